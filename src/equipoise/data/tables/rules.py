"""The rules of a table's columns, fitted on training rows: which numbers or codes inputs become, and what is predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from equipoise.core.trees import leaves, select
from equipoise.data.clients.arrays import tell_of_rounding
from equipoise.data.tables.checks import refuse_missing, tell_of_numbers_as_text
from equipoise.data.tables.column import Kind, TableColumn, shown_names, sorted_names
from equipoise.errors import InvalidData, InvalidParameter, notify, require

_CALENDAR = 700_000  # days from 1970 that Python's dates hold in either direction
_PIECE = 1 << 16  # rows that are with a model at once
OTHER, MISSING = 0, 1  # codes of an embedded column; its categories follow

AS_ASKED = "as asked"  # the note of a column that the user leaves out

Becomes = Literal["scaled", "one-hot", "codes", "left out"]
TargetKind = Literal["classes", "number"]
_WHICH_KIND = 'Is it a number to predict, or a class? Write target_kind="number" or target_kind="classes".'

_MANY_CLASSES = 10  # whole numbers that are rather an amount than classes, if there are more


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
        values = column.numbers_of_kind(kind)[rows]
        known = values[~np.isnan(values)]
        gaps = len(known) < len(values)
        if not len(known):
            return cls(column.name, kind, "left out", note="all missing among training clients")
        with np.errstate(over="ignore"):
            spread = known.max() - known.min()
        constant = spread <= 8 * np.finfo(np.float64).eps * np.abs(known).max()  # up to rounding
        if constant and (spread > 0 or column.whole_numbers(rows) > 1):
            notify(f"{column} differs by the rounding of float64 alone, around {known[0]:.17g}. Subtract a constant from it.")
        if constant and not gaps:
            return cls(column.name, kind, "left out", note="one value among training clients")
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
        values = column.numbers_of_kind(self.kind)
        gaps = np.isnan(values)
        if self.kind == "date":
            self._refuse_mix(column, values[~gaps])
        filled = np.where(gaps, self.median, values)
        with np.errstate(over="ignore"):
            scaled = ((filled - self.mean) / self.deviation if self.deviation else filled * 0).astype(np.float32)
        if (far := ~np.isfinite(scaled)).any():
            found = f"{column.place(far)} holds {values[far][0]:g}"
            raise InvalidData(f"{column}, {found}, too far from the mean {self.mean:g} of training. Repair it.")
        return ([scaled, gaps.astype(np.float32)] if self.indicator else [scaled]), set()

    def _refuse_mix(self, column: TableColumn, days: NDArray[np.float64]) -> None:
        """Refuse times of day where training had dates, and dates where it had times of day, which as days lie in [0, 1)."""
        times = 0 <= self.median < 1
        if times and not ((days >= 0) & (days < 1)).all():
            raise InvalidData(f"{column} holds dates, but training had times of day. Repair it.")
        if not times and len(days) and ((days > 0) & (days < 1)).all():
            raise InvalidData(f"{column} holds times of day, but training had dates. Write dates as 2026-11-16.")

    def codes_of(self, column: TableColumn) -> tuple[NDArray[np.int64], set[str]]:
        """The codes (N,) of the values, and the categories that training did not have.

        Code 0 stands for these, 1 for a missing value, and the categories of training follow.
        """
        places, names = column.names()
        known = {name: code for code, name in enumerate(self.categories, MISSING + 1)}
        return np.array([MISSING, *(known.get(name, OTHER) for name in names)])[places + 1], set(names).difference(known)

    def describe(self) -> tuple[str, str, str, str]:
        """The rule in four texts: the column's name, its kind, what it becomes, and the numbers of training that it goes by."""
        if self.becomes == "left out":
            return self.name, "–" if self.note == AS_ASKED else self.kind, "left out", self.note  # nobody looked at its values
        listed = shown_names(self.categories)
        if self.becomes == "codes":
            return self.name, self.kind, f"codes 0 … {self.codes - 1}", f"0 other, 1 missing, {listed}"
        count = len(self.features)
        becomes = f"{count} number{'s' if count > 1 else ''}"
        if self.becomes == "one-hot":
            return self.name, self.kind, becomes, listed + (", missing" if self.indicator else "; missing: all 0")
        filled = f"missing: {self._shown(self.median)}" + (" and an indicator" if self.indicator else "")
        scale = "" if self.kind == "boolean" else f"mean {self._shown(self.mean)}, deviation {self.deviation:g}; "
        return self.name, self.kind, becomes, scale + filled

    def _shown(self, value: float) -> str:
        """A number of the column as text; a date as people write it. Times of day lie in [0, 1)."""
        is_day = self.kind == "date" and not 0 <= self.median < 1 and max(abs(self.mean), abs(self.median)) < _CALENDAR
        return f"{date(1970, 1, 1) + timedelta(days=value)}" if is_day else f"{value:g}"


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
        refuse_missing((column, "target", column.missing()))
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
            tell_of_rounding(str(column), {"the target": ([torch.from_numpy(values)], None)})
            distinct = np.unique(values)
            few = len(distinct) <= max(2, min(20, len(values) // 2)) and bool((distinct == distinct.round()).all())
            if kind is None and by_type == "number" and few:
                listed = shown_names([f"{value:g}" for value in distinct])
                raise InvalidData(
                    f"{column}, the target, holds only the whole numbers {listed}, though as floating numbers. {_WHICH_KIND}"
                )
            return cls(column.name, "number", mean=float(values.mean()), deviation=float(values.std()))
        named = tuple(str(each) for each in (range(classes) if isinstance(classes, int) else classes))
        require(len(set(named)) == len(named), "classes", "must name each class once", classes)
        if not named:
            codes, names = column.names()
            if kind is None and column.is_text:
                if len(names) > 20 and 2 * len(names) > len(codes):
                    raise InvalidData(
                        f"{column}, the target, holds {len(names)} different texts in {len(codes)} rows. Name another "
                        "target, or say what it is: target_kind='number' or 'classes'."
                    )
                tell_of_numbers_as_text(column, codes, names, "target_kind='number' or 'classes'")
            named = sorted_names([names[code] for code in np.unique(codes[rows])])
            if len(named) < 2:
                raise InvalidData(f"{column}, the target, {_always(named[0])}, or name all classes: classes=[…].")
            if kind is None and whole and (len(named) > 100 or _MANY_CLASSES < len(named) > len(rows) / 2):
                raise InvalidData(f"{column} holds {len(named)} different whole numbers. {_WHICH_KIND}")
            if kind is None and whole and len(named) > _MANY_CLASSES:
                text = f"{column}, the target, holds {len(named)} different whole numbers, {named[0]} … {named[-1]}, "
                text += "which are taken for classes without an order"
                notify(f'{text}. If it is a number to predict, write target_kind="number". If not: target_kind="classes".')
        return cls(column.name, "classes", named)

    def values_of(self, column: TableColumn) -> Tensor:
        """The targets (N,): classes as int64, numbers as float32."""
        if self.kind == "number":
            return torch.from_numpy(_target_numbers(column).astype(np.float32))
        codes, names = column.names()
        refuse_missing((column, "target", codes < 0))
        place = {name: code for code, name in enumerate(self.classes)}
        for code, name in enumerate(names):
            if name not in place:
                raise InvalidData(
                    f"{column}, {column.place(codes == code)} holds the class {name!r}, which is none of those of training "
                    f"({shown_names(self.classes)}). Repair or drop the row, or name all classes: classes=[…]."
                )
        return torch.from_numpy(np.array([place[name] for name in names], dtype=np.int64)[codes])

    def describe(self) -> tuple[str, str, str, str]:
        """The rule in four texts: the column's name, "target", what is predicted, and the classes or numbers of training."""
        if self.kind == "number":
            return self.name, "target", "a number, as it is", f"mean {self.mean:g}, deviation {self.deviation:g}"
        return self.name, "target", f"classes 0 … {len(self.classes) - 1}", shown_names(self.classes)


def _target_numbers(column: TableColumn) -> NDArray[np.float64]:
    column = column.as_dates()
    values = column.numbers_of_kind("date" if column.type_kind == "date" else "number")
    refuse_missing((column, "target", np.isnan(values)))
    if (large := np.abs(values) > np.finfo(np.float32).max).any():
        found = f"{column.place(large)} holds {values[large][0]:g}"
        raise InvalidData(f"{column}, the target, {found}, which is too large. Repair or scale it.")
    return values


def _always(value: str) -> str:
    return f"is always {value!r} among training clients, so that there is nothing to learn. Name another target"


def predicted_columns(model: nn.Module, inputs: Any, target: TargetRule) -> dict[str, Any]:
    """By class the probabilities (N,) of all rows, or by the target's name the numbers (N,), in float64.

    `inputs` is a tensor (N, F), or a dict of tensors that the model takes by name. The model is not changed.
    """
    if not isinstance(model, nn.Module):
        raise InvalidParameter("model", "must be a torch.nn.Module", type(model).__name__, "Give result.model.")
    at = next((value for value in model.parameters() if value.is_floating_point()), torch.empty(0))

    def placed(value: Tensor) -> Tensor:
        return value.to(at.device, at.dtype) if value.is_floating_point() else value.to(at.device)

    rows, training, found = len(leaves(inputs)[0]), model.training, []
    model.eval()
    try:
        with torch.inference_mode():
            for first in range(0, rows, _PIECE):
                piece = select(inputs, slice(first, first + _PIECE))
                if isinstance(piece, dict):
                    found.append(model(**{name: placed(value) for name, value in piece.items()}))
                else:
                    found.append(model(placed(piece)))
    finally:
        model.train(training)
    whole, count = torch.cat(found).double().cpu(), len(target.classes)
    if count and whole.shape == (rows, count):
        return dict(zip(target.classes, whole.softmax(1).t().numpy(), strict=True))
    if not count and whole.shape in ((rows,), (rows, 1)):
        return {target.name: whole.reshape(rows).numpy()}
    wanted = f"logits of shape ({rows}, {count}), one for each class" if count else f"numbers of shape ({rows},)"
    fix = "Give the model that was trained with this schema, e.g. result.model."
    raise InvalidParameter("model", f"must give {wanted}", tuple(whole.shape), fix)
