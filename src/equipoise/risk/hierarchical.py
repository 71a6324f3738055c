"""Tilted risk on two levels: clients within groups, and groups among each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from equipoise.errors import require, require_number
from equipoise.risk.groups import Groups, checked_groups, group_name
from equipoise.risk.tilted import tilted
from equipoise.types import RiskValue


def hierarchical(
    losses: Tensor, base_weights: Tensor, names: list[str], tilt: float, inner_tilt: float
) -> tuple[Tensor, Tensor]:
    """(1/t) log Σ_g α_g e^{t R_g} with R_g = (1/τ) log Σ_{k∈g} (α_k/α_g) e^{τ F_k}, and its gradient; both float64.

    A client's weight is its group's weight among the groups times its own within the group.
    """
    places: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        places.setdefault(name, []).append(place)
    members = [torch.tensor(group, device=losses.device) for group in places.values()]
    members = [group for group in members if float(base_weights[group].sum()) > 0]
    inside = [tilted(losses[group], base_weights[group], inner_tilt) for group in members]
    masses = torch.stack([base_weights[group].double().sum() for group in members])
    value, shares = tilted(torch.stack([risk for risk, _ in inside]), masses, tilt)
    weights = torch.zeros_like(losses, dtype=torch.float64)
    for group, share, (_, within) in zip(members, shares, inside, strict=True):
        weights[group] = share * within
    return value, weights


@dataclass(frozen=True)
class HierarchicalTilt:
    """A tilted risk of groups whose own risks are tilted: e.g. fair between groups and robust within them.

    (1/t) log Σ_g α_g e^{t R_g} over groups g of mass α_g, with `tilt` t, and R_g the tilted risk of the clients in g with
    `inner_tilt` τ. `groups` gives each client id the name of its group: a mapping, or a function of the id. With τ = t it is
    Tilted(t), with τ = 0 the tilted risk of the groups' means.

    Source: Li 2023 (thesis), section 7.6, (7.82)–(7.85), with base weights for the sizes.

    >>> risk = HierarchicalTilt({"a": "north", "b": "north", "c": "south"}, tilt=1.0, inner_tilt=0.0)
    >>> losses, alpha = torch.tensor([1.0, 4.0, 6.0]).log(), torch.tensor([0.25, 0.25, 0.5])
    >>> given = risk(losses, alpha, clients=("a", "b", "c"))  # means of the groups: log 2 and log 6
    >>> round(float(given.value.exp()), 4), [round(weight, 4) for weight in given.weights.tolist()]  # ½ · 2 + ½ · 6
    (4.0, [0.125, 0.125, 0.75])
    """

    groups: Groups  # the name of the group of each client id: a mapping, or a function
    tilt: float = 1.0  # t, between groups
    inner_tilt: float = 0.0  # τ, within groups

    pure: ClassVar[bool] = True
    unbounded: ClassVar[bool] = True
    keeps_everyone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("tilt", "inner_tilt"):
            fix = "Positive leans towards large losses, negative away from them; 0 is the mean."
            require_number(name, getattr(self, name), "(-∞, ∞)", fix)
        object.__setattr__(self, "groups", checked_groups(self.groups))

    def group_of(self, client: str) -> str:
        """The name of the group of the client with the id `client`."""
        return group_name(self.groups, client)

    def __call__(self, losses: Tensor, base_weights: Tensor, *, clients: Any = None, state: Any = None) -> RiskValue:
        """The tilted risk of the groups' tilted risks, and its weights (K,)."""
        require(clients is not None, "clients", "must be given, because groups are told by client id", clients)
        names = [self.group_of(client) for client in clients]
        value, weights = hierarchical(losses, base_weights, names, self.tilt, self.inner_tilt)
        return RiskValue(value.to(losses.dtype), weights.to(base_weights.dtype), state)
