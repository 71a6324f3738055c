"""A run's folder: config.toml, rounds.jsonl, checkpoint/state.safetensors, clients.parquet, model.safetensors, report.html.

Where clients have models of their own there is personal.npy, too: one row of parameters for each training client, in order. If
only a sample of them was evaluated, personal.ids.json names all of them.
Where the data are a table there is schema.json: how each column was encoded. A private run has ledger.jsonl: every release,
written down before it was made.

The log of rounds grows line by line; every other file appears whole or not at all. The event "end" is written to the log after
all other files: a run without it can be resumed.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.core.files import is_unfinished, locked, remove_unfinished, write_atomically
from equipoise.core.plain_text import content_of, made_of, parse_json, typed
from equipoise.core.words import counted
from equipoise.errors import ConfigError, EquipoiseError, FileGuard
from equipoise.experiment.family_files import MANIFEST, write_family, write_single
from equipoise.experiment.run_files import ORDER, RunFolder, refuse_damaged_files, write_outcome

if TYPE_CHECKING:
    from equipoise.experiment.build import PreparedRun
    from equipoise.experiment.config import RunConfig
    from equipoise.observers import EvaluationPoint
    from equipoise.result import Result
    from equipoise.run_record import RunRecord
    from equipoise.runs.family import Family
    from equipoise.types import Observer


_END: dict[str, Any] = {  # what the last event of a log holds
    "seconds": float, "data": str, "error_is_loss": bool, "error_name": str, "target": str, "data_version": str,
    "sha256": dict[str, str], "sampled": dict[str, tuple[int, int]], "privacy": dict[str, Any],
    "stopped_members": dict[str, Any],
}  # fmt: skip
IN_STUDY = "runs of a study leave none, because writing them takes seconds. For one run: equipoise export DIR"


def resume_command(path: Path) -> str:
    """The command that goes on with the run of a folder; that of a federation begins with its operator's folder."""
    from equipoise.experiment.config_tables import read_toml
    from equipoise.experiment.recorded import FEDERATION

    if FEDERATION in read_toml(RunFolder(path).config):
        return "give the same `equipoise flower run` again, in the folder of the federation's operator"
    return f"equipoise run --resume {shlex.quote(str(path))}"


def refuse_taken(path: Path) -> None:
    """Refuse a folder that is not empty, so that no run overwrites another."""
    try:
        taken = path.exists() and (not path.is_dir() or any(not is_unfinished(file) for file in path.iterdir()))
    except OSError as failure:
        raise ConfigError(f"{path} cannot be used for a run: {failure.strerror}. Name another folder: --out DIR.") from failure
    if taken and RunFolder(path).config.exists() and not RunFolder(path).finished:
        other = "or name another folder: --out DIR."
        raise ConfigError(f"{path} holds a run that has not ended. Go on with it: {resume_command(path)}, {other}")
    if taken:
        what = "is a file" if path.is_file() else "is not empty"
        raise ConfigError(f"{path} {what}, and a run never overwrites another. Name a new folder: --out DIR.")


def refuse_run_folder(path: Path) -> None:
    """Refuse the folder of a run, finished or not, where several runs are to go: their report would be written over its."""
    if RunFolder(path).config.exists():
        raise ConfigError(f"{path} is the folder of a run, which nothing overwrites. Name another folder: --out DIR.")


def claim(path: str | Path) -> RunFolder:
    """Make the folder of a new run. A folder that is not empty, or cannot be written to, is refused."""
    path = Path(path)
    refuse_taken(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as failure:
        raise ConfigError(f"{path} cannot be written to: {failure.strerror}. Name another folder: --out DIR.") from failure
    return RunFolder(path)


def refuse_full_disk(folder: RunFolder, experiment: PreparedRun) -> None:
    """Refuse a disk without room for the model, a checkpoint with optimiser state twice, and the report."""
    parameters = sum(p.nbytes for p in experiment.model.parameters())
    needed = 10 * parameters + 300 * experiment.evaluated_clients + 1000 * experiment.config.train.rounds + 12 * 2**20
    if (personal := experiment.algorithm.personal) is not None:  # what clients keep, twice, and their models at the end
        kept = personal.width(sum(p.numel() for p in experiment.model.parameters() if p.requires_grad))
        needed += len(experiment.data.train) * (8 * kept + parameters)
    free = shutil.disk_usage(folder.path).free
    if free < needed:
        raise ConfigError(
            f"{folder.path} has {free / 2**20:.0f} MB of free disk, and the run needs about {needed / 2**20:.0f} MB. "
            "Make room, or name a folder on another disk: --out DIR."
        )


def free_folder(config_path: Path, config: RunConfig) -> Path:
    """runs/<name of the configuration>-<seed>, with -2, -3, … added if that is taken."""
    first = Path("runs") / f"{config_path.stem}-{config.train.seed}"
    others = (first.with_name(f"{first.name}-{count}") for count in itertools.count(2))
    return next(folder for folder in itertools.chain([first], others) if not folder.exists())


def to_resume(path: Path, *, more: bool = False) -> RunFolder:
    """The folder of a run that has not ended, or that is to have `more` rounds; any other folder is refused."""
    folder = RunFolder(path)
    if not folder.config.exists():
        raise ConfigError(f"{path} is not the folder of a run: it has no config.toml. Start one: equipoise run CONFIG.toml")
    if folder.finished and not more:
        fix = "More rounds: add --set train.rounds=N."
        raise ConfigError(f"The run in {path} has ended; there is nothing to resume. Its report is {folder.report}. {fix}")
    return folder


def run(
    experiment: PreparedRun,
    folder: RunFolder,
    *,
    observers: Sequence[Observer] = (),
    progress: bool | None = None,
    report: bool = True,
    again: str | None = None,
) -> Result | Family:
    """Train, from the checkpoint if the folder has one, and write the files of the run. A failure says where the log is.

    `observers` watch besides the log of rounds; without `report`, as for a run of a study, neither a page nor ONNX is written.
    `again` is the command that goes on after Ctrl-C or on a full disk, where that is not `equipoise run --resume`.
    """
    from equipoise.observers import JsonLines

    refuse_full_disk(folder, experiment)
    if not folder.config.exists():
        write_atomically(folder.config, experiment.config.text().encode())
    try:
        if experiment.data.schema is not None:
            experiment.data.schema.save(folder.schema)
        lock = folder.path / ".lock"
        with locked(lock, wait=False):  # two processes would spoil the log
            remove_unfinished(folder.path, "*", below=True)
            result = _run(experiment, folder, [JsonLines(folder.rounds), *observers], progress, report)
            lock.unlink(missing_ok=True)
    except (KeyboardInterrupt, OSError) as failure:  # the disk is full, say
        failure.add_note(f"Go on later: {again or f'equipoise run --resume {shlex.quote(str(folder.path))}'}")
        raise
    return result


def _run(
    experiment: PreparedRun, folder: RunFolder, observers: Sequence[Observer], progress: bool | None, report: bool
) -> Result | Family:
    """Train, and write what the run leaves; the last event of the log comes last."""
    from equipoise.result import Result

    try:
        name = folder.path.resolve().name
        result = experiment.train(
            name=name, observers=observers, progress=progress, checkpoint=folder.checkpoint, ledger=folder.ledger
        )
        if isinstance(result, Result):
            write_single(result, folder, no_onnx=None if report else IN_STUDY)
            write_outcome(result, folder, report=report)
        else:
            write_family(result, folder, report=report)
    except (EquipoiseError, KeyboardInterrupt, OSError) as failure:
        if isinstance(failure, KeyboardInterrupt):
            vars(failure).pop("__notes__", None)  # of `train`, for calls in Python; a folder is resumed in another way
        if folder.rounds.exists() and not folder.finished:  # else nothing was begun: the run that has ended stays as it is
            failure.add_note(f"What was logged is in {folder.rounds}.")
            if (saved := vars(failure).get("saved_round")) is not None:
                failure.add_note(f"The checkpoint holds the run after {counted(saved, 'round')}.")
            log_stop(folder, "Stopped by Ctrl-C." if isinstance(failure, KeyboardInterrupt) else str(failure))
        raise
    return result


def log_stop(folder: RunFolder, why: str) -> None:
    """Write to the log why a run stopped, for those who watch it; a run that goes on writes the log anew up to there."""
    with suppress(OSError), folder.rounds.open("a", encoding="utf-8") as log:
        log.write(json.dumps({"event": "stopped", "why": why}) + "\n")


def read_record(path: str | Path) -> RunRecord:
    """The record of a finished run, read from its folder; the folder of a family, which has several, is refused."""
    records = read_records(path)
    if len(records) > 1:
        raise ConfigError(f"{path} holds a family of {len(records)} runs, not one.")
    return records[0]


def read_records(path: str | Path) -> list[RunRecord]:
    """The record of a finished run, read from its folder; of a family, one for each member. A damaged folder is refused."""
    with FileGuard(path, ConfigError, cure="Run it anew in another folder."):
        return _read_records(path)


def _read_records(path: str | Path) -> list[RunRecord]:
    from equipoise.client_table import ClientTable
    from equipoise.experiment.config_tables import read_toml
    from equipoise.experiment.recorded import read_config
    from equipoise.observers import History
    from equipoise.privacy.accounting import Spent
    from equipoise.privacy.observer_table import PrivacyTable
    from equipoise.run_record import RunRecord
    from equipoise.runs.stopping import Stopped
    from equipoise.types import RoundReport

    folder = RunFolder(Path(path))
    if not folder.config.exists():
        raise ConfigError(f"{path} is not the folder of a run: it has no config.toml.")
    end = folder.last_event()
    if end.get("event") != "end":
        raise ConfigError(f"The run in {path} has not ended. Go on with it: {resume_command(Path(path))}")
    config = read_config(folder.config)
    name, histories = config.train.name or folder.path.resolve().name, {"": History()}
    is_family = (folder.path / MANIFEST).exists()
    for line in content_of(folder.rounds).decode().splitlines():
        event = parse_json(line)
        kind = event.pop("event")
        history = histories.setdefault(made_of(str, event.get("run", "")), History())
        if kind == "round":
            history.rounds.append(made_of(RoundReport, {"run": name, **_numbers(event)}))
        elif kind == "evaluation":
            history.points.append(evaluation_point(event))
    end = typed(end, {key: kind for key, kind in _END.items() if key in end})
    refuse_damaged_files(folder, end.get("sha256", {}))
    clients = ClientTable((), (), *no_rows()) if is_family else ClientTable.from_parquet(folder.clients)
    costs: dict[str, Any] = {name: float("inf") if value is None else value for name, value in end.get("privacy", {}).items()}
    spent = made_of(Spent, costs) if costs else None
    if "stopped" in end:
        history.stopped = made_of(Stopped, end["stopped"])
    table = PrivacyTable.of_plain(end["observers"]) if "observers" in end else None
    rounds = spent.rounds if spent is not None else config.train.rounds  # a budget may have ended the run before the last
    for member, stop in end.get("stopped_members", {}).items():
        histories.setdefault(member, History()).stopped = made_of(Stopped, stop)
    if len(histories) > 1 and not histories[""].rounds:
        del histories[""]
    for history in histories.values():
        done = history.stopped.rounds if history.stopped is not None else rounds
        if len(history.rounds) != done or any(report.round != number for number, report in enumerate(history.rounds)):
            raise ConfigError(f"{folder.rounds} does not hold each of the {done} rounds once: the log is damaged.")
    first = next(iter(histories.values()))
    rounds = first.stopped.rounds if first.stopped is not None else rounds
    from equipoise.data.schema import Schema

    described = json.dumps(read_toml(folder.config).get("data", {}), sort_keys=True, default=str)  # also the seed of the data
    record = RunRecord(
        name=name, algorithm=config.algorithm(), seed=config.train.seed, clients=clients, rounds=rounds,
        history=first, clients_per_round=config.train.clients_per_round, epsilon=spent, privacy=table,
        sampled=end.get("sampled"), seconds=end["seconds"], data=end["data"], error_is_loss=end["error_is_loss"],
        data_version=end.get("data_version") or described, error_name=end.get("error_name", ""), target=end.get("target", ""),
        inputs=Schema.load(folder.schema).inputs if folder.schema.is_file() else (),
    )  # fmt: skip
    if not is_family:
        return [record]
    from equipoise.experiment.family_records import member_records

    return member_records(folder.path, record, histories)


def evaluation_point(event: dict[str, Any]) -> EvaluationPoint:
    """An evaluation as the log holds it."""
    from equipoise.observers import EvaluationPoint

    point: EvaluationPoint = made_of(EvaluationPoint, event | {"splits": {s: _numbers(f) for s, f in event["splits"].items()}})
    return point


def no_rows() -> tuple[Any, ...]:
    """The columns of a table of clients without rows, after the names."""
    import torch

    kinds = (torch.bool, torch.int64, torch.float64, torch.float64)
    return tuple(torch.zeros(0, dtype=kind) for kind in kinds)


def count_training_clients(path: str | Path, record: RunRecord) -> int:
    """How many clients a finished run could draw from; a federation lists them in federation.json."""
    roster = Path(path) / "federation.json"
    if roster.exists():
        with FileGuard(roster, ConfigError, cure="Run it anew in another folder."):
            return sum("train" in member["splits"] for member in parse_json(roster)["clients"])
    sample = record.sample_of("train")
    return sample[1] if sample is not None else len(record.clients.where("train"))


def finished_runs(folders: Iterable[Path]) -> list[Path]:
    """The folders of finished runs: a run's own folder, or all that lie in the folder of a study."""
    runs: list[Path] = []
    for path in folders:
        if RunFolder(path).config.exists():
            runs.append(path)
            continue
        inside = _runs_of_study(path) if path.is_dir() else []
        ended = [p for p in inside if RunFolder(p).finished]
        if not ended:
            raise ConfigError(f"{path} holds no finished run. Name the folders that equipoise run or compare has made.")
        runs += ended
    return list(dict.fromkeys(runs))


def _runs_of_study(path: Path) -> list[Path]:
    """The folders of the runs of a study, in the order of the study: its first method is the baseline of reports."""
    inside = sorted(p.parent for p in path.glob("*/config.toml"))
    try:
        order = content_of(path / ORDER).decode().splitlines()
    except OSError:
        return inside
    return sorted(inside, key=lambda p: order.index(p.name) if p.name in order else len(order))


def _numbers(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with NaN in place of JSON's null, except for fields that may be None."""
    from equipoise.types import RoundReport

    optional = {each.name for each in dataclasses.fields(RoundReport) if "None" in str(each.type)}
    return {name: float("nan") if value is None and name not in optional else value for name, value in fields.items()}
