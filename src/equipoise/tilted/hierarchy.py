"""Groups within groups: labels of any kind become a tree, one level per vector of labels, outermost first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.errors import InvalidParameter, is_number, require

_FIX = "Give one label per example: a vector, or for several levels a list of vectors or an (N, levels) array, outermost first."


@dataclass(frozen=True, eq=False)
class Hierarchy:
    """A tree over examples. `parents` runs from the examples up: parents[0] (N,) is each example's innermost group, parents[1]
    each innermost group's own group, and so on; the outermost groups have the root as parent, which is not stored.

    `counts` are the numbers of groups of each level, in the same order.
    """

    parents: tuple[Tensor, ...]
    counts: tuple[int, ...]

    @property
    def depth(self) -> int:
        """The number of levels of groups; 0 means examples alone."""
        return len(self.parents)


def hierarchy(groups: Any, size: int, device: torch.device | str = "cpu") -> Hierarchy:
    """The tree of `groups` over `size` examples; None has no level.

    >>> hierarchy([["a", "a", "b"], [0, 1, 1]], 3).counts
    (3, 2)
    """
    if groups is None:
        return Hierarchy((), ())
    if isinstance(groups, Hierarchy):
        return groups
    levels: list[
        tuple[Tensor, int]
    ] = []  # the group of each example, told apart by all labels down to the level; innermost first
    for labels in _columns(groups):
        codes, count = _codes(labels, size, device)
        if levels:
            _, codes = torch.unique(levels[0][0] * count + codes, return_inverse=True)
            count = int(codes.max()) + 1
        levels.insert(0, (codes, count))
    parents = [levels[0][0]]
    for (below, count), (codes, _) in pairwise(levels):
        parents.append(torch.zeros(count, dtype=torch.int64, device=codes.device).scatter_(0, below, codes))
    return Hierarchy(tuple(parents), tuple(count for _, count in levels))


def level_tilts(tilt: float, inner_tilt: float | Sequence[float], depth: int) -> tuple[float, ...]:
    """The tilts from the innermost level up to the outermost, `tilt`; a single `inner_tilt` stands for every inner level.

    >>> level_tilts(-2.0, (5.0, 0.0), depth=2)
    (0.0, 5.0, -2.0)
    """
    inner = tuple(inner_tilt) if isinstance(inner_tilt, Sequence | np.ndarray) else (inner_tilt,) * depth
    for name, value in [("tilt", tilt), *(("inner_tilt", value) for value in inner)]:
        require(
            is_number(value) and math.isfinite(value), name, "must be a finite number", value,
            "Positive leans towards large losses, negative away from them; 0 is the mean.",
        )  # fmt: skip
    rule = f"must hold one tilt for each of the {depth} levels inside the outermost, outermost first"
    require(len(inner) == depth, "inner_tilt", rule, inner_tilt, "A single number stands for all of them.")
    return (*(float(value) for value in reversed(inner)), float(tilt))


def _columns(groups: Any) -> list[Any]:
    """One vector of labels per level."""
    if isinstance(groups, Tensor | np.ndarray) or hasattr(groups, "__array__"):
        array = groups if isinstance(groups, Tensor) else np.asarray(groups)
        if array.ndim not in (1, 2) or (array.ndim == 2 and array.shape[1] == 0):
            raise InvalidParameter("groups", "must be a vector of labels, or have one column per level", array.shape, _FIX)
        return [array] if array.ndim == 1 else [array[:, level] for level in range(array.shape[1])]
    if not isinstance(groups, list | tuple):
        raise InvalidParameter("groups", "must be labels", groups, _FIX)
    vectors = len(groups) > 0 and all(isinstance(each, list | tuple | Tensor) or hasattr(each, "__array__") for each in groups)
    scalars = vectors and all(getattr(each, "ndim", 1) == 0 for each in groups)  # NumPy's own numbers and texts are labels
    return list(groups) if vectors and not scalars else [groups]


def _codes(labels: Any, size: int, device: torch.device | str) -> tuple[Tensor, int]:
    """Labels as integers from 0, and how many different ones there are."""
    if isinstance(labels, Tensor):
        kinds, codes = torch.unique(labels.detach(), return_inverse=True)
        bad = kinds.is_floating_point() and not bool(torch.isfinite(kinds).all())
        shape, count = tuple(codes.shape), len(kinds)
    else:
        array = np.asarray(labels)
        if array.dtype == object:  # mixed kinds cannot be sorted; and a missing label is no group
            missing = [each for each in array.ravel().tolist() if each is None or each != each]
            require(not missing, "groups", "must have a label for every example", missing[:1], _FIX)
            array = array.astype(str)
        names, inverse = np.unique(array, return_inverse=True)
        bad = names.dtype.kind == "f" and not bool(np.isfinite(names).all())
        codes, shape, count = torch.from_numpy(inverse.reshape(array.shape)), array.shape, len(names)
    require(shape == (size,), "groups", f"must have one label for each of the {size} examples", shape, _FIX)
    require(not bad, "groups", "must have a label for every example, not NaN or infinity", "NaN", _FIX)
    return codes.to(device=device, dtype=torch.int64), count
