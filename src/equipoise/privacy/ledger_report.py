"""What the ledgers in a folder say: by data set the runs, their releases, and ε of each run and of all together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from equipoise.core.plain_text import parse_toml
from equipoise.core.words import cells, joined, padded
from equipoise.privacy.ledger import (
    Ledger,
    LedgerEntry,
    LedgerError,
    Total,
    compose,
    events_of,
    find_ledgers,
    read_entries,
    server_epsilon,
)

USUAL_DELTA = 1e-5  # that ε is stated for where runs name none
EVALUATION = ("scores", "evaluation ")  # how the purposes of exact evaluations begin: by secure sums, and of a node
CONFIG = "config.toml"  # in the folder of every run


@dataclass(frozen=True)
class RunInLedger:
    """One run in a ledger: rounds with a release, releases, and ε of it alone; None where its model is exact."""

    run: str
    rounds: int
    releases: int
    exact: int  # releases outside ε
    epsilon: float | None
    epsilon_server: float | None  # for the server; None where the ledger does not say who took part, or the model is exact
    folder: str = ""  # of the run, where that is known
    evaluated: bool = False  # clients that train were evaluated exactly, which the server sees: no ε holds for it
    hidden: bool = False  # nodes draw by themselves whether they take part, so that the server does not know the cohorts
    adjacency: str = ""  # how neighbouring data sets differ, for its ε

    @property
    def shown(self) -> str:
        """What a reader finds the run by."""
        return self.folder or self.run


@dataclass(frozen=True)
class DataInLedgers:
    """All runs on one data set, and what they cost together; no ε where the model of one of them is exact."""

    data: str
    runs: tuple[RunInLedger, ...]
    epsilon: float | None
    delta: float
    nominal: bool
    epsilon_noisy: float = 0.0  # of the noisy releases alone
    adjacency: str = ""  # how neighbouring data sets differ, for all together

    @property
    def without_epsilon(self) -> tuple[str, ...]:
        """The runs whose exact model, or sums, everyone who has them can learn from."""
        return tuple(run.shown for run in self.runs if run.epsilon is None)

    @property
    def name(self) -> str:
        """The data set, and how many others have clients in common with it."""
        first, *more = self.data.split(", ")
        if not first:
            return "of a node"  # whose ledger does not say which
        return f"{first} and {len(more)} more with clients in common" if more else first

    @property
    def in_all(self) -> str:
        """ε of all together, as text."""
        if self.nominal:
            return "nominal"
        total = Total(self.epsilon_noisy, self.delta, self.adjacency)
        noisy = f"; of the noisy releases alone {total}" * (self.epsilon_noisy > 0)
        return (
            str(total) if self.epsilon is not None else f"none (exact releases in run {', '.join(self.without_epsilon)}{noisy})"
        )

    def __str__(self) -> str:
        lines = [f"Data {self.name}: {len(self.runs)} run{'s' * (len(self.runs) != 1)}, ε in all = {self.in_all}"]
        width = max(18, *(cells(run.shown) + 2 for run in self.runs))
        lines.append(f"{'run':<{width}}{'rounds':>7}{'releases':>10}{'outside ε':>11}{'ε':>10}{'ε, server':>18}")
        for run in self.runs:
            own, known = (_shown(each, self.nominal) for each in (run.epsilon, run.epsilon_server))
            own = own or "none"
            known = "none" if run.epsilon is None or (run.evaluated and known == "") else known
            row = f"{padded(run.shown, width)}{run.rounds:>7}{run.releases:>10}{run.exact:>11}{own:>10}{known:>18}"
            lines.append(row.rstrip())
        lines += [f"ε of {each.shown}: {each.adjacency}" for each in self.runs if each.adjacency not in ("", self.adjacency)]
        if not self.data:
            lines.append('Runs of a node have the names that the server\'s federation.json gives them ("run").')
            lines.append(f"A node's ledger names no δ: ε is stated at {self.delta:g}; --delta states another.")
        if self.without_epsilon:
            lines.append("none: the sums or the model of the run are exact, so that no ε bounds what they reveal.")
        if any(run.exact and run.epsilon is not None for run in self.runs):
            lines.append(
                "outside ε: of a run with ε, exact means of evaluations. ε holds for the model, and not for these figures."
            )
        if any(run.exact and run.epsilon is None for run in self.runs):
            lines.append(
                "outside ε: of a run without ε, its exact releases: of secure sums each sum, else the model of each round."
            )
        if any(run.evaluated for run in self.runs):
            lines.append("ε, server: none, because it sees exact evaluations of clients that train.")
        if any(run.hidden and run.epsilon_server is not None for run in self.runs):
            lines.append("ε, server: nodes drew by themselves whether they took part, so the server did not know the cohorts.")
        return joined(lines)

    def plain(self) -> dict[str, Any]:
        """The report as plain values; ε is None where exact releases leave none."""
        return {**vars(self), "runs": [vars(run) for run in self.runs], "without_epsilon": list(self.without_epsilon)}


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
            algorithm = parse_toml(config).get("algorithm")
        except (OSError, ValueError):
            return False
        return isinstance(algorithm, dict) and isinstance(algorithm.get("privacy"), dict)

    runs = sorted(path.parent for path in folder.glob(f"**/{CONFIG}"))
    return [run for run in runs if places.isdisjoint((run, *run.parents)) and is_private(run / CONFIG)]


def summarise_ledgers(
    entries: Iterable[LedgerEntry],
    delta: float | None = None,
    plain: Mapping[str, Mapping[str, int]] | None = None,
    folders: Mapping[str, str] | None = None,
) -> list[DataInLedgers]:
    """What runs cost, by data set; at the smallest δ that they name unless one is given.

    `plain` has runs without a ledger whose models are exact: by data set, their folders and rounds. `folders` has
    those of the runs in ledgers.
    """
    by_data: dict[str, dict[str, list[LedgerEntry]]] = {}
    for entry in (entry for entry in entries if entry.kind != "clients"):
        by_data.setdefault(entry.data, {}).setdefault(entry.run, []).append(entry)
    found = []
    for data in dict.fromkeys([*by_data, *(plain or ())]):
        runs, exact_runs = by_data.get(data, {}), (plain or {}).get(data, {})
        whole = [entry for pages in runs.values() for entry in pages]
        noisy = [entry for entry in whole if entry.kind == "release"]
        named = [entry.delta for entry in noisy if entry.delta > 0]  # the ledger of a node names none
        at = delta if delta is not None else min(named, default=USUAL_DELTA)
        rows = [replace(_summarise_run(run, pages, at), folder=(folders or {}).get(run, "")) for run, pages in runs.items()]
        rows += [RunInLedger("", rounds, 0, rounds, None, None, run) for run, rounds in exact_runs.items()]
        epsilon, total, adjacency = compose([events_of(pages) for pages in runs.values()], at)
        all_in, nominal = None if any(row.epsilon is None for row in rows) else epsilon, any(entry.nominal for entry in noisy)
        found.append(DataInLedgers(data, tuple(rows), all_in, total, nominal, epsilon, adjacency))
    return found


def _summarise_run(run: str, pages: list[LedgerEntry], delta: float) -> RunInLedger:
    noisy = [entry for entry in pages if entry.kind == "release"]
    exact = [entry for entry in pages if entry.kind == "exact"]
    sums = [entry for entry in exact if not entry.purpose.startswith(EVALUATION)]  # that the model is made of
    rounds = len({entry.round for entry in (noisy or sums)})
    if sums:
        return RunInLedger(run, rounds, len(noisy), len(exact), None, None)
    hidden = any(entry.sampling[:1] == ("node poisson",) for entry in noisy)
    (epsilon, _, adjacency), server = compose([events_of(pages)], delta), server_epsilon(pages, delta)
    evaluated = server is not None and bool(exact)
    server = None if evaluated else server
    return RunInLedger(run, rounds, len(noisy), len(exact), epsilon, server, "", evaluated, hidden, adjacency)


def words_below(folder: Path, groups: Mapping[str, str]) -> str:
    """One sentence on what all private runs in a folder cost together; empty where there are fewer than two.

    `groups` has one name for data sets with clients in common (`experiment.open_runs.group_data`).
    """
    return words_of(entries_below(folder), groups) if find_ledgers(folder) else ""


def words_of(entries: Iterable[LedgerEntry], groups: Mapping[str, str]) -> str:
    """`words_below` for the entries of a ledger. It knows data by a hash of all examples, which is not said."""
    entries = [replace(entry, data=groups.get(entry.data, entry.data)) for entry in entries]
    found = [data for data in summarise_ledgers(entries) if sum(run.releases > 0 for run in data.runs) > 1]
    return " ".join(f"The {len(data.runs)} private runs on these data together: ε = {data.in_all}." for data in found)


def _shown(epsilon: float | None, nominal: bool) -> str:
    """ε as text; without noise that holds, beside runs whose noise follows from a seed, "nominal"; empty for None."""
    return "" if epsilon is None else "nominal" if nominal and math.isinf(epsilon) else f"{epsilon:.4g}"
