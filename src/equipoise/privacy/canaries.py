"""Canary clients: what each sends is known, and as large as can be; a private run of them shows what its noise hides.

All clients of such a run are canaries, each with a direction of its own. What comes out along a direction is one canary's
contribution and the noise, and nothing else: every canary is an attack of its own, and one run is as many trials as it has
canaries. Those of the first half stand for a client that is there, those of the second half for one that is not.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from equipoise import server_opt, solvers
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.privacy.discrete_gaussian import sample_discrete_gaussian
from equipoise.privacy.noise_plan import NoisePlan
from equipoise.privacy.private_sums import PrivateSums
from equipoise.privacy.release_book import ReleaseBook
from equipoise.rounds.drivers import play
from equipoise.runs.setup import set_up
from equipoise.types import Cohort
from equipoise.types.round_contracts import Kept, View

if TYPE_CHECKING:
    from equipoise.algorithm import Algorithm
    from equipoise.privacy.protected import Protected
    from equipoise.runs.setup import Setting

Array = NDArray[np.float64]
MOST_CANARIES = 128
LONG = 1e3  # times the clip bound: what a canary sends before it is clipped
_LOSS = 1e6  # of every canary: all are in every tail, and all weights are as large as can be


class CanaryModel(nn.Module):
    """A linear model whose gradient is an example: one full step of length 1 moves it by the mean of the client's examples."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dimension))

    def forward(self, x: Tensor) -> Tensor:
        """⟨w, x⟩ of each example."""
        return x @ self.weight

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """A large loss that falls along the example."""
        return _LOSS - outputs


def canary_data(clients: int, length: float, *, opposite: bool) -> FederatedData:
    """One example per client: `length` along the client's own direction in the first half, 0 (or the opposite) in the other.

    Clients beyond MOST_CANARIES send nothing.
    """
    count = min(clients, MOST_CANARIES)
    rows = torch.zeros(clients, count)
    rows[:count] = torch.eye(count) * length
    rows[count // 2 : count] *= -1.0 if opposite else 0.0
    triples = [(f"canary-{k:05}", rows[k : k + 1], torch.zeros(1)) for k in range(clients)]
    return FederatedData(ClientSet.pack(triples), name="canaries")


@dataclass(frozen=True, eq=False)
class RecordedSums(PrivateSums):
    """The sums of a private run, which note what each round released: the noisy sum in clip bounds, and whose it is."""

    released: list[tuple[Tensor, Cohort]] = field(default_factory=list)

    def total(self, view: View) -> Kept:
        """As the run does; the total is noted."""
        kept = super().total(view)
        self.released.append((kept.value.double() * float(view.weights.over) / float(view.state.privacy.clip), view.cohort))
        return kept


@dataclass(frozen=True, eq=False)
class CanaryRounds:
    """Rounds of a run's own configuration with canaries for clients; `noise` is what they have in fact.

    The run's sampler, risk, aggregator, clipping, sums and noise are its own, and so is the round. The model, the data and
    the local work are the canaries', as clipping comes after them.
    """

    setting: Setting
    noise: NoisePlan
    sums: RecordedSums

    @classmethod
    def of(cls, algorithm: Algorithm, noise: NoisePlan, *, opposite: bool) -> CanaryRounds:
        """The rounds of an algorithm with this noise."""
        data = canary_data(noise.clients, LONG * float(noise.privacy.clip), opposite=opposite)
        model, solver = CanaryModel(min(noise.clients, MOST_CANARIES)), solvers.SGD(lr=1.0, batch_size=None)
        changed = replace(algorithm, solver=solver, server=server_opt.SGD(), personal=None, averaging=None)
        setting = set_up(
            model, data, changed, rounds=noise.rounds, clients_per_round=noise.expected, seed=0, loss=None, error=None,
            engine="simulator",
        )  # fmt: skip
        sums = RecordedSums(noise)
        protection = replace(cast("Protected", setting.protection), sums=(sums,), noise=noise)
        return cls(replace(setting, protection=protection), noise, sums)

    def run(self, rounds: int, seed: int, *, contributors: int | None, without: str) -> tuple[Array, NDArray[np.bool_]]:
        """What rounds release along each canary's direction, (rounds, canaries), and whether the canary was in the cohort.

        Of distributed noise `without` "own" takes a client's share off, "server" all shares that clients did not add;
        "nothing" none. `contributors` is the size to which each cohort is cut down, as if the other clients were lost.
        """
        noise, first = self.noise, self.setting.begin()
        noise.inject(seed)
        noise.book = ReleaseBook()
        setting = replace(self.setting, seed=seed)
        state, along, here = first, [], []
        for index in range(rounds):
            cohort = setting.draw(index)
            if contributors is not None and not noise.by_nodes and len(cohort) > contributors:
                kept = np.random.default_rng([seed & 0xFFFFFFFF, index]).permutation(len(cohort))[:contributors]
                chosen = torch.zeros(len(cohort), dtype=torch.bool)
                chosen[torch.from_numpy(kept)] = True
                cohort = cohort.take(chosen)
            self.sums.released.clear()
            state = replace(play(setting, state, cohort)[0], params=first.params)  # so that losses stay what they were
            ((total, cohort),) = self.sums.released
            known = self._known_noise(index, len(cohort) if contributors is None else contributors, without)
            along.append((total - known).numpy())
            here.append(np.isin(np.arange(len(total)), cohort.clients.numpy()))
        return np.stack(along), np.stack(here)

    def _known_noise(self, index: int, contributors: int, without: str) -> Tensor:
        """The noise that an observer has added itself, in units of the clip bound."""
        noise, count = self.noise, min(self.noise.clients, MOST_CANARIES)
        total = torch.zeros(count, dtype=torch.float64)
        if without == "nothing" or not noise.distributed or noise.grid.sigma == 0:
            return total
        source = noise.source("update shares", index)
        shares = range(1) if without == "own" else range(noise.shares)
        for k in shares:  # in the order in which the run draws them
            share = sample_discrete_gaussian(noise.grid.variance, count, source=source)
            if without == "own" or k >= contributors:
                total += share.double()
        return total * (noise.grid.step / float(noise.privacy.clip))
