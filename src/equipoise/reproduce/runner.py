"""What `equipoise reproduce` does: chooses methods, scale and rates of a published experiment, and has its runs made."""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from equipoise.core.devices import usable_device
from equipoise.errors import ConfigError, require, unknown_name
from equipoise.reproduce.batched_runs import TimeLimit
from equipoise.reproduce.chosen_rates import CHOOSING_SEED, candidates, with_chosen_rates
from equipoise.reproduce.data_sets import data_folder, require_files
from equipoise.reproduce.entry import Experiment, Method
from equipoise.reproduce.experiment_runs import ExperimentRuns, PrintLine
from equipoise.reproduce.experiments import EXPERIMENTS, SEVERAL
from equipoise.reproduce.result_tables import slug


def listing() -> str:
    """A line of text per experiment: its name, title, number of methods, and whether it needs data files."""
    width = max(map(len, EXPERIMENTS))
    lines = [
        f"{name:<{width}}  {entry.title} ({len(entry.methods)} rows{'' if entry.needs else '; needs no data files'})"
        for name, entry in EXPERIMENTS.items()
    ]
    return "\n".join([*lines, *(f"{name:<{width}}  {' and '.join(parts)}" for name, parts in SEVERAL.items())])


def reproduce(
    name: str,
    *,
    data: Path | None = None,
    scale: str = "small",
    seeds: int | None = None,
    out: Path = Path("reproduce"),
    device: str | None = None,
    methods: str | None = None,
    tune: bool = False,
    show: bool = False,
    minutes: float | None = None,
    precision: str = "float32",
    ray: str | None = None,
    say: PrintLine | None = None,
) -> Path:
    """Make the missing runs of an experiment, print published and measured figures side by side, and save them.

    Returns the folder OUT/NAME-SCALE, which holds result.md, result.json and a file per run; for an experiment of several
    tables that is the folder of the last. `methods` selects rows by name or by the name of their files, separated by commas;
    `show` runs nothing and prints what the folder holds. `minutes` is when to stop; the same call then goes on. `precision` is
    that of a GPU's products ("float32", "tf32" or "bf16"). `ray`, the address of a Ray cluster, has the runs made there; every
    node needs the data files at the same path. A learning rate is chosen here all the same.

    `name` is an entry of `listing`, and `data` the folder of its files (None: EQUIPOISE_DATA). `scale` is "small" or "paper".
    `seeds` is how many (None: the scale's own). `out` is the folder for runs and tables, and `device` a torch device. `tune`
    chooses learning rates first. `say` prints each line (None: print).
    """
    limit = TimeLimit.minutes(minutes)
    require(minutes is None or minutes > 0, "minutes", "must be positive", minutes)
    given: dict[str, Any] = {
        "data": data, "scale": scale, "seeds": seeds, "out": out, "device": device, "methods": methods, "tune": tune,
        "show": show, "precision": precision, "ray": ray,
    }  # fmt: skip
    folders = [reproduce_table(part, limit=limit, say=say, **given) for part in SEVERAL.get(name, (name,))]
    return folders[-1]


def reproduce_table(
    name: str,
    *,
    data: Path | None,
    scale: str,
    seeds: int | None,
    out: Path,
    device: str | None,
    methods: str | None,
    tune: bool,
    show: bool,
    precision: str,
    ray: str | None,
    limit: TimeLimit,
    say: PrintLine | None,
) -> Path:
    """What `reproduce` does for one table."""
    if name not in EXPERIMENTS:
        raise ConfigError(unknown_name("experiment", name, {**EXPERIMENTS, **SEVERAL}))
    entry = EXPERIMENTS[name]
    if scale not in entry.scales:
        raise ConfigError(unknown_name("scale", scale, entry.scales))
    chosen = entry.scales[scale]
    require(seeds is None or seeds >= 1, "seeds", "must be at least 1", seeds)
    if ray is None and not show:  # a table that a GPU made is shown on any machine
        usable_device(device)
    folder = data_folder(data)
    folder = None if folder is None else folder.absolute()  # nodes of a cluster have other working directories
    if not show:
        require_files(name, entry.needs, folder)
    runs = ExperimentRuns(
        replace(entry, methods=chosen_methods(entry, methods, scale)),
        scale,
        replace(chosen, seeds=seeds or chosen.seeds),
        folder,
        Path(out) / f"{name}-{scale}",
        device,
        say or partial(print, flush=True),
        precision,
        options=_given_options(seeds, methods, precision),
    )
    if tune and entry.choose is not None:
        return finish_with_chosen_rates(runs, limit, ray, only_stored=show)
    if show:
        return runs.report(runs.tuned_rate(only_stored=True) if tune else None, 0.0)
    return runs.finish(tune=tune, limit=limit, ray=ray)


def _given_options(seeds: int | None, methods: str | None, precision: str) -> str:
    """The options of the command that change results, as they are written on the command line."""
    given = {"--seeds": seeds, "--methods": methods, "--precision": None if precision == "float32" else precision}
    return "".join(f" {name} {shlex.quote(str(value))}" for name, value in given.items() if value is not None)


def finish_with_chosen_rates(runs: ExperimentRuns, limit: TimeLimit, ray: str | None, *, only_stored: bool) -> Path:
    """Choose a rate for each method on validation examples, then make the tables with these rates."""
    if only_stored:
        return with_chosen_rates(runs).report(None, 0.0)
    tried = candidates(runs)
    folder = tried.finish(tune=False, limit=limit, ray=ray)
    left = [method.name for method in tried.entry.methods if tried.stored(method, CHOOSING_SEED, None) is None]
    if left:
        return folder
    return with_chosen_rates(runs).finish(tune=False, limit=limit, ray=ray)


def chosen_methods(entry: Experiment, names: str | None, scale: str) -> tuple[Method, ...]:
    """The methods that a list separated by commas names, in the order of the experiment.

    None: all, but methods that differ from others by more rounds at the scale "paper" only at that scale.
    """
    if names is None:
        names_of_all = {method.name for method in entry.methods}
        longer = {m.name for m in entry.methods if m.rounds is not None and m.name.rpartition(", ")[0] in names_of_all}
        return tuple(m for m in entry.methods if scale == "paper" or m.name not in longer)
    wanted = {slug(one) for one in names.split(",") if one.strip()}
    known = {slug(method.name): method for method in entry.methods}
    if strangers := sorted(wanted - known.keys()):
        raise ConfigError(unknown_name("method", strangers[0], known))
    require(bool(wanted), "methods", "must name at least one method", names)
    return tuple(method for key, method in known.items() if key in wanted)
