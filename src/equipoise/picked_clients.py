"""Clients picked as the worst: what the choice does to their errors, and whether clients differ beyond chance at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from equipoise.metrics import counts_wrong

if TYPE_CHECKING:
    from torch import Tensor

    from equipoise.client_table import ClientTable

BEYOND = 0.05  # clients differ beyond chance if their errors lie this far apart by chance in fewer cases
_DRAWS = 1999  # random distributions of the wrong rows over clients
_CELLS = 2_000_000  # draws × clients, at most
_FEWEST_DRAWS = 199


def picked_words(shown: int, among: int, *, intervals: bool, what: str = "clients") -> str:
    """Sentences below the `shown` worst of all clients: they were picked; empty where all are shown.

    `intervals` says whether they have intervals.

    >>> picked_words(1, 33, intervals=False)
    'This is the worst of 33 clients. Part of that is chance: expect it nearer to the others on new rows.'
    """
    if shown >= among:
        return ""
    who, they = ("This is", "it") if shown == 1 else ("These are", "them")
    worst = "the worst" if shown == 1 else f"the worst {shown}"
    ends = f" The interval{'s do' if shown > 1 else ' does'} not allow for this choice." if intervals else ""
    return f"{who} {worst} of {among:,} {what}. Part of that is chance: expect {they} nearer to the others on new rows.{ends}"


def picked_lines(shown: int, rows: ClientTable, *, intervals: bool) -> list[str]:
    """Lines below a list of the `shown` worst of `rows`: on the trivial error, on the choice, and on what chance does."""
    answer = f"trivial error: of the same answer for every example, the {rows.trivial_answer} of training."
    what = "clients" if len(set(rows.split)) == 1 else "rows of clients"
    picked = picked_words(shown, len(rows), intervals=intervals, what=what)
    said = (answer if rows.trivial_error is not None else "", picked, beyond_chance_words(rows))
    return [text for text in said if text]


def beyond_chance_words(rows: ClientTable) -> str:
    """Sentences on whether the errors of clients lie further apart than chance puts them; empty where that is not known.

    It is known for test and validation clients that a shared model serves, each row of which is either right or wrong. That is
    so where the trivial answer is a class; private runs have no trivial answer.
    """
    from equipoise.runs.trivial_answer import CLASS

    known = rows.trivial_answer == CLASS and len(set(rows.split)) == 1 and rows.split[0] != "train" and not rows.has_own
    if not known or rows.clients_in_mean is not None or not counts_wrong(rows.error, rows.size):
        return ""
    chance = chance_of_spread((rows.error * rows.size).round(), rows.size)
    if chance is None:
        return ""
    cases = "less than 0.1 %" if chance < 0.001 else f"{100 * chance:.1f} %" if chance < 0.1 else f"{100 * chance:.0f} %"
    found, end = (
        f"The {len(rows):,} clients differ beyond chance",
        "The test does not say which clients differ, nor why: some may have more rows that are hard for every model.",
    )
    if chance >= BEYOND:
        found = f"These rows do not show that the {len(rows):,} clients differ"
        end = "That does not show that they are alike."
    return (
        f"{found}: if each row of every client were equally likely to be wrong, their errors would lie at least this far apart "
        f"in {cases} of cases (a permutation test, which takes the rows to be independent of each other). {end}"
    )


def chance_of_spread(wrong: Tensor, sizes: Tensor) -> float | None:
    """How often the errors of clients lie at least as far apart as here if every row is equally likely to be wrong.

    `wrong` are the wrong rows of each client (R,), `sizes` its rows (R,). The wrong rows are distributed at random over all
    rows (Fisher), and Pearson's chi-square statistic Σ (wrong_i − n_i p)² / n_i is compared; p is the share that is wrong. The
    test is valid for any number of rows, if they are independent of each other, and the model was not trained on them. The
    random numbers are the same in each call. None if there is nothing to compare: one client, all rows right or all wrong, or
    very many clients.

    >>> import torch
    >>> chance_of_spread(torch.tensor([0, 20]), torch.tensor([20, 20])), chance_of_spread(torch.tensor([3]), torch.tensor([9]))
    (0.0005, None)
    """
    counts, rows = (each.double().numpy().round().astype(np.int64) for each in (wrong, sizes))
    total, every = int(counts.sum()), int(rows.sum())
    draws = min(_DRAWS, _CELLS // max(1, len(rows)))
    if len(rows) < 2 or not 0 < total < every or draws < _FEWEST_DRAWS or every >= 10**9:
        return None
    expected = rows * (total / every)

    def spread(values: NDArray[np.int64]) -> NDArray[np.float64]:
        found: NDArray[np.float64] = ((values - expected) ** 2 / rows).sum(-1)
        return found

    drawn = np.random.default_rng(0).multivariate_hypergeometric(rows, total, size=draws, method="marginals")
    here = float(spread(counts))
    further = int((spread(drawn) >= here * (1 - 1e-9)).sum())
    return (1 + further) / (1 + draws)
