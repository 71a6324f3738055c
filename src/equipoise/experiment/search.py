"""A search: the configuration of a run tried with other values, judged by training or validation clients.

    [search]
    criterion = "validation_90"                # "validation_mean", …, or "train_loss", without personal models
    strategy = "grid"                          # or "optuna", with trials = N
    seeds = 1                                  # from [train] seed on; the criterion is averaged over them
    at_least = 0                               # examples of the validation clients that count
    [search.space]
    "algorithm.solver.lr" = [0.01, 0.1, 1.0]   # values, or with optuna a range: {low = 0.01, high = 1.0, log = true}

[data], [model], [algorithm] and [train] are those of a single run. A trial is one choice of values; its runs lie in folders
named by these, so that the same values are never run twice, and a search that was killed, or is given more values, goes on.

Test clients cannot be used: `worker --without-test`, which makes every run of a search, drops them before training; the first
line of the config.toml of a run says so, and a folder with rows of test clients is refused.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from equipoise.errors import ConfigError
from equipoise.experiment.config import SECTIONS, RunConfig
from equipoise.experiment.config_tables import override, read_toml, refuse_unknown, section
from equipoise.experiment.origin import Origin
from equipoise.experiment.part_config import NOWHERE, PartConfig
from equipoise.experiment.run_files import RunFolder
from equipoise.experiment.study import PlannedRun, dotted_items, merged
from equipoise.experiment.values import check_value, toml_text

Criterion = Literal["train_loss", "validation_90", "validation_mean", "validation_mean_by_example"]
Strategy = Literal["grid", "optuna"]
RANGE_KEYS = {"low", "high", "log"}
CRITERIA: dict[Criterion, str] = {
    "train_loss": "mean training loss",
    "validation_90": "90th percentile of the validation error",
    "validation_mean": "mean validation error",
    "validation_mean_by_example": "mean validation error, weighted by examples",
}


@dataclass(frozen=True)
class Range:
    """All numbers between two ends, only integers if both ends are; `log` spreads them by orders of magnitude."""

    low: float
    high: float
    log: bool = False


Axis = list[Any] | Range
Values = dict[str, Any]  # dotted key → value


@dataclass(frozen=True)
class Search:
    """A checked section [search], with the tables of the run that it changes."""

    base: dict[str, Any]
    space: dict[str, Axis]
    criterion: Criterion
    strategy: Strategy
    trials: int | None
    seeds: int
    file: dict[str, Any]  # all tables of the file
    origin: Origin = NOWHERE  # where the file lies
    at_least: int = 0  # examples of the validation clients that count

    @property
    def first(self) -> Values:
        """The first point of the space."""
        return {key: axis.low if isinstance(axis, Range) else axis[0] for key, axis in self.space.items()}

    def config(self, values: Values, **options: Any) -> RunConfig:
        """The checked configuration of a run with these values; `options` are further ones of [train]."""
        changes: dict[str, Any] = {}
        # A part before its parameters, and its name first, because another name starts the part afresh.
        for key in sorted(values, key=lambda key: (key.count("."), not key.endswith(".name"))):
            changes = merged(changes, nested(key, values[key]))
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


def complete_file(search: Search) -> dict[str, Any]:
    """The tables of a search, as a file in any folder can hold them: paths are absolute, and own code is recorded."""
    tables: dict[str, Any] = dict(search.file)
    code: dict[str, Any] = {}
    for values in tried(search):
        code |= search.config(values).table().get("code", {})
    first = search.config(search.first)
    for name, part in {"data": first.data, "model": first.model}.items():
        given = section(tables, name)
        tables[name] = {key: part.parameters[key] if _is_path(part, key) else value for key, value in given.items()}
    return tables | ({"code": code} if code else {})


def _is_path(part: PartConfig, key: str) -> bool:
    return key in part.parameters and part.part.parameters[key].is_path


def nested(key: str, value: Any) -> dict[str, Any]:
    """A dotted key as tables.

    >>> nested("algorithm.solver.lr", 0.1)
    {'algorithm': {'solver': {'lr': 0.1}}}
    """
    first, _, rest = key.partition(".")
    return {first: nested(rest, value) if rest else value}


def trial_name(values: Values) -> str:
    """The name of a trial: its values, exactly.

    >>> trial_name({"algorithm.solver.lr": 0.1, "algorithm.risk": "mean"})
    'lr 0.1, risk mean'
    """
    texts = {key: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False, default=str) for key, v in values.items()}
    return ", ".join(f"{key.rpartition('.')[2]} {text}" for key, text in texts.items())


def folder_name(values: Values) -> str:
    """The name of the folder of a trial; with a checksum if the values cannot be read off it.

    >>> folder_name({"algorithm.solver.lr": 0.1}), folder_name({"algorithm.risk": {"name": "mean"}})
    ('lr-0.1', 'risk-name-mean-efbf9ed2')
    """
    name = trial_name(values)
    short = re.sub(r"[^\w.+-]+", "-", name)[:80].strip("-.")
    spaced = any(" " in value for value in values.values() if isinstance(value, str))
    exact = short == name.replace(", ", "-").replace(" ", "-") and not spaced
    return short if exact else f"{short}-{zlib.crc32(name.encode()):08x}"


# ------------------------------------------------------------------------------------------------------------ the file


def read_search(path: Path, overrides: Iterable[str] = (), *, trust: bool = False) -> Search:
    """The search that a file describes, with every value of its space checked; nothing is written."""
    table = override(read_toml(path), overrides)
    refuse_unknown(table, (*SECTIONS, "code", "versions", "search"), "")
    if "search" not in table:
        raise ConfigError(f"{path} has no [search] section: it says what to try. See examples/tune.toml.")
    options = section(table, "search")
    refuse_unknown(options, ("criterion", "strategy", "trials", "seeds", "at_least", "space"), "search")
    strategy = check_value(options.get("strategy", "grid"), Strategy, "search.strategy")
    if (strategy == "optuna") != ("trials" in options):
        missing = "is missing: it is how many values Optuna tries. Give it."
        rule = missing if strategy == "optuna" else "is for Optuna; a grid is tried whole. Leave it out."
        raise ConfigError(f"search.trials {rule}")
    search = Search(
        {name: table[name] for name in SECTIONS if name in table},
        read_space(section(options, "space", required=False), strategy),
        check_value(options.get("criterion", "train_loss"), Criterion, "search.criterion"),
        strategy,
        _at_least_one(options["trials"], "search.trials") if "trials" in options else None,
        _at_least_one(options.get("seeds", 1), "search.seeds"),
        table,
        Origin.of(path, table, "run", trust=trust),
        check_value(options.get("at_least", 0), int, "search.at_least"),
    )
    if search.at_least and (search.at_least < 0 or search.criterion == "train_loss"):
        rule = "must be 0 or more, and 0 with the training loss"
        raise ConfigError(f'search.at_least {rule}, but is {search.at_least}. Use criterion = "validation_90".')
    for values in tried(search):
        search.config(values)  # refuses values that break a rule of their own
    return search


def _at_least_one(value: Any, key: str) -> int:
    number: int = check_value(value, int, key)
    if number < 1:
        raise ConfigError(f"{key} must be at least 1, but is {number}.")
    return number


def read_space(table: Mapping[str, Any], strategy: Strategy) -> dict[str, Axis]:
    """[search.space] as dotted key → values or range; keys may be quoted or nested tables."""
    space: dict[str, Axis] = {}
    for key, axis in dotted_items(table, lambda value: not isinstance(value, Mapping) or bool(value.keys() & RANGE_KEYS)):
        refuse_key(key)
        space[key] = check_axis(axis, f"search.space.{key}", strategy)
    if not space:
        raise ConfigError('search.space is empty: it must name values to try, e.g. "algorithm.solver.lr" = [0.01, 0.1, 1.0].')
    return space


def refuse_key(key: str) -> None:
    """Refuse a key that must be the same for all trials: with other data or seeds, criteria could not be compared."""
    root = key.partition(".")[0]
    if root == "data":
        fix = "Search over algorithm, model or train."
        raise ConfigError(f"search.space.{key}: trials on other data cannot be compared. {fix}")
    if root not in SECTIONS or root == key:
        raise ConfigError(f"search.space.{key} must be a key of [algorithm], [model] or [train], e.g. algorithm.solver.lr.")
    if key == "train.seed":
        raise ConfigError("search.space.train.seed: a seed is no choice. Average over several: seeds = N in [search].")
    if key == "train.name":
        raise ConfigError("search.space.train.name is given by the search. Leave it out.")


def check_axis(given: Any, key: str, strategy: Strategy) -> Axis:
    """Check an axis of the space: a list of different values, or for Optuna a range."""
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
    axis = Range(given["low"], given["high"], check_value(given.get("log", False), bool, f"{key}.log"))
    if axis.low >= axis.high:
        raise ConfigError(f"{key}.low must be below high = {toml_text(axis.high)}, but is {toml_text(axis.low)}.")
    if axis.log and axis.low <= 0:
        raise ConfigError(f"{key}.low must be positive where log = true, but is {toml_text(axis.low)}.")
    return axis


def grid(search: Search) -> list[Values]:
    """Every combination of the values of the axes."""
    axes = [axis for axis in search.space.values() if not isinstance(axis, Range)]
    return [dict(zip(search.space, values, strict=True)) for values in itertools.product(*axes)]


def corners(search: Search) -> Iterator[Values]:
    """Points of the space that together have every value, and both ends of every range."""
    for key, axis in search.space.items():
        for value in (axis.low, axis.high) if isinstance(axis, Range) else axis:
            yield {**search.first, key: value}


def tried(search: Search) -> Iterable[Values]:
    """All points of a grid; for Optuna the corners of the space."""
    return grid(search) if search.strategy == "grid" else corners(search)


def check_first_trial(search: Search) -> None:
    """Refuse a search that cannot run, by building the first trial, and a criterion without its clients."""
    from equipoise.experiment.build import build
    from equipoise.privacy.lookers import refuse_search

    experiment = build(search.config(search.first))
    if search.criterion != "train_loss" and experiment.data.validation is None:
        config = experiment.config.data
        key = next((name for name in config.parameters if name.startswith("validation")), None)
        fix = f"Set data.{key} above 0, or use" if key else "Use"
        raise ConfigError(
            f'search.criterion = "{search.criterion}" needs validation clients, and the data {config.name!r} have none. '
            f'{fix} criterion = "train_loss".'
        )
    refuse_search([search.config(each).algorithm() for each in tried(search)], experiment.data, search.criterion.split("_")[0])
