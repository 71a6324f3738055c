"""Mocha: the relationship matrix by hand and by its optimality, the regulariser's pull, rounds by hand, and the objective."""

from dataclasses import replace
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from scipy import linalg

import equipoise as eq
from equipoise.core.task import Task
from equipoise.core.task_trial import try_task
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.engines import Loop, Simulator
from equipoise.errors import Diverged, EquipoiseNotice, IncompatibleParts, InvalidParameter
from equipoise.personal import Local
from equipoise.personal.context import PersonalContext
from equipoise.personal.mocha import Mocha, raised, regulariser_pull, relationship
from equipoise.sampling import Full
from equipoise.solvers import SGD
from made_clients import make_clients

ENGINES = pytest.mark.parametrize("engine", [Loop(), Simulator()], ids=["loop", "simulator"])


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def regression(clients=3, features=4, examples=12, seed=0, noise=0.3):
    """Clients with linear targets whose coefficients share a direction."""
    common, triples = gaussian(features, seed=seed), []
    for k in range(clients):
        x = gaussian(examples, features, seed=seed + 10 + k)
        y = x @ (common + 0.5 * gaussian(features, seed=seed + 50 + k)) + noise * gaussian(examples, seed=seed + 90 + k)
        triples.append((f"c{k}", x, y))
    return FederatedData(ClientSet.pack(triples))


def context_of(model, data, engine):
    task = try_task(Task.of(model.double()), data)
    return PersonalContext(engine.start(task, data), task, data, lambda other: engine.start(other, data))


def everyone(data, round_index=0, seed=0):
    alpha = eq.Algorithm().base_weights(data.train)
    return Full()(round_index, alpha, clients_per_round=len(data.train), seed=seed)


# -------------------------------------------------------------------------------------------------- relationship matrix


def test_relationship_is_the_published_one_without_a_floor():
    models = gaussian(4, 6)
    root = linalg.sqrtm((models @ models.t()).numpy()).real
    np.testing.assert_allclose(relationship(models, 1e-9).numpy(), 4 * root / np.trace(root), rtol=1e-7)


def test_relationship_by_hand():
    # Models 3 and 4 on a line: one direction (0.6, 0.8) with all the spread. At floor ½ the eigenvalues are 2 − ½ and ½.
    found = relationship(torch.tensor([[3.0], [4.0]]), 0.5)
    torch.testing.assert_close(found, torch.tensor([[0.86, 0.48], [0.48, 1.14]], dtype=torch.float64))
    torch.testing.assert_close(relationship(gaussian(5, 2), 1.0), torch.eye(5, dtype=torch.float64))
    assert torch.equal(relationship(torch.zeros(3, 2), 0.1), torch.eye(3, dtype=torch.float64))


@settings(max_examples=50)
@given(
    spread=st.lists(st.floats(0, 100), min_size=1, max_size=6),
    floor=st.sampled_from([0.01, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 1000),
)
def test_eigenvalues_are_the_best_that_are_allowed(spread, floor, seed):
    spread = torch.tensor(spread, dtype=torch.float64)
    count, found = len(spread), raised(spread, floor)
    assert float(found.min()) >= floor * (1 - 1e-12)
    assert float(found.sum()) == pytest.approx(count, rel=1e-9)
    shares = torch.from_numpy(np.random.default_rng(seed).dirichlet(np.ones(count), 50))
    other = floor + count * (1 - floor) * shares
    best = (spread.square() / found).sum()
    assert bool(((spread.square() / other).sum(1) >= best * (1 - 1e-9) - 1e-12).all())


# ------------------------------------------------------------------------------------------------------------ the pull


def test_the_pull_is_the_gradient_and_bounds_the_regulariser():
    models, relation = gaussian(5, 3), relationship(gaussian(5, 3, seed=1), 0.2)
    inverse, strength, l2 = torch.linalg.inv(relation), 0.7, 0.3

    def term(v):
        return strength / 2 * torch.trace(inverse @ v @ v.t()) + l2 / 2 * v.square().sum()

    pull = regulariser_pull(models, relation, strength, l2)
    leaf = models.clone().requires_grad_()
    (expected,) = torch.autograd.grad(term(leaf), leaf)
    torch.testing.assert_close(pull.strength.unsqueeze(1) * (models - pull.anchor), expected)

    def bound(v):
        steps = (v - pull.anchor).square().sum(1) - (models - pull.anchor).square().sum(1)
        return term(models) + (pull.strength / 2 * steps).sum()

    for seed in range(20):
        away = models + 3 * gaussian(5, 3, seed=100 + seed)
        assert bound(away) >= term(away)
    assert regulariser_pull(models, relation, 0.0, 0.0) is None


# --------------------------------------------------------------------------------------------------------------- rounds


@ENGINES
def test_two_rounds_by_hand(engine):
    # F_k(v) = (v − y_k)² with y = 3 and 4, lr 0.1, one step a round, λ = 0.5, floor ½.
    x = torch.ones(1, 1, dtype=torch.float64)
    data = FederatedData(ClientSet.pack([("a", x, 3 * x[0]), ("b", x, 4 * x[0])]))
    context = context_of(eq.models.LinearRegression(1, bias=False), data, engine)
    method, solver = Mocha(0.5, floor=0.5), SGD(lr=0.1, batch_size=None)
    w = torch.zeros(1, dtype=torch.float64)
    first, relation = method.begin(context, w)
    rows, relation = method.work(context, w, everyone(data), first.expand(2, -1).contiguous(), solver, relation)
    torch.testing.assert_close(rows.flatten().tolist(), [0.6, 0.8])  # at 0 the regulariser does not pull
    torch.testing.assert_close(relation, torch.tensor([[0.86, 0.48], [0.48, 1.14]], dtype=torch.float64))
    # (0.6, 0.8) is the direction of the large eigenvalue 1.5: Ω⁻¹V = V / 1.5.
    rows, _ = method.work(context, w, everyone(data, 1), rows, solver, relation)
    expected = [v - 0.1 * (2 * (v - y) + 0.5 * v / 1.5) for v, y in ((0.6, 3.0), (0.8, 4.0))]
    torch.testing.assert_close(rows.flatten().tolist(), expected)


@ENGINES
def test_limits(engine):
    data = FederatedData(make_clients([5, 9, 3], classes=2, dtype=torch.float64), classes=2)
    context, solver = context_of(eq.models.LinearSVM(4), data, engine), SGD(lr=0.1, batch_size=2, epochs=2)
    w, rows = torch.zeros(5, dtype=torch.float64), gaussian(3, 5)
    alone, _ = Local().work(context, w, everyone(data), rows, solver, None)
    method = Mocha(0.0)
    torch.testing.assert_close(method.work(context, w, everyone(data), rows, solver, method.begin(context, w)[1])[0], alone)
    decayed, _ = Local().work(context, w, everyone(data), rows, replace(solver, weight_decay=0.4), None)
    for apart in (Mocha(0.0, l2=0.4), Mocha(0.3, l2=0.1, floor=1.0)):  # without relations an L2 term is all there is
        after, relation = apart.work(context, w, everyone(data), rows, solver, torch.eye(3, dtype=torch.float64))
        torch.testing.assert_close(after, decayed)
    torch.testing.assert_close(relation, torch.eye(3, dtype=torch.float64))


def objective(data, models, relation, strength):
    fit = sum(
        (data.train.x[data.train.rows(k)] @ v - data.train.y[data.train.rows(k)]).square().mean() for k, v in enumerate(models)
    )
    return float(fit + strength / 2 * torch.trace(torch.linalg.inv(relation) @ models @ models.t()))


def test_rounds_go_down_to_the_minimum_of_the_objective():
    data, strength, floor = regression(), 0.5, 0.01
    context = context_of(eq.models.LinearRegression(4, bias=False), data, Simulator())
    method, solver = Mocha(strength, floor=floor), SGD(lr=0.02, batch_size=None, epochs=4)
    rows, relation = torch.zeros(3, 4, dtype=torch.float64), torch.eye(3, dtype=torch.float64)
    seen = []
    for t in range(250):
        rows, relation = method.work(context, torch.zeros(4).double(), everyone(data, t), rows, solver, relation)
        seen.append(objective(data, rows, relation, strength))
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(seen))
    # At the best Ω the regulariser is (λ / 2n)(sum of singular values)², which is minimised here by other means.
    free = rows.clone().add_(0.1).requires_grad_()
    search = torch.optim.LBFGS([free], max_iter=500, line_search_fn="strong_wolfe", tolerance_grad=1e-10)

    def closure():
        search.zero_grad()
        fit = sum(
            (data.train.x[data.train.rows(k)] @ free[k] - data.train.y[data.train.rows(k)]).square().mean() for k in range(3)
        )
        loss = fit + strength / 6 * torch.linalg.svdvals(free).sum() ** 2
        loss.backward()
        return loss

    search.step(closure)
    assert seen[-1] == pytest.approx(closure().item(), rel=1e-4)
    torch.testing.assert_close(rows, free.detach(), atol=5e-3, rtol=0)


def test_related_clients_help_each_other():
    # Few noisy examples, coefficients that are multiples of one direction: relations beat an L2 term of the same strength.
    common, triples, truth = gaussian(8, seed=7), [], []
    for k in range(10):
        truth.append((1 + 0.2 * k) * (-1) ** k * common)
        x = gaussian(6, 8, seed=200 + k)
        triples.append((f"c{k}", x, x @ truth[-1] + 0.5 * gaussian(6, seed=300 + k)))
    data = FederatedData(ClientSet.pack(triples))
    solver = SGD(lr=0.02, batch_size=None, epochs=5)
    wrong = {}
    for floor in (0.02, 1.0):
        algorithm = eq.Algorithm(personal=Mocha(0.5, floor=floor, solver=solver), sampler=Full(), solver=solver)
        model = eq.models.LinearRegression(8, bias=False).double()
        result = eq.train(model, data, algorithm, rounds=80, seed=0, progress=False)
        wrong[floor] = float((result.personal.params(data.train.ids) - torch.stack(truth)).norm())
    assert wrong[0.02] < 0.75 * wrong[1.0], wrong


# ---------------------------------------------------------------------------------------------------------- whole runs


def test_a_run_on_both_engines_leaves_the_shared_model_alone():
    data = FederatedData(make_clients([5, 9, 3, 12], classes=2, dtype=torch.float64), classes=2)
    model, solver = eq.models.LinearSVM(4).double(), SGD(lr=0.1, batch_size=3)

    def run(personal, engine):
        algorithm = eq.Algorithm(personal=personal, sampler=Full(), solver=solver)
        return eq.train(model, data, algorithm, rounds=4, seed=1, engine=engine, progress=False)

    slow, fast, plain = run(Mocha(), Loop()), run(Mocha(), Simulator(chunk_size=3)), run(None, Simulator(chunk_size=3))
    assert torch.equal(fast.params, plain.params)
    torch.testing.assert_close(fast.personal.params(data.train.ids), slow.personal.params(data.train.ids))


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    data = FederatedData(make_clients([5, 9, 3, 12], classes=2, dtype=torch.float64), classes=2)
    algorithm = eq.Algorithm(personal=Mocha(), sampler=Full(), solver=SGD(lr=0.1, batch_size=3))

    def run(rounds, **where):
        return eq.train(eq.models.LinearSVM(4).double(), data, algorithm, rounds=rounds, seed=1, progress=False, **where)

    run(2, checkpoint=tmp_path / "run.ckpt")
    resumed, whole = run(5, checkpoint=tmp_path / "run.ckpt"), run(5)
    assert torch.equal(resumed.personal.params(data.train.ids), whole.personal.params(data.train.ids))


def test_a_client_that_diverges_is_named():
    x = torch.ones(1, 1, dtype=torch.float64)
    data = FederatedData(ClientSet.pack([("a", x, x[0]), ("b", 1e200 * x, x[0])]))
    algorithm = eq.Algorithm(personal=Mocha(), sampler=Full(), solver=SGD(lr=0.1, epochs=5), aggregator=eq.aggregators.Median())
    model = eq.models.LinearRegression(1, bias=False).double()
    with pytest.raises(Diverged, match="own model of client b ") as caught:
        eq.train(model, data, algorithm, rounds=2, progress=False, name="Mocha")
    assert (caught.value.round, caught.value.run, caught.value.history.rounds) == (0, "Mocha", [])
    plain = replace(algorithm, personal=None, solver=SGD(epochs=0))
    with pytest.warns(EquipoiseNotice), pytest.raises(Diverged, match="own model of client b ") as caught:
        eq.train_many(model, data, {"Mocha": algorithm, "plain": plain}, seeds=1, rounds=2, progress=False)
    assert list(caught.value.finished.results) == ["plain"]  # the other run went on


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("bad", [{"strength": -1}, {"l2": float("nan")}, {"floor": 0}, {"floor": 1.5}, {"solver": "sgd"}])
def test_bad_parameters(bad):
    with pytest.raises(InvalidParameter):
        Mocha(**bad)


def test_what_does_not_go_with_it():
    with pytest.raises(IncompatibleParts, match="leaves clients out"):
        eq.Algorithm(personal=Mocha())
    with pytest.raises(InvalidParameter, match="must not exceed 1"):
        eq.Algorithm(personal=Mocha(1.0, floor=0.05), sampler=Full(), solver=SGD(lr=0.1))
    with pytest.raises(IncompatibleParts, match="MAML"):
        eq.Algorithm(personal=Mocha(), sampler=Full(), solver=eq.solvers.MAML())
    data = FederatedData(make_clients([5, 9]), classes=3)
    layers = torch.nn.Sequential(torch.nn.Linear(4, 3))
    with pytest.raises(InvalidParameter, match="linear model"):
        eq.train(layers, data, eq.Algorithm(personal=Mocha(), sampler=Full()), rounds=1, progress=False)
