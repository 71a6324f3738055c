"""Small runs whose checkpoints are stored, so that later versions can be seen to go on from files of earlier ones.

`RUNS` has each run as the arguments of `train`, by public names alone. The checkpoints in tests/stored_checkpoints were written
after `DONE` of `ROUNDS` rounds, by the version before state classes moved to other modules. index.json says of each which
classes its state is made of, and with which parameters that version ended when it went on.

Data are made of numbers that every processor holds exactly, and models are float64 unless a run needs float32: so results agree
on all machines to many digits.

To add a run: write it here, and call this file with a version that knows its state, `PYTHONPATH=src python tests/stored_runs.py
NAME`. What is stored already stays as it is; `--all` writes everything anew.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import equipoise as eq

FOLDER = Path(__file__).parent / "stored_checkpoints"
INDEX = FOLDER / "index.json"
DONE, ROUNDS = 3, 6


@dataclass(frozen=True)
class StoredRun:
    """A run: what is given to `train`, and what its engine was told when the checkpoint was written."""

    words: str
    algorithm: eq.Algorithm
    model: torch.nn.Module
    data: eq.FederatedData
    options: dict[str, Any] = field(default_factory=dict)
    chosen: dict[str, Any] | None = None  # as if measured: it is kept in the checkpoint

    def train(self, **more: Any) -> eq.Result:
        """The run, or what is left of it."""
        usual = {"rounds": ROUNDS, "clients_per_round": 5, "seed": 7, "evaluate_every": 2, "progress": False}
        return eq.train(self.model, self.data, self.algorithm, **(usual | self.options | more))


def clients(classes: int = 3, dtype: torch.dtype = torch.float64) -> eq.FederatedData:
    """Eight ragged clients with three features, all of them whole numbers over 32."""
    triples, number = [], 0
    for k, size in enumerate((3, 8, 5, 12, 1, 9, 7, 10)):
        rows = torch.arange(number, number + size)
        number += size
        y = (rows * 5 + rows // 3 + k) % classes
        x = torch.stack([(rows * (17 + 12 * f) + 5 * k) % 61 - 30 + 16 * (y == f) for f in range(3)], 1)
        triples.append((f"client-{k}", x.to(dtype) / 32, y))
    return eq.FederatedData(eq.ClientSet.pack(triples), name="stored", classes=classes)


def softmax(dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    return eq.models.Softmax(3, 3).to(dtype)


def of(words: str, **parts: Any) -> Callable[[], StoredRun]:
    """A run of softmax regression with these parts."""
    solver = {"solver": eq.solvers.SGD(lr=0.5, batch_size=4)}
    return lambda: StoredRun(words, eq.Algorithm(**(solver | parts)), softmax(), clients())


def _logistic() -> StoredRun:
    algorithm = eq.Algorithm(risk=eq.risk.Superquantile(0.5, rule="threshold"), solver=eq.solvers.SGD(lr=0.3, batch_size=4))
    return StoredRun("a model with a loss of its own", algorithm, eq.models.Logistic(3).double(), clients(2))


def _mocha() -> StoredRun:
    algorithm = eq.Algorithm(
        solver=eq.solvers.SGD(lr=0.05, batch_size=4), sampler=eq.sampling.Full(), personal=eq.personal.Mocha(0.1, floor=0.2)
    )
    words = "own models, and how they relate as shared state"
    return StoredRun(words, algorithm, eq.models.LinearSVM(3).double(), clients(2), {"clients_per_round": None})


def _network() -> StoredRun:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).double()
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(((torch.arange(value.numel()) * 7) % 13 - 6).view(value.shape) / 16)
    algorithm = eq.Algorithm(solver=eq.solvers.SGD(lr=0.3, momentum=0.5))
    return StoredRun("a network, and a momentum that is not kept between rounds", algorithm, model, clients())


def _chosen(words: str, engine: eq.engines.Simulator, **chosen: Any) -> StoredRun:
    algorithm = eq.Algorithm(risk=eq.risk.Superquantile(0.6), solver=eq.solvers.SGD(lr=0.3, batch_size=4))
    return StoredRun(words, algorithm, softmax(torch.float32), clients(dtype=torch.float32), {"engine": engine}, chosen or None)


def _poisoned() -> StoredRun:
    data = eq.attacks.apply(clients(), eq.attacks.ModelReplacement(0.25, update="negated", factor=2.0))
    algorithm = eq.Algorithm(aggregator=eq.aggregators.Median(), solver=eq.solvers.SGD(lr=0.5, batch_size=4))
    return StoredRun("malicious clients and a robust aggregator", algorithm, softmax(), data)


_GENTLE = eq.solvers.SGD(lr=0.05, batch_size=4)  # losses fall so little that an old quantile still divides clients
_SLOW = eq.risk.Superquantile(0.7, eta_every=4)
_FULL = eq.sampling.Full()
RUNS: dict[str, Callable[[], StoredRun]] = {
    "plain": of("no state but the parameters"),
    "slow-quantile": of("the quantile that clients filter by, taken every fourth round", risk=_SLOW, solver=_GENTLE),
    "worst-case": of("a mixture over all clients, and a mean of iterates", risk=eq.risk.WorstCase(0.3), sampler=_FULL),
    "mixture": of("states of several risks", risk=eq.risk.Mixture((0.5, eq.risk.Mean()), (0.5, _SLOW)), solver=_GENTLE),
    "tracked-tilt": of(
        "a tracked risk, and a velocity", risk=eq.risk.Tilted(1.0, tracked=True), server=eq.server_opt.Momentum(0.5)
    ),
    "adaptive-prox": of(
        "μ and what it goes by",
        solver=eq.solvers.AdaptiveProx(eq.solvers.SGD(lr=0.3, batch_size=4, prox=1.0), step=0.2, patience=1),
    ),
    "adam": of("two moments, and a mean of iterates", server=eq.server_opt.Adam(0.05), averaging=eq.averaging.Geometric(0.2)),
    "yogi": of("two moments, and a mean of iterates", server=eq.server_opt.Yogi(0.05), averaging=eq.averaging.Uniform()),
    "ditto": of("own models in rows of a file", personal=eq.personal.Ditto(0.5)),
    "l2sgd": of("own models in rows of a file, and their mean", personal=eq.personal.L2SGD(0.5)),
    "apfl": of("own models and how they are mixed, in rows of a file", personal=eq.personal.APFL(0.4)),
    "finetuning": of("own models made after training: a state without rows", personal=eq.personal.Finetuning(epochs=2)),
    "logistic": _logistic,
    "mocha": _mocha,
    "network": _network,
    "poisoned": _poisoned,
    "chunks": lambda: _chosen("chunks and workers that were asked for", eq.engines.Simulator(chunk_size=2, workers=2)),
    "measured": lambda: _chosen(
        "chunks and workers that were measured", eq.engines.Simulator(), chunk_size=2, workers=1, clients=5, compiled=False
    ),
    "compiled": lambda: _chosen(
        "compiled code with two threads, as measured", eq.engines.Simulator(), chunk_size=5, workers=2, clients=5, compiled=True
    ),
    "loop": lambda: StoredRun(
        "the loop engine, which chooses nothing",
        eq.Algorithm(risk=_SLOW, solver=_GENTLE),
        softmax(),
        clients(),
        {"engine": "loop"},
    ),
    "group-dro": of("a mixture over groups", risk=eq.risk.GroupDRO(0.3, lambda client: client[-1])),
}

# The classes of states in the stored files, under the names that they had when these were written.
STATES = {
    "equipoise.personal.run:PersonalState",
    "equipoise.risk.superquantile:Released",
    "equipoise.risk.worst_case:ClientMixture",
    "equipoise.risk.group_dro:GroupMixture",
    "equipoise.solvers.prepared:ProxState",
}


def written(file: Path) -> dict[str, Any]:
    """What a checkpoint says beside its tensors."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        found: dict[str, Any] = json.loads(opened.metadata()["checkpoint"])
    return found


def classes_in(entry: Any) -> set[str]:
    """All "class" entries in a part of it."""
    if isinstance(entry, dict):
        own = {entry["class"]} if isinstance(entry.get("class"), str) else set()
        return own.union(*map(classes_in, entry.values()))
    return set().union(*map(classes_in, entry)) if isinstance(entry, list) else set()


# ------------------------------------------------------------------------------------------------------------ writing the files


class _Chosen:
    """An engine that goes on with a choice as if it had measured it."""

    def __init__(self, engine: Any, chosen: dict[str, Any]) -> None:
        self.engine, self.chosen = engine, chosen

    def start(self, task: Any, data: eq.FederatedData) -> Any:
        running = self.engine.start(task, data)
        running.use(type(running.choice)(**self.chosen))
        return running


class _Copies(eq.observers.Observer):
    """Copies the checkpoint of round `DONE` when the next round has ended, as if the run had been killed there."""

    def __init__(self, file: Path, name: str) -> None:
        self.file, self.name, self.rows = file, name, False

    def on_state(self, state: Any) -> None:
        if state.round == DONE + 1:
            shutil.copy(self.file, FOLDER / f"{self.name}.safetensors")
            rows = self.file.with_suffix(".clients.npy")
            self.rows = rows.exists()
            if self.rows:
                shutil.copy(rows, FOLDER / f"{self.name}.clients.npy")


def write(name: str) -> dict[str, Any]:
    """Train a run to its end, and keep its checkpoint of round `DONE`."""
    try:
        from equipoise.checkpoint import Checkpoints
    except ImportError:
        from equipoise.runs.checkpoint import Checkpoints
    run = RUNS[name]()
    engine = run.options.get("engine", "simulator")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "state.safetensors"
        copies = _Copies(file, name)
        result = run.train(
            checkpoint=Checkpoints(file, every=DONE), observers=[copies],
            engine=_Chosen(engine, run.chosen) if run.chosen else engine,
        )  # fmt: skip
        own = result.personal.params(result.personal.ids).tolist() if result.personal is not None else None
    found = written(FOLDER / f"{name}.safetensors")
    return {
        "file": f"{name}.safetensors", "rows": f"{name}.clients.npy" if copies.rows else None, "words": run.words,
        "rounds_done": DONE, "rounds": ROUNDS, "classes": sorted(classes_in(found["state"])), "choice": found["choice"],
        "params": result.params.tolist(), "own_models": own,
    }  # fmt: skip


def main() -> None:
    names = list(RUNS) if sys.argv[1:] == ["--all"] else sys.argv[1:]
    if not names or any(name not in RUNS for name in names):
        raise SystemExit(f"name some of {', '.join(RUNS)}, or say --all")
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    print("written by", eq.__file__)
    index = json.loads(INDEX.read_text()) if INDEX.exists() and sys.argv[1:] != ["--all"] else {}
    index |= {name: write(name) for name in names}
    entries = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry, ensure_ascii=False)}" for name, entry in index.items())
    INDEX.write_text(f"{{\n{entries}\n}}\n")


if __name__ == "__main__":
    main()
