"""Which site of a federation may be why a run diverges: whose updates were left out, were the longest, or had the largest loss.

Known are these only where nothing protects single sites.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from equipoise.core.words import counted
from equipoise.metrics import mean
from equipoise.types import RoundReport

if TYPE_CHECKING:
    from equipoise.run_record import RunRecord

LOSS, UPDATE = "loss", "update"  # the kinds of rows of RoundReport.stood_out
FAR_LOSS = 10.0  # times the next largest loss from which a loss is far from all others
TOO_LONG = "times as long as the median"  # in the reason why an update was left out
LOST = 1000.0  # times its start (with classes: this number) is a loss that is finite, but no result
NOBODY = "The rounds do not show which site."


def extremes(losses: Mapping[str, float], norms: Mapping[str, float]) -> Iterator[tuple[str, str, float, float]]:
    """The clients with the largest loss and with the longest update of a round, each with its number and the next largest.

    >>> list(extremes({"a": 0.7, "b": 0.4, "c": 26.0}, {"a": 1.0}))
    [('loss', 'c', 26.0, 0.7)]
    """
    for kind, numbers in ((LOSS, losses), (UPDATE, norms)):
        finite = {client: number for client, number in numbers.items() if math.isfinite(number)}
        if len(finite) > 1:
            (_, following), (client, largest) = sorted(finite.items(), key=lambda item: item[1])[-2:]
            yield kind, client, largest, following


def is_far_loss(largest: float, following: float) -> bool:
    """Whether a loss is far above the next largest of its round."""
    return largest > FAR_LOSS * max(following, 0.0) and largest - following > 1


def is_lost(loss: float, first: float, *, classes: bool) -> bool:
    """Whether a loss is so far above the `first` that the run has diverged."""
    return loss > LOST * (1 + (0.0 if classes else first))


def left_out_of(reports: Sequence[RoundReport]) -> Counter[str]:
    """In how many rounds the update of each client was left out, because it was not finite or far too long."""
    counts = Counter(client for report in reports for client in report.rejected)
    counts.update(client for report in reports for client, why in report.missing.items() if TOO_LONG in why)
    return counts


def suspects(reports: Sequence[RoundReport]) -> dict[str, str]:
    """The clients that may be why a run diverges, with what speaks against each.

    That is whose updates were left out most often, and who had the largest loss, or the longest update, in at least half of
    the rounds in which this is known, two at least.
    """
    found: dict[str, list[str]] = {}
    for client, number in left_out_of(reports).most_common(1):
        found.setdefault(client, []).append(f"{counted(number, 'update')} of it left out")
    for kind, words in ((LOSS, "the largest loss"), (UPDATE, "the longest update")):
        leaders = [client for report in reports for each, client, *_ in report.stood_out if each == kind]
        for client, number in Counter(leaders).most_common(1):
            if number >= max(2, len(leaders) / 2):
                found.setdefault(client, []).append(f"{words} in {number} of {counted(len(leaders), 'round')}")
    return {client: ", ".join(reasons) for client, reasons in found.items()}


def blame(reports: Sequence[RoundReport]) -> str:
    """That a site may be why a run of a federation diverged, and which; empty for runs that know of no site."""
    found = suspects(reports)
    if not found and not any(report.stood_out for report in reports):
        return ""
    named = "; ".join(f"{client} ({why})" for client, why in found.items())
    text = "Or one site is the cause, by wrong units, wrong labels or false numbers"
    return f"{text}. Look first at {named}." if named else f"{text}. {NOBODY}"


def of_record(run: RunRecord) -> Iterator[str]:
    """What a page or a card says of a federation's sites that stood out; nothing of runs that protect them."""
    rounds = run.history.rounds
    if run.protects_clients or not any(report.bytes_sent for report in rounds):
        return
    yield from conspicuous(rounds)
    first = next((report.loss for report in rounds if math.isfinite(report.loss)), None)
    trained_on = run.clients.where("train")
    last = mean(trained_on.served_loss, trained_on.size) if len(trained_on) else math.nan
    if first is not None and is_lost(last, first, classes=False):
        text = f"The training loss ended at {last:.3g}: the run diverged. The learning rate may be too high."
        yield f"{text} {blame(rounds)}".strip()


def conspicuous(reports: Sequence[RoundReport]) -> Iterator[str]:
    """Sentences on sites whose updates were left out, and on losses far above all others."""
    for client, number in left_out_of(reports).most_common(5):
        verb = "was" if number == 1 else "were"
        yield f"{counted(number, 'update')} of {client} {verb} left out: not finite, or far longer than the others'."
    far = Counter(
        client
        for report in reports
        for kind, client, largest, following in report.stood_out
        if kind == LOSS and report.cohort > 2 and is_far_loss(largest, following)
    )
    for client, number in far.most_common(5):
        yield (
            f"{client} reported a loss more than {FAR_LOSS:g} times any other in {counted(number, 'round')}: wrong labels or "
            "units, or a false number."
        )
