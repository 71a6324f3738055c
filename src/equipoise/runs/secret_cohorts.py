"""Cohorts that nobody can foresee, of runs under privacy: drawn by the operating system, or from the secret of the run.

In a federation they are written down before anybody is asked. A round that is tried again, or that a run goes on with after a
kill, keeps its cohort: to draw another one because clients failed would make who takes part depend on who failed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from equipoise.errors import CheckpointError
from equipoise.privacy.random_source import RandomSource, SystemSource, uniforms
from equipoise.privacy.release_book import ReleaseBook
from equipoise.types import Cohort

if TYPE_CHECKING:
    from equipoise.runs.setup import Setting


def secret_cohort(setting: Setting, book: ReleaseBook, round_index: int) -> Cohort:
    """Who takes part in a round: as the book says, else drawn now and written into it."""
    known, ids = book.cohort(round_index), setting.data.train.ids
    if known is None:
        cohort = draw_unforeseen(setting, round_index, SystemSource())
        book.set_cohort(round_index, [ids[k] for k in cohort.clients.tolist()], cohort.weights.tolist())
        return cohort
    clients = setting.data.train.positions_of(known) if known else torch.zeros(0, dtype=torch.int64)
    if bool((clients < 0).any()):
        raise CheckpointError(f"The ledger names clients in round {round_index + 1} that these data do not have.")
    weights = torch.tensor(book.cohort_weights(round_index), dtype=torch.float64)
    return Cohort(round_index, setting.seed, clients, weights, _inclusion(setting, len(clients)))


def draw_unforeseen(setting: Setting, round_index: int, source: RandomSource) -> Cohort:
    """A cohort by the sampler's law, by random bits of `source`.

    A sampler that the privacy accountant does not know is called with a seed of 63 such bits, drawn for this round alone.
    A sampler that keeps a client's rounds apart deals out its groups by one seed for all rounds: the run's. Another seed would
    break that promise, on which correlated noise builds, and the promise hides nobody: ε counts every cohort as known.
    """
    traits, count, m = setting.algorithm.traits.sampler, len(setting.alpha), setting.clients_per_round
    if traits.separation is not None:
        return setting.sampler(round_index, setting.alpha, clients_per_round=m, seed=setting.seed)
    if traits.by_nodes and setting.engine_traits.network is not None:  # everybody is asked, and each decides by itself
        return Cohort(round_index, setting.seed, torch.arange(count), setting.alpha, _inclusion(setting, count))
    if traits.everyone or not traits.accounted or traits.share != 1:
        seed = int(source.words(1)[0]) >> 1
        drawn = setting.sampler(round_index, setting.alpha, clients_per_round=m, seed=seed)
        return replace(drawn, seed=setting.seed)  # clients' batches are the same when the round is tried again
    if traits.independent:
        clients = torch.from_numpy(np.flatnonzero(uniforms(count, source) < m / count)).to(torch.int64)
    else:
        clients = torch.from_numpy(np.sort(np.argsort(source.words(count))[:m]))  # two equal words: once in 2^64/n²
    weights = setting.alpha[clients]
    weights = weights / weights.sum() if len(clients) else weights
    return Cohort(round_index, setting.seed, clients, weights, _inclusion(setting, len(clients)))


def _inclusion(setting: Setting, clients: int) -> Tensor:
    return torch.full((clients,), setting.clients_per_round / len(setting.alpha), dtype=torch.float64)
