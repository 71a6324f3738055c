"""Gradients that are products of matrices, subtracted from the parameters as they are multiplied.

A step of plain SGD writes the gradient of a linear layer to memory, reads it again and subtracts it. Many clients' layers are
far more memory than arithmetic, so a step is faster if the product and the subtraction are one operation. Which products are
gradients is seen below autograd, in a first step that is computed as it is; nothing is asked of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCT = torch.ops.aten.bmm.default
Factors = tuple[Tensor, Tensor]


class ProductsSeen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes in which order products are made, and which of them nothing reads but what only looks at them otherwise."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # By memory; the reference keeps the number of memory that is free again from being given to other memory.
        self._made: dict[int, tuple[int, StorageWeakRef]] = {}
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = {_memory(tensor) for tensor in _tensors(result)}
        looks = not func._schema.is_mutable
        for tensor in _tensors((args, tuple((kwargs or {}).values()))):
            if not (looks and made == {_memory(tensor)}):
                self._made.pop(_memory(tensor), None)
        if func is _PRODUCT:
            held = StorageWeakRef(result.untyped_storage())  # type: ignore[no-untyped-call]
            self._made[_memory(result)] = self._count, held
            self._count += 1
        return result

    def gradients(self, gradients: Mapping[str, Tensor]) -> frozenset[int]:
        """The numbers of the products that are gradients, each of one parameter."""
        numbers = [self._made.get(_memory(gradient), (-1, None))[0] for gradient in gradients.values()]
        return frozenset(number for number in numbers if number >= 0 and numbers.count(number) == 1)


class DeferredProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Leaves out the products with some numbers: gives memory that nobody has written to, and keeps their factors."""

    def __init__(self, numbers: frozenset[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._numbers, self._count = numbers, 0
        self._left: dict[int, tuple[Tensor, Factors]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not _PRODUCT:
            return func(*args, **(kwargs or {}))
        number, self._count = self._count, self._count + 1
        if number not in self._numbers:
            return func(*args, **(kwargs or {}))
        left, right = args
        unwritten = left.new_empty(left.shape[0], left.shape[1], right.shape[2])
        self._left[_memory(unwritten)] = unwritten, (left, right)
        return unwritten

    def subtract(self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> list[str]:
        """Subtract the gradients whose products were left out from the parameters, and name the others.

        A parameter must lie in memory as its gradient does.
        """
        others, done = [], 0
        for name, gradient in gradients.items():
            found = self._left.get(_memory(gradient))
            if found is None:
                others.append(name)
                continue
            unwritten, factors = found
            value, done = weights[name], done + 1
            if value.stride() != gradient.stride() or gradient.numel() != unwritten.numel():
                torch.bmm(*factors, out=unwritten)
                others.append(name)
            else:
                value.as_strided(unwritten.shape, unwritten.stride()).baddbmm_(*factors, alpha=-1)
        if done != len(self._left):
            raise RuntimeError("a product that was left out is not a gradient")
        return others


def _memory(tensor: Tensor) -> int:
    """What is the same for tensors in one memory."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # a tensor of another layout
        return -id(tensor)


def _tensors(tree: Any) -> list[Tensor]:
    """All tensors in nested tuples and lists."""
    if isinstance(tree, Tensor):
        return [tree]
    return [tensor for each in tree for tensor in _tensors(each)] if isinstance(tree, tuple | list) else []
