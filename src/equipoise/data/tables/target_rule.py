"""The rule of the target column of a table: the classes, or the number, that a model predicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.data.clients.client_set import prefix
from equipoise.data.clients.float32_rounding import Float32Rounding
from equipoise.data.tables.column_kinds import LIKE_MISSING, misread_text, numbers_of_kind
from equipoise.data.tables.missing_cells import refuse_missing
from equipoise.data.tables.table_column import TableColumn, shown_names, sorted_names
from equipoise.errors import InvalidData, notify, require

_WHICH_KIND = 'Is it a number to predict, or a class? Write target_kind="number" or target_kind="classes".'

FEW_ROWS, FEW_SHARE = 10, 0.005  # of rows: a class with fewer than both gets a notice
_MANY_CLASSES = 10  # whole numbers that are rather an amount than classes, if there are more

TargetKind = Literal["classes", "number"]


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
            exact, rounding = torch.from_numpy(values), Float32Rounding()
            rounding.add("the target", exact, exact.float())
            rounding.tell(str(column))
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
            if kind is None and column.is_text and len(names) > 20 and 2 * len(names) > len(codes):
                hint = misread_text(column, codes, names, "target_kind={!r}".format)
                cure = "Is it an identifier? Name another target. If they are classes: target_kind='classes'."
                raise InvalidData(
                    f"{column}, the target, holds {len(names)} different texts in {len(codes)} rows. {hint or cure}"
                )
            if kind is None and column.is_text and (odd := misread_text(column, codes, names, "target_kind={!r}".format)):
                text = f"{column}, the target, is read as text, of {len(names)} classes. {odd}"
                notify(f"{text} If they are classes: target_kind='classes'.")
            elif (
                kind is None and column.is_text and (blank := [name for name in names if name.strip().lower() in LIKE_MISSING])
            ):
                found = f"{column.place(codes == names.index(blank[0]))} holds {blank[0]!r}"
                text = f"{column}, the target, {found}, which is taken for a class"
                notify(f"{text}. If it stands for a missing answer, drop such rows. If it is a class: target_kind='classes'.")
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
        import pyarrow.types as kinds

        if self.kind == "number":
            return torch.from_numpy(_target_numbers(column).astype(np.float32))
        codes, names = column.names()
        refuse_missing((column, "target", codes < 0))
        place = {name: code for code, name in enumerate(self.classes)}
        for code, name in enumerate(names):
            if name not in place:
                everything = list(sorted_names([*self.classes, *(each for each in names if each not in place)]))
                shown = str(everything) if len(everything) <= 20 else "[…]"
                cure = f" If that is a mistake, repair or drop the row. If it is a class, name all: classes={shown}."
                if kinds.is_integer(column.values.type):
                    cure += ' If it is a number to predict, write target_kind="number".'
                raise InvalidData(
                    f"{column}, {column.place(codes == code)} holds the class {name!r}, which is none of those of "
                    f"training ({shown_names(self.classes)}).{cure}"
                )
        return torch.from_numpy(np.array([place[name] for name in names], dtype=np.int64)[codes])

    def describe(self) -> tuple[str, str, str, str]:
        """The rule in four texts: the column's name, "target", what is predicted, and the classes or numbers of training."""
        if self.kind == "number":
            return self.name, "target", "a number, as it is", f"mean {self.mean:g}, deviation {self.deviation:g}"
        return self.name, "target", f"classes 0 … {len(self.classes) - 1}", shown_names(self.classes)


def tell_of_rare_classes(target: TargetRule, codes: Tensor, source: str) -> None:
    """Give a notice of classes that hardly a row has, by the classes (N,) of all rows: such a class may be a mistake."""
    if target.kind != "classes":
        return
    counts = torch.bincount(codes, minlength=len(target.classes)).tolist()
    rows = len(codes)
    rare = [
        f"{name!r} has {n}" for name, n in zip(target.classes, counts, strict=True) if n < FEW_ROWS and n < FEW_SHARE * rows
    ]
    if rare:
        more = f" (and {len(rare) - 3} more such classes)" if len(rare) > 3 else ""
        text = f"{prefix(source)}column {target.name!r}, the target: class {', class '.join(rare[:3])} of {rows} rows{more}"
        notify(f"{text}. If that is a mistake, repair or drop these rows. If it is a class: target_kind='classes'.")


def _target_numbers(column: TableColumn) -> NDArray[np.float64]:
    column = column.as_dates()
    values = numbers_of_kind(column, "date" if column.type_kind == "date" else "number")
    refuse_missing((column, "target", np.isnan(values)))
    if (large := np.abs(values) > np.finfo(np.float32).max).any():
        found = f"{column.place(large)} holds {values[large][0]:g}"
        raise InvalidData(f"{column}, the target, {found}, which is too large. Repair or scale it.")
    return values


def _always(value: str) -> str:
    return f"is always {value!r} among training clients, so that there is nothing to learn. Name another target"
