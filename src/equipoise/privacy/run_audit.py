"""An audit of a run's own configuration: canaries in the place of its clients, and an attack for each observer who has an ε.

The rounds are those of the run: its sampler, risk, aggregator, clipping, sums and noise (`privacy.canaries`). The public sees
every round's model: chance decides when a canary takes part, and whether it is there at all is the question (for cohorts of
fixed size: whether it sends one update or its opposite). A node and the server know the cohorts, or count as if they did, and
the noise that they have added: the question is whether a canary's contribution was zeroed. Releases that come before the
updates, the histogram of losses and the sum of weights, are attacked by themselves.

An audit that cannot fail is none. Each is therefore done a second time with half of the noise that is claimed, and says
nothing unless that is found out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from equipoise.core.rng import stream_key
from equipoise.errors import IncompatibleParts, InvalidParameter, require, require_integer, require_number
from equipoise.privacy.audit import log_likelihood_ratio
from equipoise.privacy.canaries import MOST_CANARIES, CanaryRounds
from equipoise.privacy.claim_audit import ClaimAudit, audit_claim
from equipoise.privacy.ledger import with_fewer_shares
from equipoise.privacy.noise_plan import NoisePlan
from equipoise.privacy.privacy_profile import Counted, unsampled_event
from equipoise.privacy.private_quantile import client_contributions
from equipoise.privacy.private_sums import PrivateSums
from equipoise.privacy.release_book import ReleaseBook
from equipoise.privacy.releases import CohortEvent, FixedSampling, Release, fold
from equipoise.types import RunSize

if TYPE_CHECKING:
    from equipoise.algorithm import Algorithm

Array = NDArray[np.float64]
Trials = tuple[Array, Array]  # scores with the canary, and without
HALF = 0.5  # of the noise, in the control
_MOST_TRIALS = 8  # as many times the trials asked for, until half of the noise is found out
_STRENGTH = 1.5  # standard deviations by which the attacked rounds should move a score: enough to tell, not too far out


@dataclass(frozen=True)
class RunAudit:
    """What an audit found for one observer, and whether it would have found half of the noise (`control`)."""

    observer: str
    rounds: int  # that were attacked; of one who knows the cohorts, those that a canary took part in
    result: ClaimAudit
    control: ClaimAudit | None = None

    @property
    def claimed(self) -> float:
        """The ε that is claimed for the rounds that were attacked."""
        return self.result.claimed

    @property
    def refuted(self) -> bool:
        """Whether the run leaks more than is claimed."""
        return self.result.refuted

    @property
    def conclusive(self) -> bool:
        """Whether the audit can fail: half of the noise is found out."""
        return self.refuted or (self.control is not None and self.control.refuted)

    def __str__(self) -> str:
        rounds = f"{self.rounds} round{'s' * (self.rounds != 1)}"
        verdict = "REFUTED" if self.refuted else "not refuted" if self.conclusive else "says nothing"
        lines = [f"{self.observer}, {rounds}: {verdict}; {self.result}"]
        if self.control is not None:
            found = "is found out" if self.control.refuted else "is NOT found out: give more trials or rounds"
            lines.append(f"  with half of the noise ε ≥ {self.control.shown:.4g} is shown, which {found}")
        return "\n".join(lines)


def audit_algorithm(
    algorithm: Algorithm, *, clients: int, clients_per_round: int, rounds: int, audited: int | None = None,
    trials: int = 2000, seed: int = 0, confidence: float = 0.95, noise_factor: float = 1.0, control: bool = True,
    only: Container[str] | None = None,
) -> list[RunAudit]:  # fmt: skip
    """Attack a private run for each observer with an ε, by `trials` canaries that are there and as many that are not.

    `audited` rounds are attacked (None: as many as it takes to tell, at most 60). With a `noise_factor` below 1 the run has
    so much less noise than it claims. `control` repeats each attack with half of the claimed noise; where that is not found
    out, both are done again with twice as many trials, up to eight times `trials`. `only` names the attacks
    that are done: "public", "node", "server", and "quantile alone" or "weights alone".
    """
    for name, value in (("clients", clients), ("rounds", rounds), ("trials", trials)):
        require_integer(name, value, 1)
    require_integer("audited", audited, 1, none="as many rounds as it takes")
    require_number("noise_factor", noise_factor, "(0, ∞)")
    require(algorithm.private, "algorithm", "must be differentially private", repr(algorithm.privacy))
    require_integer("clients", clients, 4)
    expected = clients if algorithm.traits.sampler.everyone else clients_per_round
    size = RunSize(clients, expected, rounds, min(clients, MOST_CANARIES), seed)
    claimed = _plan_of(algorithm, size)
    if not 0 < claimed.calibration.whole < math.inf:
        raise InvalidParameter("noise_multiplier", "must be positive: without noise there is no ε to audit", 0.0)
    found = []
    for attack in _attacks(algorithm, claimed, audited):
        if only is not None and attack.observer not in only:
            continue
        count, other = trials, attack.judge(HALF, trials, seed + 1, confidence) if control else None
        while other is not None and not other.refuted and count < _MOST_TRIALS * trials:
            # The control draws noise of its own, so that what it says does not favour either verdict on the run.
            count *= 2
            other = attack.judge(HALF, count, seed + 1, confidence)
        found.append(RunAudit(attack.observer, attack.rounds, attack.judge(noise_factor, count, seed, confidence), other))
    return found


@dataclass(frozen=True, eq=False)
class ObserverAttack:
    """One observer's attack: what is claimed of the rounds it sees, and scores of trials at a factor of the noise."""

    observer: str
    rounds: int
    events: Counted
    delta: float
    trials: Callable[[float, int, int], Trials]

    def judge(self, factor: float, trials: int, seed: int, confidence: float) -> ClaimAudit:
        """The claim against what the attack manages."""
        return audit_claim(*self.trials(factor, trials, seed), self.events, delta=self.delta, confidence=confidence)


def _plan_of(algorithm: Algorithm, size: RunSize) -> NoisePlan:
    """The noise of the run, whose secret each trial sets, so that an audit repeats."""
    if algorithm.traits.privacy.correlated:
        raise IncompatibleParts(
            f"{algorithm.privacy!r} adds noise that is correlated over rounds, and an audit looks at rounds one by one.",
            "Audit privacy.DifferentialPrivacy(…) or privacy.GaussianMechanism(…).",
        )
    protection = cast(Any, algorithm.privacy).protect(algorithm, size)
    privacy, noise = protection.noise.privacy, protection.noise
    require(not noise.nominal, "noise_seed", "must not be given: no ε holds then", privacy.noise_seed, "Leave it out.")
    calibrated = replace(privacy, epsilon=None, noise_multiplier=noise.calibration.whole)
    return NoisePlan(calibrated, algorithm, replace(size, rounds=max(size.rounds, 1)))


def weaken(noise: NoisePlan, factor: float, size: RunSize) -> NoisePlan:
    """The plan of a run that draws `factor` times the noise that it claims, and changes nothing else."""
    plan = NoisePlan(replace(noise.privacy, method="rdp"), noise.algorithm, size)  # ε of its rounds is asked for, fast
    full = plan.calibration
    first, count = (None if z is None else z * factor for z in (full.first, full.count))
    plan.__dict__["grid"] = replace(noise.grid, sigma=noise.grid.sigma * factor) if noise.distributed else None
    plan.calibration = replace(full, whole=full.whole * factor, update=full.update * factor, first=first, count=count)
    if plan.quantile is not None and plan.quantile.sigma is not None:
        plan.quantile = replace(plan.quantile, sigma=plan.quantile.sigma * factor)
    return plan


def _attacks(algorithm: Algorithm, noise: NoisePlan, audited: int | None) -> list[ObserverAttack]:
    found = [_by_the_public(algorithm, noise, audited)]
    if noise.distributed:
        found += [_by_insiders(algorithm, noise, audited, "node"), _by_insiders(algorithm, noise, audited, "server")]
    if noise.calibration.first is not None and 0 < noise.calibration.first < math.inf:
        found.append(_by_first_release(noise))
    return found


def _size(noise: NoisePlan) -> RunSize:
    return RunSize(noise.clients, noise.expected, noise.rounds, noise.dimension, noise.seed)


def _rate(noise: NoisePlan) -> float:
    return min(1.0, noise.expected / noise.clients)


def _rounds_to_tell(noise: NoisePlan, multiplier: float, rate: float, audited: int | None) -> int:
    """How many rounds to attack: until a score moves by `_STRENGTH`, by the central limit theorem of sampled Gaussians."""
    if audited is not None:
        return min(audited, noise.rounds)
    per_round = rate * math.sqrt(math.expm1(min(multiplier**-2, 50.0))) if rate < 1 else 1 / multiplier
    return max(1, min(math.ceil((_STRENGTH / per_round) ** 2), noise.rounds, 60))


def _by_the_public(algorithm: Algorithm, noise: NoisePlan, audited: int | None) -> ObserverAttack:
    """Of one who sees every round's model and cannot know the cohorts."""
    rate, opposite = _rate(noise), isinstance(noise.sampling, FixedSampling)
    whole = fold(*(z for z, _ in noise.planned.values()))
    rounds = _rounds_to_tell(noise, whole, rate, audited)
    events = [(CohortEvent((Release("all", whole),), noise.sampling), rounds)]
    spread = noise.calibration.update * noise.change * math.sqrt(noise.shares / noise.fewest if noise.distributed else 1.0)

    def trials(factor: float, count: int, seed: int) -> Trials:
        canaries = CanaryRounds.of(algorithm, weaken(noise, factor, _size(noise)), opposite=opposite)

        def scores(number: int) -> Trials:
            along, _ = canaries.run(rounds, stream_key(seed, "audit", number) >> 1, contributors=None, without="nothing")
            score = log_likelihood_ratio(along, spread * factor, rate)
            if opposite:
                score = score - log_likelihood_ratio(-along, spread * factor, rate)
            return _halves(score.sum(0))

        return _gather(scores, count)

    return ObserverAttack("public", rounds, events, noise.privacy.delta, trials)


def _by_insiders(algorithm: Algorithm, noise: NoisePlan, audited: int | None, observer: str) -> ObserverAttack:
    """Of a node, which knows its share of the noise, or the server, which knows all that clients did not add.

    The server's sums are of the fewest clients whose noise must suffice, as if the others were lost.
    """
    node = observer == "node"
    zeroed = fold(*(z for _, z in noise.planned.values()))
    known = with_fewer_shares(zeroed, noise.shares - 1 if node else noise.fewest, noise.fewest)
    contributors = None if node else noise.fewest
    hidden = noise.by_nodes
    rate = _rate(noise) if hidden or node else min(1.0, noise.fewest / noise.clients)
    if hidden:
        rounds = asked = _rounds_to_tell(noise, known, rate, audited)
    else:
        rounds = _rounds_to_tell(noise, known, 1.0, audited)
        asked = max(rounds, min(math.ceil(rounds / rate), noise.rounds))
        rounds = max(1, min(rounds, int(asked * rate)))
    left = (noise.shares - 1 if node else noise.fewest) / noise.fewest
    spread = noise.calibration.update * noise.change * math.sqrt(left)
    event = CohortEvent((Release("all", known),), noise.sampling) if hidden else unsampled_event(known)

    def trials(factor: float, count: int, seed: int) -> Trials:
        canaries = CanaryRounds.of(algorithm, weaken(noise, factor, _size(noise)), opposite=False)

        def scores(number: int) -> Trials:
            key = stream_key(seed, "audit", number) >> 1
            along, here = canaries.run(asked, key, contributors=contributors, without="own" if node else "server")
            if hidden:
                return _halves(log_likelihood_ratio(along, spread * factor, rate).sum(0))
            early = here & (np.cumsum(here, 0) <= rounds)  # the first rounds that each canary took part in
            return _halves(np.where(early, along, 0.0).sum(0), early.sum(0) == rounds)

        return _gather(scores, count)

    return ObserverAttack(observer, rounds, [(event, rounds)], noise.privacy.delta, trials)


def _by_first_release(noise: NoisePlan) -> ObserverAttack:
    """Of one who sees the noisy histogram of losses, or the noisy sum of weights, of one round with one canary."""
    _, zeroed = noise.planned[noise.first]

    def trials(factor: float, count: int, seed: int) -> Trials:
        plan = weaken(noise, factor, _size(noise))
        plan.book = ReleaseBook()
        worlds = []
        for present in (True, False):
            values = []
            for number in range(count):
                plan.inject(stream_key(seed, f"audit of the first release, {present}", number))
                values.append(_first_release(plan, present))
            worlds.append(np.array(values))
        return worlds[0], worlds[1]

    return ObserverAttack(f"{noise.first} alone", 1, [(unsampled_event(zeroed), 1)], noise.privacy.delta, trials)


def _first_release(noise: NoisePlan, present: bool) -> float:
    """What is released along the contribution of a canary with the largest loss; the other clients' losses are 0."""
    others = noise.fewest - 1
    if noise.quantile is None:
        weights = torch.cat([torch.zeros(others), torch.full((1,), float(present))]).double()
        return PrivateSums(noise).noisy_sum(weights, 0)
    quantile = noise.quantile
    losses = torch.cat([torch.zeros(others), torch.full((int(present),), quantile.bound)]).double()
    release = quantile.at(noise.source("quantile", 0), shares=noise.fewest)
    bound, bins = quantile.bound, quantile.bins
    row = client_contributions(torch.tensor([bound]), bound=bound, bins=bins, sigma=0.0, scale=1, source=noise.source("row", 0))
    return float(release.noisy_histogram(losses) @ row[0])


def _halves(scores: Array, counted: NDArray[np.bool_] | None = None) -> Trials:
    """Scores of the canaries that are there, and of those that are not."""
    half = len(scores) // 2
    counted = np.ones(len(scores), dtype=bool) if counted is None else counted
    return scores[:half][counted[:half]], scores[half:][counted[half:]]


def _gather(scores: Callable[[int], Trials], count: int) -> Trials:
    """Scores of as many runs as it takes for `count` trials of each world."""
    present: list[Array] = []
    absent: list[Array] = []
    number = 0
    while min(sum(map(len, present)), sum(map(len, absent))) < count:
        one, other = scores(number)
        present.append(one)
        absent.append(other)
        number += 1
        if number > 100 * count:
            raise InvalidParameter("audited", "must be enough rounds for canaries to take part", number)
    return np.concatenate(present), np.concatenate(absent)
