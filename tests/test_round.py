"""One round by hand, and what a round refuses."""

from dataclasses import dataclass

import pytest
import torch

import equipoise as eq
from equipoise.core.task import Task
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.errors import Diverged, InvalidParameter
from equipoise.risk import RiskValue
from equipoise.round_report import worst_mean
from equipoise.solvers import SGD
from equipoise.types import ServerState
from rounds import run_round


def points(*groups):
    """One client per group of numbers on a line; the task is mean estimation, F_k(w) = mean (w − x)²."""
    clients = [(f"c{i}", torch.tensor(g, dtype=torch.float64).unsqueeze(1)) for i, g in enumerate(groups)]
    return FederatedData(ClientSet.pack((name, x, x) for name, x in clients))


def one_round(data, algorithm, start=0.0, engine="loop"):
    task = Task.of(eq.models.MeanEstimator(1).double())
    running = (eq.engines.Loop() if engine == "loop" else eq.engines.Simulator()).start(task, data)
    params = torch.tensor([start], dtype=torch.float64)
    cohort = eq.sampling.Full()(0, algorithm.base_weights(data.train), clients_per_round=len(data.train), seed=0)
    state = ServerState(0, params, server=algorithm.server.begin(params))
    return run_round(state, algorithm, running, cohort, data.train)


STEP = SGD(lr=0.1, batch_size=None, steps=1)


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_fedavg_by_hand(engine):
    # Clients {1, 3} (mean 2) and {5} at w = 0: updates are −0.1 · 2(w − mean) = 0.4 and 1.0; weights 2/3 and 1/3.
    state, report = one_round(points([1.0, 3.0], [5.0]), eq.Algorithm(solver=STEP), engine=engine)
    assert float(state.params) == pytest.approx(2 / 3 * 0.4 + 1 / 3 * 1.0)
    assert (report.cohort, report.trained, report.risk) == (2, 2, None)
    assert report.loss == pytest.approx(2 / 3 * 5 + 1 / 3 * 25)  # (1 + 9)/2 = 5 and 25, seen during local work


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_uniform_weights_by_hand(engine):
    state, _ = one_round(points([1.0, 3.0], [5.0]), eq.Algorithm(solver=STEP, weights="uniform"), engine=engine)
    assert float(state.params) == pytest.approx(0.7)


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_tail_by_hand(engine):
    # Losses at 0 are 1, 4, 9; with θ = 0.5 the caps are 2/3: the third gets 2/3, the second 1/3, the first is not trained.
    algorithm = eq.Algorithm(risk=eq.risk.Superquantile(0.5), solver=STEP)
    state, report = one_round(points([1.0], [2.0], [3.0]), algorithm, engine=engine)
    assert float(state.params) == pytest.approx(2 / 3 * 0.6 + 1 / 3 * 0.4)
    assert (report.cohort, report.trained) == (3, 2)
    assert report.risk == pytest.approx(2 / 3 * 9 + 1 / 3 * 4)
    assert (report.loss, report.tail_loss) == (pytest.approx(14 / 3), pytest.approx(9.0))


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_weight_decay_and_momentum_by_hand(engine):
    data = points([1.0])
    decay = eq.Algorithm(solver=SGD(lr=0.1, batch_size=None, steps=1, weight_decay=0.5))
    state, _ = one_round(data, decay, start=2.0, engine=engine)
    assert float(state.params) == pytest.approx((1 - 0.1 * 0.5) * 2.0 - 0.1 * 2 * (2.0 - 1.0))
    heavy = eq.Algorithm(solver=SGD(lr=0.1, batch_size=None, steps=2, momentum=0.5))
    state, _ = one_round(data, heavy, start=2.0, engine=engine)
    # v1 = 2, w1 = 1.8; v2 = 0.5 · 2 + 1.6 = 2.6, w2 = 1.54.
    assert float(state.params) == pytest.approx(1.54)


def test_aggregators_that_are_not_linear_see_each_update():
    @dataclass(frozen=True)
    class Largest:
        linear = False

        def __call__(self, updates, weights, *, losses=None, state=None):
            assert updates.shape == (2, 1)
            return updates.max(0).values, (state or 0) + 1

    state, _ = one_round(points([1.0, 3.0], [5.0]), eq.Algorithm(solver=STEP, aggregator=Largest()))
    assert float(state.params) == pytest.approx(1.0)
    assert state.aggregator == 1


def test_a_risk_may_scale_the_servers_step_and_carry_state():
    @dataclass(frozen=True)
    class Halving:
        def __call__(self, losses, base_weights, *, clients=None, state=None):
            assert clients == ("c0", "c1")
            return RiskValue((base_weights * losses).sum() * 3, base_weights * 3, (state or 0) + 1)

        def server_step(self, *, losses, base_weights, weight_sum, sq_norms, lr):
            assert losses.tolist() == pytest.approx([5.0, 25.0])
            assert base_weights.tolist() == pytest.approx([2 / 3, 1 / 3])
            assert float(weight_sum) == pytest.approx(3.0)
            assert sq_norms.tolist() == pytest.approx([0.16, 1.0])
            assert lr == 0.1
            return 0.5

    state, _ = one_round(points([1.0, 3.0], [5.0]), eq.Algorithm(risk=Halving(), solver=STEP))
    assert float(state.params) == pytest.approx(0.5 * (2 / 3 * 0.4 + 1 / 3 * 1.0))
    assert state.risk == 1


def test_with_a_robust_aggregator_the_norms_are_capped_at_the_median():
    seen = []

    @dataclass(frozen=True)
    class Watching:
        def __call__(self, losses, base_weights, *, clients=None, state=None):
            return RiskValue((base_weights * losses).sum(), base_weights, state)

        def server_step(self, *, losses, base_weights, weight_sum, sq_norms, lr):
            seen.extend(sq_norms.tolist())
            return 1.0

    @dataclass(frozen=True)
    class PlainMean:
        linear = False

        def __call__(self, updates, weights, *, losses=None, state=None):
            return updates.mean(0), state

    one_round(points([1.0], [2.0], [100.0]), eq.Algorithm(risk=Watching(), solver=STEP, aggregator=PlainMean()))
    assert seen == pytest.approx([0.04, 0.16, 0.16])


def test_a_flat_risk_and_an_empty_cohort_leave_the_model():
    @dataclass(frozen=True)
    class Flat:
        def __call__(self, losses, base_weights, *, clients=None, state=None):
            return RiskValue(losses.sum() * 0, torch.zeros_like(losses), state)

    state, report = one_round(points([1.0], [2.0]), eq.Algorithm(risk=Flat(), solver=STEP), start=1.5)
    assert float(state.params) == 1.5
    assert (state.round, report.trained) == (1, 0)

    data = points(*[[1.0]] * 3)
    result = eq.train(
        eq.models.MeanEstimator(1), data, eq.Algorithm(sampler=eq.sampling.Poisson()), rounds=30, clients_per_round=1
    )
    assert 0 in {r.cohort for r in result.history.rounds}  # some of 30 Poisson rounds draw nobody
    assert torch.isfinite(result.params).all()


@pytest.mark.parametrize("weights", [[1.0, -1.0], [float("nan"), 1.0], [1.0]])
def test_weights_that_no_aggregator_could_use_are_refused(weights):
    def risk(losses, base_weights, *, clients=None, state=None):
        return RiskValue(losses.sum(), torch.tensor(weights, dtype=torch.float64), state)

    with pytest.raises(InvalidParameter, match=r"risk must give 2 finite weights"):
        one_round(points([1.0], [2.0]), eq.Algorithm(risk=risk, solver=STEP))


def test_messages_of_divergence_count_rounds_from_one():
    """In the fourth round three were done before; a loss that is lost at the end belongs to the last round."""
    assert "Round 4: the update of client a is not finite" in str(Diverged(3, ["a"], "update"))
    assert "Round 3: the loss after the last round of client a is" in str(Diverged(3, ["a"], "loss after the last round"))


@pytest.mark.parametrize("risk", [eq.risk.Mean(), eq.risk.Superquantile(0.5)])
def test_divergence_names_round_and_clients_and_keeps_the_history(risk, tmp_path):
    data = points([1.0], [1e3], [2.0])
    algorithm = eq.Algorithm(risk=risk, solver=SGD(lr=1e30, batch_size=None, steps=1), sampler=eq.sampling.Full())
    log = tmp_path / "rounds.jsonl"
    with pytest.raises(Diverged) as caught:
        eq.train(
            eq.models.MeanEstimator(1), data, algorithm, rounds=50, clients_per_round=3, observers=[eq.observers.JsonLines(log)]
        )
    failure = caught.value
    assert f"Round {failure.round + 1}:" in str(failure)
    assert failure.clients
    assert set(failure.clients) <= {"c0", "c1", "c2"}
    assert len(failure.history.rounds) == failure.round
    assert len(log.read_text().splitlines()) == 1 + failure.round  # the start, and a line per round


def test_the_reported_tail_is_the_worst_tenth():
    gen = torch.Generator().manual_seed(0)
    for count in (1, 2, 7, 30):
        values, share = torch.rand(2, count, generator=gen, dtype=torch.float64)
        values[: count // 2] = values[0]  # ties
        assert worst_mean(values, share / share.sum(), 0.1) == pytest.approx(eq.metrics.worst(values, 0.1, share))
