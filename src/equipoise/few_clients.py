"""Few judged clients: of fewer than ten, the 90th percentile of the error is the client that fares worst."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from equipoise.report.text.phrases import count_words

if TYPE_CHECKING:
    from equipoise.run_record import RunRecord

TEN_CLIENTS = 10  # of n < 10 clients, the n − 1 best are less than 90 % of the clients


def few_clients_words(runs: Sequence[RunRecord]) -> str:
    """A sentence if runs are judged on fewer than ten validation or test clients; empty if they are not.

    Training clients count by their examples, so that their number does not decide what the 90th percentile is. Where only
    means over clients are known there is no percentile.
    """
    every = [run.clients.where(run.judged_on) for run in runs]
    split = runs[0].judged_on
    if split == "train" or any(rows.clients_in_mean is not None for rows in every):
        return ""
    counts = [len(rows.benign) for rows in every]
    few = [count for count in counts if count < TEN_CLIENTS]
    if not few:
        return ""
    sampled = "evaluated " * any(run.sample_of(split) is not None for run in runs)
    kind = f"{sampled}{'benign ' * (sum(counts) < sum(map(len, every)))}{split}"
    least = max(run.at_least for run in runs)
    large = f" with {least} examples or more" if least else ""
    there = "There are only" if len(few) == len(counts) else "Some runs have only"
    if max(few) == 1:
        there = there.replace("There are", "There is")
        return f"{there} one {kind} client{large}: mean, 90th percentile and worst 10 % are its own."
    return (
        f"{there} {count_words(few)} {kind} clients{large}: of fewer than {TEN_CLIENTS}, the 90th percentile is the one that "
        "fares worst, as is the worst 10 %."
    )
