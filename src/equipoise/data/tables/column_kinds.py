"""The kind of a column's values: by its type or as asked, with notices for columns that look like another kind."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime
from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.data.tables.table_column import PLAIN, Kind, TableColumn, shown_names
from equipoise.data.tables.written_values import is_date, number_of_text, reading_advice
from equipoise.errors import InvalidData, InvalidParameter, notify, require

_NUMBER = re.compile(r"[-+−]?[$€£]?\s?(\d+|\d{1,3}([,.' ]\d{3})+)?([.,]?\d+)([eE][-+]?\d+)?\s?[%$€£]?")  # as people write it
_DATE = re.compile(
    r"(\d{4}([-/.])\d{1,2}\2\d{1,2}|\d{1,2}([-/.])\d{1,2}\3(\d{4}|\d{2})"
    r"|\d{1,2}[- ][A-Za-z]{3,9}[- ]\d{4}|[A-Za-z]{3,9} \d{1,2}, \d{4})([ T]\d.*)?"
)

LIKE_MISSING = frozenset(("-", "--", "–", "—", "?", ".", "n.a.", "n. a.", "n.a", "k.a.", "k. a."))
_FEW_ODD, _MANY_NUMBERS = 3, 8  # different texts that are odd beside this many different numbers


def checked_kinds(kinds: Any, inputs: list[str]) -> Mapping[str, Any]:
    """The kinds that a user asks for, by column; a name that is no input column, and an unknown kind, are refused."""
    require(isinstance(kinds, Mapping), "kinds", "must map names of columns to kinds", kinds)
    allowed = ("number", "boolean", "category", "date", "left out")
    for name, kind in kinds.items():
        if name not in inputs:
            close = [f"Did you mean {each!r}?" for each in get_close_matches(str(name), inputs, 1)]
            raise InvalidParameter("kinds", f"must name input columns, of {shown_names(inputs)}", name, *close)
        require(kind in allowed, f"kinds[{name!r}]", f"must be one of {', '.join(allowed)}", kind)
    return dict(kinds)


def usual_kind(column: TableColumn, unread: list[tuple[str, InvalidData]]) -> Kind:
    """The kind by the column's type. Text that differs almost everywhere is refused; a notice tells of numbers as text.

    If it holds dates that the `date_format` of its CSV file does not read, there is no notice: its text is added to `unread`,
    with the refusal of the column if that format reads no other one, either.
    """
    kind = column.type_kind
    if kind == "category":
        codes, names = column.names()
        hint = misread_text(column, codes, names, lambda is_: f"kinds={{{column.name!r}: {is_!r}}}") if column.is_text else ""
        if len(names) > 20 and 2 * len(names) > int((codes >= 0).sum()):
            out = f"eave it out: kinds={{{column.name!r}: 'left out'}}"
            free = f"Is it an identifier, or free text? L{out}; or use it as a 'category', a 'date' or a 'number'."
            cure = f"{hint} Or l{out}." if hint else free
            raise InvalidData(f"{column} holds {len(names)} different texts in {len(codes)} rows. {cure}")
        if hint:
            cure = f"{hint} If they are categories: kinds={{{column.name!r}: 'category'}}."
            text, given = (
                f"{column} is read as text, of {len(names)} categories. {cure}",
                (column.spelling or {}).get("date_format"),
            )
            if given and _are_other_dates(names, given):
                unread.append((text, InvalidData(f"{column} is not read by date_format={given!r}. {cure}")))
            else:
                notify(text)
    return kind or "category"


def _are_other_dates(names: list[str], date_format: str) -> bool:
    """Whether nearly all texts look like dates, as people write them, and the format does not read nearly all of these."""
    dates = [name.strip() for name in names if _DATE.fullmatch(name.strip())]
    return len(dates) >= 0.9 * len(names) and sum(is_date(each, date_format) for each in dates) < 0.9 * len(dates)


def misread_text(column: TableColumn, codes: NDArray[np.int64], names: list[str], say: Callable[[str], str]) -> str:
    """What is odd about text of which nearly all cells are numbers or dates, and the cure; empty if there are few of them.

    A few different texts among numbers are odd even if they are frequent, and "-" even if most cells hold it. `say` writes the
    option that gives a column's kind.
    """
    counts = np.bincount(codes[codes >= 0], minlength=len(names))
    if not names:
        return ""
    if column.zeros:
        begins = np.array([re.match(r"\s*0\d", name) is not None for name in names])
        first = codes[int(np.isin(codes, np.flatnonzero(begins)).argmax())]
        held = f"{column.place(codes == first)} holds {names[first]!r}"
        why = f"They look like numbers, but {held}, which begins with 0, as postcodes and other codes do"
        return f"{why}. If they are numbers: {say('number')}."
    for what, pattern in (("date", _DATE), ("number", _NUMBER)):
        fits = np.array([pattern.fullmatch(name.strip()) is not None for name in names])
        share = counts[fits].sum() / counts.sum()
        plain = np.array([_is_plain(name, what, column.spelling) for name in names]) & fits
        told = np.array([name.strip().lower() not in LIKE_MISSING for name in names])  # cells that say something
        few = counts[fits].sum() > 0.5 * counts[told].sum() and (~fits).sum() <= _FEW_ODD and fits.sum() >= _MANY_NUMBERS
        if (share < 0.9 and not few) or (plain.all() and what == "number" and len(names) <= 16):
            continue
        cure = f"write {say(what)}."
        if plain.all():
            return f"All are {what}s: {cure}"
        good = [name for name, fit in zip(names, fits.tolist(), strict=True) if fit]
        advice = "" if plain[fits].all() else reading_advice(what, column.name, good, column.spelling)
        odd = int((plain if fits.all() else fits).argmin())
        if what == "number" and fits.all() and not advice and (mixed := column.mixed_decimals(codes, names)):
            return f"It {mixed}"
        found = f"{column.place(codes == odd)} holds {names[odd]!r}"
        if not fits.all():
            strange = [name for name, good in zip(names, fits.tolist(), strict=True) if not good]
            if len(strange) > 1:
                found += f", and other rows {shown_names([repr(name) for name in strange[1:]])}"
            missing = f", or make it missing (missing={strange} for a CSV file)" if len(strange) <= _FEW_ODD else ""
            missing = ", or drop the row" if column.target else missing
            amount = "Nearly all" if share >= 0.9 else "Most" if share > 0.5 else "Many"
            nearly = f"{amount} are {what}s, but {found}. Repair it{missing}"
            return f"{nearly}. {advice}" if advice else f"{nearly}, and {cure}"
        look = f"All look like {what}s; {found}."
        return f"{look} {advice}" if advice else f"{look} Write them as {PLAIN[what]}, and {cure}"
    return ""


def _is_plain(text: str, what: str, spelling: Mapping[str, str] | None) -> bool:
    """Whether text is an ISO date, or a number by the options of its CSV file, that can be read as it is."""
    try:
        return bool(datetime.fromisoformat(text)) if what == "date" else bool(np.isfinite(number_of_text(text, spelling)))
    except ValueError:
        return False


def numbers_of_kind(column: TableColumn, kind: Kind) -> NDArray[np.float64]:
    """Numbers, dates as days, or booleans as 0 and 1, (N,), NaN where they are missing; other numbers are no booleans."""
    values = column.days() if kind == "date" else column.numbers()
    if kind == "boolean" and (odd := ~np.isnan(values) & (values != 0) & (values != 1)).any():
        raise InvalidData(f"{column}, {column.place(odd)} holds {values[odd][0]:g}, but must be true or false, or 0 or 1.")
    return values
