"""The Flower engine: clients are nodes, and what other engines compute, this one asks for in messages.

The round and the loop over rounds are those of every engine. What a network adds is here: clients that do not answer, or not as
asked, are left out of the round and named; if too few are left, the round is tried again, and in the end the run stops.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from equipoise.client_metrics import ClientMetrics
from equipoise.client_table import ClientTable
from equipoise.compatibility import refuse_on_nodes
from equipoise.core.abilities import solver_traits
from equipoise.core.carried import mean_carried
from equipoise.core.task import Task
from equipoise.core.update_checks import checked_norms, longest_square, with_carried
from equipoise.core.words import counted
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.engines.flower.apps import left_out
from equipoise.engines.flower.apps.members import Member
from equipoise.engines.flower.apps.run_control import RunControl
from equipoise.engines.flower.apps.welcome import Welcome
from equipoise.engines.flower.lost_clients import Present
from equipoise.engines.flower.node_scores import NodeScores
from equipoise.engines.flower.personal.remote_work import RemotePersonalWork
from equipoise.engines.flower.personal.solver_memory import RemoteRows, kept_values
from equipoise.engines.flower.secure.crowds import find_demand
from equipoise.engines.flower.secure.evaluations import SecureEvaluation
from equipoise.engines.flower.secure.identities import default_colluders, read_public_text, signed_threshold
from equipoise.engines.flower.secure.protections import mask_sums
from equipoise.engines.flower.transport.answer_readings import read_any_loss, read_loss
from equipoise.engines.flower.transport.messages import MessageContent
from equipoise.engines.flower.transport.messenger import (
    ClientRequest,
    Messenger,
    Reading,
    TooFewClients,
    efforts_of,
    end_sentence,
    show_faults,
)
from equipoise.engines.flower.transport.part_messages import pack_part
from equipoise.errors import EquipoiseError, notify
from equipoise.personal.context import PersonalContext
from equipoise.privacy.protected import Protected
from equipoise.runs.standing_out import TOO_LONG, extremes
from equipoise.solvers.batches import steps_of
from equipoise.solvers.prepared import GRADIENT
from equipoise.types import (
    Aggregator,
    Cohort,
    Engine,
    LocalSolver,
    LocalWork,
    Personalisation,
    Protection,
    Pull,
    RoundReport,
    ServerState,
)
from equipoise.types.round_contracts import Stage

if TYPE_CHECKING:
    from equipoise.algorithm import Algorithm

T = TypeVar("T")
log = logging.getLogger("flwr")  # Flower shows it to whoever watches the run
HELLO = 5.0  # seconds that a round waits for nodes to say who they are


@dataclass(frozen=True)
class Patience:
    """How long the server waits, how many clients a round needs, and how often it is tried again."""

    timeout: float = 600.0  # seconds for an answer
    minimum: int = 1  # clients of a cohort that must do their part
    retries: int = 2  # further tries of a round with fewer
    pause: float = 10.0  # seconds before another try
    longest: float = 100.0  # times the median norm of the round's updates: longer ones are left out


@dataclass(frozen=True, eq=False)
class Federation:
    """Starts the engine on a federation: how to ask its nodes, who they are, and the name of the run among them."""

    messenger: Messenger
    members: Mapping[str, Member]
    patience: Patience
    run: str
    seed: int  # that nodes make their model by
    signed: bool = False  # secure sums are signed by the nodes
    colluders: int | None = None  # nodes that may help the server in a signed sum; None: just below a third
    welcome: Welcome | None = None  # who is let in while the run goes on
    control: RunControl = field(default_factory=RunControl)  # what the operator says meanwhile

    def choose_threshold(self, clients: int) -> tuple[int | None, int]:
        """For a sum over `clients`: the colluders it tolerates (None if unsigned), and the shares that give a secret."""
        if not self.signed:
            return None, max(2, clients // 2 + 1)
        colluders = default_colluders(clients) if self.colluders is None else self.colluders
        return colluders, max(2, signed_threshold(clients, colluders))

    def start(self, task: Task, data: FederatedData) -> FlowerEngine:
        """The engine of a task on the federation; `data` stand in for those of the nodes."""
        return FlowerEngine(self, task, data)


@dataclass(eq=False)
class RoundAtHand:
    """What the server knows of the round that is under way, beside its state."""

    cohort: Cohort | None = None
    drawn: tuple[str, ...] = ()  # the clients of the cohort
    params: Tensor | None = None  # where losses were asked for, under secure sums
    last: bool = False  # whether it is not tried again
    reported: dict[str, Any] = field(default_factory=dict)  # fields of the report that secure sums have released
    norms: dict[str, float] = field(default_factory=dict)  # of the updates that clients have sent in the open
    counted: set[str] = field(default_factory=set)  # whose work is in the secure sum, though they may have gone since


class FlowerEngine(Engine):
    """The running engine of one task on a federation, and its own `types.Network`."""

    device = torch.device("cpu")

    def __init__(self, federation: Federation, task: Task, data: FederatedData) -> None:
        self.federation, self.task, self.data = federation, task, data
        self.messenger, self.patience = federation.messenger, federation.patience
        self.secure: SecureEvaluation | None = None  # set where nothing of a single client may be asked for
        self.names_nobody = False  # under differential privacy a loss that is not finite counts as the bound
        self.round = RoundAtHand()
        self.scores = NodeScores(self)
        self.tries: list[str] = []  # why the round was tried again, each time

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Clients may be lost in a round."""
        return (Present(self),)

    @property
    def network(self) -> FlowerEngine:
        """Clients are on other machines: what changes then is in this class, too."""
        return self

    @property
    def run(self) -> str:
        """The name of the run among the nodes."""
        return self.federation.run

    # ------------------------------------------------------------------------------------------------------------- a round

    def attempt(
        self, run: Callable[[Cohort], tuple[ServerState, RoundReport]], draw: Callable[[int], Cohort]
    ) -> tuple[ServerState, RoundReport]:
        """A round, tried again while too few clients do their part; the report says who did not, and what it cost."""
        sent: Counter[str] = Counter()
        received: Counter[str] = Counter()

        def run_once(number: int) -> tuple[ServerState, RoundReport]:
            cohort = draw(number)
            self.round = RoundAtHand(cohort, self.names(cohort), last=number == self.patience.retries)
            try:
                return run(cohort)
            finally:
                sent.update(self.messenger.sent)
                received.update(self.messenger.received)

        state, report = self.try_again(run_once)
        absent = set(self.round.drawn) - self.round.counted
        missing = {client: why for client, why in self.messenger.faults.items() if client in absent}
        trained = report.trained - len(report.rejected)  # of those at work, without those whose update was left out
        if self.secure is not None and not self.names_nobody:
            trained = min(trained, len(self.round.counted))
        rejected = tuple(client for client in report.rejected if client not in missing)
        report = replace(report, **{"trained": trained, **self.round.reported}, rejected=rejected, missing=missing)
        by_client = {client: (sent[client], received[client]) for client in sorted({*sent, *received})}
        report = replace(report, bytes_sent=sent.total(), bytes_received=received.total(), bytes_by_client=by_client)
        shown = extremes(self.messenger.losses, self.round.norms) if self.secure is None and not self.names_nobody else ()
        return state, replace(report, failed_tries=tuple(self.tries), stood_out=tuple(shown))

    def numbered_tries(self) -> Iterator[int]:
        """The numbers of the tries at something, with a pause between two; each begins without faults."""
        for number in range(self.patience.retries + 1):
            if number:
                time.sleep(self.patience.pause)
            self.federation.control.obey()
            self.messenger.begin()
            self.meet_newcomers()
            yield number

    def try_again(self, work: Callable[[int], T]) -> T:
        """Work that is tried again, with the number of the try, while too few clients do their part."""
        self.tries = []
        for number in self.numbered_tries():
            try:
                return work(number)
            except TooFewClients as failure:
                said = end_sentence(failure)
                self.tries.append(str(failure))
                if self.refused_for_good:
                    raise TooFewClients(f"{said} It is not tried again: policies do not change by themselves.") from failure
                if number == self.patience.retries:
                    tried = f" It was tried {number + 1} times." if number else ""
                    raise TooFewClients(f"{said}{tried}") from failure
                log.warning("%s It is tried again in %g s.", said, self.patience.pause)
        raise AssertionError  # the last try returns or raises

    @property
    def refused_for_good(self) -> bool:
        """Whether too few clients are left besides those whose policies refuse what another try would ask again."""
        members, messenger = self.federation.members, self.messenger
        everyone = len(self.round.drawn) == len(members)  # then another try has the same cohort
        refusing = messenger.refusing if everyone else messenger.for_good
        needed = max(1, self.patience.minimum)
        if everyone and self.secure is not None:  # the owners' crowds and the protocol may demand more than the run
            needed = find_demand(self.federation, self.round.drawn, minimum=needed).clients
        return bool(refusing) and len(members) - len(refusing) < needed

    def gone(self, cohort: Cohort) -> Tensor:
        """Which clients of a cohort have failed in this round, (K,) bool."""
        return torch.tensor([client in self.messenger.faults for client in self.names(cohort)], dtype=torch.bool)

    def names(self, cohort: Cohort) -> tuple[str, ...]:
        """The ids of a cohort's clients."""
        return tuple(self.data.train.ids[k] for k in cohort.clients.tolist())

    def meet_newcomers(self) -> None:
        """Ask nodes that have connected since, such as one that was started again, and those that were silent, who they are."""
        if self.federation.welcome is not None:
            self.federation.welcome.meet(HELLO)

    @property
    def identities(self) -> dict[str, bytes]:
        """The keys that nodes have introduced themselves with, by client."""
        members = self.federation.members.items()
        return {client: read_public_text(client, member.identity) for client, member in members if member.identity}

    def request_values(self, seed: int, **more: Any) -> dict[str, Any]:
        """The plain values of every request, and more of them."""
        federation = self.federation
        return {"seed": seed, "model": federation.seed, "classes": self.data.classes, "run": federation.run, **more}

    def ask(self, action: str, cohort: Cohort, requests: Sequence[ClientRequest], reading: Reading[T]) -> list[T | None]:
        """The answers of a cohort's clients, in order; None from those that have failed in this round."""
        names = self.names(cohort)
        asked = {c: request for c, request in zip(names, requests, strict=True) if c not in self.messenger.faults}
        answers = self.messenger.ask(action, asked, cohort.round, reading)
        return [answers.get(client) for client in names]

    def require_enough(self, cohort: Cohort) -> None:
        """Stop this try of the round if too few clients are left; of a cohort other than the round's all are needed."""
        names, drawn = self.names(cohort), self.round.drawn
        faults = {client: why for client, why in self.messenger.faults.items() if client in {*names, *drawn}}
        of_the_round = set(names) <= set(drawn)
        all_of = drawn if of_the_round else names
        left = [client for client in all_of if client not in faults]
        needed = min(self.patience.minimum, len(all_of)) if of_the_round else len(all_of)
        if len(left) < max(1, needed):
            why = f"{len(left)} of {len(all_of)} clients did their part, and {needed} are needed"
            raise TooFewClients(f"Round {cohort.round + 1}: {why}: {show_faults(faults)}.")

    def require_some(self, cohort: Cohort, answers: Sequence[Any]) -> None:
        """Stop this try of the round if too few clients are left, or none of those at work has answered."""
        self.require_enough(cohort)
        if all(answer is None for answer in answers):
            raise TooFewClients(f"Round {cohort.round + 1}: none of the {len(answers)} clients at work sent an update.")

    def _require_all(self, cohort: Cohort) -> None:
        for client in self.names(cohort):
            if (why := self.messenger.faults.get(client)) is not None:
                raise TooFewClients(f"Round {cohort.round + 1}: the solver needs an answer of {client}, who {why}.")

    # --------------------------------------------------------------------------------------------------- what engines compute

    def losses(self, params: Tensor, cohort: Cohort, solver: LocalSolver | None = None) -> Tensor:
        """F_k(w) of each client (K,); NaN where a client of the round is gone, which `gone` tells.

        Under secure aggregation nobody is asked: losses stay with the clients, and all of them are NaN here.
        """
        if self.secure is not None:
            self.round.params = params
            return torch.full((len(cohort),), float("nan"), dtype=torch.float64)
        tensors: dict[str, Tensor] = {"params": params}
        packed = pack_part("solver", solver, tensors) if solver is not None and solver_traits(solver).adapts else None
        request = ClientRequest(self.request_values(cohort.seed, solver=packed), tensors)
        reading = read_any_loss if self.names_nobody else read_loss
        losses = self.ask("train.losses", cohort, [request] * len(cohort), reading)
        if cohort is not self.round.cohort:
            self._require_all(cohort)
        self.require_enough(cohort)
        self.messenger.losses |= {
            client: loss for client, loss in zip(self.names(cohort), losses, strict=True) if loss is not None
        }
        return torch.tensor([math.nan if loss is None else loss for loss in losses], dtype=torch.float64)

    def updates(self, params: Tensor, cohort: Cohort, solver: LocalSolver) -> LocalWork:
        """Local work of each client: updates (K, D), NaN and marked by an infinite norm where a client is gone."""
        tensors: dict[str, Tensor] = {"params": params}
        packed = pack_part("solver", solver, tensors)

        values = [
            self.request_values(cohort.seed, solver=packed, effort=effort, **kept_values(cohort, place))
            for place, effort in enumerate(efforts_of(cohort))
        ]
        own, carried = self.task.split(params)
        unknown = torch.full(carried.shape, math.nan, dtype=torch.float64)

        lost: list[bool] = []

        def reading(answer: MessageContent) -> tuple[Tensor, Tensor, Tensor]:
            lost.append("lost" in answer.values)
            update, loss = answer.tensor("update", own.dtype, tuple(own.shape)), answer.tensor("loss", torch.float64, (1,))[0]
            counts = "carried" in answer.arrays and len(carried) > 0  # not of a client that took no step
            return update, loss, answer.tensor("carried", torch.float64, tuple(carried.shape)) if counts else unknown

        answers = self.ask("train.update", cohort, [ClientRequest(each, tensors) for each in values], reading)
        if solver is GRADIENT:
            self._require_all(cohort)
        self.require_some(cohort, answers)
        nothing = (torch.full_like(own, math.nan), torch.tensor(math.nan, dtype=torch.float64), unknown)
        updates, losses, moments = (torch.stack(values) for values in zip(*(each or nothing for each in answers), strict=True))
        sq_norms = torch.stack([update.double().square().sum() for update in updates])
        if solver is not GRADIENT:
            seen = zip(self.names(cohort), losses.tolist(), strict=True)
            self.messenger.losses = {**{client: loss for client, loss in seen if loss == loss}, **self.messenger.losses}
            sq_norms = self._without_outliers(cohort, sq_norms)
        if any(lost):
            text = f"{counted(sum(lost), 'client')} lost what is kept for the solver, and began anew with zeros."
            notify(text)
        rows = self._row_changes(updates, cohort, solver)
        work = LocalWork(updates, checked_norms(sq_norms, losses, longest_square(own)), losses, rows=rows)
        return with_carried(work, moments) if len(carried) else work

    def _row_changes(self, updates: Tensor, cohort: Cohort, solver: LocalSolver) -> Tensor | None:
        """By what the clients' rows change with their updates (K, D), where the solver's rule says it; the rows stay there."""
        traits = solver_traits(solver)
        if traits.next_rows is None or traits.shift is None:
            return None
        steps = torch.from_numpy(steps_of(cohort, solver, self.data.train, self.task.smallest_batch))
        rate = solver.learning_rate(cohort.rate_round)
        return traits.next_rows(torch.zeros_like(updates), updates, steps, rate, cohort.prox)

    def _without_outliers(self, cohort: Cohort, sq_norms: Tensor) -> Tensor:
        """Squared norms (K,), infinite for updates that are far longer than the median of the round; who sent them is named."""
        usable = sq_norms[torch.isfinite(sq_norms)]
        median = float(usable.sort().values[(len(usable) - 1) // 2]) ** 0.5 if len(usable) > 2 else 0.0
        for client, square in zip(self.names(cohort), sq_norms.tolist(), strict=True):
            self.round.norms[client] = square**0.5
            if 0 < median * self.patience.longest < square**0.5 < math.inf:
                why = f"sent an update {square**0.5 / median:.3g} {TOO_LONG} of the round"
                self.messenger.faults.setdefault(client, why)
                self.messenger.tell(self.messenger.nodes.get(client, -1), left_out.LONG)
        bound = (median * self.patience.longest) ** 2
        return torch.where(sq_norms > bound, math.inf, sq_norms) if bound > 0 else sq_norms

    def summed_update(
        self, params: Tensor, cohort: Cohort, solver: LocalSolver, weights: Tensor, aggregator: Aggregator
    ) -> LocalWork:
        """Local work, aggregated and added up client by client, in the order of the cohort: total (D,)."""
        work = self.updates(params, cohort, solver)
        total = torch.zeros_like(work.update[0])
        for update, weight, arrived in zip(work.update, weights, work.arrived, strict=True):
            if arrived:
                total += aggregator(update.unsqueeze(0), weight.reshape(1))[0]
        counted = torch.where(torch.from_numpy(work.arrived), weights, 0.0).tolist()
        return LocalWork(total, work.sq_norms, work.losses, mean_carried(work.carried, counted), work.rows)

    def own_steps(self, models: Tensor, cohort: Cohort, solver: LocalSolver, pull: Pull | None = None) -> Tensor:
        """Refused: clients' own models stay on their nodes, where this work is done (`personal_work`)."""
        raise EquipoiseError("Clients' own models are trained on their nodes; the server never has them.")

    # ------------------------------------------------------------------------------------------------------------- evaluation

    def evaluate_own(self, models: Tensor, clients: ClientSet, which: Tensor) -> tuple[Tensor, Tensor]:
        """Refused: clients' own models stay on their nodes, where they are evaluated (`personal_work`)."""
        raise EquipoiseError("Clients' own models are evaluated on their nodes; the server never has them.")

    def evaluate(self, params: Tensor, clients: ClientSet, which: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Mean loss and mean error of every client of a set, or of those at positions `which`, (n,) and (n,).

        They are NaN for clients that do not answer.
        """
        return self.scores.shared(params, clients, which)

    def client_table(
        self, params: Tensor, data: FederatedData, round_index: int, metrics: ClientMetrics | None = None
    ) -> ClientTable:
        """Every client of every split at `params`, in one exchange; clients that do not answer have no row, and are named."""
        if self.secure is not None:
            return self.secure.table(params, data, round_index)
        return self.scores.table(params, data, metrics)

    # -------------------------------------------------------------------------------------------- parts that a network changes

    def personal_work(
        self, method: Personalisation, context: PersonalContext, solver: LocalSolver, seed: int
    ) -> RemotePersonalWork:
        """Personalisation whose models stay on the nodes."""
        return RemotePersonalWork(self, method, context, solver, seed)

    def solver_rows(self) -> RemoteRows:
        """What clients keep for their solver, on their nodes."""
        return RemoteRows(self)

    def protect(self, protection: Protection, algorithm: Algorithm) -> Protection:
        """The protection of a run with its sums over the network; noise that the server adds itself needs no other sums."""
        if algorithm.privacy is None:
            return protection
        refuse_on_nodes(algorithm)
        self.names_nobody = algorithm.private
        if not algorithm.traits.privacy.sums_alone:
            # Who is left out may not depend on the others: clipping bounds long updates there.
            self.patience = replace(self.patience, longest=math.inf)
            return protection
        protected = mask_sums(self, cast(Protected, protection), algorithm)
        self.secure = SecureEvaluation(self, protected.book)
        return protected
