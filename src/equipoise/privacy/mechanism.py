"""The privacy of a federated run as parts: a budget, fixed noise, clipping that adapts, and secure aggregation alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from equipoise.core.abilities import is_part
from equipoise.errors import IncompatibleParts, require, require_integer, require_kind, require_number
from equipoise.privacy.noise_plan import NoisePlan
from equipoise.privacy.private_sums import PrivateSums
from equipoise.privacy.protected import Protected
from equipoise.privacy.releases import check_delta
from equipoise.privacy.secure_aggregate import MaskedSum, SecureSumRule
from equipoise.privacy.secure_sum import check_modulus
from equipoise.types import ClipRule, RunSize

if TYPE_CHECKING:
    from equipoise.algorithm import Algorithm

_LARGEST_EXPONENT, _SMALLEST_BOUND = 100.0, 1e-100  # a clip bound stays a positive finite number
Noise = Literal["central", "distributed"]


@dataclass(frozen=True)
class AdaptiveClip:
    """A clip bound that follows the `quantile` of the clients' update norms, found privately: C ← C · e^{−rate (b − quantile)}.

    b is the noisy share of updates with a norm of at most C. The count that it comes from is one more release of the round;
    it costs `ratio` times what all others together do, in zCDP.

    Source: Andrew, Thakkar, McMahan, Ramaswamy 2021, Algorithm 1.

    >>> AdaptiveClip(quantile=0.5, rate=2 * math.log(2)).next_bound(1.0, share=1.0)  # e^(−2 · log 2 · ½)
    0.5
    """

    quantile: float = 0.5  # the share of updates that the bound is to hold, in (0, 1)
    rate: float = 0.2  # how fast the bound moves
    ratio: float = 0.05  # the cost of the count, in zCDP, in units of all other releases of the round

    def __post_init__(self) -> None:
        require_number("quantile", self.quantile, "(0, 1)")
        for name in ("rate", "ratio"):
            require_number(name, getattr(self, name), "(0, ∞)")

    def next_bound(self, bound: float, share: float) -> float:
        """The bound after a round in which a noisy `share` of updates had a norm within `bound`."""
        exponent = -self.rate * (share - self.quantile)
        moved = bound * math.exp(min(max(exponent, -_LARGEST_EXPONENT), _LARGEST_EXPONENT))  # noise may be of any size
        return min(max(moved, _SMALLEST_BOUND), 1 / _SMALLEST_BOUND)


def write_as_floats(privacy: DifferentialPrivacy | GaussianMechanism) -> None:
    """Keep whole numbers among the settings as floats: 1 and 1.0 are the same setting, and must draw the same noise."""
    for name in ("epsilon", "delta", "clip", "quantile_ratio", "noise_multiplier", "loss_bound", "step"):
        if (value := vars(privacy).get(name)) is not None:
            object.__setattr__(privacy, name, float(value))


@dataclass(frozen=True)
class DifferentialPrivacy:
    """Client-level differential privacy: the trained model is (ε, δ)-private in each client's data and participation.

    Every update is clipped to a norm of `clip` (which `clip_rule`, an AdaptiveClip, may move over the rounds), Gaussian
    noise is added to the sum, and the sum is divided by a number fixed in advance: the expected number of clients, times
    the tail for Δ-FL. Without a `noise_multiplier`, the noise is the smallest that keeps all rounds of the run within
    `epsilon` at `delta`. With one (noise over sensitivity, of all releases of a round together), the run stops before the
    round that would exceed `epsilon` (None: no budget).

    Risks whose weights depend on losses release more than the sum of updates: Δ-FL a quantile (PrivateQuantile), Tilted and
    QFair the sum of their weights, from losses clipped to [0, `loss_bound`]. That release costs `quantile_ratio` times what the
    sum of updates does, in zCDP. Anything else that would leak is refused by the Algorithm.

    `noise="central"` is added by the server, who is trusted. `noise="distributed"` is discrete, added by the clients before
    a secure sum, each share so large that `fewest` shares suffice (None: half of the expected cohort). A sum always has as
    many shares as the expected number of clients. Otherwise its noise would reveal how many clients took part. Further
    clients add no noise, and the server adds the missing shares. `step` is the grid of the rounding (None: chosen).

    Noise and cohorts follow from a secret that the operating system draws for each run (docs/privacy.md). A `noise_seed` draws
    the noise again in each run, for tests; then no ε holds, none is printed, and a federation refuses it. `method` is the
    accountant's ("pld", "rdp", None: the tighter that applies).

    Source: McMahan et al. 2018 (DP-FedAvg); Pillutla et al. 2023, Algorithm 4, with the corrections in docs/privacy.md;
    Kairouz, Liu, Steinke 2021 (distributed noise).

    >>> privacy = DifferentialPrivacy(epsilon=None, delta=1e-5, clip=1.0, noise_multiplier=0.0)  # clipping alone
    >>> import equipoise as eq
    >>> data = eq.data.gaussian_means([[0.0], [4.0]], examples=10, exact=True)  # updates of length 0 and 2 in round 1
    >>> algorithm = eq.Algorithm(solver=eq.solvers.SGD(lr=0.25, batch_size=None), weights="uniform", privacy=privacy)
    >>> result = eq.train(eq.models.MeanEstimator(1), data, algorithm, rounds=1, clients_per_round=2)
    >>> round(result.model.point.item(), 4)  # (0 + 1)/2
    0.5
    """

    epsilon: float | None  # the budget of the run; None: none
    delta: float  # the probability that ε leaves open, in (0, 1)
    clip: float  # the largest norm of an update
    quantile_ratio: float = 0.25  # the cost of the release about losses, in zCDP, in units of the sum of updates
    noise_multiplier: float | None = None  # noise over sensitivity; None: the least within `epsilon`
    clip_rule: ClipRule | None = None  # how `clip` moves over the rounds; None: it stays
    loss_bound: float | None = None  # losses above it count as equal to it
    noise: Noise = "central"  # who adds the noise: the server, or the clients
    step: float | None = None  # the grid of distributed noise; None: chosen
    fewest: int | None = None  # shares of distributed noise that suffice; None: half of the expected cohort
    noise_seed: int | None = None  # of noise that repeats, for tests: no ε holds then; None: a secret of the system
    method: Literal["pld", "rdp"] | None = None  # of accounting; None: the tighter one that applies

    def __post_init__(self) -> None:
        require_number("epsilon", self.epsilon, "(0, ∞)", none="no budget")
        check_delta(self.delta)
        none = self.epsilon is None and self.noise_multiplier is None
        require(not none, "epsilon", "or noise_multiplier must be given", None, "Say how much privacy, or how much noise.")
        require_number("clip", self.clip, "(0, ∞]")
        good = self.clip < math.inf or (self.noise_multiplier == 0 and self.clip_rule is None)
        require(good, "clip", "must be finite where there is noise", self.clip, "An update's norm is what noise hides.")
        require_kind("clip_rule", "clip_rule", self.clip_rule)
        good = self.clip_rule is None or is_part(self.clip_rule, "next_bound", "ratio")
        require(good, "clip_rule", "must be a rule such as AdaptiveClip(), or None", self.clip_rule)
        require_number("quantile_ratio", self.quantile_ratio, "(0, ∞)")
        require_number("noise_multiplier", self.noise_multiplier, "[0, ∞)", none="the least noise within the budget")
        require_number("loss_bound", self.loss_bound, "(0, ∞)", none="no bound")
        require_number("step", self.step, "(0, ∞)", none="one that fits the noise")
        require_integer("fewest", self.fewest, 1, none="half of the expected cohort")
        require(self.noise in ("central", "distributed"), "noise", 'must be "central" or "distributed"', self.noise)
        require_integer("noise_seed", self.noise_seed, 0, none="noise from a secret")
        require(self.method in (None, "pld", "rdp"), "method", 'must be "pld", "rdp" or None', self.method)
        write_as_floats(self)
        if self.noise == "distributed" and (self.clip_rule is not None or self.clip == math.inf):
            raise IncompatibleParts(
                f"Distributed noise lies on a grid made for one clip bound, but this is {self.clip_rule or self.clip!r}.",
                "Give a finite clip and no clip_rule, or use central noise.",
            )

    def protect(self, algorithm: Algorithm, size: RunSize) -> Protected:
        """The protection of one run of `algorithm`, with the noise that the size of the run needs.

        `size` holds the numbers of rounds and of clients.
        """
        noise = NoisePlan(self, algorithm, size)
        return Protected((PrivateSums(noise),), size.rounds, noise)


@dataclass(frozen=True)
class GaussianMechanism:
    """Clipping and a fixed amount of noise, without a budget: DifferentialPrivacy(None, delta, clip, noise_multiplier=…).

    ε at `delta` is reported. `noise_multiplier` is noise over sensitivity of all releases of a round together; an infinite
    `clip` with no noise is the plain run with the fixed denominator. `noise_seed` is as in DifferentialPrivacy.

    Source: McMahan et al. 2018 (DP-FedAvg).

    >>> GaussianMechanism(clip=1.0, noise_multiplier=2.0).as_budget().epsilon is None  # no budget
    True
    """

    clip: float  # the largest norm of an update
    noise_multiplier: float  # noise over sensitivity, of all releases of a round together
    delta: float = 1e-5  # the probability that ε leaves open, in (0, 1)
    quantile_ratio: float = 0.25  # the cost of the release about losses, in zCDP, in units of the sum of updates
    clip_rule: ClipRule | None = None  # how `clip` moves over the rounds; None: it stays
    loss_bound: float | None = None  # losses above it count as equal to it
    noise_seed: int | None = None  # of noise that repeats, for tests: no ε holds then; None: a secret of the system

    def __post_init__(self) -> None:
        self.as_budget()
        write_as_floats(self)

    def as_budget(self) -> DifferentialPrivacy:
        """The mechanism as DifferentialPrivacy without a budget."""
        return DifferentialPrivacy(
            None, self.delta, self.clip, self.quantile_ratio, self.noise_multiplier, self.clip_rule, self.loss_bound,
            noise_seed=self.noise_seed,
        )  # fmt: skip

    def protect(self, algorithm: Algorithm, size: RunSize) -> Protected:
        """The protection of one run of `algorithm`.

        `size` holds the numbers of rounds and of clients.
        """
        return self.as_budget().protect(algorithm, size)


@dataclass(frozen=True)
class SecureAggregation:
    """The server learns sums over the cohort, not the update or the loss of one client.

    Clients round weight · update and weight to multiples of `step`, each up or down by chance so that the mean is right,
    and their sum modulo `modulus` is all that is seen. This is not differential privacy: sums are exact. Updates that are
    not finite, or do not fit, are replaced by zeros by the client itself, and cannot be named. A client that lies is not
    detected. Risks with weights by loss need `loss_bound`, a public bound up to which losses count (Tilted, QFair). Δ-FL
    needs quantile=SecureHistogram(bound, bins); SecureSums() is only for simulations, because its sums reveal who is in the
    tail.

    A sum over fewer than `fewest` clients is not unmasked. If the histogram counts fewer clients in the tail, the sum over
    the tail is not unmasked either, and the round does not change the model.

    In a simulation the arithmetic, wraparound included, is that of the real protocol, without its masks.

    Source: Bonawitz et al. 2017.

    >>> privacy = SecureAggregation()
    >>> import equipoise as eq
    >>> data = eq.data.gaussian_means([[0.0], [4.0]], examples=10, exact=True)  # updates of length 0 and 2 in round 1
    >>> algorithm = eq.Algorithm(solver=eq.solvers.SGD(lr=0.25, batch_size=None), weights="uniform", privacy=privacy)
    >>> result = eq.train(eq.models.MeanEstimator(1), data, algorithm, rounds=1, clients_per_round=2)
    >>> round(result.model.point.item(), 4)  # the sum is exact up to rounding: (0 + 2)/2
    1.0
    """

    step: float = 2.0**-24  # the grid that numbers are rounded to
    modulus: int = 2**48  # sums are modulo this number
    loss_bound: float | None = None  # losses above it count as equal to it
    fewest: int = 2  # the fewest clients whose sum is unmasked

    only_sums: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_number("step", self.step, "(0, ∞)")
        check_modulus(self.modulus)
        require_number("loss_bound", self.loss_bound, "(0, ∞)", none="no bound")
        require_integer("fewest", self.fewest, 2, fix="A sum over one client is its own update.")

    def protect(self, algorithm: Algorithm, size: RunSize) -> Protected:
        """The protection of one run of `algorithm`.

        `size` holds the numbers of rounds and of clients.
        """
        enough, fix = size.clients_per_round >= self.fewest, "Draw more clients per round."
        rule = f"must be at least {self.fewest}, the fewest clients whose sum is unmasked: one client's sum is its own"
        require(enough, "clients_per_round", rule, size.clients_per_round, fix)
        around = algorithm.traits.aggregator.around
        masked = MaskedSum(self, around or algorithm.aggregator, around is not None, size.seed)
        return Protected((SecureSumRule(self, algorithm, size.seed, size.ids), masked), size.rounds)
