"""GroupNorm in place of BatchNorm: what is replaced, by what, and what is said about it."""

import math

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.errors import EquipoiseNotice, IncompatibleParts


class Block(nn.Module):
    """A residual block whose two branches share one layer."""

    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = self.again = nn.BatchNorm2d(channels, eps=1e-3)

    def forward(self, x):
        return x + self.again(self.conv(self.norm(x)))


def test_layers_are_replaced_with_their_scale_and_shift_and_told():
    model = nn.Sequential(nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48), Block(48), nn.Flatten(), nn.LazyLinear(2))
    model(torch.randn(2, 3, 6, 6))
    for parameter in model[1].parameters():
        nn.init.normal_(parameter)
    model[1].requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.warns(EquipoiseNotice, match=r"replaced 2 layers: 1 BatchNorm2d\(48\) by GroupNorm\(16, 48\); 2.norm") as told:
        changed = eq.models.with_group_norm(model)
    assert len(told) == 1
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())  # the given one stays
    assert isinstance(model[1], nn.BatchNorm2d)
    assert changed[1].num_groups == math.gcd(32, 48) == 16
    assert torch.equal(changed[1].weight, model[1].weight)
    assert torch.equal(changed[1].bias, model[1].bias)
    assert not changed[1].weight.requires_grad
    assert changed[2].norm is changed[2].again
    assert changed[2].norm.eps == 1e-3
    x = torch.randn(4, 3, 6, 6)
    torch.testing.assert_close(changed(x)[:1], changed(x[:1]))  # no example depends on the others


@pytest.mark.parametrize(
    ("layer", "groups", "shape"),
    [
        (nn.BatchNorm2d(64, dtype=torch.float64), 32, (2, 64, 3, 3)),
        (nn.BatchNorm2d(7, affine=False), 1, (2, 7, 3, 3)),
        (nn.BatchNorm3d(8), 8, (2, 8, 2, 2, 2)),
        (nn.BatchNorm1d(64), 1, (2, 64)),  # 32 groups of two values would leave a sign of each
        (nn.InstanceNorm2d(6, track_running_stats=True, affine=True), 6, (2, 6, 3, 3)),
    ],
)
def test_groups(layer, groups, shape):
    with pytest.warns(EquipoiseNotice):
        changed = eq.models.with_group_norm(layer.eval())
    assert isinstance(changed, nn.GroupNorm)
    assert changed.num_groups == groups
    assert changed.affine == layer.affine
    assert not changed.training
    dtype = layer.running_mean.dtype
    assert changed(torch.randn(shape, dtype=dtype)).unique().numel() > 4


def test_instance_norm_is_the_same_in_training():
    layer = nn.InstanceNorm2d(3, track_running_stats=True, affine=True)
    nn.init.normal_(layer.weight)
    x = torch.randn(2, 3, 4, 4)
    with pytest.warns(EquipoiseNotice):
        torch.testing.assert_close(eq.models.with_group_norm(layer)(x), layer(x))


def test_what_cannot_be_replaced_is_refused():
    with pytest.raises(IncompatibleParts, match="normalises one feature"):
        eq.models.with_group_norm(nn.Sequential(nn.BatchNorm1d(1)))
    with pytest.raises(IncompatibleParts, match="Run one batch through lazy layers"):
        eq.models.with_group_norm(nn.LazyBatchNorm2d())
    with pytest.warns(EquipoiseNotice, match="found no BatchNorm"):
        eq.models.with_group_norm(nn.Linear(2, 2))
