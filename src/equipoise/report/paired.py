"""Paired differences: what a method changes against a baseline in each seed, and whether the seeds tell it from chance.

Methods share data, batches and initial weights in a seed, and cohorts if they have the same sampler. What a seed does to both
cancels in their difference, so that the spread of the differences, and not that of each method, says how far a comparison can
be trusted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from equipoise import sampling
from equipoise.core.abilities import read
from equipoise.core.words import joined, table_lines
from equipoise.errors import InvalidParameter, nearest_name
from equipoise.metrics import Interval
from equipoise.report.formats import end_text, listed, signed_text
from equipoise.report.notices import Notice, notice
from equipoise.report.over_seeds import FIGURES, Spread, figures_of
from equipoise.types import SamplerTraits

if TYPE_CHECKING:
    from equipoise.run_record import RunRecord

LEAST_SEEDS = 3  # of a verdict; with two, both agree in half of all comparisons of equal methods
SAME_IN_ALL_SEEDS = 1e-5  # a spread below this share of a difference is the rounding of errors in float32
NO_SPREAD = "no spread between seeds"
Verdict = Literal["lower", "higher", "undecided"]


def student_reach(seeds: int) -> float:
    """How many standard deviations the 95 % interval of a mean over n seeds reaches: t / √n with n − 1 degrees of freedom.

    >>> round(student_reach(4), 4)  # 3.1824 / 2
    1.5912
    """
    from scipy.special import stdtrit

    return float(stdtrit(seeds - 1, 0.975)) / math.sqrt(seeds)


@dataclass(frozen=True)
class PairedDifference:
    """A figure under a method minus that under the baseline, in each seed that both have.

    >>> found = PairedDifference("tail", (-0.02, -0.03, -0.01))
    >>> found.verdict, found.lower, round(found.spread.mean, 6), found.interval.text("{:.3f}".format)
    ('undecided', 3, -0.02, '-0.045 to 0.005')
    >>> PairedDifference("tail", (-0.02, -0.02, -0.02)).verdict_words
    'undecided (no spread between seeds)'
    """

    method: str
    values: tuple[float, ...]  # by seed; below 0 the method is lower

    @property
    def seeds(self) -> int:
        """How many seeds both have."""
        return len(self.values)

    @property
    def spread(self) -> Spread:
        """Mean and standard deviation over seeds; NaN without a seed in common."""
        return Spread.of(self.values) if self.values else Spread(math.nan, math.nan)

    @property
    def lower(self) -> int:
        """In how many seeds the method is lower."""
        return sum(value < 0 for value in self.values)

    @property
    def constant(self) -> bool:
        """Whether several seeds give the same difference, 0 or not, up to rounding: they then say nothing about chance."""
        if self.seeds < 2 or not all(map(math.isfinite, self.values)):
            return False
        return max(self.values) - min(self.values) <= SAME_IN_ALL_SEEDS * max(map(abs, self.values))

    @property
    def interval(self) -> Interval:
        """The 95 % interval of the mean: mean ± t · s / √n with n − 1 degrees of freedom.

        It is unbounded below 3 seeds, and if the difference is the same in all seeds.
        """
        if self.seeds < LEAST_SEEDS or self.constant or not all(map(math.isfinite, self.values)):
            return Interval(-math.inf, math.inf)
        spread = self.spread
        reach = student_reach(self.seeds) * spread.deviation
        return Interval(spread.mean - reach, spread.mean + reach)

    @property
    def verdict(self) -> Verdict:
        """Whether the method is lower or higher; "undecided" if the seeds do not tell."""
        found = self.interval
        return "lower" if found.high < 0 else "higher" if found.low > 0 else "undecided"

    @property
    def verdict_words(self) -> str:
        """The verdict, with the reason if all seeds give the same difference."""
        return f"{self.verdict} ({NO_SPREAD})" if self.constant and self.seeds >= LEAST_SEEDS else self.verdict


def paired(method: str, values: Mapping[int, float], baseline: Mapping[int, float]) -> PairedDifference:
    """The differences of a method's figures, by seed, from those of a baseline, in the seeds that both have."""
    pairs = [(values[seed], baseline[seed]) for seed in baseline if seed in values]
    return PairedDifference(method, tuple(0.0 if _alike(after, before) else after - before for after, before in pairs))


def figures_by_seed(methods: Mapping[str, Sequence[RunRecord]]) -> dict[str, dict[str, dict[int, float]]]:
    """Each of `FIGURES` of the error by method and seed."""
    each = {name: {run.seed: figures_of([run]) for run in runs} for name, runs in methods.items()}
    return {
        figure: {name: {seed: row[figure].mean for seed, row in rows.items()} for name, rows in each.items()}
        for figure in FIGURES
    }


def separated_methods(values: Mapping[str, Mapping[int, float]], *, higher: bool = False) -> frozenset[str]:
    """The methods that paired differences of a figure, by method and seed, tell from all others as the better ones.

    Against each other method the verdict is "lower" ("higher", where more is better).

    >>> a, b, c = {0: 0.1, 1: 0.21, 2: 0.3}, {0: 0.2, 1: 0.3, 2: 0.41}, {0: 0.3, 1: 0.2, 2: 0.3}
    >>> sorted(separated_methods({"a": a, "b": b})), sorted(separated_methods({"a": a, "b": b, "c": c}))
    (['a'], [])
    """
    better: Verdict = "higher" if higher else "lower"
    found = set()
    for name in values:
        verdicts = {paired(name, values[name], values[other]).verdict for other in values if other != name}
        if verdicts == {better}:
            found.add(name)
    return frozenset(found)


def bold_notices(bold: bool, values: Mapping[str, Mapping[int, float]]) -> list[Notice]:
    """What bold cells of a table of methods mean, or that there are none; nothing for one method."""
    if len(values) < 2:
        return []
    shared = len(set.intersection(*(set(seeds) for seeds in values.values())))
    return [notice("bold") if bold else notice("nothing-bold", seeds=shared)]


def _alike(after: float, before: float) -> bool:
    """Whether two figures differ by rounding alone."""
    return abs(after - before) <= 1e-9 * abs(before)


@dataclass(frozen=True)
class Differences:
    """The paired differences of all methods from a baseline. `str()` is a table, `differences["tail"]` one of its rows.

    `Comparison.differences` gives it. Source: ours.
    """

    baseline: str
    figure: str  # e.g. "90th percentile"
    what: str  # the column and the clients
    rows: tuple[PairedDifference, ...]
    notices: tuple[Notice, ...] = ()  # what the intervals cover, and which methods do not share cohorts

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[PairedDifference]:
        return iter(self.rows)

    def __getitem__(self, method: str) -> PairedDifference:
        found = {row.method: row for row in self.rows}
        if method not in found:
            fix = "This is the baseline." if method == self.baseline else nearest_name(method, found)
            raise InvalidParameter("method", f"must be one of {', '.join(found)}", method, fix)
        return found[method]

    def lines(self, digits: int = 3, factor: float = 1.0, others: Sequence[Differences] = ()) -> list[str]:
        """The rows as text: mean ± standard deviation of the differences, their 95 % interval, seeds, and the verdict.

        `others` are those of other figures, whose verdicts stand in further columns.
        """
        heads = ["method", "difference", "95 % interval", "lower in", "verdict", *(other.figure for other in others)]
        verdicts = zip(*([row.verdict_words for row in each] for each in (self, *others)), strict=True)
        rows = [
            [row.method, difference_text(row, digits, factor), interval_text(row, digits, factor), lower_text(row), *each]
            for row, each in zip(self.rows, verdicts, strict=True)
        ]
        title = f"Paired differences from {self.baseline}, seed by seed: {self.figure} of the {self.what}"
        said = [*self.notices, *uncorrected(len(self.rows), 1 + len(others))]
        return [title, *table_lines([heads, *rows]), str(notice("interval-rule")), *map(str, said)]

    def __str__(self) -> str:
        return joined(self.lines())

    __repr__ = __str__


def cohort_notices(methods: Mapping[str, Sequence[RunRecord]], baseline: str) -> list[Notice]:
    """That some methods draw cohorts in another way than the baseline, as private ones do; nothing if all draw alike."""
    drawn = {name: _drawn(runs[0]) for name, runs in methods.items() if runs}
    others = [name for name, how in drawn.items() if how != drawn.get(baseline, how)]
    return [notice("other-cohorts", first=baseline, methods=listed(others))] if others else []


def _drawn(run: RunRecord) -> tuple[str, int, str]:
    """How a run draws cohorts, for comparison: its sampler as it shows itself, the clients per round, whose secret."""
    usual = sampling.Uniform() if run.algorithm.privacy is None else sampling.Poisson()
    sampler = usual if run.algorithm.sampler is None else run.algorithm.sampler
    plain = type(sampler).__repr__ is object.__repr__
    secret = run.epsilon is not None and not run.epsilon.nominal and read(SamplerTraits, sampler).separation is None
    return type(sampler).__qualname__ if plain else repr(sampler), run.clients_per_round, run.name if secret else ""


def uncorrected(methods: int, figures: int = 1) -> list[Notice]:
    """That intervals are not corrected for looking at several methods and figures; nothing for one of each."""
    return [notice("uncorrected", methods=methods, figures=figures)] if methods * figures > 1 else []


def judged_on_validation(methods: Mapping[str, Sequence[RunRecord]]) -> dict[str, list[RunRecord]] | None:
    """The same runs judged on validation data; None unless they are judged on test clients, and all have both."""
    runs = [run for each in methods.values() for run in each]
    if any(run.judged_on != "test" or "validation" not in run.clients.split for run in runs):
        return None
    found = {name: [run.judged_by("validation") for run in each] for name, each in methods.items()}
    known = (run.clients.where("validation").clients_in_mean is None for each in found.values() for run in each)
    return found if all(known) else None


def difference_text(row: PairedDifference, digits: int = 3, factor: float = 1.0) -> str:
    """Mean ± standard deviation of differences, with the sign."""
    spread = row.spread
    text = signed_text(spread.mean, digits, factor)
    return text + (f" ± {factor * spread.deviation:.{digits}f}" if row.seeds > 1 and text != "–" else "")


def interval_text(row: PairedDifference, digits: int = 3, factor: float = 1.0) -> str:
    """The 95 % interval, with signs; a dash where there are too few seeds.

    >>> interval_text(PairedDifference("a", (-0.0301, -0.0299, -0.0101)), 1)
    '−0.1 to +0.01'
    """
    return row.interval.text(lambda value: end_text(value, lambda each, more: signed_text(each, digits + more, factor)))


def lower_text(row: PairedDifference) -> str:
    """In how many seeds the method is lower."""
    return f"{row.lower} of {row.seeds}"
