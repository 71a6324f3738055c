"""Runs in folders that are killed and go on; studies in which a run fails."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from equipoise.core.files import locked, write_atomically
from equipoise.core.screen import Screen
from equipoise.errors import ConfigError
from equipoise.experiment import folder, scheduler, study
from equipoise.experiment.build import build
from equipoise.experiment.config import RunConfig
from equipoise.runs.checkpoint import CheckpointError

TABLE = {
    "data": {"name": "label_shift", "train_clients": 300, "validation_clients": 5, "test_clients": 20, "examples": 60},
    "model": {"name": "softmax"},
    "algorithm": {
        "risk": {"name": "superquantile", "tail": 0.5, "eta_every": 3},
        "server": {"name": "adam", "lr": 0.05},
        "solver": {"name": "adaptive_prox", "solver": {"name": "sgd", "lr": 0.1, "epochs": 2}},
        "averaging": {"name": "geometric", "rate": 0.01},
    },
    "train": {"rounds": 60, "clients_per_round": 100, "evaluate_every": 7, "checkpoint_every": 1, "threads": 1},
}


def worker(path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "equipoise.experiment.worker", str(path)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def claimed(path, table):
    place = folder.claim(path)
    write_atomically(place.config, RunConfig.of(table).text().encode())
    return place


@pytest.mark.slow
def test_a_run_killed_at_ten_random_moments_ends_with_the_same_files(tmp_path):
    whole, killed = claimed(tmp_path / "whole", TABLE), claimed(tmp_path / "killed", TABLE)
    first = worker(whole.path)
    assert first.communicate()[0] == b""
    assert first.returncode == 0
    chance = random.Random(0)
    kills = 0
    while kills < 10:
        before = killed.rounds.stat().st_size if killed.rounds.exists() else 0
        process = worker(killed.path)
        grown = before + chance.randint(1, 900)  # bytes of log: some rounds, an evaluation or the start
        while process.poll() is None and (not killed.rounds.exists() or killed.rounds.stat().st_size < grown):
            time.sleep(0.001)
        time.sleep(chance.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        if killed.finished:
            break
        kills += 1
    assert kills == 10, "the run ended before it was killed ten times: give it more rounds"
    last = worker(killed.path)
    output = last.communicate()[0]
    assert last.returncode == 0, output
    assert killed.model.read_bytes() == whole.model.read_bytes()
    assert killed.clients.read_bytes().count(b"killed") > 0  # the method's name is the folder's; all else is equal:
    first, second = (folder.read_record(place.path) for place in (whole, killed))
    assert first.clients.error.equal(second.clients.error)
    assert first.history.points == second.history.points
    for a, b in zip(first.history.rounds, second.history.rounds, strict=True):
        assert (a.round, a.loss, a.trained) == (b.round, b.loss, b.trained)
    events = [json.loads(line)["event"] for line in killed.rounds.read_text().splitlines()]
    assert events.count("round") == 60
    assert events[-1] == "end"


SMALL = {
    "data": {"name": "label_shift", "train_clients": 12, "validation_clients": 2, "test_clients": 3, "examples": 20},
    "model": {"name": "softmax"},
    "train": {"rounds": 3, "clients_per_round": 6},
}


def test_what_can_and_cannot_be_resumed(tmp_path):
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        folder.to_resume(tmp_path)
    place = claimed(tmp_path / "run", SMALL)
    with pytest.raises(ConfigError, match=r"has not ended\. Go on with it: equipoise run --resume"):
        folder.claim(tmp_path / "run")
    with pytest.raises(ConfigError, match="has not ended"):
        folder.read_record(place.path)
    folder.run(build(RunConfig.read(folder.to_resume(place.path).config)), place, progress=False)
    with pytest.raises(ConfigError, match="has ended; there is nothing to resume"):
        folder.to_resume(place.path)


def test_a_record_equals_the_result_it_was_written_from(tmp_path):
    place = folder.claim(tmp_path / "tail")
    table = SMALL | {
        "algorithm": {"risk": {"name": "superquantile", "tail": 0.5}},
        "train": SMALL["train"] | {"evaluate_every": 1},
    }
    result = folder.run(build(RunConfig.of(table)), place, progress=False)
    record = folder.read_record(place.path)
    assert str(record.summary()) == str(result.summary())
    assert (record.name, record.seed, record.algorithm) == ("tail", 0, result.algorithm)
    assert record.history.rounds == result.history.rounds
    assert record.history.points == result.history.points
    assert record.clients.client == result.clients.client
    assert record.seconds == result.seconds


def test_a_full_disk_is_refused_with_the_path(tmp_path, monkeypatch):
    place = folder.claim(tmp_path / "run")
    monkeypatch.setattr(folder.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 2**20})())
    with pytest.raises(ConfigError, match=r"run has 1 MB of free disk, and the run needs about \d+ MB\. Make room"):
        folder.run(build(RunConfig.of(SMALL)), place, progress=False)


# --------------------------------------------------------------------------------------------------------------- studies

STUDY = """
[study]
seeds = 2
[methods.FedAvg]
[methods.broken]
solver = {lr = 1e38}
[data]
name = "label_shift"
train_clients = 12
validation_clients = 2
test_clients = 3
examples = 20
[model]
name = "softmax"
[train]
rounds = 20
clients_per_round = 6
"""


def test_a_failing_run_is_reported_and_the_others_are_kept(tmp_path):
    file = tmp_path / "study.toml"
    file.write_text(STUDY)
    runs = study.read_study(file, ["study.seeds=[3]"], out=tmp_path / "out")
    study.prepare(runs)
    console = Screen(quiet=True)
    jobs = scheduler.run_all(runs, workers=2, console=console)
    assert {job.run.method: job.status for job in jobs} == {"FedAvg": "done", "broken": "failed"}
    broken = next(job for job in jobs if job.status == "failed")
    assert "round" in broken.message
    assert "Traceback" not in (broken.folder.path / "run.log").read_text()
    assert folder.read_record(tmp_path / "out" / "FedAvg-3").name == "FedAvg"
    # The same again runs only what is missing.
    before = (tmp_path / "out" / "FedAvg-3" / "rounds.jsonl").stat().st_mtime_ns
    jobs = scheduler.run_all([run for run in runs if run.method == "FedAvg"], workers=2, console=console)
    assert [job.status for job in jobs] == ["there already"]
    assert (tmp_path / "out" / "FedAvg-3" / "rounds.jsonl").stat().st_mtime_ns == before


def test_methods_seeds_and_sweeps_multiply(tmp_path):
    file = tmp_path / "study.toml"
    file.write_text(STUDY + "[algorithm.solver]\nlr = 0.5\nepochs = 2\n[sweep]\n'algorithm.solver.batch_size' = [5, 10]\n")
    runs = study.read_study(file, out=tmp_path)
    assert len(runs) == 2 * 2 * 2
    assert runs[0].method == "FedAvg, batch_size 5"
    solver = runs[-1].config.algorithm().solver
    assert (solver.lr, solver.epochs, solver.batch_size) == (1e38, 2, 10)
    assert {run.folder.path.name for run in runs} >= {"FedAvg-batch_size-5-0", "broken-batch_size-10-1"}
    assert all(run.config.train.threads == 1 for run in runs)


@pytest.mark.parametrize(
    ("addition", "words"),
    [
        ("[methods.x]\nrisk = {name = 'superquantil'}", "methods.x: algorithm.risk.name"),
        ("[sweep]\nlr = 3", "sweep.lr must be a list of values, but is 3"),
        ("[extra]\na = 1", "extra"),
        ("[methods.none]", 'methods."none" must have a name'),
        ('[sweep]\n"train.seed" = [3, 4]', "sweep.train.seed is given by the study itself"),
        ('[sweep]\n"train.rounds.x" = [3]', "rounds is 20, so it has no key 'x'"),
    ],
)
def test_what_a_study_cannot_be_is_named(addition, words, tmp_path):
    file = tmp_path / "study.toml"
    file.write_text(STUDY + addition + "\n")
    with pytest.raises(ConfigError) as caught:
        study.read_study(file, out=tmp_path)
    assert words in str(caught.value)


def test_seeds_are_the_studys_business(tmp_path):
    file = tmp_path / "study.toml"
    file.write_text(STUDY.replace("rounds = 20", "rounds = 20\nseed = 3"))
    with pytest.raises(ConfigError, match=r"train\.seed is given by the study"):
        study.read_study(file, out=tmp_path)
    file.write_text(STUDY)
    for wrong in ("study.seeds=0", "study.seeds=[1,1]", "study.seeds=[-1]"):
        with pytest.raises(ConfigError, match=r"study\.seeds must be"):
            study.read_study(file, [wrong], out=tmp_path)


def test_a_folder_of_another_configuration_is_refused(tmp_path):
    file = tmp_path / "study.toml"
    file.write_text(STUDY)
    study.prepare(study.read_study(file, out=tmp_path / "out"))
    study.prepare(study.read_study(file, out=tmp_path / "out"))  # the same again is fine
    with pytest.raises(ConfigError, match=r"train\.rounds is 20 there, 30 here"):
        study.prepare(study.read_study(file, ["train.rounds=30"], out=tmp_path / "out"))


def test_other_data_are_refused_on_resume(tmp_path):
    place = claimed(tmp_path / "run", SMALL | {"train": SMALL["train"] | {"checkpoint_every": 1}})
    config = RunConfig.read(place.config)
    experiment = build(config)
    experiment.train(checkpoint=place.checkpoint)
    place.config.write_text(place.config.read_text().replace("examples = 20", "examples = 21"))
    with pytest.raises(CheckpointError, match="differs in data: label_shift, 12 clients"):
        folder.run(build(RunConfig.read(place.config)), place, progress=False)


def test_two_processes_cannot_work_in_one_folder(tmp_path):
    place = claimed(tmp_path / "run", SMALL)
    with locked(place.path / ".lock", wait=False), pytest.raises(ConfigError, match="Another process works in"):
        folder.run(build(RunConfig.read(place.config)), place, progress=False)


def test_a_log_that_lost_lines_is_written_anew_from_the_checkpoint(tmp_path):
    place = claimed(tmp_path / "run", SMALL | {"train": SMALL["train"] | {"checkpoint_every": 1, "evaluate_every": 1}})
    whole = folder.run(build(RunConfig.read(place.config)), place, progress=False)
    place.rounds.write_text("")
    folder.run(build(RunConfig.read(place.config)), place, progress=False)
    record = folder.read_record(place.path)
    assert record.history.rounds == whole.history.rounds
    assert record.history.points == whole.history.points


@pytest.mark.parametrize("file", ["clients.parquet", "rounds.jsonl"])
def test_damaged_folders_are_named(file, tmp_path):
    place = claimed(tmp_path / "run", SMALL)
    folder.run(build(RunConfig.read(place.config)), place, progress=False, report=False)
    if file == "clients.parquet":
        place.clients.write_bytes(b"")
    else:
        lines = place.rounds.read_text().splitlines(keepends=True)
        place.rounds.write_text("".join([*lines[:1], *lines[2:]]))
    with pytest.raises(ConfigError, match="damaged"):
        folder.read_record(place.path)


def test_the_first_method_of_a_study_stays_the_first(tmp_path):
    file = tmp_path / "study.toml"
    file.write_text(
        STUDY.replace("[methods.FedAvg]", "[methods.zero]").replace("[methods.broken]\nsolver = {lr = 1e38}", "[methods.a]")
    )
    runs = study.read_study(file, ["study.seeds=1", "train.rounds=1"], out=tmp_path / "out")
    study.prepare(runs)
    for run in runs:
        folder.run(build(RunConfig.read(run.folder.config)), run.folder, progress=False, report=False)
    assert [path.name for path in folder.finished_runs([tmp_path / "out"])] == ["zero-0", "a-0"]
