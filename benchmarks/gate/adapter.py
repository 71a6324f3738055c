"""What the gate knows of a tree of the library beyond its public API. Where a tree renames something, this file is edited.

Parts are made from tables as they stand in configuration files. Names that begin with "gate:" are of `own.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.gate import own

Numbers = dict[str, np.ndarray]
SEED_OF_NOISE = "noise_seed"  # in TOML; a tree that does not know it draws seeded noise by itself
REPORTS = ("round", "loss", "tail_loss", "risk", "cohort", "trained", "dropped", "epsilon", "clock", "tail_share")
COUNTED = ("rejected", "missing", "failed_tries")  # of reports: how many there are
SPENT = ("epsilon", "delta", "epsilon_server", "rounds", "participations")
COLUMNS = ("loss", "error", "size", "seen", "malicious", "personal_loss", "personal_error", "trivial_error", "error_deviation",
           "error_skewness")  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ catalogue, parts


def catalogue() -> dict[str, list[str]]:
    """Every part that configurations can name, by kind, and the functions that stand beside them."""
    from equipoise.experiment import catalog

    found = {kind: list(catalog.names(kind)) for kind in catalog.kinds()}
    return found | {"function": [name.replace(":", ".") for name in catalog.FUNCTIONS]}


def parameters_of(kind: str, name: str) -> set[str]:
    """The parameters that a part of the catalogue takes."""
    from equipoise.experiment import catalog

    return set(catalog.part(kind, name).parameters)


@dataclass
class Prepared:
    """What a table describes: data, model and algorithm, and the options of `train`."""

    data: Any
    model: Any
    algorithm: Any
    options: dict[str, Any]
    family: dict[str, list[float]] = field(default_factory=dict)
    conformal: float | None = None
    checkpoint_every: int = 1


def prepared(table: dict[str, Any], choice: dict[str, Any] | None = None, engine: dict[str, Any] | None = None) -> Prepared:
    """Make everything; what cannot be made is refused by the tree. `choice` pins a path of the simulator.

    `engine` are options of the engine that no configuration has.
    """
    import equipoise as eq
    from equipoise.experiment import build
    from equipoise.experiment.config import RunConfig

    table = {name: dict(section) for name, section in table.items()}
    with_known_seed(table)
    data_table = table["data"]
    train = table["train"]
    functions = {key: own.FUNCTIONS[train.pop(key)[5:]] for key in ("loss", "error") if _ours(train.get(key))}
    metrics = [name for name in train.get("metrics", ()) if _ours(name)]
    if metrics:
        train["metrics"] = [name for name in train["metrics"] if not _ours(name)]
    solver = table["algorithm"]["solver"].get("name")
    if solver == "gate:adadps":
        side = table["algorithm"]["solver"]
        table["algorithm"] = table["algorithm"] | {"solver": side.get("solver", {})}
    model, owned = table["model"], _ours(table["model"].get("name"))
    if _ours(data_table["name"]):
        table["data"] = {"name": "digits"}
    config = RunConfig.of(table | ({"model": {"name": "softmax"}} if owned else {}))
    algorithm = config.algorithm()
    if solver == "gate:adadps":
        gauge = torch.linspace(0.5, 2.0, 6)
        algorithm = replace(algorithm, solver=eq.solvers.AdaDPS({"weight": gauge}, algorithm.solver))
    data = _pairs(data_table) if _ours(data_table["name"]) else build.make_data(config)
    if config.attack is not None:
        data = eq.attacks.apply(data, config.attack.make("attack"))
    if owned:
        made = own.model(model["name"][5:], model.get("seed", 5))
        made = eq.models.with_group_norm(made) if model.get("with_group_norm") else made
    else:
        made = build.make_model(config.with_model(**build.read_from_data(config, data)), data)
    asked = config.train
    everybody = type(algorithm.sampler).__name__ == "Full"
    options = {
        "rounds": asked.rounds, "clients_per_round": None if everybody else asked.clients_per_round, "seed": asked.seed,
        "evaluate_every": asked.evaluate_every, "evaluate_clients": asked.evaluate_clients, "loss": config.loss(),
        "error": config.error(), "stop": asked.stop,
        "metrics": config.metrics() | {name[5:]: own.FUNCTIONS[name[5:]] for name in metrics},
        "engine": PinnedEngine(asked.chosen_engine(), choice) if choice else asked.chosen_engine(),
    }  # fmt: skip
    options["engine"] = replace(options["engine"], **engine) if engine else options["engine"]
    family = {} if config.family is None else {config.family.key: list(config.family.values)}
    return Prepared(data, made, algorithm, options | functions, family, asked.conformal, asked.checkpoint_every or 1)


def with_known_seed(table: dict[str, Any]) -> None:
    """Say `noise_seed` as the tree says it: where that is not known, noise is seeded unless the system's is asked for.

    "none" stands for noise of the operating system.
    """
    privacy = dict(table["algorithm"].get("privacy", {}))
    if SEED_OF_NOISE in privacy:
        system, known = privacy[SEED_OF_NOISE] == "none", SEED_OF_NOISE in parameters_of("privacy", privacy["name"])
        if system or not known:
            del privacy[SEED_OF_NOISE]
        if system and not known:
            privacy["source"] = "system"
        table["algorithm"] = dict(table["algorithm"]) | {"privacy": privacy}


def seeded(kind: type, seed: int = 7) -> dict[str, int]:
    """The seed of the noise of a private optimiser, by the name that the tree has for it."""
    import inspect

    known = inspect.signature(kind).parameters
    return {name: seed for name in (SEED_OF_NOISE, "seed") if name in known}


def _ours(name: Any) -> bool:
    return isinstance(name, str) and name.startswith("gate:")


def _pairs(table: Mapping[str, Any]) -> Any:
    """Data whose inputs are two tensors: by name, or as a tuple."""
    import equipoise as eq

    held = np.load(table["path"])
    clients = {}
    for name in np.unique(held["client"]):
        here = held["client"] == name
        left, right = torch.from_numpy(held["x"][here][:, :4]), torch.from_numpy(held["x"][here][:, 4:])
        x = {"left": left, "right": right} if table["name"] == "gate:two inputs" else (left, right)
        clients[str(name)] = (x, torch.from_numpy(held["y"][here]))
    return eq.data.from_dict(clients, test=0.25, seed=1)


@dataclass(frozen=True)
class PinnedEngine:
    """The simulator with a choice that it would make by measuring, told as a checkpoint tells it."""

    engine: Any
    choice: dict[str, Any]

    def start(self, task: Any, data: Any) -> Any:
        running = self.engine.start(task, data)
        running.measured.use(self.choice)
        return running


def path_taken(given: Prepared) -> list[str]:
    """Which paths of the simulator train, by the words of `explain`: for information only."""
    import equipoise as eq

    known = {key: given.options[key] for key in ("clients_per_round", "seed", "loss", "error", "engine")}
    text = eq.explain(given.model, given.data, given.algorithm, **known)
    return sorted({re.split(r"\s{2,}", line.strip())[0] for line in text.splitlines() if re.search(r"\btaken$", line)})


# -------------------------------------------------------------------------------------------------------- what a run leaves


def numbers_of(result: Any) -> Numbers:
    """All numbers of a result: model, clients, own models, rounds, evaluations, privacy."""
    found = {"params": result.params, "carried": result.carried, "rounds done": result.rounds}
    found |= {f"model/{name}": value for name, value in result.model.state_dict().items()}
    if result.personal is not None:
        found["own models"] = result.personal.params(list(result.personal.ids))
    found |= numbers_of_history(result.history) | numbers_of_privacy(result)
    return as_arrays(found) | numbers_of_table(result.clients)


def numbers_of_table(table: Any) -> Numbers:
    """The columns of a table of clients, and figures over clients."""
    found: dict[str, Any] = {f"clients/{name}": getattr(table, name) for name in COLUMNS}
    found |= {f"clients/{name}": value for name, value in table.metrics.items()}
    found |= {f"clients/own {name}": value for name, value in table.personal_metrics.items()}
    for split, columns in table.summaries().items():
        found |= {f"summary/{split}/{name}": list(plain_numbers(summary)) for name, summary in columns.items()}
    return as_arrays(found)


def numbers_of_history(history: Any) -> dict[str, Any]:
    """The reports of all rounds, and the evaluations."""
    rounds, points = history.rounds, history.points
    found: dict[str, Any] = {f"round/{name}": [_number(getattr(r, name)) for r in rounds] for name in REPORTS}
    found |= {f"round/{name}": [len(getattr(r, name)) for r in rounds] for name in COUNTED}
    found["round/arrivals"] = [[took, age] for r in rounds for _, took, age in r.arrivals]
    found["round/skipped"] = [bool(r.skipped) for r in rounds]
    for p in points:
        found |= {f"points/{p.round}/{split}": [v for _, v in sorted(figures.items())] for split, figures in p.splits.items()}
    found["points/rounds"] = [p.round for p in points]
    if history.stopped is not None:
        found["stopped"] = list(plain_numbers(history.stopped))
    return found


def numbers_of_privacy(result: Any) -> dict[str, Any]:
    """ε of the run by observer, and the multipliers of its noise."""
    found: dict[str, Any] = {}
    if result.epsilon is not None:
        found["spent"] = [_number(getattr(result.epsilon, name)) for name in SPENT]
    if result.privacy is not None:
        found |= {f"privacy/{row.observer}": _number(row.epsilon) for row in result.privacy.rows}
        found["privacy/events"] = [[z, times] for z, _, times in result.privacy.events]
        found["privacy/releases"] = result.privacy.releases
    return found


def plain_numbers(value: Any) -> Iterator[float]:
    """The numbers in a dataclass, one after another."""
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        for _, inner in sorted(value.items(), key=lambda item: str(item[0])):
            yield from plain_numbers(inner)
    elif isinstance(value, bool | int | float):
        yield float(value)
    elif value is None:
        yield math.nan


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def as_arrays(found: Mapping[str, Any]) -> Numbers:
    """Tensors and numbers as arrays; what is None is left out."""
    arrays = {}
    for name, value in found.items():
        if value is not None:
            value = value.detach().cpu() if isinstance(value, torch.Tensor) else value
            arrays[name] = value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
            assert arrays[name].dtype != object, (name, value)
    return arrays


def ids_of(result: Any) -> str:
    """Whose rows the table of clients has, in order."""
    return " ".join(map("/".join, zip(result.clients.client, result.clients.split, strict=True)))


def code_of(failure: BaseException) -> str:
    """An error by its type and its code."""
    return f"{type(failure).__name__} {getattr(failure, 'code', '')}".strip()


def is_refusal(failure: BaseException) -> bool:
    """Whether the library raised an error on purpose."""
    import equipoise as eq

    return isinstance(failure, eq.errors.EquipoiseError)


def notices_in(warned: list[Any]) -> list[str]:
    """The notices among warnings, by their codes where they have one; by the kind of warning elsewhere."""
    found = []
    for each in warned:
        code = getattr(each.message, "code", "")
        if code or each.category.__module__.partition(".")[0] == "equipoise":
            found.append(f"{each.category.__name__} {code}".strip())
    return sorted(found)


# -------------------------------------------------------------------------------------------------------------- a federation


class Federation:
    """Node apps in this process, and server apps that train by messages between them."""

    def __init__(self, given: Prepared, table: Mapping[str, Any]) -> None:
        from benchmarks.gate.grid import Grid

        from equipoise.engines.flower import client_app

        self.given, self.table = given, table
        self.options = {key: value for key, value in given.options.items() if key not in ("engine", "evaluate_clients")}
        shared = {"model": given.model} | {key: self.options[key] for key in ("loss", "error", "metrics")}
        names = dict.fromkeys(name for clients in given.data.splits.values() for name in clients.ids)

        def splits(name: str) -> Callable[[Any], Any]:
            splits = given.data.splits.items()
            return lambda _: {"id": name} | {split: part.client(name) for split, part in splits if name in part.ids}

        made = {name: client_app(load_data=splits(name), **shared, **table.get("node", {})) for name in names}
        self.grid = Grid(made, table.get("faults", {}))

    def train(self, **more: Any) -> Any:
        """The result of a server app."""
        from equipoise.engines.flower import server_app

        found: list[Any] = []
        app = server_app(
            self.given.algorithm, model=self.given.model, clients=len(self.grid.apps), on_result=found.append, timeout=60.0,
            pause=0.0, patience=60.0, **self.options, **self.table.get("server_app", {}), **more,
        )  # fmt: skip
        self.grid.run(app)
        return found[0]


def write_stores(folder: Path) -> None:
    """Stores on disk, of plain clients and of a table, and a Parquet file; the tree writes them."""
    import pyarrow.csv
    import pyarrow.parquet

    import equipoise as eq

    held = np.load(folder / "gauss.npz")
    triples = [(str(n), held["x"][held["client"] == n], held["y"][held["client"] == n]) for n in np.unique(held["client"])]
    eq.data.write_store(triples, folder / "clients.store", classes=4)
    table = eq.data.csv(folder / "table.csv", client="site", target="outcome", test=0.25, seed=1)
    eq.data.write_store(table, folder / "table.store")
    pyarrow.parquet.write_table(pyarrow.csv.read_csv(folder / "table.csv"), folder / "table.parquet")


def why_not(needs: str, data: Path) -> str:
    """Why a run cannot be made here: a library or a data set is not there. Empty if it can."""
    from importlib.util import find_spec

    if needs.startswith("data:"):
        return "" if (data / needs[5:]).exists() else f"{needs[5:]} is not in {data}"
    return "" if not needs or find_spec(needs) is not None else f"{needs} is not installed"


def save_to(path: Path, every: int) -> Any:
    """What writes a checkpoint every so many rounds."""
    import equipoise as eq

    return eq.Checkpoints(path, every=every)
