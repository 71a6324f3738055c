"""What is said beside numbers: entries of `notices.toml`, and which of them some runs call for.

A notice is a code and fields; its text is made where it is shown. Here is no text, and nothing that depends on a page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from equipoise.core.error_names import SQUARED
from equipoise.core.plain_text import parse_toml
from equipoise.metrics import counts_wrong
from equipoise.report import over_seeds
from equipoise.report.formats import SPLITS, ValueFormat, capital, count_words, listed
from equipoise.report.over_seeds import FIGURES, MEAN

if TYPE_CHECKING:
    from torch import Tensor

    from equipoise.client_table import ClientTable
    from equipoise.observers import EvaluationPoint
    from equipoise.report.over_seeds import Spread
    from equipoise.run_record import RunRecord

FEW_EXAMPLES = 30  # on fewer, chance moves a client's error by 10 points and more
TEN_CLIENTS = 10  # of n < 10 clients, the n − 1 best are less than 90 % of the clients
FAR_WORSE = 2  # times the mean error of the others: clients left out that err more are spoken of
MOST_NAMED = 8  # clients that a notice names
BACKDOOR = "backdoor_success"  # the column of the rate at which a backdoor works
BEYOND = 0.05  # clients differ beyond chance if their errors lie this far apart by chance in fewer cases
_DRAWS, _FEWEST_DRAWS, _CELLS = 1999, 199, 2_000_000  # random distributions of wrong rows; draws × clients, at most


@lru_cache(maxsize=1)
def entries() -> dict[str, dict[str, str]]:
    """The table of notices, by code."""
    return parse_toml(Path(__file__).with_name("notices.toml"))


@dataclass(frozen=True)
class Notice:
    """An entry of the table with its fields. `str()` is the text with the cure.

    >>> print(Notice("left-out", {"kind": "Test clients", "limit": 30, "few": 3, "all": 40}))
    Test clients with fewer than 30 examples, left out: 3 of 40.
    """

    code: str
    fields: Mapping[str, object] = field(default_factory=dict)

    @property
    def level(self) -> str:
        """How much it matters: "info", "notice" or "warning"."""
        return entries()[self.code].get("level", "info")

    @property
    def title(self) -> str:
        """The title of a figure, or the word of a glossary."""
        return entries()[self.code]["title"].format_map(self.fields)

    @property
    def text(self) -> str:
        """The text without the cure, for a reader who can do nothing."""
        return entries()[self.code]["text"].format_map(self.fields)

    def __str__(self) -> str:
        cure = entries()[self.code].get("cure", "")
        return f"{self.text} {cure.format_map(self.fields)}".rstrip()


def notice(code: str, /, **fields: object) -> Notice:
    """The notice of a code."""
    return Notice(code, fields)


def said(notices: Iterable[Notice]) -> str:
    """Notices as one text."""
    return " ".join(map(str, notices))


def about_runs(methods: Mapping[str, Sequence[RunRecord]], *, sizes: bool = True, named: bool = False) -> list[Notice]:
    """What a reader of these runs' figures must know: whose models they judge, and which clients they leave out."""
    runs = [run for each in methods.values() for run in each]
    own = [name for name, each in methods.items() if all(run.clients.where(run.judged_on).has_own for run in each)]
    lacking = [name for name, each in methods.items() if over_seeds.without_own_models(each)]
    found = [notice("own-models", methods=listed(own))] if own else []
    found += [notice("no-own-models", methods=listed(lacking))] if lacking else []
    for name, each in methods.items():
        found += own_worse_notices(name, [run.clients for run in each], each[0].judged_on)
    if untrained := [name for name in dict.fromkeys((*own, *lacking)) if over_seeds.has_untrained_layers(methods[name])]:
        found.append(notice("untrained-layers", methods=listed(untrained)))
    found += _attack_notices(methods, runs)
    rejected = {name: sum(len(r.rejected) for run in each for r in run.history.rounds) for name, each in methods.items()}
    if any(rejected.values()):
        found.append(notice("rejected", each=listed([f"{name} {count:,}" for name, count in rejected.items() if count])))
    absent = [
        each for run in runs for each in absent_notices(run.clients, run.judged_on, named=named or not run.protects_clients)
    ]
    found += [each for k, each in enumerate(absent) if each not in absent[:k]]
    if len({tuple(sorted(run.clients.not_evaluated.get(run.judged_on, ()))) for run in runs}) > 1:
        found.append(notice("different-clients"))
    return [*found, *(size_notices(runs) if sizes else ())]


def own_worse_notices(method: str, tables: Sequence[ClientTable], split: str) -> list[Notice]:
    """How many clients have an own model that is worse for them than the shared one, over seeds; none if no client has."""
    counts = [over_seeds.count_worse_own_models(table, split) for table in tables]
    if not any(worse for worse, _ in counts):
        return []
    worse, known = (count_words(numbers) for numbers in zip(*counts, strict=True))
    return [notice("own-worse", method=method, worse=worse, known=known)]


def _attack_notices(methods: Mapping[str, Sequence[RunRecord]], runs: Sequence[RunRecord]) -> list[Notice]:
    """How many training clients are malicious, and the mean error of malicious clients; none without an attack."""
    bad = [len(over_seeds.malicious_clients(run)) for run in runs]
    if not any(bad):
        return []
    found = [notice("attack", bad=count_words(bad), all=count_words(map(over_seeds.training_clients, runs)))]
    factor, digits, unit = (100.0, 1, " %") if over_seeds.in_percent(runs) else (1.0, 3, "")
    errors = {name: over_seeds.malicious_error(each) for name, each in methods.items()}
    each = [f"{name} {factor * error.mean:.{digits}f}{unit}" for name, error in errors.items() if error is not None]
    return [*found, notice("malicious-error", each=listed(each))] if each else found


def size_notices(runs: Sequence[RunRecord]) -> list[Notice]:
    """Whether few clients are judged, and whether these have few examples, or are left out; none of means alone."""
    split = runs[0].judged_on
    tables = [run.clients.where(run.judged_on).benign for run in runs]
    if any(rows.clients_in_mean is not None for rows in tables):
        return []
    least = max(run.at_least for run in runs)
    limit = least or FEW_EXAMPLES
    counts = [
        (run.left_out.get(run.judged_on, 0), len(rows) + run.left_out.get(run.judged_on, 0))
        if least
        else (int((rows.size < limit).sum()), len(rows))
        for run, rows in zip(runs, tables, strict=True)
    ]
    few, every = (count_words(each) for each in zip(*counts, strict=True))
    found = []
    if least or any(small for small, _ in counts):
        kind = capital(f"{SPLITS.get(split, split)} clients")
        found.append(notice("left-out" if least else "small-clients", kind=kind, limit=limit, few=few, all=every))
    found += _worse_left_out(runs, tables)
    fewest = [len(rows) for rows in tables if len(rows) < TEN_CLIENTS]
    if fewest and split != "train":  # training clients count by their examples
        found.append(notice("few-clients", count=count_words(fewest)))
    return found


def _worse_left_out(runs: Sequence[RunRecord], tables: Sequence[ClientTable]) -> list[Notice]:
    """That those left out have more than twice the mean error of the others, both averaged over runs."""
    pairs = [
        (run.left_out_error[run.judged_on], float(rows.served_error.double().mean()))
        for run, rows in zip(runs, tables, strict=True)
        if run.judged_on in run.left_out_error
    ]
    theirs, others = (sum(values) / len(pairs) for values in zip(*pairs, strict=True)) if pairs else (math.nan, 0.0)
    if not (math.isfinite(theirs) and theirs > FAR_WORSE * others):
        return []
    scale = ValueFormat.fitting(theirs, percent=over_seeds.in_percent(runs) and theirs <= 1)
    noun = "loss" if runs[0].error_is_loss else "error"
    return [notice("left-out-worse", noun=noun, theirs=scale.value(theirs), others=scale.value(others))]


def absent_notices(table: ClientTable, split: str, *, named: bool = True) -> list[Notice]:
    """The clients that figures of a split leave out, because they were not evaluated; without names unless `named`."""
    absent = table.not_evaluated.get(split, {})
    if not absent or split not in table.split:
        return []
    who = list_reasons(absent) if named else "not named"
    return [notice("not-evaluated", split=SPLITS.get(split, split), count=len(absent),
                   all=len(absent) + count_evaluated(table, split), who=who)]  # fmt: skip


def count_evaluated(table: ClientTable, split: str) -> int:
    """How many clients the figures of a split are over."""
    rows = table.where(split)
    return len(rows) if rows.clients_in_mean is None else rows.clients_in_mean


def list_reasons(absent: Mapping[str, str]) -> str:
    """Clients and why each was not evaluated.

    >>> list_reasons({"a": "is not connected", "b": "is not connected"})
    'a (is not connected), b (is not connected)'
    """
    return listed([f"{client} ({why})" for client, why in absent.items()], MOST_NAMED)


def changing_clients(points: Sequence[EvaluationPoint], split: str, *, named: bool = True) -> list[Notice]:
    """That evaluations during a run are over different clients of a split; none if all are over the same."""
    missed = {point.round: tuple(sorted(point.not_evaluated.get(split, ()))) for point in points}
    if len(set(missed.values())) < 2:
        return []
    rounds = [str(index) for index, clients in missed.items() if clients]
    who = listed(sorted({client for clients in missed.values() for client in clients}), MOST_NAMED) if named else "not named"
    return [notice("changing-clients", rounds=listed(rounds, MOST_NAMED), split=SPLITS.get(split, split), who=who)]


def skipped_rounds(run: RunRecord) -> list[Notice]:
    """Which rounds of a federation were skipped, and why; none if none was."""
    reasons: dict[str, list[str]] = {}
    for report in run.history.rounds:
        if report.skipped:
            reasons.setdefault(report.skipped, []).append(str(report.round + 1))
    each = "; ".join(f"rounds {listed(rounds)} ({why})" for why, rounds in reasons.items())
    return [notice("skipped", each=each)] if reasons else []


def trivial_notices(
    table: Mapping[str, Mapping[str, Spread]], answer: str, error_name: str, scale: ValueFormat
) -> Iterator[Notice]:
    """The methods that are not better than the trivial answer, at the mean or the 90th percentile; none if it is not known."""
    if answer == MEAN and error_name not in ("", SQUARED):
        yield notice("trivial-doubt")
    for figure in ("mean", "percentile_90"):
        known = {name: row for name, row in table.items() if f"trivial_{figure}" in row}
        values = {name: row[f"trivial_{figure}"].mean for name, row in known.items()}
        behind = [name for name, value in values.items() if math.isfinite(value) and not known[name][figure].mean < value]
        if behind:
            each = listed([f"{name} {scale.value(known[name][figure].mean)}" for name in behind], MOST_NAMED)
            value = scale.value(values[behind[0]])
            yield notice("trivial", answer=answer, figure=FIGURES[figure], value=value, methods=each)


def covered(runs: Sequence[RunRecord]) -> Notice:
    """What a spread over seeds covers, and what it leaves out."""
    if not over_seeds.seeds_split_again(runs):
        return notice("covers-training")
    return notice("covers-split" if over_seeds.one_table(runs) else "covers-data")


def metric_notices(missing: Mapping[str, int], higher: Sequence[str] = ()) -> Iterator[Notice]:
    """Of which metrics more is better, how many clients have no value, and what the rate of a backdoor says."""
    if higher:
        yield notice("metric-direction", names=listed(higher))
    for name, count in missing.items():
        if count:
            yield notice("metric-missing", metric=name, count=count)
    if BACKDOOR in missing:
        yield notice("backdoor")


def picked_notices(shown: int, rows: ClientTable) -> list[Notice]:
    """Below the `shown` worst of `rows`: that they were picked, and what chance does."""
    found = [notice("picked", shown=shown, all=f"{len(rows):,}")] if shown < len(rows) else []
    return found + chance_notices(rows)


def chance_notices(rows: ClientTable) -> list[Notice]:
    """Whether the errors of clients lie further apart than chance puts them; none where that is not known.

    It is known for test and validation clients that a shared model serves, each row of which is either right or wrong. That is
    so where the trivial answer is a class; private runs have no trivial answer.
    """
    known = rows.trivial_answer == "most frequent class" and len(set(rows.split)) == 1 and rows.split[0] != "train"
    if not known or rows.has_own or rows.clients_in_mean is not None or not counts_wrong(rows.error, rows.size):
        return []
    chance = chance_of_spread((rows.error * rows.size).round(), rows.size)
    if chance is None:
        return []
    cases = "less than 0.1 %" if chance < 0.001 else f"{100 * chance:.1f} %"
    verdict = "beyond chance" if chance < BEYOND else "not shown to differ"
    return [notice("chance-of-spread", count=f"{len(rows):,}", cases=cases, verdict=verdict)]


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
