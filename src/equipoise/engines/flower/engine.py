"""The Flower engine: clients are nodes, and what other engines compute, this one asks for in messages.

The round and the loop over rounds are those of every engine. What a network adds is here: clients that do not answer, or not as
asked, are left out of the round and named; if too few are left, the round is tried again, and in the end the run stops.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from equipoise.core.task import Task
from equipoise.core.update_checks import marked, usable
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.engines.flower.transport import part_messages as parts
from equipoise.engines.flower.transport.messages import BadMessage, Parcel
from equipoise.engines.flower.transport.nodes import Member, Request, TooFewClients, Wire
from equipoise.errors import EquipoiseError, EquipoiseNotice
from equipoise.personal.context import PersonalContext
from equipoise.personal.personal_run import PersonalRun
from equipoise.result import ClientTable
from equipoise.solvers.prepared import GRADIENT
from equipoise.types import Aggregator, Cohort, Job, LocalSolver, LocalWork, Pull, RoundReport, ServerState

if TYPE_CHECKING:
    from equipoise.algorithm import Algorithm
    from equipoise.engines.flower.secure.protections import SecureEvaluation
    from equipoise.privacy.private_run import PrivateRun
    from equipoise.privacy.secure_run import SecureRun

T = TypeVar("T")
HELLOS = 2  # how often a node is asked who it is before it is left alone


@dataclass(frozen=True)
class Patience:
    """How long the server waits, how many clients a round needs, and how often it is tried again."""

    timeout: float = 600.0  # seconds for an answer
    minimum: int = 1  # clients of a cohort that must do their part
    retries: int = 2  # further tries of a round with fewer
    pause: float = 10.0  # seconds before another try


@dataclass(frozen=True, eq=False)
class Federation:
    """Starts the engine on a federation: how to ask its nodes, who they are, and the name of the run among them."""

    wire: Wire
    members: Mapping[str, Member]
    patience: Patience
    run: str
    seed: int

    def start(self, task: Task, data: FederatedData) -> FlowerEngine:
        return FlowerEngine(self, task, data)


class FlowerEngine:
    """The running engine of one task on a federation."""

    device = torch.device("cpu")

    def __init__(self, federation: Federation, task: Task, data: FederatedData) -> None:
        self.federation, self.task, self.data = federation, task, data
        self.wire, self.patience = federation.wire, federation.patience
        self.secure: SecureEvaluation | None = None  # set where nothing of a single client may be asked for
        self.params: Tensor | None = None  # of the round at hand, under secure sums
        self.facts: dict[str, Any] = {}  # what else is known of the round, for its report
        self.counted: set[str] = set()  # whose work is in the round's secure sum, though they may have gone since
        self._drawn: tuple[str, ...] = ()  # the clients of the round
        self._cohort: Cohort | None = None
        self._hellos: dict[int, int] = {}
        self.rows: dict[str, list[str]] = {}  # who answered the last evaluation, by split

    # ------------------------------------------------------------------------------------------------------------- a round

    def attempt(
        self, run: Callable[[Cohort], tuple[ServerState, RoundReport]], draw: Callable[[int], Cohort]
    ) -> tuple[ServerState, RoundReport]:
        """A round, tried again while too few clients do their part; the report says who did not, and what it cost."""
        tries = self.patience.retries + 1
        sent: dict[str, int] = {}
        received: dict[str, int] = {}
        for number in range(tries):
            cohort = draw(number)
            self._begin(cohort)
            try:
                state, report = run(cohort)
            except TooFewClients as failure:
                if number + 1 == tries:
                    raise TooFewClients(f"{failure} The round was tried {tries} times.") from failure
                time.sleep(self.patience.pause)
                continue
            finally:
                _add(sent, self.wire.traffic.sent)
                _add(received, self.wire.traffic.received)
            absent = set(self._drawn) - self.counted
            missing = {client: why for client, why in self.wire.faults.items() if client in absent}
            return state, replace(
                report,
                **self.facts,
                rejected=tuple(client for client in report.rejected if client not in missing),
                missing=missing,
                bytes_sent=sum(sent.values()),
                bytes_received=sum(received.values()),
                bytes_by_client={c: (sent.get(c, 0), received.get(c, 0)) for c in sorted({*sent, *received})},
            )
        raise AssertionError  # the last try returns or raises

    def _begin(self, cohort: Cohort) -> None:
        self.wire.begin()
        self.meet_newcomers()
        self._cohort, self._drawn, self.facts, self.counted = cohort, self.names(cohort), {}, set()

    def gone(self, cohort: Cohort) -> Tensor:
        """Which clients of a cohort have failed in this round, (K,) bool."""
        return torch.tensor([client in self.wire.faults for client in self.names(cohort)], dtype=torch.bool)

    def names(self, cohort: Cohort) -> tuple[str, ...]:
        """The ids of a cohort's clients."""
        return tuple(self.data.train.ids[k] for k in cohort.clients.tolist())

    def meet_newcomers(self) -> None:
        """Ask nodes that have connected since, such as one that was started again, which client they are."""
        known = set(self.wire.nodes.values())
        new = [n for n in self.wire.connected() if n not in known and self._hellos.get(n, 0) < HELLOS]
        for node in new:
            self._hellos[node] = self._hellos.get(node, 0) + 1
        for node, member in introduced(self.wire, new, self.task, self.federation.seed).items():
            known_as = self.federation.members.get(member.client)
            if known_as is not None and (known_as.fingerprint, known_as.splits) == (member.fingerprint, member.splits):
                self.wire.nodes[member.client] = node

    def values(self, seed: int, **more: Any) -> dict[str, Any]:
        """The plain values of every request."""
        federation = self.federation
        return {"seed": seed, "model": federation.seed, "classes": self.data.classes, "run": federation.run, **more}

    def ask(
        self, action: str, cohort: Cohort, request: Callable[[int], Request], reading: Callable[[Parcel], Any]
    ) -> list[Any]:
        """The answers of a cohort's clients, in order; None from those that have failed in this round."""
        names = self.names(cohort)
        asked = {client: request(place) for place, client in enumerate(names) if client not in self.wire.faults}
        found = self.wire.ask(action, asked, cohort.round, reading)
        return [found.get(client) for client in names]

    def require_enough(self, cohort: Cohort) -> None:
        """Stop this try of the round if too few clients are left; of a cohort other than the round's all are needed."""
        names = self.names(cohort)
        faults = {client: why for client, why in self.wire.faults.items() if client in {*names, *self._drawn}}
        of_the_round = set(names) <= set(self._drawn)
        all_of = self._drawn if of_the_round else names
        left = [client for client in all_of if client not in faults]
        needed = min(self.patience.minimum, len(all_of)) if of_the_round else len(all_of)
        if len(left) < max(1, needed):
            shown = "; ".join(f"{client} {why}" for client, why in list(faults.items())[:5])
            raise TooFewClients(
                f"Round {cohort.round}: {len(left)} of {len(all_of)} clients did their part, and {needed} are needed: {shown}."
            )

    def _require_all(self, cohort: Cohort) -> None:
        bad = [client for client in self.names(cohort) if client in self.wire.faults]
        if bad:
            raise TooFewClients(
                f"Round {cohort.round}: the solver needs an answer of {bad[0]}, who {self.wire.faults[bad[0]]}."
            )

    # --------------------------------------------------------------------------------------------------- what engines compute

    def losses(self, params: Tensor, cohort: Cohort, solver: LocalSolver | None = None) -> Tensor:
        """F_k(w) of each client (K,); NaN where a client of the round is gone, which `gone` tells.

        Under secure aggregation nobody is asked: losses stay with the clients, and all of them are NaN here.
        """
        if self.secure is not None:
            self.params = params
            return torch.full((len(cohort),), float("nan"), dtype=torch.float64)
        tensors: dict[str, Tensor] = {"params": params}
        packed = parts.packed("solver", solver, tensors) if getattr(solver, "adapts", False) else None
        found = self.ask("train.losses", cohort, lambda _: Request(self.values(cohort.seed, solver=packed), tensors), _loss)
        if cohort is not self._cohort:
            self._require_all(cohort)
        self.require_enough(cohort)
        return torch.tensor([math.nan if loss is None else loss for loss in found], dtype=torch.float64)

    def updates(self, params: Tensor, cohort: Cohort, solver: LocalSolver) -> LocalWork:
        """Local work of each client: updates (K, D), NaN and marked by an infinite norm where a client is gone."""
        tensors: dict[str, Tensor] = {"params": params}
        packed = parts.packed("solver", solver, tensors)

        def request(place: int) -> Request:
            effort = int(cohort.effort[place]) if cohort.effort is not None else None
            return Request(self.values(cohort.seed, solver=packed, effort=effort), tensors)

        def reading(parcel: Parcel) -> tuple[Tensor, Tensor]:
            return parcel.tensor("update", params.dtype, tuple(params.shape)), parcel.tensor("loss", torch.float64, (1,))[0]

        found = self.ask("train.update", cohort, request, reading)
        if solver is GRADIENT:
            self._require_all(cohort)
        self.require_some(cohort, found)
        return arrived(found, params)

    def require_some(self, cohort: Cohort, found: Sequence[Any]) -> None:
        self.require_enough(cohort)
        if all(answer is None for answer in found):
            raise TooFewClients(f"Round {cohort.round}: none of the {len(found)} clients at work sent an update.")

    def summed_update(
        self, params: Tensor, cohort: Cohort, solver: LocalSolver, weights: Tensor, aggregator: Aggregator
    ) -> LocalWork:
        """The same work, aggregated and added up client by client, in the order of the cohort: total (D,)."""
        work = self.updates(params, cohort, solver)
        total = torch.zeros_like(params)
        for update, weight, good in zip(work.update, weights, torch.isfinite(work.sq_norms).tolist(), strict=True):
            if good:
                total += aggregator(update.unsqueeze(0), weight.reshape(1))[0]
        return LocalWork(total, work.sq_norms, work.losses)

    def losses_of(self, models: Sequence[Tensor], cohort: Cohort) -> Tensor:
        """The losses of several models, one after another: (M, K)."""
        return torch.stack([self.losses(params, cohort) for params in models])

    def summed_updates(self, jobs: Sequence[Job], solver: LocalSolver, aggregator: Aggregator) -> list[LocalWork]:
        """The summed updates of several models, one after another."""
        return [self.summed_update(job.params, job.cohort, solver, job.weights, aggregator) for job in jobs]

    def own_steps(self, models: Tensor, cohort: Cohort, solver: LocalSolver, pull: Pull | None = None) -> Tensor:
        """Clients' own models stay on their nodes, where this work is done (`personal_run`)."""
        raise EquipoiseError("Clients' own models are trained on their nodes; the server never has them.")

    def evaluate_own(self, models: Tensor, clients: ClientSet, which: Tensor) -> tuple[Tensor, Tensor]:
        """Clients' own models stay on their nodes, where they are evaluated (`personal_run`)."""
        raise EquipoiseError("Clients' own models are evaluated on their nodes; the server never has them.")

    def evaluate(self, params: Tensor, clients: ClientSet) -> tuple[Tensor, Tensor]:
        """Mean loss and mean error of every client of a set, (n,) and (n,); NaN for those that do not answer."""
        split = next((name for name, found in self.data.splits.items() if found is clients), "train")
        scores = self._scores(params, split_only=split)
        both = torch.stack([scores.get(client, {}).get(split, _UNKNOWN) for client in clients.ids], 1)
        return both[0], both[1]

    def client_table(self, params: Tensor, data: FederatedData) -> ClientTable:
        """Every client of every split at `params`, in one exchange; clients that do not answer have no row."""
        if self.secure is not None:
            return self.secure.table(params, data)
        scores = self._scores(params)
        self.rows = {s: [i for i in clients.ids if s in scores.get(i, {})] for s, clients in data.splits.items()}
        if not self.rows["train"]:
            raise TooFewClients("No client that trains has answered the evaluation.")
        numbers = [scores[client][split] for split, ids in self.rows.items() for client in ids]
        sizes = [self.federation.members[client].splits[split] for split, ids in self.rows.items() for client in ids]
        seen = set(data.train.ids)
        return ClientTable(
            tuple(client for ids in self.rows.values() for client in ids),
            tuple(split for split, ids in self.rows.items() for _ in ids),
            torch.tensor([client in seen for ids in self.rows.values() for client in ids]),
            torch.tensor(sizes),
            torch.stack(numbers)[:, 0],
            torch.stack(numbers)[:, 1],
        )

    def _scores(self, params: Tensor, split_only: str | None = None) -> dict[str, dict[str, Tensor]]:
        """Loss and error (2,) by client and split; clients that are silent are asked again, as often as a round is."""
        asked = {c: m for c, m in self.federation.members.items() if split_only is None or split_only in m.splits}
        request = Request(self.values(self.federation.seed), {"params": params})
        return self.ask_all("evaluate.scores", asked, lambda _: request)

    def ask_all(
        self, action: str, asked: Iterable[str], request: Callable[[str], Request], round_index: int = 0
    ) -> dict[str, dict[str, Tensor]]:
        """The scores that clients answer with; those that are silent are asked again, as often as a round is tried."""
        found: dict[str, dict[str, Tensor]] = {}
        left = list(asked)
        for number in range(self.patience.retries + 1):
            self.wire.begin()
            if number:
                time.sleep(self.patience.pause)
                self.meet_newcomers()
            found |= self.wire.ask(action, {client: request(client) for client in left}, round_index, self._splits_read)
            left = [client for client in left if client not in found]
            if not left:
                break
        if left:
            shown = "; ".join(f"{client} {self.wire.faults.get(client, '')}" for client in left[:5])
            warnings.warn(EquipoiseNotice(f"{len(left)} clients could not be evaluated: {shown}."), stacklevel=2)
        if len(found) < min(self.patience.minimum, len(found) + len(left)):
            raise TooFewClients(f"{len(found)} clients answered the evaluation, and {self.patience.minimum} are needed.")
        return found

    def try_again(self, work: Callable[[], T]) -> T:
        """Work outside rounds, tried as often as a round is."""
        for number in range(self.patience.retries + 1):
            self.wire.begin()
            self.meet_newcomers()
            try:
                return work()
            except TooFewClients:
                if number == self.patience.retries:
                    raise
                time.sleep(self.patience.pause)
        raise AssertionError  # the last try returns or raises

    def _splits_read(self, parcel: Parcel) -> dict[str, Tensor]:
        if "lost" in parcel.values:
            return {}
        return {split: parcel.tensor(split, torch.float64, (2,)) for split in self.data.splits if split in parcel.arrays}

    # -------------------------------------------------------------------------------------------- parts that a network changes

    def personal_run(self, method: Any, context: PersonalContext, solver: LocalSolver, seed: int) -> PersonalRun:
        """Personalisation whose models stay on the nodes."""
        from equipoise.engines.flower.personal.own_models import RemotePersonalRun

        return RemotePersonalRun(self, method, context, solver, seed)

    def protected(self, protection: Any, algorithm: Algorithm) -> PrivateRun | SecureRun | None:
        """Privacy that goes over the network: the same rules with the sums of real clients."""
        from equipoise.engines.flower.secure.protections import over_network
        from equipoise.privacy.private_run import PrivateRun as Central

        found: PrivateRun | SecureRun | None = over_network(self, protection, algorithm)
        if type(found) is Central:  # another try would release a quantile about another cohort, which nobody accounts for
            self.patience = replace(self.patience, retries=0)
        return found


_UNKNOWN = torch.full((2,), float("nan"), dtype=torch.float64)


def _loss(parcel: Parcel) -> float:
    loss = float(parcel.tensor("loss", torch.float64, (1,)))
    if not math.isfinite(loss):
        raise BadMessage("has a loss that is not finite")
    return loss


def _add(total: dict[str, int], more: Mapping[str, int]) -> None:
    for client, count in more.items():
        total[client] = total.get(client, 0) + count


def arrived(found: Sequence[tuple[Tensor, Tensor] | None], params: Tensor) -> LocalWork:
    """Updates and losses of clients, or None, as local work: what did not come, or cannot be used, has an infinite norm."""
    nothing = (torch.full_like(params, math.nan), torch.tensor(math.nan, dtype=torch.float64))
    updates, losses = (torch.stack(values) for values in zip(*(pair or nothing for pair in found), strict=True))
    sq_norms = torch.stack([update.double().square().sum() for update in updates])
    return LocalWork(updates, marked(sq_norms, usable(sq_norms, losses, params)), losses)


def introduced(wire: Wire, nodes: Iterable[int], task: Task, seed: int) -> dict[int, Member]:
    """What nodes say when they are asked who they are."""
    requests = {node: Request({"seed": seed, "model": seed}) for node in nodes}
    return wire.ask_nodes("query.hello", requests, 0, lambda parcel: Member.read(parcel, task))
