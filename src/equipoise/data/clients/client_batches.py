"""Clients of any number, some megabytes at a time: each batch is packed and checked, and errors name the client and its row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.core.trees import leaves, map_tree
from equipoise.data.clients.arrays import as_tree, client_name
from equipoise.data.clients.client_set import ClientSet
from equipoise.data.clients.ragged import Ragged, Visited
from equipoise.errors import InvalidData

BATCH_BYTES = 1 << 24
MOST_CLIENTS = 65_536
_READY = {np.dtype(kind) for kind in "?bBhilqefd"} | {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
}  # fmt: skip


def batches_of(clients: ClientSet) -> Iterator[ClientSet]:
    """The clients of a set in order, some megabytes at a time."""
    row_bytes = [leaf_bytes(leaf) / len(leaf) for leaf in (*leaves(clients.x), *leaves(clients.y))]
    step = max(int(BATCH_BYTES / max(sum(row_bytes), 1)), 1)  # rows
    ends = clients.host_sizes.cumsum(0)
    first = 0
    while first < len(clients):
        before = int(ends[first - 1]) if first else 0
        last = max(int(torch.searchsorted(ends, before + step, right=True)), first + 1)
        yield clients.take(torch.arange(first, min(last, first + MOST_CLIENTS, len(clients))))
        first = min(last, first + MOST_CLIENTS)


def batches_of_stream(clients: Iterable[Any], *, scale: Any, shift: Any, source: str) -> Iterator[ClientSet]:
    """Triples (id, x, y), packed some megabytes at a time; float64 becomes float32, as in `from_arrays`."""
    held: list[tuple[str, Any, Any]] = []
    size = 0
    for position, given in enumerate(clients):
        try:
            name, x, y = given
        except (TypeError, ValueError):
            raise InvalidData(
                f"{source}: entry {position} must be a triple (id, x, y), but is {type(given).__name__}."
            ) from None
        if type(name) is not str or not name:
            if (text := client_name(name)) is None:
                fix = "Drop that entry, or name its client."
                raise InvalidData(f"{source}: the id of entry {position} is missing: it is {name!r}. {fix}")
            name = text
        if not (_is_ready(x) and _is_ready(y)):
            x, y = _converted(source, name, x, y)
        size += _tree_bytes(x) + _tree_bytes(y)
        held.append((name, x, y))
        if size >= BATCH_BYTES or len(held) == MOST_CLIENTS:
            yield _packed(held, scale, shift, source)
            held, size = [], 0
    if held:
        yield _packed(held, scale, shift, source)


def leaf_bytes(leaf: Any) -> int:
    """Bytes of the values of a leaf."""
    if isinstance(leaf, Visited):
        raise InvalidData(
            "Examples that a Dataset reads at every visit, for random augmentation, cannot be written. Write what the Dataset "
            "holds without augmentation."
        )
    values = leaf.values if isinstance(leaf, Ragged) else leaf
    return int(values.nbytes)


def _tree_bytes(tree: Any) -> int:
    if type(tree) is np.ndarray or type(tree) is Tensor:
        return int(tree.nbytes)
    return sum(map(leaf_bytes, leaves(tree)))


def _is_ready(tree: Any) -> bool:
    """Whether the tree is of arrays that can be joined as they are."""
    if type(tree) is np.ndarray or type(tree) is Tensor:
        return tree.dtype in _READY and tree.ndim > 0
    trees = isinstance(tree, tuple | dict) and len(tree) > 0
    return trees and all(
        isinstance(leaf, Ragged) or (not isinstance(leaf, tuple | dict) and _is_ready(leaf)) for leaf in leaves(tree)
    )


def _converted(source: str, name: str, x: Any, y: Any) -> tuple[Any, Any]:
    try:
        targets = as_tree("y", y)
        return as_tree("x", x, len(leaves(targets)[0])), targets
    except InvalidData as failure:
        raise InvalidData(f"{source}: client {name!r}: {failure}") from None


def _packed(held: list[tuple[str, Any, Any]], scale: Any, shift: Any, source: str) -> ClientSet:
    if len({_types(x, y) for _, x, y in held}) > 1:
        held = [(name, *_converted(source, name, x, y)) for name, x, y in held]
        first = held[0]
        for name, x, y in held:
            if _types(x, y) != _types(*first[1:]):
                raise InvalidData(
                    f"{source}: the types of x and y of client {name!r} are {_types(x, y)}, those of client {first[0]!r} "
                    f"{_types(*first[1:])}. Convert them to one type."
                )
    packed = ClientSet.pack(held, scale=scale, shift=shift, source=source)
    if any(leaf.dtype == torch.float64 for leaf in (*leaves(packed.x), *leaves(packed.y))):
        fields = {name: vars(packed)[name] for name in ("offsets", "ids", "scale", "shift", "source")}
        return ClientSet(map_tree(_single, packed.x), map_tree(_single, packed.y), **fields)  # checked again
    return packed


def _types(x: Any, y: Any) -> tuple[Any, ...]:
    if type(x) is np.ndarray and type(y) is np.ndarray:
        return x.dtype, y.dtype
    return tuple(leaf.dtype for leaf in (*leaves(x), *leaves(y)))


def _single(leaf: Any) -> Any:
    if leaf.dtype != torch.float64:
        return leaf
    return Ragged(leaf.values.float(), leaf.offsets, leaf.pad, leaf.mask) if isinstance(leaf, Ragged) else leaf.float()
