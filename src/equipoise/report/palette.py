"""What interactive figures and figures for papers share: colours, and names that fit."""

from __future__ import annotations

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
