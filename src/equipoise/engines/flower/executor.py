"""Keeps PyTorch loaded between the messages of a node: `equipoise flower executor`, in place of `flower-superexec`.

Flower starts a new Python process for every message that a node receives, and each imports PyTorch anew: seconds, several
times per round. This process imports once and then forks for each message, so that a message costs milliseconds more than its
work. A fork is a process of its own, as Flower's is: state of one message does not reach the next except through the context.

Three kinds of processes: this one, which only waits and forks, so that it never has threads; its child, which is Flower's
SuperExec unchanged except for how it launches; and one fork per message. Linux and other systems with `fork` only.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, BinaryIO, NoReturn

from equipoise.errors import require

PRELOADED = ("torch", "equipoise", "equipoise.engines.flower", "flwr.clientapp", "flwr.supernode.runtime.run_clientapp")


def run(arguments: Sequence[str]) -> int:
    """Run Flower's SuperExec with these arguments (see `flower-superexec --help`) until it ends; its exit code."""
    require(hasattr(os, "fork"), "executor", "needs an operating system with fork", sys.platform, "Use --isolation subprocess.")
    for module in PRELOADED:
        importlib.import_module(module)
    reading, writing = os.pipe()
    superexec = os.fork()
    if superexec == 0:
        os.close(reading)
        _leave(_superexec, arguments, os.fdopen(writing, "wb", buffering=0))
    os.close(writing)
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda number, _: os.kill(superexec, number))
    with os.fdopen(reading, "rb") as requests:
        for line in requests:  # ends when SuperExec does
            if os.fork() == 0:
                requests.close()
                _leave(_client_app, json.loads(line))
            _reap(superexec)
    return os.waitstatus_to_exitcode(os.waitpid(superexec, 0)[1])


def _reap(superexec: int) -> None:
    """Take leave of forks that have ended; SuperExec's own exit code is read at the end."""
    while True:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None or ended.si_pid == superexec:
            return
        os.waitpid(ended.si_pid, 0)


def _leave(work: Any, *arguments: Any) -> NoReturn:
    """Do the work of a fork and end it here, whatever happens: it must not run on as its parent."""
    code = 1
    try:
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, signal.default_int_handler if name == signal.SIGINT else signal.SIG_DFL)
        work(*arguments)
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


def _superexec(arguments: Sequence[str], requests: BinaryIO) -> None:
    """Flower's own command, with launches sent to the process that forks."""
    from flwr.supercore.cli.flower_superexec import flower_superexec
    from flwr.supercore.superexec import run_superexec
    from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult
    from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor

    class Forks(SubprocessExecutor):
        def launch(self, spec: ExecutionSpec) -> LaunchResult:
            if spec.task_type != "flwr-clientapp":
                return super().launch(spec)
            requests.write(json.dumps(asdict(spec)).encode() + b"\n")
            return LaunchResult.accepted()

    vars(run_superexec)["get_executor"] = lambda *_, **__: Forks()
    sys.argv = ["flower-superexec", *arguments]
    flower_superexec()


def _client_app(spec: dict[str, Any]) -> None:
    """What the command `flwr-clientapp` does, without the imports."""
    from flwr.supercore.tls import validate_and_resolve_root_certificates
    from flwr.supernode.runtime.run_clientapp import run_clientapp

    run_clientapp(
        runtime_api_address=spec["runtime_api_address"],
        token=spec["token"],
        insecure=spec["insecure"],
        certificates=validate_and_resolve_root_certificates(spec["root_certificates_path"], spec["insecure"]),
        parent_pid=spec["parent_pid"],
        runtime_dependency_install=spec["runtime_dependency_install"],
    )


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
