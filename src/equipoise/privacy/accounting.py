"""Privacy accounting: what the releases of a run cost, and how much noise a budget asks for. Judged by `dp-accounting`.

Everything released from one cohort is **one** event. The cohort is drawn once, so chance hides a client once: the Gaussian
releases of a round are folded into one with multiplier (Σ z_i^{−2})^{−1/2}, and the sampling goes around that. Accounting each
release as if it had a cohort of its own understates ε (11.3 instead of 16.6 by RDP, for two releases with multiplier 1 in each
of 1000 rounds at rate 0.04 and δ = 4e-4).

A noise multiplier z is the standard deviation of the noise on a sum over the sensitivity of that sum, and **sampling decides
what the sensitivity is**. Poisson sampling goes with adding or removing one client, whose clipped update moves the sum by at
most C. A cohort of fixed size goes with replacing one client: the sum moves by up to 2C, and z counts in units of that.
`dp-accounting` knows fixed cohorts by RDP only, and where its bound exceeds that of no sampling at all, the latter counts; all
else is by default accounted by PLD, which is tighter.

**Two views.** Sampling hides a client only from someone who does not know the cohorts: whoever receives the models. For someone
who does, such as a server that picks the cohorts and sees noisy sums only, a client who took part in k rounds is protected by
k plain Gaussians, which is one with multiplier z/√k. Cohorts do not depend on the data, so this holds given the cohorts of a
run, with k the most rounds in which any client took part; k is the number of rounds if that is all that can be promised. (A
server that adds the noise itself sees the sum without it, and is trusted: neither figure is about that server.)

ε covers the releases named here; runs made to choose settings on the same data come on top.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any, Literal

import numpy as np

from equipoise.errors import IncompatibleParts, InvalidParameter, require, require_integer, require_number
from equipoise.privacy.releases import (
    CohortEvent,
    FixedSampling,
    NoSampling,
    PlainRounds,
    PoissonSampling,
    Release,
    Sampling,
    check_delta,
    counted,
    fold,
    sampling_of,
)

Method = Literal["pld", "rdp"]
NOMINAL = "nominal: whoever knows noise_seed takes the noise off. Leave it out for an ε that holds"
_LEAST_NOISE, _MOST_NOISE = 1e-2, 1e6  # outside of this a multiplier is no answer to anybody's question
_SMALLEST_PLD_DELTA = 1e-13  # dp-accounting cuts tails of mass 1e-15 off each composition; below, RDP is the better bound


# --------------------------------------------------------------------------------------------------------------- what it costs

Events = Sequence[CohortEvent | tuple[CohortEvent, int] | PlainRounds]
_Tally = tuple[tuple[float, Sampling, int], ...]  # (folded multiplier, sampling, how often), each kind once


def _tally(events: Events) -> _Tally:
    counts: Counter[tuple[float, Sampling]] = Counter()
    for event, count in map(counted, events):
        require_integer("rounds", count, 0)
        everyone = isinstance(event.sampling, PoissonSampling) and event.sampling.rate == 1
        counts[event.multiplier, NoSampling() if everyone else event.sampling] += count
    kinds = {type(sampling) for _, sampling in counts}
    if len(kinds - {NoSampling}) > 1:
        reason = "Poisson cohorts count neighbours by adding or removing one, fixed ones by replacing one: costs do not add."
        raise IncompatibleParts(reason, "Use one kind of sampling for the whole run.")
    # Beside fixed cohorts everyone's sums are told apart by replacing one client, too, which moves them twice as far.
    halved = NoSampling if FixedSampling in kinds else ()
    return tuple((z / 2 if isinstance(s, halved) else z, s, n) for (z, s), n in counts.items() if n > 0 and z < math.inf)


def _choose_method(method: Method | None, samplings: Iterable[Sampling], delta: float) -> Method:
    fixed = any(isinstance(sampling, FixedSampling) for sampling in samplings)
    if method is None:
        return "rdp" if fixed or delta < _SMALLEST_PLD_DELTA else "pld"
    require(method in ("pld", "rdp"), "method", "must be 'pld' or 'rdp'", method)
    if fixed and method == "pld":
        raise IncompatibleParts("PLD accounting knows no cohorts of fixed size.", "Use method 'rdp', or Poisson sampling.")
    return method


def _is_no_note_on_orders(record: logging.LogRecord) -> bool:
    # An RDP order that does not converge is left out: that may cost tightness, never safety.
    return "Excluding this order" not in str(record.msg)


@contextmanager
def quiet_dp_accounting() -> Iterator[Any]:
    """The package dp_accounting, without its notes on orders and on overflow."""
    import dp_accounting  # type: ignore[import-untyped]

    logger = logging.getLogger("absl")
    logger.addFilter(_is_no_note_on_orders)
    try:
        with np.errstate(all="ignore"):
            yield dp_accounting
    finally:
        logger.removeFilter(_is_no_note_on_orders)


@lru_cache(maxsize=256)
def _rdp(z: float, sampling: Sampling) -> tuple[Any, Any]:
    """The orders, and the Rényi divergence of one event at each."""
    with quiet_dp_accounting() as dp:
        event, relation = dp.GaussianDpEvent(z), dp.NeighboringRelation.ADD_OR_REMOVE_ONE
        if isinstance(sampling, PoissonSampling):
            event = dp.PoissonSampledDpEvent(sampling.rate, event)
        elif isinstance(sampling, FixedSampling):
            event = dp.SampledWithoutReplacementDpEvent(sampling.population, sampling.cohort, event)
            relation = dp.NeighboringRelation.REPLACE_ONE
        accountant = dp.rdp.RdpAccountant(neighboring_relation=relation).compose(event)
    return accountant.orders, accountant.rdp


def _epsilon_rdp(tally: _Tally, delta: float) -> float:
    orders = _rdp(*tally[0][:2])[0]
    total = sum(count * _rdp(z, sampling)[1] for z, sampling, count in tally)
    with quiet_dp_accounting() as dp:
        return float(dp.rdp.compute_epsilon(orders, total, delta)[0])


def gaussian_epsilon(multiplier: float, delta: float) -> float:
    """ε of one Gaussian release at δ = Φ(1/(2z) − εz) − e^ε Φ(−1/(2z) − εz), exactly (Balle and Wang 2018, Theorem 8)."""
    require_number("multiplier", multiplier, "[0, ∞]")
    check_delta(delta)
    with quiet_dp_accounting() as dp:
        return float(dp.get_epsilon_gaussian(multiplier, delta))


@lru_cache(maxsize=4)  # each may hold a million numbers
def _loss_distribution(z: float, rate: float, interval: float) -> Any:
    with quiet_dp_accounting() as dp:
        make = dp.pld.privacy_loss_distribution.from_gaussian_mechanism
        return make(z, value_discretization_interval=interval, sampling_prob=rate)


def _interval(tally: _Tally, delta: float, rough: bool) -> float:
    """The grid of the privacy loss; whatever it is, ε is an upper bound.

    1e-4, as is dp-accounting's habit, but finer where the loss of a round is as small as that (at rate 0.001, z = 20 and 10,000
    rounds 1e-4 gives ε = 0.021 for 0.016), and coarser where large losses would fill the memory. A rough one is some 0.4 % off.
    """
    # χ of one event, rate / z for much noise: about the standard deviation of its loss.
    spread: float = min(
        (s.rate if isinstance(s, PoissonSampling) else 1) * math.expm1(min(z**-2, 99)) ** 0.5 for z, s, _ in tally
    )
    reach = max(0.5 / z**2 + 10 / z for z, _, _ in tally)  # the largest loss of one event
    largest: float = max(reach, _epsilon_rdp(tally, delta))
    return max(min(1e-2, 0.2 * spread), 1e-5 * largest) if rough else max(min(1e-4, 0.05 * spread), 1e-6 * largest)


def _epsilon_pld(tally: _Tally, delta: float, rough: bool) -> float:
    if all(isinstance(sampling, NoSampling) for _, sampling, _ in tally):
        return gaussian_epsilon(fold(*(z / math.sqrt(count) for z, _, count in tally)), delta)
    interval = _interval(tally, delta, rough)
    parts = []
    with quiet_dp_accounting():
        for z, sampling, count in tally:
            if isinstance(sampling, PoissonSampling):
                parts.append(_loss_distribution(z, sampling.rate, interval).self_compose(count))
            else:
                parts.append(_loss_distribution(z / math.sqrt(count), 1.0, interval))
        return float(reduce(lambda one, other: one.compose(other), parts).get_epsilon_for_delta(delta))


@lru_cache(maxsize=4096)  # runs with other seeds ask the same
def _epsilon(tally: _Tally, delta: float, method: Method, rough: bool = False) -> float:
    if not tally or any(z == 0 for z, _, _ in tally):
        return math.inf if tally else 0.0
    epsilon = _epsilon_rdp(tally, delta) if method == "rdp" else _epsilon_pld(tally, delta, rough)
    if any(isinstance(sampling, FixedSampling) for _, sampling, _ in tally):
        # The bound for fixed cohorts may exceed what no sampling at all costs, which holds as well.
        epsilon = min(epsilon, gaussian_epsilon(fold(*(z / math.sqrt(count) for z, _, count in tally)), delta))
    return epsilon


def epsilon_of(events: Events, delta: float, *, method: Method | None = None) -> float:
    """ε at `delta` of all rounds together, for those not told the cohorts.

    `events` are triples (noise multiplier, sampling, rounds). The sampling is the rate of Poisson cohorts, a pair (cohort,
    population) of fixed sizes, or None for everyone in every round. What a round releases besides comes from the same cohort:
    give its multipliers together, as ((quantile, update), sampling, rounds). The noise of a multiplier z has the standard
    deviation z · clip on the sum, and z · 2 · clip where cohorts have a fixed size. Beside such cohorts ε is for replacing one
    client, also of the rounds of everyone, whose sums that moves by 2 · clip. `CohortEvent`s of `privacy.releases` and
    pairs (event, how often) are taken, too.

    `method` is "pld" (privacy loss distributions) or "rdp" (Rényi divergences); both bound ε from above, PLD more tightly.
    None: PLD, but RDP for cohorts of fixed size, which PLD does not know, and for δ below 1e-13. For cohorts of fixed size ε
    is the smaller of the bounds with and without amplification by sampling: both hold.

    Source: the accountants of dp-accounting (PLD: Koskela, Jälkö, Honkela 2020; RDP: Mironov 2017).

    >>> once = [(1.0, None, 1)]  # one Gaussian with noise multiplier 1
    >>> round(epsilon_of(once, delta=0.126937), 2)  # δ = Φ(½ − ε) − e^ε Φ(−½ − ε) = 0.3085 − 2.718 · 0.0668 at ε = 1
    1.0
    """
    check_delta(delta)
    tally = _tally(events)
    return _epsilon(tally, delta, _choose_method(method, (sampling for _, sampling, _ in tally), delta))


# ------------------------------------------------------------------------------------------------------------ over the rounds


@dataclass(frozen=True)
class Spent:
    """What a run has spent. `epsilon_server`: for one who knows the cohorts, about a client in all the
    `participations` rounds that the plan allows.

    `epsilon_server` is of the noisy sums alone. Of two neighbouring runs, one has zero in place of one client's contribution.
    The noise is that of the clients who contributed. `result.privacy` has one ε for each observer.
    """

    epsilon: float  # for whoever sees the released models
    delta: float  # the probability that ε leaves open
    adjacency: str  # how neighbouring data sets differ
    method: Method  # of accounting: "pld" or "rdp"
    epsilon_server: float  # for one who knows the cohorts
    rounds: int  # that are counted
    participations: int  # rounds that one client may take part in, by the plan
    nominal: bool = False  # the noise follows from a seed: no ε holds
    discrete: bool = False  # some of the noise is discrete, and recorded as the Gaussian of equal zCDP
    table: bool = False  # the data are a table, whose schema ε does not cover
    hidden: bool = False  # nodes draw by themselves whether they take part, so that nobody knows the cohorts

    def _known_cohorts(self) -> str:
        """ε for the server: where nodes draw by themselves whether they take part, sampling hides them from it, too."""
        if self.hidden:
            why = "each node draws by itself whether it takes part, so nobody knows who takes part in a round"
            return f"ε = {self.epsilon_server:.4g} for one who sees the noisy sums ({why})."
        known = f"ε = {self.epsilon_server:.4g} for one who knows who took part in which rounds"
        return f"{known} (no client in more than {self.participations} of them)."

    def __str__(self) -> str:
        if self.nominal:
            return f"ε is {NOMINAL}."
        rounds = f"{self.rounds} round{'s' * (self.rounds != 1)}"
        return (
            f"ε = {self.epsilon:.4g} at δ = {self.delta:.4g} "
            f"({self.adjacency}, {self.method.upper()} accounting, {rounds}); "
            f"{self._known_cohorts()} "
            "Runs made to choose settings are not counted."
            + (" Discrete noise counts as the Gaussian of equal zCDP: within 0.3 %, but not a bound." * self.discrete)
            + (" Means, categories and other statistics in the table's schema are not covered by ε." * self.table)
        )


class Accountant:
    """What t rounds cost, if every round releases the same, or the run goes through a pattern of rounds again and again.

    A run asks for ε after every round, and one exact PLD figure takes about a second. So `epsilon_after` is exact (equal to
    `epsilon_of`) by RDP; by PLD it is exact at `horizon`, the planned number of rounds, and elsewhere an upper bound, up to 6 %
    above: the figure of the next checkpoint on a rough grid. Checkpoints are the rounds up to 20, then every 5 % more. It never
    falls from one round to the next. `exact_after` is exact always, and `spent` and `rounds_within` use it.
    """

    def __init__(
        self, pattern: CohortEvent | Sequence[CohortEvent], delta: float, *,
        method: Method | None = None, horizon: int | None = None,
    ) -> None:  # fmt: skip
        check_delta(delta)
        self.pattern = (pattern,) if isinstance(pattern, CohortEvent) else tuple(pattern)
        require(len(self.pattern) > 0, "pattern", "must hold at least one event", self.pattern)
        require_integer("horizon", horizon, 1, none="runs of any length")
        _tally(self.pattern)  # refuses a mixture of samplings
        samplings = [event.sampling for event in self.pattern]
        self.method: Method = _choose_method(method, samplings, delta)
        self.neighbours = "replace one" if any(isinstance(s, FixedSampling) for s in samplings) else "add or remove one"
        self.delta, self.horizon = delta, horizon
        self._known: dict[tuple[int, bool], float] = {}

    def _after(self, rounds: int, rough: bool) -> float:
        if (rounds, rough) not in self._known:
            self._known[rounds, rough] = _epsilon(self._tally(rounds), self.delta, self.method, rough)
        return self._known[rounds, rough]

    def _tally(self, rounds: int) -> _Tally:
        whole, rest = divmod(rounds, len(self.pattern))
        return _tally([(event, whole + (place < rest)) for place, event in enumerate(self.pattern)])

    def exact_after(self, rounds: int) -> float:
        """ε after `rounds` rounds, equal to `epsilon_of`."""
        require_integer("rounds", rounds, 0)
        return self._after(rounds, False)

    def epsilon_after(self, rounds: int) -> float:
        """ε after `rounds` rounds, cheaply: exact by RDP, a close upper bound by PLD."""
        if self.method == "rdp" or rounds in (0, self.horizon):
            return self.exact_after(rounds)
        require_integer("rounds", rounds, 1)
        checkpoint = max(rounds, math.ceil(20 * 1.05 ** math.ceil(math.log(rounds / 20, 1.05)))) if rounds > 20 else rounds
        if self.horizon is None or rounds > self.horizon:
            return self._after(checkpoint, True)
        return min(self._after(min(checkpoint, self.horizon), True), self.exact_after(self.horizon))

    def rounds_within(self, epsilon: float, *, at_most: int | None = None) -> int:
        """The most rounds, up to `at_most` (default: the horizon; without one a million), whose exact ε is within `epsilon`."""
        require_number("epsilon", epsilon, "(0, ∞)")
        most = at_most or self.horizon or 1_000_000
        if self.exact_after(1) > epsilon:
            return 0
        if self.method == "rdp" or (most == self.horizon and self.exact_after(most) <= epsilon):
            return _largest(lambda t: self.exact_after(t) <= epsilon, most, most)
        guess = _largest(lambda t: self._after(t, True) <= epsilon, most, 1)
        return _largest(lambda t: self.exact_after(t) <= epsilon, most, guess)

    def spent(self, rounds: int, *, unit: str = "client") -> Spent:
        """What `rounds` rounds have spent; for one who knows the cohorts about a client that was in all of them, by z/√k."""
        server = gaussian_epsilon(fold(*(z / math.sqrt(count) for z, _, count in self._tally(rounds))), self.delta)
        return Spent(self.exact_after(rounds), self.delta, f"{self.neighbours} {unit}", self.method, server, rounds, rounds)


def _largest(fits: Callable[[int], bool], most: int, guess: int) -> int:
    """The largest t in 1…most that fits, for a rule that holds up to some t and at 1; searched outward from `guess`."""
    low, high, here, step = 1, most + 1, guess, max(1, guess // 200)
    while high - low > 1:
        if fits(here):
            low, here = here, here + step
        else:
            high, here = here, here - step
        here, step = here if low < here < high else (low + high) // 2, 2 * step
    return low


# ------------------------------------------------------------------------------------------------------------------ calibration


def noise_for(
    epsilon: float, delta: float, *, rounds: int, sampling_rate: float | None = None, cohort: int | None = None,
    population: int | None = None, method: Method | None = None, tolerance: float = 1e-3,
) -> float:  # fmt: skip
    """The smallest multiplier for all releases of a round together, so that `rounds` rounds cost at most `epsilon`.

    The inverse of `epsilon_of`, on the safe side: with the result, (1 − tolerance) · epsilon ≤ ε ≤ epsilon. Poisson cohorts:
    `sampling_rate`; cohorts of fixed size: `cohort` and `population` (and the result counts in units of 2C); neither: everyone.

    `epsilon` at `delta` is the budget of all `rounds` rounds. `method` is that of `epsilon_of`. `tolerance` says how far below
    the budget ε may be.

    Source: the inverse of dp-accounting's accountants.

    >>> round(noise_for(1.0, 0.126937, rounds=1), 2), round(noise_for(1.0, 0.126937, rounds=4), 2)  # z ∝ √rounds
    (1.0, 2.0)
    """
    require_number("epsilon", epsilon, "(0, ∞)")
    check_delta(delta)
    require_integer("rounds", rounds, 1)
    require_number("tolerance", tolerance, "[1e-6, 1)")
    sampling = sampling_of(sampling_rate=sampling_rate, cohort=cohort, population=population)
    chosen = _choose_method(method, [sampling], delta)

    def cost(z: float, rough: bool = False) -> float:
        return _epsilon(_tally([(CohortEvent((Release("all", z),), sampling), rounds)]), delta, chosen, rough)

    start, step = math.sqrt(rounds) / epsilon, 4.0
    if chosen == "pld" and isinstance(sampling, PoissonSampling):  # nearly there at a twentieth of the price
        start, step = _calibrate(lambda z: cost(z, rough=True), epsilon, delta, tolerance, start, step), 1.002
    return _calibrate(cost, epsilon, delta, tolerance, start, step)


def _calibrate(
    cost: Callable[[float], float], epsilon: float, delta: float, tolerance: float, start: float, step: float
) -> float:
    """A multiplier with (1 − tolerance) ε ≤ cost ≤ ε; where the cost jumps over that range, the safe side of the jump."""
    low, high, cost_low, cost_high = 0.0, math.inf, math.inf, 0.0
    z, turn = min(max(start, _LEAST_NOISE), _MOST_NOISE), 0
    while high > (1 + 1e-9) * low:
        here, turn = cost(z), turn + 1
        if (1 - tolerance) * epsilon <= here <= epsilon:
            return z
        if here <= epsilon:
            high, cost_high = z, here
        else:
            low, cost_low = z, here
        if high == _LEAST_NOISE:
            if here <= 0:
                rule = "must be small: with this one no noise is needed for any epsilon, which is no privacy"
                raise InvalidParameter("delta", rule, delta, "Choose one clearly below one over the number of clients.")
            fix = "No noise to speak of would do, which is no privacy: lower epsilon, or delta to below one over the clients."
            raise InvalidParameter("epsilon", f"must be less than {here:.4g} at this delta", epsilon, fix)
        if low == _MOST_NOISE:
            raise InvalidParameter("epsilon", f"must be at least {here:.4g} for this run", epsilon, "Fewer rounds cost less.")
        if low == 0 or high == math.inf:  # no bracket yet: go on in growing steps
            z = min(max(high / step if low == 0 else low * step, _LEAST_NOISE), _MOST_NOISE)
            step **= 1.5
        elif turn % 4 == 0 or cost_high == 0 or cost_low == math.inf:
            z = math.sqrt(low * high)
        else:  # between multipliers that are close, ε is nearly a power of z
            aim = math.log((1 - tolerance / 2) * epsilon / cost_low) / math.log(cost_high / cost_low)
            z = low * (high / low) ** min(max(aim, 0.01), 0.99)
    return high
