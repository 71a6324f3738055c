"""A search by Optuna: it is asked for values, which are tried, and is told the criterion."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from equipoise.core.plain_text import parse_json
from equipoise.errors import ConfigError, NotWritten
from equipoise.experiment.search import Axis, Range, Values, trial_name
from equipoise.experiment.trial_results import TrialResult


class TrialRunner(Protocol):
    """What makes the runs of trials, and what is tried."""

    @property
    def space(self) -> Mapping[str, Axis]:
        """What to try, by key."""

    @property
    def total(self) -> int:
        """How many trials there are."""

    @property
    def at_once(self) -> int:
        """How many values are asked for at once."""

    @property
    def seed(self) -> int:
        """What decides, with the position of a trial, what is tried."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """What a study must share with the search to go on with it."""

    def run(self, points: Sequence[Values]) -> list[TrialResult]:
        """Make the missing runs of trials."""

    def result(self, values: Values, messages: Mapping[Path, str]) -> TrialResult:
        """The result of a trial that an earlier process ended."""


def imported_optuna(what: str, fix: str) -> Any:
    """The module optuna, without its messages; if it is absent, the error says that `what` needs it, and how to install it."""
    try:
        import optuna
    except ImportError as failure:
        said = f'{what} needs Optuna, which is not installed: pip install "equipoise[tune]". {fix}'
        raise ConfigError(said) from failure
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def search_by_optuna(optuna: Any, trials: TrialRunner, file: Path | None) -> list[TrialResult]:
    """Ask Optuna for values, run them and tell it the criterion, until all trials are done.

    The study is kept in a file; with None it is in memory.
    """
    from sqlalchemy.exc import SQLAlchemyError

    study = open_study(optuna, trials.identity, file)
    try:
        return ask_and_tell(optuna, trials, study)
    except (SQLAlchemyError, optuna.exceptions.OptunaError) as failure:
        said = str(failure.__cause__ or failure).splitlines()[0]
        raise NotWritten(f"{file} could not be written: {said}. Make room on the disk, or see to its permissions.") from failure


def ask_and_tell(optuna: Any, trials: TrialRunner, study: Any) -> list[TrialResult]:
    """The trials of a search whose study is open.

    Values are asked for in batches that fill the workers. The sampler of each trial is seeded by its position and knows the
    batches before. A batch that was interrupted is run to its end first, so that a killed search ends as if it had not been.
    """
    size, total = trials.at_once, trials.total
    running, complete = optuna.trial.TrialState.RUNNING, optuna.trial.TrialState.COMPLETE
    space = {key: distribution(optuna, axis) for key, axis in trials.space.items()}
    results: dict[str, TrialResult] = {}
    while True:
        for trial in study.get_trials(deepcopy=False, states=(running,)):
            if trial.params.keys() != space.keys():  # killed while it was asked for
                study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        ended = study.get_trials(deepcopy=False, states=(complete,))
        pending = study.get_trials(deepcopy=False, states=(running,))
        for position in range(len(ended) + len(pending), min(total, (len(ended) // size + 1) * size)):
            study.sampler = sampler(optuna, trials.seed, position)
            pending.append(study.ask(space))
        if not pending:
            break
        points = [values_of(trials.space, trial.params) for trial in pending]
        for trial, result in zip(pending, trials.run(points), strict=True):
            study.tell(trial.number, result.value)
            results[trial_name(result.values)] = result
    tried = {trial_name(values_of(trials.space, trial.params)): trial for trial in ended}
    earlier = [trial for name, trial in tried.items() if name not in results and math.isfinite(trial.value)]
    # Of trials that an earlier process ended, only runs whose folders were deleted since are made again.
    for result in trials.run([values_of(trials.space, trial.params) for trial in earlier]) if earlier else []:
        results[trial_name(result.values)] = result
    return [results.get(name) or trials.result(values_of(trials.space, trial.params), {}) for name, trial in tried.items()]


def sampler(optuna: Any, seed: int, position: int) -> Any:
    """The Optuna sampler of the trial at a position, seeded so that every process makes the same one."""
    from equipoise.core.rng import stream_key

    return optuna.samplers.TPESampler(seed=stream_key(seed, "search", position) >> 32)


def distribution(optuna: Any, axis: Axis) -> Any:
    """An axis as an Optuna distribution; listed values are categories, as text because Optuna stores no tables."""
    if not isinstance(axis, Range):
        return optuna.distributions.CategoricalDistribution(list(by_text(axis)))
    integers = isinstance(axis.low, int) and isinstance(axis.high, int)
    kind = optuna.distributions.IntDistribution if integers else optuna.distributions.FloatDistribution
    return kind(axis.low, axis.high, log=axis.log)


def by_text(values: Sequence[Any]) -> dict[str, Any]:
    """Listed values by the text that Optuna stores: JSON, and objects of Python by their repr."""
    return {json.dumps(value, default=repr): value for value in values}


def values_of(space: Mapping[str, Axis], parameters: Mapping[str, Any]) -> Values:
    """The parameters of an Optuna trial as values of the space, in its order."""
    return {key: parameters[key] if isinstance(axis, Range) else by_text(axis)[parameters[key]] for key, axis in space.items()}


def open_study(optuna: Any, identity: Mapping[str, Any], path: Path | None) -> Any:
    """The Optuna study in a file, made if it is absent, or in memory; a study of another search is refused."""
    from sqlalchemy.exc import SQLAlchemyError

    if path is None:
        return optuna.create_study()
    here = json.dumps(identity, default=str)
    try:
        study = optuna.create_study(study_name="search", storage=f"sqlite:///{path.resolve()}", load_if_exists=True)
        if "search" not in study.user_attrs:
            study.set_user_attr("search", here)
        there = parse_json(study.user_attrs["search"])
    except (SQLAlchemyError, optuna.exceptions.OptunaError) as failure:
        reason = str(failure).splitlines()[0]
        raise ConfigError(f"{path} cannot be used: {reason}. Delete it, or name another folder.") from failure
    for key, value in parse_json(here).items():
        if there.get(key) != value:
            raise ConfigError(f"{path} holds a search with another {key}. Name another folder.")
    return study
