"""What travels between a driver and its workers on a real cluster: models, cohorts, calls and data, and how often."""

import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import equipoise as eq
from equipoise import risk, solvers
from equipoise.core.task import Task
from equipoise.data.clients import FederatedData
from equipoise.engines import Ray
from equipoise.engines.cluster import packing, ray_engine
from equipoise.engines.cluster.packing import Letter
from made_clients import make_clients
from ray_cluster import skip_without_ray

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.cluster,
    pytest.mark.usefixtures("small_pieces"),
    pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray's own
]
CLUSTER = {"nodes": 1, "cpus": 2}
ROUNDS = 3
TAIL = eq.Algorithm(risk=risk.Superquantile(0.5), solver=solvers.SGD(lr=0.1, batch_size=4))  # scores the cohort, then trains


def trained(data, model, **options):
    options = {"rounds": ROUNDS, "clients_per_round": 8, "seed": 3, "progress": False} | options
    return eq.train(model, data, TAIL, engine=Ray(workers=2), **options)


def test_a_driver_needs_less_than_a_gigabyte_for_two_million_clients_of_a_store(tmp_path):
    """By a Ray of its own, 10,000 clients a round: as benchmarks/cluster_memory.py measures it."""
    skip_without_ray()
    program = Path(__file__).parents[2] / "benchmarks" / "cluster_memory.py"
    command = [sys.executable, str(program), "--rounds", "2", "--folder", str(tmp_path / "store")]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=400, env=environment).stdout
    assert said.startswith("2,000,000 clients")
    assert int(re.search(r"peak (\d+) MB", said)[1]) < 1000


class Letters:
    """The letters of local work and scoring that were sent while somebody listened."""

    def __init__(self):
        self.sent = []

    def models(self):
        return sum(bool(letter.models) for letter in self.sent)

    def bytes(self):
        return sum(len(part) for letter in self.sent for part in letter.own)


@contextmanager
def listening(monkeypatch):
    letters, arguments = Letters(), Letter.arguments

    def written(letter):
        letters.sent.append(letter)
        return arguments(letter)

    with monkeypatch.context() as patch:
        patch.setattr(Letter, "arguments", written)
        yield letters


class Sent(eq.observers.Observer):
    """How much had been sent after each round."""

    def __init__(self, count):
        self.count, self.after = count, []

    def on_round(self, report):
        self.after.append(self.count())

    @property
    def last_round(self):
        return self.after[-1] - self.after[-2]


def test_a_phase_is_one_call_for_each_worker_and_the_model_goes_with_the_first(cluster, monkeypatch):
    """Eight clients in four pieces, two workers, two phases: four letters a round at most, two of them with the model."""
    data = FederatedData(make_clients([4] * 12), classes=3, name="small")
    with listening(monkeypatch) as letters:
        calls, models = Sent(lambda: len(letters.sent)), Sent(letters.models)
        trained(data, eq.models.Softmax(4, 3), observers=[calls, models])
    assert 2 <= calls.last_round <= 4  # a worker that was slow may have no piece
    assert 1 <= models.last_round <= 2
    assert max(len(stretch.lengths) for letter in letters.sent for stretch in packing.opened(letter.own)) >= 2


def test_a_large_model_goes_to_the_object_store_once_a_round(cluster, monkeypatch):
    """A model of 1.4 MB. What workers send back is put there by them."""
    import ray

    put, sizes = ray.put, []
    monkeypatch.setattr(ray, "put", lambda value: sizes.append(sum(part.nbytes for part in value[1])) or put(value))
    data = FederatedData(make_clients([4] * 12, features=600, classes=600), classes=600, name="wide")
    model = eq.models.Softmax(600, 600)
    bytes_of_model = 4 * sum(each.numel() for each in model.parameters())
    count = Sent(lambda: sizes.count(bytes_of_model))
    trained(data, model, observers=[count])
    assert count.last_round == 1


def test_what_is_sent_for_a_cohort_does_not_grow_with_the_number_of_clients(cluster, monkeypatch):
    found = {}
    for clients in (50, 5000):
        data = FederatedData(make_clients([4] * clients), classes=3, name=f"{clients} clients")
        with listening(monkeypatch) as letters:
            count = Sent(letters.bytes)
            trained(data, eq.models.Softmax(4, 3), observers=[count])
        found[clients] = count.last_round
    assert 0 < found[5000] < 1.05 * found[50] < 5000  # for 8 clients


def test_workers_of_a_node_share_the_data(cluster):
    """40 MB in the object store: no worker has a copy of its own."""
    ray_engine._pools.clear()
    small = FederatedData(make_clients([4] * 12, features=1000), classes=3, name="small")
    large = FederatedData(make_clients([1000] * 10, features=1000), classes=3, name="large")
    assert large.train.x.nbytes == 40_000_000
    task = Task.of(eq.models.Softmax(1000, 3))
    engines, memory = [], []
    for data in (small, large):
        engine = Ray(workers=2).start(task, data)
        engine.evaluate(torch.zeros(engine.dimension), data.train)
        engines.append(engine)
        memory.append(engine.pool.worker_memory())
    assert len(engine.pool.workers) == 2
    assert memory[1] - memory[0] < 20_000_000
