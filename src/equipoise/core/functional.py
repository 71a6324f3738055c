"""Calls of a module with other tensors in place of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call


def call_with_tensors(
    module: nn.Module, named: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> Any:
    """What a module gives for some arguments with other parameters and buffers of these names.

    That is `torch.func.functional_call`. Where a module has one layer under two names, that function leaves the given tensors
    in the layer; here they are put in and taken out layer by layer.
    """
    if sum(1 for _ in module.named_modules(remove_duplicate=False)) == sum(1 for _ in module.modules()):
        return functional_call(module, dict(named), args, kwargs)
    with _exchanged(module, named):
        return module(*args, **(kwargs or {}))


@contextmanager
def _exchanged(module: nn.Module, named: Mapping[str, Tensor]) -> Iterator[None]:
    """Within it, tensors of these names are others, wherever the module holds them."""
    own = dict(module.named_parameters()) | dict(module.named_buffers())
    others = {id(own[name]): value for name, value in named.items()}
    places: list[tuple[dict[str, Any], str, Tensor]] = []
    for layer in module.modules():  # each once
        stores: tuple[dict[str, Any], ...] = (vars(layer)["_parameters"], vars(layer)["_buffers"])
        for held in stores:
            places += [(held, key, value) for key, value in held.items() if value is not None and id(value) in others]
    for held, key, value in places:
        held[key] = others[id(value)]
    try:
        yield
    finally:
        for held, key, value in places:
            held[key] = value
