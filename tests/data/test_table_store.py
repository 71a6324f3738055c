"""CSV and Parquet files of any size into a store: what the pieces give is what the whole table gives."""

import numpy as np
import pytest
import torch

import equipoise as eq
from equipoise.data.tables import read
from equipoise.errors import InvalidData, InvalidParameter

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

BOTH = {"client": "who", "target": "ill"}


def table(clients=30, seed=0):
    rng = np.random.default_rng(seed)
    who = np.repeat([f"h{k:02d}" for k in range(clients)], rng.integers(2, 9, clients))
    age = rng.normal(50, 10, len(who)).round(2)
    return pa.table(
        {
            "who": who,
            "age": pa.array(age, mask=rng.random(len(who)) < 0.1),
            "town": rng.choice(["Aarau", "Bern", "Chur"], len(who)),
            "visits": rng.integers(0, 5, len(who)),
            "ill": rng.choice(["no", "yes"], len(who)),
        }
    )


def written(tmp_path, rows, **options):
    parquet.write_table(rows, tmp_path / "table.parquet", row_group_size=17)
    return eq.data.open_store(eq.data.write_table_store(tmp_path / "table.parquet", tmp_path / "store", **BOTH, **options))


def assert_same(data, expected):
    assert data.schema == expected.schema
    assert data.classes == expected.classes
    assert list(data.splits) == list(expected.splits)
    for part, clients in data.splits.items():
        other = expected.splits[part]
        assert list(clients.ids) == list(other.ids)
        assert torch.equal(clients.sizes, other.sizes)
        for mine, its in zip(eq.core.trees.leaves(clients.x), eq.core.trees.leaves(other.x), strict=True):
            assert torch.equal(mine, its)
        assert torch.equal(clients.y, other.y)


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(read, "_PIECE_ROWS", 7)
    monkeypatch.setattr(read, "_BLOCK_BYTES", 200)


@pytest.mark.parametrize("memory", [0, 1e9])
@pytest.mark.parametrize("one_hot", [16, 2])  # 2: towns become codes, and inputs a dict
def test_a_parquet_file_is_stored_as_from_frame_reads_it(tmp_path, small_pieces, memory, one_hot):
    options = {"validation": 0.2, "seed": 3, "one_hot": one_hot}
    expected = eq.data.from_frame(table(), **BOTH, **options)
    assert_same(written(tmp_path, table(), memory=memory, **options), expected)


def test_a_folder_with_a_folder_for_each_client(tmp_path, small_pieces):
    parquet.write_to_dataset(table(), tmp_path / "parts", partition_cols=["who"])
    eq.data.write_table_store(tmp_path / "parts", tmp_path / "store", **BOTH, memory=0)
    assert_same(eq.data.open_store(tmp_path / "store"), eq.data.parquet(tmp_path / "parts", **BOTH))
    assert eq.data.open_store(tmp_path / "store").name == "parts"


def as_csv(rows, path):
    from pyarrow import csv

    csv.write_csv(rows, path)


def test_csv_files_of_a_folder_are_one_table(tmp_path, small_pieces):
    (tmp_path / "files").mkdir()
    rows = table()
    cut = rows["who"].to_pylist().index("h15") + 1  # in the middle of a client
    as_csv(rows.slice(0, cut), tmp_path / "files" / "a.csv")
    as_csv(rows.slice(cut), tmp_path / "files" / "b.csv")
    expected = eq.data.from_frame(rows, **BOTH)
    for memory in (0, 1e9):
        store = eq.data.write_table_store(tmp_path / "files", tmp_path / f"store{memory}", **BOTH, memory=memory)
        assert_same(eq.data.open_store(store), expected)


def test_types_of_csv_files_come_from_all_rows(tmp_path, small_pieces):
    count = 60
    columns = {
        "who": [f"c{k // 3:03d}" for k in range(count)],
        "grows": [*range(count - 1), "0.5"],  # whole numbers, then another
        "late": [*[""] * (count - 1), "2026-11-16"],  # nothing at first, then a date
        "text": [*(k % 2 for k in range(count - 1)), "x"],
        "ill": [k % 2 for k in range(count)],
    }
    lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    opened = read.csv_files(tmp_path / "t.csv", client="who", delimiter=",", decimal=".", encoding="utf-8", missing=())
    whole = read.read_csv(tmp_path / "t.csv", client="who", delimiter=",", decimal=".", encoding="utf-8", missing=())
    assert opened.read().schema.types == whole.schema.types
    assert opened.read().to_pydict() == whole.to_pydict()
    assert opened.num_rows == count


def test_an_interrupted_table_goes_on(tmp_path, small_pieces, monkeypatch):
    parquet.write_table(table(), tmp_path / "t.parquet")
    real, calls = eq.data.Schema.targets, []

    def failing(self, *given):
        calls.append(given)
        if len(calls) == 9:
            raise KeyboardInterrupt
        return real(self, *given)

    monkeypatch.setattr(eq.data.clients.client_batches, "BATCH_BYTES", 100)
    monkeypatch.setattr(eq.data.store.store_writer, "JOURNAL_BYTES", 100)
    monkeypatch.setattr(eq.data.Schema, "targets", failing)
    with pytest.raises(KeyboardInterrupt):
        eq.data.write_table_store(tmp_path / "t.parquet", tmp_path / "store", **BOTH, memory=0)
    with pytest.raises(InvalidData, match="interrupted after"):
        eq.data.open_store(tmp_path / "store")
    eq.data.write_table_store(tmp_path / "t.parquet", tmp_path / "store", **BOTH, memory=0)
    assert_same(eq.data.open_store(tmp_path / "store"), eq.data.from_frame(table(), **BOTH))


def test_rows_of_a_client_must_stand_together_where_the_table_is_read_in_pieces(tmp_path, small_pieces):
    mixed = table().take(np.random.default_rng(1).permutation(len(table())))
    parquet.write_table(mixed, tmp_path / "t.parquet")
    with pytest.raises(InvalidParameter, match=r"comes again in row .* Sort the table by 'who'"):
        eq.data.write_table_store(tmp_path / "t.parquet", tmp_path / "store", **BOTH, memory=0)
    store = eq.data.write_table_store(tmp_path / "t.parquet", tmp_path / "store", **BOTH)  # read whole
    assert_same(eq.data.open_store(store), eq.data.from_frame(mixed, **BOTH))


def test_a_given_schema_is_used_and_new_data_are_appended(tmp_path, small_pieces):
    schema = eq.data.from_frame(table(seed=1), **BOTH).schema
    schema.save(tmp_path / "given.json")
    data = written(tmp_path, table(), schema=tmp_path / "given.json", memory=0)
    assert_same(data, eq.data.from_frame(table(), **BOTH, schema=schema))
    more = table(10, seed=5)
    more = more.set_column(0, "who", [[f"new{who}" for who in more["who"].to_pylist()]])
    parquet.write_table(more, tmp_path / "more.parquet")
    options = {**BOTH, "memory": 0, "append": True}
    with pytest.raises(InvalidParameter, match="its schema is"):
        eq.data.write_table_store(tmp_path / "more.parquet", tmp_path / "store", **options)  # would fit another
    store = eq.data.write_table_store(
        tmp_path / "more.parquet", tmp_path / "store", schema=tmp_path / "store/schema.json", **options
    )
    assert sum(len(clients) for clients in eq.data.open_store(store).splits.values()) == 40


@pytest.mark.parametrize("memory", [0, 1e9])
@pytest.mark.parametrize(
    ("column", "row", "value", "message"),
    [
        ("age", 50, float("inf"), "column 'age', row 50 holds inf"),
        ("ill", 60, None, "column 'ill', the target, is missing: 1 rows, first row 60"),
        ("who", 70, None, "column 'who', the client, is missing: 1 rows, first row 70"),
    ],
)
def test_errors_name_rows_of_the_whole_table(tmp_path, small_pieces, memory, column, row, value, message):
    rows = table()
    values = rows[column].to_pylist()
    values[row] = value
    rows = rows.set_column(rows.column_names.index(column), column, [values])
    with pytest.raises(InvalidData, match=message):
        written(tmp_path, rows, memory=memory)


def test_a_piece_names_the_row_of_the_whole_table_with_a_given_schema(tmp_path, small_pieces):
    schema = eq.data.from_frame(table(), **BOTH).schema
    rows = table().to_pydict()
    rows["ill"][90] = "maybe"
    with pytest.raises(InvalidData, match="row 90 holds the class 'maybe'"):
        written(tmp_path, pa.table(rows), schema=schema, memory=0)


def test_refusals_of_table_stores(tmp_path, small_pieces):
    with pytest.raises(InvalidParameter, match="Did you mean 'ills'"):
        written(tmp_path, table().rename_columns(["who", "age", "town", "visits", "ills"]), memory=0)
    with pytest.raises(InvalidData, match="no row"):
        written(tmp_path, table().slice(0, 0), memory=-1)
    with pytest.raises(InvalidData, match=r"nowhere\.parquet does not exist"):
        eq.data.write_table_store(tmp_path / "nowhere.parquet", tmp_path / "s", **BOTH)
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "table.parquet").read_bytes()[:-9])
    with pytest.raises(InvalidData, match="is no complete Parquet file"):
        eq.data.write_table_store(tmp_path / "cut.parquet", tmp_path / "s", **BOTH)
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "a.csv").write_text("who,ill\na,1\n")
    (tmp_path / "two" / "b.csv").write_text("who,well\na,1\n")
    with pytest.raises(InvalidData, match=r"b\.csv: its columns are not those of .*a\.csv"):
        eq.data.write_table_store(tmp_path / "two", tmp_path / "s", **BOTH)
    (tmp_path / "odd.csv").write_bytes(b"who;ill\na;\xff\n")
    with pytest.raises(InvalidData, match="Did you mean delimiter=';'"):
        eq.data.write_table_store(tmp_path / "odd.csv", tmp_path / "s", **BOTH, memory=0)
    with pytest.raises(InvalidData, match="not text in utf-8"):
        eq.data.write_table_store(tmp_path / "odd.csv", tmp_path / "s", **BOTH, memory=0, delimiter=";")
    with pytest.raises(InvalidParameter, match="encoding that Python knows"):
        eq.data.write_table_store(tmp_path / "odd.csv", tmp_path / "s", **BOTH, memory=0, encoding="utf-99")


def test_the_schema_of_a_store_is_checked_when_it_is_opened(tmp_path):
    data = eq.data.from_frame(table(), **BOTH)
    store = eq.data.write_store(data, tmp_path / "store")
    assert_same(eq.data.open_store(store), data)
    text = (store / "schema.json").read_text()
    (store / "schema.json").write_text(text.replace("Bern", "Biel"))
    for opened in (eq.data.open_store, eq.data.check_store):
        with pytest.raises(InvalidData, match="is not the schema that the store was written with"):
            opened(store)
    (store / "schema.json").unlink()
    with pytest.raises(InvalidData, match="does not exist"):
        eq.data.open_store(store)


def test_a_store_of_a_table_trains_its_network(tmp_path):
    data = written(tmp_path, table(), memory=0)
    result = eq.train(eq.models.Tabular(data.schema, hidden=(4,)), data, rounds=2, clients_per_round=3)
    result.save(tmp_path / "run")
    assert eq.data.Schema.load(tmp_path / "run" / "schema.json") == data.schema
