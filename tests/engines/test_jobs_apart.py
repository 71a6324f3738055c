"""Sums of several jobs in one call: the bits of each are those that it has alone."""

import weakref
from dataclasses import dataclass, replace
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from taken import everyone

import equipoise as eq
from equipoise import attacks
from equipoise.aggregators import NormClip, WeightedMean
from equipoise.core.task import Task
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.engines import Simulator
from equipoise.engines.cluster.piece_work import Phase, Stretch, sums
from equipoise.engines.simulator import client_queue
from equipoise.engines.simulator.calibration import Choice
from equipoise.engines.simulator.client_queue import whole_jobs
from equipoise.engines.simulator.cpu import c_library
from equipoise.engines.simulator.cpu.compiled_softmax import CompiledSoftmax, CompiledSoftmaxPath
from equipoise.solvers import SGD, batches
from equipoise.types import Job, LocalWork
from made_clients import make_clients

compiled = pytest.mark.skipif(
    c_library.library("softmax") is None, reason="this machine has no C compiler that works ($CC, or cc)"
)
SOLVER = SGD(lr=0.3, batch_size=4)
SIZES = [9, 3, 14, 5, 6, 20, 4, 4, 11, 2]


def started(data, *, chunk=100, threads=1, path=CompiledSoftmaxPath.name):
    engine = Simulator(workers=threads).start(Task.of(eq.models.Softmax(4, 3)), data)
    engine.use(Choice(chunk, threads, path=path))
    engine.measures = False
    return engine


def jobs_of(engine, cohort, cuts, *, several_models=False):
    """A job for every stretch of the cohort between two cuts."""
    generator = torch.Generator().manual_seed(1)
    model = torch.randn(engine.task.layout.dimension, generator=generator)
    weights = torch.rand(len(cohort), dtype=torch.float64, generator=generator)
    parts = [torch.arange(a, b) for a, b in pairwise([0, *cuts, len(cohort)])]
    shifts = [float(several_models and number) for number in range(len(parts))]
    return [Job(model + shift, cohort.take(part), weights[part]) for part, shift in zip(parts, shifts, strict=True)]


def assert_equal_bits(engine, jobs, solver=SOLVER, aggregator=WeightedMean()):  # noqa: B008 (it has no state)
    together = list(engine.summed_apart(jobs, solver, aggregator))
    assert len(together) == len(jobs)
    for job, found in zip(jobs, together, strict=True):
        alone = engine.summed_update(job.params, job.cohort, solver, job.weights, aggregator)
        for name in ("update", "sq_norms", "losses"):
            one, other = getattr(found, name), getattr(alone, name)
            assert torch.equal(one.nan_to_num(nan=-7.0), other.nan_to_num(nan=-7.0)), name


@pytest.fixture
def calls(monkeypatch):
    """How many clients each call of compiled code had."""
    found, train = [], CompiledSoftmax.train
    monkeypatch.setattr(CompiledSoftmax, "train", lambda self, *given: found.append(len(given[0].chunk)) or train(self, *given))
    return found


@compiled
@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=2, max_size=12),
    cuts=st.sets(st.integers(1, 11), max_size=5),
    batch=st.one_of(st.none(), st.integers(1, 12)),
    epochs=st.integers(0, 2),
    prox=st.sampled_from([0.0, 0.4]),
    straggling=st.sampled_from([0.0, 0.6]),
    aggregator=st.sampled_from([WeightedMean(), NormClip(0.2)]),
    several_models=st.booleans(),
    chunk=st.sampled_from([3, 5, 100]),
)
def test_no_bit_depends_on_the_other_jobs(
    sizes, cuts, batch, epochs, prox, straggling, aggregator, several_models, chunk
):  # fmt: skip
    engine = started(FederatedData(make_clients(sizes)), chunk=chunk)
    solver = SGD(lr=0.3, batch_size=batch, epochs=epochs, prox=prox, straggler_share=straggling, stragglers="drop")
    cohort = everyone(len(sizes))
    if straggling:
        cohort = cohort.having(effort=torch.from_numpy(np.resize([2, 0, 1], len(sizes))))
    inside = sorted(cut for cut in cuts if cut < len(sizes))
    assert_equal_bits(engine, jobs_of(engine, cohort, inside, several_models=several_models), solver, aggregator)


@compiled
def test_jobs_that_fit_into_a_chunk_are_one_call(calls):
    data = FederatedData(make_clients(SIZES))
    engine = started(data)
    list(engine.summed_apart(jobs_of(engine, everyone(10), [3, 7]), SOLVER, WeightedMean()))
    assert calls == [10]
    calls.clear()
    engine = started(data, chunk=6)
    list(engine.summed_apart(jobs_of(engine, everyone(10), [2, 4, 9]), SOLVER, WeightedMean()))
    assert calls == [4, 6]


@compiled
def test_threads_add_up_by_groups_of_all_jobs_so_that_each_job_is_alone(calls):
    engine = started(FederatedData(make_clients(SIZES)), threads=2)
    jobs = jobs_of(engine, everyone(10), [3, 7])
    list(engine.summed_apart(jobs, SOLVER, WeightedMean()))
    assert calls == [3, 4, 3]
    assert_equal_bits(engine, jobs)


@compiled
@pytest.mark.parametrize("aggregator", [WeightedMean(), NormClip(0.2)])
@pytest.mark.parametrize("value", [3e38, 1e18])  # no number comes out, or one whose square is none of float32
def test_an_update_that_cannot_be_used_changes_no_other_job(value, aggregator):
    made = make_clients(SIZES)
    x = made.x.clone()
    x[made.offsets[4] : made.offsets[5]] = value
    engine = started(FederatedData(ClientSet(x, made.y, made.offsets, made.ids)))
    assert_equal_bits(engine, jobs_of(engine, everyone(10), [3, 7]), aggregator=aggregator)


@compiled
def test_an_update_without_a_square_changes_no_other_job():
    engine = started(FederatedData(make_clients(SIZES)))
    assert_equal_bits(engine, jobs_of(engine, everyone(10), [3, 7]), replace(SOLVER, lr=1e-30))


@compiled
def test_batches_that_are_too_many_for_one_table_change_nothing(monkeypatch, calls):
    monkeypatch.setattr(batches, "TABLE", 100)
    monkeypatch.setattr(client_queue, "TABLE", 100)
    engine = started(FederatedData(make_clients(SIZES)))
    assert_equal_bits(engine, jobs_of(engine, everyone(10), [3, 7]))
    assert 0 < max(calls) < 10


@compiled
def test_clients_with_a_pull_of_their_own_and_malicious_ones(calls):
    data = FederatedData(make_clients(SIZES))
    pulled = everyone(10).having(prox=torch.linspace(0.0, 2.0, 10, dtype=torch.float64))
    engine = started(data)
    assert_equal_bits(engine, jobs_of(engine, pulled, [3, 7]))
    engine = started(attacks.apply(data, attacks.SignFlip(0.3)))
    engine.cohort_sizes = (10,) * 3
    assert_equal_bits(engine, jobs_of(engine, everyone(10), [3, 7]))
    assert max(calls) == 4


def test_other_paths_do_one_job_at_a_time():
    engine = started(FederatedData(make_clients(SIZES)), path=None)
    jobs = jobs_of(engine, everyone(10), [3, 7])
    seen, summed_updates = [], engine.summed_updates
    engine.summed_updates = lambda jobs, *given: seen.append(len(jobs)) or summed_updates(jobs, *given)
    assert_equal_bits(engine, jobs)
    assert set(seen) == {1}


@given(counts=st.lists(st.integers(1, 9), max_size=12), most=st.integers(0, 20))
def test_whole_jobs_come_in_turn_and_together_are_not_too_many(counts, most):
    jobs = [Job(torch.zeros(1), everyone(count), torch.ones(count)) for count in counts]
    groups = list(whole_jobs(jobs, most))
    assert [job for group in groups for job in group] == jobs
    sizes = [sum(len(job.cohort) for job in group) for group in groups]
    assert all(len(group) == 1 or size <= most for group, size in zip(groups, sizes, strict=True))
    assert all(size + len(after[0].cohort) > most for size, after in zip(sizes, groups[1:], strict=False))


@dataclass
class CountingEngine:
    """Gives each job a total of its own memory, and says how many of them are still held when the next is asked for."""

    task: Task
    cohort_sizes: tuple[int, ...] | None = None

    def __post_init__(self):
        self.totals, self.most = [], 0

    def summed_apart(self, jobs, solver, aggregator):
        for job in jobs:
            self.most = max(self.most, sum(total() is not None for total in self.totals))
            memory = np.ones(5, dtype=np.float32)
            self.totals.append(weakref.ref(memory))
            numbers = torch.zeros(len(job.cohort), dtype=torch.float64)
            work = LocalWork(torch.from_numpy(memory), numbers, numbers)
            del memory
            yield work
            del work


def test_a_worker_holds_few_sums_at_a_time():
    """Two pieces are added up before the next one is made."""
    engine = CountingEngine(Task.of(eq.models.Softmax(4, 3)))
    phase = Phase("sums", 0, (torch.zeros(15),), cohort_sizes=(32,))
    cohort = everyone(32)
    found = sums(engine, phase, Stretch(0, (0, 16), 16, [2] * 16, cohort, cohort.weights))
    assert found.nodes[0, 16][0].tolist() == [16.0] * 5
    assert engine.most <= 2
