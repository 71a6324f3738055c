"""Runs of an experiment that are made in one call, because their clients can work in one batch; and a limit on the time."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise import metrics
from equipoise.core.files import write_atomically
from equipoise.core.plain_text import parse_json
from equipoise.errors import Diverged, ObserverFailed
from equipoise.observers import Evaluation
from equipoise.reproduce.entry import Method
from equipoise.result import Result
from equipoise.runs.many import SeededRun, train_plan
from equipoise.train import Watching
from equipoise.types import Observer, RoundReport

ENOUGH_SECONDS = 15.0  # with less time left no further runs are begun


class OutOfTime(Exception):
    """The time that a command was given is over."""


@dataclass(frozen=True)
class TimeLimit(Observer):
    """Stops runs between two rounds when the time is over; `ends` is a reading of time.monotonic(), or infinity."""

    ends: float = float("inf")

    @classmethod
    def minutes(cls, minutes: float | None) -> TimeLimit:
        """A limit of the given number of minutes from now; None is no limit."""
        return cls() if minutes is None else cls(time.monotonic() + 60 * minutes)

    @property
    def left(self) -> float:
        """The seconds that are left."""
        return self.ends - time.monotonic()

    def on_round(self, report: RoundReport) -> None:
        """Stop if the time is over; the checkpoint before this round stays."""
        if self.left <= 0:
            raise OutOfTime("the time is over")


class AccuracyCurves(Observer):
    """Accuracy on all test examples, in %, by run and number of rounds; kept in a file for runs that are resumed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            stored = parse_json(path)
        except (FileNotFoundError, ValueError):
            stored = {}
        self.curves: dict[str, dict[int, float]] = {
            run: {int(after): value for after, value in curve.items()} for run, curve in stored.items()
        }

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Take in an evaluation of all clients."""
        if "test" not in evaluation.clients.split:
            return
        rows = evaluation.clients.where("test")
        accuracy = 100 * (1 - metrics.mean(rows.served_error, rows.size))
        self.curves.setdefault(evaluation.run, {})[evaluation.round] = accuracy
        write_atomically(self.path, json.dumps(self.curves).encode())


@dataclass(frozen=True, eq=False)
class RunsTogether:
    """Runs of some methods and seeds that share their data, rounds and evaluations, and so one call of the engine."""

    methods: Sequence[Method]  # of each run
    runs: Sequence[SeededRun]
    rounds: int
    evaluate_every: int | None

    def __str__(self) -> str:
        seeds = sorted({run.seed for run in self.runs})
        names = ", ".join(dict.fromkeys(run.name for run in self.runs))
        return f"{names}, seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"

    def checkpoint(self, folder: Path, settings: Mapping[str, Any]) -> Path:
        """The file of the checkpoint of these runs with these settings."""
        key = json.dumps([[run.name, run.seed] for run in self.runs] + [settings], sort_keys=True, default=str)
        return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.ckpt"

    def train(
        self, engine: Any, clients_per_round: int, checkpoint: Path, limit: TimeLimit
    ) -> tuple[list[Result | Diverged], list[dict[int, float]]]:
        """The result of each run, or the error that stopped it, and its curve; OutOfTime if the limit came first."""
        curves = AccuracyCurves(checkpoint.with_suffix(".json"))
        watch = Watching(self.evaluate_every, [curves, limit], False, checkpoint)
        options = {"rounds": self.rounds, "clients_per_round": clients_per_round, "loss": None, "error": None}
        ended: dict[int, Result | Diverged] = {}
        try:
            train_plan(self.runs, watch, engine, options, ended)
        except ObserverFailed as failure:
            if isinstance(failure.__cause__, OutOfTime):
                raise failure.__cause__ from failure
            raise
        for file in checkpoint.parent.glob(f"{checkpoint.stem}*"):
            file.unlink()
        return [ended[i] for i in range(len(self.runs))], [curves.curves.get(run.label(self.runs), {}) for run in self.runs]
