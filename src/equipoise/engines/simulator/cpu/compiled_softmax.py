"""Softmax regression in C (`softmax.c`): the local SGD of many clients by several threads, one client at a time each."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.core.task import Task, cross_entropy
from equipoise.data.clients import ClientSet
from equipoise.engines.simulator.batched_steps import Starts
from equipoise.engines.simulator.cpu.c_library import library
from equipoise.engines.simulator.linear_blocks import Sums, has_one_score, is_plain_linear, is_plain_sgd, weight_shape
from equipoise.engines.simulator.workers import Workspace
from equipoise.solvers import SGD
from equipoise.solvers.batches import BatchCursor
from equipoise.types import LocalSolver, Pull

_PANEL = 16  # as in softmax.c
_MOST_BYTES = 2**22  # of a model: larger ones do not stay in a core's cache


def _of(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class _Data(ctypes.Structure):
    """As in softmax.c."""

    _fields_ = (
        *_of(ctypes.c_void_p, "x y"),
        *_of(ctypes.c_int64, "features classes bytes has_bias dimension weight bias"),
        *_of(ctypes.c_float, "scale shift"),
    )


class _Work(ctypes.Structure):
    """As in softmax.c."""

    _fields_ = (
        ("data", _Data),
        *_of(ctypes.c_int64, "clients batch_size longest epochs groups"),
        *_of(ctypes.c_void_p, "first sizes steps orders starts owners anchors towards pulls weights"),
        *_of(ctypes.c_void_p, "edges totals squares losses memory"),
        *_of(ctypes.c_int64, "memory_each"),
        *_of(ctypes.c_float, "lr keep"),
        *_of(ctypes.c_int64, "next"),
    )


class _Scores(ctypes.Structure):
    """As in softmax.c."""

    _fields_ = (
        ("data", _Data),
        *_of(ctypes.c_int64, "clients models"),
        *_of(ctypes.c_void_p, "first sizes weights losses errors memory"),
        *_of(ctypes.c_int64, "memory_each next"),
    )


@dataclass(frozen=True)
class Packing:
    """How softmax.c holds a model: tiles of classes, in each a line per feature, and the bias last."""

    classes: int
    features: int
    lanes: int

    @cached_property
    def lines(self) -> int:
        """Features in whole panels, and the bias."""
        return -(-self.features // _PANEL) * _PANEL + 1

    @cached_property
    def columns(self) -> int:
        """Classes in whole vectors."""
        return -(-self.classes // self.lanes) * self.lanes

    @cached_property
    def numbers(self) -> int:
        return self.lines * self.columns


@dataclass(frozen=True, eq=False)
class Asked:
    """Local work of the clients at some positions in the training set."""

    which: Tensor  # (k,)
    starts: Starts
    solver: SGD
    lr: float
    cursor: BatchCursor
    threads: int


@dataclass(frozen=True, eq=False)
class CompiledSoftmax:
    """The local work of softmax regression on one set of clients, in C."""

    task: Task
    clients: ClientSet
    space: Workspace = field(default_factory=Workspace)

    @cached_property
    def possible(self) -> bool:
        """Whether model, loss and data are of the kind, and this machine can compile."""
        x, y, task = self.clients.x, self.clients.y, self.task
        if not is_plain_linear(task) or task.loss is not cross_entropy or has_one_score(task) or x.device.type != "cpu":
            return False
        stored = x.dtype == torch.float32 or (x.dtype == torch.uint8 and self.clients.scale is not None)
        if not (stored and x.is_contiguous() and y.dim() == 1 and not y.is_floating_point() and y.dtype != torch.bool):
            return False
        classes, features = weight_shape(task)
        known = int(y.min()) >= 0 and int(y.max()) < classes and x[0].numel() == features
        if not known or task.layout.dtype != torch.float32 or self._library is None:
            return False
        return self.model_bytes <= _MOST_BYTES

    @cached_property
    def _library(self) -> ctypes.CDLL | None:
        found = library("softmax")
        if found is None or (found.size_of_work(), found.size_of_scores()) != (ctypes.sizeof(_Work), ctypes.sizeof(_Scores)):
            return None
        return found

    @cached_property
    def _targets(self) -> Tensor:
        return self.clients.y.long().contiguous()

    @cached_property
    def _packing(self) -> Packing:
        classes, features = weight_shape(self.task)
        return Packing(classes, features, self._library.lanes() if self._library is not None else 1)

    @property
    def model_bytes(self) -> int:
        """What a model takes with its padding."""
        return 4 * self._packing.numbers

    @cached_property
    def _data(self) -> _Data:
        clients, packing, layout = self.clients, self._packing, self.task.layout
        begins = dict(zip(layout.names, accumulate(layout.sizes, initial=0), strict=False))
        return _Data(
            x=clients.x.data_ptr(), y=self._targets.data_ptr(), features=packing.features, classes=packing.classes,
            bytes=clients.x.dtype == torch.uint8, has_bias="bias" in begins, dimension=layout.dimension,
            weight=begins["weight"], bias=begins.get("bias", 0),
            scale=1.0 if clients.scale is None else clients.scale, shift=0.0 if clients.scale is None else clients.shift,
        )  # fmt: skip

    def _packed(self, name: str, models: Tensor) -> Tensor:
        """Models (n, D) as the code holds them, (n, numbers), until the same name is used again."""
        packed = self.space.empty(name, (len(models), self._packing.numbers), torch.float32, models.device)
        given = models.float().contiguous()  # by a name of its own, so that it is there until the call has ended
        self._call("pack", given.data_ptr(), len(given), packed.data_ptr())
        return packed

    def _unpacked(self, packed: Tensor, owners: Tensor, count: int) -> Tensor:
        """The sums (count, D) of packed models by their owners."""
        which = owners.argsort(stable=True)
        edges = torch.searchsorted(owners[which], torch.arange(count + 1))
        models = torch.empty(count, self._data.dimension, dtype=torch.float32)
        self._call("unpack", packed.data_ptr(), which.data_ptr(), edges.data_ptr(), count, models.data_ptr())
        return models

    def _call(self, name: str, *numbers: int) -> None:
        if self._library is None:
            raise RuntimeError("There is no compiled code on this machine.")  # `possible` says so before
        getattr(self._library, name)(ctypes.byref(self._data), *map(ctypes.c_int64, numbers))

    def fits(self, solver: LocalSolver, lr: float, pull: Pull | None = None) -> bool:
        """Whether it does this work."""
        return self.possible and is_plain_sgd(solver, lr, pull)

    def train(self, asked: Asked, weights: Tensor | None) -> tuple[Sums | Tensor, Tensor]:
        """Weighted sums of the updates, or the updates (k, D) themselves; and summed batch losses (k,).

        Updates without `weights` (k,), or where one is beyond what squares of its numbers hold.
        """
        if weights is not None:
            sums, losses = self._sums(asked, weights)
            if sums is not None:
                return sums, losses
        count = len(asked.which)
        totals, _, losses = self._run(asked, torch.ones(count), torch.arange(count + 1))
        return self._unpacked(totals, torch.arange(count), count), losses

    def _sums(self, asked: Asked, weights: Tensor) -> tuple[Sums | None, Tensor]:
        starts, steps = asked.starts, asked.cursor.steps
        edges = groups(steps.tolist(), starts.owners.tolist(), asked.threads)
        totals, squares, losses = self._run(asked, weights, edges)
        if bool((~torch.isfinite(squares) | ((squares == 0) & (steps > 0))).any()):
            return None, losses
        return Sums(self._unpacked(totals, starts.owners[edges[:-1]], len(starts.models)), squares), losses

    def _run(self, asked: Asked, weights: Tensor, edges: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Totals of each group of clients (groups, numbers), and of every client its squared length and its losses (k,)."""
        if self._library is None:
            raise RuntimeError("There is no compiled code on this machine.")  # `possible` says so before
        packing, clients, cursor, count = self._packing, self.clients, asked.cursor, len(asked.which)
        starts, solver, keep = asked.starts, asked.solver, 1 - asked.lr * asked.solver.weight_decay
        each_own = torch.arange(count)
        owners = each_own if starts.each_its_own else starts.owners.contiguous()
        models = self._packed("models", starts.rows() if starts.each_its_own else starts.models)
        anchors = towards = strength = None
        if (pull := starts.pull) is not None:
            anchors = self._packed("anchors", pull.anchor if pull.anchor.dim() == 2 else pull.anchor.unsqueeze(0))
            towards = each_own if len(anchors) > 1 else torch.zeros_like(each_own)
            strength = (asked.lr / keep * pull.strength).float().contiguous()
        elif solver.prox:  # towards the start
            anchors, towards = models, owners
            strength = torch.full((count,), asked.lr / keep * solver.prox, dtype=torch.float32)
        memory_each = -(-(packing.numbers + (packing.lines + packing.columns) * cursor.width) // 64) * 64
        memory, totals = (
            self.space.empty(name, shape, torch.float32, asked.which.device)
            for name, shape in (("memory", (asked.threads, memory_each)), ("totals", (len(edges) - 1, packing.numbers)))
        )
        squares, losses = torch.empty(count, dtype=torch.float64), torch.empty(count, dtype=torch.float64)
        orders = cursor.all_orders.contiguous()
        tensors = {
            "first": clients.offsets[asked.which], "sizes": cursor.sizes.contiguous(),
            "steps": cursor.steps.contiguous(), "orders": orders, "starts": models, "owners": owners, "anchors": anchors,
            "towards": towards, "pulls": strength, "weights": weights.float().contiguous(), "edges": edges, "totals": totals,
            "squares": squares, "losses": losses, "memory": memory,
        }  # fmt: skip
        work = _Work(
            data=self._data, clients=count, batch_size=cursor.width, longest=orders.shape[2], epochs=orders.shape[1],
            groups=len(edges) - 1, memory_each=memory_each, lr=asked.lr, keep=keep, **_addresses(tensors),
        )  # fmt: skip
        self._library.run_work(ctypes.byref(work), asked.threads)
        return totals, squares, losses

    def scores(self, models: Tensor, which: Tensor | None, threads: int) -> tuple[Tensor, Tensor]:
        """Mean loss and share of errors per model (M, D) and client, (M, n) each; `which` (n,) are clients' positions."""
        if self._library is None:
            raise RuntimeError("There is no compiled code on this machine.")  # `possible` says so before
        packing, clients = self._packing, self.clients
        first, sizes = clients.offsets[:-1], clients.sizes
        if which is not None:
            first, sizes = first[which], sizes[which]
        losses, errors = torch.empty(2, len(models), len(sizes), dtype=torch.float64).unbind()
        memory_each = -(-(packing.lines + packing.columns) * self._library.block() // 64) * 64
        memory = self.space.empty("scores", (threads, memory_each), torch.float32, clients.x.device)
        tensors = {
            "first": first.contiguous(), "sizes": sizes.contiguous(), "weights": self._packed("models", models),
            "losses": losses, "errors": errors, "memory": memory,
        }  # fmt: skip
        work = _Scores(data=self._data, clients=len(sizes), models=len(models), memory_each=memory_each, **_addresses(tensors))
        self._library.run_scores(ctypes.byref(work), threads)
        return losses, errors


def _addresses(tensors: Mapping[str, Tensor | None]) -> dict[str, int | None]:
    return {name: None if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()}


def groups(steps: list[int], owners: list[int], threads: int) -> Tensor:
    """Where groups of clients begin and end: large ones first, so that few totals are kept, and small ones last, so that no
    thread waits long for another. Clients of a group start from one model.

    >>> groups([2] * 16, [0] * 16, 2).tolist()
    [0, 4, 7, 10, 12, 13, 14, 15, 16]
    """
    edges, left, taken = [0], sum(steps), 0
    for i, work in enumerate(steps):
        taken += work
        if i + 1 == len(steps) or owners[i + 1] != owners[i] or taken * 2 * threads >= left:
            edges.append(i + 1)
            left, taken = left - taken, 0
    return torch.from_numpy(np.array(edges))
