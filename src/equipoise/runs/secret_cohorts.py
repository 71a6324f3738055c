"""Cohorts that nobody can foresee: drawn by the operating system, and written down before anybody is asked.

For federations under privacy. A round that is tried again, or that a run goes on with after a kill, keeps its cohort: to draw
another one because clients failed would make who takes part depend on who failed.
"""

from __future__ import annotations

import random
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from equipoise.errors import CheckpointError
from equipoise.privacy.random_source import SystemSource
from equipoise.privacy.release_book import ReleaseBook
from equipoise.types import Cohort

if TYPE_CHECKING:
    from equipoise.runs.setup import Setting


def secret_cohort(setting: Setting, book: ReleaseBook, round_index: int) -> Cohort:
    """Who takes part in a round: as the book says, else drawn now and written into it."""
    known, ids = book.cohort(round_index), setting.data.train.ids
    if known is None:
        cohort = draw_by_system(setting, round_index)
        book.set_cohort(round_index, [ids[k] for k in cohort.clients.tolist()], cohort.weights.tolist())
        return cohort
    clients = setting.data.train.positions_of(known) if known else torch.zeros(0, dtype=torch.int64)
    if bool((clients < 0).any()):
        raise CheckpointError(f"The ledger names clients in round {round_index + 1} that these data do not have.")
    weights = torch.tensor(book.cohort_weights(round_index), dtype=torch.float64)
    return Cohort(round_index, setting.seed, clients, weights, _inclusion(setting, len(clients)))


def draw_by_system(setting: Setting, round_index: int) -> Cohort:
    """A cohort by the sampler's law, by random bits of the operating system.

    A sampler that the privacy accountant does not know is called with a seed of 63 such bits, drawn for this round alone.
    A sampler that keeps a client's rounds apart deals out its groups by one seed for all rounds: the run's. Another seed would
    break that promise, on which correlated noise builds, and the promise hides nobody: ε counts every cohort as known.
    """
    traits, count, m = setting.algorithm.traits.sampler, len(setting.alpha), setting.clients_per_round
    if traits.separation is not None:
        return setting.sampler(round_index, setting.alpha, clients_per_round=m, seed=setting.seed)
    if traits.by_nodes:  # everybody is asked, and each decides by itself whether it takes part
        return Cohort(round_index, setting.seed, torch.arange(count), setting.alpha, _inclusion(setting, count))
    if traits.everyone or not traits.accounted or traits.share != 1:
        drawn = setting.sampler(round_index, setting.alpha, clients_per_round=m, seed=secrets.randbits(63))
        return replace(drawn, seed=setting.seed)  # clients' batches are the same when the round is tried again
    if traits.independent:
        coins = (SystemSource().words(count) >> np.uint64(11)) * 2.0**-53
        clients = torch.from_numpy(np.flatnonzero(coins < m / count)).to(torch.int64)
    else:
        clients = torch.tensor(sorted(random.SystemRandom().sample(range(count), m)), dtype=torch.int64)
    weights = setting.alpha[clients]
    weights = weights / weights.sum() if len(clients) else weights
    return Cohort(round_index, setting.seed, clients, weights, _inclusion(setting, len(clients)))


def _inclusion(setting: Setting, clients: int) -> Tensor:
    return torch.full((clients,), setting.clients_per_round / len(setting.alpha), dtype=torch.float64)
