"""Secure aggregation and distributed differential privacy over a network, and evaluation by secure sums.

The weights and sums of a protected run come from real clients here, by masked sums. A quantile by secure sums takes two
exchanges for each of its iterations, so give it few (privacy.SecureSums). A private quantile takes one sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from equipoise.engines.flower.secure.masked_sums import MaskedSums, PlannedSum, RequestMaker, RoundSums
from equipoise.engines.flower.transport.messenger import ClientRequest, TooFewClients
from equipoise.errors import IncompatibleParts
from equipoise.privacy.discrete_gaussian import sample_discrete_gaussian
from equipoise.privacy.mechanism import SecureAggregation
from equipoise.privacy.noise_plan import Grid, NoisePlan, PrivateState
from equipoise.privacy.private_quantile import ENOUGH_NOISE, PrivateQuantile, quantile_of_sum, safe_modulus
from equipoise.privacy.protected import Protected, ProtectedSums
from equipoise.privacy.secure_aggregate import mean_of_sum, secure_row_length
from equipoise.privacy.secure_sum import centred, required_modulus
from equipoise.result import ClientTable
from equipoise.risk.quantile_sources import quantile_by_sums
from equipoise.risk.superquantile import Released
from equipoise.types import Cohort, Combined, Engine, LocalSolver, RiskValue, RunSize, ServerState

if TYPE_CHECKING:
    from equipoise.algorithm import Algorithm
    from equipoise.data.clients import FederatedData
    from equipoise.engines.flower.flower_engine import FlowerEngine
    from equipoise.round import Plan

WIDE = 1 << 62  # the modulus of sums of few numbers
FINE, COARSE = 2.0**-40, 2.0**-30  # steps of a quantile's sums: of losses, up to 4096, and of its iterations, up to 4 million
SCORES = 2.0**-32


def mask_sums(engine: FlowerEngine, protection: Protected, algorithm: Algorithm) -> Protected:
    """The protection of a run that asks for secure sums alone, with masked sums over the network."""
    if algorithm.traits.personal.updates is not None:
        raise IncompatibleParts(
            f"{algorithm.personal!r} has clients send other updates than the solver's, which are not summed securely here.",
            "Use personal.Ditto(): its models stay with the clients.",
        )
    if protection.noise is None:
        return replace(protection, sums=NetworkSecureSums(engine, algorithm))
    survivors = find_fewest_survivors(engine, protection.noise)
    noise = recalibrate_noise(protection.noise, survivors)
    sums: ProtectedSums = NetworkPrivateSums(engine, noise, max(survivors, noise.fewest))
    return replace(protection, sums=sums, noise=noise)


# --------------------------------------------------------------------------------------------------------- secure aggregation


class NetworkSecureSums:
    """The weights and sums of secure aggregation with real masks: losses, tails and updates stay with the clients."""

    def __init__(self, engine: FlowerEngine, algorithm: Algorithm) -> None:
        self.privacy = cast(SecureAggregation, algorithm.privacy)
        self.risk, self.quantile = algorithm.traits.risk, algorithm.traits.quantile
        self.engine, self.round = engine, RoundSums(engine, algorithm)
        self.eta = math.nan  # the quantile that is out in this round

    def weigh(self, cohort: Cohort, losses: Tensor | None, state: Any) -> tuple[RiskValue, float]:
        """Base weights for all, as nobody but a client knows its own; for Δ-FL the quantile is found by sums first."""
        weights, unknown = cohort.weights * len(cohort), torch.tensor(float("nan"))
        update = PlannedSum("update", secure_row_length(self.engine.task), self.privacy.modulus)
        if self.risk.client_form != "filter":
            self.round.begin(cohort, [update], self.engine.round.params if losses is not None else None)
            return RiskValue(unknown, weights, state), 1.0
        if self.quantile.iterations is None:
            reason = f"{self.risk.quantile!r} is no quantile by secure sums."
            raise IncompatibleParts(reason, "Use quantile=privacy.SecureSums().")
        needed = [_quantile_sum(number) for number in range(self.quantile.iterations + 3)]
        released: Released | None = state if state is not None and state.rounds < self.risk.eta_every else None
        self.round.begin(cohort, [update, *(needed if released is None else [_REACHED])], self.engine.round.params)
        if released is not None and not self._reached(float(released.eta)):
            released = None
            self.round.add(needed)
        released = released or Released(self._find_quantile(cohort, self.quantile.iterations), 0)
        self.eta = float(released.eta)
        return RiskValue(unknown, weights, replace(released, rounds=released.rounds + 1)), 1.0

    def _reached(self, eta: float) -> bool:
        """Whether anybody reaches an old quantile: a sum of ones."""
        ask = {"kind": "reached", "public": eta, "base": 1.0}
        return int(self.round.total(_REACHED.purpose, lambda _: ask)[0]) > 0

    def _find_quantile(self, cohort: Cohort, iterations: int) -> Tensor:
        """The quantile of the losses, computed by `quantile_by_sums` as in a simulation, of rows that stay with the clients.

        A client that is lost on the way is missing from later sums only, which moves the quantile of this round a little;
        to begin again would show the sums with and without it.
        """
        alpha = dict(zip(self.engine.names(cohort), cohort.weights.tolist(), strict=True))
        before: list[list[float]] = []

        def secure_sum(rows: Tensor) -> Tensor:
            number, wanted = len(before), _quantile_sum(len(before))
            if wanted.purpose not in self.round.sums:  # more than usual, to find a quantile that somebody reaches
                self.round.add([wanted])
            step = COARSE if 2 <= number < iterations + 2 else FINE
            ask = {"kind": "quantile", "before": list(before), "step": step}
            total, _ = self.round.total(wanted.purpose, lambda client: {**ask, "alpha": alpha[client]})
            sums = (total.double() * step)[: rows[0].numel()]
            if number == 0:
                self.engine.round.reported["loss"] = float(sums[1] / sums[0])
                # When all losses are alike, rounding may lift their mean above each: lower it by as much as it may have.
                sums[1] -= 2 * len(cohort) * step
            before.append(sums.tolist())
            return sums.reshape(rows.shape[1:])

        one, tolerance = torch.ones(1, dtype=torch.float64), self.quantile.tolerance
        return quantile_by_sums(one, one, self.risk.tail, iterations=iterations, tolerance=tolerance, secure_sum=secure_sum)

    def combine(self, state: ServerState, engine: Engine, solver: LocalSolver, plan: Plan, sent: Tensor | None) -> Combined:
        """Σ w_k u_k / Σ w_k over the clients that are left, both of one masked sum."""
        weights = dict(zip(self.engine.names(plan.workers), plan.weights.tolist(), strict=True))
        public = self.eta if self.risk.client_form == "filter" else float(self.privacy.loss_bound or 0)
        base = {"kind": "update", "step": self.privacy.step, "public": public}
        asked = {client: {**base, "base": weights.get(client, 0.0)} for client in self.engine.names(plan.cohort)}
        total, _ = self.round.updates(plan.cohort, asked.__getitem__, state.model, solver)
        task = self.engine.task
        carried, numbers = mean_of_sum(total.double() * self.privacy.step, secure_row_length(task) - task.layout.dimension - 1)
        mass = float(numbers[-1])
        mean = numbers[:-1] / mass if mass > 0 else torch.zeros_like(numbers[:-1])
        return Combined(mean.to(state.params), None, state.aggregator, carried=carried)


_REACHED = PlannedSum("reached", 1, 1 << 32)


def _quantile_sum(number: int) -> PlannedSum:
    """Sum number t of a quantile; those of one number have an empty second."""
    return PlannedSum(f"quantile {number}", 2, WIDE)


# ------------------------------------------------------------------------------------------------ distributed privacy


def find_fewest_survivors(engine: FlowerEngine, noise: NoisePlan) -> int:
    """How many clients of a cohort a secure sum needs at least; cohorts of random size are refused.

    A sum that is refused because a Poisson cohort was small would tell more than the noise hides.
    """
    if noise.poisson:
        raise IncompatibleParts(
            "Poisson cohorts may have fewer clients than a secure sum needs, and refusing such a sum tells who was drawn.",
            "Use sampler=sampling.Uniform(), cohorts of fixed size, or sampling.Full().",
        )
    return max(engine.patience.minimum, noise.expected // 2 + 1, 2)


def recalibrate_noise(noise: NoisePlan, survivors: int) -> NoisePlan:
    """The noise of a run whose shares suffice for these survivors, unless its privacy says what they must suffice for."""
    if noise.privacy.fewest is not None:
        return noise
    privacy = replace(noise.privacy, fewest=min(survivors, noise.expected))
    size = RunSize(noise.clients, noise.expected, noise.rounds, noise.dimension, noise.seed)
    return NoisePlan(privacy, noise.algorithm, size)


class NetworkPrivateSums:
    """Distributed differential privacy end to end: clients clip, round and add their share of noise, and only sums are seen.

    Shares are calibrated to the fewest survivors that a sum may have. What is missing because clients were lost the server
    adds, for those who receive the model: its noise is always of as many shares.
    """

    def __init__(self, engine: FlowerEngine, noise: NoisePlan, fewest: int) -> None:
        self.noise, self.engine = noise, engine
        self.round = RoundSums(engine, noise.algorithm, fewest)
        self.risk = noise.algorithm.traits.risk
        self._public: float | None = None  # the quantile that is out in this round
        self._released = False  # whether this round has released anything yet

    def _ask(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"kind": kind, "source": self.noise.privacy.source, **more}

    def weigh(self, cohort: Cohort, losses: Tensor | None, state: Any) -> tuple[RiskValue, float]:
        """One for each client, as nobody but a client knows its weight; and the number that the sum is divided by."""
        ones, unknown = torch.ones(len(cohort), dtype=torch.float64), torch.tensor(float("nan"))
        update = PlannedSum("update", self.noise.dimension, self.noise.grid.modulus)
        self._public, self._released = None, False
        if losses is None:
            self.round.begin(cohort, [update], None)
            return RiskValue(unknown, ones, state), self.noise.workers
        if self.noise.quantile is not None:
            self._public = float(self._find_quantile(self.noise.quantile, cohort, update))
            self._released = True
            return RiskValue(unknown, ones), self.noise.workers
        denominator = max(self._sum_weights(cohort, update), 1.0)
        self._released = True
        return RiskValue(unknown, ones, state), denominator

    def _find_quantile(self, quantile: PrivateQuantile, cohort: Cohort, update: PlannedSum) -> Tensor:
        """The private quantile of the cohort's losses; the round's sum of updates is prepared with it."""
        sigma, scale = quantile.noise()
        bound, bins = quantile.bound, quantile.bins
        modulus = quantile.modulus or safe_modulus(scale, sigma, bins, max(len(cohort), self.noise.shares))
        self.round.begin(cohort, [update, PlannedSum("quantile", 2 * bins - 2, modulus)], self.engine.round.params)
        ask = self._ask("histogram", bound=bound, bins=bins, sigma=sigma, scale=scale)
        total, survivors = self.round.total("quantile", lambda _: ask)
        total = self._top_up(total, survivors, Fraction(sigma) ** 2, modulus, "quantile", cohort.round)
        return quantile_of_sum(total, self.risk.tail, bound=bound, bins=bins, scale=scale, clients=len(survivors))

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
        return float(self._top_up(total, survivors, variance, modulus, "weights", cohort.round)[0]) / scale

    def _top_up(
        self, total: Tensor, survivors: Sequence[str], variance: Fraction, modulus: int, purpose: str, round_index: int
    ) -> Tensor:
        """The sum with the shares of noise that are missing: as many as clients were expected, whoever was lost."""
        source = self.noise.source(f"{purpose}: missing shares", round_index)
        for _ in range(self.noise.shares - len(survivors) if variance > 0 else 0):
            total = total + sample_discrete_gaussian(variance, len(total), source=source)
        return centred(total, modulus)

    def combine(self, state: ServerState, engine: Engine, solver: LocalSolver, plan: Plan, sent: Tensor | None) -> Combined:
        """The sum of clipped updates with noise, divided by a number fixed in advance."""
        grid, params, privacy, quantile = self.noise.grid, state.params, self.noise.privacy, self.noise.quantile
        variance = grid.variance if grid.sigma > 0 else Fraction(0)
        bound = quantile.bound if quantile is not None else float(privacy.loss_bound or 0)
        ask = self._ask(
            "private update", clip=privacy.clip, step=grid.step, norm_bound=grid.norm_bound,
            variance=variance.as_integer_ratio(), bound=bound, public=self._public or 0.0,
        )  # fmt: skip
        participations = state.privacy.participations.clone()
        participations[plan.cohort.clients] += 1
        after = PrivateState(state.privacy.clip, participations)
        try:
            total, survivors = self.round.updates(plan.cohort, lambda _: ask, params, solver)
        except TooFewClients:
            if not self._released:
                raise
            # A quantile of this round is out and paid for: the round ends here, and is not tried again with another.
            return Combined(torch.zeros_like(params), None, state.aggregator, after)
        total = self._top_up(total, survivors, variance, grid.modulus, "update", plan.cohort.round)
        return Combined((total.double() * (grid.step / plan.denominator)).to(params), None, state.aggregator, after)


# ----------------------------------------------------------------------------------------------------------------- evaluation


class SecureEvaluation:
    """Evaluation by sums: the mean loss and error of each split, over clients, in place of a row for each client."""

    def __init__(self, engine: FlowerEngine) -> None:
        self.engine = engine

    def table(self, params: Tensor, data: FederatedData) -> ClientTable:
        """One row per split, of the mean client: by examples where clients train, each client alike elsewhere."""
        values = self.engine.request_values(self.engine.federation.seed)
        means = self.means(data, 0, lambda _: ClientRequest(values, {"params": params}))
        seen = set(data.train.ids)
        return ClientTable(
            tuple(f"mean of {len(data.splits[split])} clients" for split in means),
            tuple(means),
            torch.tensor([set(data.splits[split].ids) <= seen for split in means]),
            torch.tensor([int(data.splits[split].sizes.sum()) for split in means]),
            *torch.stack(list(means.values()), 1),
        )

    def means(self, data: FederatedData, round_index: int, base: RequestMaker, *, own: bool = False) -> dict[str, Tensor]:
        """Mean loss and error (2,) by split, at the shared model or at clients' own; NaN where nobody has a number."""
        shares = share_scores(data, trained_only=own)
        ask = {"kind": "scores", "step": SCORES, "own": own}

        def with_sum(client: str) -> ClientRequest:
            request = base(client)
            return ClientRequest({**request.values, "sum": {**ask, "shares": shares[client]}}, request.tensors)

        def sum_scores(_: int) -> Tensor:
            sums = MaskedSums(self.engine, round_index, sorted(shares))
            plain = ClientRequest(self.engine.request_values(self.engine.federation.seed))
            sums.prepare([PlannedSum("scores", 3 * len(data.splits), WIDE)], plain)
            return sums.total("scores", with_sum)[0]

        total = (self.engine.try_again(sum_scores).double() * SCORES).view(-1, 3)
        means = torch.where(total[:, 2:] > 0, total[:, :2] / total[:, 2:], math.nan)
        by_split = dict(zip(sorted(data.splits), means, strict=True))
        return {split: by_split[split] for split in data.splits}


def share_scores(data: FederatedData, *, trained_only: bool) -> dict[str, dict[str, float]]:
    """What each client's scores count in the mean of each split: its share of the examples in train, one of n elsewhere."""
    clients = data.train.ids if trained_only else tuple(dict.fromkeys(i for c in data.splits.values() for i in c.ids))
    shares: dict[str, dict[str, float]] = {client: dict.fromkeys(data.splits, 0.0) for client in clients}
    for split, holders in data.splits.items():
        weights = holders.sizes.double() if split == "train" else torch.ones(len(holders), dtype=torch.float64)
        for client, share in zip(holders.ids, (weights / weights.sum()).tolist(), strict=True):
            if client in shares:
                shares[client][split] = share
    return shares
