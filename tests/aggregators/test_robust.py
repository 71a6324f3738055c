"""Robust aggregators: against plain reference implementations, and against attackers who send anything."""

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

import equipoise as eq
from equipoise import aggregators as agg
from equipoise.core.task import Task
from equipoise.data.clients import FederatedData
from equipoise.errors import InvalidParameter
from equipoise.testing import check_aggregator
from equipoise.types import ServerState
from rounds import run_round

ALL = [
    agg.Median(),
    agg.TrimmedMean(0.2),
    agg.GeometricMedian(),
    agg.Krum(2),
    agg.MultiKrum(2),
    agg.NormClip(),
    agg.NormClip(0.7),
    agg.KNorm(2),
    agg.KLoss(2),
    agg.FedMGDA(0.1),
]


@pytest.mark.parametrize("part", ALL, ids=repr)
def test_the_law_of_aggregators(part):
    check_aggregator(part)


def example(count=9, dimension=5, seed=0, equal=False):
    gen = torch.Generator().manual_seed(seed)
    updates = torch.randn(count, dimension, generator=gen, dtype=torch.float64)
    weights = torch.ones(count, dtype=torch.float64) if equal else torch.rand(count, generator=gen, dtype=torch.float64) + 0.1
    losses = torch.rand(count, generator=gen, dtype=torch.float64)
    return updates, weights / weights.sum(), losses


def total(part, updates, weights, losses=None):
    return part(updates, weights, losses=losses)[0]


# ----------------------------------------------------------------------------------------------- plain reference versions


def plain_median(values, weights):
    """The middle of all points that minimise Σ w |z − v|; they are values, or the stretch between two."""
    costs = {v: float(sum(w * abs(v - u) for u, w in zip(values, weights, strict=True))) for v in values}
    best = min(costs.values())
    middle = [v for v, c in costs.items() if c <= best + 1e-12]
    return (min(middle) + max(middle)) / 2


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 9])
def test_median_against_its_definition(count, equal):
    updates, weights, _ = example(count, equal=equal)
    expected = [plain_median(column.tolist(), weights.tolist()) for column in updates.t()]
    assert total(agg.Median(), updates, weights).tolist() == pytest.approx(expected)


def test_median_and_trimmed_mean_with_equal_weights_are_the_usual_ones():
    from scipy.stats import trim_mean

    updates, weights, _ = example(10, equal=True)
    np.testing.assert_allclose(total(agg.Median(), updates, weights), np.median(updates, axis=0))
    np.testing.assert_allclose(total(agg.TrimmedMean(0.2), updates, weights), trim_mean(updates.numpy(), 0.2, axis=0))
    torch.testing.assert_close(total(agg.TrimmedMean(0.0), updates, weights), weights @ updates)


def test_trimmed_mean_cuts_weight_not_heads():
    # Weights 0.1, 0.2, 0.3, 0.4 on 0, 1, 2, 3; a fifth off either end leaves 0.1 of 1, 0.3 of 2 and 0.2 of 3.
    updates = torch.arange(4.0, dtype=torch.float64).unsqueeze(1)
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    assert float(total(agg.TrimmedMean(0.2), updates, weights)) == pytest.approx((0.1 * 1 + 0.3 * 2 + 0.2 * 3) / 0.6)


@pytest.mark.parametrize("fraction", [0.499999, 0.4999999999, 0.5 - 1e-15])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_trimmed_mean_that_cuts_nearly_everything_is_the_median(fraction, dtype):
    for equal in (True, False):
        updates, weights, _ = example(9, equal=equal)
        found = total(agg.TrimmedMean(fraction), updates, weights.to(dtype))
        torch.testing.assert_close(found, total(agg.Median(), updates, weights))


def test_geometric_median_has_the_least_sum_of_distances():
    from scipy.optimize import minimize

    updates, weights, _ = example(12, 3)
    found = total(agg.GeometricMedian(iterations=500, smoothing=1e-6), updates, weights).numpy()

    def cost(z):
        return float((weights.numpy() * np.linalg.norm(updates.numpy() - z, axis=1)).sum())

    best = minimize(
        cost, updates.mean(0).numpy(), method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-12, "maxiter": 5000}
    )
    assert cost(found) <= best.fun * (1 + 1e-6)


def distances(point, updates, weights):
    return float((weights * (updates - torch.as_tensor(point)).norm(dim=1)).sum())


def least_sum_of_distances(updates, weights, start):
    """By a simplex search that knows nothing of weights and starts, and at the updates themselves, where the sum has kinks."""
    from scipy.optimize import minimize

    options = {"xatol": 1e-14, "fatol": 1e-16, "maxiter": 4000, "maxfev": 4000}
    starts = (start.tolist(), updates.mean(0).tolist())
    found = (minimize(distances, s, (updates, weights), method="Nelder-Mead", options=options).fun for s in starts)
    return min(*found, *(distances(u, updates, weights) for u in updates))


def at_a_kink(pull):
    """The start, (0, 0), is an update of weight m, which the two others pull away by (1 + pull) m."""
    other = (1 + pull) / (2**0.5 + 2 * (1 + pull))
    weights = torch.tensor([1 - 2 * other, other, other], dtype=torch.float64)
    return torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64), weights


MANY_AT_THE_START = torch.tensor(  # the median of each coordinate is (1, 0), an update that is there twice
    [[0.0, 0], [0, 1], [0, 0], [1, -1], [1, 0], [1, -2], [1, 0]], dtype=torch.float64
)
PLACES = [(MANY_AT_THE_START, torch.full((7,), 1 / 7, dtype=torch.float64)), at_a_kink(1e-2)]
PLACES += [example(count, 2, seed)[:2] for count, seed in ((2, 0), (3, 1), (4, 2), (7, 3), (12, 4))]


@pytest.mark.parametrize(("updates", "weights"), PLACES)
@pytest.mark.parametrize("smoothing", [0.5, 1e-1, 1e-3, 1e-5, 1e-6, 1e-8])
def test_the_geometric_median_is_within_its_smoothing_of_the_least_sum(updates, weights, smoothing):
    assert_nearly_least(updates, weights, smoothing)


def test_the_geometric_median_leaves_an_update_that_is_nearly_the_best():
    """Steps are short there, and grow by 1/2000 each: their length alone says nothing about the sum."""
    assert_nearly_least(*at_a_kink(5e-4), 1e-8)


def assert_nearly_least(updates, weights, smoothing):
    found = total(agg.GeometricMedian(100_000, smoothing), updates, weights)
    start = torch.tensor([plain_median(column.tolist(), weights.tolist()) for column in updates.t()], dtype=torch.float64)
    typical = plain_median((updates - start).norm(dim=1).tolist(), weights.tolist())  # ν = smoothing · typical
    least = least_sum_of_distances(updates, weights, found)
    assert distances(found, updates, weights) - least <= smoothing * typical + 1e-14


@pytest.mark.parametrize("scale", [1e-150, 1e-30, 1.0, 1e30, 1e120, 1e200])
def test_the_geometric_median_is_finite_and_inside_at_any_scale(scale):
    updates = scale * example(7, 3)[0]
    found = total(agg.GeometricMedian(), updates, torch.full((7,), 1 / 7, dtype=torch.float64))
    assert bool(((found >= updates.min(0).values) & (found <= updates.max(0).values)).all())


def plain_krum_order(updates, malicious):
    scores = []
    for k, own in enumerate(updates):
        others = sorted(float(((own - u) ** 2).sum()) for j, u in enumerate(updates) if j != k)
        scores.append(sum(others[: len(updates) - malicious - 2]))
    return sorted(range(len(updates)), key=scores.__getitem__)


def test_krum_sums_squares_over_its_nearest_others():
    """K = 6, f = 1: three nearest others. Squares: 3 has 9 + 9 + 16 = 34, 6 has 1 + 9 + 25 = 35, 7 has 1 + 16 + 16 = 33.

    Fourth powers (bucketing's code, Blades) select 3: 81 + 81 + 256 = 418, against 707 of 6 and 513 of 7. With four neighbours
    (ByzFL) 6 is selected: 1 + 9 + 25 + 36 = 71, against 98 of 3 and 82 of 7.
    """
    updates = torch.tensor([[0.0], [3.0], [6.0], [7.0], [11.0], [100.0]])
    assert total(agg.Krum(1), updates, torch.full((6,), 1 / 6)).tolist() == [7.0]


def test_krum_and_multi_krum_against_loops():
    updates, weights, _ = example(11)
    order = plain_krum_order(updates, 3)
    torch.testing.assert_close(total(agg.Krum(3), updates, weights), updates[order[0]])
    best = order[: 11 - 3]
    expected = (weights[best] @ updates[best]) / weights[best].sum()
    torch.testing.assert_close(total(agg.MultiKrum(3), updates, weights), expected)


def test_clipping_leaves_out_what_is_not_finite_with_a_fixed_bound_too():
    """Totals of chunks still add up: the weight of such a client is not shared out here, but in the round."""
    updates = torch.tensor([[3.0, 4.0], [torch.nan, 1.0], [torch.inf, 0.0]])
    assert total(agg.NormClip(1.0), updates, torch.tensor([0.5, 0.25, 0.25])).tolist() == pytest.approx([0.3, 0.4])


def test_clipping_by_hand():
    # Norms 5, 1 and 10; the median norm is 5: the last is halved. Weights 1/2, 1/4, 1/4.
    updates = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 10.0]], dtype=torch.float64)
    weights = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    assert total(agg.NormClip(), updates, weights).tolist() == pytest.approx([1.5 + 0.25, 2.0 + 1.25])
    assert total(agg.NormClip(bound=1.0), updates, weights).tolist() == pytest.approx([0.3 + 0.25, 0.4 + 0.25])
    assert agg.NormClip(1.0).linear
    assert not agg.NormClip().linear


def test_k_norm_and_k_loss_by_hand():
    updates = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 10.0]], dtype=torch.float64)
    weights = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    assert total(agg.KNorm(1), updates, weights).tolist() == pytest.approx([(1.5 + 0.25) / 0.75, 2.0 / 0.75])
    losses = torch.tensor([0.2, 0.9, 0.5])
    assert total(agg.KLoss(1), updates, weights, losses).tolist() == [0.0, 10.0]  # the second largest loss
    assert total(agg.KLoss(0), updates, weights, losses).tolist() == [1.0, 0.0]
    for own in (torch.arange(3), torch.arange(3).flip(0)):  # an infinite loss is the largest, whoever has it
        infinite = torch.tensor([0.2, torch.inf, 0.5])
        assert agg.KLoss(1)(updates, weights, losses=infinite, keys=own)[0].tolist() == [0.0, 10.0]


def test_mgda_is_the_shortest_vector_and_epsilon_zero_the_mean_direction():
    # Directions (1, 0) and (0, 1) with weights 0.8 and 0.2: the shortest point of the hull is (1/2, 1/2); ε = 0.1 stops at 0.7.
    updates = torch.tensor([[2.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    weights = torch.tensor([0.8, 0.2], dtype=torch.float64)
    assert total(agg.FedMGDA(1.0), updates, weights).tolist() == pytest.approx([1.0, 1.0], abs=1e-5)
    assert total(agg.FedMGDA(0.1), updates, weights).tolist() == pytest.approx([1.4, 0.6], abs=1e-5)
    assert total(agg.FedMGDA(0.0), updates, weights).tolist() == pytest.approx([1.6, 0.4])


# -------------------------------------------------------------------------------------------------------------- attackers

anything = st.floats(allow_nan=True, allow_infinity=True, width=64)


@settings(max_examples=150)
@given(
    honest=st.lists(st.tuples(st.floats(-10, 10), st.floats(-10, 10), st.floats(0.1, 1)), min_size=4, max_size=8),
    attack=st.lists(st.tuples(anything, anything, st.floats(0.1, 1)), min_size=1, max_size=6),
    share=st.floats(0.01, 0.49),
)
def test_attackers_with_less_than_half_of_the_weight_stay_in_the_honest_range(honest, attack, share):
    updates = torch.tensor([row[:2] for row in (*honest, *attack)], dtype=torch.float64)
    good = torch.tensor([row[2] for row in honest], dtype=torch.float64)
    bad = torch.tensor([row[2] for row in attack], dtype=torch.float64)
    low, high = updates[: len(honest)].min(0).values - 1e-9, updates[: len(honest)].max(0).values + 1e-9
    weights = torch.cat([good / good.sum() * (1 - share), bad / bad.sum() * share])
    found = total(agg.Median(), updates, weights)
    assert bool(((found >= low) & (found <= high)).all())
    fraction = min(0.499, share * 1.001 + 1e-6)
    found = total(agg.TrimmedMean(fraction), updates, weights)
    assert bool(((found >= low) & (found <= high)).all())


@settings(max_examples=100)
@given(
    honest=st.lists(st.tuples(st.floats(-1, 1), st.floats(-1, 1)), min_size=7, max_size=9),
    attack=st.lists(st.tuples(anything, anything), min_size=1, max_size=2),
)
def test_krum_stays_near_an_honest_update(honest, attack):
    updates = torch.tensor([*honest, *attack], dtype=torch.float64)
    count, malicious = len(updates), 2
    weights = torch.full((count,), 1 / count, dtype=torch.float64)
    diameter = max(float((updates[i] - updates[j]).norm()) for i, j in itertools.combinations(range(len(honest)), 2))
    for part in (agg.Krum(malicious), agg.GeometricMedian()):
        found = total(part, updates, weights)
        assert bool(torch.isfinite(found).all())
        nearest = float((updates[: len(honest)] - found).norm(dim=1).min())
        assert nearest <= np.sqrt(count - malicious - 2) * diameter + 1e-9


@pytest.mark.parametrize("part", ALL, ids=repr)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_one_poisoned_update_does_not_poison_the_total(part, poison):
    updates, weights, losses = example(9)
    updates[4] = poison
    if part == agg.NormClip(0.7) and not np.isfinite(poison):
        return  # linear: updates are summed as they come, and the round stops
    found = total(part, updates, weights, losses)
    assert bool(torch.isfinite(found).all())
    assert float(found.abs().max()) < 10
    assert bool((total(part, torch.full_like(updates, float("nan")), weights, losses) == 0).all() or part.linear)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: agg.TrimmedMean(0.5), "fraction must lie in [0, 0.5)"),
        (lambda: agg.Krum(-1), "malicious must be a whole number"),
        (lambda: agg.NormClip(0.0), "bound must be a positive number"),
        (lambda: agg.FedMGDA(2.0), "epsilon must lie in [0, 1]"),
        (lambda: total(agg.Krum(3), *example(8)[:2]), "is too large for 8 clients with a weight: Krum needs K ≥ 2f + 3 = 9"),
        (lambda: total(agg.KNorm(8), *example(8)[:2]), "k-norm must leave one"),
        (lambda: total(agg.KLoss(1), *example(8)[:2]), "losses must be given"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(make, words):
    with pytest.raises(InvalidParameter) as caught:
        make()
    assert words in str(caught.value)


# ------------------------------------------------------------------------------------------------------------- in training


@pytest.mark.parametrize("part", ALL, ids=repr)
@pytest.mark.parametrize("risk", [eq.risk.Mean(), eq.risk.Tilted(1.0), eq.risk.QFair(1.0)], ids=repr)
def test_every_aggregator_trains_with_risks_and_engines_agree(part, risk, ragged):
    if type(part) in (eq.aggregators.Krum, eq.aggregators.KLoss) and type(risk) is eq.risk.Tilted:
        pytest.skip("refused: the risk would have no effect")
    algorithm = eq.Algorithm(risk=risk, aggregator=part)
    first, second = (
        eq.train(eq.models.Softmax(4, 3).double(), ragged, algorithm, rounds=3, clients_per_round=8, engine=engine)
        for engine in ("loop", "simulator")
    )
    torch.testing.assert_close(first.params, second.params, rtol=1e-5, atol=1e-7)


def test_a_client_that_sends_nan_is_left_out_and_counted(ragged):
    x = ragged.train.x.clone()
    x[ragged.train.rows(5)] = 1e38  # after a step its scores overflow
    poisoned = FederatedData(eq.ClientSet(x, ragged.train.y, ragged.train.offsets, ragged.train.ids))
    solver = eq.solvers.SGD(lr=0.1, epochs=2)

    def one_round(aggregator):
        algorithm = eq.Algorithm(aggregator=aggregator, solver=solver)
        task = Task.of(eq.models.Softmax(4, 3))
        cohort = eq.sampling.Full()(0, algorithm.base_weights(poisoned.train), clients_per_round=8, seed=0)
        state = ServerState(0, task.layout.read(task.module))
        return run_round(state, algorithm, eq.engines.Simulator().start(task, poisoned), cohort, poisoned.train)

    state, report = one_round(agg.Median())
    assert report.rejected == ("client-5",)
    assert bool(torch.isfinite(state.params).all())
    assert float(state.params.abs().max()) > 0
    state, report = one_round(agg.WeightedMean())  # streamed, and still without it
    assert report.rejected == ("client-5",)
    assert bool(torch.isfinite(state.params).all())
