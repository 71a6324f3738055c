"""What the simulator says of its paths: which one does the work of a rule, why not the others, and what was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from equipoise.engines.simulator.calibration import Choice, SpeedMeasurement
from equipoise.engines.simulator.client_queue import ClientQueue
from equipoise.engines.simulator.local_rule import LocalRule
from equipoise.engines.simulator.local_work import ChunkWork, LocalPath, Worker


@dataclass(frozen=True, eq=False)
class PathQuestion:
    """Some work that the paths are asked about: a rule, and the chunks in which clients would be trained."""

    worker: Worker
    rule: LocalRule
    chunks: Sequence[ClientQueue]
    chosen: str | None  # a path by name
    threads: int
    sums_only: bool  # whether the server wants weighted sums of updates and nothing else

    def answers(self, unvectorised: str | None = None) -> dict[str, str]:
        """By path, that it is taken, or the reason why it is not. `unvectorised` is why the loop does all the work."""
        paths, worker = self.worker.paths, self.worker
        if unvectorised is not None:
            reason = f"not taken: the model cannot be vectorised over clients ({unvectorised})"
            return {path.name: reason for path in paths[:-1]} | {paths[-1].name: "taken: one client after another"}
        works = [ChunkWork(worker, chunk, self.rule, worker.space, None, self.chosen, self.threads) for chunk in self.chunks]
        refused = {path.name: why for path in paths if (why := self._why_not(path, works[0])) is not None}
        whole = [path for path in paths if path.whole_rounds and path.name not in refused]
        taken = Counter({path.name: len(works) for path in whole[:1]})
        for work in works if not whole else ():
            for path in worker.candidates(self.rule, self.chosen):
                if (why := path.supports(work)) is None:
                    taken[path.name] += 1
                    break
                refused.setdefault(path.name, why)
        for path in worker.candidates(self.rule, self.chosen):  # those after the one that is taken
            if not taken[path.name] and path.name not in refused and (why := path.supports(works[0])) is not None:
                refused[path.name] = why
        return {path.name: self._answer(path.name, taken, refused.get(path.name)) for path in paths}

    def _why_not(self, path: LocalPath, work: ChunkWork) -> str | None:
        """The reason against a path whatever the others are."""
        reason = path.supports_rule(self.rule)
        if not path.whole_rounds or reason is not None:
            return reason
        return path.supports(work) if self.sums_only else "the aggregator is not the weighted mean"

    def _answer(self, name: str, taken: Mapping[str, int], reason: str | None) -> str:
        if not taken.get(name):
            return f"not taken: {reason or 'another one that does this work comes before it'}"
        if taken[name] == len(self.chunks):
            return "taken"
        return f"taken for {taken[name]} of {len(self.chunks)} chunks" + (f"; for others not: {reason}" if reason else "")


def table(title: str, answers: Mapping[str, str]) -> str:
    """Answers as lines under a title."""
    width = max(map(len, answers))
    return "\n".join([title, *(f"  {name:<{width}}  {answer}" for name, answer in answers.items())])


def measured_lines(choice: Choice, measurement: SpeedMeasurement | None, processes: int, threads: int) -> str:
    """How the work is divided, and the seconds per client of every choice that was tried."""
    chunk = "as many clients as memory allows" if choice.chunk_size is None else f"{choice.chunk_size} clients"
    lines = [f"Chunks of {chunk}; processes: {processes}; threads of each: {threads}."]
    if measurement is None or not measurement.seconds:
        return "\n".join([*lines, "Nothing was measured: the work is small, has not begun, or its division was given."])
    lines.append("Measured, in milliseconds per client:")
    for tried, seconds in sorted(measurement.seconds.items(), key=lambda item: item[1]):
        used = (tried.chunk_size, tried.workers, tried.path) == (choice.chunk_size, choice.workers, choice.path)
        lines.append(f"  {1e3 * seconds:10.4f}  {tried}{'  (used)' if used else ''}")
    return "\n".join(lines)
