"""Recorded steps: models of many kinds give what the loop engine gives, and what cannot be repeated is not recorded."""

import random
import re
from dataclasses import replace

import pytest
import torch
from taken import everyone
from torch import nn
from torch.nn import functional

import equipoise as eq
from equipoise.core.task import Task
from equipoise.core.task_trial import try_task
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.engines import Loop, Simulator
from equipoise.engines.simulator.calibration import Choice
from equipoise.engines.simulator.recorded_steps import RecordedSteps
from equipoise.engines.simulator.workers import one_thread


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x.sin()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * gradient * x.cos()


class Custom(nn.Module):
    """A function of the user's own, an operation in place, a constant of its own, and einsum."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Parameter(torch.randn(2, 8, 3) / 3)

    def forward(self, x):
        x = x.clone()
        x[:, 0] *= 2
        hidden = Doubled.apply(self.first(x)).add_(torch.tensor(0.5, dtype=x.dtype))
        return torch.einsum("bi,kio->bko", hidden, self.second).sum(1)


class Tied(nn.Module):
    """One matrix for both ends, a product of parameters, and a parameter that is never used."""

    def __init__(self):
        super().__init__()
        self.matrix, self.left, self.right = (nn.Parameter(torch.randn(*s) / 3) for s in ((6, 6), (6, 2), (2, 6)))
        self.unused, self.head = nn.Parameter(torch.ones(3)), nn.Linear(6, 3)

    def forward(self, x):
        hidden = torch.relu(x @ (self.matrix + self.left @ self.right))
        return self.head(hidden @ self.matrix.T)


class Dropping(nn.Module):
    """Dropout of all kinds, by functions and by modules."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"a": nn.Linear(6, 12), "b": nn.Linear(12, 3)})
        self.norm = nn.LayerNorm(12)

    def forward(self, x):
        x = functional.silu(self.norm(functional.dropout(self.layers["a"](x), 0.3, self.training)))
        x = functional.alpha_dropout(x, 0.2, self.training)
        return self.layers["b"](functional.dropout1d(x.unsqueeze(1), 0.1, self.training).squeeze(1))


class Changing(nn.Module):
    """BatchNorm, and a buffer that every forward pass in training changes."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 3))
        self.register_buffer("largest", torch.zeros(6))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.largest.copy_(torch.maximum(self.largest, x.abs().amax(0)))
        return self.net(x / (1 + self.largest))


class Repeated(nn.Module):
    """A recurrent layer in both directions with dropout, whose layers are used twice."""

    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(3, 4, 2, dropout=0.3, bidirectional=True, batch_first=True)
        self.back, self.head = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x):
        seen = self.back(self.cells(x.view(len(x), 2, 3))[0])
        return self.head(self.cells(seen)[0][:, -1])


MODELS = {
    "layers in a row": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)),
    "custom": Custom, "tied": Tied, "dropping": Dropping, "changing": Changing, "repeated": Repeated,
}  # fmt: skip
SOLVERS = {
    "plain": eq.solvers.SGD(lr=0.1, batch_size=4, epochs=2),
    "weight decay": eq.solvers.SGD(lr=0.1, batch_size=4, weight_decay=0.1),
    "proximal": eq.solvers.SGD(lr=0.1, batch_size=3, prox=0.5, weight_decay=0.1),
    "momentum": eq.solvers.SGD(lr=0.1, batch_size=3, momentum=0.9, prox=0.2, weight_decay=0.1),
}


def data_of(sizes=(11, 9, 4, 2), dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    each = [(str(i), torch.randn(n, 6, generator=generator).to(dtype), torch.arange(n) % 3) for i, n in enumerate(sizes)]
    return FederatedData(ClientSet.pack(each))


def engine_of(task, data, **options):
    engine = Simulator(chunk_size=4, workers=1, **options).start(task, data)
    engine.use(Choice(path=RecordedSteps.name))
    return engine


def task_of(model, data):
    torch.manual_seed(0)
    return try_task(Task.of(model().to(data.train.x.dtype)), data)


@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("solver", SOLVERS)
def test_recorded_steps_are_those_of_the_loop(name, solver):
    data, solver = data_of(), SOLVERS[solver]
    task = task_of(MODELS[name], data)
    loop, engine, cohort, params = Loop().start(task, data), engine_of(task, data), everyone(4), task.read_model()
    for number in (0, 1):  # the second round goes on with the same programs
        cohort = replace(cohort, round=number)
        wanted, found = (each.updates(params, cohort, solver) for each in (loop, engine))
        torch.testing.assert_close(found.update, wanted.update, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.losses, wanted.losses, rtol=1e-9, atol=1e-12, equal_nan=True)
        if wanted.carried is not None:
            torch.testing.assert_close(found.carried, wanted.carried, rtol=1e-9, atol=1e-12)
        mean = eq.aggregators.WeightedMean()
        wanted, found = (each.summed_update(params, cohort, solver, cohort.weights, mean) for each in (loop, engine))
        torch.testing.assert_close(found.update, wanted.update, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.sq_norms, wanted.sq_norms, rtol=1e-9, atol=1e-12)
    assert engine.paths_taken == (RecordedSteps.name,)


class ByValue(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(x) if float(x.sum()) > 0 else self.head(-x)


class ByHiddenValue(ByValue):
    """NumPy sees the values, and torch does not see that it does."""

    def forward(self, x):
        return self.head(x * float(x.detach().numpy().mean()))


class ByChance(ByValue):
    def forward(self, x):
        return self.head(x) if random.random() < 0.5 else self.head(x) + 0 * x.sum()


class ByCount(ByValue):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return self.head(x) / (1 + 0 * self.calls)


@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (ByValue, "its operations depend on values of tensors"),
        (ByHiddenValue, "its result differs from that of the model"),
        (ByChance, "draws numbers outside torch"),
        (ByCount, "changes attributes of its own"),
    ],
)
def test_what_cannot_be_repeated_is_done_by_another_path_which_says_why(model, reason):
    data = data_of()
    torch.manual_seed(0)
    task = Task.of(model().double())
    engine, solver, cohort, params = engine_of(task, data), SOLVERS["plain"], everyone(4), task.read_model()
    before = {name: value.clone() for name, value in engine.task.module.state_dict().items()}
    path = engine.workers.own.path(RecordedSteps.name)
    assert reason in path.why_not_recorded(engine._rule(solver, 0))
    for name, value in engine.task.module.state_dict().items():
        assert torch.equal(value, before[name])
    engine.updates(params, cohort, solver)
    assert RecordedSteps.name not in engine.paths_taken
    assert reason in engine.explain(eq.Algorithm(solver=solver))


def test_a_trial_leaves_the_model_and_the_streams_as_they_were():
    data = data_of()
    task = task_of(MODELS["changing"], data)
    engine = engine_of(task, data)
    path, rule = engine.workers.own.path(RecordedSteps.name), engine._rule(SOLVERS["plain"], 0)
    before = {name: value.clone() for name, value in engine.task.module.state_dict().items()}
    state = torch.get_rng_state()
    assert path.why_not_recorded(rule) is None
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in engine.task.module.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize(
    ("sizes", "solver", "reason"),
    [
        ((3, 2), eq.solvers.SGD(batch_size=4), "no client has a full batch"),
        ((3, 2), eq.solvers.SGD(batch_size=None), "each client has a batch of another size"),
        ((5, 6), eq.solvers.Adam(batch_size=2), "the steps of Adam are not those of SGD"),
        ((5, 6), eq.solvers.SGD(batch_size=2, clip_norm=1.0), "gradients are clipped at every step"),
    ],
)
def test_work_that_it_does_not_do(sizes, solver, reason):
    data = data_of(sizes)
    engine = engine_of(task_of(MODELS["layers in a row"], data), data)
    engine.updates(engine.task.read_model(), everyone(2), solver)
    assert engine.paths_taken == ("batched autograd",)
    assert reason in engine.explain(eq.Algorithm(solver=solver))


def test_products_are_added_to_the_parameters_at_once():
    """The gradients of three matrices are products, and none of them is written to memory; those of biases are."""
    data = data_of()
    model = lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3))  # noqa: E731
    engine = engine_of(task_of(model, data), data)
    engine.updates(engine.task.read_model(), everyone(4), SOLVERS["plain"])
    (made,) = engine.workers.own.path(RecordedSteps.name)._programs.values()
    source = made._each[0].program.source
    assert source.count("aten.addmm_(") == 3
    assert source.count("aten.add_(") == 3
    # A matrix that is a factor of another's gradient must not have been updated by then.
    engine = engine_of(task_of(MODELS["tied"], data), data)
    engine.updates(engine.task.read_model(), everyone(4), SOLVERS["plain"])
    (made,) = engine.workers.own.path(RecordedSteps.name)._programs.values()
    assert made._each[0].program.source.count("aten.addmm_(") == 1  # the head's


def test_a_step_with_convolutions_is_repeated_bit_for_bit():
    """One rounding decides on which side of zero some unit is, and the difference grows with every step."""
    torch.manual_seed(0)
    clients = [(str(k), torch.randn(20, 3, 8, 8), torch.randint(0, 3, (20,))) for k in range(2)]
    data, solver = FederatedData(ClientSet.pack(clients)), eq.solvers.SGD(lr=0.1, batch_size=10, epochs=3)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 64), nn.ReLU()
    task = Task.of(nn.Sequential(*layers, nn.Linear(64, 3)))
    engine = engine_of(task, data)
    with one_thread():  # as many as processes of the simulator have
        found, wanted = (each.updates(task.read_model(), everyone(2), solver) for each in (engine, Loop().start(task, data)))
    assert engine.paths_taken == ("recorded steps",)
    assert torch.equal(found.update, wanted.update)
    # The head's products are no exception: its gradients are written to memory first, as autograd does.
    (made,) = engine.workers.own.path(RecordedSteps.name)._programs.values()
    assert "aten.addmm_(" not in made._each[0].program.source


@pytest.mark.parametrize("path", [RecordedSteps.name, "one by one"])
def test_updates_of_a_large_model_are_summed_up_block_by_block(path):
    """More numbers than a block, a layer of several blocks, and one whose memory is in another order."""
    data = data_of((11, 9, 4))

    def model():
        wide = nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 3))
        wide[4].weight.data = wide[4].weight.data.t().contiguous().t()
        return wide

    task, cohort = task_of(model, data), everyone(3)
    engine, loop = Simulator(chunk_size=2, workers=1).start(task, data), Loop().start(task, data)
    engine.use(Choice(path=path))
    mean, weights = eq.aggregators.WeightedMean(), torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    asked = (task.read_model(), cohort, SOLVERS["plain"], weights, mean)
    found, wanted = (each.summed_update(*asked) for each in (engine, loop))
    assert engine.paths_taken == (path,)
    torch.testing.assert_close(found.update, wanted.update, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(found.sq_norms, wanted.sq_norms, rtol=1e-10, atol=0)


class Adapted(nn.Module):
    """Two frozen layers with adapters of rank 3, whose products have few columns."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(6, 200).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(3, 6) / 3), nn.Parameter(torch.randn(200, 3) / 9)
        self.c, self.d = nn.Parameter(torch.randn(200, 3) / 9), nn.Parameter(torch.randn(3, 3))

    def forward(self, x):
        hidden = torch.tanh(self.base(x) + x @ self.a.T @ self.b.T)
        return hidden @ self.c @ self.d


def test_products_with_few_columns_are_turned_and_what_nobody_uses_is_left_out(monkeypatch):
    data = data_of()
    task = task_of(Adapted, data)
    wanted = Loop().start(task, data).updates(task.read_model(), everyone(4), SOLVERS["plain"]).update
    sources = []
    for least in (2**15, 200):
        monkeypatch.setattr("equipoise.engines.simulator.cpu.narrow_products._LEAST", least)
        engine = engine_of(task, data)
        found = engine.updates(task.read_model(), everyone(4), SOLVERS["plain"]).update
        assert engine.paths_taken == ("recorded steps",)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-13)
        (made,) = engine.workers.own.path(RecordedSteps.name)._programs.values()
        sources.append(made._each[0].program.source)
    turned = [source.count("aten.contiguous(torch.ops.aten.t(torch.ops.aten.mm(") for source in sources]
    assert turned[0] == 0
    assert turned[1] >= 3  # hidden · c, the gradient of b and that of the product before it
    assert "bitwise" not in sources[0]  # the key of dropout, which nobody asks for
    used = set(re.findall(r"\bv\d+\b", re.sub(r"v\d+ = ", "", sources[0])))
    made = set(re.findall(r"(v\d+) = torch", sources[0]))
    assert made <= used


class Frozen(nn.Module):
    """Large frozen layers with and without a bias, and a frozen matrix that is used both ways, between small trained ones."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.up, self.down = nn.Linear(8, 512).requires_grad_(False), nn.Linear(512, 512, bias=False).requires_grad_(False)
        self.both = nn.Parameter(torch.randn(512, 8) / 20, requires_grad=False)

    def forward(self, x):
        hidden = torch.tanh(self.down(torch.tanh(self.up(self.first(x)))))
        return self.last(hidden @ self.both) + (hidden @ self.both @ self.both.T).mean(1, keepdim=True)


def test_products_with_frozen_matrices_are_packed_and_follow_them(monkeypatch):
    monkeypatch.setattr("equipoise.engines.simulator.cpu.packed_products._LEAST", 1000)
    torch.manual_seed(0)
    clients = [(str(k), torch.randn(16, 6), torch.randint(0, 3, (16,))) for k in range(3)]
    data, solver, cohort = FederatedData(ClientSet.pack(clients)), eq.solvers.SGD(lr=0.3, batch_size=8, epochs=2), everyone(3)
    task = Task.of(Frozen())
    engine, loop = Simulator(workers=1).start(task, data), Loop().start(task, data)
    engine.use(Choice(3, 1, 3, RecordedSteps.name))
    for _ in range(2):
        found, wanted = (each.updates(task.read_model(), cohort, solver).update for each in (engine, loop))
        assert engine.paths_taken == ("recorded steps",)
        assert (found - wanted).norm() <= 1e-4 * wanted.norm()
        with torch.no_grad():  # whoever changes a frozen layer between rounds is heard
            task.module.down.weight.mul_(-1.5)
    (made,) = engine.workers.own.path(RecordedSteps.name)._programs.values()
    (program,) = (each.program for each in made._each)
    # Forward up, down, both, bothᵀ, and back again to the input of each.
    assert program.source.count("mkldnn._linear_pointwise") == 8
