"""Runs with personal models that are stopped or killed and go on: the same models, bit for bit."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

import equipoise as eq
from equipoise.errors import EquipoiseError, ObserverFailed
from equipoise.personal import L2SGD, Ditto, Finetuning, Local
from equipoise.runs.checkpoint import CheckpointError, Checkpoints, read_checkpoint
from equipoise.solvers import SGD
from equipoise.types import Observer
from made_clients import make_clients


def data():
    return eq.data.split_examples(make_clients([24] * 12), validation=0.25, test=0.25, classes=3)


def algorithm(method):
    return eq.Algorithm(
        risk=eq.risk.Superquantile(0.6, eta_every=2),
        solver=SGD(lr=0.1, batch_size=6),
        server=eq.server_opt.Adam(lr=0.05),
        aggregator=eq.aggregators.NormClip(),
        personal=method,
    )


class Stop(Exception):
    """Somebody pulls the plug."""


class PullsThePlug(Observer):
    """Stops a run after a round, with all that was written to the disk since the last checkpoint."""

    def __init__(self, after):
        self.after = after

    def on_round(self, report):
        if report.round + 1 == self.after:
            raise Stop


def models_of(run):
    return run.personal.params(run.personal.ids)


METHODS = [
    Ditto(0.5),
    Ditto(1.0, choices=(0.1, 1.0, 2.0)),
    Ditto(1.0, choices=(0.1, 1.0), when="finetuning", solver=SGD(lr=0.1, epochs=2)),
    Local(),
    L2SGD(0.5),
    Finetuning(epochs=2),
]


CASES = [(method, "simulator") for method in METHODS] + [(Ditto(0.5), "loop")]


@pytest.mark.parametrize(("method", "engine"), CASES, ids=lambda m: repr(m)[:40])
def test_stopped_anywhere_between_checkpoints(method, engine, tmp_path):
    parts, options = data(), {"rounds": 13, "clients_per_round": 5, "engine": engine, "evaluate_every": 4}
    whole = eq.train(eq.models.Softmax(4, 3), parts, algorithm(method), **options)
    file = tmp_path / "run.safetensors"
    for after in (2, 3, 7, 8, 12):  # checkpoints are after rounds 3, 6, 9, 12
        with pytest.raises(ObserverFailed):
            eq.train(
                eq.models.Softmax(4, 3), parts, algorithm(method), checkpoint=Checkpoints(file, every=3),
                observers=[PullsThePlug(after)], **options,
            )  # fmt: skip
    last = eq.train(eq.models.Softmax(4, 3), parts, algorithm(method), checkpoint=Checkpoints(file, every=3), **options)
    assert last.params.equal(whole.params)
    assert models_of(last).equal(models_of(whole))
    assert last.clients.personal_error.equal(whole.clients.personal_error)
    assert last.clients.personal_loss.equal(whole.clients.personal_loss)
    assert last.history.points == whole.history.points
    # Once more, at the end: nothing is left to do, and the models are still there.
    again = eq.train(eq.models.Softmax(4, 3), parts, algorithm(method), checkpoint=Checkpoints(file, every=3), **options)
    assert models_of(again).equal(models_of(whole))


def test_going_on_for_longer_is_a_longer_run(tmp_path):
    parts, options = data(), {"clients_per_round": 5, "checkpoint": tmp_path / "run.safetensors"}
    eq.train(eq.models.Softmax(4, 3), parts, algorithm(Ditto(0.5)), rounds=4, **options)
    longer = eq.train(eq.models.Softmax(4, 3), parts, algorithm(Ditto(0.5)), rounds=9, **options)
    whole = eq.train(eq.models.Softmax(4, 3), parts, algorithm(Ditto(0.5)), rounds=9, clients_per_round=5)
    assert models_of(longer).equal(models_of(whole))


def test_another_method_or_missing_rows_are_refused(tmp_path):
    parts, file = data(), tmp_path / "run.safetensors"
    options = {"rounds": 2, "clients_per_round": 5, "checkpoint": file}
    eq.train(eq.models.Softmax(4, 3), parts, algorithm(Ditto(0.5)), **options)
    for other in (Ditto(0.25), None, Local()):
        with pytest.raises(CheckpointError, match="differs in algorithm: "):
            eq.train(eq.models.Softmax(4, 3), parts, replace(algorithm(Ditto(0.5)), personal=other), **options)
    (tmp_path / "run.clients.npy").rename(tmp_path / "moved.npy")
    with pytest.raises(EquipoiseError, match=r"run\.clients\.npy"):
        eq.train(eq.models.Softmax(4, 3), parts, algorithm(Ditto(0.5)), **options)
    np.save(tmp_path / "run.clients.npy", np.zeros((2, 12, 7), np.float32))
    with pytest.raises(EquipoiseError, match="Start anew"):
        eq.train(eq.models.Softmax(4, 3), parts, algorithm(Ditto(0.5)), **options)


def test_methods_without_rows_leave_no_file(tmp_path):
    eq.train(
        eq.models.Softmax(4, 3),
        data(),
        algorithm(Finetuning()),
        rounds=1,
        clients_per_round=5,
        checkpoint=tmp_path / "run.safetensors",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["run.safetensors"]


# ------------------------------------------------------------ killed

WORKER = """
import json, sys
import torch
torch.set_num_threads(1)
import equipoise as eq
from equipoise.runs.checkpoint import Checkpoints

class Says(eq.types.Observer):
    def on_round(self, report):
        print(report.round, flush=True)

clients = eq.data.label_shift(train_clients=120, validation_clients=1, test_clients=1, examples=60, seed=1).train
data = eq.data.split_examples(clients, validation=0.2, test=0.2)
algorithm = eq.Algorithm(
    risk=eq.risk.Superquantile(0.5), aggregator=eq.aggregators.MultiKrum(malicious=3),
    personal=eq.personal.Ditto(1.0, choices=(0.1, 1.0, 2.0)),
)
data = eq.attacks.apply(data, eq.attacks.LabelPoisoning(share=0.1))
run = eq.train(
    eq.models.Softmax(data.features, data.classes), data, algorithm, rounds=40, clients_per_round=40,
    checkpoint=Checkpoints(sys.argv[1] + "/run.safetensors", every=int(sys.argv[2])), observers=[Says()], progress=False,
)
run.personal.to_npy(sys.argv[1] + "/models.npy")
shared = run.params.tolist()
with open(sys.argv[1] + "/shared.json", "w") as file:
    json.dump([shared, run.clients.personal_error.tolist()], file)
"""


def worker(folder, every):
    folder.mkdir(exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WORKER, str(folder), str(every)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_run_killed_at_several_moments_ends_with_the_same_models(tmp_path):
    whole = worker(tmp_path / "whole", 1000)
    assert whole.communicate()[1] == ""
    chance, folder = random.Random(0), tmp_path / "killed"
    begun = []
    for until in (1, 9, 16, 27):
        process = worker(folder, every=4)
        first = None
        for line in process.stdout:
            first = int(line) if first is None else first
            if int(line) >= until:
                break
        time.sleep(chance.random() * 0.03)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        process.stderr.close()
        begun.append(first)
    assert begun == sorted(begun)
    assert begun[-1] >= 16  # it went on from a checkpoint, not from the start
    assert not (folder / "models.npy").exists()
    last = worker(folder, every=4)
    assert "Going on from round" in last.communicate()[1]
    assert last.returncode == 0
    models = [np.load(tmp_path / name / "models.npy") for name in ("whole", "killed")]
    assert models[0].shape[0] == 120
    assert models[0].tobytes() == models[1].tobytes()
    assert json.loads((tmp_path / "whole" / "shared.json").read_text()) == json.loads((folder / "shared.json").read_text())
    state = read_checkpoint(folder / "run.safetensors").runs[0].state
    assert state.round == 40
    assert int((state.personal.places == 2).sum()) > 0  # both places were in use
    assert state.params.equal(torch.tensor(json.loads((folder / "shared.json").read_text())[0]))
