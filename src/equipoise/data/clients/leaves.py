"""One leaf of the inputs or targets of clients: a tensor, or sequences of different lengths. How it is checked and gathered."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from equipoise.core.trees import leaves, map_tree, named_leaves
from equipoise.data.clients.ragged import Ragged, Visited
from equipoise.errors import InvalidData, require

_ROWS_PER_CHECK = 65_536


def shown_shape(tree: Any) -> Any:
    """The shape of one example, in a form to be printed."""
    return map_tree(lambda leaf: ("…", *leaf.step_shape) if isinstance(leaf, Ragged) else tuple(leaf.shape[1:]), tree)


def first_bad_row(values: Any) -> int | None:
    """The first row with NaN or infinity; None if all numbers are finite. Examples that are read later are checked then."""
    if isinstance(values, Visited):
        return None
    numbers = values.values if isinstance(values, Ragged) else values
    for start in range(0, len(numbers), _ROWS_PER_CHECK) if numbers.is_floating_point() else ():
        rows = numbers[start : start + _ROWS_PER_CHECK]
        if math.isfinite(rows.sum(dtype=torch.float64 if rows.dtype == torch.float64 else torch.float32)):
            continue  # the sum would not be finite, either
        bad = ~torch.isfinite(rows.flatten(1) if rows.dim() > 1 else rows[:, None]).all(1)
        if bad.any():
            row = start + int(bad.nonzero()[0])
            return int(torch.searchsorted(values.offsets, row, right=True)) - 1 if isinstance(values, Ragged) else row
    return None


def first_bare_row(y: Any, known: Tensor) -> int | None:
    """The first row of targets that are all ignored, where `known` says which values are not; None if there is none."""
    some = known.flatten(1).any(1) if known.dim() > 1 else known
    if isinstance(y, Ragged):
        some = torch.segment_reduce(some.double(), "max", lengths=y.lengths) > 0
    return None if bool(some.all()) else int((~some).nonzero()[0])


def as_leaf(values: Any) -> Any:
    """A tensor, or sequences; NumPy arrays are welcome."""
    try:
        return values if isinstance(values, Ragged | Visited) else torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidData(
            f"inputs and targets must be arrays of numbers, or a tuple or dict of them, but one is a {type(values).__name__} "
            "that is none. Arrays of any library: data.from_arrays(x, y, client)."
        ) from None


def columns(trees: Sequence[Any]) -> list[list[Any]] | None:
    """The leaves of many trees, leaf by leaf; None if the trees differ in their structure."""
    first = trees[0]
    if isinstance(first, dict):
        names = list(first)
        alike = all(isinstance(tree, dict) and list(tree) == names for tree in trees)
        return [_column([tree[name] for tree in trees]) for name in names] if alike else None
    if isinstance(first, tuple):
        alike = all(isinstance(tree, tuple) and len(tree) == len(first) for tree in trees)
        return [_column(list(parts)) for parts in zip(*trees, strict=True)] if alike else None
    return None if any(isinstance(tree, dict | tuple) for tree in trees) else [_column(list(trees))]


def _column(parts: list[Any]) -> list[Any]:
    """Leaves as tensors or sequences; arrays of one type stay arrays, which are joined in less time."""
    if {type(part) for part in parts} == {np.ndarray} and len({part.dtype for part in parts}) == 1:
        return parts
    return [as_leaf(part) for part in parts]


def same_rows(*columns: list[Any]) -> bool:
    """Whether the leaves of each column are of one kind, and those of each client have as many rows."""
    kinds = [{_kind(leaf) for leaf in column} for column in columns]
    if any(len(each) > 1 or (False, None) in each for each in kinds):
        return False
    counts = [[len(leaf) for leaf in column] for column in columns]
    return all(each == counts[0] for each in counts)


def tree_like(tree: Any, parts: Iterable[Any]) -> Any:
    """The leaves in a tree of the structure of another."""
    if isinstance(tree, dict):
        return dict(zip(tree, parts, strict=True))
    return tuple(parts) if isinstance(tree, tuple) else next(iter(parts))


def joined(parts: list[Any]) -> Any:
    """The rows of the leaves one after the other."""
    if isinstance(parts[0], np.ndarray):
        return torch.from_numpy(np.concatenate(parts))
    if isinstance(parts[0], Ragged):
        return Ragged.joined(parts)
    if isinstance(parts[0], Visited):
        return Visited.joined(parts)
    return torch.cat(parts)


def taken(leaf: Any, rows: Tensor) -> Any:
    """Some rows of a leaf, copied."""
    return leaf[rows] if isinstance(leaf, Ragged | Visited) else leaf.index_select(0, rows.to(leaf.device))


def _kind(leaf: Any) -> tuple[bool, tuple[int, ...] | None]:
    """What the leaves of all clients must share: whether they are sequences, and the shape of a row, None of a number."""
    if isinstance(leaf, Ragged):
        return True, leaf.step_shape
    return False, leaf.shape[1:] if leaf.shape else None


def kinds_of(tree: Any) -> dict[str, tuple[bool, tuple[int, ...] | None]]:
    """The kind of each leaf of a tree, by name."""
    return {name: _kind(leaf) for name, leaf in named_leaves("", tree).items()}


def numbers_in(leaf: Any) -> int:
    """Numbers in one example of a leaf; of sequences, in the longest."""
    return leaf.longest * leaf.step_shape.numel() if isinstance(leaf, Ragged) else leaf.shape[1:].numel()


def per_leaf(name: str, given: Any, x: Any, default: Any) -> Any:
    """`scale` or `shift` for every leaf of the inputs; leaves that are not named get the default."""
    if not isinstance(x, dict | tuple):
        return given
    if given == default:
        return map_tree(lambda leaf: default, x)
    if isinstance(x, tuple):
        good = isinstance(given, tuple | list) and len(given) == len(x)
        require(good, name, f"must be a tuple of {len(x)}, one per input", given)
        return tuple(given)
    good = isinstance(given, dict) and set(given) <= set(x)
    require(good, name, f"must be a dict by some of the inputs {', '.join(map(repr, x))}", given)
    return {key: given.get(key, default) for key in x}


def dimensions(rows: Tensor | slice) -> int:
    """Dimensions of a batch of these rows."""
    return 1 if isinstance(rows, slice) else rows.dim()


def indices(rows: Tensor | slice, device: torch.device) -> Tensor:
    """The rows as a tensor."""
    return torch.arange(rows.start, rows.stop, device=device) if isinstance(rows, slice) else rows


def gather(values: Any, rows: Tensor | slice, wider: int | None) -> Tensor:
    """values[rows] for rows of any shape, by `index_select`, which is many times faster than indexing."""
    if isinstance(values, Ragged):
        where = indices(rows, values.device)
        return values.gather(where, int(values.lengths_of(where).max()) if wider is None else values.width(where) + wider)
    if isinstance(values, Visited):
        return values.gather(indices(rows, values.places.device))
    if isinstance(rows, slice):
        part: Tensor = values[rows]
        return part
    gathered: Tensor = values.index_select(0, rows.flatten()).view(*rows.shape, *values.shape[1:])
    return gathered


def prepared(values: Tensor, rows: Tensor | slice, dtype: torch.dtype, scale: float | None, shift: float) -> Tensor:
    """Gathered values as a model sees them, in memory of their own, because a model may work in place on its inputs."""
    copy = isinstance(rows, slice)  # indexing by a tensor has copied already
    if scale is None:
        return values.to(dtype if values.is_floating_point() else torch.int64, copy=copy)
    scaled = values.to(dtype, copy=copy).mul_(scale)
    return scaled.add_(shift) if shift else scaled


def moved(value: Any, device: torch.device) -> Any:
    """A tensor or a tree of tensors on a device; anything else as it is."""
    kinds = Tensor | Ragged | Visited
    if isinstance(value, kinds):
        return value.to(device)
    trees = isinstance(value, dict | tuple) and any(isinstance(leaf, kinds) for leaf in leaves(value))
    return map_tree(lambda leaf: leaf.to(device), value) if trees else value


def hashed_parts(tree: Any) -> list[object]:
    """What a tree adds to a fingerprint; a tensor itself."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Ragged):
        return [tree.values, tree.offsets, tree.pad, tree.mask]
    if isinstance(tree, Visited):
        return ["read at every visit", tree.shape, tree.dtype, tree.places]
    return [part for name, leaf in named_leaves("", tree).items() for part in (name, *hashed_parts(leaf))]


def offsets_of(sizes: Tensor) -> Tensor:
    """The first row of each of n clients that own `sizes` (n,) rows one after the other, and the number of rows: (n + 1,)."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])


def rows_in_turn(starts: Tensor, sizes: Tensor) -> Tensor:
    """The rows of clients one after another, whose first rows and sizes are `starts` (n,) and `sizes` (n,)."""
    ends = sizes.cumsum(0)
    return torch.arange(int(ends[-1])) + (starts - ends + sizes).repeat_interleave(sizes)


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
