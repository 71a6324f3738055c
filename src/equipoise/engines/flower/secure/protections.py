"""Secure aggregation and distributed differential privacy over a network.

The weights and sums of a protected run come from real clients here, by masked sums. Δ-FL finds its quantile by one sum: a
histogram, exact or with noise. The iteration of privacy.SecureSums is refused: its sums tell who lies above each iterate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor

from equipoise.compatibility import refuse_on_nodes
from equipoise.core.abilities import solver_traits
from equipoise.engines.flower.secure.masked_sums import (
    PlannedSum,
    RoundSums,
)
from equipoise.engines.flower.secure.sum_terms import name_sum
from equipoise.engines.flower.transport.messenger import TooFewClients
from equipoise.errors import EquipoiseError, IncompatibleParts
from equipoise.privacy.discrete_gaussian import sample_discrete_gaussian
from equipoise.privacy.mechanism import SecureAggregation
from equipoise.privacy.noise_plan import Grid, NoisePlan
from equipoise.privacy.private_quantile import (
    ENOUGH_NOISE,
    PrivateQuantile,
    bin_edges,
    cumulative_counts,
    quantile_of_sum,
    safe_modulus,
)
from equipoise.privacy.protected import Protected
from equipoise.privacy.release_book import ReleaseBook
from equipoise.privacy.secure_aggregate import mean_of_sum, secure_row_length, tail_is_large_enough
from equipoise.privacy.secure_histogram import require_equal_weights
from equipoise.privacy.secure_sum import centred, required_modulus
from equipoise.types import Cohort, LocalWork, RunSize
from equipoise.types.round_contracts import UNKNOWN, Kept, Stage, View, Weights

if TYPE_CHECKING:
    from equipoise.algorithm import Algorithm
    from equipoise.engines.flower.flower_engine import FlowerEngine

WIDE, COUNTS = 1 << 62, 1 << 32  # the modulus of sums of few numbers, and of counts
SKIPPED = (
    "a sum of this round was begun and lost, and is not asked for again: the difference of two such sums may reveal one "
    "client's contribution"
)


def mask_sums(engine: FlowerEngine, protection: Protected, algorithm: Algorithm) -> Protected:
    """The protection of a run that asks for secure sums alone, with masked sums over the network."""
    refuse_on_nodes(algorithm)
    if protection.noise is None:
        sums: Stage = NetworkSecureSums(engine, algorithm, protection.own_book)
        return replace(protection, sums=(sums,), evaluates_by_sums=True)
    survivors = find_fewest_survivors(engine, protection.noise)
    noise = recalibrate_noise(protection.noise, survivors)
    sums = NetworkPrivateSums(engine, noise, max(survivors, noise.fewest))
    return replace(protection, sums=(sums,), noise=noise, evaluates_by_sums=True)


# --------------------------------------------------------------------------------------------------------- secure aggregation


class NetworkSecureSums(Stage):
    """The weights and sums of secure aggregation with real masks: losses, tails and updates stay with the clients."""

    name: ClassVar[str] = "risk"

    def __init__(self, engine: FlowerEngine, algorithm: Algorithm, book: ReleaseBook) -> None:
        self.privacy, self.book = cast(SecureAggregation, algorithm.privacy), book
        self.risk, self.quantile = algorithm.traits.risk, algorithm.traits.quantile
        self.engine, self.round = engine, RoundSums(engine, algorithm, self.privacy.fewest, self._begin)
        normalised = algorithm.traits.aggregator
        self.lengths = int(normalised.normalises is not None and normalised.steps is None)  # numbers for the mean of lengths
        self.eta, self.kept = math.nan, 0  # the quantile that is out in this round, and how many clients reach it

    def weights(self, view: View) -> Weights:
        """Base weights for all, as nobody but a client knows its own; for Δ-FL the histogram of losses is found first.

        If too few clients are in the tail, all weights are 0 and the sum of updates is not asked for. So it is where a sum of
        this round was asked for before and lost: the difference of two such sums may be one client's.
        """
        cohort, losses = view.cohort, view.losses
        weights = cohort.weights * len(cohort)
        update = PlannedSum("update", secure_row_length(self.engine.task) + self.lengths, self.privacy.modulus)
        if self.book.is_lost(cohort.round, ("histogram", "update")):
            self.engine.round.reported["skipped"] = SKIPPED
            return Weights(UNKNOWN, torch.zeros_like(weights), 1.0)
        if self.risk.client_form != "filter":
            self.round.begin(cohort, [update], self.engine.round.params if losses is not None else None)
            return Weights(UNKNOWN, weights, 1.0)
        histogram = self.quantile.histogram
        if histogram is None:
            fix = "Use quantile=privacy.SecureHistogram(bound=…, bins=64)."
            raise IncompatibleParts(f"{self.risk.quantile!r} is no histogram by secure sums.", fix)
        require_equal_weights(cohort.weights, "a histogram")
        counts = PlannedSum("histogram", histogram.bins, COUNTS)
        known = self.book.value(cohort.round, counts.purpose)
        self.round.begin(cohort, [update, counts] if known is None else [update], self.engine.round.params)
        if known is None:
            ask = {"kind": "counts", "bound": histogram.bound, "bins": histogram.bins}
            total, _ = self.round.total(counts.purpose, lambda _: ask)
            self.book.end(cohort.round, counts.purpose, total.tolist())
        else:
            total = torch.tensor(known, dtype=torch.int64)
        self.engine.round.reported["loss"] = histogram.mean(total)
        eta = histogram.edge(total, self.risk.tail)
        self.eta, self.kept = float(eta), histogram.kept(total, eta)
        self.engine.round.reported["tail_share"] = self.kept / max(1, int(total.sum()))
        if not tail_is_large_enough(self.kept, self.privacy.fewest, cohort.round):
            few = f"the tail has {self.kept} of at least {self.privacy.fewest} clients, and its sum would say too much of them"
            self.engine.round.reported["skipped"] = few
            weights = torch.zeros_like(weights)
        return Weights(UNKNOWN, weights, 1.0)

    def _begin(self, round_index: int, purpose: str, fewest: int) -> None:
        require_first(self.book.begin_exact(round_index, purpose), round_index, purpose)

    def answer(self, view: View) -> LocalWork | None:
        """Σ w_k u_k / Σ w_k over the clients that are left, both of one masked sum; None if it was lost."""
        if not len(view.workers):
            return None
        weights = dict(zip(self.engine.names(view.workers), view.workers.shares.tolist(), strict=True))
        public = self.eta if self.risk.client_form == "filter" else float(self.privacy.loss_bound or 0)
        base = {"kind": "update", "step": self.privacy.step, "public": public, "kept": self.kept}
        asked = {client: {**base, "base": weights.get(client, 0.0)} for client in self.engine.names(view.cohort)}
        task = self.engine.task
        try:
            total, _ = self.round.updates(view.cohort, view.workers, asked.__getitem__, view.state.model, view.rule)
        except TooFewClients:
            if not self.book.begun(view.cohort.round, "update"):
                raise
            self.engine.round.reported["skipped"] = SKIPPED
            return None  # it is not asked for again
        carried, numbers = mean_of_sum(total.double() * self.privacy.step, secure_row_length(task) - task.layout.dimension - 1)
        mass, values = float(numbers[-1]), numbers[: task.layout.dimension]
        mean = values / mass if mass > 0 else torch.zeros_like(values)
        if self.lengths and mass > 0:  # FedNova: Σ w u/a / Σ w times the mean length Σ w a / Σ w
            mean = mean * (float(numbers[-2]) / mass)
        return replace(unseen(mean.to(view.state.params)), carried=carried, mass=mass)

    def tell(self, view: View) -> Mapping[str, Any]:
        """A round whose sum was lost has trained nobody."""
        return {"trained": 0} if view.answer is None and len(view.workers) else {}


def unseen(total: Tensor) -> LocalWork:
    """The work of a round of which the server sees its total alone."""
    nothing = torch.zeros(0, dtype=torch.float64)
    return LocalWork(total, nothing, nothing, told=False)


# ------------------------------------------------------------------------------------------------ distributed privacy


def find_fewest_survivors(engine: FlowerEngine, noise: NoisePlan) -> int:
    """How many clients of a cohort a secure sum needs at least; where nodes flip the coins themselves, of all of them."""
    crowd = max((member.minimum_crowd for member in engine.federation.members.values()), default=2)
    asked = noise.clients if noise.by_nodes else noise.expected
    return max(engine.patience.minimum, engine.federation.choose_threshold(asked)[1], crowd)


def recalibrate_noise(noise: NoisePlan, survivors: int) -> NoisePlan:
    """The noise of a run whose shares suffice for these survivors, unless its privacy says what they must suffice for."""
    if noise.privacy.fewest is not None:
        return noise
    privacy = replace(noise.privacy, fewest=min(survivors, noise.clients if noise.by_nodes else noise.expected))
    size = RunSize(noise.clients, noise.expected, noise.rounds, noise.dimension, noise.seed)
    return NoisePlan(privacy, noise.algorithm, size)


class NetworkPrivateSums(Stage):
    """Distributed differential privacy end to end: clients clip, round and add their share of noise, and only sums are seen.

    Shares are calibrated to the fewest survivors that a sum may have. What is missing because clients were lost the server
    adds, for those who receive the model: its noise is always of as many shares.
    """

    name: ClassVar[str] = "privacy"

    def __init__(self, engine: FlowerEngine, noise: NoisePlan, fewest: int) -> None:
        self.noise, self.engine = noise, engine
        self.round = RoundSums(engine, noise.algorithm, fewest, self._begin)
        self.risk = noise.algorithm.traits.risk
        self._public: float | None = None  # the quantile that is out in this round
        self._contributors = noise.shares  # the fewest whose noise is in a sum of this round

    def _ask(self, kind: str, **more: Any) -> dict[str, Any]:
        coin = {"rate": self.noise.expected / self.noise.clients} if self.noise.by_nodes else {}
        return {"kind": kind, **coin, **more}

    def rule(self, view: View) -> Any:
        """A solver whose rows follow what clients send knows by how much it is clipped."""
        clipped = solver_traits(view.rule).with_sent_clip
        return None if clipped is None else clipped(self.noise.privacy.clip)

    def weights(self, view: View) -> Weights:
        """One for each client, as nobody but a client knows its weight; and the number that the sum is divided by."""
        cohort, losses, ones = view.cohort, view.losses, torch.ones(len(view.cohort), dtype=torch.float64)
        update = PlannedSum("update", self.noise.dimension, self.noise.grid.modulus)
        self._public, self._contributors = None, self.noise.shares
        if self.noise.is_lost(cohort.round):
            return Weights(UNKNOWN, torch.zeros_like(ones), self.noise.workers)
        if losses is None:
            self.round.begin(cohort, [update], None)
            return Weights(UNKNOWN, ones, self.noise.workers)
        first = self.noise.book.value(cohort.round, self.noise.first)
        if first is not None:  # released before this try of the round: it is not asked for again
            self.round.begin(cohort, [update], self.engine.round.params)
        elif self.noise.quantile is not None:
            first = float(self._find_quantile(self.noise.quantile, cohort, update))
        else:
            first = self._sum_weights(cohort, update)
        if self.noise.quantile is not None:
            self._public = float(first)
            return Weights(UNKNOWN, ones, self.noise.workers)
        return Weights(UNKNOWN, ones, max(float(first), 1.0))

    def _begin(self, round_index: int, purpose: str, fewest: int) -> None:
        """Write a release into the ledger, when all is there but what unmasks it."""
        good = self.noise.begin_release(round_index, purpose, contributors=fewest)
        require_first(good, round_index, purpose)

    def _end(self, round_index: int, purpose: str, value: float | None, survivors: Sequence[str]) -> None:
        self._contributors = min(self._contributors, len(survivors))
        self.noise.book.end(round_index, purpose, value, contributors=len(survivors))

    def _find_quantile(self, quantile: PrivateQuantile, cohort: Cohort, update: PlannedSum) -> Tensor:
        """The private quantile of the cohort's losses; the round's sum of updates is prepared with it."""
        sigma, scale = quantile.noise()
        bound, bins = quantile.bound, quantile.bins
        modulus = quantile.modulus or safe_modulus(scale, sigma, bins, max(len(cohort), self.noise.shares))
        self.round.begin(cohort, [update, PlannedSum("quantile", 2 * bins - 2, modulus)], self.engine.round.params)
        ask = self._ask("histogram", bound=bound, bins=bins, sigma=sigma, scale=scale)
        total, survivors = self.round.total("quantile", lambda _: ask)
        total = self._top_up(total, survivors, Fraction(sigma) ** 2, modulus, "quantile", cohort.round)
        known = None if self.noise.by_nodes else len(survivors)  # nobody knows how many coins showed heads
        eta = quantile_of_sum(total, self.risk.tail, bound=bound, bins=bins, scale=scale, clients=known)
        below = cumulative_counts(total, bins=bins, scale=scale, clients=known)
        place = int((bin_edges(bound, bins) >= eta).nonzero()[0])
        share = 1 - float(below[place] / below[-1]) if below[-1] > 0 else 0.0  # as the noisy counts say: nothing else is known
        self.engine.round.reported["tail_share"] = min(1.0, max(0.0, share))
        self._end(cohort.round, "quantile", float(eta), survivors)
        return eta

    def _sum_weights(self, cohort: Cohort, update: PlannedSum) -> float:
        """The noisy sum of the clients' weights; the round's sum of updates is prepared with it."""
        z, fewest = float(self.noise.calibration.first or 0), self.noise.fewest
        scale = math.ceil(max(ENOUGH_NOISE, 2 * math.sqrt(fewest)) / z) if z else 1 << 20
        sigma = z * scale / math.sqrt(fewest) * (1 + 1e-9)
        modulus = required_modulus(1.0, 1 / scale, max(len(cohort), self.noise.shares), sigma=sigma)
        variance = Grid(1 / scale, scale, sigma, modulus).variance if z else Fraction(0)
        self.round.begin(cohort, [update, PlannedSum("weights", 1, modulus)], self.engine.round.params)
        bound = float(self.noise.privacy.loss_bound or 0)
        ask = self._ask("weight", scale=scale, variance=variance.as_integer_ratio(), bound=bound)
        total, survivors = self.round.total("weights", lambda _: ask)
        found = float(self._top_up(total, survivors, variance, modulus, "weights", cohort.round)[0]) / scale
        self._end(cohort.round, "weights", found, survivors)
        return found

    def _top_up(
        self, total: Tensor, survivors: Sequence[str], variance: Fraction, modulus: int, purpose: str, round_index: int
    ) -> Tensor:
        """The sum with the shares of noise that are missing: as many as clients were expected, whoever was lost."""
        source = self.noise.source(f"{purpose}: missing shares", round_index)
        for _ in range(self.noise.shares - len(survivors) if variance > 0 else 0):
            total = total + sample_discrete_gaussian(variance, len(total), source=source)
        return centred(total, modulus)

    def owners_refuse(self) -> bool:
        """Whether too few nodes are left, after refusals by policies, for any sum of this run: then the run stops.

        Policies do not know a node's data, so a refusal reveals nothing about them. If nodes are silent, the round is skipped.
        """
        return len(set(self.engine.round.drawn) - self.engine.messenger.refusing) < self.round.fewest

    def answer(self, view: View) -> LocalWork | None:
        """The sum of clipped updates with noise, divided by a number fixed in advance; None if it was lost."""
        grid, params, privacy, quantile = self.noise.grid, view.state.params, self.noise.privacy, self.noise.quantile
        variance = grid.variance if grid.sigma > 0 else Fraction(0)
        bound = quantile.bound if quantile is not None else float(privacy.loss_bound or 0)
        ask = self._ask(
            "private update", clip=privacy.clip, step=grid.step, norm_bound=grid.norm_bound,
            variance=variance.as_integer_ratio(), bound=bound, public=self._public or 0.0,
        )  # fmt: skip
        index = view.cohort.round
        try:
            if self.noise.is_lost(index):
                raise TooFewClients(f"Round {index + 1}: a release was begun before, and what it gave is not known.")
            total, survivors = self.round.updates(view.cohort, view.workers, lambda _: ask, params, view.rule)
        except TooFewClients:
            over = self.engine.round.last and self.noise.book.begun(index, self.noise.first)  # it is paid for, and ends
            over = over and not self.owners_refuse()
            if not over and not self.noise.is_lost(index):
                raise  # of the update nothing is out yet: the round may be tried again
            self._contributors = min(self._contributors, self.round.fewest)
            self.engine.round.reported["skipped"] = SKIPPED
            return None  # it is out, or may be: it is paid for, and not asked for again
        self._end(index, "update", None, survivors)
        total = self._top_up(total, survivors, variance, grid.modulus, "update", index)
        return unseen((total.double() * (grid.step / float(view.weights.over))).to(params))

    def keep(self, view: View) -> Kept:
        """Who took part, and what it cost them."""
        private, weight = view.state.privacy, self.noise.round_weight(self._contributors)
        return Kept(None, private.after(clip=private.clip, weight=weight))

    def tell(self, view: View) -> Mapping[str, Any]:
        """What was spent; a round whose sum was lost has trained nobody."""
        lost: dict[str, Any] = {"trained": 0} if view.answer is None else {}
        return {"epsilon": view.run.protection.epsilon_after(view.state.round + 1), **lost}


def require_first(good: bool, round_index: int, purpose: str) -> None:
    """Refuse to ask for a release a second time."""
    if not good:
        raise EquipoiseError(f"{name_sum(purpose, round_index)} was released before, and is not asked for again.")
