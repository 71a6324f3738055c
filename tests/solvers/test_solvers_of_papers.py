"""Stragglers, adaptive μ, FedDane and MAML: numbers by hand on a line, where F_k(w) = mean (w − x)² and ∇F_k(w) = 2(w − x̄)."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import equipoise as eq
from equipoise.core import rng
from equipoise.core.task import Task
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.errors import InvalidParameter
from equipoise.sampling import Full
from equipoise.solvers import MAML, SGD, AdaptiveProx, FedDane
from equipoise.solvers.batches import SplitCursor, split_batches, support_sizes
from equipoise.solvers.local_optimizer import stragglers
from equipoise.solvers.prepared import ProxState, adapted
from equipoise.types import ServerState
from rounds import run_round

ENGINES = pytest.mark.parametrize("engine", ["loop", "simulator"])


def points(*groups):
    clients = [(f"c{i}", torch.tensor(g, dtype=torch.float64).unsqueeze(1)) for i, g in enumerate(groups)]
    return FederatedData(ClientSet.pack((name, x, x) for name, x in clients))


def started(data, engine):
    task = Task.of(eq.models.MeanEstimator(1).double())
    return (eq.engines.Loop() if engine == "loop" else eq.engines.Simulator()).start(task, data)


def rounds(data, algorithm, count=1, start=0.0, engine="loop", seed=0):
    running, params = started(data, engine), torch.tensor([start], dtype=torch.float64)
    state, reports = ServerState(0, params, server=algorithm.server.begin(params)), []
    for index in range(count):
        cohort = Full()(index, algorithm.base_weights(data.train), clients_per_round=len(data.train), seed=seed)
        state, report = run_round(state, algorithm, running, cohort, data.train)
        reports.append(report)
    return state, reports


# ---------------------------------------------------------------------------------------------------------- stragglers

# With lr 0.25 a full-batch step halves the distance to a client's mean: after e epochs from 0 it is at x̄ (1 − 2^−e).
HALVING = {"lr": 0.25, "batch_size": None, "epochs": 4}


@ENGINES
def test_partial_work_by_hand(engine):
    data = points([16.0], [32.0], [64.0])
    cohort = Full()(0, torch.full((3,), 1 / 3, dtype=torch.float64), clients_per_round=3, seed=0)
    cohort = eq.types.Cohort(0, 0, cohort.clients, cohort.weights, cohort.inclusion, {"effort": torch.tensor([4, 1, 2])})
    work = started(data, engine).updates(torch.zeros(1, dtype=torch.float64), cohort, SGD(**HALVING))
    assert work.update.flatten().tolist() == [15.0, 16.0, 48.0]  # 16 · 15/16, 32 · 1/2, 64 · 3/4


@ENGINES
def test_straggler_round_by_hand(engine):
    # Ten clients, 90 % slow: one finishes its four epochs. Dropping leaves that one alone; keeping averages all the parts.
    data = points(*([16.0 * (i + 1)] for i in range(10)))
    dropping = SGD(**HALVING, straggler_share=0.9, stragglers="drop")
    cohort = Full()(0, torch.full((10,), 0.1, dtype=torch.float64), clients_per_round=10, seed=0)
    efforts = dropping.efforts(cohort, data.train.keys)
    (finisher,) = (efforts > 0).nonzero().flatten().tolist()
    assert efforts[finisher] == 4
    state, (report,) = rounds(data, eq.Algorithm(solver=dropping), engine=engine)
    assert float(state.params) == 16 * (finisher + 1) * 15 / 16
    assert (report.cohort, report.trained, report.dropped) == (10, 1, 9)

    keeping = SGD(**HALVING, straggler_share=0.9, stragglers="keep")
    parts = keeping.efforts(cohort, data.train.keys)
    assert parts[finisher] == 4
    assert bool(((parts >= 1) & (parts <= 4)).all())
    state, (report,) = rounds(data, eq.Algorithm(solver=keeping), engine=engine)
    expected = sum(16 * (i + 1) * (1 - 0.5 ** int(e)) for i, e in enumerate(parts)) / 10
    assert float(state.params) == pytest.approx(expected, rel=1e-12)
    assert (report.trained, report.dropped) == (10, 0)


@given(count=st.integers(1, 40), share=st.floats(0, 0.99), full=st.integers(1, 30), seed=st.integers(0, 2**40))
def test_the_share_is_exact_and_one_client_always_finishes(count, share, full, seed):
    keys = rng.client_keys(rng.stream_key(seed, "stragglers", 3), torch.arange(count))
    slow, done = stragglers(keys, share, full)
    assert int(slow.sum()) == min(int(share * count + 0.5), count - 1)
    assert bool(((done >= 1) & (done <= full)).all())
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    again, same = stragglers(keys[order], share, full)
    assert torch.equal(again, slow[order])
    assert torch.equal(same, done[order])


def test_every_number_of_epochs_up_to_all_is_drawn():
    # The published code draws 1 … E − 1; the text says 1 … E.
    keys = rng.client_keys(rng.stream_key(0, "stragglers", 0), torch.arange(2000))
    _, done = stragglers(keys, 0.5, 5)
    counts = torch.bincount(done, minlength=6)
    assert counts[0] == 0
    assert bool(((counts[1:] - 400).abs() < 100).all())


def test_the_tail_and_stragglers_compose():
    # Losses at 0 are x²; the tail of half are the five largest. Those among them that are dropped are lost, the rest share.
    data = points(*([float(i + 1)] for i in range(10)))
    solver = SGD(**HALVING, straggler_share=0.5, stragglers="drop")
    algorithm = eq.Algorithm(risk=eq.risk.Superquantile(0.5), solver=solver)
    state, (report,) = rounds(data, algorithm)
    cohort = Full()(0, torch.full((10,), 0.1, dtype=torch.float64), clients_per_round=10, seed=0)
    left = [i for i in range(5, 10) if int(solver.efforts(cohort, data.train.keys)[i]) > 0]
    assert (report.trained, report.dropped) == (len(left), 5 - len(left))
    assert float(state.params) == pytest.approx(sum((i + 1) * 15 / 16 for i in left) / len(left))


def test_dropping_all_that_have_a_weight_leaves_the_model_alone():
    data = points([1.0], [2.0], [30.0])
    for seed in range(20):
        solver = SGD(**HALVING, straggler_share=0.6, stragglers="drop")
        cohort = Full()(0, torch.full((3,), 1 / 3, dtype=torch.float64), clients_per_round=3, seed=seed)
        if int(solver.efforts(cohort, data.train.keys)[2]) == 0:
            break
    algorithm = eq.Algorithm(risk=eq.risk.Superquantile(0.01), solver=solver)
    state, (report,) = rounds(data, algorithm, seed=seed)
    assert float(state.params) == 0.0
    assert (report.trained, report.dropped, state.round) == (0, 1, 1)


# ---------------------------------------------------------------------------------------------------------- adaptive μ


def test_adaptive_mu_by_hand():
    losses = [5.0, 6.0, 5.0, 4.0, 4.5, 4.0, 3.5, 3.0, 2.5, 2.0, 1.9, 1.9, 1.8]
    # up, fall, fall, up, then five falls in a row take 0.1 back (the counter starts anew), a fall, no change, a fall
    expected = [0.0, 0.1, 0.1, 0.1, 0.2, 0.2, 0.2, 0.2, 0.2, 0.1, 0.1, 0.1, 0.1]
    state, found = ProxState(0.0), []
    for loss in losses:
        state = adapted(state, loss, 0.1, 5)
        found.append(state.prox)
    assert found == pytest.approx(expected)


def test_adaptive_mu_never_falls_below_zero():
    state = ProxState(0.05)
    for loss in range(30, 0, -1):
        state = adapted(state, float(loss), 0.1, 5)
        assert state.prox >= 0
    assert state.prox == 0.0


@ENGINES
def test_adaptive_mu_enters_the_round(engine):
    # lr 1.5 overshoots: the loss rises every round, so μ is 0 in the first, then 0.1. One client at 1, starting at 0.
    solver = AdaptiveProx(SGD(lr=0.6, batch_size=None, steps=2), step=0.1)
    data = points([1.0])
    state, _ = rounds(data, eq.Algorithm(solver=solver), engine=engine)
    # μ = 0: w1 = 1.2, w2 = 1.2 − 0.6 · 0.4 = 0.96
    assert float(state.params) == pytest.approx(0.96)
    assert state.solver.prox == 0.0
    risen = ServerState(1, state.params, solver=ProxState(0.0, loss=0.0))
    algorithm = eq.Algorithm(solver=solver)
    cohort = Full()(1, torch.ones(1, dtype=torch.float64), clients_per_round=1, seed=0)
    after, _ = run_round(risen, algorithm, started(data, engine), cohort, data.train)
    assert after.solver.prox == pytest.approx(0.1)
    # From 0.96: w1 = 0.96 + 0.6 · 0.08 = 1.008; w2 = 1.008 − 0.6 (0.016 + 0.1 · 0.048) = 0.99552
    assert float(after.params) == pytest.approx(0.99552)


def test_adaptive_mu_judges_by_all_clients_not_by_the_cohort():
    data = points([0.0], [10.0])
    solver = AdaptiveProx(SGD(lr=0.1, batch_size=None, steps=1))
    algorithm = eq.Algorithm(solver=solver)
    cohort = eq.types.Cohort(0, 0, torch.tensor([0]), torch.ones(1).double(), torch.ones(1).double())
    state, _ = run_round(ServerState(0, torch.zeros(1).double()), algorithm, started(data, "loop"), cohort, data.train)
    assert state.solver.loss == pytest.approx(50.0)


# ------------------------------------------------------------------------------------------------------------- FedDane


@ENGINES
def test_feddane_round_by_hand(engine):
    # Means 0 and 4 at w = 1, everyone in both cohorts: ∇F = 2, −6, g = −2. Client 1 steps along 2 + (−2 − 2) = −2, client 2
    # along −6 + (−2 + 6) = −2: the first step is the same for both, w = 1 + 0.1 · 2 = 1.2.
    # Second step: 2(1.2 − 0) − 4 = −1.6, plus μ(w − w^t) = 0.5 · 0.2 = 0.1: w = 1.2 + 0.15 = 1.35; client 2 alike.
    data = points([0.0], [4.0])
    algorithm = eq.Algorithm(solver=FedDane(SGD(lr=0.1, batch_size=None, steps=2, prox=0.5)), sampler=Full())
    state, _ = rounds(data, algorithm, start=1.0, engine=engine)
    assert float(state.params) == pytest.approx(1.35)


def test_feddane_draws_its_own_cohort(ragged):
    seen = []

    def sampler(index, alpha, *, clients_per_round, seed):
        cohort = eq.sampling.Uniform()(index, alpha, clients_per_round=clients_per_round, seed=seed)
        seen.append(cohort.clients.tolist())
        return cohort

    algorithm = eq.Algorithm(solver=FedDane(SGD(prox=0.1)), sampler=sampler)
    eq.train(eq.models.Softmax(4, 3), ragged, algorithm, rounds=4, clients_per_round=3)
    seen = seen[-8:]  # the calls before them try the sampler's law and the size
    pairs = list(zip(seen[::2], seen[1::2], strict=True))
    assert len(pairs) == 4
    assert any(first != second for first, second in pairs)


# ---------------------------------------------------------------------------------------------------------------- MAML


@ENGINES
def test_maml_round_by_hand(engine):
    # Two examples: whichever is drawn for the inner step, a, the other, b, gives the gradient. From 0 with inner rate 0.25 the
    # client adapts to a/2; there the loss on b is (a/2 − b)² and the gradient a − 2b; the update is −0.1 (a − 2b).
    data = points([2.0, 10.0])
    running = started(data, engine)
    cohort = Full()(0, torch.ones(1, dtype=torch.float64), clients_per_round=1, seed=0)
    solver = MAML(lr=0.1, inner_lr=0.25)
    work = running.updates(torch.zeros(1, dtype=torch.float64), cohort, solver)
    cases = {(2.0, 10.0): (1.8, 81.0), (10.0, 2.0): (-0.6, 9.0)}  # (a, b): update, adapted loss
    found = (float(work.update), float(work.losses))
    assert any(found == pytest.approx(case) for case in cases.values())
    losses = running.losses(torch.zeros(1, dtype=torch.float64), cohort, solver)
    assert float(losses) == pytest.approx(found[1])


@ENGINES
def test_q_maml_round_by_hand(engine):
    # All examples of a client are equal, so the split does not matter. Clients at 2 and 4, w = 0, inner rate 0.25: adapted to
    # 1 and 2, losses 1 and 4, gradients −2 and −4, L = 1/0.1 = 10, q = 1, equal weights.
    # Δ = F ∇F = −2, −16; h = ‖∇F‖² + L F = 4 + 10, 16 + 40; w = 18/70.
    data = points([2.0, 2.0], [4.0, 4.0])
    state, (report,) = rounds(data, eq.Algorithm(risk=eq.risk.QFair(1.0), solver=MAML(lr=0.1, inner_lr=0.25)), engine=engine)
    assert float(state.params) == pytest.approx(18 / 70)
    assert report.loss == pytest.approx(2.5)  # of the adapted models


def test_maml_learns_what_adapts_well():
    # Tasks y = a x with slopes of either sign: no single model fits, one inner step from a good start does.
    gen = torch.Generator().manual_seed(0)
    triples = []
    for i in range(40):
        x = torch.randn(20, 1, generator=gen)
        slope = 1.0 if i % 2 else -1.0
        triples.append((f"t{i}", x, slope * x[:, 0]))
    data = FederatedData(ClientSet.pack(triples))
    solver = MAML(lr=0.1, inner_lr=0.3, inner_steps=2)
    result = eq.train(eq.models.LinearRegression(1), data, eq.Algorithm(risk=eq.risk.Tilted(0.0), solver=solver),
                      rounds=30, clients_per_round=20)  # fmt: skip
    with torch.no_grad():
        plain_loss = float(torch.stack([(result.model(x) - y).square().mean() for _, x, y in triples]).mean())
    assert result.history.rounds[-1].loss < 0.5 * plain_loss
    assert result.summary().loss.mean < 0.5 * plain_loss  # results judge the adapted models


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6), share=st.floats(0.01, 0.99), steps=st.integers(1, 4))
def test_split_batches_are_two_parts_that_share_no_example(sizes, share, steps):
    keys, counts = rng.client_keys(7, torch.arange(len(sizes))), torch.tensor(sizes)
    cursor = SplitCursor(keys, counts, share, torch.full((len(sizes),), steps))
    for k, size in enumerate(sizes):
        plain = list(split_batches(keys[k], size, share, steps))
        assert len(plain) == steps
        if steps > 1 and size > 1:
            assert sorted(torch.cat([plain[0], plain[-1]]).tolist()) == list(range(size))
            assert len(plain[0]) == int(support_sizes(torch.tensor(size), share)) >= 1
        for step, rows in enumerate(plain):
            places, shares = cursor.batch(step, torch.float64)
            real = shares[k] > 0
            assert places[k][real].tolist() == rows.tolist()
            assert float(shares[k].sum()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MAML(lr=0), "lr must be a positive number"),
        (lambda: MAML(inner_steps=0), "inner_steps must be a whole number of at least 1"),
        (lambda: MAML(support=1.0), "support must lie in (0, 1)"),
        (lambda: AdaptiveProx(MAML()), "solver must be a solvers.SGD"),
        (lambda: FedDane(solver="sgd"), "solver must be a solvers.SGD"),
        (lambda: AdaptiveProx(SGD), "solver must be a solvers.SGD, but is <class"),
        (lambda: FedDane(SGD), "solver must be a solvers.SGD, but is <class"),
        (lambda: AdaptiveProx(step=0.0), "step must be a positive number"),
        (lambda: AdaptiveProx(patience=0), "patience must be a whole number of at least 1"),
    ],
)
def test_bad_parameters_are_named(make, words):
    with pytest.raises(InvalidParameter) as caught:
        make()
    assert words in str(caught.value)
