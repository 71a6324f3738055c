"""The report's sentences, as pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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

    def signed(self, change: float) -> str:
        """A change with its sign, without the unit; a dash if it is not finite."""
        if not math.isfinite(change):
            return "–"
        text = self.number(abs(change))
        return f"{'±' if not float(text) else '−' if change < 0 else '+'}{text}"

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


def clearly_lower(differences: Sequence[float]) -> bool:
    """Whether paired differences over seeds, a method minus the first one, say that the method is lower.

    There are two seeds or more, the mean difference is more than 2 standard errors (s / √n) below 0, and the difference is
    below 0 in all seeds but at most a fifth of them.

    >>> clearly_lower([-1.0, -1.1, -0.9]), clearly_lower([-2.6, -0.9, 2.2, -0.3])
    (True, False)
    """
    count = len(differences)
    if count < 2 or not all(map(math.isfinite, differences)):
        return False
    spread = Spread.of(differences)
    lower = sum(each < 0 for each in differences)
    return spread.mean < -2 * spread.deviation / math.sqrt(count) and lower >= count - count // 5


def best_method(table: Mapping[str, MethodFigures], differences: Mapping[str, Sequence[float]]) -> str:
    """The method after the first with the lowest 90th percentile, of those that are clearly lower than the first if any is."""
    others = list(table)[1:] or list(table)
    clear = [name for name in others if clearly_lower(differences.get(name, ()))]
    return min(clear or others, key=lambda name: _finite_or_inf(table[name]["percentile_90"].mean))


def comparison_sentence(
    table: Mapping[str, MethodFigures],
    judged: JudgedClients,
    scale: ValueFormat,
    differences: Mapping[str, Sequence[float]] | None = None,
) -> str:
    """What the best method does against the first, in one sentence.

    `differences` are, by method, those of its 90th percentile from that of the first method, in each seed that both have.
    With several seeds a method is said to lower the percentile only if it is `clearly_lower`.
    """
    if judged.means:
        means = ", ".join(f"{scale.value(row['mean'].mean)} under {name}" for name, row in table.items())
        return f"The mean {scale.noun} over {judged}{judged.weighed} is {means}. {MEANS_ONLY}"
    baseline, best = next(iter(table)), best_method(table, differences or {})
    before, after = table[baseline]["percentile_90"].mean, table[best]["percentile_90"].mean
    drop = scale.change(before, after)
    over = f"the 90th percentile of the {scale.noun} over {judged}"
    if math.isnan(drop) or drop >= 0:
        if math.isfinite(before):
            return f"No method lowers {over}: none gets below the {scale.value(before)} of {baseline}."
        if not math.isfinite(after):
            return f"No method has a finite {scale.noun} for nine of ten clients."
        return f"{best} reaches {scale.value(after)} as {over}; that of {baseline} is not finite."
    found = None if differences is None else differences.get(best, ())
    if found is not None and len(found) > 1 and not clearly_lower(found):
        spread, lower = Spread.of(found), sum(each < 0 for each in found)
        return (
            f"No method clearly lowers {over}: {scale.value(before)} under {baseline}, {scale.value(after)} under {best}; the "
            f"difference varies by ± {scale.number(spread.deviation)} over {len(found)} seeds (lower in {lower} of them)."
        )
    mean = scale.change(table[baseline]["mean"].mean, table[best]["mean"].mean)
    if mean > 0:
        price = f" at +{scale.points(mean)} of mean {scale.noun}"
    elif mean < 0:
        price = f" and the mean {scale.noun} by {scale.points(mean)}"
    else:
        price = f" at the same mean {scale.noun}" if mean == 0 else ""
    own = ""
    if "shared_percentile_90" in table[best]:
        shared = scale.value(table[best]["shared_percentile_90"].mean)
        own = f" Its clients are served their own models; with its shared model the percentile is {shared}."
    change = f"from {scale.value(before)} to {scale.value(after)}{price}, against {baseline}"
    return f"{best} lowers {over} {change}{_seed_words(found)}.{own}"


def _seed_words(differences: Sequence[float] | None) -> str:
    """In brackets, how many seeds a gain was seen in; empty if that is not known."""
    if differences is None:
        return ""
    if len(differences) < 2:
        return " (one seed)" if differences else " (but the two have no seed in common)"
    return f" (lower in {sum(each < 0 for each in differences)} of {len(differences)} seeds)"


def trivial_sentence(row: MethodFigures, scale: ValueFormat, answer: str, method: str = "") -> str:
    """That a method is no better at the 90th percentile than the trivial answer; empty if it is, or if that is not known."""
    if "trivial_percentile_90" not in row:
        return ""
    reached, trivial = row["percentile_90"].mean, row["trivial_percentile_90"].mean
    if not math.isfinite(trivial) or reached < trivial:
        return ""
    who = f" of {method}" if method else ""
    return (
        f"The 90th percentile{who}, {scale.value(reached)}, is no better than that of the trivial answer ({answer}), "
        f"{scale.value(trivial)}."
    )


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
