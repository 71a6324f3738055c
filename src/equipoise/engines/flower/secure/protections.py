"""Secure aggregation and distributed differential privacy over a network, and evaluation by secure sums.

Both protections are those of a simulation with their sums over real clients. A quantile by many sums (privacy.SecureSums) takes
two exchanges for each of its iterations, and should be given few; a private one (privacy.PrivateQuantile) takes a single sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equipoise.engines.flower.secure.masked_sums import Base, MaskedSums, RoundSums, Sum
from equipoise.engines.flower.transport.nodes import Request, TooFewClients
from equipoise.errors import IncompatibleParts
from equipoise.privacy.discrete_gaussian import sample_discrete_gaussian
from equipoise.privacy.mechanism import SecureAggregation
from equipoise.privacy.private_quantile import ENOUGH_NOISE, quantile_of_sum, safe_modulus
from equipoise.privacy.private_run import Grid, PrivateRun, PrivateState
from equipoise.privacy.secure_run import SecureRun
from equipoise.privacy.secure_sum import centred, required_modulus
from equipoise.result import ClientTable
from equipoise.risk import Superquantile
from equipoise.risk.quantile_sources import SecureSums, quantile_by_sums
from equipoise.risk.superquantile import Released
from equipoise.sampling import Full, Poisson
from equipoise.types import Cohort, Engine, LocalSolver, LocalWork, RiskValue

if TYPE_CHECKING:
    from equipoise.algorithm import Algorithm
    from equipoise.data.clients import FederatedData
    from equipoise.engines.flower.engine import FlowerEngine
    from equipoise.round import Plan

WIDE = 1 << 62  # the modulus of sums of few numbers
FINE, COARSE = 2.0**-40, 2.0**-30  # steps of a quantile's sums: of losses, up to 4096, and of its iterations, up to 4 million
SCORES = 2.0**-32


def by_sums_only(algorithm: Algorithm) -> bool:
    """Whether an algorithm asks nodes for secure sums alone."""
    privacy = algorithm.privacy
    return isinstance(privacy, SecureAggregation) or getattr(privacy, "noise", "central") == "distributed"


def over_network(engine: FlowerEngine, protection: Any, algorithm: Algorithm) -> Any:
    """The protection of a run with its sums over the network; noise that the server adds itself needs none."""
    if protection is None or not by_sums_only(algorithm):
        return protection
    if hasattr(algorithm.personal, "updates"):
        raise IncompatibleParts(
            f"{algorithm.personal!r} has clients send other updates than the solver's, which are not summed securely here.",
            "Use personal.Ditto(): its models stay with the clients.",
        )
    engine.secure = SecureEvaluation(engine)
    if isinstance(protection, SecureRun):
        return NetworkSecureRun(engine, protection, algorithm)
    return NetworkPrivateRun(engine, protection, algorithm)


# --------------------------------------------------------------------------------------------------------- secure aggregation


class NetworkSecureRun(SecureRun):
    """Secure aggregation with real masks: losses, tails and updates stay with the clients."""

    def __init__(self, engine: FlowerEngine, of: SecureRun, algorithm: Algorithm) -> None:
        self.privacy, self.risk, self.seed, self.aggregator = of.privacy, of.risk, of.seed, of.aggregator
        self.engine, self.round = engine, RoundSums(engine, algorithm)
        self.eta = math.nan  # the quantile that is out in this round

    def weigh(self, cohort: Cohort, losses: Tensor | None, state: Any) -> tuple[RiskValue, float]:
        """Base weights for all, as nobody but a client knows its own; for Δ-FL the quantile is found by sums first."""
        weights, unknown = cohort.weights * len(cohort), torch.tensor(float("nan"))
        update: Sum = ("update", self.engine.task.layout.dimension + 1, self.privacy.modulus)
        if not isinstance(self.risk, Superquantile):
            self.round.begin(cohort, [update], self.engine.params if losses is not None else None)
            return RiskValue(unknown, weights, state), 1.0
        source = self.risk.quantile
        if not isinstance(source, SecureSums):
            raise IncompatibleParts(f"{source!r} is no quantile by secure sums.", "Use quantile=privacy.SecureSums().")
        needed = [_quantile_sum(number) for number in range(source.iterations + 3)]
        released = state if isinstance(state, Released) and state.rounds < self.risk.eta_every else None
        self.round.begin(cohort, [update, *(needed if released is None else [_REACHED])], self.engine.params)
        if released is not None and not self._reached(float(released.eta)):
            released = None
            self.round.add(needed)
        released = released or Released(self._quantile(cohort, source), 0)
        self.eta = float(released.eta)
        return RiskValue(unknown, weights, replace(released, rounds=released.rounds + 1)), 1.0

    def _reached(self, eta: float) -> bool:
        """Whether anybody reaches an old quantile: a sum of ones."""
        ask = {"kind": "reached", "public": eta, "base": 1.0}
        return int(self.round.total(_REACHED[0], lambda _: ask)[0]) > 0

    def _quantile(self, cohort: Cohort, source: SecureSums) -> Tensor:
        """The quantile of the losses, by sums; the same computation as in a simulation, with rows that nobody sees.

        A client that is lost on the way is missing from later sums only, which moves the quantile of this round a little;
        to begin again would show the sums with and without it.
        """
        assert isinstance(self.risk, Superquantile)  # noqa: S101
        alpha = dict(zip(self.engine.names(cohort), cohort.weights.tolist(), strict=True))
        before: list[list[float]] = []

        def secure_sum(rows: Tensor) -> Tensor:
            number, wanted = len(before), _quantile_sum(len(before))
            if wanted[0] not in self.round.sums:  # more than usual, to find a quantile that somebody reaches
                self.round.add([wanted])
            step = COARSE if 2 <= number < source.iterations + 2 else FINE
            ask = {"kind": "quantile", "before": list(before), "step": step}
            total, _ = self.round.total(wanted[0], lambda client: {**ask, "alpha": alpha[client]})
            found = (total.double() * step)[: rows[0].numel()]
            if number == 0:
                self.engine.facts["loss"] = float(found[1] / found[0])
                # When all losses are alike, rounding may lift their mean above each: lower it by as much as it may have.
                found[1] -= 2 * len(cohort) * step
            before.append(found.tolist())
            return found.reshape(rows.shape[1:])

        one = torch.ones(1, dtype=torch.float64)
        return quantile_by_sums(
            one, one, self.risk.tail, iterations=source.iterations, tolerance=source.tolerance, secure_sum=secure_sum
        )

    def combine(
        self, params: Tensor, engine: Engine, solver: LocalSolver, plan: Plan, sent: Tensor | None
    ) -> tuple[Tensor, LocalWork | None]:
        """Σ w_k u_k / Σ w_k over the clients that are left, both of one masked sum."""
        weights = dict(zip(self.engine.names(plan.workers), plan.weights.tolist(), strict=True))
        public = self.eta if isinstance(self.risk, Superquantile) else float(self.privacy.loss_bound or 0)
        ask = {"kind": "update", "step": self.privacy.step, "public": public}
        total, _ = self.round.updates(
            plan.cohort, lambda client: {**ask, "base": weights.get(client, 0.0)}, params, solver
        )  # fmt: skip
        numbers = total.double() * self.privacy.step
        mass = float(numbers[-1])
        return (numbers[:-1] / mass if mass > 0 else torch.zeros_like(numbers[:-1])).to(params), None


_REACHED: Sum = ("reached", 1, 1 << 32)


def _quantile_sum(number: int) -> Sum:
    """Sum number t of a quantile; those of one number have an empty second."""
    return f"quantile {number}", 2, WIDE


# ------------------------------------------------------------------------------------------------ distributed privacy


class NetworkPrivateRun(PrivateRun):
    """Distributed differential privacy end to end: clients clip, round and add their share of noise, and only sums are seen.

    Shares are calibrated to the fewest survivors that a sum may have. What is missing because clients were lost the server
    adds, for those who receive the model: its noise is always of as many shares. Cohorts are of fixed size: a sum that is
    refused because a Poisson cohort was small would tell more than the noise hides.
    """

    def __init__(self, engine: FlowerEngine, of: PrivateRun, algorithm: Algorithm) -> None:
        if isinstance(of.sampler, Poisson):
            raise IncompatibleParts(
                "Poisson cohorts may have fewer clients than a secure sum needs, and refusing such a sum tells who was drawn.",
                "Use sampler=sampling.Uniform(), cohorts of fixed size, or sampling.Full().",
            )
        expected = of.clients if isinstance(of.sampler, Full) else of.expected
        survivors = max(engine.patience.minimum, expected // 2 + 1, 2)
        privacy = of.privacy if of.privacy.fewest is not None else replace(of.privacy, fewest=min(survivors, expected))
        super().__init__(
            privacy, algorithm, clients=of.clients, clients_per_round=of.expected, rounds=of.rounds, dimension=of.dimension,
            seed=of.seed,
        )  # fmt: skip
        self.engine, self.round = engine, RoundSums(engine, algorithm, max(survivors, self.fewest))
        self._public: float | None = None
        self._released = False

    def _ask(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"kind": kind, "source": self.privacy.source, **more}

    def weigh(self, cohort: Cohort, losses: Tensor | None, state: Any) -> tuple[RiskValue, float]:
        """One for each client, as nobody but a client knows its weight; and the number that the sum is divided by."""
        ones, unknown = torch.ones(len(cohort), dtype=torch.float64), torch.tensor(float("nan"))
        sums: list[Sum] = [("update", self.dimension, self.grid.modulus)]
        self._public, self._released = None, False
        if losses is None:
            self.round.begin(cohort, sums, None)
            return RiskValue(unknown, ones, state), self.workers
        if isinstance(self.risk, Superquantile):
            self._public = float(self._private_quantile(self.risk, cohort, sums))
            self._released = True
            return RiskValue(unknown, ones), self.workers
        denominator = max(self._private_weights(cohort, sums), 1.0)
        self._released = True
        return RiskValue(unknown, ones, state), denominator

    def _private_quantile(self, risk: Superquantile, cohort: Cohort, sums: Sequence[Sum]) -> Tensor:
        assert self.quantile is not None  # noqa: S101 — the rules refuse a superquantile without a private one
        sigma, scale = self.quantile.noise()
        bound, bins, modulus = self.quantile.bound, self.quantile.bins, self.quantile.modulus
        modulus = modulus or safe_modulus(scale, sigma, bins, max(len(cohort), self.shares))
        self.round.begin(cohort, [*sums, ("quantile", 2 * bins - 2, modulus)], self.engine.params)
        ask = self._ask("histogram", bound=bound, bins=bins, sigma=sigma, scale=scale)
        total, survivors = self.round.total("quantile", lambda _: ask)
        total = self._topped_up(total, survivors, Fraction(sigma) ** 2, modulus, "quantile", cohort.round)
        return quantile_of_sum(total, risk.tail, bound=bound, bins=bins, scale=scale, clients=len(survivors))

    def _private_weights(self, cohort: Cohort, sums: Sequence[Sum]) -> float:
        z = float(self.calibration.first or 0)
        scale = math.ceil(max(ENOUGH_NOISE, 2 * math.sqrt(self.fewest)) / z) if z else 1 << 20
        sigma = z * scale / math.sqrt(self.fewest) * (1 + 1e-9)
        modulus = required_modulus(1.0, 1 / scale, max(len(cohort), self.shares), sigma=sigma)
        variance = Grid(1 / scale, scale, sigma, modulus).variance if z else Fraction(0)
        self.round.begin(cohort, [*sums, ("weights", 1, modulus)], self.engine.params)
        ask = self._ask("weight", scale=scale, variance=_pair(variance), bound=float(self.privacy.loss_bound or 0))
        total, survivors = self.round.total("weights", lambda _: ask)
        return float(self._topped_up(total, survivors, variance, modulus, "weights", cohort.round)[0]) / scale

    def _topped_up(
        self, total: Tensor, survivors: Sequence[str], variance: Fraction, modulus: int, purpose: str, round_index: int
    ) -> Tensor:
        """The sum with the shares of noise that are missing: as many as clients were expected, whoever was lost."""
        source = self.source(f"{purpose}: missing shares", round_index)
        for _ in range(self.shares - len(survivors) if variance > 0 else 0):
            total = total + sample_discrete_gaussian(variance, len(total), source=source)
        return centred(total, modulus)

    def combine(
        self, state: PrivateState, params: Tensor, engine: Engine, solver: LocalSolver, plan: Plan, sent: Tensor | None
    ) -> tuple[Tensor, PrivateState, LocalWork | None]:
        """The sum of clipped updates with noise, divided by a number fixed in advance."""
        grid = self.grid
        bound = self.quantile.bound if self.quantile is not None else float(self.privacy.loss_bound or 0)
        ask = self._ask(
            "private update", clip=self.privacy.clip, step=grid.step, norm_bound=grid.norm_bound,
            variance=_pair(grid.variance if grid.sigma > 0 else Fraction(0)), bound=bound, public=self._public or 0.0,
        )  # fmt: skip
        participations = state.participations.clone()
        participations[plan.cohort.clients] += 1
        after = PrivateState(state.clip, participations)
        try:
            total, survivors = self.round.updates(plan.cohort, lambda _: ask, params, solver)
        except TooFewClients:
            if not self._released:
                raise
            # A quantile of this round is out and paid for: the round ends here, and is not tried again with another.
            return torch.zeros_like(params), after, None
        variance = grid.variance if grid.sigma > 0 else Fraction(0)
        total = self._topped_up(total, survivors, variance, grid.modulus, "update", plan.cohort.round)
        return (total.double() * (grid.step / plan.denominator)).to(params), after, None


def _pair(value: Fraction) -> list[int]:
    return [value.numerator, value.denominator]


# ----------------------------------------------------------------------------------------------------------------- evaluation


class SecureEvaluation:
    """Evaluation by sums: the mean loss and error of each split, over clients, in place of a row for each client."""

    def __init__(self, engine: FlowerEngine) -> None:
        self.engine = engine

    def table(self, params: Tensor, data: FederatedData) -> ClientTable:
        """One row per split, of the mean client: by examples where clients train, each client alike elsewhere."""
        values = self.engine.values(self.engine.federation.seed)
        means = self.means(data, 0, lambda _: Request(values, {"params": params}))
        seen = set(data.train.ids)
        return ClientTable(
            tuple(f"mean of {len(data.splits[split])} clients" for split in means),
            tuple(means),
            torch.tensor([set(data.splits[split].ids) <= seen for split in means]),
            torch.tensor([int(data.splits[split].sizes.sum()) for split in means]),
            torch.stack([found[0] for found in means.values()]),
            torch.stack([found[1] for found in means.values()]),
        )

    def means(self, data: FederatedData, round_index: int, base: Base, *, own: bool = False) -> dict[str, Tensor]:
        """Mean loss and error (2,) by split, at the shared model or at clients' own; NaN where nobody has a number."""
        shares = score_shares(data, trained_only=own)
        ask = {"kind": "scores", "step": SCORES, "own": own}

        def with_sum(client: str) -> Request:
            request = base(client)
            return Request({**request.values, "sum": {**ask, "shares": shares[client]}}, request.tensors)

        def once() -> Tensor:
            sums = MaskedSums(self.engine, round_index, sorted(shares))
            sums.prepare([("scores", 3 * len(data.splits), WIDE)], Request(self.engine.values(self.engine.federation.seed)))
            return sums.total("scores", with_sum)[0]

        total = (self.engine.try_again(once).double() * SCORES).view(-1, 3)
        rows = dict(zip(sorted(data.splits), total, strict=True))
        return {
            split: rows[split][:2] / rows[split][2] if rows[split][2] > 0 else torch.full((2,), math.nan).double()
            for split in data.splits
        }  # fmt: skip


def score_shares(data: FederatedData, *, trained_only: bool) -> dict[str, dict[str, float]]:
    """What each client's scores count in the mean of each split: its share of the examples in train, one of n elsewhere."""
    clients = data.train.ids if trained_only else tuple(dict.fromkeys(i for c in data.splits.values() for i in c.ids))
    shares: dict[str, dict[str, float]] = {client: dict.fromkeys(data.splits, 0.0) for client in clients}
    for split, found in data.splits.items():
        weights = found.sizes.double() if split == "train" else torch.ones(len(found), dtype=torch.float64)
        for client, share in zip(found.ids, (weights / weights.sum()).tolist(), strict=True):
            if client in shares:
                shares[client][split] = share
    return shares
