"""CUDA graphs for softmax regression: losses of some clients, or all their local steps and the sum of their updates.

The arithmetic of the steps is that of `span.py`; all steps of a client are one Triton kernel. A graph is captured once for a
number of clients and of examples, and then replayed: the host hands over one small block of numbers, and gets one back.

Bytes (pixels) are multiplied as they are, which tensor cores do without rounding: a byte has 8 bits, and they keep 11. The
other factor, of float32 with 24 bits, is split into two numbers that they keep whole, so that a product at the fast rate is as
exact as one of float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.engines.precision import Precision
from equipoise.engines.workers import Worker

_BEFORE_CAPTURE = 2  # uses: a shape that does not come again is not worth a graph
Numbers = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Room:
    """What a graph has room for: so many clients and rows of examples of each model, of any sizes."""

    models: int
    clients: int
    rows: int
    largest: int  # examples of one client

    @property
    def all_clients(self) -> int:
        return self.models * self.clients

    @property
    def all_rows(self) -> int:
        return self.models * self.rows


@dataclass(frozen=True)
class Shape(Room):
    """What a graph of local steps is captured for."""

    grams: int  # numbers of all Gram matrices
    epochs: int
    batch: int
    decay: float
    prox: float
    server: float | None  # the rate of the server's step, if that is taken, too


@dataclass(frozen=True, eq=False)
class Part:
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


class Models:
    """The parameters of some models on the device, in memory that graphs read, and write to with a server's step."""

    def __init__(self, count: int, worker: Worker) -> None:
        self.params = torch.zeros(count, worker.task.layout.dimension, device=worker.clients.x.device)
        self.rows = self.params.unbind()
        self._here: list[tuple[Tensor, int] | None] = [None] * count  # whose values these are, as of which change

    def take(self, given: Sequence[Tensor], *, written: bool = False) -> None:
        """Have these parameters here, copied only if they are not; they will not be for long if they are `written` to."""
        for number, (params, here) in enumerate(zip(given, self._here, strict=True)):
            if here is None or here[0] is not params or here[1] != params._version:
                self.rows[number].copy_(params, non_blocking=True)
                here = _known(params)
            self._here[number] = None if written else here

    def hand_out(self) -> tuple[Tensor, ...]:
        """A copy of the parameters, (D,) each."""
        found: tuple[Tensor, ...] = (self.rows[0].clone(),) if len(self.rows) == 1 else self.params.clone().unbind()
        self._here = [_known(params) for params in found]
        return found


def _known(params: Tensor) -> tuple[Tensor, int] | None:
    """A tensor and how often it was changed in place; None for one that does not count that."""
    return None if params.is_inference() else (params, params._version)


class ClientGraph(ABC):
    """A graph over examples of some clients and their outputs at some models, which it finds first.

    Results are valid until the next start. `columns` are the numbers that the host hands over for each client, the first
    three of them its position, its number of examples and its first row; `more` are those beside them.
    """

    def __init__(
        self, worker: Worker, room: Room, precision: Precision, here: Models, columns: int, more: int, answers: int
    ) -> None:
        self.worker, self.room, self.precision, self.clients = worker, room, precision, worker.clients
        task, self.device = worker.task, worker.clients.x.device
        self.on_gpu = self.device.type == "cuda"
        self.classes, self.features = task.layout.shapes[task.layout.names.index("weight")]
        self.bias = "bias" in task.layout.names
        k, rows = room.all_clients, room.all_rows
        self.host = torch.zeros(columns * k + more, dtype=torch.int64, pin_memory=self.on_gpu)
        self.host_clients: Numbers = self.host.numpy()[: columns * k].reshape(columns, room.models, -1)
        self.host_rest: Numbers = self.host.numpy()[columns * k :]
        self.asked = torch.zeros_like(self.host, device=self.device)
        self.asked_clients, self.asked_rest = self.asked[: columns * k].view(columns, k), self.asked[columns * k :]
        self.layout: tuple[Any, ...] | None = None
        self.models, self.params = here, here.params
        self.x = self.zeros(rows, self.features)
        self.scores = power_of_two(self.classes, 16)  # rows of such a length are read and multiplied faster
        bytes_ = self.clients.x.dtype == torch.uint8 and self.clients.scale is not None and not self.clients.shift
        self.scale = self.clients.scale if bytes_ and self.clients.scale is not None else 1.0  # of x, in its products
        self.parts = 2 if bytes_ and not precision.reduced else 1
        self.products = Precision("tf32") if self.parts == 2 else precision
        self.outputs = self.zeros(rows, self.parts * self.scores)
        self.weight = self.zeros(room.models, self.parts * self.scores, self.features)
        self.ones = torch.ones(room.models, device=self.device)
        self.small = self.zeros(answers, dtype=torch.float64)
        self.answer = torch.zeros_like(self.small, device="cpu", pin_memory=self.on_gpu)
        self.event = torch.cuda.Event() if self.on_gpu else None  # type: ignore[no-untyped-call]
        self.stream: torch.cuda.Stream | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.uses = 0
        self.sides = [torch.cuda.Stream() for _ in range(2)] if self.on_gpu else []  # type: ignore[no-untyped-call]

    def zeros(self, *sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(*sizes, dtype=dtype, device=self.device)

    @property
    def bytes(self) -> int:
        """Memory that is kept for the examples and what belongs to each of them."""
        return self.x.nbytes + self.outputs.nbytes

    @abstractmethod
    def _body(self) -> None:
        """What is captured."""

    def _go(self) -> None:
        """Start the graph, or what will be one."""
        self.uses += 1
        if self.on_gpu and self.graph is None and self.uses > _BEFORE_CAPTURE:
            self._capture()
        if self.graph is None:
            self._body()
        else:
            self.graph.replay()
        if self.event is not None:
            self.event.record(self._stream())

    def _wait(self) -> None:
        """Until the last start has ended, and what it read on the host may be written to."""
        if self.event is not None:
            self.event.synchronize()

    def _capture(self) -> None:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            before = self.params.clone()
            for _ in range(2):  # kernels are compiled and libraries ready before the capture
                self._body()
            self.params.copy_(before)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._body()
        self.graph = graph

    def _stream(self) -> torch.cuda.Stream:
        """The current stream. Its number is quickly found; the object is not, and seldom another one."""
        number = torch._C._cuda_getCurrentRawStream(self.device.index or 0)
        if self.stream is None or self.stream.cuda_stream != number:
            self.stream = torch.cuda.current_stream(self.device)
        return self.stream

    @contextmanager
    def _aside(self, side: int) -> Iterator[None]:
        """Kernels inside run beside those that follow, until they are joined."""
        if not self.on_gpu:
            yield
            return
        self.sides[side].wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.sides[side]):
            yield

    def _join(self, side: int) -> None:
        if self.on_gpu:
            torch.cuda.current_stream().wait_stream(self.sides[side])

    def _split_weights(self) -> None:
        """The models' weights as products take them: whole, or in two parts."""
        from equipoise.engines.kernels import span as kernels

        weight = self.worker.task.layout.unflatten(self.params)["weight"]
        halves = [self.weight[:, part * self.scores :][:, : self.classes] for part in range(self.parts)]
        kernels.split(weight, self.ones, self.scale, halves)

    def _gather(self, here: Any) -> None:
        """The clients' examples, one after the other."""
        from equipoise.engines.kernels import span as kernels

        clients = self.clients
        scale, shift = (1.0, 0.0) if clients.scale is None or self.scale != 1.0 else (clients.scale, clients.shift)
        kernels.gather_examples(clients.x.view(len(clients.x), -1), here, clients.offsets, self.x, scale, shift)

    def _multiply(self) -> None:
        """The outputs X Wᵀ of all examples, without bias."""
        x, outputs = (v.view(self.room.models, self.room.rows, -1) for v in (self.x, self.outputs))
        with self.products.products():
            torch.bmm(x, self.weight.transpose(1, 2), out=outputs)


class LossGraph(ClientGraph):
    """The mean loss of each client at its model."""

    def __init__(self, worker: Worker, room: Room, precision: Precision, here: Models) -> None:
        super().__init__(worker, room, precision, here, columns=3, more=0, answers=room.all_clients)
        self.of_models: Numbers = self.answer.numpy().reshape(room.models, -1)

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
            for model, found in enumerate(sizes):
                _, counts, rows_at = self.host_clients[:, model, : len(found)]
                counts[:] = found
                np.cumsum(found[:-1], out=rows_at[1:])
                rows_at += model * self.room.rows
            self.layout = layout
        for model, found in enumerate(positions):
            self.host_clients[0, model, : len(found)] = found
        self._go()
        self._wait()
        return [torch.from_numpy(answer[: len(size)] / size) for answer, size in zip(self.of_models, sizes, strict=True)]

    def _body(self) -> None:
        from equipoise.engines.kernels import span as kernels

        self.asked.copy_(self.host, non_blocking=True)
        which, counts, rows_at = self.asked_clients
        here = kernels.Ragged(which, counts, rows_at, rows_at, self.room.largest)
        with self._aside(0):
            self._split_weights()
        self._gather(here)
        self._join(0)
        self._multiply()
        bias = self.worker.task.layout.unflatten(self.params).get("bias")
        kernels.sum_losses(
            self.outputs, bias, self.clients.y, here, self.clients.offsets, self.small, self.classes, self.scores
        )
        self.answer.copy_(self.small, non_blocking=True)


class SpanGraph(ClientGraph):
    """Local steps of all clients, the sum of their updates and perhaps the server's step."""

    def __init__(self, worker: Worker, shape: Shape, precision: Precision, here: Models) -> None:
        k, models = shape.all_clients, shape.models
        super().__init__(worker, shape, precision, here, columns=6, more=models + 1, answers=2 * k + 2 * models)
        self.shape = shape
        self.host_weights: Numbers = self.host_clients[5].view(np.float64)
        self.totals = torch.zeros_like(self.params)
        self.each_total = self.totals.unbind()
        self.gram, self.summed = self.zeros(shape.grams), self.zeros(k, self.scores)
        self.weighted = torch.zeros_like(self.outputs)
        self.coefficients = self.zeros(shape.all_rows, self.scores)
        self.orders = self.zeros(k, shape.epochs, shape.largest, dtype=torch.int32)
        # Squared norms and summed losses of the clients, then the models' norms before and after the server's step.
        numbers: Numbers = self.answer.numpy()
        self.of_clients = numbers[: 2 * k].reshape(2, models, -1).swapaxes(0, 1)
        self.before, self.after = numbers[2 * k :].reshape(2, models)
        self.awaited = False  # whether somebody will ask for the results of the last start
        self.held = self.bytes + sum(t.nbytes for t in (self.gram, self.weighted, self.coefficients, self.orders))

    def start(self, params: Sequence[Tensor], parts: Sequence[Part], lr: float) -> None:
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
        self.host_rest[-1:].view(np.float64)[0] = lr
        self._go()

    def answers(self) -> tuple[Numbers, Numbers, Numbers]:
        """After a wait: squared norms and summed losses of each model's clients, (M, 2, K), and the models' norms before and
        after the server's step, (M,) each.
        """
        self._wait()
        return self.of_clients, self.before, self.after

    def _lay_out(self, parts: Sequence[Part]) -> None:
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
        from equipoise.engines.kernels import span as kernels
        from equipoise.engines.kernels.batches import draw_orders

        clients, shape, models = self.clients, self.shape, self.shape.models
        k = shape.all_clients
        self.asked.copy_(self.host, non_blocking=True)
        which, counts, rows_at, grams_at, steps, weights = self.asked_clients
        here = kernels.Ragged(which, counts, rows_at, grams_at, shape.largest)
        streams, rate = self.asked_rest[:-1], self.asked_rest[-1:].view(torch.float64)
        weights = weights.view(torch.float64).float()
        bias = self.worker.task.layout.unflatten(self.params).get("bias")
        with self._aside(0):
            draw_orders(clients.keys, which, counts, streams, self.orders, shape.batch)
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
            self.outputs, bias, self.gram, clients.y, here, clients.offsets, steps, self.orders, rate, self.coefficients,
            (self.summed, squares, losses, factors, scales), classes=self.classes, batch=shape.batch, decay=shape.decay,
            prox=shape.prox, tf32=self.precision.reduced,
        )  # fmt: skip
        if shape.decay or shape.prox:  # ‖u‖² = ⟨A, G A⟩ + 2 (c−1) ⟨A, X W_0ᵀ⟩ + (c−1)² ‖W_0‖²
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
        models, classes, named = self.shape.models, self.classes, self.worker.task.layout.unflatten(self.totals)
        x, weighted = (v.view(models, self.shape.rows, -1) for v in (self.x, self.weighted))
        products = torch.bmm(weighted.transpose(1, 2), x) if models > 1 else torch.mm(weighted[0].t(), x[0]).unsqueeze(0)
        if self.parts == 2:
            torch.add(products[:, :classes], products[:, self.scores : self.scores + classes], out=named["weight"])
        else:
            named["weight"].copy_(products[:, :classes])
        if self.bias:
            totals = torch.bmm(weights.view(models, 1, -1), self.summed.view(models, -1, self.scores))
            named["bias"].copy_(totals[:, 0, :classes])
        if self.shape.decay or self.shape.prox:
            shares = (weights * factors).view(models, -1).sum(1, keepdim=True)
            self.totals.addcmul_(self.params, shares)


def padded(count: int, least: int = 1) -> int:
    """A count rounded up by at most a sixteenth, so that few graphs serve all cohorts, and to a multiple of `least`."""
    step = max(least, 1 << max(0, count.bit_length() - 5))
    return -(-count // step) * step


def power_of_two(count: int, least: int = 1) -> int:
    """The smallest power of two that is at least `count` and `least`."""
    return max(least, 1 << max(0, count - 1).bit_length())
