"""Follows the log of a run as it grows, in bounded memory."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from equipoise.core.words import printable
from equipoise.serve.pages_text import counted, finite
from equipoise.serve.safe_files import open_below

POINTS = 2000  # of a curve that are kept; beyond it every second one goes, again and again
CHUNK = 4 * 2**20  # bytes that are read at once
MOST_CURVES = 200  # members of a family that are followed
LONGEST = 16 * 2**20  # of a line; a longer one is no log


@dataclass
class Curve:
    """The rounds of one run, thinned so that at most `POINTS` are kept; the newest round is always there."""

    rows: list[tuple[int, float | None, float | None, int, float | None]] = field(default_factory=list)
    stride: int = 1
    last: tuple[int, float | None, float | None, int, float | None] | None = None
    cohort: int = 0

    def add(self, event: dict[str, Any]) -> None:
        """Take in the report of a round: round, loss, tail loss, clients trained, ε."""
        number = counted(event["round"]) + 1
        loss, tail, epsilon = (finite(event.get(name)) for name in ("loss", "tail_loss", "epsilon"))
        self.last = (number, loss, tail, counted(event.get("trained")), epsilon)
        self.cohort = counted(event.get("cohort"))
        if (number - 1) % self.stride == 0:
            self.rows.append(self.last)
        if len(self.rows) > POINTS:
            self.stride *= 2
            self.rows = [row for row in self.rows if (row[0] - 1) % self.stride == 0]

    def after(self, number: int) -> list[tuple[int, float | None, float | None, int, float | None]]:
        """The points of rounds after a number, with the newest."""
        found = [row for row in self.rows if row[0] > number]
        if self.last is not None and self.last[0] > number and (not found or found[-1][0] < self.last[0]):
            found.append(self.last)
        return found


class LogTail:
    """The events of a rounds.jsonl: curves by run, evaluations, the start, and how it ended. `read` takes in what is new.

    A file that was replaced or cut off is read anew, and `generation` counts that. Lines that are no events are skipped.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.generation = 0
        self._forget()

    def _forget(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.evaluations: list[dict[str, Any]] = []
        self.total_rounds = 0
        self.end: dict[str, Any] | None = None
        self.stopped: str | None = None
        self.modified = 0.0
        self.recent: list[tuple[int, float]] = []  # rounds and their seconds, for the time left
        self.changes = 0  # grows with every event
        self._offset, self._inode, self._skipped = 0, 0, 0

    def read(self) -> bool:
        """Take in what was appended; whether there was anything."""
        try:
            with open_below(self.folder, [self.name]) as file:
                about = os.fstat(file.fileno())
                if self._offset and (about.st_ino != self._inode or about.st_size < self._offset):
                    self._forget()
                    self.generation += 1
                self._inode, self.modified = about.st_ino, about.st_mtime
                if about.st_size == self._offset:
                    return False
                file.seek(self._offset)
                before, rest = self.changes, b""
                while part := file.read(CHUNK):
                    lines = (rest + part).split(b"\n")
                    rest = lines.pop()
                    for line in lines:
                        self._take(line)
                    self._offset = file.tell() - len(rest)
                    if len(rest) > LONGEST:
                        self._offset, rest, self._skipped = file.tell(), b"", self._skipped + 1
                return self.changes > before
        except OSError:
            gone = self._offset > 0
            if gone:
                self._forget()
                self.generation += 1
            return gone

    def _take(self, line: bytes) -> None:
        try:
            event = json.loads(line)
            kind = event.get("event")
            name = printable(event.get("run", ""))[:200]
            if kind == "start":
                self.total_rounds, self.stopped, self.end = counted(event["rounds"]), None, None
            elif kind == "round":
                if name not in self.curves and len(self.curves) >= MOST_CURVES:
                    raise ValueError("no family has that number of members")
                self.curves.setdefault(name, Curve()).add(event)
                self.recent = [*self.recent[-63:], (counted(event["round"]), finite(event.get("seconds")) or 0.0)]
                self.stopped = self.end = None
            elif kind == "evaluation":
                about = {"run": name, "round": counted(event["round"]), "splits": _plain(event["splits"])}
                self.evaluations.append(about | {"histogram": _counts(event.get("histogram"))})
                if len(self.evaluations) > 2 * POINTS:
                    self.evaluations = self.evaluations[::2]
            elif kind == "stopped":
                self.stopped = printable(event.get("why", ""))[:2000]
            elif kind == "end":
                self.end = event
            self.changes += 1
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            self._skipped += 1

    @property
    def rounds_done(self) -> int:
        """The rounds that every run of the folder has done."""
        return min((curve.last[0] for curve in self.curves.values() if curve.last is not None), default=0)

    @property
    def seconds_per_round(self) -> float | None:
        """The mean time of the newest rounds, all runs of the folder together; None before the first."""
        if not self.recent:
            return None
        runs = max(1, len(self.curves))
        return runs * sum(seconds for _, seconds in self.recent) / len(self.recent)


def _counts(given: Any) -> dict[str, Any] | None:
    """The histogram of an evaluation; None if there is none, or it is none."""
    if not isinstance(given, dict) or not isinstance(given.get("counts"), list) or len(given["counts"]) > 1000:
        return None
    low, high = finite(given.get("low")), finite(given.get("high"))
    counts = [max(0, counted(count)) for count in given["counts"]]
    return (
        None
        if low is None or high is None
        else {"low": low, "high": high, "counts": counts, "split": str(given.get("split"))[:40]}
    )


def _plain(splits: Any) -> dict[str, dict[str, float | None]]:
    return {
        str(name)[:40]: {str(key)[:80]: finite(value) for key, value in of.items()} for name, of in list(splits.items())[:8]
    }
