"""The clients of a federation as their nodes introduce them, and a stand-in for their data.

A stand-in is an ordinary FederatedData whose examples are zeros without memory: ids, sizes, shapes and classes are real, so
that cohorts are drawn, weights set and the model tried out as in a simulation. No example ever comes to the server.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from equipoise.core.task import Task
from equipoise.data.clients import ClientSet, FederatedData, offsets_of
from equipoise.engines.flower.apps import left_out
from equipoise.engines.flower.apps.example_kinds import read_kind, read_units, zeros_like_kind
from equipoise.engines.flower.apps.model_source import digest_frozen, digest_layout
from equipoise.engines.flower.apps.node_keys import read_proof
from equipoise.engines.flower.secure.identities import read_public_text
from equipoise.engines.flower.secure.sum_terms import MOST_CLIENTS
from equipoise.engines.flower.transport.messages import BadMessage, MessageContent, shorten
from equipoise.errors import ConfigError, InvalidData, is_integer

SPLITS = ("train", "validation", "test")
LONGEST_NAME = 200  # bytes
MOST_METRICS = 100
MOST_EXAMPLES = 1_000_000  # of a split, by default: they set a client's weight, and nobody can check them
MOST_CLASSES = 1_000_000
LONGEST_VERSION = 40  # characters
OF_POLICY = ("only_sums", "minimum_crowd", "evaluates", "evaluations")  # what an introduction says of the owner's policy
OTHER_APP = (
    "Its app is not that of this run: send it the folder app/ (`equipoise flower site NAME`) and have its node restarted"
)


@dataclass(frozen=True)
class Member:
    """A client as its node has introduced it."""

    client: str
    splits: dict[str, int]  # examples
    x: Any  # the kind of one input, of example_kinds.py
    y: Any
    classes: int
    fingerprint: str
    scale: Any = None
    shift: Any = 0.0
    only_sums: bool = False
    minimum_crowd: int = 2  # the fewest clients in a secure sum that the node takes part in
    evaluates: bool = True  # whether it takes part in evaluations
    evaluations: int | None = None  # in how many of a run at most; None: in any number
    identity: str = ""  # the public key by which other nodes know it, where it has one
    metrics: tuple[str, ...] = ()  # those that the node computes
    key: str = ""  # the public key that the node has proved to have, where it has one
    mark: str = ""  # that only this node knows: the same in all its introductions
    versions: dict[str, str] = field(default_factory=dict)  # of Equipoise, torch and Python on the node
    compact: bool = False  # whether it reads small tensors inside a call
    at_start: dict[str, Any] = field(default_factory=dict)  # of its policy when the run began, where the owner has changed it

    @classmethod
    def read(cls, content: MessageContent, task: Task, most_examples: int) -> Member:
        """A node's introduction, checked; what does not fit the server's model is refused with the reason."""
        name = content.value("client", str)
        if not (name.isprintable() and 1 <= len(name.encode()) <= LONGEST_NAME):  # a lone surrogate is not printable
            text = f"its client has a name that is empty, cannot be printed, or has over {LONGEST_NAME} bytes"
            raise BadMessage(text, left_out.INTRODUCTION)
        if content.value("layout", str) != digest_layout(task):
            raise BadMessage(f"{name} has another model: its parameters have other names, shapes or types. {OTHER_APP}")
        if content.value("frozen", str) != digest_frozen(task):
            raise BadMessage(
                f"{name} has another model: its buffers or frozen parameters differ, and these do not travel. {OTHER_APP}"
            )
        splits = content.value("splits", dict)
        if not splits or not all(s in SPLITS and is_integer(n) and 0 < n <= most_examples for s, n in splits.items()):
            rule = f"each split must have 1 to {most_examples} examples (most_examples of server_app)"
            raise BadMessage(f"{name} says of its examples {shorten(splits)!r}, and {rule}", left_out.INTRODUCTION)
        x, y = (read_kind(content.value(key, (dict, list)), name) for key in ("x", "y"))
        scale = read_units(content.values.get("scale"), x, name, optional=True)
        shift = read_units(content.values.get("shift"), x, name, optional=False)
        classes = content.value("classes", int)
        if not 0 <= classes <= MOST_CLASSES:
            raise BadMessage(f"{name} has {classes} classes", left_out.INTRODUCTION)
        mark, alone = content.value("fingerprint", str)[:64], content.value("only_sums", bool)
        crowd, evaluates = content.values.get("minimum_crowd", 2), content.values.get("evaluates", True)
        if not is_integer(crowd) or not 2 <= crowd <= MOST_CLIENTS or not isinstance(evaluates, bool):
            raise BadMessage(f"{name} demands a crowd of {shorten(crowd)!r}", left_out.INTRODUCTION)
        most = content.values.get("evaluations")
        if most is not None and (not is_integer(most) or most < 1):
            raise BadMessage(f"{name} allows {shorten(most)!r} evaluations", left_out.INTRODUCTION)
        identity = content.values.get("identity", "")
        if identity:
            try:
                read_public_text(name, identity)
            except ConfigError as failure:
                raise BadMessage(str(failure), left_out.INTRODUCTION) from failure
        named = content.values.get("metrics")
        metrics = tuple(str(each)[:LONGEST_NAME] for each in named[:MOST_METRICS]) if isinstance(named, list) else ()
        key, own = read_proof(content, name), str(content.values.get("mark", ""))[:64]
        versions, compact = read_versions(content.values.get("versions")), content.values.get("compact") is True
        return cls(
            name, splits, x, y, classes, mark, scale, shift, alone, crowd, evaluates, most, identity, metrics, key, own,
            versions, compact,
        )  # fmt: skip

    @property
    def marks(self) -> dict[str, Any]:
        """What a run must find again to go on; metrics, keys, versions and the owner's policy may change meanwhile."""
        changing = ("evaluations", "metrics", "key", "mark", "versions", "compact", "at_start")
        return {key: value for key, value in (asdict(self) | self.at_start).items() if key not in changing}

    def with_policy_of(self, now: Member) -> Member:
        """The client with what its policy says now: its owner may have changed it since the run began."""
        before, after = ({name: getattr(member, name) for name in OF_POLICY} for member in (self, now))
        return self if before == after else replace(self, **after, at_start=before | self.at_start)

    def has_same_data(self, now: Member) -> bool:
        """Whether the data are those of another introduction. Version 0.1 had an unkeyed hash, which is not compared."""
        keyed = len(self.fingerprint) == len(now.fingerprint)
        return self.splits == now.splits and (not keyed or self.fingerprint == now.fingerprint)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Shape, type and scale of its examples, in which all clients of a run agree."""
        return self.x, self.y, self.scale, self.shift

    def refuse_other_kind(self, late: Member) -> None:
        """A client that joins must have examples like those of the others."""
        if late.kind != self.kind:
            text = f"{late.client} has examples of another shape, type or scale than {self.client}: {late.x}, {late.y} and "
            raise BadMessage(f"{text}{self.x}, {self.y}", left_out.KIND)

    def refuse_change(self, now: Member) -> None:
        """A client that comes back must have the data it had."""
        if not self.has_same_data(now):
            raise BadMessage(f"{now.client} has other data than when the run began", left_out.DATA)


def read_versions(given: Any) -> dict[str, str]:
    """What a node says of its versions, a few short texts."""
    if not isinstance(given, dict):
        return {}
    return {name: shorten(given[name])[:LONGEST_VERSION] for name in ("equipoise", "torch", "python") if name in given}


def natural_order(name: str) -> list[Any]:
    """A key that sorts "2" before "10"."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]


def make_stand_in(members: Iterable[Member], name: str) -> FederatedData:
    """Data with the clients' ids, sizes and shapes, in the natural order of their ids, and zeros for examples."""
    ordered = sorted(members, key=lambda m: natural_order(m.client))
    first = ordered[0]
    for other in ordered[1:]:
        if other.kind != first.kind:
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
    marks = json.dumps([m.marks for m in ordered], sort_keys=True).encode()
    vars(data)["fingerprint"] = hashlib.blake2b(marks, digest_size=8).hexdigest()  # of the nodes' data, not of zeros
    return data


def _zeros(sizes: list[tuple[str, int]], like: Member) -> ClientSet:
    """A set of clients whose examples are all one zero, repeated without memory."""
    counts = torch.tensor([count for _, count in sizes])
    total, ids = int(counts.sum()), tuple(name for name, _ in sizes)
    x, y = zeros_like_kind(like.x, total), zeros_like_kind(like.y, total)
    return ClientSet.trusted(x=x, y=y, offsets=offsets_of(counts), ids=ids, scale=like.scale, shift=like.shift)
