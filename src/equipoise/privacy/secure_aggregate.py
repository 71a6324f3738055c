"""Secure aggregation at work in a run: sums of (weight · update, weight) in integers, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from equipoise.errors import EquipoiseError, notify
from equipoise.privacy.private_sums import client_weights, mean_loss
from equipoise.privacy.random_source import Seeded
from equipoise.privacy.secure_sum import EXACT, SimulatedSecureSum, quantise
from equipoise.types import Aggregator, Cohort, LocalWork, RiskValue
from equipoise.types.round_contracts import UNKNOWN, Fold, Kept, Stage, View, Weights

if TYPE_CHECKING:
    from equipoise.algorithm import Algorithm
    from equipoise.core.task import Task
    from equipoise.privacy.mechanism import SecureAggregation


@dataclass(frozen=True, eq=False)
class SecureSumRule(Stage):
    """The weights and sums of a simulated run with secure aggregation."""

    privacy: SecureAggregation
    algorithm: Algorithm
    seed: int
    ids: Sequence[str] = ()  # of the training clients

    name: ClassVar[str] = "risk"

    def weights(self, view: View) -> Weights | Kept:
        """Weights that each client finds alone, in units of the mean base weight; their sum is found by the secure sum."""
        cohort, losses, state = view.cohort, view.losses, view.state.risk
        base = cohort.weights * len(cohort)
        if losses is None or not len(cohort):
            return Weights(UNKNOWN, base, 1.0)
        good = torch.isfinite(losses)  # others take no part, and are not named
        losses, base = torch.where(good, losses, 0.0), torch.where(good, base, 0.0)
        if not bool(good.any()):
            return Weights(UNKNOWN, base, 1.0)
        traits = self.algorithm.traits.risk
        if traits.client_form == "groups":
            risk = self._by_groups(cohort, losses, base, state)
            return Kept(Weights(risk.value, risk.weights, 1.0), risk.state)
        if traits.client_form == "filter":
            risk = self.algorithm.risk(losses, torch.where(good, cohort.weights, 0.0), state=state)
            weights = torch.where(risk.weights > 0, base, 0.0)
            if self.algorithm.traits.quantile.histogram is not None:
                kept = int((weights > 0).sum())
                weights = weights if tail_is_large_enough(kept, self.privacy.fewest, cohort.round) else torch.zeros_like(base)
            return Kept(Weights(risk.value, weights, 1.0), risk.state)
        public = None if traits.client_form == "base" else float(self.privacy.loss_bound or 0)
        weights = client_weights(traits, losses, base, public)
        return Weights(mean_loss(losses, weights), weights, 1.0)

    def _by_groups(self, cohort: Cohort, losses: Tensor, base: Tensor, state: Any) -> RiskValue:
        """The risk of the groups' mean losses, found by one secure sum over the cohort of (w · loss, w) of each group.

        Clients of a group with fewer than `fewest` of them in the cohort take no part: its sum would tell too much.
        """
        group_of = self.algorithm.traits.risk.group_of
        if group_of is None:
            raise EquipoiseError(f"{self.algorithm.risk!r} does not say which group a client is in.")
        ids = [self.ids[k] for k in cohort.clients.tolist()]
        groups = [group_of(name) for name in ids]
        names = [name for name in dict.fromkeys(groups) if groups.count(name) >= self.privacy.fewest]
        here = torch.tensor([group in names for group in groups]) & (base > 0)
        weights = torch.zeros_like(base)
        if not bool(here.any()):
            return RiskValue(torch.tensor(float("nan")), weights, state)
        member = torch.tensor([[group == name for name in names] for group in groups], dtype=torch.float64) * base.unsqueeze(1)
        rows = torch.cat([member * losses.double().unsqueeze(1), member], 1)  # (K, 2G)
        source = Seeded(self.seed, "group losses", cohort.round)
        whole = quantise(rows, step=self.privacy.step, source=source, modulus=self.privacy.modulus)
        total = SimulatedSecureSum(self.privacy.modulus).sum(whole).double() * self.privacy.step
        means = total[: len(names)] / total[len(names) :].clamp(min=self.privacy.step)
        places = [k for k, counted in enumerate(here.tolist()) if counted]
        seen = torch.stack([means[names.index(groups[k])] for k in places])
        share = cohort.weights[here] / cohort.weights[here].sum()
        risk = self.algorithm.risk(seen, share, clients=tuple(ids[k] for k in places), state=state)
        weights[here] = risk.weights.double() * len(cohort)
        return replace(risk, weights=weights)


@dataclass(frozen=True, eq=False)
class MaskedSum(Stage):
    """Σ w_k u_k / Σ w_k, both found by one secure sum; clients outside the tail send masked zeros."""

    privacy: SecureAggregation
    aggregator: Aggregator  # linear: each client applies it to its own update
    around: bool  # whether it is applied to updates minus the last total
    seed: int

    name: ClassVar[str] = "aggregator"

    def fold(self, view: View) -> Fold | None:
        """Rows; none where the sum would be over too few different clients, and stays masked."""
        different, fewest = len(set(view.cohort.clients.tolist())), self.privacy.fewest
        if different >= fewest:
            return Fold(None)
        why = f"a sum over {different} of at least {fewest} clients would say too much"
        notify(f"Round {view.cohort.round + 1} leaves the model as it is: {why}.")
        return None

    def answer(self, view: View) -> Any:
        """The mean by the secure sum, and that of carried values."""
        if view.answer is None:
            return None
        work, params, weights = view.answer, view.state.params, view.workers.shares.double()
        updates, aggregator, centre, good = work.update, self.aggregator, None, torch.isfinite(work.sq_norms)
        if self.around:
            last = view.state.aggregator
            centre = torch.zeros_like(params) if last is None else last.to(params)
            updates = updates - centre
        own = torch.stack([aggregator(u.unsqueeze(0), w.reshape(1).to(u))[0] for u, w in zip(updates, weights, strict=True)])
        rows = torch.cat([own.double().cpu().nan_to_num(0.0, 0.0, 0.0), weights.unsqueeze(1)], 1)
        rows = torch.cat([carried_rows(work, weights), rows], 1)
        room = min((self.privacy.modulus - 1) // 2 // len(view.cohort), EXACT) * self.privacy.step
        fits = good & (rows.abs().amax(1) <= room)
        rows = torch.where(fits.unsqueeze(1), rows, 0.0)
        sq_norms = torch.where(fits, work.sq_norms, torch.inf)  # the others are not in the sum
        source = Seeded(self.seed, "rounding", view.cohort.round)
        whole = quantise(rows, step=self.privacy.step, source=source, modulus=self.privacy.modulus)
        total = SimulatedSecureSum(self.privacy.modulus).sum(whole).double() * self.privacy.step
        carried, total = mean_of_sum(total, len(total) - len(params) - 1)
        mass = float(total[-1])
        mean = (total[:-1] / mass if mass > 0 else torch.zeros_like(total[:-1])).to(params)
        work = replace(work, update=mean if centre is None else mean + centre, sq_norms=sq_norms, carried=carried, mass=mass)
        return work if centre is None else Kept(work, work.update)


def carried_rows(work: LocalWork, weights: Tensor) -> Tensor:
    """What clients add to a secure sum for their carried values: (weight · moments, weight), (K, C + 1); zeros if none count.

    Without carried values (K, 0).
    """
    if work.carried is None:
        return torch.zeros(len(weights), 0, dtype=torch.float64)
    rows = weights.unsqueeze(1) * torch.cat([work.carried, torch.ones(len(weights), 1, dtype=torch.float64)], 1)
    return torch.where(torch.isfinite(rows).all(1, keepdim=True), rows, 0.0)


def secure_row_length(task: Task) -> int:
    """The numbers of a client's row in the secure sum of updates: (w · moments, w) for carried values, and (w · u, w)."""
    return task.layout.dimension + 1 + (task.carried.size + 1 if task.carried.names else 0)


def mean_of_sum(total: Tensor, carried: int) -> tuple[Tensor | None, Tensor]:
    """The mean (C,) of carried values in the first C + 1 numbers of a sum, None if none count; and the rest of the sum."""
    mass = float(total[carried - 1]) if carried else 0.0
    return (total[: carried - 1] / mass if mass > 0 else None), total[carried:]


def tail_is_large_enough(kept: int, fewest: int, round_index: int) -> bool:
    """Whether the sum of a tail of `kept` clients may be unmasked; a notice if not."""
    if kept >= fewest:
        return True
    why = f"the tail has {kept} of at least {fewest} clients by the histogram, so that its sum would say too much of them"
    notify(f"Round {round_index + 1} leaves the model as it is: {why}.")
    return False
