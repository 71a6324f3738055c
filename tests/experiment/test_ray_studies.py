"""Studies on a real Ray cluster: the same runs as by processes, only what is missing, and lost runs go on elsewhere."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from equipoise.core.screen import Screen
from equipoise.engines.cluster import ray_tasks
from equipoise.experiment.run_files import RunFolder
from equipoise.experiment.scheduler import run_all
from equipoise.experiment.search import read_search, run_search
from equipoise.experiment.study import prepare, read_study
from equipoise.reproduce import reproduce

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
    run_all(here, workers=2, console=Screen(quiet=True))
    jobs = run_all(there, workers=1, console=Screen(quiet=True), ray=cluster.address)
    assert [job.status for job in jobs] == ["done"] * 4
    assert {job.node for job in jobs} == {os.uname().nodename}
    assert models(here) == models(there)
    again = run_all(there, workers=1, console=Screen(quiet=True), ray=cluster.address)
    assert [job.status for job in again] == ["there already"] * 4
    assert not (tmp_path / "there" / "runs" / ray_tasks.TOKEN).exists()


def test_folders_that_nodes_do_not_see_are_brought_back(cluster, tmp_path, monkeypatch):
    runs = planned(tmp_path)
    monkeypatch.setattr(ray_tasks, "write_atomically", lambda file, content: None)  # no token: as on a node elsewhere
    jobs = run_all(runs, workers=1, console=Screen(quiet=True), ray=cluster.address)
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


def kill_tasks(times, ready, killed):
    """SIGKILL the process of a task so many times, each time that `ready` says so."""
    until = time.monotonic() + 120
    while len(killed) < times and time.monotonic() < until:
        for process in processes_of("ray::_on_node"):
            if ready() and process not in killed and len(killed) < times:
                os.kill(process, signal.SIGKILL)
                killed.append(process)
        time.sleep(0.01)


@contextmanager
def tasks_killed(times, ready):
    killed = []
    killer = threading.Thread(target=kill_tasks, args=(times, ready, killed))
    killer.start()
    yield killed
    killer.join()
    assert len(killed) == times


def test_a_run_that_is_lost_again_and_again_is_given_up_by_name(cluster, tmp_path):
    runs = planned(tmp_path, 2000)[:1]
    with tasks_killed(ray_tasks.MOST_STARTS, lambda: True):
        (job,) = run_all(runs, workers=1, console=Screen(quiet=True), ray=cluster.address)
    assert (job.status, job.starts) == ("failed", ray_tasks.MOST_STARTS)
    assert re.match(r"its worker or node was lost: .* It was started 3 times", job.message)


def test_a_reproduction_on_a_cluster_makes_the_runs_of_one_machine(cluster, tmp_path):
    """With a task that is lost in the middle: the runs and figures are the same."""
    given = {"methods": "0-stragglers-fedprox-mu-0,50-stragglers-fedavg", "seeds": 2, "say": lambda line: None}
    here = reproduce("fedprox-synthetic", out=tmp_path / "here", **given)
    lines = []
    there = tmp_path / "there"
    with tasks_killed(1, lambda: True):
        folder = reproduce("fedprox-synthetic", out=there, ray=cluster.address, **{**given, "say": lines.append})
    assert not (folder / ray_tasks.TOKEN).exists()
    one, two = (
        {file.name: json.loads(file.read_text()) for file in sorted((place / "runs").iterdir())} for place in (here, folder)
    )
    assert one.keys() == two.keys()
    for name, run in one.items():
        assert run["figures"] == pytest.approx(two[name]["figures"], rel=1e-3)  # other chunks add up in another order
        assert two[name]["node"] == os.uname().nodename
    assert any("It was started 2 times, because its worker or node was lost." in line for line in lines)
    assert any(run.get("starts") == 2 for run in two.values())
    again = []
    reproduce("fedprox-synthetic", out=there, ray=cluster.address, **{**given, "say": again.append})
    assert "0 runs to make, 4 kept from before" in again[0]


SEARCH = """
[search]
criterion = "validation_90"
[search.space]
"algorithm.solver.lr" = [0.001, 0.1]
[data]
name = "label_shift"
train_clients = 12
validation_clients = 6
[model]
name = "softmax"
[train]
rounds = 3
clients_per_round = 6
"""


def test_a_search_on_a_cluster_finds_what_processes_find(cluster, tmp_path, monkeypatch):
    started, start = [], ray_tasks.RayTasks.start
    monkeypatch.setattr(ray_tasks.RayTasks, "start", lambda self, *given: started.append(given) or start(self, *given))
    file, found = tmp_path / "search.toml", {}
    file.write_text(SEARCH)
    for place, address in (("here", None), ("there", cluster.address)):
        search = read_search(file)
        found[place] = run_search(search, tmp_path / place, workers=2, console=Screen(quiet=True), ray=address)
    one, two = ([(trial.values, trial.criterion) for trial in found[place]] for place in ("here", "there"))
    assert one == two
    assert len({criterion for _, criterion in one}) == 2
    assert len(started) == 2


def test_a_run_that_is_lost_goes_on_from_its_checkpoint(cluster, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    here, there = planned(tmp_path / "here", 80), planned(tmp_path / "there", 80)
    with tasks_killed(1, lambda: any(run.folder.checkpoint.exists() for run in there)):
        jobs = run_all(there, workers=1, console=Screen(quiet=True), ray=cluster.address)
    assert [job.status for job in jobs] == ["done"] * 4, [job.message for job in jobs]
    assert sum(job.starts for job in jobs) == 5
    assert any("started 2 times" in job.message for job in jobs)
    run_all(here, workers=2, console=Screen(quiet=True))
    assert models(here) == models(there)


def test_a_study_whose_driver_is_killed_leaves_nothing_running_and_goes_on(cluster, tmp_path):
    import ray

    runs = planned(tmp_path, 300)
    command = [sys.executable, "-m", "equipoise", "compare", str(tmp_path / "study.toml"), "--out", str(tmp_path / "runs")]
    driver = subprocess.Popen([*command, "--ray", cluster.address], stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: any(run.folder.checkpoint.exists() for run in runs))
        assert processes_of("ray::_on_node")
    finally:
        driver.kill()
        driver.wait()
    wait_until(lambda: not processes_of("ray::_on_node") and not processes_of("ray::Board"))
    wait_until(lambda: ray.available_resources().get("CPU", 0) == ray.cluster_resources()["CPU"])
    assert not all(run.folder.finished for run in runs)
    jobs = run_all(runs, workers=1, console=Screen(quiet=True), ray=cluster.address)
    assert {job.status for job in jobs} <= {"done", "there already"}
    assert all(run.folder.finished for run in runs)


def wait_until(true, seconds=60.0):
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.05)
