"""Families as run folders: from Python, from a configuration, resumed, in several versions, and read again."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import equipoise as eq
from equipoise.cli.commands import app
from equipoise.errors import ConfigError, InvalidData, InvalidParameter
from equipoise.experiment import folder
from equipoise.experiment.build import build
from equipoise.experiment.config import RunConfig
from equipoise.experiment.family_files import FamilyManifest, read_manifest
from equipoise.experiment.run_files import RunFolder
from equipoise.types import Observer

CONFIG = """
[data]
name = "label_shift"
train_clients = 12
validation_clients = 0
test_clients = 8
examples = 10
[model]
name = "softmax"
[family]
tails = [1.0, 0.5]
[train]
rounds = 6
clients_per_round = 4
evaluate_every = 2
checkpoint_every = 2
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "family.toml"
    path.write_text(CONFIG)
    return path


def family(seed=0, tails=(1.0, 0.5)):
    data = eq.data.label_shift(train_clients=12, validation_clients=0, test_clients=8, examples=10)
    model = eq.models.Softmax(data.features, data.classes)
    return eq.train_family(model, data, tails=list(tails), rounds=3, clients_per_round=4, seed=seed, progress=False)


class PowerCut(Observer):
    def on_state(self, state):
        if state.round == 5:
            raise KeyboardInterrupt


def run(config, place, *observers):
    place.mkdir(exist_ok=True)
    experiment = build(RunConfig.read(config, code="never"))
    return folder.run(experiment, RunFolder(place), observers=observers, progress=False)


def test_a_family_from_a_configuration_is_resumed_to_the_same_bits(config, tmp_path):
    whole = run(config, tmp_path / "whole")
    (tmp_path / "cut").mkdir()
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "cut", PowerCut())
    assert RunFolder(tmp_path / "cut").last_event() == {"event": "stopped", "why": "Stopped by Ctrl-C."}
    with pytest.raises(ConfigError, match="has not ended"):
        folder.read_records(tmp_path / "cut")
    done = CliRunner().invoke(app, ["run", "--resume", str(tmp_path / "cut")])
    assert done.exit_code == 0, done.output
    assert "90th pct." in done.output
    for value, member in whole.results.items():
        stored = [load_file(tmp_path / place / "members" / f"tail-{value}" / "model.safetensors") for place in ("whole", "cut")]
        for name, tensor in member.model.state_dict().items():
            assert torch.equal(stored[0][name], tensor)
            assert torch.equal(stored[1][name], tensor)
    assert read_manifest(tmp_path / "whole").version == read_manifest(tmp_path / "cut").version
    events = [json.loads(line) for line in (tmp_path / "cut" / "rounds.jsonl").read_text().splitlines()]
    assert events[-1]["event"] == "end"
    assert not any(event["event"] == "stopped" for event in events)
    spread = [event["histogram"] for event in events if event["event"] == "evaluation"]
    assert all(sum(each["counts"]) == 8 for each in spread)  # those before the cut, too
    assert len(spread) == 6


def test_a_saved_family_is_read_again_and_reported(tmp_path):
    made = family()
    place = made.save(tmp_path / "family")
    records = folder.read_records(place)
    assert [record.name for record in records] == ["tail 1", "tail 0.5"]
    for record, result in zip(records, made.results.values(), strict=True):
        assert record.summary().error == result.summary().error
        assert repr(record.algorithm) == repr(result.algorithm)
        assert [r.loss for r in record.history.rounds] == [r.loss for r in result.history.rounds]
    with pytest.raises(ConfigError, match="holds a family of 2 runs"):
        folder.read_record(place)
    report = CliRunner().invoke(app, ["report", str(place), "--out", str(tmp_path / "page.html")])
    assert report.exit_code == 0, report.output
    assert 'id="knob-slider"' in (tmp_path / "page.html").read_text()
    with pytest.raises(InvalidParameter, match="must be a new or empty folder"):
        made.save(place)
    assert not list(tmp_path.glob(".*.part"))


def test_versions_stay_and_equal_models_are_one_version(tmp_path):
    place = family().publish(tmp_path / "family")
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    assert family().publish(place) == place
    second = family(seed=1).publish(place)
    assert second == place / "versions" / "2"
    assert family(seed=1).publish(place) == second
    assert family(seed=2).publish(place) == place / "versions" / "3"
    assert {path: path.read_bytes() for path in before} == before
    assert len({read_manifest(each).version for each in (place, second, place / "versions" / "3")}) == 3
    other = eq.train_family(
        eq.models.Softmax(20, 10), family().setting.data, qs=[0.0, 1.0], rounds=1, clients_per_round=4, progress=False
    )
    with pytest.raises(InvalidParameter, match="must hold a family with this knob"):
        other.publish(place)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ("tails = []", "family.tails must be a list of numbers"),
        ("tails = 0.5", "family.tails must be a list of numbers"),
        ("tails = [0.5, 0.5]", "family.tails must be different numbers"),
        ("tail = [0.5]", "family.tail: Unknown key 'tail'. Did you mean 'tails'?"),
        ("tails = [1.0]\nqs = [1.0]", "[family] must have one of tails, qs, tilts"),
        ("tails = [2.0]", "tail must lie in (0, 1]"),
    ],
)
def test_a_section_that_is_no_family_is_refused(config, tmp_path, section, words):
    config.write_text(CONFIG.replace("tails = [1.0, 0.5]", section))
    done = CliRunner().invoke(app, ["run", str(config), "--out", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert words in done.output.replace("\n", " ")


def test_a_study_of_families_is_refused(config, tmp_path):
    done = CliRunner().invoke(app, ["compare", str(config), "--out", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert "[family] is for equipoise run" in done.output


def test_a_damaged_manifest_is_refused_in_words(tmp_path):
    place = family().save(tmp_path / "family")
    good = (place / "family.json").read_bytes()
    table = json.loads(good)
    member = table["members"][0]
    broken = [
        b"", b"{", b"[]", b"\xff", b'{"format": "equipoise family 2"}',
        json.dumps(table | {"members": []}).encode(),
        json.dumps(table | {"members": [member, member]}).encode(),
        json.dumps(table | {"members": [member | {"folder": "../../etc"}]}).encode(),
        json.dumps(table | {"members": [member | {"files": {"../x": {"bytes": 1, "sha256": ""}}}]}).encode(),
        json.dumps(table | {"members": [member | {"files": {"x\r\nset-cookie: a": {"bytes": 1, "sha256": ""}}}]}).encode(),
        json.dumps(table | {"members": [member | {"value": float("nan")}]}).encode(),
        json.dumps(table | {"signature": {"form": "tensor"}}).encode(),
    ]  # fmt: skip
    for content in broken:
        with pytest.raises(InvalidData):
            FamilyManifest.of_bytes(content, "family.json")
    assert FamilyManifest.of_bytes(good, "family.json").version == table["version"]
    shutil.rmtree(place / "members" / "tail-0.5")
    with pytest.raises(ConfigError, match=r"clients\.parquet does not exist"):
        folder.read_records(place)
