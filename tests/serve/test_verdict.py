"""Which model serves a client best, and what few examples do not settle."""

import numpy as np
import pytest
from scipy import stats

from equipoise.serve.verdict import judge, share_interval, student_interval


def test_intervals_are_those_of_the_textbooks():
    values = np.array([1.0, 2.0, 4.0, 7.0])
    wanted = stats.t.interval(0.95, 3, values.mean(), stats.sem(values))
    assert tuple(vars(student_interval(values)).values()) == pytest.approx(wanted)
    exact = stats.binomtest(3, 12).proportion_ci(0.95, "exact")
    assert tuple(vars(share_interval(3, 12)).values()) == pytest.approx((exact.low, exact.high))
    assert share_interval(0, 5).low == 0.0
    assert share_interval(5, 5).high == 1.0


def test_one_example_settles_nothing():
    found = judge([np.array([0.2]), np.array([3.0])], [np.zeros(1), np.ones(1)])
    assert (found.best, found.open) == (0, (1,))
    assert found.members[1].behind.low == -np.inf


def test_pairs_are_compared_example_by_example():
    hard = np.linspace(0, 5, 30)  # examples differ much more than models do
    found = judge([hard + 0.1, hard], [np.ones(30), np.full(30, 0.5)])
    assert (found.best, found.open) == (1, ())
    assert found.members[0].interval.low < found.members[1].interval.high  # intervals of means alone would not tell
    assert found.members[0].wrong == 30
    assert found.members[1].wrong is None


@pytest.mark.parametrize("examples", [4, 12])
def test_the_best_model_is_kept_open_in_95_of_100_samples(examples):
    """Four models that are equally good in truth: any of them that is called worse is a mistake about the best."""
    rng = np.random.default_rng(0)
    kept = 0
    for _ in range(400):
        shared = rng.exponential(1.0, examples)
        found = judge([shared + rng.normal(0, 0.4, examples) for _ in range(4)], [np.zeros(examples)] * 4)
        kept += found.best == 0 or 0 in found.open
    assert kept / 400 >= 0.95 - 2 * (0.95 * 0.05 / 400) ** 0.5
    assert kept < 400  # the interval is not so wide that it says nothing
