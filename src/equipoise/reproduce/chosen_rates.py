"""Chooses the learning rate of each method of an experiment on validation examples.

This is what `equipoise reproduce --tune` does for entries with `choose`: every method is trained for a few rounds with every
rate, on data of which a share is kept for validation, with a seed that no table reports. The rate with the highest accuracy on
the validation examples is taken; a smaller one if two are equal. Test examples play no part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from equipoise import metrics
from equipoise.errors import ConfigError, InvalidParameter
from equipoise.reproduce.entry import Figure, FinishedRun, Method

if TYPE_CHECKING:
    from equipoise.reproduce.experiment_runs import ExperimentRuns

CHOOSING_SEED = 100  # of the runs by which rates are chosen; no reported seed
FIGURES = {"validation": Figure("accuracy on validation examples")}


def validation_accuracy(trained: FinishedRun) -> dict[str, float]:
    """Accuracy on all validation examples, in %, of the model that each client is served."""
    rows = trained.result.clients.where("validation")
    return {"validation": 100 * (1 - metrics.mean(rows.served_error, rows.size))}


def candidate_name(method: str, rate: float) -> str:
    """The name of a method with a rate, as tables and files have it."""
    return f"{method}, rate {rate:g}"


def candidates(runs: ExperimentRuns) -> ExperimentRuns:
    """The runs by which rates are chosen: every method with every rate, judged on validation examples."""
    entry, choose = runs.entry, runs.entry.choose
    if choose is None:
        raise ConfigError(f"{entry.name} has no rule by which rates are chosen for each method.")
    methods = tuple(
        replace(with_rate(method, rate), name=candidate_name(method.name, rate), rounds=None, seeds=None, evaluate_every=0)
        for method in methods_with_a_choice(runs)
        for rate in entry.rates
    )
    rounds = min(choose.rounds, runs.scale.rounds)
    title = f"{entry.title} on validation examples after {rounds} rounds"
    options = {**runs.scale.options, "validation": choose.share}
    return replace(
        runs,
        entry=replace(
            entry, methods=methods, title=title, figures=FIGURES, measure=validation_accuracy, tables=(), claims=()
        ),
        scale=replace(runs.scale, rounds=rounds, seeds=1, first_seed=CHOOSING_SEED, options=options),
        out=runs.out / "candidates",
    )  # fmt: skip


def methods_with_a_choice(runs: ExperimentRuns) -> list[Method]:
    """The methods whose rate is chosen: all but those that differ from others by their rounds."""
    names = {method.name for method in runs.entry.methods}
    return [m for m in runs.entry.methods if m.rounds is None or m.name.rpartition(", ")[0] not in names]


def with_rate(method: Method, rate: float) -> Method:
    """A method whose local work has another learning rate."""
    if method.local is None:
        return replace(method, solver={**method.solver, "lr": rate})
    return replace(method, local=_solver_with_rate(method.local, rate))


def _solver_with_rate(solver: Any, rate: float) -> Any:
    """A solver with another rate; a solver that wraps another passes it on."""
    names = {field.name for field in fields(solver)} if is_dataclass(solver) else set()
    if "lr" in names:
        return replace(solver, lr=rate)
    if "solver" in names:
        return replace(solver, solver=_solver_with_rate(solver.solver, rate))
    raise InvalidParameter("local", "must have a learning rate `lr`, or a solver with one", solver)


def chosen_rates(runs: ExperimentRuns) -> dict[str, float]:
    """The chosen rate of each method of which all candidates were run; a method that diverges with every rate has none."""
    tried = candidates(runs)
    known = {method.name: method for method in tried.entry.methods}
    found: dict[str, float] = {}
    for method in methods_with_a_choice(runs):
        of_rates = {
            rate: tried.stored(known[candidate_name(method.name, rate)], CHOOSING_SEED, None) for rate in runs.entry.rates
        }
        scores = {rate: run["figures"]["validation"] for rate, run in of_rates.items() if run is not None and "figures" in run}
        if scores and all(run is not None for run in of_rates.values()):
            found[method.name] = best_rate(scores)
    return found


def best_rate(scores: Mapping[float, float]) -> float:
    """The rate with the highest score; the smallest of those that are equal."""
    return min(scores, key=lambda rate: (-scores[rate], rate))


def with_chosen_rates(runs: ExperimentRuns) -> ExperimentRuns:
    """The runs of an experiment in which each method has its chosen rate; a method without one is left out.

    A run whose chosen rate is that of the experiment equals the run of the plain table, and is taken from there.
    """
    found = chosen_rates(runs)
    if not found:
        raise ConfigError(f"{runs.out / 'candidates'} holds no method that was run with every rate.")
    methods = tuple(with_rate(method, found[method.name]) for method in runs.entry.methods if method.name in found)
    chosen = replace(runs, entry=replace(runs.entry, methods=methods), out=runs.out / "chosen", chosen=found)
    for method in methods:
        for seed in chosen.seeds_of(method):
            plain = runs.run_in_file(method.name, seed)
            if chosen.stored(method, seed, None) is None and plain.get("settings") == chosen.settings(method, None):
                chosen.keep(plain)
    return chosen
