"""Checkpoints: all that a run needs to go on as if it had never stopped, in one safetensors file, written atomically.

Cohorts and batches are pure functions of the seed and the round, and so are cohorts and noise of a private run's secret. The
state between rounds is therefore small: parameters and the states of the parts. These may be made of tensors, numbers, text,
None, tuples, lists, dictionaries and dataclasses. Nothing is pickled, and reading a file imports nothing.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equipoise.core.files import locked, make_folder, remove_unfinished, write_atomically, writing
from equipoise.core.plain_text import parse_json
from equipoise.core.tensor_files import read_tensor_file, tensor_file_bytes
from equipoise.errors import CheckpointError, Diverged, FileGuard, NotWritten, is_integer, notify, require
from equipoise.observers import EvaluationPoint, History
from equipoise.runs.history_columns import packed_reports, unpacked_reports
from equipoise.runs.identity import START, digest_of, identity_of, refuse_other_run
from equipoise.runs.stopping import StopState
from equipoise.runs.tried_calls import refuse_unkeepable
from equipoise.types import Observer, PersonalWork, ServerState, SolverMemory

if TYPE_CHECKING:
    from equipoise.runs.setup import Setting
    from equipoise.train import RunUnderWay

SECONDS = 10.0  # between checkpoints, unless a number of rounds is given
SHARE = 0.05  # of a run's time that may go into writing checkpoints, unless a number of rounds is given
KIND = "checkpoint"
NO_CHECKPOINT = "is no checkpoint of a run", "Delete it to start anew."


@dataclass(frozen=True, eq=False)
class SavedRun:
    """A run between two rounds, and the error that stopped it, if one did."""

    state: ServerState
    history: History
    identity: dict[str, str]  # what must be the same to go on
    failure: Diverged | None = None
    start: Tensor | None = None  # w^0, where clients begin with it in later rounds
    stop: StopState | None = None  # of early stopping
    secret: str = field(default="", repr=False)  # what noise and cohorts of a private run follow from; "" once it has ended

    @property
    def ended(self) -> bool:
        """Whether the run ends here, before its last round."""
        return self.failure is not None or (self.stop is not None and self.stop.over)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Runs that share their rounds, between two rounds."""

    runs: Sequence[SavedRun]
    seconds: float
    choice: dict[str, Any] = field(default_factory=dict)  # what the engine chose by measuring

    def bytes(self) -> bytes:
        """The file's content: tensors by name, all else as JSON in a tensor of bytes, and a checksum."""
        tensors: dict[str, Tensor] = {}
        runs = [_packed_run(run, tensors, f"{number}.") for number, run in enumerate(self.runs)]
        whole = {"runs": runs, "seconds": self.seconds, "choice": self.choice}
        return tensor_file_bytes(tensors, text=json.dumps(whole), kind=KIND)

    def write(self, path: Path) -> None:
        """Write the file; its owner alone may read it, as it may hold a secret."""
        write_atomically(path, self.bytes(), private=True)


def _packed_run(run: SavedRun, tensors: dict[str, Tensor], prefix: str) -> dict[str, Any]:
    """A run as JSON; tensors go to `tensors` under names that begin with `prefix`."""
    state = {name: packed(value, tensors, prefix + name) for name, value in vars(run.state).items()}
    failure, start, stop = run.failure, run.start, run.stop
    return {
        "state": state,
        "reports": packed_reports(run.history.rounds, tensors, f"{prefix}reports"),
        "points": [asdict(point) for point in run.history.points],
        "identity": run.identity,
        "failure": None if failure is None else [failure.round, failure.clients, failure.what],
        "start": None if start is None else packed(start, tensors, f"{prefix}start"),
        "stop": None if stop is None else packed(stop, tensors, f"{prefix}stop"),
        "secret": run.secret,
    }


def read_checkpoint(path: Path, device: torch.device | str = "cpu") -> Checkpoint:
    """The checkpoint in a file, its parameters on a device; a file that is none, or is damaged, is refused with its path."""
    place = torch.device(device)

    def run(whole: dict[str, Any]) -> SavedRun:
        parts = {name: unpacked(value, tensors, place) for name, value in whole["state"].items()}
        reports, points = unpacked_reports(whole["reports"], tensors), [EvaluationPoint(**point) for point in whole["points"]]
        history = History(reports, points=points)
        failure = Diverged(*whole["failure"]) if whole["failure"] is not None else None
        start, stop = (unpacked(whole[name], tensors, place) for name in ("start", "stop"))
        if not (isinstance(start, Tensor | None) and isinstance(stop, StopState | None)):
            raise ValueError("its start or its state of early stopping is damaged")
        identity = {str(name): str(value) for name, value in whole["identity"].items()}
        return SavedRun(ServerState(**parts), history, identity, failure, start, stop, str(whole["secret"]))

    with FileGuard(path, CheckpointError, *NO_CHECKPOINT):
        whole, tensors = _contents(path)
        return Checkpoint([run(each) for each in whole["runs"]], float(whole["seconds"]), dict(whole["choice"]))


def read_place(path: Path) -> tuple[int, dict[str, str]]:
    """The round that the first run in a checkpoint has reached, and its identity; classes of its state need not be known."""
    with FileGuard(path, CheckpointError, *NO_CHECKPOINT):
        first = _contents(path)[0]["runs"][0]
        return int(first["state"]["round"]), dict(first["identity"])


def _contents(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The JSON in a checkpoint, and its tensors by name."""
    file = read_tensor_file(path)
    if file.about.get("kind") != KIND:
        raise ValueError(f"it is a {file.about.get('kind', 'file of another program')}")
    return parse_json(file.text or ""), file.tensors


class Checkpoints(Observer):
    """Writes a checkpoint at every multiple of `every` rounds, or about every ten seconds, and after the last round.

    After Ctrl-C or SIGTERM it writes one at the end of the round.

    >>> import tempfile
    >>> import equipoise as eq
    >>> path = Path(tempfile.mkdtemp()) / "run.ckpt"
    >>> data = eq.data.digits(clients=12)
    >>> for rounds in (2, 4):  # the second run begins with round 3
    ...     result = eq.train(eq.models.Softmax(64, 10), data, rounds=rounds, clients_per_round=3, checkpoint=Checkpoints(path))
    >>> len(result.history.rounds)
    4
    """

    def __init__(self, path: str | Path, *, every: int | None = None) -> None:
        self.path, self.every = Path(path), every
        self._settings: Sequence[Setting] = ()
        self._identities: Sequence[dict[str, str]] = ()
        self._began = self._saved = time.monotonic()
        self._cost = 0.0  # seconds that the last one took
        self.saved_round: int | None = None  # of the checkpoint in the file, once it was read or written
        self.stop_asked: int | None = None  # the signal that asks the run to stop after the round that it is in

    @property
    def rows(self) -> Path:
        """The file of what clients keep between rounds for models of their own."""
        return self.path.with_suffix(".clients.npy")

    @property
    def solver_rows(self) -> Path:
        """The file of what clients keep between rounds for their solver."""
        return self.path.with_suffix(".solver.npy")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes from going on with the same runs meanwhile: they would write over each other's rows."""
        lock = self.path.with_name(f".{self.path.name}.lock")
        with writing(self.path):
            make_folder(lock.parent)
            with lock.open("ab"):
                pass
        with locked(lock, wait=False, work=self.path):
            try:
                remove_unfinished(lock.parent, glob.escape(self.path.name))
                yield
            finally:
                lock.unlink(missing_ok=True)

    def open(self, settings: Sequence[Setting]) -> Checkpoint | None:
        """Begin to save these runs; the checkpoint that they go on from, or None if there is no file yet."""
        self._settings, self._identities = settings, [identity_of(setting) for setting in settings]
        for setting, identity in zip(settings, self._identities, strict=True):
            if setting.noise is not None:
                setting.noise.bound_to = digest_of(identity, (START,))
        self._began = self._saved = time.monotonic()
        if not self.path.exists():
            return None
        saved = read_checkpoint(self.path, settings[0].engine_traits.device)
        count = "number of runs"
        notes: dict[str, None] = {}
        refuse_other_run(self.path, {count: str(len(saved.runs))}, {count: str(len(settings))})
        with FileGuard(self.path, CheckpointError, *NO_CHECKPOINT):
            for run, identity, setting in zip(saved.runs, self._identities, settings, strict=True):
                notes |= dict.fromkeys(refuse_other_run(self.path, run.identity, identity))
                params, carried = setting.task.split(setting.first_model)
                state, first = run.state, ServerState(0, params, carried=carried if setting.task.carried.names else None)
                if state.round > setting.rounds:
                    raise CheckpointError(f"{self.path} is already at round {state.round}, beyond rounds = {setting.rounds}.")
                begun = {"server": setting.algorithm.server.begin(params), "averaging": setting.averaged.begin(first)}
                ours = [name for name in begun if type(vars(setting.algorithm)[name]).__module__.startswith("equipoise.")]
                fits = _resembles(first.model, state.model)  # states of parts of the user's own may change their form
                fits = fits and all(_resembles(begun[name], vars(state)[name]) for name in ours)
                if not (fits and is_integer(state.round) and state.round >= 0):
                    raise ValueError(f"its states after {state.round} rounds are not those of this run")
        reached = self.saved_round = max(run.state.round for run in saved.runs)
        about = f"Going on from round {reached} of {settings[0].rounds}, as {self.path} has it."
        if all(run.state.round == setting.rounds for run, setting in zip(saved.runs, settings, strict=True)):
            about = f"{self.path} holds round {reached} of {reached}: this run is finished, and no round is trained."
        notify(" ".join([about, *notes]))
        self._began -= saved.seconds
        return saved

    def on_states(self, runs: Sequence[RunUnderWay]) -> None:
        """The runs between two rounds: write them if it is time."""
        now, reached = time.monotonic(), max(run.state.round for run in runs)
        due = reached % self.every == 0 if self.every else now - self._saved >= max(SECONDS, self._cost / SHARE)
        # Round 0: a full disk or unwritable folder fails before any work.
        ended = all(run.failure is not None or run.over for run in runs)
        if due or ended or self.stop_asked is not None or reached in (0, self._settings[0].protection.rounds_allowed):
            keeping: list[tuple[PersonalWork | SolverMemory, Any]] = [
                *((run.setting.personal, run.state.personal) for run in runs if run.setting.personal is not None),
                *((run.setting.kept, run.state.kept) for run in runs if run.setting.kept is not None),
            ]
            for run in runs:
                for name in ("risk", "solver", "aggregator", "server", "averaging"):
                    refuse_unkeepable(name, vars(run.setting.algorithm)[name], vars(run.state)[name], run.setting.name)
            for rows, _ in keeping:
                rows.flush()
            measured = self._settings[0].engine_traits.measured
            named = zip(runs, self._identities, strict=True)
            saved = [
                SavedRun(
                    run.state, run.history, identity, run.failure, run.start, run.stop if run.setting.stop else None,
                    run.setting.secret.hex(),
                )
                for run, identity in named
            ]  # fmt: skip
            choice = {} if measured is None else measured.read()
            Checkpoint(saved, now - self._began, choice).write(self.path)
            for rows, state in keeping:
                rows.on_saved(state)
            self._saved = time.monotonic()
            self._cost = self._saved - now
            self.saved_round = reached

    def on_failure(self, failure: BaseException) -> None:
        """The run ended with an error: a full disk says how to go on."""
        if isinstance(failure, NotWritten) and self.path.exists():
            failure.add_note(f"What was saved is in {self.path}; once there is room, the same call goes on from there.")


def _resembles(first: Any, saved: Any) -> bool:
    """Whether a state has the form of that before the first round: tensors of the same shapes and types."""
    if isinstance(first, Tensor):
        return isinstance(saved, Tensor) and (saved.shape, saved.dtype) == (first.shape, first.dtype)
    if isinstance(first, tuple):
        return isinstance(saved, tuple) and len(saved) == len(first) and all(map(_resembles, first, saved))
    if isinstance(first, dict):
        return isinstance(saved, dict) and saved.keys() == first.keys() and all(_resembles(first[k], saved[k]) for k in first)
    if isinstance(first, int):  # a count, which only grows
        return is_integer(saved) and saved >= first
    if isinstance(first, float):
        return isinstance(saved, int | float)
    return first is None or type(saved) is type(first)


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
    part = name.lstrip("0123456789.")  # without the number of the run
    raise NotWritten(
        f"The state of {part} holds a {type(value).__name__}, which a checkpoint cannot keep. Make it of tensors, numbers, "
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
    state_class: Any = sys.modules.get(module)
    for step in name.split("."):
        state_class = getattr(state_class, step, None)
    known, fix = (
        isinstance(state_class, type) and dataclasses.is_dataclass(state_class),
        "Import the module of your own parts first.",
    )
    require(known, "checkpoint", "must hold states of known dataclasses", path, fix)
    return state_class


def numbered(saving: Checkpoints | None, number: int) -> Checkpoints | None:
    """The checkpoint of one of several runs, or groups: the first has the given file, later ones a number in its name.

    >>> numbered(Checkpoints("many.ckpt"), 2).path.name
    'many-2.ckpt'
    """
    if saving is None or number == 1:
        return saving
    path = saving.path
    return Checkpoints(path.with_name(f"{path.stem}-{number}{path.suffix}"), every=saving.every)


def checkpoint_of(saving: Checkpoints, method: str, seed: int) -> Checkpoints:
    """The checkpoint of a run of a comparison: beside the given file, named by method and seed.

    A name with characters that files should not have is shortened, and a few digits of its hash tell it from others.

    >>> checkpoint_of(Checkpoints("c.ckpt"), "FedAvg", 3).path.name
    'c-FedAvg-seed3.ckpt'
    >>> checkpoint_of(Checkpoints("c.ckpt"), "a/b", 0).path.name
    'c-a-b-6d959c-seed0.ckpt'
    """
    plain = re.sub(r"[^A-Za-z0-9._+=]+", "-", method).strip("-.")[:40]
    if plain != method:
        plain = f"{plain}-{hashlib.blake2b(method.encode(), digest_size=3).hexdigest()}".lstrip("-")
    path = saving.path
    return Checkpoints(path.with_name(f"{path.stem}-{plain}-seed{seed}{path.suffix}"), every=saving.every)
