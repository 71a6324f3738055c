"""BatchNorm replaced by GroupNorm, which normalises within each example and keeps no statistics."""

from __future__ import annotations

import copy
import math
from typing import TypeGuard

import torch
from torch import nn

from equipoise.errors import IncompatibleParts, notify, require

_NormBase = nn.modules.batchnorm._NormBase
GROUPS = 32  # at most: as many as divide the channels, too


def with_group_norm(model: nn.Module) -> nn.Module:
    """A copy of a model with GroupNorm in place of every BatchNorm; a notice says which layers were replaced, and by what.

    C channels are normalised in gcd(32, C) groups. BatchNorm1d, whose examples may have one value per channel, gets one
    group: a group of one or two values would carry almost no information. Scale and shift are copied, running statistics
    are dropped, so that a trained model must be trained further. InstanceNorm with running statistics becomes GroupNorm
    with C groups, which is the same in training. The given model is not changed.

    Source: Wu, He 2018 (group normalisation, 32 groups); Hsieh et al. 2020 (in place of BatchNorm in federated learning).

    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")  # the notice
    ...     print(with_group_norm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))[1].num_groups)
    8
    """
    require(isinstance(model, nn.Module), "model", "must be a torch.nn.Module", type(model).__name__)
    for name, layer in model.named_modules():
        if _keeps_statistics(layer):
            _refuse_unfit(name, layer)
    changed = copy.deepcopy(model)
    layers = {name: layer for name, layer in changed.named_modules() if _keeps_statistics(layer)}
    replaced = {id(layer): _group_norm(layer) for layer in layers.values()}
    texts = [f"{name or 'the model'} {_shown(layer)} by {_shown(replaced[id(layer)])}" for name, layer in layers.items()]
    for parent in list(changed.modules()):
        for name, child in parent._modules.items():  # a layer may have several names
            if id(child) in replaced:
                setattr(parent, name, replaced[id(child)])
    told = f"replaced {len(texts)} layer{'s' * (len(texts) > 1)}: {'; '.join(texts)}" if texts else "found no BatchNorm"
    notify(f"with_group_norm {told}.")
    return replaced.get(id(changed), changed)


def _keeps_statistics(layer: nn.Module) -> TypeGuard[_NormBase]:
    """Whether a layer normalises by statistics of the batch, or by running ones."""
    return isinstance(layer, _NormBase) and (isinstance(layer, nn.modules.batchnorm._BatchNorm) or layer.track_running_stats)


def _refuse_unfit(name: str, layer: _NormBase) -> None:
    """Refuse a layer of unknown size, and one whose examples have a single value."""
    where = f"{f'model.{name}' if name else 'model'}, a {type(layer).__name__},"
    if layer.num_features < 1:
        raise IncompatibleParts(f"{where} has no known number of channels.", "Run one batch through lazy layers first.")
    if layer.num_features == 1 and isinstance(layer, nn.BatchNorm1d):
        reason = f"{where} normalises one feature, and has nothing to group it with."
        raise IncompatibleParts(reason, "Leave the layer out, and scale this feature.")


def _group_norm(layer: _NormBase) -> nn.GroupNorm:
    """The GroupNorm in place of a normalisation layer, with its scale and shift."""
    channels, flat = layer.num_features, isinstance(layer, nn.BatchNorm1d)
    per_channel = not isinstance(layer, nn.modules.batchnorm._BatchNorm)  # InstanceNorm
    groups = channels if per_channel else 1 if flat else math.gcd(GROUPS, channels)
    group_norm = nn.GroupNorm(groups, channels, eps=layer.eps, affine=layer.affine)
    like = layer.weight if layer.affine else layer.running_mean
    if like is not None:
        group_norm.to(like)
    if layer.affine:
        with torch.no_grad():
            for parameter, given in ((group_norm.weight, layer.weight), (group_norm.bias, layer.bias)):
                parameter.copy_(given)
                parameter.requires_grad_(given.requires_grad)
    return group_norm.train(layer.training)


def _shown(layer: _NormBase | nn.GroupNorm) -> str:
    if isinstance(layer, nn.GroupNorm):
        return f"GroupNorm({layer.num_groups}, {layer.num_channels})"
    return f"{type(layer).__name__}({layer.num_features})"
