"""FedBuff: clients come and go on a simulated clock, and the server steps whenever its buffer is full.

The driver of runs whose sampler is `sampling.FedBuff`. A round of such a run is one step of the server, from one version of the
model to the next. Times are computed, never measured, so that a run is a function of its seed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from equipoise.core import rng
from equipoise.core.update_checks import as_local_work
from equipoise.errors import Diverged, EquipoiseError, IncompatibleParts, notify
from equipoise.privacy.private_sums import client_weights, mean_loss
from equipoise.round import Outcome, Plan, or_diverged, stop_unless_finite
from equipoise.round_report import report_of
from equipoise.runs.setup import Setting
from equipoise.sampling import TICKS
from equipoise.server_step import named_by_aggregator, next_state, scaled, server_step, total_of_rows
from equipoise.types import Cohort, Combined, Job, LocalWork, RiskValue, RoundReport, ServerState

_NEVER = -(2**62)  # the step to which a client without any contribution contributed last


class Flight(NamedTuple):
    """A job of a client that is at work: when it ends, who does it, from which version, and the how-manieth of the client."""

    end: int  # ticks
    client: int  # position in data.train
    version: int
    number: int


@dataclass(frozen=True, eq=False)
class FlightState:
    """The clock and all jobs under way, between two steps of the server."""

    now: int
    flights: Tensor  # (M, 4) int64: end, client, version, number
    begun: Tensor  # (n,) int64: how many jobs each client has begun
    models: dict[int, Tensor]  # the model of each version that somebody works from
    last: Tensor | None = None  # (n,) int64: the step that each client contributed to last; None where nobody has to wait

    @classmethod
    def first(cls, clients: int, *, waits: bool = False) -> FlightState:
        """Before anything has begun; `waits` says whether clients have to wait for some steps before they begin again."""
        empty = torch.zeros(0, 4, dtype=torch.int64)
        last = torch.full((clients,), _NEVER, dtype=torch.int64) if waits else None
        return cls(0, empty, torch.zeros(clients, dtype=torch.int64), {}, last)


class BufferedRounds:
    """Steps of the server of runs whose clients come and go: called with the runs' states, it gives the next outcomes."""

    def __init__(self, settings: Sequence[Setting]) -> None:
        self.clocks = [RunOnClock(setting) for setting in settings]

    def __call__(self, states: Sequence[ServerState]) -> list[Outcome]:
        """Of each run the state after one more step and what it did, or the error that stops it."""
        return [or_diverged(clock.step, state) for clock, state in zip(self.clocks, states, strict=True)]


class RunOnClock:
    """One run on its simulated clock."""

    def __init__(self, setting: Setting) -> None:
        if setting.engine_traits.network is not None:
            raise IncompatibleParts(
                f"{setting.algorithm.sampler!r} simulates a clock, and the nodes of a network have a real one.",
                "Run it in a simulation, or use another sampler.",
            )
        if setting.task.carried.names:
            raise IncompatibleParts(
                f"The model carries running statistics, and {setting.algorithm.sampler!r} does not average those of different "
                "versions.",
                "Use models.with_group_norm(model).",
            )
        self.setting, self.rule = setting, setting.algorithm.traits.sampler.buffered
        clients, solver = setting.data.train, setting.algorithm.solver
        steps = [solver.local_steps(size) for size in clients.host_sizes.tolist()]
        self.ids = clients.ids_at(torch.arange(len(clients)))
        self.ticks = self.rule.ticks(self.ids, steps)

    def step(self, state: ServerState) -> tuple[ServerState, RoundReport]:
        """Let time pass until the buffer is full, then move the model."""
        began, setting = time.perf_counter(), self.setting
        for store in {clients.store for clients in setting.data.splits.values() if clients.store is not None}:
            store.refuse_changed()
        waits = self.rule.apart is not None
        before = FlightState.first(len(self.ids), waits=waits) if state.flights is None else state.flights
        buffer, after = self.fill(before, state)
        if waits:
            self.refuse_too_close(buffer, before, state.round)
        with setting.engine_traits.round_context():
            plan, combined = self.combine(buffer, state, after.models)
        work = combined.work
        try:
            params, server = server_step(state, setting.algorithm, combined.total)
        except Diverged as failure:
            raise named_by_aggregator(failure, setting.algorithm.aggregator, combined) from None
        needed = {int(version) for version in after.flights[:, 2].tolist()}
        after = replace(after, models={version: model for version, model in after.models.items() if version in needed})
        changed = {"aggregator": combined.aggregator, "privacy": combined.privacy, "flights": after}
        moved = next_state(setting, state, params=params, server=server, **changed)
        open_work = work if setting.protection.in_the_open else None
        lost = plan.workers.clients[torch.from_numpy(~open_work.arrived)].tolist() if open_work is not None else []
        rejected = tuple(self.ids[i] for i in lost)
        report = replace(
            report_of(setting, plan, began, work), rejected=rejected, clock=after.now / TICKS,
            arrivals=tuple((self.ids[f.client], self.ticks[f.client] / TICKS, state.round - f.version) for f in buffer),
            epsilon=setting.protection.epsilon_after(moved.round),
        )  # fmt: skip
        report = replace(report, trained=0) if combined.lost else report  # whatever clients did is in no model
        return moved, report

    def fill(self, before: FlightState, state: ServerState) -> tuple[list[Flight], FlightState]:
        """The jobs of the next buffer in the order in which they come back, and what is under way then.

        All jobs that end at one instant are taken before anyone begins; those beyond the buffer wait for the next version.
        With `apart`, a client begins at least `apart` steps after the one that it contributed to last. A job that begins
        at a version contributes to that step or a later one, so contributions of a client are at least as far apart.
        """
        version, now = state.round, before.now
        last = None if self.rule.apart is None else self.steps_of_last(before).clone()
        flights = [Flight(*row) for row in before.flights.tolist()]
        begun, models = before.begun.clone(), {**before.models}
        here: set[int] = set()  # who has begun at this version
        buffer: list[Flight] = []
        order: list[int] | None = None
        while True:
            back = sorted((f for f in flights if f.end <= now), key=lambda f: (f.end, self.ids[f.client], f.number))
            taken = back[: self.rule.buffer - len(buffer)]
            buffer += taken
            if last is not None:
                last[[f.client for f in taken]] = version
            flights = [f for f in flights if f not in taken]
            if len(buffer) == self.rule.buffer:
                break
            if len(flights) < self.setting.clients_per_round:
                if order is None:
                    order = self.rule.order(version, len(self.ids), self.setting.clients_per_round, self.setting.seed)
                busy = {f.client for f in flights}
                idle = [client for client in order if client not in busy and client not in here]
                if last is not None:
                    idle = [client for client in idle if version - int(last[client]) >= self.rule.apart]
                for client in idle[: self.setting.clients_per_round - len(flights)]:
                    flights.append(Flight(now + self.ticks[client], client, version, int(begun[client])))
                    begun[client] += 1
                    here.add(client)
                    models.setdefault(version, state.model)
            now = min(f.end for f in flights)
        rows = torch.tensor([list(f) for f in flights], dtype=torch.int64).reshape(len(flights), 4)
        return buffer, FlightState(now, rows, begun, models, last)

    @staticmethod
    def steps_of_last(before: FlightState) -> Tensor:
        """The step (n,) that each client contributed to last; without it nobody can be held apart."""
        if before.last is None:
            raise EquipoiseError("The state of this run does not say when clients contributed last, which `apart` goes by.")
        return before.last

    def refuse_too_close(self, buffer: Sequence[Flight], before: FlightState, step: int) -> None:
        """Stop before a step that breaks the promise of `apart`, by which noise may have been set: never, unless by a fault."""
        last, clients = self.steps_of_last(before), [f.client for f in buffer]
        close = [self.ids[client] for client in clients if step - int(last[client]) < self.rule.apart]
        if close or len(set(clients)) < len(clients):
            raise EquipoiseError(f"Clients contributed to step {step + 1} too soon after their last: {close or clients}.")

    def combine(self, buffer: Sequence[Flight], state: ServerState, models: dict[int, Tensor]) -> tuple[Plan, Combined]:
        """The local work of the buffer and its total Σ α_k f_k u_k / Σ α_k, f_k the factor of its staleness.

        Jobs from one version are one call of the engine, with the learning rate of that version.
        """
        setting, algorithm, engine = self.setting, self.setting.algorithm, self.setting.engine
        flights = sorted(buffer, key=lambda f: (f.version, f.client))
        clients = torch.tensor([f.client for f in flights])
        base = setting.alpha[clients] / setting.alpha[clients].sum()
        weights, risk = self.weigh(flights, base, models, state)
        share = weights / weights.sum().clamp(min=torch.finfo(torch.float64).tiny)  # no weight at all: the model stays
        factors = torch.tensor([self.rule.factor(state.round - f.version) for f in flights], dtype=torch.float64)
        everyone = Cohort(state.round, setting.seed, clients, base, torch.ones_like(base))
        everyone = replace(everyone, shares=share) if setting.data.malicious else everyone
        plan = Plan(everyone, None, risk, everyone, share, None, 0)
        jobs = []
        for version in dict.fromkeys(f.version for f in flights):
            places = torch.tensor([i for i, f in enumerate(flights) if f.version == version])
            cohort = replace(everyone.take(places), round=version)
            jobs.append(Job(models[version], cohort, (share * factors)[places]))
        if setting.protection.without_clients:  # noise is released
            return self.combine_private(plan, jobs, factors, state)
        if not setting.protection.in_the_open:
            return self.combine_masked(plan, jobs, state)
        linear = algorithm.aggregator.linear
        works = [
            engine.summed_update(job.params, job.cohort, algorithm.solver, job.weights, algorithm.aggregator)
            if linear
            else engine.updates(job.params, job.cohort, algorithm.solver)
            for job in jobs
        ]
        updates = sum_of([work.update for work in works]) if linear else torch.cat([work.update for work in works])
        norms, losses = torch.cat([work.sq_norms.cpu() for work in works]), torch.cat([work.losses.cpu() for work in works])
        work = LocalWork(updates, norms, losses)
        arrived = torch.from_numpy(work.arrived)
        if not bool(arrived.any()):
            stop_unless_finite(work.sq_norms, everyone, setting.data.train, "update")
        weighed = share > 0  # a client that finds the weight 0 takes no part
        if not bool((arrived & weighed).any()):  # the model stays
            return plan, Combined(torch.zeros_like(state.params), work, state.aggregator, state.privacy)
        if linear:
            known = 1.0 if bool(arrived.all()) else 1.0 / float(share[arrived].sum())
            return plan, Combined(scaled(updates, known), work, state.aggregator, state.privacy)
        keys = None
        if algorithm.traits.aggregator.needs_keys:
            stream = rng.stream_key(setting.seed, "aggregation", state.round)
            keys = rng.client_keys(stream, setting.data.train.keys[clients].cpu())
        updates = updates * factors.to(updates).unsqueeze(1)
        total, aggregated = total_of_rows(algorithm.aggregator, work, updates, share, state.aggregator, keys=keys)
        return plan, Combined(total, work, aggregated, state.privacy)

    def weigh(
        self, flights: Sequence[Flight], base: Tensor, models: dict[int, Tensor], state: ServerState
    ) -> tuple[Tensor, RiskValue]:
        """The weights (K,) of jobs, in the order of versions: α_k, or what clients find at the model that they began with."""
        traits, bound = self.setting.algorithm.traits.risk, self.rule.loss_bound
        if not traits.needs_losses or bound is None:
            return base, RiskValue(torch.tensor(float("nan")), base)
        found = []
        for version in dict.fromkeys(f.version for f in flights):
            clients = torch.tensor([f.client for f in flights if f.version == version])
            ones = torch.ones(len(clients), dtype=torch.float64)
            cohort = Cohort(version, self.setting.seed, clients, ones / len(clients), ones)
            found.append(self.setting.engine.losses(models[version], cohort).cpu())
        losses = torch.cat(found)
        if not bool(torch.isfinite(losses).any()):
            clients = torch.tensor([f.client for f in flights])
            stop_unless_finite(losses, Cohort(state.round, 0, clients, base, base), self.setting.data.train, "loss")
        weights = client_weights(traits, losses, base, bound)
        return weights, RiskValue(mean_loss(losses.nan_to_num(), weights), weights)

    def combine_private(self, plan: Plan, jobs: Sequence[Job], factors: Tensor, state: ServerState) -> tuple[Plan, Combined]:
        """The local work of the buffer and Σ clip(f_k u_k) plus noise, over the size of the buffer, which is public.

        Factors f_k of staleness come before clipping, and the sum is not scaled again where updates are left out.
        """
        setting, solver = self.setting, self.setting.algorithm.solver
        works = [setting.engine.updates(job.params, job.cohort, solver) for job in jobs]
        updates = torch.cat([work.update for work in works])
        updates = updates * factors.to(updates).unsqueeze(1)
        risk, denominator = setting.protection.weigh(plan.cohort, None, state.risk)
        if denominator is None or denominator != self.rule.buffer:
            raise EquipoiseError(f"Noise was made for {denominator} clients in a step, and the buffer has {self.rule.buffer}.")
        plan = plan._replace(risk=risk, weights=risk.weights / denominator, denominator=denominator)
        combined = setting.protection.combine(state, setting.engine, solver, plan, updates)
        if combined.work is not None:
            combined = replace(combined, work=replace(combined.work, losses=torch.cat([work.losses.cpu() for work in works])))
        return plan, combined

    def combine_masked(self, plan: Plan, jobs: Sequence[Job], state: ServerState) -> tuple[Plan, Combined]:
        """The local work of the buffer and its total by a secure sum, in which all versions count alike.

        A client may be in a buffer twice. If too few different clients are, the sum would tell too much, and stays masked.
        """
        setting, algorithm = self.setting, self.setting.algorithm
        updates = torch.cat([setting.engine.updates(job.params, job.cohort, algorithm.solver).update for job in jobs])
        different, fewest = len(set(plan.workers.clients.tolist())), algorithm.traits.privacy.fewest or 2
        if different < fewest:
            why = f"its buffer has updates of {different} of at least {fewest} clients, so that their sum would say too much"
            notify(f"Round {state.round + 1} leaves the model as it is: {why}.")
            work = as_local_work(updates, state.params)
            return plan, Combined(torch.zeros_like(state.params), work, state.aggregator, state.privacy)
        risk, _ = setting.protection.weigh(plan.cohort, None, state.risk)
        plan = plan._replace(risk=risk, weights=risk.weights)
        combined = setting.protection.combine(state, setting.engine, algorithm.solver, plan, updates)
        return plan, replace(combined, work=combined.work or as_local_work(updates, state.params), privacy=state.privacy)


def sum_of(totals: Sequence[Tensor]) -> Tensor:
    """The sum (D,) of the totals of some jobs, in their order; of one it is that total itself."""
    total = totals[0]
    for each in totals[1:]:
        total = total + each
    return total
