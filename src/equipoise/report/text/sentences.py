"""The report's sentences, as pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from equipoise.report.data.over_seeds import Spread
from equipoise.report.text.phrases import count_words, plural

# By name: those of `FIGURES`, "trained" and "seconds"; where clients have their own models also "shared_mean" and so on.
MethodFigures = Mapping[str, Spread]

MEANS_ONLY = "Under secure sums nothing else is known of how single clients fare."


@dataclass(frozen=True)
class ValueFormat:
    """How errors are written: in percent or as plain numbers, with how many decimals, and under which noun."""

    percent: bool
    decimals: int
    noun: str = "error"

    @classmethod
    def fitting(cls, largest: float, *, percent: bool, noun: str = "error") -> ValueFormat:
        """The format for values up to `largest`: one decimal for percent (two if all are small), else three digits."""
        if percent:
            return cls(True, 1 if largest >= 0.02 else 2, noun)
        magnitude = math.floor(math.log10(largest)) if math.isfinite(largest) and largest > 0 else 0
        return cls(False, min(8, max(0, 2 - magnitude)), noun)

    @property
    def unit(self) -> str:
        """The unit after a number, with a space; nothing for plain numbers."""
        return " %" if self.percent else ""

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
        return self.number(value) + self.unit * math.isfinite(value)

    def spread(self, spread: Spread, seeds: int) -> str:
        """Mean ± standard deviation, without the unit."""
        return self.number(spread.mean) + (f" ± {self.number(spread.deviation)}" if seeds > 1 else "")

    def change(self, before: float, after: float) -> float:
        """The difference of two values as they are written, as a reader would subtract; NaN if one is not finite."""
        written = self.number(before), self.number(after)
        return float("nan") if "–" in written else float(written[1]) - float(written[0])

    def points(self, change: float) -> str:
        """The size of a change, e.g. '0.3 points'."""
        shown = f"{abs(change):.{self.decimals}f}" if abs(change) < 1e7 else f"{abs(change):.3g}"
        return shown + (" points" if self.percent else "")


@dataclass(frozen=True)
class JudgedClients:
    """The clients that a report judges methods on. `str()` describes them, e.g. "500 unseen test clients"."""

    count: tuple[int, int]  # fewest and most over the runs
    split: str
    unseen: bool
    weighted: bool  # whether clients count by their examples
    benign: bool = False  # whether malicious clients are left out
    means: bool = False  # whether only means over them are known, under secure sums

    def __str__(self) -> str:
        split = {"train": "training"}.get(self.split, self.split)
        kind = f"{'unseen ' if self.unseen else ''}{self.benign_word}{split}"
        return f"{count_words(self.count)} {kind} {plural('client', self.count[1])}"

    @property
    def weighed(self) -> str:
        """A clause if clients count by their examples, else nothing."""
        return ", weighted by their examples" if self.weighted else ""

    @property
    def benign_word(self) -> str:
        """The word "benign" with a space if malicious clients are left out, else nothing."""
        return "benign " if self.benign else ""


def comparison_sentence(
    table: Mapping[str, MethodFigures], judged: JudgedClients, scale: ValueFormat, wins: tuple[int, int] | None = None
) -> str:
    """What the best method does against the first, in one sentence.

    `wins` are the number of common seeds in which its 90th percentile is lower, and the number of common seeds.
    """
    baseline, *others = table
    if judged.means:
        found = ", ".join(f"{scale.value(row['mean'].mean)} under {name}" for name, row in table.items())
        return f"The mean {scale.noun} over {judged}{judged.weighed} is {found}. {MEANS_ONLY}"
    best = min(others, key=lambda name: _finite_or_inf(table[name]["percentile_90"].mean))
    before, after = table[baseline]["percentile_90"].mean, table[best]["percentile_90"].mean
    drop = scale.change(before, after)
    over = f"the 90th percentile of the {scale.noun} over {judged}"
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


def method_sentence(
    row: MethodFigures,
    median: float,
    judged: JudgedClients,
    scale: ValueFormat,
    seeds: int = 1,
    shared_median: float | None = None,
) -> str:
    """Whom one method leaves behind, in one sentence, and in another how the shared model does where clients have their own."""
    mean, worst = row["mean"].mean, row["worst_10"].mean
    if judged.means and not math.isfinite(mean):
        return f"The mean {scale.noun} of the {judged.split} clients is not known."
    if not math.isfinite(mean):
        return f"Some of the {judged} have {with_article(scale.noun)} that is not finite."
    if judged.means:
        return f"The mean {scale.noun} over {judged}{judged.weighed} is {scale.value(mean)}{_mean_over(seeds)}. {MEANS_ONLY}"
    if judged.count == (1, 1):
        value = f"{scale.value(mean)}{_mean_over(seeds)}"
        text = f"The one {str(judged).removeprefix('1 ')} sees {with_article(scale.noun)} of {value}."
        return text if shared_median is None else f"{text} With the shared model it is {scale.value(row['shared_mean'].mean)}."
    weighed = f"{judged.weighed}," if judged.weighed else ""
    text = (
        f"Half of the {judged}{weighed} see {with_article(scale.noun)} of {scale.value(median)} or less; "
        f"the worst 10 % see {scale.value(worst)} on average{_mean_over(seeds)}."
    )
    if shared_median is None:
        return text
    without = (shared_median, row["shared_worst_10"].mean)
    if not all(math.isfinite(v) for v in without):
        return f"{text} With the shared model in place of their own some have {with_article(scale.noun)} that is not finite."
    return f"{text} With the shared model in place of their own these are {' and '.join(map(scale.value, without))}."


def with_article(noun: str) -> str:
    """The noun after "a" or "an"."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _mean_over(seeds: int) -> str:
    return f" (mean over {seeds} seeds)" if seeds > 1 else ""


def _finite_or_inf(value: float) -> float:
    return value if math.isfinite(value) else math.inf
