"""What flower_internals.py and superlink_process.py rely on in Flower's private modules.

A new version of Flower that changes it fails here first.
"""

from __future__ import annotations

import ast
import base64
import inspect
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'equipoise[flower]'")

import flwr
from flwr.app import Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from equipoise.engines import flower
from equipoise.engines.flower import flower_internals, superlink_process
from equipoise.engines.flower.apps import node_log

PUBLIC = ("flwr.app", "flwr.clientapp", "flwr.serverapp")
PACKAGE = Path(flower.__file__).parent


def test_private_modules_of_flower_are_imported_in_two_files():
    found = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found |= {file.name for name in names if name.split(".")[0] == "flwr" and name not in PUBLIC}
    assert found == {"flower_internals.py", "superlink_process.py"}


def test_keys_are_agreed_on_as_secure_sums_need():
    """Elliptic curve P-384, and the same 32 bytes on both sides, which another party does not get."""
    a, b, c = (flower_internals.new_private_key() for _ in range(3))
    assert {key.curve.name for key in (a, b, c)} == {"secp384r1"}
    shared = flower_internals.agree_on_key(a, b.public_key())
    assert shared == flower_internals.agree_on_key(b, a.public_key()) != flower_internals.agree_on_key(c, a.public_key())
    assert len(base64.urlsafe_b64decode(shared)) == 32


def test_the_version_is_one_that_this_was_checked_with():
    from importlib.metadata import version

    assert version("flwr").startswith("1.41."), "Run the tests of real processes, and change this line."
    assert flwr is not None


def test_names_that_are_replaced_are_there():
    from flwr.supercore.superexec import run_superexec
    from flwr.supernode import fleet_http_connection, start_client_internal
    from flwr.supernode.runtime import run_clientapp

    replaced = {
        run_clientapp: {
            "pull_task_input",
            "push_message",
            "push_task_output",
            "install_from_fab",
            "get_load_client_app_fn",
            "Error",
        },
        run_superexec: {"get_executor", "time"},
        start_client_internal: {"time"},
        fleet_http_connection: {"flwr_exit"},
    }  # fmt: skip
    for module, names in replaced.items():
        assert names <= set(vars(module)), module
        code = inspect.getsource(module)
        for name in names - {"time"}:
            assert f"{name}(" in code, (module, name)


def test_signatures_that_are_called():
    from flwr.supercore.superexec.executor import ExecutionSpec
    from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState
    from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, run_clientapp

    given = set(inspect.signature(run_clientapp).parameters)
    assert {"runtime_api_address", "token", "insecure", "parent_pid", "runtime_dependency_install"} <= given
    assert list(inspect.signature(pull_task_input).parameters) == ["client"]
    assert list(inspect.signature(push_message).parameters) == ["client", "message", "context"]
    assert list(inspect.signature(InMemoryNodeState.set_node_id).parameters) == ["self", "node_id"]
    spec = {field.name for field in fields(ExecutionSpec)}
    assert {"task_type", "runtime_api_address", "token", "insecure", "runtime_dependency_install"} <= spec


def test_loops_of_flower_sleep_by_the_module_time():
    """`Pauses` stands for it: the SuperNode's longest pause is 3 s, the SuperExec's 1 s."""
    from flwr.supercore.superexec import run_superexec
    from flwr.supernode import start_client_internal

    assert "time.sleep(3)" in inspect.getsource(start_client_internal)
    assert "time.sleep(task_poll_interval)" in inspect.getsource(run_superexec)
    assert vars(run_superexec)["_DEFAULT_TASK_POLL_INTERVAL_SECONDS"] == 1.0


def test_parts_of_a_message_are_looked_for_again_soon(monkeypatch):
    """Flower waits for a second, then for two and four: three parts that come a moment later cost nothing here."""
    from flwr.supercore.constant import PULL_INITIAL_BACKOFF
    from flwr.supercore.inflatable import inflatable_utils
    from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError

    functions = (inflatable_utils.pull_objects, inflatable_utils.pull_and_inflate_object_from_tree)
    assert PULL_INITIAL_BACKOFF == 1
    for function in functions:
        assert {"initial_backoff", "backoff_cap", "max_tries_per_object"} <= set(function.__kwdefaults__)
        monkeypatch.setattr(function, "__kwdefaults__", {**function.__kwdefaults__, "initial_backoff": PULL_INITIAL_BACKOFF})
    flower_internals.look_again_soon()
    asked = []

    def pull(name):
        asked.append(name)
        if asked.count(name) < 4:
            raise ObjectUnavailableError(name)
        return name.encode()

    began = time.monotonic()
    assert inflatable_utils.pull_objects(["a", "b", "c"], pull) == {"a": b"a", "b": b"b", "c": b"c"}
    assert time.monotonic() - began < 6  # 2 · (1 + 2 + 4) s before; 0.7 s now
    assert functions[1].__kwdefaults__["initial_backoff"] == flower_internals.FIRST_LOOK


def test_a_supernode_makes_its_tasks_by_a_method_that_is_watched():
    from flwr.supernode import start_client_internal
    from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

    code = inspect.getsource(start_client_internal._pull_and_store_message)
    assert code.index("state.create_task(") < code.index("pull_objects(")
    assert callable(InMemoryNodeState.create_task)


def test_the_handlers_that_were_there_are_put_back_after_the_first_signal():
    """Which is why a SuperNode ignores signals before Flower takes them: a second one must not cut its farewell short."""
    from flwr.supercore.exit import signal_handler

    assert "signal.signal(sig, default_handlers[sig])" in inspect.getsource(signal_handler)


def test_a_message_says_when_its_time_is_over():
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 1
    message = Message(RecordDict(), 1, "query.hello", ttl=60.0)
    assert 58 < flower_internals.seconds_left(message) <= 60
    message.metadata.__dict__["_created_at"] = time.time() - 100
    assert flower_internals.seconds_left(message) < -39


def node_state():
    """A SuperNode's memory, whose class may be changed."""
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

    class State(InMemoryNodeState):
        pass

    return State(ObjectStoreFactory().store())


def put(state, message):
    message.metadata.__dict__["_message_id"] = message.object_id
    state._store_generated_message(message)
    state.store_message(message)
    return message


def exchange(state):
    """Two messages, of which the first was answered twice: by Flower for an app that seemed to have crashed, and by the app."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 1
    first = put(state, Message(RecordDict(), 1, "query.hello", ttl=60.0, group_id="a"))
    put(state, Message(Error(8, "crashed"), reply_to=first))
    (sent,) = state.get_messages_legacy(is_reply=True)
    state.delete_messages(
        message_ids=[sent.metadata.message_id, first.metadata.message_id]
    )  # as Flower does when it has sent it
    second = put(state, Message(RecordDict(), 1, "query.hello", ttl=60.0, group_id="b"))
    late = put(state, Message(RecordDict(), reply_to=first))
    return second, late


def test_a_reply_to_a_message_that_was_answered_is_not_sent_for_the_next():
    state = node_state()
    _, late = exchange(state)
    assert list(state.get_messages_legacy(is_reply=True)) == [late]  # Flower's own: each reply after it is one message late
    state = node_state()
    flower_internals.refuse_stale_replies(type(state))
    second, late = exchange(state)
    assert state.get_messages_legacy(is_reply=True) == []
    assert late.metadata.message_id not in state.msg_store
    good = put(state, Message(RecordDict(), reply_to=second))
    assert state.get_messages_legacy(is_reply=True) == [good]
    assert len(state.get_messages_legacy(is_reply=False)) == 1  # the message itself, which an app takes


def test_the_reply_for_an_app_of_a_run_that_has_ended_is_not_sent_for_the_next_message():
    """After a SuperLink's restart: a message of the dead run stays with the SuperNode, which answers it a minute later."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 1
    state = node_state()
    flower_internals.refuse_stale_replies(type(state))
    dropped = put(state, Message(RecordDict(), 1, "query.hello", ttl=60.0, group_id="a"))  # Flower forgets to delete it
    second = put(state, Message(RecordDict(), 1, "train.losses", ttl=60.0, group_id="b"))
    put(state, Message(Error(8, "crashed"), reply_to=dropped))
    assert state.get_messages_legacy(is_reply=True) == []
    good = put(state, Message(RecordDict(), reply_to=second))
    assert state.get_messages_legacy(is_reply=True) == [good]


def test_node_configurations_are_read_as_flower_reads_them():
    assert flower_internals.read_node_config("client-id='a' beds=12 ratio=0.5") == {"client-id": "a", "beds": 12, "ratio": 0.5}
    assert flower_internals.read_node_config(None) == {}


def test_lists_of_runs_are_read():
    text = 'Loading…\n{"success": true, "runs": [{"run-id": "5", "status": "finished:completed"}]}'
    assert flower_internals.read_runs(text) == [{"run-id": "5", "status": "finished:completed"}]


def test_a_reply_whose_parts_never_come_holds_nobody_up():
    """A node was killed between announcing its reply and sending it; another's reply is behind it in the same answer."""
    from flwr.common.constant import ErrorCode
    from flwr.proto.message_pb2 import Message as MessageProto
    from flwr.proto.message_pb2 import Metadata, ObjectTree, PullObjectResponse
    from flwr.proto.runtime_pb2 import PullAppMessagesResponse
    from flwr.supercore.constant import PULL_MAX_TIME
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
    from flwr.superlink.grid import http_grid

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 1
    whole = Message(RecordDict(), 5, "query.hello")
    whole.metadata.__dict__.update(_message_id="", _src_node_id=5, _dst_node_id=1, _reply_to_message_id="second")
    parts = {each: value.deflate() for each, value in get_all_nested_objects(whole).items()}
    tree = ObjectTree(object_id=whole.object_id, children=[ObjectTree(object_id=i) for i in parts if i != whole.object_id])
    confirmed = []

    class Client:
        def PullMessages(self, request):  # noqa: N802
            cut = MessageProto(metadata=Metadata(message_id="cut", reply_to_message_id="first"))
            good = MessageProto(metadata=Metadata(message_id=whole.object_id, reply_to_message_id="second"))
            trees = [ObjectTree(object_id="cut"), tree]
            return PullAppMessagesResponse(messages_list=[cut, good], message_object_trees=trees)

        def PullObject(self, request):  # noqa: N802
            there = request.object_id in parts
            return PullObjectResponse(
                object_found=True, object_available=there, object_content=parts.get(request.object_id, b"")
            )

        def ConfirmMessageReceived(self, request):  # noqa: N802
            confirmed.append(request.message_object_id)

    class Grid(http_grid.HttpGrid):
        def __init__(self):
            self._run, self.node = SimpleNamespace(run_id=7), http_grid.Node(node_id=1)

        _runtime_client = Client()

    usual, began = http_grid.pull_objects, time.monotonic()
    cut, good = flower_internals.pull_replies(Grid(), ["first", "second"], 0.3)
    assert time.monotonic() - began < 10 < PULL_MAX_TIME
    assert cut.error.code == ErrorCode.MESSAGE_UNAVAILABLE
    assert cut.error.code in flower_internals.TOO_LATE
    assert cut.metadata.reply_to_message_id == "first"
    assert good.metadata.message_type == "query.hello"
    assert confirmed == [whole.object_id]
    assert http_grid.pull_objects is usual


# --------------------------------------------------------------------------------------------------------------- the SuperLink


@pytest.fixture
def superlink_state():
    """The state of a SuperLink in a database, as `equipoise flower superlink` has it, and what is written to it."""
    from flwr.server.superlink.linkstate import sql_linkstate
    from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
    from flwr.superlink.federation import NoOpFederationManager

    class State(sql_linkstate.SqlLinkState):  # a class of its own: no other test meets the changed one
        pass

    superlink_process.write_less(State)
    state = State(":memory:", NoOpFederationManager(), InMemoryObjectStore())
    state.initialize()
    written: list[str] = []
    from sqlalchemy import event

    @event.listens_for(state._engine, "before_cursor_execute")
    def note(_connection, _cursor, statement, *_):
        if not statement.lstrip().upper().startswith(("SELECT", "WITH", "PRAGMA")) or "UPDATE" in statement.upper():
            written.append(statement)

    return state, written


def test_a_superlink_writes_nothing_for_a_node_without_messages(superlink_state):
    state, written = superlink_state
    assert state.get_message_ins(5, limit=1) == []
    assert written == []


def test_a_superlink_hands_messages_out_once(superlink_state, monkeypatch):
    """The look before does not change who gets what."""
    from flwr.server.superlink.linkstate import sql_linkstate
    from flwr.supercore.state.schema.linkstate_models import MessageIns
    from flwr.supercore.utils import uint64_to_int64

    state, written = superlink_state
    node = 2**63 + 5  # in the database such an id is a negative number
    with state._engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA foreign_keys = OFF")  # there is no run that the message belongs to
    with state.session() as session:
        row = {"message_id": "a", "group_id": "", "run_id": 1, "src_node_id": 1, "dst_node_id": uint64_to_int64(node)}
        more = {"reply_to_message_id": "", "created_at": time.time(), "delivered_at": "", "ttl": 60.0, "message_type": "train"}
        session.add(MessageIns(**row, **more))
    monkeypatch.setattr(state, "_check_stored_messages", lambda ids: None)
    monkeypatch.setitem(vars(sql_linkstate), "dict_to_message", lambda row: row["message_id"])
    written.clear()
    assert state.get_message_ins(node + 1, limit=1) == []
    assert state.get_message_ins(node, limit=1) == ["a"]
    assert state.get_message_ins(node, limit=1) == []
    assert len(written) == 1


def test_a_superlink_ends_tasks_whose_time_is_over_once_a_second(superlink_state, monkeypatch):
    state, written = superlink_state
    for _ in range(5):
        state.get_run_status({7})
    first = len(written)
    assert first > 0
    monkeypatch.setattr(superlink_process, "END_TASKS", 0.0)
    state.get_run_status({7})
    assert len(written) == 2 * first
    monkeypatch.setattr(superlink_process, "END_TASKS", 1000.0)
    with state.session():  # a transaction that writes must have begun with it
        state.get_run_status({7})
    assert len(written) == 3 * first


@pytest.mark.parametrize("name", superlink_process.OF_THE_OPERATOR)
def test_layers_that_are_skipped_do_nothing_for_nodes(name, monkeypatch):
    """Each passes a request of a node on as it is, so that to go past it changes nothing; the operator's all go through it."""
    import asyncio

    from flwr.superlink.routers.control import middlewares
    from starlette.responses import PlainTextResponse

    usual = getattr(middlewares, name)
    assert not middlewares._is_control_path("/v1/fleet/pull-messages")
    assert middlewares._is_control_path("/v1/control/list-runs")

    def answer_of(layer, path):
        sent = []

        async def send(message):
            sent.append(message)

        async def receive():
            return {"type": "http.request", "body": b"", "more_body": False}

        async def inner(scope, receive, send):
            await PlainTextResponse("inner", headers={"x-inner": "1"})(scope, receive, send)

        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"", "app": SimpleNamespace()}
        asyncio.run(layer(inner)({**scope, "state": {}}, receive, send))
        start = next(message for message in sent if message["type"] == "http.response.start")
        body = b"".join(message.get("body", b"") for message in sent)
        return start["status"], sorted(start["headers"]), body

    paths = ("/v1/fleet/pull-messages", "/v1/runtime/pull-object")
    before = [answer_of(usual, path) for path in paths]
    through = []
    skipping = type(name, (usual,), {})
    dispatch = usual.dispatch

    async def noted(self, request, call_next):
        through.append(request.url.path)
        return await (call_next(request) if request.url.path.startswith("/v1/control/") else dispatch(self, request, call_next))

    monkeypatch.setattr(usual, "dispatch", noted)
    superlink_process.skip_layer(skipping, ("/v1/fleet/", "/v1/runtime/"))
    assert [answer_of(skipping, path) for path in paths] == before
    assert through == []
    answer_of(skipping, "/v1/control/list-runs")
    answer_of(skipping, "/v1/fleet")  # not a path of nodes
    assert through == ["/v1/control/list-runs", "/v1/fleet"]


def test_a_request_for_the_operators_interface_never_goes_past_its_layers():
    """The paths that go past them are those of nodes and apps, and none of them begins the operator's."""
    source = inspect.getsource(superlink_process.skip_idle_layers)
    assert source.count('("/v1/fleet/", "/v1/runtime/")') == 2
    assert "/v1/control" not in source


def test_the_interface_of_flowers_own_commands_lists_nodes():
    from flwr.cli import flower_config, utils
    from flwr.proto import control_pb2, node_pb2
    from flwr.supercore.control.control_http_client import ControlHttpClient

    assert {"ListNodes", "RegisterNode", "UnregisterNode"} <= set(dir(ControlHttpClient))
    known = set(node_pb2.NodeInfo.DESCRIPTOR.fields_by_name)
    assert {"node_id", "public_key", "name", "status", "last_activated_at", "last_deactivated_at"} <= known
    assert {"public_key", "name"} <= set(control_pb2.RegisterNodeRequest.DESCRIPTOR.fields_by_name)
    assert "node_id" in control_pb2.UnregisterNodeRequest.DESCRIPTOR.fields_by_name
    assert list(inspect.signature(flower_config.read_superlink_connection).parameters) == ["connection_name"]
    assert next(iter(inspect.signature(utils.init_http_client_from_connection).parameters)) == "connection"


# ------------------------------------------------------------------------------------------------------------------ the node


def test_a_node_loads_no_database():
    """SQLAlchemy and Alembic are 30 MB of each node, and Flower's SuperNode keeps its state in memory."""
    code = (
        "import importlib, sys\n"
        "from equipoise.engines.flower import flower_internals as it\n"
        "it.leave_out_databases()\n"
        "for name in it.PRELOADED: importlib.import_module(name)\n"
        "assert not {'sqlalchemy', 'alembic'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_lines_of_flowers_log_are_those_that_are_put_in_plain_words():
    from flwr.supercore.retry import http_retry
    from flwr.supernode import main, start_client_internal
    from flwr.supernode.cli import flower_supernode as command

    where = (start_client_internal, http_retry, main, sys.modules[command.__module__])
    source = "".join(" ".join(inspect.getsource(module).replace('"\n', "").split()) for module in where).replace('" "', "")
    for line in (node_log.RUN_AND_ROUND, node_log.RECEIVING, node_log.SENT, *node_log.IN_PLACE):
        assert json.dumps(line) in source, line


def test_the_log_of_a_superlink_in_a_file_has_no_colours(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    path = tmp_path / "superlink.log"
    command = [sys.executable, "-P", superlink_process.__file__, "--insecure", "--host", "127.0.0.1", "--port", port]
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "FLWR_HOME": str(tmp_path), "PATH": programs}
    with path.open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log, env=environment) as superlink:
        try:
            end = time.monotonic() + 60
            while b"Starting Flower SuperExec" not in path.read_bytes() and time.monotonic() < end:
                assert superlink.poll() is None, path.read_text()
                time.sleep(0.1)
        finally:
            superlink.terminate()
            superlink.wait(30)
    text = path.read_text()
    assert "Starting Flower SuperLink" in text
    assert "Starting Flower SuperExec" in text  # by another process
    assert "\x1b" not in text
