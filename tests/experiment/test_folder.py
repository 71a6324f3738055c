import json
import tomllib

import pyarrow.parquet
import pytest
from safetensors.torch import load_file

from equipoise.errors import ConfigError, Diverged
from equipoise.experiment import folder
from equipoise.experiment.build import build
from equipoise.experiment.config import RunConfig
from equipoise.experiment.config_tables import override

TABLE = {
    "data": {"name": "label_shift", "train_clients": 12, "validation_clients": 2, "test_clients": 3, "examples": 20},
    "model": {"name": "softmax"},
    "train": {"rounds": 3, "clients_per_round": 6},
}


def experiment(*overrides):
    return build(RunConfig.of(override(TABLE, overrides)))


def test_a_run_leaves_all_its_files_and_nothing_else(tmp_path):
    place = folder.claim(tmp_path / "a" / "run")
    result = folder.run(experiment("train.evaluate_every=1"), place, progress=False)
    names = {"checkpoint", "clients.parquet", "config.toml", "model.safetensors", "report.html", "rounds.jsonl"}
    assert {p.name for p in place.path.iterdir()} == names | {"model.json", "model.card.md", "model.card.json"}
    assert [p.name for p in (place.path / "checkpoint").iterdir()] == ["state.safetensors"]
    events = [json.loads(line)["event"] for line in place.rounds.read_text().splitlines()]
    assert events == ["start", *["round", "evaluation"] * 3, "end"]
    rows = pyarrow.parquet.read_table(place.clients).to_pylist()
    assert len(rows) == 12 + 2 + 3
    assert {(row["method"], row["seed"]) for row in rows} == {("run", 0)}
    assert [row["error"] for row in rows] == result.clients.error.tolist()
    saved = load_file(place.model)
    assert {n: t.shape for n, t in saved.items()} == {"weight": (10, 20), "bias": (10,)}
    assert all(saved[name].equal(value) for name, value in result.model.state_dict().items())
    assert "<html" in place.report.read_text(encoding="utf-8")


def test_a_run_from_its_own_config_gives_the_same_model(tmp_path):
    first, second = folder.claim(tmp_path / "first"), folder.claim(tmp_path / "second")
    folder.run(experiment(), first, progress=False)
    folder.run(build(RunConfig.read(first.config)), second, progress=False)
    for file in ("config.toml", "model.safetensors"):
        assert (first.path / file).read_bytes() == (second.path / file).read_bytes()
    ours, theirs = (pyarrow.parquet.read_table(place.clients).drop_columns(["method"]) for place in (first, second))
    assert ours.equals(theirs)


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"is not empty, and a run never overwrites another\. Name a new folder"):
        folder.claim(tmp_path)
    with pytest.raises(ConfigError, match="is a file"):
        folder.claim(tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_refused_with_its_path(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/run cannot be"):
        folder.claim(tmp_path / "file" / "run")


def test_free_folders_are_numbered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    taken, config = [], RunConfig.of(override(TABLE, ["train.seed=4"]))
    for _ in range(3):
        taken.append(folder.free_folder(tmp_path / "tail.toml", config))
        taken[-1].mkdir(parents=True)
    assert [p.name for p in taken] == ["tail-4", "tail-4-2", "tail-4-3"]


def test_a_diverging_run_keeps_its_log_and_says_where(tmp_path):
    place = folder.claim(tmp_path / "run")
    with pytest.raises(Diverged) as caught:
        folder.run(
            experiment("algorithm.solver.lr=1e38", "algorithm.risk=superquantile", "train.rounds=20"), place, progress=False
        )
    assert caught.value.__notes__ == [f"What was logged is in {place.rounds}."]
    logged = place.rounds.read_text().splitlines()[1:-1]  # after the start, before why it stopped
    assert len(logged) == caught.value.round
    assert tomllib.loads(place.config.read_text())["algorithm"]["solver"]["lr"] == 1e38
    assert not place.report.exists()
