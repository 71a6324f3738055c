"""A disk that is full at any moment: the message names the file, and the command that goes on."""

import os
import re
import sys
from contextlib import suppress
from types import SimpleNamespace

import pytest

from equipoise.cli import app
from equipoise.core import files
from equipoise.errors import NotWritten
from equipoise.experiment import scheduler, worker
from equipoise.experiment.config import RunConfig
from equipoise.experiment.run_files import RunFolder
from equipoise.experiment.study import PlannedRun

pytestmark = pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
FULL = OSError(28, "No space left on device")
RUN = """
[data]
name = "label_shift"
train_clients = 6
validation_clients = 2
test_clients = 2
examples = 6
[model]
name = "softmax"
[train]
rounds = 2
clients_per_round = 3
engine = "loop"
checkpoint_every = 1
"""
PARTS = {
    "plain": "",
    "own models": '[algorithm]\npersonal = {name = "ditto"}\n',
    "kept by the solver": '[algorithm]\nsolver = {name = "adam", lr = 0.01, state = "kept"}\n',
    "private": """
[algorithm.privacy]
name = "differential_privacy"
epsilon = "none"
delta = 0.01
clip = 1.0
noise_multiplier = 1.0
method = "rdp"
""",
    "family": "[family]\ntails = [1.0, 0.5]\n",
}
FILES = {  # that a plain run has not
    "own models": ["state.clients.npy", "personal.npy.part"],
    "kept by the solver": ["state.solver.npy"],
    "private": ["ledger.jsonl"],
    "family": ["family.json"],
}


class NoRoom:
    """Refuses to write bytes from the primitive of this number on; without one it only notes what is done."""

    def __init__(self, first=None):
        self.first, self.seen = first, []

    def __call__(self, operation, path, *details):
        self.seen.append((operation, re.sub(r"^\.(.*)\.\d+\.tmp$", r"\1", path.name)))
        if self.first is not None and len(self.seen) > self.first and operation in ("write", "sync", "truncate"):
            raise OSError(*FULL.args)

    def moments(self):
        """The last write of each file, and each kind of primitive on the log of rounds: numbers of primitives."""
        written = [(number, *seen) for number, seen in enumerate(self.seen) if seen[0] in ("write", "sync", "truncate")]
        return {(operation if file == "rounds.jsonl" else "", file): number for number, operation, file in written}


def new_folder(path, parts):
    path.mkdir(parents=True)
    config = RunConfig.of(folder_table(parts))
    (path / "config.toml").write_text(config.text())
    return RunFolder(path)


def folder_table(parts):
    import tomllib

    return tomllib.loads(RUN + PARTS[parts])


@pytest.mark.parametrize("parts", PARTS)
def test_a_run_of_a_study_on_a_disk_that_is_full_at_any_write_names_the_file_and_how_to_go_on(
    parts, tmp_path, monkeypatch, capsys
):
    counting = NoRoom()
    monkeypatch.setattr(files, "recorder", counting)
    assert worker.main(str(new_folder(tmp_path / "whole", parts).path)) == 0
    chosen = {what: moment for what, moment in counting.moments().items() if parts == "plain" or what[1] in FILES[parts]}
    assert len(chosen) >= (8 if parts == "plain" else len(FILES[parts])), counting.seen
    for what, moment in chosen.items():
        place = new_folder(tmp_path / f"at-{moment}", parts)
        monkeypatch.setattr(files, "recorder", NoRoom(moment))
        assert worker.main(str(place.path)) == 2, what
        said = capsys.readouterr().err
        assert said.count("Error:") == 1
        assert "Errno" not in said
        assert "Observer" not in said
        assert str(place.path) in said.partition("No space left on device")[0], (what, said)
        assert f"equipoise run --resume {place.path}" in said, (what, said)


def test_a_trial_of_a_search_on_a_full_disk_names_the_search_and_not_a_run_with_test_clients(tmp_path, monkeypatch, capsys):
    place = new_folder(tmp_path / "trial", "plain")
    monkeypatch.setattr(files, "recorder", NoRoom(20))
    assert worker.main(str(place.path), without_test=True) == 2
    said = capsys.readouterr().err
    assert "the same equipoise tune" in said
    assert "--resume" not in said


@pytest.mark.parametrize("lock", ["run.log", ".lock", ".state.safetensors.lock"])
def test_a_lock_that_a_full_disk_has_no_room_for_is_named(lock, tmp_path, monkeypatch, capsys):
    from pathlib import Path

    place, really = new_folder(tmp_path / "run", "plain"), Path.open

    def opened(self, mode="r", *rest, **named):
        if self.name == lock and "a" in mode:
            raise OSError(*FULL.args, str(self))
        return really(self, mode, *rest, **named)

    monkeypatch.setattr(Path, "open", opened)
    assert worker.main(str(place.path)) == 2
    said = capsys.readouterr().err
    assert "could not be written: No space left on device. Make room on the disk." in said
    assert str(place.path) in said
    assert lock == "run.log" or f"equipoise run --resume {place.path}" in said


def test_own_models_without_a_checkpoint_say_which_folder_is_full(ragged, monkeypatch):
    import tempfile

    import equipoise as eq

    def full(*_, **__):
        raise OSError(*FULL.args)

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    algorithm = eq.Algorithm(personal=eq.personal.Ditto())
    with pytest.raises(NotWritten, match=r"temporary folder: No space left on device\. Make room there, or set TMPDIR"):
        eq.train(eq.models.Softmax(4, 3), ragged, algorithm, rounds=1, clients_per_round=2, progress=False)


@pytest.mark.parametrize("written", [b"", b"Error: /data/sta", b"Error: whole\n"])
def test_a_run_whose_log_was_cut_off_by_a_full_disk_is_said_to_be_so(written, tmp_path, monkeypatch):
    place = new_folder(tmp_path / "run", "plain")
    job = scheduler.ScheduledRun(PlannedRun(place, "plain", 0, RunConfig.of(folder_table("plain"))), "running")
    place.log.write_bytes(written)
    monkeypatch.setattr(scheduler.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))

    job.end(2, "exit code 2")
    if written.endswith(b"\n"):
        assert job.message == "whole"
    else:
        assert f"{place.log} could not be written: the disk is full. Make room on the disk." in job.message


def test_a_study_that_cannot_begin_on_a_full_disk_says_that_the_same_command_goes_on(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    (tmp_path / "study.toml").write_text(RUN + "[study]\nseeds = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "recorder", NoRoom(0))
    found = CliRunner().invoke(app, ["compare", "study.toml"])
    assert found.exit_code == 2
    said = found.output.replace("\n", " ")
    assert "config.toml could not be written: No space left on device. Make room on the disk." in said
    assert "The same command goes on where it stopped." in found.output


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only some systems have a device that is always full")
def test_standard_output_on_a_full_disk_is_named(monkeypatch, capsys):
    from typer.main import get_command

    full = open("/dev/full", "w", buffering=1)  # noqa: SIM115 — closing it fails
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as ended:
            get_command(app)(["methods", "risk"])
    with suppress(OSError):
        full.close()
    assert ended.value.code == 2
    assert "standard output could not be written: No space left on device" in capsys.readouterr().err
