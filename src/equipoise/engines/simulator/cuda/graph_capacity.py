"""How large a CUDA graph is made, and how it is captured: few graphs of rounded sizes serve all cohorts."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_CAPTURES = threading.Lock()  # torch has one stream for captures, whichever thread makes them


def rounded_up(count: int, least: int = 1) -> int:
    """A count rounded up by at most a sixteenth, so that few graphs serve all cohorts, and to a multiple of `least`."""
    step = max(least, 1 << max(0, count.bit_length() - 5))
    return -(-count // step) * step


def power_of_two(count: int, least: int = 1) -> int:
    """The smallest power of two that is at least `count` and `least`."""
    return max(least, 1 << max(0, count - 1).bit_length())


def rounded_batch(batch: int) -> int:
    """A batch of all examples, rounded up by an eighth at most, so that few graphs serve all cohorts."""
    return rounded_up(batch, power_of_two(batch, 16) // 16)


def captured(body: Callable[[], None], trial: Callable[[], None], trials: int, pool: Any = None) -> torch.cuda.CUDAGraph:
    """The graph of what `body` does, after some trial runs: kernels are compiled and libraries have their memory before.

    No garbage is collected meanwhile: the memory of another engine, let go, would end the capture.
    """
    with _CAPTURES:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(trials):
                trial()
        torch.cuda.current_stream().wait_stream(side)
        graph, enabled = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # another thread may copy examples
                body()
        finally:
            if enabled:
                gc.enable()
        return graph


@dataclass(frozen=True)
class GraphCapacity:
    """What a graph holds: a number of clients and of rows of examples of each model, of any sizes."""

    models: int
    clients: int
    rows: int
    largest: int  # examples of one client

    @property
    def all_clients(self) -> int:
        """Clients of all models."""
        return self.models * self.clients

    @property
    def all_rows(self) -> int:
        """Rows of examples of all models."""
        return self.models * self.rows
