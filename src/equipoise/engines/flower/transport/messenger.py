"""The nodes as the server sees them: who they are, how they are asked, and stand-ins for their data.

A stand-in is an ordinary FederatedData whose examples are zeros without memory: ids, sizes, shapes and classes are real, so
that cohorts are drawn, weights set and the model tried out as in a simulation. No example ever comes to the server.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from equipoise.core.task import Task
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.engines.flower.transport.messages import BadMessage, Parcel, read, short, size_of, written
from equipoise.errors import EquipoiseError, InvalidData, InvalidParameter

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.serverapp import Grid

T = TypeVar("T")
SPLITS = ("train", "validation", "test")
LONGEST_NAME = 200  # bytes
_SEEDED = threading.Lock()  # torch has one generator for all threads
_POLL = (0.02, 1.0)  # seconds between looks for replies: at first, and at last
_LOOK_AROUND = 3.0  # seconds between looks at who is connected
_TYPES = {str(t).removeprefix("torch."): t for t in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8,
          torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)}  # fmt: skip


class TooFewClients(EquipoiseError, RuntimeError):
    """Fewer clients did their part than a round needs; the text names the others."""


def require_flower() -> None:
    """Say what is missing where Flower is not installed."""
    try:
        import cryptography  # noqa: F401
        import flwr.app  # noqa: F401
    except ImportError as failure:
        raise EquipoiseError(f'{failure}. Install Flower with Equipoise: pip install "equipoise[flower]"') from failure


# ------------------------------------------------------------------------------------------------------------------ the model


def make_model(model: Any, seed: int) -> nn.Module:
    """A module: the one that is given, or what its class, or a function of nothing or of the seed, makes under the seed."""
    if isinstance(model, nn.Module):
        return model
    rule = "must be a torch module, its class, or a function of nothing (or of the seed) that makes one"
    if not callable(model):
        raise InvalidParameter("model", rule, model)
    needed = [
        p for p in inspect.signature(model).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]  # fmt: skip
    if len(needed) > 1:
        fix = "Write model=lambda: Net(…)."
        raise InvalidParameter("model", rule, f"a function of {', '.join(p.name for p in needed)}", fix)
    with _SEEDED, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        made = model(seed) if needed else model()
    if not isinstance(made, nn.Module):
        raise InvalidParameter("model", rule, type(made).__name__)
    return made


def layout_digest(task: Task) -> str:
    """A short hash of the names, shapes and type of the trained parameters: server and nodes must agree on it."""
    layout = task.layout
    text = repr((layout.names, [tuple(shape) for shape in layout.shapes], str(layout.dtype)))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def frozen_digest(task: Task) -> str:
    """A short hash of what the model holds besides trained parameters: it does not travel, so it must be the same anywhere."""
    digest = hashlib.blake2b(digest_size=8)
    held = [*task.module.named_parameters(), *task.module.named_buffers()]
    for name, value in sorted((name, value) for name, value in held if name not in task.layout.names):
        plain = value.detach().cpu()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)}".encode() + plain.double().numpy().tobytes())
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------------------ who takes part


@dataclass(frozen=True)
class Member:
    """A client as its node has introduced it."""

    client: str
    splits: dict[str, int]  # examples
    x: dict[str, Any]  # shape and type of one input
    y: dict[str, Any]
    classes: int
    fingerprint: str
    scale: float | None = None
    shift: float = 0.0
    only_sums: bool = False

    @classmethod
    def read(cls, parcel: Parcel, task: Task) -> Member:
        """A node's introduction, checked; what does not fit the server's model is refused with the reason."""
        name = parcel.value("client", str)
        if not 1 <= len(name.encode()) <= LONGEST_NAME:
            raise BadMessage(f"its client has a name of {len(name.encode())} bytes")
        if parcel.value("layout", str) != layout_digest(task):
            raise BadMessage(f"{name} has another model: its parameters have other names, shapes or types")
        if parcel.value("frozen", str) != frozen_digest(task):
            raise BadMessage(f"{name} has another model: its buffers or frozen parameters differ, and these do not travel")
        splits = parcel.value("splits", dict)
        good = bool(splits) and all(s in SPLITS and type(n) is int and 0 < n < 2**40 for s, n in splits.items())
        if not good:
            raise BadMessage(f"{name} says of its examples {short(splits)!r}")
        kinds = {key: _example(parcel.value(key, dict), name) for key in ("x", "y")}
        scale, shift = parcel.values.get("scale"), parcel.value("shift", (int, float))
        if scale is not None and not isinstance(scale, float):
            raise BadMessage(f"{name} scales its inputs by {short(scale)!r}")
        classes = parcel.value("classes", int)
        if not 0 <= classes < 2**31:
            raise BadMessage(f"{name} has {classes} classes")
        mark, alone = parcel.value("fingerprint", str)[:64], parcel.value("only_sums", bool)
        return cls(name, splits, kinds["x"], kinds["y"], classes, mark, scale, float(shift), alone)

    def refuse_change(self, now: Member) -> None:
        """A client that comes back must have the data it had."""
        if (self.fingerprint, self.splits) != (now.fingerprint, now.splits):
            raise BadMessage(f"{now.client} has other data than when the run began")


def _example(kind: dict[str, Any], name: str) -> dict[str, Any]:
    shape, dtype = kind.get("shape"), kind.get("dtype")
    good = isinstance(shape, list) and len(shape) <= 8 and all(type(n) is int and 0 <= n < 2**24 for n in shape)
    if not good or dtype not in _TYPES or torch.Size(shape).numel() > 2**28:  # type: ignore[arg-type]
        raise BadMessage(f"{name} has examples of shape {short(shape)!r} and type {short(dtype)!r}")
    return {"shape": shape, "dtype": dtype}


def natural(name: str) -> list[Any]:
    """A key that sorts "2" before "10"."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]


def stand_in(members: Iterable[Member], name: str) -> FederatedData:
    """Data with the clients' ids, sizes and shapes, in the natural order of their ids, and zeros for examples."""
    ordered = sorted(members, key=lambda m: natural(m.client))
    first = ordered[0]
    for other in ordered[1:]:
        if (other.x, other.y, other.scale, other.shift) != (first.x, first.y, first.scale, first.shift):
            raise InvalidData(
                f"{first.client} and {other.client} have examples of different shape, type or scale: {first.x}, {first.y} and "
                f"{other.x}, {other.y}. All nodes must prepare their data alike."
            )
    sets = {
        split: _zeros([(m.client, m.splits[split]) for m in ordered if split in m.splits], first)
        for split in SPLITS
        if any(split in m.splits for m in ordered)
    }
    if "train" not in sets:
        raise InvalidData("No node has examples to train on.")
    classes = max(m.classes for m in ordered)
    data = FederatedData(sets["train"], sets.get("validation"), sets.get("test"), name, classes)
    marks = json.dumps([asdict(m) for m in ordered], sort_keys=True).encode()
    vars(data)["fingerprint"] = hashlib.blake2b(marks, digest_size=8).hexdigest()  # of the nodes' data, not of zeros
    return data


def _zeros(sizes: list[tuple[str, int]], like: Member) -> ClientSet:
    """A set of clients whose examples are all one zero, repeated without memory."""
    counts = torch.tensor([count for _, count in sizes])
    total = int(counts.sum())
    made = object.__new__(ClientSet)  # there is nothing in it to check
    kinds = {key: (kind["shape"], _TYPES[kind["dtype"]]) for key, kind in (("x", like.x), ("y", like.y))}
    values: dict[str, Any] = {key: torch.zeros(1, *shape, dtype=t).expand(total, *shape) for key, (shape, t) in kinds.items()}
    values |= {
        "offsets": torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]),
        "ids": tuple(name for name, _ in sizes),
        "scale": like.scale,
        "shift": like.shift,
        "source": "",
    }
    for key, value in values.items():
        object.__setattr__(made, key, value)
    return made


# -------------------------------------------------------------------------------------------------------------- asking nodes


@dataclass
class Traffic:
    """Bytes to and from each client, of the contents of messages."""

    sent: dict[str, int] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)

    def add(self, which: dict[str, int], client: str, count: int) -> None:
        which[client] = which.get(client, 0) + count


@dataclass(frozen=True, eq=False)
class Request:
    """What one client is asked: plain values, and tensors."""

    values: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


class Wire:
    """Asks nodes and reads their answers. Whoever does not answer in time, or not as asked, is named in `faults`."""

    def __init__(self, grid: Grid, *, timeout: float) -> None:
        self.grid, self.timeout = grid, timeout
        self.nodes: dict[str, int] = {}  # Flower's id of the node of each client
        self.faults: dict[str, str] = {}
        self.traffic = Traffic()

    def begin(self) -> None:
        """A new round, or another try of one: faults and traffic before it are forgotten."""
        self.faults, self.traffic = {}, Traffic()

    def connected(self) -> set[int]:
        """Flower's ids of the nodes that are there now."""
        return set(self.grid.get_node_ids())

    def ask(
        self, action: str, requests: Mapping[str, Request], round_index: int, reading: Callable[[Parcel], T]
    ) -> dict[str, T]:
        """Ask clients, all at once; what `reading` makes of each good answer. The others are in `faults`, with the reason.

        `reading` raises BadMessage for an answer that is not what was asked for.
        """
        there = self.connected()
        asked: dict[int, str] = {}
        for client in requests:
            node = self.nodes.get(client)
            if node is None or node not in there:
                self.faults[client] = "is not connected"
            else:
                asked[node] = client
        found = self.ask_nodes(action, {node: requests[client] for node, client in asked.items()}, round_index, reading, asked)
        return {asked[node]: answer for node, answer in found.items()}

    def ask_nodes(
        self,
        action: str,
        requests: Mapping[int, Request],
        round_index: int,
        reading: Callable[[Parcel], T],
        names: Mapping[int, str] | None = None,
    ) -> dict[int, T]:
        """The same by Flower's ids of nodes, for those whose client is not known yet."""
        if not requests:
            return {}
        names = names or {}
        tokens = {node: secrets.token_hex(8) for node in requests}
        waiting = self._send(action, requests, round_index, tokens, names)
        found: dict[int, T] = {}

        def take(node: int, reply: Message) -> None:
            try:
                parcel = self._opened(node, reply, round_index, tokens[node])
                if reply.has_content() and node in names:
                    self.traffic.add(self.traffic.received, names[node], size_of(reply.content))
                found[node] = reading(parcel)
            except EquipoiseError as failure:
                self.faults[names.get(node, f"node {node}")] = short(failure)

        for node in self._collect(waiting, take):
            self.faults[names.get(node, f"node {node}")] = self._why_silent(node)
        return found

    def _send(
        self,
        action: str,
        requests: Mapping[int, Request],
        round_index: int,
        tokens: Mapping[int, str],
        names: Mapping[int, str],
    ) -> dict[str, int]:
        """Send the requests; the message id of each, and its node."""
        from flwr.app import Message

        messages, order = [], []
        for node, request in requests.items():
            content = written(round_index, tokens[node], request.values, request.tensors)
            if node in names:
                self.traffic.add(self.traffic.sent, names[node], size_of(content))
            messages.append(Message(content, node, action, ttl=self.timeout, group_id=str(round_index)))
            order.append(node)
        ids = list(self.grid.push_messages(messages))
        ids += [""] * (len(order) - len(ids))
        unsent = [node for node, name in zip(order, ids, strict=True) if not name]
        for node in unsent:
            self.faults[names.get(node, f"node {node}")] = "could not be sent its message"
        return {name: node for name, node in zip(ids, order, strict=True) if name}

    def _collect(self, waiting: dict[str, int], take: Callable[[int, Message], None]) -> list[int]:
        """Hand in replies as they come, until all are there or the time is over; the nodes that did not reply."""
        end, pause, looked = time.monotonic() + self.timeout, _POLL[0], time.monotonic()
        while waiting:
            for reply in self.grid.pull_messages(list(waiting)):
                node = waiting.pop(reply.metadata.reply_to_message_id, None)
                if node is not None:
                    take(node, reply)
            now = time.monotonic()
            if not waiting or now >= end:
                break
            if now - looked > _LOOK_AROUND:  # nobody waits for a node that has gone
                there, looked = self.connected(), now
                if not any(node in there for node in waiting.values()):
                    break
            time.sleep(min(pause, max(0.0, end - now)))
            pause = min(1.5 * pause, _POLL[1])
        return list(waiting.values())

    def _opened(self, node: int, reply: Message, round_index: int, token: str) -> Parcel:
        """What a reply says, if it is the answer to what was asked."""
        if reply.has_error():
            raise BadMessage(f"failed: {short(reply.error.reason or f'error {reply.error.code}')}")
        if not reply.has_content():
            raise BadMessage("sent an empty answer")
        if reply.metadata.src_node_id != node:
            raise BadMessage("answered in another node's name")
        try:
            parcel = read(reply.content)
        except BadMessage as failure:
            raise BadMessage(f"sent an answer that cannot be read: {failure}") from failure
        if "refused" in parcel.values:
            raise BadMessage(f"refused: {short(parcel.values['refused'])}")
        if parcel.round != round_index or parcel.token != token:
            raise BadMessage(f"sent the answer to another request (of round {parcel.round}, asked in round {round_index})")
        return parcel

    def _why_silent(self, node: int) -> str:
        if node not in self.connected():
            return "lost its connection"
        return f"did not answer within {self.timeout:g} s"
