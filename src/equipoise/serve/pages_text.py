"""Numbers as people read them, for pages and terminals."""

from __future__ import annotations

import math
from collections.abc import Sequence

MOST_COUNTED = 2**53
BARS = "▁▂▃▄▅▆▇█"


def counted(value: object) -> int:
    """A whole number from elsewhere; 0 for what is none, and no more than a browser can count.

    >>> counted(3), counted("3"), counted(10**400) == 2**53, counted(float("nan")), counted(True)
    (3, 0, True, 0, 0)
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        return 0
    return int(max(-MOST_COUNTED, min(MOST_COUNTED, value)))


def finite(value: object) -> float | None:
    """A number from elsewhere; None for what is none or not finite.

    >>> finite(3), finite("3"), finite(10**400), finite(float("inf"))
    (3.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def duration(seconds: float | None) -> str:
    """Seconds as people say them.

    >>> duration(42), duration(400), duration(7300), duration(None)
    ('42 s', '7 min', '2 h 2 min', '–')
    """
    if seconds is None:
        return "–"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def size_words(count: int) -> str:
    """A number of bytes as people say it.

    >>> size_words(1008), size_words(25_000), size_words(3_400_000)
    ('1.0 kB', '25 kB', '3.4 MB')
    """
    if count < 1_000_000:
        return f"{count / 1000:.1f} kB" if count < 9_950 else f"{count / 1000:.0f} kB"
    return f"{count / 1e6:.1f} MB"


def sparkline(values: Sequence[float | None], width: int = 20) -> str:
    """A curve as one line of text, at most `width` letters.

    >>> sparkline([1.0, 2.0, None, 3.0]), sparkline([])
    ('▁▅ █', '')
    """
    if len(values) > width:
        values = [values[round(k * (len(values) - 1) / (width - 1))] for k in range(width)]
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    return "".join(" " if v is None else BARS[int((v - low) / (high - low) * 7 + 0.5) if high > low else 3] for v in values)
