"""The quantile of the clients' losses with differential privacy: a noisy histogram of the cohort, by secure sums only.

Each client sends its hierarchical histogram: 1 at its bin, at its pair of bins, at its four, …, times an integer c, plus its
own discrete Gaussian noise, modulo M. The server gets the sum, reads cumulative counts off it with few nodes each (dyadic
sums), and releases the bin edge whose count is nearest to the one asked for. Source: Pillutla et al. 2023, Algorithm 2 and
Theorem 6, with two corrections: the sensitivity is c√(log2 b) where c·log2 b was printed, and bins are closed below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from torch import Tensor

from equipoise.errors import (
    IncompatibleParts,
    InvalidParameter,
    is_integer,
    is_number,
    notify,
    require,
    require_integer,
    require_number,
)
from equipoise.privacy.discrete_gaussian import concentrated_epsilon, sample_discrete_gaussian
from equipoise.privacy.random_source import RandomSource
from equipoise.privacy.secure_sum import LARGEST_MODULUS, SimulatedSecureSum, check_modulus, power_of_two_above

Adjacency = Literal["add_remove", "replace_one"]

ENOUGH_NOISE = 20.0  # √m'·σ from which the sum's noise is as good as a Gaussian's for an accountant
LARGEST_BINS = 1 << 16
_LEAST_SIGMA = 2.0  # with it ψ, the price of adding discrete shares, is below 1e-14
_TIE = 1e-9  # counts nearer to each other than this are equal: θm has rounding errors


# ------------------------------------------------------------------------------------------------------------- the tree of bins


def bin_edges(bound: float, bins: int) -> Tensor:
    """l_0 = 0, l_1, …, l_b = B, equally spaced: (b + 1,) float64."""
    return torch.arange(bins + 1, dtype=torch.float64) / bins * bound


@lru_cache(maxsize=16)
def _level_offsets(bins: int) -> Tensor:
    """Where each level of the tree begins among the 2b − 2 nodes: leaves first, the two halves last; (log2 b,)."""
    sizes = [bins >> level for level in range(bins.bit_length() - 1)]
    return torch.tensor([sum(sizes[:level]) for level in range(len(sizes))])


@lru_cache(maxsize=16)
def _dyadic_nodes(bins: int) -> tuple[Tensor, Tensor]:
    """The nodes of the bins before each inner edge, and which edge each belongs to.

    Bins 1 … j are the ranges that the binary digits of j stand for, largest first: at level r, if digit r of j is 1, node
    ⌊j/2^r⌋ (counted from 1). E.g. 15 = 8 + 4 + 2 + 1: bins 1 to 8, 9 to 12, 13 and 14, 15.
    """
    offsets = _level_offsets(bins)
    inner = torch.arange(1, bins).unsqueeze(1)  # (b − 1, 1)
    level = torch.arange(len(offsets))  # (log2 b,)
    used = (inner >> level) & 1 == 1
    nodes = offsets + (inner >> level) - 1
    return nodes[used], inner.expand_as(used)[used]


def client_nodes(losses: Tensor, bound: float, bins: int) -> Tensor:
    """The nodes of the tree that hold each client's loss, clipped to [0, B]: (K, log2 b) positions, one at each level.

    Bin j is l_{j−1} ≤ F < l_j, and F = B is in the last one.
    """
    clipped = losses.double().clamp(0.0, bound)
    leaf = torch.bucketize(clipped, bin_edges(bound, bins)[1:-1].to(losses.device), right=True)  # edges at or below F
    level = torch.arange(bins.bit_length() - 1, device=losses.device)
    return _level_offsets(bins).to(losses.device) + (leaf.unsqueeze(1) >> level)


def client_contributions(losses: Tensor, *, bound: float, bins: int, sigma: float, scale: int, source: RandomSource) -> Tensor:
    """What each client puts into the secure sum: c × its hierarchical histogram + N_Z(0, σ²) at every node, (K, 2b − 2) int64.

    σ² is the exact square of the float σ. A sum of discrete Gaussians is not one, so every client's noise is drawn.
    """
    require(not bool(losses.isnan().any()), "losses", "must be numbers", math.nan, "Has a client diverged?")
    nodes = client_nodes(losses, bound, bins)
    noise = sample_discrete_gaussian(Fraction(sigma) ** 2, (len(losses), 2 * bins - 2), source=source).to(losses.device)
    return noise.scatter_add_(1, nodes, torch.full_like(nodes, scale))


def cumulative_counts(total: Tensor, *, bins: int, scale: int, clients: int | None = None) -> Tensor:
    """The estimated number of clients below each edge l_0 … l_b, from the centred sum: (b + 1,) float64.

    The count is 0 at l_0. At l_b it is `clients`, or the sum of the two halves of the tree if `clients` is None.
    """
    nodes, edge = _dyadic_nodes(bins)
    counts = torch.zeros(bins + 1, dtype=torch.int64, device=total.device)
    counts.index_add_(0, edge.to(total.device), total[nodes.to(total.device)])
    counts[bins] = total[-2:].sum() if clients is None else scale * clients
    return counts.double() / scale


def quantile_of_sum(total: Tensor, tail: float, *, bound: float, bins: int, scale: int, clients: int | None = None) -> Tensor:
    """The server's side: the edge with an estimated count below it nearest to (1 − θ)m, () float64; of equal ones the lowest.

    l_0 is among the edges, which (8) of the paper leaves out: if all clients are in the first bin, or the tail is 1, the others
    would keep nobody, or not everybody.
    """
    counts = cumulative_counts(total, bins=bins, scale=scale, clients=clients)
    distance = (counts - (1 - tail) * counts[-1]).abs()
    near = distance <= distance.min() + _TIE * counts[-1].abs().clamp(min=1.0)
    return bin_edges(bound, bins).to(total.device)[int(near.nonzero()[0])]


# --------------------------------------------------------------------------------------------------------- what a release costs


def histogram_sensitivity(scale: int, bins: int, adjacency: Adjacency = "add_remove") -> float:
    """The L2 norm of what one client changes in the sum: c√(log2 b), as its histogram has log2 b ones.

    Replacing one client by another takes as many ones away and puts as many elsewhere: c√(2 log2 b). Theorem 6 of the source
    has c·log2 b, which is the L1 norm.
    """
    good = adjacency in ("add_remove", "replace_one")
    require(good, "adjacency", 'must be "add_remove" or "replace_one"', adjacency)
    levels = math.log2(bins)
    return scale * math.sqrt(levels if adjacency == "add_remove" else 2 * levels)


def safe_modulus(scale: int, sigma: float, bins: int, most: int, *, failure: float = 1e-9) -> int:
    """The smallest power of two M ≥ 2 + 2cm + 2m√(2σ² log(16mb/δ)): with it no sum of m clients wraps around, but for δ.

    A sum that does wrap around is a wrong quantile, no loss of privacy. Source: Pillutla et al. 2023, Theorem 6.
    """
    spread = math.sqrt(2 * sigma**2 * math.log(16 * most * bins / failure))
    modulus = power_of_two_above(2 + 2 * scale * most + 2 * most * spread)
    require(modulus <= LARGEST_MODULUS, "scale", "must leave the sum room in 62 bits", scale, "Lower scale and sigma alike.")
    return modulus


@dataclass(frozen=True)
class PrivateQuantile:
    """The quantile of the cohort's losses with differential privacy, to one of `bins` + 1 edges in [0, `bound`].

    Losses above `bound` count as `bound`. More `bins` give a finer quantile and need more noise. At a given ε the noise
    grows like log2 bins, so use fewer bins than clients. Each client adds discrete Gaussian noise of standard deviation
    `sigma` to its histogram times `scale`, and the secure sum is modulo `modulus`; left at None, all three are set from the
    privacy budget.

    What is protected is a client's loss, and in a run also that it took part: there the number of shares of noise is fixed.
    All clients of a cohort count alike, so their base weights must be equal. A bin that holds more clients than the tail
    asks for is kept completely or not at all, whichever is nearer to the tail. With wide bins and a small tail, it may
    happen that no client is kept. If that happens at the start, when all losses are similar, training makes no progress. A
    `bound` below the first losses avoids this, because losses at or above `bound` are always kept when `bound` is released.

    Source: Pillutla et al. 2023, Algorithm 2, Theorem 6 with the tight sensitivity.

    >>> from equipoise.privacy.random_source import Seeded
    >>> exact = PrivateQuantile(bound=1.0, bins=4, sigma=0.0, scale=1).at(Seeded(0, "example"), clients=4)  # no noise
    >>> float(exact(torch.tensor([0.1, 0.3, 0.6, 0.9]), torch.full((4,), 0.25), 0.5))  # two of four losses are below 0.5
    0.5
    """

    reads_losses: ClassVar[bool] = False

    bound: float  # B: losses above it count as equal to it
    bins: int = 32  # b, a power of two
    sigma: float | None = None  # σ, the noise of one client; None: from the budget
    scale: int | None = None  # c, what a histogram is multiplied by; None: from the budget
    modulus: int | None = None  # M, which sums are modulo; None: large enough

    def __post_init__(self) -> None:
        require_number("bound", self.bound, "(0, ∞)", "Losses above it count as equal: a high typical loss.")
        good = is_integer(self.bins) and 2 <= self.bins <= LARGEST_BINS and self.bins & (self.bins - 1) == 0
        require(good, "bins", "must be a power of two from 2 to 65536", self.bins, "32 is a good start for 100 clients.")
        good = self.sigma is None or (is_number(self.sigma) and 0 <= self.sigma <= 2.0**30)
        require(good, "sigma", "must be a number from 0 to 2^30, or None", self.sigma, "0 is no noise and no privacy.")
        good = self.scale is None or (is_integer(self.scale) and 1 <= self.scale <= 1 << 40)
        require(good, "scale", "must be a whole number ≥ 1, or None", self.scale, "sigma / scale is the noise of one client.")
        if self.modulus is not None:
            check_modulus(self.modulus)
        if (self.sigma is None) != (self.scale is None) or (self.sigma is None and self.modulus is not None):
            raise IncompatibleParts(
                f"sigma={self.sigma}, scale={self.scale} and modulus={self.modulus} are set from a budget together.",
                "Give sigma and scale (and modulus, if you like), or none of them.",
            )

    def noise(self) -> tuple[float, int]:
        """σ and c, if they are set."""
        if self.sigma is None or self.scale is None:
            fix = "calibrated(multiplier, contributors) sets it, or a budget does."
            raise InvalidParameter("sigma", "must be set before a release", None, fix)
        return self.sigma, self.scale

    def at(self, source: RandomSource, *, clients: int | None = None, shares: int = 0) -> PrivateRelease:
        """The quantile source of one round: noise from `source`; `clients`, the number of contributors, if it is public.

        `shares` is the number of shares of noise in the sum (see `PrivateRelease`); 0: one from each client.
        """
        self.noise()
        require_integer("clients", clients, 1, none="a number that is not public")
        return PrivateRelease(self, source, clients, shares)

    def __call__(self, losses: Tensor, base_weights: Tensor, tail: float) -> Tensor:
        """Refused: every release needs fresh noise, which `at` gives it."""
        raise IncompatibleParts(
            f"{self!r} needs fresh noise in every round, and a budget for it.",
            "Add privacy=DifferentialPrivacy(epsilon, delta, clip) to the Algorithm, or call .at(source) for one round.",
        )

    def multiplier(self, contributors: int, *, adjacency: Adjacency = "add_remove") -> float:
        """The noise multiplier of the Gaussian mechanism of equal zCDP: 1/ε, with ε of `concentrated_epsilon`.

        `contributors` is the fewest clients whose noise may be in the sum. An accountant may take the release for that Gaussian
        mechanism's if √contributors · σ ≥ 20, which `calibrated` sees to; below, only its zCDP is right. 0 without noise.

        Neighbouring cohorts differ by one client more or less (`adjacency` "add_remove"), or by another client ("replace_one").

        >>> PrivateQuantile(1.0, bins=16, sigma=20.0, scale=1).multiplier(1)  # sensitivity √log₂ 16 = 2, so 20/2
        10.0
        """
        require_integer("contributors", contributors, 1)
        sigma, scale = self.noise()
        if sigma == 0:
            return 0.0
        sensitivity = histogram_sensitivity(scale, self.bins, adjacency)
        return 1 / concentrated_epsilon(sensitivity, sigma, contributors, 2 * self.bins - 2)

    def calibrated(
        self,
        multiplier: float,
        contributors: int,
        *,
        most: int | None = None,
        adjacency: Adjacency = "add_remove",
        failure: float = 1e-9,
        cohort: int | None = None,
    ) -> PrivateQuantile:
        """A copy with σ, c and M set for a noise multiplier of at least `multiplier` (and at most 1e-9 more).

        `contributors` is the fewest clients in the sum, `most` the most (None: the same), `cohort` how many a round has on
        average (None: the most), `failure` the probability that a sum wraps around. c is the smallest scale with
        √contributors · σ ≥ 20 and σ ≥ 2, where the shares of discrete noise add up to a Gaussian's privacy; σ then follows
        without rounding. A larger c would need more bits and gain nothing.

        Neighbouring cohorts differ by one client more or less (`adjacency` "add_remove"), or by another client ("replace_one").
        """
        require_number("multiplier", multiplier, "(0, ∞)", "It is noise over sensitivity, as of a Gaussian.")
        require_integer("contributors", contributors, 1)
        most = contributors if most is None else most
        require_integer("most", most, contributors, fix=f"At least contributors={contributors} are in the sum.")
        require_number("failure", failure, "(0, 1)")
        noise_per_unit = multiplier * histogram_sensitivity(1, self.bins, adjacency)  # √m'·σ/c
        scale = math.ceil(max(ENOUGH_NOISE, _LEAST_SIGMA * math.sqrt(contributors)) / noise_per_unit)
        sigma = noise_per_unit * scale / math.sqrt(contributors)
        calibrated, excess = replace(self, sigma=sigma, scale=scale, modulus=None), 1e-15

        def short() -> bool:
            little = math.sqrt(contributors) * calibrated.noise()[0] < ENOUGH_NOISE
            return little or calibrated.multiplier(contributors, adjacency=adjacency) < multiplier

        while short():  # by rounding, or by ψ: to the safe side
            calibrated, excess = replace(calibrated, sigma=sigma * (1 + excess)), 2 * excess
        self.check_cohort(most if cohort is None else cohort)
        modulus = safe_modulus(scale, sigma * (1 + excess), self.bins, most, failure=failure)
        return replace(calibrated, modulus=modulus)

    def check_cohort(self, clients: int) -> None:
        """A notice if there are more bins than `clients`, the clients to count in them."""
        if self.bins > clients:
            fewer = 1 << max(1, clients.bit_length() - 1)
            text = (
                f"{self.bins} bins count the {clients} clients of a round: finer than the clients tell apart, and noisier for "
                f"it. Give no more bins than a round has clients (clients_per_round): bins={fewer} or fewer."
            )
            notify(text)


@dataclass(frozen=True, eq=False)
class PrivateRelease:
    """The quantile source of one round: `settings` with their noise, drawn from `source`.

    Losses are clipped to [0, B], counted in b bins (a power of two), multiplied by the scale c, and each client adds N_Z(0, σ²)
    to each of its 2b − 2 nodes. `clients` is the number of contributors if it is public, else None: then the noisy total stands
    in. With `shares` > 0 the sum has exactly that number of shares of noise: clients beyond them add none, and the server adds
    what is missing. Otherwise the width of the noise would tell how many took part, which is all that hides a client who was
    added or removed. 0: one from each client, for cohorts of a size that is public. With σ = 0 the quantile is the bin edge
    that sorting would give, and nothing is private.

    Clients then filter themselves by their *clipped* loss, clip(F, 0, B) ≥ what is returned. As the edges lie in [0, B], only
    a loss below 0 would be judged differently as it is: losses that are never negative need no clipping there.

    Source: Pillutla et al. 2023, Algorithm 2.
    """

    reads_losses: ClassVar[bool] = False

    settings: PrivateQuantile
    source: RandomSource
    clients: int | None = None
    shares: int = 0

    def __call__(self, losses: Tensor, base_weights: Tensor, tail: float) -> Tensor:
        """The noisy (1 − tail)-quantile, () float64, of losses (K,) under equal base weights."""
        alike = not len(base_weights) or bool((base_weights - base_weights[0]).abs().max() <= 1e-6 * base_weights[0].abs())
        if not alike:
            rule, fix = "must be equal within a cohort under a private quantile", "Use uniform weights: a client counts once."
            raise InvalidParameter("base_weights", rule, (float(base_weights.min()), float(base_weights.max())), fix)
        require_number("tail", tail, "(0, 1]", "0.5 asks for the median.")
        settings = self.settings
        bound, bins, scale = settings.bound, settings.bins, settings.noise()[1]
        return quantile_of_sum(self.noisy_histogram(losses), tail, bound=bound, bins=bins, scale=scale, clients=self.clients)

    def noisy_histogram(self, losses: Tensor) -> Tensor:
        """What is released: the centred sum of the clients' hierarchical histograms, with noise, (2b − 2,) int64.

        `losses` (K,) are the clients' losses.
        """
        (sigma, scale), shares, source = self.settings.noise(), self.shares, self.source
        bound, bins = self.settings.bound, self.settings.bins
        modulus = self.settings.modulus or safe_modulus(scale, sigma, bins, max(1, len(losses), shares))
        noisy = min(shares, len(losses)) if shares else len(losses)
        rows = [
            client_contributions(losses[:noisy], bound=bound, bins=bins, sigma=sigma, scale=scale, source=source),
            client_contributions(losses[noisy:], bound=bound, bins=bins, sigma=0.0, scale=scale, source=source),
        ]
        if (missing := shares - len(losses)) > 0:
            extra = sample_discrete_gaussian(Fraction(sigma) ** 2, (missing, 2 * bins - 2), source=source)
            rows.append(extra.to(losses.device))
        return SimulatedSecureSum(modulus).sum(torch.cat(rows))
