"""The report's sentences, as pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from equipoise.report.data.over_seeds import Spread
from equipoise.report.text.phrases import count_words

# mean, percentile_90, worst_10, standard_deviation (with shared_ before where clients have their own models), trained, seconds
Row = Mapping[str, Spread]


@dataclass(frozen=True)
class ValueFormat:
    """How values are written: as percentages or as plain numbers, and with how many decimals."""

    percent: bool
    decimals: int
    noun: str = "error"

    @classmethod
    def fitting(cls, largest: float, *, percent: bool, noun: str = "error") -> ValueFormat:
        """The decimals that suit values up to `largest`: percentages have one (two if all are small), others three digits."""
        if percent:
            return cls(True, 1 if largest >= 0.02 else 2, noun)
        magnitude = math.floor(math.log10(largest)) if math.isfinite(largest) and largest > 0 else 0
        return cls(False, min(8, max(0, 2 - magnitude)), noun)

    def number(self, value: float) -> str:
        """The value without its unit; a dash if it is not finite.

        >>> ValueFormat(percent=True, decimals=1).number(0.3124)
        '31.2'
        """
        if not math.isfinite(value):
            return "–"
        shown = 100 * value if self.percent else value
        return f"{shown:.{self.decimals}f}" if abs(shown) < 1e7 else f"{shown:.3g}"

    def value(self, value: float) -> str:
        """The value with its unit."""
        return self.number(value) + (" %" if self.percent and math.isfinite(value) else "")

    def spread(self, spread: Spread, seeds: int) -> str:
        """Mean ± standard deviation, without the unit."""
        return self.number(spread.mean) + (f" ± {self.number(spread.deviation)}" if seeds > 1 else "")

    def change(self, before: float, after: float) -> float:
        """The difference of the two as they are written, so that a reader who subtracts gets the same."""
        written = self.number(before), self.number(after)
        return float("nan") if "–" in written else float(written[1]) - float(written[0])

    def points(self, change: float) -> str:
        """The size of a change, e.g. '0.3 points'."""
        shown = f"{abs(change):.{self.decimals}f}" if abs(change) < 1e7 else f"{abs(change):.3g}"
        return shown + (" points" if self.percent else "")


@dataclass(frozen=True)
class JudgedClients:
    """The clients a report speaks of."""

    count: tuple[int, int]  # fewest and most over the runs
    split: str
    unseen: bool
    weighted: bool  # by examples
    benign: bool = False  # malicious clients are left out

    def __str__(self) -> str:
        split = {"train": "training"}.get(self.split, self.split)
        kind = f"{'unseen ' if self.unseen else ''}{self.benign_word}{split}"
        return f"{count_words(self.count)} {kind} client{'s' if self.count[1] > 1 else ''}"

    @property
    def benign_word(self) -> str:
        """What stands before "clients" where some others are left out."""
        return "benign " if self.benign else ""


def compared(table: Mapping[str, Row], crowd: JudgedClients, scale: ValueFormat, wins: tuple[int, int] | None = None) -> str:
    """What the best method does against the first, in one sentence. `wins`: in how many of the common seeds it is lower."""
    baseline, *others = table
    best = min(others, key=lambda name: _order(table[name]["percentile_90"].mean))
    before, after = table[baseline]["percentile_90"].mean, table[best]["percentile_90"].mean
    drop = scale.change(before, after)
    over = f"the 90th percentile of the {scale.noun} over {crowd}"
    if math.isnan(drop) or drop >= 0:
        if math.isfinite(before):
            return f"No method lowers {over}: none gets below the {scale.value(before)} of {baseline}."
        if not math.isfinite(after):
            return f"No method has a finite {scale.noun} for nine of ten clients."
        return f"{best} reaches {scale.value(after)} as {over}; that of {baseline} is not finite."
    mean = scale.change(table[baseline]["mean"].mean, table[best]["mean"].mean)
    if mean > 0:
        price = f" at +{scale.points(mean)} of mean {scale.noun}"
    elif mean < 0:
        price = f" and the mean {scale.noun} by {scale.points(mean)}"
    else:
        price = f" at the same mean {scale.noun}" if mean == 0 else ""
    seeds = ""
    if wins and wins[1] == 0:
        seeds = " (but the two have no seed in common)"
    elif wins and wins[1] > 1:
        chance = 2 * wins[0] <= wins[1]
        seeds = f" (lower in {'only ' * chance}{wins[0]} of {wins[1]} seeds{', so perhaps by chance' * chance})"
    own = ""
    if "shared_percentile_90" in table[best]:
        shared = scale.value(table[best]["shared_percentile_90"].mean)
        own = f" Its clients are served their own models; with its shared model the percentile is {shared}."
    return f"{best} lowers {over} from {scale.value(before)} to {scale.value(after)}{price}, against {baseline}{seeds}.{own}"


def alone(
    row: Row, median: float, crowd: JudgedClients, scale: ValueFormat, seeds: int = 1, shared_median: float | None = None
) -> str:
    """Who one method leaves behind, in one sentence; where clients have their own models, how it is without them."""
    mean, worst = row["mean"].mean, row["worst_10"].mean
    if not math.isfinite(mean):
        return f"Some of the {crowd} have {with_article(scale.noun)} that is not finite."
    if crowd.count == (1, 1):
        text = f"The one {str(crowd).removeprefix('1 ')} sees {with_article(scale.noun)} of {scale.value(mean)}{_over(seeds)}."
        return text if shared_median is None else f"{text} With the shared model it is {scale.value(row['shared_mean'].mean)}."
    weighed = ", weighted by their examples," if crowd.weighted else ""
    text = (
        f"Half of the {crowd}{weighed} see {with_article(scale.noun)} of {scale.value(median)} or less; "
        f"the worst 10 % see {scale.value(worst)} on average{_over(seeds)}."
    )
    if shared_median is None:
        return text
    without = (shared_median, row["shared_worst_10"].mean)
    if not all(math.isfinite(v) for v in without):
        return f"{text} With the shared model in place of their own some have {with_article(scale.noun)} that is not finite."
    return f"{text} With the shared model in place of their own these are {' and '.join(map(scale.value, without))}."


def with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _over(seeds: int) -> str:
    return f" (mean over {seeds} seeds)" if seeds > 1 else ""


def _order(value: float) -> float:
    return value if math.isfinite(value) else math.inf
