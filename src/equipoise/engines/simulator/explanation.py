"""What the simulator says of its paths: which one does the work of a rule, why not the others, and what was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from equipoise.engines.simulator.calibration import Choice, SpeedMeasurement
from equipoise.engines.simulator.local_work import ONLY_FASTEST, ChunkWork, LocalPath


def path_answers(works: Sequence[ChunkWork], *, sums_only: bool, measurement: SpeedMeasurement | None = None) -> dict[str, str]:
    """By path, that it is taken for chunks of one rule, or why it is not.

    `sums_only` says whether the server wants weighted sums of updates and nothing else. A path that could be taken and was
    measured is not taken because of its `measurement`.
    """
    paths, chosen = works[0].worker.paths, works[0].chosen
    taken: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    for work in works:
        answers = {path.name: _why_not(path, work, sums_only) for path in paths}
        reasons = {name: why for name, why in answers.items() if why is not None} | reasons
        able = [path for path in paths if answers[path.name] is None]
        first = min(able, key=lambda path: (not path.whole_rounds, path.name != chosen))
        taken[first.name] += 1

    def answer(name: str) -> str:
        if not taken[name]:
            why = _by_measurement(name, taken, measurement) if reasons.get(name, ONLY_FASTEST) == ONLY_FASTEST else None
            if why is None and name not in reasons:
                return f"not needed: {' or '.join(taken)} comes first and can do it"
            return f"not taken: {why or reasons[name]}"
        if taken[name] == len(works):
            return "taken"
        return f"taken for {taken[name]} of {len(works)} chunks" + (
            f"; for others not: {reasons[name]}" if name in reasons else ""
        )

    return {path.name: answer(path.name) for path in paths}


def _by_measurement(name: str, taken: Iterable[str], measurement: SpeedMeasurement | None) -> str | None:
    """What a measurement says against a path that was tried; None if it, or what is taken instead, was not."""
    best: dict[str | None, float] = {}
    for choice, seconds in (measurement.seconds if measurement is not None else {}).items():
        best[choice.path] = min(seconds, best.get(choice.path, seconds))
    rivals = {path: best[path] for path in taken if path in best}
    if name not in best or not rivals:
        return None
    rival = min(rivals, key=lambda path: rivals[path])
    found = "slower" if best[name] >= rivals[rival] else "not clearly faster"
    return f"measured, and {found} than {rival}"


def _why_not(path: LocalPath, work: ChunkWork, sums_only: bool) -> str | None:
    """The reason against a path, whatever the others are."""
    if path.whole_rounds and not sums_only:
        return work.worker.why_not(path, work.rule) or "the aggregator is not the weighted mean"
    return work.worker.why_not(path, work.rule) or path.supports(work)


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
