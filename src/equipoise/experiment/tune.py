"""A search: one run's configuration tried with other values, judged by training or validation clients.

    [search]
    criterion = "validation_90"                # or "train_loss"
    strategy = "grid"                          # or "optuna", with trials = N
    seeds = 1                                  # from [train] seed on; the criterion is averaged over them
    [search.space]
    "algorithm.solver.lr" = [0.01, 0.1, 1.0]   # values, or with optuna a range: {low = 0.01, high = 1.0, log = true}

[data], [model], [algorithm] and [train] are those of a single run. A trial is one choice of values; its runs lie in folders
named by these, so that the same values are never run twice, and a search that was killed, or is given more values, goes on.

Test clients cannot be used: every run of a search is done by `worker --without-test`, which drops them before training; the
first line of a run's config.toml says so, and a folder in which rows of test clients are found is refused.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from equipoise.errors import ConfigError
from equipoise.experiment import scheduler, toml
from equipoise.experiment.config import SECTIONS, RunConfig, override, read_toml, refuse_unknown, section
from equipoise.experiment.folder import RunFolder
from equipoise.experiment.study import PlannedRun, merged, prepare
from equipoise.experiment.values import check_value, toml_text, value_text
from equipoise.files import write_atomically

if TYPE_CHECKING:
    from equipoise.compare import Spread

Criterion = Literal["train_loss", "validation_90"]
Strategy = Literal["grid", "optuna"]
CRITERIA = {"train_loss": "training loss", "validation_90": "90th percentile of the validation error"}
NOTE = "# A trial of equipoise tune: trained and judged without the test clients.\n"


@dataclass(frozen=True)
class Range:
    """All numbers between two ends, whole numbers if both ends are; `log` spreads them by orders of magnitude."""

    low: float
    high: float
    log: bool = False


Axis = list[Any] | Range
Values = dict[str, Any]  # dotted key → value


@dataclass(frozen=True)
class Search:
    """A checked [search] with the tables of the run that it changes."""

    base: dict[str, Any]
    space: dict[str, Axis]
    criterion: Criterion
    strategy: Strategy
    trials: int | None
    seeds: int
    written: dict[str, Any]  # the whole file as it was given

    @property
    def first(self) -> Values:
        """A point of the space."""
        return {key: axis.low if isinstance(axis, Range) else axis[0] for key, axis in self.space.items()}

    def config(self, values: Values) -> RunConfig:
        """The configuration of a single run with these values, checked."""
        changes: dict[str, Any] = {}
        # A part before its parameters, and its name first, because another name starts the part afresh.
        for key in sorted(values, key=lambda key: (key.count("."), not key.endswith(".name"))):
            changes = merged(changes, nested(key, values[key]))
        return RunConfig.of(merged(self.base, changes))

    def plan(self, values: Values, out: Path) -> list[PlannedRun]:
        """The runs of a trial, one per seed."""
        config = self.config(values)
        name = trial_name(values)
        runs = []
        for seed in range(config.train.seed, config.train.seed + self.seeds):
            seeded = self.config({**values, "train.seed": seed, "train.name": name})
            seeded = replace(seeded, train=replace(seeded.train, threads=seeded.train.threads or 1))
            runs.append(PlannedRun(RunFolder(out / f"{folder_name(values)}-{seed}"), name, seed, seeded))
        return runs


@dataclass(frozen=True)
class Outcome:
    """How a trial ended: its criterion over seeds, or None if one of its runs failed, and why."""

    values: Values
    criterion: Spread | None
    message: str = ""

    @property
    def value(self) -> float:
        """What a search minimises; a failed trial is worse than all others."""
        return self.criterion.mean if self.criterion is not None else math.inf


def nested(key: str, value: Any) -> dict[str, Any]:
    """A dotted key as tables.

    >>> nested("algorithm.solver.lr", 0.1)
    {'algorithm': {'solver': {'lr': 0.1}}}
    """
    for step in reversed(key.split(".")):
        value = {step: value}
    found: dict[str, Any] = value
    return found


def trial_name(values: Values) -> str:
    """A trial by its values, exactly.

    >>> trial_name({"algorithm.solver.lr": 0.1, "algorithm.risk": "mean"})
    'lr 0.1, risk mean'
    """
    texts = {key: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False, default=str) for key, v in values.items()}
    return ", ".join(f"{key.rpartition('.')[2]} {text}" for key, text in texts.items())


def folder_name(values: Values) -> str:
    """A trial as part of a path; what a path cannot show is told apart by a checksum.

    >>> folder_name({"algorithm.solver.lr": 0.1}), folder_name({"algorithm.risk": {"name": "mean"}})
    ('lr-0.1', 'risk-name-mean-9c4f5bcf')
    """
    name = trial_name(values)
    short = re.sub(r"[^\w.+-]+", "-", name)[:80].strip("-.")
    exact = short == name.replace(", ", "-").replace(" ", "-") and not any(" " in v for v in values.values() if type(v) is str)
    return short if exact else f"{short}-{zlib.crc32(name.encode()):08x}"


# ------------------------------------------------------------------------------------------------------------ the file


def read_search(path: Path, overrides: Iterable[str] = ()) -> Search:
    """The search that a file asks for, every value of its space checked; nothing is written."""
    table = override(read_toml(path), overrides)
    refuse_unknown(table, (*SECTIONS, "versions", "search"), "")
    if "search" not in table:
        raise ConfigError(f"{path} has no [search] section: it says what to try. See examples/tune.toml.")
    wanted = section(table, "search")
    refuse_unknown(wanted, ("criterion", "strategy", "trials", "seeds", "space"), "search")
    strategy = check_value(wanted.get("strategy", "grid"), Strategy, "search.strategy")
    if (strategy == "optuna") != ("trials" in wanted):
        rule = (
            "is missing: it is how many values Optuna tries" if strategy == "optuna" else "is for Optuna; a grid is tried whole"
        )
        raise ConfigError(f"search.trials {rule}. {'Give it.' if strategy == 'optuna' else 'Leave it out.'}")
    search = Search(
        {name: table[name] for name in SECTIONS if name in table},
        read_space(section(wanted, "space", required=False), strategy),
        check_value(wanted.get("criterion", "train_loss"), Criterion, "search.criterion"),
        strategy,
        _at_least_one(wanted["trials"], "search.trials") if "trials" in wanted else None,
        _at_least_one(wanted.get("seeds", 1), "search.seeds"),
        table,
    )
    for values in grid(search) if strategy == "grid" else corners(search):
        search.config(values)
    return search


def _at_least_one(value: Any, key: str) -> int:
    number: int = check_value(value, int, key)
    if number < 1:
        raise ConfigError(f"{key} must be at least 1, but is {number}.")
    return number


def read_space(table: Mapping[str, Any], strategy: Strategy) -> dict[str, Axis]:
    """[search.space] as dotted key → values or range; keys may be quoted or nested tables."""
    space: dict[str, Axis] = {}

    def collect(inner: Mapping[str, Any], path: tuple[str, ...]) -> None:
        for key, axis in inner.items():
            dotted = ".".join((*path, key))
            if isinstance(axis, Mapping) and not axis.keys() & {"low", "high", "log"}:
                collect(axis, (*path, key))
            else:
                refuse_key(dotted)
                space[dotted] = check_axis(axis, f"search.space.{dotted}", strategy)

    collect(table, ())
    if not space:
        raise ConfigError('search.space is empty: it must name values to try, e.g. "algorithm.solver.lr" = [0.01, 0.1, 1.0].')
    return space


def refuse_key(key: str) -> None:
    """Refuse what must be the same for all trials: other clients or seeds would make their criteria incomparable."""
    root = key.partition(".")[0]
    if root == "data":
        raise ConfigError(
            f"search.space.{key}: trials on other data cannot be compared. Search over algorithm, model or train."
        )
    if root not in SECTIONS or root == key:
        raise ConfigError(f"search.space.{key} must be a key of [algorithm], [model] or [train], e.g. algorithm.solver.lr.")
    if key == "train.seed":
        raise ConfigError("search.space.train.seed: a seed is no choice. Average over several: seeds = N in [search].")
    if key == "train.name":
        raise ConfigError("search.space.train.name is given by the search. Leave it out.")


def check_axis(given: Any, key: str, strategy: Strategy) -> Axis:
    """A list of different values, or for Optuna a range."""
    if not isinstance(given, Mapping):
        if not isinstance(given, list) or not given or len(set(map(repr, given))) < len(given):
            raise ConfigError(f"{key} must be a list of different values, but is {toml_text(given)}.")
        return given
    if strategy == "grid":
        raise ConfigError(f'{key} is a range, which a grid cannot try. List its values, or use strategy = "optuna".')
    refuse_unknown(given, ("low", "high", "log"), key)
    for end in ("low", "high"):
        if end not in given:
            raise ConfigError(f"{key}.{end} is missing: a range has two ends, {{low = 0.01, high = 1.0}}.")
        if not math.isfinite(check_value(given[end], float, f"{key}.{end}")):
            raise ConfigError(f"{key}.{end} must be finite, but is {toml_text(given[end])}.")
    found = Range(given["low"], given["high"], check_value(given.get("log", False), bool, f"{key}.log"))
    if found.low >= found.high:
        raise ConfigError(f"{key}.low must be below high = {toml_text(found.high)}, but is {toml_text(found.low)}.")
    if found.log and found.low <= 0:
        raise ConfigError(f"{key}.low must be positive where log = true, but is {toml_text(found.low)}.")
    return found


def grid(search: Search) -> list[Values]:
    """Every combination of the values."""
    axes = [axis for axis in search.space.values() if not isinstance(axis, Range)]
    return [dict(zip(search.space, values, strict=True)) for values in itertools.product(*axes)]


def corners(search: Search) -> Iterator[Values]:
    """Every value, and both ends of every range, with the first of all others."""
    for key, axis in search.space.items():
        for value in (axis.low, axis.high) if isinstance(axis, Range) else axis:
            yield {**search.first, key: value}


def refuse_unjudgeable(search: Search) -> None:
    """Build the first trial, so that what cannot run is refused at once, as is a criterion of clients that are not there."""
    from equipoise.experiment.build import build

    experiment = build(search.config(search.first))
    if search.criterion == "validation_90" and experiment.data.validation is None:
        config = experiment.config.data
        key = next((name for name in config.parameters if name.startswith("validation")), None)
        fix = f"Set data.{key} above 0, or use" if key else "Use"
        raise ConfigError(
            f'search.criterion = "validation_90" needs validation clients, and the data {config.name!r} have none. '
            f'{fix} criterion = "train_loss".'
        )


# ------------------------------------------------------------------------------------------------------------- trials


def judge(folder: RunFolder, criterion: Criterion) -> float:
    """The criterion of a finished run: from its table of clients, which must not know test clients."""
    from equipoise.result import ClientTable

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
    """Where and how trials are run."""

    search: Search
    out: Path
    workers: int
    console: Console

    def run(self, points: Sequence[Values]) -> list[Outcome]:
        """Run what is missing of these trials; one that fails does not stop the others."""
        runs: dict[Path, PlannedRun] = {}  # by folder, because Optuna may ask for the same values again
        for values in points:
            with suppress(ConfigError):  # of values that are each fine, but not together: their outcome says so
                runs |= {run.folder.path: run for run in self.search.plan(values, self.out)}
        prepare([run for run in runs.values() if run.folder.config.exists()])
        for run in runs.values():
            if not run.folder.config.exists():
                write_atomically(run.folder.config, (NOTE + run.config.text()).encode())
        options = ("--without-test",)
        jobs = scheduler.run_all(list(runs.values()), workers=self.workers, console=self.console, options=options)
        messages = {job.folder.path: job.message for job in jobs if job.status == "failed"}
        return [self.outcome(values, messages) for values in points]

    def outcome(self, values: Values, messages: Mapping[Path, str]) -> Outcome:
        """How a trial ended, by its folders; `messages` are of runs that have just failed."""
        from equipoise.compare import Spread

        try:
            plan = self.search.plan(values, self.out)
        except ConfigError as failure:
            return Outcome(values, None, str(failure))
        for run in plan:
            if not run.folder.finished:
                message = messages.get(run.folder.path, "failed before.")
                return Outcome(values, None, f"seed {run.seed}: {message} See {run.folder.path / 'run.log'}.")
        found = Spread.of(judge(run.folder, self.search.criterion) for run in plan)
        if not math.isfinite(found.mean):
            return Outcome(values, None, f"the {CRITERIA[self.search.criterion]} is not finite.")
        return Outcome(values, found)


def run_search(search: Search, out: Path, *, workers: int, console: Console) -> list[Outcome]:
    """Run what is missing of a search; every trial, best first."""
    optuna = imported_optuna() if search.strategy == "optuna" else None
    refuse_unjudgeable(search)
    write_atomically(out / "search.toml", toml.dumps(search.written).encode())
    trials = Trials(search, out, workers, console)
    outcomes = trials.run(grid(search)) if optuna is None else search_by_optuna(optuna, trials)
    return sorted(outcomes, key=lambda outcome: outcome.value)


# ------------------------------------------------------------------------------------------------------------- Optuna


def imported_optuna() -> Any:
    """Optuna, silent, or how to get it."""
    try:
        import optuna
    except ImportError as failure:
        raise ConfigError(
            'search.strategy = "optuna" needs Optuna, which is not installed: pip install "equipoise[tune]". '
            'Or list values and use strategy = "grid".'
        ) from failure
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def search_by_optuna(optuna: Any, trials: Trials) -> list[Outcome]:
    """Ask for values, run them, tell the criterion, until `trials` are done; the study is kept in study.db.

    Values are asked for in batches that fill the workers. The sampler of each trial is seeded by its position and knows the
    batches before, and a batch that was cut off is run to its end first: a search that was killed ends as if it had not been.
    """
    search, total = trials.search, trials.search.trials or 0
    study = open_study(optuna, search, trials.out / "study.db")
    running, complete = optuna.trial.TrialState.RUNNING, optuna.trial.TrialState.COMPLETE
    size = math.ceil(trials.workers / search.seeds)
    space = {key: distribution(optuna, axis) for key, axis in search.space.items()}
    seed = search.config(search.first).train.seed
    outcomes: dict[str, Outcome] = {}
    while True:
        for trial in study.get_trials(deepcopy=False, states=(running,)):
            if trial.params.keys() != space.keys():  # killed while it was asked for
                study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        told = study.get_trials(deepcopy=False, states=(complete,))
        open_ones = study.get_trials(deepcopy=False, states=(running,))
        for position in range(len(told) + len(open_ones), min(total, (len(told) // size + 1) * size)):
            study.sampler = sampler(optuna, seed, position)
            open_ones.append(study.ask(space))
        if not open_ones:
            break
        points = [values_of(search, trial.params) for trial in open_ones]
        for trial, outcome in zip(open_ones, trials.run(points), strict=True):
            study.tell(trial.number, outcome.value)
            outcomes[trial_name(outcome.values)] = outcome
    tried = {trial_name(values): values for values in (values_of(search, trial.params) for trial in told)}
    return [outcomes.get(name) or trials.outcome(values, {}) for name, values in tried.items()]


def sampler(optuna: Any, seed: int, position: int) -> Any:
    """The sampler of the trial at a position: the same whichever process asks for it."""
    from equipoise.rng import stream_key

    return optuna.samplers.TPESampler(seed=stream_key(seed, "search", position) >> 32)


def distribution(optuna: Any, axis: Axis) -> Any:
    """An axis as Optuna knows it; values are categories, as JSON because Optuna keeps no tables."""
    if not isinstance(axis, Range):
        return optuna.distributions.CategoricalDistribution([json.dumps(value) for value in axis])
    whole = isinstance(axis.low, int) and isinstance(axis.high, int)
    kind = optuna.distributions.IntDistribution if whole else optuna.distributions.FloatDistribution
    return kind(axis.low, axis.high, log=axis.log)


def values_of(search: Search, parameters: Mapping[str, Any]) -> Values:
    """Optuna's parameters as values, in the order of the space."""
    return {
        key: parameters[key] if isinstance(axis, Range) else json.loads(parameters[key]) for key, axis in search.space.items()
    }


def open_study(optuna: Any, search: Search, path: Path) -> Any:
    """The study in a file, made if it is not there; a study of another search is refused."""
    from sqlalchemy.exc import SQLAlchemyError

    identity = {"criterion": search.criterion, "seeds": search.seeds, "space": search.written["search"]["space"], **search.base}
    try:
        study = optuna.create_study(study_name="search", storage=f"sqlite:///{path.resolve()}", load_if_exists=True)
        found = study.user_attrs.get("search")
        if found is None:
            study.set_user_attr("search", json.dumps(identity, default=str))
    except (SQLAlchemyError, optuna.exceptions.OptunaError) as failure:
        reason = str(failure).splitlines()[0]
        raise ConfigError(f"{path} cannot be used: {reason}. Delete it, or name another folder: --out DIR.") from failure
    there, here = json.loads(found or json.dumps(identity, default=str)), json.loads(json.dumps(identity, default=str))
    for key in here:
        if there.get(key) != here[key]:
            raise ConfigError(f"{path} holds a search with another {key}. Name another folder: --out DIR.")
    return study


# ----------------------------------------------------------------------------------------------------------- the result


def search_table(search: Search, outcomes: Sequence[Outcome]) -> Table:
    """Every trial with its values, the criterion over seeds, and how it ended, best first."""
    over = f", mean ± standard deviation over {search.seeds} seeds" if search.seeds > 1 else ""
    table = Table(title=f"{CRITERIA[search.criterion]}{over}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    last = [key.rpartition(".")[2] for key in search.space]
    for key in search.space:
        name = key.rpartition(".")[2]
        table.add_column(name if last.count(name) == 1 else key)
    table.add_column(search.criterion, justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    for outcome in outcomes:
        cells = [Text(value if isinstance(value, str) else shown(value)) for value in outcome.values.values()]
        status = Text("failed", style="red") if outcome.criterion is None else Text("done", style="green")
        table.add_row(*cells, spread_text(outcome.criterion, search.seeds), status)
    return table


def shown(value: Any) -> str:
    """A value in a table: numbers in six digits, tables and lists as JSON."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping | list) else value_text(value)


def spread_text(spread: Spread | None, seeds: int) -> str:
    """The criterion over seeds, in five digits."""
    if spread is None:
        return "–"
    return f"{spread.mean:.5g}" + (f" ± {spread.deviation:.2g}" if seeds > 1 else "")


def write_best(search: Search, best: Outcome, out: Path) -> Path:
    """The best trial as a complete configuration of a run: with the test clients, the name and the seed of the file."""
    said = f"{CRITERIA[search.criterion]} {spread_text(best.criterion, search.seeds)}"
    note = f"# The best of a search by equipoise tune: {trial_name(best.values)} ({said}).\n"
    return write_atomically(out / "best.toml", (note + search.config(best.values).text()).encode())


def tune(search: Search, out: Path, *, workers: int, console: Console) -> list[Outcome]:
    """Run a search, print its table, write best.toml and say how to run it; returns the trials, best first."""
    outcomes = run_search(search, out, workers=workers, console=console)
    console.print(search_table(search, outcomes))
    if outcomes[0].criterion is not None:
        best = write_best(search, outcomes[0], out)
        console.print(Text(f"Judge the best on test clients: equipoise run {shlex.quote(str(best))}"), soft_wrap=True)
    return outcomes
