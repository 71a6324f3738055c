"""Flower's SuperLink as `equipoise flower superlink` runs it: less work for each request, and a log without colours in files.

This file is run alone, without the package: a SuperLink needs no PyTorch. It changes private modules of flwr 1.41, as does
`flower_internals.py`; `tests/engines/test_flower_contract.py` checks what is relied on.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flwr.app import Message

OF_THE_OPERATOR = (  # layers of the SuperLink's web server that concern /v1/control/ alone
    "ControlSensitiveResponseMiddleware", "ControlAuthenticationMiddleware", "ControlLicenseMiddleware",
    "ControlEventLogMiddleware",
)  # fmt: skip
SUPEREXEC = "flower-superexec"  # Flower's program that starts apps
TRACING = "FLWR_TRACING_ENABLED"  # in the environment: "1" if Flower writes traces
END_TASKS = 1.0  # seconds between looks of a SuperLink for tasks whose time is over


def run_superlink(arguments: Sequence[str]) -> None:
    """Flower's SuperLink in this process, with the arguments of `flower-superlink`, and less work for each request."""
    from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
    from flwr.superlink.cli import flower_superlink

    write_less(SqlLinkState)
    skip_idle_layers()
    colour_terminals_alone()
    started_by = vars(sys.modules["flwr.superlink.cli.flower_superlink"])
    usual = started_by["_get_superexec_command"]
    # SUPEREXEC stays the first argument, and names the process in a list of processes.
    started_by["_get_superexec_command"] = lambda *given, **named: [sys.executable, "-P", __file__, *usual(*given, **named)]
    sys.argv = ["flower-superlink", *arguments]
    flower_superlink()


def start_server_apps(arguments: Sequence[str]) -> None:
    """Flower's SuperExec in this process, with the arguments of `flower-superexec`: it starts the apps of a SuperLink."""
    from flwr.supercore.cli.flower_superexec import flower_superexec

    colour_terminals_alone()
    sys.argv = [SUPEREXEC, *arguments]
    flower_superexec()


def colour_terminals_alone() -> None:
    """Have Flower's log of this process without the codes that colour a terminal where it goes into a file."""
    from flwr.supercore.logger import update_console_handler

    if not sys.stderr.isatty():
        update_console_handler(colored=False)


def skip_idle_layers() -> None:
    """Have requests of nodes and apps go past the layers of the SuperLink's web server that do nothing for their paths.

    Nine layers lie around each request, and to pass it on takes each as long as the request's own work. Those of the operator's
    interface pass on all that is not for its path. So does the one that writes traces, unless it is on.
    """
    from flwr.supercore.routers.runtime.tracing import RuntimeTracingMiddleware
    from flwr.superlink.routers.control import middlewares as control
    from flwr.superlink.routers.fleet.node_auth import NodeAuthMiddleware

    for name in OF_THE_OPERATOR:
        skip_layer(getattr(control, name), ("/v1/fleet/", "/v1/runtime/"))
    skip_layer(NodeAuthMiddleware, ("/v1/runtime/",))
    if os.environ.get(TRACING) != "1":
        skip_layer(RuntimeTracingMiddleware, ("/v1/fleet/", "/v1/runtime/"))


def skip_layer(layer: Any, paths: tuple[str, ...]) -> None:
    """Have requests whose path begins with one of these go past a layer of a web server."""
    usual = layer.__call__

    async def call(self: Any, scope: Any, receive: Any, send: Any) -> None:
        passes = scope["type"] == "http" and scope["path"].startswith(paths)
        await (self.app(scope, receive, send) if passes else usual(self, scope, receive, send))

    layer.__call__ = call


def write_less(state_class: Any) -> None:
    """Have a SuperLink write to its database only where there is something to write.

    SQLite has one writer at a time. For each part of a message that a node gets or sends, Flower asks for the state of the run,
    and becomes the writer to end tasks whose time is over: here once a second. It also becomes the writer for every node that
    asks for messages: here only if there are some. Within a transaction all is as before: one that has read may not write any
    more when another one has written meanwhile.
    """
    from flwr.supercore import sql_mixin
    from flwr.supercore.state.schema.linkstate_models import MessageIns
    from flwr.supercore.utils import uint64_to_int64
    from sqlalchemy import select

    end_tasks, take_messages = state_class._cleanup_expired_task_tokens, state_class.get_message_ins
    ended: dict[str, float] = {}  # when tasks were last ended, by database

    def within(state: Any) -> bool:
        return state._session_scope in (vars(sql_mixin)["_current_sessions"].get() or {})

    def end_tasks_now_and_then(state: Any) -> None:
        if within(state) or time.monotonic() - ended.get(state.database_url, -END_TASKS) >= END_TASKS:
            ended[state.database_url] = time.monotonic()
            end_tasks(state)

    def take_messages_that_are_there(state: Any, node_id: int, limit: int | None, **more: Any) -> list[Message]:
        if not within(state):
            to_node = MessageIns.dst_node_id == uint64_to_int64(node_id)
            with state.session() as session:
                if session.scalar(select(MessageIns.message_id).where(to_node, MessageIns.delivered_at == "").limit(1)) is None:
                    return []
        return list(take_messages(state, node_id, limit, **more))

    state_class._cleanup_expired_task_tokens = end_tasks_now_and_then
    state_class.get_message_ins = take_messages_that_are_there


if __name__ == "__main__":  # `equipoise flower superlink` runs this file alone: a SuperLink needs no PyTorch
    if sys.argv[1:2] == [SUPEREXEC]:
        start_server_apps(sys.argv[2:])
    else:
        run_superlink(sys.argv[1:])
