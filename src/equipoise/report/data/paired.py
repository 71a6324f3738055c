"""Paired differences: what a method changes against a baseline in each seed, and whether the seeds tell it from chance.

Methods share data, batches and initial weights in a seed, and cohorts if they have the same sampler. What a seed does to both
cancels in their difference, so that the spread of the differences, and not that of each method, says how far a comparison can
be trusted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from equipoise import sampling
from equipoise.core.abilities import read
from equipoise.core.words import cells, joined, padded, table_lines
from equipoise.errors import InvalidParameter, nearest_name
from equipoise.metrics import Interval
from equipoise.report.data.over_seeds import FIGURES, Spread, figures_of
from equipoise.types import SamplerTraits

if TYPE_CHECKING:
    from equipoise.run_record import RunRecord

LEAST_SEEDS = 3  # of a verdict; with two, both agree in half of all comparisons of equal methods
CONFIDENCE = 0.95
SAME_IN_ALL_SEEDS = 1e-5  # a spread below this share of a difference is the rounding of errors in float32
RULE = (
    "A difference counts if there are 3 seeds or more and the 95 % interval of the paired differences (Student's t, which "
    "takes them to be roughly normal) does not contain 0; otherwise it is undecided. So is one that is the same in all seeds: "
    "without a spread between them, seeds do not tell it from chance."
)
SIGN_DIGITS = 4  # more, at most, by which an end of an interval close to 0 shows its sign
NO_SPREAD = "no spread between seeds"
Verdict = Literal["lower", "higher", "undecided"]


def student_quantile(confidence: float, freedom: int) -> float:
    """The t with P(|T| ≤ t) = confidence, for Student's distribution with a whole number of degrees of freedom.

    By bisection of the finite sums of Abramowitz and Stegun 1964, 26.7.3 and 26.7.4, so that it needs numpy and torch alone.

    >>> [round(student_quantile(0.95, freedom), 3) for freedom in (1, 2, 4)]
    [12.706, 4.303, 2.776]
    """
    low, high = 0.0, 1.0
    while _central_probability(high, freedom) < confidence:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _central_probability(middle, freedom) < confidence else (low, middle)
    return high


def _central_probability(t: float, freedom: int) -> float:
    """P(|T| ≤ t)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, sine, odd = math.cos(angle), math.sin(angle), freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for step in range(1 + odd, freedom, 2):  # the powers of the cosine up to freedom − 2
        total += term
        term *= cosine**2 * step / (step + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


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
        reach = student_quantile(CONFIDENCE, self.seeds - 1) * spread.deviation / math.sqrt(self.seeds)
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

    def words(self, baseline: str, write: Callable[[float], str]) -> str:
        """The difference in words, its size written by `write`, e.g. "tail is lower than FedAvg by 0.020 ± 0.010".

        >>> PairedDifference("tail", (-0.02, -0.03, -0.01)).words("FedAvg", "{:.3f}".format)
        'tail is lower than FedAvg by 0.020 ± 0.010 (lower in 3 of 3 seeds)'
        """
        if self.values and not any(self.values):
            return f"{self.method} equals {baseline} in {_seed_count(self.seeds)}"
        spread = self.spread
        size = write(abs(spread.mean)) + (f" ± {write(spread.deviation)}" if self.seeds > 1 else "")
        word = "lower" if spread.mean < 0 else "higher"
        count = self.lower if word == "lower" else sum(value > 0 for value in self.values)
        agreeing = f"{word} in {count} of {self.seeds} seeds" if self.seeds > 1 else "one seed"
        return f"{self.method} is {word} than {baseline} by {size} ({agreeing})"


def _seed_count(seeds: int) -> str:
    return f"all {seeds} seeds" if seeds > 1 else "the only seed"


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


def bold_words(bold: bool, values: Mapping[str, Mapping[int, float]]) -> str:
    """What bold cells of a table of methods mean, or why there are none; empty for one method.

    >>> bold_words(False, {"a": {0: 0.1}, "b": {0: 0.2}})
    'Nothing is bold: with one seed, methods cannot be told apart; that takes 3 or more.'
    """
    if len(values) < 2:
        return ""
    if bold:
        return "Bold: better than every other method; the 95 % intervals of the paired differences do not contain 0."
    shared = len(set.intersection(*(set(seeds) for seeds in values.values())))
    if shared < LEAST_SEEDS:
        few = {0: "no common seed", 1: "one seed"}.get(shared, f"{shared} seeds")
        return f"Nothing is bold: with {few}, methods cannot be told apart; that takes {LEAST_SEEDS} or more."
    return "Nothing is bold: no 95 % intervals of paired differences separate one method from every other."


def _alike(after: float, before: float) -> bool:
    """Whether two figures differ by rounding alone."""
    return abs(after - before) <= 1e-9 * abs(before)


@dataclass(frozen=True)
class Differences:
    """The paired differences of all methods from a baseline. `str()` is a table, `differences["tail"]` one of its rows.

    `Comparison.differences` gives it. Source: ours.
    """

    baseline: str
    figure: str  # in words, e.g. "90th percentile"
    what: str  # the column and the clients in words
    rows: tuple[PairedDifference, ...]
    covers: str = ""  # what the intervals cover, in words
    cohorts: str = ""  # which methods do not share the cohorts of the baseline, in a sentence

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

        def texts(row: PairedDifference) -> str:
            shown, between = difference_text(row, digits, factor), interval_text(row, digits, factor)
            return f"{shown:>18}  {between:<19}{lower_words(row):<16}"

        width = max(map(cells, ("method", *(row.method for row in self.rows))))
        heads = f"{'method':<{width}}{'difference':>18}  {'95 % interval':<19}{'seeds':<16}"
        columns = [["verdict", *(row.verdict_words for row in self.rows)]]
        columns += [[other.figure, *(row.verdict_words for row in other)] for other in others]
        left = [heads, *(f"{padded(row.method, width)}{texts(row)}" for row in self.rows)]
        return [f"{shown}{words}" for shown, words in zip(left, table_lines([*zip(*columns, strict=True)]), strict=True)]

    def short(self, digits: int = 3, factor: float = 1.0, others: Sequence[Differences] = ()) -> list[str]:
        """The rows under a short title and above a line on what the interval covers, for below a table of methods.

        `others` are those of other figures: their verdicts stand at the right.
        """
        seeds = min((row.seeds for row in self.rows), default=0)
        few = f" An interval needs {LEAST_SEEDS} seeds." if seeds < LEAST_SEEDS else ""
        title = f"Paired differences of the {self.figure} from {self.baseline}, seed by seed (Student's t).{few}"
        if others:
            title += f" At the right: verdicts by the same rule on the {' and the '.join(other.figure for other in others)}."
        said = self._covered(1 + len(others))
        return [title, *self.lines(digits, factor, others), *([said] if said else [])]

    def __str__(self) -> str:
        seeds = max((row.seeds for row in self.rows), default=0)
        over = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
        title = f"Paired differences from {self.baseline}: {self.figure} of the {self.what}, seed by seed, {over}"
        return joined([title, *self.lines(), " ".join(filter(None, (RULE, self._covered())))])

    def _covered(self, figures: int = 1) -> str:
        """What the intervals cover, that they are not corrected for several comparisons, and which cohorts differ."""
        covered = f"The interval covers {self.covers}." if self.covers else ""
        return " ".join(filter(None, (covered, uncorrected_words(len(self.rows), figures), self.cohorts)))

    __repr__ = __str__


def cohort_words(methods: Mapping[str, Sequence[RunRecord]], baseline: str) -> str:
    """That some methods draw cohorts in another way than the baseline, as private ones do; empty if all draw alike."""
    drawn = {name: _drawn(runs[0]) for name, runs in methods.items() if runs}
    others = [name for name, how in drawn.items() if how != drawn.get(baseline, how)]
    if not others:
        return ""
    one = len(others) == 1
    named = " and ".join(filter(None, [", ".join(others[:-1]), others[-1]]))
    return (
        f"{named} {'draws' if one else 'draw'} cohorts in another way "
        f"than {baseline}: {'this difference is' if one else 'these differences are'} paired by data, batches and initial "
        "weights, not by cohorts."
    )


def _drawn(run: RunRecord) -> tuple[str, int, str]:
    """How a run draws cohorts, for comparison: its sampler as it shows itself, the clients per round, whose secret."""
    usual = sampling.Uniform() if run.algorithm.privacy is None else sampling.Poisson()
    sampler = usual if run.algorithm.sampler is None else run.algorithm.sampler
    plain = type(sampler).__repr__ is object.__repr__
    secret = run.epsilon is not None and not run.epsilon.nominal and read(SamplerTraits, sampler).separation is None
    return type(sampler).__qualname__ if plain else repr(sampler), run.clients_per_round, run.name if secret else ""


def uncorrected_words(methods: int, figures: int = 1) -> str:
    """That intervals are not corrected for looking at several methods and figures; empty for one of each.

    >>> uncorrected_words(3), uncorrected_words(2, 3)
    ('It is not corrected for looking at 3 methods.', 'It is not corrected for looking at 2 methods and 3 figures.')
    >>> uncorrected_words(1, 3), uncorrected_words(1)
    ('It is not corrected for looking at 3 figures.', '')
    """
    several = [f"{count} {noun}" for count, noun in ((methods, "methods"), (figures, "figures")) if count > 1]
    return f"It is not corrected for looking at {' and '.join(several)}." if several else ""


def signed_text(value: float, digits: int = 3, factor: float = 1.0) -> str:
    """A difference with its sign, and no sign for 0.

    >>> signed_text(-0.0201), signed_text(0.0004), signed_text(0.5, 1, 100)
    ('−0.020', '0.000', '+50.0')
    """
    if not math.isfinite(value):
        return "–"
    text = f"{factor * value:+z.{digits}f}"
    return text.replace("-", "−") if any(digit in "123456789" for digit in text) else text[1:]


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


def end_text(value: float, write: Callable[[float, int], str]) -> str:
    """An end of an interval, written by `write` with as many more digits as show on which side of 0 it is.

    >>> [end_text(value, lambda each, more: signed_text(each, 1 + more)) for value in (0.004, -0.24, 0.0, -1e-9)]
    ['+0.004', '−0.2', '0.0', '−0.00000']
    """
    for more in range(SIGN_DIGITS + 1):
        text = write(value, more)
        if not value or any(digit in "123456789" for digit in text):
            return text
    return f"{'−' if value < 0 else '+'}{text.lstrip('±')}" if math.isfinite(value) else text


def lower_words(row: PairedDifference) -> str:
    """In how many seeds the method is lower."""
    return f"lower in {row.lower} of {row.seeds}"
