"""How often each client came back, against how long its work takes, in runs whose clients come and go (FedBuff)."""

from __future__ import annotations

from typing import NamedTuple

from equipoise.report.data.results_by_method import MethodResults


class Participation(NamedTuple):
    """Clients of one run that came back at least once."""

    clients: tuple[str, ...]
    took: tuple[float, ...]  # simulated time of a job
    jobs: tuple[int, ...]  # how often it came back
    staleness: tuple[float, ...]  # of its updates, on average


def participation(method: MethodResults) -> Participation:
    """Who came back how often in the first seed; empty where clients work in rounds."""
    seen: dict[str, list[tuple[float, int]]] = {}
    for report in method.runs[0].history.rounds:
        for client, took, age in report.arrivals:
            seen.setdefault(client, []).append((took, age))
    return Participation(
        tuple(seen),
        tuple(jobs[-1][0] for jobs in seen.values()),
        tuple(len(jobs) for jobs in seen.values()),
        tuple(sum(age for _, age in jobs) / len(jobs) for jobs in seen.values()),
    )
