"""How people write numbers and dates in files, 2.980,44 or 25.09.2024: which options read them, and what is read by these."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from equipoise.errors import nearest_name, require

_MOST = 1000  # texts of a column that are looked at for an advice
_NUMBERS = ((".", ""), (",", ""), (".", ","), (",", "."), (".", "'"), (".", " "), (",", " "), (",", "'"))  # decimal, thousands
_DAYS = (
    "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%m-%d-%Y", "%Y/%m/%d", "%Y.%m.%d", "%d.%m.%y", "%d/%m/%y", "%m/%d/%y",
    "%d %b %Y", "%d-%b-%Y", "%d %B %Y", "%b %d, %Y", "%B %d, %Y",
)  # fmt: skip
_TIMES = ("", " %H:%M", " %H:%M:%S", "T%H:%M:%S")
_SPACES = " \u00a0\u202f"  # a plain, a no-break and a narrow no-break space
_MINUS = "\u2212"  # the minus sign, which is no hyphen
_WITH_SIGN = re.compile(rf"[-+{_MINUS}]?(?P<before>\d*)(?P<groups>([.,' ]\d{{3}})*)(?P<sign>[.,])(?P<after>\d+)([eE][-+]?\d+)?")


def decimal_of(decimal: str | Mapping[str, str], column: str) -> str:
    """The decimal sign of a column: one for all, or those of some columns by name and a point for the others."""
    return decimal if isinstance(decimal, str) else decimal.get(column, ".")


def checked_decimal(decimal: str | Mapping[str, str], delimiter: str) -> None:
    """Refuse a decimal sign that is no point or comma. A comma may be the delimiter, too: cells that hold it are quoted."""
    each = decimal.values() if isinstance(decimal, Mapping) else [decimal]
    good = all(isinstance(sign, str) and sign in (".", ",") and (sign == "," or sign != delimiter) for sign in each)
    rule = 'must be "." or ",", or one of these by the name of a column, and no point if that is the delimiter'
    require(good, "decimal", rule, decimal, 'E.g. decimal=",", or decimal={"price": ","} if other columns have a point.')


def refuse_unknown_columns(decimal: str | Mapping[str, str], names: Sequence[str]) -> None:
    """Refuse a decimal sign of a column that a table does not have."""
    for column in decimal if isinstance(decimal, Mapping) else ():
        require(column in names, "decimal", "must name columns of the file", column, nearest_name(column, names))


def checked_spelling(decimal: str | Mapping[str, str], thousands: str, date_format: str) -> None:
    """Refuse a separator of thousands that is no single sign beside the decimal one, and a format that names no date."""
    good = isinstance(thousands, str) and len(thousands) <= 1 and not thousands.isalnum() and thousands not in ("-", "+")
    fix = 'E.g. thousands="." with decimal="," for 2.980,44.'
    signs = [decimal] if isinstance(decimal, str) else [".", *decimal.values()]
    require(good and thousands not in signs, "thousands", "must be one sign, and not that of decimals", thousands, fix)
    fix = 'E.g. "%d.%m.%Y" for 25.09.2024, or leave it out for 2024-09-25.'
    require(isinstance(date_format, str) and (not date_format or _is_format(date_format)), "date_format",
            "must be a format of strptime with a day, a month and a year", date_format, fix)  # fmt: skip


def _is_format(text: str) -> bool:
    """Whether Arrow reads back the dates that a format writes."""
    import pyarrow as pa
    from pyarrow import compute

    moment = datetime(2026, 11, 16)
    try:
        return bool(compute.strptime(pa.scalar(moment.strftime(text)), text, "s").as_py().date() == moment.date())
    except (pa.ArrowException, ValueError, AttributeError):
        return False


def without_thousands(values: Any, decimal: str, thousands: str) -> Any:
    """Text, an Arrow column, as the numbers that it is with separators of thousands, if any; None if one is no number."""
    import pyarrow as pa
    from pyarrow import compute

    texts = compute.utf8_trim_whitespace(values)
    if thousands and thousands in _SPACES:
        texts = compute.replace_substring_regex(texts, "[\u00a0\u202f]", " ")
        thousands = " "
    pattern = _pattern(decimal, thousands)
    if texts.null_count == len(texts) or not compute.all(compute.match_substring_regex(texts, f"^(?:{pattern})$")).as_py():
        return None
    if compute.any(compute.match_substring_regex(texts, r"^0\d")).as_py():  # codes, such as 01234
        return None
    plain = compute.replace_substring(texts, thousands, "") if thousands else texts
    plain = compute.replace_substring(plain, decimal, ".")
    for of in (pa.int64(), pa.float64()):
        try:
            return plain.cast(of)
        except pa.ArrowInvalid:
            continue
    return None


def read_as_text(decimal: str | Mapping[str, str]) -> list[str]:
    """The columns with a decimal sign of their own, which Arrow reads as text first."""
    return [] if isinstance(decimal, str) else [name for name, sign in decimal.items() if sign != "."]


def with_numbers(table: Any, decimal: str | Mapping[str, str], thousands: str, *, but: Sequence[str]) -> Any:
    """An Arrow table whose columns of text are numbers where all of their texts are, but for the columns `but`."""
    from pyarrow.types import is_string

    own = read_as_text(decimal)
    for place, field in enumerate(table.schema):
        if is_string(field.type) and field.name not in but and (thousands or field.name in own):
            found = without_thousands(table.column(place), decimal_of(decimal, field.name), thousands)
            table = table if found is None else table.set_column(place, field.name, found)
    return table


def grouped_numbers(
    batches: Iterator[Any], texts: Sequence[str], decimal: str | Mapping[str, str], thousands: str
) -> dict[str, Any]:
    """Those of some columns of text that hold numbers by these signs, each with the type of all its numbers."""
    import pyarrow as pa

    found: dict[str, Any] = {}
    left = set(texts)
    for batch in batches:
        for name in sorted(left):
            values = batch.column(name)
            if values.null_count == len(values):
                continue
            numbers = without_thousands(values, decimal_of(decimal, name), thousands)
            if numbers is None:
                left.discard(name)
            elif found.get(name) != pa.float64():
                found[name] = numbers.type
    return {name: of for name, of in found.items() if name in left}


def batch_with_numbers(batch: Any, grouped: dict[str, Any], decimal: str | Mapping[str, str], thousands: str) -> Any:
    """A record batch with numbers in the columns that `grouped` has a type of."""
    import pyarrow as pa

    arrays = []
    for name, values in zip(batch.schema.names, batch.columns, strict=True):
        if name in grouped:
            numbers = without_thousands(values, decimal_of(decimal, name), thousands)
            values = pa.nulls(len(values), grouped[name]) if numbers is None else numbers.cast(grouped[name])
        arrays.append(values)
    return pa.record_batch(arrays, names=batch.schema.names) if grouped else batch


def _pattern(decimal: str, thousands: str) -> str:
    """The regular expression of a number in groups of three digits, or in one."""
    grouped = rf"\d{{1,3}}(?:{re.escape(thousands)}\d{{3}})+|" if thousands else ""
    return rf"[-+]?(?:(?:{grouped}\d+)(?:{re.escape(decimal)}\d*)?|{re.escape(decimal)}\d+)"


def number_of_text(text: str, spelling: Mapping[str, str] | None) -> float:
    """The number that a text writes, by the options of its CSV file if it has one; ValueError if it is none.

    True and false are 1 and 0. The minus sign of typesetters is a minus. ASCII digits alone are numbers.
    """
    plain, given = text.strip().replace(_MINUS, "-"), spelling or {}
    if plain.lower() in ("true", "false"):
        return float(plain.lower() == "true")
    decimal, thousands = given.get("decimal", "."), given.get("thousands", "")
    if thousands and thousands in _SPACES:
        plain, thousands = plain.translate(dict.fromkeys(map(ord, _SPACES), " ")), " "
    if (decimal, thousands) != (".", "") and re.fullmatch(_pattern(decimal, thousands) + r"(?:[eE][-+]?\d+)?", plain) is None:
        raise ValueError(f"{text!r} is no number")
    if "_" in plain or not plain.isascii():
        raise ValueError(f"{text!r} is no number")
    return float(plain.replace(thousands, "").replace(decimal, "."))


def days_of_text(text: str) -> float:
    """The days since 1970-01-01 (UTC) of a date or time in ISO 8601; ValueError if it is none."""
    moment = datetime.fromisoformat(text)
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() / 86_400


def decimal_signs(texts: Sequence[str]) -> dict[str, list[str]]:
    """By the name of a decimal sign, "comma" or "point", the texts that are numbers with it.

    A sign before exactly three digits may group thousands, and says nothing, unless another sign stands before it.

    >>> decimal_signs(["1,5", "2.75", "1,000", "1.000,5", "n.a."])
    {'comma': ['1,5', '1.000,5'], 'point': ['2.75']}
    """
    found: dict[str, list[str]] = {}
    for text in texts:
        parts = _WITH_SIGN.fullmatch(text.strip())
        if parts is None or parts["sign"] in parts["groups"]:
            continue
        if len(parts["after"]) == 3 and not parts["groups"] and re.fullmatch(r"[1-9]\d{0,2}", parts["before"]):
            continue
        found.setdefault("comma" if parts["sign"] == "," else "point", []).append(text)
    return found


def reading_advice(what: str, name: str, texts: Sequence[str], given: Mapping[str, str] | None) -> str:
    """Which options read the texts of a column as numbers or dates ("number", "date"), as a sentence; empty if none does.

    `given` are the options by which a CSV file was read, which are not advised again; None for a table that was no CSV file.
    """
    known = [text.strip() for text in texts[:_MOST]]
    ways = [f'date_format="{each}"' for each in _formats(known)] if what == "date" else _separators(known, given or {})
    if not ways:
        return ""
    choice = ways[0] if len(ways) == 1 else f"{', or '.join(ways)}, whichever is meant"
    if given is not None and ways == ['decimal="."']:  # the other columns may be read already by the comma that was given
        return 'It has a point. Name the columns with a comma instead, as in decimal={"NAME": ","}; the others have a point.'
    if given is not None and ways == ['decimal=","']:
        return f'Give {choice}, or decimal={{{json.dumps(name, ensure_ascii=False)}: ","}} if other columns have a point.'
    if given is not None:
        return f"Give {choice}."
    if what == "date":
        formats = [way.removeprefix("date_format=") for way in ways]
        return f"Convert it first: pandas.to_datetime(frame[{name!r}], format={' or '.join(formats)})."
    return f"Read the file again: data.csv or pandas.read_csv with {choice}."


def _separators(texts: Sequence[str], given: Mapping[str, str]) -> list[str]:
    """The options, but for those that are given, under which all texts are numbers."""
    found = []
    for decimal, thousands in _NUMBERS:
        pattern = re.compile(_pattern(decimal, thousands))
        if all(pattern.fullmatch(text.translate(dict.fromkeys(map(ord, _SPACES), " "))) for text in texts):
            wanted = {"decimal": decimal, "thousands": thousands}
            usual = {"decimal": ".", "thousands": "", **given}
            found.append({key: value for key, value in wanted.items() if value != usual[key]})
    fewest = min(map(len, found), default=0)
    return [", ".join(f'{key}="{value}"' for key, value in each.items()) for each in found if fewest and len(each) == fewest]


def _formats(texts: Sequence[str]) -> list[str]:
    """The formats under which all texts are dates."""
    return [f"{day}{time}" for day in _DAYS for time in _TIMES if all(is_date(text, f"{day}{time}") for text in texts)]


def is_date(text: str, form: str) -> bool:
    """Whether a text is a date in a format of strptime."""
    try:
        datetime.strptime(text, form)
    except ValueError:
        return False
    return True
