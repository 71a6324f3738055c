import pytest
import torch

from equipoise.errors import InvalidParameter
from equipoise.sampling import Full, Poisson, Proportional, Uniform


def alpha(*values):
    weights = torch.tensor(values, dtype=torch.float64)
    return weights / weights.sum()


def test_uniform_weights_are_base_weights_inside_the_cohort():
    base = alpha(1, 2, 3, 4)
    cohort = Uniform()(7, base, clients_per_round=2, seed=0)
    assert len(cohort) == 2
    torch.testing.assert_close(cohort.weights, base[cohort.clients] / base[cohort.clients].sum())
    assert cohort.inclusion.tolist() == [0.5, 0.5]


def test_proportional_counts_repeated_draws_as_weight():
    # Client 0 has almost all the weight, so it is drawn several times and trained once.
    cohort = Proportional()(0, alpha(97, 1, 1, 1), clients_per_round=10, seed=0)
    place = cohort.clients.tolist().index(0)
    assert float(cohort.weights[place]) * 10 == pytest.approx(round(float(cohort.weights[place]) * 10))
    assert float(cohort.weights[place]) >= 0.7


def test_proportional_averages_to_the_base_weights():
    base, total = alpha(1, 2, 3, 4), torch.zeros(4, dtype=torch.float64)
    for index in range(4000):
        cohort = Proportional()(index, base, clients_per_round=5, seed=1)
        total[cohort.clients] += cohort.weights
    torch.testing.assert_close(total / 4000, base, atol=0.015, rtol=0)


def test_poisson_sizes_vary_around_the_rate():
    sizes = [len(Poisson()(i, alpha(*[1] * 50), clients_per_round=10, seed=0)) for i in range(400)]
    assert len(set(sizes)) > 5
    assert sum(sizes) / 400 == pytest.approx(10, abs=0.8)


def test_full_takes_everyone_in_order():
    cohort = Full()(3, alpha(1, 1, 2), clients_per_round=1, seed=0)
    assert cohort.clients.tolist() == [0, 1, 2]
    assert cohort.weights.tolist() == [0.25, 0.25, 0.5]


@pytest.mark.parametrize("sampler", [Uniform(), Poisson()])
@pytest.mark.parametrize("count", [0, -1, 4])
def test_impossible_cohorts_are_refused(sampler, count):
    with pytest.raises(
        InvalidParameter, match="clients_per_round must be a whole number between 1 and the number of training clients, 3"
    ):
        sampler(0, alpha(1, 1, 1), clients_per_round=count, seed=0)


def test_cohorts_are_those_of_the_seed_and_round_and_nothing_else():
    base = alpha(*range(1, 31))
    first = [Uniform()(i, base, clients_per_round=5, seed=0).clients.tolist() for i in range(6)]
    torch.manual_seed(1)
    again = [Uniform()(i, base, clients_per_round=5, seed=0).clients.tolist() for i in reversed(range(6))]
    assert first == again[::-1]
    assert len({tuple(c) for c in first}) == 6
    assert first[0] != Uniform()(0, base, clients_per_round=5, seed=1).clients.tolist()
