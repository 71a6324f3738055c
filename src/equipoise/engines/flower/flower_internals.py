"""All that this package uses of Flower's private modules, for flwr 1.41, but for what the SuperLink's own process does.

A new Flower is a change of this file and of `superlink_process.py` alone. `tests/engines/test_flower_contract.py` checks each
name, signature and behaviour that is relied on. What is public (flwr.app, flwr.clientapp, flwr.serverapp) is imported where it
is used.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.common.config import parse_config_args
from flwr.common.constant import ErrorCode, SubStatus
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from flwr.serverapp import Grid
from flwr.supercore.primitives.asymmetric import generate_key_pairs

from equipoise.core.plain_text import parse_json
from equipoise.engines.flower.superlink_process import TRACING, skip_layer

if TYPE_CHECKING:
    from equipoise.engines.flower.apps.owned_app import OwnedApp

log = logging.getLogger("equipoise.node")
PRELOADED = (  # by a node's first process, so that those which it forks need not load them again, and share their memory
    "flwr.supernode.cli.flower_supernode", "flwr.supernode.main", "flwr.supernode.runtime.run_clientapp",
    "flwr.supercore.cli.flower_superexec", "httpcore",
)  # fmt: skip
OF_THE_APP = (
    ErrorCode.UNKNOWN, ErrorCode.LOAD_CLIENT_APP_EXCEPTION, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, ErrorCode.CLIENT_APP_CRASHED
)  # fmt: skip
TOO_LATE = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)  # the SuperLink has dropped what had expired
IN_WORDS = {  # other codes of Flower, and what an app's error says that names no type
    ErrorCode.NODE_UNAVAILABLE: "it has lost its connection",
    ErrorCode.INVALID_FAB: "its node cannot use the project that the server runs",
    ErrorCode.LOAD_CLIENT_APP_EXCEPTION: "its app could not be loaded; its own log says why",
    ErrorCode.CLIENT_APP_RAISED_EXCEPTION: "its app raised an error; its own log says which",
    ErrorCode.CLIENT_APP_CRASHED: "its app ended without an answer; its own log says more",
}
DEADLINE = "DeadlinePassed"  # what an app answers that took too long
TRY_AGAIN = 75  # exit code of a SuperNode that could not connect, or has lost its connection: EX_TEMPFAIL
DATABASES = {  # modules of Flower that load SQLAlchemy and Alembic, and the class that others import from each
    "flwr.server.superlink.linkstate.sql_linkstate": "SqlLinkState",
    "flwr.supercore.corestate.sql_corestate": "SqlCoreState",
    "flwr.supercore.object_store.sql_object_store": "SqlObjectStore",
}
NOT_LET_IN = "(Is its key registered? A node that was killed is let in again after a minute. It tries again by itself.)"
POLL_INTERVAL = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"  # in a SuperExec's environment: seconds between its looks for tasks
FIRST_LOOK, LAST_LOOK = 0.05, 1.0  # seconds between looks for a part of a message that is on its way
LATEST_MARGIN = 2.0  # seconds before a message's end at which its app gives up, so that the answer still arrives


def read_node_config(text: str | None) -> dict[str, Any]:
    """The node's configuration as Flower reads it from its command line."""
    return dict(parse_config_args([text] if text else None))


def seconds_left(message: Message) -> float:
    """Seconds until nobody waits for the answer to a message any more."""
    return float(message.metadata.created_at + message.metadata.ttl - time.time())


def new_private_key() -> ec.EllipticCurvePrivateKey:
    """A private key on P-384, from the operating system's randomness."""
    return generate_key_pairs()[0]


def agree_on_key(private: ec.EllipticCurvePrivateKey, public: ec.EllipticCurvePublicKey) -> bytes:
    """The key that two parties agree on by Diffie–Hellman, each with its private and the other's public key."""
    return generate_shared_key(private, public)


def pull_replies(grid: Grid, message_ids: Sequence[str], seconds: float) -> list[Message]:
    """The replies that are there. One whose parts do not all come within `seconds` is an error in its place.

    A node announces its reply and then sends the parts. If it ends in between, Flower's server waits for them alone, until the
    SuperLink gives the reply up after three minutes, however short the time for an answer is.
    """
    from flwr.superlink.grid import http_grid

    names = vars(http_grid)
    usual, end = names["pull_objects"], time.monotonic() + seconds

    def pull_parts(object_ids: list[str], pull_object_fn: Callable[[str], bytes]) -> dict[str, bytes]:
        left = max(0.0, end - time.monotonic())
        return dict(usual(object_ids, pull_object_fn, max_time=left, backoff_cap=LAST_LOOK))

    names["pull_objects"] = pull_parts
    try:
        return list(grid.pull_messages(message_ids))
    finally:
        names["pull_objects"] = usual


def look_again_soon() -> None:
    """Have this process look again soon for parts of a message that are on their way.

    Flower announces a message before its parts are there. Who asks for a part too early waits for one second, then two, four …,
    where most parts come within a tenth of one. How long it waits in all stays as it is.
    """
    from flwr.supercore.inflatable import inflatable_utils

    for function in (inflatable_utils.pull_objects, inflatable_utils.pull_and_inflate_object_from_tree):
        sooner = {"initial_backoff": FIRST_LOOK, "backoff_cap": LAST_LOOK, "max_tries_per_object": None}
        function.__kwdefaults__ = {**(function.__kwdefaults__ or {}), **sooner}


def leave_out_databases() -> None:
    """Have this process, a node's, not load Flower's modules for databases, 30 MB: a node keeps its state in memory."""
    for path, name in DATABASES.items():
        if path not in sys.modules:
            sys.modules[path] = ModuleType(path, "Stands for a module of Flower that this process does not use.")
            setattr(sys.modules[path], name, type(name, (), {}))


def run_supernode(arguments: Sequence[str], parent: int, pauses: Any, tell_node: Callable[[int], None]) -> None:
    """Flower's SuperNode in this process, which looks for messages after `pauses`.

    `tell_node` is told Flower's id of the node whenever it has connected. The exit code is TRY_AGAIN where the SuperLink could
    not be reached, has refused the node, or is lost, and another one where the arguments are wrong.
    """
    from flwr.supercore.app_utils import start_parent_process_monitor
    from flwr.supercore.routers.runtime.tracing import RuntimeTracingMiddleware
    from flwr.supernode import fleet_http_connection, start_client_internal
    from flwr.supernode.cli.flower_supernode import flower_supernode
    from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

    # Flower puts these back when the first signal has come: a second one must not cut its farewell to the SuperLink short.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connected = threading.Event()
    note_id, leave = InMemoryNodeState.set_node_id, vars(fleet_http_connection)["flwr_exit"]

    def set_node_id(state: InMemoryNodeState, node_id: int | None) -> None:
        note_id(state, node_id)
        connected.set()
        tell_node(int(node_id or 0))

    def leave_for_another_try(code: int, message: str | None = None, **_: Any) -> None:
        said = " ".join((message or f"exit code {code}").split())
        log.warning("The SuperLink does not let this node in: %s %s", said, NOT_LET_IN)
        os._exit(TRY_AGAIN)

    def end_with_a_failed_thread(failure: threading.ExceptHookArgs) -> None:
        kind, said = failure.exc_type.__name__, failure.exc_value  # a heartbeat that the SuperLink does not recognise, say
        log.warning("The connection to the SuperLink is lost, and made anew: %s: %s", kind, said)
        os._exit(TRY_AGAIN)

    create = InMemoryNodeState.create_task

    def create_task(state: InMemoryNodeState, *given: Any, **named: Any) -> int | None:
        pauses.has_work()
        return create(state, *given, **named)

    InMemoryNodeState.create_task = create_task  # type: ignore[method-assign, assignment]
    InMemoryNodeState.set_node_id = set_node_id  # type: ignore[method-assign, assignment]
    look_again_soon()
    refuse_stale_replies(InMemoryNodeState)
    if os.environ.get(TRACING) != "1":
        skip_layer(RuntimeTracingMiddleware, ("/v1/runtime/",))
    vars(fleet_http_connection)["flwr_exit"] = leave_for_another_try
    threading.excepthook = end_with_a_failed_thread
    vars(start_client_internal)["time"] = pauses
    start_parent_process_monitor(parent)
    sys.argv = ["flower-supernode", *arguments]
    try:
        flower_supernode()
    except SystemExit as end:
        if connected.is_set():
            raise SystemExit(TRY_AGAIN) from end
        raise
    finally:
        vars(fleet_http_connection)["flwr_exit"] = leave
    raise SystemExit(TRY_AGAIN)


def refuse_stale_replies(state_class: Any) -> None:
    """Have a SuperNode send only replies to the message that it got last.

    It waits for any reply when it has got a message. When an app was killed, Flower answers in its place, also when its run has
    ended meanwhile, and once for the next app of the run, which is at work. That one's own reply then comes too late, and would
    be sent when the message after it has come, whose own reply would come too late in turn, and so on for good.
    """
    find, store = state_class.get_messages_legacy, state_class.store_message

    def store_and_await(state: Any, message: Message) -> str | None:
        if not message.metadata.reply_to_message_id:
            state.awaited = message.metadata.message_id
        return cast("str | None", store(state, message))

    def find_awaited(state: Any, **options: Any) -> list[Message]:
        found = find(state, **options)
        if not options.get("is_reply"):
            return list(found)
        with state.lock_msg_store:
            last = {vars(state).get("awaited")} & set(state.msg_store)
        awaited = [message for message in found if message.metadata.reply_to_message_id in last]
        kept = {message.metadata.message_id for message in awaited}
        stale = [message.metadata.message_id for message in found if message.metadata.message_id not in kept]
        state.delete_messages(message_ids=stale)
        for message_id in stale:
            state.object_store.delete(message_id)
        return awaited

    state_class.get_messages_legacy, state_class.store_message = find_awaited, store_and_await


def run_superexec(arguments: Sequence[str], parent: int, pauses: Any, launch: Callable[[dict[str, Any]], None]) -> None:
    """Flower's SuperExec in this process; `launch` is called with what an app needs, instead of starting a process."""
    from flwr.supercore.cli.flower_superexec import flower_superexec
    from flwr.supercore.constant import TaskType
    from flwr.supercore.superexec import run_superexec as superexec_loop
    from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult
    from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor

    class Launches(SubprocessExecutor):
        def launch(self, spec: ExecutionSpec) -> LaunchResult:
            if spec.task_type != TaskType.CLIENT_APP:
                return LaunchResult.failed(f"This node runs ClientApps, not {spec.task_type}.")
            launch(asdict(spec))
            pauses.worked()
            return LaunchResult.accepted()

    vars(superexec_loop).update(get_executor=lambda *_, **__: Launches(), time=pauses)
    os.environ[POLL_INTERVAL] = str(pauses.longest)
    sys.argv = ["flower-superexec", "--parent-pid", str(parent), *arguments]
    flower_superexec()


def replace_loading(names: dict[str, Any], owner: OwnedApp) -> None:
    """Have Flower's runtime of an app, the module with these names, load the owner's, and send no text of an error."""
    install, find, push = names["install_from_fab"], names["get_load_client_app_fn"], names["push_task_output"]

    def push_type(**options: Any) -> None:
        push(**{**options, "details": owner.name_error(options["details"]) if options.get("details") else ""})

    names["Error"] = lambda code, reason=None: Error(code, owner.name_error(reason))
    names["push_task_output"] = push_type
    if owner.installed is not None:
        names["install_from_fab"] = lambda *_, **__: None
        names["get_load_client_app_fn"] = lambda **_: lambda *_: owner.installed
    elif owner.pinned is not None:

        def install_pinned(content: bytes, **options: Any) -> Path:
            owner.refuse_other(hashlib.sha256(content).hexdigest())
            return Path(install(content, **options))

        def find_pinned(**options: Any) -> Callable[[str, str, str], ClientApp]:
            def load(name: str, version: str, digest: str) -> ClientApp:
                owner.refuse_other(digest)  # or another app that this node has once unpacked would be loaded
                return owner.hold(find(**options)(name, version, digest))

            return load

        names["install_from_fab"], names["get_load_client_app_fn"] = install_pinned, find_pinned


def run_client_app(
    spec: dict[str, Any],
    parent: int,
    owner: OwnedApp,
    begun: Callable[[float], None],
    answered: Callable[[], None],
) -> None:
    """What the command `flwr-clientapp` does, in this process, and no longer than the server waits for the answer.

    The app is the owner's. `begun` is told the seconds that are left when the message has come; `answered` is called when the
    answer has been handed over. An app that takes too long answers with an error and ends.
    """
    from flwr.supernode.runtime import run_clientapp

    names = vars(run_clientapp)
    look_again_soon()
    replace_loading(names, owner)
    pull, push = names["pull_task_input"], names["push_message"]
    over = threading.Lock()  # held by whoever answers: the app, or the watch

    def pull_and_watch(client: Any) -> tuple[Any, ...]:
        message, context, *_ = pulled = tuple(pull(client))
        left = seconds_left(message)
        begun(left)
        threading.Thread(target=end_in_time, args=(client, message, context, left), daemon=True).start()
        return pulled

    def end_in_time(client: Any, message: Message, context: Context, left: float) -> None:
        time.sleep(max(0.0, left - min(LATEST_MARGIN, 0.1 * left)))
        if not over.acquire(blocking=False):
            return  # the answer is on its way
        action, index = message.metadata.message_type, message.metadata.group_id
        of_round = (
            f" of round {int(index) + 1}"
            if index.isdecimal() and action.startswith("train")
            else f" of the {index}" * index.startswith("evaluation")
        )
        log.warning("%s%s took too long, and was ended.", action, of_round)
        try:
            error = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, DEADLINE)
            push(client, Message(error, reply_to=message), context)
            # Or Flower would look for the end of this app until its token expires, and then fail the one after it.
            names["push_task_output"](client=client, context=None, sub_status=SubStatus.FAILED, details=DEADLINE)
        finally:
            sys.stderr.flush()
            os._exit(124)

    def push_first(client: Any, message: Message, context: Context) -> None:
        if not over.acquire(blocking=False):
            time.sleep(60.0)  # the watch ends this process
        push(client, message, context)
        answered()

    names["pull_task_input"], names["push_message"] = pull_and_watch, push_first
    passed_on = {name: spec[name] for name in ("runtime_api_address", "token", "insecure", "runtime_dependency_install")}
    run_clientapp.run_clientapp(parent_pid=parent, **passed_on)


def read_runs(text: str) -> list[dict[str, Any]]:
    """The runs in what `flwr list --format json` prints."""
    return list(parse_json(text[text.index("{") :])["runs"])


@dataclass(frozen=True)
class Registry:
    """The SuperLink's list of nodes, by the interface that Flower's own commands use."""

    connection: str

    def _ask(self, method: str, **values: Any) -> Any:
        from flwr.cli.flower_config import read_superlink_connection
        from flwr.cli.utils import init_http_client_from_connection
        from flwr.proto import control_pb2

        with redirect_stdout(io.StringIO()):  # which SuperLink it is
            client = init_http_client_from_connection(read_superlink_connection(self.connection))
        try:
            return getattr(client, method)(getattr(control_pb2, f"{method}Request")(**values))
        finally:
            client.close()

    def nodes(self) -> list[dict[str, Any]]:
        """All nodes that were ever registered: id, key as PEM, name, state, and since when it came or went."""
        return [
            {
                "id": int(node.node_id), "key": bytes(node.public_key), "name": str(node.name), "state": str(node.status),
                "since": str(node.last_deactivated_at if node.status == "offline" else node.last_activated_at)[:19],
            }
            for node in self._ask("ListNodes").nodes_info
        ]  # fmt: skip

    def register(self, key: bytes, name: str) -> int:
        """Let a node in by its public key, in PEM; Flower's id of it."""
        return int(self._ask("RegisterNode", public_key=key, name=name).node_id)

    def unregister(self, node: int) -> None:
        """Let a node in no longer; its key cannot be registered again."""
        self._ask("UnregisterNode", node_id=node)
