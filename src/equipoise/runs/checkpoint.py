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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equipoise.core.files import write_atomically
from equipoise.errors import EquipoiseError, InvalidParameter, NotWritten
from equipoise.observers import EvaluationPoint, History, Run
from equipoise.types import Observer, RoundReport, ServerState

if TYPE_CHECKING:
    from equipoise.personal.personal_run import PersonalRun
    from equipoise.train import Setting

SECONDS = 10.0  # between checkpoints, unless a number of rounds is given
MOVED_MODULES = {  # where state classes of version 0.1 live now: checkpoints name them by module
    "equipoise.personal.run": "equipoise.personal.personal_run",
    "equipoise.privacy.run": "equipoise.privacy.private_run",
}


class CheckpointError(EquipoiseError):
    """A checkpoint cannot be used: it is damaged, or belongs to another run."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A run between two rounds."""

    state: ServerState
    history: History
    seconds: float
    identity: dict[str, str]  # what must be the same to go on
    choice: dict[str, Any] = field(default_factory=dict)  # what the engine chose by measuring

    def bytes(self) -> bytes:
        """The file's content."""
        from safetensors.torch import save

        tensors: dict[str, Tensor] = {}
        parts = {
            field.name: packed(getattr(self.state, field.name), tensors, field.name)
            for field in dataclasses.fields(ServerState)
        }
        whole = {
            "state": parts,
            "rounds": [asdict(report) for report in self.history.rounds],
            "points": [asdict(point) for point in self.history.points],
            "seconds": self.seconds,
            "identity": self.identity,
            "choice": self.choice,
        }
        saved: bytes = save(tensors, metadata={"checkpoint": json.dumps(whole)})
        return saved


def read_checkpoint(path: Path, device: torch.device | str = "cpu") -> Checkpoint:
    """The checkpoint in a file, its parameters on a device; a file that is none is refused with its path."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            whole = json.loads((file.metadata() or {})["checkpoint"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 — not a dictionary
        parts = {name: unpacked(value, tensors, torch.device(device)) for name, value in whole["state"].items()}
        history = History([RoundReport(**r) for r in whole["rounds"]], points=[EvaluationPoint(**p) for p in whole["points"]])
        return Checkpoint(ServerState(**parts), history, whole["seconds"], whole["identity"], whole.get("choice", {}))
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as failure:
        raise CheckpointError(f"{path} is no checkpoint of a run: {failure}. Delete it to start anew.") from failure


def identity_of(setting: Setting, algorithm: object) -> dict[str, str]:
    """What a run must share with a checkpoint to go on from it; the number of rounds may grow."""
    loss = getattr(setting.task.loss, "__qualname__", type(setting.task.loss).__name__)
    describe = getattr(setting.protection, "describe", None)
    private = {"privacy": describe()} if describe is not None else {}
    return private | {
        "algorithm": re.sub(r" at 0x[0-9a-f]+", "", repr(algorithm)),  # a plain class shows where it lies in memory
        "data": f"{setting.data.name}, {len(setting.data.train)} clients, {setting.data.fingerprint}",
        "model": f"{type(setting.model).__name__} with {setting.task.layout.dimension} parameters",
        "loss": loss,
        "clients_per_round": str(setting.clients_per_round),
        "seed": str(setting.seed),
    }


def refuse_strangers(path: Path, found: dict[str, str], wanted: dict[str, str]) -> None:
    """Refuse a checkpoint of another run, naming what differs."""
    for name, value in wanted.items():
        if found.get(name) != value:
            there, here = _apart(str(found.get(name)), value)
            raise CheckpointError(
                f"{path} is the checkpoint of another run: its {name} is {there}, here it is {here}. "
                "Give the same again, or start a new run with another file."
            )


def _apart(first: str, second: str) -> tuple[str, str]:
    """Two long texts from where they begin to differ to where they are the same again, with some words around."""
    if max(len(first), len(second)) < 120:
        return first, second
    start = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    start = max(first.rfind("(", 0, start), first.rfind(", ", 0, start) + 1, 0)
    return tuple(f"…{text[start : start + 60].strip()}…" for text in (first, second))  # type: ignore[return-value]


class Checkpoints(Observer):
    """Writes a checkpoint every so many rounds, or about every ten seconds, and after the last round."""

    def __init__(self, path: str | Path, *, every: int | None = None) -> None:
        self.path, self.every = Path(path), every
        self._history, self._identity, self._last_round = History(), dict[str, str](), 0
        self._personal: PersonalRun | None = None
        self._engine: object = None
        self._began = self._saved = time.monotonic()

    def begin(self, setting: Setting, identity: dict[str, str], history: History, seconds: float) -> None:
        """What `train` tells before the first round: what the run is, and what it did before."""
        self._identity, self._history, self._engine, personal = identity, history, setting.engine, setting.personal
        self._personal = personal if personal is not None and personal.keeps_rows else None
        self._began, self._saved = time.monotonic() - seconds, time.monotonic()

    def on_start(self, run: Run) -> None:
        self._last_round = run.rounds

    def on_state(self, state: ServerState) -> None:
        now = time.monotonic()
        due = state.round % self.every == 0 if self.every else now - self._saved >= SECONDS
        if due or state.round in (0, self._last_round):  # round 0: a full disk or unwritable folder fails before any work
            if self._personal is not None:
                self._personal.rows.flush()
            choice = getattr(self._engine, "choice", None)
            found = Checkpoint(
                state, self._history, now - self._began, self._identity, {} if choice is None else asdict(choice)
            )
            write_atomically(self.path, found.bytes())
            if self._personal is not None:
                self._personal.rows.on_saved(state.personal.places)
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
        made = object.__new__(kind_of_state)  # as it was, also fields that its constructor does not take
        for name, inner in fields.items():
            object.__setattr__(made, name, inner)
        return made
    raise ValueError(f"unknown entry {kind!r}")


def _known_class(path: str) -> Any:
    """A dataclass of a module that is already imported: a file must not decide what is imported."""
    module, _, name = path.partition(":")
    found: Any = sys.modules.get(MOVED_MODULES.get(module, module))
    for step in name.split("."):
        found = getattr(found, step, None)
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise InvalidParameter(
            "checkpoint", "must hold states of known dataclasses", path, "Import the module of your own parts first."
        )
    return found
