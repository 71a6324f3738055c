"""Trials of a search: what may be tried, in which order, and how trials are judged; for `eq.tune` and `equipoise tune`.

A grid tries every combination of listed values. Optuna is told the criterion of each batch of trials before it is asked for the
next. Its sampler is seeded by the position of a trial, so that a search that is repeated asks for the same values again: what
was trained before is only judged, and no study has to be kept.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from equipoise.core.words import table_lines
from equipoise.errors import ConfigError, InvalidParameter, brief, unknown_name
from equipoise.experiment.values import check_value, toml_text, value_text

if TYPE_CHECKING:
    from equipoise.client_table import ClientTable
    from equipoise.report.over_seeds import Spread

Criterion = Literal["train_loss", "validation_90", "validation_mean", "validation_mean_by_example"]
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
Space = Mapping[str, Axis]
Values = dict[str, Any]  # key → value


def is_range(given: Any) -> bool:
    """Whether an axis is given as a range, {low = 0.01, high = 1.0}."""
    return isinstance(given, Mapping) and bool(given.keys() & {"low", "high", "log"})


def check_axis(given: Any, key: str, *, ranges: bool) -> Axis:
    """An axis of the space: a list of different values, or, where Optuna chooses, a range."""
    if not isinstance(given, Mapping):
        if not isinstance(given, list) or not given or len(set(map(repr, given))) < len(given):
            raise ConfigError(f"{key} must be a list of different values, but is {toml_text(given)}. E.g. [0.01, 0.1, 1.0].")
        return given
    if not ranges:
        raise ConfigError(f"{key} must be a list of values without trials, but is a range. List values, or give trials = 20.")
    for name in given:
        if name not in ("low", "high", "log"):
            raise ConfigError(f"{key}.{name}: " + unknown_name("key", str(name), ("low", "high", "log")))
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


def grid(space: Space) -> list[Values]:
    """Every combination of listed values."""
    axes = [axis for axis in space.values() if not isinstance(axis, Range)]
    return [dict(zip(space, values, strict=True)) for values in product(*axes)]


def corners(space: Space) -> Iterator[Values]:
    """Points of a space that together have every listed value, and both ends of every range."""
    first = {key: axis.low if isinstance(axis, Range) else axis[0] for key, axis in space.items()}
    for key, axis in space.items():
        for value in (axis.low, axis.high) if isinstance(axis, Range) else axis:
            yield {**first, key: value}


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


# ------------------------------------------------------------------------------------------------------------- the trials


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

    @classmethod
    def of(cls, values: Values, by_seed: Sequence[float], criterion: Criterion) -> TrialResult:
        """The result of a trial whose runs all ended."""
        from equipoise.report.over_seeds import Spread

        spread = Spread.of(by_seed)
        if not math.isfinite(spread.mean):
            return cls(values, None, f"the {CRITERIA[criterion]} is not finite.")
        return cls(values, spread, by_seed=tuple(by_seed))


RunTrials = Callable[[Sequence[Values]], list[TrialResult]]  # trains what is missing of some trials, and judges them


def run_trials(run: RunTrials, space: Space, trials: int | None, *, seed: int, at_once: int = 1) -> list[TrialResult]:
    """The results of all trials, best first: of a grid, or of as many `trials` as Optuna chooses, `at_once` at a time."""
    if trials is None:
        return sorted(run(grid(space)), key=lambda result: result.value)
    from equipoise.core.rng import stream_key

    optuna, found = imported_optuna(), {}
    study = optuna.create_study()
    axes = {key: _distribution(optuna, axis) for key, axis in space.items()}
    for start in range(0, trials, at_once):
        asked = []
        for position in range(start, min(start + at_once, trials)):
            study.sampler = optuna.samplers.TPESampler(seed=stream_key(seed, "search", position) >> 32)
            asked.append(study.ask(axes))
        points = [_values_of(space, trial.params) for trial in asked]
        for trial, result in zip(asked, run(points), strict=True):
            study.tell(trial, result.value)
            found[trial_name(result.values)] = result  # Optuna may ask for the same values again
    return sorted(found.values(), key=lambda result: result.value)


def imported_optuna() -> Any:
    """The module optuna, without its messages; if it is absent, the error says how to install it."""
    try:
        import optuna
    except ImportError as failure:
        fix = 'pip install "equipoise[tune]". Or list values, and leave out trials.'
        raise ConfigError(f"trials = N needs Optuna, which is not installed: {fix}") from failure
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _distribution(optuna: Any, axis: Axis) -> Any:
    """An axis as an Optuna distribution; listed values are categories, as text because Optuna stores no tables."""
    if not isinstance(axis, Range):
        return optuna.distributions.CategoricalDistribution(list(_by_text(axis)))
    integers = isinstance(axis.low, int) and isinstance(axis.high, int)
    kind = optuna.distributions.IntDistribution if integers else optuna.distributions.FloatDistribution
    return kind(axis.low, axis.high, log=axis.log)


def _by_text(values: Sequence[Any]) -> dict[str, Any]:
    """Listed values by the text that Optuna knows them by: JSON, and objects of Python by their repr."""
    return {json.dumps(value, default=repr): value for value in values}


def _values_of(space: Space, parameters: Mapping[str, Any]) -> Values:
    """The parameters of an Optuna trial as values of the space, in its order."""
    return {key: parameters[key] if isinstance(axis, Range) else _by_text(axis)[parameters[key]] for key, axis in space.items()}


# ------------------------------------------------------------------------------------------------------------ the verdict


def criterion_of(clients: ClientTable, criterion: Criterion, at_least: int = 0) -> float:
    """The criterion of a run, from its table of clients; the training loss is weighted by examples.

    `at_least` leaves out validation clients with fewer examples.
    """
    if criterion == "train_loss":
        return clients.where("train").summaries()["train"]["loss"].mean
    rows = clients.where("validation")
    kept = rows.take((rows.size >= at_least).nonzero().flatten())
    if not len(kept.benign):
        rule = f"must leave a client, and no validation client has more than {int(rows.size.max())} examples"
        raise InvalidParameter("at_least", rule, at_least, "Lower it.")
    found = kept.summaries()["validation"]["error"]
    figures = {"validation_mean": found.mean, "validation_mean_by_example": found.mean_by_example}
    return figures.get(criterion, found.percentiles[90])


def trial_lines(results: Sequence[TrialResult], criterion: Criterion, *, at_least: int, seeds: int) -> list[str]:
    """The table of all trials as lines of text, best first, and which of them the seeds do not tell from the best."""
    clients = f", clients with {at_least} validation examples or more" if at_least else ""
    rows = [["trial", *(key.rpartition(".")[2] for key in results[0].values), criterion, "status"]]
    for number, result in enumerate(results, start=1):
        status = "failed" if result.criterion is None else "done"
        rows.append([str(number), *map(_cell, result.values.values()), spread_text(result.criterion, seeds), status])
    failed = [f"Failed: trial {n}: {each.message}" for n, each in enumerate(results, start=1) if each.criterion is None]
    title = f"{criterion}: {CRITERIA[criterion]}{clients}; mean ± standard deviation over seeds: {seeds}"
    return [title, *table_lines(rows), *failed, *filter(None, [noise_words(results)])]


def noise_words(results: Sequence[TrialResult]) -> str:
    """How many trials the seeds do not tell from the best one, by their paired differences; empty if there are none."""
    from equipoise.report.paired import LEAST_SEEDS, paired

    done = [result for result in results if result.criterion is not None]
    if len(done) < 2:
        return ""
    best, *others = done
    first, seeds = dict(enumerate(best.by_seed)), len(best.by_seed)
    alike = [each for each in others if paired("", first, dict(enumerate(each.by_seed))).verdict != "lower"]
    equal = sum(each.by_seed == best.by_seed for each in others)
    alike = others if seeds < LEAST_SEEDS else alike
    cure = f"Use {LEAST_SEEDS} seeds or more, or another criterion where trials are equal."
    told = f"Not told from the best by {seeds} seeds: {len(alike)} of {len(others)} trials; equal to it: {equal}. {cure}"
    return told if alike else ""


def spread_text(spread: Spread | None, seeds: int) -> str:
    """The criterion with five digits, and its standard deviation over seeds; a dash for None."""
    if spread is None:
        return "–"
    return f"{spread.mean:.5g}" + (f" ± {spread.deviation:.2g}" if seeds > 1 else "")


def _cell(value: Any) -> str:
    """A value as a cell: numbers with six digits, tables and lists as JSON, parts with what differs from their defaults."""
    if isinstance(value, Mapping | list):
        return json.dumps(value, ensure_ascii=False)
    return value_text(value) if isinstance(value, str | int | float) else brief(value)
