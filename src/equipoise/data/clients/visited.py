"""Inputs that are read from a torch Dataset at every visit, for random augmentation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from equipoise.errors import InvalidData


def read_example(dataset: Any, number: int, owner: str) -> Any:
    """An example of a Dataset; whatever reading it raises is said to be about that example."""
    try:
        return dataset[number]
    except Exception as failure:  # a user's code may raise anything
        text = (str(failure).strip().splitlines() or [""])[0]
        raise InvalidData(
            f"{owner}: example {number} of its Dataset cannot be read: {type(failure).__name__}: {text}. Repair or leave out "
            "that example."
        ) from failure


@dataclass(frozen=True, eq=False)
class Visited:
    """N examples, of which example i is input places[i][1] of dataset places[i][0], read whenever a batch holds it.

    Random augmentation draws from torch's generator, which the loop engine seeds for each client and round: a run can be
    repeated. Only the loop engine takes such inputs.
    """

    datasets: Sequence[Any]
    places: Tensor  # (N, 2) int64: dataset, number in it
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # where batches go

    def __len__(self) -> int:
        return len(self.places)

    def __repr__(self) -> str:
        return f"Visited({len(self)} examples of {len(self.datasets)} datasets)"

    def _read(self, place: Sequence[int]) -> Tensor:
        return torch.as_tensor(read_example(self.datasets[place[0]], place[1], f"dataset {place[0]}")[0])

    @cached_property
    def _first(self) -> Tensor:
        return self._read(self.places[0].tolist())

    @property
    def shape(self) -> torch.Size:
        """N and the shape of an example."""
        return torch.Size((len(self), *self._first.shape))

    @property
    def dtype(self) -> torch.dtype:
        """The type of an example."""
        return self._first.dtype

    def is_floating_point(self) -> bool:
        """Whether examples are floating numbers."""
        return self._first.is_floating_point()

    def __getitem__(self, rows: Any) -> Visited:
        return replace(self, places=self.places[rows])

    def gather(self, rows: Tensor) -> Tensor:
        """The examples (*rows, …), read now."""
        read = [self._read(place) for place in self.places[rows.flatten()].tolist()]
        for row, example in zip(rows.flatten().tolist(), read, strict=True):
            if example.shape != self._first.shape or (example.is_floating_point() and not bool(torch.isfinite(example).all())):
                raise InvalidData(
                    f"example {int(self.places[row, 1])} of dataset {int(self.places[row, 0])} came with the shape "
                    f"{tuple(example.shape)} instead of {tuple(self._first.shape)}, or holds NaN or infinity."
                )
        return torch.stack(read).view(*rows.shape, *self._first.shape).to(self.device)

    @staticmethod
    def joined(parts: list[Visited]) -> Visited:
        """Examples of several, one after the other."""
        datasets: list[Any] = []
        places: list[Tensor] = []
        for part in parts:
            places.append(part.places + torch.tensor([len(datasets), 0]))
            datasets += list(part.datasets)
        return Visited(datasets, torch.cat(places))

    def to(self, device: torch.device) -> Visited:
        """The examples, whose batches go to a device."""
        return replace(self, device=device)
