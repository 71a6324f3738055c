"""`eq.tune`: a search in Python, over the values of a function that makes an algorithm, judged without the test clients."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from torch import nn

from equipoise.algorithm import Algorithm
from equipoise.core.files import make_folder, writing
from equipoise.core.fingerprints import without_addresses
from equipoise.core.numbers import plain_values
from equipoise.core.words import joined, table_lines
from equipoise.data.federated_data import FederatedData
from equipoise.errors import (
    ConfigError,
    Diverged,
    EquipoiseError,
    EquipoiseNotice,
    IncompatibleParts,
    InvalidData,
    InvalidParameter,
    brief,
    each_notice_once,
    require,
    require_integer,
    require_name,
)
from equipoise.experiment.optuna_trials import imported_optuna, search_by_optuna
from equipoise.experiment.search import CRITERIA, Axis, Criterion, Range, Values, check_axis, folder_name, trial_name
from equipoise.experiment.trial_results import TrialResult, cell_text, criterion_of, criterion_words, noise_words, spread_text
from equipoise.privacy.common_clients import join_data, marks_in
from equipoise.privacy.ledger import FILE, Ledger
from equipoise.privacy.ledger_report import words_of
from equipoise.privacy.lookers import CHOSEN, refuse_search
from equipoise.report.notices import said, size_notices
from equipoise.runs.checkpoint import Checkpoints
from equipoise.runs.setup import DataOrMaker, ModelOrMaker, build, chosen_seeds, refuse_swapped
from equipoise.train import train

_NO_FOLDER = 'Nothing was saved. With folder="runs/tune", a search that is interrupted goes on when the call is repeated.'
# Said of every trial of a search that goes on.
_GOING_ON = r"(Going on from round \d+ of \d+, as .* has it|.* this run is finished, and no round is trained)\.$"


@dataclass(frozen=True)
class Tuning:
    """A search that has ended: the `best` algorithm, its `values`, and all `trials`, best first. `summary()` is the table.

    `tune` gives it. Source: ours.

    >>> import equipoise as eq
    >>> data = eq.data.label_shift(train_clients=5, validation_clients=3, test_clients=2, examples=20)
    >>> tuned = eq.tune(lambda lr: eq.Algorithm(solver=eq.solvers.SGD(lr=lr)), {"lr": [0.001, 0.1]},
    ...                 eq.models.Softmax(20, 10), data, rounds=5, clients_per_round=3)
    >>> len(tuned.trials), tuned.criterion, tuned.seeds, tuned.values == dict(tuned.trials[0].values)
    (2, 'validation_90', 1, True)
    """

    best: Algorithm
    trials: tuple[TrialResult, ...]  # best first, failed ones last
    criterion: Criterion  # one of CRITERIA, e.g. "validation_90"
    seeds: int  # how many seeds each trial has
    privacy: str = ""  # what the private runs of the search cost together; empty without differential privacy
    at_least: int = 0  # examples of the validation clients that count
    small_clients: str = ""  # on few validation clients, or few examples of theirs, under the best trial; else empty

    @property
    def values(self) -> dict[str, Any]:
        """The values of the best trial."""
        return dict(self.trials[0].values)

    def summary(self) -> str:
        """A table of all trials, best first, and which of them the seeds cannot distinguish from the best.

        Parts are shown with the parameters that differ from their defaults.
        """
        names = list(self.trials[0].values)
        numbers = {trial_name(trial.values): f"trial {number}" for number, trial in enumerate(self.trials, start=1)}
        rows = [["trial", *names, self.criterion, "status"]]
        for number, trial in enumerate(self.trials, start=1):
            cells = [str(number), *map(_cell, trial.values.values())]
            rows.append([*cells, spread_text(trial.criterion, self.seeds), "done" if trial.criterion is not None else "failed"])
        lines = [criterion_words(self.criterion, self.at_least, self.seeds)]
        lines += table_lines(rows)
        lines += [f"Failed: {numbers[trial_name(t.values)]}: {t.message}" for t in self.trials if t.criterion is None]
        noise = noise_words(self.trials, self.criterion, name_of=lambda values: numbers[trial_name(values)])
        lines += filter(None, (noise, self.small_clients, self.privacy))
        lines.append("Test clients took no part. Judge the best on them once, with train or compare.")
        return joined(lines)

    def __repr__(self) -> str:
        values = ", ".join(f"{name!r}: {brief(value)}" for name, value in self.values.items())
        return f"Tuning(values={{{values}}})\n{self.summary()}"


def _cell(value: Any) -> str:
    """A value as a cell: numbers with six digits, parts with the parameters that differ from their defaults."""
    return cell_text(value) if isinstance(value, str | int | float | list | Mapping) else brief(value)


@dataclass(frozen=True, eq=False)
class PythonTrials:
    """Runs the trials of a search in this process, one after another."""

    make: Callable[..., Algorithm]
    space: Mapping[str, Axis]
    model: ModelOrMaker
    data: DataOrMaker
    criterion: Criterion
    seeds: Sequence[int]
    total: int
    folder: Path | None
    options: Mapping[str, Any]
    at_least: int = 0
    at_once: int = 1
    refusals: list[EquipoiseError] = field(default_factory=list)  # of trials that failed
    tried: list[Algorithm] = field(default_factory=list)  # that were not refused
    known: dict[str, TrialResult] = field(default_factory=dict)  # by name: Optuna may ask for the same values again
    small_clients: dict[str, str] = field(default_factory=dict)  # by name, sentences on few clients, or few examples of theirs

    @property
    def seed(self) -> int:
        """The first seed, which also decides what Optuna tries."""
        return self.seeds[0]

    @property
    def identity(self) -> dict[str, Any]:
        """What a study must share with the search to go on; checkpoints compare model, data and algorithms."""
        space = {
            key: vars(axis) if isinstance(axis, Range) else [repr(value) for value in axis] for key, axis in self.space.items()
        }
        named = {name: self.options[name] for name in ("rounds", "clients_per_round")} | {"at_least": self.at_least}
        return {"criterion": self.criterion, "seeds": list(self.seeds), "space": space, **named}

    def run(self, points: Sequence[Values]) -> list[TrialResult]:
        """Make the runs of trials; those in the folder that have ended are only evaluated."""
        for values in points:
            if (name := trial_name(values)) not in self.known:
                self.known[name] = self._trial(values)
        return [self.known[trial_name(values)] for values in points]

    def result(self, values: Values, messages: Mapping[Path, str]) -> TrialResult:
        """The result of a trial that failed in an earlier process."""
        return TrialResult(values, None, "failed before.")

    def algorithm(self, values: Values) -> Algorithm:
        """The algorithm of a trial."""
        made = self.make(**values)
        rule = "must be a function that gives an equipoise.Algorithm"
        require(isinstance(made, Algorithm), "algorithm", rule, made, "E.g. lambda lr: Algorithm(solver=solvers.SGD(lr=lr)).")
        return made

    def _trial(self, values: Values) -> TrialResult:
        """Train with every seed; values that are refused, or that diverge, fail the trial alone."""
        by_seed = []
        for seed in self.seeds:
            file = None if self.folder is None else Checkpoints(self.folder / f"{folder_name(values)}-{seed}.safetensors")
            try:
                algorithm = self.algorithm(values)
                start, clients = build(self.model, seed, nn.Module, "model"), self.clients(seed)
                refuse_search([*self.tried, algorithm], clients, self.criterion.split("_")[0])
                self.tried.append(algorithm)
                run = train(start, clients, algorithm, seed=seed, name=trial_name(values), checkpoint=file, **self.options)
            except (Diverged, IncompatibleParts, InvalidParameter) as failure:
                self.refusals.append(failure)
                return TrialResult(values, None, f"seed {seed}: {failure}")
            except EquipoiseError as failure:
                failure.add_note(f"This was the trial {trial_name(values)} with seed {seed}.")
                raise
            by_seed.append(criterion_of(run.clients, self.criterion, self.at_least))
            if self.criterion != "train_loss":
                judged = run.judged_by("validation", self.at_least)
                self.small_clients.setdefault(trial_name(values), said(size_notices([judged])))
        return TrialResult.of(values, by_seed, self.criterion)

    def clients(self, seed: int) -> FederatedData:
        """The data of a seed without test clients; data that the criterion cannot judge are refused."""
        data = build(self.data, seed, FederatedData, "data")
        if self.criterion != "train_loss" and data.validation is None:
            raise InvalidData(
                f'criterion = "{self.criterion}" needs validation clients, and the data {data.name!r} have none. Split them '
                'with validation clients or examples, or use criterion="train_loss".'
            )
        return replace(data, test=None)


def tune(
    algorithm: Callable[..., Algorithm],
    space: Mapping[str, Any],
    model: ModelOrMaker,
    data: DataOrMaker,
    *,
    rounds: int,
    clients_per_round: int | None = None,
    criterion: str = "validation_90",
    trials: int | None = None,
    seeds: int | Iterable[int] = 1,
    folder: str | Path | None = None,
    at_least: int = 0,
    **options: Any,
) -> Tuning:
    """Try values of an algorithm, and choose by validation clients or by training loss, never by test clients.

    `algorithm` is a function of the names in `space` that makes an Algorithm. `space` lists the values of each name; they
    may be parts. Without `trials` all combinations are tried. `trials=20` lets Optuna choose 20 times, and then a name may
    have a range, {"low": 0.01, "high": 1.0, "log": True}, of integers if both ends are. `criterion` is "validation_90", the
    90th percentile of the error over validation clients, "validation_mean", its mean over them, "validation_mean_by_example",
    in which they count by their examples, or "train_loss"; it is averaged over `seeds` (5 means 0 … 4). Test clients are
    dropped before training. If values are refused or diverge, only their trial fails. `at_least=30` judges by the validation
    clients with 30 validation examples or more.

    `folder` keeps a checkpoint of each run, and Optuna's study. The same call continues the search. `model`, `data` and the
    other options are those of `train`. Source: ours.

    `options` are passed on to `train`.

    >>> import equipoise as eq
    >>> data = eq.data.label_shift(train_clients=8, validation_clients=4, test_clients=3, examples=20)
    >>> tuned = eq.tune(lambda lr: eq.Algorithm(solver=eq.solvers.SGD(lr=lr)), {"lr": [0.001, 0.1]},
    ...                 eq.models.Softmax(20, 10), data, rounds=5, clients_per_round=4)
    >>> tuned.values, tuned.best.solver.lr
    ({'lr': 0.1}, 0.1)
    """
    refuse_swapped(model, data, "tune")
    require_name("criterion", criterion, CRITERIA)
    if trials is not None:
        require_integer("trials", trials, 1)
    require_integer("at_least", at_least, 0)
    fix = 'Leave it out, or use criterion="validation_90".'
    require(not at_least or criterion != "train_loss", "at_least", "must be 0 with the training loss", at_least, fix)
    for name, fix in {"checkpoint": "Write folder=…", "seed": "Write seeds=[…] or seeds=5.", "name": "Leave it out."}.items():
        require(name not in options, name, "is set by tune", options.get(name), fix)
    place = None if folder is None else Path(folder)
    ledger = Ledger(options.get("ledger") or (place and place / FILE))  # one for all trials: it counts those that fail, too
    chosen = next(each for each in CRITERIA if each == criterion)
    runner = PythonTrials(
        algorithm, checked_space(algorithm, space, trials, place), model, data, chosen, chosen_seeds(seeds), trials or 0, place,
        {**options, "rounds": rounds, "clients_per_round": clients_per_round, "ledger": ledger}, at_least,
    )  # fmt: skip
    optuna = None if trials is None else imported_optuna("trials=…", "Or list values, and leave out trials.")
    if place is not None:
        with writing(place):
            make_folder(place)
    try:
        with each_notice_once(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_GOING_ON, category=EquipoiseNotice)
            if optuna is None:
                found = runner.run(every_combination(runner.space))
            else:
                found = search_by_optuna(optuna, runner, None if place is None else place / "study.db")
    except KeyboardInterrupt as stop:
        if place is None:
            stop.__notes__ = [_NO_FOLDER]  # in place of what `train` says
        raise
    ordered = sorted(found, key=lambda result: result.value)
    if ordered[0].criterion is None and runner.refusals:
        runner.refusals[0].add_note(f"All {len(ordered)} trials failed; this was the first.")
        raise runner.refusals[0]
    if ordered[0].criterion is None:
        raise ConfigError(f"All {len(ordered)} trials failed. {ordered[0].message}")
    best = runner.algorithm(ordered[0].values)
    few = runner.small_clients.get(trial_name(ordered[0].values), "")
    spent = words_of(ledger.entries, join_data(marks_in(ledger.entries)))
    return Tuning(best, tuple(ordered), chosen, len(runner.seeds), spent and f"{spent} {CHOSEN}", at_least, few)


def every_combination(space: Mapping[str, Axis]) -> list[Values]:
    """All combinations of listed values."""
    axes = [axis for axis in space.values() if not isinstance(axis, Range)]
    return [dict(zip(space, values, strict=True)) for values in product(*axes)]


def checked_space(make: Any, space: Any, trials: int | None, folder: Path | None) -> dict[str, Axis]:
    """The space of a search, with every axis checked, and its names against the parameters of the function."""
    example = "E.g. lambda lr: Algorithm(solver=solvers.SGD(lr=lr))."
    good = callable(make) and not isinstance(make, type | Algorithm)
    require(good, "algorithm", "must be a function that makes an Algorithm", make, example)
    good = isinstance(space, Mapping) and len(space) > 0 and all(isinstance(name, str) for name in space)
    rule = "must map names of the function's parameters to the values to try"
    require(good, "space", rule, space, 'E.g. {"lr": [0.01, 0.1, 1.0]}.')
    found = {name: checked_axis(f"space[{name!r}]", axis, trials, folder) for name, axis in space.items()}
    try:
        inspect.signature(make).bind(**found)
    except TypeError as failure:
        rule = f"must take the names of space, {', '.join(found)}, as its parameters"
        raise InvalidParameter("algorithm", rule, make, f"Calling it said: {failure}.") from failure
    return found


def checked_axis(key: str, given: Any, trials: int | None, folder: Path | None) -> Axis:
    """The values of one name, or its range, which only Optuna can try."""
    if isinstance(given, Mapping):
        fix = "List its values, or give trials=20, which lets Optuna choose."
        require(trials is not None, key, "must be a list of values without trials=…", given, fix)
        return check_axis(given, key, "optuna")
    plain = plain_values(given)
    values = list(plain) if isinstance(plain, Sequence) and not isinstance(plain, str) else []
    good = len(values) > 0 and len(set(map(repr, values))) == len(values)
    require(good, key, "must be a list of different values", given, "E.g. [0.01, 0.1, 1.0].")
    for value in values if folder is not None else ():
        fixed = without_addresses(repr(value)) == repr(value)
        fix = "List names, and choose by name in the function."
        require(fixed, key, "must hold values whose repr is the same in every process where folder is given", value, fix)
    return values
