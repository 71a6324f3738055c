"""The schema of a table: how each column is encoded, with numbers from the training clients alone."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from equipoise.core.files import PathLike, write_atomically
from equipoise.core.fingerprints import NO_PART_OF_FINGERPRINT
from equipoise.core.plain_text import content_of, made_of, parse_json
from equipoise.core.words import table_lines
from equipoise.data.clients.client_set import prefix
from equipoise.data.tables.arrow import arrow_table, check_names, table_like
from equipoise.data.tables.checks import AnswerCheck, count_missing, tell_of_numbers_as_text, tell_of_unseen
from equipoise.data.tables.column import CSV_DEFAULTS, Kind, Reading, TableColumn, reading_of, shown_names
from equipoise.data.tables.read import parquet_files, read_csv
from equipoise.data.tables.rules import AS_ASKED, ColumnRule, TargetKind, TargetRule, predicted_columns
from equipoise.errors import FileGuard, InvalidData, InvalidParameter, nearest_name, notify, require, require_integer

FORMAT = "equipoise schema 1"

_SAVED_INDEX = re.compile(r"|Unnamed: \d+|__index_level_\d+__")  # how pandas names an index that it saves, or reads again


@dataclass(frozen=True)
class Schema:
    """How each column of a table is encoded, so that other tables with these columns become inputs of the same model.

    It is fitted on training clients only. Its means, deviations, medians, categories and classes come from their data as they
    are: they are NOT covered by the ε of differential privacy, and a saved schema shows them to whoever reads it. In a
    federation, where nobody sees all data, the operator supplies a schema, for example one fitted on public data.

    `reading` are the options of `data.csv` by which the file of the table was read, as far as they are not the usual ones. New
    files are read by them. Schemas that differ in nothing else are equal. `client` is the column that named the client of each
    row, which is no input; empty if none is known.
    """

    columns: tuple[ColumnRule, ...]  # one for each column of the table but the target, in order
    target: TargetRule  # the column to predict, and how it is read
    reading: tuple[tuple[str, Reading], ...] = field(default=(), compare=False, metadata=NO_PART_OF_FINGERPRINT)
    client: str = field(default="", compare=False, metadata=NO_PART_OF_FINGERPRINT)

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
        rules: list[ColumnRule] = []
        odd: list[InvalidData] = []  # a user repairs all columns at once
        answer, check = None, None
        answers = TableColumn.of(table, target, source)
        try:
            answer = TargetRule.fit(answers, training, target_kind, classes)
            check = AnswerCheck.of(answers, answer.kind, training)
        except InvalidData as failure:
            odd.append(failure)
        for name in inputs:  # one at a time: the columns of files on disk need not fit into memory together
            if asked.get(name) == "left out":
                rules.append(ColumnRule(name, "category", "left out", note=AS_ASKED))
                continue
            column = TableColumn.of(table, name, source)
            try:
                if columns is None and name not in asked and _is_saved_index(column, table.column_names[0]):
                    notify(f"{column} is the index of a saved table, and left out. To use it: kinds={{{name!r}: 'number'}}.")
                    rules.append(ColumnRule(name, "number", "left out", note="the index of a saved table"))
                elif why := column.constant():
                    raise InvalidData(
                        f"{column} tells no example from another: {why}. Leave it out: kinds={{{name!r}: 'left out'}}."
                    )
                else:
                    kind = asked.get(name) or _usual_kind(column.as_dates())
                    rules.append(ColumnRule.fit(column, kind, training, one_hot))
                    if check is not None and name not in asked:
                        check.tell_of(column, kind)
            except InvalidData as failure:
                odd.append(failure)
        if odd:
            lines = "".join(f"\n  {number}. {str(each).removeprefix(prefix(source))}" for number, each in enumerate(odd, 1))
            raise odd[0] if len(odd) == 1 else InvalidData(f"{prefix(source)}{len(odd)} things are to be decided:{lines}")
        if answer is None or all(rule.becomes == "left out" for rule in rules):
            raise InvalidData(f"{source}: no column is left as an input; those that are there are left out or constant.")
        return cls(tuple(rules), answer, reading_of(table), client=client or "")

    @property
    def inputs(self) -> tuple[str, ...]:
        """The columns that the target is predicted from, in order."""
        return tuple(rule.name for rule in self.columns if rule.becomes != "left out")

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
        did not have. `frame` may also be the path of a CSV or Parquet file. A CSV file is read with the options of the
        training file. Of a piece of a larger table, `first` is the row where it begins, for errors.
        """
        frame, source = self._opened(frame, source)
        inputs, unseen = self.inputs_of(frame, source, first)
        tell_of_unseen(unseen, source)
        return inputs

    def predict(self, model: nn.Module, frame: Any, source: str = "table") -> Any:
        """What a trained model says about each row: a table with the probability of each class, in a column of its name.

        If the target is a number, the table has one column, of the target's name, in the target's unit. The rows need
        neither the target nor the client, and may belong to unseen clients. A notice names categories that training did not
        have. A pandas or Polars frame gives such a frame, with the index of the pandas frame; others an Arrow table.
        `frame` may also be the path of a CSV or Parquet file. A CSV file is read with the options of the training file.

        >>> import equipoise as eq
        >>> frame = {"who": ["a", "b"], "age": [30, 50], "ill": ["no", "yes"]}
        >>> schema = Schema.fit(frame, target="ill", client="who")
        >>> schema.predict(eq.models.Tabular(schema), {"age": [70]}).column_names
        ['no', 'yes']
        """
        frame, source = self._opened(frame, source)
        return table_like(frame, predicted_columns(model, self.transform(frame, source), self.target))

    def _opened(self, frame: Any, source: str) -> tuple[Any, str]:
        """The table that is given, or that of the file at a path, and what messages call it."""
        if not isinstance(frame, str | os.PathLike):
            return frame, source
        return read_rows(frame, self, dict(self.reading)), str(frame) if source == "table" else source

    def inputs_of(self, frame: Any, source: str = "table", first: int = 0) -> tuple[Any, dict[str, set[str]]]:
        """The inputs of a table, as `transform` makes them, and by column the categories that training did not have."""
        table = arrow_table(frame, source)
        known, used = set(table.column_names), [rule.name for rule in self.columns if rule.becomes != "left out"]
        read = {name: self._column(table, known, name, source, first) for name in used}
        numbers: list[NDArray[np.float32]] = []
        codes: list[NDArray[np.int64]] = []
        unseen: dict[str, set[str]] = {}
        for column in read.values():
            count_missing(column)
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
                f"{source}: column {name!r} of the schema is missing; the table has {shown_names(table.column_names)}. Add it "
                "(it may be empty), or fit another schema."
            )
        return TableColumn.of(table, name, source, first)

    def describe(self) -> str:
        """A table of the columns: what becomes of each, and by which numbers of the training clients."""
        rows = [("column", "kind", "becomes", "from training clients")]
        rows += [*(rule.describe() for rule in self.columns), self.target.describe()]
        return "\n".join(table_lines(rows))

    def to_json(self) -> str:
        """The schema as JSON."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Schema:
        """The schema that `to_json` wrote."""
        with FileGuard("The schema", InvalidData):
            content = parse_json(text, finite=True)
            version = content.pop("format", None) if isinstance(content, dict) else None
            if version != FORMAT:
                raise ValueError(f"it must be in the format {FORMAT!r}, but its format is {version!r}")
            made: Schema = made_of(cls, content)
            return made

    def save(self, path: PathLike) -> Path:
        """Write the schema as a JSON file."""
        return write_atomically(Path(path), self.to_json().encode())

    @classmethod
    def load(cls, path: PathLike) -> Schema:
        """Read a schema that `save` wrote."""
        require(isinstance(path, str | os.PathLike), "path", "must name a file", path)
        with FileGuard(path, InvalidData):
            return cls.from_json(content_of(Path(path)).decode())


def _is_saved_index(column: TableColumn, first: str) -> bool:
    """Whether a column is the index that pandas saved: a number without a name, in the first place."""
    named = _SAVED_INDEX.fullmatch(column.name) is not None and (bool(column.name) or column.name == first)
    return named and column.type_kind == "number"


def _checked_kinds(kinds: Any, inputs: list[str]) -> Mapping[str, Any]:
    """The kinds that a user asks for, by column; a name that is no input column, and an unknown kind, are refused."""
    require(isinstance(kinds, Mapping), "kinds", "must map names of columns to kinds", kinds)
    allowed = ("number", "boolean", "category", "date", "left out")
    for name, kind in kinds.items():
        rule = f"must name input columns, of {shown_names(inputs)}"
        require(name in inputs, "kinds", rule, name, nearest_name(str(name), inputs))
        require(kind in allowed, f"kinds[{name!r}]", f"must be one of {', '.join(allowed)}", kind)
    return dict(kinds)


def _usual_kind(column: TableColumn) -> Kind:
    """The kind by the column's type. Text that differs almost everywhere is refused."""
    kind = column.type_kind
    if kind == "category":
        codes, names = column.names()
        if column.is_text:
            tell_of_numbers_as_text(column, codes, names, f"kinds={{{column.name!r}: 'category'}}")
        if len(names) > 20 and 2 * len(names) > int((codes >= 0).sum()):
            raise InvalidData(
                f"{column} holds {len(names)} different texts in {len(codes)} rows. Leave it out, or say what it is, e.g. "
                f"kinds={{{column.name!r}: 'left out'}}."
            )
    return kind or "category"


def read_rows(path: PathLike, schema: Schema, reading: Mapping[str, Any], client: str = "") -> Any:
    """The rows of a CSV or Parquet file as an Arrow table; columns that were text in training are text, as 007 is no 7.

    A CSV file is read by the options `reading`, which stand for those of `data.csv`, and so is its column `client`.
    """
    return _read(path, reading, [rule.name for rule in schema.columns if _is_text(rule.categories)], client)


def read_columns(path: PathLike, reading: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Some columns of a CSV or Parquet file as an Arrow table; those of a CSV file as text, as they are written."""
    return _read(path, reading, names).select(list(names))


def _read(path: PathLike, reading: Mapping[str, Any], text: Sequence[str], client: str = "") -> Any:
    if Path(path).suffix == ".parquet" or Path(path).is_dir():
        return parquet_files(path, client).read()
    return read_csv(path, client=client, **{**CSV_DEFAULTS, **reading}, text=text)


def _is_text(categories: tuple[str, ...]) -> bool:
    """Whether categories are text that a reader could take for something else: some are neither numbers nor booleans."""

    def is_read_back(name: str) -> bool:
        try:
            return name in ("True", "False") or repr(float(name)).removesuffix(".0") == name
        except ValueError:
            return False

    return not all(map(is_read_back, categories))
