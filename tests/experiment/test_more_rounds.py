"""A run in a folder that goes on to more rounds ends as a run does that had them from the start."""

import json

import pytest
from typer.testing import CliRunner

from equipoise.cli import app
from equipoise.experiment import folder, toml
from equipoise.experiment.folder import RunFolder
from equipoise.runs.checkpoint import Checkpoints

SMALL = {
    "data": {"name": "label_shift", "train_clients": 12, "validation_clients": 3, "test_clients": 4, "examples": 20},
    "model": {"name": "softmax"},
    "train": {"rounds": 4, "clients_per_round": 5, "evaluate_every": 3, "threads": 1},
}
RICH = {
    "risk": {"name": "superquantile", "tail": 0.5, "eta_every": 3},
    "server": {"name": "adam", "lr": 0.05},
    "averaging": {"name": "geometric", "rate": 0.01},
}
METHODS = {
    "plain": {},
    "rich": RICH,
    "kept momentum": {"solver": {"name": "sgd", "momentum": 0.9, "state": "kept"}},
    "own models": {"personal": {"name": "ditto"}},
    "models after the last round": {"personal": {"name": "ditto", "when": "finetuning"}},
    "schedule": {"solver": {"name": "sgd", "schedule": {"name": "cosine", "rounds": 6}}},
    "stop": {},
    "family": {},
}


def command(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


def started(tmp_path, name, algorithm, *more, **sections):
    (tmp_path / "run.toml").write_text(toml.dumps(SMALL | {"algorithm": algorithm} | sections))
    made = command("run", tmp_path / "run.toml", "--out", tmp_path / name, *more)
    assert made.exit_code == 0, made.output
    return RunFolder(tmp_path / name)


def stop_at(round_index):
    """What saves a checkpoint, and presses Ctrl-C after a round."""
    usual = Checkpoints.on_states

    def on_states(self, runs):
        usual(self, runs)
        if runs[0].state.round == round_index:
            raise KeyboardInterrupt

    return on_states


def logged(place):
    """The rounds and evaluations of a log; a family that goes on has its members one after another."""
    events = [json.loads(line) for line in place.rounds.read_text().splitlines()]
    kept = [{key: value for key, value in event.items() if "seconds" not in key} for event in events]
    return sorted(json.dumps(event) for event in kept if event["event"] in ("round", "evaluation"))


@pytest.mark.parametrize("name", METHODS)
def test_a_run_with_more_rounds_is_the_run_that_had_them_from_the_start(name, tmp_path):
    sections = {"family": {"tails": [1.0, 0.5]}} if name == "family" else {}
    if name == "stop":
        sections["train"] = SMALL["train"] | {"stop": {"figure": "validation.error_90", "patience": 2}}
    whole = started(tmp_path, "whole", METHODS[name], "--set", "train.rounds=9", **sections)
    longer = started(tmp_path, "longer", METHODS[name], **sections)
    assert folder.read_records(longer.path)[0].rounds == 4
    done = command("run", "--resume", longer.path, "--set", "train.rounds=9")
    assert done.exit_code == 0, done.output
    assert "Going on from round 4 of 9" in done.output
    assert longer.config.read_text() == whole.config.read_text()
    for file in ("model.safetensors", "model.onnx", "personal.npy", "members/1.safetensors"):
        assert (longer.path / file).exists() == (whole.path / file).exists()
        assert not (longer.path / file).exists() or (longer.path / file).read_bytes() == (whole.path / file).read_bytes()
    assert logged(longer) == logged(whole)
    for a, b in zip(folder.read_records(longer.path), folder.read_records(whole.path), strict=True):
        assert a.clients.error.equal(b.clients.error)
        assert (a.rounds, len(a.history.rounds)) == (b.rounds, len(b.history.rounds))
    again = command("run", "--resume", longer.path)
    assert "has ended; there is nothing to resume" in again.output
    assert "More rounds: add --set train.rounds=N." in again.output


def test_what_cannot_have_more_rounds_is_refused_and_stays_as_it_was(tmp_path):
    place = started(tmp_path, "run", {})

    def files():
        return {file: file.read_bytes() for file in place.path.rglob("*") if file.is_file() and file.name != ".lock"}

    before = files()

    def refused(*arguments):
        found = command("run", "--resume", place.path, *arguments)
        assert found.exit_code == 2
        assert files() == before
        return found.output

    for rounds in (3, 4):
        assert f"must be more than the 4 rounds of the run in {place.path}, but is {rounds}" in refused(
            "--set", f"train.rounds={rounds}"
        )
    assert "--set can only change train.rounds" in refused("--set", "train.seed=3")
    assert "--set can only change train.rounds" in refused("--set", "train.rounds=9", "--set", "train.seed=3")
    assert "train.rounds must be a whole number" in refused("--set", "train.rounds=many")
    (tmp_path / "order.txt").write_text("run\n")
    assert "is a run of a study" in refused("--set", "train.rounds=9")
    (tmp_path / "order.txt").unlink()
    before[place.config] = place.config.read_bytes().replace(b"examples = 20", b"examples = 21")  # other data
    place.config.write_bytes(before[place.config])
    assert "another run" in refused("--set", "train.rounds=9")  # by the checkpoint, after data were read
    place.checkpoint.unlink()
    del before[place.checkpoint]
    assert "has no checkpoint any more" in refused("--set", "train.rounds=9")


def test_the_same_command_goes_on_after_the_run_was_stopped(tmp_path, monkeypatch):
    whole = started(tmp_path, "whole", RICH, "--set", "train.rounds=9")
    longer = started(tmp_path, "longer", RICH)
    more = "run", "--resume", longer.path, "--set", "train.rounds=9"
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "on_states", stop_at(6))
        assert command(*more).exit_code == 130
    assert not longer.finished
    assert command(*more).exit_code == 0
    assert longer.model.read_bytes() == whole.model.read_bytes()
    assert longer.config.read_text() == whole.config.read_text()


@pytest.mark.parametrize(
    ("name", "others"),
    [("differential_privacy", {}), ("dp_ftrl", {"sampler": {"name": "min_separation", "rounds": 2}})],
    ids=["independent noise", "correlated noise"],
)
def test_a_private_run_cannot_have_more_rounds(name, others, tmp_path):
    private = {"name": name, "epsilon": 8.0, "delta": 1e-2, "clip": 0.5}
    place = started(tmp_path, "private", {"privacy": private, **others})
    found = command("run", "--resume", place.path, "--set", "train.rounds=9")
    assert found.exit_code == 2
    assert "is private, and its noise and its ε are made for 4 rounds" in found.output
    assert place.finished
