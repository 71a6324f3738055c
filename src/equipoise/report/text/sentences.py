"""The report's sentences, as pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from equipoise.report.data.over_seeds import Spread
from equipoise.report.data.paired import LEAST_SEEDS, PairedDifference, end_text
from equipoise.report.text.phrases import count_words, listed, plural

# By name: those of `FIGURES`, "trained" and "seconds"; where clients have their own models also "shared_mean" and so on.
MethodFigures = Mapping[str, Spread]

FEW_CLIENTS = 10  # of these or fewer, the worst 10 % are the one that fares worst
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

    def end(self, value: float) -> str:
        """An end of an interval of changes, with its sign; by more digits if only these show on which side of 0 it is.

        >>> ValueFormat(percent=True, decimals=1).end(-0.0002), ValueFormat(percent=True, decimals=1).end(0.018)
        ('−0.02', '+1.8')
        """
        return end_text(value, lambda each, more: replace(self, decimals=self.decimals + more).signed(each))

    def spread(self, spread: Spread, seeds: int) -> str:
        """Mean ± standard deviation, without the unit."""
        return self.number(spread.mean) + (f" ± {self.number(spread.deviation)}" if seeds > 1 else "")

    def change(self, before: float, after: float) -> float:
        """The difference of two values as they are written, as a reader would subtract; NaN if one is not finite."""
        written = self.number(before), self.number(after)
        return float("nan") if "–" in written else float(written[1]) - float(written[0])


@dataclass(frozen=True)
class JudgedClients:
    """The clients that a report judges methods on. `str()` describes them, e.g. "500 unseen test clients"."""

    count: tuple[int, int]  # fewest and most over the runs
    split: str
    unseen: bool
    weighted: bool  # whether clients count by their examples
    benign: bool = False  # whether malicious clients are left out
    means: bool = False  # whether only means over them are known, under secure sums
    at_least: int = 0  # examples of each; clients with fewer are left out

    def __str__(self) -> str:
        split = {"train": "training"}.get(self.split, self.split)
        kind = f"{'unseen ' if self.unseen else ''}{self.benign_word}{split}"
        large = f" with {self.at_least} examples or more" if self.at_least else ""
        return f"{count_words(self.count)} {kind} {plural('client', self.count[1])}{large}"

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

    From three seeds on their 95 % interval by Student's t lies below 0. Two seeds, for which that says nothing, both have to be
    lower; whoever writes of them says that they are too few.

    >>> clearly_lower([-1.0, -1.1, -0.9]), clearly_lower([-2.6, -0.9, 2.2, -0.3])
    (True, False)
    """
    if len(differences) == LEAST_SEEDS - 1:
        return all(math.isfinite(each) and each < 0 for each in differences)
    return PairedDifference("", tuple(differences)).verdict == "lower"


@dataclass(frozen=True)
class ValidationFigures:
    """What the methods reach on validation data, by which one of them may be chosen: the 90th percentile of the error."""

    percentile_90: Mapping[str, float]  # by method, mean over seeds
    clients: str  # in words, e.g. "100 unseen validation clients"

    def choose(self) -> str:
        """The method with the lowest 90th percentile; the first of those that are equal."""
        return min(self.percentile_90, key=lambda name: _finite_or_inf(self.percentile_90[name]))


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
    validation: ValidationFigures | None = None,
) -> str:
    """What one method does against the first, in one or two sentences.

    With `validation` it is the method that has the lowest 90th percentile there. Without, it is the best on the very clients
    that the sentence is about, and of several methods the sentence says that this is optimistic. `differences` are, by method,
    those of its 90th percentile from that of the first method, in each seed that both have. With several seeds a method is
    said to lower the percentile only if it is `clearly_lower`.
    """
    if judged.means:
        means = ", ".join(f"{scale.value(row['mean'].mean)} under {name}" for name, row in table.items())
        return f"The mean {scale.noun} over {judged}{judged.weighed} is {means}. {MEANS_ONLY}"
    if validation is not None:
        return _validated_sentence(table, judged, scale, differences, validation)
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
        return f"No method clearly lowers {over}: {_unclear(table, scale, best, found)}."
    chosen = _chosen_here(table, scale, best, differences or {})
    change = f"{_change(table, scale, best)}{_seed_words(found, scale)}"
    return f"{best} lowers {over} {change}.{_means(table, scale, best)}{chosen}{_own(table, scale, best)}"


def _chosen_here(
    table: Mapping[str, MethodFigures], scale: ValueFormat, best: str, differences: Mapping[str, Sequence[float]]
) -> str:
    """That a method was chosen on the clients it is judged on, and which others are lower though undecided; empty for one."""
    candidates, reached = list(table)[1:], table[best]["percentile_90"].mean
    if len(candidates) < 2:
        return ""
    lower = [name for name in candidates if table[name]["percentile_90"].mean < reached]
    if not lower:
        return f" It is the best of {len(candidates)} methods on these same clients, and the figure therefore optimistic."
    told = "whose difference is significant" if len(differences[best]) >= LEAST_SEEDS else "that are lower in every seed"
    verdicts = {name: PairedDifference(name, tuple(differences.get(name, ()))).verdict_words for name in lower}
    others = " and ".join(f"{name} at {scale.value(table[name]['percentile_90'].mean)} ({verdicts[name]})" for name in lower)
    return (
        f" Of {len(candidates)} methods it is the lowest of those {told} on these same clients, and the figure therefore "
        f"optimistic; lower still: {others}."
    )


def _validated_sentence(
    table: Mapping[str, MethodFigures],
    judged: JudgedClients,
    scale: ValueFormat,
    differences: Mapping[str, Sequence[float]] | None,
    validation: ValidationFigures,
) -> str:
    """What the method does on the judged clients that has the lowest 90th percentile on validation data."""
    baseline, best = next(iter(table)), validation.choose()
    over, on = f"the 90th percentile of the {scale.noun} over {judged}", f"its 90th percentile on {validation.clients}"
    before, after = table[baseline]["percentile_90"].mean, table[best]["percentile_90"].mean
    if best == baseline:
        found = validation.percentile_90[baseline]
        return (
            f"No method has a lower 90th percentile on {validation.clients} than {baseline} ({scale.value(found)}), so none is "
            f"chosen; {over} is {scale.value(before)} under {baseline}."
        )
    there = [scale.value(validation.percentile_90[name]) for name in (best, baseline)]
    chosen = f"{best}, chosen by {on} ({there[0]} against {there[1]} under {baseline}),"
    found_here = None if differences is None else differences.get(best, ())
    drop = scale.change(before, after)
    if math.isnan(drop) or drop >= 0:
        return f"{chosen} does not lower {over}: {scale.value(before)} under {baseline}, {scale.value(after)} under {best}."
    if found_here is not None and len(found_here) > 1 and not clearly_lower(found_here):
        return f"{chosen} does not clearly lower {over}: {_unclear(table, scale, best, found_here)}."
    change = f"{_change(table, scale, best)}{_seed_words(found_here, scale)}"
    return f"{chosen} lowers {over} {change}.{_means(table, scale, best)}{_own(table, scale, best)}"


def _unclear(table: Mapping[str, MethodFigures], scale: ValueFormat, best: str, found: Sequence[float]) -> str:
    """Both percentiles, and how far their difference varies over seeds."""
    baseline = next(iter(table))
    spread, lower = Spread.of(found), sum(each < 0 for each in found)
    before, after = (scale.value(table[name]["percentile_90"].mean) for name in (baseline, best))
    both = f"{before} under {baseline}, {after} under {best}"
    if PairedDifference(best, tuple(found)).constant:
        return f"{both}; the difference is the same in all {len(found)} seeds, which then do not tell it from chance"
    varies = f"the difference varies by ± {scale.number(spread.deviation)} over {len(found)} seeds (lower in {lower} of them)"
    return f"{both}; {varies}"


def _change(table: Mapping[str, MethodFigures], scale: ValueFormat, best: str) -> str:
    """From which 90th percentile to which, against which method."""
    baseline = next(iter(table))
    both = " to ".join(scale.value(table[name]["percentile_90"].mean) for name in (baseline, best))
    return f"from {both}, against {baseline}"


def _means(table: Mapping[str, MethodFigures], scale: ValueFormat, best: str) -> str:
    """A sentence on both mean errors: apart from the percentiles, since seeds and intervals there do not speak of the means."""
    baseline = next(iter(table))
    means = table[baseline]["mean"].mean, table[best]["mean"].mean
    change = scale.change(*means)
    if change == 0:
        return f" The mean {scale.noun} is the same."
    if math.isnan(change):
        return ""
    return f" The mean {scale.noun} {'rises' if change > 0 else 'falls'} from {' to '.join(map(scale.value, means))}."


def _own(table: Mapping[str, MethodFigures], scale: ValueFormat, best: str) -> str:
    """A sentence on the shared model where clients of the method are served their own; else empty."""
    if "shared_percentile_90" not in table[best]:
        return ""
    shared = scale.value(table[best]["shared_percentile_90"].mean)
    return f" Its clients are served their own models; with its shared model the percentile is {shared}."


def _seed_words(differences: Sequence[float] | None, scale: ValueFormat) -> str:
    """In brackets, how many seeds a gain was seen in, and its 95 % interval; empty if that is not known."""
    if differences is None:
        return ""
    if len(differences) < 2:
        return " (one seed, which does not rule out chance)" if differences else " (but the two have no seed in common)"
    few = ", too few to rule out chance" if len(differences) < LEAST_SEEDS else ""
    between = PairedDifference("", tuple(differences)).interval.text(scale.end)
    interval = "" if between == "–" else f"; 95 % interval of the difference: {between}{' points' * scale.percent}"
    return f" (lower in {sum(each < 0 for each in differences)} of {len(differences)} seeds{few}{interval})"


def trivial_sentence(row: MethodFigures, scale: ValueFormat, answer: str, method: str = "") -> str:
    """That a method is no better than the trivial answer, at the mean, the 90th percentile or both; empty if it is better.

    It is empty also where the trivial answer is not known.
    """
    found = []
    for key, words in (("mean", f"mean {scale.noun}"), ("percentile_90", "90th percentile")):
        if key not in row or f"trivial_{key}" not in row:
            continue
        reached, trivial = row[key].mean, row[f"trivial_{key}"].mean
        if math.isfinite(trivial) and not reached < trivial:
            found.append((words, scale.value(reached), scale.value(trivial)))
    if not found:
        return ""
    names, ours, others = (" and ".join(texts) for texts in zip(*found, strict=True))
    names = names.replace(" and ", " and the ") + (f" of {method}" if method else "")
    verb, those = ("is", "that") if len(found) == 1 else ("are", "those")
    return f"The {names}, {ours}, {verb} no better than {those} of the trivial answer ({answer}), {others}."


def trivial_words(table: Mapping[str, MethodFigures], scale: ValueFormat, answer: str) -> str:
    """One sentence on the methods that are no better at the 90th percentile than the trivial answer; empty if all are better.

    >>> made = {name: {"percentile_90": Spread(reached, 0.0), "trivial_percentile_90": Spread(0.38, 0.0)}
    ...         for name, reached in {"FedAvg": 0.4, "tail": 0.39, "Ditto": 0.2}.items()}
    >>> trivial_words(made, ValueFormat(percent=False, decimals=3), "mean")
    'The 90th percentiles of FedAvg (0.400) and tail (0.390) are no better than that of the trivial answer (mean), 0.380.'
    """
    found = {name: row for name, row in table.items() if _no_better_than_trivial(row)}
    if len(found) < 2:
        alone = (trivial_sentence(row, scale, answer, name if len(table) > 1 else "") for name, row in table.items())
        return " ".join(sentence for sentence in alone if sentence)
    reached = [f"{name} ({scale.value(row['percentile_90'].mean)})" for name, row in found.items()]
    trivial = scale.value(next(iter(found.values()))["trivial_percentile_90"].mean)
    return (
        f"The 90th percentiles of {listed(reached, most=8)} are no better than that of the trivial answer ({answer}), "
        f"{trivial}."
    )


def _no_better_than_trivial(row: MethodFigures) -> bool:
    """Whether the trivial answer is known and the method is not below it at the 90th percentile."""
    trivial = row["trivial_percentile_90"].mean if "trivial_percentile_90" in row else math.nan
    return math.isfinite(trivial) and not row["percentile_90"].mean < trivial


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
    tail = f"the one that fares worst sees {scale.value(worst)}"
    if judged.weighted or judged.count[1] > FEW_CLIENTS:
        tail = f"the worst 10 % see {scale.value(worst)} on average"
    text = (
        f"Half of the {judged}{weighed} see {with_article(scale.noun)} of {scale.value(median)} or less; "
        f"{tail}{_mean_over(seeds)}."
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
