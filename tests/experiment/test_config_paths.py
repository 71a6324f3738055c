"""Paths in configurations start from the configuration's folder; tables, stores and models that read a schema, from TOML."""

import os
import tomllib
from pathlib import Path

import numpy as np
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from typer.testing import CliRunner

import equipoise as eq
from equipoise.cli.commands import app
from equipoise.errors import ConfigError, EquipoiseError, InvalidData
from equipoise.experiment.build import build
from equipoise.experiment.config import RunConfig

EXAMPLES = Path(__file__).parents[2] / "examples"
TRAIN = '[train]\nrounds = 2\nclients_per_round = 2\nengine = "loop"\nthreads = 1\n'


def command(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def write_npz(path, features):
    path.parent.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(40, features)), generator.integers(0, 2, 40)
    np.savez(path, x=x, y=y, client=np.arange(40) % 8)


@pytest.fixture
def places(tmp_path, monkeypatch):
    """The folder of a configuration, and another that is the working directory."""
    beside, here = tmp_path / "beside", tmp_path / "here"
    beside.mkdir()
    here.mkdir()
    (beside / "run.toml").write_text(f'[data]\nname = "npz"\npath = "d/x.npz"\n[model]\nname = "softmax"\n{TRAIN}')
    monkeypatch.chdir(here)
    return beside, here


def test_a_path_starts_from_the_configuration_and_else_from_the_working_directory(places):
    beside, here = places
    with pytest.raises(InvalidData, match=f"{beside}/d/x.npz does not exist"):  # nowhere: the error names the first choice
        build(RunConfig.read("../beside/run.toml"))
    write_npz(here / "d" / "x.npz", 3)
    assert build(RunConfig.read("../beside/run.toml")).data.features == 3  # as it always was
    write_npz(beside / "d" / "x.npz", 5)
    config = RunConfig.read("../beside/run.toml")
    assert build(config).data.features == 5  # the configuration's folder wins
    assert config.data.parameters["path"] == str(beside / "d" / "x.npz")


@pytest.mark.parametrize("given", ["~/d/x.npz", "{home}/d/x.npz"])
def test_absolute_paths_and_the_home_folder_are_taken_as_they_are(places, tmp_path, monkeypatch, given):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = RunConfig.read(places[0] / "run.toml", [f"data.path={given.format(home=tmp_path)}"])
    assert config.data.parameters["path"] == f"{tmp_path}/d/x.npz"


@pytest.mark.parametrize("given", ["x" * 5000, "a\\u0000b", "~no-such-user/x"])
def test_paths_that_no_system_has_are_refused_by_name(places, given):
    config = RunConfig.read(places[0] / "run.toml", [f'data.path="{given}"'])
    with pytest.raises(EquipoiseError, match=r"cannot be read|does not exist"):
        build(config)


def test_a_run_resumes_from_any_directory(places, tmp_path, monkeypatch):
    beside, _ = places
    write_npz(beside / "d" / "x.npz", 5)
    assert command("run", "../beside/run.toml", "--out", tmp_path / "a").exit_code == 0
    table = tomllib.loads((tmp_path / "a" / "config.toml").read_text())
    assert table["data"]["path"] == str(beside / "d" / "x.npz")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.toml").write_bytes((tmp_path / "a" / "config.toml").read_bytes())
    monkeypatch.chdir("/")
    found = command("run", "--resume", tmp_path / "b")
    assert found.exit_code == 0, found.output
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


def test_a_csv_file_becomes_a_run_with_a_model_that_fits_its_schema(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = os.path.relpath(EXAMPLES / "adult-by-country.csv", tmp_path)
    about = f'path = "{name}"\nclient = "country"\ntarget = "income"\ntest = 0.25\nmissing = ["?"]\n'
    (tmp_path / "run.toml").write_text(f'[data]\nname = "csv"\n{about}[model]\nname = "tabular"\nhidden = [8]\n{TRAIN}')
    found = command("run", "run.toml", "--out", "out")
    assert found.exit_code == 0, found.output
    config = tomllib.loads((tmp_path / "out" / "config.toml").read_text())
    assert config["data"]["path"] == str(EXAMPLES / "adult-by-country.csv")
    assert config["model"] == {"name": "tabular", "hidden": [8], "dropout": 0.0, "seed": 0}
    assert eq.data.Schema.load(tmp_path / "out" / "schema.json") == build(RunConfig.read("out/config.toml")).data.schema


def test_parquet_and_csv_give_the_same_data(tmp_path):
    table = pyarrow.table({"who": list("aabbccdd"), "age": [1.0, 2, 3, 4, 5, None, 7, 8], "ill": ["no", "yes"] * 4})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    pyarrow.csv.write_csv(table, tmp_path / "t.csv")
    found = []
    for kind in ("csv", "parquet"):
        text = f'[data]\nname = "{kind}"\npath = "t.{kind}"\nclient = "who"\ntarget = "ill"\n[data.kinds]\nage = "number"\n'
        (tmp_path / f"{kind}.toml").write_text(f'{text}[model]\nname = "tabular"\n{TRAIN}')
        config = RunConfig.read(tmp_path / f"{kind}.toml")
        assert RunConfig.of(tomllib.loads(config.text())) == config
        found.append(build(config))
    assert torch.equal(found[0].data.train.x, found[1].data.train.x)
    assert repr(found[0].model) == repr(found[1].model)
    with pytest.raises(ConfigError, match=r"data\.colour: Unknown key 'colour'\."):
        RunConfig.read(tmp_path / "csv.toml", ["data.colour=3"])
    with pytest.raises(ConfigError, match=r"data\.target is missing: csv needs it, text"):
        RunConfig.of({"data": {"name": "csv", "path": "t.csv", "client": "who"}, "model": "tabular", "train": {}} | TABLE)


TABLE = {"train": {"rounds": 1, "clients_per_round": 1}}


def test_a_model_of_tables_is_refused_for_other_data():
    with pytest.raises(ConfigError, match="reads schema, which the data 'label_shift' have not"):
        build(RunConfig.of({"data": "label_shift", "model": "tabular", **TABLE}))


def test_a_store_is_opened_from_a_configuration(tmp_path, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    clients = [(f"c{k}", torch.randn(6, 3, generator=generator), torch.arange(6) % 2) for k in range(10)]
    eq.data.write_store(clients, tmp_path / "phones.store")
    (tmp_path / "run.toml").write_text(f'[data]\nname = "store"\npath = "phones.store"\n[model]\nname = "softmax"\n{TRAIN}')
    monkeypatch.chdir("/")
    found = command("run", tmp_path / "run.toml", "--out", tmp_path / "out")
    assert found.exit_code == 0, found.output
    config = RunConfig.read(tmp_path / "out" / "config.toml")
    assert config.data.parameters["path"] == str(tmp_path / "phones.store")
    assert len(build(config).data.train) == 8
