"""What the table of docs/reference/files.md says of the files of a run: which are needed to predict, and what they reveal."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import equipoise as eq
from equipoise.cli.commands import app

CLIENTS = [f"clinic {k} of {(k * 7919) % 1000 + 1000}" for k in range(12)]
AGES = [20.0 + (row * 37) % 61 for row in range(360)]
CONFIG = """
[data]
name = "csv"
path = "{path}"
client = "site"
target = "ill"
split_by = "examples"
[model]
name = "tabular"
hidden = []
[algorithm]
{algorithm}
[train]
rounds = 2
clients_per_round = 6
"""
PLAIN = 'personal = {name = "ditto", strength = 0.5}'
PRIVATE = 'privacy = {name = "differential_privacy", epsilon = 5.0, delta = 1e-2, clip = 0.1}'
DISTRIBUTED = PRIVATE.replace("}", ', noise = "distributed"}')
SUMS = 'weights = "uniform"\nprivacy = {name = "secure_aggregation"}'


@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
@pytest.mark.parametrize("algorithm", [PLAIN, PRIVATE, DISTRIBUTED, SUMS], ids=["plain", "private", "distributed", "sums"])
def test_what_predicting_needs_and_what_files_reveal(tmp_path, algorithm):
    table, config, run = tmp_path / "visits.csv", tmp_path / "run.toml", tmp_path / "run"
    rows = [f"{CLIENTS[row % 12]},{age},{'yes' if age + row % 7 > 50 else 'no'}" for row, age in enumerate(AGES)]
    table.write_text("\n".join(["site,age,ill", *rows]) + "\n")
    config.write_text(CONFIG.format(path=table, algorithm=algorithm))
    made = CliRunner().invoke(app, ["run", str(config), "--out", str(run)])
    assert made.exit_code == 0, made.output
    protected = algorithm != PLAIN

    few = tmp_path / "few"
    few.mkdir()
    for name in ("model.safetensors", "schema.json", "config.toml"):
        shutil.copy(run / name, few)
    answers = [CliRunner().invoke(app, ["predict", str(each), str(table), "--shared"]) for each in (run, few)]
    assert answers[1].exit_code == 0, answers[1].output
    assert answers[0].stdout == answers[1].stdout

    named = {path.name: sum(client.encode() in path.read_bytes() for client in CLIENTS)
             for path in run.rglob("*") if path.is_file()}  # fmt: skip
    del named["clients.parquet"], named["report.html"]  # both are packed
    assert set(eq.ClientTable.from_parquet(run / "clients.parquet").client) == set(CLIENTS)
    cards = {named.pop("model.card.md"), named.pop("model.card.json")}
    assert cards == ({0} if protected else {5})
    took_part = {named.pop("rounds.jsonl"), named.pop("state.safetensors")}  # with the cohort of each round
    assert took_part == ({0} if protected else {9})
    assert not any(named.values()), named
    assert str(table) in (run / "config.toml").read_text()
    assert '"seed": 0' in (run / "rounds.jsonl").read_text()
    assert ("ledger.jsonl" in named) is protected
    (age,) = (each for each in json.loads((run / "schema.json").read_text())["columns"] if each["name"] == "age")
    trained = eq.data.csv(table, client="site", target="ill", split_by="examples")
    assert age["mean"] == trained.schema.columns[0].mean
    assert age["mean"] == pytest.approx(np.mean(AGES), rel=0.05)
    if not protected:
        assert len(np.load(run / "personal.npy")) == 12
        assert (Path(run) / "checkpoint" / "state.clients.npy").exists()
