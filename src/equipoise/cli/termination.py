"""SIGTERM for commands whose runs are processes of their own: they are stopped, too, and a last line says how to go on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Terminated(KeyboardInterrupt):
    """SIGTERM, raised where the command is, so that what it has started is stopped as after Ctrl-C."""


@contextmanager
def raising_terminated() -> Iterator[None]:
    """Within it SIGTERM raises `Terminated`, unless it has a handler already; a second one does what is usual."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def stop(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise Terminated

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def end_by_sigterm() -> None:
    """End this process by SIGTERM, so that whoever sent it sees that it did."""
    os.kill(os.getpid(), signal.SIGTERM)
