"""What flower_internals.py relies on in Flower's private modules. A new version of Flower that changes it fails here first."""

from __future__ import annotations

import ast
import base64
import inspect
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
from equipoise.engines.flower import flower_internals

PUBLIC = ("flwr.app", "flwr.clientapp", "flwr.serverapp")
PACKAGE = Path(flower.__file__).parent


def test_private_modules_of_flower_are_imported_in_one_file():
    found = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found |= {file.name for name in names if name.split(".")[0] == "flwr" and name not in PUBLIC}
    assert found == {"flower_internals.py"}


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
    first, second = (put(state, Message(RecordDict(), 1, "query.hello", ttl=60.0, group_id=text)) for text in "ab")
    put(state, Message(Error(8, "crashed"), reply_to=first))
    (sent,) = state.get_messages_legacy(is_reply=True)
    state.delete_messages(
        message_ids=[sent.metadata.message_id, first.metadata.message_id]
    )  # as Flower does when it has sent it
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
