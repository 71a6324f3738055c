"""Several seeds and algorithms in one batched run: every result equals the run of `train` alone."""

import warnings
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import equipoise as eq
from equipoise.client_table import ClientTable
from equipoise.core.equality import same_but_for_training
from equipoise.data.clients import FederatedData
from equipoise.engines.loop import LoopEngine
from equipoise.engines.simulator.engine import SimulatorEngine
from equipoise.errors import Diverged, EquipoiseNotice, IncompatibleParts, InvalidParameter
from equipoise.privacy.unprotected import Unprotected
from equipoise.types import ServerState
from made_clients import make_clients
from rounds import round_of, rounds_of, start_run

SEEDS = [3, 0, 11]
OPTIONS = {"rounds": 5, "clients_per_round": 4}
SGD = eq.solvers.SGD(lr=0.2, batch_size=4)
ALGORITHMS = {
    "FedAvg": eq.Algorithm(solver=SGD),
    "tail": eq.Algorithm(risk=eq.risk.Superquantile(0.5), solver=SGD),
    "q": eq.Algorithm(risk=eq.risk.QFair(1.0), solver=SGD, server=eq.server_opt.Momentum()),
}


def softmax(seed=0, dtype=torch.float64):
    """A model whose first parameters depend on the seed alone."""
    model = eq.models.Softmax(4, 3).to(dtype)
    with torch.no_grad():
        model.weight.copy_(torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)))
    return model


def clients(seed=0, dtype=torch.float64):
    train = make_clients([1, 2, 3, 7, 10, 11, 20, 25], seed=seed, dtype=dtype)
    return FederatedData(train, test=make_clients([5, 9, 14], seed=1, prefix="unseen", dtype=dtype), name="ragged")


@pytest.fixture
def data():
    return clients()


@pytest.fixture
def calls(monkeypatch):
    """How many jobs each call of `summed_updates` had, on either engine."""
    found = []

    def counting(kind):
        plain = kind.summed_updates

        def summed_updates(self, jobs, solver, aggregator):
            found.append(len(jobs))
            return plain(self, jobs, solver, aggregator)

        monkeypatch.setattr(kind, "summed_updates", summed_updates)

    counting(LoopEngine)
    counting(SimulatorEngine)
    return found


def assert_same_run(found, alone, rtol=1e-12, atol=1e-12):
    """All that two runs left is the same, but for the time it took."""
    torch.testing.assert_close(found.params, alone.params, rtol=rtol, atol=atol)
    for mine, theirs in zip(found.model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol)
    torch.testing.assert_close(found.clients.loss, alone.clients.loss, rtol=10 * rtol, atol=10 * atol)
    assert found.clients.client == alone.clients.client
    assert (found.name, found.seed, found.algorithm, found.rounds) == (alone.name, alone.seed, alone.algorithm, alone.rounds)
    assert len(found.history.rounds) == len(alone.history.rounds)
    for mine, theirs in zip(found.history.rounds, alone.history.rounds, strict=True):
        same = ("round", "cohort", "trained", "dropped", "rejected", "loss_from")
        assert [getattr(mine, name) for name in same] == [getattr(theirs, name) for name in same]
        for name in ("loss", "tail_loss", "risk"):
            found_here, expected = getattr(mine, name), getattr(theirs, name)
            assert (found_here is None) == (expected is None)
            if expected is not None:
                assert found_here == pytest.approx(expected, rel=100 * rtol, abs=100 * atol, nan_ok=True)
    assert [e.round for e in found.history.evaluations] == [e.round for e in alone.history.evaluations]
    for mine, theirs in zip(found.history.evaluations, alone.history.evaluations, strict=True):
        torch.testing.assert_close(mine.clients.loss, theirs.clients.loss, rtol=10 * rtol, atol=10 * atol)


# ------------------------------------------------------------------------------------------------------ equal to `train`


@pytest.mark.parametrize(
    ("engine", "dtype", "tolerance"),
    [
        ("loop", torch.float64, 0.0),
        ("loop", torch.float32, 0.0),
        ("simulator", torch.float64, 1e-12),
        ("simulator", torch.float32, 1e-6),
        (eq.engines.Simulator(chunk_size=3), torch.float64, 1e-12),
    ],
    ids=str,
)
def test_every_run_equals_that_of_train(engine, dtype, tolerance, calls):
    data = clients(dtype=dtype)
    options = {**OPTIONS, "engine": engine, "evaluate_every": 2}
    many = eq.train_many(lambda seed: softmax(seed, dtype), data, ALGORITHMS, seeds=SEEDS, **options)
    assert calls == [9] * 5  # three seeds and three algorithms in one call per round
    assert list(many.results) == list(ALGORITHMS)
    for name, runs in many.results.items():
        assert [run.seed for run in runs] == SEEDS
        for run in runs:
            alone = eq.train(softmax(run.seed, dtype), data, ALGORITHMS[name], seed=run.seed, name=name, **options)
            assert_same_run(run, alone, tolerance, tolerance)


@pytest.mark.parametrize(
    "algorithm",
    [
        eq.Algorithm(solver=eq.solvers.SGD(epochs=3, straggler_share=0.5, stragglers="drop")),
        eq.Algorithm(solver=eq.solvers.SGD(batch_size=None, momentum=0.9, prox=0.1)),
        eq.Algorithm(risk=eq.risk.QFair(1.0), solver=eq.solvers.MAML()),
        eq.Algorithm(risk=eq.risk.Superquantile(0.4), sampler=eq.sampling.Poisson()),
        eq.Algorithm(sampler=eq.sampling.Poisson(), server=eq.server_opt.Adam()),
        eq.Algorithm(risk=eq.risk.WorstCase(), sampler=eq.sampling.Full()),
        eq.Algorithm(averaging=eq.averaging.Uniform(), weights="uniform", sampler=eq.sampling.Uniform(0.5)),
        eq.Algorithm(sampler=eq.sampling.Proportional()),
    ],
    ids=repr,
)
def test_other_parts_are_trained_together_too(algorithm, data, calls):
    options = {"rounds": 5, "clients_per_round": 2}  # with Poisson sampling some cohorts are empty
    many = eq.train_many(softmax(), data, algorithm, seeds=4, **options)
    assert max(calls) > 1
    for run in many.results["run"]:
        assert_same_run(run, eq.train(softmax(), data, algorithm, seed=run.seed, **options))


def test_algorithms_of_one_seed_that_draw_other_cohorts(data, calls):
    tail = eq.risk.Superquantile(0.5)
    algorithms = {
        "uniform": eq.Algorithm(risk=tail, solver=SGD),
        "same": eq.Algorithm(risk=eq.risk.Tilted(1.0), solver=SGD),
        "equal weights": eq.Algorithm(risk=tail, solver=SGD, weights="uniform"),
        "Poisson": eq.Algorithm(risk=tail, solver=SGD, sampler=eq.sampling.Poisson()),
        "all": eq.Algorithm(risk=tail, solver=SGD, sampler=eq.sampling.Full()),
    }
    many = eq.train_many(softmax, data, algorithms, seeds=2, **OPTIONS)
    assert calls == [10] * 5
    for name, runs in many.results.items():
        for run in runs:
            assert_same_run(run, eq.train(softmax, data, algorithms[name], seed=run.seed, name=name, **OPTIONS))


class Half:
    """A linear aggregator: half of the weighted mean."""

    linear = True

    def __call__(self, updates, weights, *, losses=None, state=None):
        return weights @ updates / 2, state


@pytest.mark.parametrize("engine", [eq.engines.Loop(), eq.engines.Simulator()], ids=repr)
def test_a_round_of_runs_of_all_kinds_is_the_round_of_each(engine, data):
    algorithms = [
        eq.Algorithm(solver=SGD),
        eq.Algorithm(solver=SGD, aggregator=Half()),
        eq.Algorithm(solver=SGD, aggregator=eq.aggregators.Median()),
        eq.Algorithm(solver=SGD, aggregator=eq.aggregators.Median()),
        eq.Algorithm(solver=eq.solvers.SGD(lr=0.01)),
        eq.Algorithm(solver=eq.solvers.AdaptiveProx()),
        eq.Algorithm(solver=eq.solvers.FedDane()),
        eq.Algorithm(risk=eq.risk.QFair(1.0), solver=eq.solvers.MAML()),
        eq.Algorithm(risk=eq.risk.Superquantile(0.3), solver=SGD),
        eq.Algorithm(risk=eq.risk.Superquantile(0.9), solver=SGD),
    ]
    algorithms.append(algorithms[0])
    one = start_run(softmax(), data, algorithms[0], clients_per_round=4, engine=engine)
    settings = [replace(one, algorithm=algorithm, protection=Unprotected(one.rounds)) for algorithm in algorithms]
    states, cohorts = [], []
    for seed, setting in enumerate(settings):
        states.append(ServerState(0, one.task.layout.read(softmax(seed))))
        cohorts.append(eq.sampling.Uniform()(0, setting.alpha, clients_per_round=4, seed=seed // 2))
    cohorts[-1] = cohorts[-1].take(torch.zeros(4, dtype=torch.bool))
    together = rounds_of(settings, states, cohorts)
    for setting, before, cohort, (state, report) in zip(settings, states, cohorts, together, strict=True):
        alone = round_of(setting, before, cohort)
        torch.testing.assert_close(state.params, alone[0].params, rtol=1e-12, atol=1e-12)
        assert (report.trained, report.loss_from) == (alone[1].trained, alone[1].loss_from)
        assert report.loss == pytest.approx(alone[1].loss, nan_ok=True)
        assert state.solver == alone[0].solver


def test_a_model_that_is_not_linear_and_attacked_clients(data, calls):
    attacked = eq.attacks.apply(data, eq.attacks.RandomUpdates(share=0.3, seed=1))

    def network(seed):
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()

    many = eq.train_many(network, attacked, ALGORITHMS["tail"], seeds=3, **OPTIONS)
    assert calls == [3] * 5
    for run in many.results["run"]:
        alone = eq.train(network, attacked, ALGORITHMS["tail"], seed=run.seed, engine="loop", **OPTIONS)
        assert_same_run(run, alone, rtol=1e-9, atol=1e-12)
        assert bool(run.clients.malicious.any())


def test_one_algorithm_or_none_is_called_run(data):
    many = eq.train_many(softmax(), data, seeds=2, **OPTIONS)
    (name, runs), *others = many.results.items()
    assert (name, others, [run.seed for run in runs]) == ("run", [], [0, 1])
    assert runs[0].algorithm == eq.Algorithm()
    assert "mean ± standard deviation over seeds (2)" in many.summary()


def test_no_rounds(data):
    many = eq.train_many(softmax, data, seeds=2, rounds=0, clients_per_round=2)
    for run in many.results["run"]:
        assert_same_run(run, eq.train(softmax, data, seed=run.seed, rounds=0, clients_per_round=2), 0.0, 0.0)


def test_the_given_model_is_not_changed_and_models_are_copies(data):
    model = softmax()
    before = model.weight.detach().clone()
    runs = eq.train_many(model, data, seeds=2, engine="loop", **OPTIONS).results["run"]
    assert torch.equal(model.weight, before)
    assert not torch.equal(runs[0].model.weight, runs[1].model.weight)


def test_reports_work_at_once(data, tmp_path):
    page = eq.train_many(softmax, data, ALGORITHMS, seeds=2, **OPTIONS).report(tmp_path / "many.html").read_text()
    assert "FedAvg" in page


PARTS = {
    "risk": [
        eq.risk.Mean(), eq.risk.Superquantile(0.5), eq.risk.Superquantile(0.3, eta_every=2), eq.risk.Tilted(1.0, tracked=True),
        eq.risk.QFair(1.0), eq.risk.WorstCase(),
    ],
    "solver": [
        SGD, eq.solvers.SGD(lr=0.1, epochs=2, straggler_share=0.5), eq.solvers.MAML(), eq.solvers.AdaptiveProx(SGD),
        eq.solvers.FedDane(SGD),
    ],
    "aggregator": [eq.aggregators.WeightedMean(), eq.aggregators.NormClip(0.3), eq.aggregators.Median()],
    "server": [eq.server_opt.SGD(), eq.server_opt.Momentum(), eq.server_opt.Adam(lr=0.1)],
    "sampler": [None, eq.sampling.Poisson(), eq.sampling.Full(), eq.sampling.Proportional()],
    "averaging": [None, eq.averaging.Uniform(), eq.averaging.Geometric(0.1)],
    "weights": [None, "uniform"],
    "personal": [None, None, None, None, eq.personal.Ditto(0.1), eq.personal.Mapper()],
    "privacy": [None, None, None, eq.privacy.SecureAggregation(loss_bound=4.0)],
}  # fmt: skip


def fitting(parts):
    """The algorithm of these parts without those that do not go with the others, one after another."""
    for name in ("", "personal", "privacy", "sampler", "aggregator", "solver", "risk"):
        parts = {part: value for part, value in parts.items() if part != name}
        try:
            return eq.Algorithm(**parts)
        except IncompatibleParts:
            continue
    raise AssertionError(parts)


any_algorithm = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in PARTS.items()}).map(fitting)


@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
@settings(max_examples=15)
@given(
    algorithms=st.lists(any_algorithm, min_size=1, max_size=3),
    repeated=st.booleans(),
    seeds=st.lists(st.integers(0, 2**40), min_size=1, max_size=2, unique=True),
)
def test_any_mixture_equals_separate_runs_bit_for_bit(algorithms, repeated, seeds):
    if repeated:  # the same parts with another risk share their rounds, and mostly their cohorts
        algorithms = [*algorithms, replace(algorithms[0], server=eq.server_opt.SGD(lr=0.5))]
    named = {f"method {number}": algorithm for number, algorithm in enumerate(algorithms)}
    data, options = clients(), {"rounds": 3, "clients_per_round": 3, "evaluate_every": 2, "engine": "loop"}
    together = eq.train_many(softmax, data, named, seeds=seeds, **options).results
    for name, algorithm in named.items():
        for seed, run in zip(seeds, together[name], strict=True):
            alone = eq.train(softmax, data, algorithm, seed=seed, name=name, **options)
            assert torch.equal(run.params, alone.params)
            assert torch.equal(run.clients.loss, alone.clients.loss)
            assert run.history.points == alone.history.points
            assert_same_run(run, alone, 0.0, 0.0)


# ------------------------------------------------------------------------------------------- what is not trained together


def test_solvers_that_differ_are_batches_of_their_own(data, calls):
    rates = {f"lr {lr}": eq.Algorithm(solver=eq.solvers.SGD(lr=lr)) for lr in (0.1, 0.3)}
    many = eq.train_many(softmax, data, rates, seeds=2, **OPTIONS)
    assert calls == [2] * 10
    for name, runs in many.results.items():
        for run in runs:
            assert_same_run(run, eq.train(softmax, data, rates[name], seed=run.seed, name=name, **OPTIONS))
    with pytest.warns(EquipoiseNotice, match=r"None of the 2 runs .* go: lr 0.1, lr 0.3 \(no other run"):
        eq.train_many(softmax, data, rates, seeds=1, **OPTIONS)


ALONE = {
    "aggregator is not linear": eq.Algorithm(solver=SGD, aggregator=eq.aggregators.Median()),
    "the solver prepares every round": eq.Algorithm(solver=eq.solvers.FedDane()),
    "clients have models of their own": eq.Algorithm(solver=SGD, personal=eq.personal.Finetuning()),
    "sums are protected": eq.Algorithm(
        solver=SGD, privacy=eq.privacy.GaussianMechanism(noise_multiplier=1.0, delta=1e-3, clip=1.0, noise_seed=0)
    ),
}


@pytest.mark.filterwarnings("ignore:These clients took no part:equipoise.errors.EquipoiseNotice")
@pytest.mark.parametrize("reason", ALONE)
def test_what_cannot_share_rounds_still_runs_and_is_named(reason, data, calls):
    both = {"FedAvg": ALGORITHMS["FedAvg"], "odd": ALONE[reason]}
    with pytest.warns(
        EquipoiseNotice, match=rf"^2 of the 4 runs can be trained together\. .*up to rounding, which grows.* odd \(.*{reason}\)"
    ):
        many = eq.train_many(softmax, data, both, seeds=2, **OPTIONS)
    assert calls.count(2) == 5
    for name, runs in many.results.items():
        for run in runs:
            assert_same_run(run, eq.train(softmax, data, both[name], seed=run.seed, name=name, **OPTIONS))
    with pytest.warns(EquipoiseNotice, match="^None of the 2 runs can be trained together"):
        eq.train_many(softmax, data, both["odd"], seeds=2, **OPTIONS)


@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_a_run_alone_may_start_an_engine_of_its_own(engine, data):
    algorithm = eq.Algorithm(solver=SGD, personal=eq.personal.Mapper())  # trains pairs of models as one
    options = {**OPTIONS, "engine": engine}
    for run in eq.train_many(softmax, data, algorithm, seeds=2, **options).results["run"]:
        alone = eq.train(softmax, data, algorithm, seed=run.seed, **options)
        assert_same_run(run, alone, 0.0, 0.0)
        assert torch.equal(run.personal.params(data.train.ids), alone.personal.params(data.train.ids))


def test_data_by_seed_are_batched_where_seeds_share_them(calls):
    sets = [clients(0), clients(1)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        many = eq.train_many(softmax, lambda seed: sets[seed % 2], ALGORITHMS["tail"], seeds=4, **OPTIONS)
    assert calls == [2] * 10
    for run in many.results["run"]:
        assert_same_run(run, eq.train(softmax, sets[run.seed % 2], ALGORITHMS["tail"], seed=run.seed, **OPTIONS))


def test_data_that_are_made_again_with_the_same_content_are_one(calls):
    eq.train_many(softmax, lambda seed: clients(), seeds=3, **OPTIONS)
    assert calls == [3] * 5


def test_data_of_every_seed_its_own(calls):
    with pytest.warns(EquipoiseNotice, match=r"None of the 3 runs .* go: run \(no other run has its data, solver"):
        many = eq.train_many(softmax, clients, seeds=3, **OPTIONS)
    assert 2 not in calls
    for run in many.results["run"]:
        assert_same_run(run, eq.train(softmax, clients, seed=run.seed, **OPTIONS))


class Scaled(nn.Module):
    """A linear model over features times a fixed number, which may be a buffer or a plain attribute."""

    def __init__(self, buffer, plain):
        super().__init__()
        self.linear = nn.Linear(4, 3).double()
        self.register_buffer("scale", torch.tensor(float(buffer), dtype=torch.float64))
        self.plain = plain

    def forward(self, x):
        return self.linear(x * self.scale * self.plain)


@pytest.mark.parametrize("make", [lambda seed: Scaled(seed + 1, 1), lambda seed: Scaled(1, seed + 1)], ids=["buffer", "plain"])
def test_models_that_differ_in_more_than_trained_values_do_not_share_an_engine(make, data, calls):
    with pytest.warns(EquipoiseNotice, match="None of the 2 runs"):
        many = eq.train_many(make, data, ALGORITHMS["FedAvg"], seeds=2, **OPTIONS)
    for run in many.results["run"]:
        assert_same_run(run, eq.train(make, data, ALGORITHMS["FedAvg"], seed=run.seed, **OPTIONS))


class Elsewhere(LoopEngine):
    """The loop engine as if its clients were on other machines."""

    @property
    def network(self):
        return self

    def attempt(self, run, draw):
        return run(draw(0))

    def gone(self, cohort):
        return torch.zeros(len(cohort), dtype=torch.bool)

    def client_table(self, params, data, round_index, metrics=None):
        return ClientTable.evaluate(self, params, data)

    def protect(self, protection, algorithm):
        return protection


class Network:
    def start(self, task, data):
        return Elsewhere(task, data, torch.device("cpu"))


def test_an_engine_over_a_network_is_asked_for_one_run_after_another(data, calls):
    many = eq.train_many(softmax, data, seeds=2, engine=Network(), **OPTIONS)
    assert not calls
    for run in many.results["run"]:
        assert_same_run(run, eq.train(softmax, data, seed=run.seed, engine="loop", **OPTIONS), 0.0, 0.0)


def test_a_family_over_a_network_is_asked_for_one_member_after_another(data, calls):
    tails = {"tails": [1.0, 0.5], "seed": 3, **OPTIONS}
    family = eq.train_family(softmax(), data, ALGORITHMS["FedAvg"], engine=Network(), **tails)
    assert not calls
    for run in family.results.values():
        alone = eq.train(softmax(), data, run.algorithm, seed=3, name=run.name, engine="loop", **OPTIONS)
        assert_same_run(run, alone, 0.0, 0.0)


class Noisy(nn.Module):
    """Adds noise to its inputs in training."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x + torch.randn_like(x) if self.training else x)


def test_a_model_that_cannot_be_vectorised_is_trained_one_by_one_with_one_notice(data):
    def noisy(seed):
        return Noisy().double()

    torch.manual_seed(0)
    with pytest.warns(EquipoiseNotice, match="cannot be vectorised") as said:
        many = eq.train_many(noisy, data, seeds=2, **OPTIONS)
    assert len(said) == 1
    torch.manual_seed(0)
    for run in many.results["run"]:
        assert_same_run(run, eq.train(noisy, data, seed=run.seed, engine="loop", **OPTIONS), 1e-12, 1e-14)


# ------------------------------------------------------------------------------------------------------ runs that fail


class Squares(nn.Module):
    """Outputs squared; large parameters make the loss overflow, parameters of 0 stay there."""

    def __init__(self, start):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 3), float(start), dtype=torch.float64))

    def forward(self, x):
        return x @ self.weight

    def loss(self, outputs, targets):
        return outputs.square().sum(1)


@pytest.mark.parametrize("engine", ["loop", "simulator", Network()], ids=["loop", "simulator", "network"])
@pytest.mark.parametrize("method", ["FedAvg", "tail"])
def test_a_run_that_diverges_is_named_and_the_others_end(method, engine, data):
    def model(seed):
        return Squares(1e200 if seed == 1 else 0.5)

    options = {**OPTIONS, "engine": engine}
    with pytest.raises(Diverged) as caught:
        eq.train_many(model, data, {method: ALGORITHMS[method]}, seeds=4, **options)
    assert caught.value.__notes__ == [f"This was method {method!r} with seed 1."]
    assert caught.value.round == 0
    assert caught.value.history.rounds == []
    finished = caught.value.finished.results[method]
    assert [run.seed for run in finished] == [0, 2, 3]
    for run in finished:
        alone = eq.train(model, data, ALGORITHMS[method], seed=run.seed, name=method, **options)
        assert_same_run(run, alone)


def test_all_that_diverge_are_counted(data):
    algorithms = {"good": ALGORITHMS["FedAvg"], "bad": eq.Algorithm(solver=eq.solvers.SGD(lr=1e200))}
    with pytest.raises(Diverged) as caught:
        eq.train_many(softmax, data, algorithms, seeds=3, **OPTIONS)
    assert caught.value.__notes__[0] == "This was method 'bad' with seed 0."
    assert caught.value.__notes__[1] == "So did method 'bad' with seed 1, method 'bad' with seed 2."
    assert {name: len(runs) for name, runs in caught.value.finished.results.items()} == {"good": 3}


@pytest.mark.filterwarnings("ignore:2 of the:equipoise.errors.EquipoiseNotice")
def test_one_that_diverges_alone_does_not_stop_the_others_either(data):
    algorithms = {
        "bad": eq.Algorithm(solver=eq.solvers.SGD(lr=1e200), aggregator=eq.aggregators.Median()),
        "good": ALGORITHMS["FedAvg"],
    }
    with pytest.raises(Diverged) as caught:
        eq.train_many(softmax, data, algorithms, seeds=2, **OPTIONS)
    assert caught.value.__notes__[0] == "This was method 'bad' with seed 0."
    assert [run.seed for run in caught.value.finished.results["good"]] == [0, 1]


def test_a_loss_that_is_lost_only_at_the_end_is_found(data):
    # The server's step makes the parameters so large that they are finite, but their squares are not.
    algorithm = eq.Algorithm(solver=eq.solvers.SGD(batch_size=None), server=eq.server_opt.SGD(lr=1e160))
    with pytest.raises(Diverged, match="loss after the last round") as caught:
        eq.train_many(lambda seed: Squares(0.0 if seed else 0.5), data, algorithm, seeds=2, rounds=1, clients_per_round=4)
    assert [run.seed for run in caught.value.finished.results["run"]] == [1]
    assert len(caught.value.history.rounds) == 1


def test_a_run_that_grows_without_bounds_is_told(data):
    algorithm = eq.Algorithm(solver=eq.solvers.SGD(lr=10.0, batch_size=None))
    with pytest.warns(EquipoiseNotice, match="method 'run' with seed 0 diverged"):
        eq.train_many(lambda seed: Squares(0.0 if seed else 0.5), data, algorithm, seeds=2, rounds=3, clients_per_round=4)


def test_an_error_while_setting_up_names_the_run_and_keeps_what_is_finished(data):
    def model(seed):
        batch_statistics = nn.BatchNorm1d(4, track_running_stats=False)  # also in evaluation mode
        return softmax() if seed < 2 else nn.Sequential(batch_statistics, nn.Linear(4, 3)).double()

    with pytest.warns(EquipoiseNotice, match="2 of the 3 runs"), pytest.raises(IncompatibleParts, match="mixes") as caught:
        eq.train_many(model, data, seeds=3, **OPTIONS)
    assert caught.value.__notes__ == ["This was method 'run' with seed 2."]
    assert [run.seed for run in caught.value.finished.results["run"]] == [0, 1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seeds": 0}, "seeds must be one or more different whole numbers"),
        ({"seeds": [1, 1]}, "seeds must be one or more different whole numbers"),
        ({"seeds": [0.5]}, "seeds must be one or more different whole numbers"),
        ({"seeds": None}, "seeds must be one or more different whole numbers"),
        ({"seeds": [-1, 0]}, "seed must be a whole number from 0"),
        ({"algorithms": {}}, "algorithms must map names to algorithms"),
        ({"algorithms": eq.risk.Mean()}, "algorithms must be an equipoise.Algorithm"),
        ({"algorithms": {"a": eq.risk.Mean()}}, "algorithms must be an equipoise.Algorithm"),
        ({"evaluate_every": 0}, "evaluate_every must be at least 1 round"),
        ({"clients_per_round": 100}, "clients_per_round must be a whole number between 1"),
        ({"engine": "warp"}, "engine must be"),
        ({"rounds": -1}, "rounds must be a whole number"),
    ],
)
def test_what_is_wrong_is_refused(options, words, data):
    with pytest.raises(InvalidParameter) as caught:
        eq.train_many(softmax, data, **{"seeds": 2, **OPTIONS, **options})
    assert words in str(caught.value)


def test_model_and_data_in_the_wrong_order(data):
    with pytest.raises(InvalidParameter, match="model comes first"):
        eq.train_many(data, softmax(), seeds=2, **OPTIONS)


@pytest.mark.parametrize("seeds", [torch.tensor([4, 2]), range(4, 0, -2), iter([4, 2])], ids=["tensor", "range", "iterator"])
def test_seeds_of_many_kinds(seeds, data):
    assert [run.seed for run in eq.train_many(softmax, data, seeds=seeds, **OPTIONS).results["run"]] == [4, 2]


# ----------------------------------------------------------------------------------------- models that one engine serves


class Referring(nn.Module):
    """A module with attributes of many kinds, and one that refers back to it."""

    def __init__(self, **attributes):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.me = [self]
        self.method = self.forward
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.linear(x)


def power(exponent):
    return lambda x: x**exponent


@pytest.mark.parametrize(
    ("first", "second", "alike"),
    [
        (1, 1, True),
        (1, 2, False),
        (1, 1.0, False),
        ("relu", "tanh", False),
        ([1, (2, {"a": 3})], [1, (2, {"a": 3})], True),
        ([1, (2, {"a": 3})], [1, (2, {"a": 4})], False),
        (torch.ones(2), torch.ones(2), True),
        (torch.ones(2), torch.zeros(2), False),
        (torch.ones(2), torch.ones(2).double(), False),
        (torch.ones(2).numpy(), torch.ones(2).numpy(), True),
        (torch.ones(2).numpy(), torch.zeros(2).numpy(), False),
        (power(2), power(2), True),
        (power(2), power(3), False),
        (nn.Tanh(), nn.Tanh(), True),
        (nn.Dropout(0.1), nn.Dropout(0.2), False),
        (nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2)), True),
        (nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.zeros(2), requires_grad=False), False),
        (nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False), False),
        (torch.Generator(), torch.Generator(), False),
    ],
)
def test_which_models_differ_in_trained_values_alone(first, second, alike):
    assert same_but_for_training(Referring(part=first), Referring(part=second)) is alike
