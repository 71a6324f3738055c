"""Aggregators that average the updates they trust: Bulyan, the mean around the median, and divide-and-conquer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.aggregators.by_coordinate import column_blocks, coordinate_median
from equipoise.aggregators.order import levels, nearest_shares, ranked, rounding
from equipoise.aggregators.robust import (
    AgainstAttackers,
    Counted,
    RobustAggregator,
    gram_matrix,
    krum_scores,
    mean_of,
    pairs,
    rounding_lengths,
    update_norms,
)
from equipoise.aggregators.weighted_mean import weighted_mean
from equipoise.core.rng import random_bits
from equipoise.errors import require_integer, require_number

_SQUARABLE = 1e100  # products and sums of larger numbers may be infinite, those of their inverses 0


def mean_around(updates: Tensor, weights: Tensor, centre: Tensor, chosen: Tensor, mass: float) -> Tensor:
    """Of each coordinate the mean of the values nearest `centre` (D,), under weights (K,): (D,).

    Values are taken up to a total of `mass` of the weights `chosen` (K,), which decide how many; those at the border share.
    Distances that rounding alone tells apart are equal: two values on either side of the median may be as far from it.
    """
    mean, weights = torch.empty_like(updates[0]), weights.double()
    for columns, rows in column_blocks(updates):
        values = rows.double()
        middle = centre[columns].double().unsqueeze(1)
        distances = (values - middle).abs()
        slack = rounding(updates.dtype) * (middle.abs() + distances)  # each its own: a huge value does not make others equal
        part = nearest_shares(distances, chosen, mass, slack) / chosen.double()  # (B, K), between 0 and 1
        mean[columns] = (torch.linalg.vecdot(part * weights, values) / (part * weights).sum(1)).to(updates.dtype)
    return mean


@dataclass(frozen=True)
class MeaMed(RobustAggregator):
    """Mean around the median: of each coordinate the weighted mean of the values nearest the weighted median.

    Values are taken up to a weight of 1 − `share`. While attackers hold at most `share` < ½ of the weight, each coordinate
    stays within one width of the honest range from that range.

    Source: Xie, Koyejo, Gupta 2018 (arXiv 1802.10116); weights are ours.

    >>> updates = torch.tensor([[1.0], [2.0], [3.0], [100.0]])  # the median is 2.5; the nearest three are 1, 2 and 3
    >>> MeaMed(share=0.25)(updates, torch.full((4,), 0.25))[0]
    tensor([2.])
    """

    share: float = 0.2  # the weight of attackers, in [0, 0.5)

    def __post_init__(self) -> None:
        require_number("share", self.share, "[0, 0.5)", "It is the weight of attackers.")

    def _total(self, given: Counted) -> Tensor:
        rows, kept = given.rows, given.weights
        return mean_around(rows, kept, coordinate_median(rows, kept), kept, 1.0 - self.share)


def bulyan_selection(rows: Tensor, keys: Tensor, malicious: int) -> list[int]:
    """The places of the R − 2f updates that Krum selects one after another, each time among those that are left.

    Among R′ left, Krum sums the max(1, R′ − f − 2) smallest squared distances. Equal scores: the update nearest the coordinate
    median of those left, then the smallest key.
    """
    squares, slack = pairs(rows)
    left, chosen, lengths = list(range(len(rows))), list[int](), rounding_lengths(rows)
    even = torch.ones(len(rows), dtype=torch.float64, device=rows.device)
    while len(chosen) < len(rows) - 2 * malicious:
        among = torch.tensor(left, device=rows.device)
        scores = krum_scores(squares[among][:, among], slack[among][:, among], max(1, len(left) - malicious - 2))
        best = (levels(*scores) == 0).nonzero().flatten()
        if len(best) > 1:
            median = coordinate_median(rows[among], even[: len(left)] / len(left)).double()
            tied = among.cpu()[best]
            best = best[ranked(update_norms(rows[tied].double() - median), keys[tied], 2 * lengths[tied])]
        chosen.append(left.pop(int(best[0])))
    return chosen


@dataclass(frozen=True)
class Bulyan(AgainstAttackers):
    """Krum selects K − 2f updates one after another; of each coordinate the K − 4f values nearest their median are averaged.

    Needs K ≥ 4f + 3 clients with a weight in every round. The selection does not use weights; the mean does. Each coordinate
    stays within one width of the honest range from that range.

    f is `malicious`.

    Source: El Mhamdi, Guerraoui, Rouault 2018 (arXiv 1802.07927). Some published code selects once instead of repeatedly.

    >>> updates = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0], [6.0], [100.0]])  # Krum selects 4, 3, 5, 2, 6
    >>> Bulyan(malicious=1)(updates, torch.full((7,), 1 / 7))[0]  # their median is 4; the nearest three are 3, 4 and 5
    tensor([4.])
    """

    def _check(self, clients: int, losses: Tensor | None) -> None:
        needed = 4 * self.malicious + 3
        self._require_clients(clients, needed, f"Bulyan needs K ≥ 4f + 3 = {needed}")

    def _total(self, given: Counted) -> Tensor | None:
        malicious = self._still_expected(given)
        if len(given.rows) < 4 * malicious + 3:
            return None
        chosen = torch.tensor(bulyan_selection(given.rows, given.keys, malicious), device=given.rows.device)
        rows, even = given.rows[chosen], torch.ones(len(chosen), dtype=torch.float64, device=given.rows.device)
        centre = coordinate_median(rows, even / len(chosen))
        return mean_around(rows, given.weights[chosen], centre, even, float(len(given.rows) - 4 * malicious))


@dataclass(frozen=True)
class DnC(AgainstAttackers):
    """Divide and conquer: the weighted mean of the updates that never stand out along the main direction of their spread.

    `repeats` times: of `coordinates` random coordinates (None: all), centred by the weighted mean, the f updates with the
    largest squared projection on the top singular vector are dropped. The mean is over those that were never dropped, or
    dropped least often. A heuristic: no bound is claimed.

    f is `malicious`.

    Source: Shejwalkar, Houmansadr 2021 (NDSS); weights are ours.

    >>> DnC(malicious=1)(torch.tensor([[1.0], [2.0], [3.0], [100.0]]), torch.full((4,), 0.25))[0]  # 100 is dropped
    tensor([2.])
    """

    repeats: int = 1  # how often a direction is computed
    coordinates: int | None = 10_000  # how many coordinates it is computed from; None: all

    def __post_init__(self) -> None:
        super().__post_init__()
        require_integer("repeats", self.repeats, 1)
        if self.coordinates is not None:
            require_integer("coordinates", self.coordinates, 1)

    def _check(self, clients: int, losses: Tensor | None) -> None:
        self._require_clients(clients, self.malicious + 1, "divide and conquer must leave one")

    def _total(self, given: Counted) -> Tensor | None:
        rows, malicious = given.rows, self._still_expected(given)
        if len(rows) <= malicious:
            return None
        dropped = torch.zeros(len(rows), dtype=torch.int64)
        shared = given.keys.sum().reshape(1)  # a stream of this round, whatever the order of clients
        for repeat in range(self.repeats):
            part = rows
            if self.coordinates is not None and self.coordinates < rows.shape[1]:
                drawn = random_bits(shared, repeat * rows.shape[1], rows.shape[1])[0].argsort()[: self.coordinates]
                part = rows[:, drawn.to(rows.device)]
            part = part.double()
            largest = float(part.abs().max())
            if largest > 0 and not 1 / _SQUARABLE < largest < _SQUARABLE:
                part = part / largest  # the direction stays
            gram = gram_matrix(part, weighted_mean(part, given.weights))
            values, vectors = torch.linalg.eigh(gram.cpu())
            noise = rounding(rows.dtype) * float(part.norm())
            slack = noise * (2 * math.sqrt(max(0.0, float(values[-1]))) + noise)  # what rounding may do to eigenvalues
            below = values[-1] - values
            scores = vectors[:, below <= slack].square().sum(1)  # mostly of one; of several none is the main direction alone
            turned = rounding(rows.dtype) + float((slack / below.masked_fill(below <= slack, math.inf)).amax())
            order = ranked(-scores, given.keys, turned * (2 * scores.sqrt() + turned))
            dropped[order[:malicious]] += 1
        return mean_of(given, (dropped == dropped.min()).nonzero().flatten())
