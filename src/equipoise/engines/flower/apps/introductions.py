"""Asking nodes who they are: nobody waits for one that does not answer, and it is asked again after growing pauses."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flwr.app import Message

from equipoise.engines.flower.apps.members import Member
from equipoise.engines.flower.transport.messages import MessageContent
from equipoise.engines.flower.transport.messenger import ClientRequest, Messenger, SentMessage

log = logging.getLogger("flwr")  # Flower shows it to whoever watches the run
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 300.0  # seconds before a node is asked again who it is
_POLL = (0.02, 0.5)


@dataclass
class _NextQuestion:
    """When a node is asked again, and how long the pause after that is."""

    due: float
    pause: float = FIRST_PAUSE


class Introductions:
    """Who the nodes are, as they answer. `reasons` says of each node that has not introduced itself well why that is."""

    def __init__(self, messenger: Messenger, request: ClientRequest, reading: Callable[[MessageContent], Member]) -> None:
        self.messenger, self.request, self.reading = messenger, request, reading
        self.reasons: dict[int, str] = {}
        self._asked: dict[int, _NextQuestion] = {}
        self._waiting: dict[str, SentMessage] = {}
        self._ends: dict[str, float] = {}  # when a message expires
        self._fresh: set[str] = set()  # the messages of the last call of `ask`
        self._come: list[tuple[SentMessage, Message]] = []  # answers that nobody has read yet
        messenger.meanwhile = self.take_answers

    def take_answers(self) -> None:
        """Take the answers that are there; they are read by `collect`. A round may take longer than they last."""
        self._come += self.messenger.pull(self._waiting)

    def ask(self, nodes: Iterable[int]) -> None:
        """Ask those nodes whose time it is, and that have no question before them."""
        now = time.monotonic()
        self.take_answers()
        for message_id in [each for each, end in self._ends.items() if now >= end]:
            sent = self._waiting.pop(message_id, None)
            del self._ends[message_id]
            if sent is not None:
                self.refuse(sent.node, "has not said who it is")
        busy = {sent.node for sent in (*self._waiting.values(), *(sent for sent, _ in self._come))}
        due = [node for node in nodes if node not in busy and self._asked.setdefault(node, _NextQuestion(now)).due <= now]
        asked = dict.fromkeys(due, self.request)
        pushed = self.messenger.push("query.hello", asked, 0, {}, self.messenger.timeout) if due else {}
        self._waiting |= pushed
        self._ends |= dict.fromkeys(pushed, now + self.messenger.timeout)
        self._fresh = set(pushed)
        for node in due:
            before = self._asked[node]
            before.due, before.pause = now + before.pause, min(2 * before.pause, LONGEST_PAUSE)

    def collect(self, wait: float) -> dict[int, Member]:
        """The nodes that have said who they are. For those that were just asked it waits some seconds, for others not."""
        end, pause = time.monotonic() + wait, _POLL[0]
        found: dict[int, Member] = {}
        while True:
            self.take_answers()
            come, self._come = self._come, []
            for sent, reply in come:
                read = self.messenger.read(sent, reply, self.reading, {})
                if read is None:
                    self.refuse(sent.node, self.messenger.faults.get(f"node {sent.node}", "sent an answer of no use"))
                else:
                    found[sent.node] = read[0]
            there = self.messenger.connected() if self._fresh & set(self._waiting) else set()
            left = any(self._waiting[each].node in there for each in self._fresh & set(self._waiting))
            if not left or time.monotonic() >= end:
                return found
            time.sleep(pause)
            pause = min(1.5 * pause, _POLL[1])

    def accept(self, node: int) -> None:
        """A node that has introduced itself well takes part."""
        self._asked.pop(node, None)
        self.reasons.pop(node, None)
        self.messenger.forget_told(node)

    def refuse(self, node: int, why: str, cause: str = "") -> None:
        """Note why a node takes no part: whoever watches the run reads it once, and so does the node, if it has a cause."""
        self.messenger.tell(node, cause)
        if self.reasons.get(node) != why:
            log.warning("Not taking part: %s: %s.", self.messenger.show(node), why)
        self.reasons[node] = why
        self._asked.setdefault(node, _NextQuestion(time.monotonic() + FIRST_PAUSE, 2 * FIRST_PAUSE))
