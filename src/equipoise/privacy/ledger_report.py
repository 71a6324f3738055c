"""What the ledgers in a folder say: by data set the runs, their releases, and ε of each run and of all together."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise.privacy.accounting import epsilon_of
from equipoise.privacy.ledger import (
    Ledger,
    LedgerEntry,
    LedgerError,
    compose,
    events_of,
    find_ledgers,
    read_entries,
    server_epsilon,
)

CONFIG = "config.toml"  # in the folder of every run


@dataclass(frozen=True)
class RunInLedger:
    """One run in a ledger: rounds with a release, releases, and ε of it alone; None where something was not noisy."""

    run: str
    rounds: int
    releases: int
    exact: int  # releases outside ε
    epsilon: float
    epsilon_server: float | None  # for one who knows the cohorts; None where the ledger does not say who took part


@dataclass(frozen=True)
class DataInLedgers:
    """All runs on one data set, and what they cost together."""

    data: str
    runs: tuple[RunInLedger, ...]
    epsilon: float
    delta: float
    nominal: bool

    def __str__(self) -> str:
        nominal = "nominal " if self.nominal else ""
        head = f"Data {self.data}: {len(self.runs)} run{'s' * (len(self.runs) != 1)}, {nominal}ε in all = {self.epsilon:.4g} "
        lines = [f"{head}at δ = {self.delta:.4g} for the public"]
        lines.append(f"{'run':<18}{'rounds':>7}{'releases':>10}{'outside ε':>11}{'ε':>10}{'ε, cohorts known':>18}")
        for run in self.runs:
            known = "" if run.epsilon_server is None else f"{run.epsilon_server:.4g}"
            lines.append(
                f"{run.run:<18}{run.rounds:>7}{run.releases:>10}{run.exact:>11}{run.epsilon:>10.4g}{known:>18}".rstrip()
            )
        return "\n".join(lines)

    def plain(self) -> dict[str, Any]:
        """The report as plain values."""
        return {**vars(self), "runs": [vars(run) for run in self.runs]}


def entries_below(folder: Path) -> list[LedgerEntry]:
    """All entries of the ledgers in a folder, or of one file; what two of them repeat with the same bits counts once."""
    paths = find_ledgers(folder)
    if not paths:
        raise LedgerError(f"{folder} holds no ledger: there was no private run, or it is of version 0.1.")
    whole = Ledger()
    for path in paths:
        for entry in read_entries(path):
            whole.write(entry)
    return whole.entries


def runs_without_ledger(folder: Path) -> list[Path]:
    """Folders of private runs in a folder that no ledger is in or above, such as those that `Result.save` has written."""
    places = {path.parent for path in find_ledgers(folder)}

    def is_private(config: Path) -> bool:
        try:
            algorithm = tomllib.loads(config.read_text(encoding="utf-8")).get("algorithm")
        except (OSError, ValueError):
            return False
        return isinstance(algorithm, dict) and isinstance(algorithm.get("privacy"), dict)

    runs = sorted(path.parent for path in folder.glob(f"**/{CONFIG}"))
    return [run for run in runs if places.isdisjoint((run, *run.parents)) and is_private(run / CONFIG)]


def summarise_ledgers(entries: Iterable[LedgerEntry], delta: float | None = None) -> list[DataInLedgers]:
    """What runs cost, by data set; at the smallest δ that they name unless one is given."""
    by_data: dict[str, dict[str, list[LedgerEntry]]] = {}
    for entry in entries:
        by_data.setdefault(entry.data, {}).setdefault(entry.run, []).append(entry)
    found = []
    for data, runs in by_data.items():
        whole = [entry for pages in runs.values() for entry in pages]
        noisy = [entry for entry in whole if entry.kind == "release"]
        at = delta if delta is not None else min((entry.delta for entry in noisy), default=1e-5)
        rows = tuple(_summarise_run(run, pages, at) for run, pages in runs.items())
        epsilon, total = compose([events_of(pages) for pages in runs.values()], at)
        found.append(DataInLedgers(data, rows, epsilon, total, any(entry.nominal for entry in noisy)))
    return found


def _summarise_run(run: str, pages: list[LedgerEntry], delta: float) -> RunInLedger:
    noisy = [entry for entry in pages if entry.kind == "release"]
    exact = sum(entry.kind == "exact" for entry in pages)
    rounds = len({entry.round for entry in noisy})
    return RunInLedger(run, rounds, len(noisy), exact, epsilon_of(events_of(pages), delta), server_epsilon(pages, delta))


def words_below(folder: Path) -> str:
    """One sentence on what all private runs in a folder cost together; empty where there are fewer than two."""
    if not find_ledgers(folder):
        return ""
    found = [data for data in summarise_ledgers(entries_below(folder)) if sum(run.releases > 0 for run in data.runs) > 1]
    return " ".join(
        f"The {len(data.runs)} private runs on data {data.data} together: {'nominal ' * data.nominal}ε = {data.epsilon:.4g} at "
        f"δ = {data.delta:.4g} for the public."
        for data in found
    )
