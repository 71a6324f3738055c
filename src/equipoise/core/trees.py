"""Trees of tensors, one level deep: a tensor, a tuple of tensors, or a dict of them, each with one row per example.

Inputs, targets and outputs of a model are trees. Batched computations by `torch.func` take them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core.functional import call_with_tensors

Tree = Tensor | tuple[Tensor, ...] | dict[str, Tensor]


def leaves(tree: Any) -> list[Any]:
    """The leaves in order: of anything that is neither a tuple nor a dict, itself.

    >>> leaves({"image": 1, "age": 2}), leaves(3)
    ([1, 2], [3])
    """
    if isinstance(tree, dict):
        return list(tree.values())
    return list(tree) if isinstance(tree, tuple) else [tree]


def named_leaves(name: str, tree: Any) -> dict[str, Any]:
    """The leaves by the expressions that a user would write for them.

    >>> named_leaves("x", {"image": 1, "age": 2}), named_leaves("x", (1,)), named_leaves("y", 3)
    ({"x['image']": 1, "x['age']": 2}, {'x[0]': 1}, {'y': 3})
    """
    if isinstance(tree, dict):
        return {f"{name}[{key!r}]": leaf for key, leaf in tree.items()}
    return {f"{name}[{i}]": leaf for i, leaf in enumerate(tree)} if isinstance(tree, tuple) else {name: tree}


def first_output(outputs: Any) -> str:
    """The first tensor of what a model returns, by the expression that a user would write for it.

    >>> first_output({"scores": 1}), first_output((1, 2)), first_output(torch.zeros(2))
    ("outputs['scores']", 'outputs[0]', 'outputs')
    """
    if isinstance(outputs, Mapping) and outputs:
        return f"outputs[{next(iter(outputs))!r}]"
    return "outputs" if isinstance(outputs, Tensor) else "outputs[0]"


def map_tree(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """The tree with `function` of each leaf and of the leaves of the others at the same place.

    >>> map_tree(lambda a, b: a + b, {"a": 1, "b": 2}, {"a": 10, "b": 20})
    {'a': 11, 'b': 22}
    """
    if isinstance(tree, dict):
        return {key: function(leaf, *(other[key] for other in others)) for key, leaf in tree.items()}
    if isinstance(tree, tuple):
        return tuple(function(*each) for each in zip(tree, *others, strict=True))
    return function(tree, *others)


def select(tree: Any, index: Any) -> Any:
    """Every leaf indexed: tree[index]."""
    return map_tree(lambda leaf: leaf[index], tree)


def split(tree: Any, counts: list[int]) -> list[Any]:
    """Split a tree by rows into trees of `counts` rows each.

    >>> [part["a"].tolist() for part in split({"a": torch.arange(5)}, [2, 3])]
    [[0, 1], [2, 3, 4]]
    """
    if isinstance(tree, dict):
        return [dict(zip(tree, each, strict=True)) for each in zip(*(v.split(counts) for v in tree.values()), strict=True)]
    if isinstance(tree, tuple):
        return list(zip(*(leaf.split(counts) for leaf in tree), strict=True))
    return list(tree.split(counts))


def clone(tree: Any) -> Any:
    """Every leaf in memory of its own."""
    return map_tree(Tensor.clone, tree)


def move(tree: Any, device: torch.device) -> Any:
    """Every leaf on a device."""
    return map_tree(lambda leaf: leaf.to(device), tree)


def batch_shape(tree: Any) -> Any:
    """The shape (B,) of a batch: the first dimension of its first leaf."""
    return leaves(tree)[0].shape[:1]


def call(module: nn.Module, x: Any) -> Any:
    """The outputs of a model for a batch: module(x), or module(*x) of a tuple, or module(**x) of a dict."""
    if isinstance(x, dict):
        return module(**x)
    return module(*x) if isinstance(x, tuple) else module(x)


def call_with(module: nn.Module, params: dict[str, Tensor], x: Any) -> Any:
    """The outputs of a model with other parameters for a batch, as `call` gives them."""
    given = ((), x) if isinstance(x, dict) else (x if isinstance(x, tuple) else (x,), {})
    return call_with_tensors(module, params, *given)
