"""What a trained model says about new rows: `Schema.predict`, and `equipoise predict` on the folder of a run."""

import csv
import importlib.util
import json
import re
import shutil
import sys
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from typer.testing import CliRunner

import equipoise as eq
from equipoise.cli import app
from equipoise.errors import EquipoiseNotice, InvalidParameter

COUNT = 240
DRAW = np.random.default_rng(0)
FRAME = pd.DataFrame(
    {
        "shop": [f"shop {row % 12}" for row in range(COUNT)],
        "price": DRAW.gamma(2, 700, COUNT).round(2),
        "town": [f"0{row % 23}" for row in range(COUNT)],  # more than 16 categories: codes; 007 is no 7
        "returned": DRAW.choice(["no", "yes"], COUNT),
        "days": DRAW.gamma(2, 3, COUNT),
    }
)
NEW = pd.DataFrame({"price": [10.0, None], "town": ["03", "nowhere"], "shop": ["a new shop", "another"]}, index=[7, 9])


def load(target="returned", **options):
    kinds = {"town": "category"}
    inputs = ["price", "town"]
    return eq.data.from_frame(FRAME, client="shop", target=target, columns=inputs, kinds=kinds, test=0.25, **options)


def predicted(schema, model, frame=NEW):
    with pytest.warns(EquipoiseNotice, match="categories that training did not have: 'nowhere'"):
        return schema.predict(model, frame)


@pytest.mark.parametrize("one_hot", [16, 30])  # codes and numbers, or numbers alone
def test_probabilities_by_class(one_hot):
    data = load(one_hot=one_hot)
    model = eq.models.Tabular(data.schema, hidden=(8,), dropout=0.5)
    told = predicted(data.schema, model)
    assert list(told.columns) == ["no", "yes"]
    assert list(told.index) == [7, 9]
    assert model.training  # as it was
    with pytest.warns(EquipoiseNotice):
        inputs = data.schema.transform(NEW)
    expected = model.eval()(inputs).softmax(1).detach().double().numpy()
    np.testing.assert_allclose(told.to_numpy(), expected, rtol=1e-6)
    np.testing.assert_allclose(told.sum(axis=1), 1.0)


def test_the_network_takes_the_dict_as_its_one_argument():
    data = load()
    model, inputs = eq.models.Tabular(data.schema), data.schema.transform(FRAME)
    assert set(inputs) == {"numbers", "codes"}
    assert torch.equal(model(inputs), model(**inputs))
    with pytest.raises(InvalidParameter, match='inputs must be one dict of "numbers" and "codes"'):
        model({"numbers": inputs["numbers"], "cods": inputs["codes"]})
    with pytest.raises(InvalidParameter, match="give nothing beside it"):
        model(inputs, inputs["codes"])


def test_numbers_are_in_the_unit_of_the_target():
    data = load("days")
    model = eq.models.Tabular(data.schema)
    told = predicted(data.schema, model, pa.Table.from_pandas(NEW, preserve_index=False))
    with pytest.warns(EquipoiseNotice):
        expected = model(data.schema.transform(NEW)).detach()
    assert told.column_names == ["days"]
    np.testing.assert_allclose(told.column("days").to_numpy(), expected.numpy(), rtol=1e-6)


def test_tables_come_back_as_they_were_given():
    data = load()
    model = eq.models.Tabular(data.schema)
    assert isinstance(predicted(data.schema, model, pl.from_pandas(NEW)), pl.DataFrame)
    assert isinstance(predicted(data.schema, model, {"price": [1], "town": ["nowhere"]}), pa.Table)


def test_models_that_do_not_fit():
    data = load(one_hot=30)
    with pytest.raises(InvalidParameter, match=r"model must give logits of shape \(240, 2\).*but is \(240, 3\)"):
        data.schema.predict(torch.nn.Linear(data.features, 3), FRAME)
    with pytest.raises(InvalidParameter, match=r"model must be a torch\.nn\.Module"):
        data.schema.predict("model", FRAME)


# ---------------------------------------------------------------------------------------------------------------- command line

CONFIG = """
[data]
name = "csv"
path = "shops.csv"
client = "shop"
target = "returned"
delimiter = ";"
decimal = ","
columns = ["price", "town"]
kinds = {town = "category"}
[model]
name = "tabular"
hidden = [4]
[train]
rounds = 2
clients_per_round = 4
"""


@pytest.fixture
def shops(tmp_path, monkeypatch):
    """A folder with a table, and new rows in the same spelling."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EQUIPOISE_ONNX", "0")
    FRAME.to_csv("shops.csv", index=False, sep=";", decimal=",")
    NEW.assign(town=["03", "04"]).to_csv("new.csv", index=False, sep=";", decimal=",")
    (tmp_path / "run.toml").write_text(CONFIG)
    return tmp_path


def call(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments])


def rows_of_text(text):
    return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(text.splitlines())]


def rows_of(path):
    return rows_of_text(Path(path).read_text())


def test_a_run_predicts_new_rows(shops):
    assert call("run", "run.toml", "--out", "mine").exit_code == 0
    (shops / "shops.csv").unlink()  # the data are not needed again
    done = call("predict", "mine", "new.csv", "--out", "out.csv")
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() == "out.csv: 2 rows"
    told = rows_of("out.csv")
    assert [list(row) for row in told] == [["no", "yes"], ["no", "yes"]]
    assert all(sum(row.values()) == pytest.approx(1) for row in told)
    assert call("predict", "mine", "new.csv").stdout == (shops / "out.csv").read_text()
    taken = call("predict", "mine", "new.csv", "--out", "new.csv")
    assert taken.exit_code == 2
    assert "--out new.csv is there already. Name another file, or add --overwrite." in " ".join(taken.stderr.split())
    assert call("predict", "mine", "new.csv", "--out", "out.csv", "--overwrite").exit_code == 0
    (shops / "plain.csv").write_text("price,town\n10.0,03\n,04\n")
    changed = call("predict", "mine", "plain.csv", "--set", 'delimiter=","', "--set", 'decimal="."')
    assert changed.stdout == (shops / "out.csv").read_text()
    page = (shops / "mine" / "report.html").read_text()
    assert "Trained on shops: returned from price, town." in page
    FRAME.to_csv("shops.csv", index=False, sep=";", decimal=",")
    again = call("report", "mine", "--out", "again.html")
    assert again.exit_code == 0, again.output
    assert "returned from price, town." in (shops / "again.html").read_text()


def test_a_run_may_leave_out_small_clients(shops):
    done = call("run", "run.toml", "--out", "mine", "--at-least", "5")
    assert done.exit_code == 0, done.output
    assert "with 5 examples or more" in " ".join(done.stdout.split())
    assert "with 5 examples or more" in (shops / "mine" / "report.html").read_text().replace("\u00a0", " ")
    (shops / "family.toml").write_text(CONFIG + "[family]\ntails = [1.0, 0.5]\n")
    refused = call("run", "family.toml", "--out", "family", "--at-least", "5")
    assert refused.exit_code == 2
    assert "--at-least is for a run of one model" in " ".join(refused.stderr.split())
    assert not (shops / "family").exists()


def test_columns_are_kept_as_they_are_written(shops):
    assert call("run", "run.toml", "--out", "mine").exit_code == 0
    (shops / "named.csv").write_text("id;price;town\n007;10,50;03\nA 1;;04\n", encoding="utf-8")
    done = call("predict", "mine", "named.csv", "--keep", "id", "--keep", "price")
    assert done.exit_code == 0, done.output
    with_ids = list(csv.DictReader(done.stdout.splitlines()))
    assert [list(row) for row in with_ids] == [["id", "price", "no", "yes"]] * 2
    assert [(row["id"], row["price"]) for row in with_ids] == [("007", "10,50"), ("A 1", "")]
    assert "has no such column. Unknown column 'ids'. Did you mean 'id'?" in " ".join(
        call("predict", "mine", "named.csv", "--keep", "ids").stderr.split()
    )


def test_the_truth_stands_beside_the_prediction(shops):
    """A kept column keeps its name, and what the model says of it is "predicted …"; columns of one name are refused."""
    whole = Path("run.toml").read_text().replace('"returned"', '"days"')
    Path("days.toml").write_text(whole)
    assert call("run", "days.toml", "--out", "mine").exit_code == 0
    done = call("predict", "mine", "shops.csv", "--keep", "days")
    assert done.exit_code == 0, done.stderr
    rows = list(csv.DictReader(done.stdout.splitlines()))
    assert list(rows[0]) == ["days", "predicted days"]
    assert [float(row["days"].replace(",", ".")) for row in rows] == FRAME["days"].tolist()
    assert call("predict", "mine", "shops.csv").stdout.splitlines()[1:] == [row["predicted days"] for row in rows]
    (shops / "clash.csv").write_text("days;predicted days;price;town\n1;2;10,50;03\n")
    refused = call("predict", "mine", "clash.csv", "--keep", "days", "--keep", "predicted days")
    assert refused.exit_code == 2
    assert "the output has a column 'predicted days' of its own" in " ".join(refused.stderr.split())


@pytest.mark.parametrize(("error", "power"), [("absolute_error", 1), ("squared_error", 2), ("own_errors:cubed", 3)])
def test_a_configuration_names_the_error_that_judges_clients(error, power, shops):
    """The error of a client is the mean of |prediction − target|^power over its rows, by what `predict` writes."""
    (shops / "own_errors.py").write_text("def cubed(outputs, targets):\n    return (outputs - targets).abs() ** 3\n")
    days = CONFIG.replace('"returned"', '"days"').replace("[data]", "[data]\ntest = 0.0", 1)
    (shops / "days.toml").write_text(f'{days}error = "{error}"\n')
    done = call("run", "days.toml", "--out", "mine")
    assert done.exit_code == 0, done.stderr
    told = np.array([row["days"] for row in rows_of_text(call("predict", "mine", "shops.csv").stdout)])
    expected = (FRAME["days"] - told).abs().pow(power).groupby(FRAME["shop"]).mean()
    clients = eq.ClientTable.from_parquet("mine/clients.parquet")
    np.testing.assert_allclose(clients.error.numpy(), expected[list(clients.client)].to_numpy(), rtol=1e-4)
    name = {1: "absolute error", 2: "squared error", 3: "cubed"}[power]
    assert f"by their {name} of days" in " ".join(done.stdout.split())
    assert call("run", "days.toml", "--explain").exit_code == 0


def test_files_show_the_digits_of_float32(shops):
    """Each number is the shortest text that float32 reads back, of at most 9 significant digits, and no fewer."""
    data = load("days")
    result = eq.train(eq.models.Tabular(data.schema, hidden=(4,)), data, rounds=1, clients_per_round=3, progress=False)
    result.save("saved")
    done = call("predict", "saved", "shops.csv", "--set", "delimiter=;", "--set", 'decimal=","')
    written = done.stdout.splitlines()[1:]
    told = data.schema.predict(result.model, FRAME)["days"].to_numpy()
    assert [np.float32(text) for text in written] == told.astype(np.float32).tolist()
    assert max(len(text.lstrip("-0.").replace(".", "")) for text in written) <= 9
    assert all(text == np.format_float_positional(np.float32(text), trim="0") for text in written)


def test_a_schema_remembers_how_its_file_was_read(shops):
    options = {"client": "shop", "target": "returned", "columns": ["price", "town"], "kinds": {"town": "category"}}
    data = eq.data.csv("shops.csv", delimiter=";", decimal=",", missing=["?"], **options)
    assert data.schema.reading == (("delimiter", ";"), ("decimal", ","), ("missing", ("?",)))
    result = eq.train(eq.models.Tabular(data.schema), data, rounds=1, clients_per_round=4, progress=False)
    told = data.schema.predict(result.model, NEW.assign(town=["03", "04"]))  # as a CSV file has them
    for path in ("new.csv", shops / "new.csv"):  # a path is read by these options, too
        assert data.schema.predict(result.model, path).to_pandas().equals(told.reset_index(drop=True))
        torch.testing.assert_close(data.schema.transform(path), data.schema.transform(NEW.assign(town=["03", "04"])))
    with pytest.raises(eq.errors.InvalidParameter, match=r"must be a pandas, Polars or Arrow table"):
        data.schema.transform(data)
    result.save("saved")
    assert eq.data.Schema.load("saved/schema.json").reading == data.schema.reading
    done = call("predict", "saved", "new.csv", "--out", "out.csv")
    assert done.exit_code == 0, done.output
    np.testing.assert_allclose([list(row.values()) for row in rows_of("out.csv")], told.to_numpy())
    with pytest.raises(eq.errors.InvalidData, match=r"gone\.csv does not exist"):
        data.schema.predict(result.model, "gone.csv")
    eq.data.write_table_store("shops.csv", "a.store", delimiter=";", decimal=",", missing=["?"], **options)
    assert eq.data.open_store("a.store").schema.reading == data.schema.reading
    (shops / "folder").mkdir()
    (shops / "shops.csv").rename("folder/1.csv")
    eq.data.write_table_store("folder", "b.store", delimiter=";", decimal=",", missing=["?"], **options)
    assert eq.data.open_store("b.store").schema.reading == data.schema.reading


def test_advice_on_a_file_that_cannot_be_read_is_for_the_shell(shops):
    (shops / "run.toml").write_text(CONFIG)
    done = call("run", "run.toml", "--out", "mine")
    assert done.exit_code == 0, done.output
    (shops / "comma.csv").write_text("price,town\n10.5,03\n")
    (shops / "tab.csv").write_text("price\ttown\n10.5\t03\n")
    (shops / "latin.csv").write_bytes("price;town\n10,5;Zürich\n".encode("latin-1"))
    for name, setting in (("comma", "delimiter=,"), ("tab", r"""'delimiter="\t"'"""), ("latin", "encoding=latin-1")):
        assert call("predict", "mine", f"{name}.csv").exit_code == 2
        again = call("predict", "mine", f"{name}.csv", "--set", setting.strip("'"), "--set", f"decimal={',.'[name != 'latin']}")
        assert again.exit_code == 0, again.output


def test_how_a_file_was_read_is_no_part_of_what_a_schema_computes():
    from equipoise.core.fingerprints import fingerprint

    plain = load().schema
    other = eq.data.Schema(plain.columns, plain.target, (("decimal", ","),))
    assert other == plain
    assert fingerprint(other) == fingerprint(plain)
    assert json.loads(plain.to_json())["reading"] == []


@pytest.mark.parametrize(("hidden", "dropout"), [((), 0.0), ((4,), 0.5), ((5, 3), 0.0)])
def test_a_result_saved_from_python_predicts_new_rows(hidden, dropout, shops):
    data = load()
    result = eq.train(eq.models.Tabular(data.schema, hidden=hidden, dropout=dropout), data, rounds=1, clients_per_round=4)
    result.save("saved")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        told = data.schema.predict(result.model, NEW.assign(town=["03", "04"]))
    done = call("predict", "saved", "new.csv", "--out", "out.csv", "--set", "delimiter=;", "--set", 'decimal=","')
    assert done.exit_code == 0, done.output
    np.testing.assert_allclose([list(row.values()) for row in rows_of("out.csv")], told.to_numpy())


def test_a_family_asks_which_model(shops):
    config = CONFIG + "[algorithm.risk]\nname = 'superquantile'\ntail = 0.5\n[family]\ntails = [1.0, 0.5]\n"
    (shops / "family.toml").write_text(config)
    done = call("run", "family.toml", "--out", "family")
    assert done.exit_code == 0, done.output
    asked = call("predict", "family", "new.csv")
    assert asked.exit_code == 2
    assert "tail-1.0, tail-0.5, but member is None. Write --member tail-1.0" in " ".join(asked.stderr.split())
    assert call("predict", "family", "new.csv", "--member", "0.5").stdout.startswith('"no","yes"')


def test_what_cannot_be_predicted_says_why(shops):
    assert "mine does not exist" in " ".join(call("predict", "mine", "new.csv").stderr.split())
    (shops / "empty").mkdir()
    assert "empty is no folder of a run" in " ".join(call("predict", "empty", "new.csv").stderr.split())
    (shops / "study" / "first").mkdir(parents=True)
    (shops / "study" / "first" / "config.toml").touch()
    assert "It holds the runs study/first" in " ".join(call("predict", "study", "new.csv").stderr.split())
    assert call("run", "run.toml", "--out", "mine").exit_code == 0
    assert "nothing.csv does not exist" in call("predict", "mine", "nothing.csv").stderr
    unknown = call("predict", "mine", "new.csv", "--set", "delimeter=;")
    assert "Did you mean 'delimiter'" in unknown.stderr
    (shops / "short.csv").write_text("price\n10,5\n")
    assert "column 'town' of the schema is missing" in call("predict", "mine", "short.csv").stderr
    (shops / "mine" / "schema.json").unlink()
    assert "are no table" in call("predict", "mine", "new.csv").stderr


def test_runs_print_the_worst_clients_and_refusals_in_the_words_of_a_file(shops):
    FRAME.assign(order=[f"A-{row}" for row in range(COUNT)]).to_csv("shops.csv", index=False, sep=";", decimal=",")
    done = call("run", "run.toml", "--set", 'data.columns=["price", "order"]', "--set", "data.kinds={}", "--out", "no")
    assert done.exit_code == 2
    wrong = call("run", "run.toml", "--set", "data.client=shopp", "--out", "no").stderr
    assert "Did you mean 'shop'?" in wrong
    assert "pandas" not in wrong
    large = call("run", "run.toml", "--set", "train.clients_per_round=100", "--out", "no").stderr
    assert 'algorithm.sampler.name = "proportional"' in " ".join(large.split())
    told = call("run", "run.toml", "--set", "data.split_by=examples", "--out", "mine").stdout
    assert re.search(
        r"The clients that are served worst, by their 0-1 error:\n"
        r"  client .* size  error  95 % interval +trivial error\n  shop ",
        told,
    )
    assert "--at-least 30" in told
    assert "gets wrong, from 0 to 1." in told


READING = ["--set", "delimiter=;", "--set", 'decimal=","']
METHODS = {
    "Ditto": eq.personal.Ditto(strength=0.5),
    "finetuning": eq.personal.Finetuning(),
    "APFL": eq.personal.APFL(),
    "split": eq.personal.FedPer("layers.*.bias"),
}


def with_own_models(personal=METHODS["Ditto"], **options):
    """A result with own models, saved in the folder "own"; a week's shops, of which one is new."""
    data = load(split_by="examples")
    algorithm = eq.Algorithm(personal=personal, solver=eq.solvers.SGD(lr=0.5, batch_size=5))
    model = eq.models.Tabular(data.schema, hidden=(4,))
    result = eq.train(model, data, algorithm, rounds=3, clients_per_round=12, progress=False, **options)
    result.save("own")
    week = FRAME.iloc[[3, 0, 17, 15, 30]].assign(shop=["shop 3", "shop 0", "a new shop", "shop 3", None])
    week.to_csv("week.csv", index=False, sep=";", decimal=",")
    return data.schema, result, week


@pytest.mark.parametrize("method", METHODS)
def test_clients_are_predicted_by_their_own_models(method, shops):
    schema, result, week = with_own_models(METHODS[method])
    done = call("predict", "own", "week.csv", "--out", "out.csv", *READING)
    assert done.exit_code == 0, done.stderr
    said = "Rows by the clients' own models: 3 (clients: 2); by the shared model: 2 "
    said += "(clients without an own model: a new shop; rows without a client: 1)."
    rows = result.clients.where("test")
    worse = int((rows.personal_error > rows.error).sum())
    told = f"Clients whose own model is worse than the shared one: {worse} of 12 (run)."
    assert " ".join(done.stderr.split()) == (f"{said} {told}" if worse else said)
    assert (told in str(result.summary())) == (worse > 0)
    models = [result.personal.model("shop 3"), result.personal.model("shop 0"), result.model]
    by = [schema.predict(model, week).to_numpy() for model in models]
    expected = np.stack([by[which][row] for row, which in enumerate([0, 1, 2, 0, 2])])
    assert np.abs(expected - by[2]).max() > 1e-4  # own models differ from the shared one
    np.testing.assert_allclose([list(row.values()) for row in rows_of("out.csv")], expected, rtol=1e-6)
    saved = eq.read_personal_models("own")
    for found in (saved.predict(week), result.personal.predict(week)):
        assert found.pop("predicted by").tolist() == [f"{each} model" for each in ("own", "own", "shared", "own", "shared")]
        assert found.index.equals(week.index)
        np.testing.assert_allclose(found.to_numpy(), expected, rtol=1e-6)
    with pytest.raises(InvalidParameter, match="client must name a column of the table, but is 'shop'"):
        saved.predict(week.drop(columns="shop"))
    renamed = week.rename(columns={"shop": "store"})
    assert saved.predict(renamed, client="store").equals(saved.predict(week))
    shared = call("predict", "own", "week.csv", "--shared", "--out", "shared.csv", *READING)
    assert shared.stderr.startswith("All rows by the shared model: --shared")
    np.testing.assert_allclose([list(row.values()) for row in rows_of("shared.csv")], by[2], rtol=1e-6)


def test_own_models_of_a_configuration_and_of_rows_without_clients(shops):
    config = CONFIG + "[algorithm.personal]\nname = 'ditto'\nstrength = 0.5\n"
    (shops / "own.toml").write_text(config.replace("[data]", '[data]\nsplit_by = "examples"', 1))
    assert call("run", "own.toml", "--out", "own").exit_code == 0
    done = call("predict", "own", "shops.csv")
    assert f"own models: {COUNT} (clients: 12); by the shared model: 0 (clients without an own model: none" in done.stderr
    pa.parquet.write_table(pa.Table.from_pandas(FRAME), "shops.parquet")
    assert call("predict", "own", "shops.parquet").stdout == done.stdout
    FRAME.drop(columns="shop").to_csv("nobody.csv", index=False, sep=";", decimal=",")
    done = call("predict", "own", "nobody.csv")
    assert done.exit_code == 0, done.stderr
    assert "All rows by the shared model: --shared, or no column 'shop' in nobody.csv" in " ".join(done.stderr.split())
    FRAME.rename(columns={"shop": "store"}).to_csv("store.csv", index=False, sep=";", decimal=",")
    named = call("predict", "own", "store.csv", "--client", "store")
    assert named.stdout == call("predict", "own", "shops.csv").stdout != done.stdout
    assert "--client stor: store.csv has no such column. Unknown column 'stor'. Did you mean 'store'?" in " ".join(
        call("predict", "own", "store.csv", "--client", "stor").stderr.split()
    )


def test_folders_that_do_not_say_whose_a_model_is(shops):
    with_own_models(evaluate_clients=5)
    Path("own/personal.ids.json").unlink()  # as earlier versions left it
    refused = call("predict", "own", "week.csv", *READING)
    assert refused.exit_code == 2
    assert "must hold floating numbers of shape (5, 308)" in " ".join(refused.stderr.split())
    assert call("predict", "own", "week.csv", "--shared", *READING).exit_code == 0
    shutil.rmtree("own")
    with_own_models()
    whole = call("predict", "own", "week.csv", *READING).stdout
    schema = json.loads(Path("own/schema.json").read_text())
    assert schema.pop("client") == "shop"
    Path("own/schema.json").write_text(json.dumps(schema))  # as earlier versions wrote it
    refused = call("predict", "own", "week.csv", *READING)
    assert refused.exit_code == 2
    assert "does not say which column names the client. Write --client COLUMN, or --shared" in " ".join(refused.stderr.split())
    assert call("predict", "own", "week.csv", "--client", "shop", *READING).stdout == whole


def test_damaged_own_models_are_refused(shops):
    with_own_models()
    rows = np.load("own/personal.npy")
    Path("own/personal.npy").write_bytes(Path("own/personal.npy").read_bytes()[:-4])
    assert "personal.npy is damaged: it is not what the run has left" in " ".join(
        call("predict", "own", "week.csv", *READING).stderr.split()
    )
    log = Path("own/rounds.jsonl").read_text().splitlines()
    Path("own/rounds.jsonl").write_text("\n".join(log[:-1]) + "\n")  # without checksums
    wrong = {
        "holds float32 of shape (12, 3), but must hold": rows[:, :3],
        "holds int64 of shape": rows.astype(np.int64),
        "must hold floating numbers of shape (12, 308)": np.concatenate([rows, rows]),
        "cannot be read": np.array([{}] * 12, dtype=object),  # pickled
    }
    for words, values in wrong.items():
        np.save("own/personal.npy", values, allow_pickle=True)
        refused = call("predict", "own", "week.csv", *READING)
        assert refused.exit_code == 2, words
        assert words in " ".join(refused.stderr.split())
        with pytest.raises(eq.errors.ConfigError, match=re.escape(words)):
            eq.read_personal_models("own")


def test_a_folder_names_all_clients_if_a_sample_of_them_was_evaluated(shops):
    with_own_models()
    whole, every = call("predict", "own", "week.csv", *READING), eq.read_personal_models("own").ids
    assert not Path("own/personal.ids.json").exists()  # clients.parquet names them
    shutil.rmtree("own")
    _, result, _ = with_own_models(evaluate_clients=5)
    assert result.sampled["train"] == (5, 12)
    sampled, own = call("predict", "own", "week.csv", *READING), eq.read_personal_models("own")
    assert sampled.exit_code == 0
    by_which = "own models: 3 (clients: 2); by the shared model: 2"
    assert sampled.stdout == whole.stdout
    assert by_which in sampled.stderr  # how many own models are worse is known of other clients
    assert by_which in whole.stderr
    assert own.ids == every == tuple(result.personal.ids)
    left_out = next(name for name in own.ids if name not in result.clients.where("train").client)
    read, made = (models.model(left_out).state_dict() for models in (own, result.personal))
    assert all(value.equal(made[name]) for name, value in read.items())
    ids = Path("own/personal.ids.json")
    ids.write_text(json.dumps([*every[1:], every[0]]))
    with pytest.raises(eq.errors.ConfigError, match=r"personal\.ids\.json is damaged"):
        eq.read_personal_models("own")
    log = Path("own/rounds.jsonl")
    log.write_text("\n".join(log.read_text().splitlines()[:-1]) + "\n")  # without checksums
    for wrong in ('{"a": 1}', "[1, 2]", json.dumps([*every[1:], every[1]]), "[", ""):
        ids.write_text(wrong)
        with pytest.raises(eq.errors.ConfigError, match=r"cannot be read: .* Run it anew\."):
            eq.read_personal_models("own")


def test_own_models_that_no_folder_holds_are_told_of(shops):
    data = load(split_by="examples")
    adapted = eq.Algorithm(solver=eq.solvers.MAML())
    model = eq.models.Tabular(data.schema, hidden=(4,))
    eq.train(model, data, adapted, rounds=1, clients_per_round=3, progress=False).save("adapted")
    done = call("predict", "adapted", "new.csv", *READING)
    assert done.exit_code == 0
    assert "All rows by the shared model: Its clients were judged by models" in " ".join(done.stderr.split())
    with pytest.raises(eq.errors.ConfigError, match=r"has no personal\.npy\. Its clients were judged by models"):
        eq.read_personal_models("adapted")
    eq.train(model, data, rounds=1, clients_per_round=3, progress=False).save("plain")
    assert call("predict", "plain", "new.csv", *READING).stderr == ""
    with pytest.raises(eq.errors.ConfigError, match=r"has no personal\.npy\. The run had no personal=…"):
        eq.read_personal_models("plain")


def test_own_models_are_read_in_python(shops):
    schema, result, week = with_own_models()
    own = eq.read_personal_models("own")
    assert (len(own), own.ids, repr(own)) == (12, tuple(result.personal.ids), "SavedPersonalModels(clients: 12)")
    for client in own.ids:
        assert schema.predict(own.model(client), week).equals(schema.predict(result.personal.model(client), week))
    with pytest.raises(
        InvalidParameter, match=r"client must be the id of a client with a model of its own, but is 'a new shop'\. Known are"
    ):
        own.model("a new shop")


def test_own_models_of_a_network_of_the_users_own_have_their_statistics(shops):
    data = load(one_hot=30, split_by="examples")

    def make():
        layers = [torch.nn.Linear(data.features, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)]
        return torch.nn.Sequential(*layers)

    algorithm = eq.Algorithm(personal=eq.personal.Ditto(), solver=eq.solvers.SGD(lr=0.1, batch_size=5))
    result = eq.train(make(), data, algorithm, rounds=2, clients_per_round=12, progress=False)
    result.save("own")
    with pytest.raises(InvalidParameter, match="model must be given for this run, whose folder holds no code"):
        eq.read_personal_models("own")
    with pytest.raises(eq.errors.ConfigError, match="does not fit the model of the parameter `model`"):
        eq.read_personal_models("own", torch.nn.Linear(3, 2))
    with pytest.raises(InvalidParameter, match="model must be a torch"):
        eq.read_personal_models("own", "Net")
    own, client = eq.read_personal_models("own", make()), "shop 5"
    expected, found = result.personal.model(client).state_dict(), own.model(client).state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    assert not torch.equal(found["1.running_mean"], result.model.state_dict()["1.running_mean"])


OWN = """
import torch

class Net(torch.nn.Module):
    def __init__(self, features, hidden=5):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(features, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 2))

    def forward(self, x):
        return self.layers(x)

def make(schema):
    return Net(len(schema.feature_names), 3)

def needs(depth):
    return None

def no_module():
    return 3

def breaks():
    raise KeyError("weights")
"""


@pytest.fixture
def own_net(shops):
    """A run of a network of the user's own, whose file is there, and its predictions for new rows."""
    (shops / "own_net.py").write_text(OWN)
    spec = importlib.util.spec_from_file_location("own_net", shops / "own_net.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    data = load(one_hot=30)
    result = eq.train(module.make(data.schema), data, rounds=1, clients_per_round=4, progress=False)
    result.save("own")
    yield [list(row.values()) for row in data.schema.predict(result.model, NEW.assign(town=["03", "04"])).to_dict("records")]
    sys.modules.pop("own_net", None)


def test_a_network_of_the_users_own_predicts_new_rows(own_net):
    reading = ["--set", "delimiter=;", "--set", 'decimal=","']
    told = " ".join(call("predict", "own", "new.csv").stderr.split())
    assert "with the model own_net:Net of your own. Write --model my_model:make" in told
    done = call("predict", "own", "new.csv", "--model", "own_net:make", "--out", "out.csv", *reading)
    assert done.exit_code == 0, done.stderr
    np.testing.assert_allclose([list(row.values()) for row in rows_of("out.csv")], own_net, rtol=1e-6)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("own_net:Net", "layers.0.weight: (3, 24) in the file, (5, 24) in the model"),
        ("own_net:needs", "it needs depth, which nobody gives. Name a function of yours"),
        ("own_net:no_module", "must make a torch.nn.Module, but made a int"),
        ("own_net:breaks", "own_net:breaks failed: KeyError: 'weights' ("),
        ("own_net:none", "must be a class or function of"),
        ("nowhere:Net", "nowhere:Net was not found"),
        ("own_net", 'must have the form "module:name"'),
        ("os:system", "is the name of a module of Python itself"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(model, words, own_net):
    refused = call("predict", "own", "new.csv", "--model", model)
    assert refused.exit_code == 2
    assert words in " ".join(refused.stderr.split())
    assert "Traceback" not in refused.stderr


def test_a_configuration_that_names_a_network_needs_no_option(own_net):
    config = CONFIG.replace('name = "tabular"\nhidden = [4]', 'name = "own_net:Net"')
    Path("named.toml").write_text(config.replace("[data]", "[data]\none_hot = 30", 1))
    done = call("run", "named.toml", "--out", "named")
    assert done.exit_code == 0, done.stderr
    done = call("predict", "named", "new.csv", "--out", "out.csv")
    assert done.exit_code == 0, done.stderr
    assert len(rows_of("out.csv")) == 2
