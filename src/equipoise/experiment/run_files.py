"""The folder of a run: its files by name, its log of rounds, and what a finished run leaves in it.

config.toml, rounds.jsonl, checkpoint/state.safetensors, clients.parquet, model.safetensors, report.html, and the files of
`family_files` for other programs. Where clients have models of their own there is personal.npy: one row of parameters for each
training client, in order; if only a sample of them was evaluated, personal.ids.json names all of them. Where the data are a
table there is schema.json: how each column was encoded. A private run has ledger.jsonl: every release, written down before it
was made.

The log of rounds grows line by line; every other file appears whole or not at all. The event "end" is written to the log after
all other files: a run without it can be resumed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.core.files import DurableFile, write_atomically, writing
from equipoise.core.plain_text import open_plain, parse_json
from equipoise.errors import ConfigError
from equipoise.runs.stopping import Stopped

if TYPE_CHECKING:
    from equipoise.result import Result

ORDER = "order.txt"  # in the folder of a study: the names of its runs in order, one per line


class _File:
    """A file of a run folder by its name: an attribute of `RunFolder` that is a path."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: RunFolder, owner: type | None = None) -> Path:
        return folder.path / self.name


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run, with the paths of its files."""

    path: Path

    config = _File("config.toml")
    rounds = _File("rounds.jsonl")
    checkpoint = _File("checkpoint/state.safetensors")
    clients = _File("clients.parquet")
    model = _File("model.safetensors")
    onnx = _File("model.onnx")
    personal = _File("personal.npy")
    personal_ids = _File("personal.ids.json")
    report = _File("report.html")
    schema = _File("schema.json")
    log = _File("run.log")
    ledger = _File("ledger.jsonl")
    lock = _File(".lock")

    def last_event(self) -> dict[str, Any]:
        """The last event in the log of rounds; empty if there is none."""
        try:
            with open_plain(self.rounds) as file:
                file.seek(0, 2)
                file.seek(max(0, file.tell() - 65_536))
                lines = file.read().splitlines()
        except OSError:
            return {}
        for line in reversed(lines):
            try:
                event = parse_json(line.decode("utf-8"))
            except ValueError:  # cut off, or being written
                continue
            if isinstance(event, dict):
                return event
        return {}

    @property
    def finished(self) -> bool:
        """Whether the run has ended and left all its files."""
        return self.last_event().get("event") == "end"

    def log_stop(self, why: str) -> None:
        """Write to the log why a run stopped, for those who watch it; a run that goes on writes the log anew up to there."""
        with suppress(OSError), self.rounds.open("a", encoding="utf-8") as log:
            log.write(json.dumps({"event": "stopped", "why": why}) + "\n")


@dataclass(frozen=True)
class RunEnd:
    """The last event of the log of a finished run: what its record needs and no other file has."""

    seconds: float
    data: str
    error_is_loss: bool
    error_name: str = ""
    target: str = ""
    data_version: str = ""
    sha256: dict[str, str] = field(default_factory=dict)  # of each file whose numbers may be used later
    sampled: dict[str, tuple[int, int]] | None = None
    privacy: dict[str, Any] | None = None  # what was spent; an infinite number is None
    observers: Any = None
    stopped: Stopped | None = None
    stopped_members: dict[str, Stopped] = field(default_factory=dict)  # of a family

    @classmethod
    def of(cls, result: Result, files: Mapping[str, Path], **more: Any) -> RunEnd:
        """The end of the run of a result that has left `files`, by the names that the folder has for them."""
        private = result.privacy is not None and result.algorithm.privacy is not None
        spent = {} if result.epsilon is None else asdict(result.epsilon)
        given: dict[str, Any] = {
            "seconds": result.seconds, "data": result.data, "error_is_loss": result.error_is_loss,
            "error_name": result.error_name, "target": result.target, "data_version": result.data_version,
            "sha256": {name: file_checksum(file) for name, file in files.items()}, "sampled": result.sampled,
            "privacy": {key: None if value == float("inf") else value for key, value in spent.items()},  # JSON has no infinity
            "observers": result.privacy.plain() if private and result.privacy is not None else None,
            "stopped": result.history.stopped,
        }  # fmt: skip
        return cls(**given | more)

    def event(self) -> dict[str, Any]:
        """The event as the log holds it."""
        return {"event": "end", **{key: value for key, value in asdict(self).items() if value not in (None, "", {})}}


def log_end(folder: RunFolder, event: Mapping[str, Any]) -> None:
    """Write the last event of the log, after all other files: the run has ended.

    The rounds before it are synced first: a power cut must not leave a log that ends well and lacks rounds.
    """
    with writing(folder.rounds):
        log = DurableFile.at_end(folder.rounds)
        try:
            log.sync()
            log.write((json.dumps(event) + "\n").encode())
            log.sync()
        finally:
            log.close()


def write_outcome(result: Result, folder: RunFolder, *, report: bool = True) -> None:
    """Write clients, own models and report of a finished run, and its end; its model is there already."""
    written = [folder.model, result.clients.to_parquet(folder.clients, method=result.name, seed=result.seed)]
    if result.personal is not None:
        written.append(result.personal.to_npy(folder.personal))
        if result.sample_of("train") is not None:  # clients.parquet names only some of the clients that have models
            written.append(write_atomically(folder.personal_ids, _json_list(result.personal.ids)))
    if report:
        result.report(folder.report)
    log_end(folder, RunEnd.of(result, {file.name: file for file in written}).event())


def _json_list(texts: Iterable[str]) -> bytes:
    """Texts as a list in JSON, made one by one: there may be a million."""
    made = bytearray()
    for text in texts:
        made += b", " if made else b""
        made += json.dumps(text).encode()
    return b"[" + bytes(made) + b"]"


def model_bytes(result: Result) -> bytes:
    """The state dict of the trained model as safetensors, with a checksum."""
    from equipoise.core.tensor_files import tensor_file_bytes

    return tensor_file_bytes(result.model.state_dict(), kind="model", model=type(result.model).__name__)


def file_checksum(path: Path) -> str:
    """SHA-256 of a file's content."""
    with open_plain(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def refuse_damaged_files(folder: RunFolder, checksums: Mapping[str, str]) -> None:
    """Refuse a run's folder in which a file is not what the run has left; files that were removed are no damage."""
    for name, expected in checksums.items():
        file = folder.path / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ConfigError(f"{folder.rounds} is damaged: it names a file outside its folder.")
        if file.exists() and file_checksum(file) != expected:
            raise ConfigError(f"{file} is damaged: it is not what the run has left (its checksum differs). Run it anew.")


def method_folder(name: str) -> str:
    """The name of a method as the name of a folder.

    >>> method_folder("Δ-FL 0.5, lr 0.1")
    'Δ-FL-0.5-lr-0.1'
    """
    return re.sub(r"[^\w.+-]+", "-", name).strip("-.") or "run"
