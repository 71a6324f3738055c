"""Aggregators that bound what a few malicious clients can do. Each is a pure function over updates (K, D) and a thin class.

Weights (K,) come from the risk. `counted` leaves out updates without a weight and those that are not finite (NaN, infinity),
and scales the weights of the others to a sum of 1: no rule looks after that itself. The total is zero if none is left.
`malicious` is the number of attackers that the server expects. Ties go by key (`order.ranked`).
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
from equipoise.aggregators.order import ranked, rounding
from equipoise.aggregators.weighted_mean import weighted_mean
from equipoise.core.numbers import has_weight, mass_slack
from equipoise.errors import require, require_integer, require_number

_BLOCK = 2**19  # numbers looked at together on a CPU
_DEVICE_BLOCK = 2**24  # on a GPU, where starting work on a small block takes longer than the work


class Counted(NamedTuple):
    """The updates that count."""

    rows: Tensor  # (R, D)
    weights: Tensor  # (R,), summing to 1; float32 or float64, as they were given
    lost: int  # how many others have a weight, but are not finite
    losses: Tensor | None  # (R,)
    streams: Tensor | None  # (R,) int64: a random stream of each client in this round

    @property
    def keys(self) -> Tensor:
        """What decides ties, (R,) int64 on the CPU: the streams, or else all that is known of a client but its place."""
        if self.streams is not None:
            return self.streams.cpu()
        known = [self.rows, self.weights.unsqueeze(1), *([] if self.losses is None else [self.losses.unsqueeze(1)])]
        places: Tensor = torch.unique(torch.cat([each.double().cpu() for each in known], 1), dim=0, return_inverse=True)[1]
        return places


def counted(updates: Tensor, weights: Tensor, losses: Tensor | None = None, keys: Tensor | None = None) -> Counted:
    """The updates with a weight and without NaN or infinity, and what belongs to them; their weights are scaled to sum to 1."""
    # A row's sum is finite only if all its entries are; where it overflows, the entries decide.
    finite = torch.isfinite(updates.sum(1))
    if not bool(finite.all()):
        finite = torch.isfinite(updates).all(1)
    weights = (weights if weights.dtype == torch.float32 else weights.double()).to(updates.device)
    weighed = has_weight(weights)
    good = finite & weighed
    kept, rows = weights[good], updates if bool(good.all()) else updates[good]
    losses, keys = (None if each is None else each[good.to(each.device)] for each in (losses, keys))
    return Counted(rows, kept / kept.sum(dtype=torch.float64), int(weighed.sum()) - len(rows), losses, keys)


def update_norms(updates: Tensor) -> Tensor:
    """L2 norms of the rows in float64, which holds the squares of any float32."""
    norms: Tensor = torch.linalg.vector_norm(updates, dim=1, dtype=torch.float64)
    if updates.dtype == torch.float64 and not bool(((norms > 1e-150) & (norms < 1e150)).all()):  # its own are held like this
        largest = torch.linalg.vector_norm(updates, math.inf, dim=1).clamp(min=torch.finfo(torch.float64).tiny)
        norms = largest * torch.linalg.vector_norm(updates / largest.unsqueeze(1), dim=1)
    return norms


def weighted_quantile(values: Tensor, weights: Tensor, share: float) -> Tensor:
    """The smallest value with at least `share` of the weight at or below it; values (K,), weights summing to 1."""
    ordered, order = values.sort()
    place = int(torch.searchsorted(weights[order].double().cumsum(0), share - mass_slack(weights.dtype, len(weights))))
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
    It stops where the gradient is shorter than ν/1000 in units of that distance: then the sum is within ν of the least.
    Since z − c = Σ β_k (u_k − c), the Gram matrix of the u_k − c gives all distances, and no iteration touches the updates.
    """
    start = coordinate_median(updates, weights)
    gram = gram_matrix(updates, start)
    far = ~torch.isfinite(gram.diagonal())  # beyond what squares hold: infinitely far, and so without a share
    gram[far], gram[:, far] = 0.0, 0.0
    squares = gram.diagonal().clone()
    distances = squares.sqrt().masked_fill(far, math.inf)
    typical = float(weighted_quantile(distances, weights, 0.5))
    if not 0 < typical < math.inf:  # half of the weight is at the start, or too far away or too near for squares
        unit = float(weighted_quantile(update_norms(updates - start), weights, 0.5))
        if not 0 < unit < math.inf:
            return start
        return start + unit * geometric_median((updates - start) / unit, weights, iterations=iterations, smoothing=smoothing)
    shares = torch.zeros_like(squares)  # of z − c, at first zero
    for _ in range(iterations):
        after = weights / distances.clamp(min=smoothing * typical)
        pull = float(after.sum())
        step, shares = after / pull - shares, after / pull
        if pull * math.sqrt(max(0.0, float(step @ gram @ step))) <= 1e-3 * smoothing:  # the length of the gradient
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


def rounding_lengths(updates: Tensor) -> Tensor:
    """How long the rounding of each update may be, (K,) float64.

    It goes by its own length, or by the median one: an update of zeros may be what is left of a sum.
    """
    norms = update_norms(updates)
    return rounding(updates.dtype) * torch.maximum(norms, norms.median())


def pairs(updates: Tensor) -> tuple[Tensor, Tensor]:
    """‖u_j − u_k‖² of all pairs, infinite for j = k, and by how much rounding may change each, (K, K) and (K, K) float64.

    Where most updates are beyond what squares hold, in units of the median length.
    """
    own = rounding_lengths(updates)
    if updates.dtype == torch.float64 and (unit := float(update_norms(updates).median())) > 0 and not 1e-100 < unit < 1e100:
        updates, own = updates / unit, own / unit
    squares, both = squared_distances(updates), own + own.unsqueeze(1)
    slack = (both * (2 * squares.sqrt() + both)).nan_to_num(0.0, 0.0)
    return squares.fill_diagonal_(math.inf), slack


def krum_scores(squares: Tensor, slack: Tensor, neighbours: int) -> tuple[Tensor, Tensor]:
    """Σ ‖u_k − u_j‖² over the nearest others j, small for an update among many like it, and its rounding, (K,) and (K,)."""
    nearest, places = squares.topk(min(neighbours, len(squares) - 1), largest=False)
    return nearest.sum(1), slack.gather(1, places).sum(1)


def clipped_mean(updates: Tensor, weights: Tensor, bound: float) -> Tensor:
    """Σ π_k u_k · min(1, bound / ‖u_k‖), over the u_k of finite norm."""
    norms = update_norms(updates)
    if not bool((good := torch.isfinite(norms)).all()):
        updates, norms = torch.where(good.unsqueeze(1), updates, 0.0), torch.where(good, norms, 0.0)
    return weighted_mean(updates, weights.to(updates.device) * (bound / norms.clamp(min=1e-300)).clamp(max=1.0))


def mean_of(given: Counted, chosen: Tensor) -> Tensor:
    """The weighted mean of the updates at these places, weights scaled to sum to 1 over them."""
    weights = given.weights[chosen]
    return weighted_mean(given.rows[chosen], weights / weights.sum())


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


class RobustAggregator(ABC):
    """Aggregates the updates that count; the total is zero where too few of them are left."""

    @property
    def linear(self) -> bool:
        """Whether totals over chunks of a cohort add up to the total over the cohort."""
        return False

    def __call__(
        self, updates: Tensor, weights: Tensor, *, losses: Tensor | None = None, state: Any = None, keys: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """The total (D,) of those updates (K, D) that count, zeros if they are too few; the state as it is."""
        given = counted(updates, weights, losses, keys)
        if (clients := len(given.rows) + given.lost) > 0:
            self._check(clients, losses)
        total = self._total(given) if len(given.rows) else None
        return (updates.new_zeros(updates.shape[1]) if total is None else total), state

    def _check(self, clients: int, losses: Tensor | None) -> None:  # noqa: B027 — most aggregators have nothing to refuse
        """Refuse what the aggregator cannot work with."""

    @abstractmethod
    def _total(self, given: Counted) -> Tensor | None:
        """The total (D,) of one or more updates."""


@dataclass(frozen=True)
class Median(RobustAggregator):
    """The weighted median of each coordinate: attackers with less than half of the weight cannot leave the honest range.

    Source: Yin et al. 2018; Li 2023 (thesis), chapter 5.

    >>> updates = torch.tensor([[1.0], [2.0], [100.0]])
    >>> Median()(updates, torch.full((3,), 1 / 3))[0], Median()(updates, torch.tensor([0.2, 0.2, 0.6]))[0]
    (tensor([2.]), tensor([100.]))
    """

    def _total(self, given: Counted) -> Tensor:
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

    def _total(self, given: Counted) -> Tensor:
        return trimmed_mean(given.rows, given.weights, self.fraction)


@dataclass(frozen=True)
class GeometricMedian(RobustAggregator):
    """The point with the smallest weighted sum of distances to the updates: robust while attackers hold less than half.

    Minimises Σ π_k ‖z − u_k‖ over z by z ← Σ β_k u_k / Σ β_k with β_k = π_k / max(‖z − u_k‖, ν), starting at the median of each
    coordinate. With enough iterations the sum is within ν of the least one. A smaller ν needs more of them.

    Source: Pillutla, Kakade, Harchaoui 2022 (RFA), smoothed Weiszfeld iteration.

    >>> total, _ = GeometricMedian()(torch.tensor([[1.0], [2.0], [100.0]]), torch.full((3,), 1 / 3))  # on a line: the median
    >>> round(float(total), 3)
    2.0
    """

    iterations: int = 50  # the most steps of the iteration
    smoothing: float = 1e-3  # ν, the least distance, as a share of the median distance; at least 1e-8, which rounding allows

    def __post_init__(self) -> None:
        require_integer("iterations", self.iterations, 1)
        require_number("smoothing", self.smoothing, "[1e-8, 1)", "It is a share of the median distance.")

    def _total(self, given: Counted) -> Tensor:
        rows, kept = given.rows, given.weights
        return geometric_median(rows, kept, iterations=self.iterations, smoothing=self.smoothing)


@dataclass(frozen=True)
class AgainstAttackers(RobustAggregator):
    """An aggregator that is told how many attackers to expect."""

    malicious: int = 1  # f, how many attackers the server expects in a round

    needs_keys: ClassVar[bool] = True  # for ties

    def __post_init__(self) -> None:
        require_integer("malicious", self.malicious, 0)

    def _require_clients(self, clients: int, needed: int, rule: str) -> None:
        text = f"is too large for {clients} clients with a weight: {rule}"
        require(clients >= needed, "malicious", text, self, "Lower it, take more clients per round, or widen the tail.")

    def _still_expected(self, given: Counted) -> int:
        """How many attackers are expected among the finite updates: those that sent NaN gave themselves away."""
        return max(0, self.malicious - given.lost)


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

    def _total(self, given: Counted) -> Tensor | None:
        rows, left = given.rows, self._still_expected(given)
        if len(rows) < 3 + left:
            return None
        scores, slack = krum_scores(*pairs(rows), len(rows) - left - 2)
        order = ranked(scores, given.keys, slack)
        return self._chosen(given, order[: len(rows) - left])

    def _chosen(self, given: Counted, best: Tensor) -> Tensor:
        """The total of the rows with the best scores, whose places are `best`, best first."""
        return given.rows[best[0]].clone()


@dataclass(frozen=True)
class MultiKrum(Krum):
    """The weighted mean of the K − f updates with the best Krum scores, weights scaled to sum to 1 over them.

    Source: Blanchard et al. 2017; Li 2023 (thesis), chapter 5.

    >>> updates = torch.tensor([[0.0], [1.0], [3.0], [6.0], [100.0]])
    >>> MultiKrum(malicious=1)(updates, torch.full((5,), 0.2))[0]  # (0 + 1 + 3 + 6)/4
    tensor([2.5000])
    """

    def _chosen(self, given: Counted, best: Tensor) -> Tensor:
        return mean_of(given, best)


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

    def _total(self, given: Counted) -> Tensor:
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

    def _total(self, given: Counted) -> Tensor | None:
        kept, norms = len(given.rows) - self._still_expected(given), update_norms(given.rows)
        order = ranked(norms, given.keys, rounding(given.rows.dtype) * norms)
        return mean_of(given, order[:kept]) if kept > 0 else None


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

    def _total(self, given: Counted) -> Tensor:
        rank, losses = min(self._still_expected(given), len(given.rows) - 1), cast(Tensor, given.losses).double()
        slack = losses.abs() * max(rounding(each.dtype) for each in (given.rows, cast(Tensor, given.losses)))
        return given.rows[ranked(-losses, given.keys, slack)[rank]].clone()


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

    def _total(self, given: Counted) -> Tensor | None:
        largest = torch.linalg.vector_norm(given.rows, math.inf, dim=1)
        moving = largest > 0
        if not bool(moving.any()):
            return None
        rows, kept = given.rows[moving], given.weights[moving] / given.weights[moving].sum()
        directions = rows / largest[moving].unsqueeze(1)  # first so, because a norm may be more than the type holds
        directions = directions / torch.linalg.vector_norm(directions, dim=1, keepdim=True)
        chosen = min_norm_weights(directions, kept, self.epsilon)
        typical = float(weighted_quantile(update_norms(rows), kept, 0.5))
        return (weighted_mean(directions, chosen).double() * typical).to(rows.dtype)
