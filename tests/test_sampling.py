import math
from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from equipoise.errors import InvalidParameter
from equipoise.sampling import Availability, Full, MinSeparation, Poisson, Proportional, Uniform


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


def test_a_share_draws_that_many_clients_of_the_round_rounded_but_at_least_one():
    base = alpha(*[1] * 10)
    sizes = [len(Uniform(share=share)(0, base, clients_per_round=6, seed=0)) for share in (1.0, 0.5, 0.26, 0.01)]
    assert sizes == [6, 3, 2, 1]
    assert Uniform(share=0.5)(0, base, clients_per_round=6, seed=0).inclusion.tolist() == [0.3] * 3


@pytest.mark.parametrize("share", [0, -0.5, 1.5, float("nan"), True, "half"])
@pytest.mark.parametrize("sampler", [Uniform, Availability])
def test_a_share_lies_between_nothing_and_all(sampler, share):
    with pytest.raises(InvalidParameter, match=r"share must lie in \(0, 1\]"):
        sampler(share=share)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"day": 0}, "day must be a whole number of rounds"),
        ({"day": 1.5}, "day must be a whole number of rounds"),
        ({"aligned": 1.1}, r"aligned must lie in \[0, 1\]"),
        ({"aligned": float("nan")}, r"aligned must lie in \[0, 1\]"),
        ({"schedule": -1}, "schedule must be a whole number"),
        ({"schedule": 0.5}, "schedule must be a whole number"),
    ],
)
def test_impossible_days_are_refused(wrong, words):
    with pytest.raises(InvalidParameter, match=words):
        Availability(**wrong)


def presence(sampler, n=400, days=1):
    return torch.stack([sampler.there(i, n) for i in range(days * sampler.day)])  # (rounds, n)


def test_a_client_is_there_in_one_window_of_every_day():
    sampler = Availability(day=24, share=0.5, aligned=0.0)
    there = presence(sampler, days=2)
    assert there[:24].equal(there[24:])
    arrivals = (there & ~there.roll(1, 0))[:24].sum(0)
    assert arrivals.max() == 1  # one window, also where it goes on after midnight
    assert (there[0] & there[23]).any()
    hours = there[:24].sum(0)
    assert hours.min() >= 5  # from 0.25 to 0.75 of the day, up to a round
    assert hours.max() <= 18
    assert float(hours.double().mean()) == pytest.approx(12, abs=0.5)


def test_time_zones_spread_clients_and_alignment_gathers_them():
    spread, together = (presence(Availability(aligned=aligned)).double().mean(1) for aligned in (0.0, 1.0))
    assert float(spread.max() - spread.min()) < 0.15
    assert float(together[:6].min()) == 1.0  # all come at the first hour, and the shortest window is a quarter of the day
    assert float(together[18:].max()) == 0.0


def test_the_whole_day_at_the_longest():
    hours = presence(Availability(share=1.0, aligned=0.0)).sum(0)
    assert hours.max() == 24
    assert float((hours == 24).double().mean()) == pytest.approx(0.5, abs=0.1)


def test_the_schedule_is_the_populations_and_not_the_runs():
    base, sampler = alpha(*[1] * 40), Availability(schedule=1)
    for index in range(24):
        there = set(sampler.there(index, 40).nonzero().squeeze(1).tolist())
        for seed in (0, 1):
            assert set(sampler(index, base, clients_per_round=5, seed=seed).clients.tolist()) <= there
    assert not presence(sampler).equal(presence(Availability(schedule=2)))
    assert sampler.there(7, 10).equal(sampler.there(7, 40)[:10])  # later clients change nothing


def test_few_clients_all_take_part_and_none_gives_an_empty_cohort():
    base, sampler = alpha(*range(1, 21)), Availability(share=0.3, aligned=1.0)
    sizes = set()
    for index in range(24):
        cohort, there = sampler(index, base, clients_per_round=8, seed=0), sampler.there(index, 20)
        present = int(there.sum())
        assert len(cohort) == min(8, present)
        assert cohort.inclusion.tolist() == [min(1.0, 8 / max(present, 1))] * len(cohort)
        if present <= 8:
            assert cohort.clients.equal(there.nonzero().squeeze(1))
        sizes.add(len(cohort))
    assert {0, 8} < sizes
    assert sampler(23, base, clients_per_round=8, seed=0).clients.dtype == torch.int64


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 23), st.integers(0, 2**40))
def test_rounds_of_one_client_keep_their_separation(data, apart, rounds, seed):
    # Client k is in one of `apart` groups whose turns come every `apart` rounds: at most ⌈T/apart⌉ in T rounds.
    count = data.draw(st.integers(apart, 4 * apart))
    size = data.draw(st.integers(1, count // apart))
    sampler, taken = MinSeparation(apart), {}
    for t in range(rounds):
        cohort = sampler(t, torch.full((count,), 1 / count, dtype=torch.float64), clients_per_round=size, seed=seed)
        assert len(set(cohort.clients.tolist())) == size
        for client in cohort.clients.tolist():
            taken.setdefault(client, []).append(t)
    assert all(later - earlier >= sampler.separation for own in taken.values() for earlier, later in pairwise(own))
    assert max(map(len, taken.values())) <= sampler.participations(rounds) == math.ceil(rounds / apart)
