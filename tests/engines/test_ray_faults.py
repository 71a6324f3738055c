"""Faults on a real cluster of three nodes: workers and nodes that die, hang or come late, and a driver that is killed."""

import logging
import os
import random
import re
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import equipoise as eq
from equipoise import risk, solvers
from equipoise.core.version import VERSION
from equipoise.data.clients import FederatedData
from equipoise.engines import Ray
from equipoise.engines.cluster import ray_engine
from equipoise.engines.cluster.ray_extra import OUR_OWN
from equipoise.errors import EquipoiseNotice, IncompatibleParts
from made_clients import make_clients
from ray_cluster import MEMORY, cut_small, python_path, skip_without_ray

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.cluster,
    pytest.mark.usefixtures("small_pieces"),
    pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray leaves files of the nodes that it starts open
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
CLUSTER = {"nodes": 3, "kills": True}
ROUNDS = 40
TAIL = eq.Algorithm(risk=risk.Superquantile(0.5), solver=solvers.SGD(lr=0.1, batch_size=4))


@pytest.fixture(scope="module")
def data():
    return forty_clients()


def forty_clients():
    return FederatedData(make_clients([5 + k % 17 for k in range(40)]), classes=3, name="forty")


def trained(data, engine, model=(4, 3), **options):
    options = {"rounds": ROUNDS, "clients_per_round": 24, "seed": 3, "progress": False} | options
    return eq.train(eq.models.Softmax(*model), data, TAIL, engine=engine, **options)


@pytest.fixture(scope="module")
def undisturbed(data):
    """The run by the simulator of one process; what Ray makes of it has the bits of `alone`."""
    return trained(data, "simulator")


@pytest.fixture(scope="module")
def alone(cluster, data):
    with pytest.MonkeyPatch.context() as patch:
        cut_small(patch)
        return trained(data, Ray(workers=1)).params


def pool():
    (held,) = ray_engine._pools.values()
    return held


class After(eq.observers.Observer):
    """Does something once, between two rounds, or in a thread some time after a round has begun."""

    def __init__(self, round_index, act, delay=None):
        self.round_index, self.act, self.delay, self.thread = round_index, act, delay, None

    def on_round(self, report):
        if report.round == self.round_index and self.delay is None:
            self.act()
        elif report.round == self.round_index:
            self.thread = threading.Timer(self.delay, self.act)
            self.thread.start()

    def on_end(self):
        if self.thread is not None:
            self.thread.join()


def wait_until(true, seconds=60.0):
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.parametrize("moment", range(10))
def test_a_worker_that_is_killed_costs_its_pieces_only(cluster, data, alone, undisturbed, moment):
    draw = random.Random(moment)

    def kill():
        os.kill(draw.choice(pool().workers).process, signal.SIGKILL)

    result = trained(data, Ray(), observers=[After(draw.randrange(ROUNDS - 10), kill, draw.random() * 0.02)])
    assert torch.equal(result.params, alone)
    torch.testing.assert_close(result.params, undisturbed.params, rtol=1e-3, atol=1e-4)


def test_a_node_that_dies_and_one_that_comes(cluster, data, alone):
    before = {worker.node for worker in pool().workers}
    victim = cluster.worker_nodes.copy().pop()
    observers = [After(5, lambda: cluster.remove_node(victim, allow_graceful=False), 0.01)]
    result = trained(data, Ray(), observers=observers)
    assert torch.equal(result.params, alone)
    assert victim.node_id not in {worker.node for worker in pool().workers}
    came = []
    observers = [After(2, lambda: came.append(cluster.add_node(**cluster.options)))]
    result = trained(data, Ray(), observers=observers, rounds=60)
    assert result.history.rounds
    wait_until(lambda: (pool().look(now=True), came[0].node_id in {worker.node for worker in pool().workers})[1])
    assert came[0].node_id not in before
    again = trained(data, Ray())
    assert torch.equal(again.params, alone)
    assert pool().answers[came[0].node_id] > ROUNDS


def test_a_worker_that_hangs_is_given_up(cluster, data, alone):
    trained(data, Ray(patience=1.0), rounds=3)
    hung = []

    def stop():
        hung.append(pool().workers[-1].process)
        os.kill(hung[0], signal.SIGSTOP)

    with pytest.warns(EquipoiseNotice, match="does not answer, and is given up"):
        result = trained(data, Ray(patience=1.0), observers=[After(5, stop, 0.0)])
    assert torch.equal(result.params, alone)
    wait_until(lambda: not Path(f"/proc/{hung[0]}").exists())


DRIVER = """
import sys
import equipoise as eq
sys.path.insert(0, {tests!r})
from test_ray_faults import Ray, cut_small, forty_clients, pytest, trained
cut_small(pytest.MonkeyPatch())
saving = eq.Checkpoints({file!r}, every=1)

class Slow(eq.observers.Observer):
    def on_round(self, report):
        print(report.round, flush=True)
        import time; time.sleep(0.02)

trained(forty_clients(), Ray(address={address!r}), checkpoint=saving, observers=[Slow()])
"""


@pytest.mark.parametrize("round_index", [4, 23])
def test_a_driver_that_is_killed_is_resumed_with_another_number_of_workers(cluster, data, alone, tmp_path, round_index):
    import ray

    ray_engine._pools.clear()  # the other driver needs their CPUs
    file, here = tmp_path / "run.ckpt", Path(__file__).parent
    code = DRIVER.format(tests=str(here), file=str(file), address=cluster.address)
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        for line in driver.stdout:
            if line.strip() == str(round_index):
                break
    finally:
        driver.kill()
        driver.communicate()
    wait_until(lambda: ray.available_resources().get("CPU", 0) == ray.cluster_resources()["CPU"])  # nothing is left running
    result = trained(data, Ray(workers=2), checkpoint=file)
    assert len(result.history.rounds) == ROUNDS
    assert torch.equal(result.params, alone)


LARGE_DRIVER = """
import sys, time
sys.path.insert(0, {tests!r})
from test_ray_faults import FederatedData, Ray, make_clients, trained
data = FederatedData(make_clients([1000] * 40, features=100), classes=3, name="large")
trained(data, Ray(address={address!r}), rounds=2, model=(100, 3))
print("trained", flush=True)
time.sleep(600)
"""


def test_shared_memory_of_a_driver_that_is_killed_is_free_again(cluster):
    """16 MB of data are in the object stores of a cluster that goes on; they go with the driver that sent them."""
    import ray

    ray_engine._pools.clear()

    def held():
        return ray.cluster_resources()["object_store_memory"] - ray.available_resources().get("object_store_memory", 0)

    wait_until(lambda: held() < 1_000_000)
    code = LARGE_DRIVER.format(tests=str(Path(__file__).parent), address=cluster.address)
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout.readline() == "trained\n"
        wait_until(lambda: held() > 10_000_000)
    finally:
        driver.kill()
        driver.communicate()
    wait_until(lambda: held() < 1_000_000)
    assert ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"]


def test_other_versions_are_refused_by_name(cluster, data, tmp_path):
    """A node whose equipoise says another version: a copy of the package with another number."""
    import shutil

    ray_engine._pools.clear()
    shutil.copytree(Path(eq.__file__).parent, tmp_path / "equipoise", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "equipoise" / "core" / "version.py").write_text('VERSION = "0.0.9"\n')
    before = os.environ["PYTHONPATH"]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(tmp_path), before])
    try:
        node = cluster.add_node(**cluster.options)
    finally:
        os.environ["PYTHONPATH"] = before
    try:
        words = rf"Node .* has equipoise 0\.0\.9, but the driver has equipoise {re.escape(VERSION)}"
        with pytest.raises(IncompatibleParts, match=words):
            trained(data, Ray(), rounds=1)
    finally:
        cluster.remove_node(node)
        ray_engine._pools.clear()


@dataclass(frozen=True, repr=False)
class ShortOfMemory(solvers.SGD):
    """SGD whose step needs more memory than there is for more than `most` clients at once, on one node or on all."""

    most: int = 1
    node: str = ""

    def step(self, weights, gradient, memory, *, anchor, lr):
        clients = weights.shape[0] if weights.dim() > 1 else 1
        if clients > self.most and self.node in ("", here()):
            raise MemoryError
        super().step(weights, gradient, memory, anchor=anchor, lr=lr)


def here():
    import ray

    return ray.get_runtime_context().get_node_id() if ray.is_initialized() else "no node"


def with_short_memory(data, **given):
    """A run by nodes whose memory is short, and one by the simulator that has enough."""
    options = {"rounds": 2, "clients_per_round": 24, "progress": False}
    solver = ShortOfMemory(lr=0.1, batch_size=4, **given)
    result = eq.train(eq.models.Softmax(4, 3), data, eq.Algorithm(solver=solver), engine=Ray(), **options)
    plain = eq.Algorithm(solver=solvers.SGD(lr=0.1, batch_size=4))
    expected = eq.train(eq.models.Softmax(4, 3), data, plain, engine="simulator", **options)
    torch.testing.assert_close(result.params, expected.params, rtol=1e-3, atol=1e-4)


def test_chunks_get_smaller_where_memory_is_short(cluster, data):
    ray_engine._pools.clear()
    with pytest.warns(EquipoiseNotice, match=r"ran out of memory, and works in chunks of 1 clients .* last bits"):
        with_short_memory(data)


def test_a_node_without_memory_for_one_client_is_left_out(cluster, data):
    ray_engine._pools.clear()
    trained(data, Ray(), rounds=1)  # workers are there on every node
    victim = pool().workers[-1].node
    with pytest.warns(EquipoiseNotice, match=r"has too little memory for one client. It gets no more work"):
        with_short_memory(data, most=0, node=victim)
    assert victim in pool().left_out
    assert victim not in pool().nodes()
    ray_engine._pools.clear()


def failing_loss(outputs, targets):
    raise ZeroDivisionError("this loss cannot be found")


def test_errors_of_remote_work_name_the_node(cluster, data):
    from equipoise.core.task import Task
    from equipoise.testing.small_run import draw_everyone

    task = Task.of(eq.models.Softmax(4, 3), failing_loss)
    with pytest.raises(Exception, match="this loss cannot be found") as failure:
        Ray().start(task, data).losses(task.read_model(), draw_everyone(data, 0))
    assert "in a worker on" in "".join(failure.value.__notes__)
    assert os.uname().nodename in "".join(failure.value.__notes__)


def loss_that_logs(outputs, targets):
    logging.getLogger("my.loss").info("%d outputs", outputs.shape[-1])
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")


def test_what_remote_work_logs_is_logged_at_the_driver_with_the_nodes_name(cluster, data, caplog):
    from equipoise.core.task import Task
    from equipoise.testing.small_run import draw_everyone

    ray_engine._pools.clear()
    task = Task.of(eq.models.Softmax(4, 3), loss_that_logs)
    with caplog.at_level(logging.INFO):
        Ray().start(task, data).losses(task.read_model(), draw_everyone(data, 0))
    ray_engine._pools.clear()
    heard = [record for record in caplog.records if record.name == "my.loss"]
    assert {record.levelno for record in heard} == {logging.INFO}
    assert all(re.fullmatch(rf"{re.escape(os.uname().nodename)} \(\w+\): 3 outputs", record.getMessage()) for record in heard)


LOCAL_DRIVER = """
import sys, time
sys.path.insert(0, {tests!r})
from equipoise.engines.cluster.ray_extra import connect
from test_ray_faults import Ray, forty_clients, pool, trained
connect("local", num_cpus=2, object_store_memory=80 * 2**20)
trained(forty_clients(), Ray(), rounds=2)
print(*(worker.process for worker in pool().workers), flush=True)
time.sleep({wait})
"""


def processes_that_name(text):
    """Numbers and commands of the processes that run and whose environment has this text."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if text.encode() in (folder / "environ").read_bytes() and "State:\tZ" not in (folder / "status").read_text():
                found.append((int(folder.name), (folder / "cmdline").read_bytes()[:80]))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("end", ["by itself", "killed", "killed as Ray starts"])
def test_nothing_is_left_running_when_a_driver_with_its_own_ray_ends(end):
    """Neither workers nor Ray's own processes, and none of the memory that they shared.

    Agents of Ray that have just begun when their head is gone would look for it for a minute.
    """
    skip_without_ray()
    before, mark = set(os.listdir(MEMORY)), f"driver-{secrets.token_hex(8)}"
    code = LOCAL_DRIVER.format(tests=str(Path(__file__).parent), wait=0 if end == "by itself" else 600)
    environment = os.environ | {"PYTHONPATH": python_path(), "EQUIPOISE_TEST_DRIVER": mark}
    environment = {name: value for name, value in environment.items() if name not in OUR_OWN}
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        if end == "killed as Ray starts":
            # The agent's title shows that it has begun; where it is not seen, the driver is killed as soon as it has trained.
            wait_until(
                lambda: (
                    any(b"ray::DashboardAgent" in command for _, command in processes_that_name(mark))
                    or select.select([driver.stdout], [], [], 0)[0]
                )
            )
        else:
            workers = driver.stdout.readline().split()
            assert len(workers) == 2
            assert end == "by itself" or {int(worker) for worker in workers} < {each for each, _ in processes_that_name(mark)}
    finally:
        if end != "by itself":
            driver.kill()
        driver.communicate(timeout=120)
    wait_until(lambda: not processes_that_name(mark), 40.0)
    assert not {name for name in set(os.listdir(MEMORY)) - before if "plasma" in name or "ray" in name}


def test_tests_on_a_cluster_are_skipped_with_the_reason_where_shared_memory_is_short(monkeypatch):
    import ray_cluster

    monkeypatch.setattr(ray_cluster.shutil, "disk_usage", lambda path: SimpleNamespace(free=64 << 20))
    with pytest.raises(pytest.skip.Exception, match=r"shm has 64 MB free, and the cluster's object stores take 240 MB"):
        skip_without_ray()
