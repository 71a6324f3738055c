"""The two CUDA graphs of softmax regression: losses of some clients, and a whole round of them.

The arithmetic of a round is that of `linear_span.py`; all local steps of a client are one Triton kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.core.numbers import Numbers
from equipoise.engines.simulator.cuda.client_graph import ClientGraph, DeviceModels
from equipoise.engines.simulator.cuda.graph_capacity import GraphCapacity, power_of_two
from equipoise.engines.simulator.local_work import Workplace
from equipoise.types import SgdRule

_LONG_SUM, _PRODUCTS = 2048, 16  # rows of a model; products at once that keep a large card busy


@dataclass(frozen=True)
class RoundShape(GraphCapacity):
    """What a graph of local steps is captured for."""

    grams: int  # numbers of all Gram matrices
    epochs: int
    batch: int
    sgd: SgdRule
    server: float | None  # the rate of the server's step, if that is taken, too


@dataclass(frozen=True, eq=False)
class JobClients:
    """Clients of one job that are trained in one graph."""

    job: int
    places: Numbers | slice  # in the job's cohort
    positions: Numbers  # in the training set
    sizes: Numbers
    steps: Numbers
    weights: Numbers
    stream: int
    all_work: bool  # each of them takes a step
    layout: tuple[Any, ...] | None = None  # parts with the same one have the same sizes and steps


class LossGraph(ClientGraph):
    """The mean loss of each client at its model."""

    def __init__(self, place: Workplace, capacity: GraphCapacity, here: DeviceModels) -> None:
        super().__init__(place, capacity, here, columns=3, more=0, answers=capacity.all_clients)
        self.of_models: Numbers = self.answer.numpy().reshape(capacity.models, -1)

    def losses(
        self, params: Sequence[Tensor], positions: Sequence[Numbers], sizes: Sequence[Numbers], layout: tuple[int, ...] | None
    ) -> list[Tensor]:
        """F_k(w) of the clients at these positions of the training set, (K,) for each model.

        Calls with the same `layout` have the same sizes.
        """
        self._wait()
        self.models.take(params)
        if layout is None or layout != self.layout:
            self.host_clients.fill(0)
            for model, own in enumerate(sizes):
                _, counts, rows_at = self.host_clients[:, model, : len(own)]
                counts[:] = own
                np.cumsum(own[:-1], out=rows_at[1:])
                rows_at += model * self.capacity.rows
            self.layout = layout
        for model, own in enumerate(positions):
            self.host_clients[0, model, : len(own)] = own
        self._go()
        self._wait()
        return [torch.from_numpy(answer[: len(size)] / size) for answer, size in zip(self.of_models, sizes, strict=True)]

    def _body(self) -> None:
        from equipoise.engines.simulator.cuda.kernels import span_kernels as kernels

        self.asked.copy_(self.host, non_blocking=True)
        which, counts, rows_at = self.asked_clients
        here = kernels.RaggedClients(which, counts, rows_at, rows_at, self.capacity.largest)
        with self._aside(0):
            self._split_weights()
        self._gather(here)
        self._join(0)
        self._multiply()
        bias = self.place.task.layout.unflatten(self.params).get("bias")
        kernels.sum_losses(self.outputs, bias, self.clients.y, here, self.clients.starts, self.small, self.classes, self.scores)
        self.answer.copy_(self.small, non_blocking=True)


class RoundGraph(ClientGraph):
    """Local steps of all clients, the sum of their updates and perhaps the server's step."""

    def __init__(self, place: Workplace, shape: RoundShape, here: DeviceModels) -> None:
        k, models = shape.all_clients, shape.models
        super().__init__(place, shape, here, columns=6, more=models + 1, answers=2 * k + 2 * models)
        self.shape = shape
        self.host_weights: Numbers = self.host_clients[5].view(np.float64)
        self.host_rate: Numbers = self.host_rest[-1:].view(np.float64)
        self.totals = torch.zeros_like(self.params)
        self.each_total = self.totals.unbind()
        self.gram, self.summed = self.zeros(shape.grams), self.zeros(k, self.scores)
        self.weighted = torch.zeros_like(self.outputs)
        self.coefficients = self.zeros(shape.all_rows, self.scores)
        self.permutations = self.zeros(k, shape.epochs, shape.largest, dtype=torch.int32)
        # Squared norms and summed losses of the clients, then the models' norms before and after the server's step.
        numbers: Numbers = self.answer.numpy()
        self.of_clients = numbers[: 2 * k].reshape(2, models, -1).swapaxes(0, 1)
        self.before, self.after = numbers[2 * k :].reshape(2, models)
        self.awaited = False  # whether somebody will ask for the results of the last start
        self.held = self.bytes + sum(t.nbytes for t in (self.gram, self.weighted, self.coefficients, self.permutations))

    def start(self, params: Sequence[Tensor], parts: Sequence[JobClients], lr: float) -> None:
        """Start a round of one part per model: `totals` (M, D) are the sums of updates; `answers` come later."""
        self._wait()
        self.models.take(params, written=self.shape.server is not None)
        layout = tuple(part.layout for part in parts)
        if layout != self.layout or None in layout:
            self._lay_out(parts)
            self.layout = layout
        for model, part in enumerate(parts):
            count = len(part.positions)
            self.host_clients[0, model, :count] = part.positions
            self.host_weights[model, :count] = part.weights
            self.host_rest[model] = part.stream
        self.host_rate[0] = lr
        self._go()

    def answers(self) -> tuple[Numbers, Numbers, Numbers]:
        """After a wait: squared norms and summed losses of each model's clients, (M, 2, K), and the models' norms before and
        after the server's step, (M,) each.
        """
        self._wait()
        return self.of_clients, self.before, self.after

    def _lay_out(self, parts: Sequence[JobClients]) -> None:
        """Tell the device where the clients lie in memory, and how many steps they take."""
        grams = 0
        self.host_clients.fill(0)  # clients without examples or steps
        for model, part in enumerate(parts):
            _, counts, rows_at, grams_at, steps, _ = self.host_clients[:, model, : len(part.positions)]
            counts[:], steps[:] = part.sizes, part.steps
            squares = part.sizes * part.sizes
            np.cumsum(part.sizes[:-1], out=rows_at[1:])
            np.cumsum(squares[:-1], out=grams_at[1:])
            rows_at += model * self.shape.rows
            grams_at += grams
            grams += int(squares.sum())

    def _body(self) -> None:
        from equipoise.engines.simulator.cuda.kernels import span_kernels as kernels
        from equipoise.engines.simulator.cuda.kernels.batch_tables import draw_permutations

        clients, shape, models = self.clients, self.shape, self.shape.models
        k = shape.all_clients
        self.asked.copy_(self.host, non_blocking=True)
        which, counts, rows_at, grams_at, steps, weights = self.asked_clients
        here = kernels.RaggedClients(which, counts, rows_at, grams_at, shape.largest)
        streams, rate = self.asked_rest[:-1], self.asked_rest[-1:].view(torch.float64)
        weights = weights.view(torch.float64).float()
        bias = self.place.task.layout.unflatten(self.params).get("bias")
        with self._aside(0):
            draw_permutations(clients.keys, which, counts, streams, self.permutations, shape.batch)
            self.coefficients.zero_()
            self.weighted.zero_()  # of rows that belong to nobody
        with self._aside(1):
            self._split_weights()
            torch.linalg.vector_norm(self.params, dim=1, dtype=torch.float64, out=self.small[2 * k : -models])
        self._gather(here)
        self._join(1)
        squares, losses = self.small[:k], self.small[k : 2 * k]
        factors, scales = (torch.empty(k, device=self.device) for _ in range(2))
        self._multiply()
        precision = "tf32" if self.products.reduced else "tf32x3"  # the latter is as exact as float32
        kernels.gram_matrices(self.x, here, self.gram, self.scale**2, precision)
        self._join(0)
        kernels.take_steps(
            self.outputs, bias, self.gram, clients.y, here, clients.starts, steps, self.permutations, rate, self.coefficients,
            (self.summed, squares, losses, factors, scales), classes=self.classes, batch=shape.batch,
            decay=shape.sgd.weight_decay, prox=shape.sgd.prox, tf32=self.precision.reduced,
        )  # fmt: skip
        if shape.sgd.weight_decay or shape.sgd.prox:  # ‖u‖² = ⟨A, G A⟩ + 2 (c−1) ⟨A, X W_0ᵀ⟩ + (c−1)² ‖W_0‖²
            crossed = torch.empty_like(factors)
            kernels.crossed_with_start(self.coefficients, self.outputs, bias, scales, here, self.classes, crossed)
            lengths = self.params.square().sum(1).repeat_interleave(shape.clients, output_size=k)
            squares += 2 * factors * crossed + factors.square() * lengths
        kernels.weigh(self.coefficients, weights, scales, here, self.scale, self.weighted)
        with self.products.products():
            self._sum(weights, factors)
        if shape.server is not None:
            torch.add(self.params, self.totals, alpha=shape.server, out=self.params)
            torch.linalg.vector_norm(self.params, dim=1, dtype=torch.float64, out=self.small[-models:])
        self.answer.copy_(self.small, non_blocking=True)

    def _sum(self, weights: Tensor, factors: Tensor) -> None:
        """The weighted sums of updates, into `totals`."""
        models, classes, named = self.shape.models, self.classes, self.place.task.layout.unflatten(self.totals)
        products = _summed(self.weighted, self.x, models)
        if self.parts == 2:
            torch.add(products[:, :classes], products[:, self.scores : self.scores + classes], out=named["weight"])
        else:
            named["weight"].copy_(products[:, :classes])
        if self.bias:
            totals = torch.bmm(weights.view(models, 1, -1), self.summed.view(models, -1, self.scores))
            named["bias"].copy_(totals[:, 0, :classes])
        if self.shape.sgd.weight_decay or self.shape.sgd.prox:
            shares = (weights * factors).view(models, -1).sum(1, keepdim=True)
            self.totals.addcmul_(self.params, shares)


def _summed(weighted: Tensor, x: Tensor, models: int) -> Tensor:
    """Σ_r weighted_r x_rᵀ over the rows of each model: (models · R, C) and (models · R, F) to (models, C, F).

    A few products over many rows leave a large card idle, so each is made of several.
    """
    if models == 1:
        return torch.mm(weighted.t(), x).unsqueeze(0)
    rows = len(x) // models
    pieces = power_of_two(_PRODUCTS // models + 1) // 2 if rows >= _LONG_SUM and models <= _PRODUCTS else 1
    w, x = (v.view(models * pieces, rows // pieces, -1) for v in (weighted, x))  # rows are a multiple of 16
    products = torch.bmm(w.transpose(1, 2), x)
    return products if pieces == 1 else products.view(models, pieces, *products.shape[1:]).sum(1)
