"""The schema of a table: how each column is encoded, with numbers from the training clients alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.core.files import write_atomically
from equipoise.data.arrow_tables import Kind, TableColumn, arrow_table, check_names, sorted_names
from equipoise.data.clients import prefix
from equipoise.data.file_access import PathLike
from equipoise.data.identifiers import tell_of_identifier
from equipoise.errors import InvalidData, InvalidParameter, notify, require, require_integer

FORMAT = "equipoise schema 1"
OTHER, MISSING = 0, 1  # codes of an embedded column; its categories follow

_WHICH_KIND = 'Is it a number to predict, or a class? Write target_kind="number" or target_kind="classes".'
_SAVED_INDEX = re.compile(r"|Unnamed: \d+|__index_level_\d+__")  # how pandas names an index that it saves, or reads again
_NUMBER = re.compile(r"[-+]?[$€£]?\s?(\d+|\d{1,3}([,.' ]\d{3})+)?([.,]?\d+)([eE][-+]?\d+)?\s?[%$€£]?")  # as people write it
_DATE = re.compile(r"(\d{4}([-/.])\d{1,2}\2\d{1,2}|\d{1,2}([-/.])\d{1,2}\3(\d{4}|\d{2}))([ T]\d.*)?")

_FEW_ODD, _MANY_NUMBERS = 3, 8  # different texts that are odd beside this many different numbers
_PLAIN = {"number": "1005.5", "date": "2026-11-16"}

Becomes = Literal["scaled", "one-hot", "codes", "left out"]
TargetKind = Literal["classes", "number"]


@dataclass(frozen=True)
class ColumnRule:
    """How one column is encoded.

    A number or date x becomes (x − mean) / deviation, a boolean 0 or 1; missing ones are taken for the median. Categories
    become one number each ("one-hot"), or one integer code in all ("codes"). `indicator` adds a number that is 1 where the
    value is missing.
    """

    name: str  # of the column
    kind: Kind  # what its values are
    becomes: Becomes  # how they are encoded
    mean: float = 0.0  # over training rows
    deviation: float = 1.0  # over training rows; 0: the column was constant in training, and becomes 0
    median: float = 0.0  # stands for missing numbers
    indicator: bool = False  # whether a further number says which values are missing
    categories: tuple[str, ...] = ()  # in the order of their numbers or codes
    note: str = ""  # why it is left out

    def __post_init__(self) -> None:
        numbers = (self.mean, self.deviation, self.median)
        require(bool(np.isfinite(numbers).all()), f"column {self.name!r}", "must have finite mean, deviation, median", numbers)
        require(self.deviation >= 0, f"column {self.name!r}", "must have a deviation ≥ 0", self.deviation)
        once = len(set(self.categories)) == len(self.categories)
        require(once, f"column {self.name!r}", "must name each category once", self.categories)

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the numbers that the column becomes."""
        if self.becomes not in ("scaled", "one-hot"):
            return ()
        values = (self.name,) if self.becomes == "scaled" else tuple(f"{self.name}={each}" for each in self.categories)
        return (*values, f"{self.name} missing") if self.indicator else values

    @property
    def codes(self) -> int:
        """The number of codes of a column that becomes codes: its categories, "other" and "missing"."""
        return len(self.categories) + 2

    @classmethod
    def fit(cls, column: TableColumn, kind: Kind, rows: NDArray[np.int64], one_hot: int) -> ColumnRule:
        """The rule for a column by its values in the training rows; `one_hot` is the most categories that become one-hot."""
        if kind == "category":
            codes, names = column.names()
            seen = np.unique(codes[rows])
            categories = sorted_names([names[code] for code in seen if code >= 0])
            gaps = bool((seen < 0).any())
            if len(categories) + gaps < 2:
                return cls(column.name, kind, "left out", note="one value among training clients")
            few = len(categories) <= one_hot
            return cls(column.name, kind, "one-hot" if few else "codes", categories=categories, indicator=few and gaps)
        values = _numbers(column, kind)[rows]
        known = values[~np.isnan(values)]
        gaps = len(known) < len(values)
        if not len(known):
            return cls(column.name, kind, "left out", note="all missing among training clients")
        with np.errstate(over="ignore"):
            spread = known.max() - known.min()
        constant = spread <= 8 * np.finfo(np.float64).eps * np.abs(known).max()  # up to rounding
        note = "one value among training clients"
        if constant and (spread > 0 or column.whole_numbers(rows) > 1):
            note = "one value up to the rounding of float64 among training clients"
            text = f"{column} holds {note}, around {known[0]:.17g}, and tells no example from another"
            notify(f"{text}. Subtract a constant from it first, or leave it out.")
        if constant and not gaps:
            return cls(column.name, kind, "left out", note=note)
        median = float(np.median(known))
        if kind == "boolean":
            return cls(column.name, kind, "scaled", median=float(median >= 0.5), indicator=gaps)
        with np.errstate(over="ignore", invalid="ignore"):
            mean, deviation = float(known.mean()), float(known.std())
        if not np.isfinite([mean, deviation]).all():
            raise InvalidData(
                f"{column} holds numbers as large as {np.abs(known).max():g}. Take their logarithm, or repair them."
            )
        if deviation < 1e-140:  # whose square underflows
            deviation = float(spread * (known / spread).std()) if spread > 0 else 0.0
        return cls(column.name, kind, "scaled", mean, 0.0 if constant else deviation, median, gaps)

    def columns_of(self, column: TableColumn) -> tuple[list[NDArray[np.float32]], set[str]]:
        """The numbers (N,) that the values become, one array per feature, and the categories that training did not have."""
        if self.becomes == "one-hot":
            codes, unseen = self.codes_of(column)
            hot = [codes == MISSING + 1 + k for k in range(len(self.categories))]
            return [each.astype(np.float32) for each in (*hot, *([codes == MISSING] if self.indicator else []))], unseen
        values = _numbers(column, self.kind)
        gaps = np.isnan(values)
        if self.kind == "date":
            self._refuse_mix(column, values[~gaps])
        filled = np.where(gaps, self.median, values)
        with np.errstate(over="ignore"):
            scaled = ((filled - self.mean) / self.deviation if self.deviation else filled * 0).astype(np.float32)
        if (far := ~np.isfinite(scaled)).any():
            found = f"row {column.row(far)} holds {values[far][0]:g}"
            raise InvalidData(f"{column}, {found}, too far from the mean {self.mean:g} of training. Repair it.")
        return ([scaled, gaps.astype(np.float32)] if self.indicator else [scaled]), set()

    def _refuse_mix(self, column: TableColumn, days: NDArray[np.float64]) -> None:
        """Refuse times of day where training had dates, and the reverse: as days, times lie between 0 and 1."""
        times = 0 <= self.median < 1
        if times and not ((days >= 0) & (days < 1)).all():
            raise InvalidData(f"{column} holds dates, but training had times of day. Repair it.")
        if not times and len(days) and ((days > 0) & (days < 1)).all():
            raise InvalidData(f"{column} holds times of day, but training had dates. Write dates as 2026-11-16.")

    def codes_of(self, column: TableColumn) -> tuple[NDArray[np.int64], set[str]]:
        """The codes (N,): 0 for a category that training did not have, 1 for missing, then the others; and those unseen."""
        places, names = column.names()
        known = {name: code for code, name in enumerate(self.categories, MISSING + 1)}
        return np.array([MISSING, *(known.get(name, OTHER) for name in names)])[places + 1], set(names).difference(known)

    def describe(self) -> tuple[str, str, str, str]:
        """Name, kind, what becomes of it, and by which numbers of training."""
        if self.becomes == "left out":
            return self.name, self.kind, "left out", self.note
        listed = _listed([repr(each) if each in ("missing", "other") else each for each in self.categories])
        if self.becomes == "codes":
            return self.name, self.kind, f"codes 0 … {self.codes - 1}", f"0 other, 1 missing, {listed}"
        count = len(self.features)
        becomes = f"{count} number{'s' if count > 1 else ''}"
        if self.becomes == "one-hot":
            return self.name, self.kind, becomes, listed + (", missing" if self.indicator else "; missing: all 0")
        filled = f"missing: {self.median:g}" + (" and an indicator" if self.indicator else "")
        scale = "" if self.kind == "boolean" else f"mean {self.mean:g}, deviation {self.deviation:g}; "
        return self.name, self.kind, becomes, scale + filled


@dataclass(frozen=True)
class TargetRule:
    """What is predicted: one of `classes`, in their order, or a number, whose mean and deviation in training are kept."""

    name: str  # of the column
    kind: TargetKind  # "classes" or "number"
    classes: tuple[str, ...] = ()  # in the order of the model's outputs
    mean: float = 0.0  # over training rows
    deviation: float = 1.0  # over training rows

    def __post_init__(self) -> None:
        named = len(set(self.classes)) == len(self.classes) > 0
        good = named if self.kind == "classes" else self.deviation > 0 and bool(np.isfinite([self.mean, self.deviation]).all())
        require(good, f"target {self.name!r}", "must have different classes, or a finite mean and a deviation > 0", self)

    @classmethod
    def fit(
        cls, column: TableColumn, rows: NDArray[np.int64], kind: TargetKind | None, classes: int | Sequence[str]
    ) -> TargetRule:
        """The rule by the training rows. Without `kind`, floating numbers and dates are numbers and all else are classes."""
        import pyarrow.types as kinds

        column = column if kind == "classes" else column.as_dates()
        by_type = column.type_kind
        _refuse_missing(column, column.missing())
        whole = kinds.is_integer(column.values.type)
        numeric = by_type == "date" or (by_type == "number" and not whole)
        chosen = kind or ("number" if numeric and not classes else "classes")
        if chosen == "number":
            values = _target_numbers(column)[rows]
            if np.ptp(values) == 0:
                raise InvalidData(f"{column}, the target, {_always(f'{values[0]:g}')}.")
            if np.ptp(values.astype(np.float32)) == 0:
                raise InvalidData(
                    f"{column}, the target, holds numbers near {values[0]:g} that float32 cannot tell apart. Shift or scale it."
                )
            distinct = np.unique(values)
            few = len(distinct) <= max(2, min(20, len(values) // 2)) and bool((distinct == distinct.round()).all())
            if kind is None and by_type == "number" and few:
                listed = _listed([f"{value:g}" for value in distinct])
                raise InvalidData(
                    f"{column}, the target, holds only the whole numbers {listed}, though as floating numbers. {_WHICH_KIND}"
                )
            return cls(column.name, "number", mean=float(values.mean()), deviation=float(values.std()))
        named = tuple(str(each) for each in (range(classes) if isinstance(classes, int) else classes))
        require(len(set(named)) == len(named), "classes", "must name each class once", classes)
        if not named:
            codes, names = column.names()
            if kind is None and column.is_text and (odd := _misread_text(column, codes, names, "target_kind={!r}".format)):
                text = f"{column}, the target, is read as text, of {len(names)} classes. {odd}"
                notify(f"{text} If they are classes: target_kind='classes'.")
            named = sorted_names([names[code] for code in np.unique(codes[rows])])
            if len(named) < 2:
                raise InvalidData(f"{column}, the target, {_always(named[0])}, or name all classes: classes=[…].")
            if kind is None and whole and (len(named) > 100 or 10 < len(named) > len(rows) / 2):
                raise InvalidData(f"{column} holds {len(named)} different whole numbers. {_WHICH_KIND}")
        return cls(column.name, "classes", named)

    def values_of(self, column: TableColumn) -> Tensor:
        """The targets (N,): classes as int64, numbers as float32."""
        import pyarrow.types as kinds

        if self.kind == "number":
            return torch.from_numpy(_target_numbers(column).astype(np.float32))
        codes, names = column.names()
        _refuse_missing(column, codes < 0)
        place = {name: code for code, name in enumerate(self.classes)}
        for code, name in enumerate(names):
            if name not in place:
                everything = list(sorted_names([*self.classes, *(each for each in names if each not in place)]))
                cure = (
                    f" Name all classes: classes={everything}." if len(everything) <= 20 else " Name all classes: classes=[…]."
                )
                if kinds.is_integer(column.values.type):
                    cure += ' If it is a number to predict, write target_kind="number".'
                raise InvalidData(
                    f"{column}, row {column.row(codes == code)} holds the class {name!r}, which is none of those of "
                    f"training ({_listed(self.classes)}).{cure}"
                )
        return torch.from_numpy(np.array([place[name] for name in names], dtype=np.int64)[codes])

    def describe(self) -> tuple[str, str, str, str]:
        """Name, kind, what becomes of it, and by which numbers of training."""
        if self.kind == "number":
            return self.name, "target", "a number, as it is", f"mean {self.mean:g}, deviation {self.deviation:g}"
        return self.name, "target", f"classes 0 … {len(self.classes) - 1}", _listed(self.classes)


@dataclass(frozen=True)
class Schema:
    """How each column of a table is encoded, so that other tables with these columns become inputs of the same model.

    It is fitted on training clients only. Its means, deviations, medians, categories and classes come from their data as they
    are: they are NOT covered by the ε of differential privacy, and a saved schema shows them to whoever reads it. In a
    federation, where nobody sees all data, the operator supplies a schema, for example one fitted on public data.
    """

    columns: tuple[ColumnRule, ...]
    target: TargetRule

    def __post_init__(self) -> None:
        names = [*(rule.name for rule in self.columns), self.target.name]
        require(len(set(names)) == len(names), "columns", "must have different names, also from the target's", names)
        inputs = [rule.name for rule in self.columns if rule.becomes != "left out"]
        require(len(inputs) > 0, "columns", "must leave at least one input", names[:-1], "All are left out.")

    @classmethod
    def fit(
        cls,
        frame: Any,
        *,
        target: str,
        client: str | None = None,
        split: str | None = None,
        rows: Any = None,
        columns: Sequence[str] | None = None,
        kinds: Mapping[str, Kind | Literal["left out"]] | None = None,
        one_hot: int = 16,
        target_kind: TargetKind | None = None,
        classes: int | Sequence[str] = 0,
        source: str = "table",
    ) -> Schema:
        """The schema of a table by its training rows (all, if `rows` is None; a mask will do).

        For the other parameters see `from_frame`.
        """
        table = arrow_table(frame, source, client)
        check_names(table, source, target=target, client=client, split=split)
        require_integer("one_hot", one_hot, 0)
        require(target_kind in (None, "classes", "number"), "target_kind", 'must be "classes" or "number"', target_kind)
        good = isinstance(classes, Sequence) and not isinstance(classes, str)
        good = good or (isinstance(classes, int) and not isinstance(classes, bool) and classes >= 0)
        require(good, "classes", "must be the names of all classes, or their number if they are 0, 1, …", classes)
        taken = {target, client, split}
        if columns is None:
            inputs = [name for name in table.column_names if name not in taken]
        else:
            require(not isinstance(columns, str), "columns", "must be a list of names", columns)
            inputs, known = list(columns), set(table.column_names) - taken
            for name in inputs:
                if not isinstance(name, str) or name not in known:
                    check_names(table, source, target=target, client=client, split=split, columns=name)
        asked = _checked_kinds(kinds or {}, inputs)
        try:
            training = np.arange(table.num_rows)[... if rows is None else np.asarray(rows)]
        except IndexError as failure:
            raise InvalidParameter("rows", f"must be rows of {source}, as numbers or as a mask", rows, f"{failure}.") from None
        require(len(training) > 0, "rows", "must be at least one row to fit the schema on", rows)
        rules, constant = [], {}
        for name in inputs:  # one at a time: the columns of files on disk need not fit into memory together
            if asked.get(name) == "left out":
                rules.append(ColumnRule(name, "category", "left out", note="as asked"))
                continue
            column = TableColumn(name, table.column(name), source)
            if columns is None and name not in asked and _SAVED_INDEX.fullmatch(name) and column.type_kind == "number":
                text = f"{column} is taken for the index of a table that was saved with it, and left out"
                cure = f"To use it: kinds={{{name!r}: 'number'}}. To save without it: frame.to_csv(path, index=False)."
                notify(f"{text}. {cure}")
                rules.append(ColumnRule(name, "number", "left out", note="the index of a saved table"))
                continue
            kind = asked.get(name) or _usual_kind(column.as_dates())
            if name not in asked:
                tell_of_identifier(column)
            if why := column.constant():
                constant[name] = why
            else:
                rules.append(ColumnRule.fit(column, kind, training, one_hot))
        _refuse_constant(constant, source)
        if all(rule.becomes == "left out" for rule in rules):
            raise InvalidData(f"{source}: no column is left as an input; those that are there are left out or constant.")
        return cls(
            tuple(rules), TargetRule.fit(TableColumn(target, table.column(target), source), training, target_kind, classes)
        )

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The names of the numbers (N, F) that a table becomes, in order."""
        return tuple(feature for rule in self.columns for feature in rule.features)

    @property
    def embedded(self) -> dict[str, int]:
        """The columns that become codes, in order, each with the number of its codes."""
        return {rule.name: rule.codes for rule in self.columns if rule.becomes == "codes"}

    def transform(self, frame: Any, source: str = "table", first: int = 0) -> Any:
        """The inputs of a table: floating numbers (N, F), or a dict of these and of "codes" (N, C) if there are any.

        The table needs the columns of the schema, in any order; others are ignored. A notice names categories that training
        did not have. Of a piece of a larger table, `first` is the row where it begins, for errors.
        """
        inputs, unseen = self.inputs_of(frame, source, first)
        tell_of_unseen(unseen, source)
        return inputs

    def inputs_of(self, frame: Any, source: str = "table", first: int = 0) -> tuple[Any, dict[str, set[str]]]:
        """The inputs of a table, as `transform` makes them, and by column the categories that training did not have."""
        table = arrow_table(frame, source)
        known, used = set(table.column_names), [rule.name for rule in self.columns if rule.becomes != "left out"]
        read = {name: self._column(table, known, name, source, first) for name in used}
        numbers: list[NDArray[np.float32]] = []
        codes: list[NDArray[np.int64]] = []
        unseen: dict[str, set[str]] = {}
        for rule in self.columns:
            if rule.features:
                parts, unseen[rule.name] = rule.columns_of(read[rule.name])
                numbers += parts
            elif rule.becomes == "codes":
                part, unseen[rule.name] = rule.codes_of(read[rule.name])
                codes.append(part)
        tree = {
            name: torch.from_numpy(np.stack(made, axis=1)) for name, made in (("numbers", numbers), ("codes", codes)) if made
        }
        return tree if codes else tree["numbers"], {name: found for name, found in unseen.items() if found}

    def targets(self, frame: Any, source: str = "table", first: int = 0) -> Tensor:
        """The targets (N,) of a table, or of a piece of it from row `first`: classes as int64, numbers as float32."""
        table = arrow_table(frame, source)
        return self.target.values_of(self._column(table, set(table.column_names), self.target.name, source, first))

    def _column(self, table: Any, known: set[str], name: str, source: str, first: int) -> TableColumn:
        if name not in known:
            raise InvalidData(
                f"{source}: column {name!r} of the schema is missing; the table has {_listed(table.column_names)}. Add it "
                "(it may be empty), or fit another schema."
            )
        return TableColumn(name, table.column(name), source, first)

    def describe(self) -> str:
        """A table of the columns: what becomes of each, and by which numbers of the training clients."""
        rows = [("column", "kind", "becomes", "from training clients")]
        rows += [*(rule.describe() for rule in self.columns), self.target.describe()]
        widths = [max(len(row[place]) for row in rows) for place in range(3)]
        return "\n".join("  ".join((*map(str.ljust, row, widths), row[3])).rstrip() for row in rows)

    def to_json(self) -> str:
        """The schema as JSON."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Schema:
        """The schema that `to_json` wrote."""
        from pydantic import TypeAdapter, ValidationError

        try:
            content = json.loads(text)
            version = content.get("format") if isinstance(content, dict) else None
            if version != FORMAT:
                raise InvalidData(f"must be a schema in the format {FORMAT!r}, but its format is {version!r}.")
            return TypeAdapter(cls).validate_python({key: value for key, value in content.items() if key != "format"})
        except ValidationError as failure:
            first = failure.errors()[0]
            where = ".".join(str(step) for step in first["loc"])
            raise InvalidData(f"the schema is damaged at {where or 'its top'}: {first['msg']}.") from None
        except (json.JSONDecodeError, TypeError) as failure:
            raise InvalidData(f"the schema is not valid JSON: {failure}.") from None

    def save(self, path: PathLike) -> Path:
        """Write the schema as a JSON file."""
        return write_atomically(Path(path), self.to_json().encode())

    @classmethod
    def load(cls, path: PathLike) -> Schema:
        """Read a schema that `save` wrote."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except TypeError:
            raise InvalidParameter("path", "must name a file", path) from None
        except FileNotFoundError:
            raise InvalidData(f"{path} does not exist.") from None
        except InvalidData as failure:
            raise InvalidData(f"{path}: {failure}") from None
        except (OSError, ValueError) as failure:
            raise InvalidData(f"{path}: cannot be read: {failure}") from failure


def _numbers(column: TableColumn, kind: Kind) -> NDArray[np.float64]:
    values = column.days() if kind == "date" else column.numbers()
    if kind == "boolean" and (odd := ~np.isnan(values) & (values != 0) & (values != 1)).any():
        raise InvalidData(f"{column}, row {column.row(odd)} holds {values[odd][0]:g}, but must be true or false, or 0 or 1.")
    return values


def _target_numbers(column: TableColumn) -> NDArray[np.float64]:
    column = column.as_dates()
    values = _numbers(column, "date" if column.type_kind == "date" else "number")
    _refuse_missing(column, np.isnan(values))
    if (large := np.abs(values) > np.finfo(np.float32).max).any():
        found = f"row {column.row(large)} holds {values[large][0]:g}"
        raise InvalidData(f"{column}, the target, {found}, which is too large. Repair or scale it.")
    return values


def _refuse_missing(column: TableColumn, missing: NDArray[Any]) -> None:
    if missing.any():
        count = int(missing.sum())
        more = f" and {count - 1} more. Drop these rows" if count > 1 else ". Drop this row"
        blank = column.is_text and not column.values.null_count
        how = f"frame[frame[{column.name!r}].str.strip() != '']" if blank else f"frame.dropna(subset=[{column.name!r}])"
        raise InvalidData(f"{column}, the target, is missing in row {column.row(missing)}{more}: {how} in pandas.")


def _always(value: str) -> str:
    return f"is always {value!r} among training clients, so that there is nothing to learn. Name another target"


def _checked_kinds(kinds: Any, inputs: list[str]) -> Mapping[str, Any]:
    require(isinstance(kinds, Mapping), "kinds", "must map names of columns to kinds", kinds)
    allowed = ("number", "boolean", "category", "date", "left out")
    for name, kind in kinds.items():
        if name not in inputs:
            raise InvalidParameter("kinds", f"must name input columns, of {_listed(inputs)}", name)
        require(kind in allowed, f"kinds[{name!r}]", f"must be one of {', '.join(allowed)}", kind)
    return dict(kinds)


def _usual_kind(column: TableColumn) -> Kind:
    """The kind by the column's type. Text that differs almost everywhere is refused; a notice tells of numbers as text."""
    kind = column.type_kind
    if kind == "category":
        codes, names = column.names()
        hint = _misread_text(column, codes, names, lambda is_: f"kinds={{{column.name!r}: {is_!r}}}") if column.is_text else ""
        if len(names) > 20 and 2 * len(names) > int((codes >= 0).sum()):
            hint = hint or "Is it an identifier, or free text?"
            raise InvalidData(
                f"{column} holds {len(names)} different texts in {len(codes)} rows. {hint}"
                f" Leave it out: kinds={{{column.name!r}: 'left out'}}; or use it as a 'category', a 'date' or a 'number'."
            )
        if hint:
            text = (
                f"{column} is read as text, of {len(names)} categories. {hint} If they are categories: kinds={{{column.name!r}:"
            )
            notify(f"{text} 'category'}}.")
    return kind or "category"


def tell_of_unseen(unseen: Mapping[str, set[str]], source: str) -> None:
    """A notice for each column with categories that training did not have, which names them."""
    for name, categories in unseen.items():
        listed = _listed([repr(each) for each in sorted_names(list(categories))])
        text = f"{prefix(source)}column {name!r} holds categories that training did not have: {listed}"
        cure = "The model takes them for unknown. Repair them if they are misspelt; else train on rows that have them."
        notify(f"{text}. {cure}")


def _misread_text(column: TableColumn, codes: NDArray[np.int64], names: list[str], say: Callable[[str], str]) -> str:
    """What is odd about text of which nearly all cells are numbers or dates, and the cure; empty if there are few of them.

    A few different texts among numbers are odd even if they are frequent. `say` writes the option that gives a column's kind.
    """
    counts = np.bincount(codes[codes >= 0], minlength=len(names))
    if not names:
        return ""
    for what, pattern in (("date", _DATE), ("number", _NUMBER)):
        fits = np.array([pattern.fullmatch(name.strip()) is not None for name in names])
        share = counts[fits].sum() / counts.sum()
        plain = np.array([_is_plain(name, what) for name in names]) & fits
        few = share > 0.5 and (~fits).sum() <= _FEW_ODD and fits.sum() >= _MANY_NUMBERS
        if (share < 0.9 and not few) or (plain.all() and what == "number" and len(names) <= 16):
            continue
        cure = f"write {say(what)}."
        if plain.all():
            return f"All are {what}s: {cure}"
        odd = int((plain if fits.all() else fits).argmin())
        found = f"row {column.row(codes == odd)} holds {names[odd]!r}"
        if not fits.all():
            strange = [name for name, good in zip(names, fits.tolist(), strict=True) if not good]
            if len(strange) > 1:
                found += f", and other rows {_listed([repr(name) for name in strange[1:]])}"
            missing = f", or make it missing (missing={strange} for a CSV file)" if len(strange) <= _FEW_ODD else ""
            return f"{'Nearly all' if share >= 0.9 else 'Most'} are {what}s, but {found}. Repair it{missing}, and {cure}"
        comma = ', or give decimal="," for a CSV file' if re.search(r",\d\d?$", names[odd]) else ""
        return f"All look like {what}s; {found}. Write them as {_PLAIN[what]}{comma}, and {cure}"
    return ""


def _is_plain(text: str, what: str) -> bool:
    """Whether text is a number or an ISO date that can be read as it is."""
    try:
        return bool(datetime.fromisoformat(text)) if what == "date" else bool(np.isfinite(float(text)))
    except ValueError:
        return False


def _refuse_constant(found: Mapping[str, str], source: str) -> None:
    """Refuse columns that hold one value, or none, in the whole table: they tell no example from another."""
    if found:
        shown = ", ".join(f"{name!r} ({why})" for name, why in found.items())
        cure = ", ".join(f"{name!r}: 'left out'" for name in found)
        raise InvalidData(f"{source}: columns tell no example from another: {shown}. Leave them out: kinds={{{cure}}}.")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:6])
    return f"{shown} … ({len(names)} in all)" if len(names) > 6 else shown
