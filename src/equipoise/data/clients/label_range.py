"""The range of the classes among some targets, and the class of targets that losses ignore."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from equipoise.data.clients.leaves import first_bare_row
from equipoise.data.clients.ragged import Ragged
from equipoise.errors import InvalidData

IGNORE = -100  # the usual class of places that losses ignore


class LabelRange(NamedTuple):
    """The smallest and the largest class of some targets, and whether some of their places are ignored."""

    lowest: int
    highest: int
    ignored: bool


def find_label_range(targets: Any, ignore: int, place: Callable[[int], str]) -> LabelRange | None:
    """The range of the classes of targets, without the class `ignore`; None if targets are not classes.

    An example all of whose targets are ignored is refused; `place` says in words where a row is.
    """
    if not isinstance(targets, Tensor | Ragged) or targets.is_floating_point():
        return None
    values = targets.values if isinstance(targets, Ragged) else targets
    lowest, highest = int(values.min()), int(values.max())
    padded = isinstance(targets, Ragged) and targets.pad == ignore
    if lowest > ignore or not bool((known := values != ignore).logical_not().any()):
        return LabelRange(lowest, highest, padded)
    if (row := first_bare_row(targets, known)) is not None:
        raise InvalidData(f"{place(row)} has no target that counts: all are of the ignored class. Drop it.")
    if not bool(known.any()):
        return LabelRange(0, 0, True)
    return LabelRange(int(values[known].min()), int(values[known].max()), True)
