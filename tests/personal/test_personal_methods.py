"""EWC, symmetrised KL, Mapper and APFL: numbers by hand on a line, slow references, limits, both engines, whole runs."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

import equipoise as eq
from equipoise.core.task import Task
from equipoise.core.task_trial import try_task
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.engines import Loop, Simulator
from equipoise.errors import IncompatibleParts, InvalidParameter
from equipoise.personal import Finetuning
from equipoise.personal.context import PersonalContext
from equipoise.personal.interpolate import APFL, Mapper, Pair, mixed_models, pair_steps, train_both, train_own
from equipoise.personal.regularise import EWC, SymmetrisedKL, _PredictionPenalty, diagonal_fisher, symmetrised_kl
from equipoise.sampling import Full
from equipoise.solvers import SGD
from made_clients import make_clients

ENGINES = pytest.mark.parametrize("engine", [Loop(), Simulator()], ids=["loop", "simulator"])
LINE = eq.models.LinearRegression(1, bias=False).double()
QUARTER = SGD(lr=0.25, batch_size=None)


def on_a_line(*targets):
    """Clients whose loss is the mean of (w − y)²: one example with x = 1 per target."""
    clients = [(f"c{i}", torch.ones(len(y), 1, dtype=torch.float64), torch.tensor(y)) for i, y in enumerate(targets)]
    return FederatedData(ClientSet.pack((name, x, y.double()) for name, x, y in clients))


def ragged(dtype=torch.float64):
    return FederatedData(make_clients([2, 7, 10, 4], dtype=dtype), classes=3, name="ragged")


def context_of(model, data, engine, loss=None):
    task = try_task(Task.of(model, loss), data)
    return PersonalContext(engine.start(task, data), task, data, lambda other: engine.start(other, data))


def everyone(data, round_index=0, seed=0):
    alpha = eq.Algorithm().base_weights(data.train)
    return Full()(round_index, alpha, clients_per_round=len(data.train), seed=seed)


def doubles(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def models_after(method, context, params, solver, cohort=None):
    cohort = cohort or everyone(context.data)
    return method.models(context, params, cohort, params.new_empty(len(cohort), 0), solver, None)


# ----------------------------------------------------------------------------------------------------------------- EWC


@ENGINES
def test_ewc_by_hand(engine):
    # At w = 0 the examples 1 and 3 have the gradients −2 and −6: Fisher 20. With λ = 0.01 v is pulled by 0.2.
    context = context_of(LINE, on_a_line([1.0, 3.0]), engine)
    w = doubles(0.0)
    assert diagonal_fisher(context.task, w, context.data.train, torch.tensor([0])).tolist() == [[20.0]]
    solver = SGD(lr=0.1, batch_size=None)
    first = 0.1 * 2 * 2.0  # 0.4: at v = w nothing pulls
    second = first - 0.1 * (2 * (first - 2) + 0.2 * first)  # 0.712
    found = models_after(EWC(0.01, epochs=2), context, w, solver)
    assert float(found) == pytest.approx(second, rel=1e-12)
    # A pull beyond 1/lr brings v back to w, from where it goes by the gradient at v: −0.1 · 2(0.4 − 2).
    found = models_after(EWC(1e9, epochs=2), context, w, solver)
    assert float(found) == pytest.approx(0.32, rel=1e-12)


class Doubting(nn.Module):
    """A model that no vmap can batch: what it computes depends on the numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, x):
        scores = self.layers(x)
        return scores if bool(scores.isfinite().all()) else torch.zeros_like(scores)


@pytest.mark.parametrize("model", [Doubting().layers, Doubting()], ids=["vectorised", "one by one"])
def test_fisher_is_the_mean_of_squared_gradients(model, monkeypatch):
    monkeypatch.setattr("equipoise.personal.regularise._GRADIENT_NUMBERS", 3 * 43)  # three examples at a time
    data, task = ragged(), Task.of(model.double())
    params = task.layout.read(task.module)
    found = diagonal_fisher(task, params, data.train, torch.tensor([2, 0]))
    for row, k in zip(found, (2, 0), strict=True):
        squares = []
        for i in range(*data.train.rows(k).indices(len(data.train.x))):
            leaf = params.clone().requires_grad_()
            x, y = data.train.inputs(slice(i, i + 1), torch.float64), data.train.targets(slice(i, i + 1))
            named = task.layout.unflatten(leaf)
            loss = functional.cross_entropy(torch.func.functional_call(model, named, (x,)), y)
            squares.append(torch.autograd.grad(loss, leaf)[0] ** 2)
        torch.testing.assert_close(row, torch.stack(squares).mean(0), rtol=1e-10, atol=1e-14)


def test_ewc_limits():
    data = ragged()
    context = context_of(eq.models.Softmax(4, 3).double(), data, Simulator())
    w = torch.randn(15, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    solver = SGD(lr=0.01, batch_size=3)
    plain = models_after(Finetuning(5), context, w, solver)
    torch.testing.assert_close(models_after(EWC(0.0, 5), context, w, solver), plain)
    away = [float((models_after(EWC(s, 5), context, w, solver) - w).norm()) for s in (0.0, 1.0, 100.0, 1e9)]
    assert away == sorted(away, reverse=True)
    # Held as fast as steps of 0.01 can hold, v is one step away from w at most; cross-entropy's gradients are ≤ √2 ‖(x, 1)‖.
    longest = float((data.train.x.square().sum(1) + 1).sqrt().max())
    held = models_after(EWC(1e9, 5), context, w, solver)
    fisher = diagonal_fisher(context.task, w, data.train, torch.arange(4))
    assert float(((held - w) * (fisher > 1e-6)).norm(dim=1).max()) <= 0.01 * 2**0.5 * longest


# ------------------------------------------------------------------------------------------------------ symmetrised KL


def test_symmetrised_kl_is_the_sum_of_both():
    gen = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 5, 4, generator=gen, dtype=torch.float64)
    p, q = torch.distributions.Categorical(logits=a), torch.distributions.Categorical(logits=b)
    expected = torch.distributions.kl_divergence(p, q) + torch.distributions.kl_divergence(q, p)
    torch.testing.assert_close(symmetrised_kl(a, b), expected)
    torch.testing.assert_close(symmetrised_kl(b, a), expected)
    places = symmetrised_kl(torch.stack([a, b], 2), torch.stack([b, b], 2))  # (B, C, 2): the mean over places
    torch.testing.assert_close(places, expected / 2)


@ENGINES
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_kl_steps_against_a_slow_reference(engine, decay):
    data = ragged()
    context = context_of(eq.models.Softmax(4, 3).double(), data, engine)
    w = torch.randn(15, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    solver = SGD(lr=0.1, batch_size=None, weight_decay=decay)
    found = models_after(SymmetrisedKL(2.0, epochs=3), context, w, solver)
    for k in range(4):
        rows = data.train.rows(k)
        x, y = data.train.inputs(rows, torch.float64), data.train.targets(rows)
        reference = functional.log_softmax(context.task.outputs(w, x), 1).detach()
        v = w.clone()
        for _ in range(3):
            leaf = v.clone().requires_grad_()
            log_p = functional.log_softmax(context.task.outputs(leaf, x), 1)
            forth = (log_p.exp() * (log_p - reference)).sum(1)
            back = (reference.exp() * (reference - log_p)).sum(1)
            loss = (functional.nll_loss(log_p, y, reduction="none") + forth + back).mean() + decay / 2 * leaf.square().sum()
            v = v - 0.1 * torch.autograd.grad(loss, leaf)[0]
        torch.testing.assert_close(found[k], v, rtol=1e-9, atol=1e-12)


def test_kl_limits():
    data = ragged()
    context = context_of(eq.models.Softmax(4, 3).double(), data, Simulator())
    w = torch.randn(15, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    solver = SGD(lr=0.01, batch_size=3)
    plain = models_after(Finetuning(5), context, w, solver)
    torch.testing.assert_close(models_after(SymmetrisedKL(0.0, 5), context, w, solver), plain)
    long = SGD(lr=0.005, batch_size=None)  # 100 is the strongest that such steps can follow
    apart = []
    for strength in (0.0, 1.0, 10.0, 100.0):
        models = models_after(SymmetrisedKL(strength, 100), context, w, long)
        x = data.train.inputs(slice(None), torch.float64)
        apart.append(float(sum(symmetrised_kl(context.task.outputs(v, x), context.task.outputs(w, x)).mean() for v in models)))
    assert apart == sorted(apart, reverse=True)
    assert apart[-1] < 0.005 * apart[0]


def test_the_predictions_to_stay_near_have_no_dropout(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    pair, seen, x = Pair(Task.of(model), _PredictionPenalty(1.0)).train(), [], torch.randn(6, 4, dtype=torch.float64)
    monkeypatch.setattr(
        "equipoise.personal.regularise.symmetrised_kl", lambda *given: seen.append(given) or symmetrised_kl(*given)
    )
    for _ in range(2):
        pair.loss(x, torch.zeros(6, dtype=torch.int64))
    (once, kept), (again, still) = seen
    assert not torch.equal(once, again)
    assert torch.equal(kept, still)
    torch.testing.assert_close(kept, model.eval()(x))
    assert pair.scorer.training


@pytest.mark.parametrize("model", [eq.models.Logistic(4), eq.models.LinearSVM(4)])
def test_kl_needs_softmax_classification(model):
    data = FederatedData(make_clients([5, 4], classes=2), classes=2)
    algorithm = eq.Algorithm(personal=SymmetrisedKL())
    with pytest.raises(InvalidParameter, match="cross-entropy"):
        eq.train(model, data, algorithm, rounds=1, clients_per_round=2, progress=False)


# -------------------------------------------------------------------------------------------------------------- Mapper


@ENGINES
def test_mapper_by_hand(engine):
    # From w = v = 0 towards 4 with lr ¼: λ = ½ takes v to ¼ · ½ · 8 = 1 (loss (½ − 4)²), λ = 1 takes it to 2 (loss 4).
    data = on_a_line([4.0], [4.0, 4.0])
    context, w, cohort = context_of(LINE, data, engine), doubles(0.0), everyone(data)
    rows = doubles([0.0, 0.0], [0.0, 0.0])
    after, shared = Mapper((0.0, 0.5, 1.0)).work(context, w, cohort, rows, QUARTER, None)
    assert (after.tolist(), shared) == ([[1.0, 2.0], [1.0, 2.0]], None)
    assert Mapper((0.0, 0.5, 1.0)).updates(context, w, cohort, after, QUARTER).tolist() == [[0.0], [0.0]]  # (1 − λ) = 0
    half = Mapper((0.5,))
    rows = half.work(context, w, cohort, rows, QUARTER, None)[0]
    assert rows.tolist() == [[0.5, 1.0], [0.5, 1.0]]
    # Given v = 1, a step on w is ¼ · ½ · 2(4 − ½) = 0.875.
    assert half.updates(context, w, cohort, rows, QUARTER).tolist() == [[0.875], [0.875]]
    assert half.models(context, doubles(3.0), cohort, doubles([0.5, 1.0], [0.0, 1.0]), QUARTER, None).tolist() == [[2.0], [3.0]]


@ENGINES
def test_mapper_at_0_sends_the_solvers_work(engine):
    data = ragged()
    context = context_of(eq.models.Softmax(4, 3).double(), data, engine)
    w = torch.randn(15, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    cohort = everyone(data).having(effort=torch.tensor([2, 1, 2, 1]))
    solver = SGD(lr=0.2, batch_size=3, epochs=2, momentum=0.5, weight_decay=0.1, prox=0.7, straggler_share=0.5)
    rows = torch.cat([w.new_zeros(1), w + 1]).expand(4, -1)
    method = Mapper((0.0,))
    sent = method.updates(context, w, cohort, rows, solver)
    torch.testing.assert_close(sent, context.engine.updates(w, cohort, solver).update)
    assert torch.equal(method.work(context, w, cohort, rows, solver, None)[0], rows)
    assert torch.equal(method.models(context, w, cohort, rows, solver, None), w.expand(4, -1))


@ENGINES
def test_mapper_at_1_is_local_training(engine):
    data = ragged()
    context = context_of(eq.models.Softmax(4, 3).double(), data, engine)
    w = torch.randn(15, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = torch.cat([w.new_zeros(4, 1), w.expand(4, -1) + torch.arange(4).unsqueeze(1)], 1)
    solver = SGD(lr=0.2, batch_size=3, epochs=2, momentum=0.5, weight_decay=0.1)
    after, _ = Mapper((1.0,)).work(context, w, everyone(data), rows, solver, None)
    alone, _ = eq.personal.Local().work(context, w, everyone(data), rows[:, 1:].contiguous(), solver, None)
    torch.testing.assert_close(after, torch.cat([torch.ones(4, 1, dtype=torch.float64), alone], 1))


def test_of_equally_good_mixes_the_smallest_is_kept():
    context = context_of(LINE, on_a_line([4.0]), Loop())  # w is where F is least: so is every mixture with v = w
    after, _ = Mapper((1.0, 0.5, 0.25)).work(context, doubles(4.0), everyone(context.data), doubles([1.0, 4.0]), QUARTER, None)
    assert after.tolist() == [[0.25, 4.0]]


def test_mapper_works_once_a_round_and_starts_its_engines_once():
    started, data = [], ragged()
    context = context_of(eq.models.Softmax(4, 3).double(), data, Simulator())
    counting = replace(context, start=lambda task: started.append(task.module.rule) or context.start(task))
    calls = []
    engine = context.engine
    original = engine.evaluate_own
    engine.evaluate_own = lambda *args: calls.append(1) or original(*args)
    method, w = Mapper((0.0, 0.5, 1.0)), torch.zeros(15, dtype=torch.float64)
    rows = torch.cat([w.new_zeros(1), w]).expand(4, -1)
    for round_index in range(3):
        cohort = everyone(data, round_index)
        method.updates(counting, w, cohort, rows, QUARTER)
        rows, _ = method.work(counting, w, cohort, rows, QUARTER, None)
    assert len(calls) == 3 * 3  # three mixes in each of three rounds
    assert len(started) == 2
    again, _ = method.work(counting, w + 1, cohort, rows, QUARTER, None)  # another w, another answer
    assert not torch.equal(again, rows)
    assert len(calls) == 4 * 3


# ---------------------------------------------------------------------------------------------------------------- APFL


@ENGINES
def test_apfl_by_hand(engine):
    data = on_a_line([4.0])
    context, w, cohort = context_of(LINE, data, engine), doubles(0.0), everyone(data)
    # v̄ = ½ · 2 = 1 with gradient −6, so that α gains 0.01 · 2 · 6.
    alpha = 0.62
    # Two steps: w_k = 0, then 2; v̄ = α v + (1 − α) w_k, and v moves by ¼ α · 2(4 − v̄).
    first = 2 + 0.25 * alpha * 2 * (4 - alpha * 2)
    second = first + 0.25 * alpha * 2 * (4 - (alpha * first + (1 - alpha) * 2))
    solver = SGD(lr=0.25, batch_size=None, steps=2)
    after, shared = APFL(mix_lr=0.01).work(context, w, cohort, doubles([0.5, 2.0]), solver, None)
    assert after.flatten().tolist() == pytest.approx([alpha, second], rel=1e-12)
    assert shared is None
    served = APFL().models(context, doubles(10.0), cohort, after, solver, None)
    assert float(served) == pytest.approx(alpha * second + (1 - alpha) * 10, rel=1e-12)
    # The solver's rate, ¼, would take α to 0.5 + 3: cut to 1. Where w is better than v it is cut to 0.
    assert float(APFL().work(context, w, cohort, doubles([0.5, 2.0]), solver, None)[0][0, 0]) == 1.0
    assert float(APFL().work(context, w, cohort, doubles([0.5, -2.0]), solver, None)[0][0, 0]) == 0.0


@ENGINES
def test_apfl_takes_the_shared_models_local_steps(engine):
    data = ragged()
    context = context_of(eq.models.Softmax(4, 3).double(), data, engine)
    gen = torch.Generator().manual_seed(0)
    w, own = torch.randn(15, generator=gen, dtype=torch.float64), torch.randn(4, 15, generator=gen, dtype=torch.float64)
    solver = SGD(lr=0.2, batch_size=3, epochs=2, momentum=0.5, weight_decay=0.1, prox=0.7)
    rows = torch.cat([torch.full((4, 1), 0.3, dtype=torch.float64), own], 1)
    shared, _ = pair_steps(context, train_both, rows, w, everyone(data), solver, "both")
    torch.testing.assert_close(shared, w + context.engine.updates(w, everyone(data), solver).update)


@ENGINES
def test_apfl_limits(engine):
    data = ragged()
    context = context_of(eq.models.Softmax(4, 3).double(), data, engine)
    gen = torch.Generator().manual_seed(0)
    w, own = torch.randn(15, generator=gen, dtype=torch.float64), torch.randn(4, 15, generator=gen, dtype=torch.float64)
    solver = SGD(lr=0.2, batch_size=3, epochs=2, momentum=0.5, weight_decay=0.1)
    rows = torch.cat([torch.ones(4, 1, dtype=torch.float64), own], 1)
    after, _ = APFL(mix=1.0, mix_lr=0.0).work(context, w, everyone(data), rows, solver, None)
    torch.testing.assert_close(after[:, 1:], context.engine.own_steps(own, everyone(data), solver))
    rows[:, 0] = 0
    after, _ = APFL(mix=0.0, mix_lr=0.0).work(context, w, everyone(data), rows, replace(solver, weight_decay=0.0), None)
    assert torch.equal(after, rows)
    assert torch.equal(APFL().models(context, w, everyone(data), after, solver, None), w.expand(4, -1))


def test_only_what_a_rule_moves_is_moved():
    data = ragged()
    context = context_of(eq.models.Softmax(4, 3).double(), data, Simulator())
    w = torch.randn(15, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = torch.cat([torch.full((4, 1), 0.3, dtype=torch.float64), w.expand(4, -1) + 1], 1)
    solver = SGD(lr=0.2, batch_size=3, momentum=0.5, weight_decay=0.1, prox=0.7)
    shared, own = pair_steps(context, train_own, rows, w, everyone(data), solver, "own")
    assert torch.equal(shared, w.expand(4, -1))
    assert not torch.isclose(own, rows[:, 1:]).any()


class Scaled(nn.Module):
    """A model whose own loss uses one of its parameters, of no dimension."""

    def __init__(self):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64)), nn.Parameter(torch.tensor(2.0).double())

    def forward(self, x):
        return x @ self.weight

    def loss(self, outputs, y):
        return self.scale.square() * (outputs - y).square()


@ENGINES
def test_parameters_of_a_models_own_loss_are_mixed_too(engine):
    data = FederatedData(make_clients([3, 2], dtype=torch.float64), classes=3)
    context = context_of(Scaled(), data, engine)
    w, own = doubles(1.0, 1.0, 1.0, 1.0, 2.0), doubles([0.0, 1.0, 0.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0, 3.0])
    rows = torch.cat([torch.full((2, 1), 0.25, dtype=torch.float64), own], 1)
    solver = SGD(lr=0.01, batch_size=None)
    _, after = pair_steps(context, train_own, rows, w, everyone(data), solver, "own")
    for k in range(2):
        leaf = mixed_models(rows, w)[k].clone().requires_grad_()
        x, y = (values[data.train.rows(k)].double() for values in (data.train.x, data.train.y))
        loss = (leaf[4] ** 2 * (x @ leaf[:4] - y) ** 2).mean()
        torch.testing.assert_close(after[k], own[k] - 0.01 * 0.25 * torch.autograd.grad(loss, leaf)[0])


# ---------------------------------------------------------------------------------------------------------- whole runs

METHODS = {
    "ewc": EWC(0.5, epochs=3),
    "kl": SymmetrisedKL(0.5, epochs=3),
    "mapper": Mapper((0.0, 0.5, 1.0)),
    "apfl": APFL(0.3),
}
SOLVER = SGD(lr=0.2, batch_size=3, epochs=2)


def trained(personal, engine="simulator", rounds=4, model=None, clients_per_round=2, **options):
    model = model or eq.models.Softmax(4, 3).double()
    algorithm = eq.Algorithm(solver=SOLVER, personal=personal, **options)
    return eq.train(
        model, ragged(), algorithm, rounds=rounds, clients_per_round=clients_per_round, seed=3, engine=engine, progress=False
    )


def tanh_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("model", [None, tanh_layers()], ids=["softmax", "two layers"])
def test_loop_and_simulator_agree(name, model):
    slow, fast = trained(METHODS[name], "loop", model=model), trained(METHODS[name], Simulator(chunk_size=2), model=model)
    torch.testing.assert_close(fast.params, slow.params, rtol=1e-8, atol=1e-10)
    ids = slow.personal.ids
    own = slow.personal.params(ids)
    torch.testing.assert_close(fast.personal.params(ids), own, rtol=1e-8, atol=1e-10)
    assert not torch.isclose(own, slow.params).all(1).all()  # somebody has a model that is not the shared one


@pytest.mark.parametrize("name", ["ewc", "kl", "apfl"])
def test_the_shared_model_is_that_of_the_run_without(name):
    assert torch.equal(trained(METHODS[name]).params, trained(None).params)


def test_apfl_goes_on_from_what_clients_keep():
    result = trained(APFL(0.3), "loop", rounds=3, clients_per_round=4)
    data = ragged()
    context = context_of(eq.models.Softmax(4, 3).double(), data, Loop())
    w, rows = (
        torch.zeros(15, dtype=torch.float64),
        torch.cat([doubles(0.3), torch.zeros(15, dtype=torch.float64)]).expand(4, -1),
    )
    for t in range(3):
        cohort = everyone(data, t, seed=3)
        rows, _ = APFL(0.3).work(context, w, cohort, rows, SOLVER, None)
        w = w + cohort.weights @ context.engine.updates(w, cohort, SOLVER).update
    torch.testing.assert_close(result.params, w)
    torch.testing.assert_close(result.personal.params(result.personal.ids), mixed_models(rows, w))
    assert not torch.isclose(rows[:, 0], doubles(0.3)).all()  # α has moved


@ENGINES
def test_what_mapper_sends_makes_the_shared_model(engine):
    # Clients at 4 and 8, λ = ½ for both, lr ¼. Round by round: v moves by ⅛ · 2(y − m), m = (v + w)/2; then w by the same rule.
    data, personal = on_a_line([4.0], [8.0]), Mapper((0.5,))
    algorithm = eq.Algorithm(solver=QUARTER, personal=personal, sampler=Full())
    result = eq.train(LINE, data, algorithm, rounds=3, seed=0, engine=engine, progress=False)
    w, own = 0.0, [0.0, 0.0]
    for _ in range(3):
        own = [v + 0.25 * (y - (v + w) / 2) for v, y in zip(own, (4.0, 8.0), strict=True)]
        w += sum(0.25 * (y - (v + w) / 2) for v, y in zip(own, (4.0, 8.0), strict=True)) / 2
    assert float(result.params) == pytest.approx(w, rel=1e-12)
    served = [(v + w) / 2 for v in own]
    assert result.personal.params(["c0", "c1"]).flatten().tolist() == pytest.approx(served, rel=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_models_serve_their_clients(name):
    # Two groups of clients whose classes are swapped: one model cannot serve both, personal models can.
    clients = make_clients([40] * 6, classes=2, seed=4)
    swapped = clients.y.clone()
    swapped[120:] = 1 - swapped[120:]
    data = eq.data.split_examples(replace(clients, y=swapped), test=0.5, seed=0, classes=2)
    algorithm = eq.Algorithm(solver=SGD(lr=0.5, batch_size=10), personal=METHODS[name])
    result = eq.train(eq.models.Softmax(4, 2), data, algorithm, rounds=15, clients_per_round=6, seed=0, progress=False)
    losses = []
    for client in data.test.ids:
        x, y = data.test.client(client)
        losses.append([functional.cross_entropy(m(x), y).item() for m in (result.model, result.personal.model(client))])
    shared, own = torch.tensor(losses).mean(0).tolist()
    assert own < shared - 0.1


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "make",
    [
        lambda: EWC(-1.0),
        lambda: EWC(epochs=0),
        lambda: EWC(solver=SGD),
        lambda: SymmetrisedKL(float("inf")),
        lambda: Mapper(()),
        lambda: Mapper((0.5, 1.5)),
        lambda: Mapper(0.5),
        lambda: Mapper(solver=eq.solvers.MAML()),
        lambda: APFL(mix=1.1),
        lambda: APFL(mix_lr=-0.1),
    ],
)
def test_bad_parameters(make):
    with pytest.raises(InvalidParameter):
        make()


@pytest.mark.parametrize("personal", [SymmetrisedKL(), Mapper(), APFL(), EWC()])
@pytest.mark.parametrize("solver", [eq.solvers.MAML(), eq.solvers.FedDane()])
def test_solvers_that_are_made_for_the_shared_model(personal, solver):
    with pytest.raises(IncompatibleParts):
        eq.Algorithm(solver=solver, personal=personal)


def test_a_solver_of_its_own_makes_it_fit():
    eq.Algorithm(solver=eq.solvers.MAML(), personal=SymmetrisedKL(solver=SGD()))
    eq.Algorithm(solver=eq.solvers.MAML(), personal=EWC(solver=SGD()))
    with pytest.raises(IncompatibleParts):  # it sends work on the shared model, too
        eq.Algorithm(solver=eq.solvers.MAML(), personal=Mapper(solver=SGD()))
