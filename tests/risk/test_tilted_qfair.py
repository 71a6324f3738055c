"""Tilted and q-fair risks: limits, numbers by hand, whole rounds by hand, and numbers that would overflow."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import equipoise as eq
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.errors import IncompatibleParts, InvalidParameter
from equipoise.risk import Mixture, QFair, Superquantile, Tilted
from equipoise.risk.tilted import tilted

losses_and_weights = st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(1, 9)), min_size=1, max_size=10).map(
    lambda rows: (
        torch.tensor([r[0] for r in rows], dtype=torch.float64),
        torch.tensor([r[1] for r in rows], dtype=torch.float64) / sum(r[1] for r in rows),
    )
)


@given(losses_and_weights)
def test_limits_of_the_tilt(case):
    losses, alpha = case
    mean, spread = float(alpha @ losses), float(losses.max() - losses.min())
    for tiny in (1e-9, -1e-9, 1e-14):  # the difference to the mean is about t · variance / 2
        assert float(tilted(losses, alpha, tiny)[0]) == pytest.approx(mean, abs=1e-9 * (1 + spread**2))
    slack = math.log(1 / float(alpha.min())) / 1e5
    assert 0 <= float(losses.max()) - float(tilted(losses, alpha, 1e5)[0]) <= slack + 1e-9
    assert 0 <= float(tilted(losses, alpha, -1e5)[0]) - float(losses.min()) <= slack + 1e-9


@given(losses_and_weights, st.floats(-5, 5), st.floats(-5, 5))
def test_grows_with_the_tilt(case, a, b):
    losses, alpha = case
    low, high = sorted((a, b))
    assert float(tilted(losses, alpha, low)[0]) <= float(tilted(losses, alpha, high)[0]) + 1e-9


def test_tilted_by_hand():
    # Losses log 1 and log 3 with equal weights and t = 1: log((1 + 3)/2) = log 2, weights 1/4 and 3/4.
    losses, alpha = torch.tensor([0.0, math.log(3)], dtype=torch.float64), torch.tensor([0.5, 0.5], dtype=torch.float64)
    result = Tilted(tilt=1.0)(losses, alpha)
    assert float(result.value) == pytest.approx(math.log(2))
    assert result.weights.tolist() == pytest.approx([0.25, 0.75])
    # t = −1: −log((1 + 1/3)/2) = log 1.5, weights 3/4 and 1/4.
    result = Tilted(tilt=-1.0)(losses, alpha)
    assert float(result.value) == pytest.approx(math.log(1.5))
    assert result.weights.tolist() == pytest.approx([0.75, 0.25])


def test_the_kl_smoothed_superquantile_with_a_vanishing_tail_is_tilted():
    losses, alpha = torch.tensor([0.3, 1.2, 2.0]), torch.tensor([0.2, 0.5, 0.3])
    smooth = Superquantile(1e-9, smoothing="kl", nu=0.5)(losses, alpha)
    plain = Tilted(2.0)(losses, alpha)
    torch.testing.assert_close(smooth.weights, plain.weights)
    torch.testing.assert_close(smooth.value, plain.value)


def test_two_tracked_rounds_by_hand():
    # t = 1, ρ = ½. Round 1, losses log 2 twice: R_S = log 2 = R, weights ½ and ½, step 1.
    risk, alpha = Tilted(1.0, tracked=True), torch.tensor([0.5, 0.5], dtype=torch.float64)
    first = risk(torch.full((2,), math.log(2), dtype=torch.float64), alpha)
    assert first.weights.tolist() == pytest.approx([0.5, 0.5])
    assert float(first.state) == pytest.approx(math.log(2))
    # Round 2, losses 0 and log 11: e^{R_S} = 6, so e^R = (2 + 6)/2 = 4; weights α e^{F − R} = 1/8 and 11/8, step 6/4.
    second = risk(torch.tensor([0.0, math.log(11)], dtype=torch.float64), alpha, state=first.state)
    assert float(second.state) == pytest.approx(math.log(4))
    assert second.weights.tolist() == pytest.approx([1 / 8, 11 / 8])
    step = risk.server_step(weight_sum=second.weights.sum(), losses=None, base_weights=alpha, sq_norms=None, lr=0.1)
    assert step == pytest.approx(1.5)


@pytest.mark.parametrize("tilt", [200.0, -200.0])
def test_a_tracked_step_never_overflows(tilt):
    risk, alpha = Tilted(tilt, tracked=True), torch.tensor([0.5, 0.5], dtype=torch.float64)
    state = None
    for losses in ([1e4, 1.0], [0.0, 0.0], [1e6, 1e6], [1.0, 2.0]):
        result = risk(torch.tensor(losses, dtype=torch.float64), alpha, state=state)
        state = result.state
        assert torch.isfinite(result.weights).all()
        assert 0 <= float(result.weights.sum()) <= 2 + 1e-9
        assert torch.isfinite(state)


@given(losses_and_weights)
def test_q_zero_is_the_mean(case):
    losses, alpha = case
    result = QFair(0.0)(losses, alpha)
    assert float(result.value) == pytest.approx(float(alpha @ losses), abs=1e-8)
    torch.testing.assert_close(result.weights, alpha)
    step = QFair(0.0).server_step(
        losses=losses, base_weights=alpha, weight_sum=alpha.sum(), sq_norms=torch.rand(len(losses)), lr=0.1
    )
    assert step == pytest.approx(1.0)


def test_q_fair_by_hand():
    losses, alpha = torch.tensor([1.0, 3.0], dtype=torch.float64), torch.tensor([0.25, 0.75], dtype=torch.float64)
    result = QFair(2.0)(losses, alpha)
    assert float(result.value) == pytest.approx((0.25 * 1 + 0.75 * 27) / 3)
    assert result.weights.tolist() == pytest.approx([0.25, 0.75 * 9])


def test_huge_powers_keep_their_ratios():
    losses, alpha = torch.tensor([1e4, 2e4]), torch.tensor([0.5, 0.5])
    weights = QFair(200.0)(losses, alpha).weights
    assert torch.isfinite(weights).all()
    assert float(weights[0] / weights.sum()) == pytest.approx(2.0**-200, abs=1e-30)


def line(*groups):
    clients = [(f"c{i}", torch.tensor(g, dtype=torch.float64).unsqueeze(1)) for i, g in enumerate(groups)]
    return FederatedData(ClientSet.pack((name, x, x) for name, x in clients))


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_one_q_fedavg_round_on_two_quadratic_clients(engine):
    # F_1 = (w − 1)², F_2 = (w − 2)² at w = 0 with lr 0.1 (L = 10): losses 1 and 4, updates u = 0.2 and 0.4.
    # q = 1: Δw = −10u = −2, −4; Δ = FΔw = −2, −16; h = ‖Δw‖² + 10 F = 4 + 10 = 14 and 16 + 40 = 56.
    # w ← 0 − (−18)/70 with equal base weights in both sums.
    algorithm = eq.Algorithm(
        risk=QFair(q=1.0), solver=eq.solvers.SGD(lr=0.1, batch_size=None, steps=1), sampler=eq.sampling.Full()
    )
    model = eq.models.MeanEstimator(1).double()
    result = eq.train(model, line([1.0], [2.0]), algorithm, rounds=1, clients_per_round=2, engine=engine)
    assert float(result.params) == pytest.approx(18 / 70)


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_one_tilted_round_by_hand(engine):
    # Losses 0 and 4 at w = 0, t = ¼ log 3: weights ∝ 1 and e^{4t} = 3; updates 0 and 0.4.
    algorithm = eq.Algorithm(
        risk=Tilted(tilt=math.log(3) / 4),
        solver=eq.solvers.SGD(lr=0.1, batch_size=None, steps=1),
        sampler=eq.sampling.Full(),
    )
    result = eq.train(
        eq.models.MeanEstimator(1).double(), line([0.0], [2.0]), algorithm, rounds=1, clients_per_round=2, engine=engine
    )
    assert float(result.params) == pytest.approx(0.75 * 0.4)


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_two_fedprox_steps_by_hand(engine):
    # One client at 1, w^t = 0, lr 0.1, μ = 2. Step 1: g = 2(0 − 1) + 0, w = 0.2. Step 2: g = 2(0.2 − 1) + 2 · 0.2, w = 0.32.
    algorithm = eq.Algorithm(solver=eq.solvers.SGD(lr=0.1, batch_size=None, steps=2, prox=2.0))
    result = eq.train(eq.models.MeanEstimator(1).double(), line([1.0]), algorithm, rounds=1, clients_per_round=1, engine=engine)
    assert float(result.params) == pytest.approx(0.32)


def test_a_strong_proximal_term_holds_clients_at_the_model():
    far = line([5.0])
    updates = [
        float(
            eq.train(
                eq.models.MeanEstimator(1).double(), far,
                eq.Algorithm(solver=eq.solvers.SGD(lr=0.001, batch_size=None, steps=2000, prox=mu)),
                rounds=1, clients_per_round=1,
            ).params
        )
        for mu in (0.0, 2.0, 18.0)
    ]  # fmt: skip
    # The minimiser of (w − 5)² + (μ/2) w² is 10 / (2 + μ); 2000 steps of 0.001 come within e^{−4} of it.
    assert updates == pytest.approx([5.0, 2.5, 0.5], rel=0.02)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Tilted(float("inf")), "tilt must be a finite number"),
        (lambda: Tilted("a"), "tilt must be a finite number"),
        (lambda: Tilted(0.0, tracked=True), "tracked needs a tilt other than 0"),
        (lambda: Tilted(1.0, rho=0.0), "rho must lie in"),
        (lambda: QFair(-1.0), "q must be a number ≥ 0"),
        (lambda: QFair(float("nan")), "q must be a number ≥ 0"),
    ],
)
def test_bad_parameters_are_named(make, words):
    with pytest.raises(InvalidParameter) as caught:
        make()
    assert words in str(caught.value)


@pytest.mark.parametrize("risk", [QFair(1.0), Tilted(1.0, tracked=True)])
def test_risks_with_a_step_of_their_own_do_not_mix(risk):
    with pytest.raises(IncompatibleParts, match="server's step"):
        Mixture((0.5, eq.risk.Mean()), (0.5, risk))
    Mixture((0.5, eq.risk.Mean()), (0.5, Tilted(1.0)))


# -------------------------------------------------------- with a server optimiser (docs/methods/objectives.md, q-fair learning)


def steps_of(server, rounds, q=2.0):
    """The parameters of a q-fair run after some rounds."""
    import equipoise as eq

    data = eq.data.label_shift(train_clients=6, validation_clients=0, test_clients=2, examples=20)
    algorithm = eq.Algorithm(risk=QFair(q), server=server)
    given = {"rounds": rounds, "clients_per_round": 3, "engine": "loop"}
    return eq.train(eq.models.Softmax(data.features, data.classes), data, algorithm, **given).params.double()


def test_the_server_optimiser_gets_the_mean_update_times_the_dynamic_step():
    from equipoise.server_opt import SGD, Momentum

    start, one, two = (steps_of(SGD(1.0), rounds) for rounds in (0, 1, 2))
    torch.testing.assert_close(steps_of(SGD(0.5), 1), start + 0.5 * (one - start))  # γ s Δ
    torch.testing.assert_close(steps_of(Momentum(1.0, 0.9), 1), one)  # v = s Δ in the first round
    # In the second round both begin at the same model, and v has 0.9 of the first step besides.
    torch.testing.assert_close(steps_of(Momentum(1.0, 0.9), 2), two + 0.9 * (one - start), rtol=1e-5, atol=1e-6)
    assert float((one - start).norm()) < float((steps_of(SGD(1.0), 1, q=0.0) - start).norm())  # the price is shorter steps


def test_adam_on_the_server_cancels_a_factor_that_is_the_same_in_all_rounds():
    from equipoise.server_opt import Adam

    server, params = Adam(lr=0.1, epsilon=1e-12), torch.zeros(3, dtype=torch.float64)
    totals = torch.tensor([[1.0, -2.0, 0.5], [0.3, 0.4, -0.1]], dtype=torch.float64)

    def moved(factor):
        place, state = params, server.begin(params)
        for total in totals:
            place, state = server.step(place, factor * total, state)
        return place

    torch.testing.assert_close(moved(0.01), moved(1.0), rtol=1e-8, atol=0)


def test_the_dynamic_step_by_hand_is_a_factor_of_the_mean_update():
    # q = 1 and α = ½ give π = (1, 3)/4; s = 1/(0.25 (1 + 2/(0.1·1)) + 0.75 (1 + 0.5/(0.1·3))).
    losses, alpha = torch.tensor([1.0, 3.0], dtype=torch.float64), torch.tensor([0.5, 0.5], dtype=torch.float64)
    norms = torch.tensor([2.0, 0.5], dtype=torch.float64)
    step = QFair(1.0).server_step(losses=losses, base_weights=alpha, weight_sum=alpha.sum(), sq_norms=norms, lr=0.1)
    assert step == pytest.approx(1 / (0.25 * 21 + 0.75 * (1 + 5 / 3)))
    assert step == pytest.approx(1 / 7.25)
