"""Softmax regression in C (`softmax.c`): the local SGD of many clients by several threads, one client at a time each."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.core.per_example_losses import cross_entropy
from equipoise.core.task import Task
from equipoise.data.clients import IGNORE, ClientSet
from equipoise.engines.simulator.client_queue import ClientQueue
from equipoise.engines.simulator.cpu.c_library import library
from equipoise.engines.simulator.linear_blocks import has_one_score, weight_shape, why_not_linear
from equipoise.engines.simulator.local_rule import LocalRule
from equipoise.engines.simulator.local_work import (
    ONLY_FASTEST,
    ChunkResult,
    ChunkWork,
    LocalPath,
    WeightedSums,
    Workplace,
    Workspace,
)

_PANEL = 16  # as in softmax.c
_EACH_BYTES = 2**23  # of models of a chunk whose updates are given one by one
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
        *_of(ctypes.c_void_p, "turns edges totals squares losses memory"),
        *_of(ctypes.c_int64, "memory_each"),
        *_of(ctypes.c_float, "lr keep clip"),
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


class ModelPacking:
    """How softmax.c holds a model: tiles of classes, in each a line per feature, and the bias last."""

    def __init__(self, classes: int, features: int, lanes: int) -> None:
        self.classes, self.features = classes, features
        self.lines = -(-features // _PANEL) * _PANEL + 1  # features in whole panels, and the bias
        self.columns = -(-classes // lanes) * lanes  # classes in whole vectors
        self.numbers = self.lines * self.columns  # of a model with its padding


class CompiledSoftmaxPath(LocalPath):
    """Softmax regression under SGD without momentum, in C, on a CPU with a C compiler: where it was measured to be fastest."""

    name = "compiled softmax"
    threaded = True
    sums_each_job_alone = True

    def __init__(self, place: Workplace) -> None:
        super().__init__(place)
        self.code = CompiledSoftmax(place.task, place.clients)

    def supports_rule(self, rule: LocalRule) -> str | None:
        """It must be allowed, the code must be for this model, these data and this machine, and the rule plain SGD."""
        if not self.place.compiled:
            return "compiled code is not allowed (compiled=False)"
        return self.code.obstacle or rule.why_not_plain_sgd()

    def supports(self, work: ChunkWork) -> str | None:
        """All batches must fit into one table."""
        if work.chosen != self.name:
            return ONLY_FASTEST
        return None if work.batches.at_once else "the batches of all steps are too many for one table"

    def run(self, work: ChunkWork) -> ChunkResult:
        """All clients in one call of C."""
        return work.result(*self.code.train(work, work.weights if work.clipped is None else work.clipped.weights))

    def most_clients(self, queue: ClientQueue, chunk_size: int | None, *, sums: bool) -> int | None:
        """It holds a model or two for each client, unless sums of a shared model are wanted."""
        if sums and not queue.own:
            return chunk_size
        return min(chunk_size or len(queue), max(1, _EACH_BYTES // self.code.model_bytes))


@dataclass(frozen=True, eq=False)
class CompiledSoftmax:
    """The local work of softmax regression on one set of clients, in C."""

    task: Task
    clients: ClientSet
    space: Workspace = field(default_factory=Workspace)

    @cached_property
    def obstacle(self) -> str | None:
        """Why it does not do the work of this model on these data on this machine; None if it does."""
        x, y, task = self.clients.x, self.clients.y, self.task
        if self.clients.device.type != "cpu":
            return "it is for the CPU"
        if (reason := self.clients.why_not_plain or why_not_linear(task)) is not None:
            return reason
        if task.loss is not cross_entropy or has_one_score(task):
            return "the loss is not cross-entropy of several classes"
        if task.layout.dtype != torch.float32:
            return f"it is for float32, not {task.layout.dtype}"
        stored = x.dtype == torch.float32 or (x.dtype == torch.uint8 and self.clients.scale is not None)
        if not stored or not x.is_contiguous():
            return f"inputs must be stored as float32, or as bytes with a scale, not {x.dtype}"
        if y.dim() != 1 or y.is_floating_point() or y.dtype == torch.bool:
            return "targets must be one class per example"
        classes, features = weight_shape(task)
        labels = self.clients.label_range(IGNORE)
        if labels is None or labels.lowest < 0 or labels.highest >= classes or x[0].numel() != features:
            return "some targets or inputs are not what the model is made for"
        if self._library is None:
            return "this machine has no C compiler that works"
        return None if self.model_bytes <= _MOST_BYTES else "the model does not fit into a core's cache"

    @cached_property
    def _library(self) -> ctypes.CDLL | None:
        code = library("softmax")
        if code is None or (code.size_of_work(), code.size_of_scores()) != (ctypes.sizeof(_Work), ctypes.sizeof(_Scores)):
            return None
        return code

    @property
    def _code(self) -> ctypes.CDLL:
        if self._library is None:
            raise RuntimeError("There is no compiled code on this machine.")  # `obstacle` says so before
        return self._library

    @cached_property
    def _targets(self) -> Tensor:
        targets: Tensor = self.clients.y.long().contiguous()
        return targets

    @cached_property
    def _packing(self) -> ModelPacking:
        classes, features = weight_shape(self.task)
        return ModelPacking(classes, features, self._library.lanes() if self._library is not None else 1)

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
        getattr(self._code, name)(ctypes.byref(self._data), *map(ctypes.c_int64, numbers))

    def train(self, work: ChunkWork, weights: Tensor | None) -> tuple[WeightedSums | Tensor, Tensor]:
        """Weighted sums of the updates, clipped if that is asked for, or the updates (k, D); and summed batch losses (k,).

        Updates without `weights` (k,), or where one is beyond what squares of its numbers hold. The clients of a model are
        trained one after the other, so that with one thread their sum has the same bits whatever other models there are.
        """
        count, starts, steps = len(work.chunk), work.starts, work.batches.steps
        if weights is not None:
            turns = starts.owners.argsort(stable=True)
            edges = group_edges(steps[turns].tolist(), starts.owners[turns].tolist(), work.threads)
            clip = math.inf if work.clipped is None else work.clipped.bound
            totals, squares, losses = self._run(work, weights, turns, edges, clip)
            if not bool((~torch.isfinite(squares) | ((squares == 0) & (steps > 0))).any()):
                sums = self._unpacked(totals, starts.owners[turns[edges[:-1]]], len(starts.models))
                return WeightedSums(sums, squares), losses
        totals, _, losses = self._run(work, torch.ones(count), torch.arange(count), torch.arange(count + 1))
        return self._unpacked(totals, torch.arange(count), count), losses

    def _run(
        self, work: ChunkWork, weights: Tensor, turns: Tensor, edges: Tensor, clip: float = math.inf
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Totals of each group of clients (groups, numbers), and of every client its squared length and its losses (k,).

        Clients are trained in the order `turns` (k,); groups begin and end at `edges` of it.
        """
        packing, clients, cursor, count = self._packing, self.clients, work.batches, len(work.chunk)
        starts, sgd, lr = work.starts, work.rule.sgd, work.rule.lr
        keep = 1 - lr * sgd.weight_decay
        each_own = torch.arange(count)
        owners = each_own if starts.each_its_own else starts.owners.contiguous()
        models = self._packed("models", starts.rows() if starts.each_its_own else starts.models)
        anchors = towards = strength = None
        if (pull := starts.pull) is not None:
            anchors = self._packed("anchors", pull.anchor if pull.anchor.dim() == 2 else pull.anchor.unsqueeze(0))
            towards = each_own if len(anchors) > 1 else torch.zeros_like(each_own)
            strength = (lr / keep * pull.strength).float().contiguous()
        elif sgd.prox:  # towards the start
            anchors, towards = models, owners
            strength = torch.full((count,), lr / keep * sgd.prox, dtype=torch.float32)
        memory_each = -(-(packing.numbers + (packing.lines + packing.columns) * cursor.width) // 64) * 64
        memory = self.space.empty("memory", (work.threads, memory_each), torch.float32, clients.device)
        totals = self.space.empty("totals", (len(edges) - 1, packing.numbers), torch.float32, clients.device)
        squares, losses = torch.empty(count, dtype=torch.float64), torch.empty(count, dtype=torch.float64)
        permutations = cursor.all_orders.contiguous()
        tensors = {
            "first": clients.starts[work.positions], "sizes": cursor.sizes.contiguous(),
            "steps": cursor.steps.contiguous(), "orders": permutations, "starts": models, "owners": owners, "anchors": anchors,
            "towards": towards, "pulls": strength, "weights": weights.float().contiguous(), "turns": turns, "edges": edges,
            "totals": totals, "squares": squares, "losses": losses, "memory": memory,
        }  # fmt: skip
        call = _Work(
            data=self._data, clients=count, batch_size=cursor.width, longest=permutations.shape[2],
            epochs=permutations.shape[1], groups=len(edges) - 1, memory_each=memory_each, lr=lr, keep=keep, clip=clip,
            **_addresses(tensors),
        )  # fmt: skip
        self._code.run_work(ctypes.byref(call), work.threads)
        return totals, squares, losses

    def scores(self, models: Tensor, which: Tensor | None, threads: int) -> tuple[Tensor, Tensor]:
        """Mean loss and share of errors per model (M, D) and client, (M, n) each; `which` (n,) are clients' positions."""
        packing, clients = self._packing, self.clients
        first, sizes = clients.starts, clients.sizes
        if which is not None:
            first, sizes = first[which], sizes[which]
        losses, errors = torch.empty(2, len(models), len(sizes), dtype=torch.float64).unbind()
        memory_each = -(-(packing.lines + packing.columns) * self._code.block() // 64) * 64
        memory = self.space.empty("scores", (threads, memory_each), torch.float32, clients.device)
        tensors = {
            "first": first.contiguous(), "sizes": sizes.contiguous(), "weights": self._packed("models", models),
            "losses": losses, "errors": errors, "memory": memory,
        }  # fmt: skip
        work = _Scores(data=self._data, clients=len(sizes), models=len(models), memory_each=memory_each, **_addresses(tensors))
        self._code.run_scores(ctypes.byref(work), threads)
        return losses, errors


def _addresses(tensors: Mapping[str, Tensor | None]) -> dict[str, int | None]:
    return {name: None if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()}


def group_edges(steps: list[int], owners: list[int], threads: int) -> Tensor:
    """Where groups of clients begin and end: large ones first, so that few totals are kept, and small ones last, so that no
    thread waits long for another; one thread waits for nobody. Clients of a group start from one model.

    >>> group_edges([2] * 16, [0] * 16, 2).tolist()
    [0, 4, 7, 10, 12, 13, 14, 15, 16]
    >>> group_edges([2] * 16, [0] * 9 + [1] * 7, 1).tolist()
    [0, 9, 16]
    """
    edges, left, taken = [0], sum(steps), 0
    for i, work in enumerate(steps):
        taken += work
        if i + 1 == len(steps) or owners[i + 1] != owners[i] or (threads > 1 and taken * 2 * threads >= left):
            edges.append(i + 1)
            left, taken = left - taken, 0
    return torch.from_numpy(np.array(edges))
