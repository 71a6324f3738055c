"""Who takes part in a run: nodes are asked who they are, and let in under their names, before the run and while it goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from equipoise.core.words import counted
from equipoise.engines.flower.apps import left_out
from equipoise.engines.flower.apps.introductions import Introductions
from equipoise.engines.flower.apps.members import Member, natural_order
from equipoise.engines.flower.apps.node_keys import RETIRED, KnownNodes
from equipoise.engines.flower.transport.messages import BadMessage
from equipoise.engines.flower.transport.messenger import Messenger, TooFewClients
from equipoise.errors import EquipoiseError

log = logging.getLogger("flwr")  # Flower shows it to whoever watches the run
HELLO = 3.0  # seconds that one look for nodes waits for their answers


class MoreClients(EquipoiseError):
    """Clients have come that were not there when the run began; `members` are theirs."""

    def __init__(self, members: Mapping[str, Member]) -> None:
        super().__init__(", ".join(members))
        self.members = dict(members)


@dataclass(eq=False)
class Welcome:
    """Lets nodes in. `members` are the clients of the run, those of its roster once it has begun."""

    messenger: Messenger
    introductions: Introductions
    names: KnownNodes
    members: dict[str, Member] = field(default_factory=dict)
    begun: bool = False  # whether the clients of the run are settled
    admits: bool = False  # whether clients may still join between rounds
    late: dict[str, Member] = field(default_factory=dict)  # clients that wait for the next round
    said: set[str] = field(default_factory=set)  # whom the log has named as late
    keys: dict[int, str] = field(default_factory=dict)  # that nodes have proved

    @property
    def there(self) -> list[str]:
        """The clients whose nodes have introduced themselves."""
        return [client for client in self.members if client in self.messenger.nodes]

    def look(self, wait: float) -> None:
        """Ask nodes that are not known, or were silent, who they are, and let them in."""
        messenger = self.messenger
        self.bar_withdrawn()
        there, known = {node for node in messenger.connected() if self._may_come(node)}, set(messenger.nodes.values())
        now = time.monotonic()
        silent = [messenger.nodes[c] for c, rest in messenger.resting.items() if c in messenger.nodes and now >= rest.until]
        back = [messenger.nodes[c] for c in messenger.away if c in messenger.nodes]  # perhaps with other data, or upgraded
        asked = dict.fromkeys([*(node for node in there if node not in known), *silent, *back])
        self.introductions.ask(node for node in asked if node in there)
        for node, member in self.introductions.collect(min(wait, messenger.timeout)).items():
            try:
                self.let_in(node, member)
                self.introductions.accept(node)
            except BadMessage as failure:
                self.introductions.refuse(node, str(failure), failure.cause)

    def bar_withdrawn(self) -> None:
        """Ask nothing more of clients whose key the operator has replaced or retired; a run may go on for months."""
        self.names.refresh()
        nodes, barred = self.messenger.nodes, self.messenger.barred
        for client in {**self.members, **nodes}:
            why = self.names.withdrawn(client, self.keys.get(nodes[client], "") if client in nodes else None)
            if why and barred.get(client) != why:
                log.warning("%s %s. The run goes on without it.", client, why)
            if why:
                if client in nodes and barred.get(client) != why:
                    self.messenger.tell(nodes[client], left_out.RETIRED if why == RETIRED else left_out.REPLACED)
                barred[client] = why
                nodes.pop(client, None)
                self.messenger.resting.pop(client, None)
                if not self.begun:
                    self.members.pop(client, None)
            elif barred.get(client) == RETIRED:
                del barred[client]  # it is on the list again

    def _may_come(self, node: int) -> bool:
        """Whether it is of use to ask a node who it is: Flower knows it by its key, which must be on the operator's list."""
        listed, key = self.names.listed, self.keys.get(node)
        return listed is None or not key or key in listed.values()

    @property
    def awaited(self) -> int:
        """How many clients of a run that goes on may still come."""
        return sum(self.names.withdrawn(client, None) == "" for client in self.members)

    @property
    def missing(self) -> list[str]:
        """The clients that have not introduced themselves, by the operator's list or the roster; none where neither is."""
        listed = self.names.listed
        known = self.members if self.begun else listed if listed is not None else ()
        there = set(self.there)
        return sorted((c for c in known if c not in there and not self.names.withdrawn(c, None)), key=natural_order)

    def meet(self, wait: float) -> None:
        """Look for nodes between rounds; raises MoreClients where new ones may join."""
        self.look(wait)
        if self.late and self.admits:
            raise MoreClients(self.late)

    def let_in(self, node: int, member: Member) -> None:
        """Note which node a client is at. A node with another one's name, or other data than before, is refused."""
        client, nodes = member.client, self.messenger.nodes
        self.keys[node] = member.key
        self.names.check(member)
        self.messenger.barred.pop(client, None)
        (self.messenger.compact.add if member.compact else self.messenger.compact.discard)(node)
        before = self.members.get(client)
        if before is None and self.begun:
            self._note_late(node, member)
            return
        if before is not None:
            before.refuse_change(member)
            other = nodes.get(client)
            if not self.begun and other not in (None, node) and other in self.messenger.connected():
                text = f"has the client name {client!r}, which node {other} has already: give each its own client-id"
                raise BadMessage(text, left_out.TWICE)
        nodes[client], self.messenger.marks[client] = node, member.fingerprint
        self.messenger.known[node] = client
        self.messenger.heard[client], self.messenger.versions[client] = time.time(), member.versions
        if self.begun and client in {*self.messenger.away, *self.messenger.resting}:
            log.info("%s is back.", client)
        self.messenger.away.discard(client)
        self.messenger.wake(client)
        self.members[client] = member if before is None or not self.begun else before.with_policy_of(member)
        self.names.pin({client: member})

    def _note_late(self, node: int, member: Member) -> None:
        """A client that was not there when the run began. If its examples are not like the others', it does not join."""
        if self.admits:
            next(iter(self.members.values())).refuse_other_kind(member)
        if member.client not in self.said:
            self.said.add(member.client)
            when = "joins before the next round" if self.admits else "takes part from the next run on"
            log.warning("Client %s at node %d was not there when the run began, and %s.", member.client, node, when)
        if self.admits:
            self.late[member.client] = member
            self.messenger.nodes[member.client], self.messenger.known[node] = node, member.client
            self.messenger.marks[member.client] = member.fingerprint
            self.messenger.versions[member.client] = member.versions
            return
        raise BadMessage("was not there when the run began", left_out.LATE)

    def settle(self, members: Mapping[str, Member]) -> None:
        """These are the clients of the run from now on."""
        self.members, self.begun = dict(members), True
        self.late.clear()


def gather(
    welcome: Welcome, wanted: int, *, patience: float, enough: int, soon: float | None = None,
    tell: Callable[[Welcome, int], None] = lambda welcome, wanted: None,
) -> None:  # fmt: skip
    """Wait until `wanted` clients are there; after `patience` seconds, or `soon`, `enough` of them suffice.

    `tell` is called after each look with who is there and how many are wanted.
    """
    log.info("Waiting for %s.", counted(wanted, "node"))
    began, pause = time.monotonic(), 0.05
    while len(welcome.there) < wanted:
        welcome.look(HELLO)
        tell(welcome, wanted)
        waited = time.monotonic() - began
        if len(welcome.there) >= wanted or waited >= patience:
            break
        if soon is not None and waited >= soon and len(welcome.there) >= enough:
            break
        time.sleep(min(pause, max(0.0, patience - waited)))
        pause = min(1.5 * pause, 3.0)
    there = welcome.there
    if len(there) < min(enough, wanted):
        strangers = list(welcome.introductions.reasons.items())[:5]
        shown = "".join(f" Of {welcome.messenger.show(node)}: {why}." for node, why in strangers)
        raise TooFewClients(f"{counted(len(there), 'node')} came within {patience:g} s, and {enough} are needed.{shown}")
    log.info("%s: %s.", counted(len(there), "client"), ", ".join(sorted(there, key=natural_order)))
