"""Models that change float buffers in training: running statistics are carried beside the parameters, and pooled."""

import copy
import warnings
from typing import ClassVar

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import equipoise as eq
from equipoise.core import rng
from equipoise.core.carried import CarriedLayout, mean_carried
from equipoise.core.task import Task
from equipoise.core.task_trial import try_task
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.engines import Loop, Simulator
from equipoise.errors import EquipoiseNotice, IncompatibleParts, InvalidParameter, ObserverFailed
from equipoise.runs.checkpoint import Checkpoints
from equipoise.runs.setup import set_up
from equipoise.solvers import SGD
from equipoise.solvers.batches import client_batches
from equipoise.testing import check_engine
from equipoise.types import Cohort, Observer, Pull
from made_clients import make_clients

pytestmark = pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
SIZES = [6, 9, 12, 8]
SOLVER = SGD(lr=0.1, batch_size=4, epochs=2, momentum=0.9)


def normalised(dtype=torch.float64, **options):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, **options), nn.ReLU(), nn.Linear(5, 3)).to(dtype)


@pytest.fixture
def data():
    test = make_clients([5, 8], seed=1, prefix="unseen", dtype=torch.float64)
    return FederatedData(make_clients(SIZES, dtype=torch.float64), test=test, name="made")


class RunningCentre(nn.Module):
    """A layer of a user's own: in training it moves a centre, which it subtracts in evaluation."""

    def __init__(self, features):
        super().__init__()
        self.register_buffer("centre", torch.zeros(features))
        self.register_buffer("calls", torch.tensor(7))

    def forward(self, x):
        if not self.training:
            return x - self.centre
        with torch.no_grad():
            self.centre.mul_(0.5).add_(0.5 * x.mean(0))
            self.calls += 1
        return x - x.mean(0)


def everyone(count, weights=None):
    weights = torch.full((count,), 1 / count, dtype=torch.float64) if weights is None else weights
    return Cohort(0, 0, torch.arange(count), weights, torch.ones(count, dtype=torch.float64))


def model_vector(task):
    return task.read_model()


# ------------------------------------------------------------------------------------------------------- pooled statistics


def test_variances_pool_as_those_of_mixed_data():
    layout = CarriedLayout.of(nn.BatchNorm1d(1))
    clients = torch.tensor([[0.0, 1.0], [2.0, 1.0]])  # means 0 and 2, variances 1 and 1
    pooled = layout.from_moments(layout.to_moments(clients).mean(0))
    assert pooled.tolist() == [1.0, 2.0]  # averaged linearly the variance would be 1


def test_a_round_of_two_clients_by_hand():
    # Client 0 has the inputs −1, 1 (mean 0, variance 1 over n, 2 over n − 1), client 1 has 1, 3. With momentum 1 the running
    # statistics are those of the batch: means 0 and 2, variances 2 and 2. Pooled: mean 1, variance 2 + (0² + 2²)/2 − 1² = 3.
    pairs = [("a", [-1.0, 1.0]), ("b", [1.0, 3.0])]
    clients = ClientSet.pack([(name, torch.tensor(x).unsqueeze(1), torch.tensor(x).unsqueeze(1)) for name, x in pairs])
    model = nn.Sequential(nn.BatchNorm1d(1, momentum=1.0), nn.Linear(1, 1))
    algorithm = eq.Algorithm(solver=SGD(batch_size=None), server=eq.server_opt.Adam(lr=0.5))
    result = eq.train(model, FederatedData(clients), algorithm, rounds=1, clients_per_round=2, loss=squared)
    assert result.carried.tolist() == [1.0, 3.0]
    assert (result.model[0].running_mean.item(), result.model[0].running_var.item()) == (1.0, 3.0)
    assert result.model[0].num_batches_tracked.item() == 0  # counters stay the server's


def squared(outputs, targets):
    return (outputs - targets).square().mean(1)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.floats(-50, 50), st.floats(0, 9), st.floats(0.01, 5)), min_size=1, max_size=6), st.randoms())
def test_pooling_is_that_of_a_mixture_whatever_the_order(clients, order):
    layout = CarriedLayout.of(nn.BatchNorm1d(1))
    mean, variance, weight = torch.tensor(clients, dtype=torch.float64).T
    share = weight / weight.sum()
    moments = layout.to_moments(torch.stack([mean, variance], 1))
    expected = torch.stack([share @ mean, share @ (variance + (mean - share @ mean) ** 2)])
    torch.testing.assert_close(layout.from_moments(mean_carried(moments, weight.tolist())), expected)
    shuffled = order.sample(range(len(clients)), len(clients))
    again = layout.from_moments(mean_carried(moments[shuffled], weight[shuffled].tolist()))
    torch.testing.assert_close(again, expected)
    alone = layout.from_moments(layout.to_moments(torch.stack([mean, variance], 1)))  # nothing is lost on the way
    torch.testing.assert_close(alone, torch.stack([mean, variance], 1), atol=1e-10, rtol=1e-9)


def test_rounding_never_makes_a_variance_negative():
    layout = CarriedLayout.of(nn.BatchNorm1d(1))
    far = layout.to_moments(torch.tensor([[1e8, 0.0], [1e8 + 1e-7, 0.0], [1e8 - 1e-7, 0.0]], dtype=torch.float64))
    assert layout.from_moments(far.mean(0))[1] >= 0
    assert layout.from_moments(torch.tensor([2.0, 3.0], dtype=torch.float64)).tolist() == [2.0, 0.0]


def test_clients_that_do_not_count_are_left_out():
    moments = torch.tensor([[1.0, 2.0], [float("nan")] * 2, [5.0, 9.0]], dtype=torch.float64)
    assert mean_carried(moments, [1.0, 100.0, 3.0]).tolist() == [4.0, 7.25]
    assert mean_carried(moments[1:2], [1.0]) is None


# ------------------------------------------------------------------------------------------------- engines, against plain torch


def plain_client(model, clients, k, solver, seed, round_index):
    """Local work as one writes it down with torch alone."""
    model = copy.deepcopy(model).train()
    optimiser = torch.optim.SGD(model.parameters(), lr=solver.lr, momentum=solver.momentum)
    rows = clients.rows(k)
    x, y = clients.inputs(rows, torch.float64), clients.targets(rows, torch.float64)
    key = rng.client_keys(rng.stream_key(seed, "batches", round_index), clients.keys[k])
    for batch in client_batches(key, len(y), solver.batch_size, solver.local_steps(len(y))):
        if len(batch) < 2:
            continue
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimiser.step()
    return model


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("engine", [Loop(), Simulator()])
def test_rounds_are_those_of_plain_torch(engine, momentum, data):
    result = eq.train(normalised(momentum=momentum), data, eq.Algorithm(solver=SOLVER, sampler=eq.sampling.Full()),
                      rounds=2, engine=engine)  # fmt: skip
    server = normalised(momentum=momentum)
    share = torch.tensor(SIZES, dtype=torch.float64) / sum(SIZES)
    for t in range(2):
        after = [plain_client(server, data.train, k, SOLVER, 0, t) for k in range(len(SIZES))]
        with torch.no_grad():
            for name, parameter in server.named_parameters():
                parameter.copy_(sum(w * dict(m.named_parameters())[name] for w, m in zip(share, after, strict=True)))
        means, variances = (torch.stack([getattr(m[1], f"running_{s}") for m in after]) for s in ("mean", "var"))
        server[1].running_mean.copy_(share @ means)
        server[1].running_var.copy_(share @ (variances + means**2) - (share @ means) ** 2)
    for name, value in server.state_dict().items():
        torch.testing.assert_close(result.model.state_dict()[name], value, rtol=1e-9, atol=1e-10)
    linear = share @ variances
    assert not torch.allclose(result.model[1].running_var, linear, rtol=1e-3)  # variances are not averaged as they are
    x, y = data.test.inputs(data.test.rows(1), torch.float64), data.test.targets(data.test.rows(1), torch.float64)
    loss = nn.functional.cross_entropy(server.eval()(x), y).detach()
    row = next(row for row in result.clients if row["client"] == "unseen-1")
    assert row["loss"] == pytest.approx(float(loss), rel=1e-9)  # evaluated with the server's statistics


@settings(max_examples=8)
@given(st.lists(st.integers(2, 13), min_size=2, max_size=5), st.integers(0, 5), st.data())
def test_engines_agree_and_weights_count_once(sizes, seed, drawn):
    data = FederatedData(make_clients(sizes, seed=seed, dtype=torch.float64))
    task = try_task(Task.of(normalised()), data)
    weights = torch.tensor(
        drawn.draw(st.lists(st.floats(0.1, 1), min_size=len(sizes), max_size=len(sizes))), dtype=torch.float64
    )
    cohort, model = everyone(len(sizes), weights / weights.sum()), model_vector(task)
    loop, fast = (engine.start(task, data) for engine in (Loop(), Simulator()))
    rule = eq.aggregators.WeightedMean()
    one = loop.summed_update(model, cohort, SOLVER, cohort.weights, rule)
    two = fast.summed_update(model, cohort, SOLVER, cohort.weights, rule)
    each = loop.updates(model, cohort, SOLVER)
    torch.testing.assert_close(two.carried, one.carried, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(two.update, one.update, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(mean_carried(each.carried, cohort.weights), one.carried, rtol=1e-9, atol=1e-12)
    order = torch.tensor(drawn.draw(st.permutations(range(len(sizes)))))
    shuffled = loop.summed_update(model, cohort.take(order), SOLVER, cohort.weights[order], rule)
    torch.testing.assert_close(shuffled.carried, one.carried, rtol=1e-9, atol=1e-12)
    again = loop.summed_update(model, cohort, SOLVER, cohort.weights, rule)  # nothing is left in the engine's module
    assert torch.equal(again.carried, one.carried)
    assert torch.equal(again.update, one.update)


class Replaced(RunningCentre):
    """Makes a new tensor of its buffer at every step, which a batched forward pass loses."""

    def forward(self, x):
        if self.training:
            self.centre = (0.5 * self.centre + 0.5 * x.mean(0)).detach()
            return x - x.mean(0)
        return x - self.centre


class OneLayerTwice(nn.Module):
    """One normalisation layer under two names, and one weight in two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.again, self.second.weight = self.norm, self.first.weight

    def forward(self, x):
        return self.head(self.again(self.second(torch.relu(self.norm(self.first(x))))))


def with_dropout():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 3)).double()


MODELS = {  # by name: a model, a batch size, and the path that trains it
    "BatchNorm": (normalised(), 3, "batched autograd"),
    "BatchNorm, all examples at once": (normalised(), None, "batched autograd"),
    "BatchNorm, batches of one": (normalised(), 4, "one by one"),
    "mean over all batches": (normalised(momentum=None), 3, "one by one"),
    "one layer twice": (OneLayerTwice().double(), 3, "batched autograd"),
    "dropout, too": (with_dropout(), 3, "batched autograd"),
    "a layer of the user's own": (nn.Sequential(RunningCentre(4), nn.Linear(4, 3)).double(), 4, "one by one"),
    "a buffer made anew": (nn.Sequential(Replaced(4), nn.Linear(4, 3)).double(), 4, "one by one"),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, {"chunk_size": 2, "workers": 2}])
def test_paths_agree_with_the_loop_engine(name, options, data):
    model, batch_size, path = MODELS[name]
    task, engine = try_task(Task.of(model), data), Simulator(**options)
    for solver in (SGD(batch_size=batch_size, epochs=2, momentum=0.5), eq.solvers.Adam(batch_size=batch_size, clip_norm=0.1)):
        check_engine(engine, task=task, data=data, solver=solver)
    running = engine.start(task, data)
    running.summed_update(
        model_vector(task), everyone(4), solver_of(batch_size), everyone(4).weights, eq.aggregators.WeightedMean()
    )
    if not options:
        assert running.paths_taken == (path,)


def solver_of(batch_size):
    return SGD(lr=0.1, batch_size=batch_size)


@pytest.mark.parametrize("model", [normalised(), nn.Sequential(RunningCentre(4), nn.Linear(4, 3)).double()])
def test_the_public_check_covers_carried_values(model, data):
    check_engine(Simulator(), task=try_task(Task.of(model), data), data=data)


def test_buffers_are_found_by_trying_and_others_are_averaged(data):
    model = nn.Sequential(RunningCentre(4).double(), nn.Linear(4, 3).double())
    task = try_task(Task.of(model), data)
    assert task.carried.names == ("0.centre",)
    assert task.mixes
    assert not task.carried.moments
    result = eq.train(model, data, eq.Algorithm(solver=SGD(batch_size=None)), rounds=1, clients_per_round=len(SIZES))
    means = torch.stack([data.train.inputs(data.train.rows(k), torch.float64).mean(0) for k in range(len(SIZES))])
    share = torch.tensor(SIZES, dtype=torch.float64) / sum(SIZES)
    torch.testing.assert_close(result.model[0].centre, 0.5 * share @ means)
    assert result.model[0].calls.item() == 7


def test_zeros_do_not_hide_a_buffer():
    clients = ClientSet.pack([("a", torch.zeros(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]))])
    task = try_task(Task.of(nn.Sequential(RunningCentre(4), nn.Linear(4, 3))), FederatedData(clients))
    assert task.carried.names == ("0.centre",)


def test_attacks_and_lost_updates(data):
    bad = eq.attacks.apply(data, eq.attacks.ModelReplacement(share=0.25, factor=1e300))
    options = {"rounds": 1, "clients_per_round": 4, "engine": "loop"}
    algorithm = eq.Algorithm(solver=SOLVER)
    attacked = eq.train(normalised(), bad, algorithm, **options)
    (lost,) = attacked.history.rounds[0].rejected
    rest = [k for k, client in enumerate(data.train.ids) if client != lost]
    alone = eq.train(normalised(), FederatedData(data.train.take(rest)), algorithm, **options | {"clients_per_round": 3})
    torch.testing.assert_close(attacked.carried, alone.carried)  # its statistics are left out with its update


def test_clients_without_a_step_do_not_count(data):
    task = try_task(Task.of(normalised()), data)
    cohort = everyone(4)
    idle = Cohort(0, 0, cohort.clients, cohort.weights, cohort.inclusion, {"effort": torch.tensor([0, 2, 2, 0])})
    rule, model = eq.aggregators.WeightedMean(), model_vector(task)
    engine = Loop().start(task, data)
    some = engine.summed_update(model, idle, SOLVER, idle.weights, rule)
    two = cohort.take(torch.tensor([1, 2]))
    torch.testing.assert_close(some.carried, engine.summed_update(model, two, SOLVER, two.weights, rule).carried)
    none = Cohort(0, 0, cohort.clients, cohort.weights, cohort.inclusion, {"effort": torch.zeros(4, dtype=torch.int64)})
    assert engine.summed_update(model, none, SOLVER, none.weights, rule).carried is None
    stragglers = eq.Algorithm(solver=SGD(batch_size=4, straggler_share=0.5, stragglers="drop"))
    result = eq.train(normalised(), data, stragglers, rounds=1, clients_per_round=4, engine="loop")
    assert torch.isfinite(result.carried).all()


# ------------------------------------------------------------------------------------------------------------- small batches


def test_batches_of_one_are_left_out_and_told(data):
    clients = FederatedData(make_clients([5, 9, 1, 8], dtype=torch.float64))
    with pytest.warns(EquipoiseNotice, match=r"3 of 4 clients have a last batch of one example.*1 of them have no other"):
        result = eq.train(normalised(), clients, eq.Algorithm(solver=SGD(batch_size=4)), rounds=2, clients_per_round=4)
    assert torch.isfinite(result.params).all()
    model = plain_client(normalised(), clients.train, 0, SGD(batch_size=4), 0, 0)
    task = try_task(Task.of(normalised()), clients)
    assert task.smallest_batch == 2
    work = Loop().start(task, clients).updates(model_vector(task), everyone(4), SGD(batch_size=4))
    after = task.layout.read(task.module) + work.update[0]
    torch.testing.assert_close(after, task.layout.read(model))
    assert not work.update[2].any()
    assert work.carried[2].isnan().all()


@pytest.fixture
def marked_memory():
    """Memory that nobody has written to holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("chunk_size", [None, 1, 2])
@pytest.mark.parametrize(
    "solver", [SGD(batch_size=4), eq.solvers.Adam(lr=0.05, batch_size=4), eq.solvers.Adam(lr=0.05, batch_size=4, state="kept")]
)
def test_a_client_whose_only_batch_is_left_out_stays_where_it_is(solver, chunk_size, marked_memory):
    clients = FederatedData(make_clients([5, 9, 1, 8], dtype=torch.float64))
    task, cohort = try_task(Task.of(normalised()), clients), everyone(4)
    model, engines = model_vector(task), (Loop(), Simulator(chunk_size, workers=1))
    expected, work = (engine.start(task, clients).updates(model, cohort, solver) for engine in engines)
    assert not work.update[2].any()
    torch.testing.assert_close(work.update, expected.update, rtol=0, atol=1e-7)  # Adam blows up the last bits of zeros
    if expected.rows is not None:
        torch.testing.assert_close(work.rows, expected.rows)
    own, pull = model.expand(4, -1) + 0.1, Pull(model, torch.full((4,), 0.5, dtype=torch.float64))
    if solver.state == "fresh":
        wanted, found = (engine.start(task, clients).own_steps(own, cohort, solver, pull) for engine in engines)
        torch.testing.assert_close(found, wanted)
        assert torch.equal(found[2], own[2])


@pytest.mark.parametrize("solver", [SGD(batch_size=1), eq.solvers.MAML()])
def test_batches_of_one_that_cannot_be_left_out_are_refused(solver):
    sizes = [5, 9, 1, 8]
    clients = FederatedData(make_clients(sizes, dtype=torch.float64))
    with pytest.raises(IncompatibleParts, match=r"batch of one example(?s:.*)batch_size(?s:.*)with_group_norm"):
        eq.train(normalised(), clients, eq.Algorithm(solver=solver), rounds=1, clients_per_round=4)


def test_images_may_come_one_at_a_time():
    gen = torch.Generator().manual_seed(0)
    triples = [(f"c{k}", torch.randn(n, 1, 4, 4, generator=gen), torch.randint(0, 2, (n,), generator=gen))
               for k, n in enumerate([1, 3])]  # fmt: skip
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))
    data = FederatedData(ClientSet.pack(triples))
    assert try_task(Task.of(model), data).smallest_batch == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", EquipoiseNotice)
        eq.train(model, data, eq.Algorithm(solver=SGD(batch_size=2)), rounds=1, clients_per_round=2, engine="loop")


# ------------------------------------------------------------------------------------------------------------------- modes


def test_frozen_parts_keep_the_mode_they_were_left_in(data):
    class Seen(nn.Dropout):
        modes: ClassVar[list[bool]] = []

        def forward(self, x):
            self.modes.append(self.training)
            return super().forward(x)

    backbone = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), Seen(0.5)).double().requires_grad_(False)
    nn.init.normal_(backbone[1].running_mean)
    head = nn.Sequential(nn.Dropout(0.1), nn.Linear(5, 3)).double()
    model = nn.Sequential(backbone.eval(), head)
    task = try_task(Task.of(model), data)
    assert task.carried.size == 0
    assert not task.mixes
    task.scorer.train()
    assert task.module[1][0].training
    assert not any(part.training for part in task.module[0].modules())
    task.scorer.eval()
    assert not task.module[1][0].training
    Seen.modes.clear()
    result = eq.train(model, data, rounds=1, clients_per_round=4, engine="loop")
    assert Seen.modes
    assert not any(Seen.modes)
    assert torch.equal(result.model[0][1].running_mean, backbone[1].running_mean)
    assert result.carried is None
    left_on = nn.Sequential(copy.deepcopy(backbone).train(), head)
    task = try_task(Task.of(left_on), data)  # as left by the user: in training mode, so its statistics move
    assert task.carried.names == ("0.1.running_mean", "0.1.running_var")
    task.scorer.eval()
    assert not any(part.training for part in task.module.modules())  # in evaluation nothing is


class KeepsItsStatistics(nn.Sequential):
    """A model that says itself which layers are trained in which mode."""

    def train(self, mode=True):
        super().train(mode)
        self[1].eval()
        return self


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_the_mode_of_local_work_does_not_depend_on_the_mode_at_the_start(engine, data):
    left_off = eq.train(normalised().eval(), data, eq.Algorithm(solver=SOLVER), rounds=1, clients_per_round=4, engine=engine)
    usual = eq.train(normalised(), data, eq.Algorithm(solver=SOLVER), rounds=1, clients_per_round=4, engine=engine)
    assert torch.equal(left_off.carried, usual.carried)
    own = KeepsItsStatistics(*normalised())
    result = eq.train(own, data, eq.Algorithm(solver=SOLVER), rounds=1, clients_per_round=4, engine=engine)
    assert result.carried is None
    assert torch.equal(result.model[1].running_var, torch.ones(5, dtype=torch.float64))


def test_a_frozen_backbone_is_batched_and_agrees(data):
    backbone = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)).double().requires_grad_(False).eval()
    model = nn.Sequential(backbone, nn.Linear(5, 3).double())
    loop, fast = (eq.train(model, data, rounds=2, clients_per_round=4, engine=e) for e in ("loop", "simulator"))
    torch.testing.assert_close(fast.params, loop.params)
    engine = Simulator().start(try_task(Task.of(model), data), data)
    assert engine.why_not_vectorised() is None


# ------------------------------------------------------------------------------------------------------- with the other parts


class Stop(Observer):
    def on_state(self, state):
        if state.round == 3:
            raise RuntimeError("stop")


@pytest.mark.parametrize("averaging", [None, eq.averaging.Geometric(0.3)])
@pytest.mark.parametrize("personal", [None, eq.personal.Ditto()])
def test_a_run_that_stops_goes_on_bit_for_bit(averaging, personal, data, tmp_path):
    algorithm = eq.Algorithm(solver=SOLVER, averaging=averaging, personal=personal, server=eq.server_opt.Adam(lr=0.1))
    options = {"rounds": 5, "clients_per_round": 3, "evaluate_every": 2}
    file = tmp_path / "state.safetensors"
    whole = eq.train(normalised(torch.float32), data, algorithm, **options)
    with pytest.raises(ObserverFailed):
        eq.train(
            normalised(torch.float32), data, algorithm, observers=[Stop()], checkpoint=Checkpoints(file, every=1), **options
        )
    resumed = eq.train(normalised(torch.float32), data, algorithm, checkpoint=file, **options)
    assert torch.equal(resumed.params, whole.params)
    assert torch.equal(resumed.carried, whole.carried)
    assert torch.equal(resumed.clients.loss, whole.clients.loss)
    assert resumed.history.points == whole.history.points
    if personal is not None:
        for client in data.train.ids:
            one, two = (run.personal.model(client).state_dict() for run in (resumed, whole))
            assert all(torch.equal(one[name], two[name]) for name in one)


def test_an_averaged_iterate_pools_its_statistics(data):
    states = []

    class Keep(Observer):
        def on_state(self, state):
            states.append(state)

    algorithm = eq.Algorithm(solver=SOLVER, averaging=eq.averaging.Uniform())
    result = eq.train(normalised(), data, algorithm, rounds=3, clients_per_round=3, observers=[Keep()])
    mean, variance = (torch.stack([s.carried[part] for s in states[1:]]) for part in (slice(0, 5), slice(5, 10)))
    torch.testing.assert_close(result.carried[:5], mean.mean(0))
    torch.testing.assert_close(result.carried[5:], (variance + mean**2).mean(0) - mean.mean(0) ** 2)


def test_clients_keep_their_own_statistics(data):
    algorithm = eq.Algorithm(solver=SGD(lr=0.1, batch_size=None), sampler=eq.sampling.Full())
    plain = eq.train(normalised(), data, algorithm, rounds=2)
    local = eq.train(normalised(), data, eq.Algorithm(**{**vars_of(algorithm), "personal": eq.personal.Local()}), rounds=2)
    assert torch.equal(local.params, plain.params)
    assert torch.equal(local.carried, plain.carried)
    for k, client in enumerate(data.train.ids):
        model = normalised()
        for t in range(2):
            model = plain_client(model, data.train, k, SGD(lr=0.1, batch_size=None), 0, t)
        own = local.personal.model(client).state_dict()
        for name in ("0.weight", "1.running_mean", "1.running_var"):
            torch.testing.assert_close(own[name], model.state_dict()[name])
    assert local.personal.params(data.train.ids[:2]).shape == (2, len(plain.params))


def vars_of(algorithm):
    return {name: getattr(algorithm, name) for name in ("risk", "solver", "aggregator", "server", "sampler")}


def test_a_pull_does_not_reach_statistics(data):
    strong = eq.personal.Ditto(strength=1.0)
    free = eq.personal.Ditto(strength=0.0)
    options = {"rounds": 1, "clients_per_round": 4, "engine": "loop"}
    solver = SGD(lr=0.1, batch_size=None)  # one step: the pull is zero at its start, so that only statistics could differ
    one, two = (eq.train(normalised(), data, eq.Algorithm(solver=solver, personal=p), **options) for p in (strong, free))
    for client in data.train.ids:
        a, b = (run.personal.model(client).state_dict() for run in (one, two))
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_secure_sums_carry_statistics(data):
    options = {"rounds": 2, "clients_per_round": 4}
    plain = eq.train(normalised(), data, eq.Algorithm(solver=SOLVER), **options)
    secure = eq.train(normalised(), data, eq.Algorithm(solver=SOLVER, privacy=eq.privacy.SecureAggregation()), **options)
    torch.testing.assert_close(secure.carried, plain.carried, atol=1e-5, rtol=0)
    torch.testing.assert_close(secure.params, plain.params, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "solver",
    [eq.solvers.FedDane(SOLVER), eq.solvers.AdaptiveProx(SOLVER), eq.solvers.Scaffold(SOLVER), eq.solvers.FedDyn(0.1, SOLVER)],
)
def test_solvers_that_look_around(solver, data):
    options = {"rounds": 2, "clients_per_round": 4}
    result = eq.train(normalised(), data, eq.Algorithm(solver=solver), **options)
    assert torch.isfinite(result.carried).all()
    loop = eq.train(normalised(), data, eq.Algorithm(solver=solver), engine="loop", **options)
    torch.testing.assert_close(result.params, loop.params, atol=1e-4, rtol=1e-4)


def test_the_gradient_that_corrects_moves_no_statistics(data):
    task = try_task(Task.of(normalised()), data)
    engine, rule, model = Loop().start(task, data), eq.aggregators.WeightedMean(), model_vector(task)
    shared = torch.zeros(task.layout.dimension, dtype=torch.float64)
    solver = SGD(lr=0.0 + 1e-12, batch_size=None)
    adjusted = eq.solvers.prepared.AdjustedSolver(solver, shared)
    plain = engine.summed_update(model, everyone(4), solver, everyone(4).weights, rule)
    corrected = engine.summed_update(model, everyone(4), adjusted, everyone(4).weights, rule)
    torch.testing.assert_close(corrected.carried, plain.carried)


def test_families_and_seeds_share_an_engine(data):
    algorithm = eq.Algorithm(solver=SOLVER)
    options = {"rounds": 2, "clients_per_round": 3}
    family = eq.train_family(normalised(), data, algorithm, tails=[1.0, 0.5], **options)
    for tail, member in family.results.items():
        alone = eq.train(normalised(), data, eq.Algorithm(solver=SOLVER, risk=eq.risk.Superquantile(tail)), **options)
        torch.testing.assert_close(member.params, alone.params)
        torch.testing.assert_close(member.carried, alone.carried)
    assert family.losses(data.test.take([0]))[1.0] == pytest.approx(
        float(next(r["loss"] for r in family.results[1.0].clients if r["client"] == "unseen-0"))
    )
    between = family.at(0.75, interpolate=True)[1]
    ends = [family.results[tail].model[1] for tail in (1.0, 0.5)]
    mean = sum(end.running_mean for end in ends) / 2
    second = sum(end.running_var + end.running_mean**2 for end in ends) / 2
    torch.testing.assert_close(between.running_mean, mean)
    torch.testing.assert_close(between.running_var, second - mean**2)
    family.comparison()
    many = eq.train_many(normalised(), data, algorithm, seeds=2, **options)
    for seed, run in enumerate(many.results["run"]):
        alone = eq.train(normalised(), data, algorithm, seed=seed, **options)
        torch.testing.assert_close(run.params, alone.params)
        torch.testing.assert_close(run.carried, alone.carried)


def test_a_saved_run_holds_the_final_statistics(data, tmp_path):
    from safetensors.torch import load_file

    result = eq.train(normalised(), data, eq.Algorithm(solver=SOLVER), rounds=2, clients_per_round=4)
    folder = result.save(tmp_path / "run")
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(stored["1.running_var"], result.model[1].running_var)
    assert (folder / "report.html").exists()


# ------------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("parts", "rule"),
    [
        ({"privacy": eq.privacy.DifferentialPrivacy(epsilon=5, delta=1e-3, clip=1.0)}, "statistics-without-noise"),
        ({"aggregator": eq.aggregators.Median()}, "statistics-and-robust-rules"),
        ({"personal": eq.personal.APFL()}, "statistics-of-own-models"),
        ({"personal": eq.personal.EWC()}, "statistics-of-own-models"),
    ],
)
def test_what_does_not_go_with_carried_values_is_refused(parts, rule, data):
    with pytest.raises(IncompatibleParts) as refusal:
        eq.train(normalised(), data, eq.Algorithm(**parts), rounds=1, clients_per_round=4)
    assert refusal.value.rule == rule
    replaced = eq.models.with_group_norm(normalised())  # the cure works
    eq.train(replaced, data, eq.Algorithm(**parts), rounds=1, clients_per_round=4)


class ChangesInEvaluation(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3).double()
        self.register_buffer("seen", torch.zeros(4, dtype=torch.float64))

    def forward(self, x):
        self.seen += x.sum(0)
        return self.linear(x)


class MadeLate(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3).double()

    def forward(self, x):
        if "late" not in dict(self.named_buffers()):
            self.register_buffer("late", torch.zeros(4, dtype=torch.float64))
        if self.training:
            self.late += x.sum(0)
        return self.linear(x)


class KeepsTheGraph(MadeLate):
    def __init__(self):
        super().__init__()
        self.register_buffer("late", torch.zeros(3, dtype=torch.float64))

    def forward(self, x):
        outputs = self.linear(x)
        if self.training:
            self.late = 0.9 * self.late + 0.1 * outputs.mean(0)
        return outputs


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (KeepsTheGraph(), "must change its buffer 'late' without gradients"),
        (nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3)).double(), "mixes them"),
        (ChangesInEvaluation(), "changes its buffer 'seen' when it runs in evaluation mode"),
        (MadeLate(), "must make its buffer 'late' before it runs"),
        (nn.Sequential(nn.Linear(4, 3).bfloat16(), nn.BatchNorm1d(3, affine=False)), "type at least as wide"),
    ],
)
def test_models_that_remain_refused(model, words, data):
    with pytest.raises((IncompatibleParts, InvalidParameter), match=words):
        eq.train(model, data, rounds=1, clients_per_round=4)


def test_a_model_without_its_carried_values_is_refused(data):
    setting = set_up(normalised(), data, eq.Algorithm(solver=SOLVER), rounds=1, clients_per_round=4, seed=0, loss=None,
                     error=None, engine="loop")  # fmt: skip
    with pytest.raises(InvalidParameter, match="10 carried values after them"):
        setting.engine.evaluate(setting.first_params, data.train)


class Sequences(nn.Module):
    """Normalises every step, padded or not, or the mean over the steps that are there."""

    def __init__(self, every_step):
        super().__init__()
        self.every_step, self.norm, self.head = every_step, nn.BatchNorm1d(2), nn.Linear(2, 2)

    def forward(self, values, mask):
        if self.every_step:
            values = self.norm(values.transpose(1, 2)).transpose(1, 2)
        shares = mask.to(values.dtype).unsqueeze(2)
        mean = (values * shares).sum(1) / shares.sum(1)
        return self.head(mean if self.every_step else self.norm(mean))


def test_statistics_must_not_count_padded_steps():
    gen = torch.Generator().manual_seed(0)
    rows = [[torch.randn(int(n), 2, generator=gen) for n in lengths] for lengths in ([2, 5, 3, 7], [4, 1, 6, 2])]
    clients = [
        (f"c{k}", {"values": eq.data.Ragged.of(each, mask="mask")}, torch.tensor([0, 1, 0, 1])) for k, each in enumerate(rows)
    ]
    data = FederatedData(ClientSet.pack(clients))
    with pytest.raises(IncompatibleParts, match="statistics of a batch count padded places"):
        eq.train(Sequences(every_step=True), data, rounds=1, clients_per_round=2)
    eq.train(Sequences(every_step=False), data, rounds=1, clients_per_round=2)
