"""The ClientApp of a node: which request is answered by which function, and what becomes of refusals."""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from equipoise.engines.flower.apps import node_answers
from equipoise.engines.flower.apps.node_session import Handler, NodeSession, NodeSetup
from equipoise.engines.flower.personal import node_models
from equipoise.engines.flower.secure import secure_node
from equipoise.engines.flower.transport.messages import MessageContent, read_message, shorten, write_message
from equipoise.errors import EquipoiseError

HANDLERS: dict[str, Handler] = {**node_answers.HANDLERS, **node_models.HANDLERS, **secure_node.HANDLERS}


def make_client_app(setup: NodeSetup) -> ClientApp:
    """The app that answers all requests of the server."""
    app = ClientApp()
    for name, handler in HANDLERS.items():
        category, _, action = name.partition(".")
        getattr(app, category)(action)(answer_by(handler, setup))
    return app


def answer_by(handler: Handler, setup: NodeSetup) -> Callable[[Message, Context], Message]:
    """A handler as Flower calls it. A refusal is an answer, with its reason; other errors are Flower's to report."""

    def answer(message: Message, context: Context) -> Message:
        request = MessageContent(-1, "")
        try:
            request = read_message(message.content)
            values, tensors = handler(NodeSession(setup, context, request))
        except EquipoiseError as failure:
            values, tensors = {"refused": shorten(failure)}, {}
        return Message(write_message(request.round, request.token, values, tensors), reply_to=message)

    return answer
