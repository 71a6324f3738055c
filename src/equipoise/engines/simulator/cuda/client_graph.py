"""CUDA graphs over the examples of some clients of softmax regression: their memory, their start and their capture.

A graph is captured once for a number of clients and of examples, and then replayed: the host hands over one small block of
numbers, and gets one back.

Bytes (pixels) are multiplied as they are, which tensor cores do without rounding: a byte has 8 bits, and they keep 11. The
other factor, of float32 with 24 bits, is split into two numbers that they keep whole, so that a product at the fast rate is as
exact as one of float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from equipoise.core.numbers import Numbers
from equipoise.engines.simulator.cuda.graph_capacity import GraphCapacity, captured, power_of_two
from equipoise.engines.simulator.local_work import Workplace
from equipoise.engines.simulator.precision import Precision

_BEFORE_CAPTURE = 2  # uses: a shape that does not come again is not worth a graph


class DeviceModels:
    """The parameters of some models on the device, in memory that graphs read, and write to with a server's step."""

    def __init__(self, count: int, place: Workplace) -> None:
        self.params = torch.zeros(count, place.task.layout.dimension, device=place.clients.device)
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
        copied: tuple[Tensor, ...] = (self.rows[0].clone(),) if len(self.rows) == 1 else self.params.clone().unbind()
        self._here = [_known(params) for params in copied]
        return copied


def _known(params: Tensor) -> tuple[Tensor, int] | None:
    """A tensor and how often it was changed in place; None for one that does not count that."""
    return None if params.is_inference() else (params, params._version)


class ClientGraph(ABC):
    """A graph over examples of some clients and their outputs at some models, which it finds first.

    Results are valid until the next start. `columns` are the numbers that the host hands over for each client, the first
    three of them its position, its number of examples and its first row; `more` are those beside them.
    """

    def __init__(
        self, place: Workplace, capacity: GraphCapacity, here: DeviceModels, columns: int, more: int, answers: int
    ) -> None:
        self.place, self.capacity, self.precision, self.clients = place, capacity, place.precision, place.clients
        task, self.device = place.task, place.clients.device
        self.on_gpu = self.device.type == "cuda"
        self.classes, self.features = task.layout.shapes[task.layout.names.index("weight")]
        self.bias = "bias" in task.layout.names
        k, rows = capacity.all_clients, capacity.all_rows
        self.host = torch.zeros(columns * k + more, dtype=torch.int64, pin_memory=self.on_gpu)
        self.host_clients: Numbers = self.host.numpy()[: columns * k].reshape(columns, capacity.models, -1)
        self.host_rest: Numbers = self.host.numpy()[columns * k :]
        self.asked = torch.zeros_like(self.host, device=self.device)
        self.asked_clients, self.asked_rest = self.asked[: columns * k].view(columns, k), self.asked[columns * k :]
        self.layout: tuple[Any, ...] | None = None
        self.models, self.params = here, here.params
        self.x = self.zeros(rows, self.features)
        self.scores = power_of_two(self.classes, 16)  # rows of such a length are read and multiplied faster
        bytes_ = self.clients.x.dtype == torch.uint8 and self.clients.scale is not None and not self.clients.shift
        self.scale = self.clients.scale if bytes_ and self.clients.scale is not None else 1.0  # of x, in its products
        self.parts = 2 if bytes_ and not self.precision.reduced else 1
        self.products = Precision("tf32") if self.parts == 2 else self.precision
        self.outputs = self.zeros(rows, self.parts * self.scores)
        self.weight = self.zeros(capacity.models, self.parts * self.scores, self.features)
        self.ones = torch.ones(capacity.models, device=self.device)
        self.small = self.zeros(answers, dtype=torch.float64)
        self.answer = torch.zeros_like(self.small, device="cpu", pin_memory=self.on_gpu)
        self.event = torch.cuda.Event() if self.on_gpu else None  # type: ignore[no-untyped-call]
        self.stream: torch.cuda.Stream | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.uses = 0
        self.under_way = False  # whether the last start may not have ended
        self.sides = [torch.cuda.Stream() for _ in range(2)] if self.on_gpu else []  # type: ignore[no-untyped-call]

    def zeros(self, *sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Zeros on the device."""
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
            before = self.params.clone()
            self.graph = captured(self._body, self._body, 2)
            self.params.copy_(before)
        if self.graph is None:
            self._body()
        else:
            self.graph.replay()
        if self.event is not None:
            self.event.record(self._stream())
            self.under_way = True

    def _wait(self) -> None:
        """Until the last start has ended, and what it read on the host may be written to."""
        if self.event is not None and self.under_way:  # asking a device that has answered costs microseconds
            self.event.synchronize()
            self.under_way = False

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
        from equipoise.engines.simulator.cuda.kernels import span_kernels as kernels

        weight = self.place.task.layout.unflatten(self.params)["weight"]
        halves = [self.weight[:, part * self.scores :][:, : self.classes] for part in range(self.parts)]
        kernels.split_in_two(weight, self.ones, self.scale, halves)

    def _gather(self, here: Any) -> None:
        """The clients' examples, one after the other."""
        from equipoise.engines.simulator.cuda.kernels import span_kernels as kernels

        clients = self.clients
        scale, shift = (1.0, 0.0) if clients.scale is None or self.scale != 1.0 else (clients.scale, clients.shift)
        kernels.gather_examples(clients.x.flatten(1), here, clients.starts, self.x, scale, shift)

    def _multiply(self) -> None:
        """The outputs X Wᵀ of all examples, without bias."""
        x, outputs = (v.view(self.capacity.models, self.capacity.rows, -1) for v in (self.x, self.outputs))
        with self.products.products():
            torch.bmm(x, self.weight.transpose(1, 2), out=outputs)
