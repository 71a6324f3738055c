"""Conformal sets: answers by hand, the promise over many draws, and what it does not promise to single clients."""

import itertools
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import equipoise as eq
from equipoise.conformal import ConformalSets, conformal_sets, conformal_threshold, threshold_by_sums
from equipoise.errors import InvalidData, InvalidParameter
from equipoise.privacy import PrivateQuantile, SecureHistogram


def test_thresholds_by_hand():
    scores = torch.arange(1.0, 21.0)
    # Two clients: ⌈0.9 · 22⌉ = 20. Pooled as if they were one: ⌈0.9 · 21⌉ = 19, which is too small.
    assert conformal_threshold(scores, 0.1, clients=2) == 20.0
    assert conformal_threshold(scores, 0.1) == 19.0
    # 8 scores: ⌈0.9 · 9⌉ = 9 > 8: everything. 9 scores are enough, (1 − ζ)/ζ = 9.
    assert conformal_threshold(scores[:8], 0.1) == math.inf
    assert conformal_threshold(scores[:9], 0.1) == 9.0


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 8), min_size=2, max_size=5), min_size=1, max_size=3), st.floats(0.05, 0.6))
def test_coverage_is_at_least_what_was_asked_for(scores, miss):
    # Every client has n_k + 1 scores, one of which, each equally likely, is the test point and the others calibrate. Over all
    # choices, client k's test point counting (n_k + 1)/(N + K), at least 1 − ζ of the test points are covered: exactly counted.
    total, choices, covered = sum(map(len, scores)), 0, 0.0
    for left_out in itertools.product(*(range(len(own)) for own in scores)):
        rest = [s for own, place in zip(scores, left_out, strict=True) for i, s in enumerate(own) if i != place]
        threshold = conformal_threshold(torch.tensor(rest, dtype=torch.float64), miss, len(scores))
        hits = [own[place] <= threshold for own, place in zip(scores, left_out, strict=True)]
        covered += sum(hit * len(own) / total for hit, own in zip(hits, scores, strict=True))
        choices += 1
    assert covered / choices >= 1 - miss - 1e-9


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(2, 5), min_size=1, max_size=3), st.randoms(use_true_random=False), st.floats(0.01, 0.6))
def test_coverage_of_scores_without_ties_lies_between_both_bounds(sizes, order, miss):
    # As above with n_k + 1 = `sizes` and no two scores equal: 1 − ζ ≤ coverage < 1 − ζ + K/(N + K), where N + K = Σ sizes.
    total, clients = sum(sizes), len(sizes)
    ranks = list(range(total))
    order.shuffle(ranks)
    scores = [ranks[sum(sizes[:k]) : sum(sizes[: k + 1])] for k in range(clients)]
    choices, covered = 0, 0  # whole numbers: exact
    for left_out in itertools.product(*(range(size) for size in sizes)):
        rest = [s for own, place in zip(scores, left_out, strict=True) for i, s in enumerate(own) if i != place]
        threshold = conformal_threshold(torch.tensor(rest, dtype=torch.float64), miss, clients)
        covered += sum(len(own) for own, place in zip(scores, left_out, strict=True) if own[place] <= threshold)
        choices += total
    assert 1 - miss - 1e-9 <= covered / choices < 1 - miss + clients / total


class Given(nn.Module):
    """The probability of the true class is in the input."""

    def __init__(self):
        super().__init__()
        self.idle = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        p = x[:, 0].clamp(1e-6, 1 - 1e-6)
        return torch.stack([p.log(), (1 - p).log()], 1) + 0 * self.idle


def packed(scores):
    return [(name, 1 - s.unsqueeze(1), torch.zeros(len(s), dtype=torch.int64)) for name, s in scores.items()]


def test_one_threshold_leaves_a_client_behind():
    # Scores of one client lie below those of the other. Asked for 90 %, one gets 100 %, the other 80 %.
    grid = torch.arange(1, 1001) / 1001
    scores = {"easy": grid / 2, "hard": 0.5 + grid / 2}
    clients = eq.ClientSet.pack(packed(scores))
    data = eq.FederatedData(clients, validation=clients, test=clients, classes=2)
    found = conformal_sets(Given(), data, miss=0.1)
    assert found.coverage.tolist() == pytest.approx([1.0, 0.8], abs=0.005)
    assert (found.worst, found.percentile_10) == pytest.approx((0.8, 0.8), abs=0.005)
    assert found.overall == pytest.approx(0.9, abs=0.005)
    own = conformal_sets(Given(), data, miss=0.1, per_client=True)
    assert own.coverage.tolist() == pytest.approx([0.9, 0.9], abs=0.005)
    assert float(own.slack[0]) == pytest.approx(math.sqrt(0.09 / 1000))
    assert "worst client" in str(found)
    assert {row["client"] for row in own} == {"easy", "hard"}


def test_a_client_with_few_examples_gets_every_class():
    few = eq.ClientSet.pack(packed({"a": torch.linspace(0.1, 0.9, 5)}))
    data = eq.FederatedData(few, validation=few, test=few, classes=2)
    found = conformal_sets(Given(), data, miss=0.1, per_client=True)
    assert found.set_size.tolist() == [2.0]
    assert found.coverage.tolist() == [1.0]


def test_each_client_has_a_rank_of_its_own():
    # ζ = 0.2. Client a has the scores 0.1 … 0.9: ⌈0.8 · 10⌉ = 8, so 0.8. Client b has 0.1 … 0.4: ⌈0.8 · 5⌉ = 4 = (1 − ζ)/ζ, so
    # 0.4. Client c has three, fewer than 4: everything. Together, N + K = 19: ⌈15.2⌉ = 16, the largest of all, 0.9.
    scores = {name: torch.arange(1, count + 1) / 10 for name, count in (("a", 9), ("b", 4), ("c", 3))}
    clients = eq.ClientSet.pack(packed(scores))
    data = eq.FederatedData(clients, validation=clients, test=clients, classes=2)
    own = conformal_sets(Given(), data, miss=0.2, per_client=True)
    assert own.threshold.tolist() == pytest.approx([0.8, 0.4, math.inf], abs=1e-5)
    assert conformal_sets(Given(), data, miss=0.2).threshold.tolist() == pytest.approx([0.9] * 3, abs=1e-5)


def test_a_trained_model():
    data = eq.data.digits(clients=10, split_by="examples", validation=0.3, test=0.3, seed=0)
    result = eq.train(eq.models.Softmax(data.features, data.classes), data, rounds=10, clients_per_round=10, progress=False)
    found = conformal_sets(result.model, data, miss=0.2)
    assert isinstance(found, ConformalSets)
    assert 0.7 < found.overall <= 1.0
    assert not result.model.training


def test_what_cannot_be_calibrated_is_refused():
    apart = eq.data.label_shift(train_clients=5, validation_clients=2, test_clients=2)
    model = eq.models.Softmax(apart.features, apart.classes)
    with pytest.raises(InvalidData, match="has both validation and test examples"):
        conformal_sets(model, apart)
    with pytest.raises(InvalidParameter, match="miss must lie in"):
        conformal_sets(model, apart, miss=0.0)
    with pytest.raises(InvalidData, match="need validation and test examples"):
        conformal_sets(model, eq.FederatedData(apart.train, classes=apart.classes))


@settings(max_examples=25)
@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=40),
    st.sampled_from([0.05, 0.1, 0.3]),
    st.integers(1, 3),
    st.sampled_from([2, 8, 64]),
)
def test_a_threshold_by_sums_covers_no_less_and_a_bin_more_at_most(values, miss, clients, bins):
    scores = torch.tensor(values, dtype=torch.float64)
    exact = conformal_threshold(scores, miss, clients)
    for source in (SecureHistogram(1.0, bins), PrivateQuantile(1.0, bins, sigma=0.0, scale=1)):
        found = threshold_by_sums(scores, miss, clients, source)
        assert found >= exact
        assert found == exact or found <= exact + 1 / bins + 1e-12


def test_sets_by_secure_sums_and_with_noise():
    data = eq.data.digits(clients=6, split_by="examples", validation=0.3, test=0.3, seed=0)
    model = eq.train(eq.models.Softmax(data.features, data.classes), data, rounds=5, clients_per_round=6, progress=False).model
    exact, sums = conformal_sets(model, data), conformal_sets(model, data, quantile=SecureHistogram(1.0, 64))
    assert 0 <= float(sums.threshold[0] - exact.threshold[0]) <= 1 / 64
    assert bool((sums.coverage >= exact.coverage).all())
    noisy = conformal_sets(model, data, quantile=PrivateQuantile(1.0, 32, sigma=0.1, scale=1))
    assert abs(float(noisy.threshold[0] - exact.threshold[0])) < 0.5
    for wrong in ({"quantile": SecureHistogram(0.5, 8)}, {"quantile": SecureHistogram(1.0, 8), "per_client": True}):
        with pytest.raises(InvalidParameter, match="quantile"):
            conformal_sets(model, data, **wrong)
