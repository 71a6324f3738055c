"""A Flower SuperNode that answers quickly and goes on by itself: `equipoise flower node`, in place of `flower-supernode`.

Flower starts a new Python process for every message that a node receives, and each of them imports PyTorch and loads the
data anew: seconds of work, several times per round. Here one process does so once and forks for every message. A fork is a
process of its own, as Flower's is: what a message leaves in memory never reaches the next one, only the context does. Flower
also looks for messages every three seconds; here it looks sooner after a message, as another is likely then.

Five kinds of processes: this one, which starts the others and starts them again; Flower's SuperNode and SuperExec; the process
that forks (app_forks.py); and one fork per message. A SuperNode that cannot reach the SuperLink, is refused by it or loses it
is started again, with growing pauses: a SuperLink may be away for days. Needs `fork`, so not for Windows.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.engines.flower.apps.node_log import log, speak_plainly, start_log
from equipoise.errors import ConfigError, InvalidParameter, require

if TYPE_CHECKING:
    from equipoise.engines.flower.apps.owned_app import OwnedApp

PRELOADED = (
    "equipoise.engines.flower.apps.node_app",
    "equipoise.engines.flower.apps.owned_app",
    "equipoise.engines.flower.flower_internals",
)
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds before a SuperNode is started again
STEADY = 60.0  # seconds after which the next pause is the first one again
FAREWELL = 15.0  # seconds that the processes have to end
LOOK = 5.0  # seconds between looks of a SuperExec that is told when there is work


def run(
    arguments: Sequence[str],
    *,
    preload: Sequence[str] = (),
    app: str | None = None,
    pinned: str | None = None,
    policy: Path | None = None,
    keep_data: bool = True,
) -> int:
    """Run a SuperNode with these arguments, those of `flower-supernode`, until it is told to end; its exit code.

    `preload` names modules to load once that the app would import for each message. `app` is the installed app that the node
    runs, or `pinned` the SHA-256 of the one bundle that it takes from the server, and `policy` the file of its owner's policy.
    With an installed app the data are loaded once, unless `keep_data` is False.
    """
    require("fork" in vars(os), "system", "must have fork", sys.platform, "Use flower-supernode instead.")
    start_log()
    address = NodeAddress.read(arguments)
    from equipoise.engines.flower.flower_internals import PRELOADED as INTERNALS
    from equipoise.engines.flower.flower_internals import leave_out_databases

    leave_out_databases()
    for module in (*PRELOADED, *preload):
        _load(module)
    from equipoise.engines.flower.apps.owned_app import OwnedApp

    for module in INTERNALS:
        _load(module)
    from equipoise.engines.flower.apps.node_keys import NODE_KEY

    if address.key is not None:
        os.environ[NODE_KEY] = str(Path(address.key).expanduser().resolve())
    gc.collect()
    gc.freeze()  # a collection would write to the memory of all modules, which the processes share until then
    return WarmNode(address, OwnedApp.choose(app, pinned, policy), keep=keep_data).run()


class WarmNode:
    """The process that starts the others, and starts them again."""

    def __init__(self, address: NodeAddress, owner: OwnedApp, *, keep: bool) -> None:
        self.address, self.owner, self.keep = address, owner, keep
        self.reading, self.writing = os.pipe()
        self.children: dict[str, int] = {}  # process ids by name
        self.codes: dict[str, int] = {}  # exit codes of those that have ended
        self.told = 0  # how often this process was told to end
        self._waking, self._wake = os.pipe()
        self._work, self._has_work = os.pipe()  # by which the SuperNode tells the SuperExec that a message is there
        self._parent = os.getpid()

    def run(self) -> int:
        """Until told to end, or until something fails that no further try mends; the exit code."""
        from equipoise.engines.flower.flower_internals import TRY_AGAIN

        for end in (self._waking, self._wake, self._work, self._has_work):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._be_told)
        pause = FIRST_PAUSE
        log.info("The node starts%s.", f": {self.address.client}" if self.address.client else "")
        while True:
            began = time.monotonic()
            code = self._run_once()
            if self.told:
                return 0
            if code != TRY_AGAIN:
                return code or 1
            pause = FIRST_PAUSE if time.monotonic() - began > STEADY else pause
            log.info("The SuperNode has ended. It starts again in %g s.", pause)
            self._wait(lambda: self.told > 0, pause)
            if self.told:
                self._end()
                return 0
            pause = min(2 * pause, LONGEST_PAUSE)

    def _run_once(self) -> int:
        """SuperNode and SuperExec until one of them ends; the SuperNode's exit code."""
        self._start_forks()
        self.codes.clear()
        for name, work in (("supernode", self._supernode), ("superexec", self._superexec)):
            self._start(name, work)
        while True:
            self._wait(lambda: self.told > 0 or len(self.codes) > 0, None)
            if "forks" in self.codes and not self.told and "supernode" not in self.codes:
                self._start_forks()  # its data have threads, or its own code has crashed
                continue
            break
        self._end(but=() if self.told else ("forks",))
        return self.codes.pop("supernode")

    def _start_forks(self) -> None:
        from equipoise.engines.flower.apps.app_forks import NOT_KEPT

        if self.codes.pop("forks", None) == NOT_KEPT:
            self.keep = False
        if "forks" not in self.children:
            self._start("forks", self._forks)

    def _start(self, name: str, work: object) -> None:
        from equipoise.engines.flower.apps.app_forks import fork

        self.codes.pop(name, None)
        self.children[name] = fork(work, closed=(self._waking, self._wake))  # type: ignore[arg-type]

    def _be_told(self, *_: object) -> None:
        self.told += 1
        if self.told > 2:  # by somebody who cannot wait
            for child in self.children.values():
                os.kill(child, signal.SIGKILL)

    def _wait(self, until: object, longest: float | None) -> None:
        """Sleep until a signal or the end of a child makes a condition true."""
        end = None if longest is None else time.monotonic() + longest
        while True:
            self._note_ended()
            if until() or (end is not None and time.monotonic() >= end):  # type: ignore[operator]
                return
            ready, _, _ = select.select([self._waking], [], [], None if end is None else max(0.0, end - time.monotonic()))
            if ready:
                os.read(self._waking, 512)

    def _note_ended(self) -> None:
        for name, child in list(self.children.items()):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                del self.children[name]
                self.codes[name] = os.waitstatus_to_exitcode(status)

    def _end(self, but: Sequence[str] = ()) -> None:
        """Ask the processes to end, each once, as a second signal would cut a farewell short; then they are killed."""
        for name, child in self.children.items():
            if name not in but:
                os.kill(child, signal.SIGTERM)
        self._wait(lambda: not set(self.children) - set(but), FAREWELL)
        for name, child in self.children.items():
            if name not in but:
                os.kill(child, signal.SIGKILL)
        self._wait(lambda: not set(self.children) - set(but), FAREWELL)

    # ---------------------------------------------------------------------------------------------------------- in the children

    def _tell(self, what: object) -> None:
        os.write(self.writing, json.dumps(what).encode() + b"\n")

    def _supernode(self) -> None:
        from equipoise.engines.flower.flower_internals import run_supernode

        speak_plainly()
        os.close(self.reading)
        address = [*self.address.others, "--host", self.address.host, "--port", str(self.address.port)]
        pauses = Pauses(0.2, 3.0, tells=self._has_work)  # each look costs the SuperLink some milliseconds
        run_supernode([*address, "--isolation", "process"], self._parent, pauses, lambda node: self._tell({"node": node}))

    def _superexec(self) -> None:
        from equipoise.engines.flower.flower_internals import run_superexec

        speak_plainly(least=logging.ERROR)  # that the SuperNode beside it is not yet there is nobody's concern
        os.close(self.reading)
        arguments = ["--insecure", "--runtime-api-address", f"{self.address.host}:{self.address.port}"]
        run_superexec(arguments, self._parent, Pauses(LOOK, LOOK, told=self._work), self._tell)

    def _forks(self) -> None:
        from equipoise.engines.flower.apps.app_forks import AppForks

        speak_plainly(least=logging.WARNING, of_app=True)
        os.close(self.writing)
        AppForks(self.reading, self.owner, self.address.node_config, keep=self.keep).serve()


class NodeAddress:
    """The arguments of `flower-supernode`, as far as they concern this process, and the others, which are passed on."""

    def __init__(self, known: argparse.Namespace, others: list[str]) -> None:
        from equipoise.engines.flower.flower_internals import read_node_config

        self.host: str = known.host
        self.port: int = known.port or free_port(known.host)
        self.key: str | None = known.auth_supernode_private_key
        self.node_config = read_node_config(known.node_config)
        self.client = str(self.node_config.get("client-id", ""))
        self.others = others
        for name, value in (("--auth-supernode-private-key", self.key), ("--node-config", known.node_config)):
            self.others += [name, value] if value is not None else []

    @classmethod
    def read(cls, arguments: Sequence[str]) -> NodeAddress:
        """Where SuperNode and SuperExec meet on this machine, a free port if none is named."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--host", default="127.0.0.1")
        parser.add_argument("--port", type=int, default=0)
        for name in ("--isolation", "--ssl-certfile", "--node-config", "--auth-supernode-private-key"):
            parser.add_argument(name)
        known, others = parser.parse_known_args(list(arguments))
        for name, value in (("--isolation", known.isolation), ("--ssl-certfile", known.ssl_certfile)):
            if value is not None:
                rule = "cannot be given: the app runs on this machine"
                raise InvalidParameter(name, rule, value, "Use flower-supernode instead.")
        return cls(known, others)


def free_port(host: str) -> int:
    """A port of this machine on which nobody listens."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _load(module: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as failure:
        raise ConfigError(f"A node needs the module {module}, which cannot be loaded: {failure}.") from failure


class Pauses:
    """Stands for the module `time` in a loop of Flower's that looks for work every `longest` seconds.

    The first pause after work is the `shortest`, and each is half as long again as the one before, up to `longest`. A shorter
    pause than `longest` that the loop asks for is one within its work. `tells` and `told` are the ends of a pipe: the loop that
    has got work for the other one tells it when all of it is there, and ends its pause.
    """

    def __init__(self, shortest: float, longest: float, *, tells: int | None = None, told: int | None = None) -> None:
        self.shortest, self.longest, self.next = shortest, longest, shortest
        self._tells, self._told, self._news = tells, told, False

    def worked(self) -> None:
        """There was work: the next pause is the shortest."""
        self.next = self.shortest

    def has_work(self) -> None:
        """There is work for the other loop, of which it is told in this one's next pause."""
        self._news = True

    def sleep(self, seconds: float) -> None:
        """Pause, for less than the loop asks for."""
        if self._news and self._tells is not None:
            self._news = False
            with suppress(BlockingIOError):  # it has been told so often that once more is no news
                os.write(self._tells, b".")
        if seconds < self.longest:
            self.worked()
            time.sleep(min(seconds, 0.05))
            return
        if self._told is None:
            time.sleep(self.next)
        elif select.select([self._told], [], [], self.next)[0]:
            os.read(self._told, 512)
            self.worked()
            return
        self.next = min(1.5 * self.next, self.longest)
