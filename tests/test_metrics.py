import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from scipy import stats

from equipoise import metrics
from equipoise.errors import InvalidParameter

values = st.lists(st.floats(0, 1, width=32), min_size=1, max_size=30).map(lambda v: torch.tensor(v, dtype=torch.float64))


@given(values, st.sampled_from(metrics.PERCENTILES))
def test_percentile_is_the_inverted_distribution_function(v, percent):
    assert metrics.percentile(v, percent) == np.percentile(v.numpy(), percent, method="inverted_cdf")


def test_percentiles_by_hand():
    v = torch.arange(1.0, 101.0)
    assert [metrics.percentile(v, p) for p in (0, 10, 50, 90, 95, 100)] == [1, 10, 50, 90, 95, 100]
    # Half of the weight lies on the first of two clients.
    assert metrics.percentile(torch.tensor([1.0, 2.0]), 70, torch.tensor([3.0, 1.0])) == 1.0
    assert metrics.percentile(torch.tensor([1.0, 2.0]), 80, torch.tensor([3.0, 1.0])) == 2.0


def test_worst_and_best_by_hand():
    v = torch.arange(1.0, 21.0)
    assert metrics.worst(v, 0.1) == pytest.approx(19.5)
    assert metrics.best(v, 0.1) == pytest.approx(1.5)
    assert metrics.worst(v, 0.05) == pytest.approx(20.0)
    assert metrics.worst(v, 1.0) == pytest.approx(10.5)
    # 10 % of 5 clients is half a client: the worst one alone.
    assert metrics.worst(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), 0.1) == pytest.approx(5.0)


@given(values)
def test_spread_against_numpy(v):
    assert metrics.mean(v) == pytest.approx(v.numpy().mean(), abs=1e-12)
    assert metrics.standard_deviation(v) == pytest.approx(v.numpy().std(), abs=1e-9)


@given(values)
def test_gini_against_its_definition(v):
    total = float(v.sum())
    pairs = float((v.unsqueeze(0) - v.unsqueeze(1)).abs().sum())
    expected = pairs / (2 * len(v) * total) if total > 0 else 0.0
    assert metrics.gini(v) == pytest.approx(expected, abs=1e-9)


def test_uniformity_by_hand():
    equal, one = torch.full((4,), 0.3), torch.tensor([0.0, 0.0, 0.0, 1.0])
    assert metrics.angle(equal) == pytest.approx(0.0, abs=1e-4)
    assert metrics.angle(one) == pytest.approx(60.0)  # cosine 1/2
    assert metrics.entropy(equal) == pytest.approx(math.log(4))
    assert metrics.kl_to_uniform(one) == pytest.approx(math.log(4))
    assert metrics.kl_to_uniform(equal) == pytest.approx(0.0, abs=1e-9)
    assert metrics.gini(one) == pytest.approx(0.75)
    zero = torch.zeros(3)
    assert (metrics.angle(zero), metrics.gini(zero), metrics.kl_to_uniform(zero)) == (0.0, 0.0, 0.0)


def test_rank_correlation_against_scipy():
    gen = torch.Generator().manual_seed(0)
    v, sizes = torch.randint(0, 8, (40,), generator=gen).double(), torch.randint(1, 9, (40,), generator=gen)
    assert metrics.rank_correlation(v, sizes) == pytest.approx(stats.spearmanr(v.numpy(), sizes.numpy()).statistic)
    assert metrics.rank_correlation(v, torch.ones(40)) == 0.0


def test_summary_weighs_clients_and_examples():
    v, sizes = torch.tensor([0.0, 1.0], dtype=torch.float64), torch.tensor([30, 10])
    plain, weighted = metrics.summarise(v, sizes), metrics.summarise(v, sizes, sizes)
    assert (plain.mean, plain.mean_by_example) == (0.5, 0.25)
    assert weighted.mean == 0.25
    assert plain.variance == pytest.approx(0.25)
    assert plain.size_correlation == pytest.approx(-1.0)
    assert math.isnan(metrics.summarise(-v, sizes).gini)
    assert plain.as_dict()["clients"] == plain.clients == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda: metrics.mean(torch.empty(0)),
        lambda: metrics.percentile(torch.ones(2), 101),
        lambda: metrics.worst(torch.ones(2), 0.0),
        lambda: metrics.gini(torch.tensor([-1.0, 1.0])),
        lambda: metrics.entropy(torch.tensor([-1.0, 1.0])),
        lambda: metrics.mean(torch.ones(2), torch.ones(3)),
        lambda: metrics.mean(torch.ones(2), torch.tensor([1.0, -1.0])),
    ],
)
def test_bad_input_is_refused(call):
    with pytest.raises(InvalidParameter):
        call()


@pytest.mark.parametrize("percent", [True, -1, 101, float("nan"), "90"])
def test_a_percentile_needs_a_number(percent):
    for figure in (metrics.percentile, metrics.percentile_interval):
        with pytest.raises(InvalidParameter, match=r"percent must lie in \[0, 100\]"):
            figure(torch.arange(9.0), percent)
    with pytest.raises(InvalidParameter, match="share must lie in"):
        metrics.worst(torch.arange(9.0), True)
