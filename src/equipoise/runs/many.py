"""Several seeds and several algorithms in one batched run.

Each run has its own parameters, cohorts and batches, and equals the run that `train` makes of it alone. What runs share is the
engine, and the call in which the clients of all of them work.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from equipoise.algorithm import Algorithm
from equipoise.compare import Comparison
from equipoise.core.equality import same_but_for_training, same_part
from equipoise.core.task import PerExample, Task
from equipoise.data.clients import FederatedData
from equipoise.errors import Diverged, EquipoiseError, EquipoiseNotice, InvalidParameter, is_whole, require
from equipoise.observers import History, Observers, Progress, Run, show_progress
from equipoise.report.text.phrases import listed
from equipoise.result import Result
from equipoise.runs.look_ahead import SharedRounds
from equipoise.runs.together import Outcome, grouped
from equipoise.train import (
    DataOrMaker,
    EngineChoice,
    ModelOrMaker,
    Setting,
    choose_engine,
    made,
    set_up,
    stop_if_lost,
    train,
    warn_if_idle,
    warn_if_lost,
    warn_if_rejected,
)
from equipoise.types import Engine, ServerState

Ended = Result | Diverged


class OneEngine:
    """An engine choice that starts one engine, when it is first asked, and hands it to every run that can share it."""

    def __init__(self, choice: EngineChoice) -> None:
        self._choice = choice
        self._running: Engine | None = None

    def start(self, task: Task, data: FederatedData) -> Engine:
        if self._running is None:
            self._running = self._choice.start(task, data)
        return self._running


@dataclass(frozen=True, eq=False)
class Wanted:
    """A run to be made: an algorithm with a seed, and the model and data of that seed."""

    name: str
    algorithm: Algorithm
    seed: int
    model: nn.Module
    data: FederatedData

    def __str__(self) -> str:
        return f"method {self.name!r} with seed {self.seed}"

    @property
    def alone_because(self) -> str | None:
        """Why the run cannot share its rounds with others, whoever they are; None if it can."""
        algorithm = self.algorithm
        if algorithm.personal is not None:
            return "clients have models of their own"
        if algorithm.privacy is not None:
            return "sums are protected"
        if hasattr(algorithm.solver, "prepare"):
            return "the solver prepares every round"
        return None if algorithm.aggregator.linear else "the aggregator is not linear"

    def goes_with(self, other: Wanted) -> bool:
        """Whether both runs' clients can work in one call."""
        return (
            self.alone_because is None
            and other.alone_because is None
            and same_part(self.algorithm.solver, other.algorithm.solver)
            and same_part(self.algorithm.aggregator, other.algorithm.aggregator)
            and self.served_with(other)
        )

    def served_with(self, other: Wanted) -> bool:
        """Whether one engine serves both runs."""
        return self.data is other.data and same_but_for_training(self.model, other.model)


@dataclass(eq=False)
class Going:
    """A run among others: where it is, and what it left so far."""

    wanted: Wanted
    setting: Setting
    state: ServerState
    history: History = field(default_factory=History)
    failure: Diverged | None = None

    def draws_as(self, other: Going) -> bool:
        """Whether both runs have the same cohorts in every round."""
        mine, theirs = self.setting, other.setting
        alike = mine.seed == theirs.seed and mine.clients_per_round == theirs.clients_per_round
        return alike and same_part(mine.sampler, theirs.sampler) and torch.equal(mine.alpha, theirs.alpha)

    def take(self, outcome: Outcome) -> None:
        """Go on from a round, or stop if it failed."""
        if isinstance(outcome, Diverged):
            self.fail(outcome)
        else:
            self.state, report = outcome
            self.history.on_round(report)

    def fail(self, failure: Diverged) -> None:
        failure.history = self.history
        self.failure = failure

    def evaluate(self, *, final: bool = False) -> None:
        """Evaluate all clients for the history; after the last round a loss that is not finite is a failure."""
        evaluation = self.setting.evaluation(self.wanted.algorithm, self.state, final=final)
        self.history.on_evaluation(evaluation)
        if final:
            try:
                stop_if_lost(evaluation)
            except Diverged as failure:
                self.fail(failure)

    def result(self, seconds: float) -> Result:
        last = self.history.evaluations[-1].clients
        return self.setting.result(self.wanted.name, self.wanted.algorithm, self.state, last, self.history, seconds)


def rounds_of(going: Sequence[Going]) -> SharedRounds:
    """The rounds that runs share; algorithms with one seed mostly have one cohort, which is drawn once."""
    same_cohorts = grouped(range(len(going)), lambda i, j: going[i].draws_as(going[j]))
    return SharedRounds([(run.setting, run.wanted.algorithm) for run in going], same_cohorts)


def train_together(runs: Sequence[Going], evaluate_every: int | None, progress: bool | None) -> list[Ended]:
    """All rounds of runs that share an engine, and their evaluation. One that diverges stops there; the others go on."""
    setting = runs[0].setting
    watching = Observers([Progress()] if show_progress(progress) else [])
    began = time.perf_counter()
    try:
        watching.on_start(Run(f"{len(runs)} runs", setting.rounds, setting.seed, setting=setting))
        going, rounds = list(runs), rounds_of(runs)
        for index in range(setting.rounds):
            for run, outcome in zip(going, rounds.following([run.state for run in going]), strict=True):
                run.take(outcome)
            if any(run.failure is not None for run in going):
                going = [run for run in going if run.failure is None]
                if not going:
                    break
                rounds = rounds_of(going)
            watching.on_round(going[0].history.rounds[-1])
            if evaluate_every and (index + 1) % evaluate_every == 0 and index + 1 < setting.rounds:
                for run in going:
                    run.evaluate()
        watching.on_evaluating(setting.rounds)
        for run in runs:
            if run.failure is None:
                run.evaluate(final=True)
    except BaseException:
        watching.on_end(failing=True)
        raise
    watching.on_end()
    seconds = (time.perf_counter() - began) / len(runs)
    return [run.failure or run.result(seconds) for run in runs]


def train_many(
    model: ModelOrMaker,
    data: DataOrMaker,
    algorithms: Algorithm | Mapping[str, Algorithm] | None = None,
    *,
    seeds: int | Iterable[int],
    rounds: int,
    clients_per_round: int | None = None,
    loss: PerExample | None = None,
    error: PerExample | None = None,
    engine: EngineChoice | str = "simulator",
    evaluate_every: int | None = None,
    progress: bool | None = None,
) -> Comparison:
    """Train with several seeds (`seeds=5` means 0 … 4), and perhaps several algorithms by name, in one batched run.

    Every result equals that of `train` with its algorithm and seed: the same cohorts and batches. Runs on the same data with
    the same solver and a linear aggregator are trained together, one round of all at a time, which costs less than one after
    another; models may differ by seed in the values of their trained parameters. All others (personal models, privacy, robust
    aggregators, solvers that prepare their rounds) are made one by one, and a notice says which. The other options are those of
    `train`. Data that differ by seed are all in memory at once; `compare` has those of one seed at a time.

    If a run diverges the others go on; the error is raised at the end, and its `finished` holds the runs that ended well.

    Source: ours.
    """
    good = evaluate_every is None or (is_whole(evaluate_every) and evaluate_every >= 1)
    require(good, "evaluate_every", "must be at least 1 round", evaluate_every)
    wanted = wanted_runs(model, data, named_algorithms(algorithms), chosen_seeds(seeds))
    batches = grouped(range(len(wanted)), lambda i, j: wanted[i].goes_with(wanted[j]))
    if (said := told_apart(wanted, batches)) is not None:
        warnings.warn(EquipoiseNotice(said), stacklevel=2)
    basics = {"rounds": rounds, "clients_per_round": clients_per_round, "loss": loss, "error": error}
    watched = {"evaluate_every": evaluate_every, "progress": progress}
    ended: dict[int, Ended] = {}
    try:
        together = [batch for batch in batches if len(batch) > 1]
        for home in grouped(range(len(together)), lambda a, b: wanted[together[a][0]].served_with(wanted[together[b][0]])):
            shared = OneEngine(choose_engine(engine))
            for batch in (together[number] for number in home):
                found = made_together([wanted[i] for i in batch], shared, engine, basics, watched)
                ended |= zip(batch, found, strict=True)
                for i, run in zip(batch, found, strict=True):
                    if isinstance(run, Result):
                        warn_if_lost(run.history, run.clients, classes=wanted[i].data.classes > 0, who=str(wanted[i]))
                        warn_if_idle(run.history)
                        warn_if_rejected(run.history)
            del shared  # its data leave the device before those of the next come
        for batch in batches:
            if len(batch) == 1:
                ended[batch[0]] = made_alone(wanted[batch[0]], engine, basics, watched)
    except EquipoiseError as failure:
        failure.finished = comparison_of(wanted, ended)
        raise
    stop_if_any_diverged(wanted, ended)
    return comparison_of(wanted, ended)


def made_together(
    wanted: Sequence[Wanted], shared: OneEngine, engine: EngineChoice | str, basics: dict[str, Any], watched: dict[str, Any]
) -> list[Ended]:
    """Runs that share their rounds; one by one after all if their clients are elsewhere, where a round may be tried again."""
    going = []
    for one in wanted:
        with said_of(one):
            setting = set_up(one.model, one.data, one.algorithm, seed=one.seed, engine=shared, **basics)
        if hasattr(setting.engine, "attempt"):
            return [made_alone(each, engine, basics, watched) for each in wanted]
        going.append(Going(one, setting, setting.begin(one.algorithm)))
    return train_together(going, **watched)


def made_alone(one: Wanted, engine: EngineChoice | str, basics: dict[str, Any], watched: dict[str, Any]) -> Ended:
    """A run by itself; if it diverges, the error."""
    try:
        with said_of(one):
            return train(one.model, one.data, one.algorithm, seed=one.seed, name=one.name, engine=engine, **basics, **watched)
    except Diverged as failure:
        return failure


@contextmanager
def said_of(wanted: Wanted) -> Iterator[None]:
    """Within it, an error says which run it was."""
    try:
        yield
    except EquipoiseError as failure:
        failure.add_note(f"This was {wanted}.")
        raise


def named_algorithms(algorithms: Algorithm | Mapping[str, Algorithm] | None) -> dict[str, Algorithm]:
    """Algorithms by name; a single one is called "run", as in `train`."""
    named = dict(algorithms) if isinstance(algorithms, Mapping) else {"run": algorithms or Algorithm()}
    require(len(named) > 0, "algorithms", "must map names to algorithms", algorithms, 'E.g. {"FedAvg": Algorithm()}.')
    for algorithm in named.values():
        good = isinstance(algorithm, Algorithm)
        require(
            good, "algorithms", "must be an equipoise.Algorithm, or map names to some", algorithm, "Write Algorithm(risk=…)."
        )
    return named


def chosen_seeds(seeds: object) -> list[int]:
    """Different seeds as a list; a number n means 0 … n − 1."""
    found: Any = seeds.tolist() if hasattr(seeds, "tolist") else seeds
    numbers = list(range(found)) if is_whole(found) else list(found) if isinstance(found, Iterable) else []
    good = len(numbers) > 0 and all(is_whole(seed) for seed in numbers) and len(set(numbers)) == len(numbers)
    require(good, "seeds", "must be one or more different whole numbers, or how many", seeds, "E.g. seeds=5 for 0 … 4.")
    return [int(seed) for seed in numbers]


def wanted_runs(
    model: ModelOrMaker, data: DataOrMaker, algorithms: Mapping[str, Algorithm], seeds: Sequence[int]
) -> list[Wanted]:
    """Every algorithm with every seed; the model and the data of a seed are made once. Data with equal content are one."""
    if isinstance(model, FederatedData) or isinstance(data, nn.Module):
        raise InvalidParameter(
            "model", "comes first and the data second", type(model).__name__, "Write train_many(model, data, …)."
        )
    known: dict[tuple[str, ...], FederatedData] = {}
    runs = []
    for seed in seeds:
        start, found = made(model, seed, nn.Module, "model"), made(data, seed, FederatedData, "data")
        if found is not data and found.attack is None:  # attacks need not be comparable
            found = known.setdefault((found.name, str(found.classes), found.fingerprint), found)
        runs += [Wanted(name, algorithm, seed, start, found) for name, algorithm in algorithms.items()]
    return runs


def told_apart(wanted: Sequence[Wanted], batches: Sequence[Sequence[int]]) -> str | None:
    """What to say about runs that are not trained together with others; None if there are none, or there is one run only."""
    alone = [wanted[batch[0]] for batch in batches if len(batch) == 1]
    if not alone or len(wanted) == 1:
        return None
    usual = "no other run has its data, solver and aggregator, and its model but for trained values"
    reasons: dict[str, list[str]] = {}
    for one in alone:
        reasons.setdefault(one.alone_because or usual, []).append(one.name)
    because = "; ".join(f"{listed(list(dict.fromkeys(names)), 3)} ({reason})" for reason, names in reasons.items())
    count = "None" if len(alone) == len(wanted) else f"{len(wanted) - len(alone)}"
    return f"{count} of the {len(wanted)} runs can be trained together. One by one, with the same results, go: {because}."


def comparison_of(wanted: Sequence[Wanted], ended: Mapping[int, Ended]) -> Comparison:
    """The runs that ended well, by method, in the order of their seeds."""
    results: dict[str, list[Result]] = {}
    for number, one in enumerate(wanted):
        if isinstance(run := ended.get(number), Result):
            results.setdefault(one.name, []).append(run)
    return Comparison(results)


def stop_if_any_diverged(wanted: Sequence[Wanted], ended: Mapping[int, Ended]) -> None:
    """Raise the first error of a run that diverged, after the others have ended; it names all of them."""
    failures = {number: run for number, run in sorted(ended.items()) if isinstance(run, Diverged)}
    if not failures:
        return
    (number, first), *others = failures.items()
    if not getattr(first, "__notes__", None):  # one that was alone has said it
        first.add_note(f"This was {wanted[number]}.")
    if others:
        first.add_note(f"So did {listed([str(wanted[i]) for i, _ in others], 5)}.")
    first.finished = comparison_of(wanted, ended)
    raise first
