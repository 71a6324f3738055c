"""How errors, counts, and the clients that methods are judged on are written."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING

from equipoise.report.over_seeds import Spread

if TYPE_CHECKING:
    from equipoise.run_record import RunRecord

SPLITS = {"train": "training"}
SIGN_DIGITS = 4  # more, at most, by which an end of an interval close to 0 shows its sign


def count_words(numbers: Iterable[int]) -> str:
    """A number, or the range of numbers that differ from run to run.

    >>> count_words([8, 8]), count_words([7, 1000, 8])
    ('8', '7 to 1,000')
    """
    ordered = sorted(numbers)
    return f"{ordered[0]:,}" if ordered[0] == ordered[-1] else f"{ordered[0]:,} to {ordered[-1]:,}"


def capital(text: str) -> str:
    """The text with a capital letter; the others stay as they are, and so does a first word that is a name in code.

    >>> capital("squared error"), capital("pinball_error of price")
    ('Squared error', 'pinball_error of price')
    """
    return text if "_" in text.partition(" ")[0] else text[:1].upper() + text[1:]


def listed(names: Sequence[str], most: int | None = None) -> str:
    """Names in a row; of many, the first ones.

    >>> listed(["a", "b", "c"]), listed(["a", "b", "c", "d"], most=2)
    ('a, b, c', 'a, b, … (4)')
    """
    shown = names if most is None or len(names) <= most + 1 else [*names[:most], f"… ({len(names):,})"]
    return ", ".join(shown)


def minus(text: str) -> str:
    """A number with the sign − in place of a hyphen."""
    return f"−{text[1:]}" if text.startswith("-") else text


def shorten(name: str, most: int = 28) -> str:
    """A name that fits a figure: a long one loses its middle, because names tend to differ at the ends."""
    name = " ".join(name.split())
    if len(name) > most:
        name = f"{name[: most // 2].rstrip()}…{name[most // 2 + 1 - most :].lstrip()}"
    return name


def distinct_names(names: Sequence[str], most: int = 28) -> list[str]:
    """Different names that fit a figure. Long ones that would look alike begin at the word in which they differ.

    >>> distinct_names(["FedAvg", "with the rate 0.1 on the server", "with the rate 0.2 on the server"], 20)
    ['FedAvg', '…0.1 on the server', '…0.2 on the server']
    """
    short = [shorten(name, most) for name in names]
    for text in [text for text, count in Counter(short).items() if count > 1]:
        alike = [i for i, each in enumerate(short) if each == text]
        words = [names[i].split() for i in alike]
        shared = len(list(takewhile(lambda each: len(set(each)) == 1, zip(*words, strict=False))))
        ends = [f"…{shorten(' '.join(each[shared:]), most - 1)}" if shared else "" for each in words]
        numbered = len(set(ends)) < len(alike)  # they differ far inside of one word, or are the same
        for i, end in zip(alike, ends, strict=True):
            short[i] = f"{i + 1}: {shorten(names[i], most - 4)}" if numbered else end
    return short


def signed_text(value: float, digits: int = 3, factor: float = 1.0) -> str:
    """A difference with its sign, and no sign for 0.

    >>> signed_text(-0.0201), signed_text(0.0004), signed_text(0.5, 1, 100)
    ('−0.020', '0.000', '+50.0')
    """
    if not math.isfinite(value):
        return "–"
    text = f"{factor * value:+z.{digits}f}"
    return text.replace("-", "−") if any(digit in "123456789" for digit in text) else text[1:]


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


@dataclass(frozen=True)
class Judged:
    """The clients that runs are judged on. `str()` describes them, e.g. "500 unseen test clients"."""

    counts: tuple[int, ...]  # of each run
    split: str  # "training", "validation" or "test"; empty for all clients that a model was evaluated on
    unseen: bool
    benign: bool = False  # whether malicious clients are left out
    means: bool = False  # whether only means over them are known, under secure sums
    at_least: int = 0  # examples of each; clients with fewer are left out
    drawn: tuple[str, str] | None = None  # how many clients were evaluated, and of how many, if these are a sample

    @classmethod
    def of(cls, runs: Sequence[RunRecord]) -> Judged:
        """Those of some runs, which share their split."""
        split = runs[0].judged_on
        word = "" if split == "train" and not any(run.knows_unseen for run in runs) else SPLITS.get(split, split)
        every = [run.clients.where(run.judged_on) for run in runs]
        benign = [rows.benign for rows in every]
        in_means = [rows.clients_in_mean for rows in benign]
        counts = tuple(len(rows) if count is None else count for rows, count in zip(benign, in_means, strict=True))
        unseen = all(run.knows_unseen for run in runs) and not any(bool(rows.seen.any()) for rows in benign)
        sizes = [run.sample_of(run.judged_on) or (len(rows),) * 2 for run, rows in zip(runs, every, strict=True)]
        evaluated, whole = map(count_words, zip(*sizes, strict=True))
        drawn = (evaluated, whole) if any(some < n for some, n in sizes) else None
        means, fewer = any(count is not None for count in in_means), sum(map(len, benign)) < sum(map(len, every))
        return cls(counts, word, unseen, fewer, means, max(run.at_least for run in runs), drawn)

    @property
    def weighted(self) -> bool:
        """Whether clients count by their examples."""
        return self.split in ("training", "")

    @property
    def kind(self) -> str:
        """The kind of clients, without their number."""
        noun = f"client{'s' * (max(self.counts) != 1)}"
        return " ".join(filter(None, ("unseen" * self.unseen, "benign" * self.benign, self.split, noun)))

    def __str__(self) -> str:
        count = count_words(self.counts)
        what = self.kind + f" with {self.at_least} examples or more" * (self.at_least > 0)
        if self.drawn is None:
            return f"{count} {what}{', weighted by examples' * self.weighted}"
        evaluated, every = self.drawn
        if count == evaluated:
            return f"{evaluated} of {every} {what}, drawn at random"
        return f"{count} {what}, among {evaluated} of {every} drawn at random"
