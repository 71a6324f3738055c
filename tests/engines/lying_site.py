"""A node that lies: it follows the protocol, and changes the numbers that it sends."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
from fake_grid import Delivery, FakeGrid
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

import equipoise.engines.flower.secure.secure_node as secure_node
from equipoise.engines.flower.apps.node_session import NodeSession

Change = Callable[[np.ndarray], np.ndarray]


def with_tensors(reply: Any, changes: dict[str, Change]) -> Any:
    """A reply with other numbers in its tensors."""
    content = RecordDict({key: record.copy() for key, record in reply.content.items()})
    tensors = dict(content["tensors"])
    for name, change in changes.items():
        if name in tensors:
            array = tensors[name]
            own = np.frombuffer(array.data, array.dtype)
            sent = np.asarray(change(own)).astype(own.dtype).tobytes()
            tensors[name] = Array(dtype=array.dtype, shape=tuple(array.shape), stype=array.stype, data=sent)
    content["tensors"] = ArrayRecord(tensors)
    reply.content = content
    return reply


def with_values(reply: Any, changes: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A reply with other plain values."""
    content = RecordDict({key: record.copy() for key, record in reply.content.items()})
    call = dict(content["call"])
    call["values"] = json.dumps(changes(json.loads(call["values"])))
    content["call"] = ConfigRecord(call)
    reply.content = content
    return reply


def lie(
    grid: FakeGrid,
    who: str,
    *,
    update: Change | None = None,
    loss: float | None = None,
    examples: int | None = None,
    score: float | None = None,
) -> FakeGrid:
    """Have a client send another update, a false loss, a false number of training examples, or false scores."""

    def fault(delivery: Delivery) -> Any:
        reply = delivery.answer()
        if delivery.client != who:
            return reply
        if update is not None and delivery.action == "train.update":
            reply = with_tensors(reply, {"update": update})
        if loss is not None and delivery.action == "train.losses":
            reply = with_tensors(reply, {"loss": lambda own: np.full_like(own, loss)})
        if score is not None and delivery.action.startswith("evaluate."):
            splits = ("train", "validation", "test")
            reply = with_tensors(reply, dict.fromkeys(splits, lambda own: np.full_like(own, score)))
        if examples is not None and delivery.action == "query.hello":
            reply = with_values(reply, lambda own: {**own, "splits": {**own["splits"], "train": examples}})
        return reply

    grid.fault = fault
    return grid


def lie_in_sums(monkeypatch: Any, who: str, kind: str, change: Callable[[Any], Any]) -> None:
    """Have a client put other integers into secure sums of a kind; nobody sees them but masked."""
    usual = secure_node.compute_contribution

    def contribute(session: NodeSession, terms: Any) -> Any:
        row = usual(session, terms)
        asked = session.request.value("sum", dict)
        return change(row) if session.client == who and asked["kind"] == kind else row

    monkeypatch.setattr(secure_node, "compute_contribution", contribute)
