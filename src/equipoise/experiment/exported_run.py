"""Writes the model of a finished run for other programs, beside what the run has left: ONNX files and the card."""

from __future__ import annotations

from pathlib import Path

import torch

from equipoise.core.files import locked
from equipoise.core.signature import Signature
from equipoise.core.task import Task
from equipoise.core.task_trial import try_task
from equipoise.core.tensor_files import read_tensor_file
from equipoise.errors import ConfigError
from equipoise.experiment.build import build
from equipoise.experiment.config import RunConfig
from equipoise.experiment.config_tables import read_toml
from equipoise.experiment.family_files import MANIFEST, SINGLE_MANIFEST, read_manifest, write_single
from equipoise.experiment.folder import read_record
from equipoise.experiment.recorded import FEDERATION
from equipoise.experiment.run_files import RunFolder
from equipoise.result import Result
from equipoise.run_record import RunRecord


def export_run(path: Path, *, trust: bool = False) -> list[Path]:
    """Write model.onnx, score.onnx, the card and model.json into the folder of a finished run; returns what is there now.

    The data are read again, for the shapes and types of the model's inputs, and the model is made as config.toml says.
    """
    folder = RunFolder(path)
    if (path / MANIFEST).exists():
        raise ConfigError(f"{path} holds a family, which wrote its models when it ended: they are in {path / 'members'}.")
    record = read_record(path)
    if FEDERATION in read_toml(folder.config):
        return _written_by_federation(path)
    config = RunConfig.read(folder.config, code="resume", trust=trust)
    prepared = build(config)
    if not folder.model.exists():
        raise ConfigError(f"{folder.model} does not exist: there is no model to write.")
    stored = read_tensor_file(folder.model).tensors
    try:
        prepared.model.load_state_dict(stored)
    except RuntimeError as failure:
        raise ConfigError(f"{folder.model} does not fit the model of {folder.config}: {failure}") from failure
    task = try_task(Task.of(prepared.model, config.loss(), config.error()), prepared.data)
    fields = {name: value for name, value in vars(record).items() if name in RunRecord.__dataclass_fields__}
    result = Result(
        **{**fields, "algorithm": prepared.algorithm}, model=prepared.model,
        params=torch.cat([parameter.detach().flatten() for parameter in prepared.model.parameters()]),
        schema=prepared.data.schema, signature=Signature.of(prepared.data, task.layout.dtype), task=task,
    )  # fmt: skip
    lock = path / ".lock"
    with locked(lock, wait=False):
        write_single(result, folder)
        lock.unlink(missing_ok=True)
    (member,) = read_manifest(path, SINGLE_MANIFEST).members
    if member.no_onnx is not None:
        raise ConfigError(f"{path} has its card now, but no ONNX: {member.no_onnx}")
    return [path / name for name in (*member.files, SINGLE_MANIFEST)]


def _written_by_federation(path: Path) -> list[Path]:
    """The files of a federated run, which writes its model for other programs when it ends; nobody has its data here."""
    (member,) = read_manifest(path, SINGLE_MANIFEST).members
    if member.no_onnx is not None:
        raise ConfigError(
            f"{path} is a federated run, which writes ONNX when it ends, and has none: {member.no_onnx}. Load "
            f'{path / "model.safetensors"} into the model of the app, as the page "After a federation\'s run" shows. With '
            '`pip install "equipoise[serve]"` on the server the next run writes ONNX.'
        )
    return [path / name for name in (*member.files, SINGLE_MANIFEST)]
