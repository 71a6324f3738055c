"""`equipoise tune`: the configuration of a run tried with other values, judged by training or validation clients.

    [search]
    criterion = "validation_90"                # "validation_mean", …, or "train_loss", without personal models
    trials = 20                                # of Optuna; without it every combination is tried
    seeds = 1                                  # from [train] seed on; the criterion is averaged over them
    at_least = 0                               # examples of the validation clients that count
    [search.space]
    "algorithm.solver.lr" = [0.01, 0.1, 1.0]   # values, or for Optuna a range: {low = 0.01, high = 1.0, log = true}

[data], [model], [algorithm] and [train] are those of a single run. A trial is one choice of values; its runs lie in folders
named by these, so that the same values are never run twice, and a search that was killed, or is given more values, goes on.

Test clients cannot be used: `worker --without-test`, which makes every run of a search, drops them before training; the first
line of the config.toml of a run says so, and a folder with rows of test clients is refused.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise.core.files import write_atomically
from equipoise.core.screen import Screen
from equipoise.core.words import printable
from equipoise.errors import ConfigError
from equipoise.experiment import scheduler, toml
from equipoise.experiment.config import SECTIONS, RunConfig
from equipoise.experiment.config_tables import override, read_toml, refuse_unknown, section, with_value
from equipoise.experiment.open_runs import group_data
from equipoise.experiment.own_code import Origin
from equipoise.experiment.run_files import RunFolder
from equipoise.experiment.study import PlannedRun, dotted_items, merged, prepare
from equipoise.experiment.trials import (
    CRITERIA,
    Axis,
    Criterion,
    TrialResult,
    Values,
    check_axis,
    corners,
    criterion_of,
    folder_name,
    grid,
    imported_optuna,
    is_range,
    noise_words,
    run_trials,
    spread_text,
    trial_lines,
    trial_name,
)
from equipoise.experiment.values import check_value
from equipoise.privacy.ledger_report import words_below
from equipoise.privacy.lookers import CHOSEN, refuse_search

NOTE = "# A trial of equipoise tune: trained and judged without the test clients.\n"
KEYS: dict[str, Any] = {
    "criterion": Criterion,
    "trials": int,
    "seeds": int,
    "at_least": int,
    "at_once": int,
    "space": Mapping[str, Any],
}


@dataclass(frozen=True)
class Search:
    """A checked section [search], with the tables of the run that it changes."""

    base: dict[str, Any]
    space: dict[str, Axis]
    origin: Origin  # where the file lies
    given: Mapping[str, Any]  # the section [search]
    criterion: Criterion = "train_loss"
    trials: int | None = None
    seeds: int = 1
    at_least: int = 0  # examples of the validation clients that count
    at_once: int | None = None  # trials that Optuna is asked for at once

    @property
    def points(self) -> list[Values]:
        """All points of a grid; for Optuna the corners of the space."""
        return grid(self.space) if self.trials is None else list(corners(self.space))

    def config(self, values: Values, **options: Any) -> RunConfig:
        """The checked configuration of a run with these values; `options` are further ones of [train]."""
        changes: dict[str, Any] = {}
        # A part before its parameters, and its name first, because another name starts the part afresh.
        for key in sorted(values, key=lambda key: (key.count("."), not key.endswith(".name"))):
            changes = merged(changes, with_value({}, key.split("."), values[key], "search.space"))
        table = merged(self.base, changes)
        return RunConfig.of({**table, "train": {**section(table, "train"), **options}}, self.origin)

    def plan(self, values: Values, out: Path) -> list[PlannedRun]:
        """The runs of a trial, one per seed."""
        first, name, folder = self.config(values).train, trial_name(values), folder_name(values)
        options = {"name": name, "threads": first.threads or 1}
        return [
            PlannedRun(RunFolder(out / f"{folder}-{seed}"), name, seed, self.config(values, seed=seed, **options))
            for seed in range(first.seed, first.seed + self.seeds)
        ]


def read_search(path: Path, overrides: Iterable[str] = (), *, trust: bool = False) -> Search:
    """The search that a file describes, with every value of its space checked; nothing is written."""
    table = override(read_toml(path), overrides)
    refuse_unknown(table, (*SECTIONS, "code", "versions", "search"), "")
    if "search" not in table:
        raise ConfigError(f"{path} has no [search] section: it says what to try. See examples/tune.toml.")
    options = section(table, "search")
    refuse_unknown(options, KEYS, "search")
    checked = {key: check_value(value, KEYS[key], f"search.{key}") for key, value in options.items()}
    for key in ("trials", "seeds", "at_once"):
        if checked.get(key, 1) < 1:
            raise ConfigError(f"search.{key} must be at least 1, but is {checked[key]}.")
    space = read_space(checked.pop("space", {}), ranges="trials" in checked)
    base = {name: table[name] for name in SECTIONS if name in table}
    search = Search(base, space, Origin.of(path, table, "run", trust=trust), options, **checked)
    if search.at_least and (search.at_least < 0 or search.criterion == "train_loss"):
        rule = "must be 0 or more, and 0 with the training loss"
        raise ConfigError(f'search.at_least {rule}, but is {search.at_least}. Use criterion = "validation_90".')
    for values in search.points:
        search.config(values)  # refuses values that break a rule of their own
    return search


def read_space(table: Mapping[str, Any], *, ranges: bool) -> dict[str, Axis]:
    """[search.space] as dotted key → values or range; keys may be quoted or nested tables."""
    space: dict[str, Axis] = {}
    for key, axis in dotted_items(table, lambda value: not isinstance(value, Mapping) or is_range(value)):
        root = key.partition(".")[0]
        if root not in ("algorithm", "model", "train", "attack") or root == key or key in ("train.seed", "train.name"):
            rule = (
                "must be a key of [algorithm], [model] or [train], and no seed or name: trials on other data cannot be compared"
            )
            raise ConfigError(f"search.space.{key} {rule}. E.g. algorithm.solver.lr; for seeds, seeds = N in [search].")
        space[key] = check_axis(axis, f"search.space.{key}", ranges=ranges)
    if not space:
        raise ConfigError('search.space is empty: it must name values to try, e.g. "algorithm.solver.lr" = [0.01, 0.1, 1.0].')
    return space


def check_first_trial(search: Search) -> None:
    """Refuse a search that cannot run, by building the first trial, and a criterion without its clients."""
    from equipoise.experiment.build import build

    experiment = build(search.config(search.points[0]))
    if search.criterion != "train_loss" and experiment.data.validation is None:
        config = experiment.config.data
        key = next((name for name in config.parameters if name.startswith("validation")), None)
        fix = f"Set data.{key} above 0, or use" if key else "Use"
        raise ConfigError(
            f'search.criterion = "{search.criterion}" needs validation clients, and the data {config.name!r} have none. '
            f'{fix} criterion = "train_loss".'
        )
    refuse_search([search.config(each).algorithm() for each in search.points], experiment.data, search.criterion.split("_")[0])


# -------------------------------------------------------------------------------------------------------------- the runs


@dataclass(frozen=True)
class Trials:
    """Runs the trials of a search in a folder, with a number of worker processes."""

    search: Search
    out: Path
    workers: int
    console: Screen
    ray: str | None = None

    def run(self, points: Sequence[Values]) -> list[TrialResult]:
        """Make the missing runs of trials; a trial that fails does not stop the others."""
        runs: dict[Path, PlannedRun] = {}  # by folder, because Optuna may ask for the same values again
        for values in points:
            with suppress(ConfigError):  # values that do not go together: their result says so
                runs |= {run.folder.path: run for run in self.search.plan(values, self.out)}
        prepare(list(runs.values()), note=NOTE)
        options = ("--without-test",)
        jobs = scheduler.run_all(list(runs.values()), workers=self.workers, console=self.console, options=options, ray=self.ray)
        messages = {job.folder.path: job.message for job in jobs if job.status == "failed"}
        return [self._result(values, messages) for values in points]

    def _result(self, values: Values, messages: Mapping[Path, str]) -> TrialResult:
        """The result of a trial, from the folders of its runs; `messages` of runs that have just failed, by folder."""
        try:
            plan = self.search.plan(values, self.out)
        except ConfigError as failure:
            return TrialResult(values, None, str(failure))
        for run in plan:
            if not run.folder.finished:
                return TrialResult(values, None, f"seed {run.seed}: {messages[run.folder.path]} See {run.folder.log}.")
        return TrialResult.of(values, [self._judge(run.folder) for run in plan], self.search.criterion)

    def _judge(self, folder: RunFolder) -> float:
        """The criterion of a finished run, from its table of clients. A table with test clients is refused."""
        from equipoise.client_table import ClientTable

        clients = ClientTable.from_parquet(folder.clients)
        if "test" in clients.split:
            raise ConfigError(
                f"The run in {folder.path} was judged on test clients, which a search must not know. "
                "Delete the folder, and run the search again."
            )
        return criterion_of(clients, self.search.criterion, self.search.at_least)


def run_search(search: Search, out: Path, *, workers: int, console: Screen, ray: str | None = None) -> list[TrialResult]:
    """Make the missing runs of a search, print its table, and write best.toml; returns the results of trials, best first.

    How many trials Optuna is asked for at once is written down: what it tries depends on that.
    """
    if search.trials is not None:
        imported_optuna()
    check_first_trial(search)
    record = out / "search.toml"
    before = section(read_toml(record), "search").get("at_once") if record.exists() else None
    at_once = search.at_once or before or math.ceil(workers / search.seeds)
    write_atomically(record, toml.dumps({"search": {**search.given, "at_once": at_once}}).encode())
    trials, seed = Trials(search, out, workers, console, ray), search.config(search.points[0]).train.seed
    results = run_trials(trials.run, search.space, search.trials, seed=seed, at_once=at_once)
    best, said = results[0], words_below(out, group_data(out))
    console.say("", *trial_lines(results, search.criterion, at_least=search.at_least, seeds=search.seeds))
    console.say(*filter(None, [said and f"{said} {CHOSEN}"]))
    if best.criterion is not None:
        said = f"{trial_name(best.values)}: {CRITERIA[search.criterion]} {spread_text(best.criterion, search.seeds)}"
        notes = [f"The best of a search by equipoise tune: {said}", noise_words(results)]
        text = "".join(f"# {printable(note)}\n" for note in notes if note) + search.config(best.values).text()
        file = write_atomically(out / "best.toml", text.encode())
        console.say(f"Judge the best on test clients: equipoise run {shlex.quote(str(file))}")
    return results
