"""FedDyn by hand, and SCAFFOLD and FedDyn beside robust rules, secure sums and noise: invariants, refusals, resumed runs."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import equipoise as eq
from equipoise.aggregators import FedNova, Median, TrimmedMean, WeightedMean
from equipoise.core.abilities import solver_traits
from equipoise.data.clients import FederatedData
from equipoise.errors import IncompatibleParts, InvalidParameter
from equipoise.privacy import DifferentialPrivacy, GaussianMechanism, SecureAggregation
from equipoise.runs import setup
from equipoise.solvers import SGD, Adam, FedDyn, PerFedAvg, Scaffold
from equipoise.solvers.batches import client_batches, steps_taken
from made_clients import make_clients
from rounds import round_of
from test_drift import ENGINES, FULL, RAGGED, parabolas, set_up, train

EXACT = SGD(
    lr=0.5, batch_size=None, steps=1
)  # with κ = 1 the objective ½(y − x)² + ½(y − w)² has curvature 2: one step solves it


def play(setting, rounds):
    """The states of a run after each of some rounds."""
    state = setting.begin()
    for _ in range(rounds):
        state, _ = round_of(setting, state)
        yield state


# --------------------------------------------------------------------------------------------------------------------- FedDyn


@ENGINES
def test_feddyn_is_at_the_mean_after_one_round_and_stays(engine):
    # F_k = ½(w − x_k)², κ = 1, exact solves from w = 0: y_k = x_k/2, so ū = x̄/2, g_k = −x_k/2, h = −x̄/2 and
    # w = 0 + x̄/2 + x̄/2 = x̄. Then y_k = (x_k + g_k + w)/2 = x_k/4 + x̄/2, ū = −x̄/4, h = −x̄/4, and w stays. FedProx with
    # μ = 1 is at x̄/2 after one round.
    data = parabolas([1.0, 2.0, 6.0])
    dynamic = eq.Algorithm(solver=FedDyn(1.0, EXACT), sampler=FULL)
    for rounds in (1, 2, 3):
        assert float(train(data, dynamic, rounds, engine).params) == pytest.approx(3.0, abs=1e-12)
    assert float(train(data, replace(dynamic, solver=replace(EXACT, prox=1.0)), 1, engine).params) == pytest.approx(1.5)


@ENGINES
def test_feddyn_ends_at_the_minimum_of_the_weighted_mean(engine):
    # Curvatures (1, 3), x = (0, 1), weights (1/4, 3/4): the weighted mean has its minimum at 9/4 / (1/4 + 9/4) = 0.9.
    data = parabolas([0.0, 1.0], curvatures=[1.0, 3.0], counts=[1, 3])
    algorithm = eq.Algorithm(solver=FedDyn(1.0, SGD(lr=0.2, batch_size=None, steps=8)), sampler=FULL)
    assert float(train(data, algorithm, 60, engine).params) == pytest.approx(0.9, abs=1e-6)


@settings(max_examples=8, deadline=None)
@given(
    counts=st.lists(st.integers(1, 6), min_size=3, max_size=6),
    engine=st.sampled_from(["loop", "simulator"]),
    momentum=st.sampled_from([0.0, 0.5]),
    privacy=st.sampled_from([None, SecureAggregation()]),
    seed=st.integers(0, 99),
)
def test_h_is_the_weighted_sum_of_all_rows_after_every_round(counts, engine, momentum, privacy, seed):
    gen = torch.Generator().manual_seed(seed)
    data = parabolas(torch.randn(len(counts), generator=gen).tolist(), counts=counts)
    solver = SGD(lr=0.1, batch_size=1, epochs=2, momentum=momentum)
    setting = set_up(data, eq.Algorithm(solver=FedDyn(0.5, solver), privacy=privacy), engine)  # two clients in every round
    for state in play(setting, 4):
        rows = setting.kept.read(state.kept, torch.arange(len(counts)))
        torch.testing.assert_close(state.solver, setting.alpha @ rows, rtol=1e-6, atol=1e-7 if privacy else 1e-12)
    assert float(state.solver.abs()) > 0


def test_the_strength_of_a_client_grows_as_its_weight_falls():
    # κ_k = κ/(n α_k), n = 3: with α = (1/2, 1/4, 1/4) it is 2κ/3, 4κ/3, 4κ/3.
    assert FedDyn(0.3).own_prox(torch.tensor([0.5, 0.25, 0.25]), 3).tolist() == pytest.approx([0.2, 0.4, 0.4])


def test_the_proximal_term_of_feddyn_is_a_square():
    # Erratum 3: with (κ/2)‖y − w‖ the pull would not grow with the distance. κ = 1, x = 8, rate 0.5, two steps from 0:
    # gradients −8 and (4 − 8) + 4 = 0, so that y stays at 4; with the norm it would move by 0.5 · (4 − ½) more.
    data = parabolas([8.0])
    setting = set_up(data, eq.Algorithm(solver=FedDyn(1.0, replace(EXACT, steps=2))), "loop", clients_per_round=1)
    state = next(iter(play(setting, 1)))
    assert float(setting.kept.read(state.kept, torch.arange(1))) == pytest.approx(-4.0)  # g = −κ u


@pytest.mark.parametrize("solver", [FedDyn(0.5, SGD(lr=0.2, batch_size=4)), Scaffold(SGD(lr=0.2, batch_size=4, steps=3))])
@pytest.mark.parametrize("privacy", [None, SecureAggregation()], ids=["open", "secure"])
def test_drift_corrections_in_both_engines_and_resumed_bit_for_bit(solver, privacy, tmp_path):
    data = FederatedData(make_clients(RAGGED, dtype=torch.float64), classes=3)
    algorithm = eq.Algorithm(solver=solver, privacy=privacy)
    model, options = eq.models.Softmax(4, 3).double(), {"clients_per_round": 5, "progress": False}
    one, other = (eq.train(model, data, algorithm, rounds=4, engine=e, **options).params for e in ("loop", "simulator"))
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6 if privacy else 1e-12)
    path = tmp_path / "run.ckpt"
    eq.train(model, data, algorithm, rounds=2, checkpoint=path, **options)
    assert torch.equal(eq.train(model, data, algorithm, rounds=4, checkpoint=path, **options).params, other)


@pytest.mark.parametrize("solver", [FedDyn(0.5, SGD(lr=0.2, batch_size=4)), Scaffold(SGD(lr=0.2, batch_size=4, steps=3))])
def test_secure_sums_give_the_corrections_of_the_open_run(solver):
    data = FederatedData(make_clients(RAGGED, dtype=torch.float64), classes=3)
    model, runs = eq.models.Softmax(4, 3).double(), []
    for privacy in (None, SecureAggregation(step=2.0**-30)):
        algorithm = eq.Algorithm(solver=solver, privacy=privacy)
        runs.append(eq.train(model, data, algorithm, rounds=4, clients_per_round=5, engine="loop", progress=False).params)
    torch.testing.assert_close(*runs, rtol=1e-6, atol=1e-6)


def test_feddyn_wraps_sgd_without_a_proximal_term():
    for bad in (Adam(), SGD(prox=0.1), SGD(momentum=0.5, state="kept"), eq.solvers.MAML()):
        with pytest.raises(InvalidParameter, match="solver must"):
            FedDyn(0.1, bad)
    for strength in (0.0, -1.0, float("nan")):
        with pytest.raises(InvalidParameter, match="strength"):
            FedDyn(strength)


class OnlyLarge(SGD):
    """Clients with less than two examples take no step."""

    def local_steps(self, size, effort=None):
        return 0 if size < 2 else super().local_steps(size, effort)


@pytest.mark.parametrize("wrap", [Scaffold, lambda solver: FedDyn(1.0, solver)], ids=["SCAFFOLD", "FedDyn"])
@ENGINES
def test_clients_without_a_step_change_nothing(engine, wrap):
    # The second client alone: two steps of batches of one from 0 towards 1 make 0.19; FedDyn's also has its own pull.
    solver = OnlyLarge(lr=0.1, batch_size=1)
    setting = set_up(parabolas([5.0, 1.0], counts=[1, 2]), eq.Algorithm(solver=wrap(solver), weights="uniform"), engine)
    state = next(iter(play(setting, 1)))
    rows = setting.kept.read(state.kept, torch.arange(2)).flatten()
    assert float(rows[0]) == 0.0
    assert float(rows[1]) != 0.0
    assert float(state.solver) == pytest.approx(float(rows[1]) / 2)  # α = ½
    nobody = set_up(parabolas([5.0, 1.0]), eq.Algorithm(solver=wrap(solver)), engine)
    state = next(iter(play(nobody, 1)))
    assert float(state.params) == 0.0
    assert float(state.solver) == 0.0


# ------------------------------------------------------------------------------------------- SCAFFOLD beside other parts


def test_with_a_robust_rule_c_follows_the_robust_total():
    # x = (1, 2, 9), one full-batch step of 0.1 from 0: u = (0.1, 0.2, 0.9), the median is 0.2, and with everyone in it
    # c = −0.2/0.1 = −2. Each client keeps its own: c_k = −u_k/0.1 = −x_k, whose mean is −4: the invariant is void.
    solver = Scaffold(SGD(lr=0.1, batch_size=None, steps=1))
    setting = set_up(parabolas([1.0, 2.0, 9.0]), eq.Algorithm(solver=solver, aggregator=Median(), sampler=FULL), "loop", 3)
    state = next(iter(play(setting, 1)))
    assert float(state.params) == pytest.approx(0.2)
    assert float(state.solver) == pytest.approx(-2.0)
    assert setting.kept.read(state.kept, torch.arange(3)).flatten().tolist() == pytest.approx([-1.0, -2.0, -9.0])


def test_a_robust_rule_that_takes_the_mean_gives_the_common_correction():
    data = FederatedData(make_clients(RAGGED, dtype=torch.float64), classes=3)
    model, runs = eq.models.Softmax(4, 3).double(), []
    for rule in (eq.aggregators.WeightedMean(), TrimmedMean(0.0)):
        algorithm = eq.Algorithm(solver=Scaffold(SGD(lr=0.2, batch_size=4, steps=3)), aggregator=rule)
        runs.append(eq.train(model, data, algorithm, rounds=4, clients_per_round=5, progress=False).params)
    torch.testing.assert_close(*runs, rtol=1e-9, atol=1e-12)


@ENGINES
def test_under_noise_rows_follow_the_clipped_update(engine):
    # One full-batch step of 0.1 from 0 towards x = (1, 8): u = (0.1, 0.8), clipped to (0.1, 0.3). Sent is the sum over n = 2:
    # w = 0.2. c_k = −u_k/0.1 as sent: (−1, −3), and c = −0.2/0.1 = −2, their mean.
    algorithm = eq.Algorithm(
        solver=Scaffold(SGD(lr=0.1, batch_size=None, steps=1)), sampler=FULL,
        privacy=GaussianMechanism(clip=0.3, noise_multiplier=0.0),
    )  # fmt: skip
    setting = set_up(parabolas([1.0, 8.0]), algorithm, engine)
    state = next(iter(play(setting, 1)))
    assert float(state.params) == pytest.approx(0.2)
    assert setting.kept.read(state.kept, torch.arange(2)).flatten().tolist() == pytest.approx([-1.0, -3.0])
    assert float(state.solver) == pytest.approx(-2.0)


@pytest.mark.parametrize("noise", ["central", "distributed"])
def test_the_common_correction_is_made_of_what_was_released(noise):
    # c ← c − q(c + T/(ηa)) by the noisy total T alone: q = ½ of the clients, η = 0.1, a = 2 steps.
    privacy = DifferentialPrivacy(None, 1e-5, clip=0.5, noise_multiplier=1.0, noise=noise)
    algorithm = eq.Algorithm(
        solver=Scaffold(SGD(lr=0.1, batch_size=None, steps=2)), privacy=privacy, sampler=eq.sampling.Uniform()
    )
    setting = set_up(parabolas([1.0, 2.0, 3.0, 8.0]), algorithm, "loop")
    before, common = 0.0, 0.0
    for state in play(setting, 3):
        common -= 0.5 * (common + (float(state.params) - before) / 0.2)
        assert float(state.solver) == pytest.approx(common, rel=1e-9)
        before = float(state.params)


@pytest.mark.parametrize("privacy", [SecureAggregation(), GaussianMechanism(clip=1.0, noise_multiplier=1.0)])
def test_lengths_of_steps_must_be_public_where_clients_are_hidden(privacy):
    with pytest.raises(IncompatibleParts, match="Count local work in steps"):
        eq.Algorithm(solver=Scaffold(SGD(epochs=2)), privacy=privacy)
    with pytest.raises(IncompatibleParts, match="Count local work in steps"):
        eq.Algorithm(solver=Scaffold(SGD(steps=4, straggler_share=0.3)), privacy=privacy)


class OwnSign(SGD):
    """No sum of gradients."""

    def step(self, weights, gradient, memory, *, anchor, lr):
        weights.sub_(lr * gradient.sign())


class OwnMomentum(SGD):
    """A sum of gradients, each with a fixed factor."""

    def begin(self, weights):
        return (torch.zeros_like(weights),)

    def step(self, weights, gradient, memory, *, anchor, lr):
        memory[0].mul_(0.9).add_(gradient)
        weights.sub_(lr * memory[0])


def test_scaffold_takes_a_solver_of_ones_own_only_if_it_adds_up_gradients():
    with pytest.raises(InvalidParameter, match="must add up gradients, each with a fixed factor") as caught:
        Scaffold(OwnSign(lr=0.01))
    assert "your solver without SCAFFOLD" in str(caught.value)
    assert Scaffold(OwnMomentum(lr=0.01)).solver.lr == 0.01


# ------------------------------------------------------------------------------------- batches that are too small for the model


def normalised():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()


def two_epochs(**given):
    return SGD(**{"lr": 0.1, "batch_size": 4, "epochs": 2} | given)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.one_of(st.none(), st.integers(1, 6)), st.integers(0, 30), st.integers(1, 3), st.integers(1, 3))
def test_steps_taken_are_those_on_batches_that_are_large_enough(size, batch_size, steps, repeats, least):
    solver = PerFedAvg(batch_size=batch_size) if repeats == 3 else SGD(batch_size=batch_size)
    key = torch.tensor(7)
    batches = client_batches(key, size, batch_size, steps, solver_traits(solver).repeats)
    assert steps_taken(solver, size, steps, least) == sum(len(batch) >= least for batch in batches)


@pytest.mark.filterwarnings("ignore:.*which is left out:equipoise.errors.EquipoiseNotice")
@ENGINES
def test_fednova_counts_no_batch_that_is_left_out(engine):
    # BatchNorm takes no batch of one. Batches of 4, two epochs: sizes 1, 5, 9, 7 have batches (1), (4, 1), (4, 4, 1), (4, 3):
    # 0, 2, 4 and 4 steps are taken, of 2, 4, 6 and 4. The first client has no step and leaves the cohort: π = ⅓ each,
    # ā = 10/3, and the total is (10/9)(u_1/2 + u_2/4 + u_3/4).
    data = FederatedData(make_clients([1, 5, 9, 7], dtype=torch.float64), classes=3)
    algorithm = eq.Algorithm(solver=two_epochs(), aggregator=FedNova(), sampler=FULL, weights="uniform")
    options = {"rounds": 1, "engine": engine, "progress": False}
    moved = eq.train(normalised(), data, algorithm, **options).params
    start = eq.train(normalised(), data, algorithm, **options | {"rounds": 0}).params
    plain = replace(algorithm, aggregator=WeightedMean())
    alone = [FederatedData(data.train.take([k]), classes=3) for k in (1, 2, 3)]
    u = [eq.train(normalised(), each, plain, **options).params - start for each in alone]
    torch.testing.assert_close(moved - start, (10 / 9) * (u[0] / 2 + u[1] / 4 + u[2] / 4), rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*which is left out:equipoise.errors.EquipoiseNotice")
@pytest.mark.parametrize("wrap", [Scaffold, lambda solver: FedDyn(0.5, solver)], ids=["SCAFFOLD", "FedDyn"])
@ENGINES
def test_clients_whose_only_batch_is_left_out_take_no_part(engine, wrap):
    # Size 1 has no batch for BatchNorm. In the first round all rows are 0: SCAFFOLD moves by the mean ū of the other three.
    # FedDyn, κ = ½: ū of steps with a proximal term of ½, h = −κ · ¾ · ū, so that it moves by ū + ¾ ū.
    data = FederatedData(make_clients([1, 5, 9, 7], dtype=torch.float64), classes=3)
    algorithm = eq.Algorithm(solver=wrap(two_epochs()), sampler=FULL, weights="uniform")
    setting = setup.set_up(
        normalised(), data, algorithm, rounds=3, clients_per_round=None, seed=0, loss=None, error=None, engine=engine
    )
    for state in play(setting, 3):
        rows = setting.kept.read(state.kept, torch.arange(4))
        torch.testing.assert_close(state.solver, setting.alpha @ rows, rtol=1e-9, atol=1e-12)
        assert not rows[0].any()
        assert bool(rows[1:].any(1).all())
    others, options = FederatedData(data.train.take([1, 2, 3]), classes=3), {"engine": engine, "progress": False}
    plain, factor = (two_epochs(), 1.0) if wrap is Scaffold else (two_epochs(prox=0.5), 1.75)
    mean = eq.train(normalised(), others, replace(algorithm, solver=plain), rounds=1, **options).params - setting.first_params
    moved = eq.train(normalised(), data, algorithm, rounds=1, **options).params - setting.first_params
    torch.testing.assert_close(moved, factor * mean, rtol=1e-9, atol=1e-12)


def test_a_public_length_of_steps_needs_batches_that_are_all_large_enough():
    # With steps = 3 and batches of 4 a client of 5 takes 2 of 3 steps, but c would be divided by 3.
    algorithm = eq.Algorithm(solver=Scaffold(SGD(batch_size=4, steps=3)), privacy=SecureAggregation())
    options = {"rounds": 1, "clients_per_round": 3, "progress": False}
    with pytest.raises(IncompatibleParts, match=r"batch of one example(.|\n)*1 of 3 clients"):
        eq.train(normalised(), FederatedData(make_clients([5, 6, 7], dtype=torch.float64), classes=3), algorithm, **options)
    eq.train(normalised(), FederatedData(make_clients([4, 6, 7], dtype=torch.float64), classes=3), algorithm, **options)
