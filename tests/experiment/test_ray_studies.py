"""Studies on a real Ray cluster: the same runs as by processes, only what is missing, and lost runs go on elsewhere."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from equipoise.experiment import ray_studies
from equipoise.experiment.run_files import RunFolder
from equipoise.experiment.scheduler import run_all
from equipoise.experiment.study import prepare, read_study

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.cluster,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray's own
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
STUDY = """
[study]
seeds = 2
[methods.FedAvg]
[methods.tail]
risk = {{name = "superquantile", tail = 0.5}}
[data]
name = "label_shift"
train_clients = 12
[model]
name = "softmax"
[train]
rounds = {rounds}
clients_per_round = 6
checkpoint_every = 1
"""


def planned(folder, rounds=3):
    file = folder / "study.toml"
    file.write_text(STUDY.format(rounds=rounds))
    runs = read_study(file, out=folder / "runs")
    prepare(runs)
    return runs


def models(runs):
    return [run.folder.model.read_bytes() for run in runs]


def test_a_study_on_a_cluster_makes_the_runs_of_processes(cluster, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    here, there = planned(tmp_path / "here"), planned(tmp_path / "there")
    run_all(here, workers=2, console=Console(quiet=True))
    jobs = run_all(there, workers=1, console=Console(quiet=True), ray=cluster.address)
    assert [job.status for job in jobs] == ["done"] * 4
    assert {job.node for job in jobs} == {os.uname().nodename}
    assert models(here) == models(there)
    again = run_all(there, workers=1, console=Console(quiet=True), ray=cluster.address)
    assert [job.status for job in again] == ["there already"] * 4
    assert not (tmp_path / "there" / "runs" / ray_studies._TOKEN).exists()


def test_folders_that_nodes_do_not_see_are_brought_back(cluster, tmp_path, monkeypatch):
    runs = planned(tmp_path)
    monkeypatch.setattr(ray_studies, "write_atomically", lambda file, content: None)  # no token: as on a node elsewhere
    jobs = run_all(runs, workers=1, console=Console(quiet=True), ray=cluster.address)
    assert [job.status for job in jobs] == ["done"] * 4
    assert all(RunFolder(run.folder.path).finished for run in runs)


def processes_of(name):
    """The numbers of the processes whose title begins so: Ray gives a worker the name of its task."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if each.read_bytes().startswith(name.encode()):
                found.append(int(each.parent.name))
        except OSError:
            continue
    return found


def test_a_run_that_is_lost_goes_on_from_its_checkpoint(cluster, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    here, there = planned(tmp_path / "here", 80), planned(tmp_path / "there", 80)
    killed = []

    def kill():
        until = time.monotonic() + 60
        while not killed and time.monotonic() < until:
            if any(run.folder.checkpoint.exists() for run in there) and (at_work := processes_of("ray::_train_folder")):
                os.kill(at_work[0], signal.SIGKILL)
                killed.append(at_work[0])
            time.sleep(0.01)

    killer = threading.Thread(target=kill)
    killer.start()
    jobs = run_all(there, workers=1, console=Console(quiet=True), ray=cluster.address)
    killer.join()
    assert killed
    assert [job.status for job in jobs] == ["done"] * 4, [job.message for job in jobs]
    assert sum(job.starts for job in jobs) == 5
    assert any("started 2 times" in job.message for job in jobs)
    run_all(here, workers=2, console=Console(quiet=True))
    assert models(here) == models(there)
