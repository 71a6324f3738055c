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
from flwr.serverapp import Grid
from torch import Tensor

from equipoise.core.error_codes import WRITTEN
from equipoise.engines.flower.apps import left_out
from equipoise.engines.flower.flower_internals import DEADLINE, IN_WORDS, OF_THE_APP, TOO_LATE, pull_replies
from equipoise.engines.flower.secure.sum_terms import SCORES
from equipoise.engines.flower.transport import messages
from equipoise.engines.flower.transport.messages import BadMessage, MessageContent, shorten
from equipoise.errors import EquipoiseError
from equipoise.types import Cohort

T = TypeVar("T")
Reading: TypeAlias = Callable[[MessageContent], T]  # raises BadMessage for an answer that is not what was asked for
_POLL = (0.02, 1.0)  # seconds between looks for replies: at first, and at last
_LOOK_AROUND = 3.0  # seconds between looks at who is connected
_PARTS = 5.0  # seconds that the parts of an announced reply may take, where nobody waits for the reply itself
_FOR_OTHERS = 0.1  # of the time for answers, left for the others when the parts of one have not come
EVALUATION_AFTER = "evaluation after round "  # how the group of the sums of an evaluation begins
LONGEST_REST = 64  # timeouts that a silent client rests at most
LONGEST_TYPE = 80  # characters of the name of an error's type
BY_ITS_OWNER = {  # types of refusals that follow from a node's policy and the request, never from its data; in words
    "PolicyRefusal": "PolicyRefusal: its policy does not allow what the run asks for, and its own log says why",
    "PartNotAllowed": "PartNotAllowed: a part of the algorithm is not among `parts` of its policy, and its own log says which",
    "SumsOnly": "SumsOnly: its policy says only_sums, and the run asks for something of this client alone",
    "BudgetSpent": "BudgetSpent: the run would cost more than the ε of its policy, and its own log says more",
}
FOR_GOOD = ("PartNotAllowed", "SumsOnly", "BudgetSpent")  # those that another cohort does not change


class TooFewClients(EquipoiseError, RuntimeError):
    """Fewer clients did their part than a round needs; the text names the others."""


def efforts_of(cohort: Cohort) -> list[int | None]:
    """The local work that each client of a cohort is asked for; None where the solver says it."""
    return cohort.effort.tolist() if cohort.effort is not None else [None] * len(cohort)


def show_faults(faults: Mapping[str, str]) -> str:
    """The first clients that failed, and why; a reason of several is said once.

    >>> show_faults({"a": "is not connected", "b": "was silent", "c": "is not connected"})
    'a, c: each is not connected; b was silent'
    """
    clients: dict[str, list[str]] = {}
    for client, why in list(faults.items())[:5]:
        clients.setdefault(why, []).append(client)
    return "; ".join(f"{named[0]} {why}" if len(named) == 1 else f"{', '.join(named)}: each {why}"
                     for why, named in clients.items())  # fmt: skip


def end_sentence(failure: EquipoiseError) -> str:
    """What an error says, with one full stop at its end and without its code: another sentence may follow.

    >>> end_sentence(TooFewClients("a is not connected"))
    'a is not connected.'
    """
    return WRITTEN.sub("", str(failure)).rstrip(". ") + "."


def name_group(action: str, request: ClientRequest, round_index: int) -> str:
    """What Flower is told that a message belongs to, which a node's log names: a round, or the sums of an evaluation."""
    of_scores = action.startswith("train.") and any(name.startswith(f"sum.{SCORES}") for name in request.tensors)
    return f"{EVALUATION_AFTER}{round_index}" if of_scores else str(round_index)


def read_type(name: object) -> str:
    """The type of a node's error as the node gives it; anything that is no name of a type is not repeated."""
    return name if isinstance(name, str) and name.isidentifier() and len(name) <= LONGEST_TYPE else "(unnamed)"


def name_error(error: Error) -> str:
    """An error that Flower reports, in our words where we know its code; of an exception in an app the type alone.

    Flower sends "<class 'ValueError'>:<'the text'>", and the text may tell of a node's data.
    """
    if error.code in TOO_LATE:
        return "no answer came before the message expired"
    of_app = error.code in OF_THE_APP
    words = IN_WORDS.get(error.code) or (f"error {error.code} of its app" if of_app else shorten(error.reason or "error"))
    return (name_type(error.reason) or words) if of_app else words


def name_type(reason: str | None) -> str:
    """The type in what Flower says of an exception, "<class 'package.Type'>:<'text'>"; nothing if there is none."""
    found = re.match(r"<class '(?:[\w.]*\.)?(\w+)'>", reason or "") or re.fullmatch(r"([A-Za-z_]\w*)", reason or "")
    return read_type(found[1]) if found else ""


def called(node: int, names: Mapping[int, str]) -> str:
    """What a node is called in faults: its client, or its number."""
    return names.get(node, f"node {node}")


@dataclass(frozen=True, eq=False)
class ClientRequest:
    """What one client is asked: plain values, and tensors."""

    values: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class SentMessage:
    """A request on its way: the node that it goes to, its token, and the round that it is about."""

    node: int
    token: str
    round: int


@dataclass
class Rest:
    """A client that was silent: it is asked nothing but who it is until it has answered that, and not before `until`."""

    strikes: int  # how often it was silent since its last good answer
    until: float  # on the monotonic clock


class Messenger:
    """Asks nodes and reads their answers. Whoever does not answer in time, or not as asked, is named in `faults`.

    A client that was silent rests: nobody waits for it again before it has said who it is. From the second time on it also
    rests for the time that an answer may take, twice that, and so on.
    """

    def __init__(self, grid: Grid, *, timeout: float) -> None:
        self.grid, self.timeout = grid, timeout
        self.nodes: dict[str, int] = {}  # Flower's id of the node of each client
        self.marks: dict[str, str] = {}  # of each client's data, which every answer names
        self.resting: dict[str, Rest] = {}
        self.strikes: Counter[str] = Counter()
        self.away: set[str] = set()  # clients that were not connected when asked, and have not said who they are since
        self.barred: dict[str, str] = {}  # clients whose key the operator has taken off the list, and why
        self.seconds: dict[str, float] = {}  # that the last answer of each client took
        self.heard: dict[str, float] = {}  # when each client last answered, in seconds since 1970
        self.versions: dict[str, Mapping[str, str]] = {}  # of the software on each client's node, as it last said
        self.compact: set[int] = set()  # nodes that read small tensors inside a call
        self.listening: set[int] = set()  # nodes that can be told why they are left out
        self._told: set[tuple[int, str]] = set()  # nodes, and what they were told
        self.known: dict[int, str] = {}  # the clients that nodes were at, also before this run
        self.meanwhile: Callable[[], None] = lambda: None  # done now and then while answers are waited for
        self.own_seed: Callable[[str, int], int] | None = None  # of a client's batches, where the run's seed is secret
        self.begin()

    def begin(self) -> None:
        """A new round, or another try of one: faults and traffic before it are forgotten."""
        self.faults: dict[str, str] = {}
        self.losses: dict[str, float] = {}  # that clients of the round have sent in the open
        self.refusing: set[str] = set()  # clients whose owners do not allow what was asked
        self.for_good: set[str] = set()  # those of them that would refuse every cohort of the run
        self.sent: Counter[str] = Counter()  # bytes of the contents of messages, by client
        self.received: Counter[str] = Counter()

    def connected(self) -> set[int]:
        """Flower's ids of the nodes that are there now."""
        return set(self.grid.get_node_ids())

    def show(self, node: int) -> str:
        """A node as an operator knows it: by its client, if it has ever said who that is, and by Flower's id."""
        return f"{self.known[node]} (node {node})" if node in self.known else f"node {node}"

    def tell(self, node: int, cause: str) -> None:
        """Tell a node why it is left out, once; `cause` is a key of left_out.WORDS. Nobody waits for its answer."""
        if cause and node in self.listening and (node, cause) not in self._told and node in self.connected():
            self._told.add((node, cause))
            self.push("query.left_out", {node: ClientRequest({"cause": cause})}, 0, {}, self.timeout)

    def forget_told(self, node: int) -> None:
        """A node takes part again: if it is left out once more, it is told anew."""
        self._told = {(each, cause) for each, cause in self._told if each != node}

    # -------------------------------------------------------------------------------------------------------- who is silent

    def rest(self, client: str) -> None:
        """Let a client rest that was silent."""
        self.strikes[client] += 1
        extra = self.timeout * min(2 ** (self.strikes[client] - 2), LONGEST_REST) if self.strikes[client] > 1 else 0.0
        self.resting[client] = Rest(self.strikes[client], time.monotonic() + extra)

    def wake(self, client: str) -> bool:
        """A resting client has said who it is: it is asked again, if it has rested long enough."""
        rest = self.resting.get(client)
        if rest is not None and time.monotonic() < rest.until:
            return False
        self.resting.pop(client, None)
        return True

    # ------------------------------------------------------------------------------------------------------------- asking

    def ask(self, action: str, requests: Mapping[str, ClientRequest], round_index: int, reading: Reading[T]) -> dict[str, T]:
        """Ask clients, all at once; what `reading` makes of each good answer. The others are in `faults`, with the reason."""
        there = self.connected()
        barred = {client: self.barred[client] for client in requests if client in self.barred}
        absent = (client for client in requests if self.nodes.get(client) not in there and client not in barred)
        away = dict.fromkeys(absent, "is not connected")
        resting = {client: "rests, as it did not answer before" for client in requests if client in self.resting}
        self.faults |= {**resting, **away, **barred}
        self.away |= set(away)
        left_out = {*resting, *away, *barred}
        asked = {self.nodes[client]: client for client in requests if client not in left_out}
        by_node = {node: self._own_request(client, requests[client]) for node, client in asked.items()}
        answers = self.ask_nodes(action, by_node, round_index, reading, asked)
        return {asked[node]: answer for node, answer in answers.items()}

    def _own_request(self, client: str, request: ClientRequest) -> ClientRequest:
        """A request with the client's own seed in place of the run's."""
        if self.own_seed is None or "seed" not in request.values:
            return request
        return ClientRequest({**request.values, "seed": self.own_seed(client, request.values["seed"])}, request.tensors)

    def push(
        self, action: str, asked: Mapping[int, ClientRequest], round_index: int, names: Mapping[int, str], ttl: float
    ) -> dict[str, SentMessage]:
        """Send requests to nodes, by Flower's ids: the messages on their way by their ids. What cannot be sent is a fault."""
        sent, pushed = [], []
        for node, request in asked.items():
            token = secrets.token_hex(8)
            records = messages.write_message(round_index, token, request.values, request.tensors)
            if node in names:
                self.sent[names[node]] += messages.count_bytes(records)
            records = messages.compacted(records) if node in self.compact else records
            sent.append(SentMessage(node, token, round_index))
            pushed.append(Message(records, node, action, ttl=ttl, group_id=name_group(action, request, round_index)))
        ids = [*self.grid.push_messages(pushed), *[""] * len(pushed)]  # "", or none, for a message that was not sent
        for each, message_id in zip(sent, ids, strict=False):
            if not message_id:
                self.faults[called(each.node, names)] = "could not be sent its message"
        return {message_id: each for each, message_id in zip(sent, ids, strict=False) if message_id}

    def read(self, sent: SentMessage, reply: Message, reading: Reading[T], names: Mapping[int, str]) -> tuple[T] | None:
        """What `reading` makes of a reply, alone in a tuple; None, and a fault, if it is not what was asked for."""
        client = names.get(sent.node)
        try:
            content = self._open(sent.node, reply, sent.round, sent.token, client)
            if content.values.get("listens") is True:
                self.listening.add(sent.node)
            if client is not None:
                self.received[client] += content.size
                self._refuse_other_data(client, content)
            found = reading(content)
        except EquipoiseError as failure:
            self.faults[called(sent.node, names)] = shorten(failure)
            self.tell(sent.node, failure.cause if isinstance(failure, BadMessage) else "")
        except Exception as failure:  # whatever an answer brings about is its node's fault, and stops nobody else
            self.faults[called(sent.node, names)] = f"sent an answer that brings about {type(failure).__name__}"
        else:
            return (found,)
        if (
            client is not None
            and reply.has_error()
            and (reply.error.code in TOO_LATE or DEADLINE in (reply.error.reason or ""))
        ):
            self.faults[client] = f"did not answer within {self.timeout:g} s"
            self.rest(client)
        return None

    def _refuse_other_data(self, client: str, content: MessageContent) -> None:
        """Every answer names the data that it was made with; nodes of earlier versions say nothing."""
        known = self.marks.get(client)
        if content.data and known and content.data != known[: len(content.data)]:
            raise BadMessage("has other data than when the run began", left_out.DATA)

    def ask_nodes(
        self, action: str, asked: Mapping[int, ClientRequest], round_index: int, reading: Reading[T], names: Mapping[int, str]
    ) -> dict[int, T]:
        """Ask nodes by Flower's ids, all at once, and give what `reading` makes of each good answer.

        `names` are the clients of the nodes, where known: faults and traffic are noted under them.
        """
        if not asked:
            return {}
        began = time.monotonic()
        sent = self.push(action, asked, round_index, names, self.timeout)
        waiting = dict(sent)
        answers: dict[int, T] = {}
        for message, reply in self._replies(waiting):
            found = self.read(message, reply, reading, names)
            if found is not None:
                answers[message.node] = found[0]
                client = names.get(message.node, "")
                self.strikes.pop(client, None)
                self.seconds[client], self.heard[client] = time.monotonic() - began, time.time()
        for message in waiting.values():
            gone = message.node not in self.connected()
            name = called(message.node, names)
            self.faults[name] = "lost its connection" if gone else f"did not answer within {self.timeout:g} s"
            if message.node in names and gone:
                self.away.add(name)
            elif message.node in names:
                self.rest(name)
        return answers

    def pull(self, waiting: dict[str, SentMessage], seconds: float = _PARTS) -> list[tuple[SentMessage, Message]]:
        """The replies that are there now, with the requests that they answer, which no longer wait.

        A node may end while it sends a reply: the parts that are missing are waited for no longer than `seconds`.
        """
        replies = pull_replies(self.grid, list(waiting), seconds) if waiting else ()
        found = [(waiting.pop(reply.metadata.reply_to_message_id, None), reply) for reply in replies]
        return [(sent, reply) for sent, reply in found if sent is not None]

    def _replies(self, waiting: dict[str, SentMessage]) -> Iterator[tuple[SentMessage, Message]]:
        """Requests and their replies as they come, until all are there or the time is over; the others stay waiting."""
        end, pause, looked = time.monotonic() + self.timeout, _POLL[0], time.monotonic()
        while waiting:
            yield from self.pull(waiting, (1 - _FOR_OTHERS) * max(0.0, end - time.monotonic()))
            now = time.monotonic()
            if not waiting or now >= end:
                return
            if now - looked > _LOOK_AROUND:  # nobody waits for a node that has gone
                there, looked = self.connected(), now
                self.meanwhile()
                if there.isdisjoint(sent.node for sent in waiting.values()):
                    return
            time.sleep(min(pause, max(0.0, end - now)))
            pause = min(1.5 * pause, _POLL[1])

    def _open(self, node: int, reply: Message, round_index: int, token: str, client: str | None = None) -> MessageContent:
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
            if content.values["refused"] == BadMessage.__name__:
                self.compact.discard(node)  # an earlier version may have come back under the same id
            kind = read_type(content.values["refused"])
            if kind in BY_ITS_OWNER and client is not None:
                self.refusing.add(client)
                if kind in FOR_GOOD:
                    self.for_good.add(client)
            raise BadMessage(f"refused, for the reason {BY_ITS_OWNER.get(kind, f'{kind}: its own log says more')}")
        if content.round != round_index or content.token != token:
            raise BadMessage(
                f"sent the answer to another request (of round {content.round + 1}, asked in round {round_index + 1})"
            )
        return content
