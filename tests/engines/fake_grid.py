"""A federation in memory: Flower's Grid with real client apps behind it, each in a thread of its own, and faults on demand.

Time is made up: it stands still while nodes work and passes at once when all are done, so that a timeout is met by those who
are silent and by nobody else, however slow the machine.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any
from unittest import mock

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from equipoise.data.clients import FederatedData
from equipoise.engines.flower import client_app, flower_engine
from equipoise.engines.flower.apps import introductions, run_control, welcome
from equipoise.engines.flower.transport import messenger
from equipoise.engines.flower.transport.messages import BadMessage, expanded

Fault = Callable[["Delivery"], Any]


class Clock:
    """Stands for the module `time` on the server's side."""

    def __init__(self) -> None:
        self.now, self.working = 0.0, 0
        self._late: list[float] = []  # the moments that late nodes wait for
        self._changed = threading.Condition()

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1.7e9 + self.now

    def sleep(self, seconds: float) -> None:
        with self._changed:
            if self.working:  # nodes are at it, and the server waits for them
                self._changed.wait(0.05)
            else:
                self.now += max(seconds, 1e-3)
                self._changed.notify_all()
                self._changed.wait_for(lambda: all(moment > self.now for moment in self._late), timeout=10)

    def works(self, more: int) -> None:
        with self._changed:
            self.working += more
            self._changed.notify_all()

    def wait_until(self, moment: float) -> None:
        """For a node that is late: it does nothing until then."""
        with self._changed:
            self.working -= 1
            self._late.append(moment)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self.now >= moment, timeout=300)  # real seconds, of a busy machine
            self._late.remove(moment)
            self.working += 1
            self._changed.notify_all()


class Delivery:
    """One message on its way: who gets it, what it asks, and how often this node was asked that before."""

    def __init__(self, grid: FakeGrid, node: int, message: Message, count: int) -> None:
        self.grid, self.node, self.message, self.count = grid, node, message, count

    @property
    def client(self) -> str:
        return self.grid.names[self.node]

    @property
    def action(self) -> str:
        return self.message.metadata.message_type

    @property
    def round(self) -> int:
        return int(self.message.metadata.group_id.split()[-1])  # or of the evaluation after as many rounds

    def answer(self) -> Message:
        """What the node really answers."""
        return self.grid.answer(self.node, self.message)


class FakeGrid(Grid):
    """Routes messages to client apps. `fault(delivery)` may return another reply, None for silence, or raise.

    Every message is written to bytes and read again on its way, as Flower does, so that what cannot travel fails here too.
    """

    def __init__(self, apps: dict[str, ClientApp], *, node_config: dict[str, dict[str, Any]] | None = None) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 1
        self.names = {100 + i: name for i, name in enumerate(apps)}
        self.apps = {node: apps[name] for node, name in self.names.items()}
        config = node_config or {}
        self.contexts = {
            node: Context(7, node, {"client-id": name, **config.get(name, {})}, RecordDict(), {})
            for node, name in self.names.items()
        }
        self.fault: Fault = lambda delivery: delivery.answer()
        self.offline: set[str] = set()
        self.log: list[tuple[str, str, int]] = []  # client, action, round
        self.raw: list[tuple[str, Message]] = []  # requests as they travelled
        self.sent: list[tuple[str, Message]] = []  # requests as the nodes read them, with tensors beside the call
        self.replies: list[tuple[str, str, Message]] = []  # client, action, reply as the server got it
        self._counts: dict[tuple[int, str], int] = {}
        self._waiting: dict[str, Message] = {}
        self._busy = {node: threading.Lock() for node in self.names}
        self._lock, self._working = threading.Lock(), threading.Lock()
        self._pool = ThreadPoolExecutor(16)
        self.clock = Clock()

    # Flower's interface

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise AssertionError("The server is not meant to use this call of Flower's.")

    def get_node_ids(self) -> Iterable[int]:
        return [node for node, name in self.names.items() if name not in self.offline]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid.uuid4())
            ids.append(message.metadata.message_id)
            self.clock.works(1)
            self._pool.submit(self._deliver, message.metadata.dst_node_id, message)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        with self._lock:
            return [self._waiting.pop(i) for i in list(message_ids) if i in self._waiting]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise AssertionError("The server is not meant to use this call of Flower's.")

    # what happens on the way

    def _deliver(self, node: int, message: Message) -> None:
        try:
            self._deliver_one(node, message)
        finally:
            self.clock.works(-1)

    def _deliver_one(self, node: int, message: Message) -> None:
        name = self.names.get(node, "")
        if not name:
            return  # the node has ended
        if not self._busy[node].acquire(blocking=False):  # one message at a time, as a SuperNode does
            self.clock.works(-1)
            self._busy[node].acquire()
            self.clock.works(1)
        try:
            action = message.metadata.message_type
            key = (node, action)
            with self._lock:
                self._counts[key] = self._counts.get(key, 0) + 1
                self.log.append((name, action, int(message.metadata.group_id.split()[-1])))
                self.raw.append((name, message))
                self.sent.append((name, readable(message)))
            try:
                reply = self.fault(Delivery(self, node, message, self._counts[key]))
            except Exception as failure:
                reply = Message(Error(1, str(failure)), reply_to=message)
            if reply is None or name in self.offline:
                return
            reply.metadata.__dict__["_message_id"] = str(uuid.uuid4())
            with self._lock:
                self.replies.append((name, action, reply))
                self._waiting[reply.metadata.reply_to_message_id] = reply
        finally:
            self._busy[node].release()

    def answer(self, node: int, message: Message) -> Message:
        with self._working:  # torch has one generator for all threads, where real nodes have a process each
            reply = self.apps[node](travelled(message), self.contexts[node])
        # The state is written to bytes between two messages, as on a SuperNode.
        self.contexts[node].state = inflated(self.contexts[node].state)
        return readable(reply)

    def restart(self, client: str, *, keep_state: bool = False) -> None:
        """The node ends and starts anew, with another id, and without what it had in memory."""
        old = next(node for node, name in self.names.items() if name == client)
        new = max(self.names) + 1
        self.names[new], self.apps[new] = self.names.pop(old), self.apps.pop(old)
        context = self.contexts.pop(old)
        state = context.state if keep_state else RecordDict()
        self.contexts[new] = Context(7, new, context.node_config, state, {})
        self._busy[new] = threading.Lock()
        self.offline.discard(client)

    def new_run(self) -> None:
        """A new Flower run on the same nodes: their state of the old one is not there."""
        for context in self.contexts.values():
            context.state = RecordDict()


def inflated(thing: Any) -> Any:
    """A message or record through bytes and back."""
    contents = {key: value.deflate() for key, value in get_all_nested_objects(thing).items()}
    return inflate_object_from_contents(thing.object_id, contents)


def travelled(message: Message) -> Message:
    """A message as the other side gets it."""
    other = inflated(message)
    other.metadata.__dict__["_message_id"] = message.metadata.message_id
    return other


def readable(message: Message) -> Message:
    """A message as the other side gets it, with its tensors beside the call, where tests look for them."""
    other = travelled(message)
    if other.has_content():
        with suppress(BadMessage):
            other.content = expanded(other.content)
    return other


def one_client(data: FederatedData, name: str) -> FederatedData:
    """The splits of one client."""
    sets = {s: c.take([c.ids.index(name)]) for s, c in data.splits.items() if name in c.ids}
    if "train" not in sets:
        raise KeyError(name)
    return FederatedData(sets["train"], sets.get("validation"), sets.get("test"), name)


def splits_of(data: FederatedData, name: str) -> Any:
    """What a node's `load_data` gives: a client's splits, also of one that is only tested on."""
    if name in data.train.ids:
        return one_client(data, name)
    return {"id": name, **{s: c.client(name) for s, c in data.splits.items() if name in c.ids}}


def federation(data: FederatedData, model: Any, **options: Any) -> FakeGrid:
    """A grid with one node for each client of the data."""
    names = list(dict.fromkeys(i for clients in data.splits.values() for i in clients.ids))
    apps = {
        name: client_app(model=model, load_data=lambda _, name=name: splits_of(data, name), **options) for name in names
    }  # fmt: skip
    return FakeGrid(apps)


def run_app(app: Any, grid: FakeGrid, **config: Any) -> None:
    """Run a server app on a grid, as Flower would."""
    with ExitStack() as stack:
        for module in (messenger, flower_engine, introductions, welcome, run_control):
            stack.enter_context(mock.patch.object(module, "time", grid.clock))
        app(grid=grid, context=Context(7, 1, {}, RecordDict(), config))
