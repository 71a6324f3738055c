"""A run is a folder: config.toml, rounds.jsonl, clients.csv, model.safetensors and report.html.

The log of rounds grows line by line; every other file appears whole or not at all.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.errors import ConfigError, EquipoiseError
from equipoise.files import write_atomically

if TYPE_CHECKING:
    from equipoise.experiment.build import Experiment
    from equipoise.result import Result


@dataclass(frozen=True)
class RunFolder:
    """The files of one run."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def rounds(self) -> Path:
        return self.path / "rounds.jsonl"

    @property
    def clients(self) -> Path:
        return self.path / "clients.csv"

    @property
    def model(self) -> Path:
        return self.path / "model.safetensors"

    @property
    def report(self) -> Path:
        return self.path / "report.html"


def refuse_taken(path: Path) -> None:
    """Refuse a folder in which something lies, so that no run is lost under another."""
    try:
        taken = path.exists() and (not path.is_dir() or any(path.iterdir()))
    except OSError as failure:
        raise ConfigError(f"{path} cannot be used for a run: {failure.strerror}. Name another folder: --out DIR.") from failure
    if taken:
        what = "is a file" if path.is_file() else "is not empty"
        raise ConfigError(f"{path} {what}, and a run never overwrites another. Name a new folder: --out DIR.")


def claim(path: str | Path) -> RunFolder:
    """Make the folder and prove that files can be written to it, before any work is done."""
    path = Path(path)
    refuse_taken(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as failure:
        raise ConfigError(f"{path} cannot be written to: {failure.strerror}. Name another folder: --out DIR.") from failure
    return RunFolder(path)


def free_folder(config_path: Path, seed: int) -> Path:
    """runs/<name of the configuration>-<seed>, with -2, -3, … added if that is taken."""
    first = Path("runs") / f"{config_path.stem}-{seed}"
    folder, count = first, 1
    while folder.exists():
        count += 1
        folder = first.with_name(f"{first.name}-{count}")
    return folder


def run(experiment: Experiment, folder: RunFolder, *, progress: bool | None = None) -> Result:
    """Train, logging as it goes, then write what the run leaves. A failure says where the log is."""
    from equipoise.observers import JsonLines

    write_atomically(folder.config, experiment.config.text().encode())
    try:
        result = experiment.train(name=folder.path.name, observers=[JsonLines(folder.rounds)], progress=progress)
    except (EquipoiseError, KeyboardInterrupt) as failure:
        if folder.rounds.exists():
            failure.add_note(f"What was logged is in {folder.rounds}.")
        raise
    result.clients.to_csv(folder.clients)
    write_atomically(folder.model, model_bytes(result))
    result.report(folder.report)
    return result


def model_bytes(result: Result) -> bytes:
    """The trained model's named tensors as safetensors; `load_state_dict` of the same model takes them."""
    from safetensors.torch import save

    # Copies, because tensors that share memory cannot be saved.
    tensors = {name: value.detach().cpu().clone().contiguous() for name, value in result.model.state_dict().items()}
    # One entry of metadata, because the order of several is random and equal models should be equal files.
    saved: bytes = save(tensors, metadata={"model": type(result.model).__name__})
    return saved
