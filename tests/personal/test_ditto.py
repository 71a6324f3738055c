"""Ditto by hand, at its limits, on both engines, and beside any risk and aggregator; local models, finetuning, L2SGD."""

import math
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import equipoise as eq
from equipoise.core.task import Task
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.engines import Loop, Simulator
from equipoise.errors import EquipoiseNotice, IncompatibleParts, InvalidParameter
from equipoise.personal import L2SGD, Ditto, Finetuning, Local
from equipoise.personal.ditto import STRENGTHS_UNDER_ATTACK, USUAL_STRENGTHS, choose_by_validation
from equipoise.solvers import SGD
from equipoise.types import Pull
from made_clients import make_clients

SIZES = [1, 2, 3, 7, 10, 11, 20, 25]
ENGINES = {"loop": Loop(), "simulator": Simulator(), "chunks of 3": Simulator(chunk_size=3)}


def parts(sizes=(20, 24, 30, 16, 40, 22), *, validation=0.25, test=0.25, dtype=torch.float64, **options):
    """Clients with training, validation and test examples of their own."""
    clients = make_clients(list(sizes), dtype=dtype, **options)
    return eq.data.split_examples(clients, validation=validation, test=test, classes=3)


def softmax():
    return eq.models.Softmax(4, 3).double()


class Net(nn.Module):
    """A small network with a hidden layer, started away from zero."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 5).double(), nn.Linear(5, 3).double()
        gen = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            parameter.data = 0.5 * torch.randn(parameter.shape, generator=gen, dtype=torch.float64)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x)))


def everyone(run):
    return run.personal.params(run.personal.ids)


# ------------------------------------------------------------ by hand


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_two_rounds_of_two_steps_by_hand(engine):
    # y = 3x with one example x = 1 and y = −2 with one example x = 2, no bias: F_a(v) = (v − 3)², F_b(v) = (2v + 2)².
    data = FederatedData(
        ClientSet.pack(
            [("a", torch.tensor([[1.0]]).double(), torch.tensor([3.0]).double()),
             ("b", torch.tensor([[2.0]]).double(), torch.tensor([-2.0]).double())]
        )
    )  # fmt: skip
    lr, strength = 0.1, 0.5
    gradient = {"a": lambda v: 2 * (v - 3), "b": lambda v: 4 * (2 * v + 2)}
    w, own = 0.0, {"a": 0.0, "b": 0.0}
    for _ in range(2):
        after = {}
        for name in own:
            local = w
            for _ in range(2):
                local -= lr * gradient[name](local)
                own[name] -= lr * (gradient[name](own[name]) + strength * (own[name] - w))  # w is that of the round's start
            after[name] = local
        w = (after["a"] + after["b"]) / 2
    algorithm = eq.Algorithm(
        solver=SGD(lr=lr, batch_size=None, steps=2), personal=Ditto(strength=strength), sampler=eq.sampling.Full()
    )
    model = eq.models.LinearRegression(1, bias=False).double()
    run = eq.train(model, data, algorithm, rounds=2, engine=engine)
    assert float(run.params) == pytest.approx(w, abs=1e-12)
    for name, value in own.items():
        assert float(run.personal.params([name])) == pytest.approx(value, abs=1e-12)
        assert run.personal.model(name).weight.item() == pytest.approx(value, abs=1e-12)
    rows = {row["client"]: row for row in run.clients}
    assert rows["a"]["personal_loss"] == pytest.approx((own["a"] - 3) ** 2)
    assert rows["b"]["personal_loss"] == pytest.approx((2 * own["b"] + 2) ** 2)
    assert rows["a"]["loss"] == pytest.approx((w - 3) ** 2)


@pytest.mark.parametrize("engine", ENGINES)
def test_l2sgd_by_hand(engine):
    # F_k(v) = (v − x_k)², all clients: v_k ← v_k − η(2(v_k − x_k) + λ(v_k − v̄)), v̄ of the round's start.
    points = {"a": 1.0, "b": 2.0, "c": 6.0}
    data = FederatedData(
        ClientSet.pack((n, torch.tensor([[x]]).double(), torch.tensor([[x]]).double()) for n, x in points.items())
    )
    own = dict.fromkeys(points, 0.0)
    for _ in range(4):
        mean = sum(own.values()) / 3
        own = {n: v - 0.1 * (2 * (v - points[n]) + 0.7 * (v - mean)) for n, v in own.items()}
    algorithm = eq.Algorithm(solver=SGD(lr=0.1, batch_size=None), personal=L2SGD(0.7), sampler=eq.sampling.Full())
    run = eq.train(eq.models.MeanEstimator(1).double(), data, algorithm, rounds=4, engine=ENGINES[engine])
    assert everyone(run).flatten().tolist() == pytest.approx(list(own.values()), abs=1e-12)


# ------------------------------------------------------------ engines agree


@st.composite
def own_solvers(draw):
    return SGD(
        lr=draw(st.sampled_from([0.01, 0.3])), batch_size=draw(st.sampled_from([None, 1, 3, 10])),
        momentum=draw(st.sampled_from([0.0, 0.9])), weight_decay=draw(st.sampled_from([0.0, 0.05])),
        **draw(st.sampled_from([{"epochs": 1}, {"epochs": 3}, {"steps": 4}, {"epochs": 0}])),
    )  # fmt: skip


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(1, 23), min_size=1, max_size=7),
    solver=own_solvers(),
    chunk=st.sampled_from([None, 1, 2, 5]),
    pull=st.sampled_from(["none", "one anchor", "own anchors", "by parameter"]),
    model=st.sampled_from(["softmax", "net", "logistic"]),
    seed=st.integers(0, 2**40),
)
def test_own_steps_and_scores_agree(sizes, solver, chunk, pull, model, seed):
    classes = 2 if model == "logistic" else 3
    data = FederatedData(make_clients(sizes, dtype=torch.float64, seed=seed % 1000, classes=classes), classes=classes)
    made = {"softmax": softmax, "net": Net, "logistic": lambda: eq.models.Logistic(4).double()}[model]()
    task = Task.of(made)
    gen = torch.Generator().manual_seed(seed % 1000)
    k, width = len(sizes), task.layout.dimension
    models = torch.randn(k, width, generator=gen, dtype=torch.float64)
    anchor = torch.randn(k, width, generator=gen, dtype=torch.float64)
    strength = torch.rand(k, width, generator=gen, dtype=torch.float64)
    given_pull = {
        "none": None, "one anchor": Pull(anchor[0], strength[:, 0]), "own anchors": Pull(anchor, strength[:, 0]),
        "by parameter": Pull(anchor, strength),
    }[pull]  # fmt: skip
    cohort = eq.sampling.Full()(3, eq.Algorithm().base_weights(data.train), clients_per_round=1, seed=seed)
    loop, fast = Loop().start(task, data), Simulator(chunk_size=chunk).start(task, data)
    before = models.clone()
    first, second = (engine.own_steps(models, cohort, solver, given_pull) for engine in (loop, fast))
    torch.testing.assert_close(second, first, rtol=1e-8, atol=1e-9)
    assert models.equal(before)
    which = torch.randperm(k, generator=gen)
    for one, two in zip(
        loop.evaluate_own(first[which], data.train, which), fast.evaluate_own(first[which], data.train, which), strict=True
    ):
        torch.testing.assert_close(two, one, rtol=1e-8, atol=1e-9)


METHODS = [
    Ditto(0.5),
    Ditto(1.0, choices=USUAL_STRENGTHS),
    Ditto(0.3, choices=(0.0, 1.0), solver=SGD(lr=0.3, batch_size=3, epochs=2)),
    Ditto(1.0, when="finetuning"),
    Ditto(1.0, choices=(0.1, 2.0), when="finetuning", solver=SGD(lr=0.05, epochs=3)),
    Local(),
    L2SGD(0.5),
    Finetuning(epochs=2),
    Finetuning(epochs=3, solver=SGD(lr=0.02, batch_size=5)),
]


@pytest.mark.parametrize("make", [softmax, Net], ids=["softmax", "net"])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_runs_agree_and_leave_the_shared_model_alone(method, make):
    data, options = parts(), {"rounds": 4, "clients_per_round": 3, "seed": 5}
    algorithm = eq.Algorithm(solver=SGD(lr=0.1, batch_size=8, epochs=2), personal=method)
    runs = {name: eq.train(make(), data, algorithm, engine=engine, **options) for name, engine in ENGINES.items()}
    plain = {name: eq.train(make(), data, replace(algorithm, personal=None), engine=ENGINES[name], **options) for name in runs}
    for name, run in runs.items():
        assert run.params.equal(plain[name].params)  # bit for bit
        assert [r.loss for r in run.history.rounds] == [r.loss for r in plain[name].history.rounds]
        torch.testing.assert_close(everyone(run), everyone(runs["loop"]), rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(run.clients.personal_loss, runs["loop"].clients.personal_loss, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(run.clients.personal_error, runs["loop"].clients.personal_error)
    assert not everyone(runs["loop"])[0].equal(everyone(runs["loop"])[1])


def test_the_scores_of_a_run_are_those_of_its_models():
    data = parts()
    run = eq.train(softmax(), data, eq.Algorithm(personal=Ditto(0.5)), rounds=3, clients_per_round=4, evaluate_every=1)
    for split, clients in data.splits.items():
        rows = run.clients.where(split)
        for k, name in enumerate(clients.ids):
            x, y = clients.inputs(clients.rows(k), torch.float64), clients.targets(clients.rows(k))
            outputs = run.personal.model(name)(x).detach()
            assert float(rows.personal_loss[k]) == pytest.approx(float(nn.functional.cross_entropy(outputs, y)))
            assert float(rows.personal_error[k]) == pytest.approx(float((outputs.argmax(1) != y).double().mean()))
    test = run.clients.where("test")
    assert run.summary().error.mean == pytest.approx(float(test.personal_error.mean()))
    assert run.summary().shared_error.mean == pytest.approx(float(test.error.mean()))
    assert run.history.points[-1].splits["test"]["error"] == pytest.approx(float(test.personal_error.mean()))
    assert "own error" in str(run.summary())


def test_the_summary_heads_a_metric_by_whose_model_it_is_of(ragged):
    data = eq.data.split_examples(ragged.train, test=0.4)
    f1 = {"f1": eq.metrics.macro_f1}
    options = {"rounds": 2, "clients_per_round": 4, "metrics": f1}
    head = str(eq.train(torch.nn.Linear(4, 3), data, eq.Algorithm(personal=Ditto(1.0)), **options).summary()).splitlines()[0]
    assert head.split("  ")[-1].strip() == "own f1"
    head = str(eq.train(torch.nn.Linear(4, 3), data, **options).summary()).splitlines()[0]
    assert head.split("  ")[-1].strip() == "f1"


# ------------------------------------------------------------ limits


@pytest.mark.parametrize("make", [softmax, Net], ids=["softmax", "net"])
@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_without_a_pull_it_is_local_training(make, engine):
    data, options = parts(), {"rounds": 5, "clients_per_round": 4, "engine": engine}
    ditto = eq.train(make(), data, eq.Algorithm(personal=Ditto(0.0)), **options)
    local = eq.train(make(), data, eq.Algorithm(personal=Local()), **options)
    assert everyone(ditto).equal(everyone(local))


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_a_strong_pull_gives_the_shared_model(engine):
    # With lr · λ = 1 a step is v ← w − lr ∇F(v): within lr · (largest gradient) of w. So the distance falls as 1/λ.
    data = parts()
    distances = []
    for strength in (10.0, 100.0, 1000.0):
        own = SGD(lr=1 / strength, batch_size=None, steps=3)
        algorithm = eq.Algorithm(
            solver=SGD(lr=0.05, batch_size=8), personal=Ditto(strength, solver=own), sampler=eq.sampling.Full()
        )
        run = eq.train(softmax(), data, algorithm, rounds=4, engine=engine)
        before = eq.train(softmax(), data, replace(algorithm, personal=None), rounds=3, engine=engine)  # w^t of the last round
        distances.append(float((everyone(run) - before.params).norm(dim=1).max()))
    assert distances[0] / distances[1] == pytest.approx(10, rel=0.3)
    assert distances[1] / distances[2] == pytest.approx(10, rel=0.1)


def test_a_step_that_leaps_over_the_shared_model_is_refused():
    with pytest.raises(InvalidParameter, match="must not exceed 1"):
        eq.Algorithm(solver=SGD(lr=0.1), personal=Ditto(20.0))
    with pytest.raises(InvalidParameter, match="must not exceed 1"):
        eq.Algorithm(solver=SGD(lr=0.1), personal=Ditto(1.0, choices=(0.1, 11.0)))
    with pytest.raises(InvalidParameter, match="must not exceed 1"):
        eq.Algorithm(solver=SGD(lr=0.1), personal=L2SGD(20.0))
    eq.Algorithm(solver=SGD(lr=0.1), personal=Ditto(20.0, solver=SGD(lr=0.05)))


def test_the_finetuning_solver_meets_the_joint_one_where_it_must():
    # Point estimation: both end at argmin (v − x)² + (λ/2)(v − w)² = (2x + λw)/(2 + λ).
    points = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)
    data = FederatedData(ClientSet.pack((f"c{i}", x.reshape(1, 1), x.reshape(1, 1)) for i, x in enumerate(points)))
    work = SGD(lr=0.1, batch_size=None, steps=10)
    common = {"solver": SGD(lr=0.1, batch_size=None), "sampler": eq.sampling.Full()}
    model = eq.models.MeanEstimator(1).double()
    joint = eq.train(model, data, eq.Algorithm(personal=Ditto(1.5, solver=work), **common), rounds=60)
    after = eq.train(
        model, data, eq.Algorithm(personal=Ditto(1.5, solver=replace(work, steps=80), when="finetuning"), **common), rounds=60
    )
    expected = (2 * points + 1.5 * points.mean()) / 3.5
    torch.testing.assert_close(everyone(joint).flatten(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(everyone(after).flatten(), expected, atol=1e-5, rtol=0)


def test_finetuning_by_hand():
    # Two epochs on one example from w: v ← v − 0.2(v − x), twice.
    data = FederatedData(
        ClientSet.pack((f"c{i}", torch.tensor([[x]]).double(), torch.tensor([[x]]).double()) for i, x in enumerate([1.0, 5.0]))
    )
    algorithm = eq.Algorithm(solver=SGD(lr=0.1, batch_size=None), sampler=eq.sampling.Full(), personal=Finetuning(epochs=2))
    run = eq.train(eq.models.MeanEstimator(1).double(), data, algorithm, rounds=1)
    assert float(run.params) == pytest.approx(0.6)
    assert everyone(run).flatten().tolist() == pytest.approx([1 + (0.6 - 1) * 0.8**2, 5 + (0.6 - 5) * 0.8**2])
    assert everyone(run).equal(everyone(run))  # made again, the same


# ------------------------------------------------------------ who takes part


@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize("method", [Ditto(0.5), Ditto(0.5, choices=USUAL_STRENGTHS), Local(), L2SGD(0.5)], ids=repr)
def test_clients_that_were_never_drawn_are_served_the_shared_model(method, engine):
    data = parts([20] * 12)
    algorithm = eq.Algorithm(personal=method)
    run = eq.train(softmax(), data, algorithm, rounds=2, clients_per_round=2, engine=engine)
    drawn = {
        int(k)
        for t in range(2)
        for k in eq.sampling.Uniform()(t, algorithm.base_weights(data.train), clients_per_round=2, seed=0).clients
    }
    assert 2 <= len(drawn) <= 4
    models = everyone(run)
    for k in range(12):
        assert bool(models[k].equal(run.params)) is (k not in drawn)
    rows = run.clients.where("test")
    for k in range(12):
        assert (float(rows.personal_loss[k]) == pytest.approx(float(rows.loss[k]), abs=1e-12)) is (k not in drawn)


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_clients_without_a_weight_still_train_their_own_model(engine):
    data = parts()
    common = {"sampler": eq.sampling.Full(), "solver": SGD(lr=0.1, batch_size=8)}
    worst = eq.Algorithm(risk=eq.risk.Superquantile(0.3), personal=Ditto(0.5), **common)
    tail = eq.train(Net(), data, worst, rounds=1, engine=engine)
    mean = eq.train(Net(), data, eq.Algorithm(personal=Ditto(0.5), **common), rounds=1, engine=engine)
    assert tail.history.rounds[0].trained < 6
    assert everyone(tail).equal(everyone(mean))  # in the first round both are pulled to w^0
    assert not tail.params.equal(mean.params)


def test_unseen_clients_have_no_model_and_the_summary_says_so(ragged):
    with pytest.warns(EquipoiseNotice, match="figures are of the shared model"):
        run = eq.train(eq.models.Softmax(4, 3), ragged, eq.Algorithm(personal=Ditto()), rounds=2, clients_per_round=4)
    assert bool(run.clients.where("test").personal_error.isnan().all())
    assert not run.clients.where("test").has_own
    assert not bool(run.clients.where("train").personal_error.isnan().any())
    assert run.summary().shared_error is None
    assert run.summary().error.mean == pytest.approx(float(run.clients.where("test").error.mean()))


# ------------------------------------------------------------ choosing the strength


def test_each_client_is_served_the_strength_with_the_fewest_validation_errors():
    data = parts([16, 24, 40, 60, 80], validation=0.25)
    common = {"rounds": 4, "clients_per_round": 5}
    strengths = (0.0, 1.0, 5.0)
    apart = {s: eq.train(softmax(), data, eq.Algorithm(personal=Ditto(s)), **common) for s in strengths}
    chosen = eq.train(softmax(), data, eq.Algorithm(personal=Ditto(1.0, choices=strengths)), **common)
    for k, name in enumerate(data.train.ids):
        assert int(data.validation.sizes[k]) >= 4
        scores = {
            s: (
                float(run.clients.where("validation").personal_error[k]),
                float(run.clients.where("validation").personal_loss[k]),
            )
            for s, run in apart.items()
        }
        best = min(scores, key=scores.__getitem__)
        assert chosen.personal.params([name]).equal(apart[best].personal.params([name])), (name, scores)


def test_clients_with_few_validation_examples_use_the_given_strength():
    data = parts([12, 12, 40, 40], validation=0.25, test=0.25)
    assert data.validation.sizes.tolist() == [3, 3, 10, 10]
    common = {"rounds": 3, "clients_per_round": 4}
    for strength, choices in ((1.0, USUAL_STRENGTHS), (0.1, STRENGTHS_UNDER_ATTACK), (3.0, (0.0, 0.5))):
        run = eq.train(softmax(), data, eq.Algorithm(personal=Ditto(strength, choices=choices)), **common)
        fixed = eq.train(softmax(), data, eq.Algorithm(personal=Ditto(strength)), **common)
        ids = data.train.ids
        assert run.personal.params(ids[:2]).equal(fixed.personal.params(ids[:2]))
        # The others choose among the choices alone: a fallback that is no choice is not served to them.
        apart = [eq.train(softmax(), data, eq.Algorithm(personal=Ditto(c)), **common).personal.params(ids[2:]) for c in choices]
        for k, model in enumerate(run.personal.params(ids[2:])):
            assert any(model.equal(other[k]) for other in apart)


class Scored:
    """An engine that answers with given losses and errors, one column per model."""

    def __init__(self, loss, error):
        self.columns = list(zip(torch.tensor(loss).double().t(), torch.tensor(error).double().t(), strict=True))

    def evaluate_own(self, models, clients, which):
        loss, error = self.columns[int(models[0, 0])]
        return loss[which], error[which]


def test_fewest_errors_then_the_lowest_loss_then_the_first():
    clients = make_clients([4, 5, 6, 7, 4, 4])
    data = FederatedData(clients, validation=clients, classes=3)
    nan, inf = math.nan, math.inf
    loss = [[1, 2, 3], [3, 2, 1], [2, 2, 2], [nan, 5, 6], [inf, 2, nan], [0.1, nan, 0.3]]
    error = [[0.5, 0.25, 0.25], [0.5, 0.5, 0.5], [0, 0, 0], [0, 0, 0.1], [nan, 0.5, 0.5], [nan, nan, 0.9]]
    context = type("Context", (), {"data": data, "engine": Scored(loss, error)})()
    models = torch.arange(3.0).expand(6, 3).unsqueeze(2)  # the number of a model is its only parameter
    assert choose_by_validation(context, models, torch.arange(6), [0, 1, 2]).tolist() == [1, 2, 0, 1, 1, 2]
    assert choose_by_validation(context, models, torch.arange(6), [2, 0]).tolist() == [2, 2, 2, 2, 2, 2]
    assert choose_by_validation(context, models, torch.arange(6), [0, 2]).tolist() == [2, 2, 0, 2, 0, 2]


def test_choices_need_validation_examples_of_the_same_clients(ragged):
    with pytest.raises(InvalidParameter, match="validation examples"):
        eq.train(
            eq.models.Softmax(4, 3),
            ragged,
            eq.Algorithm(personal=Ditto(choices=USUAL_STRENGTHS)),
            rounds=1,
            clients_per_round=4,
        )
    strangers = FederatedData(ragged.train, validation=ragged.test, classes=3)
    with pytest.raises(InvalidParameter, match="validation examples"):
        eq.train(
            eq.models.Softmax(4, 3),
            strangers,
            eq.Algorithm(personal=Ditto(choices=USUAL_STRENGTHS)),
            rounds=1,
            clients_per_round=4,
        )


# ------------------------------------------------------------ composition

PARTS = [
    {"risk": eq.risk.Tilted(1.0), "aggregator": eq.aggregators.MultiKrum(malicious=1)},
    {"aggregator": eq.aggregators.NormClip()},
    {"aggregator": eq.aggregators.NormClip(0.1)},
    {"aggregator": eq.aggregators.Median(), "server": eq.server_opt.Adam(lr=0.05)},
    {"risk": eq.risk.QFair(1.0), "averaging": eq.averaging.Uniform()},
    {"risk": eq.risk.WorstCase(0.1), "sampler": eq.sampling.Full()},
    {"solver": SGD(lr=0.1, epochs=4, prox=0.5, straggler_share=0.5)},
    {"solver": SGD(lr=0.1, straggler_share=0.5, stragglers="drop")},
    {"sampler": eq.sampling.Poisson()},
    {"sampler": eq.sampling.Proportional()},
]


@pytest.mark.parametrize("others", PARTS, ids=lambda p: ", ".join(type(v).__name__ for v in p.values()))
def test_it_goes_with_other_parts(others):
    data = eq.attacks.apply(parts(), eq.attacks.RandomUpdates(share=0.2))
    options = {"rounds": 4, "clients_per_round": 5}
    algorithm = eq.Algorithm(**others)
    plain = eq.train(softmax(), data, algorithm, **options)
    run = eq.train(softmax(), data, replace(algorithm, personal=Ditto(0.5)), **options)
    slow = eq.train(softmax(), data, replace(algorithm, personal=Ditto(0.5)), engine="loop", **options)
    assert run.params.equal(plain.params)
    torch.testing.assert_close(everyone(run), everyone(slow), rtol=1e-7, atol=1e-9)


def test_stragglers_and_the_proximal_term_belong_to_the_shared_model():
    data, options = parts(), {"rounds": 1, "clients_per_round": 6}
    slow = SGD(lr=0.1, batch_size=5, epochs=4, prox=0.7, straggler_share=0.5)
    first = eq.train(softmax(), data, eq.Algorithm(solver=slow, personal=Ditto(0.5)), **options)
    second = eq.train(
        softmax(), data, eq.Algorithm(solver=replace(slow, prox=0.0, straggler_share=0.0), personal=Ditto(0.5)), **options
    )
    assert everyone(first).equal(everyone(second))
    assert not first.params.equal(second.params)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_mean_of_l2sgd_is_that_of_all_models(engine):
    data = parts([20] * 9)
    run = eq.train(softmax(), data, eq.Algorithm(personal=L2SGD(0.5)), rounds=30, clients_per_round=3, engine=ENGINES[engine])
    state = run.personal._state.personal
    kept = run.personal._setting.personal.rows.read(state.places, torch.arange(9))
    torch.testing.assert_close(state.shared, kept.mean(0), rtol=1e-10, atol=1e-12)


def test_refusals():
    for make in (
        lambda: Ditto(-1.0), lambda: Ditto(math.inf), lambda: Ditto(math.nan), lambda: Ditto(choices=0.1),
        lambda: Ditto(choices=(-1.0,)),
        lambda: Ditto(when="later"), lambda: Ditto(solver="sgd"), lambda: Ditto(solver=SGD), lambda: L2SGD(-1.0),
        lambda: Finetuning(0), lambda: Finetuning(1.5), lambda: Local(solver=3), lambda: eq.Algorithm(personal=Ditto),
        lambda: eq.Algorithm(personal="ditto"),
    ):  # fmt: skip
        with pytest.raises(InvalidParameter):
            make()
    for solver in (eq.solvers.MAML(), eq.solvers.FedDane(SGD()), eq.solvers.AdaptiveProx(SGD())):
        with pytest.raises(IncompatibleParts, match="made for the shared model"):
            eq.Algorithm(solver=solver, personal=Ditto())
        eq.Algorithm(solver=solver, personal=Ditto(solver=SGD()))
    with pytest.raises(InvalidParameter, match="family"):
        eq.train_family(softmax(), parts(), eq.Algorithm(personal=Ditto()), tails=[1.0, 0.5], rounds=1, clients_per_round=2)
    run = eq.train(softmax(), parts(), eq.Algorithm(personal=Ditto()), rounds=1, clients_per_round=2)
    for wrong in ("client-0", ["nobody"], []):
        with pytest.raises(InvalidParameter, match="must be ids"):
            run.personal.params(wrong)


# ------------------------------------------------------------ what comes out


def test_all_models_in_one_file(tmp_path):
    import numpy as np

    run = eq.train(softmax(), parts(), eq.Algorithm(personal=Ditto()), rounds=2, clients_per_round=3)
    file = run.personal.to_npy(tmp_path / "models.npy")
    assert torch.from_numpy(np.load(file)).equal(everyone(run))
    assert [p.name for p in tmp_path.iterdir()] == ["models.npy"]


def test_the_table_with_personal_columns_round_trips(tmp_path):
    run = eq.train(softmax(), parts(), eq.Algorithm(personal=Ditto()), rounds=2, clients_per_round=3)
    back = eq.ClientTable.from_parquet(run.clients.to_parquet(tmp_path / "clients.parquet"))
    assert back.columns[-3:] == ("personal_loss", "personal_error", "trivial_error")
    assert back.personal_error.equal(run.clients.personal_error)
    assert str(back.summaries()) == str(run.clients.summaries())
    shared = run.clients.summaries()["test"]["shared_error"]
    assert shared.mean == pytest.approx(float(run.clients.where("test").error.mean()))


def test_a_personal_model_that_diverged_does_not_pass_for_the_shared_one():
    data = FederatedData(
        ClientSet.pack((f"c{i}", torch.full((4, 1), x), torch.full((4, 1), x)) for i, x in enumerate([1.0, 2.0]))
    )
    wild = Ditto(0.0, solver=SGD(lr=1e6, batch_size=None, steps=20))
    algorithm = eq.Algorithm(solver=SGD(lr=0.1, batch_size=None), personal=wild, sampler=eq.sampling.Full())
    for engine in ("loop", "simulator"):
        run = eq.train(eq.models.MeanEstimator(1), data, algorithm, rounds=2, engine=engine)
        assert math.isfinite(float(run.clients.loss.max()))
        assert run.clients.has_own
        assert bool(torch.isinf(run.clients.served_error).all())


def test_an_error_that_cannot_be_batched_over_models_is_scored_one_by_one():
    def error(outputs, targets):
        wrong = torch.zeros(len(outputs), dtype=outputs.dtype)
        for i in range(len(outputs)):
            if int(outputs[i].argmax()) != int(targets[i]):  # reads numbers off tensors: no vmap does that
                wrong[i] = 1.0
        return wrong

    data, options = parts(), {"rounds": 2, "clients_per_round": 3}
    algorithm = eq.Algorithm(personal=Ditto(1.0, choices=(0.1, 1.0)))
    usual = eq.train(softmax(), data, algorithm, **options)
    slow = eq.train(softmax(), data, algorithm, error=error, **options)
    torch.testing.assert_close(slow.clients.personal_error, usual.clients.personal_error)


@pytest.mark.parametrize("solver", [eq.solvers.Scaffold(), eq.solvers.AdaptiveProx()])
def test_a_method_is_named_in_its_own_refusal(solver):
    for method in (eq.personal.L2SGD(), Ditto(1.0), eq.personal.Local()):
        with pytest.raises(IncompatibleParts) as refusal:
            eq.Algorithm(solver=solver, personal=method)
        assert refusal.value.reason.startswith(f"{method!r} would train clients' own models by {type(solver).__name__}")
    with pytest.raises(eq.errors.InvalidParameter, match="leap over the mean one"):
        eq.Algorithm(solver=eq.solvers.SGD(lr=2.0), personal=eq.personal.L2SGD(1.0))
