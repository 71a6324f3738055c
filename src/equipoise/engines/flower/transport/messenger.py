"""Asks nodes: sends requests, waits for the answers, and notes faults and traffic."""

from __future__ import annotations

import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from torch import Tensor

from equipoise.engines.flower.transport import messages
from equipoise.engines.flower.transport.messages import BadMessage, MessageContent, shorten
from equipoise.errors import EquipoiseError
from equipoise.types import Cohort

T = TypeVar("T")
Reading: TypeAlias = Callable[[MessageContent], T]  # raises BadMessage for an answer that is not what was asked for
_POLL = (0.02, 1.0)  # seconds between looks for replies: at first, and at last
_LOOK_AROUND = 3.0  # seconds between looks at who is connected
_OF_THE_APP = (
    ErrorCode.UNKNOWN,
    ErrorCode.LOAD_CLIENT_APP_EXCEPTION,
    ErrorCode.CLIENT_APP_RAISED_EXCEPTION,
    ErrorCode.CLIENT_APP_CRASHED,
)
LONGEST_TYPE = 80  # characters of the name of an error's type


class TooFewClients(EquipoiseError, RuntimeError):
    """Fewer clients did their part than a round needs; the text names the others."""


def efforts_of(cohort: Cohort) -> list[int | None]:
    """The local work that each client of a cohort is asked for; None where the solver says it."""
    return cohort.effort.tolist() if cohort.effort is not None else [None] * len(cohort)


def show_faults(faults: Mapping[str, str]) -> str:
    """The first clients that failed, and why."""
    return "; ".join(f"{client} {why}" for client, why in list(faults.items())[:5])


def read_type(name: object) -> str:
    """The type of a node's error as the node gives it; anything that is no name of a type is not repeated."""
    return name if isinstance(name, str) and name.isidentifier() and len(name) <= LONGEST_TYPE else "(unnamed)"


def name_error(error: Error) -> str:
    """An error that Flower reports: in its own words, but of an exception in a node's app the type alone.

    Flower sends "<class 'ValueError'>:<'the text'>", and the text may tell of a node's data.
    """
    if error.code not in _OF_THE_APP:
        return shorten(error.reason or f"error {error.code}")
    return name_type(error.reason) or f"error {error.code} of its app"


def name_type(reason: str | None) -> str:
    """The type in what Flower says of an exception, "<class 'package.Type'>:<'text'>"; nothing if there is none."""
    found = re.match(r"<class '(?:[\w.]*\.)?(\w+)'>", reason or "") or re.fullmatch(r"([A-Za-z_]\w*)", reason or "")
    return read_type(found[1]) if found else ""


@dataclass(frozen=True, eq=False)
class ClientRequest:
    """What one client is asked: plain values, and tensors."""

    values: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


class Messenger:
    """Asks nodes and reads their answers. Whoever does not answer in time, or not as asked, is named in `faults`."""

    def __init__(self, grid: Grid, *, timeout: float) -> None:
        self.grid, self.timeout = grid, timeout
        self.nodes: dict[str, int] = {}  # Flower's id of the node of each client
        self.own_seed: Callable[[str, int], int] | None = None  # of a client's batches, where the run's seed is secret
        self.begin()

    def begin(self) -> None:
        """A new round, or another try of one: faults and traffic before it are forgotten."""
        self.faults: dict[str, str] = {}
        self.sent: Counter[str] = Counter()  # bytes of the contents of messages, by client
        self.received: Counter[str] = Counter()

    def connected(self) -> set[int]:
        """Flower's ids of the nodes that are there now."""
        return set(self.grid.get_node_ids())

    def ask(self, action: str, requests: Mapping[str, ClientRequest], round_index: int, reading: Reading[T]) -> dict[str, T]:
        """Ask clients, all at once; what `reading` makes of each good answer. The others are in `faults`, with the reason."""
        there = self.connected()
        asked = {self.nodes[client]: client for client in requests if self.nodes.get(client) in there}
        self.faults |= {client: "is not connected" for client in requests if self.nodes.get(client) not in there}
        by_node = {node: self._own_request(client, requests[client]) for node, client in asked.items()}
        answers = self.ask_nodes(action, by_node, round_index, reading, asked)
        return {asked[node]: answer for node, answer in answers.items()}

    def _own_request(self, client: str, request: ClientRequest) -> ClientRequest:
        """A request with the client's own seed in place of the run's."""
        if self.own_seed is None or "seed" not in request.values:
            return request
        return ClientRequest({**request.values, "seed": self.own_seed(client, request.values["seed"])}, request.tensors)

    def ask_nodes(
        self, action: str, asked: Mapping[int, ClientRequest], round_index: int, reading: Reading[T], names: Mapping[int, str]
    ) -> dict[int, T]:
        """Ask nodes by Flower's ids, all at once, and give what `reading` makes of each good answer.

        `names` are the clients of the nodes, where known: faults and traffic are noted under them.
        """
        if not asked:
            return {}
        called = {node: names.get(node, f"node {node}") for node in asked}
        tokens = {node: secrets.token_hex(8) for node in asked}
        pushed = []
        for node, request in asked.items():
            records = messages.write_message(round_index, tokens[node], request.values, request.tensors)
            if node in names:
                self.sent[names[node]] += messages.count_bytes(records)
            pushed.append(Message(records, node, action, ttl=self.timeout, group_id=str(round_index)))
        ids = [*self.grid.push_messages(pushed), *[""] * len(pushed)]  # "", or none, for a message that was not sent
        sent = dict(zip(asked, ids, strict=False))
        self.faults |= {called[node]: "could not be sent its message" for node, message_id in sent.items() if not message_id}
        waiting = {message_id: node for node, message_id in sent.items() if message_id}
        answers: dict[int, T] = {}
        for node, reply in self._replies(waiting):
            try:
                content = self._open(node, reply, round_index, tokens[node])
                if node in names:
                    self.received[names[node]] += messages.count_bytes(reply.content)
                answers[node] = reading(content)
            except EquipoiseError as failure:
                self.faults[called[node]] = shorten(failure)
            except Exception as failure:  # whatever an answer brings about is its node's fault, and stops nobody else
                self.faults[called[node]] = f"sent an answer that brings about {type(failure).__name__}"
        for node in waiting.values():
            gone = node not in self.connected()
            self.faults[called[node]] = "lost its connection" if gone else f"did not answer within {self.timeout:g} s"
        return answers

    def _replies(self, waiting: dict[str, int]) -> Iterator[tuple[int, Message]]:
        """Nodes and their replies as they come, until all are there or the time is over; who did not reply stays waiting."""
        end, pause, looked = time.monotonic() + self.timeout, _POLL[0], time.monotonic()
        while waiting:
            for reply in self.grid.pull_messages(list(waiting)):
                node = waiting.pop(reply.metadata.reply_to_message_id, None)
                if node is not None:
                    yield node, reply
            now = time.monotonic()
            if not waiting or now >= end:
                return
            if now - looked > _LOOK_AROUND:  # nobody waits for a node that has gone
                there, looked = self.connected(), now
                if there.isdisjoint(waiting.values()):
                    return
            time.sleep(min(pause, max(0.0, end - now)))
            pause = min(1.5 * pause, _POLL[1])

    def _open(self, node: int, reply: Message, round_index: int, token: str) -> MessageContent:
        """What a reply says, if it is the answer to what was asked."""
        if reply.has_error():
            raise BadMessage(f"failed: {name_error(reply.error)}")
        if not reply.has_content():
            raise BadMessage("sent an empty answer")
        if reply.metadata.src_node_id != node:
            raise BadMessage("answered in another node's name")
        try:
            content = messages.read_message(reply.content)
        except BadMessage as failure:
            raise BadMessage(f"sent an answer that cannot be read: {failure}") from failure
        if "refused" in content.values:
            raise BadMessage(f"refused, for the reason {read_type(content.values['refused'])}: its own log says more")
        if content.round != round_index or content.token != token:
            raise BadMessage(f"sent the answer to another request (of round {content.round}, asked in round {round_index})")
        return content
