"""A Flower SuperNode that answers quickly: `equipoise flower node`, in place of `flower-supernode`.

Flower starts a new Python process for every message that a node receives, and each of them imports PyTorch anew: seconds of
work, several times per round. Here one process imports once and forks for every message. A fork is a process of its own, as
Flower's is: what a message leaves in memory never reaches the next one, only the context does. Flower also looks for messages
every three seconds; here it looks sooner after a message, as another is likely then, and as seldom when nothing comes.

Four kinds of processes: this one, which waits and forks and never has threads of its own; its two children, Flower's SuperNode
and Flower's SuperExec, both unchanged except for pauses and for how an app is launched; and one fork per message. If one of the
first three ends, so do the others. Needs `fork`, so not for Windows.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.errors import ConfigError, InvalidParameter, require

if TYPE_CHECKING:
    from equipoise.engines.flower.apps.owned_app import OwnedApp

PRELOADED = (
    "equipoise.engines.flower.apps.node_app",
    "equipoise.engines.flower.apps.owned_app",
    "flwr.supernode.cli.flower_supernode",
    "flwr.supernode.runtime.run_clientapp",
)


def run(
    arguments: Sequence[str],
    *,
    preload: Sequence[str] = (),
    app: str | None = None,
    pinned: str | None = None,
    policy: Path | None = None,
) -> int:
    """Run a SuperNode with these arguments, those of `flower-supernode`, until it ends or is told to; its exit code.

    `preload` names modules to load once that the app would import for each message. `app` is the installed app that the node
    runs, or `pinned` the SHA-256 of the one bundle that it takes from the server, and `policy` the file of its owner's policy.
    """
    require("fork" in vars(os), "system", "must have fork", sys.platform, "Use flower-supernode instead.")
    host, port, passed_on = _address(arguments)
    for module in (*PRELOADED, *preload):
        _load(module)
    from equipoise.engines.flower.apps.owned_app import OwnedApp

    answer_messages = partial(_client_app, OwnedApp.choose(app, pinned, policy))
    children = Children()
    signal.signal(signal.SIGCHLD, lambda *_: children.take_leave())
    reading, writing = os.pipe()
    node_arguments = [*passed_on, "--host", host, "--port", str(port), "--isolation", "process"]
    exec_arguments = ["--insecure", "--runtime-api-address", f"{host}:{port}"]
    for work, its_arguments in ((_supernode, node_arguments), (_superexec, exec_arguments)):
        children.lasting.append(_fork(work, its_arguments, reading, writing))
    os.close(writing)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: children.end())
    children.take_leave()  # of one that ended before both were noted
    last = 0
    with os.fdopen(reading, "rb") as requests:
        for line in requests:  # no more of them when SuperExec has ended
            if last:  # it has answered, but must also have handed in the context that the next one reads
                children.wait_for(last)
                del children.codes[last]  # its id may be another's some day
            last = _fork(answer_messages, json.loads(line), reading)
    return children.wait_for(children.lasting[0])


class Children:
    """The processes that this one has forked: exit codes of those that have ended, and the two that last."""

    def __init__(self) -> None:
        self.codes: dict[int, int] = {}
        self.lasting: list[int] = []
        self.told: set[int] = set()

    def take_leave(self) -> None:
        """Note children that have ended, so that none stays as a zombie; the end of a lasting one is the end of the other."""
        while True:
            try:
                child, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if child == 0:
                break
            self.codes[child] = os.waitstatus_to_exitcode(status)
        if any(child in self.codes for child in self.lasting):
            self.end()

    def end(self) -> None:
        """Ask the lasting ones to end; each once, as a second signal would cut its farewell short."""
        for child in self.lasting:
            if child not in self.codes and child not in self.told:
                self.told.add(child)
                os.kill(child, signal.SIGTERM)

    def wait_for(self, child: int) -> int:
        """The exit code of a child, once it has ended."""
        while child not in self.codes:
            time.sleep(0.002 if child not in self.lasting else 0.05)
        return self.codes[child]


def _address(arguments: Sequence[str]) -> tuple[str, int, list[str]]:
    """Where SuperNode and SuperExec meet on this machine, a free port if none is named; and the arguments without it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--isolation")
    parser.add_argument("--ssl-certfile")
    known, others = parser.parse_known_args(list(arguments))
    for name, value in (("--isolation", known.isolation), ("--ssl-certfile", known.ssl_certfile)):
        if value is not None:
            rule = "cannot be given: the app runs on this machine"
            raise InvalidParameter(name, rule, value, "Use flower-supernode instead.")
    if known.port:
        return known.host, known.port, others
    with socket.socket() as probe:
        probe.bind((known.host, 0))
        return known.host, int(probe.getsockname()[1]), others


def _load(module: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as failure:
        raise ConfigError(f"A node needs the module {module}, which cannot be loaded: {failure}.") from failure


def _fork(work: Callable[..., None], argument: Any, *pipe: int) -> int:
    """Do the work in a fork, which ends here whatever happens: it must not run on as its parent. Returns the child's id."""
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(pipe[0])
        work(argument, parent, *pipe[1:])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # a fork has no caller to tell
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Pauses:
    """Stands for the module `time` in a loop of Flower's that looks for work every `longest` seconds.

    The first pause after work is the `shortest`, and each is half as long again as the one before, up to `longest`. A shorter
    pause than `longest` that the loop asks for is one within its work.
    """

    def __init__(self, shortest: float, longest: float) -> None:
        self.shortest, self.longest, self.next = shortest, longest, shortest

    def worked(self) -> None:
        """There was work: the next pause is the shortest."""
        self.next = self.shortest

    def sleep(self, seconds: float) -> None:
        """Pause, for less than the loop asks for."""
        if seconds < self.longest:
            self.worked()
            time.sleep(min(seconds, 0.05))
            return
        time.sleep(self.next)
        self.next = min(1.5 * self.next, self.longest)


def _supernode(arguments: list[str], parent: int, writing: int) -> None:
    """Flower's own command, with pauses that begin short after a message."""
    from flwr.supercore.app_utils import start_parent_process_monitor
    from flwr.supernode import start_client_internal
    from flwr.supernode.cli.flower_supernode import flower_supernode

    os.close(writing)
    start_parent_process_monitor(parent)
    vars(start_client_internal)["time"] = Pauses(0.2, 3.0)  # each look costs the SuperLink some milliseconds
    sys.argv = ["flower-supernode", *arguments]
    flower_supernode()


def _superexec(arguments: list[str], parent: int, writing: int) -> None:
    """Flower's own command, with pauses that begin short after a launch, and with launches sent to the process that forks."""
    from flwr.supercore.cli.flower_superexec import flower_superexec
    from flwr.supercore.constant import TaskType
    from flwr.supercore.superexec import run_superexec
    from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult
    from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor

    pauses = Pauses(0.05, 1.0)

    class Forks(SubprocessExecutor):
        def launch(self, spec: ExecutionSpec) -> LaunchResult:
            if spec.task_type != TaskType.CLIENT_APP:
                return LaunchResult.failed(f"This node runs ClientApps, not {spec.task_type}.")
            os.write(writing, json.dumps(asdict(spec)).encode() + b"\n")
            pauses.worked()
            return LaunchResult.accepted()

    vars(run_superexec).update(get_executor=lambda *_, **__: Forks(), time=pauses)
    sys.argv = ["flower-superexec", "--parent-pid", str(parent), *arguments]
    flower_superexec()


def _client_app(owner: OwnedApp, spec: dict[str, Any], parent: int) -> None:
    """What the command `flwr-clientapp` does, without the imports, and with the app that the node's owner has chosen."""
    from flwr.supernode.runtime import run_clientapp

    owner.replace_loading(run_clientapp)
    passed_on = {name: spec[name] for name in ("runtime_api_address", "token", "insecure", "runtime_dependency_install")}
    if owner.installed is not None:
        passed_on["runtime_dependency_install"] = False  # nothing of the server's is installed
    run_clientapp.run_clientapp(parent_pid=parent, **passed_on)
