"""FedNova and SCAFFOLD on lines and parabolas: numbers by hand, invariants, refusals, both engines, resumed runs."""

import math
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import equipoise as eq
from equipoise.aggregators import FedNova, Median, NormClip, WeightedMean
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.errors import InvalidParameter
from equipoise.runs import setup
from equipoise.solvers import SGD, Adam, AdamW, Step
from made_clients import make_clients
from rounds import round_of

ENGINES = pytest.mark.parametrize("engine", ["loop", "simulator"])
FULL = eq.sampling.Full()


class Point(nn.Module):
    """One number w; the output for an input a is a·w, so that the loss ½(a w − b)² is ½a²(w − b/a)²."""

    def __init__(self, start=0.0):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([float(start)], dtype=torch.float64))

    def forward(self, x):
        return (x * self.w).squeeze(-1)


def half_square(outputs, targets):
    return 0.5 * (outputs - targets).square()


def parabolas(minima, curvatures=None, counts=None):
    """F_k(w) = ½ c_k (w − x_k)², as `counts` equal examples of each client."""
    curvatures, counts = curvatures or [1.0] * len(minima), counts or [1] * len(minima)
    triples = []
    for k, (x, c, n) in enumerate(zip(minima, curvatures, counts, strict=True)):
        a = math.sqrt(c)
        triples.append((f"c{k}", torch.full((n, 1), a, dtype=torch.float64), torch.full((n,), a * x, dtype=torch.float64)))
    return FederatedData(ClientSet.pack(triples))


def train(data, algorithm, rounds, engine="loop", start=0.0, **more):
    more = {"clients_per_round": None, "progress": False} | more
    return eq.train(Point(start), data, algorithm, rounds=rounds, loss=half_square, engine=engine, **more)


# ------------------------------------------------------------------------------------------------------------------- FedNova


def test_lengths_of_steps_by_hand():
    steps = torch.tensor([0, 1, 3, 10])
    assert SGD().normalisers(steps, 0.1).tolist() == pytest.approx([0, 1, 3, 10])
    # ρ = 0.9, τ = 3: 1 + 1.9 + 2.71 = 5.61. In general (τ − ρ(1 − ρ^τ)/(1 − ρ))/(1 − ρ); weight decay does not count.
    with_momentum = SGD(momentum=0.9, weight_decay=0.3).normalisers(steps, 0.1).tolist()
    assert with_momentum[2] == pytest.approx(5.61)
    assert with_momentum[3] == pytest.approx((10 - 0.9 * (1 - 0.9**10) / 0.1) / 0.1)
    # prox: (1 − (1 − ημ)^τ)/(ημ)
    assert SGD(prox=2.0).normalisers(steps, 0.1)[3] == pytest.approx((1 - 0.8**10) / 0.2)
    # Nesterov, ρ = 0.5: g + ρv with v = 1, 1.5, 1.75: 1.5 + 1.75 + 1.875
    assert SGD(momentum=0.5, nesterov=True).normalisers(steps, 0.1)[2] == pytest.approx(5.125)
    assert Adam().normalisers(steps, 0.1).tolist() == pytest.approx([0, 1, 3, 10], rel=1e-6)  # m̂ = √v̂ = 1 at every step
    assert AdamW(weight_decay=0.5).normalisers(steps, 0.1).tolist() == pytest.approx([0, 1, 3, 10], rel=1e-6)
    assert SGD(local_schedule=Step(2, 0.5)).normalisers(steps, 0.1)[2] == pytest.approx(1 + 1 + 0.5)


@settings(max_examples=40)
@given(st.integers(1, 12), st.floats(0, 0.95), st.floats(0, 5), st.floats(0, 1), st.floats(0.01, 0.3))
def test_lengths_of_steps_are_the_solvers_recursion(count, momentum, prox, decay, lr):
    # v ← ρv + 1 − ημy, y ← y + v from 0; in closed form where ρ or μ is 0.
    v = y = 0.0
    for _ in range(count):
        v = momentum * v + 1 - lr * prox * y
        y += v
    found = SGD(momentum=momentum, prox=prox, weight_decay=decay).normalisers(torch.tensor([count]), lr)
    assert float(found) == pytest.approx(y, rel=1e-9)
    alone = float(SGD(momentum=momentum).normalisers(torch.tensor([count]), lr))
    assert alone == pytest.approx((count - momentum * (1 - momentum**count) / (1 - momentum)) / (1 - momentum), rel=1e-9)
    if prox > 0.01:
        pulled = float(SGD(prox=prox).normalisers(torch.tensor([count]), lr))
        assert pulled == pytest.approx((1 - (1 - lr * prox) ** count) / (lr * prox), rel=1e-9)


@ENGINES
def test_fednova_ends_where_equal_steps_would_nearly(engine):
    # F_k = ½(w − x_k)², x = (0, 1), equal weights, η = 0.1, τ = (1, 3) by batches of one example. With q = 0.9 the updates are
    # u = (q − 1) w and (q³ − 1)(w − 1). FedAvg rests where their sum is 0: w = 0.271/(0.1 + 0.271) = 0.7305. FedNova divides
    # them by 1 and 3: w = 0.09033/(0.1 + 0.09033) = 0.4746.
    data = parabolas([0.0, 1.0], counts=[1, 3])
    solver = SGD(lr=0.1, batch_size=1)
    nova = eq.Algorithm(solver=solver, aggregator=FedNova(), sampler=FULL, weights="uniform")
    assert float(train(data, nova, 150, engine).params) == pytest.approx(0.4746, abs=5e-5)
    plain = replace(nova, aggregator=WeightedMean())
    assert float(train(data, plain, 150, engine).params) == pytest.approx(0.7305, abs=5e-5)


@ENGINES
def test_the_mean_length_of_fednova_is_weighted(engine):
    # Both minima are at 1, and batches of one of the 1 and 3 examples are τ = (1, 3) steps. With weights by examples, ¼ and ¾,
    # ā = ¼ · 1 + ¾ · 3 = 2.5. From 0 with η = 0.1: u = (0.1, 1 − 0.9³ = 0.271), and w = 2.5(¼ · 0.1 + ¾ · 0.271/3) = 0.231875.
    # The plain mean of the steps, 2, would give 0.1855.
    nova = eq.Algorithm(solver=SGD(lr=0.1, batch_size=1), aggregator=FedNova(), sampler=FULL, weights="examples")
    assert float(train(parabolas([1.0, 1.0], counts=[1, 3]), nova, 1, engine).params) == pytest.approx(0.231875)


@ENGINES
def test_qfair_sees_the_norms_of_normalised_updates(engine):
    # x = (2, 4), q = 1, from 0 with η = 0.1 and τ = (1, 2): losses 2 and 8, so that π = (⅕, ⅘), ā = ⅕ + ⅘ · 2 = 1.8, and
    # u·ā/a = (0.2 · 1.8, 0.76 · 0.9) = (0.36, 0.684), in the mean 0.6192. The server's factor is 1/(1 + Σ π_k ‖·‖²/(η F_k)) =
    # 1/(1 + 0.1296 + 0.467856). With ‖u_k‖² it would be 1/(1 + 0.04 + 0.5776).
    data = parabolas([2.0, 4.0], counts=[1, 2])
    solver, risk = SGD(lr=0.1, batch_size=1), eq.risk.QFair(1.0)
    nova = eq.Algorithm(risk=risk, solver=solver, aggregator=FedNova(), sampler=FULL, weights="uniform")
    assert float(train(data, nova, 1, engine).params) == pytest.approx(0.6192 / 1.597456)


@settings(max_examples=15)
@given(
    solver=st.sampled_from(
        [SGD(lr=0.2), SGD(lr=0.2, momentum=0.9, prox=0.5), Adam(lr=0.1), AdamW(lr=0.1, local_schedule=Step(2))]
    ),
    steps=st.integers(1, 5),
    tail=st.sampled_from([1.0, 0.5]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_with_equal_steps_fednova_is_fedavg(solver, steps, tail, seed):
    data = FederatedData(make_clients([3, 9, 5, 12], dtype=torch.float64, seed=seed), classes=3)
    risk = eq.risk.Superquantile(tail) if tail < 1 else eq.risk.Mean()
    algorithms = [
        eq.Algorithm(risk=risk, solver=replace(solver, steps=steps, batch_size=4), aggregator=rule, sampler=FULL)
        for rule in (FedNova(), WeightedMean())
    ]
    model = eq.models.Softmax(4, 3).double()
    one, other = (eq.train(model, data, a, rounds=2, engine="loop", progress=False).params for a in algorithms)
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


RAGGED = (1, 2, 3, 7, 10, 11, 20, 25)


@pytest.mark.parametrize(
    "parts",
    [
        {"aggregator": FedNova()},
        {"aggregator": FedNova(Median())},
        {"aggregator": FedNova(NormClip(0.1))},
        {"aggregator": FedNova(), "risk": eq.risk.QFair(1.0)},
        {"aggregator": FedNova(), "risk": eq.risk.Superquantile(0.5)},
        {"aggregator": FedNova(), "privacy": eq.privacy.SecureAggregation()},
        {
            "aggregator": FedNova(steps=2.0),
            "privacy": eq.privacy.GaussianMechanism(clip=0.1, noise_multiplier=0.0, noise_seed=0),
        },
        {"aggregator": FedNova(), "solver": SGD(batch_size=4, epochs=3, momentum=0.5, straggler_share=0.5)},
    ],
    ids=lambda parts: ", ".join(type(part).__name__ for part in parts.values()),
)
def test_fednova_in_both_engines_with_other_parts(parts):
    data = FederatedData(make_clients(RAGGED, dtype=torch.float64), classes=3)
    algorithm = eq.Algorithm(**({"solver": SGD(lr=0.2, batch_size=4)} | parts))
    model = eq.models.Softmax(4, 3).double()
    one, other = (
        eq.train(model, data, algorithm, rounds=3, clients_per_round=6, engine=engine, progress=False).params
        for engine in ("loop", "simulator")
    )
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def test_a_robust_aggregator_sees_normalised_updates():
    # τ = (1, 2, 3) steps of batches of one, all towards 1 from 0 with η = 0.1: u = (0.1, 0.19, 0.271), ā = 2.
    # u·ā/a = (0.2, 0.19, 0.18067): the median is 0.19.
    data = parabolas([1.0, 1.0, 1.0], counts=[1, 2, 3])
    algorithm = eq.Algorithm(solver=SGD(lr=0.1, batch_size=1), aggregator=FedNova(Median()), sampler=FULL, weights="uniform")
    assert float(train(data, algorithm, 1).params) == pytest.approx(0.19)


def test_a_public_number_of_steps_scales_and_is_clipped_after():
    # u = 0.1 after one step; with steps = 5 it is 0.5, and the clip of 0.3 acts on that.
    algorithm = eq.Algorithm(
        solver=SGD(lr=0.1, batch_size=1), aggregator=FedNova(steps=5.0), sampler=eq.sampling.Full(), weights="uniform",
        privacy=eq.privacy.GaussianMechanism(clip=0.3, noise_multiplier=0.0),
    )  # fmt: skip
    assert float(train(parabolas([1.0, 1.0]), algorithm, 1).params) == pytest.approx(0.3)


@ENGINES
def test_clients_without_a_step_leave_the_cohort(engine):
    class OnlyLarge(SGD):
        """Clients with less than two examples take no step."""

        def local_steps(self, size, effort=None):
            return 0 if size < 2 else super().local_steps(size, effort)

    algorithm = eq.Algorithm(solver=OnlyLarge(lr=0.1, batch_size=1), aggregator=FedNova(), sampler=FULL, weights="uniform")
    result = train(parabolas([5.0, 1.0], counts=[1, 2]), algorithm, 1, engine)
    assert float(result.params) == pytest.approx(0.19)  # the second client alone
    assert result.history.rounds[0].trained == 1
    with pytest.warns(eq.errors.EquipoiseNotice, match="Nobody was trained in 2 of 2 rounds"):
        nobody = train(parabolas([5.0, 1.0]), algorithm, 2, engine, start=0.3)
    assert float(nobody.params) == 0.3


def test_fednova_around_fednova_is_refused():
    with pytest.raises(InvalidParameter, match="aggregator must be another aggregator"):
        FedNova(FedNova())


# ------------------------------------------------------------------------------------------------------------------- SCAFFOLD


@ENGINES
def test_scaffold_ends_at_the_minimum_of_the_mean(engine):
    # F_k = ½ c_k (w − x_k)², c = (1, 3), x = (0, 1), equal weights, η = 0.1, two full-batch steps, everyone. The mean has its
    # minimum at (1·0 + 3·1)/4 = 3/4. FedAvg rests where (q² − 1)(w − x) add up to 0 with q = 0.9, 0.7: 0.51/(0.19 + 0.51).
    data = parabolas([0.0, 1.0], curvatures=[1.0, 3.0])
    work = SGD(lr=0.1, batch_size=None, steps=2)
    scaffold = eq.Algorithm(solver=eq.solvers.Scaffold(work), sampler=FULL)
    assert float(train(data, scaffold, 200, engine).params) == pytest.approx(0.75, abs=1e-9)
    assert float(train(data, replace(scaffold, solver=work), 200, engine).params) == pytest.approx(51 / 70, abs=1e-9)


@ENGINES
def test_the_first_round_of_scaffold_by_hand(engine):
    # From w = 0 with c = c_k = 0: client 1 (c = 3, x = 1) steps to 0.3 and to 0.51, client 0 stays. So u = (0, 0.51), and
    # c_k = −u_k/(η τ) = (0, −2.55), c = −1.275. In round 2, at w = 0.255, the first steps are along
    # 0.255 − 0 − 1.275 = −1.02 and 3(0.255 − 1) + 2.55 − 1.275 = −0.96. After that one step c_k is the gradient at 0.255:
    # 0 + 1.275 − 1.02 = 0.255 and −2.55 + 1.275 − 0.96 = −2.235 = 3(0.255 − 1); c is their mean.
    data = parabolas([0.0, 1.0], curvatures=[1.0, 3.0])
    algorithm = eq.Algorithm(solver=eq.solvers.Scaffold(SGD(lr=0.1, batch_size=None, steps=2)), sampler=FULL)
    setting = set_up(data, algorithm, engine)
    state = setting.begin()
    state, _ = round_of(setting, state)
    assert float(state.params) == pytest.approx(0.255)
    assert setting.kept.read(state.kept, torch.arange(2)).flatten().tolist() == pytest.approx([0.0, -2.55])
    assert float(state.solver) == pytest.approx(-1.275)
    one_step = replace(algorithm, solver=eq.solvers.Scaffold(SGD(lr=0.1, batch_size=None, steps=1)))
    after, _ = round_of(replace(setting, algorithm=one_step), state)
    assert float(after.params) == pytest.approx(0.255 + 0.1 * (1.02 + 0.96) / 2)
    assert setting.kept.read(after.kept, torch.arange(2)).flatten().tolist() == pytest.approx([0.255, -2.235])
    assert float(after.solver) == pytest.approx(-0.99)


def set_up(data, algorithm, engine, clients_per_round=2):
    return setup.set_up(
        Point(), data, algorithm, rounds=20, clients_per_round=clients_per_round, seed=3, loss=half_square, error=None,
        engine=engine,
    )  # fmt: skip


@settings(max_examples=10)
@given(
    counts=st.lists(st.integers(1, 6), min_size=3, max_size=6),
    engine=st.sampled_from(["loop", "simulator"]),
    momentum=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 99),
)
def test_the_common_correction_is_the_mean_of_all_clients_after_every_round(counts, engine, momentum, seed):
    gen = torch.Generator().manual_seed(seed)
    data = parabolas(torch.randn(len(counts), generator=gen).tolist(), counts=counts)
    solver = SGD(lr=0.1, batch_size=1, epochs=2, momentum=momentum, straggler_share=0.4)
    setting = set_up(data, eq.Algorithm(solver=eq.solvers.Scaffold(solver)), engine)  # two of the clients in every round
    state = setting.begin()
    for _ in range(4):
        state, _ = round_of(setting, state)
        rows = setting.kept.read(state.kept, torch.arange(len(counts)))
        torch.testing.assert_close(state.solver, setting.alpha @ rows, rtol=1e-9, atol=1e-12)
    assert float(state.solver.abs()) > 0


@pytest.mark.parametrize("chunk", [1, 3, None])
def test_scaffold_in_both_engines(chunk):
    data = FederatedData(make_clients(RAGGED, dtype=torch.float64), classes=3)
    algorithm = eq.Algorithm(solver=eq.solvers.Scaffold(SGD(lr=0.2, batch_size=4, epochs=2, clip_norm=0.5)))
    model = eq.models.Softmax(4, 3).double()
    one, other = (
        eq.train(model, data, algorithm, rounds=4, clients_per_round=5, engine=engine, progress=False).params
        for engine in ("loop", eq.engines.Simulator(chunk_size=chunk, workers=2 if chunk == 3 else None))
    )
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@ENGINES
def test_scaffold_resumes_bit_for_bit(engine, tmp_path):
    data = FederatedData(make_clients(RAGGED, dtype=torch.float64), classes=3)
    algorithm = eq.Algorithm(solver=eq.solvers.Scaffold(SGD(lr=0.2, batch_size=4)))
    model = eq.models.Softmax(4, 3).double()
    options = {"clients_per_round": 5, "engine": engine, "progress": False}
    whole = eq.train(model, data, algorithm, rounds=6, **options).params
    eq.train(model, data, algorithm, rounds=3, checkpoint=tmp_path / "run.ckpt", **options)
    with pytest.warns(eq.errors.EquipoiseNotice, match="Going on from round 3"):
        again = eq.train(model, data, algorithm, rounds=6, checkpoint=tmp_path / "run.ckpt", **options).params
    assert torch.equal(again, whole)


def test_scaffold_wraps_sgd_with_one_rate_and_a_fresh_state():
    for bad in (Adam(), SGD(rates={"w": 0.5}), SGD(momentum=0.5, state="kept"), eq.solvers.MAML()):
        with pytest.raises(InvalidParameter, match="solver must"):
            eq.solvers.Scaffold(bad)


def test_the_rate_of_the_round_divides_what_it_has_made():
    # Round 1 has the rate 0.05: one step from 0 towards 1 makes u = 0.05 and c_0 = −u/η = −1, whatever the rate of round 0 was.
    data = parabolas([1.0])
    solver = eq.solvers.Scaffold(SGD(lr=0.1, batch_size=None, steps=1, schedule=Step(1, 0.5)))
    setting = set_up(data, eq.Algorithm(solver=solver), "loop", clients_per_round=1)
    state, _ = round_of(setting, replace(setting.begin(), round=1))
    assert float(state.params) == pytest.approx(0.05)
    assert float(setting.kept.read(state.kept, torch.arange(1))) == pytest.approx(-1.0)


def test_momentum_and_prox_together_are_one_recursion():
    # ρ = 0.5, ημ = 0.1·2 = 0.2: v = 1, y = 1; v = 0.5 + 1 − 0.2 = 1.3, y = 2.3; v = 0.65 + 1 − 0.46 = 1.19, y = 3.49.
    assert float(SGD(momentum=0.5, prox=2.0).normalisers(torch.tensor([3]), 0.1)) == pytest.approx(3.49)
