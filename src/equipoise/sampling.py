"""Who takes part in a round. A cohort is a pure function of the seed and the round, the same in every engine.

`FedBuff` has no rounds of its own: clients come and go on a simulated clock (`rounds/clock.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from equipoise.core.rng import first_uniforms, generator, name_keys
from equipoise.core.words import shown_as_before
from equipoise.errors import InvalidParameter, is_integer, require, require_integer, require_number
from equipoise.types import Cohort


def _cohort(round_index: int, seed: int, clients: Tensor, weights: Tensor, inclusion: Tensor) -> Cohort:
    total = weights.sum()
    return Cohort(round_index, seed, clients, weights / total if len(clients) else weights, inclusion)


@lru_cache(maxsize=64)
def _constant_vector(count: int, value: float) -> Tensor:
    """`value` for each of `count` clients, (count,) float64; it is shared, since nobody changes what a cohort holds."""
    return torch.full((count,), value, dtype=torch.float64)


def _check_size(clients_per_round: int, n: int) -> None:
    if is_integer(clients_per_round) and 1 <= clients_per_round <= n:
        return
    rule = f"must be a whole number between 1 and the number of training clients, {n}"
    fix = 'Lower it, or draw with replacement: sampling.Proportional(), in a file algorithm.sampler.name = "proportional".'
    raise InvalidParameter("clients_per_round", rule, clients_per_round, fix)


@dataclass(frozen=True)
class Uniform:
    """A fixed number of clients, uniformly and without replacement; base weights α renormalised inside the cohort.

    Of the m clients per round only `share` · m take part, rounded, at least one. `share` = θ is FedAvg-Sub: FedAvg that
    trains as many clients a round as Δ-FL with tail θ does, and so separates the effect of the tail from the effect of
    fewer clients.

    Source: the usual FedAvg, and the code of the Δ-FL papers; FedAvg-Sub: Pillutla et al. 2023, Section 7.

    >>> alpha = torch.full((4,), 0.25)
    >>> cohort = Uniform(share=0.5)(0, alpha, clients_per_round=4, seed=0)  # two of the four, alike in weight
    >>> len(cohort.clients), cohort.weights.tolist(), cohort.inclusion.tolist()
    (2, [0.5, 0.5], [0.5, 0.5])
    """

    share: float = 1.0  # θ in (0, 1]: the share of the m clients per round that take part

    pure: ClassVar[bool] = True
    accounted: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_number("share", self.share, "(0, 1]")

    def __call__(self, round_index: int, alpha: Tensor, *, clients_per_round: int, seed: int) -> Cohort:
        """`share` · `clients_per_round` distinct clients, drawn uniformly."""
        n = len(alpha)
        _check_size(clients_per_round, n)
        count = max(1, int(self.share * clients_per_round + 0.5))
        chosen = generator(seed, "cohort", round_index).choice(n, size=count, replace=False)
        chosen.sort()
        weights = alpha.numpy()[chosen]  # NumPy, because this is done in every round: torch takes longer over so few numbers
        inclusion = _constant_vector(count, count / n)
        return Cohort(round_index, seed, torch.from_numpy(chosen), torch.from_numpy(weights / weights.sum()), inclusion)


@dataclass(frozen=True)
class Proportional:
    """m draws with replacement, client k with probability α_k, and plain averaging: drawn c times means weight c/m.

    Source: Li 2023 (thesis), Algorithm 1.

    >>> cohort = Proportional()(0, torch.tensor([1.0, 0.0]), clients_per_round=3, seed=0)  # each draw is the first client
    >>> cohort.clients.tolist(), cohort.weights.tolist()
    ([0], [1.0])
    """

    pure: ClassVar[bool] = True
    by_weight: ClassVar[bool] = True

    def __call__(self, round_index: int, alpha: Tensor, *, clients_per_round: int, seed: int) -> Cohort:
        """The distinct clients among `clients_per_round` draws, weighted by how often each was drawn."""
        require_integer("clients_per_round", clients_per_round, 1)
        p = alpha.double().numpy()
        drawn = generator(seed, "cohort", round_index).choice(len(p), size=clients_per_round, replace=True, p=p / p.sum())
        positions, counts = np.unique(drawn, return_counts=True)
        clients = torch.from_numpy(positions).to(torch.int64)
        inclusion = 1 - (1 - alpha[clients].double()) ** clients_per_round
        return _cohort(round_index, seed, clients, torch.from_numpy(counts).double(), inclusion)


@dataclass(frozen=True)
class Poisson:
    """Every client takes part independently with probability m/n; base weights α renormalised. A cohort may be empty.

    Source: the sampling that differential privacy accounts for (Mironov, Talwar, Zhang 2019).

    >>> cohort = Poisson()(0, torch.full((4,), 0.25), clients_per_round=4, seed=0)  # probability 4/4
    >>> cohort.clients.tolist(), cohort.inclusion.tolist()
    ([0, 1, 2, 3], [1.0, 1.0, 1.0, 1.0])
    """

    pure: ClassVar[bool] = True
    accounted: ClassVar[bool] = True
    independent: ClassVar[bool] = True

    def __call__(self, round_index: int, alpha: Tensor, *, clients_per_round: int, seed: int) -> Cohort:
        """The clients whose coin of probability `clients_per_round` / n shows heads; perhaps nobody."""
        n = len(alpha)
        _check_size(clients_per_round, n)
        rate = clients_per_round / n
        clients = torch.from_numpy(np.flatnonzero(generator(seed, "cohort", round_index).random(n) < rate)).to(torch.int64)
        inclusion = torch.full((len(clients),), rate, dtype=torch.float64)
        return _cohort(round_index, seed, clients, alpha[clients], inclusion)


@dataclass(frozen=True)
class NodePoisson:
    """Every node draws by itself, with probability m/n, whether its client is in the round, and tells nobody.

    For differential privacy with distributed noise alone. In a federation every connected node answers every round with the
    same messages, does the full local work and adds its share of noise, whether its client is in the round or not. The
    server then does not know who is in a cohort, so that amplification by sampling counts against the server and the other
    nodes, too. The cost is that all n nodes work in each round. With `Poisson` only m of them would. A node draws once per
    round, for all purposes, and keeps the result if the round is repeated. In a simulation cohorts are those of `Poisson`,
    and all clients add their shares of noise.

    Source: the sampling of `Poisson`, drawn by clients who keep it to themselves (cf. random check-ins, Balle et al. 2020).

    >>> NodePoisson()(0, torch.full((4,), 0.25), clients_per_round=4, seed=0).clients.tolist()  # probability 4/4
    [0, 1, 2, 3]
    """

    pure: ClassVar[bool] = True
    accounted: ClassVar[bool] = True
    independent: ClassVar[bool] = True
    by_nodes: ClassVar[bool] = True

    def __call__(self, round_index: int, alpha: Tensor, *, clients_per_round: int, seed: int) -> Cohort:
        """The clients whose coin of probability `clients_per_round` / n shows heads; perhaps nobody."""
        return Poisson()(round_index, alpha, clients_per_round=clients_per_round, seed=seed)


@dataclass(frozen=True)
class Full:
    """Every client, every round; `clients_per_round` is not used.

    Source: the setting of agnostic federated learning (Mohri, Sivek, Suresh 2019).

    >>> cohort = Full()(0, torch.tensor([0.5, 0.25, 0.25]), clients_per_round=1, seed=0)
    >>> cohort.clients.tolist(), cohort.weights.tolist()
    ([0, 1, 2], [0.5, 0.25, 0.25])
    """

    pure: ClassVar[bool] = True
    accounted: ClassVar[bool] = True
    separation: ClassVar[int] = 1
    everyone: ClassVar[bool] = True

    def __call__(self, round_index: int, alpha: Tensor, *, clients_per_round: int, seed: int) -> Cohort:
        """All clients, with their base weights."""
        return _cohort(round_index, seed, torch.arange(len(alpha)), alpha, torch.ones(len(alpha), dtype=torch.float64))


@dataclass(frozen=True)
class Availability:
    """Clients are available at some hours of the day: m of those available, uniformly; all of them if they are fewer than m.

    A day is `day` rounds. Client k is available from (1 − `aligned`) · U_k · day on, U_k uniform in [0, 1), for `share` ·
    day times a uniform factor in [0.5, 1.5], at most the whole day, around midnight where need be. `aligned` = 0 spreads
    the clients around the clock, as time zones do; 1 makes all of them available at the same hour. `schedule` is the seed
    of these windows and belongs to the population: runs with other seeds meet the same clients at the same hours. If a
    window is so short that it falls between two rounds, no round meets it. Inclusion, min(1, m / number there), is exact
    given the schedule.

    Source: ours. Pillutla et al. 2023 remark that few clients may be available at some times of the day. Δ-FL needs m/θ clients
    to train m.

    >>> sampler = Availability(day=24, share=0.5, aligned=1.0)  # windows of 6 to 18 rounds that begin at round 0
    >>> int(sampler.there(0, 5).sum()), int(sampler.there(23, 5).sum())
    (5, 0)
    """

    day: int = 24  # rounds in a day
    share: float = 0.5  # the mean share of the day that a client is available
    aligned: float = 0.5  # in [0, 1]: how far the windows coincide
    schedule: int = 0  # the seed of the windows

    pure: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(is_integer(self.day) and self.day >= 1, "day", "must be a whole number of rounds, at least 1", self.day)
        require_number("share", self.share, "(0, 1]")
        require_number("aligned", self.aligned, "[0, 1]")
        require_integer("schedule", self.schedule, 0)

    def there(self, round_index: int, n: int) -> Tensor:
        """Which of `n` clients are available in round `round_index`: bool (n,). The window of a client does not depend on n."""
        uniform = generator(self.schedule, "availability").random((n, 2))
        start = (1 - self.aligned) * uniform[:, 0] * self.day
        length = self.share * self.day * (0.5 + uniform[:, 1])
        since_start = (round_index % self.day - start) % self.day  # at most a day, so a longer window never ends
        return torch.from_numpy(since_start < length)

    def __call__(self, round_index: int, alpha: Tensor, *, clients_per_round: int, seed: int) -> Cohort:
        """`clients_per_round` of the clients who are there in the round, or all of them if they are fewer."""
        _check_size(clients_per_round, len(alpha))
        clients = self.there(round_index, len(alpha)).nonzero().squeeze(1)
        present = len(clients)
        if present > clients_per_round:
            chosen = generator(seed, "cohort", round_index).choice(present, size=clients_per_round, replace=False)
            clients = clients[torch.from_numpy(np.sort(chosen))]
        inclusion = torch.full((len(clients),), min(1.0, clients_per_round / max(present, 1)), dtype=torch.float64)
        return _cohort(round_index, seed, clients, alpha[clients], inclusion)


@dataclass(frozen=True)
class MinSeparation:
    """m of the clients whose turn it is: rounds of one client are at least `rounds` apart, whatever is drawn.

    Clients are dealt out at random into `rounds` groups of equal size (± 1), by the seed; round t draws m clients of group
    t mod `rounds`, uniformly and without replacement. So in T rounds nobody takes part more than ⌈T/`rounds`⌉ times. This
    holds in every run, and not only on average. Noise that is correlated over rounds (privacy.correlated_noise) needs this
    bound.

    Source: Choquette-Choo et al. 2023 (arXiv 2306.08153), cyclic participation.

    >>> sampler, alpha = MinSeparation(rounds=2), torch.full((4,), 0.25)  # two groups of two clients, in turn
    >>> cohorts = [sampler(t, alpha, clients_per_round=2, seed=0).clients.tolist() for t in (0, 1, 2)]
    >>> sorted(cohorts[0] + cohorts[1]), cohorts[2] == cohorts[0]
    ([0, 1, 2, 3], True)
    """

    rounds: int = 10  # the least number of rounds from one round of a client to its next

    pure: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_integer("rounds", self.rounds, 1)

    @property
    def separation(self) -> int:
        """The least number of rounds from one round of a client to its next. Correlated noise is set by it."""
        return self.rounds

    def participations(self, rounds: int) -> int:
        """The largest number of rounds in which one client takes part, in a run of `rounds` rounds.

        >>> MinSeparation(rounds=2).participations(5)  # rounds 0, 2 and 4
        3
        """
        return -(-rounds // self.rounds)

    def group(self, number: int, clients: int, seed: int) -> Tensor:
        """The positions of the clients of group `number`, in order, of `clients` clients dealt out by `seed`."""
        order = generator(seed, "groups of clients").permutation(clients)
        return torch.from_numpy(np.sort(order[number :: self.rounds]))

    def __call__(self, round_index: int, alpha: Tensor, *, clients_per_round: int, seed: int) -> Cohort:
        """`clients_per_round` distinct clients of the group whose turn it is, drawn uniformly."""
        n = len(alpha)
        _check_size(clients_per_round, n)
        fix = f"A group of {n} clients in {self.rounds} has {n // self.rounds}: lower it, or rounds of sampling.MinSeparation."
        rule = "must not exceed the clients whose turn it is"
        require(clients_per_round <= n // self.rounds, "clients_per_round", rule, clients_per_round, fix)
        group = self.group(round_index % self.rounds, n, seed)
        chosen = generator(seed, "cohort", round_index).choice(len(group), size=clients_per_round, replace=False)
        clients = group[torch.from_numpy(np.sort(chosen))]
        inclusion = torch.full((clients_per_round,), clients_per_round / n, dtype=torch.float64)
        return _cohort(round_index, seed, clients, alpha[clients], inclusion)


TICKS = 1_000_000  # of the simulated clock in one unit of its time: whole numbers, so that equal instants are equal


@dataclass(frozen=True)
class FedBuff:
    """Clients work at their own speed, and the server steps whenever `buffer` of them have come back.

    `clients_per_round` clients are at work at any time. A job of client k takes a_k + b_k τ_k units of simulated time for τ_k
    local steps: `fixed` and `per_step`, times e^(`spread` · N(0, 1)), drawn once per client with the seed `schedule`, which
    belongs to the population. `durations` gives the time of a job by client instead. A client works from the model that was
    there when it began. When it comes back s versions later, its update counts (1 + s)^(−½), and the step is
    Σ α_k (1 + s_k)^(−½) u_k / Σ α_k over the buffer: not divided by these factors, or equal staleness would have no effect.
    With `damped=False` the factors are 1. A "round" of such a run is one step of the server, a version.

    Everything is a function of the seed: jobs come back in the order of finishing time, client id and job; all that finish at
    one instant are taken before anyone begins; batches are those of (seed, version at the start, client). A client begins at
    most once per version. With equal durations and `buffer` = `clients_per_round` it is FedAvg on Uniform's cohorts, bit for
    bit. Fast clients tend to take part more often: `report.arrivals` and the report show participation against speed.

    With `damped=False` updates may be added by `privacy.SecureAggregation()`, which needs no factor that is unknown when a
    client masks. With a public `loss_bound` B a risk may weigh updates, if a client finds its weight from its own loss and B
    alone, such as `Tilted`: its weight at the model that it began with takes the place of α_k. Risks that rank losses,
    personal models, solvers with a memory of clients, centred clipping and FedNova are refused. A server optimiser keeps its
    state from step to step, and so does an aggregator of your own.

    With `apart` b a client that contributed to step s begins again at version s + b or later, so that its contributions are
    at least b steps apart; fewer than `clients_per_round` may then be at work, and b · `buffer` clients are needed. This
    promise is what `privacy.DPFTRL` needs, because arrivals are not a random sample. Each sum is divided by `buffer`, and
    updates are multiplied by (1 + s)^(−½) before they are clipped. ε holds against an observer who knows who works when.
    Other noise is refused.

    Source: Nguyen et al. 2022 (FedBuff, arXiv 2106.06639). Some published code scales the factor to 1 at staleness 1.

    >>> FedBuff().factor(3)  # (1 + 3)^(−½)
    0.5
    """

    buffer: int = 10  # how many clients must return before the server steps
    fixed: float = 1.0  # a: the time of a job without its steps
    per_step: float = 0.0  # b: the time of one local step
    spread: float = 1.0  # standard deviation of the logarithm of a client's factor
    schedule: int = 0  # the seed of the clients' speeds
    damped: bool = True  # weigh updates by (1 + s)^(−½)
    durations: Mapping[str, float] | None = None  # the time of a job of each client id; None: by the rule
    loss_bound: float | None = None  # a public bound on losses, by which clients find their weights alone
    apart: int | None = None  # the least number of steps from one contribution of a client to its next; None: any

    pure: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_integer("buffer", self.buffer, 1)
        require_number("loss_bound", self.loss_bound, "(0, ∞)", none="risks that need no losses")
        if self.apart is not None:
            require_integer("apart", self.apart, 1)
        for name in ("fixed", "per_step", "spread"):
            require_number(name, getattr(self, name), "[0, ∞)")
        good = self.fixed + self.per_step > 0 or self.durations is not None
        require(good, "fixed", "and per_step must not both be 0: work takes time", self.fixed)
        require_integer("schedule", self.schedule, 0)
        require(isinstance(self.damped, bool), "damped", "must be True or False", self.damped)
        if self.durations is not None:
            require(isinstance(self.durations, Mapping), "durations", "must map client ids to times", self.durations)
            for client, time in self.durations.items():
                require_number(f"durations[{client!r}]", time, "(0, ∞)")
            object.__setattr__(self, "durations", dict(self.durations))

    def __repr__(self) -> str:
        return shown_as_before(self, ("loss_bound", "apart"))

    @property
    def buffered(self) -> FedBuff:
        """The rule by which clients come and go."""
        return self

    @property
    def separation(self) -> int | None:
        """The least number of steps from one contribution of a client to its next. Correlated noise is set by it."""
        return self.apart

    def __call__(self, round_index: int, alpha: Tensor, *, clients_per_round: int, seed: int) -> Cohort:
        """The clients that begin at a version if nobody is at work: Uniform's cohort."""
        rule = f"must not exceed the number of training clients, {len(alpha)}: each begins at most once per version"
        require(self.buffer <= len(alpha), "buffer", rule, self.buffer)
        if self.apart is not None:  # then at any time enough clients may begin or are at work, and the buffer fills
            rule = f"· buffer ({self.buffer}) must not exceed the number of training clients, {len(alpha)}"
            require(self.apart * self.buffer <= len(alpha), "apart", rule, self.apart, "Lower it, or buffer.")
        return Uniform()(round_index, alpha, clients_per_round=clients_per_round, seed=seed)

    def ticks(self, ids: Sequence[str], steps: Sequence[int]) -> list[int]:
        """How long a job of each client takes, in ticks of the clock: a millionth of a unit of time.

        `ids` are the clients, and `steps` are their numbers of local steps.

        >>> FedBuff(fixed=1.0, per_step=0.5, spread=0.0).ticks(["a", "b"], [2, 4])  # 1 + 0.5 · 2 and 1 + 0.5 · 4
        [2000000, 3000000]
        """
        if self.durations is not None:
            if missing := [client for client in ids if client not in self.durations]:
                rule = "must name a time for every training client"
                raise InvalidParameter("durations", rule, f"without {len(missing)}, e.g. {missing[0]!r}")
            times = [float(self.durations[client]) for client in ids]
        else:
            # Box-Muller: a standard normal number of each client, whatever the others are.
            first, second = (first_uniforms(self.schedule, f"speed {part}", name_keys(ids)) for part in (1, 2))
            normal = np.sqrt(-2 * np.log1p(-first)) * np.cos(2 * np.pi * second)
            base = self.fixed + self.per_step * np.asarray(steps, dtype=np.float64)
            with np.errstate(over="ignore"):
                times = (base * np.exp(self.spread * normal)).tolist()
        if not all(math.isfinite(time) for time in times):
            raise InvalidParameter("spread", "must leave durations finite", self.spread, "Lower it.")
        return [max(1, round(time * TICKS)) for time in times]

    def order(self, version: int, clients: int, at_work: int, seed: int) -> list[int]:
        """All clients in the order in which they are asked to begin at a version; Uniform's cohort comes first.

        `version` is the number of steps of the server, `clients` is n, `at_work` is how many work at a time, and `seed` is the
        run's.
        """
        first = generator(seed, "cohort", version).choice(clients, size=at_work, replace=False)
        rest = np.setdiff1d(np.arange(clients), first)
        return [*first.tolist(), *generator(seed, "cohort, further clients", version).permutation(rest).tolist()]

    def factor(self, staleness: int) -> float:
        """The weight of an update that is `staleness` = s model versions old: (1 + s)^(−½), or 1 if not damped."""
        return (1 + staleness) ** -0.5 if self.damped else 1.0
