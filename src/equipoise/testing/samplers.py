"""The law of samplers: who takes part in a round, how often, and with which weight."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from equipoise.core.abilities import is_of_user
from equipoise.core.rng import torch_generator
from equipoise.errors import notify, shown
from equipoise.runs.inclusion_rules import INCLUSION, INCLUSION_CURE, wrong_inclusion
from equipoise.runs.own_parts import SAMPLER_CALL
from equipoise.testing.laws import accepts, agree, check_of, hold, without_error
from equipoise.types import Cohort, Sampler

AS_STATED = "clients take part as often as their inclusion says"
SIZE_STATED = "the inclusion of all clients of a round adds up to the mean size of its cohorts"
ALL_OR_NONE = "a sampler states the inclusion of all its cohorts, or of none"
_ROUNDS = (0, 1, 9, 1000)
_FALSE_ALARM = 1e-6  # the probability that a check of frequencies refuses a true inclusion, at most
_ALARM = -math.log(_FALSE_ALARM)
_DEVIATIONS = 6.0  # of a mean size; less than 1e-8 of a normal distribution lies beyond
_SUM_SLACK = 1e-3  # of the mean size: an inclusion that was found by simulation is not exact
_FEW = 5  # clients per round below which weights within a cohort say little about base weights
_FOLLOWS = 0.3  # the slope of mean weights over base weights; 1 if a client counts by its base weight, 0 if all count alike


@dataclass
class _Seen:
    """What some cohorts of one round, or of several, held."""

    clients: int
    cohorts: int = 0
    counts: Tensor = field(init=False)  # (n,) in how many cohorts a client was
    stated: Tensor = field(init=False)  # (n,) sums of the inclusion that these cohorts state for it
    weights: Tensor = field(init=False)  # (n,) sums of its weights
    sizes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counts, self.stated, self.weights = torch.zeros(3, self.clients, dtype=torch.float64).unbind()

    def add(self, cohort: Cohort) -> None:
        """Count a cohort."""
        self.cohorts += 1
        self.sizes.append(len(cohort))
        self.counts[cohort.clients] += 1
        self.weights[cohort.clients] += cohort.weights
        if cohort.inclusion is not None:
            self.stated[cohort.clients] += cohort.inclusion.double()

    @property
    def inclusion(self) -> Tensor:
        """The mean stated inclusion of each client, (n,); 0 for clients in no cohort."""
        return (self.stated / self.counts.clamp(min=1)).clamp(max=1)


@check_of("a sampler", "__call__", cure=f"Write {SAMPLER_CALL}, which returns a Cohort.")
def check_sampler(sampler: Sampler, *, clients: int = 20, clients_per_round: int = 6, draws: int = 1000, seed: int = 0) -> None:
    """Distinct clients with positive weights that sum to 1; a pure function of seed and round; stated inclusion is true.

    Inclusion may change from round to round, so it is held against `draws` seeds at each of four rounds, and against all four
    together; a client that no cohort of a round holds has inclusion 0 in it. Frequencies refuse a true inclusion with a
    probability of at most 10⁻⁶ (Chernoff's bound, if cohorts of different seeds are independent). Over all clients inclusion
    adds up to the mean size of a cohort. A sampler that does not know it states None in every cohort. Over `draws` rounds,
    one seed must choose a client as often as another.

    A notice names clients that are in no cohort at all, and says if the mean weights of clients do not follow their base
    weights. Both are allowed.

    >>> import equipoise as eq
    >>> check_sampler(eq.sampling.Uniform(), draws=100)  # nothing is returned: all laws hold
    """
    accepts(sampler, sampler, SAMPLER_CALL, (0, 0), clients_per_round=1, seed=0)
    alpha = torch.rand(clients, generator=torch_generator(seed, "check_sampler"), dtype=torch.float64) + 0.1
    alpha = alpha / alpha.sum()
    known: set[bool] = set()

    def draw(round_index: int, own_seed: int) -> Cohort:
        law = f"it draws a cohort of about {clients_per_round} of {clients} clients, in any round and at any seed"
        fix = "If it needs others, call check_sampler(…, clients=…, clients_per_round=…)."
        with without_error(sampler, law, f"round {round_index} gives ", fix):
            cohort = sampler(round_index, alpha, clients_per_round=clients_per_round, seed=own_seed)
        hold(isinstance(cohort, Cohort), sampler, "a sampler returns a Cohort", type(cohort).__name__)
        _check_cohort(sampler, cohort, round_index, own_seed, clients)
        if len(cohort):
            known.add(cohort.inclusion is not None)
            hold(len(known) == 1, sampler, ALL_OR_NONE, f"round {round_index}, seed {own_seed} differs from others")
        return cohort

    every, stated, unseen = _Seen(clients), torch.zeros(clients, dtype=torch.float64), 0
    for place, index in enumerate(_ROUNDS):
        here = _Seen(clients)
        for own_seed in range(seed + place * draws, seed + (place + 1) * draws):  # cohorts of one seed may go together
            cohort = draw(index, own_seed)
            here.add(cohort)
            every.add(cohort)
        if known == {True}:
            _check_frequencies(sampler, here, here.inclusion, f"round {index}")
            _check_sum(sampler, here, here.inclusion, int((here.counts == 0).sum()), f"round {index}")
        stated += here.inclusion / len(_ROUNDS)  # which may differ from round to round
        unseen += int((here.counts == 0).sum())
    if known == {True}:
        where = f"rounds {', '.join(map(str, _ROUNDS))}"
        _check_frequencies(sampler, every, stated, where)
        _check_sum(sampler, every, stated, unseen, where)
    agree(sampler, "a cohort is a function of seed and round alone", draw(1, seed).clients, draw(1, seed).clients)
    first, second = _Seen(clients), _Seen(clients)
    for index in range(draws):
        first.add(draw(index, seed))
        second.add(draw(index, seed + 1))
    # A count has a variance of at most draws/4, so five standard deviations of the difference of two are at most this.
    apart, limit = (first.counts - second.counts).abs(), 5 * math.sqrt(draws / 2)
    worst = int(apart.argmax())
    counted = f"client {worst} is in {int(first.counts[worst])} and {int(second.counts[worst])} cohorts of {draws}"
    hold((apart <= limit).all(), sampler, "over many rounds clients take part as often as at another seed", counted)
    if is_of_user(sampler):
        _tell_of_absent(sampler, every.counts + first.counts + second.counts, every.cohorts + 2 * draws, clients_per_round)
        if clients_per_round >= _FEW:
            _tell_of_base_weights(sampler, every.weights, alpha)


def _check_cohort(sampler: Sampler, cohort: Cohort, round_index: int, seed: int, clients: int) -> None:
    carried = (cohort.round, cohort.seed)
    hold(carried == (round_index, seed), sampler, "a cohort carries its round and seed", carried)
    if len(cohort) == 0:
        return
    hold(len(set(cohort.clients.tolist())) == len(cohort), sampler, "clients of a cohort are distinct", cohort.clients)
    in_range = int(cohort.clients.min()) >= 0 and int(cohort.clients.max()) < clients
    hold(in_range, sampler, "positions are in range", cohort.clients)
    good = bool((cohort.weights > 0).all()) and abs(float(cohort.weights.sum()) - 1) < 1e-9
    hold(good, sampler, "weights are positive and sum to 1", cohort.weights)
    stated = wrong_inclusion(cohort)
    hold(not stated, sampler, INCLUSION, stated, INCLUSION_CURE)


def _check_frequencies(sampler: Sampler, seen: _Seen, stated: Tensor, where: str) -> None:
    """Each client's share of N cohorts against its inclusion p: a share q or beyond has a probability ≤ 2 exp(−N KL(q‖p))."""
    found = seen.counts / seen.cohorts
    far = torch.xlogy(found, found / stated) + torch.xlogy(1 - found, (1 - found) / (1 - stated))
    unlikely = seen.cohorts * far.nan_to_num(0.0, math.inf) > _ALARM + math.log(2 * seen.clients * (len(_ROUNDS) + 1))
    wrong = unlikely & (seen.counts > 0)
    if not bool(wrong.any()):
        return
    worst = int(torch.where(wrong, (found - stated).abs(), -1.0).argmax())
    others = int(wrong.sum()) - 1
    shown_share = f"client {worst} is in {found[worst]:.3g} of {seen.cohorts} cohorts, and {stated[worst]:.3g} is stated"
    more = f"; {others} other client{'s' * (others > 1)} differ{'s' * (others == 1)}, too" * (others > 0)
    hold(False, sampler, AS_STATED, f"{where}: {shown_share}{more}", INCLUSION_CURE)


def _check_sum(sampler: Sampler, seen: _Seen, stated: Tensor, unseen: int, where: str) -> None:
    """Inclusion adds up to the mean size of a cohort; what is missing must belong to clients that chance alone left out.

    `unseen` counts the clients of each round that no cohort of it held.
    """
    sizes = torch.tensor(seen.sizes, dtype=torch.float64)
    mean, deviation = float(sizes.mean()), float(sizes.std(unbiased=False)) / math.sqrt(len(sizes))
    missing = mean - float(stated.sum())
    rare = mean * _ALARM / seen.cohorts  # sizes that are so rare that chance left them out
    if abs(missing) <= _SUM_SLACK * mean + _DEVIATIONS * deviation + rare:
        return
    # Of the clients that were not drawn one has an inclusion of at least missing / unseen, and was left out every time.
    if missing > 0 and unseen and seen.cohorts * missing / unseen < _ALARM:
        return
    never = (seen.counts == 0).nonzero().flatten().tolist()
    absent = f", and {_named(never)} in no cohort" if never else ""
    case = f"{where}: it adds up to {mean - missing:.4g}, {seen.cohorts} cohorts have {mean:.4g} clients on average{absent}"
    hold(False, sampler, SIZE_STATED, case, INCLUSION_CURE)


def _named(places: list[int]) -> str:
    """Clients by their positions, of many the first three and their number, with the verb."""
    if len(places) == 1:
        return f"client {places[0]} is"
    rest = f", … ({len(places)} clients)" if len(places) > 3 else ""
    return f"clients {', '.join(map(str, places[:3]))}{rest} are"


def _tell_of_absent(sampler: Sampler, counts: Tensor, cohorts: int, clients_per_round: int) -> None:
    """Give a notice if clients are in no cohort of any round."""
    absent = (counts == 0).nonzero().flatten().tolist()
    if absent and cohorts * clients_per_round >= 20 * len(counts):  # else chance may have left them out
        notify(
            f"{_named(absent).capitalize()} in none of {cohorts} cohorts that {shown(sampler)} drew for {len(counts)} clients: "
            "their data would never be used. If you want to draw them, look for an end of a range that is 1 too small."
        )


def _tell_of_base_weights(sampler: Sampler, weights: Tensor, alpha: Tensor) -> None:
    """Give a notice if the mean weights of clients do not follow their base weights."""
    spread = alpha - alpha.mean()
    slope = float(weights / weights.sum() @ spread) / float(spread @ spread)
    if slope < _FOLLOWS:
        notify(
            f"The mean weights of clients in cohorts of {shown(sampler)} do not follow their base weights (slope {slope:.2f}, "
            "and 1 if they do): clients with few examples count as much as others, or more. If you want another mean, this is "
            "right. Otherwise give alpha[clients] / alpha[clients].sum() as weights, unless clients are drawn by alpha."
        )
