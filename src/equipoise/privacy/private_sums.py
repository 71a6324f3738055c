"""Differential privacy in a simulated round: weights that clients find alone, and noisy sums of their clipped updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from equipoise.aggregators import NormClip, WeightedMean
from equipoise.core.abilities import is_of_user, solver_traits
from equipoise.errors import EquipoiseError, require_number
from equipoise.privacy.discrete_gaussian import sample_discrete_gaussian
from equipoise.privacy.noise_plan import Grid, NoisePlan
from equipoise.privacy.private_quantile import ENOUGH_NOISE
from equipoise.privacy.secure_sum import SimulatedSecureSum, quantise, required_modulus
from equipoise.types import Cohort, LocalWork, RiskTraits
from equipoise.types.round_contracts import UNKNOWN, Fold, Kept, Stage, View, Weights


@dataclass(frozen=True, eq=False)
class PrivateSums(Stage):
    """The private weights and sums of a simulated run."""

    noise: NoisePlan

    name: ClassVar[str] = "privacy"
    place: ClassVar[str] = "noise"

    def rule(self, view: View) -> Any:
        """A solver whose rows follow what clients send knows by how much it is clipped."""
        clipped = solver_traits(view.rule).with_sent_clip
        return None if clipped is None else clipped(view.state.privacy.clip)

    def weights(self, view: View) -> Weights:
        """The clients' weights, at most 1 each, found by each client alone; and the number that their sum is divided by."""
        ones, index, losses = torch.ones(len(view.cohort), dtype=torch.float64), view.cohort.round, view.losses
        if losses is None:
            return Weights(UNKNOWN, ones, self.noise.workers)
        losses = losses.double().nan_to_num(nan=math.inf)  # counts as the bound: to stop here would tell on the client
        traits = self.noise.algorithm.traits.risk
        if traits.client_form == "filter":
            return self._by_quantile(traits, index, losses, ones)
        weights = client_weights(traits, losses, ones, float(self.noise.privacy.loss_bound or 0))
        total = self._first(index, lambda: self.noisy_sum(weights, index))
        if math.isnan(total):  # the round is over: nobody works
            return Weights(UNKNOWN, torch.zeros_like(ones), self.noise.workers)
        return Weights(mean_loss(losses, weights), weights, max(total, 1.0))

    def _first(self, round_index: int, release: Callable[[], float]) -> float:
        """The first release of a round, which the ledger knows of before it is made; NaN if it was begun and is not known."""
        purpose = self.noise.first
        known = self.noise.book.value(round_index, purpose)
        if known is not None:
            return float(known)
        if not self.noise.begin_release(round_index, purpose):
            return math.nan
        value = release()
        self.noise.book.end(round_index, purpose, value)
        return value

    def noisy_sum(self, weights: Tensor, round_index: int) -> float:
        """The sum of weights in [0, 1] with noise. A client moves it by 1, also one that is replaced."""
        z = float(self.noise.calibration.first or 0)
        if z == 0 or self.noise.privacy.noise == "central":
            return float(weights.sum()) + (z * float(self.noise.gaussian("weights", round_index, 1)) if z else 0.0)
        scale = math.ceil(max(ENOUGH_NOISE, 2 * math.sqrt(self.noise.fewest)) / z)  # so fine that σ ≥ 2, as for the quantile
        sigma = z * scale / math.sqrt(self.noise.fewest) * (1 + 1e-9)
        modulus = required_modulus(1.0, 1 / scale, self.noise.most, sigma=sigma)
        rounding, adding = self.noise.source("weights rounding", round_index), self.noise.source("weight shares", round_index)
        whole = quantise(weights.unsqueeze(1), step=1 / scale, source=rounding, norm_bound=scale)
        noise = sample_discrete_gaussian(Grid(1 / scale, scale, sigma, modulus).variance, (self.noise.shares, 1), source=adding)
        return float(SimulatedSecureSum(modulus).sum(torch.cat([whole, noise]))) / scale

    def _by_quantile(self, risk: RiskTraits, index: int, losses: Tensor, ones: Tensor) -> Weights:
        if self.noise.quantile is None:
            raise EquipoiseError("The run has no private quantile.")
        known = None if self.noise.poisson else self.noise.expected
        release = self.noise.quantile.at(self.noise.source("quantile", index), clients=known, shares=self.noise.shares)
        clipped = losses.clamp(0.0, self.noise.quantile.bound)
        eta = self._first(index, lambda: float(release(clipped, ones, risk.tail)))
        if math.isnan(eta):  # the round is over: nobody works
            return Weights(UNKNOWN, torch.zeros_like(ones), self.noise.workers)
        kept = client_weights(risk, clipped, ones, eta)
        return Weights(mean_loss(losses, kept), kept, self.noise.workers)

    def fold(self, view: View) -> Fold | None:
        """Clipped updates: added up as they come, or rows that each client rounds and adds its share of noise to."""
        index, clip = view.cohort.round, view.state.privacy.clip
        if self.noise.is_lost(index):
            return None
        if self.noise.distributed:
            self.noise.begin_release(index, "update")
            return Fold(None)
        return Fold(NormClip(clip) if clip < math.inf else WeightedMean())

    def answer(self, view: View) -> LocalWork | None:
        """Of noise that clients add, the sum."""
        if view.fold is None or not self.noise.distributed:
            return None
        params, work = view.state.params, view.answer
        total = self._summed(view.state.privacy.clip, params, view.cohort, view.workers, work, float(view.weights.over))
        unseen = torch.zeros(0, dtype=torch.float64)
        return LocalWork(total, unseen, unseen) if work is None else replace(work, update=total)

    def total(self, view: View) -> Kept:
        """The noisy sum over its denominator (D,), and the next clip bound."""
        index, noise, params, private = view.cohort.round, self.noise, view.state.params, view.state.privacy
        clip = private.clip
        if view.fold is None:  # the round's sum was lost: the model stays
            return Kept(None, private.after(clip=clip))
        total = torch.zeros_like(params) if view.total is None else view.total
        for purpose in noise.planned if not noise.distributed else ():  # the server has the updates, and now draws its noise
            if purpose != noise.first:
                noise.begin_release(index, purpose)
        if not noise.distributed and noise.calibration.update > 0:
            scale = noise.calibration.update * noise.change * clip / float(view.weights.over)
            drawn, private = noise.update_noise(private, index, len(params))
            total = (total.double() + drawn.to(params.device) * scale).to(params)  # rounded once, with its noise
        return Kept(total, private.after(clip=self._next_clip(clip, index, view.answer)))

    def tell(self, view: View) -> Mapping[str, Any]:
        """What was spent; a round whose sum was lost has trained nobody."""
        lost: dict[str, Any] = {"trained": 0} if view.fold is None else {}
        return {"epsilon": view.run.protection.epsilon_after(view.state.round + 1), **lost}

    def _summed(
        self, clip: float, params: Tensor, cohort: Cohort, workers: Cohort, work: LocalWork | None, denominator: float
    ) -> Tensor:
        """Each client clips, rounds and adds its share of noise; only the sum is seen."""
        grid, index = self.noise.grid, cohort.round
        rows = torch.zeros(len(cohort), len(params), dtype=torch.float64)
        if work is not None:
            number = {client: place for place, client in enumerate(cohort.clients.tolist())}
            places = torch.tensor([number[client] for client in workers.clients.tolist()])
            good, norms = torch.isfinite(work.sq_norms), work.sq_norms.sqrt()
            shrink = torch.where(good, workers.shares * denominator * (clip / norms.clamp(min=1e-300)).clamp(max=1.0), 0.0)
            rows[places] = work.update.double().cpu().nan_to_num(0.0, 0.0, 0.0) * shrink.unsqueeze(1)
        rounding = self.noise.source("rounding", index)
        whole = quantise(rows, step=grid.step, source=rounding, norm_bound=grid.norm_bound, modulus=grid.modulus)
        noise, secure = self.noise.source("update shares", index), SimulatedSecureSum(grid.modulus)
        total = secure.sum(whole)
        for _ in range(self.noise.shares if grid.sigma > 0 else 0):  # all at once would be many times the model
            total = secure.add(total, sample_discrete_gaussian(grid.variance, len(params), source=noise))
        return (total.double() * (grid.step / denominator)).to(params)

    def _next_clip(self, clip: float, index: int, work: LocalWork | None) -> float:
        rule = self.noise.privacy.clip_rule
        if rule is None:
            return clip
        within = (work.sq_norms.sqrt() <= clip).double() if work is not None else torch.zeros(0, dtype=torch.float64)
        spread = float(self.noise.calibration.count or 0)
        noise = float(self.noise.gaussian("count", index, 1)) * spread * self.noise.change / 2
        count = float((within - 0.5).sum()) + noise  # centred, so that a client moves it by ½ at most
        bound = rule.next_bound(clip, count / self.noise.workers + 0.5)
        require_number("the next bound of clip_rule", bound, "(0, ∞)")  # which follows what was released alone
        return float(bound)


def client_weights(risk: RiskTraits, losses: Tensor, base_weights: Tensor, public: Any) -> Tensor:
    """What each client finds alone as its weight, (K,) float64, given what was released: between 0 and its base weight.

    The noise is made for these limits, so a weight outside of them is moved to the limit, and NaN to 0.
    """
    if risk.client_weight is None:
        raise EquipoiseError("The risk has no form in which clients find their weights alone.")
    alone = is_of_user(getattr(risk.client_weight, "__self__", risk.client_weight))  # then as each client would ask it
    parts = (torch.split(each, 1 if alone else max(1, len(each))) for each in (losses, base_weights))
    found = torch.cat([risk.client_weight(loss, base, public) for loss, base in zip(*parts, strict=True)]).double()
    return torch.minimum(found.nan_to_num(nan=0.0).clamp(min=0.0), base_weights.double())


def mean_loss(losses: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean of losses, NaN without any: for the report, which no noise covers."""
    return (weights @ losses.double()) / weights.sum() if bool(weights.sum() > 0) else torch.tensor(float("nan"))
