"""Rules for a forward pass in local work: dropout by counters, and what `torch.func.vmap` cannot batch, written out.

They hold for whatever a model calls, a module or a function, at any depth: torch hands every call of its functions to the rules
that are in force. Nothing is asked of the model itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from equipoise.core import dropout, written_out


class ForwardRules(TorchFunctionMode):
    """In force inside `with`: for one forward pass.

    `key` is one int64 number, under vmap one for each client, that fixes the masks of dropout; None leaves dropout to torch.
    With `batched`, attention, recurrent layers and bags of embeddings are written out; else only where they have dropout.
    `captured` says that a CUDA graph is made of the pass, so that no tensor may move. `calls` counts the calls of dropout that
    had an effect.
    """

    def __init__(self, key: Tensor | None, *, batched: bool, captured: bool = False) -> None:
        super().__init__()
        self.key, self.batched, self.captured, self.calls = key, batched, captured, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = _RULES.get(func)
        if rule is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return rule(self, func, *args, **(kwargs or {}))

    @property
    def drops(self) -> bool:
        """Whether dropout is ours. It is not where torch will run a part of the pass again (checkpointing of activations)."""
        if self.key is None or not torch.is_grad_enabled():
            return False
        return torch._C._autograd._top_saved_tensors_default_hooks(True) is None

    def dropout(self, x: Tensor, p: float, *, features: bool = False, alpha: bool = False) -> Tensor:
        """Dropout as `dropout.dropout`, under the number of this call."""
        if self.key is None:
            raise RuntimeError("dropout without a key")
        self.calls += 1
        options = {"features": features, "alpha": alpha, "batched": self.batched}
        return dropout.dropout(x, p, self.key, self.calls, **options)


Rule = Callable[..., Any]


class _Local(threading.local):
    """The rules in whose force a function of torch is run again, by thread."""

    rules: ForwardRules | None = None


_local = _Local()


def _drop(
    rules: ForwardRules, func: Any, input: Tensor, p: float, train: bool, *, features: bool, alpha: bool, inplace: bool
) -> Tensor:
    """A function of torch that drops elements or channels."""
    if not train or p == 0 or not rules.drops:
        result: Tensor = func(input, p, train)
        return result
    if features and input.dim() < 2:
        raise RuntimeError("Feature dropout requires at least 2 dimensions in the input")
    dropped = rules.dropout(input, p, features=features, alpha=alpha)
    return input.copy_(dropped) if inplace else dropped


def _native_drop(rules: ForwardRules, func: Any, input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """`torch.native_dropout`: the result and the mask."""
    if train is False or p == 0 or not rules.drops:
        result: tuple[Tensor, Tensor] = func(input, p, train)
        return result
    noise = rules.dropout(torch.ones_like(input), p)
    return input * noise, noise != 0


def _attend(rules: ForwardRules, func: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
            dropout_p: float = 0.0, is_causal: bool = False, **options: Any) -> Tensor:  # fmt: skip
    """`scaled_dot_product_attention`."""
    drops = dropout_p > 0 and rules.drops
    if not drops and (not rules.batched or dropout_p > 0):
        result: Tensor = func(query, key, value, attn_mask, dropout_p, is_causal, **options)
        return result
    return written_out.attention(query, key, value, attn_mask, dropout_p, is_causal, **options, dropout=rules.dropout)


def _recur(kind: str, rules: ForwardRules, func: Any, *args: Any) -> Any:
    """Recurrent layers; packed sequences are left to torch."""
    packed = len(args) != 9 or not isinstance(args[3], bool)
    drops = not packed and args[5] > 0 and args[6] and args[4] > 1
    if packed or (drops and not rules.drops) or not (drops or rules.batched):
        return func(*args)
    layer = written_out.scan_directions if rules.batched else written_out.fused_directions
    return written_out.recurrent(kind, *args, layer=layer, dropout=rules.dropout)


def _step_cell(kind: str, rules: ForwardRules, func: Any, *args: Any) -> Any:
    """One step of a recurrent cell."""
    return written_out.one_cell(kind, *args) if rules.batched else func(*args)


def _bag(rules: ForwardRules, func: Any, input: Tensor, weight: Tensor, offsets: Tensor | None = None, **options: Any) -> Any:
    """`embedding_bag` of bags of one size."""
    special = any(options.get(name) for name in ("max_norm", "scale_grad_by_freq", "sparse"))
    if not rules.batched or input.dim() != 2 or offsets is not None or special:
        return func(input, weight, offsets, **options)
    mode, weights, padding = options.get("mode", "mean"), options.get("per_sample_weights"), options.get("padding_idx")
    return written_out.embedding_bag(input, weight, mode, weights, padding)


def _data_pointer(rules: ForwardRules, func: Any, tensor: Tensor) -> int:
    """Where a tensor's numbers are: 0 if it has none of its own, or may not move.

    Recurrent layers on a GPU ask in order to move their weights together, and do not if all weights are at one place.
    """
    return 0 if rules.batched or rules.captured else int(func(tensor))


def _normalise_weight(rules: ForwardRules, func: Any, v: Tensor, g: Tensor, dim: int = 0) -> Any:
    """Weights in terms of their length and direction."""
    return written_out.weight_norm(v, g, dim) if rules.batched else func(v, g, dim)


def _again(body: FunctionType, rules: ForwardRules, func: Any, *args: Any, **kwargs: Any) -> Any:
    """A function of `torch.nn.functional` that is written in Python, with the rules in force inside."""
    before = _local.rules
    _local.rules = rules
    try:
        return body(*args, **kwargs)
    finally:
        _local.rules = before


def _inside(name: str, module: Any) -> Callable[..., Any]:
    """A function of torch as those that are run again see it: with the rules of the pass they are in."""
    func = getattr(module, name)

    def ruled(*args: Any, **kwargs: Any) -> Any:
        return _RULES[func](_local.rules, func, *args, **kwargs)

    return ruled


_RULES: dict[Any, Rule] = {torch.native_dropout: _native_drop, functional.scaled_dot_product_attention: _attend,
                           functional.embedding_bag: _bag}  # fmt: skip
for _name, _features, _alpha in (
    ("dropout", False, False), ("feature_dropout", True, False), ("alpha_dropout", False, True),
    ("feature_alpha_dropout", True, True),
):  # fmt: skip
    for _end in ("", "_"):
        _RULES[getattr(torch, _name + _end)] = partial(_drop, features=_features, alpha=_alpha, inplace=bool(_end))
_RULES[torch._weight_norm] = _normalise_weight
_RULES[Tensor.data_ptr] = _data_pointer
for _kind in written_out.CELLS:
    _RULES[getattr(torch, _kind)] = partial(_recur, _kind)
    _RULES[getattr(torch, f"{_kind}_cell")] = partial(_step_cell, _kind)

_AGAIN = (
    "dropout",
    "alpha_dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "feature_alpha_dropout",
    "multi_head_attention_forward",
)
_names = {
    f"{name}{end}" for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout") for end in ("", "_")
}
_scope: dict[str, Any] = vars(functional) | {
    "has_torch_function": lambda *_: False,
    "has_torch_function_unary": lambda *_: False,
    "_VF": SimpleNamespace(**{name: _inside(name, torch) for name in _names}),
    "scaled_dot_product_attention": _inside("scaled_dot_product_attention", functional),
}
for _name in _AGAIN:
    _original = getattr(functional, _name)
    _scope[_name] = FunctionType(_original.__code__, _scope, _name, _original.__defaults__)
    _scope[_name].__kwdefaults__ = _original.__kwdefaults__
    _RULES[_original] = partial(_again, _scope[_name])
