"""What Ctrl-C leaves: notes on KeyboardInterrupt that say what was saved, and how to go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from equipoise.core.words import counted
from equipoise.runs.checkpoint import Checkpoints

_NO_CHECKPOINT = (
    'Nothing was saved, because the call names no checkpoint. With checkpoint="run.safetensors", a call that is interrupted '
    "goes on where it was when it is repeated."
)


@contextmanager
def noting_interrupts(saving: Checkpoints | None) -> Iterator[None]:
    """Within it, KeyboardInterrupt gets a note on what the checkpoint holds, unless a call inside has given it one."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if not vars(stop).get("__notes__"):
            stop.add_note(_NO_CHECKPOINT if saving is None else saved_words(saving))
        raise


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
