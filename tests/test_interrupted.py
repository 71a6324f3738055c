"""Ctrl-C in a Python script: what was saved is said, and how to go on; KeyboardInterrupt stays one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import equipoise as eq
from equipoise.errors import EquipoiseNotice

TAIL = Path(__file__).parents[1] / "examples/tail.toml"

SCRIPT = """
import sys
import time
import equipoise as eq

data = eq.data.label_shift(train_clients=20, validation_clients=0, test_clients=5, examples=20)
model = eq.models.Softmax(data.features, data.classes)
methods = {"FedAvg": eq.Algorithm(), "prox": eq.Algorithm(solver=eq.solvers.SGD(prox=0.1))}


class Waits:
    def on_start(self, run):
        self.last = not run.name.startswith("FedAvg")

    def on_state(self, state):
        if self.last and state.round == 7:
            print("here", flush=True)
            time.sleep(SECONDS)  # Ctrl-C comes now, and not inside of torch, which may make a RuntimeError of it


usual = {"rounds": 9, "clients_per_round": 5, "observers": [Waits()], "progress": False}
CALL
"""
TRAIN = "eq.train(model, data, checkpoint=CHECKPOINT, **usual)"


def interrupted(call, folder, checkpoint="None", *, times=1, number=signal.SIGINT):
    """The standard error and the exit status of a script that gets Ctrl-C after its seventh round, as many `times`."""
    waits = 60 if checkpoint == "None" or times > 1 else 2
    source = SCRIPT.replace("CALL", call.replace("CHECKPOINT", checkpoint)).replace("SECONDS", str(waits))
    child = subprocess.Popen(
        [sys.executable, "-c", source], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    try:
        assert child.stdout.readline() == "here\n", child.stderr.read()
        for _ in range(times):
            child.send_signal(number)
            time.sleep(0.5)
        _, said = child.communicate(timeout=60)
    finally:
        child.kill()
    return said, child.returncode


def test_a_run_without_a_checkpoint_says_how_to_get_one(tmp_path):
    said, status = interrupted(TRAIN, tmp_path)
    assert status == -signal.SIGINT  # as Python ends without the library
    lines = said.strip().splitlines()
    assert "KeyboardInterrupt" in lines[-2]
    assert lines[-1].startswith('Nothing was saved, because the call names no checkpoint. With checkpoint="run.safetensors"')
    assert "in train_runs" in said  # no frame is hidden


def resumed(path, algorithm=None):
    """The result of the script's call, which goes on from a checkpoint if there is one."""
    data = eq.data.label_shift(train_clients=20, validation_clients=0, test_clients=5, examples=20)
    model = eq.models.Softmax(data.features, data.classes)
    return eq.train(model, data, algorithm, rounds=9, clients_per_round=5, checkpoint=path)


@pytest.mark.filterwarnings("ignore:These clients took no part")
@pytest.mark.parametrize(
    ("call", "algorithm"),
    [
        (TRAIN, eq.Algorithm()),
        (TRAIN.replace("data, ", "data, eq.Algorithm(personal=eq.personal.Ditto(0.5)), "),
         eq.Algorithm(personal=eq.personal.Ditto(0.5))),
    ],
    ids=["shared", "own models"],
)  # fmt: skip
def test_a_run_with_a_checkpoint_ends_its_round_and_the_same_call_goes_on_bit_for_bit(call, algorithm, tmp_path):
    said, status = interrupted(call, tmp_path, 'eq.Checkpoints("run.safetensors", every=5)')
    assert status == -signal.SIGINT
    assert "Ctrl-C: this stops after the round, with a checkpoint. Ctrl-C again stops at once." in said
    note = said.strip().splitlines()[-1]
    assert note == "run.safetensors holds the run after 7 rounds. Repeat the call to go on from there."
    with pytest.warns(EquipoiseNotice, match="Going on from round 7 of 9"):
        after = resumed(tmp_path / "run.safetensors", algorithm)
    with pytest.warns(EquipoiseNotice, match=r"run.safetensors holds round 9 of 9: this run is finished, and no round is"):
        assert torch.equal(resumed(tmp_path / "run.safetensors", algorithm).params, after.params)
    whole = resumed(None, algorithm)
    assert torch.equal(after.params, whole.params)
    assert after.clients.served_error.tolist() == whole.clients.served_error.tolist()
    assert [report.loss for report in after.history.rounds] == [report.loss for report in whole.history.rounds]


def test_a_process_that_has_compiled_something_ends_by_the_signal_too(tmp_path):
    pytest.importorskip("tabulate")  # torch._dynamo imports it at exit, after which Python forgets about Ctrl-C
    call = f"import torch._dynamo.utils\n{TRAIN}"
    _, status = interrupted(call, tmp_path, '"run.safetensors"')
    assert status == -signal.SIGINT


def test_a_second_ctrl_c_stops_at_once_and_leaves_the_checkpoint_as_it_was(tmp_path):
    began = time.monotonic()
    said, status = interrupted(TRAIN, tmp_path, 'eq.Checkpoints("run.safetensors", every=5)', times=2)
    assert status == -signal.SIGINT
    assert time.monotonic() - began < 50  # of 60 that the script waits
    assert said.strip().splitlines()[-1].startswith("run.safetensors holds the run after 5 rounds.")
    with pytest.warns(EquipoiseNotice, match="Going on from round 5 of 9"):
        after = resumed(tmp_path / "run.safetensors")
    assert torch.equal(after.params, resumed(None).params)


def test_sigterm_ends_the_process_after_the_round_with_a_checkpoint(tmp_path):
    said, status = interrupted(TRAIN, tmp_path, 'eq.Checkpoints("run.safetensors", every=5)', number=signal.SIGTERM)
    assert status == -signal.SIGTERM
    told = "Stopped by SIGTERM. run.safetensors holds the run after 7 rounds. Repeat the call to go on from there."
    assert said.strip().splitlines()[-1] == told
    with pytest.warns(EquipoiseNotice, match="Going on from round 7 of 9"):
        after = resumed(tmp_path / "run.safetensors")
    assert torch.equal(after.params, resumed(None).params)


def test_sigterm_ends_a_study_and_its_runs_with_a_word(tmp_path):
    study = tmp_path / "study.toml"
    study.write_text(TAIL.read_text().replace("seed = 0\n", "") + "\n[study]\nseeds = 1\n[methods.FedAvg]\n")
    command = [sys.executable, "-m", "equipoise", "compare", str(study), "--set", "train.rounds=100000", "--out", "out"]
    child = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        log = tmp_path / "out" / "FedAvg-0" / "rounds.jsonl"
        waited = time.monotonic() + 60
        while not (log.exists() and '"round"' in log.read_text()):
            assert child.poll() is None, child.stderr.read()
            assert time.monotonic() < waited
            time.sleep(0.1)
        child.send_signal(signal.SIGTERM)
        _, said = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == -signal.SIGTERM
    assert said.strip().splitlines()[-1] == "Stopped by SIGTERM. The same command goes on where it stopped."
    length = log.stat().st_size
    time.sleep(1)
    assert log.stat().st_size == length  # nobody goes on with it
    assert "Stopped by SIGTERM." in (log.parent / "run.log").read_text()


def test_the_command_line_says_which_round_the_checkpoint_holds_and_goes_on_from_it(tmp_path):
    command = [sys.executable, "-m", "equipoise", "run"]
    config = [str(TAIL), "--set", "train.rounds=400"]
    child = subprocess.Popen(
        [*command, *config, "--out", "out"], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        log = tmp_path / "out/rounds.jsonl"
        until = time.monotonic() + 60
        while not log.exists() or log.read_text().count("\n") < 20:
            assert child.poll() is None, child.stderr.read()
            assert time.monotonic() < until
            time.sleep(0.01)
        child.send_signal(signal.SIGINT)
        _, said = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 130
    logged = [json.loads(line) for line in log.read_text().splitlines()]
    done = sum(event["event"] == "round" for event in logged)
    assert 20 <= done + 1 < 400
    last = said.strip().splitlines()[-1]
    assert f"Rounds in the checkpoint: {done}. Go on later: equipoise run --resume out" in last
    again = subprocess.run([*command, "--resume", "out"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
    assert f"Going on from round {done} of 400" in again.stderr
    subprocess.run([*command, *config, "--out", "whole"], cwd=tmp_path, capture_output=True, timeout=300, check=True)
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()


@pytest.mark.parametrize("call", [
    "eq.compare(methods, model, data, seeds=1, checkpoint=CHECKPOINT, **usual)",
    "eq.train_many(model, data, methods, seeds=1, checkpoint=CHECKPOINT, **usual)",
])  # fmt: skip
def test_a_comparison_hands_over_the_runs_that_had_ended(call, tmp_path):
    handing = f"""
try:
    {call}
except KeyboardInterrupt as stop:
    print(list(stop.finished.results), file=sys.stderr)
    raise
"""
    said, status = interrupted(handing, tmp_path, '"all.safetensors"')
    assert status == -signal.SIGINT
    assert "['FedAvg']" in said
    assert "all-prox-seed0.safetensors holds the run after 7 rounds. Repeat the call to go on from there." in said
    assert "1 of 2 runs had ended. The attribute `finished` of this KeyboardInterrupt is a Comparison of them" in said
    assert said.count("Nothing was saved") == 0
