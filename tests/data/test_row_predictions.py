"""What a trained model says about new rows: `Schema.predict`, and `equipoise predict` on the folder of a run."""

import csv
import importlib.util
import re
import sys
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
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


def rows_of(path):
    with open(path, newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


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
    (shops / "clash.csv").write_text("yes;price;town\n1;10,50;03\n")
    assert "a column 'yes' of its own" in call("predict", "mine", "clash.csv", "--keep", "yes").stderr


def test_a_schema_remembers_how_its_file_was_read(shops):
    options = {"client": "shop", "target": "returned", "columns": ["price", "town"], "kinds": {"town": "category"}}
    data = eq.data.csv("shops.csv", delimiter=";", decimal=",", missing=["?"], **options)
    assert data.schema.reading == (("delimiter", ";"), ("decimal", ","), ("missing", ("?",)))
    result = eq.train(eq.models.Tabular(data.schema), data, rounds=1, clients_per_round=4, progress=False)
    told = data.schema.predict(result.model, NEW.assign(town=["03", "04"]))  # as a CSV file has them
    for path in ("new.csv", shops / "new.csv"):  # a path is read by these options, too
        assert data.schema.predict(result.model, path).to_pandas().equals(told.reset_index(drop=True))
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


def test_how_a_file_was_read_is_no_part_of_what_a_schema_computes():
    from equipoise.core.fingerprints import fingerprint

    plain = load().schema
    other = eq.data.Schema(plain.columns, plain.target, (("decimal", ","),))
    assert other == plain
    assert fingerprint(other) == fingerprint(plain)
    assert "reading" not in plain.to_json()


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
    assert "tail-1.0, tail-0.5, but none is named. Write --member tail-1.0" in " ".join(asked.stderr.split())
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
    refused = call(
        "run", "run.toml", "--set", 'data.columns=["price", "order"]', "--set", "data.kinds={}", "--out", "no"
    ).stderr
    assert 'In [data] of a file: kinds.order = "left out". [EQ302]' in " ".join(refused.split())
    wrong = call("run", "run.toml", "--set", "data.client=shopp", "--out", "no").stderr
    assert "Did you mean 'shop'?" in wrong
    assert "pandas" not in wrong
    large = call("run", "run.toml", "--set", "train.clients_per_round=100", "--out", "no").stderr
    assert 'algorithm.sampler.name = "proportional"' in " ".join(large.split())
    told = call("run", "run.toml", "--set", "data.split_by=examples", "--out", "mine").stdout
    assert re.search(
        r"The 5 clients that are served worst, by their 0-1 error:\n  client .* size  error  95 % interval\n  shop ", told
    )
    assert re.search(
        r"fewer than 30 examples: .*; equipoise report mine --at-least 30 leaves (it|them) out\.|All \d+ test", told
    )
    assert "gets wrong, from 0 to 1." in told


def test_predictions_of_a_run_with_own_models_say_whose_they_are(shops):
    data = load(split_by="examples")
    algorithm = eq.Algorithm(personal=eq.personal.Finetuning())
    result = eq.train(eq.models.Tabular(data.schema, hidden=(4,)), data, algorithm, rounds=1, clients_per_round=3)
    result.save("own")
    done = call("predict", "own", "new.csv", "--out", "out.csv", "--set", "delimiter=;", "--set", 'decimal=","')
    assert done.exit_code == 0, done.stderr
    said = " ".join(done.stderr.split())
    assert "These predictions are of the shared model. The run has own models of 12 clients" in said


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
    assert "with the model own_net:Net of your own. Write --model own_net:Net, or --model my_model:make" in told
    done = call("predict", "own", "new.csv", "--model", "own_net:make", "--out", "out.csv", *reading)
    assert done.exit_code == 0, done.stderr
    np.testing.assert_allclose([list(row.values()) for row in rows_of("out.csv")], own_net, rtol=1e-6)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("own_net:Net", "layers.0.weight has the shape (3, 24) in the file, but (5, 24) in the model"),
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
