"""Several seeds and several algorithms in one batched run.

Each run has its own parameters, cohorts and batches, and equals the run that `train` makes of it alone. What runs share is the
engine, and the call in which the clients of all of them work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from equipoise.algorithm import Algorithm
from equipoise.compare import Comparison
from equipoise.core.equality import same_but_for_training, same_part
from equipoise.core.grouping import grouped
from equipoise.core.per_example_losses import PerExample
from equipoise.core.task import Task
from equipoise.data.clients import FederatedData
from equipoise.errors import Diverged, ObserverFailed, each_notice_once, notify, require
from equipoise.report.formats import listed
from equipoise.result import Result
from equipoise.runs.checkpoint import Checkpoints, checkpoint_of, numbered
from equipoise.runs.health import notices
from equipoise.runs.interrupted import note_finished, noting_interrupts
from equipoise.runs.setup import (
    DataOrMaker,
    EngineChoice,
    ModelOrMaker,
    Setting,
    build,
    choose_engine,
    chosen_seeds,
    refuse_swapped,
    set_up,
)
from equipoise.runs.stopping import EarlyStopping
from equipoise.train import Watching, train_runs
from equipoise.types import Engine, Observer


class SharedEngine:
    """An engine choice that starts one engine, when it is first asked, and hands it to every run that can share it."""

    def __init__(self, choice: EngineChoice) -> None:
        self._choice = choice
        self._running: Engine | None = None

    def start(self, task: Task, data: FederatedData) -> Engine:
        """The one engine."""
        if self._running is None:
            self._running = self._choice.start(task, data)
        return self._running


@dataclass(frozen=True, eq=False)
class SeededRun:
    """A run to be made: an algorithm with a seed, and the model and data of that seed."""

    name: str
    algorithm: Algorithm
    seed: int
    model: nn.Module
    data: FederatedData

    def __str__(self) -> str:
        return f"method {self.name!r} with seed {self.seed}"

    def label(self, planned: Sequence[SeededRun]) -> str:
        """What observers call the run: the method's name, and the seed where there are several."""
        return self.name if len({run.seed for run in planned}) == 1 else f"{self.name}, seed {self.seed}"

    def set_up(self, engine: EngineChoice, options: dict[str, Any], label: str) -> Setting:
        """The run made ready, on an engine that it may share."""
        with self.named_in_errors():
            return set_up(self.model, self.data, self.algorithm, seed=self.seed, engine=engine, name=label, **options)

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Within it, an error says which run it was."""
        try:
            yield
        except Exception as failure:  # also of a part of the user's own
            failure.add_note(f"This was {self}.")
            raise

    @property
    def alone_because(self) -> str | None:
        """Why the run cannot share its rounds with others, whoever they are; None if it can."""
        algorithm = self.algorithm
        if algorithm.personal is not None:
            return "clients have models of their own"
        if algorithm.traits.sampler.buffered is not None:
            return "clients come and go on a clock of the run's own"
        if algorithm.privacy is not None:
            return "sums are protected"
        if algorithm.traits.solver.prepare is not None:
            return "the solver prepares every round"
        if algorithm.traits.aggregator.normalises is not None:
            return "updates are normalised client by client"
        if algorithm.traits.solver.keeps is not None:
            return "clients keep a state for their solver"
        return None if algorithm.aggregator.linear else "the aggregator is not linear"

    def goes_with(self, other: SeededRun) -> bool:
        """Whether both runs' clients can work in one call."""
        mine, theirs = self.algorithm, other.algorithm
        able = self.alone_because is None and other.alone_because is None and self.served_with(other)
        return able and same_part(mine.solver, theirs.solver) and same_part(mine.aggregator, theirs.aggregator)

    def served_with(self, other: SeededRun) -> bool:
        """Whether one engine serves both runs."""
        return self.data is other.data and same_but_for_training(self.model, other.model)


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
    evaluate_clients: int | None = None,
    metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
    stop: EarlyStopping | None = None,
    observers: Sequence[Observer] = (),
    progress: bool | None = None,
    checkpoint: Checkpoints | str | Path | None = None,
    ledger: str | Path | None = None,
) -> Comparison:
    """Train with several seeds (`seeds=5` means 0 … 4), and perhaps several algorithms by name, in one batched run.

    Every result equals that of `train` with its algorithm and seed: the same cohorts and batches. Runs on the same data
    with the same solver and a linear aggregator are trained together, one round of all runs at a time. This takes less time
    than one run after another. Models may differ by seed in the values of their trained parameters. All other runs
    (personal models, privacy, robust aggregators, solvers that prepare their rounds) are trained one by one, and a notice
    says which. The other options are those of `train`. Data that differ by seed are all in memory at once; `compare` has
    those of one seed at a time.

    Observers get the reports of every run's rounds; `report.run` is the method's name, with the seed if there are several.
    `checkpoint` names the file of the first runs that are trained together; further groups have files beside it
    (`many.ckpt`, `many-2.ckpt`, …). Runs that are made one by one have files named by method and seed, as those of
    `compare`.

    With `stop` each run is stopped by its own figures, and the others continue. If a run diverges, the others continue,
    too. The error is raised at the end, and its `finished` holds the runs that did not fail.

    `algorithms` is one Algorithm, or several by name (None: FedAvg).

    Source: ours.

    >>> import equipoise as eq
    >>> data = eq.data.label_shift(train_clients=5, validation_clients=0, test_clients=3, examples=20)
    >>> made = eq.train_many(eq.models.Softmax(20, 10), data, seeds=2, rounds=2, clients_per_round=3)
    >>> [run.seed for run in made.all_results]
    [0, 1]
    """
    watch = Watching(evaluate_every, observers, progress, checkpoint, ledger)
    planned = plan_runs(model, data, named_algorithms(algorithms), chosen_seeds(seeds))
    if (text := notice_about_single_runs(planned, groups_of(planned))) is not None:
        notify(text)
    options: dict[str, Any] = {"rounds": rounds, "clients_per_round": clients_per_round, "loss": loss, "error": error}
    options |= {"evaluate_clients": evaluate_clients, "metrics": metrics, "stop": stop}
    ended: dict[int, Result | Diverged] = {}
    try:
        with each_notice_once(), noting_interrupts(watch.saving):
            train_plan(planned, watch, engine, options, ended)
    except Exception as failure:
        vars(failure)["finished"] = comparison_of(planned, ended)
        raise
    except KeyboardInterrupt as stop_asked:
        done = comparison_of(planned, ended)
        note_finished(stop_asked, done, len(done.all_results), len(planned))
        raise
    stop_if_any_diverged(planned, ended)
    return comparison_of(planned, ended)


def groups_of(planned: Sequence[SeededRun]) -> list[list[int]]:
    """The positions of runs whose clients can work in one call, group by group."""
    return grouped(range(len(planned)), lambda i, j: planned[i].goes_with(planned[j]))


def train_plan(
    planned: Sequence[SeededRun],
    watch: Watching,
    engine: EngineChoice | str,
    options: dict[str, Any],
    ended: dict[int, Result | Diverged],
) -> None:
    """Make the runs, together where that is possible; `ended` takes each one's result, or its error, by its position.

    `options` are those of `set_up` that all runs share. Where an observer stops the runs, `ended` has those that were over.
    """
    groups = groups_of(planned)
    together = [group for group in groups if len(group) > 1]
    alone = [[group] for group in groups if len(group) == 1]
    on_one_engine = grouped(range(len(together)), lambda a, b: planned[together[a][0]].served_with(planned[together[b][0]]))
    files = 0
    for sharing in [*([together[number] for number in numbers] for numbers in on_one_engine), *alone]:
        choice = choose_engine(engine)
        shared = SharedEngine(choice) if len(sharing[0]) > 1 else choice  # a run alone may start further engines (Mapper)
        for group in sharing:
            runs = [planned[i] for i in group]
            settings = [run.set_up(shared, options, label=run.label(planned)) for run in runs]
            apart = settings[0].engine_traits.network is not None  # there a round may be tried again, for one run at a time
            for part in [[i] for i in range(len(runs))] if apart else [range(len(runs))]:
                files += len(part) > 1 or len(planned) == 1
                saving = replace(watch, checkpoint=_file_of([runs[i] for i in part], watch.saving, files, len(planned)))
                numbers = [group[i] for i in part]
                try:
                    results = train_planned([runs[i] for i in part], [settings[i] for i in part], saving)
                except ObserverFailed as failure:  # perhaps at the end of runs that are finished
                    ended |= zip(numbers, failure.finished or (), strict=False)
                    raise
                ended |= zip(numbers, results, strict=True)
            for number, setting in zip(group, settings, strict=True):
                if isinstance(result := ended[number], Result):
                    who = "the run" if len(group) == 1 else str(planned[number])
                    for text in notices(setting, result, who):
                        notify(text)
        del shared, settings  # their data leave the device before those of the next come


def _file_of(runs: Sequence[SeededRun], saving: Checkpoints | None, number: int, planned: int) -> Checkpoints | None:
    """The checkpoint of runs that are trained together, by its number, or of one of several `planned` runs, by its name."""
    if saving is None or len(runs) > 1 or planned == 1:
        return numbered(saving, number)
    return checkpoint_of(saving, runs[0].name, runs[0].seed)


def train_planned(runs: Sequence[SeededRun], settings: Sequence[Setting], watch: Watching) -> list[Result | Diverged]:
    """The results of runs that share their rounds, or of a single one, which is named in errors."""
    if len(runs) > 1:
        return train_runs(settings, watch, f"{len(runs)} runs")
    with runs[0].named_in_errors():
        return train_runs(settings, watch, runs[0].name)


def named_algorithms(algorithms: Algorithm | Mapping[str, Algorithm] | None) -> dict[str, Algorithm]:
    """Algorithms by name; a single one is called "run", as in `train`."""
    named = dict(algorithms) if isinstance(algorithms, Mapping) else {"run": algorithms or Algorithm()}
    require(len(named) > 0, "algorithms", "must map names to algorithms", algorithms, 'E.g. {"FedAvg": Algorithm()}.')
    rule = "must be an equipoise.Algorithm, or map names to some"
    for algorithm in named.values():
        require(isinstance(algorithm, Algorithm), "algorithms", rule, algorithm, "Write Algorithm(risk=…).")
    return named


def plan_runs(
    model: ModelOrMaker, data: DataOrMaker, algorithms: Mapping[str, Algorithm], seeds: Sequence[int]
) -> list[SeededRun]:
    """Every algorithm with every seed; the model and the data of a seed are made once. Data with equal content are one."""
    refuse_swapped(model, data, "train_many")
    known: dict[tuple[str, ...], FederatedData] = {}
    runs = []
    for seed in seeds:
        start, clients = build(model, seed, nn.Module, "model"), build(data, seed, FederatedData, "data")
        if clients is not data and clients.attack is None:  # attacks need not be comparable
            clients = known.setdefault((clients.name, str(clients.classes), clients.fingerprint), clients)
        runs += [SeededRun(name, algorithm, seed, start, clients) for name, algorithm in algorithms.items()]
    return runs


def notice_about_single_runs(planned: Sequence[SeededRun], groups: Sequence[Sequence[int]]) -> str | None:
    """Which runs are not trained together with others, and why; None if there are none, or there is one run only."""
    alone = [planned[group[0]] for group in groups if len(group) == 1]
    if not alone or len(planned) == 1:
        return None
    usual = "no other run has its data, solver and aggregator, and its model but for trained values"
    reasons: dict[str, list[str]] = {}
    for one in alone:
        reasons.setdefault(one.alone_because or usual, []).append(one.name)
    because = "; ".join(f"{listed(list(dict.fromkeys(names)), 3)} ({reason})" for reason, names in reasons.items())
    count = "None" if len(alone) == len(planned) else f"{len(planned) - len(alone)}"
    together = f"{count} of the {len(planned)} runs can be trained together."
    return f"{together} One by one, with the same results up to rounding, which grows over the rounds, go: {because}."


def comparison_of(planned: Sequence[SeededRun], ended: Mapping[int, Result | Diverged]) -> Comparison:
    """The runs that ended well, by method and under its name, in the order of their seeds."""
    results: dict[str, list[Result]] = {}
    differ = any(run.data is not planned[0].data for run in planned)  # data with equal content are one object
    for number, run in enumerate(planned):
        if isinstance(result := ended.get(number), Result):
            version = run.data.fingerprint if differ else ""
            results.setdefault(run.name, []).append(replace(result, name=run.name, data_version=version))
    return Comparison(results)


def stop_if_any_diverged(planned: Sequence[SeededRun], ended: Mapping[int, Result | Diverged]) -> None:
    """Raise the first error of a run that diverged, after the others have ended; it names all of them."""
    failures = {number: run for number, run in sorted(ended.items()) if isinstance(run, Diverged)}
    if not failures:
        return
    (number, first), *others = failures.items()
    first.add_note(f"This was {planned[number]}.")
    if others:
        first.add_note(f"So did {listed([str(planned[i]) for i, _ in others], 5)}.")
    first.finished = comparison_of(planned, ended)
    raise first
