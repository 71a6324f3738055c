"""Privacy at work in a run: what each round releases, with which noise, and what it has cost.

All releases of a round come from one cohort and are one event for the accountant (see privacy.accounting). In order: a private
quantile (Δ-FL) or the sum of the clients' weights (Tilted, QFair); the sum of clipped updates; the count for a clip bound that
adapts. Denominators are fixed in advance, nothing is divided by what came, and an empty cohort still releases noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from equipoise.aggregators import NormClip, WeightedMean
from equipoise.core import rng
from equipoise.core.update_checks import marked, usable
from equipoise.errors import EquipoiseError, InvalidParameter, require
from equipoise.privacy import accounting, releases
from equipoise.privacy.discrete_gaussian import concentrated_epsilon, sample_discrete_gaussian
from equipoise.privacy.mechanism import DifferentialPrivacy, GaussianMechanism
from equipoise.privacy.private_quantile import ENOUGH_NOISE, Adjacency, PrivateQuantile
from equipoise.privacy.random_source import RandomSource, Seeded, SystemSource
from equipoise.privacy.secure_sum import SimulatedSecureSum, quantise, required_modulus, rounded_norm_bound
from equipoise.risk import Superquantile
from equipoise.sampling import Full, Poisson
from equipoise.types import ClientRisk, Cohort, Engine, LocalSolver, LocalWork, RiskValue

if TYPE_CHECKING:
    from equipoise.algorithm import Algorithm
    from equipoise.round import Plan

_ROUNDING_FAILURE = 1e-6  # the chance that a client rounds an update again
_FINE = 16.0  # grid steps per clip bound and √D, unless a step is given: rounding then adds 0.1 % to the sensitivity


@dataclass(frozen=True, eq=False)
class PrivateState:
    """What privacy carries from round to round: the clip bound, and in how many rounds each client took part (n,)."""

    clip: float
    participations: Tensor


@dataclass(frozen=True)
class Calibration:
    """The noise multipliers of a run's releases, each noise over sensitivity; the whole is what they fold to."""

    whole: float
    update: float
    first: float | None = None  # of the quantile, or of the sum of weights
    count: float | None = None  # of the updates within an adaptive clip bound


class PrivateRun:
    """A privacy mechanism in one run with so many clients, so many of them expected in a round, and so many rounds."""

    def __init__(
        self,
        privacy: DifferentialPrivacy | GaussianMechanism,
        algorithm: Algorithm,
        *,
        clients: int,
        clients_per_round: int,
        rounds: int,
        dimension: int,
        seed: int,
    ) -> None:
        self.privacy = privacy.as_budget() if isinstance(privacy, GaussianMechanism) else privacy
        self.risk, self.sampler = algorithm.risk, algorithm.sampler or Poisson()
        self.clients, self.expected, self.rounds = clients, clients_per_round, rounds
        self.dimension, self.seed = dimension, seed
        fixed = not isinstance(self.sampler, Poisson | Full)
        if isinstance(self.sampler, Full):
            self.sampling: releases.Sampling = releases.NoSampling()
        elif fixed:
            self.sampling = releases.FixedSampling(clients_per_round, clients)
        else:
            self.sampling = releases.PoissonSampling(clients_per_round / clients)
        self.change = 2.0 if fixed else 1.0  # replacing a client moves a sum twice as far as adding or removing one
        self.fewest = self._fewest()
        self.shares = max(self.expected, self.fewest)  # of noise in a sum, whoever is there: their number must tell nothing
        self.calibration = self._calibrate()
        self.quantile = self._calibrated_quantile()

    # -------------------------------------------------------------------------------------------------------- before the run

    def _fewest(self) -> int:
        """How many shares of noise must suffice; all of them where the server adds what is missing and is trusted to."""
        poisson = isinstance(self.sampler, Poisson)
        given, most = self.privacy.fewest, self.clients if poisson else self.expected
        if given is None:
            return max(1, self.expected // 2) if poisson and self.privacy.noise == "distributed" else self.expected
        if given > most:
            raise InvalidParameter("fewest", f"must not exceed the {most} clients that a round may have", given)
        return given

    def _calibrate(self) -> Calibration:
        whole = self.privacy.noise_multiplier
        if whole is None:
            if self.rounds == 0:
                return Calibration(math.inf, math.inf)
            whole = accounting.noise_for(
                float(self.privacy.epsilon or 0),
                self.privacy.delta,
                rounds=self.rounds,
                method=self.privacy.method,
                **self._rates(),
            )
        count, rest = None, whole
        if self.privacy.clip_rule is not None:
            count, rest = releases.split(whole, self.privacy.clip_rule.ratio)
        given = getattr(self.risk, "quantile", None)
        if isinstance(given, PrivateQuantile) and given.sigma is not None:
            first = given.multiplier(self.fewest, adjacency=self._adjacency)
            if first == 0 or rest == 0:  # no noise at all is for trying things out
                none = self.privacy.epsilon is not None and rest > 0
                require(not none, "sigma", "of the private quantile must be positive under a budget", given.sigma)
                return Calibration(whole, rest, first, count)
            rule = f"of the private quantile must be at least {ENOUGH_NOISE:g}/√{self.fewest}, or it is not as good as Gaussian"
            enough = math.sqrt(self.fewest) * float(given.sigma) >= ENOUGH_NOISE
            require(enough, "sigma", rule, given.sigma, "Raise sigma and scale together: the cost stays.")
            return Calibration(whole, releases.remaining(rest, first), first, count)
        if self._releases_first:
            first, update = releases.split(rest, self.privacy.quantile_ratio)
            return Calibration(whole, update, first, count)
        return Calibration(whole, rest, None, count)

    def _rates(self) -> dict[str, Any]:
        if isinstance(self.sampling, releases.PoissonSampling):
            return {"sampling_rate": self.sampling.rate}
        if isinstance(self.sampling, releases.FixedSampling):
            return {"cohort": self.sampling.cohort, "population": self.sampling.population}
        return {}

    @property
    def _releases_first(self) -> bool:
        return bool(getattr(self.risk, "needs_losses", True))

    def _calibrated_quantile(self) -> PrivateQuantile | None:
        given = getattr(self.risk, "quantile", None)
        if not isinstance(given, PrivateQuantile) or given.sigma is not None or self.calibration.first is None:
            return given if isinstance(given, PrivateQuantile) else None
        if self.calibration.first in (0.0, math.inf):
            return replace(given, sigma=0.0, scale=1)
        if given.bins <= self._most:  # `calibrated` says so itself beyond that
            given.check_cohort(self.expected)
        return given.calibrated(self.calibration.first, self.fewest, most=self._most, adjacency=self._adjacency)

    @property
    def _adjacency(self) -> Adjacency:
        return "replace_one" if self.change == 2 else "add_remove"

    @property
    def _most(self) -> int:
        """The most clients that a round may have."""
        return self.clients if isinstance(self.sampler, Poisson) else self.expected

    @cached_property
    def grid(self) -> Grid:
        """How updates are rounded and how much noise each client adds, for distributed noise."""
        clip, z = self.privacy.clip, self.calibration.update
        fine = _FINE * math.sqrt(self.dimension)
        if z > 0:  # and never so coarse that the noise is no longer as good as Gaussian
            fine = max(fine, max(ENOUGH_NOISE, 2 * math.sqrt(self.fewest)) / (z * self.change))
        step = self.privacy.step or clip / fine
        bound = rounded_norm_bound(clip, step, self.dimension, failure=_ROUNDING_FAILURE)
        sigma = z * self.change * bound / math.sqrt(self.fewest)
        if z > 0:
            if math.sqrt(self.fewest) * sigma < ENOUGH_NOISE:
                raise InvalidParameter(
                    "step", f"must be so small that √{self.fewest} shares of noise are {ENOUGH_NOISE:g} steps wide", step
                )
            start, excess = sigma, 1e-15
            while 1 / concentrated_epsilon(self.change * bound, sigma, self.fewest, self.dimension) < z:
                # What adding discrete shares costs more than one Gaussian: to the safe side.
                sigma, excess = start * (1 + excess), 2 * excess
        return Grid(step, bound, sigma, required_modulus(clip, step, self._most, sigma=sigma, dimension=self.dimension))

    @cached_property
    def accountant(self) -> accounting.Accountant:
        found = self.calibration
        named = {"quantile or weights": found.first, "update": found.update, "count": found.count}
        noisy = tuple(releases.Release(name, z) for name, z in named.items() if z is not None)
        horizon = self.rounds if self.rounds >= 1 else None
        event = releases.CohortEvent(noisy, self.sampling)
        return accounting.Accountant(event, self.privacy.delta, method=self.privacy.method, horizon=horizon)

    @cached_property
    def rounds_allowed(self) -> int:
        """How many rounds the budget allows."""
        if self.privacy.epsilon is None or self.privacy.noise_multiplier is None or self.rounds == 0:
            return self.rounds  # without a budget all, and a calibrated run stays within it by construction
        return self.accountant.rounds_within(self.privacy.epsilon, at_most=self.rounds)

    def describe(self) -> str:
        """The noise of this run, for its checkpoints: a run must go on with the noise that it began with."""
        return f"{self.privacy!r} with {self.calibration!r}, {self.quantile!r}, for {self.rounds} rounds"

    # --------------------------------------------------------------------------------------------------------------- a round

    def begin(self) -> PrivateState:
        return PrivateState(float(self.privacy.clip), torch.zeros(self.clients, dtype=torch.int32))

    def source(self, purpose: str, round_index: int) -> RandomSource:
        """Random words for one purpose in one round."""
        return SystemSource() if self.privacy.source == "system" else Seeded(self.seed, purpose, round_index)

    def gaussian(self, purpose: str, round_index: int, count: int) -> Tensor:
        """Standard normal numbers (count,) float64 for one purpose in one round."""
        if self.privacy.source == "system":  # every bit of it, not a generator started from a few
            uniform = ((SystemSource().words(count) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
            drawn: Tensor = torch.special.ndtri(torch.from_numpy(uniform))
            return drawn
        key = rng.stream_key(self.seed, f"private noise: {purpose}", round_index)
        return torch.from_numpy(np.random.Generator(np.random.Philox(key=key)).standard_normal(count))

    def weigh(self, cohort: Cohort, losses: Tensor | None, state: Any) -> tuple[RiskValue, float]:
        """The clients' weights, at most 1 each, found by each client alone; and the number that their sum is divided by."""
        ones = torch.ones(len(cohort), dtype=torch.float64)
        nothing = torch.tensor(float("nan"))
        if losses is None:
            return RiskValue(nothing, ones, state), self.workers
        losses = losses.double().nan_to_num(nan=math.inf)  # counts as the bound: to stop here would tell on the client
        if isinstance(self.risk, Superquantile):
            return self._by_quantile(self.risk, cohort, losses, ones), self.workers
        weights = client_weights(self.risk, losses, ones, float(self.privacy.loss_bound or 0))
        return RiskValue(mean_of(losses, weights), weights, state), max(self._noisy_sum(weights, cohort.round), 1.0)

    @property
    def workers(self) -> float:
        """How many clients are expected to work in a round: fixed in advance."""
        return (self.risk.tail if isinstance(self.risk, Superquantile) else 1.0) * self.expected

    def _noisy_sum(self, weights: Tensor, round_index: int) -> float:
        """The sum of weights in [0, 1] with noise. A client moves it by 1, also one that is replaced."""
        z = float(self.calibration.first or 0)
        if z == 0 or self.privacy.noise == "central":
            return float(weights.sum()) + (z * float(self.gaussian("weights", round_index, 1)) if z else 0.0)
        scale = math.ceil(max(ENOUGH_NOISE, 2 * math.sqrt(self.fewest)) / z)  # so fine that σ ≥ 2, as for the quantile
        sigma = z * scale / math.sqrt(self.fewest) * (1 + 1e-9)
        modulus = required_modulus(1.0, 1 / scale, self._most, sigma=sigma)
        rounding, adding = self.source("weights rounding", round_index), self.source("weight shares", round_index)
        whole = quantise(weights.unsqueeze(1), step=1 / scale, source=rounding, norm_bound=scale)
        noise = sample_discrete_gaussian(Grid(1 / scale, scale, sigma, modulus).variance, (self.shares, 1), source=adding)
        return float(SimulatedSecureSum(modulus).sum(torch.cat([whole, noise]))) / scale

    def _by_quantile(self, risk: Superquantile, cohort: Cohort, losses: Tensor, ones: Tensor) -> RiskValue:
        assert self.quantile is not None  # noqa: S101 — the rules refuse a superquantile without a private one
        known = None if isinstance(self.sampler, Poisson) else self.expected
        release = self.quantile.at(self.source("quantile", cohort.round), clients=known, shares=self.shares)
        clipped = losses.clamp(0.0, self.quantile.bound)
        kept = risk.client_weight(clipped, ones, release(clipped, ones, risk.tail))
        return RiskValue(mean_of(losses, kept), kept)

    def combine(
        self, state: PrivateState, params: Tensor, engine: Engine, solver: LocalSolver, plan: Plan, sent: Tensor | None
    ) -> tuple[Tensor, PrivateState, LocalWork | None]:
        """The noisy sum of clipped updates over its denominator (D,), and the next clip bound."""
        distributed = self.privacy.noise == "distributed"
        clip = state.clip
        work: LocalWork | None = None
        total = torch.zeros_like(params)
        if len(plan.workers) or distributed:
            total, work = (self._distributed if distributed else self._central)(clip, params, engine, solver, plan, sent)
        if not distributed and self.calibration.update > 0:
            noise = self.gaussian("update", plan.cohort.round, len(params)).to(params)
            total = total + noise * (self.calibration.update * self.change * clip / plan.denominator)
        participations = state.participations.clone()
        participations[plan.cohort.clients] += 1
        return total, PrivateState(self._next_clip(clip, plan, work), participations), work

    def _central(
        self, clip: float, params: Tensor, engine: Engine, solver: LocalSolver, plan: Plan, sent: Tensor | None
    ) -> tuple[Tensor, LocalWork]:
        rule = NormClip(clip) if clip < math.inf else WeightedMean()
        if sent is None:
            work = engine.summed_update(params, plan.workers, solver, plan.weights, rule)
            return work.update, work
        work = as_work(sent, params)
        good = torch.isfinite(work.sq_norms)
        return rule(sent[good.to(sent.device)], plan.weights[good])[0], work

    def _distributed(
        self, clip: float, params: Tensor, engine: Engine, solver: LocalSolver, plan: Plan, sent: Tensor | None
    ) -> tuple[Tensor, LocalWork | None]:
        """Each client clips, rounds and adds its share of noise; only the sum is seen."""
        grid, index = self.grid, plan.cohort.round
        rows = torch.zeros(len(plan.cohort), len(params), dtype=torch.float64)
        work = None
        if len(plan.workers):
            work = engine.updates(params, plan.workers, solver) if sent is None else as_work(sent, params)
            number = {client: place for place, client in enumerate(plan.cohort.clients.tolist())}
            places = torch.tensor([number[client] for client in plan.workers.clients.tolist()])
            good = torch.isfinite(work.sq_norms)
            norms = work.sq_norms.sqrt()
            shrink = torch.where(good, plan.weights * plan.denominator * (clip / norms.clamp(min=1e-300)).clamp(max=1.0), 0.0)
            rows[places] = work.update.double().cpu().nan_to_num(0.0, 0.0, 0.0) * shrink.unsqueeze(1)
        whole = quantise(
            rows, step=grid.step, source=self.source("rounding", index), norm_bound=grid.norm_bound, modulus=grid.modulus
        )
        noise, secure = self.source("update shares", index), SimulatedSecureSum(grid.modulus)
        total = torch.zeros(len(params), dtype=torch.int64)
        for k in range(max(len(rows), self.shares)):  # share by share: all of them at once would be many times the model
            own = whole[k] if k < len(whole) else torch.zeros_like(total)
            if k < self.shares and grid.sigma > 0:
                own = own + sample_discrete_gaussian(grid.variance, len(params), source=noise)
            total = secure.sum(torch.stack([total, own]))
        return (total.double() * (grid.step / plan.denominator)).to(params), work

    def _next_clip(self, clip: float, plan: Plan, work: LocalWork | None) -> float:
        rule = self.privacy.clip_rule
        if rule is None:
            return clip
        within = (work.sq_norms.sqrt() <= clip).double() if work is not None else torch.zeros(0, dtype=torch.float64)
        noise = float(self.gaussian("count", plan.cohort.round, 1)) * float(self.calibration.count or 0) * self.change / 2
        count = float((within - 0.5).sum()) + noise  # centred, so that a client moves it by ½ at most
        return rule.next_bound(clip, count / self.workers + 0.5)

    # --------------------------------------------------------------------------------------------------------- what was spent

    def epsilon_after(self, rounds: int) -> float:
        """ε after so many rounds, for whoever receives the models."""
        return self.accountant.epsilon_after(rounds)

    def spent(self, state: PrivateState, rounds: int) -> accounting.Spent:
        """What the run has spent."""
        spent = self.accountant.spent(rounds, participations=int(state.participations.max()))
        discrete = self.privacy.noise == "distributed" or self.quantile is not None
        return replace(spent, seeded=self.privacy.source == "seeded", discrete=discrete)


@dataclass(frozen=True)
class Grid:
    """Updates in whole numbers of `step`: their largest norm in steps, each client's noise, and the modulus of the sum."""

    step: float
    norm_bound: float
    sigma: float
    modulus: int

    @property
    def variance(self) -> Any:
        """σ² as a rational with a small denominator, rounded up."""
        from fractions import Fraction

        return Fraction(math.ceil(self.sigma**2 * 1024), 1024)


def client_weights(risk: ClientRisk, losses: Tensor, base_weights: Tensor, public: Any) -> Tensor:
    """What each client finds alone as its weight, (K,) float64."""
    rule = getattr(risk, "client_weight", None)
    if rule is None:
        raise EquipoiseError(f"{risk!r} has no form in which clients find their weights alone.")
    weights: Tensor = rule(losses, base_weights, public)
    return weights.double()


def mean_of(losses: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean of losses, NaN without any: for the report, which no noise covers."""
    return (weights @ losses.double()) / weights.sum() if bool(weights.sum() > 0) else torch.tensor(float("nan"))


def as_work(sent: Tensor, params: Tensor) -> LocalWork:
    """Updates (K, D) that clients made in another way than by the solver's work, as local work."""
    sq_norms = sent.double().square().sum(1).cpu()
    losses = torch.zeros_like(sq_norms)
    return LocalWork(sent, marked(sq_norms, usable(sq_norms, losses, params)), losses)
