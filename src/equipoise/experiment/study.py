"""A study: methods × seeds (× values of swept keys), each a run in its own folder.

    [study]
    seeds = 5                                  # 0 … 4, or a list
    [methods.FedAvg]                           # each method changes [algorithm]
    [methods."Δ-FL 0.5"]
    risk = {name = "superquantile", tail = 0.5}
    [sweep]
    "algorithm.solver.lr" = [0.03, 0.1]        # every method with every value

[data], [model], [algorithm] and [train] are those of a single run and hold for all runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from equipoise.core.files import remove_unfinished, write_atomically
from equipoise.errors import ConfigError
from equipoise.experiment.config import SECTIONS as RUN_SECTIONS
from equipoise.experiment.config import RunConfig
from equipoise.experiment.config_tables import override, read_toml, refuse_unknown, section, with_value
from equipoise.experiment.own_code import Origin
from equipoise.experiment.run_files import ORDER, RunFolder, method_folder
from equipoise.experiment.values import NONE, check_value, toml_text, value_text

MOST_SEEDS = 10_000
SECTIONS = ("study", *RUN_SECTIONS, "methods", "sweep", "code")


@dataclass(frozen=True)
class PlannedRun:
    """A run of a study before it is made: its folder, method, seed and checked configuration."""

    folder: RunFolder
    method: str
    seed: int
    config: RunConfig


def read_study(path: Path, overrides: Iterable[str] = (), *, out: Path, trust: bool = False) -> list[PlannedRun]:
    """The runs that a study file describes, each with a checked configuration; nothing is written in `out`."""
    table = override(read_toml(path), overrides)
    origin = Origin.of(path, table, "run", trust=trust)
    refuse_unknown(table, SECTIONS, "")
    if "family" in table:
        raise ConfigError("[family] is for equipoise run; a study trains one model for each method: write it as methods.")
    study = section(table, "study", required=False)
    refuse_unknown(study, ("seeds",), "study")
    seeds = _seeds(study.get("seeds", 1))
    base = {name: table[name] for name in RUN_SECTIONS if name in table}
    if "seed" in section(table, "train"):
        raise ConfigError("train.seed is given by the study: write seeds = … in [study].")
    methods = section(table, "methods", required=False) or {path.stem: {}}
    planned: list[tuple[str, int, RunConfig]] = []
    for (method, changes), values in itertools.product(methods.items(), _sweep(section(table, "sweep", required=False))):
        if method in ("", NONE):
            raise ConfigError(f'methods."{method}" must have a name other than "" and "{NONE}".')
        if not isinstance(changes, Mapping):
            raise ConfigError(f"methods.{method} must be a table of changes to [algorithm], but is {toml_text(changes)}.")
        name = ", ".join([method, *(f"{key.rpartition('.')[2]} {value_text(value)}" for key, value in values.items())])
        for seed in seeds:
            run_table = merged(base, {"algorithm": changes})
            for key, value in {**values, "train.seed": seed, "train.name": name}.items():
                run_table = with_value(run_table, key.split("."), value, "sweep")
            try:
                config = RunConfig.of(run_table, origin)
            except ConfigError as failure:
                raise ConfigError(f"methods.{method}: {failure}") from failure
            config = replace(config, train=replace(config.train, threads=config.train.threads or 1))
            planned.append((name, seed, config))
    runs = [PlannedRun(RunFolder(out / f"{method_folder(name)}-{seed}"), name, seed, config) for name, seed, config in planned]
    if len({run.folder.path for run in runs}) < len(runs):
        raise ConfigError("Two methods have names that make the same folder. Give them names that differ in letters or digits.")
    return runs


def _seeds(given: Any) -> list[int]:
    """The seeds of a study: a list, or the first of a number of seeds."""
    if isinstance(given, list):
        seeds = [check_value(seed, int, "study.seeds") for seed in given]
    else:
        count = check_value(given, int, "study.seeds")
        if count > MOST_SEEDS:
            raise ConfigError(f"study.seeds must be at most {MOST_SEEDS} seeds, but is {toml_text(given)}.")
        seeds = list(range(count))
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        rule = "must be a number of seeds, or a list of different seeds ≥ 0"
        raise ConfigError(f"study.seeds {rule}, but is {toml_text(given)}.")
    return seeds


def _sweep(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every combination of the swept values, as dotted key → value; keys may be quoted or nested tables."""
    axes = dict(dotted_items(table, lambda value: not isinstance(value, Mapping)))
    for key, values in axes.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"sweep.{key} must be a list of values, but is {toml_text(values)}.")
        if key in ("train.seed", "train.name"):
            raise ConfigError(f"sweep.{key} is given by the study itself: use seeds and methods.")
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def dotted_items(table: Mapping[str, Any], is_leaf: Callable[[Any], bool], before: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested tables by dotted key.

    >>> dict(dotted_items({"train": {"seed": 1}, "algorithm.solver.lr": 2}, lambda value: isinstance(value, int)))
    {'train.seed': 1, 'algorithm.solver.lr': 2}
    """
    for key, value in table.items():
        if is_leaf(value):
            yield before + key, value
        else:
            yield from dotted_items(value, is_leaf, f"{before}{key}.")


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables with changes applied; a change that names another part replaces the whole table of the part.

    >>> base = {"solver": {"lr": 0.1}, "risk": {"name": "tilted", "tilt": 2}}
    >>> merged(base, {"solver": {"prox": 1}, "risk": {"name": "mean"}})
    {'solver': {'lr': 0.1, 'prox': 1}, 'risk': {'name': 'mean'}}
    """
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        old = {"name": old} if isinstance(old, str) and isinstance(value, Mapping) else old
        same_part = isinstance(old, Mapping) and isinstance(value, Mapping) and value.get("name") in (None, old.get("name"))
        result[key] = merged(old, value) if same_part and isinstance(old, Mapping) else value
    return result


def prepare(runs: Sequence[PlannedRun], *, note: str = "") -> None:
    """Make the folders of runs with their configurations, below a `note`. One with another configuration is refused first."""
    for run in runs:
        if not run.folder.config.exists():
            continue
        planned = run.config.table()
        code = {"code": read_toml(run.folder.config).get("code", {})}
        difference = _first_difference(code, {"code": planned.get("code", {})})  # other code is not run
        if difference is None:
            difference = _first_difference(RunConfig.read(run.folder.config, code="resume").table(), planned)
        if difference is not None:
            key, old, new = difference
            raise ConfigError(
                f"{run.folder.path} holds a run of another configuration: {key} is {toml_text(old)} there, {toml_text(new)} "
                "here. Delete the folder, or name another: --out DIR."
            )
    for run in runs:
        if not run.folder.config.exists():
            write_atomically(run.folder.config, (note + run.config.text()).encode())
    for parent in {run.folder.path.parent for run in runs}:
        names = [run.folder.path.name for run in runs if run.folder.path.parent == parent]
        remove_unfinished(parent, ORDER)
        write_atomically(parent / ORDER, "".join(f"{name}\n" for name in names).encode())


def _first_difference(stored: Mapping[str, Any], planned: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The first key of the planned configuration with another stored value, and both values; None if all agree.

    The stored configuration may have more keys: those that the model read from the data.
    """
    for key, value in planned.items():
        old = stored.get(key)
        if key == "versions":
            continue
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            inner = _first_difference(old, value)
            if inner is not None:
                return f"{key}.{inner[0]}", inner[1], inner[2]
        elif old != value:
            return key, old, value
    return None
