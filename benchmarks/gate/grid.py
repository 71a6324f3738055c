"""Flower's Grid in memory: each message is answered at once by a node's app, after a way through bytes."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid as FlowerGrid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

logging.getLogger("flwr").setLevel("ERROR")


def travelled(thing: Any) -> Any:
    """A message or a record as the other side gets it."""
    contents = {key: value.deflate() for key, value in get_all_nested_objects(thing).items()}
    return inflate_object_from_contents(thing.object_id, contents)


class Grid(FlowerGrid):
    """Routes messages to node apps, one at a time in the order in which they are sent.

    `faults` are rounds by client in which the client's app fails whatever it is asked.
    """

    def __init__(self, apps: dict[str, ClientApp], faults: dict[str, list[int]]) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 1
        self.apps = dict(enumerate(apps.values(), 100))
        self.contexts = {node: Context(7, node, {"client-id": name}, RecordDict(), {}) for node, name in enumerate(apps, 100)}
        self.waiting: dict[str, Message] = {}
        self.faults = {node: faults[name] for node, name in enumerate(apps, 100) if name in faults}

    def run(self, app: Any) -> None:  # type: ignore[override]
        """Run a server app to its end."""
        app(grid=self, context=Context(7, 1, {}, RecordDict(), {}))

    def set_run(self, run: Any) -> None: ...

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise AssertionError("not used by the server")

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        ids = list(self.push_messages(messages))
        return self.pull_messages(ids)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.apps)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._answer(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.waiting.pop(name) for name in message_ids if name in self.waiting]

    def _answer(self, message: Message) -> str:
        message.metadata.__dict__["_message_id"] = name = str(uuid.uuid4())
        node, received = message.metadata.dst_node_id, travelled(message)
        received.metadata.__dict__["_message_id"] = name
        try:
            if int(message.metadata.group_id.split()[-1]) in self.faults.get(node, ()):
                raise RuntimeError("a fault")
            reply = travelled(self.apps[node](received, self.contexts[node]))
            self.contexts[node].state = travelled(self.contexts[node].state)
        except Exception as failure:
            reply = Message(Error(1, str(failure)), reply_to=message)
        reply.metadata.__dict__["_message_id"] = str(uuid.uuid4())
        self.waiting[name] = reply
        return name
