"""Runs a search: trials by grid or Optuna, one worker process per run; then the table, and the best configuration.

A search that was killed goes on: a grid skips finished folders, and Optuna keeps its study in study.db.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from equipoise.core.files import write_atomically
from equipoise.core.screen import Screen
from equipoise.core.words import printable
from equipoise.errors import ConfigError
from equipoise.experiment import scheduler, toml
from equipoise.experiment.open_runs import group_data
from equipoise.experiment.optuna_trials import imported_optuna, search_by_optuna
from equipoise.experiment.run_files import RunFolder
from equipoise.experiment.search import (
    CRITERIA,
    Axis,
    Criterion,
    Search,
    Values,
    check_first_trial,
    complete_file,
    grid,
    trial_name,
)
from equipoise.experiment.study import PlannedRun, prepare
from equipoise.experiment.trial_results import TrialResult, cell_text, criterion_of, criterion_words, noise_words, spread_text
from equipoise.privacy.ledger_report import words_below
from equipoise.privacy.lookers import CHOSEN

NOTE = "# A trial of equipoise tune: trained and judged without the test clients.\n"


# ------------------------------------------------------------------------------------------------------------- trials


def judge(folder: RunFolder, criterion: Criterion, at_least: int = 0) -> float:
    """The criterion of a finished run, from its table of clients. A table with test clients is refused."""
    from equipoise.client_table import ClientTable

    clients = ClientTable.from_parquet(folder.clients)
    if "test" in clients.split:
        raise ConfigError(
            f"The run in {folder.path} was judged on test clients, which a search must not know: something else than the "
            "search ended it. Delete the folder, and run the search again."
        )
    return criterion_of(clients, criterion, at_least)


@dataclass(frozen=True)
class Trials:
    """Runs the trials of a search in a folder, with a number of worker processes."""

    search: Search
    out: Path
    workers: int
    console: Screen
    ray: str | None = None

    @property
    def space(self) -> dict[str, Axis]:
        """What to try, by key."""
        return self.search.space

    @property
    def total(self) -> int:
        """How many trials Optuna makes."""
        return self.search.trials or 0

    @property
    def at_once(self) -> int:
        """How many trials fill the workers."""
        return math.ceil(self.workers / self.search.seeds)

    @property
    def seed(self) -> int:
        """The first seed of the runs, which also decides what Optuna tries."""
        return self.search.config(self.search.first).train.seed

    @property
    def identity(self) -> dict[str, Any]:
        """What a study must share with the search to go on with it."""
        search = self.search
        given = {"at_least": search.at_least, "criterion": search.criterion, "seeds": search.seeds}
        return {**given, "space": search.file["search"]["space"], **search.base}

    def run(self, points: Sequence[Values]) -> list[TrialResult]:
        """Make the missing runs of trials; a trial that fails does not stop the others."""
        runs: dict[Path, PlannedRun] = {}  # by folder, because Optuna may ask for the same values again
        for values in points:
            with suppress(ConfigError):  # values that do not go together: their result says so
                runs |= {run.folder.path: run for run in self.search.plan(values, self.out)}
        prepare([run for run in runs.values() if run.folder.config.exists()])
        for run in runs.values():
            if not run.folder.config.exists():
                write_atomically(run.folder.config, (NOTE + run.config.text()).encode())
        options = ("--without-test",)
        jobs = scheduler.run_all(list(runs.values()), workers=self.workers, console=self.console, options=options, ray=self.ray)
        messages = {job.folder.path: job.message for job in jobs if job.status == "failed"}
        return [self.result(values, messages) for values in points]

    def result(self, values: Values, messages: Mapping[Path, str]) -> TrialResult:
        """The result of a trial, from the folders of its runs; `messages` of runs that have just failed, by folder."""
        try:
            plan = self.search.plan(values, self.out)
        except ConfigError as failure:
            return TrialResult(values, None, str(failure))
        for run in plan:
            if not run.folder.finished:
                message = messages.get(run.folder.path, "failed before.")
                return TrialResult(values, None, f"seed {run.seed}: {message} See {run.folder.log}.")
        search = self.search
        by_seed = [judge(run.folder, search.criterion, search.at_least) for run in plan]
        return TrialResult.of(values, by_seed, search.criterion)


def run_search(search: Search, out: Path, *, workers: int, console: Screen, ray: str | None = None) -> list[TrialResult]:
    """Make the missing runs of a search; returns the results of all trials, best first."""
    optuna = None
    if search.strategy == "optuna":
        optuna = imported_optuna('search.strategy = "optuna"', 'Or list values and use strategy = "grid".')
    check_first_trial(search)
    write_atomically(out / "search.toml", toml.dumps(complete_file(search)).encode())
    trials = Trials(search, out, workers, console, ray)
    results = trials.run(grid(search)) if optuna is None else search_by_optuna(optuna, trials, out / "study.db")
    return sorted(results, key=lambda result: result.value)


# ----------------------------------------------------------------------------------------------------------- the result


def search_table(search: Search, results: Sequence[TrialResult]) -> Table:
    """A table of all trials: values, criterion over seeds and status."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    last = [key.rpartition(".")[2] for key in search.space]
    for key in search.space:
        name = key.rpartition(".")[2]
        table.add_column(name if last.count(name) == 1 else key)
    table.add_column(search.criterion, justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    for result in results:
        cells = [printable(value if isinstance(value, str) else cell_text(value)) for value in result.values.values()]
        status = Text("failed", style="red") if result.criterion is None else Text("done", style="green")
        table.add_row(*cells, spread_text(result.criterion, search.seeds), status)
    return table


def write_best(search: Search, best: TrialResult, out: Path, noise: str = "") -> Path:
    """Write best.toml: the configuration of the best trial, with the test clients, name and seed of the search file."""
    criterion = f"{CRITERIA[search.criterion]} {spread_text(best.criterion, search.seeds)}"
    note = f"# The best of a search by equipoise tune: {printable(trial_name(best.values))} ({criterion}).\n"
    note += f"# {noise}\n" if noise else ""
    return write_atomically(out / "best.toml", (note + search.config(best.values).text()).encode())


def tune(search: Search, out: Path, *, workers: int, console: Screen, ray: str | None = None) -> list[TrialResult]:
    """Run a search, print its table, write best.toml and print how to run it; returns the results of trials, best first."""
    results = run_search(search, out, workers=workers, console=console, ray=ray)
    console.say("", criterion_words(search.criterion, search.at_least, search.seeds))
    console.print(search_table(search, results))
    said = words_below(out, group_data(out))
    below = [said and f"{said} {CHOSEN}"]
    if results[0].criterion is not None:
        below += [noise := noise_words(results, search.criterion, where="in [search]"), _small_clients(search, results[0], out)]
        best = write_best(search, results[0], out, noise)
        below.append(f"Judge the best on test clients: equipoise run {shlex.quote(str(best))}")
    console.say(*filter(None, below))
    return results


def _small_clients(search: Search, best: TrialResult, out: Path) -> str:
    """Sentences on few validation clients, or few examples of theirs; empty if there are enough, or if they are not judged."""
    from equipoise.experiment.folder import read_record
    from equipoise.report.notices import said, size_notices

    if search.criterion == "train_loss":
        return ""
    runs = [read_record(run.folder.path).judged_by("validation", search.at_least) for run in search.plan(best.values, out)]
    return said(size_notices(runs))
