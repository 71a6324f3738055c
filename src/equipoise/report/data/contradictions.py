"""Verdicts that contradict each other: methods that are lower than the baseline on validation data and higher on test data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from equipoise.report.data.paired import PairedDifference, Verdict, figures_by_seed, paired
from equipoise.report.text.phrases import count_words, listed

if TYPE_CHECKING:
    from equipoise.run_record import RunRecord

Records = Mapping[str, Sequence["RunRecord"]]


def judged_on_validation(methods: Records) -> dict[str, list[RunRecord]] | None:
    """The same runs judged on validation data; None unless they are judged on test clients, and all have both."""
    runs = [run for each in methods.values() for run in each]
    if any(run.judged_on != "test" or "validation" not in run.clients.split for run in runs):
        return None
    found = {name: [run.judged_by("validation") for run in each] for name, each in methods.items()}
    known = (run.clients.where("validation").clients_in_mean is None for each in found.values() for run in each)
    return found if all(known) else None


def contradictions_of(methods: Records, baseline: str) -> str:
    """A sentence on methods whose 90th percentile is lower than that of the baseline on one split, and higher on the other.

    Where both splits hold examples of the same clients, the verdicts are over the clients that are in both, so that a choice
    of clients, such as that of `at_least`, contradicts nothing.
    """
    if len(methods) < 2 or judged_on_validation(methods) is None:
        return ""
    common = {name: [_over_common_clients(run) for run in runs] for name, runs in methods.items()}
    same = all(run is not None for runs in common.values() for run in runs)
    on_test = {name: [run for run in runs if run is not None] for name, runs in common.items()} if same else methods
    on_validation = judged_on_validation(on_test) or {}
    test, validation = _verdicts(on_test, baseline), _verdicts(on_validation, baseline)
    opposed: dict[tuple[Verdict, Verdict], list[str]] = {}
    for name, verdict in test.items():
        if {verdict, validation[name]} == {"lower", "higher"}:
            opposed.setdefault((validation[name], verdict), []).append(name)
    if not opposed:
        return ""
    noun = "examples" if same else "clients"
    validation_count, test_count = _count(on_validation, "validation"), _count(on_test, "test")
    first, second = (f"validation {noun}", f"test {noun}")
    if not same:
        first, second = f"{validation_count} {first}", f"{test_count} {second}"
    clauses = "; ".join(
        f"{listed(names)} {'are' if len(names) > 1 else 'is'} {before} on {first}, and {after} on {second}"
        for (before, after), names in opposed.items()
    )
    least = max(run.at_least for runs in methods.values() for run in runs)
    large = f"with {least} examples or more in both" if least else "that have both"
    over = f" over the {test_count} clients {large}" if same else ""
    return (
        f"Validation and test {noun} contradict each other on the 90th percentile{over}: against {baseline}, {clauses}. "
        f"The seeds agree on both, so that the {noun} are the reason: claim neither."
    )


def _over_common_clients(run: RunRecord) -> RunRecord | None:
    """The record without clients that are in one of test and validation data alone; None if no client is in both."""
    table = run.clients
    common = set(table.where("validation").benign.client) & set(table.where("test").benign.client)
    if not common:
        return None
    pairs = zip(table.client, table.split, strict=True)
    rows = [row for row, (client, split) in enumerate(pairs) if split == "train" or client in common]
    return replace(run, clients=table.take(torch.tensor(rows)))


def _verdicts(methods: Records, baseline: str) -> dict[str, Verdict]:
    """By method, whether its 90th percentile is lower or higher than that of the baseline, over the seeds that both have."""
    values = figures_by_seed(methods)["percentile_90"]
    found: list[PairedDifference] = [paired(name, values[name], values[baseline]) for name in methods if name != baseline]
    return {each.method: each.verdict for each in found}


def _count(methods: Records, split: str) -> str:
    """How many benign clients of a split the runs have, as text."""
    return count_words(len(run.clients.where(split).benign) for runs in methods.values() for run in runs)
