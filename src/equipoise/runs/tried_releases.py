"""A trial of parts of the user's own under differential privacy: what other clients send does not follow one client's data.

Clients with random examples train for some rounds, twice: with a first client whose weight is 0, and without it but with other
examples in its place. Nothing that the server gets of the others may differ. No example of the user's data is looked at.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.algorithm import Algorithm
from equipoise.core.abilities import is_of_user
from equipoise.core.trees import map_tree
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.errors import InvalidParameter, without_notices
from equipoise.privacy.mechanism import DifferentialPrivacy
from equipoise.privacy.private_sums import PrivateSums
from equipoise.risk import Mean
from equipoise.rounds.drivers import play
from equipoise.runs.tried_calls import or_none, same_state
from equipoise.sampling import Full
from equipoise.server_opt import SGD
from equipoise.types.round_contracts import View, Weights

CLIP = 1e-6  # so small that whatever is released without being clipped stands out
CLIENTS, EXAMPLES = 4, 4
LAW = "must keep the law that what a client sends follows no other client's data"
CURE = "Use no mean, sum or order over the rows of a cohort, nor its size. Noise covers what one client sends alone."


def try_releases(algorithm: Algorithm, model: nn.Module, data: FederatedData, start: Callable[..., Any]) -> None:
    """Raise InvalidParameter for a part of the user's own by which one client's data reach what others send.

    `start` sets up a run. A part that raises an error here is left to the run.
    """
    traits = algorithm.traits
    parts = [("personal", each) for each in (algorithm.personal, traits.personal.solver)]
    parts += [("solver", each) for each in (algorithm.solver, traits.solver.solver)]
    own = [(name, part) for name, part in [*parts, ("risk", algorithm.risk)] if part is not None and is_of_user(part)]
    if not own or not algorithm.private:
        return
    privacy = DifferentialPrivacy(None, 0.5, CLIP, noise_multiplier=0.0, loss_bound=traits.privacy.loss_bound)
    risk = algorithm.risk if traits.risk.client_form == "loss" else Mean()
    tried = replace(algorithm, risk=risk, privacy=privacy, sampler=Full(), server=SGD(), averaging=None)

    def alike() -> bool:
        one, other = (list(_of_others(start, tried, model, data, without)) for without in (False, True))
        return all(same_state(*pair, 1e-4) for pair in zip(one, other, strict=True))

    with without_notices():
        if or_none(alike) is False:
            raise InvalidParameter(own[0][0], LAW, own[0][1], CURE)


@dataclass(frozen=True, eq=False)
class Undivided(PrivateSums):
    """The sums of a run in which the first client sends what counts for nothing, and nothing is divided by who came."""

    seen: list[Tensor]  # the weights of the others, of each round

    def weights(self, view: View) -> Weights:
        """The weights of the clients."""
        given, others = super().weights(view), view.cohort.clients > 0
        self.seen.append(given.each[others])
        return given._replace(each=torch.where(others, given.each, 1e-30), over=1.0)


def _of_others(start: Callable[..., Any], tried: Algorithm, model: nn.Module, data: Any, without: bool) -> Iterator[Any]:
    """What the server gets of all clients but the first in two rounds: the sum, in units of the clip bound, and the rest."""
    model, source = copy.deepcopy(model).double(), torch.Generator().manual_seed(0)  # in which rounding does not count
    for values in model.parameters():  # away from points at which all losses are equal
        values.data += 0.1 * torch.randn(values.shape, generator=source, dtype=values.dtype).to(values)
    seen: list[Any] = []
    setting = start(model, _invented(data, source, without), tried)
    protection = replace(setting.protection, sums=(Undivided(setting.noise, seen),))
    setting = replace(setting, protection=protection)
    state = setting.begin()
    for index in range(2):
        cohort = tried.drawn_by(index, setting.alpha, clients_per_round=CLIENTS, seed=0)
        if without:
            cohort = cohort.take(cohort.clients > 0)
            cohort = replace(cohort, weights=cohort.weights / cohort.weights.sum())
        after, _ = play(setting, state, cohort)
        yield (after.params - state.params).cpu() / CLIP
        yield seen.pop(), setting.personal and after.personal.shared
        state = after


def _invented(data: FederatedData, source: torch.Generator, other: bool) -> FederatedData:
    """A few clients with random examples of the form of the data; the first has `other` ones or not."""

    def like(most: int, leaf: Tensor) -> Tensor:
        made = torch.empty(EXAMPLES, *leaf.shape[1:], dtype=leaf.dtype)
        return made.normal_(generator=source) if made.is_floating_point() else made.random_(0, most, generator=source)

    def examples() -> list[Any]:
        reads = (data.train.inputs, 2), (data.train.targets, max(1, data.classes))
        return [map_tree(partial(like, most), read(slice(0, 1), torch.float64)) for read, most in reads]

    every = [(f"client-{k}", *examples()) for k in (0, *range(CLIENTS))]
    return FederatedData(ClientSet.pack([every[int(other)], *every[2:]]), classes=data.classes)
