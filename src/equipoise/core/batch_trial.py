"""How a model treats the examples of a batch, tried out before any work.

In evaluation mode an example's output must not depend on the others in its batch, and nothing may change. In training mode a
model may mix the examples of one client's batch and keep statistics of them, as BatchNorm does: then batches are never padded,
and the statistics are carried (`core.carried`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core import trees
from equipoise.errors import IncompatibleParts, InvalidParameter


@dataclass(frozen=True)
class BatchUse:
    """What a model does with the batches that it is trained on."""

    changed: tuple[str, ...] = ()  # buffers that a forward pass in training mode changes
    mixes: bool = False  # an example's output depends on the others of its batch: padding would change it
    smallest: int = 1  # examples that a batch must have


def try_batches(module: nn.Module, set_training: Callable[[bool], object], x: Any) -> BatchUse:
    """What a module does with a batch x of two examples or more; what cannot be trained over clients is refused.

    `set_training` puts the module into training or evaluation mode. The module's buffers are changed by the trial.
    """
    set_training(False)
    _run(module, x)  # buffers that are made on first use are there now
    before = _copied_buffers(module)
    several, again = _run(module, x), _run(module, x)
    try:
        mixes = _mixes(several, again, _one_by_one(module, x))
    except InvalidParameter:
        raise
    except Exception:  # it takes several examples, and no single one
        mixes = True
    if mixes:
        raise IncompatibleParts(
            f"In evaluation mode {type(module).__name__} gives an example another output when others are in its batch: a "
            "layer mixes them, so that a client's result depends on who is evaluated beside it.",
            "Normalise within each example, e.g. by torch.nn.GroupNorm or LayerNorm, or use running statistics in evaluation.",
        )
    if changed := _changed(module, before):
        raise IncompatibleParts(
            f"{type(module).__name__} changes its buffer {changed[0]!r} when it runs in evaluation mode, so that evaluating a "
            "model changes it.",
            "Change buffers in training mode only (if self.training: …), make it a parameter, or keep it fixed.",
        )
    set_training(True)
    several, again = _run(module, x), _run(module, x)
    try:
        alone = _one_by_one(module, x)
    except InvalidParameter:
        raise
    except Exception:  # a batch of one has no variance, say: BatchNorm refuses it, and any layer may raise anything
        mixes, smallest = True, 2
    else:
        mixes, smallest = _mixes(several, again, alone), 1
    with suppress(Exception):  # inputs that a model does not take
        _run(module, _moved(x))
    return BatchUse(_changed(module, before), mixes, smallest)


def _run(module: nn.Module, batch: Any) -> list[Tensor]:
    outputs = trees.call(module, trees.clone(batch))
    return [leaf for leaf in trees.leaves(outputs) if isinstance(leaf, Tensor)]


def _one_by_one(module: nn.Module, x: Any) -> list[list[Tensor]]:
    """The outputs of each example in a batch of its own."""
    alone = [_run(module, trees.select(x, slice(i, i + 1))) for i in range(trees.batch_shape(x)[0])]
    for several, single in zip(_run(module, x), alone[0], strict=True):
        if single.shape != several[:1].shape:
            rule = f"must give a batch of one an output of shape {tuple(several[:1].shape)}"
            raise InvalidParameter("model", rule, tuple(single.shape), "Squeeze only the last dimension: squeeze(-1).")
    return alone


def _mixes(several: Sequence[Tensor], again: Sequence[Tensor], alone: Sequence[Sequence[Tensor]]) -> bool:
    """Whether outputs of a batch differ from those of its examples alone; random ones (dropout) are not compared."""
    for place, (first, second) in enumerate(zip(several, again, strict=True)):
        random = not nearly_equal(first, second)
        if not random and not nearly_equal(first, torch.cat([outputs[place] for outputs in alone])):
            return True
    return False


def _moved(x: Any) -> Any:
    """Other inputs of the same kind: a statistic of zeros may be what it was before."""

    def move(leaf: Tensor) -> Tensor:
        return leaf + torch.linspace(0.5, 1.5, leaf.numel()).view_as(leaf).to(leaf) if leaf.is_floating_point() else leaf

    return trees.map_tree(move, x)


def _copied_buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.named_buffers()}


def _changed(module: nn.Module, before: dict[str, Tensor]) -> tuple[str, ...]:
    """The buffers that are not as they were."""
    now = dict(module.named_buffers())
    return tuple(name for name, old in before.items() if not torch.equal(now[name].nan_to_num(), old.nan_to_num()))


def nearly_equal(a: Tensor, b: Tensor) -> bool:
    """Equal up to the rounding of another batch size."""
    rough = 8 * torch.finfo(a.dtype).eps if a.is_floating_point() else 0.0
    return a.shape == b.shape and torch.allclose(a, b, rtol=max(1e-3, rough), atol=max(1e-4, rough), equal_nan=True)


def refuse_batch_normalisation(model: nn.Module, harm: str) -> None:
    """Refuse layers that normalise over a batch or keep running statistics; `harm` says what these statistics would do."""
    for name, layer in model.named_modules():
        keeps_statistics = isinstance(layer, nn.modules.batchnorm._NormBase) and layer.track_running_stats
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) or keeps_statistics:
            raise IncompatibleParts(
                f"{f'model.{name}' if name else 'model'} is a {type(layer).__name__}: its statistics {harm}.",
                f"Replace it, e.g. by torch.nn.GroupNorm(groups, {getattr(layer, 'num_features', 'channels')}); "
                "equipoise.models.with_group_norm(model) replaces all of them.",
            )
