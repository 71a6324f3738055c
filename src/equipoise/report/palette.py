"""What interactive figures and figures for papers share: colours, and names that fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

# Okabe and Ito's colours, which people with any kind of colour vision tell apart; yellow is left out, being faint on white,
# and black is a grey that is seen on white and on a dark ground.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#767676")
DARK_COLOURS = ("#4DA6E0", "#F0804A", "#2FC49A", "#E0A0C4", "#F0B840", "#9ADCF8", "#B4B4B4")  # the same, on a dark ground
INK, FAINT = "#1c2430", "#8a94a3"


def colour(index: int) -> str:
    """The colour of a method by its number, as #rrggbb."""
    return COLOURS[index % len(COLOURS)]


def with_opacity(shade: str, opacity: float) -> str:
    """A colour #rrggbb as rgba(…) with an opacity between 0 and 1."""
    red, green, blue = (int(shade[k : k + 2], 16) for k in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def palette_cycle(index: int) -> int:
    """How often the colours were used up before this method; dashes then distinguish methods of one colour."""
    return index // len(COLOURS)


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
