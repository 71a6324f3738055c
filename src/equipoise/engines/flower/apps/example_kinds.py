"""What examples look like, as plain values that travel: the shape and type of every leaf of the inputs or targets."""

from __future__ import annotations

from typing import Any

import torch

from equipoise.core.trees import map_tree
from equipoise.data.clients import Ragged
from equipoise.engines.flower.transport.messages import BadMessage, shorten
from equipoise.errors import is_integer, is_number

_TYPES = {str(t).removeprefix("torch."): t for t in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8,
          torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)}  # fmt: skip
_MOST_LEAVES = 64
LARGEST_UNIT = 1e30  # of scales, shifts and padding


def kind_of_examples(tree: Any) -> Any:
    """The kind of a leaf is {"shape", "dtype"}, with "pad" and "mask" for sequences; tuples travel as lists."""
    kinds = map_tree(_leaf_kind, tree)
    return list(kinds) if isinstance(kinds, tuple) else {"leaves": kinds} if isinstance(tree, dict) else kinds


def _leaf_kind(leaf: Any) -> dict[str, Any]:
    name = str(leaf.dtype).removeprefix("torch.")
    if isinstance(leaf, Ragged):
        return {"shape": list(leaf.step_shape), "dtype": name, "pad": leaf.pad, "mask": leaf.mask}
    return {"shape": list(leaf.shape[1:]), "dtype": name}


def read_kind(kind: Any, client: str) -> Any:
    """A kind as a node sent it, checked: a leaf, a list of leaves, or {"leaves": {name: leaf}}."""
    if isinstance(kind, list) and 0 < len(kind) <= _MOST_LEAVES:
        return [_read_leaf(each, client) for each in kind]
    if isinstance(kind, dict) and isinstance(kind.get("leaves"), dict) and 0 < len(kind["leaves"]) <= _MOST_LEAVES:
        return {"leaves": {str(name)[:200]: _read_leaf(each, client) for name, each in kind["leaves"].items()}}
    return _read_leaf(kind, client)


def _read_leaf(kind: Any, client: str) -> dict[str, Any]:
    kind = kind if isinstance(kind, dict) else {}
    shape, dtype = kind.get("shape"), kind.get("dtype")
    good = isinstance(shape, list) and len(shape) <= 8 and all(is_integer(n) and 0 <= n < 2**24 for n in shape)
    if not good or dtype not in _TYPES or torch.Size(shape).numel() > 2**28:
        raise BadMessage(f"{client} has examples of shape {shorten(shape)!r} and type {shorten(dtype)!r}")
    if "mask" not in kind:
        return {"shape": shape, "dtype": dtype}
    pad, mask = kind.get("pad"), kind["mask"]
    if (
        not is_number(pad)
        or not abs(pad) <= LARGEST_UNIT
        or not (mask is None or (isinstance(mask, str) and mask.isidentifier()))
    ):
        raise BadMessage(f"{client} pads sequences with {shorten(pad)!r} and calls their mask {shorten(mask)!r}")
    return {"shape": shape, "dtype": dtype, "pad": pad, "mask": mask}


def zeros_like_kind(kind: Any, rows: int) -> Any:
    """Examples of a kind that are all one zero, repeated without memory; sequences have one step."""
    if isinstance(kind, list):
        return tuple(_zeros(each, rows) for each in kind)
    if "leaves" in kind:
        return {name: _zeros(each, rows) for name, each in kind["leaves"].items()}
    return _zeros(kind, rows)


def _zeros(kind: dict[str, Any], rows: int) -> Any:
    values = torch.zeros((), dtype=_TYPES[kind["dtype"]]).expand(rows, *kind["shape"])  # of any shape, without memory
    return Ragged(values, torch.arange(rows + 1), kind["pad"], kind["mask"]) if "mask" in kind else values


def read_units(given: Any, x: Any, client: str, *, optional: bool) -> Any:
    """A scale or shift as a node sent it: a number for every leaf of inputs like `x`; None only where it is optional."""

    def number(value: Any) -> float | None:
        if value is None and optional:
            return None
        if not is_number(value) or not abs(value) <= LARGEST_UNIT:
            raise BadMessage(f"{client} scales or shifts its inputs by {shorten(value)!r}")
        return float(value)

    if isinstance(x, list) and isinstance(given, list) and len(given) == len(x):
        return tuple(map(number, given))
    if isinstance(x, dict) and "leaves" in x and isinstance(given, dict) and set(given) == set(x["leaves"]):
        return {name: number(given[name]) for name in x["leaves"]}
    return number(given)
