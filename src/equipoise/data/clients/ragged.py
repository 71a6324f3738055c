"""Sequences of different lengths, packed one after the other and padded when a batch is gathered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from equipoise.errors import InvalidData, require

MULTIPLE = 8  # batches are padded to a multiple of this many steps


@dataclass(frozen=True, eq=False)
class Ragged:
    """N sequences: sequence i is values[offsets[i] : offsets[i + 1]].

    A batch of them has the shape (B, T, …), where T is the length of its longest sequence, rounded up to a multiple of 8; the
    other places hold `pad`. Beside inputs goes a mask (B, T) of int64, 1 at values and 0 at padding, under the name `mask`.
    Targets have none: give them `pad=-100`, which losses ignore.

    >>> Ragged.of([[1, 2, 3], [4]]).gather(torch.tensor([1]))
    tensor([[4, 0, 0, 0, 0, 0, 0, 0]])
    """

    values: Tensor  # (V, …)
    offsets: Tensor  # (N + 1,) int64
    pad: float = 0
    mask: str | None = "attention_mask"

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", _as_tensor("values", self.values))
        object.__setattr__(self, "offsets", _as_tensor("offsets", self.offsets).to(torch.int64))
        good = self.mask is None or (isinstance(self.mask, str) and self.mask.isidentifier())
        require(good, "mask", "must be the name of an argument of the model, or None", self.mask)
        if self.offsets.dim() != 1 or len(self.offsets) == 0 or self.values.dim() == 0:
            raise InvalidData("Ragged needs values (V, …) and offsets (N + 1,).")
        if int(self.offsets[0]) != 0 or int(self.offsets[-1]) != len(self.values):
            raise InvalidData(f"offsets of Ragged must run from 0 to {len(self.values)} (the number of values).")
        if bool((short := self.offsets.diff() < 1).any()):
            first = int(short.nonzero()[0])
            rule = "must rise: sequences are not empty, and stand one after the other"
            raise InvalidData(f"offsets of Ragged {rule}, but do not at sequence {first}. Ragged.of(sequences) finds them.")

    @classmethod
    def of(cls, sequences: Iterable[Any], *, pad: float = 0, mask: str | None = "attention_mask") -> Ragged:
        """Sequences, each an array or a list (T, …), packed."""
        if not isinstance(sequences, Iterable):
            raise InvalidData(f"Ragged.of needs sequences, each an array or a list, but got {sequences!r}.")
        tensors = [_as_tensor(f"sequence {row}", sequence) for row, sequence in enumerate(sequences)]
        if not tensors:
            raise InvalidData("Ragged needs at least one sequence.")
        for row, tensor in enumerate(tensors):
            if tensor.dim() == 0:
                raise InvalidData(f"sequence {row} of Ragged is the single number {tensor.item()}. Give [{tensor.item()}].")
            if tensor.shape[1:] != tensors[0].shape[1:]:
                raise InvalidData(f"steps of sequence {row} of Ragged have another shape than those of sequence 0.")
        lengths = torch.tensor([0, *(len(tensor) for tensor in tensors)])
        return cls(torch.cat(tensors), lengths.cumsum(0), pad, mask)

    @classmethod
    def trusted(cls, values: Tensor, offsets: Tensor, pad: float, mask: str | None, longest: int) -> Ragged:
        """Sequences that need no checks, the longest of a known length: nothing is read."""
        made = object.__new__(cls)
        for name, value in {"values": values, "offsets": offsets, "pad": pad, "mask": mask, "longest": longest}.items():
            object.__setattr__(made, name, value)
        return made

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __repr__(self) -> str:
        return f"Ragged({len(self)} sequences of {int(self.lengths.min())} to {self.longest} steps)"

    @cached_property
    def lengths(self) -> Tensor:
        """Steps of each sequence, (N,)."""
        return self.offsets.diff()

    @cached_property
    def longest(self) -> int:
        """Steps of the longest sequence."""
        return int(self.lengths.max())

    def lengths_of(self, rows: Tensor) -> Tensor:
        """Steps of some sequences, in the shape of `rows`."""
        return self.offsets[rows + 1] - self.offsets[rows]

    @property
    def dtype(self) -> torch.dtype:
        """The type of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """Where the values are."""
        return self.values.device

    @property
    def step_shape(self) -> torch.Size:
        """The shape of one step of a sequence."""
        return self.values.shape[1:]

    def is_floating_point(self) -> bool:
        """Whether the values are floating numbers."""
        return self.values.is_floating_point()

    def __getitem__(self, rows: Tensor) -> Ragged:
        """Some of the sequences; their values are copied."""
        lengths = self.lengths_of(rows)
        ends = lengths.cumsum(0)
        within = torch.arange(int(ends[-1]), device=ends.device) - (ends - lengths).repeat_interleave(lengths)
        taken = self.values[self.offsets[:-1][rows].repeat_interleave(lengths) + within]
        return replace(self, values=taken, offsets=torch.cat([ends.new_zeros(1), ends]))

    def width(self, rows: Tensor) -> int:
        """The length to which a batch of these sequences is padded."""
        return -(-int(self.lengths_of(rows).max()) // MULTIPLE) * MULTIPLE

    def gather(self, rows: Tensor, width: int | None = None) -> Tensor:
        """The sequences (*rows, T, …), padded to a multiple of 8 or to `width`."""
        steps = torch.arange(self.width(rows) if width is None else width, device=rows.device)
        inside = steps < self.lengths_of(rows).unsqueeze(-1)
        places = torch.where(inside, self.offsets[rows].unsqueeze(-1) + steps, 0)
        padded = self.values.index_select(0, places.flatten()).view(*places.shape, *self.step_shape)
        filled: Tensor = padded.masked_fill_(~inside.view(*inside.shape, *(1 for _ in self.step_shape)), self.pad)
        return filled

    def inside(self, rows: Tensor, width: int) -> Tensor:
        """1 at values and 0 at padding, (*rows, T) int64."""
        return (torch.arange(width, device=rows.device) < self.lengths_of(rows).unsqueeze(-1)).long()

    def to(self, device: torch.device) -> Ragged:
        """The sequences on a device."""
        return replace(self, values=self.values.to(device), offsets=self.offsets.to(device))

    @staticmethod
    def joined(parts: list[Ragged]) -> Ragged:
        """Sequences of several, one after the other."""
        lengths = torch.cat([part.lengths for part in parts])
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return replace(parts[0], values=torch.cat([part.values for part in parts]), offsets=offsets)


def _as_tensor(what: str, values: Any) -> Tensor:
    """Real numbers as a tensor."""
    try:
        if isinstance(values, str):
            raise TypeError("text")
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidData(f"{what} of Ragged must hold numbers in steps of one shape, but is {values!r:.80}.") from None
    if tensor.is_complex():
        raise InvalidData(f"{what} of Ragged holds complex numbers. Give real and imaginary parts as two features.")
    return tensor


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
