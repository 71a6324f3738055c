"""Who takes part in a round. A cohort is a pure function of the seed and the round, the same in every engine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equipoise.errors import is_whole, require
from equipoise.rng import generator
from equipoise.types import Cohort


def _cohort(round_index: int, seed: int, clients: Tensor, weights: Tensor, inclusion: Tensor) -> Cohort:
    total = weights.sum()
    return Cohort(round_index, seed, clients, weights / total if len(clients) else weights, inclusion)


def _check_size(clients_per_round: int, n: int) -> None:
    require(
        is_whole(clients_per_round) and 1 <= clients_per_round <= n,
        "clients_per_round",
        f"must be a whole number between 1 and the number of training clients, {n}",
        clients_per_round,
        "Lower it, or use sampling.Proportional(), which draws with replacement.",
    )


@dataclass(frozen=True)
class Uniform:
    """A fixed number of clients, uniformly and without replacement; base weights α renormalised inside the cohort.

    Source: the usual FedAvg, and the code of the Δ-FL papers.
    """

    def __call__(self, round_index: int, alpha: Tensor, *, clients_per_round: int, seed: int) -> Cohort:
        n = len(alpha)
        _check_size(clients_per_round, n)
        chosen = generator(seed, "cohort", round_index).choice(n, size=clients_per_round, replace=False)
        clients = torch.from_numpy(np.sort(chosen)).to(torch.int64)
        inclusion = torch.full((clients_per_round,), clients_per_round / n, dtype=torch.float64)
        return _cohort(round_index, seed, clients, alpha[clients], inclusion)


@dataclass(frozen=True)
class Proportional:
    """m draws with replacement, client k with probability α_k, and plain averaging: drawn c times means weight c/m.

    Source: Li 2023 (thesis), Algorithm 1.
    """

    def __call__(self, round_index: int, alpha: Tensor, *, clients_per_round: int, seed: int) -> Cohort:
        good = is_whole(clients_per_round) and clients_per_round >= 1
        require(good, "clients_per_round", "must be a whole number of at least 1", clients_per_round)
        p = alpha.double().numpy()
        drawn = generator(seed, "cohort", round_index).choice(len(p), size=clients_per_round, replace=True, p=p / p.sum())
        positions, counts = np.unique(drawn, return_counts=True)
        clients = torch.from_numpy(positions).to(torch.int64)
        inclusion = 1 - (1 - alpha[clients].double()) ** clients_per_round
        return _cohort(round_index, seed, clients, torch.from_numpy(counts).double(), inclusion)


@dataclass(frozen=True)
class Poisson:
    """Every client takes part independently with probability m/n; base weights α renormalised. A cohort may be empty.

    Source: the sampling that differential privacy accounts for (Mironov, Talwar, Zhang 2019).
    """

    def __call__(self, round_index: int, alpha: Tensor, *, clients_per_round: int, seed: int) -> Cohort:
        n = len(alpha)
        _check_size(clients_per_round, n)
        rate = clients_per_round / n
        clients = torch.from_numpy(np.flatnonzero(generator(seed, "cohort", round_index).random(n) < rate)).to(torch.int64)
        inclusion = torch.full((len(clients),), rate, dtype=torch.float64)
        return _cohort(round_index, seed, clients, alpha[clients], inclusion)


@dataclass(frozen=True)
class Full:
    """Every client, every round; `clients_per_round` is not used.

    Source: the setting of agnostic federated learning (Mohri, Sivek, Suresh 2019).
    """

    def __call__(self, round_index: int, alpha: Tensor, *, clients_per_round: int, seed: int) -> Cohort:
        return _cohort(round_index, seed, torch.arange(len(alpha)), alpha, torch.ones(len(alpha), dtype=torch.float64))
