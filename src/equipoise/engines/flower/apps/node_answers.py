"""A node's answers to plain requests: who it is, its loss, its update, its scores."""

from __future__ import annotations

import logging
import platform

import torch

from equipoise.core.version import VERSION
from equipoise.engines.flower.apps.example_kinds import kind_of_examples
from equipoise.engines.flower.apps.left_out import say_why
from equipoise.engines.flower.apps.model_source import digest_frozen, digest_layout
from equipoise.engines.flower.apps.node_keys import prove_name
from equipoise.engines.flower.apps.node_session import Answer, Handler, NodeSession
from equipoise.engines.flower.personal.solver_memory import NodeWork
from equipoise.engines.flower.secure.identities import public_text

log = logging.getLogger("equipoise.node")


def introduce(session: NodeSession) -> Answer:
    """Who the client is: its name, how many examples of which shape, and what must agree with the server's model."""
    node, task = session.node, session.task
    first = node.data.train
    asked = session.request.values  # servers of earlier versions do not say what their model is
    if any(asked.get(key, own) != own for key, own in (("layout", digest_layout(task)), ("frozen", digest_frozen(task)))):
        log.warning(
            "This node is left out of the run: its model is not the server's. Its app, the kit's folder app/, is another than "
            "that of the run. Get the folder from the operator, and start the node again."
        )
    values = {
        "client": session.client,
        "splits": node.sizes,
        "x": kind_of_examples(first.x),
        "y": kind_of_examples(first.y),
        "scale": first.scale,
        "shift": first.shift,
        "classes": node.data.classes,
        "layout": digest_layout(task),
        "frozen": digest_frozen(task),
        "fingerprint": session.ledger.fingerprint(node.data.fingerprint),
        "only_sums": session.policy.only_sums,
        "minimum_crowd": session.policy.minimum_crowd,
        "evaluates": session.policy.evaluates,
        "evaluations": session.policy.evaluations,
        "identity": public_text(session.identity.public) if session.identity is not None else "",
        "metrics": list(session.setup.metrics.functions),
        "mark": session.ledger.mark,
        "compact": True,
        "listens": True,
        "versions": {"equipoise": VERSION, "torch": torch.__version__, "python": platform.python_version()},
        **prove_name(session.given.token, session.client),
    }
    return values, {}


def hear_why(session: NodeSession) -> Answer:
    """The server leaves this node out: its own log says why, and what to do."""
    log.warning("%s", say_why(session.request.values.get("cause")))
    return {}, {}


def compute_loss(session: NodeSession) -> Answer:
    """The loss of the client's training examples at the model it was sent."""
    session.refuse_single()
    session.refuse_unless_training()
    solver = session.solver if session.request.values.get("solver") is not None else None
    loss = session.engine.losses(session.params, session.cohort, solver).double()
    session.note_single("loss")
    return {}, {"loss": loss}


def compute_update(session: NodeSession) -> Answer:
    """Local work from the model it was sent: the update (D,), the mean loss of its batches, carried values that count."""
    session.refuse_single()
    done = NodeWork(session)
    done.keep()
    work = done.work
    counts = work.carried is not None and bool(torch.isfinite(work.carried).all())
    carried = {"carried": work.carried[0]} if counts and work.carried is not None else {}
    session.note_single("update")
    return {"lost": True} if done.lost else {}, {"update": work.update[0], "loss": work.losses.double(), **carried}


def compute_scores(session: NodeSession) -> Answer:
    """Mean loss and error of the model it was sent, on each of the client's splits."""
    session.begin_evaluation("shared")
    return {}, session.score(session.params.unsqueeze(0))


HANDLERS: dict[str, Handler] = {
    "query.hello": introduce,
    "query.left_out": hear_why,
    "train.losses": compute_loss,
    "train.update": compute_update,
    "evaluate.scores": compute_scores,
}
