"""The ClientApp of a node: which request is answered by which function, and what becomes of refusals.

What goes wrong on a node is told in the node's own log. Over the network goes the type of the error and never its text, which
may hold a patient's name or a row of data.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from equipoise.engines.flower.apps import node_answers
from equipoise.engines.flower.apps.node_log import ASKED, keep_traceback
from equipoise.engines.flower.apps.node_policy import NodePolicy
from equipoise.engines.flower.apps.node_session import Handler, NodeSession, NodeSetup
from equipoise.engines.flower.personal import node_models
from equipoise.engines.flower.secure import secure_node
from equipoise.engines.flower.secure.sum_terms import SCORES
from equipoise.engines.flower.transport.messages import MessageContent, compacted, read_message, write_message
from equipoise.errors import EquipoiseError

log = logging.getLogger("equipoise.node")
MEND = " Until this is mended, the node is left out of the run: `equipoise flower check --kit .` looks for the fault."
HANDLERS: dict[str, Handler] = {**node_answers.HANDLERS, **node_models.HANDLERS, **secure_node.HANDLERS}


class NodeApp(ClientApp):
    """A Flower ClientApp that its owner can hold to a policy: `setup` is what it answers by."""

    setup: NodeSetup

    def own(self, policy: NodePolicy | None, file: Path | None = None) -> None:
        """Make the node its owner's: its policy counts besides the app's, and the server's run configuration does not.

        A policy that is in a `file` is read anew for each request: what the owner changes takes effect at once.
        """
        self.setup.owned = True
        if policy is not None:
            self.setup.app_policy, self.setup.owners_file = self.setup.policy, file
            self.setup.policy = self.setup.policy.stricter(policy)


def make_client_app(setup: NodeSetup) -> NodeApp:
    """The app that answers all requests of the server."""
    app = NodeApp()
    app.setup = setup
    for name, handler in HANDLERS.items():
        category, _, action = name.partition(".")
        getattr(app, category)(action)(answer_by(handler, setup, at_once=category == "query"))
    return app


def answer_by(handler: Handler, setup: NodeSetup, *, at_once: bool = False) -> Callable[[Message, Context], Message]:
    """A handler as Flower calls it. Any error is an answer that names its type; the text stays in the node's log."""

    def answer(message: Message, context: Context) -> Message:
        began, request, action = time.monotonic(), MessageContent(-1, ""), message.metadata.message_type
        try:
            request = read_message(message.content)
            setup.read_policy_anew()
            session = NodeSession(setup, context, request)
            values, tensors = handler(session)
            mark = session.data_mark if action != "query.left_out" else ""  # to which the answer says nothing at all
        except Exception as failure:
            unforeseen = failure if not isinstance(failure, EquipoiseError) else None
            asked = ASKED.get(action, action) + f" in {name_moment(request)}" * action.startswith("train")
            text = f"{type(failure).__name__}: {failure}".rstrip(".") + f".{MEND * (action == 'query.hello')}"
            text += keep_traceback(unforeseen)
            log.warning("Refused, when asked %s: %s", asked, text)
            values, tensors, mark = {"refused": type(failure).__name__}, {}, ""
        records = write_message(request.round, request.token, values, tensors, mark)
        reply = Message(compacted(records) if request.compact else records, reply_to=message)
        if setup.policy.answer_after > 0 and not at_once:
            time.sleep(time_to_wait(time.monotonic() - began, setup.policy.answer_after))
        return reply

    return answer


def name_moment(request: MessageContent) -> str:
    """The round that a request is of, or the evaluation that its secure sums are of."""
    of_scores = any(name.startswith(f"sum.{SCORES}") for name in request.arrays)
    return f"the evaluation after round {request.round}" if of_scores else f"round {request.round + 1}"


def time_to_wait(taken: float, step: float) -> float:
    """Seconds until an answer leaves: at `step` seconds after its request, or at the first multiple that is not over.

    >>> time_to_wait(0.5, 5.0), time_to_wait(6.0, 5.0)
    (4.5, 4.0)
    """
    return math.ceil(taken / step) * step - taken
