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
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from equipoise.errors import ConfigError
from equipoise.experiment.config import SECTIONS, RunConfig, override, read_toml, refuse_unknown, section
from equipoise.experiment.folder import RunFolder
from equipoise.experiment.study import PlannedRun, merged
from equipoise.experiment.values import check_value, toml_text

if TYPE_CHECKING:
    pass

Criterion = Literal["train_loss", "validation_90"]
Strategy = Literal["grid", "optuna"]
CRITERIA = {"train_loss": "mean training loss", "validation_90": "90th percentile of the validation error"}


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

    def config(self, values: Values, **options: Any) -> RunConfig:
        """The configuration of a single run with these values, checked; `options` are further ones of [train]."""
        changes: dict[str, Any] = {}
        # A part before its parameters, and its name first, because another name starts the part afresh.
        for key in sorted(values, key=lambda key: (key.count("."), not key.endswith(".name"))):
            changes = merged(changes, nested(key, values[key]))
        table = merged(self.base, changes)
        return RunConfig.of({**table, "train": {**section(table, "train"), **options}})

    def plan(self, values: Values, out: Path) -> list[PlannedRun]:
        """The runs of a trial, one per seed."""
        first, name = self.config(values).train, trial_name(values)
        return [
            PlannedRun(
                RunFolder(out / f"{folder_name(values)}-{seed}"),
                name,
                seed,
                self.config(values, seed=seed, name=name, threads=first.threads or 1),
            )
            for seed in range(first.seed, first.seed + self.seeds)
        ]


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
    ('lr-0.1', 'risk-name-mean-efbf9ed2')
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
