"""Where float32 rounds away what tells the numbers of a column apart: a notice names the column."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.errors import notify

_SHARE = 0.01  # of the standard deviation of a column: rounding above it is told
_CONSTANT = 1e-12  # a smaller deviation, as a share of the largest number, is the rounding of float64 itself
_NUMBERS = 2**22  # that are looked at per array, in rows at equal distances
_SHOWN = 3  # columns that a notice names


@dataclass
class _Moments:
    """The numbers of each column of a leaf so far, by parts of their rows."""

    count: int
    mean: Tensor
    squares: Tensor  # sum of squared deviations from the mean
    largest: Tensor  # absolute number
    rounding: Tensor  # largest error of float32

    def joined(self, other: _Moments) -> _Moments:
        """The moments of both parts together (Chan, Golub, LeVeque 1983)."""
        count, step = self.count + other.count, other.mean - self.mean
        return _Moments(
            count, self.mean + step * (other.count / count),
            self.squares + other.squares + step.square() * (self.count * other.count / count),
            torch.maximum(self.largest, other.largest), torch.maximum(self.rounding, other.rounding),
        )  # fmt: skip


class Float32Rounding:
    """What becomes of float64 arrays of some clients, or of all, in float32.

    >>> import warnings
    >>> seconds, found = torch.tensor([1700000000.0, 1700000060.0], dtype=torch.float64), Float32Rounding()
    >>> found.add("x", seconds, seconds.float())
    >>> with warnings.catch_warnings(record=True) as given:
    ...     warnings.simplefilter("always")
    ...     found.tell("visits")
    >>> str(given[0].message).split(":")[0]
    'visits'
    """

    def __init__(self) -> None:
        self._found: dict[str, tuple[_Moments, Any]] = {}

    def add(self, name: str, exact: Tensor, rounded: Tensor, names: Any = None) -> None:
        """Take in the rows of an array (N, …) and what they are in float32; `names` are those of its columns, if known."""
        if exact.numel() == 0:
            return
        step = -(-exact.numel() // _NUMBERS)
        rows, single = exact.detach()[::step], rounded.detach()[::step]
        mean = rows.mean(0)
        here = _Moments(len(rows), mean, (rows - mean).square().sum(0), rows.abs().amax(0), (rows - single).abs().amax(0))
        if name not in self._found:
            self._found[name] = here, names
        elif (before := self._found[name][0]).mean.shape == mean.shape:
            self._found[name] = before.joined(here), names

    def tell(self, source: str) -> None:
        """Give a notice that names the columns of the data `source` whose rounding is large beside their spread."""
        told = []
        for name, (found, names) in self._found.items():
            deviation = (found.squares / found.count).sqrt()
            lost = (found.rounding > _SHARE * deviation) & (deviation > _CONSTANT * found.largest)
            places = lost.nonzero().tolist()
            shown = [f"{name}{_column(place, names)}" for place in places[:_SHOWN]]
            told += [*shown, f"{len(places) - _SHOWN} more of {name}"] if len(places) > _SHOWN else shown
        if told:
            notify(
                f"{source}: numbers become float32, of about 7 digits, and these differ by so little that rounding changes "
                f"them by more than {_SHARE:.0%} of their standard deviation: {', '.join(told)}. Subtract the mean first."
            )


def _column(place: list[int], names: Any) -> str:
    if not place:
        return ""
    if len(place) > 1:
        return f" at place {tuple(place)}"
    return f" in column {place[0]}" if names is None else f" in column {str(names[place[0]])!r}"
