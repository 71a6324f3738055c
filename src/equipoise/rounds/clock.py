"""FedBuff: clients come and go on a simulated clock, and the server steps whenever its buffer is full.

The driver of runs whose sampler is `sampling.FedBuff`. A round of such a run is one step of the server, from one version of the
model to the next: the clients of the buffer are its cohort, and each is asked at the model of its start. Times are computed,
never measured, so that a run is a function of its seed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from equipoise.engines.answers import answer_all
from equipoise.errors import Diverged, EquipoiseError, IncompatibleParts
from equipoise.rounds.drivers import Outcome, committed, together
from equipoise.rounds.one_round import one_round
from equipoise.sampling import TICKS
from equipoise.types import Cohort, LocalWork, ServerState
from equipoise.types.round_contracts import Ask, Fold

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


class OnAClock:
    """Steps of the server of runs whose clients come and go: called with the runs' states, it gives the next outcomes."""

    def __init__(self, runs: Sequence[Any]) -> None:
        self.clocks = [RunOnClock(run) for run in runs]

    def __call__(self, states: Sequence[ServerState]) -> list[Outcome]:
        """Of each run the state after one more step and what it did, or the error that stops it."""
        return [clock.step(state) for clock, state in zip(self.clocks, states, strict=True)]


class RunOnClock:
    """One run on its simulated clock."""

    def __init__(self, run: Any) -> None:
        if run.engine_traits.network is not None:
            raise IncompatibleParts(
                f"{run.algorithm.sampler!r} simulates a clock, and the nodes of a network have a real one.",
                "Run it in a simulation, or use another sampler.",
            )
        if run.task.carried.names:
            raise IncompatibleParts(
                f"The model carries running statistics, and {run.algorithm.sampler!r} does not average those of different "
                "versions.",
                "Use models.with_group_norm(model).",
            )
        self.run, self.rule = run, run.algorithm.traits.sampler.buffered
        clients, solver = run.data.train, run.algorithm.solver
        steps = [solver.local_steps(size) for size in clients.host_sizes.tolist()]
        self.ids = clients.ids_at(torch.arange(len(clients)))
        self.ticks = self.rule.ticks(self.ids, steps)

    def step(self, state: ServerState) -> Outcome:
        """Let time pass until the buffer is full, then move the model."""
        began, run = time.perf_counter(), self.run
        for store in {clients.store for clients in run.data.splits.values() if clients.store is not None}:
            store.refuse_changed()
        waits = self.rule.apart is not None
        before = FlightState.first(len(self.ids), waits=waits) if state.flights is None else state.flights
        buffer, after = self.fill(before, state)
        if waits:
            self.refuse_too_close(buffer, before, state.round)
        answers = partial(self.answers, after.models)
        with run.engine_traits.round_context():
            (ended,) = together(answers, [one_round(run, state, partial(self.cohort, buffer, state.round))])
        if isinstance(ended, Diverged):
            return ended
        moved, tell = ended
        needed = {int(version) for version in after.flights[:, 2].tolist()}
        after = replace(after, models={version: model for version, model in after.models.items() if version in needed})
        report = replace(
            tell(time.perf_counter() - began), clock=after.now / TICKS,
            arrivals=tuple((self.ids[f.client], self.ticks[f.client] / TICKS, state.round - f.version) for f in buffer),
        )  # fmt: skip
        return committed(run, replace(moved, flights=after)), report

    def cohort(self, buffer: Sequence[Flight], step: int) -> Cohort:
        """The clients of the buffer by version, each with the factor of its staleness."""
        flights = sorted(buffer, key=lambda f: (f.version, f.client))
        clients, versions = (torch.tensor([f[place] for f in flights]) for place in (1, 2))
        base = self.run.alpha[clients] / self.run.alpha[clients].sum()
        factors = torch.tensor([self.rule.factor(step - f.version) for f in flights], dtype=torch.float64)
        columns = {"version": versions, "factor": factors}
        return Cohort(step, self.run.seed, clients, base, torch.ones_like(base), columns)

    def answers(self, models: dict[int, Tensor], asks: Sequence[Ask]) -> list[Any]:
        """Answers of clients that came back, each at the model and at the rate of its start."""
        return [self.answer(models, ask) for ask in asks]

    def answer(self, models: dict[int, Tensor], ask: Ask) -> Any:
        """The answer to a question: those from one version are one call of the engine."""
        fold = ask.fold or Fold(None)
        streams = fold.by is not None and fold.scales is None
        clients = ask.clients if fold.factors is None else ask.clients.having(shares=ask.clients.shares * fold.factors)
        asks = []
        for version in dict.fromkeys(clients.columns["version"].tolist()):
            part = replace(clients.take(clients.columns["version"] == version), round=version)
            asks.append(replace(ask, model=models[version], clients=part, fold=Fold(fold.by if streams else None)))
        answers = [answer_all(self.run.engine, [each])[0] for each in asks]
        if ask.what == "loss":
            return torch.cat([each.cpu() for each in answers])
        norms, losses = (torch.cat([getattr(each, name).cpu() for each in answers]) for name in ("sq_norms", "losses"))
        updates = [each.update for each in answers]
        if streams:
            return LocalWork(reduce(torch.add, updates), norms, losses)
        return fold.of(LocalWork(torch.cat(updates), norms, losses), ask.clients.shares)

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
            if len(flights) < self.run.clients_per_round:
                if order is None:
                    order = self.rule.order(version, len(self.ids), self.run.clients_per_round, self.run.seed)
                busy = {f.client for f in flights}
                idle = [client for client in order if client not in busy and client not in here]
                if last is not None:
                    idle = [client for client in idle if version - int(last[client]) >= self.rule.apart]
                for client in idle[: self.run.clients_per_round - len(flights)]:
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
