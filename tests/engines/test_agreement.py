"""The simulator agrees with the loop engine: random ragged clients, every solver option, every model, every chunk size."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given, settings
from taken import paths_of
from torch import nn

import equipoise as eq
from equipoise.core.task import Task
from equipoise.core.task_trial import try_task
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.engines import Loop, Simulator
from equipoise.engines.simulator.client_queue import most_clients
from equipoise.engines.simulator.local_rule import LocalRule
from equipoise.engines.simulator.local_work import squared_norms
from equipoise.errors import EquipoiseNotice, IncompatibleParts, InvalidParameter
from equipoise.solvers import SGD
from equipoise.testing import check_engine
from made_clients import make_clients


@st.composite
def solvers(draw):
    length = draw(st.sampled_from([{"epochs": 1}, {"epochs": 3}, {"steps": 1}, {"steps": 5}, {"epochs": 0}]))
    return SGD(
        lr=draw(st.sampled_from([0.01, 0.3])),
        batch_size=draw(st.sampled_from([None, 1, 3, 10, 100])),
        momentum=draw(st.sampled_from([0.0, 0.9])),
        weight_decay=draw(st.sampled_from([0.0, 0.05])),
        prox=draw(st.sampled_from([0.0, 0.5])),
        straggler_share=draw(st.sampled_from([0.0, 0.0, 0.5, 0.9])),
        stragglers="drop" if length in ({"epochs": 1}, {"steps": 1}) else draw(st.sampled_from(["keep", "drop"])),
        **length,
    )


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 23), min_size=1, max_size=7),
    solver=solvers(),
    chunk=st.sampled_from([None, 1, 2, 5]),
    seed=st.integers(0, 2**40),
)
def test_ragged_clients_and_all_solver_options(sizes, solver, chunk, seed):
    data = FederatedData(make_clients(sizes, dtype=torch.float64, seed=seed % 1000), classes=3)
    task = Task.of(eq.models.Softmax(4, 3).double())
    check_engine(Simulator(chunk_size=chunk), task=task, data=data, solver=solver, seed=seed)


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(1, 23), min_size=1, max_size=7),
    kind=st.sampled_from(["meta", "dane", "adaptive"]),
    chunk=st.sampled_from([None, 1, 2, 5]),
    share=st.sampled_from([0.1, 0.5, 0.9]),
    seed=st.integers(0, 2**40),
)
def test_ragged_clients_and_solvers_beyond_sgd(sizes, kind, chunk, share, seed):
    data = FederatedData(make_clients(sizes, dtype=torch.float64, seed=seed % 1000), classes=3)
    task = Task.of(eq.models.Softmax(4, 3).double())
    sgd = SGD(lr=0.1, batch_size=3, epochs=2, prox=0.5, straggler_share=0.5)
    solver = {
        "meta": eq.solvers.MAML(lr=0.3, inner_lr=0.2, inner_steps=1 + seed % 3, support=share),
        "dane": eq.solvers.FedDane(sgd),
        "adaptive": eq.solvers.AdaptiveProx(sgd),
    }[kind]
    check_engine(Simulator(chunk_size=chunk), task=task, data=data, solver=solver, seed=seed)


def images(sizes, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return ClientSet.pack(
        [
            (
                f"w{i}",
                torch.randint(0, 256, (n, 28, 28), generator=gen, dtype=torch.uint8),
                torch.randint(0, 5, (n,), generator=gen),
            )
            for i, n in enumerate(sizes)
        ],
        scale=-1 / 255,
        shift=1.0,
    )


def characters(sizes, classes, seed=0, length=6, vocabulary=9):
    gen = torch.Generator().manual_seed(seed)
    return ClientSet.pack(
        (
            f"r{i}",
            torch.randint(0, vocabulary, (n, length), generator=gen, dtype=torch.uint8),
            torch.randint(0, classes, (n,), generator=gen),
        )
        for i, n in enumerate(sizes)
    )


def real_targets(sizes, binary=False, seed=0):
    gen = torch.Generator().manual_seed(seed)
    triples = []
    for i, n in enumerate(sizes):
        x = torch.randn(n, 4, generator=gen)
        y = torch.randint(0, 2, (n,), generator=gen) if binary else torch.randn(n, generator=gen)
        triples.append((f"c{i}", x, y))
    return ClientSet.pack(triples)


def point_clouds(sizes, seed=0):
    gen = torch.Generator().manual_seed(seed)
    points = [(f"c{i}", torch.randn(n, 2, generator=gen)) for i, n in enumerate(sizes)]
    return ClientSet.pack((name, x, x) for name, x in points)


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.GELU(), nn.LayerNorm(5), nn.Linear(5, 3))


SIZES = [5, 1, 12, 4]
LINEAR = ("softmax", "softmax without bias", "logistic", "svm", "regression")
CASES = {
    "softmax": lambda: (eq.models.Softmax(4, 3), make_clients(SIZES)),
    "softmax without bias": lambda: (eq.models.Softmax(4, 3, bias=False), make_clients(SIZES)),
    "logistic": lambda: (eq.models.Logistic(4), real_targets(SIZES, binary=True)),
    "svm": lambda: (eq.models.LinearSVM(4), real_targets(SIZES, binary=True)),
    "regression": lambda: (eq.models.LinearRegression(4), real_targets(SIZES)),
    "mean": lambda: (eq.models.MeanEstimator(2), point_clouds(SIZES)),
    "convnet": lambda: (eq.models.ConvNet(classes=5), images([5, 1, 3])),
    "gru": lambda: (eq.models.CharGRU(vocabulary=9, classes=4, hidden=6), characters(SIZES, 4)),
    "lstm": lambda: (eq.models.CharLSTM(vocabulary=9, classes=4, hidden=5), characters(SIZES, 4)),
    "two-layer lstm": lambda: (eq.models.CharLSTM(vocabulary=9, classes=4, hidden=5, layers=2), characters(SIZES, 4)),
    "embedding lstm": lambda: (
        eq.models.EmbeddingLSTM(torch.randn(9, 3, generator=torch.Generator().manual_seed(1)), classes=2, hidden=4),
        characters(SIZES, 2),
    ),
    "any module": lambda: (two_layers(), make_clients(SIZES)),
}


def paths_for(name, solver):
    """The paths that may do the work: small linear models are by their clients' examples, or by weights."""
    if name == "convnet":
        return {"hand-written ConvNet"}
    return {"example span", "linear blocks"} if name in LINEAR and not solver.momentum else {"batched autograd"}


@pytest.mark.parametrize("name", CASES)
def test_every_model(name):
    model, clients = CASES[name]()
    task, data = Task.of(model.double()), FederatedData(clients)
    for solver in (
        SGD(lr=0.05, batch_size=4, epochs=2, momentum=0.5, weight_decay=0.01),
        SGD(lr=0.05, batch_size=None, steps=2),
    ):
        engine = Simulator(chunk_size=2)
        assert set(paths_of(engine, task, data, solver)) <= paths_for(name, solver)  # no silent fallback
        check_engine(engine, task=task, data=data, solver=solver, tolerance=1e-8)


def test_whole_runs_agree_whatever_the_chunk(ragged):
    algorithm = eq.Algorithm(
        risk=eq.risk.Superquantile(0.5), solver=SGD(batch_size=4, momentum=0.5), server=eq.server_opt.Adam()
    )
    runs = [
        eq.train(eq.models.Softmax(4, 3), ragged, algorithm, rounds=8, clients_per_round=5, seed=3, engine=engine)
        for engine in ("loop", Simulator(), Simulator(chunk_size=1), Simulator(chunk_size=2))
    ]
    for run in runs[1:]:
        torch.testing.assert_close(run.params, runs[0].params, rtol=1e-4, atol=1e-5)
        assert [r.trained for r in run.history.rounds] == [r.trained for r in runs[0].history.rounds]


def test_a_run_repeats_bit_for_bit_and_depends_on_the_seed(ragged):
    def params(seed):
        return eq.train(eq.models.Softmax(4, 3), ragged, rounds=5, clients_per_round=3, seed=seed).params

    assert torch.equal(params(0), params(0))
    assert not torch.equal(params(0), params(1))


def test_the_order_of_clients_in_the_data_does_not_change_their_batches():
    clients = make_clients([6, 9, 14], dtype=torch.float64)
    turned = clients.take([2, 0, 1])
    task = Task.of(eq.models.Softmax(4, 3).double())
    params = task.layout.read(task.module)

    def updates(set_, order):
        data = FederatedData(set_, classes=3)
        cohort = eq.sampling.Full()(0, torch.full((3,), 1 / 3, dtype=torch.float64), clients_per_round=3, seed=5)
        return Simulator().start(task, data).updates(params, cohort, SGD(batch_size=4)).update[order]

    torch.testing.assert_close(updates(clients, [0, 1, 2]), updates(turned, [1, 2, 0]))


class PlainLSTM(nn.Module):
    """torch's own LSTM kernel, which does not vectorise."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.head = nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x):
        outputs, _ = self.lstm(x.unsqueeze(1))
        return self.head(outputs[:, -1])


class WithDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    def forward(self, x):
        return self.layers(x)


class Noisy(nn.Module):
    """Draws numbers in its forward pass, from the client's own stream, which no batch of clients can do."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x + 0.1 * torch.randn_like(x) if self.training else x)


class Asking(nn.Module):
    """Reads a number off a tensor."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x) if float(self.head.bias.detach()[0]) < 100 else x[:, :3]


@pytest.mark.parametrize("model", [Noisy, Asking])
def test_what_cannot_be_vectorised_is_trained_one_by_one_with_one_notice(model, ragged):
    module = model().double()
    with pytest.warns(EquipoiseNotice, match=f"{model.__name__} cannot be vectorised over clients") as notices:
        first = eq.train(module, ragged, rounds=2, clients_per_round=3)
    assert len(notices) == 1
    second = eq.train(module, ragged, rounds=2, clients_per_round=3, engine="loop")
    torch.testing.assert_close(first.params, second.params, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(first.clients.loss, second.clients.loss, rtol=1e-12, atol=1e-14)
    assert torch.equal(first.clients.error, second.clients.error)


@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
@pytest.mark.parametrize(
    "solver", [SGD(lr=0.1), SGD(lr=0.1, momentum=0.9, weight_decay=0.1, prox=0.5), eq.solvers.MAML(lr=0.1)]
)
def test_a_model_that_falls_back_does_what_the_loop_does(ragged, solver):
    task = Task.of(Asking().double())
    engine, loop = Simulator().start(task, ragged), Loop().start(task, ragged)
    params, cohort = task.layout.read(task.module), _cohort_of(len(ragged.train))
    assert engine.look_ahead is None
    job = eq.types.Job(params, cohort, cohort.weights)
    models = params.expand(len(cohort), -1).contiguous()

    def results(engine):
        yield engine.losses(params, cohort, solver)
        yield engine.losses_of([params, -params], cohort)
        yield engine.losses_each([job])[0]
        yield engine.updates(params, cohort, solver).update
        yield engine.summed_updates([job], solver, eq.aggregators.WeightedMean())[0].update
        yield engine.own_steps(models, cohort, solver)
        yield engine.own_steps(models, cohort, solver, eq.types.Pull(-params, torch.linspace(0, 1, len(cohort)).double()))
        for clients in ragged.splits.values():
            yield from engine.evaluate(params, clients)
            yield from engine.evaluate_own(models[: len(clients)], clients, torch.arange(len(clients)))

    for found, wanted in zip(results(engine), results(loop), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
    assert engine.paths_taken == ("one by one",)


@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_the_global_random_state_is_left_alone(engine, ragged):
    model = WithDropout()
    before = torch.get_rng_state()
    eq.train(model, ragged, rounds=1, clients_per_round=2, engine=engine)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_data_are_left_alone():
    """Also by models that work in place on their input, and when raw numbers are scaled."""
    clients = make_clients([5, 9, 4])
    for scale in (None, 0.5):
        data = FederatedData(replace(clients, scale=scale), classes=3)
        before = data.train.x.clone()
        for engine in ("loop", "simulator"):
            model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3))
            eq.train(model, data, rounds=2, clients_per_round=2, engine=engine, evaluate_every=1)
        data.train.client(at=0)
        assert torch.equal(data.train.x, before)


class Sharper(eq.models.Softmax):
    def forward(self, x):
        return 5 * super().forward(x)


class OwnLoss(nn.Module):
    """A regression whose loss has a parameter (a learned scale) and a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.linear, self.log_scale = nn.Linear(4, 1), nn.Parameter(torch.tensor(0.0))
        self.register_buffer("factor", torch.tensor(0.5))

    def forward(self, x):
        return self.linear(x).squeeze(-1)

    def loss(self, outputs, targets):
        return self.factor * (outputs - targets).square() * torch.exp(-2 * self.log_scale) + self.log_scale


class Sequence(nn.Module):
    """Five classes at each of three places: outputs (B, C, L)."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 15)

    def forward(self, x):
        return self.linear(x).unflatten(-1, (5, 3))


class Summed(nn.Module):
    """Parameters whose gradients autograd hands out as one tensor, or as one number spread out."""

    def __init__(self):
        super().__init__()
        gen = torch.Generator().manual_seed(5)
        self.base, self.delta = (nn.Parameter(torch.randn(3, 4, generator=gen)) for _ in range(2))
        self.scale = nn.Parameter(torch.randn(6, generator=gen))

    def forward(self, x):
        return nn.functional.linear(x, self.base + self.delta) * self.scale.sum()


def in_place(outputs, targets):
    outputs -= outputs.max(1, keepdim=True).values.detach()
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def hooked():
    model = eq.models.Softmax(4, 3)
    model.register_forward_hook(lambda module, args, outputs: 3 * outputs)
    return model


def sequences(sizes):
    gen = torch.Generator().manual_seed(3)
    return ClientSet.pack(
        (f"c{i}", torch.randn(n, 4, generator=gen), torch.randint(0, 5, (n, 3), generator=gen)) for i, n in enumerate(sizes)
    )


def numbers(sizes):
    gen = torch.Generator().manual_seed(4)
    return ClientSet.pack((f"c{i}", torch.randn(n, generator=gen), torch.randn(n, generator=gen)) for i, n in enumerate(sizes))


UNUSUAL = {
    "a forward pass of its own": lambda: (Sharper(4, 3), make_clients(SIZES)),
    "a hook": lambda: (hooked(), make_clients(SIZES)),
    "a loss with a parameter": lambda: (OwnLoss(), real_targets(SIZES)),
    "sequences": lambda: (Sequence(), sequences(SIZES)),
    "inputs without a dimension": lambda: (eq.models.LinearRegression(1), numbers(SIZES)),
    "shared gradients": lambda: (Summed(), make_clients(SIZES)),
    "raw floats with a scale": lambda: (eq.models.Softmax(4, 3), replace(make_clients(SIZES), scale=0.5, shift=1.0)),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_models_and_data(name):
    model, clients = UNUSUAL[name]()
    data = FederatedData(clients)
    task = try_task(Task.of(model.double()), data)
    for solver in (
        SGD(lr=0.05, batch_size=4, epochs=2, weight_decay=0.01),
        SGD(lr=0.05, batch_size=None, steps=2, momentum=0.5, weight_decay=0.1),
        SGD(lr=0.05, batch_size=4, prox=1.0),
    ):
        check_engine(Simulator(chunk_size=3), task=task, data=data, solver=solver, tolerance=1e-8)


def test_a_loss_that_works_in_place():
    data = FederatedData(make_clients(SIZES), classes=3)
    check_engine(
        Simulator(), task=try_task(Task.of(eq.models.Softmax(4, 3).double(), in_place), data), data=data, tolerance=1e-8
    )


class Lazily(SGD):
    """Clients with fewer than ten examples take no step."""

    def local_steps(self, size):
        return size // 10


def test_clients_without_a_step_agree_and_are_left_out_of_the_report(ragged):
    check_engine(Simulator(chunk_size=3), solver=Lazily())
    runs = [
        eq.train(eq.models.Softmax(4, 3), ragged, eq.Algorithm(solver=Lazily()), rounds=2, clients_per_round=8, engine=engine)
        for engine in ("loop", "simulator")
    ]
    for a, b in zip(runs[0].history.rounds, runs[1].history.rounds, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-4)
        assert a.loss > 0


class Checkpointed(nn.Module):
    """Recomputes its forward pass during backward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        hidden = torch.utils.checkpoint.checkpoint(lambda v: torch.tanh(self.first(v)), x, use_reentrant=False)
        return self.second(hidden)


class Plainly(Checkpointed):
    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
def test_checkpointed_models_train_as_plain_ones(ragged):
    recomputed, plain = (
        eq.train(model, ragged, rounds=3, clients_per_round=4, engine="simulator").params
        for model in (Checkpointed(), Plainly())
    )
    torch.testing.assert_close(recomputed, plain)


def test_parameters_of_a_loss_are_trained():
    result = eq.train(OwnLoss(), FederatedData(real_targets([30, 40])), rounds=20, clients_per_round=2)
    assert abs(float(result.model.log_scale.detach())) > 0.01


class Centring(nn.Module):
    """Subtracts the batch's mean: another layer that mixes examples."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x - x.mean(0))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        self.calls += 1
        return self.linear(x)


def test_layers_that_mix_examples_or_keep_state_are_refused(ragged):
    with pytest.raises(IncompatibleParts, match="mixes them"):
        eq.train(Centring(), ragged, rounds=1, clients_per_round=2)
    with pytest.raises(IncompatibleParts, match="changes its buffer 'calls'"):
        eq.train(Counting(), ragged, rounds=1, clients_per_round=2)


def test_norms_beyond_float32_agree():
    data = FederatedData(numbers([3, 4]))
    task = Task.of(eq.models.LinearRegression(1))
    params = torch.zeros(task.layout.dimension)
    cohort = eq.sampling.Full()(0, torch.full((2,), 0.5, dtype=torch.float64), clients_per_round=2, seed=0)
    for lr in (1e25, 1e-25):
        loop, fast = (e.start(task, data).updates(params, cohort, SGD(lr=lr, batch_size=None)) for e in (Loop(), Simulator()))
        torch.testing.assert_close(fast.sq_norms, loop.sq_norms, rtol=1e-4, atol=0)
        assert (loop.sq_norms > 0).all()
        assert bool(torch.isfinite(loop.sq_norms).all()) is (lr < 1)  # an update of 1e25 is marked as absurd
    huge = torch.full((2, 3), 1e25)
    torch.testing.assert_close(squared_norms(huge), huge.double().square().sum(1))


def test_one_large_client_does_not_widen_the_chunks_of_small_ones():
    clients = make_clients([9, 9])
    assert most_clients(60, 200_000, clients, LocalRule.of(SGD(steps=2), 0.1)) < 20
    assert most_clients(60, 10, clients, LocalRule.of(SGD(steps=2), 0.1)) > 1000


def test_an_averaged_loss_is_refused(ragged):
    with pytest.raises(InvalidParameter, match='reduction="none"'):
        eq.train(nn.Linear(4, 3), ragged, rounds=1, clients_per_round=2, loss=nn.CrossEntropyLoss())


def test_frozen_parameters_and_buffers_stay(ragged):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    before = model[0].weight.clone()
    result = eq.train(model, ragged, rounds=2, clients_per_round=4)
    assert torch.equal(result.model[0].weight, before)
    assert not torch.equal(result.model[1].weight, model[1].weight)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
def test_on_a_gpu():
    for solver in (SGD(), SGD(batch_size=3, momentum=0.9, weight_decay=0.01, steps=4)):
        check_engine(Simulator(device="cuda"), solver=solver, tolerance=1e-7)


@pytest.mark.parametrize("model", ["softmax", "network", "no batch"])
def test_losses_of_cohorts_at_their_own_models_in_one_batch(model, monkeypatch):
    class ReadsANumber(nn.Linear):
        def forward(self, x):
            return super().forward(x) * float(x.sum() > -1e9)

    data = FederatedData(make_clients([5, 1, 12, 4, 7]))
    made = {"softmax": eq.models.Softmax(4, 3), "network": two_layers(), "no batch": ReadsANumber(4, 3)}[model]
    engine = Simulator().start(Task.of(eq.models.Softmax(4, 3)), data)
    task = Task.of(made)
    engine.scoring.task = task
    generator = torch.Generator().manual_seed(0)
    models = torch.randn(3, task.layout.dimension, generator=generator)
    cohorts = [torch.tensor([4, 0, 2]), torch.tensor([1]), torch.tensor([3, 4, 1, 0])]
    found = engine.scoring.means_each(models, data.train, cohorts)
    assert (found is None) == (model == "no batch")
    assert engine.scoring.models_together == (model != "no batch")
    for one, params, which in zip(found or [], models, cohorts, strict=model != "no batch"):
        (expected,) = engine.scoring.means(params.unsqueeze(0), data.train, which, with_errors=False)
        torch.testing.assert_close(one, expected[0], rtol=1e-6, atol=1e-7)


def test_losses_of_several_runs_are_batched_where_that_is_worth_it(monkeypatch):
    data = FederatedData(make_clients([5, 1, 12, 4, 7]))
    task = Task.of(two_layers())
    engine = Simulator().start(task, data)
    cohorts = [replace(_cohort_of(5), clients=torch.tensor(which)) for which in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0])]
    jobs = [eq.types.Job((1 + i) * task.layout.read(task.module), cohort, cohort.weights) for i, cohort in enumerate(cohorts)]
    alone = engine.losses_each(jobs)
    monkeypatch.setattr(type(engine.scoring), "can_batch", lambda *_: True)
    monkeypatch.setattr(engine, "losses_of", lambda *_: pytest.fail("one by one"))
    for one, other in zip(engine.losses_each(jobs), alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def _cohort_of(count):
    return eq.sampling.Full()(0, torch.full((count,), 1 / count, dtype=torch.float64), clients_per_round=count, seed=0)
