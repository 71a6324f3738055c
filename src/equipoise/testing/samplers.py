"""The laws of samplers: who takes part in a round, how often, and with which weight."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from equipoise.core.abilities import is_of_user
from equipoise.core.rng import torch_generator
from equipoise.errors import notify, shown
from equipoise.testing.laws import Tried, check_of
from equipoise.types import Cohort, Sampler

SAMPLER_CALL = "sampler(round_index, alpha, clients_per_round=…, seed=…)"
ROUNDS = (0, 1, 9, 1000)
ALARM = -math.log(1e-6)  # of the probability that a check of frequencies refuses a true inclusion, at most
DEVIATIONS = 6.0  # of a mean size; less than 1e-8 of a normal distribution lies beyond
SUM_SLACK = 1e-3  # of the mean size: an inclusion that was found by simulation is not exact
FEW = 5  # clients per round below which weights within a cohort say little about base weights
FOLLOWS = 0.3  # the slope of mean weights over base weights; 1 if a client counts by its base weight, 0 if all count alike


@dataclass(frozen=True, eq=False)
class TriedSampler(Tried):
    """A sampler, asked for cohorts of clients with these base weights."""

    alpha: Tensor = field(default_factory=lambda: torch.zeros(0))
    clients_per_round: int = 6

    def draw(self, round_index: int, seed: int) -> Cohort:
        """A cohort, of the right form."""
        counts = {"clients_per_round": self.clients_per_round, "clients": len(self.alpha)}
        with self.without_error("draws", f"round {round_index} gives ", **counts):
            cohort = self.part(round_index, self.alpha.clone(), clients_per_round=self.clients_per_round, seed=seed)
        self.hold(isinstance(cohort, Cohort), "cohort", type(cohort).__name__)
        self.hold((cohort.round, cohort.seed) == (round_index, seed), "round_and_seed", (cohort.round, cohort.seed))
        if not len(cohort):
            return cohort  # type: ignore[no-any-return]
        clients = cohort.clients.tolist()
        self.hold(len(set(clients)) == len(cohort), "distinct", clients[:9])
        self.hold(min(clients) >= 0 and max(clients) < len(self.alpha), "in_range", clients[:9])
        good = bool((cohort.weights > 0).all()) and abs(float(cohort.weights.sum()) - 1) < (1e-6 if self.quick else 1e-9)
        self.hold(good, "shares", cohort.weights.tolist()[:9])
        stated: Any = cohort.inclusion
        if stated is not None:
            tensor = isinstance(stated, Tensor) and stated.shape == cohort.clients.shape
            self.hold(tensor, "inclusion", f"{type(stated).__name__} of shape {tuple(getattr(stated, 'shape', ()))}")
            wrong = stated[~((stated > 0) & (stated <= 1 + 1e-6))].tolist()
            self.hold(not wrong, "inclusion", f"{wrong[0] if wrong else 0:.4g}")
        return cohort  # type: ignore[no-any-return]


def function_of_seed(case: TriedSampler, seed: int) -> None:
    """One cohort, drawn twice."""
    first, again = case.draw(1, seed).clients, case.draw(1, seed).clients
    case.hold(torch.equal(first, again), "function_of_seed", (first.tolist()[:9], again.tolist()[:9]))


def try_sampler(sampler: Any, alpha: Tensor, clients_per_round: int, seed: int) -> None:
    """The quick trial of a sampler: one cohort, drawn twice."""
    case = TriedSampler(sampler, True, alpha=alpha, clients_per_round=clients_per_round)
    case.accepts(case.part, SAMPLER_CALL, 0, alpha, clients_per_round=1, seed=0)
    function_of_seed(case, seed)


@check_of("a sampler", "__call__", fix=f"Write {SAMPLER_CALL}, which returns a Cohort.")
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
    alpha = torch.rand(clients, generator=torch_generator(seed, "check_sampler"), dtype=torch.float64) + 0.1
    case = TriedSampler(sampler, seed=seed, alpha=alpha / alpha.sum(), clients_per_round=clients_per_round)
    case.accepts(case.part, SAMPLER_CALL, 0, 0, clients_per_round=1, seed=0)
    here = [
        _Seen(case, [case.draw(index, own) for own in range(seed + place * draws, seed + (place + 1) * draws)])
        for place, index in enumerate(ROUNDS)  # cohorts of one seed may go together
    ]
    every = _Seen(case, [cohort for each in here for cohort in each.cohorts])
    known = {cohort.inclusion is not None for cohort in every.cohorts if len(cohort)}
    case.hold(len(known) < 2, "inclusion_of_all")
    if known == {True}:
        for index, seen in zip(ROUNDS, here, strict=True):
            seen.check(f"round {index}", seen.inclusion, int((seen.counts == 0).sum()))
        stated = torch.stack([each.inclusion for each in here]).mean(0)  # which may differ from round to round
        every.check("all rounds", stated, sum(int((each.counts == 0).sum()) for each in here))
    function_of_seed(case, seed)
    first, second = (_Seen(case, [case.draw(index, own) for index in range(draws)]) for own in (seed, seed + 1))
    # A count has a variance of at most draws/4, so five standard deviations of the difference of two are at most this.
    apart, limit = (first.counts - second.counts).abs(), 5 * math.sqrt(draws / 2)
    worst = int(apart.argmax())
    counted = f"client {worst} is in {int(first.counts[worst])} and {int(second.counts[worst])} cohorts of {draws}"
    case.hold((apart <= limit).all(), "seeds_alike", counted)
    if is_of_user(sampler):
        _tell(case, every.counts + first.counts + second.counts, every.weights, len(every.cohorts) + 2 * draws)


class _Seen:
    """What some cohorts hold: in how many a client is, its mean stated inclusion and the sum of its weights, all (n,)."""

    def __init__(self, case: TriedSampler, cohorts: list[Cohort]) -> None:
        self.case, self.cohorts = case, cohorts
        self.counts, stated, self.weights = torch.zeros(3, len(case.alpha), dtype=torch.float64).unbind()
        for cohort in cohorts:
            self.counts[cohort.clients] += 1
            self.weights[cohort.clients] += cohort.weights
            if cohort.inclusion is not None:
                stated[cohort.clients] += cohort.inclusion.double()
        self.inclusion = (stated / self.counts.clamp(min=1)).clamp(max=1)

    def check(self, where: str, stated: Tensor, unseen: int) -> None:
        """Frequencies and their sum against the stated inclusion.

        A share q of N cohorts or beyond has, at inclusion p, a probability ≤ 2 exp(−N KL(q‖p)). What is missing in the sum must
        belong to clients that chance alone left out: `unseen` counts the clients of each round that no cohort of it held.
        """
        count, found = len(self.cohorts), self.counts / len(self.cohorts)
        far = torch.xlogy(found, found / stated) + torch.xlogy(1 - found, (1 - found) / (1 - stated))
        unlikely = count * far.nan_to_num(0.0, math.inf) > ALARM + math.log(2 * len(found) * (len(ROUNDS) + 1))
        wrong = unlikely & (self.counts > 0)
        worst = int(torch.where(wrong, (found - stated).abs(), -1.0).argmax())
        share = f"{where}: client {worst} is in {found[worst]:.3g} of {count} cohorts, and {stated[worst]:.3g} is stated"
        self.case.hold(not wrong.any(), "inclusion_true", f"{share}; clients that differ: {int(wrong.sum())}")
        sizes = torch.tensor([len(cohort) for cohort in self.cohorts], dtype=torch.float64)
        mean, deviation = float(sizes.mean()), float(sizes.std(unbiased=False)) / math.sqrt(count)
        missing, rare = mean - float(stated.sum()), mean * ALARM / count  # sizes so rare that chance left them out
        good = abs(missing) <= SUM_SLACK * mean + DEVIATIONS * deviation + rare
        # Of the clients that were not drawn one has an inclusion of at least missing / unseen, and was left out every time.
        good = good or (missing > 0 and unseen > 0 and count * missing / unseen < ALARM)
        absent = (self.counts == 0).nonzero().flatten().tolist()[:3]
        case = f"{where}: it adds up to {mean - missing:.4g}, {count} cohorts have {mean:.4g} clients on average"
        self.case.hold(good, "inclusion_sum", f"{case}; clients in no cohort: {absent}")


def _tell(case: TriedSampler, counts: Tensor, weights: Tensor, cohorts: int) -> None:
    """Give a notice if clients are in no cohort, or if mean weights do not follow base weights."""
    absent = (counts == 0).nonzero().flatten().tolist()
    if absent and cohorts * case.clients_per_round >= 20 * len(counts):  # else chance may have left them out
        notify(
            f"{shown(case.part)} drew clients into none of {cohorts} cohorts: {absent[:3]}, {len(absent)} of {len(counts)}. If "
            "you want to draw them, look for an end of a range that is 1 too small."
        )
    spread = case.alpha - case.alpha.mean()
    slope = float(weights / weights.sum() @ spread) / float(spread @ spread)
    if case.clients_per_round >= FEW and slope < FOLLOWS:
        notify(
            f"The mean weights of clients in cohorts of {shown(case.part)} do not follow their base weights (slope {slope:.2f} "
            "in place of 1). If you want their mean, and do not draw by alpha, give alpha[clients] / alpha[clients].sum()."
        )
