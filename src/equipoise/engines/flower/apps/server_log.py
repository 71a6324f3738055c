"""A run's log in plain words: one line says what went wrong and what to do, and the traceback goes into a file.

Flower shows a failed app as a traceback with its own frames, an exit code and a link. An operator needs the last line of it.
"""

from __future__ import annotations

import logging
import re
import warnings
from pathlib import Path
from typing import Any

from equipoise.core.words import printable, traceback_text
from equipoise.engines.flower.apps.run_control import StoppedByOperator
from equipoise.errors import EquipoiseError, EquipoiseNotice

log = logging.getLogger("flwr")  # Flower shows it to whoever watches the run
GOES_ON = re.compile(r"Going on from round \d+ of \d+, as .* has it\.")
TRACEBACK = "error.txt"  # in the run's folder: the traceback of what stopped the run
RAISED, EXIT = "%s raised an exception", "Exit Code: "  # how lines of Flower begin that tell of an app's failure


class PlainFailures(logging.Filter):
    """Says in one line why the app failed, where Flower writes a traceback, an exit code and a link; leaves out empty lines."""

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()
        self.folder, self.failed = folder, False

    def filter(self, record: logging.LogRecord) -> bool:
        """Change a line, or leave it out. Lines that nobody expects stay as they are."""
        failure = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if record.msg == RAISED and failure is not None:
            self.failed = True
            record.msg, record.args, record.exc_info, record.exc_text = "%s", (self.words(failure),), None, None
            return True
        return record.msg != "" and not (self.failed and str(record.msg).startswith(EXIT))

    def words(self, failure: BaseException) -> str:
        """What stopped the run, in one line, and where the rest is."""
        text = " ".join(printable(failure).split()) or type(failure).__name__
        if isinstance(failure, StoppedByOperator):
            return text
        named = text if isinstance(failure, EquipoiseError) else f"{type(failure).__name__}: {text}"
        return f"The run has failed: {named}{self.keep(failure)}"

    def keep(self, failure: BaseException) -> str:
        """Write the traceback into the run's folder; a sentence says where it is."""
        whole = traceback_text(failure)
        if self.folder is None or not self.folder.is_dir():
            return "" if isinstance(failure, EquipoiseError) else f"\n{whole}"
        try:
            file = self.folder / TRACEBACK
            file.write_text(whole, encoding="utf-8")
            file.chmod(0o600)
        except OSError:
            return f"\n{whole}"
        return f" The traceback is in {file}."


def show_notice(message: Warning | str, *_: Any, **__: Any) -> None:
    """A notice as a line of the log, without the file and the line of code that it came from.

    That a run goes on from its checkpoint is no warning.
    """
    log.log(logging.INFO if GOES_ON.fullmatch(str(message)) else logging.WARNING, "%s", message)


def speak_plainly(folder: str | None) -> None:
    """Have the log of this process in plain words, each line once. Where a program has a log of its own, nothing is changed.

    Libraries that are loaded later may give the root a handler, which would repeat each line of Flower's in another form.
    """
    if logging.getLogger().handlers:
        return
    log.propagate = False
    log.addFilter(PlainFailures(Path(folder) if folder is not None else None))
    usual = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *more: Any, **named: Any) -> None:
        if issubclass(category, EquipoiseNotice):
            show_notice(message)
        else:
            usual(message, category, *more, **named)

    warnings.showwarning = show


def say_end(folder: str | None, rounds: int) -> None:
    """Say where report and model are, and what comes next."""
    if folder is not None:
        log.info(
            "The run has finished after %d round%s. Report: %s. Model: %s. Next: equipoise flower publish %s --out published",
            rounds, "s" * (rounds != 1), Path(folder) / "report.html", Path(folder) / "model.safetensors", folder,
        )  # fmt: skip
