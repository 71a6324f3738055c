"""Processes side by side: the same results as one process, whatever happens to them."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass, replace

import pytest
import torch

import equipoise as eq
from equipoise.core.task import Task
from equipoise.data.clients import FederatedData
from equipoise.engines import Simulator
from equipoise.engines.simulator import scoring
from equipoise.engines.simulator.local_work import Worker, Workplace
from equipoise.engines.simulator.workers import SharedMessages, Workers, can_fork, one_thread
from equipoise.testing import check_engine
from made_clients import make_clients

pytestmark = pytest.mark.skipif(not can_fork(), reason="this system has no safe fork")


def one(data):
    return Worker(Workplace(Task.of(eq.models.Softmax(4, 3)), data, data.train))


def where_and_twice(worker, part):
    return os.getpid(), 2 * part


def die_elsewhere(worker, part):
    if os.getpid() != part[0]:
        os._exit(1)
    return part[1]


def fail_elsewhere(worker, part):
    if os.getpid() != part[0]:
        raise ValueError("elsewhere")
    return part[1]


def fail(worker, part):
    raise ZeroDivisionError("as the caller would see it")


def threads(worker, part):
    return torch.get_num_threads()


def test_parts_are_done_side_by_side_and_come_in_order(ragged):
    workers = Workers(one(ragged), 3)
    for size in (5, 100_000):
        found = workers.share(where_and_twice, [torch.full((size,), float(i)) for i in range(3)])
        assert [float(result[1][-1]) for result in found] == [0.0, 2.0, 4.0]
        assert found[0][0] == os.getpid()
        assert len({pid for pid, _ in found}) == 3
    workers.stop()


def test_fewer_parts_than_processes_and_again_after_a_stop(ragged):
    workers = Workers(one(ragged), 3)
    assert len(workers.share(where_and_twice, [torch.ones(1)] * 2)) == 2
    workers.stop()
    assert len({pid for pid, _ in workers.share(where_and_twice, [torch.ones(1)] * 3)}) == 3
    workers.stop()


@pytest.mark.parametrize("work", [die_elsewhere, fail_elsewhere])
def test_what_another_process_cannot_do_is_done_here(work, ragged):
    workers = Workers(one(ragged), 2)
    for _ in range(2):
        assert workers.share(work, [(os.getpid(), 1), (os.getpid(), 2)]) == [1, 2]
    workers.stop()


def test_what_cannot_be_sent_is_done_here(ragged):
    workers = Workers(one(ragged), 2)
    found = workers.share(where_and_twice, [torch.ones(1), torch.ones(1, requires_grad=True).sum()])
    assert [float(result[1]) for result in found] == [2.0, 2.0]
    doubled = workers.share(lambda worker, part: 2 * part, [1, 2])  # a lambda has no name in a module
    assert doubled == [2, 4]
    workers.stop()


def test_an_error_is_raised_as_if_there_were_no_processes(ragged):
    workers = Workers(one(ragged), 2)
    with pytest.raises(ZeroDivisionError, match="as the caller"):
        workers.share(fail, [1, 2])
    assert [r[1].item() for r in workers.share(where_and_twice, [torch.tensor(1), torch.tensor(2)])] == [2, 4]
    workers.stop()


def test_each_process_has_one_torch_thread_and_the_caller_keeps_its_own(ragged):
    workers = Workers(one(ragged), 2)
    torch.set_num_threads(2)
    try:
        assert workers.share(threads, [0, 0]) == [1, 1]
        assert torch.get_num_threads() == 2
        with one_thread():
            assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(1)
        workers.stop()


@dataclass(frozen=True)
class Letter:
    name: str
    values: torch.Tensor
    parts: tuple


def test_messages_keep_values_types_and_shapes():
    shared = SharedMessages()
    letter = Letter("a", torch.arange(12.0).view(3, 4).t(), (torch.tensor(True), [torch.tensor([], dtype=torch.int64), 7]))
    found = shared.loads(shared.dumps(letter))
    assert found.name == "a"
    assert torch.equal(found.values, letter.values)
    assert found.parts[0].dtype == torch.bool
    assert bool(found.parts[0])
    assert found.parts[1][0].shape == (0,)
    assert found.parts[1][1] == 7
    assert len(shared.dumps(torch.zeros(100_000))) < 200  # the numbers do not go through the pipe


@pytest.mark.parametrize("count", [1, 1000, 5000])  # with the message, or through the shared memory
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.float32, torch.float16, torch.uint8])
def test_tensors_of_any_length_arrive_and_can_be_written_to(count, dtype):
    shared = SharedMessages()
    sent = [(torch.arange(2 * count) % 251).to(dtype)[::2], torch.full((count, 2), 3, dtype=dtype)]
    found = shared.loads(shared.dumps(sent))
    for one, other in zip(found, sent, strict=True):
        assert one.dtype == dtype
        assert torch.equal(one, other)
    found[0].zero_()
    assert torch.equal(found[1], sent[1])


SOLVERS = {
    "plain": eq.solvers.SGD(),
    "momentum": eq.solvers.SGD(batch_size=3, steps=7, momentum=0.9, weight_decay=0.01),
    "full batch": eq.solvers.SGD(batch_size=None, epochs=2),
    "FedProx": eq.solvers.SGD(batch_size=3, epochs=4, prox=0.5, straggler_share=0.6),
    "MAML": eq.solvers.MAML(),
    "FedDane": eq.solvers.FedDane(eq.solvers.SGD(prox=0.5)),
}


@pytest.mark.parametrize("name", SOLVERS)
def test_two_processes_agree_with_the_loop(name):
    check_engine(Simulator(workers=2), solver=SOLVERS[name], tolerance=1e-9)
    check_engine(Simulator(workers=3, chunk_size=2), solver=SOLVERS[name], tolerance=1e-9)


@pytest.mark.parametrize(
    "algorithm",
    [
        eq.Algorithm(),
        eq.Algorithm(risk=eq.risk.Superquantile(0.5)),
        eq.Algorithm(aggregator=eq.aggregators.Median()),
        eq.Algorithm(personal=eq.personal.Ditto(strength=0.5)),
    ],
    ids=["mean", "tail", "median", "Ditto"],
)
def test_a_run_does_not_depend_on_the_number_of_processes(algorithm, ragged):
    ragged = replace(ragged, test=None)
    runs = [
        eq.train(
            eq.models.Softmax(4, 3).double(), ragged, algorithm, rounds=4, clients_per_round=5, engine=Simulator(workers=n)
        )
        for n in (1, 2, 3)
    ]
    for other in runs[1:]:
        torch.testing.assert_close(other.params, runs[0].params, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(other.clients.loss, runs[0].clients.loss, rtol=1e-9, atol=1e-11)
    again = eq.train(
        eq.models.Softmax(4, 3).double(), ragged, algorithm, rounds=4, clients_per_round=5, engine=Simulator(workers=2)
    )
    assert torch.equal(again.params, runs[1].params)  # the same bits on repeat


def test_a_networks_gradients_work_in_other_processes():
    data = FederatedData(make_clients([5, 9, 12, 3, 8]))
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).double()
    check_engine(Simulator(workers=2), task=Task.of(model), data=data, solver=eq.solvers.SGD(batch_size=4), tolerance=1e-9)


def test_a_killed_run_leaves_no_process_behind():
    script = """
        import os, torch, equipoise as eq
        from equipoise.core.task import Task
        from equipoise.engines.simulator.local_work import Worker, Workplace
        from equipoise.engines.simulator.workers import Workers
        data = eq.data.label_shift(train_clients=4, validation_clients=1, test_clients=1, seed=0)
        workers = Workers(Worker(Workplace(Task.of(eq.models.Softmax(data.features, data.classes)), data, data.train)), 3)
        workers._started()
        print(*[process.process.pid for process in workers._others], flush=True)
        import time; time.sleep(60)
    """
    run = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in run.stdout.readline().split()]
    assert len(pids) == 2
    run.send_signal(signal.SIGKILL)
    run.wait()
    run.stdout.close()
    deadline = time.monotonic() + 20
    while any(_lives(pid) for pid in pids):
        assert time.monotonic() < deadline, "a worker outlived its run"
        time.sleep(0.05)


def _lives(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("name", ["train", "test"])
def test_scores_of_two_processes_are_those_of_one(name, monkeypatch):
    monkeypatch.setattr(scoring, "_WORTH_SHARING", 1)
    data = FederatedData(make_clients([5, 9, 1, 12, 7]), test=make_clients([30, 2, 4], prefix="other"))
    task = Task.of(eq.models.Softmax(4, 3))
    params = torch.randn(task.layout.dimension, generator=torch.Generator().manual_seed(0))
    two, one = Simulator(workers=2).start(task, data), Simulator(workers=1).start(task, data)
    shared = []
    monkeypatch.setattr(
        two.workers, "share", lambda work, parts, share=two.workers.share: shared.append(1) or share(work, parts)
    )
    for found, expected in zip(*(engine.evaluate(params, data.splits[name]) for engine in (two, one)), strict=True):
        torch.testing.assert_close(found, expected)
    cohort = eq.sampling.Uniform()(0, torch.full((5,), 0.2, dtype=torch.float64), clients_per_round=3, seed=0)
    torch.testing.assert_close(two.losses(params, cohort), one.losses(params, cohort))
    assert len(shared) == 2
    two.workers.stop()


def test_a_round_beside_other_processes_is_quiet_and_threads_come_back(ragged):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        engine = Simulator(workers=2).start(Task.of(eq.models.Softmax(4, 3)), ragged)
        with engine.round_context():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with Simulator(workers=1).start(Task.of(eq.models.Softmax(4, 3)), ragged).round_context():
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
