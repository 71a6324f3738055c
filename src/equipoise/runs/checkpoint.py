"""Checkpoints: all that a run needs to go on as if it had never stopped, in one safetensors file, written atomically.

Cohorts and batches are pure functions of the seed and the round, so the state between rounds is small: parameters and the
states of the parts. These may be made of tensors, numbers, text, None, tuples, lists, dictionaries and dataclasses. Nothing
is pickled, and reading a file imports nothing.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equipoise.core.files import write_atomically
from equipoise.errors import Diverged, EquipoiseError, NotWritten, require
from equipoise.observers import EvaluationPoint, History
from equipoise.runs.stopping import StopState
from equipoise.types import Observer, RoundReport, ServerState

if TYPE_CHECKING:
    from equipoise.runs.setup import Setting
    from equipoise.train import RunUnderWay

SECONDS = 10.0  # between checkpoints, unless a number of rounds is given
MOVED_MODULES = {  # where state classes of version 0.1 live now: checkpoints name them by module
    "equipoise.personal.run": "equipoise.personal.personal_run",
    "equipoise.privacy.run": "equipoise.privacy.noise_plan",
}


class CheckpointError(EquipoiseError):
    """A checkpoint cannot be used: it is damaged, or belongs to another run."""


@dataclass(frozen=True, eq=False)
class SavedRun:
    """A run between two rounds, and the error that stopped it, if one did."""

    state: ServerState
    history: History
    identity: dict[str, str]  # what must be the same to go on
    failure: Diverged | None = None
    stop: StopState | None = None  # of early stopping


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Runs that share their rounds, between two rounds. One run is the usual case, and its file has no list of runs."""

    runs: Sequence[SavedRun]
    seconds: float
    choice: dict[str, Any] = field(default_factory=dict)  # what the engine chose by measuring

    def bytes(self) -> bytes:
        """The file's content."""
        from safetensors.torch import save

        tensors: dict[str, Tensor] = {}
        runs = [_packed_run(run, tensors, f"{number}." if len(self.runs) > 1 else "") for number, run in enumerate(self.runs)]
        whole = runs[0] if len(runs) == 1 else {"runs": runs}
        whole |= {"seconds": self.seconds, "choice": self.choice}
        saved: bytes = save(tensors, metadata={"checkpoint": json.dumps(whole)})
        return saved


def _packed_run(run: SavedRun, tensors: dict[str, Tensor], prefix: str) -> dict[str, Any]:
    """A run as JSON; tensors go to `tensors` under names that begin with `prefix`."""
    state = {name: packed(value, tensors, prefix + name) for name, value in vars(run.state).items()}
    failure = run.failure
    stop = None if run.stop is None else packed(run.stop, tensors, f"{prefix}stop")
    return {
        "state": state,
        "rounds": [asdict(report) for report in run.history.rounds],
        "points": [asdict(point) for point in run.history.points],
        "identity": run.identity,
        **({"failure": [failure.round, failure.clients, failure.what]} if failure is not None else {}),
        **({"stop": stop} if stop is not None else {}),
    }


def read_checkpoint(path: Path, device: torch.device | str = "cpu") -> Checkpoint:
    """The checkpoint in a file, its parameters on a device; a file that is none is refused with its path."""
    from safetensors import SafetensorError, safe_open

    def run(whole: dict[str, Any]) -> SavedRun:
        parts = {name: unpacked(value, tensors, torch.device(device)) for name, value in whole["state"].items()}
        history = History([RoundReport(**r) for r in whole["rounds"]], points=[EvaluationPoint(**p) for p in whole["points"]])
        failure = Diverged(*whole["failure"]) if "failure" in whole else None
        stop = unpacked(whole["stop"], tensors, torch.device(device)) if "stop" in whole else None
        return SavedRun(ServerState(**parts), history, whole["identity"], failure, stop)

    try:
        with safe_open(path, framework="pt") as file:
            whole = json.loads((file.metadata() or {})["checkpoint"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 — not a dictionary
        return Checkpoint([run(each) for each in whole.get("runs", [whole])], whole["seconds"], whole.get("choice", {}))
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as failure:
        raise CheckpointError(f"{path} is no checkpoint of a run: {failure}. Delete it to start anew.") from failure


def identity_of(setting: Setting) -> dict[str, str]:
    """What a run must share with a checkpoint to go on from it; the number of rounds may grow."""
    loss = getattr(setting.task.loss, "__qualname__", type(setting.task.loss).__name__)
    noise = setting.protection.describe()
    stop = {"stop": repr(setting.stop)} if setting.stop is not None else {}
    return (
        ({"privacy": noise} if noise is not None else {})
        | stop
        | {
            "algorithm": re.sub(r" at 0x[0-9a-f]+", "", repr(setting.algorithm)),  # a plain class shows where it lies in memory
            "data": f"{setting.data.name}, {len(setting.data.train)} clients, {setting.data.fingerprint}",
            "model": f"{type(setting.model).__name__} with {setting.task.layout.dimension} parameters",
            "loss": loss,
            "clients_per_round": str(setting.clients_per_round),
            "seed": str(setting.seed),
        }
    )


def refuse_other_run(path: Path, saved: dict[str, str], given: dict[str, str]) -> None:
    """Refuse a checkpoint of another run, naming what differs."""
    for name in dict.fromkeys((*given, *(name for name in saved if name == "stop"))):
        if saved.get(name) != given.get(name):
            there, here = _differing_parts(str(saved.get(name)), str(given.get(name)))
            raise CheckpointError(
                f"{path} is the checkpoint of another run: its {name} is {there}, here it is {here}. "
                "Give the same again, or start a new run with another file."
            )


def _differing_parts(first: str, second: str) -> tuple[str, str]:
    """Two long texts from where they begin to differ to where they are the same again, with some words around."""
    if max(len(first), len(second)) < 120:
        return first, second
    start = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    start = max(first.rfind("(", 0, start), first.rfind(", ", 0, start) + 1, 0)
    return tuple(f"…{text[start : start + 60].strip()}…" for text in (first, second))  # type: ignore[return-value]


class Checkpoints(Observer):
    """Writes a checkpoint at every multiple of `every` rounds, or about every ten seconds, and after the last round."""

    def __init__(self, path: str | Path, *, every: int | None = None) -> None:
        self.path, self.every = Path(path), every
        self._settings: Sequence[Setting] = ()
        self._identities: Sequence[dict[str, str]] = ()
        self._began = self._saved = time.monotonic()

    @property
    def rows(self) -> Path:
        """The file of what clients keep between rounds."""
        return self.path.with_suffix(".clients.npy")

    def open(self, settings: Sequence[Setting]) -> Checkpoint | None:
        """Begin to save these runs; the checkpoint that they go on from, or None if there is no file yet."""
        self._settings, self._identities = settings, [identity_of(setting) for setting in settings]
        self._began = self._saved = time.monotonic()
        if not self.path.exists():
            return None
        saved = read_checkpoint(self.path, settings[0].engine_traits.device)
        count = "number of runs"
        refuse_other_run(self.path, {count: str(len(saved.runs))}, {count: str(len(settings))})
        for run, identity, setting in zip(saved.runs, self._identities, settings, strict=True):
            refuse_other_run(self.path, run.identity, identity)
            if run.state.round > setting.rounds:
                raise CheckpointError(f"{self.path} is already at round {run.state.round}, beyond rounds = {setting.rounds}.")
        self._began -= saved.seconds
        return saved

    def on_states(self, runs: Sequence[RunUnderWay]) -> None:
        """The runs between two rounds: write them if it is time."""
        now, reached = time.monotonic(), max(run.state.round for run in runs)
        due = reached % self.every == 0 if self.every else now - self._saved >= SECONDS
        # Round 0: a full disk or unwritable folder fails before any work.
        ended = all(run.failure is not None or run.over for run in runs)
        if due or ended or reached in (0, self._settings[0].protection.rounds_allowed):
            keeping = [(run.setting.personal, run.state) for run in runs if run.setting.personal is not None]
            for personal, _ in keeping:
                personal.flush()
            measured = self._settings[0].engine_traits.measured
            named = zip(runs, self._identities, strict=True)
            saved = [
                SavedRun(run.state, run.history, identity, run.failure, run.stop if run.setting.stop is not None else None)
                for run, identity in named
            ]
            choice = {} if measured is None else measured.read()
            write_atomically(self.path, Checkpoint(saved, now - self._began, choice).bytes())
            for personal, state in keeping:
                personal.on_saved(state.personal)
            self._saved = time.monotonic()


# ---------------------------------------------------------------------------------------- states as JSON and named tensors


def packed(value: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """A value as JSON; tensors go to `tensors` under names that begin with `name`."""
    if value is None or type(value) in (bool, str) or (type(value) is int and abs(value) < 2**53):
        return value
    if type(value) is float:
        return {"float": value.hex()}  # exact, also when it is not finite
    if type(value) is int:
        return {"int": str(value)}
    if isinstance(value, Tensor):
        key = f"{name}.{len(tensors)}"
        tensors[key] = value.detach().cpu().clone().contiguous()
        return {"tensor": key, "on_device": value.device.type != "cpu"}
    if type(value) in (tuple, list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [packed(inner, tensors, f"{name}.{i}") for i, inner in enumerate(value)]}
    if type(value) is dict:
        return {"dict": [[packed(k, tensors, name), packed(v, tensors, f"{name}.{k}")] for k, v in value.items()]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: packed(getattr(value, f.name), tensors, f"{name}.{f.name}") for f in dataclasses.fields(value)}
        return {"class": f"{type(value).__module__}:{type(value).__qualname__}", "fields": fields}
    raise NotWritten(
        f"The state of {name} holds a {type(value).__name__}, which a checkpoint cannot keep. Make it of tensors, numbers, "
        "text, tuples, lists, dictionaries or dataclasses."
    )


def unpacked(value: Any, tensors: dict[str, Tensor], device: torch.device) -> Any:
    """The value that `packed` made JSON of."""
    if not isinstance(value, dict):
        return value
    ((kind, content), *rest) = value.items()
    if kind == "float":
        return float.fromhex(content)
    if kind == "int":
        return int(content)
    if kind == "tensor":
        return tensors[content].to(device) if dict(rest)["on_device"] else tensors[content]
    if kind in ("tuple", "list"):
        inner = [unpacked(each, tensors, device) for each in content]
        return tuple(inner) if kind == "tuple" else inner
    if kind == "dict":
        return {unpacked(k, tensors, device): unpacked(v, tensors, device) for k, v in content}
    if kind == "class":
        fields = {name: unpacked(each, tensors, device) for name, each in dict(rest)["fields"].items()}
        kind_of_state = _known_class(content)
        state = object.__new__(kind_of_state)  # as it was, also fields that its constructor does not take
        for name, inner in fields.items():
            object.__setattr__(state, name, inner)
        return state
    raise ValueError(f"unknown entry {kind!r}")


def _known_class(path: str) -> Any:
    """A dataclass of a module that is already imported: a file must not decide what is imported."""
    module, _, name = path.partition(":")
    state_class: Any = sys.modules.get(MOVED_MODULES.get(module, module))
    for step in name.split("."):
        state_class = getattr(state_class, step, None)
    known, fix = (
        isinstance(state_class, type) and dataclasses.is_dataclass(state_class),
        "Import the module of your own parts first.",
    )
    require(known, "checkpoint", "must hold states of known dataclasses", path, fix)
    return state_class
