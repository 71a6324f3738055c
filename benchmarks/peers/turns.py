"""How a worker takes turns: it reads commands on standard input and answers each with one line of JSON.

    run N    →  {"seconds": …, "peak_mb": …}   after N more rounds
    loss     →  {"rounds": …, "loss": …}       cross-entropy after the rounds so far, over the data of the first 100 clients
    (end)       the worker ends

The first line a worker writes says {"ready": true, "version": …}. A worker drives itself or is driven by its framework, so
that the whole protocol sits in one call, `proceed`, to be made before every round.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from problem import PROBLEMS, Array, Problem


def options() -> argparse.Namespace:
    """What every worker is told: the workload, and how many threads and processes it may use."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=sorted(PROBLEMS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    return parser.parse_args()


class Turns:
    """The conversation of a worker with the script that compares them.

    `parameters` gives the model as it is now, in the layout of `Problem.shapes`; `finish` waits for work still under way.
    """

    def __init__(
        self, problem: Problem, parameters: Callable[[], Sequence[Array]], finish: Callable[[], object] = lambda: None
    ) -> None:
        self.problem, self.parameters, self.finish = problem, parameters, finish
        # Frameworks print what they like: their standard output becomes standard error, ours is kept apart.
        self.answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.rounds, self.left = 0, 0
        self.began: float | None = None

    def ready(self, version: str) -> None:
        self.answer(ready=True, version=version)

    def answer(self, **fields: Any) -> None:
        self.answers.write(json.dumps(fields) + "\n")
        self.answers.flush()

    def proceed(self) -> bool:
        """Whether to run one more round; returns when it is this worker's turn again."""
        if self.left == 0:
            self.close_run()
            if not self.next_command():
                return False
        self.left -= 1
        self.rounds += 1
        return True

    def close_run(self) -> None:
        if self.began is not None:
            self.finish()
            self.answer(seconds=time.perf_counter() - self.began, peak_mb=peak_memory(os.getpid()))
            self.began = None

    def next_command(self) -> bool:
        for line in sys.stdin:
            word, *rest = line.split()
            if word == "loss":
                self.answer(rounds=self.rounds, loss=self.problem.loss(self.parameters()))
            elif word == "run":
                self.left, self.began = int(rest[0]), time.perf_counter()
                return True
        return False


def peak_memory(process: int) -> float:
    """The peak resident memory of a process and all its descendants, in MB; shared pages count in each of them."""
    total = 0.0
    for child in descendants(process):
        try:
            status = Path(f"/proc/{child}/status").read_text()
        except OSError:  # it has ended
            continue
        total += sum(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM:"))
    return total


def descendants(process: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                after_name = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(after_name[1]), []).append(int(entry.name))
    found = [process]
    for known in found:  # grows while it is walked
        found += parents.get(known, [])
    return found
