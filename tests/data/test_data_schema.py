"""The schema of a table: how it reads, how it is saved, and what is said about one that is damaged."""

import json
from datetime import date, time

import numpy as np
import pytest

import equipoise as eq
from equipoise.data.tables import Schema
from equipoise.data.tables.rules import ColumnRule, TargetRule
from equipoise.errors import InvalidData, InvalidParameter, NotWritten

FRAME = {
    "who": ["a", "a", "b", "b"],
    "age": [20, 40, None, 60],
    "ward": ["east", "west", "north", None],
    "drug": ["x", "y", None, "x"],
    "smoker": [True, None, False, True],
    "row": [1, 2, 3, 4],
    "ill": ["no", "yes", "no", "yes"],
}
SCHEMA = Schema.fit(FRAME, target="ill", client="who", one_hot=2, kinds={"row": "left out"})


def test_describe():
    assert SCHEMA.describe().splitlines() == [
        "column  kind      becomes        from training clients",
        "age     number    2 numbers      mean 40, deviation 16.3299; missing: 40 and an indicator",
        "ward    category  codes 0 … 4    0 other, 1 missing, east, north, west",
        "drug    category  3 numbers      x, y, missing",
        "smoker  boolean   2 numbers      missing: 1 and an indicator",
        "row     –         left out       as asked",
        "ill     target    classes 0 … 1  no, yes",
    ]
    assert SCHEMA.feature_names == ("age", "age missing", "drug=x", "drug=y", "drug missing", "smoker", "smoker missing")
    assert SCHEMA.embedded == {"ward": 5}
    number = Schema.fit(FRAME, target="row", columns=["age"], target_kind="number")
    assert number.describe().splitlines()[-1] == "row     target  a number, as it is  mean 2.5, deviation 1.11803"
    many = Schema.fit({"x": list("abcdefgh"), "y": [0, 1] * 4}, target="y")
    assert "a, b, c, d, e, f … (8 in all); missing: all 0" in many.describe()


def test_dates_are_described_as_dates():
    days = {"day": [date(2024, 1, 1), date(2024, 1, 3)], "time": [time(6), time(18)], "y": [0, 1]}
    lines = Schema.fit(days, target="y").describe().splitlines()
    assert lines[1].endswith("mean 2024-01-02, deviation 1; missing: 2024-01-02")
    assert lines[2].endswith("mean 0.5, deviation 0.25; missing: 0.5")  # of a day


def test_training_rows_alone_are_looked_at():
    schema = Schema.fit(FRAME, target="ill", client="who", rows=[0, 1], columns=["age", "ward"])
    assert (schema.columns[0].mean, schema.columns[0].deviation, schema.columns[0].indicator) == (30.0, 10.0, False)
    assert schema.columns[1].categories == ("east", "west")


def test_save_and_load(tmp_path):
    path = SCHEMA.save(tmp_path / "folder" / "schema.json")
    assert Schema.load(path) == SCHEMA
    assert hash(Schema.load(str(path))) == hash(SCHEMA)
    assert json.loads(path.read_text(encoding="utf-8"))["format"] == "equipoise schema 1"
    assert repr(eq.data.Schema.load(path)) == repr(SCHEMA)


def changed(**changes):
    content = json.loads(SCHEMA.to_json())
    content.update(changes)
    return json.dumps(content)


FIRST = json.loads(SCHEMA.to_json())["columns"][0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not valid JSON"),
        ("[1]", "must be in the format 'equipoise schema 1', but its format is None"),
        (changed(format="equipoise schema 9"), "but its format is 'equipoise schema 9'"),
        (changed(columns=3), "is damaged at columns"),
        (changed(columns=[{**FIRST, "mean": "much"}]), "is damaged at columns.0.mean"),
        (changed(columns=[{**FIRST, "becomes": "lost"}]), "is damaged at columns.0.becomes"),
        (changed(columns=[{**FIRST, "deviation": -1.0}]), "must have a deviation ≥ 0, but is -1.0"),
        (changed(columns=[{**FIRST, "mean": float("nan")}]), "not finite"),
        (changed(columns=[{**FIRST, "categories": ["a", "a"]}]), "must name each category once"),
        (changed(columns=[FIRST, FIRST]), "columns must have different names"),
        (changed(columns=[{**FIRST, "becomes": "left out"}]), "columns must leave at least one input"),
        (changed(target={"name": "ill", "kind": "classes"}), "must have different classes, or a finite mean"),
        (changed(target={"name": "ill", "kind": "number", "deviation": 0.0}), "must have different classes, or a finite mean"),
        ('{"format": "equipoise schema 1"}', "is damaged at columns"),
    ],
)
def test_damaged_schemas_are_refused(tmp_path, text, words):
    with pytest.raises(InvalidData) as caught:
        Schema.from_json(text)
    assert words in str(caught.value)
    (tmp_path / "bad.json").write_text(text, encoding="utf-8")
    with pytest.raises(InvalidData, match=r"bad\.json "):
        Schema.load(tmp_path / "bad.json")


def test_files_that_cannot_be_used(tmp_path):
    with pytest.raises(InvalidData, match="does not exist"):
        Schema.load(tmp_path / "nowhere.json")
    with pytest.raises(InvalidData, match="cannot be read"):
        Schema.load(tmp_path)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(InvalidData, match="cannot be read"):
        Schema.load(tmp_path / "bytes.json")
    with pytest.raises(NotWritten):
        SCHEMA.save(tmp_path)


def test_rules_are_checked_when_made():
    with pytest.raises(InvalidParameter, match="finite"):
        ColumnRule("x", "number", "scaled", deviation=np.inf)
    with pytest.raises(InvalidParameter, match="different classes"):
        TargetRule("y", "classes", ("a", "a"))
    with pytest.raises(AttributeError):
        SCHEMA.columns = ()  # type: ignore[misc]


def test_the_docstring_says_that_privacy_does_not_cover_it():
    assert "NOT covered by the ε" in Schema.__doc__
