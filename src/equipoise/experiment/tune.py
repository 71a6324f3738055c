"""Runs a search: trials by grid or Optuna, one worker process per run; then the table, and the best configuration.

A search that was killed goes on: a grid skips finished folders, and Optuna keeps its study in study.db.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from equipoise.core.files import write_atomically
from equipoise.errors import ConfigError, NotWritten
from equipoise.experiment import scheduler, toml
from equipoise.experiment.run_files import RunFolder
from equipoise.experiment.search import (
    CRITERIA,
    Axis,
    Criterion,
    Range,
    Search,
    Values,
    check_first_trial,
    complete_file,
    grid,
    trial_name,
)
from equipoise.experiment.study import PlannedRun, prepare
from equipoise.experiment.values import value_text
from equipoise.privacy.ledger_report import words_below

if TYPE_CHECKING:
    from equipoise.report.data.over_seeds import Spread

NOTE = "# A trial of equipoise tune: trained and judged without the test clients.\n"


@dataclass(frozen=True)
class TrialResult:
    """The criterion of a trial over seeds; None, with a message, if one of its runs failed."""

    values: Values
    criterion: Spread | None
    message: str = ""
    by_seed: tuple[float, ...] = ()  # the criterion of each seed, in the order of the seeds

    @property
    def value(self) -> float:
        """The number that a search minimises; infinite for a failed trial."""
        return self.criterion.mean if self.criterion is not None else math.inf


# ------------------------------------------------------------------------------------------------------------- trials


def judge(folder: RunFolder, criterion: Criterion) -> float:
    """The criterion of a finished run, from its table of clients. A table with test clients is refused."""
    from equipoise.client_table import ClientTable

    clients = ClientTable.from_parquet(folder.clients)
    if "test" in clients.split:
        raise ConfigError(
            f"The run in {folder.path} was judged on test clients, which a search must not know: something else than the "
            "search ended it. Delete the folder, and run the search again."
        )
    if criterion == "train_loss":
        return clients.summaries()["train"]["loss"].mean  # weighted by examples
    return clients.summaries()["validation"]["error"].percentiles[90]


@dataclass(frozen=True)
class Trials:
    """Runs the trials of a search in a folder, with a number of worker processes."""

    search: Search
    out: Path
    workers: int
    console: Console
    ray: str | None = None

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
        from equipoise.report.data.over_seeds import Spread

        try:
            plan = self.search.plan(values, self.out)
        except ConfigError as failure:
            return TrialResult(values, None, str(failure))
        for run in plan:
            if not run.folder.finished:
                message = messages.get(run.folder.path, "failed before.")
                return TrialResult(values, None, f"seed {run.seed}: {message} See {run.folder.log}.")
        by_seed = tuple(judge(run.folder, self.search.criterion) for run in plan)
        criterion = Spread.of(by_seed)
        if not math.isfinite(criterion.mean):
            return TrialResult(values, None, f"the {CRITERIA[self.search.criterion]} is not finite.")
        return TrialResult(values, criterion, by_seed=by_seed)


def run_search(search: Search, out: Path, *, workers: int, console: Console, ray: str | None = None) -> list[TrialResult]:
    """Make the missing runs of a search; returns the results of all trials, best first."""
    optuna = imported_optuna() if search.strategy == "optuna" else None
    check_first_trial(search)
    write_atomically(out / "search.toml", toml.dumps(complete_file(search)).encode())
    trials = Trials(search, out, workers, console, ray)
    results = trials.run(grid(search)) if optuna is None else search_by_optuna(optuna, trials)
    return sorted(results, key=lambda result: result.value)


# ------------------------------------------------------------------------------------------------------------- Optuna


def imported_optuna() -> Any:
    """The module optuna, without its messages; its absence is refused with how to install it."""
    try:
        import optuna
    except ImportError as failure:
        raise ConfigError(
            'search.strategy = "optuna" needs Optuna, which is not installed: pip install "equipoise[tune]". '
            'Or list values and use strategy = "grid".'
        ) from failure
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def search_by_optuna(optuna: Any, trials: Trials) -> list[TrialResult]:
    """Ask Optuna for values, run them and tell it the criterion, until all trials are done; the study is kept in study.db."""
    from sqlalchemy.exc import SQLAlchemyError

    file = trials.out / "study.db"
    study = open_study(optuna, trials.search, file)
    try:
        return ask_and_tell(optuna, trials, study)
    except (SQLAlchemyError, optuna.exceptions.OptunaError) as failure:
        said = str(failure.__cause__ or failure).splitlines()[0]
        raise NotWritten(f"{file} could not be written: {said}. Make room on the disk, or see to its permissions.") from failure


def ask_and_tell(optuna: Any, trials: Trials, study: Any) -> list[TrialResult]:
    """The trials of a search whose study is open.

    Values are asked for in batches that fill the workers. The sampler of each trial is seeded by its position and knows the
    batches before. A batch that was interrupted is run to its end first, so that a killed search ends as if it had not been.
    """
    search, total = trials.search, trials.search.trials or 0
    running, complete = optuna.trial.TrialState.RUNNING, optuna.trial.TrialState.COMPLETE
    size = math.ceil(trials.workers / search.seeds)
    space = {key: distribution(optuna, axis) for key, axis in search.space.items()}
    seed = search.config(search.first).train.seed
    results: dict[str, TrialResult] = {}
    while True:
        for trial in study.get_trials(deepcopy=False, states=(running,)):
            if trial.params.keys() != space.keys():  # killed while it was asked for
                study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        ended = study.get_trials(deepcopy=False, states=(complete,))
        pending = study.get_trials(deepcopy=False, states=(running,))
        for position in range(len(ended) + len(pending), min(total, (len(ended) // size + 1) * size)):
            study.sampler = sampler(optuna, seed, position)
            pending.append(study.ask(space))
        if not pending:
            break
        points = [values_of(search, trial.params) for trial in pending]
        for trial, result in zip(pending, trials.run(points), strict=True):
            study.tell(trial.number, result.value)
            results[trial_name(result.values)] = result
    tried = {trial_name(values_of(search, trial.params)): trial for trial in ended}
    earlier = [trial for name, trial in tried.items() if name not in results and math.isfinite(trial.value)]
    # Of trials that an earlier process ended, only runs whose folders were deleted since are made again.
    for result in trials.run([values_of(search, trial.params) for trial in earlier]) if earlier else []:
        results[trial_name(result.values)] = result
    return [results.get(name) or trials.result(values_of(search, trial.params), {}) for name, trial in tried.items()]


def sampler(optuna: Any, seed: int, position: int) -> Any:
    """The Optuna sampler of the trial at a position, seeded so that every process makes the same one."""
    from equipoise.core.rng import stream_key

    return optuna.samplers.TPESampler(seed=stream_key(seed, "search", position) >> 32)


def distribution(optuna: Any, axis: Axis) -> Any:
    """An axis as an Optuna distribution; listed values are categories, as JSON because Optuna stores no tables."""
    if not isinstance(axis, Range):
        return optuna.distributions.CategoricalDistribution([json.dumps(value) for value in axis])
    integers = isinstance(axis.low, int) and isinstance(axis.high, int)
    kind = optuna.distributions.IntDistribution if integers else optuna.distributions.FloatDistribution
    return kind(axis.low, axis.high, log=axis.log)


def values_of(search: Search, parameters: Mapping[str, Any]) -> Values:
    """The parameters of an Optuna trial as values of the search, in the order of the space."""
    given = {key: parameters[key] for key in search.space}
    return {key: value if isinstance(search.space[key], Range) else json.loads(value) for key, value in given.items()}


def open_study(optuna: Any, search: Search, path: Path) -> Any:
    """The Optuna study in a file, made if it is absent; a study of another search is refused."""
    from sqlalchemy.exc import SQLAlchemyError

    identity = {"criterion": search.criterion, "seeds": search.seeds, "space": search.file["search"]["space"], **search.base}
    here = json.dumps(identity, default=str)
    try:
        study = optuna.create_study(study_name="search", storage=f"sqlite:///{path.resolve()}", load_if_exists=True)
        if "search" not in study.user_attrs:
            study.set_user_attr("search", here)
        there = json.loads(study.user_attrs["search"])
    except (SQLAlchemyError, optuna.exceptions.OptunaError) as failure:
        reason = str(failure).splitlines()[0]
        raise ConfigError(f"{path} cannot be used: {reason}. Delete it, or name another folder: --out DIR.") from failure
    for key, value in json.loads(here).items():
        if there.get(key) != value:
            raise ConfigError(f"{path} holds a search with another {key}. Name another folder: --out DIR.")
    return study


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
        cells = [Text(value if isinstance(value, str) else cell_text(value)) for value in result.values.values()]
        status = Text("failed", style="red") if result.criterion is None else Text("done", style="green")
        table.add_row(*cells, spread_text(result.criterion, search.seeds), status)
    return table


def cell_text(value: Any) -> str:
    """A value as a cell of a table: numbers with six digits, tables and lists as JSON."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping | list) else value_text(value)


def spread_text(spread: Spread | None, seeds: int) -> str:
    """The criterion with five digits, ± standard deviation over seeds; a dash for None."""
    if spread is None:
        return "–"
    return f"{spread.mean:.5g}" + (f" ± {spread.deviation:.2g}" if seeds > 1 else "")


def noise_words(results: Sequence[TrialResult]) -> str:
    """Which trials the seeds do not tell from the best one, by their paired differences; empty if there are none."""
    from equipoise.report.data.paired import LEAST_SEEDS, paired
    from equipoise.report.text.phrases import listed

    best, *others = [result for result in results if result.criterion is not None]
    if not others:
        return ""
    name, seeds = trial_name(best.values), len(best.by_seed)
    if seeds < LEAST_SEEDS:
        many = "one seed does" if seeds == 1 else f"{seeds} seeds do"
        return f"The best, {name}, may be so by chance: {many} not tell. Set seeds = {LEAST_SEEDS} or more in [search]."
    first = dict(enumerate(best.by_seed))
    apart = {trial_name(result.values): paired(name, first, dict(enumerate(result.by_seed))) for result in others}
    alike = [other for other, found in apart.items() if found.verdict != "lower"]
    if not alike:
        return ""
    found = apart[alike[0]].words(alike[0], "{:.2g}".format)
    same = apart[alike[0]].constant
    why = "and there is no spread between seeds" if same else "and the 95 % interval of the paired differences contains 0"
    return (
        f"The best is within the noise of the next: {found}, {why}. The "
        f"seeds do not tell {len(alike)} of {len(others)} other trials from the best: {listed(alike, 5)}. Take one of them for "
        "other reasons, or add seeds in [search]."
    )


def write_best(search: Search, best: TrialResult, out: Path, noise: str = "") -> Path:
    """Write best.toml: the configuration of the best trial, with the test clients, name and seed of the search file."""
    criterion = f"{CRITERIA[search.criterion]} {spread_text(best.criterion, search.seeds)}"
    note = f"# The best of a search by equipoise tune: {trial_name(best.values)} ({criterion}).\n"
    note += f"# {noise}\n" if noise else ""
    return write_atomically(out / "best.toml", (note + search.config(best.values).text()).encode())


def tune(search: Search, out: Path, *, workers: int, console: Console, ray: str | None = None) -> list[TrialResult]:
    """Run a search, print its table, write best.toml and print how to run it; returns the results of trials, best first."""
    results = run_search(search, out, workers=workers, console=console, ray=ray)
    over = f", mean ± standard deviation over {search.seeds} seeds" if search.seeds > 1 else ""
    console.print(Text(f"\n{search.criterion}: {CRITERIA[search.criterion]}{over}"), soft_wrap=True)
    console.print(search_table(search, results))
    if said := words_below(out):
        console.print(Text(said), soft_wrap=True)
    if results[0].criterion is not None:
        if noise := noise_words(results):
            console.print(Text(noise), soft_wrap=True)
        best = write_best(search, results[0], out, noise)
        console.print(Text(f"Judge the best on test clients: equipoise run {shlex.quote(str(best))}"), soft_wrap=True)
    return results
