"""The process of a node that forks for every message: it has the libraries and the data in memory, and no threads.

A fork ends at the deadline of its message, and never blocks the next one. It ends itself, with an answer that says so. One that
cannot, because its code never lets go of Python's lock, is killed from here; so is one that still waits for a message which the
SuperNode has given up.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from equipoise.core.plain_text import parse_json
from equipoise.engines.flower.apps.kept_data import KeptData, has_threads
from equipoise.engines.flower.apps.node_log import log
from equipoise.engines.flower.flower_internals import run_client_app

if TYPE_CHECKING:
    from equipoise.engines.flower.apps.owned_app import OwnedApp

TO_PULL = 60.0  # seconds in which a fork must have its message
TO_END = (2.0, 10.0)  # seconds that a fork may still take when the next message is there: without an answer, with one
GRACE = 5.0  # seconds after its deadline at which a fork is killed
NOT_KEPT = 76  # exit code: loading the data has started threads, so this process must be begun anew without them
_WAITING, _WORKING, _ANSWERED = 0.0, 1.0, 2.0
_STATE = struct.Struct("dd")


def fork(work: Callable[[], None], *, closed: tuple[int, ...] = ()) -> int:
    """Do the work in a fork, which ends here whatever happens: it must not run on as its parent. Returns the child's id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        for each in closed:
            os.close(each)
        work()
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


class AppForks:
    """Reads what SuperNode and SuperExec write into a pipe: `{"node": id}`, or what an app needs; and forks for the latter."""

    def __init__(self, reading: int, owner: OwnedApp, node_config: dict[str, Any], *, keep: bool) -> None:
        self.reading, self.owner, self.node_config, self.keep = reading, owner, node_config, keep
        self.data: KeptData | None = None
        self.child = 0
        self._state = mmap.mmap(-1, _STATE.size)  # of the fork: deadline on the monotonic clock, and how far it is

    def serve(self) -> None:
        """Until nobody writes any more."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one decides when it ends
        waking, wake = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(waking, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for line in self._lines(waking):
            told = parse_json(line)
            if "node" in told:
                self._keep_data(told["node"])
                continue
            self._make_way()
            if self.data is not None:
                self.data.refresh()
                self._refuse_threads()
            self._note(time.monotonic() + TO_PULL, _WAITING)
            self.child = fork(partial(self._answer, told, os.getpid()), closed=(waking, wake))
        self._make_way()

    def _lines(self, waking: int) -> Iterator[bytes]:
        """Lines as they come; meanwhile forks are watched."""
        held = b""
        while True:
            ready, _, _ = select.select([self.reading, waking], [], [], 1.0 if self.child else None)
            if waking in ready:
                os.read(waking, 512)
            self._look_after_the_fork()
            if self.reading not in ready:
                continue
            got = os.read(self.reading, 65_536)
            if not got:
                return
            *lines, held = (held + got).split(b"\n")
            yield from lines

    # ---------------------------------------------------------------------------------------------------------- the fork's end

    def _note(self, deadline: float, state: float) -> None:
        self._state[:] = _STATE.pack(deadline, state)

    def _has_ended(self) -> bool:
        if self.child:
            try:
                ended, _ = os.waitpid(self.child, os.WNOHANG)
            except ChildProcessError:
                ended = self.child
            self.child = 0 if ended else self.child
        return not self.child

    def _kill(self, why: str) -> None:
        log.warning("An app was ended: %s.", why)
        os.kill(self.child, signal.SIGKILL)
        os.waitpid(self.child, 0)
        self.child = 0

    def _look_after_the_fork(self) -> None:
        deadline, state = _STATE.unpack(self._state[:])
        if not self._has_ended() and time.monotonic() > deadline:
            self._kill("it waited for a message that never came" if state == _WAITING else "its time was over")

    def _make_way(self) -> None:
        """Wait until the last fork has handed in the context that the next one reads; one without an answer is in the way."""
        began = time.monotonic()
        while not self._has_ended():
            state = _STATE.unpack(self._state[:])[1]
            if time.monotonic() - began > TO_END[state == _ANSWERED]:
                self._kill("the next message is there, and nobody waits for its answer")
                return
            time.sleep(0.002)

    # ----------------------------------------------------------------------------------------------------------------- its work

    def _keep_data(self, node: int) -> None:
        """Load the data now that the node's id is known, if the owner has named the app."""
        if not self.keep:
            return
        self.data = self.owner.keep_data(node, self.node_config)
        if self.data is not None:
            self.data.refresh()
            self._refuse_threads()

    def _refuse_threads(self) -> None:
        if has_threads():
            log.warning(
                "load_data starts threads, so the node cannot keep the data in memory, and loads them anew for every message. "
                "Answers are right, but slower. Cure: read the data without threads, e.g. by pandas.read_csv or numpy.load."
            )
            os._exit(NOT_KEPT)

    def _answer(self, spec: dict[str, Any], parent: int) -> None:
        os.close(self.reading)

        def begun(left: float) -> None:
            self._note(time.monotonic() + max(left, 0.0) + GRACE, _WORKING)

        def answered() -> None:
            self._note(time.monotonic() + max(TO_END) + GRACE, _ANSWERED)

        if self.owner.installed is not None:
            spec["runtime_dependency_install"] = False  # nothing of the server's is installed
        run_client_app(spec, parent, self.owner, begun, answered)
