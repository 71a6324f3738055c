"""How the numbers of single clients are written: means over seeds, their intervals, and changes."""

from __future__ import annotations

import math
from collections.abc import Iterable

from equipoise.report.data.by_client import LEAST_SEEDS, ClientErrors
from equipoise.report.data.results_by_method import Study
from equipoise.report.text.phrases import FEW_EXAMPLES, minus


def seeds_words(found: ClientErrors) -> str:
    """A clause on the seeds that an error is the mean of; empty for one seed, and where each seed has its own clients."""
    return f", mean over {len(found.seeds)} seeds" if found.over_seeds else ""


def differing_clients(found: ClientErrors) -> str:
    """A sentence that the data differ from seed to seed; empty if they do not."""
    if found.seed_of_row is None:
        return ""
    return (
        f" The data differ from seed to seed, so that the clients of each of the {len(found.seeds)} seeds count on their own."
    )


def interval_words(found: ClientErrors) -> str:
    """A sentence on the small numbers below a mean over seeds; empty where there is no such mean."""
    if not found.over_seeds:
        return ""
    if len(found.seeds) < LEAST_SEEDS:
        return " Small numbers: the lower and the higher seed; an interval needs three."
    return " Small numbers: the 95 % interval of this mean, by the seeds."


def examples_cell(size: int) -> str:
    """A client's examples, with a mark where they are so few that its error is mostly chance."""
    return f"{size:,}{' *' * (size < FEW_EXAMPLES)}"


def few_words(study: Study, found: ClientErrors, shown: Iterable[int]) -> str:
    """A sentence on the mark of `examples_cell`; empty if none of the clients that are shown, by position, has it."""
    if all(found.sizes[k] >= FEW_EXAMPLES for k in shown):
        return ""
    kind = {"train": "training"}.get(study.judged.split, study.judged.split)
    return f" * fewer than {FEW_EXAMPLES} {kind} examples: this number is mostly chance."


def signed(study: Study, change: float) -> str:
    """A change with its sign, in the unit of the error; a dash if it is not finite."""
    return study.scale.signed(change)


def below(study: Study, low: float, high: float, *, sign: bool = False) -> str:
    """An interval in small numbers below a number; nothing if it is not known."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return ""
    write = (lambda value: signed(study, value)) if sign else study.scale.number
    return f' <small class="below">{minus(write(low))} to {minus(write(high))}</small>'
