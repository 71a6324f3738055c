"""Ctrl-C in a Python script: what was saved is said, and how to go on; KeyboardInterrupt stays one."""

import os
import signal
import subprocess
import sys

import pytest

import equipoise as eq
from equipoise.errors import EquipoiseNotice

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
            time.sleep(60)  # Ctrl-C comes now, and not inside of torch, which may make a RuntimeError of it


usual = {"rounds": 9, "clients_per_round": 5, "observers": [Waits()], "progress": False}
CALL
"""
TRAIN = "eq.train(model, data, checkpoint=CHECKPOINT, **usual)"


def interrupted(call, folder, checkpoint="None"):
    """The standard error and the exit status of a script that gets Ctrl-C after its seventh round."""
    source = SCRIPT.replace("CALL", call.replace("CHECKPOINT", checkpoint))
    child = subprocess.Popen(
        [sys.executable, "-c", source], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    try:
        assert child.stdout.readline() == "here\n", child.stderr.read()
        child.send_signal(signal.SIGINT)
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


def test_a_run_with_a_checkpoint_says_where_it_is_and_the_same_call_goes_on(tmp_path):
    said, status = interrupted(TRAIN, tmp_path, 'eq.Checkpoints("run.safetensors", every=5)')
    assert status == -signal.SIGINT
    note = said.strip().splitlines()[-1]
    assert note == "run.safetensors holds the run after 5 rounds. Repeat the call to go on from there."
    data = eq.data.label_shift(train_clients=20, validation_clients=0, test_clients=5, examples=20)
    with pytest.warns(EquipoiseNotice, match="Going on from round 5 of 9"):
        eq.train(
            eq.models.Softmax(data.features, data.classes), data, rounds=9, clients_per_round=5,
            checkpoint=tmp_path / "run.safetensors",
        )  # fmt: skip


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
    assert "all-prox-seed0.safetensors holds the run after 0 rounds. Repeat the call to go on from there." in said
    assert "1 of 2 runs had ended. The attribute `finished` of this KeyboardInterrupt is a Comparison of them" in said
    assert said.count("Nothing was saved") == 0
