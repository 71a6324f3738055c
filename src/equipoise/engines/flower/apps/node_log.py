"""A node's log in plain words, with the time: what the node was asked, how long its answer took, and what went wrong.

Flower writes ten lines for each message, with ids of 64 digits, no time and no name. `speak_plainly` puts a few lines in their
place. Whoever sets FLWR_LOG_LEVEL gets Flower's own log.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from pathlib import Path

from equipoise.core.words import traceback_text

log = logging.getLogger("equipoise.node")
ERROR = "error.txt"  # in the node's state folder: the traceback of the last failure that nobody foresaw
ASKED = {  # what the node is asked, by the kind of message
    "query.hello": "who it is",
    "query.left_out": "",  # nothing: it is told why it is left out, which is a line of its own
    "train.losses": "for its loss",
    "train.update": "for its update",
    "train.own": "for work on its own model",
    "train.keys": "for its keys in a secure sum",
    "train.shares": "for shares of its keys",
    "train.masked": "for its masked numbers",
    "train.confirm": "to sign who is in the sum",
    "train.reveal": "for shares that unmask the sum",
    "evaluate.scores": "for its scores",
    "evaluate.own": "for the scores of its own model",
}
# Lines of Flower's SuperNode, as it hands them to its log, and what is said in their place; None: nothing.
EVALUATION = re.compile(r"evaluation after round \d+$")  # the group of its secure sums; that of a round is its index
RUN_AND_ROUND, RECEIVING, SENT = "[RUN %s, ROUND %s]", "Receiving: %s message (ID: %s)", "Sent successfully"
IN_PLACE = {
    "": None,
    "[RUN %s]": None,
    "Received successfully": None,
    "Sending: %s message (ID: %s)": None,
    "FastAPI lifespan: startup": None,
    "FastAPI lifespan: shutdown": None,
    "Starting Flower SuperNode": None,
    "SuperNode ID: %s": "Connected to the SuperLink. SuperNode ID: %s",
    "Connection attempt failed, retrying in %.2f seconds": "The SuperLink cannot be reached. The next try is in %.1f s.",
    "Connection successful after %.2f seconds and %s tries.": "The SuperLink is reached, after %.0f s and %s tries.",
    "Run ID %s is not in `RUNNING` status. Ignoring message %s.": "Run %s has ended, and its message %.8s is dropped.",
    "Run ID %s is not in `RUNNING` status. Ignoring reply message %s.": "Run %s has ended, and the answer %.8s is not sent.",
}
OF_AN_APP = {  # the same lines in the process of an app, which speaks with the node's own SuperNode alone
    "Connection attempt failed, retrying in %.2f seconds": (
        "An app cannot reach its own node, which may have ended. The next try is in %.1f s."
    ),
    "Connection successful after %.2f seconds and %s tries.": "An app reaches its own node, after %.0f s and %s tries.",
}


class PlainWords(logging.Filter):
    """Puts plain words in the place of what Flower's SuperNode says of each message."""

    def __init__(self, *, of_app: bool = False) -> None:
        super().__init__()
        self.in_place = {**IN_PLACE, **(OF_AN_APP if of_app else {})}
        self.run, self.round, self.asked, self.began, self.silent = "", "", "", 0.0, False

    def filter(self, record: logging.LogRecord) -> bool:
        """Change a line, or leave it out. Lines that nobody expects stay as they are."""
        given = record.args if isinstance(record.args, tuple) else ()
        if record.msg == RUN_AND_ROUND:
            self.run, index = f"Run {given[0]}", str(given[1])
            self.round = f", round {int(index) + 1}" if index.isdecimal() else f", {index}" * bool(EVALUATION.match(index))
            return False
        if record.msg == RECEIVING:
            action = str(given[0])
            self.asked, self.began = self.run + self.round * action.startswith("train."), time.monotonic()
            words = ASKED.get(action, action)
            self.silent = words == ""
            record.msg, record.args = "%s: asked %s.", (self.asked, words)
            return not self.silent
        if record.msg == SENT:  # an answer, or a refusal of which another line tells
            record.msg, record.args = "%s: answered after %.1f s.", (self.asked, time.monotonic() - self.began)
            return not self.silent
        if record.msg in self.in_place:
            plain = self.in_place[record.msg]
            if plain is None:
                return False
            record.msg = plain
        return True


class TimedLines(logging.Formatter):
    """A line with the time in UTC, and the level where something is wrong."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        level = f"{record.levelname}: " if record.levelno >= logging.WARNING else ""
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        return f"{moment} {level}{super().format(record)}"


def start_log() -> None:
    """Have the log of this process, and of those that it forks, on standard error, each line with the time."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TimedLines())
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)


def speak_plainly(*, least: int = logging.INFO, of_app: bool = False) -> None:
    """Have Flower's log of this process, a SuperNode or `of_app`, in plain words; what is below `least` is left out."""
    if os.environ.get("FLWR_LOG_LEVEL"):
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TimedLines())
    handler.addFilter(PlainWords(of_app=of_app))
    handler.setLevel(least)
    logging.getLogger("flwr").handlers = [handler]
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):  # their configuration comes later, and keeps filters
        logging.getLogger(name).addFilter(lambda record: record.levelno >= logging.WARNING)


def keep_traceback(failure: BaseException | None) -> str:
    """Write the traceback of a failure that nobody foresaw into the node's state folder; a sentence says where it is.

    Without such a folder the traceback itself is given. It stays on the node.
    """
    if failure is None:
        return ""
    whole, folder = traceback_text(failure), os.environ.get("EQUIPOISE_CONFIG")
    if not folder:
        return f"\n{whole}"
    try:
        file = Path(folder) / ERROR
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(whole, encoding="utf-8")
        file.chmod(0o600)
    except OSError:
        return f"\n{whole}"
    return f" The traceback is in {file}."
