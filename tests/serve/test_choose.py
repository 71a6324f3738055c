"""`equipoise choose`: a client tries a family on its own examples, which stay with it."""

import json
import zipfile

import numpy as np
import pandas as pd
import pytest
from served import Client, Running
from typer.testing import CliRunner

import equipoise as eq
from equipoise.cli.commands import app
from equipoise.core.signature import Signature, TensorSpec
from equipoise.data.tables import Schema
from equipoise.errors import ConfigError, InvalidData
from equipoise.serve import choose as choosing
from equipoise.serve.choose import choose, parse_address
from equipoise.serve.own_examples import read_examples

FLAT = Signature("tensor", (TensorSpec("x", "float32", (2,)),), (TensorSpec("y", "int64", ()),), 3)


def own_file(data, path, at=3, count=15):
    x, y = data.test.client(at=at)
    x, y = x[:count].numpy(), y[:count].numpy()
    if path.suffix == ".npz":
        np.savez_compressed(path, x=x, y=y)
    else:
        names = [*(f"f{k}" for k in range(x.shape[1])), "y"]
        frame = pd.DataFrame(np.c_[x.astype(np.float64), y], columns=names)
        frame.to_csv(path, index=False)
    return path


@pytest.mark.parametrize("name", ["mine.csv", "mine.npz"])
def test_losses_are_those_of_the_family_and_the_best_model_is_kept(server, family, data, tmp_path, name):
    file = own_file(data, tmp_path / name)
    before = len(server.asked)
    done = CliRunner().invoke(app, ["choose", server.url, str(file), "--out", str(tmp_path / "kept")])
    assert done.exit_code == 0, done.output
    x, y = (part[:15] for part in data.test.client(at=3))
    wanted = family.losses((x, y))
    found = choose(f"{server.url}/run/knob", file)
    assert [row.mean for row in found.verdict.members] == pytest.approx([wanted[value] for value in found.values], abs=1e-4)
    best = found.values[found.verdict.best]
    assert best == family.choose((x, y))
    assert f"tail {best:g} " in done.output
    kept = json.loads((tmp_path / "kept" / "choice.json").read_text())
    assert (kept["value"], kept["version"]) == (best, found.version)
    stored = (tmp_path / "kept" / "model.safetensors").read_bytes()
    assert stored == (server.root / "knob" / "members" / f"tail-{best}" / "model.safetensors").read_bytes()
    asked = server.asked[before:]
    assert {method for method, _, _ in asked} == {"GET"}
    assert all(body == b"" for _, _, body in asked)
    values = {f"{value:.4f}"[:6] for value in x.flatten().tolist()[:40]}
    assert not any(value in path for _, path, _ in asked for value in values)


def test_a_kept_folder_is_not_overwritten_and_a_wrong_address_is_named(server, data, tmp_path):
    file = own_file(data, tmp_path / "mine.csv")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "x").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty"):
        choose(server.url, file, out=tmp_path / "kept")
    for url, words in (("file:///etc/passwd", "is no address of a server"), ("nonsense", "is no address of a server"),
                       ("http://127.0.0.1:9", "cannot be reached"), (f"{server.url}/run/other", "There is no run 'other'"),
                       (f"{server.url}/run/study~tail-0.6-0", "is no family")):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            choose(url, file)
    assert parse_address("http://[::1]:8642/run/a%7Eb") == ("http://[::1]:8642", "a~b")


def test_a_token_is_sent_and_asked_for(root, data, tmp_path):
    file = own_file(data, tmp_path / "mine.csv")
    secret = "open-sesame-123"  # noqa: S105 — of this test
    with Running(root, token=secret) as server:
        with pytest.raises(ConfigError, match=r"answers 401: This server asks for its token\. Give it: --token"):
            choose(server.url, file, run="knob")
        assert choose(server.url, file, run="knob", token=secret).verdict.examples == 15


def test_a_server_that_lies_is_found_out(server, data, tmp_path, monkeypatch):
    file = own_file(data, tmp_path / "mine.csv")
    real = choosing.FamilyClient.get

    def answers(change):
        def get(self, path, most=choosing.LARGEST_ANSWER):
            return change(path, real(self, path, most))

        monkeypatch.setattr(choosing.FamilyClient, "get", get)

    answers(lambda path, content: content[:-1] + b"!" if path.endswith("score.onnx") else content)
    with pytest.raises(ConfigError, match="arrived damaged"):
        choose(server.url, file, run="knob")
    for broken in (b"{}", b"[]", b"<html>", b'{"versions": [], "latest": "x"}'):
        answers(lambda path, content, broken=broken: broken if path.endswith("/models") else content)
        with pytest.raises(ConfigError, match=r"not understood|sends no JSON"):
            choose(server.url, file, run="knob")


def test_bad_files_are_refused_with_the_place(tmp_path):
    def refused(content, words, name="mine.csv", signature=FLAT, schema=None):
        path = tmp_path / name
        if isinstance(content, dict):
            np.savez(path, **content)
        else:
            path.write_bytes(content)
        with pytest.raises(InvalidData, match=words):
            read_examples(path, signature, (), schema)

    refused(b"", "holds no examples")
    refused(b"a,b,y\n", "holds no examples")
    refused(b"a,b,y\n1,2\n", "row 1 has 2 columns, but the first has 3")
    refused(b"a,b,y\n1,x,0\n", "column 'b', row 0 holds 'x', which is no number")
    refused(b"a,b,y\n1,nan,0\n", "which is no number")
    refused(b"a,y\n1,0\n", "1 columns beside the target 'y', but the models take 2")
    refused(b"a,b,y\n1,2,7\n", "row 0 is 7, but must be a class from 0 to 2")
    refused(b"a,b,y\n1,2,0.5\n", "row 0 is 0.5")
    refused(b'a,b,y\n1,"2,0\n', "is no CSV file")
    refused(b"\xff\xfe\x00", "is no CSV file")
    refused(b"PK\x03\x04 nonsense", r"mine\.npz", name="mine.npz")
    refused({"x": np.zeros((2, 2))}, r"mine\.npz.*y", name="mine.npz")
    refused({"x": np.zeros((2, 3)), "y": np.zeros(2, dtype=int)}, "must be of shape", name="mine.npz")
    refused({"x": np.full((2, 2), np.inf), "y": np.zeros(2, dtype=int)}, "NaN or infinity", name="mine.npz")
    refused({"x": np.zeros((2, 2)), "y": np.zeros(3, dtype=int)}, "a target for each", name="mine.npz")
    refused({"x": np.array([["a", "b"]]), "y": np.zeros(1, dtype=int)}, "must hold numbers", name="mine.npz")
    refused({"x": np.array([object()]), "y": np.zeros(1, dtype=int)}, r"mine\.npz", name="mine.npz")  # a pickle is never read
    with pytest.raises(InvalidData, match="does not exist"):
        read_examples(tmp_path / "absent.csv", FLAT, (), None)
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w") as file:
        file.writestr("x.npy", b"\x93NUMPY nonsense")
    with pytest.raises(InvalidData, match=r"bomb\.npz"):
        read_examples(tmp_path / "bomb.npz", FLAT, (), None)


def test_pixels_and_tables_become_what_models_see(tmp_path):
    pixels = Signature("tensor", (TensorSpec("x", "float32", (2,), 1 / 255, 0.5),), (TensorSpec("y", "int64", ()),), 3)
    (tmp_path / "raw.csv").write_text("a,b,label\n255,0,1\n")
    x, y = read_examples(tmp_path / "raw.csv", pixels, (), None)
    assert (x.tolist(), y.tolist()) == ([[1.5, 0.5]], [1])
    (tmp_path / "seen.csv").write_text("1.5,0.25,1\n1.0,0.0,2\n")  # without names: the last column is the target
    x, y = read_examples(tmp_path / "seen.csv", pixels, (), None)
    assert (x.tolist(), y.tolist()) == ([[1.5, 0.25], [1.0, 0.0]], [1, 2])
    frame = pd.DataFrame({"age": [1.0, 2.0, 4.0, None], "town": ["a", "b", "a", "b"], "ill": ["no", "yes", "yes", "no"]})
    schema = Schema.fit(frame, target="ill")
    frame.to_csv(tmp_path / "table.csv", index=False)
    named = Signature("tensor", (TensorSpec("x", "float32", (len(schema.feature_names),)),), (TensorSpec("y", "int64", ()),), 2)
    x, y = read_examples(tmp_path / "table.csv", named, schema.target.classes, schema)
    np.testing.assert_allclose(x, schema.transform(frame).numpy())
    assert y.tolist() == [0, 1, 1, 0]


@pytest.mark.usefixtures("onnx")
def test_a_family_without_onnx_says_why(family, tmp_path, monkeypatch, data):
    from equipoise.export import onnx_files

    monkeypatch.setattr(onnx_files, "why_no_onnx", lambda: "onnx not installed: pip install X")
    family.save(tmp_path / "runs" / "plain")
    page = Client(tmp_path / "runs").get("/run/plain").text
    assert "Own examples cannot be tried with this family: onnx not installed" in page
    with Running(tmp_path / "runs") as server, pytest.raises(ConfigError, match="onnx not installed"):
        choose(server.url, own_file(data, tmp_path / "mine.csv"))
    assert isinstance(family, eq.Family)
