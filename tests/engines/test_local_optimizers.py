"""SGD, Adam and AdamW on clients: torch.optim on one client, clipping, schedules, rates by name, and a state that is kept."""

import copy
import math
from dataclasses import dataclass, replace

import pytest
import torch
from taken import everyone, paths_of
from torch import nn

import equipoise as eq
from equipoise.core.task import Task
from equipoise.data.clients import FederatedData
from equipoise.engines import Loop, Simulator
from equipoise.errors import IncompatibleParts, InvalidParameter
from equipoise.runs.checkpoint import Checkpoints
from equipoise.solvers import SGD, Adam, AdamW, Constant, Cosine, LinearDecay, Step
from equipoise.types import Observer
from made_clients import make_clients
from rounds import round_of

ENGINES = pytest.mark.parametrize("engine", ["loop", "simulator"])


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def clients(*sizes):
    return FederatedData(make_clients(sizes, dtype=torch.float64), classes=3)


def by_torch(data, make_optimizer, steps, rounds=1, clip=math.inf, fresh=True):
    """Full-batch steps of torch.optim on the one client of `data`; the parameters after all rounds, (D,)."""
    model = network()
    x, y = data.train.inputs(slice(None), torch.float64), data.train.targets(slice(None), torch.float64)
    optimizer = make_optimizer(model)
    for _ in range(rounds):
        if fresh:
            optimizer = make_optimizer(model)
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def by_us(data, solver, rounds=1, engine="loop"):
    algorithm = eq.Algorithm(solver=solver, sampler=eq.sampling.Full())
    return eq.train(network(), data, algorithm, rounds=rounds, engine=engine, progress=False).params


CASES = [
    (SGD(lr=0.3, momentum=0.9, nesterov=True), lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9, nesterov=True)),
    (
        SGD(lr=0.3, momentum=0.8, nesterov=True, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.8, nesterov=True, weight_decay=0.1),
    ),
    (SGD(lr=0.3, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9)),
    (Adam(lr=0.05), lambda p: torch.optim.Adam(p, lr=0.05)),
    (
        Adam(lr=0.05, beta1=0.7, beta2=0.8, epsilon=1e-3, weight_decay=0.2),
        lambda p: torch.optim.Adam(p, lr=0.05, betas=(0.7, 0.8), eps=1e-3, weight_decay=0.2),
    ),
    (AdamW(lr=0.05), lambda p: torch.optim.AdamW(p, lr=0.05)),
    (
        AdamW(lr=0.05, beta1=0.0, weight_decay=0.5),
        lambda p: torch.optim.AdamW(p, lr=0.05, betas=(0.0, 0.999), weight_decay=0.5),
    ),
]


@ENGINES
@pytest.mark.parametrize(("solver", "optimizer"), CASES, ids=lambda case: repr(case) if isinstance(case, SGD | Adam) else "")
@pytest.mark.parametrize("clip", [math.inf, 0.05])
@pytest.mark.parametrize("state", ["fresh", "kept"])
def test_steps_are_those_of_torch(solver, optimizer, clip, state, engine):
    data = clients(7)
    solver = replace(solver, batch_size=None, steps=4, clip_norm=clip, state=state)
    expected = by_torch(data, lambda m: optimizer(m.parameters()), 4, rounds=3, clip=clip, fresh=state == "fresh")
    torch.testing.assert_close(by_us(data, solver, 3, engine), expected, rtol=1e-12, atol=1e-12)


@ENGINES
def test_rates_by_name_are_parameter_groups(engine):
    data = clients(7)

    def groups(model):
        return torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.005}], lr=0.05)

    solver = AdamW(lr=0.05, batch_size=None, steps=4, rates={"2.*": 0.1, "2.bias": 7.0})  # the first pattern counts
    torch.testing.assert_close(by_us(data, solver, engine=engine), by_torch(data, groups, 4), rtol=1e-12, atol=1e-12)


def test_rates_that_match_nothing_and_a_rate_of_zero_are_refused():
    with pytest.raises(InvalidParameter, match=r"They are 0.weight, 0.bias, 2.weight, 2.bias"):
        by_us(clients(7), SGD(rates={"head.*": 0.1}))
    with pytest.raises(InvalidParameter, match=r"requires_grad_\(False\)"):
        SGD(rates={"head.*": 0})


# -------------------------------------------------------------------------------------------------------------------- schedules


def test_schedules_by_hand():
    # Warm-up of 2 rounds: 1/3, 2/3; then half a cosine over the other 4: (1 + cos(π·j/4))/2 for j = 0 … 3.
    expected = [1 / 3, 2 / 3, 1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, (1 - math.sqrt(0.5)) / 2]
    assert [Cosine(6, warmup=2)(t) for t in range(7)] == pytest.approx(expected, abs=1e-15)
    assert [Cosine(4, final=0.2)(t) for t in (0, 2)] == pytest.approx([1.0, 0.6])
    assert [LinearDecay(5, warmup=1, final=0.2)(t) for t in range(6)] == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.4])
    assert [Step(2, 0.5)(t) for t in range(5)] == [1.0, 1.0, 0.5, 0.5, 0.25]
    assert [Constant()(t) for t in range(3)] == [1.0, 1.0, 1.0]
    assert [Constant(warmup=1)(t) for t in range(3)] == [0.5, 1.0, 1.0]
    assert Cosine(10**9)(10**9) > 0


def test_a_schedule_is_a_factor_of_the_rate():
    assert SGD(lr=0.3, schedule=Constant()).learning_rate(17) == 0.3
    old, new = SGD(lr=0.4, lr_decay=0.5, lr_decay_every=3), SGD(lr=0.4, schedule=Step(3, 0.5))
    assert [old.learning_rate(t) for t in range(20)] == [new.learning_rate(t) for t in range(20)]
    with pytest.raises(InvalidParameter, match="lr_decay must be left alone"):
        SGD(lr_decay=0.5, schedule=Step())


@ENGINES
def test_a_schedule_over_rounds_is_the_rate_of_each_round(engine):
    data, schedule = clients(7, 3), Cosine(4, warmup=1)
    algorithm = eq.Algorithm(solver=SGD(lr=0.4, batch_size=4, schedule=schedule), sampler=eq.sampling.Full())
    whole = eq.train(network(), data, algorithm, rounds=3, engine=engine, progress=False).params
    model = network()
    for t in range(3):
        plain = replace(algorithm, solver=SGD(lr=0.4 * schedule(t), batch_size=4))
        task, cohort = Task.of(model), everyone(2, t)
        params = task.layout.read(model)
        started = (Loop() if engine == "loop" else Simulator()).start(task, data)
        weights = algorithm.base_weights(data.train)
        total = started.summed_update(params, cohort, plain.solver, weights, eq.aggregators.WeightedMean()).update
        task.layout.write(model, params + total)
    torch.testing.assert_close(whole, Task.of(model).layout.read(model), rtol=1e-12, atol=1e-12)


@ENGINES
def test_a_local_schedule_is_the_rate_of_each_step(engine):
    data = clients(7)

    def optimizer(model):
        made = torch.optim.SGD(model.parameters(), lr=0.4)
        schedule = torch.optim.lr_scheduler.StepLR(made, 2, 0.5)
        made.register_step_post_hook(lambda *_: schedule.step())
        return made

    solver = SGD(lr=0.4, batch_size=None, steps=5, local_schedule=Step(2, 0.5))
    torch.testing.assert_close(by_us(data, solver, 2, engine), by_torch(data, optimizer, 5, rounds=2), rtol=1e-12, atol=1e-12)


@dataclass(frozen=True)
class Halving:
    """A schedule of the user's own."""

    def __call__(self, index):
        return 0.5**index


def test_any_frozen_function_of_the_round_is_a_schedule():
    assert SGD(lr=0.4, schedule=Halving()).learning_rate(2) == 0.1
    for bad in (Halving, "cosine", lambda t: 0.0, lambda t: math.nan, lambda t: "a"):
        with pytest.raises(InvalidParameter, match="schedule must map 0, 1, … to a positive factor"):
            SGD(schedule=bad)


# ------------------------------------------------------------------------------------------------------ both engines, all paths

RAGGED = (1, 2, 3, 7, 10, 11, 20, 25)
SOLVERS = [
    SGD(lr=0.3, batch_size=4, momentum=0.9, nesterov=True, epochs=2),
    SGD(lr=0.3, batch_size=4, clip_norm=0.3, prox=0.5, weight_decay=0.1, epochs=2),
    SGD(lr=0.3, batch_size=4, rates={"weight": 0.3}, local_schedule=LinearDecay(5), epochs=2),
    SGD(lr=0.3, batch_size=4, momentum=0.9, epochs=3, state="kept", straggler_share=0.5),
    Adam(lr=0.05, batch_size=4, epochs=2, weight_decay=0.1, prox=0.3),
    Adam(lr=0.05, batch_size=4, epochs=3, state="kept", clip_norm=0.2, straggler_share=0.5),
    AdamW(lr=0.05, batch_size=None, steps=3, clip_norm=0.2, local_schedule=Cosine(4, warmup=2)),
    AdamW(lr=0.05, batch_size=4, steps=5, state="kept", straggler_share=0.4, stragglers="drop", prox=0.2),
]


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
@pytest.mark.parametrize("chunk", [1, 3, None])
def test_the_simulator_agrees_with_the_loop_on_ragged_clients(solver, chunk):
    data, task = clients(*RAGGED), Task.of(eq.models.Softmax(4, 3).double())
    assert paths_of(Simulator(chunk_size=chunk), task, data, solver) == ("batched autograd",)
    results = [rounds_of(solver, data, engine) for engine in (Loop(), Simulator(chunk_size=chunk))]
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


def rounds_of(solver, data, engine, rounds=3, **more):
    """The parameters after rounds with some of the clients in each, so that kept states have different ages."""
    algorithm = eq.Algorithm(solver=solver, **more)
    model = eq.models.Softmax(4, 3).double()
    return eq.train(model, data, algorithm, rounds=rounds, clients_per_round=5, engine=engine, progress=False).params


def test_two_workers_agree_with_the_loop():
    data = clients(*RAGGED)
    solver = SOLVERS[5]
    results = [rounds_of(solver, data, engine) for engine in (Loop(), Simulator(chunk_size=2, workers=2))]
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


class Branching(nn.Module):
    """Asks for a value, so that no path can batch it over clients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 3).double()

    def forward(self, x):
        outputs = self.layer(x)
        return outputs if float(outputs.detach().sum()) > -1e9 else -outputs


@pytest.mark.parametrize("solver", [SOLVERS[4], SOLVERS[5], eq.solvers.Scaffold(SGD(lr=0.2, batch_size=4))], ids=repr)
def test_a_model_that_cannot_be_batched_is_trained_alike(solver):
    data, algorithm = clients(*RAGGED), eq.Algorithm(solver=solver)
    options = {"rounds": 3, "clients_per_round": 5, "progress": False}
    expected = eq.train(Branching(), data, algorithm, engine="loop", **options).params
    with pytest.warns(eq.errors.EquipoiseNotice, match="one at a time"):
        found = eq.train(Branching(), data, algorithm, engine=Simulator(workers=2), **options).params
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_no_bound_is_bit_for_bit_no_clipping():
    data = clients(*RAGGED)
    assert SGD(clip_norm=math.inf) == SGD()
    for engine in (Loop(), Simulator()):
        one, other = (rounds_of(AdamW(lr=0.05, clip_norm=bound), data, engine) for bound in (None, math.inf))
        assert torch.equal(one, other)
        far = rounds_of(AdamW(lr=0.05, clip_norm=1e9), data, engine)  # clips nothing, either
        assert torch.equal(one, far)


@pytest.mark.parametrize(
    ("solver", "reason"),
    [
        (Adam(), "the steps of Adam are not those of SGD"),
        (SGD(clip_norm=1.0), "gradients are clipped at every step"),
        (SGD(local_schedule=Step(2)), "the learning rate changes from step to step"),
        (SGD(rates={"weight": 0.5}), "parameters have learning rates of their own"),
        (SGD(momentum=0.5, state="kept"), "clients keep the state of their optimiser between rounds"),
        (SGD(momentum=0.5, nesterov=True), "are not those of SGD with or without plain momentum"),
    ],
)
def test_fast_paths_of_sgd_decline_with_the_reason(solver, reason):
    engine = Simulator().start(Task.of(eq.models.Softmax(4, 3)), FederatedData(make_clients([5, 6]), classes=3))
    text = engine.explain(eq.Algorithm(solver=solver))
    assert reason in text.split("linear blocks")[1].split("\n")[0]
    assert "batched autograd" in text


# ------------------------------------------------------------------------------------------------------------------ kept states


class Stop(Exception):
    """Somebody pulls the plug."""


class PullsThePlug(Observer):
    def on_round(self, report):
        if report.round == 4:
            raise Stop


@ENGINES
@pytest.mark.parametrize("solver", [SOLVERS[3], SOLVERS[5]], ids=["momentum", "adam"])
def test_a_kept_state_resumes_bit_for_bit(solver, engine, tmp_path):
    data = clients(*RAGGED)
    whole = rounds_of(solver, data, engine, rounds=8)
    file = Checkpoints(tmp_path / "run.ckpt", every=3)
    model, algorithm = eq.models.Softmax(4, 3).double(), eq.Algorithm(solver=solver)
    options = {"rounds": 8, "clients_per_round": 5, "engine": engine, "progress": False}
    with pytest.raises(eq.errors.ObserverFailed):  # rows of rounds 3 and 4 are in the file, and the checkpoint is of round 3
        eq.train(model, data, algorithm, checkpoint=file, observers=[PullsThePlug()], **options)
    assert (tmp_path / "run.solver.npy").exists()
    again = eq.train(model, data, algorithm, checkpoint=Checkpoints(tmp_path / "run.ckpt", every=3), **options)
    assert torch.equal(again.params, whole)
    fresh = rounds_of(replace(solver, state="fresh"), data, engine, rounds=8)
    assert not torch.allclose(fresh, whole)


@ENGINES
def test_an_update_that_cannot_be_used_leaves_the_kept_state_alone(engine):
    # Client 0 has inputs that are not finite in one example of two: its updates are NaN, and so would be its moments.
    data = clients(4, 4, 4)
    data.train.x[0] = math.inf
    algorithm = eq.Algorithm(solver=Adam(lr=0.05, batch_size=None, state="kept"), sampler=eq.sampling.Full())
    setting = eq.runs.setup.set_up(
        eq.models.Softmax(4, 3).double(), data, algorithm, rounds=2, clients_per_round=3, seed=0, loss=None, error=None,
        engine=engine,
    )  # fmt: skip
    state = setting.begin()
    for _ in range(2):
        state, report = round_of(setting, state)
        assert report.rejected == ("client-0",)
    rows = setting.kept.read(state.kept, torch.arange(3))
    assert bool((rows[0] == 0).all())
    assert rows[1:, -1].tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    "privacy",
    [eq.privacy.SecureAggregation(), eq.privacy.GaussianMechanism(clip=1.0, noise_multiplier=0.0, noise_seed=0)],
    ids=["secure", "private"],
)
def test_a_kept_state_goes_with_protection(privacy):
    data = clients(*RAGGED)
    algorithm = eq.Algorithm(solver=Adam(lr=0.05, batch_size=4, state="kept"), privacy=privacy)
    model = eq.models.Softmax(4, 3).double()
    results = [
        eq.train(model, data, algorithm, rounds=3, clients_per_round=5, engine=engine, progress=False).params
        for engine in ("loop", "simulator")
    ]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_runs_with_kept_states_are_made_one_by_one_and_no_family():
    data, algorithm = clients(*RAGGED), eq.Algorithm(solver=Adam(state="kept"))
    model = eq.models.Softmax(4, 3).double()
    with pytest.warns(eq.errors.EquipoiseNotice, match="clients keep a state for their solver"):
        eq.train_many(model, data, algorithm, seeds=2, rounds=1, clients_per_round=3, progress=False)
    with pytest.raises(InvalidParameter, match="fresh state in every round in a family"):
        eq.train_family(model, data, algorithm, tails=[1.0, 0.5], rounds=1, clients_per_round=3)


def test_personal_models_are_trained_by_all_of_them():
    data = clients(*RAGGED)
    for solver in (Adam(lr=0.01, state="kept", batch_size=4), AdamW(lr=0.01, batch_size=4, clip_norm=0.5)):
        results = [
            rounds_of(solver, data, engine, personal=eq.personal.Ditto(0.5)) for engine in (Loop(), Simulator(chunk_size=3))
        ]
        torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)
    with pytest.raises(IncompatibleParts, match=r"steps of solvers\.SGD"):
        eq.Algorithm(solver=Adam(), personal=eq.personal.APFL())


# --------------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SGD(nesterov=True), "nesterov needs momentum"),
        (lambda: SGD(nesterov=1, momentum=0.5), "nesterov must be True or False"),
        (lambda: SGD(state="kept"), "state needs a memory that can be kept"),
        (lambda: SGD(state="own"), 'state must be "fresh" or "kept"'),
        (lambda: Adam(clip_norm=0.0), "clip_norm must be a positive number"),
        (lambda: Adam(clip_norm=-1), "clip_norm must be a positive number"),
        (lambda: Adam(beta1=1.0), "beta1 must lie in [0, 1)"),
        (lambda: AdamW(beta2=-0.1), "beta2 must lie in [0, 1)"),
        (lambda: AdamW(epsilon=0.0), "epsilon must be a positive number"),
        (lambda: Adam(rates=[0.1]), "rates must map patterns"),
        (lambda: Adam(rates={"a": math.inf}), "rates['a'] must be a positive factor of lr"),
        (lambda: Cosine(10, warmup=10), "warmup must be shorter than the 10 rounds"),
        (lambda: Step(factor=0.0), "factor must lie in (0, 1]"),
        (lambda: eq.solvers.FedDane(Adam()), "solver must be a solvers.SGD"),
        (lambda: eq.solvers.AdaDPS({"weight": torch.ones(3)}, AdamW()), "solver must be a solvers.SGD"),
        (lambda: eq.solvers.AdaptiveProx(Adam(state="kept")), "must begin every round with a fresh state"),
    ],
)
def test_bad_options_are_named(make, words):
    with pytest.raises(InvalidParameter) as caught:
        make()
    assert words in str(caught.value)


def test_options_at_their_defaults_are_not_shown():
    """Checkpoints of version 0.1 are compared by this text."""
    assert repr(SGD()) == (
        "SGD(lr=0.1, batch_size=10, epochs=1, steps=None, momentum=0.0, weight_decay=0.0, prox=0.0, lr_decay=1.0, "
        "lr_decay_every=1, straggler_share=0.0, stragglers='keep')"
    )
    assert repr(SGD(clip_norm=1.0)).endswith("stragglers='keep', clip_norm=1.0)")
    for solver in SOLVERS:
        assert eval(repr(solver), vars(eq.solvers)) == solver  # noqa: S307
        assert copy.deepcopy(solver) == solver
        assert hash(solver) == hash(copy.deepcopy(solver))
