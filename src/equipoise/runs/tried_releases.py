"""What parts of the user's own do under protection: what other clients send does not follow one client's data.

Personal methods and weights of a risk are asked for one client at a time; the rest is tried, and watched. In a trial clients
with random examples train for some rounds, twice: with one client whose weight is 0, and without it but with other examples in
its place. Nothing that the server gets of the others may differ. No example of the user's data is looked at. Model, loss and
solver must hold what they held, in a trial and in each round: what they note of one client would reach the next.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.algorithm import Algorithm
from equipoise.core.abilities import is_of_user
from equipoise.core.fingerprints import fingerprint
from equipoise.core.task import Task
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
from equipoise.types.round_contracts import Stage, View, Weights

CLIENTS, EXAMPLES, FAR = 4, 4, 10.0
TRIALS = (1e-6, 0), (1e6, CLIENTS - 1)  # whatever is not clipped stands out, or nothing is clipped; and whose data differ
LAW = "must keep the law that what a client sends follows no other client's data"
CONSTANT = "must hold what it held when it has run: what it notes of one client's data reaches what others send"
CURE = "Use no mean, sum or order over the rows of a cohort, nor its size. Noise covers what one client sends alone."


def try_releases(algorithm: Algorithm, model: nn.Module, data: FederatedData, start: Callable[..., Any]) -> None:
    """Raise InvalidParameter for a part of the user's own by which one client's data reach what others send.

    `start` sets up a run. A part that raises an error here is left to the run.
    """
    traits = algorithm.traits
    parts = [("personal", each) for each in (algorithm.personal, traits.personal.solver)]
    parts += [("solver", each) for each in (algorithm.solver, traits.solver.solver)]
    own = [(name, part) for name, part in parts if part is not None and is_of_user(part)]
    if not own or not algorithm.private:
        return
    tried = replace(algorithm, risk=Mean(), sampler=Full(), server=SGD(), averaging=None)

    def alike() -> bool:
        runs = ([list(_of_others(start, tried, model, data, *case, without)) for without in (False, True)] for case in TRIALS)
        return all(same_state(one, other, 1e-4) for both in runs for one, other in zip(*both, strict=True))

    with without_notices():
        if or_none(alike) is False:
            raise InvalidParameter(own[0][0], LAW, own[0][1], CURE)


@dataclass(frozen=True, eq=False)
class Undivided(PrivateSums):
    """The sums of a run in which one client sends what counts for nothing, and nothing is divided by who came."""

    absent: int

    def weights(self, view: View) -> Weights:
        """The weights of the clients."""
        return super().weights(view)._replace(each=torch.where(view.cohort.clients != self.absent, 1.0, 1e-30), over=1.0)


def _of_others(
    start: Callable[..., Any], tried: Algorithm, model: nn.Module, data: Any, clip: float, absent: int, without: bool
) -> Iterator[Any]:
    """What the server gets of all clients but one in two rounds: the sum, in units of a small clip bound, and the rest."""
    tried = replace(tried, privacy=DifferentialPrivacy(None, 0.5, clip, noise_multiplier=0.0))
    model, source = copy.deepcopy(model).double(), torch.Generator().manual_seed(0)  # in which rounding does not count
    for values in model.parameters():  # away from points at which all losses are equal
        values.data += 0.1 * torch.randn(values.shape, generator=source, dtype=values.dtype).to(values)
    setting = start(model, _invented(data, source, absent, without), tried)
    protection = replace(setting.protection, sums=(Undivided(setting.noise, absent),))
    setting = replace(setting, protection=protection)
    state = setting.begin()
    for index in range(2):
        cohort = tried.drawn_by(index, setting.alpha, clients_per_round=CLIENTS, seed=0)
        if without:
            cohort = cohort.take(cohort.clients != absent)
            cohort = replace(cohort, weights=cohort.weights / cohort.weights.sum())
        after, _ = play(setting, state, cohort)
        yield (after.params - state.params).cpu() / min(clip, 1.0)
        yield setting.personal and after.personal.shared
        state = after


def _invented(data: FederatedData, source: torch.Generator, absent: int, other: bool) -> FederatedData:
    """A few clients with random examples of the form of the data; those of one are `other` ones or not, and far out."""

    def like(most: int, leaf: Tensor, far: float) -> Tensor:
        made = torch.empty(EXAMPLES, *leaf.shape[1:], dtype=leaf.dtype)
        return made.normal_(0, far, generator=source) if leaf.is_floating_point() else made.random_(0, most, generator=source)

    def examples(k: int) -> tuple[str, Any, Any]:
        far, dtype = FAR if k == absent else 1.0, torch.float64
        x, y = (read(slice(0, 1), dtype) for read in (data.train.inputs, data.train.targets))
        most = max(1, data.classes)
        return f"client-{k}", map_tree(lambda leaf: like(2, leaf, far), x), map_tree(lambda leaf: like(most, leaf, 1.0), y)

    *every, replaced = [examples(k) for k in (*range(CLIENTS), absent)]
    every[absent] = replaced if other else every[absent]
    return FederatedData(ClientSet.pack(every), classes=data.classes)


class Watched(Stage):
    """Before anything is released, model, loss and solver hold what they held at first, without what is trained."""

    def __init__(self, task: Task, algorithm: Algorithm) -> None:
        self.task, self.parts = task, {"model": task.module, "loss": task.given_functions[0], "solver": algorithm.solver}
        self.before = self.held()

    def held(self) -> dict[str, str]:
        """Fingerprints of what each part holds."""
        return {name: fingerprint(part, trained=self.task.trained_in(), strict=True) for name, part in self.parts.items()}

    def refuse_changed(self) -> None:
        """Raise InvalidParameter where a part holds something else."""
        if changed := [name for name, now in self.held().items() if now != self.before[name]]:
            shown = getattr(self.parts[changed[0]], "__name__", type(self.parts[changed[0]]).__name__)
            raise InvalidParameter(changed[0], CONSTANT, shown, "Make it in __init__; note nothing in forward or in a call.")

    def weights(self, view: View) -> None:
        """After clients have told their losses."""
        if view.losses is not None:
            self.refuse_changed()

    def answer(self, view: View) -> None:
        """After clients have worked."""
        self.refuse_changed()


def try_memory(task: Task, data: FederatedData, algorithm: Algorithm) -> None:
    """Refuse a model or a loss that notes what it sees, tried on a few examples and on some far out."""
    trial = task.to(torch.device("cpu"))
    watch = Watched(trial, algorithm)
    x, y = (map_tree(Tensor.cpu, read(slice(0, 2), task.layout.dtype)) for read in (data.train.inputs, data.train.targets))
    for training, far in ((True, 1), (False, int(FAR**4))):
        trial.scorer.train(training)
        with suppress(Exception), torch.no_grad(), torch.random.fork_rng(devices=[]):  # it may refuse what is far out
            trial.scorer(map_tree(lambda leaf, by=far: leaf * by if leaf.is_floating_point() else leaf, x), y, False)
    watch.refuse_changed()
