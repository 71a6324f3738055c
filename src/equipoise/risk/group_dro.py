"""Group DRO: a mixture of groups that moves towards the groups with the largest mean losses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from equipoise.core.words import shown_as_before
from equipoise.errors import is_integer, require, require_number
from equipoise.risk.groups import Groups, checked_groups, group_name
from equipoise.risk.tilted import tilted, weighed
from equipoise.types import RiskValue


@dataclass(frozen=True, eq=False)
class GroupMixture:
    """Shares q of groups that sum to 1, as logarithms (float64), and the names of the groups."""

    groups: tuple[str, ...]
    log_shares: Tensor

    def including(self, names: list[str]) -> GroupMixture:
        """The mixture with groups that were not known before: each starts with the mean of the shares."""
        new = [name for name in dict.fromkeys(names) if name not in self.groups]
        if not new:
            return self
        mean = torch.logsumexp(self.log_shares, 0) - math.log(len(self.groups))
        grown = torch.cat([self.log_shares, mean.expand(len(new))])
        return GroupMixture((*self.groups, *new), grown - torch.logsumexp(grown, 0))


@dataclass(frozen=True)
class GroupDRO:
    """The worst mixture of groups, found by exponentiated ascent: groups with large mean losses gain weight over the rounds.

    R_g = Σ_{k∈g} α_k F_k / α_g; q_g ← q_g e^{step · R_g}, normalised; client k of group g has the weight q_g α_k / α_g with the
    new q. These weights are the gradient of the value, Q · (1/step) log Σ_g (q_g/Q) e^{step · R_g} over the groups of the
    cohort, whose old shares sum to Q. A group without a client in the cohort (or without a weight) keeps its share, and the
    others divide theirs among themselves. q starts uniform over the groups. `groups` gives each client id the name of its
    group: a mapping, or a function of the id. With `step` 0 it is the mean of the groups' means. Sums of losses over groups
    are all that it needs: under secure sums (in simulations) who is in which group is public, and a group with fewer clients
    in a cohort than a sum needs counts as absent. With an `adjustment` C, R_g + C/√N_g takes the place of R_g.

    Source: Sagawa et al. 2020 (arXiv 1911.08731), section 3.3 for the adjustment. The published code counts an absent group
    as a loss of 0, so that it loses share; here it keeps it.

    >>> risk = GroupDRO(step=math.log(3), groups={"a": "north", "b": "north", "c": "south"})
    >>> losses, alpha = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.25, 0.25, 0.5])
    >>> weights = risk(losses, alpha, clients=("a", "b", "c")).weights  # shares of the groups: 1 : 3
    >>> [round(weight, 4) for weight in weights.tolist()]
    [0.125, 0.125, 0.75]
    """

    step: float  # how fast the shares move, in units of 1/loss
    groups: Groups  # the name of the group of each client id: a mapping, or a function
    adjustment: float = 0.0  # C: the shares follow R_g + C/√N_g, so that small groups count for more
    sizes: Mapping[str, int] | None = None  # N_g, the training examples of each group; needed with an adjustment

    client_form: ClassVar[str] = "groups"  # sums over groups suffice, and who is in which group is public
    unbounded: ClassVar[bool] = True
    pure: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_number("step", self.step, "[0, ∞)", "In units of 1/loss; start with 0.01.")
        object.__setattr__(self, "groups", checked_groups(self.groups))
        require_number("adjustment", self.adjustment, "[0, ∞)")
        given = isinstance(self.sizes, Mapping) and all(is_integer(size) and size > 0 for size in self.sizes.values())
        rule = "must give the number of training examples of each group where there is an adjustment"
        require(given or (self.sizes is None and not self.adjustment), "sizes", rule, self.sizes, 'E.g. {"north": 1200}.')

    def __repr__(self) -> str:
        return shown_as_before(self, ("adjustment", "sizes"))

    def group_of(self, client: str) -> str:
        """The name of the group of the client with the id `client`."""
        return group_name(self.groups, client)

    def _adjustments(self, names: list[str]) -> Tensor:
        """C/√N_g of groups, (G,)."""
        if not self.adjustment or self.sizes is None:
            return torch.zeros(len(names), dtype=torch.float64)
        unknown = [name for name in names if name not in self.sizes]
        require(not unknown, "sizes", f"must have the group {', '.join(map(repr, unknown))}", dict(self.sizes))
        return torch.tensor([self.adjustment / math.sqrt(self.sizes[name]) for name in names], dtype=torch.float64)

    def __call__(self, losses: Tensor, base_weights: Tensor, *, clients: Any = None, state: Any = None) -> RiskValue:
        """The risk of the cohort's groups, its weights (K,), and the next shares of all groups."""
        require(clients is not None, "clients", "must be given, because groups are told by client id", clients)
        names = [self.group_of(client) for client in clients]
        present = [name for name, weight in zip(names, base_weights.tolist(), strict=True) if weight > 0]
        if state is None:  # uniform over all groups where they are known, else over those of the first cohort
            known = self.groups.values() if isinstance(self.groups, Mapping) else present
            every = tuple(sorted(set(known)))
            state = GroupMixture(every, torch.full((len(every),), -math.log(len(every)), dtype=torch.float64))
        mixture = state.including(present)
        here = sorted(set(present))
        places = torch.tensor([mixture.groups.index(name) for name in here])
        member = torch.tensor([[name == group for name in names] for group in here], dtype=torch.float64)  # (G, K)
        inside = member.to(losses.device) * base_weights.double()
        inside = inside / inside.sum(1, keepdim=True)
        means = inside @ weighed(losses, base_weights).double() + self._adjustments(here).to(losses.device)
        before = mixture.log_shares[places]
        total = torch.logsumexp(before, 0)  # log Q
        value, shares = tilted(means, torch.softmax(before, 0).to(means.device), self.step)
        after = mixture.log_shares.clone()
        after[places] = total + torch.log_softmax(before + self.step * (means - means.max()).cpu(), 0)
        mass = total.exp().to(means.device)
        weights = mass * shares @ inside
        return RiskValue((mass * value).to(losses.dtype), weights.to(base_weights.dtype), GroupMixture(mixture.groups, after))
