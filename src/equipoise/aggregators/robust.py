"""Aggregators that bound what a few malicious clients can do. Each is a pure function over updates (K, D) and a thin class.

Weights (K,) sum to 1 and come from the risk. An update that is not finite (NaN, infinity) is left out, and the weights of the
others are scaled up; a total of zero if none is left. `malicious` is the number of attackers that the server expects.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from equipoise.aggregators.by_coordinate import coordinate_median, trimmed_mean
from equipoise.aggregators.weighted_mean import weighted_mean
from equipoise.errors import require, require_integer, require_number

_BLOCK = 2**19  # numbers looked at together on a CPU
_DEVICE_BLOCK = 2**24  # on a GPU, where starting work on a small block takes longer than the work


def finite_rows(updates: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The updates without NaN or infinity, their weights scaled to sum to 1 (float64), and which they are (K,) bool."""
    # A row's sum is finite only if all its entries are; where it overflows, the entries decide.
    good = torch.isfinite(updates.sum(1))
    if not bool(good.all()):
        good = torch.isfinite(updates).all(1)
    kept = weights.double().to(updates.device)[good]
    total = kept.sum()
    kept = kept / total if bool(total > 0) else kept
    return (updates if bool(good.all()) else updates[good]), kept, good


def update_norms(updates: Tensor) -> Tensor:
    """L2 norms of the rows in float64, which holds the squares of any float32."""
    norms: Tensor = torch.linalg.vector_norm(updates, dim=1, dtype=torch.float64)
    return norms


def weighted_quantile(values: Tensor, weights: Tensor, share: float) -> Tensor:
    """The smallest value with at least `share` of the weight at or below it; values (K,), weights summing to 1."""
    ordered, order = values.sort()
    place = int(torch.searchsorted(weights[order].cumsum(0), share - 1e-12))
    return ordered[min(place, len(values) - 1)]


# ------------------------------------------------------------------------------------------------------- by distance and norm


def gram_matrix(updates: Tensor, centre: Tensor | None = None) -> Tensor:
    """⟨u_j − c, u_k − c⟩ of all pairs, (K, K), in float64; some coordinates at a time, without a copy of all updates."""
    gram = torch.zeros(len(updates), len(updates), dtype=torch.float64, device=updates.device)
    width = max(1, (_BLOCK if updates.device.type == "cpu" else _DEVICE_BLOCK) // max(1, len(updates)))
    for start in range(0, updates.shape[1], width):
        part = updates[:, start : start + width].double()
        if centre is not None:
            part = part - centre[start : start + width].double()
        gram.addmm_(part, part.t())
    return gram


def geometric_median(updates: Tensor, weights: Tensor, *, iterations: int, smoothing: float) -> Tensor:
    """argmin_z Σ π_k ‖z − u_k‖ by Weiszfeld's iteration, z ← Σ β_k u_k / Σ β_k with β_k ∝ π_k / max(‖z − u_k‖, ν).

    It starts at the coordinate median c, and ν = `smoothing` × the median distance to that point: the start is robust already.
    Since z − c = Σ β_k (u_k − c), the Gram matrix of the u_k − c gives all distances, and no iteration touches the updates.
    """
    start = coordinate_median(updates, weights)
    gram = gram_matrix(updates, start)
    far = ~torch.isfinite(gram.diagonal())  # beyond what squares hold: infinitely far, and so without a share
    gram[far], gram[:, far] = 0.0, 0.0
    squares = gram.diagonal().clone()
    distances = squares.sqrt().masked_fill(far, math.inf)
    typical = float(weighted_quantile(distances, weights, 0.5))
    floor = smoothing * typical or 1e-12
    shares = torch.zeros_like(weights)  # of z − c, at first zero
    for _ in range(iterations):
        after = weights / distances.clamp(min=floor)
        after = after / after.sum()
        step, shares = after - shares, after
        if math.sqrt(max(0.0, float(step @ gram @ step))) <= 1e-6 * typical:
            break
        pulled = gram @ shares
        distances = (squares - 2 * pulled + shares @ pulled).clamp(min=0.0).sqrt().masked_fill(far, math.inf)
    return weighted_mean(updates, shares)


def squared_distances(updates: Tensor) -> Tensor:
    """‖u_j − u_k‖² of all pairs, (K, K), in float64."""
    if updates.dtype == torch.float64:  # by differences: those of products could cancel
        return torch.cdist(updates, updates, compute_mode="donot_use_mm_for_euclid_dist").square()
    gram = gram_matrix(updates)  # products of narrower numbers are exact in float64, which leaves digits for differences
    return (gram.diagonal() + gram.diagonal().unsqueeze(1) - 2 * gram).clamp(min=0.0)


def krum_scores(updates: Tensor, malicious: int) -> Tensor:
    """Σ ‖u_k − u_j‖² over the K − f − 2 nearest others j, (K,) float64: small for an update among many like it."""
    squares = squared_distances(updates)
    squares.fill_diagonal_(math.inf)  # oneself is no neighbour
    return squares.sort(dim=1).values[:, : len(updates) - malicious - 2].sum(1)


def clipped_mean(updates: Tensor, weights: Tensor, bound: float) -> Tensor:
    """Σ π_k u_k · min(1, bound / ‖u_k‖)."""
    return weighted_mean(updates, weights.to(updates.device) * (bound / update_norms(updates).clamp(min=1e-300)).clamp(max=1.0))


def min_norm_weights(updates: Tensor, centre: Tensor, epsilon: float) -> Tensor:
    """The λ with the least ‖Σ λ_k u_k‖² over the simplex with |λ_k − centre_k| ≤ ε, (K,) float64, by scipy's lsq_linear.

    With A the square root of the Gram matrix it is ‖A λ‖², least squares in a box; a heavy row makes λ sum to 1.
    """
    from scipy.optimize import lsq_linear

    if epsilon == 0 or len(centre) == 1:
        return centre.double()
    values, vectors = np.linalg.eigh(gram_matrix(updates).cpu().numpy())
    root = (vectors * np.sqrt(np.clip(values, 0.0, None))).T
    heavy = 1e4 * max(1.0, float(np.sqrt(values[-1] / len(values))))  # then the sum is right to nine digits
    start = centre.double().cpu().numpy()
    low, high = np.maximum(start - epsilon, 0.0), np.minimum(start + epsilon, 1.0)
    rows, right = np.vstack([root, np.full_like(start, heavy)]), np.append(np.zeros_like(start), heavy)
    solution = lsq_linear(rows, right, bounds=(low, high), method="bvls", tol=1e-12, max_iter=50 * len(start))
    weights = np.clip(solution.x, low, high)
    return torch.from_numpy(weights / weights.sum()).to(updates.device)


# ------------------------------------------------------------------------------------------------------------------ the parts


class FiniteUpdates(NamedTuple):
    """The finite ones among a round's updates."""

    rows: Tensor  # (R, D)
    weights: Tensor  # (R,), summing to 1
    good: Tensor  # (K,) bool: which of all updates they are
    losses: Tensor | None  # (R,) on the CPU
    keys: Tensor  # (R,) int64 on the CPU: a random stream of each client in this round


class RobustAggregator(ABC):
    """Aggregates the updates that are finite; the total is zero where too few of them are left."""

    @property
    def linear(self) -> bool:
        """Whether totals over chunks of a cohort add up to the total over the cohort."""
        return False

    def __call__(
        self, updates: Tensor, weights: Tensor, *, losses: Tensor | None = None, state: Any = None, keys: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """The total (D,) of the finite ones among updates (K, D), zeros if they are too few; the state as it is."""
        self._check(len(updates), losses)
        rows, kept, good = finite_rows(updates, weights)
        own = good.cpu()
        streams = (torch.arange(len(updates)) if keys is None else keys.cpu())[own]
        given = FiniteUpdates(rows, kept, good, None if losses is None else losses.double().cpu()[own], streams)
        total = self._total(given) if len(rows) else None
        return (torch.zeros_like(updates[0]) if total is None else total), state

    def _check(self, clients: int, losses: Tensor | None) -> None:  # noqa: B027 — most aggregators have nothing to refuse
        """Refuse what the aggregator cannot work with."""

    @abstractmethod
    def _total(self, given: FiniteUpdates) -> Tensor | None:
        """The total (D,) of one or more finite updates."""


@dataclass(frozen=True)
class Median(RobustAggregator):
    """The weighted median of each coordinate: attackers with less than half of the weight cannot leave the honest range.

    Source: Yin et al. 2018; Li 2023 (thesis), chapter 5.

    >>> updates = torch.tensor([[1.0], [2.0], [100.0]])
    >>> Median()(updates, torch.full((3,), 1 / 3))[0], Median()(updates, torch.tensor([0.2, 0.2, 0.6]))[0]
    (tensor([2.]), tensor([100.]))
    """

    def _total(self, given: FiniteUpdates) -> Tensor:
        return coordinate_median(given.rows, given.weights)


@dataclass(frozen=True)
class TrimmedMean(RobustAggregator):
    """The weighted mean of each coordinate without the `fraction` of the weight at either end.

    Attackers with less than `fraction` of the weight cannot leave the honest range.

    Source: Yin et al. 2018.

    >>> TrimmedMean(0.25)(torch.tensor([[1.0], [2.0], [3.0], [100.0]]), torch.full((4,), 0.25))[0]  # (2 + 3)/2
    tensor([2.5000])
    """

    fraction: float = 0.1  # the share of the weight that is cut at either end, in [0, 0.5)

    def __post_init__(self) -> None:
        require_number("fraction", self.fraction, "[0, 0.5)", "It is cut at either end.")

    def _total(self, given: FiniteUpdates) -> Tensor:
        return trimmed_mean(given.rows, given.weights, self.fraction)


@dataclass(frozen=True)
class GeometricMedian(RobustAggregator):
    """The point with the smallest weighted sum of distances to the updates: robust while attackers hold less than half.

    Minimises Σ π_k ‖z − u_k‖ over z by z ← Σ β_k u_k / Σ β_k with β_k = π_k / max(‖z − u_k‖, ν), starting at the median of each
    coordinate.

    Source: Pillutla, Kakade, Harchaoui 2022 (RFA), smoothed Weiszfeld iteration.

    >>> total, _ = GeometricMedian()(torch.tensor([[1.0], [2.0], [100.0]]), torch.full((3,), 1 / 3))  # on a line: the median
    >>> round(float(total), 3)
    2.0
    """

    iterations: int = 50  # the most steps of the iteration
    smoothing: float = 1e-3  # ν, the least distance, as a share of the median distance

    def __post_init__(self) -> None:
        require_integer("iterations", self.iterations, 1)
        require_number("smoothing", self.smoothing, "(0, 1)", "It is a share of the median distance.")

    def _total(self, given: FiniteUpdates) -> Tensor:
        rows, kept = given.rows, given.weights
        return geometric_median(rows, kept, iterations=self.iterations, smoothing=self.smoothing)


@dataclass(frozen=True)
class AgainstAttackers(RobustAggregator):
    """An aggregator that is told how many attackers to expect."""

    malicious: int = 1  # f, how many attackers the server expects in a round

    def __post_init__(self) -> None:
        require_integer("malicious", self.malicious, 0)

    def _require_clients(self, clients: int, needed: int, rule: str) -> None:
        text = f"is too large for {clients} clients with a weight: {rule}"
        require(clients >= needed, "malicious", text, self, "Lower it, take more clients per round, or widen the tail.")

    def _still_expected(self, good: Tensor) -> int:
        """How many attackers are expected among the finite updates: those that sent NaN gave themselves away."""
        return max(0, self.malicious - int((~good).sum()))


@dataclass(frozen=True)
class Krum(AgainstAttackers):
    """The update with the nearest neighbours, by the sum Σ ‖u_k − u_j‖² over its K − f − 2 nearest others.

    It needs K ≥ 2f + 3 clients with a positive weight in every round. It does not use the weights otherwise. The result is
    within √(K − f − 2) honest diameters of an honest update.

    Source: Blanchard et al. 2017; Li 2023 (thesis), chapter 5. The published code counts the client itself as a neighbour.

    >>> updates = torch.tensor([[0.0], [1.0], [3.0], [6.0], [100.0]])  # K − f − 2 = 2 neighbours; least: 1² + 2² = 5
    >>> Krum(malicious=1)(updates, torch.full((5,), 0.2))[0]
    tensor([1.])
    """

    picks_one: ClassVar[bool] = True

    def _check(self, clients: int, losses: Tensor | None) -> None:
        needed = 2 * self.malicious + 3
        self._require_clients(clients, needed, f"Krum needs K ≥ 2f + 3 = {needed}")

    def _total(self, given: FiniteUpdates) -> Tensor | None:
        rows, kept = given.rows, given.weights
        left = self._still_expected(given.good)
        if len(rows) < 3 + left:
            return None
        return self._chosen(rows, kept, krum_scores(rows, left).argsort(stable=True)[: len(rows) - left])

    def _chosen(self, rows: Tensor, kept: Tensor, best: Tensor) -> Tensor:
        """The total of the rows with the best scores, whose places are `best`, best first."""
        return rows[best[0]].clone()


@dataclass(frozen=True)
class MultiKrum(Krum):
    """The weighted mean of the K − f updates with the best Krum scores, weights scaled to sum to 1 over them.

    Source: Blanchard et al. 2017; Li 2023 (thesis), chapter 5.

    >>> updates = torch.tensor([[0.0], [1.0], [3.0], [6.0], [100.0]])
    >>> MultiKrum(malicious=1)(updates, torch.full((5,), 0.2))[0]  # (0 + 1 + 3 + 6)/4
    tensor([2.5000])
    """

    def _chosen(self, rows: Tensor, kept: Tensor, best: Tensor) -> Tensor:
        return weighted_mean(rows[best], kept[best] / kept[best].sum())


@dataclass(frozen=True)
class NormClip(RobustAggregator):
    """The weighted mean of updates clipped to a norm of at most `bound`; None: to the weighted median norm of the cohort.

    With a fixed bound it is linear, and updates are added up as they come.

    The total is Σ π_k u_k · min(1, bound/‖u_k‖).

    Source: Sun et al. 2019; Li 2023 (thesis), chapter 5 ("clipping").

    >>> NormClip(bound=1.0)(torch.tensor([[3.0, 4.0], [0.0, 1.0]]), torch.tensor([0.5, 0.5]))[0]  # (0.6, 0.8) and (0, 1)
    tensor([0.3000, 0.9000])
    """

    bound: float | None = None  # the largest norm; None: the weighted median norm

    def __post_init__(self) -> None:
        require_number("bound", self.bound, "(0, ∞)", none="the median norm")

    @property
    def linear(self) -> bool:
        """Whether the bound is fixed, so that totals over chunks add up."""
        return self.bound is not None

    @property
    def clips_to(self) -> float | None:
        """The norm that each update is clipped to, if that is fixed."""
        return self.bound

    def __call__(
        self, updates: Tensor, weights: Tensor, *, losses: Tensor | None = None, state: Any = None, keys: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """The weighted mean (D,) of the clipped updates; where the bound is not fixed, zeros if none is finite."""
        if self.bound is not None:
            return clipped_mean(updates, weights, self.bound), state
        return super().__call__(updates, weights, losses=losses, state=state, keys=keys)

    def _total(self, given: FiniteUpdates) -> Tensor:
        rows, kept = given.rows, given.weights
        return clipped_mean(rows, kept, float(weighted_quantile(update_norms(rows), kept, 0.5)))


@dataclass(frozen=True)
class KNorm(AgainstAttackers):
    """The weighted mean without the k updates of largest norm, weights scaled to sum to 1 over the others.

    k is `malicious`.

    Source: Li 2023 (thesis), chapter 5 ("k-norm").

    >>> KNorm(malicious=1)(torch.tensor([[1.0], [2.0], [-100.0]]), torch.full((3,), 1 / 3))[0]  # (1 + 2)/2
    tensor([1.5000])
    """

    def _check(self, clients: int, losses: Tensor | None) -> None:
        self._require_clients(clients, self.malicious + 1, "k-norm must leave one")

    def _total(self, given: FiniteUpdates) -> Tensor | None:
        rows, kept = given.rows, given.weights
        cut = self._still_expected(given.good)
        if len(rows) <= cut:
            return None
        smallest = update_norms(rows).argsort(stable=True)[: len(rows) - cut]
        return weighted_mean(rows[smallest], kept[smallest] / kept[smallest].sum())


@dataclass(frozen=True)
class KLoss(AgainstAttackers):
    """The update of the client with the (k + 1)-th largest reported loss.

    It trusts the reported losses: an attacker who reports a small loss is never removed. It needs the losses of every
    round.

    k is `malicious`.

    Source: Li 2023 (thesis), chapter 5 ("k-loss").

    >>> losses = torch.tensor([0.1, 5.0, 0.9])
    >>> KLoss(malicious=1)(torch.tensor([[1.0], [2.0], [3.0]]), torch.full((3,), 1 / 3), losses=losses)[0]
    tensor([3.])
    """

    needs_losses: ClassVar[bool] = True
    picks_one: ClassVar[bool] = True
    picks_large_loss: ClassVar[bool] = True

    def _check(self, clients: int, losses: Tensor | None) -> None:
        require(losses is not None, "losses", "must be given to k-loss", None)
        self._require_clients(clients, self.malicious + 1, "k-loss needs a (k + 1)-th loss")

    def _total(self, given: FiniteUpdates) -> Tensor:
        rows = given.rows
        reported = cast(Tensor, given.losses)
        rank = min(self._still_expected(given.good), len(rows) - 1)
        return rows[int(reported.argsort(descending=True, stable=True)[rank])].clone()


@dataclass(frozen=True)
class FedMGDA(RobustAggregator):
    """FedMGDA+: the shortest vector in the hull of the normalised updates, with weights within ε of the risk's.

    min ‖Σ λ_k u_k/‖u_k‖‖² over the simplex with |λ_k − π_k| ≤ ε: a direction that serves all clients; with ε = 0 the weighted
    mean of the directions. It is given the weighted median norm of the updates, so that the server's learning rate means the
    same as with other aggregators (ours; the paper leaves the length to a global rate).

    Source: Hu et al. 2022 (FedMGDA+); Li 2023 (thesis), chapter 5.

    >>> updates = torch.tensor([[2.0, 0.0], [0.0, 2.0]])  # weights move from (0.7, 0.3) to (0.6, 0.4); both norms are 2
    >>> FedMGDA(epsilon=0.1)(updates, torch.tensor([0.7, 0.3]))[0]
    tensor([1.2000, 0.8000])
    """

    epsilon: float = 0.1  # ε in [0, 1]: how far weights may be from those of the risk

    def __post_init__(self) -> None:
        require_number("epsilon", self.epsilon, "[0, 1]")

    def _total(self, given: FiniteUpdates) -> Tensor | None:
        rows, kept = given.rows, given.weights
        norms = update_norms(rows)
        moving = norms > 0
        if not bool(moving.any()):
            return None
        kept = kept[moving] / kept[moving].sum()
        directions = rows[moving] / norms[moving].to(rows.dtype).unsqueeze(1)
        chosen = min_norm_weights(directions, kept, self.epsilon)
        return weighted_mean(directions, chosen) * float(weighted_quantile(norms[moving], kept, 0.5))
