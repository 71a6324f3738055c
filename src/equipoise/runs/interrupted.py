"""Ctrl-C: it waits for the end of a round where there is a checkpoint, and leaves notes that say what was saved.

A round changes states, histories and the rows of clients one after another, so that a run in the middle of one cannot be saved.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from equipoise.core.words import counted
from equipoise.runs.checkpoint import Checkpoints

_NO_CHECKPOINT = (
    'Nothing was saved, because the call names no checkpoint. With checkpoint="run.safetensors", a call that is interrupted '
    "goes on where it was when it is repeated."
)
_WAITING = b"\nCtrl-C: this stops after the round, with a checkpoint. Ctrl-C again stops at once.\n"


@contextmanager
def interrupts_wait(saving: Checkpoints | None) -> Iterator[None]:
    """Within it, Ctrl-C and SIGTERM ask `saving` to stop after the round; a second Ctrl-C raises KeyboardInterrupt at once.

    Nothing changes without a checkpoint, in other threads, where Python lets no handler be set, or under handlers of the
    user's own. Whoever asked is answered at the end if no `stop_if_asked` has done so until then.
    """
    usual: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    main = threading.current_thread() is threading.main_thread()
    if saving is None or not main or any(signal.getsignal(number) != handler for number, handler in usual.items()):
        yield
        return
    saving.stop_asked = None

    def ask(number: int, frame: Any) -> None:
        if saving.stop_asked is not None and number == signal.SIGINT:
            signal.default_int_handler(number, frame)
        saving.stop_asked = saving.stop_asked or number
        if number == signal.SIGINT:
            with suppress(OSError):
                os.write(2, _WAITING)  # not print: a handler may come in the middle of one

    try:
        for number in usual:
            signal.signal(number, ask)
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
    stop_if_asked(saving.stop_asked, saving)


def stop_if_asked(number: int | None, saving: Checkpoints | None) -> None:
    """End a run that a signal asked to stop: KeyboardInterrupt for Ctrl-C, the end of the process for SIGTERM.

    Before the process ends, a line says what the checkpoint holds.
    """
    if number == signal.SIGTERM:
        if saving is not None:
            with suppress(OSError):
                os.write(2, f"Stopped by SIGTERM. {saved_words(saving)}\n".encode())
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    if number is not None:
        raise KeyboardInterrupt


@contextmanager
def noting_interrupts(saving: Checkpoints | None) -> Iterator[None]:
    """Within it, KeyboardInterrupt gets a note on what the checkpoint holds, unless a call inside has given it one."""
    try:
        yield
    except KeyboardInterrupt as stop:
        _keep_exit_status()
        if not vars(stop).get("__notes__"):
            stop.add_note(_NO_CHECKPOINT if saving is None else saved_words(saving))
            vars(stop)["saved_round"] = None if saving is None else saving.saved_round
        raise


def _keep_exit_status() -> None:
    """Import what torch._dynamo would import at exit: code that runs then makes Python forget that Ctrl-C ended the process.

    The process would have the status 1 in place of SIGINT, and a loop of the shell would go on.
    """
    if "torch._dynamo.utils" in sys.modules:
        with suppress(ImportError):
            importlib.import_module("tabulate")


def saved_words(saving: Checkpoints) -> str:
    """What a checkpoint holds now, and how to go on from it."""
    if not saving.path.exists():
        return f"Nothing was saved in {saving.path} yet. Repeat the call to begin again."
    if saving.saved_round is None:  # the call was interrupted before it looked
        return f"{saving.path} is as it was. Repeat the call to go on from there."
    return f"{saving.path} holds the run after {counted(saving.saved_round, 'round')}. Repeat the call to go on from there."


def note_finished(stop: KeyboardInterrupt, finished: object, ended: int, planned: int) -> None:
    """Hand over the runs that had ended before Ctrl-C as the attribute `finished`, and say so."""
    if ended:
        stop.finished = finished  # type: ignore[attr-defined]
        stop.add_note(
            f"{ended} of {planned} runs had ended. The attribute `finished` of this KeyboardInterrupt is a Comparison of them: "
            "sys.last_value.finished in a notebook."
        )
