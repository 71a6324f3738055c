"""The noise of a private run: what each round releases, with which noise, and what it has cost.

All releases of a round come from one cohort and are one event for the accountant (see privacy.accounting). In order: a private
quantile (Δ-FL) or the sum of the clients' weights (Tilted, QFair); the sum of clipped updates; the count for a clip bound that
adapts. Denominators are fixed in advance, nothing is divided by what came, and an empty cohort still releases noise.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property
from os import urandom
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from equipoise.errors import ConfigError, require
from equipoise.privacy import accounting, releases
from equipoise.privacy.discrete_gaussian import concentrated_epsilon
from equipoise.privacy.ledger import new_token, server_epsilon
from equipoise.privacy.observer_table import KnownCohorts, PrivacyTable, ReleasedNoise
from equipoise.privacy.private_quantile import ENOUGH_NOISE, Adjacency, PrivateQuantile
from equipoise.privacy.random_source import SECRET_BYTES, RandomSource, SecretStream, SystemSource, gaussian
from equipoise.privacy.release_book import ReleaseBook
from equipoise.privacy.secure_sum import required_modulus, rounded_norm_bound
from equipoise.types import RunSize

if TYPE_CHECKING:
    from equipoise.algorithm import Algorithm
    from equipoise.privacy.mechanism import DifferentialPrivacy

_ROUNDING_FAILURE = 1e-6  # the chance that a client rounds an update again
_FINE = 16.0  # grid steps per clip bound and √D, unless a step is given: rounding then adds 0.1 % to the sensitivity


@dataclass(frozen=True, eq=False)
class PrivateState:
    """What privacy carries from round to round: the clip bound, and how many rounds there were. Who took part stays unsaid.

    `exposure` is larger by more than 1 after a round in which too few nodes added noise. `run` is the run's name in its ledger,
    drawn at random. `buffers` (pairs, D) is what noise that is correlated over rounds remembers.
    """

    clip: float
    rounds: int = 0
    exposure: float = 0.0
    run: str = ""
    buffers: Tensor | None = None

    def after(self, *, clip: float, weight: float = 1.0) -> PrivateState:
        """The state after a round, which counts as `weight` rounds for one who knows the noise added."""
        return replace(self, clip=clip, rounds=self.rounds + 1, exposure=self.exposure + weight)


@dataclass(frozen=True)
class Calibration:
    """The noise multipliers of a run's releases, each noise over sensitivity; the whole is what they fold to."""

    whole: float
    update: float
    first: float | None = None  # of the quantile, or of the sum of weights
    count: float | None = None  # of the updates within an adaptive clip bound


class NoisePlan:
    """How much noise each release of one run has, and what its rounds cost.

    The noise follows from `secret`, drawn by the operating system for this run, or from a `noise_seed`, and then no ε holds
    (`nominal`). It is None where the operating system draws each number, over a network, and empty once the run has ended.
    """

    def __init__(self, privacy: DifferentialPrivacy, algorithm: Algorithm, size: RunSize) -> None:
        self.privacy, self.algorithm = privacy, algorithm
        self.clients, self.expected, self.rounds = size.clients, size.clients_per_round, size.rounds
        self.dimension, self.seed = size.dimension, size.seed
        self.poisson, self.by_nodes = algorithm.traits.sampler.independent, algorithm.traits.sampler.by_nodes
        self.sampling = self._sampling()
        # Replacing a client moves a sum twice as far as adding or removing one.
        self.change = 2.0 if isinstance(self.sampling, releases.FixedSampling) else 1.0
        self.fewest = self._fewest()
        # Of noise in a sum, whoever is there: their number must tell nothing.
        self.shares = self.clients if self.by_nodes else max(self.expected, self.fewest)
        self.calibration = self._calibrate()
        self.quantile = self._calibrated_quantile()
        self.nominal = privacy.noise_seed is not None
        self.secret: bytes | None = key_of_seed(algorithm, size.seed) if self.nominal else urandom(SECRET_BYTES)
        self.bound_to = b""  # what a checkpoint says of the run: another run that goes on from it has other noise
        self.run = "" if self.nominal else new_token()  # runs with one name release the same bits
        self.book = ReleaseBook(nominal=self.nominal)

    # -------------------------------------------------------------------------------------------------------- before the run

    def _sampling(self) -> releases.Sampling:
        """How cohorts are drawn, as the accountant sees it."""
        if self.algorithm.traits.sampler.everyone:
            return releases.NoSampling()
        if self.poisson:
            return releases.PoissonSampling(self.expected / self.clients, self.by_nodes)
        return releases.FixedSampling(self.expected, self.clients)

    def _fewest(self) -> int:
        """How many shares of noise must suffice; all of them where the server adds what is missing and is trusted to."""
        given = self.privacy.fewest
        if given is None and self.by_nodes:  # all nodes answer, and more than half of them must
            return self.clients // 2 + 1
        if given is None:
            return max(1, self.expected // 2) if self.poisson and self.privacy.noise == "distributed" else self.expected
        require(given <= self.most, "fewest", f"must not exceed the {self.most} clients that a round may have", given)
        return given

    def _calibrate(self) -> Calibration:
        whole = self.privacy.noise_multiplier
        if whole is None:
            if self.rounds == 0:
                return Calibration(math.inf, math.inf)
            budget, method = float(self.privacy.epsilon or 0), self.privacy.method
            whole = accounting.noise_for(budget, self.privacy.delta, rounds=self.rounds, method=method, **self._rates())
        count, rest = None, whole
        if self.privacy.clip_rule is not None:
            count, rest = releases.split(whole, self.privacy.clip_rule.ratio)
        given = self._given_quantile
        if given is not None and given.sigma is not None:
            first = given.multiplier(self.fewest, adjacency=self._adjacency)
            if first == 0 or rest == 0:  # no noise at all is for trying things out
                none = self.privacy.epsilon is not None and rest > 0
                require(not none, "sigma", "of the private quantile must be positive under a budget", given.sigma)
                return Calibration(whole, rest, first, count)
            rule = f"of the private quantile must be at least {ENOUGH_NOISE:g}/√{self.fewest}, or it is not as good as Gaussian"
            enough = math.sqrt(self.fewest) * float(given.sigma) >= ENOUGH_NOISE
            require(enough, "sigma", rule, given.sigma, "Raise sigma and scale together: the cost stays.")
            return Calibration(whole, releases.remaining(rest, first), first, count)
        if self.algorithm.traits.risk.needs_losses:
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
    def _given_quantile(self) -> PrivateQuantile | None:
        traits = self.algorithm.traits
        return cast(PrivateQuantile, traits.risk.quantile) if traits.quantile.calibrated is not None else None

    def _calibrated_quantile(self) -> PrivateQuantile | None:
        given = self._given_quantile
        if given is None or given.sigma is not None or self.calibration.first is None:
            return given
        if self.calibration.first in (0.0, math.inf):
            return replace(given, sigma=0.0, scale=1)
        return given.calibrated(
            self.calibration.first, self.fewest, most=self.most, adjacency=self._adjacency, cohort=self.expected
        )

    @property
    def _adjacency(self) -> Adjacency:
        return "replace_one" if self.change == 2 else "add_remove"

    @property
    def most(self) -> int:
        """The most clients that a round may have."""
        return self.clients if self.poisson else self.expected

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
            rule = f"must be so small that √{self.fewest} shares of noise are {ENOUGH_NOISE:g} steps wide"
            require(math.sqrt(self.fewest) * sigma >= ENOUGH_NOISE, "step", rule, step)
            start, excess = sigma, 1e-15
            while 1 / concentrated_epsilon(self.change * bound, sigma, self.fewest, self.dimension) < z:
                # What adding discrete shares costs more than one Gaussian: to the safe side.
                sigma, excess = start * (1 + excess), 2 * excess
        return Grid(step, bound, sigma, required_modulus(clip, step, self.most, sigma=sigma, dimension=self.dimension))

    @cached_property
    def accountant(self) -> accounting.Accountant:
        """The accountant of this run: each round is one event with all its releases."""
        noisy = tuple(releases.Release(name, z) for name, (z, _) in self.planned.items())
        event = releases.CohortEvent(noisy, self.sampling)
        return accounting.Accountant(event, self.privacy.delta, method=self.privacy.method, horizon=self.rounds or None)

    @cached_property
    def first(self) -> str:
        """The release that comes before the sum of updates, if there is one."""
        return "quantile" if self._given_quantile is not None else "weights"

    @cached_property
    def planned(self) -> dict[str, tuple[float, float]]:
        """The releases of a round by name: the noise multiplier, and that for a contribution zeroed."""
        noise, found = self.calibration, {}
        if noise.first is not None:
            zeroed = noise.first  # the sum of weights moves by 1, whether a client is replaced or zeroed
            if self.quantile is not None and self.change == 2 and 0 < noise.first < math.inf:
                zeroed = self.quantile.multiplier(self.fewest, adjacency="add_remove")
            found[self.first] = (noise.first, zeroed)
        found["update"] = (noise.update, noise.update * self.change)
        if noise.count is not None:
            found["count"] = (noise.count, noise.count * self.change)
        return found

    @cached_property
    def rounds_allowed(self) -> int:
        """How many rounds the budget allows."""
        if self.privacy.epsilon is None or self.privacy.noise_multiplier is None or self.rounds == 0:
            return self.rounds  # without a budget all, and a calibrated run stays within it by construction
        return self.accountant.rounds_within(self.privacy.epsilon, at_most=self.rounds)

    def describe(self) -> str:
        """The noise of this run, for its checkpoints: a run must go on with the noise that it began with."""
        return f"{self.privacy!r} with {self.calibration!r}, {self.quantile!r}, for {self.rounds} rounds"

    def inject(self, seed: int) -> None:
        """Have noise and cohorts follow from a number: for audits, which compare pairs of runs."""
        self.secret = seed.to_bytes(SECRET_BYTES, "little")

    def begin(self) -> PrivateState:
        """The state before the first round: the first clip bound."""
        return PrivateState(float(self.privacy.clip), run=self.run)

    def resume(self, state: PrivateState, rounds: int) -> None:
        """Resume from a checkpoint after `rounds` rounds: every round stays counted."""
        self.book.fill(rounds, self.planned, self.sampling, self.privacy.delta)

    def source(self, purpose: str, round_index: int) -> RandomSource:
        """Random words for one purpose in one round."""
        if self.secret is None:
            return SystemSource()
        bound = self.secret and self.bound_to and not self.nominal
        key = hashlib.blake2b(self.bound_to, key=self.secret, digest_size=SECRET_BYTES).digest() if bound else self.secret
        return SecretStream(key, purpose, round_index)

    def gaussian(self, purpose: str, round_index: int, count: int) -> Tensor:
        """Standard normal numbers (count,) float64 for one purpose in one round."""
        return gaussian(count, self.source(purpose, round_index))

    def update_noise(self, state: PrivateState, round_index: int, count: int) -> tuple[Tensor, PrivateState]:
        """The noise (count,) float64 of a round's sum of updates in units of its sensitivity, and the state after it."""
        return self.gaussian("update", round_index, count), state

    @property
    def workers(self) -> float:
        """How many clients are expected to work in a round: fixed in advance."""
        return self.algorithm.traits.risk.tail * self.expected

    # ------------------------------------------------------------------------------------------------------------- the ledger

    def begin_release(self, round_index: int, purpose: str, *, contributors: int | None = None) -> bool:
        """Write a release into the ledger before it is made; False if it was begun before and must not be again.

        `contributors` is the fewest clients whose shares of noise may be in the sum.
        """
        multiplier, zeroed = self.planned[purpose]
        return self.book.begin(
            round_index, releases.Release(purpose, multiplier), zeroed=zeroed, sampling=self.sampling,
            delta=self.privacy.delta, shares=self.fewest if self.distributed else None, contributors=contributors,
        )  # fmt: skip

    def is_lost(self, round_index: int) -> bool:
        """Whether a release of this round was begun before, and what it gave is not known: the round is over, and paid for."""
        return self.book.is_lost(round_index, (self.first, "update"))

    @property
    def distributed(self) -> bool:
        """Whether clients add the noise."""
        return self.privacy.noise == "distributed"

    def round_weight(self, contributors: int) -> float:
        """As how many rounds one counts for a server that knows which noise it added: 1, more if few clients added theirs."""
        return self.fewest / min(max(contributors, 1), self.fewest) if self.distributed else 1.0

    def epsilon_after(self, rounds: int) -> float:
        """ε after `rounds` rounds, for whoever receives the models; of what the ledger says, if that is more.

        A run that was killed some rounds after its checkpoint finds these rounds in the ledger. Where it releases the same bits
        again, they count with their rounds, as in a run that was never killed.
        """
        if self.book.once and self.book.releases > rounds * len(self.planned):
            return self._events_epsilon()
        return self.accountant.epsilon_after(rounds)

    def _events_epsilon(self) -> float:
        return accounting.epsilon_of(self.book.events(), self.privacy.delta, method=self.privacy.method)

    def participations(self, rounds: int) -> int:
        """In how many of the rounds a client may take part by the plan: how many it did in fact is as secret as the cohorts."""
        return -(-rounds // int(self.algorithm.traits.sampler.separation or 1))

    def _known_cohorts(self, participations: float) -> KnownCohorts:
        zeroed = 0.0 if self.nominal else releases.fold(*(z for _, z in self.planned.values()))
        if isinstance(self.sampling, releases.PoissonSampling) and self.by_nodes:
            rounds = sum(count for _, count in self.book.events())
            return KnownCohorts(zeroed, rounds, self.shares, self.fewest, self.sampling.rate, self.privacy.method)
        return KnownCohorts(zeroed, participations, self.shares, self.fewest)

    def spent(self, state: PrivateState, rounds: int) -> accounting.Spent:
        """What the run has spent: ε of all that the ledger says was begun."""
        neighbours, server = releases.adjacency_of([self.sampling]), self._server(state)  # how many clients there are is public
        discrete = self.distributed or self.quantile is not None
        return accounting.Spent(
            self._events_epsilon(), self.privacy.delta, neighbours, self.accountant.method,
            math.inf if server is None else server, rounds, self.participations(rounds), self.nominal, discrete,
            hidden=self.by_nodes,
        )  # fmt: skip

    def _server(self, state: PrivateState) -> float | None:
        """ε for a server that sees noisy sums, by the noise of the clients who contributed; None: no finite ε holds."""
        if self.by_nodes:
            epsilon = server_epsilon(self.book.pages(), self.privacy.delta, method=self.privacy.method)
            return epsilon if epsilon is not None and epsilon < math.inf else None
        return self._known_cohorts(state.exposure).epsilon(self.privacy.delta)

    def table(self, state: PrivateState, evaluated: tuple[str, ...]) -> PrivacyTable:
        """ε by observer; `evaluated` says what of clients that train was evaluated exactly."""
        return ReleasedNoise(
            self.book.events(), self.privacy.delta, self._known_cohorts(self.participations(state.rounds)),
            self._server(state), self.distributed, self.nominal, self.clients, evaluated, self.privacy.method,
            self.book.releases,
        ).table()  # fmt: skip


def key_of_seed(algorithm: Algorithm, seed: int) -> bytes:
    """The key of noise from a `noise_seed`: a hash of it, the run's seed, and all parts that a release depends on.

    So methods of a comparison do not share their noise. Parts stand there as configurations write them, those of one's own by
    their import path, and 1 as 1.0: code that is renamed draws the same noise. Clients' own models change no release unless
    they are what clients send.
    """
    from equipoise.experiment.part_config import describe_part

    sent = algorithm.personal if algorithm.traits.personal.updates is not None else None
    usual = {"sampler": algorithm.drawn_by, "averaging": algorithm.reported, "personal": sent, "weights": None}
    table: dict[str, Any] = {"seeds": [str(algorithm.traits.privacy.noise_seed), str(seed)]}
    for kind, part in {each.name: getattr(algorithm, each.name) for each in fields(algorithm)}.items():
        part = usual.get(kind, part)
        try:
            table[kind] = None if part is None else describe_part(kind, part)
        except (ConfigError, AttributeError):
            table[kind] = f"{type(part).__module__}:{type(part).__qualname__}"
    text = json.dumps(_with_floats(table), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=SECRET_BYTES).digest()


def _with_floats(value: Any) -> Any:
    """A table for JSON with 1.0 for 1."""
    if isinstance(value, dict):
        return {str(key): _with_floats(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_with_floats(inner) for inner in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


@dataclass(frozen=True)
class Grid:
    """Updates in integer multiples of `step`: their largest norm in steps, each client's noise, and the modulus of the sum."""

    step: float
    norm_bound: float
    sigma: float
    modulus: int

    @property
    def variance(self) -> Fraction:
        """σ² as a rational with a small denominator, rounded up."""
        return Fraction(math.ceil(self.sigma**2 * 1024), 1024)
