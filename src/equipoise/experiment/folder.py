"""Runs in folders: claimed, trained, gone on with, given more rounds, and read again as records for reports."""

from __future__ import annotations

import itertools
import json
import shlex
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.core.files import is_unfinished, locked, remove_unfinished, write_atomically
from equipoise.core.plain_text import content_of, made_of, parse_json
from equipoise.errors import ConfigError, EquipoiseError, FileGuard
from equipoise.experiment import toml
from equipoise.experiment.config_tables import read_toml
from equipoise.experiment.family_files import CLIENTS, MANIFEST, MEMBERS, read_manifest, write_family, write_single
from equipoise.experiment.run_files import ORDER, RunEnd, RunFolder, refuse_damaged_files, write_outcome
from equipoise.types import Observer, RoundReport

if TYPE_CHECKING:
    from equipoise.experiment.build import PreparedRun
    from equipoise.experiment.config import RunConfig
    from equipoise.observers import History, Run
    from equipoise.result import Result
    from equipoise.run_record import RunRecord
    from equipoise.runs.family import Family

ROUNDS = "train.rounds"  # the one setting that a run which goes on may change


def resume_command(path: Path) -> str:
    """The command that goes on with the run of a folder; that of a federation begins with its operator's folder."""
    from equipoise.experiment.recorded import FEDERATION

    if FEDERATION in read_toml(RunFolder(path).config):
        return "give the same `equipoise flower run` again, in the folder of the federation's operator"
    return f"equipoise run --resume {shlex.quote(str(path))}"


# ---------------------------------------------------------------------------------------------------- folders for new runs


def refuse_taken(path: Path) -> None:
    """Refuse a folder that is not empty, so that no run overwrites another."""
    try:
        taken = path.exists() and (not path.is_dir() or any(not is_unfinished(file) for file in path.iterdir()))
    except OSError as failure:
        raise ConfigError(f"{path} cannot be used for a run: {failure.strerror}. Name another folder: --out DIR.") from failure
    if taken and RunFolder(path).config.exists() and not RunFolder(path).finished:
        raise ConfigError(f"{path} holds a run that has not ended. Go on with it: {resume_command(path)}, or give --out DIR.")
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


def free_folder(config_path: Path, config: RunConfig) -> Path:
    """runs/<name of the configuration>-<seed>, with -2, -3, … added if that is taken."""
    first = Path("runs") / f"{config_path.stem}-{config.train.seed}"
    others = (first.with_name(f"{first.name}-{count}") for count in itertools.count(2))
    return next(folder for folder in itertools.chain([first], others) if not folder.exists())


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


# ---------------------------------------------------------------------------------------------------------- runs that go on


def to_resume(path: Path, *, more: bool = False) -> RunFolder:
    """The folder of a run that has not ended, or that is to have `more` rounds; any other folder is refused."""
    folder = RunFolder(path)
    if not folder.config.exists():
        raise ConfigError(f"{path} is not the folder of a run: it has no config.toml. Start one: equipoise run CONFIG.toml")
    if folder.finished and not more:
        fix = "More rounds: add --set train.rounds=N."
        raise ConfigError(f"The run in {path} has ended; there is nothing to resume. Its report is {folder.report}. {fix}")
    return folder


def refuse_other_settings(settings: Sequence[str]) -> None:
    """Refuse settings of a run that goes on, other than its number of rounds."""
    if any(setting.partition("=")[0].strip() != ROUNDS for setting in settings):
        how = f"equipoise run --resume DIR --set {ROUNDS}=200"
        raise ConfigError(f"--resume takes all it needs from its folder; --set can only change {ROUNDS} there: {how}")


class MoreRounds(Observer):
    """Writes the new number of rounds into the folder of a run, once its checkpoint has been accepted.

    Cohorts and batches depend on the seed and the round alone: a run of 100 rounds that goes on to 200 ends as a run of 200
    rounds does, bit for bit. A private run is refused: its noise is made for its number of rounds. The log of rounds has lost
    its end by then: whatever happens next, the folder holds a run that can go on.
    """

    def __init__(self, folder: RunFolder, config: RunConfig) -> None:
        before, after = read_toml(folder.config)["train"]["rounds"], config.train.rounds
        self.folder, self.rounds = folder, after
        if after == before and not folder.finished:  # the same command goes on after Ctrl-C
            return
        if after <= before:
            raise ConfigError(f"{ROUNDS} must be more than the {before} rounds of the run in {folder.path}, but is {after}.")
        if config.algorithm().private:
            raise ConfigError(
                f"The run in {folder.path} is private, and its noise and its ε are made for {before} rounds, not for {after}. "
                "Start another run with as many rounds; on the same data its ε adds to that of this one."
            )
        order = folder.path.parent / ORDER
        if order.exists() and folder.path.resolve().name in content_of(order).decode().splitlines():
            fix = f"Run the study in another folder: equipoise compare STUDY.toml --set {ROUNDS}={after} --out DIR"
            raise ConfigError(f"{folder.path} is a run of a study, whose runs all have {before} rounds. {fix}")
        if folder.finished and not folder.checkpoint.exists():
            raise ConfigError(
                f"{folder.path} has no checkpoint any more, so that its run cannot go on. Run it anew: --out DIR."
            )

    def on_start(self, run: Run) -> None:
        """The run goes on."""
        table = read_toml(self.folder.config)
        if table["train"]["rounds"] != self.rounds:  # a family begins once for each member
            table["train"]["rounds"] = self.rounds
            write_atomically(self.folder.config, toml.dumps(table).encode())


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
        with locked(folder.lock, wait=False):  # two processes would spoil the log
            remove_unfinished(folder.path, "*", below=True)
            result = _run(experiment, folder, [JsonLines(folder.rounds), *observers], progress, report)
            folder.lock.unlink(missing_ok=True)
    except (KeyboardInterrupt, OSError) as failure:  # the disk is full, say
        failure.add_note(f"Go on later: {again or f'equipoise run --resume {shlex.quote(str(folder.path))}'}")
        raise
    return result


def _run(
    experiment: PreparedRun, folder: RunFolder, observers: Sequence[Observer], progress: bool | None, report: bool
) -> Result | Family:
    """Train, and write what the run leaves; the last event of the log comes last."""
    from equipoise.experiment.saved_run import IN_STUDY
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
                failure.add_note(f"Rounds in the checkpoint: {saved}.")
            folder.log_stop("Stopped by Ctrl-C." if isinstance(failure, KeyboardInterrupt) else str(failure))
        raise
    return result


# ----------------------------------------------------------------------------------------------------------------- records


def read_record(path: str | Path) -> RunRecord:
    """The record of a finished run, read from its folder; the folder of a family, which has several, is refused."""
    records = read_records(path)
    if len(records) > 1:
        raise ConfigError(f"{path} holds a family of {len(records)} runs, not one.")
    return records[0]


def read_records(path: str | Path) -> list[RunRecord]:
    """The record of a finished run, read from its folder; of a family, one for each member. A damaged folder is refused."""
    with FileGuard(path, ConfigError, cure="Run it anew in another folder."):
        return _read_records(RunFolder(Path(path)))


def _read_records(folder: RunFolder) -> list[RunRecord]:
    from equipoise.client_table import ClientTable
    from equipoise.data.tables import Schema
    from equipoise.experiment.recorded import read_config
    from equipoise.privacy.accounting import Spent
    from equipoise.privacy.observer_table import PrivacyTable
    from equipoise.run_record import RunRecord

    path = folder.path
    if not folder.config.exists():
        raise ConfigError(f"{path} is not the folder of a run: it has no config.toml.")
    if not folder.finished:
        raise ConfigError(f"The run in {path} has not ended. Go on with it: {resume_command(path)}")
    config, end = read_config(folder.config), made_of(RunEnd, folder.last_event())
    refuse_damaged_files(folder, end.sha256)
    name = config.train.name or path.resolve().name
    costs = {key: float("inf") if value is None else value for key, value in (end.privacy or {}).items()}
    spent: Spent | None = made_of(Spent, costs) if costs else None
    histories = _read_histories(folder, end, name)
    rounds = spent.rounds if spent is not None else config.train.rounds  # a budget may have ended the run before the last
    for history in histories.values():
        done = history.stopped.rounds if history.stopped is not None else rounds
        if len(history.rounds) != done or any(report.round != number for number, report in enumerate(history.rounds)):
            raise ConfigError(f"{folder.rounds} does not hold each of the {done} rounds once: the log is damaged.")
    first = next(iter(histories.values()))
    described = json.dumps(read_toml(folder.config).get("data", {}), sort_keys=True, default=str)  # also the seed of the data

    def record(clients: ClientTable) -> RunRecord:
        return RunRecord(
            name=name, algorithm=config.algorithm(), seed=config.train.seed, clients=clients, history=first,
            rounds=first.stopped.rounds if first.stopped is not None else rounds,
            clients_per_round=config.train.clients_per_round, epsilon=spent,
            privacy=None if end.observers is None else PrivacyTable.of_plain(end.observers),
            sampled=end.sampled, seconds=end.seconds, data=end.data, error_is_loss=end.error_is_loss,
            data_version=end.data_version or described, error_name=end.error_name, target=end.target,
            inputs=Schema.load(folder.schema).inputs if folder.schema.is_file() else (),
        )  # fmt: skip

    if not (path / MANIFEST).exists():
        return [record(ClientTable.from_parquet(folder.clients))]
    members = read_manifest(path).members
    tables = [ClientTable.from_parquet(path / MEMBERS / member.folder / CLIENTS) for member in members]
    whole, records = record(tables[0]), []
    for member, clients, algorithm in zip(members, tables, _member_algorithms(path, whole), strict=True):
        if not histories.keys() & {member.name, ""}:
            raise ConfigError(f"{path} is damaged: its log says nothing of {member.name}.")
        history = histories.get(member.name, first)
        own: dict[str, Any] = {"name": member.name, "algorithm": algorithm, "clients": clients, "history": history}
        records.append(replace(whole, **own, seconds=whole.seconds / len(members), rounds=len(history.rounds)))
    return records


def _read_histories(folder: RunFolder, end: RunEnd, name: str) -> dict[str, History]:
    """The history of a run by the name "", or those of the members of a family by their names."""
    from equipoise.observers import EvaluationPoint, History

    histories = {"": History(stopped=end.stopped)}
    for line in content_of(folder.rounds).decode().splitlines():
        event = parse_json(line)
        kind = event.pop("event")
        history = histories.setdefault(made_of(str, event.get("run", "")), History())
        if kind == "round":
            history.rounds.append(made_of(RoundReport, {"run": name, **_numbers(event)}))
        elif kind == "evaluation":
            splits = {split: _numbers(figures) for split, figures in event["splits"].items()}
            history.points.append(made_of(EvaluationPoint, event | {"splits": splits}))
    for member, stopped in end.stopped_members.items():
        histories.setdefault(member, History()).stopped = stopped
    if len(histories) > 1 and not histories[""].rounds:
        del histories[""]
    return histories


def _numbers(figures: dict[str, Any]) -> dict[str, Any]:
    """The fields with NaN in place of JSON's null, except for fields that may be None."""
    optional = {each.name for each in fields(RoundReport) if "None" in str(each.type)}
    return {name: float("nan") if value is None and name not in optional else value for name, value in figures.items()}


def _member_algorithms(path: Path, whole: RunRecord) -> list[Any]:
    """The algorithm of each member of a family: that of the folder, with the member's risk."""
    from equipoise.algorithm import Algorithm
    from equipoise.experiment.recorded import RecordedPart
    from equipoise.runs.family import KNOBS, family_members

    manifest = read_manifest(path)
    values, base = [member.value for member in manifest.members], whole.algorithm
    kind = KNOBS[manifest.knob]
    if isinstance(base, Algorithm):
        risk = base.risk if isinstance(base.risk, kind) else Algorithm().risk
        return list(family_members(replace(base, risk=risk), {manifest.knob: values})[1].values())
    recorded: Any = base
    return [replace(recorded, risk=RecordedPart(f"{kind.__name__}({manifest.knob}={value!r})")) for value in values]


def family_knob(path: Path, records: Sequence[RunRecord]) -> dict[str, Any] | None:
    """The numbers of the knob of a family's folder, given the records of its members; None for any other folder."""
    from equipoise.report.knob import MemberClients, knob_data

    if not (path / MANIFEST).exists():
        return None
    manifest = read_manifest(path)
    pairs = zip(manifest.members, records, strict=True)
    members = [MemberClients(member.value, member.name, record.clients) for member, record in pairs]
    private = any(record.algorithm.privacy is not None for record in records)
    return knob_data(manifest.knob, members, manifest.judged_on, error_is_loss=manifest.error_is_loss, private=private)


def count_training_clients(path: str | Path, record: RunRecord) -> int:
    """How many clients a finished run could draw from; a federation lists them in federation.json."""
    roster = Path(path) / "federation.json"
    if roster.exists():
        with FileGuard(roster, ConfigError, cure="Run it anew in another folder."):
            return sum("train" in member["splits"] for member in parse_json(roster)["clients"])
    sample = record.sample_of("train")
    return sample[1] if sample is not None else len(record.clients.where("train"))


def finished_runs(folders: Iterable[Path]) -> list[Path]:
    """The folders of finished runs: a run's own folder, or all that lie in the folder of a study, in its order."""
    runs: list[Path] = []
    for path in folders:
        if RunFolder(path).config.exists():
            runs.append(path)
            continue
        ended = [each.parent for each in sorted(path.glob("*/config.toml")) if RunFolder(each.parent).finished]
        if not ended:
            raise ConfigError(f"{path} holds no finished run. Name the folders that equipoise run or compare has made.")
        file = path / ORDER
        order = content_of(file).decode().splitlines() if file.is_file() else []  # its first method is the baseline
        runs += sorted(ended, key=lambda each: order.index(each.name) if each.name in order else len(order))
    return list(dict.fromkeys(runs))
