"""What `check_sampler` and `train` find in samplers: inclusion that is untrue, unknown or no probability, absent clients."""

import pytest
import torch

import equipoise as eq
from equipoise.errors import InvalidParameter
from equipoise.testing import LawBroken, check_sampler
from equipoise.types import Cohort


def drawing(choose, inclusion, weigh=lambda alpha, clients: alpha[clients]):
    """A sampler by (alpha, m, generator) -> positions, (alpha, positions) -> inclusion and (alpha, positions) -> weights."""

    class Drawing:
        def __call__(self, round_index, alpha, *, clients_per_round, seed):
            random = torch.Generator().manual_seed(seed * 9973 + round_index)
            clients = choose(alpha, clients_per_round, random).sort().values
            weights = weigh(alpha, clients)
            return Cohort(round_index, seed, clients, weights / weights.sum(), inclusion(alpha, clients))

    return Drawing()


def uniformly(alpha, m, random):
    return torch.randperm(len(alpha), generator=random)[:m]


def never_the_last(alpha, m, random):
    return torch.randperm(len(alpha) - 1, generator=random)[:m]


def in_proportion(alpha, m, random):
    """Without replacement: the m largest of log α plus Gumbel noise; inclusion has no closed form."""
    uniform = torch.rand(len(alpha), generator=random, dtype=torch.float64)
    return (alpha.log() - (-uniform.log()).log()).topk(m).indices


def share(clients_less=0, factor=1.0):
    return lambda alpha, clients: torch.full((len(clients),), factor * len(clients) / (len(alpha) - clients_less)).double()


def alike(alpha, clients):
    return torch.ones(len(clients), dtype=torch.float64)


def test_good_samplers_pass_without_a_notice(recwarn):
    check_sampler(drawing(uniformly, share()))
    check_sampler(drawing(in_proportion, lambda alpha, clients: None, alike))
    assert not list(recwarn)


def test_a_client_that_is_never_drawn_is_found_by_the_sum_of_inclusion():
    # 19 clients with an inclusion of 6/20 add up to 5.7, and every cohort has 6.
    for draws in (100, 1000):
        with pytest.raises(LawBroken, match="adds up to the mean size") as caught:
            check_sampler(drawing(never_the_last, share()), draws=draws)
        assert "adds up to 5.7, " in str(caught.value)
        assert "cohorts have 6 clients on average, and client 19 is in no cohort" in str(caught.value)


def test_a_client_that_is_never_drawn_at_true_inclusion_gets_a_notice(recwarn):
    check_sampler(drawing(never_the_last, share(clients_less=1)))
    assert [str(each.message).startswith("Client 19 is in none of 6000 cohorts") for each in recwarn] == [True]


def test_weights_that_do_not_follow_base_weights_get_a_notice(recwarn):
    check_sampler(drawing(uniformly, share(), alike))
    assert ["do not follow their base weights" in str(each.message) for each in recwarn] == [True]


def test_a_wrong_inclusion_is_told_in_short():
    # 3/20 stated, 6/20 true: at one round each of the 20 clients differs
    with pytest.raises(LawBroken, match="as often as their inclusion says") as caught:
        check_sampler(drawing(uniformly, share(factor=0.5)))
    assert "and 0.15 is stated; 19 other clients differ, too" in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("draws", [20, 100])
def test_true_inclusion_is_hardly_ever_refused(draws):
    for seed in range(5):
        for sampler in (eq.sampling.Uniform(), eq.sampling.Poisson(), eq.sampling.Proportional(), eq.sampling.Availability()):
            check_sampler(sampler, draws=draws, seed=seed, clients=10, clients_per_round=2)


NO_PROBABILITY = {
    "NaN": (lambda alpha, clients: torch.full((len(clients),), torch.nan).double(), "Found: nan"),
    "zero": (lambda alpha, clients: torch.zeros(len(clients)).double(), "Found: 0"),
    "above 1": (lambda alpha, clients: torch.full((len(clients),), 1.5).double(), "Found: 1.5"),
    "a list": (lambda alpha, clients: [0.5] * len(clients), "Found: a value of type list"),
    "one number": (lambda alpha, clients: torch.tensor(0.5).double(), "Found: the shape ()"),
}


@pytest.mark.parametrize(("inclusion", "found"), NO_PROBABILITY.values(), ids=NO_PROBABILITY)
def test_inclusion_that_is_no_probability_is_refused_by_check_and_by_train(inclusion, found, ragged):
    sampler = drawing(uniformly, inclusion)
    with pytest.raises(LawBroken, match="inclusion is one probability per client") as law:
        check_sampler(sampler)
    with pytest.raises(InvalidParameter, match="inclusion is one probability per client") as refused:
        eq.train(eq.models.Softmax(4, 3), ragged, eq.Algorithm(sampler=sampler), rounds=1, clients_per_round=4, progress=False)
    for caught in (law, refused):
        assert found in str(caught.value)
        assert "inclusion=None" in str(caught.value)


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_a_run_needs_no_inclusion(engine, ragged):
    models = []
    for inclusion in (share(), lambda alpha, clients: None):
        algorithm = eq.Algorithm(sampler=drawing(uniformly, inclusion), risk=eq.risk.Superquantile(tail=0.5))
        model = eq.models.Softmax(4, 3)
        models.append(eq.train(model, ragged, algorithm, rounds=3, clients_per_round=4, engine=engine, progress=False).params)
    assert torch.equal(*models)


def test_inclusion_is_known_for_all_cohorts_or_for_none():
    turns = drawing(uniformly, lambda alpha, clients: None if int(clients[0]) else share()(alpha, clients))
    with pytest.raises(LawBroken, match="of all its cohorts, or of none"):
        check_sampler(turns)


def test_a_sub_cohort_without_inclusion_has_none():
    weights = torch.full((4,), 0.25, dtype=torch.float64)
    assert Cohort(0, 0, torch.arange(4), weights, None).take(torch.tensor([0, 2])).inclusion is None
