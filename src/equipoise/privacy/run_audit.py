"""An audit of a run's own configuration: its sampler, clipping, sums and noise, with a canary among its clients.

The rounds are those of a simulation (`PrivateSums`), of a model with few parameters. All clients but the canary send zeros, so
that what is released is the canary's contribution and the noise. Two observers attack. The public sees every round's model: the
canary is there or not (for cohorts of fixed size: it sends one update or its opposite), and chance decides when it takes part.
One who knows the cohorts sees rounds in which the canary takes part, or in which its contribution is zeroed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from equipoise.core.rng import stream_key
from equipoise.errors import InvalidParameter, require, require_integer, require_number
from equipoise.privacy.audit import AuditResult, Scores, audit, log_likelihood_ratio
from equipoise.privacy.noise_plan import NoisePlan
from equipoise.privacy.observer_table import KnownCohorts
from equipoise.privacy.private_sums import PrivateSums
from equipoise.privacy.release_book import ReleaseBook
from equipoise.privacy.releases import FixedSampling, PoissonSampling, fold
from equipoise.round import Plan
from equipoise.types import Cohort, RunSize, ServerState

if TYPE_CHECKING:
    from equipoise.algorithm import Algorithm

DIMENSION = 4  # of the model that stands in: noise is alike in every coordinate
_LONG = 10.0  # times the clip bound: what the canary sends before it is clipped
Observer = Literal["public", "cohorts known"]


@dataclass(frozen=True)
class RunAudit:
    """What an audit of a run found for one observer: what is claimed, and what was shown."""

    observer: Observer
    claimed: float
    rounds: int
    result: AuditResult

    @property
    def refuted(self) -> bool:
        """Whether the run leaks more than is claimed."""
        return self.result.exceeds(self.claimed)

    def __str__(self) -> str:
        verdict = "REFUTED: it leaks more than" if self.refuted else "not refuted: nothing found beyond"
        return f"{self.observer}, {self.rounds} rounds: {self.result}\n{verdict} ε = {self.claimed:.4g}."


def audit_algorithm(
    algorithm: Algorithm, *, clients: int, clients_per_round: int, rounds: int, audited: int = 5, runs: int = 2000,
    seed: int = 0, confidence: float = 0.95, noise_factor: float = 1.0,
) -> list[RunAudit]:  # fmt: skip
    """Attack `audited` of the rounds of a private run, `runs` times with the canary and as often without.

    With a `noise_factor` below 1 the run has so much less noise than it claims: an audit that then finds nothing is none.
    """
    for name, value in (("clients", clients), ("rounds", rounds), ("audited", audited)):
        require_integer(name, value, 1)
    require_number("noise_factor", noise_factor, "(0, ∞)")
    require(algorithm.private, "algorithm", "must be differentially private", repr(algorithm.privacy))
    size = RunSize(clients, clients_per_round, rounds, DIMENSION, seed)
    claimed = _plan_of(algorithm, size)
    if not 0 < claimed.calibration.whole < math.inf:
        raise InvalidParameter("noise_multiplier", "must be positive: without noise there is no ε to audit", 0.0)
    audited = min(audited, claimed.rounds_allowed)
    actual = claimed
    if noise_factor != 1:
        less = replace(claimed.privacy, epsilon=None, noise_multiplier=claimed.calibration.whole * noise_factor)
        actual = NoisePlan(less, replace(algorithm, privacy=less), size)
    zeroed = fold(*(z for _, z in claimed.planned.values()))
    known = KnownCohorts(zeroed, audited, claimed.shares, claimed.fewest).epsilon(claimed.privacy.delta)
    claims: dict[Observer, float] = {
        "public": claimed.accountant.exact_after(audited),
        "cohorts known": math.inf if known is None else known,
    }
    found = []
    for observer, epsilon in claims.items():
        scores = _scores(claimed, actual, audited, observer)
        result = audit(scores, delta=claimed.privacy.delta, runs=runs, seed=seed, confidence=confidence)
        found.append(RunAudit(observer, epsilon, audited, result))
    return found


def _plan_of(algorithm: Algorithm, size: RunSize) -> NoisePlan:
    """The noise of the run; seeded, so that an audit repeats."""
    protection = cast(Any, algorithm.privacy).protect(algorithm, size)
    seeded = replace(protection.noise.privacy, source="seeded")
    return NoisePlan(seeded, replace(algorithm, privacy=seeded), size)


def _scores(claimed: NoisePlan, noise: NoisePlan, rounds: int, observer: Observer) -> Scores:
    """Scores of runs of these rounds: the log likelihood ratio of what came out along the canary's direction."""
    sums, canary = PrivateSums(noise), noise.clients - 1
    alpha = torch.full((noise.clients,), 1 / noise.clients, dtype=torch.float64)
    direction = torch.full((DIMENSION,), DIMENSION**-0.5, dtype=torch.float64)
    opposite = observer == "public" and isinstance(noise.sampling, FixedSampling)
    rate = noise.sampling.rate if isinstance(noise.sampling, PoissonSampling) else noise.expected / noise.clients
    rate = 1.0 if observer != "public" else min(rate, 1.0)
    spread = claimed.calibration.update * claimed.change  # noise over the clip bound

    def one_run(present: bool, seed: int) -> float:
        noise.seed, noise.book = seed, ReleaseBook()
        state = ServerState(0, torch.zeros(DIMENSION, dtype=torch.float64), privacy=noise.begin())
        total = 0.0
        for index in range(rounds):
            cohort = noise.algorithm.drawn_by(index, alpha, clients_per_round=noise.expected, seed=seed)
            cohort = _with_canary(cohort, canary) if observer != "public" else cohort
            if not present and not opposite and observer == "public":
                cohort = cohort.take(cohort.clients != canary)
            here = (cohort.clients == canary).double()
            sign = 1.0 if present else -1.0 if opposite else 0.0
            sent = here.unsqueeze(1) * direction * (sign * _LONG * float(state.privacy.clip))
            out, clip = _one_round(sums, state, cohort, here, sent)
            along = float(out @ direction) / clip
            along = (along + 1) / 2 if opposite else along  # −1 or 1, as 0 or 1
            total += float(log_likelihood_ratio(np.array(along), spread / (2 if opposite else 1), rate))
        return total

    def scores(present: bool, runs: int, seed: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.array([one_run(present, stream_key(seed, "audit run", run) >> 1) for run in range(runs)])

    return scores


def _with_canary(cohort: Cohort, canary: int) -> Cohort:
    """The cohort with the canary in it, in the place of another client if need be."""
    if bool((cohort.clients == canary).any()):
        return cohort
    clients = cohort.clients.clone()
    if len(clients) == 0:
        one = torch.ones(1, dtype=torch.float64)
        return Cohort(cohort.round, cohort.seed, torch.tensor([canary]), one, one)
    clients[-1] = canary
    return replace(cohort, clients=clients)


def _one_round(sums: PrivateSums, state: ServerState, cohort: Cohort, here: Tensor, sent: Tensor) -> tuple[Tensor, float]:
    """The noisy sum of a round (D,), in units before its denominator, and the clip bound that it was made with.

    The canary's loss is as large as can be, and those of others 0: it is in every tail.
    """
    noise = sums.noise
    asks = noise.algorithm.traits.risk.needs_losses
    risk, denominator = sums.weigh(cohort, here * 1e6 if asks else None, None)
    fixed = float(denominator or 1.0)
    workers = torch.ones(len(cohort), dtype=torch.bool)
    plan = Plan(cohort, None, risk, cohort.take(workers), risk.weights.double() / fixed, None, 0, fixed)
    combined = sums.combine(state, cast(Any, None), cast(Any, None), plan, sent)
    return combined.total.double() * fixed, float(state.privacy.clip)
