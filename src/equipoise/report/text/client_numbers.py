"""How the numbers of single clients are written: means over seeds, their intervals, and changes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from equipoise.metrics import LEAST_FOR_SPREAD, counts_wrong, share_interval
from equipoise.report.data.by_client import LEAST_SEEDS, ClientErrors, client_errors, mean_over_seeds
from equipoise.report.data.results_by_method import MethodResults, Numbers, Study
from equipoise.report.text.phrases import listed, minus
from equipoise.small_clients import FEW_EXAMPLES

if TYPE_CHECKING:
    from equipoise.client_table import ClientTable


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
    rest = "" if found.seed_of_row else ", which all seeds share"
    return (
        " Small numbers: the 95 % interval of this mean, by the seeds alone. It does not cover the choice of the client's "
        f"examples{rest}. There is none where all seeds give the same number."
    )


def has_example_intervals(study: Study, found: ClientErrors) -> bool:
    """Whether every error is a share of a client's examples, so that these give it an interval."""
    if not study.scale.percent:
        return False
    known = np.nan_to_num(found.errors, nan=0.0)  # (M, R, S)
    sizes = torch.tensor(found.sizes, dtype=torch.float64)[None, :, None].expand(known.shape)
    return counts_wrong(torch.from_numpy(known), sizes)


def has_number_intervals(study: Study, found: ClientErrors) -> bool:
    """Whether errors are numbers whose spread over a client's examples gives an interval, under some method at least."""
    if study.scale.noun == "loss":
        return False
    return any(_has_spread(study.methods[index]) for index in found.methods)


def _has_spread(method: MethodResults) -> bool:
    """Whether the spread of errors over a client's examples is known in all runs of a method."""
    return all(rows.number_intervals is not None for rows in method.rows)


def number_intervals(study: Study, start: MethodResults | None, method: int) -> tuple[Numbers, Numbers]:
    """Both ends of the interval of each client's error under a method, by the spread over its examples; NaN for none.

    Ends are averaged over seeds. The seeds share the examples, so that the chance of their choice does not average out.
    """

    def end(which: int) -> Numbers:
        def values(rows: ClientTable) -> Tensor:
            ends = rows.number_intervals
            return torch.full_like(rows.error, torch.nan) if ends is None else ends[which]

        return mean_over_seeds(client_errors(study, start, values_of=values).of(method))

    return end(0), end(1)


def error_interval_words(study: Study, found: ClientErrors) -> str:
    """A sentence on the small numbers below the error of a client: by its examples, or else by the seeds."""
    if has_number_intervals(study, found) and not has_example_intervals(study, found):
        ends = ", its ends averaged over seeds" if found.over_seeds else ""
        seeds = ", and not the seeds" if found.over_seeds else ""
        lacking = [study.methods[index].name for index in found.methods if not _has_spread(study.methods[index])]
        none = f" Under {listed(lacking)} there is none: the errors of single examples are not kept." if lacking else ""
        return (
            f" Small numbers: the 95 % interval (Student, corrected for skewness){ends}. It covers the choice of the client's "
            f"examples{seeds}, and is there from {LEAST_FOR_SPREAD} examples on.{none}"
        )
    if not has_example_intervals(study, found):
        return interval_words(found)
    rest = ", and not the seeds" if found.over_seeds else ""
    return (
        " Small numbers: the 95 % interval (Clopper and Pearson). It covers the choice of the client's examples, by their "
        f"number{rest}."
    )


def below_error(study: Study, found: ClientErrors, method: int, at: int, seeds: tuple[Numbers, Numbers] | None) -> str:
    """The interval of a client's error in small numbers: by its examples, or else that of `seeds`."""
    if seeds is not None:
        return below(study, seeds[0][at], seeds[1][at])
    error, size = float(mean_over_seeds(found.of(method))[at]), found.sizes[at]
    if not math.isfinite(error):
        return ""
    between = share_interval(error * size, size)
    return below(study, between.low, between.high)


def examples_cell(size: int) -> str:
    """A client's examples, with a mark where they are so few that much of its error may be chance."""
    return f"{size:,}{' *' * (size < FEW_EXAMPLES)}"


def few_words(study: Study, found: ClientErrors, shown: Iterable[int]) -> str:
    """A sentence on the mark of `examples_cell`; empty if none of the clients that are shown, by position, has it."""
    if all(found.sizes[k] >= FEW_EXAMPLES for k in shown):
        return ""
    kind = {"train": "training"}.get(study.judged.split, study.judged.split)
    return f" * fewer than {FEW_EXAMPLES} {kind} examples: much of this number may be chance."


def signed(study: Study, change: float) -> str:
    """A change with its sign, in the unit of the error; a dash if it is not finite."""
    return study.scale.signed(change)


def below(study: Study, low: float, high: float, *, sign: bool = False) -> str:
    """An interval in small numbers below a number; nothing if it is not known."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return ""
    write = study.scale.end if sign else study.scale.number
    return f' <small class="below">{minus(write(low))} to {minus(write(high))}</small>'
