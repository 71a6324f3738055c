"""The model of one run for other programs: left by the run itself, or written later by `equipoise export`."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import equipoise as eq
from equipoise.cli.commands import app
from equipoise.experiment.family_files import SINGLE_MANIFEST, read_manifest
from equipoise.export.onnx_runs import OnnxModel
from equipoise.serve.model_store import find_versions

pytest.importorskip("onnxruntime")
CONFIG = """
[data]
name = "label_shift"
train_clients = 12
validation_clients = 0
test_clients = 16
examples = 10
[model]
name = "softmax"
[train]
rounds = 3
clients_per_round = 4
"""


@pytest.fixture
def done(tmp_path):
    """The folder of a finished run without ONNX."""
    (tmp_path / "run.toml").write_text(CONFIG)
    made = CliRunner().invoke(app, ["run", str(tmp_path / "run.toml"), "--out", str(tmp_path / "run")])
    assert made.exit_code == 0, made.output
    return tmp_path / "run"


def outputs(place):
    x = np.random.default_rng(0).normal(size=(5, 20)).astype(np.float32)
    state = load_file(place / "model.safetensors")
    model = eq.models.Softmax(20, 10)
    model.load_state_dict(state)
    (got,) = OnnxModel((place / "model.onnx").read_bytes(), source="model.onnx")([x])
    return got, model(torch.from_numpy(x)).detach().numpy()


def test_a_run_leaves_its_model_for_other_programs(tmp_path, monkeypatch):
    monkeypatch.delenv("EQUIPOISE_ONNX")
    (tmp_path / "run.toml").write_text(CONFIG)
    made = CliRunner().invoke(app, ["run", str(tmp_path / "run.toml"), "--out", str(tmp_path / "run")], env={"COLUMNS": "300"})
    assert made.exit_code == 0, made.output
    assert "model.onnx" in made.output
    got, wanted = outputs(tmp_path / "run")
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
    card = json.loads((tmp_path / "run" / "model.card.json").read_text())
    assert card["metrics"]["test"]["clients"] == 16
    (version,), wrong = find_versions(tmp_path / "run")
    assert (version.single, wrong, version.manifest.members[0].no_onnx) == (True, [], None)


def test_what_was_left_out_is_written_later(done, monkeypatch):
    before = {path.name: path.read_bytes() for path in done.iterdir() if path.is_file()}
    assert "model.onnx" not in before
    assert "EQUIPOISE_ONNX=0" in read_manifest(done, SINGLE_MANIFEST).members[0].no_onnx
    refused = CliRunner().invoke(app, ["export", str(done)], env={"COLUMNS": "300"})
    assert (refused.exit_code, "no ONNX: the run was told" in refused.output) == (2, True), refused.output
    monkeypatch.delenv("EQUIPOISE_ONNX")
    written = CliRunner().invoke(app, ["export", str(done)], env={"COLUMNS": "300"})
    assert written.exit_code == 0, written.output
    assert str(done / "model.onnx") in written.output
    got, wanted = outputs(done)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
    for name, content in before.items():
        if not name.startswith("model.card") and name != SINGLE_MANIFEST:
            assert (done / name).read_bytes() == content, name  # what the run has left stays
    again = read_manifest(done, SINGLE_MANIFEST)
    assert CliRunner().invoke(app, ["export", str(done)]).exit_code == 0
    assert read_manifest(done, SINGLE_MANIFEST) == again  # an equal model is an equal version


def test_what_cannot_be_exported_is_refused_in_words(done, tmp_path):
    def words(*given):
        made = CliRunner().invoke(app, ["export", *map(str, given)], env={"COLUMNS": "300"})
        assert made.exit_code == 2, made.output
        return " ".join(made.output.split())

    assert "is not the folder of a run" in words(tmp_path / "nowhere")
    data = eq.data.label_shift(train_clients=12, validation_clients=0, test_clients=8, examples=10)
    model = eq.models.Softmax(data.features, data.classes)
    eq.train(model, data, rounds=1, clients_per_round=4, progress=False).save(tmp_path / "saved")
    assert "cannot be run" in words(tmp_path / "saved")
    options = {"rounds": 1, "clients_per_round": 4, "progress": False}
    eq.train_family(model, data, tails=[1.0, 0.5], **options).save(tmp_path / "family")
    assert "holds a family" in words(tmp_path / "family")
    half = shutil.copytree(done, tmp_path / "half")
    log = (half / "rounds.jsonl").read_text().splitlines(keepends=True)
    (half / "rounds.jsonl").write_text("".join(log[:-1]))
    assert "has not ended" in words(half)
    (done / "config.toml").write_text((done / "config.toml").read_text().replace("classes = 10", "classes = 11"))
    assert "does not fit the model" in words(done)
