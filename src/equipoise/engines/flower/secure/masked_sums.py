"""Secure sums over nodes: the masking protocol in messages. The server learns each sum, and nothing of one client.

All sums of a round that can be foreseen are prepared together, in two exchanges; each then takes two: masked values, and what
unmasks their sum.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from equipoise.core.error_codes import WRITTEN
from equipoise.core.words import counted
from equipoise.engines.flower.personal.solver_memory import kept_values
from equipoise.engines.flower.secure.crowds import find_demand
from equipoise.engines.flower.secure.masking_server import MaskingServer
from equipoise.engines.flower.secure.sum_messages import MaskingError, SumTooSmall
from equipoise.engines.flower.secure.sum_terms import OF_OWN, SCORES, SumTerms
from equipoise.engines.flower.transport.messages import MessageContent, bytes_to_tensor, shorten
from equipoise.engines.flower.transport.messenger import ClientRequest, TooFewClients, efforts_of, show_faults
from equipoise.engines.flower.transport.part_messages import pack_part
from equipoise.types import Cohort, LocalSolver

if TYPE_CHECKING:
    from equipoise.algorithm import Algorithm
    from equipoise.engines.flower.flower_engine import FlowerEngine

OWN_VALUE = "seed"  # of a request: the seed of a client's batches, which nobody else needs
ALIAS = "alias"  # of an invitation: what the client is called in the sums of a round
Begin = Callable[[str, int], None]  # notes that a sum over at least this number of clients is about to be released
RequestMaker = Callable[[str], ClientRequest]  # what a client's request holds besides its part of the sums


def split_of(purpose: str) -> str:
    """The split that the purpose of an evaluation is about."""
    return purpose.removeprefix(SCORES).removesuffix(OF_OWN)


class PlannedSum(NamedTuple):
    """A sum that a round asks for: what it is for, how many integers it has, and modulo what they are added.

    It is over `clients`, or over all clients of the round.
    """

    purpose: str
    length: int
    modulus: int
    clients: tuple[str, ...] | None = None


class MaskedSums:
    """Sums of integers over some clients in one round: `prepare` them together, then ask for the `total` of each.

    Clients are called by random names that are drawn for these sums, so that a node does not learn who else takes part, but
    only how many. In signed sums they have their own names, as nodes know each other's keys by them.
    """

    def __init__(self, engine: FlowerEngine, round_index: int, clients: Sequence[str], *, fewest: int = 2) -> None:
        self.engine, self.round, self.fewest = engine, round_index, fewest
        self.clients = tuple(clients)
        signed = engine.federation.signed
        everyone = engine.federation.members
        self._alias = {client: client if signed else secrets.token_hex(8) for client in {*everyone, *clients}}
        self._client = {alias: client for client, alias in self._alias.items()}
        self._ready: dict[str, tuple[MaskingServer, dict[str, bytes]]] = {}
        self._first, self._of_scores = True, False  # whether nothing was asked yet, and whether this is an evaluation
        self._setting = ""  # that demands as many clients as the sums have at least

    def __contains__(self, purpose: str) -> bool:
        return purpose in self._ready

    def prepare(self, sums: Sequence[PlannedSum], base: ClientRequest) -> None:
        """The exchange of keys and shares for these sums; the first of a round brings all clients what is in `base`."""
        self._of_scores = all(planned.purpose.startswith(SCORES) for planned in sums)
        known = self.engine.identities
        servers = {planned.purpose: MaskingServer(self._terms(planned), known) for planned in sums}
        opening = {**base.values, "first": self._first}

        def first(client: str) -> ClientRequest:
            own = {} if self.engine.federation.signed else {ALIAS: self._alias[client]}
            return ClientRequest({**opening, **own}, base.tensors)

        requests = {purpose: server.start() for purpose, server in servers.items()}
        requests = self._exchange("train.keys", servers, requests, first)
        requests = self._exchange("train.shares", servers, requests, lambda _: ClientRequest(base.values))
        self._first = False
        for purpose, server in servers.items():
            self._ready[purpose] = server, requests[purpose]

    def total(self, purpose: str, base: RequestMaker, begin: Begin | None = None) -> tuple[Tensor, tuple[str, ...]]:
        """The sum of a prepared purpose, centred, (length,) int64, and whose numbers are in it.

        `base(client)` says what the client is to add up, as its value "sum".
        """
        return self.totals([purpose], base, begin)[purpose]

    def totals(
        self, purposes: Sequence[str], base: RequestMaker, begin: Begin | None = None
    ) -> dict[str, tuple[Tensor, tuple[str, ...]]]:
        """The sums of several prepared purposes, in the same messages, by purpose.

        `begin(purpose, fewest)` is called when all is there but what unmasks the sum: from then on it counts as released.
        Before, nothing is known of it, and it may be asked for again.
        """
        ready = {purpose: self._ready.pop(purpose) for purpose in purposes}
        servers, requests = {p: server for p, (server, _) in ready.items()}, {p: inbox for p, (_, inbox) in ready.items()}
        requests = self._exchange("train.masked", servers, requests, base)
        plain = ClientRequest(self.engine.request_values(self.engine.federation.seed))
        if self.engine.federation.signed:
            requests = self._exchange("train.confirm", servers, requests, lambda _: plain)
        for purpose, server in servers.items():
            if begin is not None:
                begin(purpose, server.terms.fewest)
        self._exchange("train.reveal", servers, requests, lambda _: plain)
        return {p: (torch.from_numpy(server.total.copy()), self._names(server.survivors)) for p, server in servers.items()}

    def _names(self, aliases: Sequence[str]) -> tuple[str, ...]:
        """The clients behind aliases, in rising order."""
        return tuple(sorted(self._client[alias] for alias in aliases))

    def _terms(self, planned: PlannedSum) -> SumTerms:
        faults, federation = self.engine.messenger.faults, self.engine.federation
        here = [client for client in planned.clients or self.clients if client not in faults]
        colluders, threshold = federation.choose_threshold(len(here))
        minimum = self.engine.patience.minimum if planned.clients is None else 2
        demand = find_demand(federation, here, minimum=minimum, fewest=self.fewest)
        fewest, self._setting = demand
        if len(here) < fewest:
            came = counted(len(here), "client")
            raise self._too_few(f"{came} can take part in a secure sum, and it needs {fewest}, by {self._setting}.")
        purpose, length, modulus, _ = planned
        clients = tuple(sorted(self._alias[client] for client in here))
        return SumTerms(federation.run, self.round, purpose, clients, length, modulus, threshold, fewest, colluders=colluders)

    def _exchange(
        self, action: str, servers: Mapping[str, MaskingServer], requests: Mapping[str, Mapping[str, bytes]], base: RequestMaker
    ) -> dict[str, dict[str, bytes]]:
        """Send each client its part of all sums in one message, and hand the answers to the sums: their next requests."""
        messenger = self.engine.messenger
        by_client: dict[str, dict[str, Tensor]] = {}
        for purpose, sent in requests.items():
            for alias, message in sent.items():
                if (client := self._client[alias]) not in messenger.faults:
                    by_client.setdefault(client, {})[f"sum.{purpose}"] = bytes_to_tensor(message)
        plain = {client: base(client) for client in by_client}
        if self.engine.federation.signed:
            plain = make_common(plain)
        asked = {c: ClientRequest(plain[c].values, {**plain[c].tensors, **messages}) for c, messages in by_client.items()}
        most = max(server.terms.largest_message for server in servers.values())

        def reading(answer: MessageContent) -> dict[str, bytes]:
            there = [purpose for purpose in servers if f"sum.{purpose}" in answer.arrays]  # not all sums are over all clients
            return {purpose: answer.raw_bytes(f"sum.{purpose}", most) for purpose in there}

        replies = messenger.ask(action, asked, self.round, reading)
        following = {}
        for purpose, server in servers.items():
            failure = None
            try:
                taken = {self._alias[c]: answers[purpose] for c, answers in replies.items() if purpose in answers}
                following[purpose] = server.advance(taken)
            except MaskingError as error:
                failure = error
            for alias, why in server.faults.items():
                messenger.faults.setdefault(self._client[alias], shorten(self._in_names(str(why))))
            if failure is not None:
                small = isinstance(failure, SumTooSmall)
                by = f" {failure.need} are demanded by {self._setting}." if isinstance(failure, SumTooSmall) else ""
                text = WRITTEN.sub("", str(failure)) if small else str(failure)  # too few clients, and not wrong masks
                raise self._too_few(self._in_names(text) + by) from failure
        return following

    def _in_names(self, text: str) -> str:
        """A text about aliases as one about clients, for the server's own log."""
        for alias, client in self._client.items():
            text = text.replace(alias, client)
        return text

    def _too_few(self, why: str) -> TooFewClients:
        when = f"Evaluation after round {self.round}" if self._of_scores else f"Round {self.round + 1}"
        return TooFewClients(f"{when}: {why} {show_faults(self.engine.messenger.faults)}".strip())


def make_common(requests: Mapping[str, ClientRequest]) -> dict[str, ClientRequest]:
    """The requests of a signed sum: each client gets what all are asked, under "each" by name, and its own batch seed.

    A client that signs a hash of its request then signs what the others were asked, too. Whoever gets another weight than the
    others see, or another model, has another hash.
    """
    values = {client: {k: v for k, v in request.values.items() if k != OWN_VALUE} for client, request in requests.items()}
    first = next(iter(values.values()), {})
    alike = {key: value for key, value in first.items() if all(key in v and v[key] == value for v in values.values())}
    each = {client: {k: v for k, v in own.items() if k not in alike} for client, own in sorted(values.items())}
    return {
        client: ClientRequest(
            {**alike, "each": each, **{k: v for k, v in request.values.items() if k == OWN_VALUE}}, request.tensors
        )
        for client, request in requests.items()
    }


class RoundSums:
    """The secure sums of the round at hand, and what every request of it carries."""

    sums: MaskedSums  # prepared by `begin`, when the round's cohort is weighed

    def __init__(self, engine: FlowerEngine, algorithm: Algorithm, fewest: int, begin: Callable[[int, str, int], None]) -> None:
        self.engine, self.fewest, self._begin_release = engine, fewest, begin
        self.seed = engine.federation.seed
        parts = {"risk": algorithm.risk, "aggregator": algorithm.aggregator}
        self._parts = {kind: pack_part(kind, part, {}) for kind, part in parts.items()}

    def values(self, **more: Any) -> dict[str, Any]:
        """Plain values of the round's requests: the risk and the aggregator travel by name."""
        return self.engine.request_values(self.seed, **self._parts, **more)

    def begin(self, cohort: Cohort, sums: Sequence[PlannedSum], params: Tensor | None) -> None:
        """Prepare the round's sums; with `params`, nodes compute their losses at them first."""
        self.seed = cohort.seed
        self.sums = MaskedSums(self.engine, cohort.round, self.engine.names(cohort), fewest=self.fewest)
        self.sums.prepare(sums, ClientRequest(self.values(), {"params": params} if params is not None else {}))

    def _begin(self, purpose: str, fewest: int) -> None:
        self._begin_release(self.sums.round, purpose, fewest)

    def add(self, sums: Sequence[PlannedSum]) -> None:
        """Prepare more sums of this round."""
        self.sums.prepare(sums, ClientRequest(self.values()))

    def total(self, purpose: str, ask: Callable[[str], Mapping[str, Any]]) -> tuple[Tensor, tuple[str, ...]]:
        """A sum of numbers that clients have without further work; `ask(client)` says which."""
        values = self.values()
        return self.sums.total(purpose, lambda client: ClientRequest({**values, "sum": dict(ask(client))}), self._begin)

    def updates(
        self, cohort: Cohort, workers: Cohort, ask: Callable[[str], Mapping[str, Any]], params: Tensor, solver: LocalSolver
    ) -> tuple[Tensor, tuple[str, ...]]:
        """The sum that clients' local work goes into; of the cohort, the `workers` may keep something for their solver."""
        tensors: dict[str, Tensor] = {"params": params}
        values = self.values(solver=pack_part("solver", solver, tensors))
        effort = dict(zip(self.engine.names(cohort), efforts_of(cohort), strict=True))
        kept = {client: kept_values(workers, place) for place, client in enumerate(self.engine.names(workers))}
        total, survivors = self.sums.total(
            "update",
            lambda client: ClientRequest(
                {**values, "effort": effort[client], "sum": dict(ask(client)), **kept.get(client, {})}, tensors
            ),
            self._begin,
        )
        self.engine.round.counted |= set(survivors)
        return total, survivors
