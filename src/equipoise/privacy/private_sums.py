"""Differential privacy in a simulated round: weights that clients find alone, and noisy sums of their clipped updates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equipoise.aggregators import NormClip, WeightedMean
from equipoise.core.abilities import solver_traits
from equipoise.core.update_checks import as_local_work
from equipoise.errors import EquipoiseError
from equipoise.privacy.discrete_gaussian import sample_discrete_gaussian
from equipoise.privacy.noise_plan import Grid, NoisePlan
from equipoise.privacy.private_quantile import ENOUGH_NOISE
from equipoise.privacy.secure_sum import SimulatedSecureSum, quantise, required_modulus
from equipoise.types import Cohort, Combined, Engine, LocalSolver, LocalWork, RiskTraits, RiskValue, ServerState

if TYPE_CHECKING:
    from equipoise.round import Plan


@dataclass(frozen=True, eq=False)
class PrivateSums:
    """The private weights and sums of a simulated run."""

    noise: NoisePlan

    def weigh(self, cohort: Cohort, losses: Tensor | None, state: Any) -> tuple[RiskValue, float]:
        """The clients' weights, at most 1 each, found by each client alone; and the number that their sum is divided by."""
        ones = torch.ones(len(cohort), dtype=torch.float64)
        nothing = torch.tensor(float("nan"))
        if losses is None:
            return RiskValue(nothing, ones, state), self.noise.workers
        losses = losses.double().nan_to_num(nan=math.inf)  # counts as the bound: to stop here would tell on the client
        traits = self.noise.algorithm.traits.risk
        if traits.client_form == "filter":
            return self._by_quantile(traits, cohort, losses, ones), self.noise.workers
        weights = client_weights(traits, losses, ones, float(self.noise.privacy.loss_bound or 0))
        total = self._first(cohort.round, lambda: self.noisy_sum(weights, cohort.round))
        if math.isnan(total):  # the round is over: nobody works
            return RiskValue(nothing, torch.zeros_like(ones), state), self.noise.workers
        return RiskValue(mean_loss(losses, weights), weights, state), max(total, 1.0)

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

    def _by_quantile(self, risk: RiskTraits, cohort: Cohort, losses: Tensor, ones: Tensor) -> RiskValue:
        assert self.noise.quantile is not None  # noqa: S101 — the rules refuse a superquantile without a private one
        known = None if self.noise.poisson else self.noise.expected
        release = self.noise.quantile.at(self.noise.source("quantile", cohort.round), clients=known, shares=self.noise.shares)
        clipped = losses.clamp(0.0, self.noise.quantile.bound)
        eta = self._first(cohort.round, lambda: float(release(clipped, ones, risk.tail)))
        if math.isnan(eta):  # the round is over: nobody works
            return RiskValue(torch.tensor(float("nan")), torch.zeros_like(ones))
        kept = client_weights(risk, clipped, ones, eta)
        return RiskValue(mean_loss(losses, kept), kept)

    def combine(self, state: ServerState, engine: Engine, solver: LocalSolver, plan: Plan, sent: Tensor | None) -> Combined:
        """The noisy sum of clipped updates over its denominator (D,), and the next clip bound."""
        distributed, index, noise = self.noise.distributed, plan.cohort.round, self.noise
        params, private, clip = state.params, state.privacy, state.privacy.clip
        work: LocalWork | None = None
        total = torch.zeros_like(params)
        weight = noise.round_weight(len(plan.cohort))
        if noise.is_lost(index):
            after = private.after(plan.cohort.clients, clip=clip, weight=weight)
            return Combined(total, None, state.aggregator, after, lost=True)
        if (clipped := solver_traits(solver).with_sent_clip) is not None:
            solver = clipped(clip)
        if distributed:
            noise.begin_release(index, "update")
            total, work = self._distributed(clip, params, engine, solver, plan, sent)
        elif len(plan.workers):
            total, work = self._central(clip, params, engine, solver, plan, sent)
        for purpose in noise.planned if not distributed else ():  # the server has the updates, and now draws its noise
            if purpose != noise.first:
                noise.begin_release(index, purpose)
        if not distributed and noise.calibration.update > 0:
            scale = noise.calibration.update * noise.change * clip / plan.denominator
            drawn, private = noise.update_noise(private, index, len(params))
            total = (total.double() + drawn.to(params.device) * scale).to(params)  # rounded once, with its noise
        after = private.after(plan.cohort.clients, clip=self._next_clip(clip, plan, work), weight=weight)
        return Combined(total, work, state.aggregator, after)

    def _central(
        self, clip: float, params: Tensor, engine: Engine, solver: LocalSolver, plan: Plan, sent: Tensor | None
    ) -> tuple[Tensor, LocalWork]:
        rule = NormClip(clip) if clip < math.inf else WeightedMean()
        if sent is None:
            work = engine.summed_update(params, plan.workers, solver, plan.weights, rule)
            return work.update, work
        work = as_local_work(sent, params)
        good = torch.isfinite(work.sq_norms)
        return rule(sent[good.to(sent.device)], plan.weights[good])[0], work

    def _distributed(
        self, clip: float, params: Tensor, engine: Engine, solver: LocalSolver, plan: Plan, sent: Tensor | None
    ) -> tuple[Tensor, LocalWork | None]:
        """Each client clips, rounds and adds its share of noise; only the sum is seen."""
        grid, index = self.noise.grid, plan.cohort.round
        rows = torch.zeros(len(plan.cohort), len(params), dtype=torch.float64)
        work = None
        if len(plan.workers):
            work = engine.updates(params, plan.workers, solver) if sent is None else as_local_work(sent, params)
            number = {client: place for place, client in enumerate(plan.cohort.clients.tolist())}
            places = torch.tensor([number[client] for client in plan.workers.clients.tolist()])
            good = torch.isfinite(work.sq_norms)
            norms = work.sq_norms.sqrt()
            shrink = torch.where(good, plan.weights * plan.denominator * (clip / norms.clamp(min=1e-300)).clamp(max=1.0), 0.0)
            rows[places] = work.update.double().cpu().nan_to_num(0.0, 0.0, 0.0) * shrink.unsqueeze(1)
        rounding = self.noise.source("rounding", index)
        whole = quantise(rows, step=grid.step, source=rounding, norm_bound=grid.norm_bound, modulus=grid.modulus)
        noise, secure = self.noise.source("update shares", index), SimulatedSecureSum(grid.modulus)
        total = secure.sum(whole)
        for _ in range(self.noise.shares if grid.sigma > 0 else 0):  # all at once would be many times the model
            total = secure.add(total, sample_discrete_gaussian(grid.variance, len(params), source=noise))
        return (total.double() * (grid.step / plan.denominator)).to(params), work

    def _next_clip(self, clip: float, plan: Plan, work: LocalWork | None) -> float:
        rule = self.noise.privacy.clip_rule
        if rule is None:
            return clip
        within = (work.sq_norms.sqrt() <= clip).double() if work is not None else torch.zeros(0, dtype=torch.float64)
        spread = float(self.noise.calibration.count or 0)
        noise = float(self.noise.gaussian("count", plan.cohort.round, 1)) * spread * self.noise.change / 2
        count = float((within - 0.5).sum()) + noise  # centred, so that a client moves it by ½ at most
        return rule.next_bound(clip, count / self.noise.workers + 0.5)


def client_weights(risk: RiskTraits, losses: Tensor, base_weights: Tensor, public: Any) -> Tensor:
    """What each client finds alone as its weight, (K,) float64, given what was released: between 0 and its base weight.

    The noise is made for these limits, so a weight outside of them is moved to the limit, and NaN to 0.
    """
    if risk.client_weight is None:
        raise EquipoiseError("The risk has no form in which clients find their weights alone.")
    found = risk.client_weight(losses, base_weights, public).double().nan_to_num(nan=0.0)
    return torch.minimum(found.clamp(min=0.0), base_weights.double())


def mean_loss(losses: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean of losses, NaN without any: for the report, which no noise covers."""
    return (weights @ losses.double()) / weights.sum() if bool(weights.sum() > 0) else torch.tensor(float("nan"))
