"""How large a CUDA graph is made, and how it is captured: few graphs of rounded sizes serve all cohorts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


def rounded_up(count: int, least: int = 1) -> int:
    """A count rounded up by at most a sixteenth, so that few graphs serve all cohorts, and to a multiple of `least`."""
    step = max(least, 1 << max(0, count.bit_length() - 5))
    return -(-count // step) * step


def power_of_two(count: int, least: int = 1) -> int:
    """The smallest power of two that is at least `count` and `least`."""
    return max(least, 1 << max(0, count - 1).bit_length())


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """What is done inside becomes the graph. No garbage is collected: the memory of another engine, let go, would end it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool):
            yield
    finally:
        if enabled:
            gc.enable()


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
