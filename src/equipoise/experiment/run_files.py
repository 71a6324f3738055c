"""The files of a run's folder, and what a finished run leaves in them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.core.files import write_atomically

if TYPE_CHECKING:
    from equipoise.result import Result


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
    personal = _File("personal.npy")
    report = _File("report.html")
    schema = _File("schema.json")
    log = _File("run.log")

    def last_event(self) -> dict[str, Any]:
        """The last event in the log of rounds; empty if there is none."""
        try:
            with self.rounds.open("rb") as file:
                file.seek(0, 2)
                file.seek(max(0, file.tell() - 65_536))
                lines = file.read().splitlines()
        except OSError:
            return {}
        for line in reversed(lines):
            try:
                event: dict[str, Any] = json.loads(line)
                return event
            except ValueError:  # cut off, or being written
                continue
        return {}

    @property
    def finished(self) -> bool:
        """Whether the run has ended and left all its files."""
        return self.last_event().get("event") == "end"


def write_outcome(result: Result, folder: RunFolder, *, report: bool = True) -> None:
    """Write clients, model, own models and report of a finished run; the last event of the log comes last."""
    result.clients.to_parquet(folder.clients, method=result.name, seed=result.seed)
    write_atomically(folder.model, model_bytes(result))
    if result.personal is not None:
        result.personal.to_npy(folder.personal)
    if report:
        result.report(folder.report)
    end = {"event": "end", "seconds": result.seconds, "data": result.data, "error_is_loss": result.error_is_loss}
    if result.epsilon is not None:
        spent = asdict(result.epsilon).items()
        end["privacy"] = {name: None if value == float("inf") else value for name, value in spent}  # JSON has no infinity
    if result.sampled is not None:
        end["sampled"] = result.sampled
    if result.history.stopped is not None:
        end["stopped"] = asdict(result.history.stopped)
    with folder.rounds.open("a", encoding="utf-8") as log:
        log.write(json.dumps(end) + "\n")


def model_bytes(result: Result) -> bytes:
    """The state dict of the trained model as safetensors."""
    from safetensors.torch import save

    # Copies, because tensors that share memory cannot be saved.
    tensors = {name: value.detach().cpu().clone().contiguous() for name, value in result.model.state_dict().items()}
    # One entry of metadata, because the order of several is random and equal models should be equal files.
    saved: bytes = save(tensors, metadata={"model": type(result.model).__name__})
    return saved
