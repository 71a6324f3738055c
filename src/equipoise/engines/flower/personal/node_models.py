"""A client's own model on its node: the work of a round, and its scores. The model itself stays there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from equipoise.core.abilities import read
from equipoise.engines.flower.apps.node_session import Answer, Handler, NodeSession
from equipoise.engines.flower.transport.part_messages import PartNotSent
from equipoise.errors import EquipoiseError
from equipoise.types import PersonalTraits


class LostRow(EquipoiseError):
    """A node that was started anew has no model of its own any more."""


def work_on_own_model(session: NodeSession) -> Answer:
    """A round's work on the client's own model, which stays here; with `send`, what the method sends for the shared one."""
    session.refuse_unless_training()
    method, solver, params, cohort = session.part("personal"), session.solver, session.params, session.cohort
    try:
        row = read_kept_row(session, method, params)
    except LostRow:
        return {"lost": True}, {}
    if not session.request.values.get("send"):
        after, _ = method.work(session.started, params, cohort, row, solver, None)
        session.rows.write(session.request.value("since", int), cohort.round + 1, after[0])
        return {}, {}
    session.refuse_single()
    sent, send = method.updates(session.started, params, cohort, row, solver), read(PersonalTraits, method).sends_carried
    if sent is None:  # a method that keeps nothing apart: the work of the solver
        work = session.engine.updates(params, cohort, solver)
        sent, carried = work.update, work.carried
    else:
        carried = None if send is None else send(session.started, params, cohort, row, solver)
    session.note_single("update")
    counts = carried is not None and not bool(torch.isnan(carried).any())  # not of a client that took no step
    return {}, {"update": sent[0]} | ({"carried": carried[0]} if counts and carried is not None else {})


def answer_own_scores(session: NodeSession) -> Answer:
    """Mean loss and error of the client's own model, on each of its splits."""
    session.begin_evaluation("own")
    try:
        return {}, score_own_model(session)
    except LostRow:
        return {"lost": True}, {}


def score_own_model(session: NodeSession) -> dict[str, Tensor]:
    """Mean loss and error (2,) of the client's own model on each split that it has."""
    session.refuse_unless_training()
    method, solver, params = session.part("personal"), session.solver, session.params
    row = read_kept_row(session, method, params)
    with torch.enable_grad():
        model = method.models(session.started, params, session.cohort.after_training(), row, solver, None)
    never = session.request.value("since", int) == 0 and method.width(session.task.width) > 0
    if never and not read(PersonalTraits, method).serves_all:
        model = params.unsqueeze(0)  # a client that never took part is served the shared model
    return session.score(model)


def read_kept_row(session: NodeSession, method: Any, params: Tensor) -> Tensor:
    """What the client has kept since the round that the request names, (1, width); at first what all clients begin with."""
    since = session.request.value("since", int)
    width = method.width(session.task.width)
    if width == 0 or since == 0:
        first = session.vector("first") if "first" in session.request.arrays else params
        row, shared = method.begin(session.started, first)
        if shared is not None:
            raise PartNotSent(f"{type(method).__name__} needs what all clients' models add up to, which no node has.")
    else:
        row = session.rows.read(since, width)
        if row is None:
            raise LostRow(f"{session.client} has lost its own model of round {since}")
    kept: Tensor = row.to(params).unsqueeze(0)
    return kept


HANDLERS: dict[str, Handler] = {"train.own": work_on_own_model, "evaluate.own": answer_own_scores}
