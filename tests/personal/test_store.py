"""What clients keep between rounds: rows as at the last save whatever is killed, in a sparse file instead of memory."""

import gc
import os
import subprocess
import sys

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

import equipoise as eq
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.errors import EquipoiseError, NotWritten
from equipoise.personal.store import ClientRows

CLIENTS, WIDTH = 5, 3
EVERYONE = torch.arange(CLIENTS)


class Kept(RuleBasedStateMachine):
    """Writes, saves and crashes in any order, beside plain dictionaries of what must be there."""

    @initialize(folder=st.uuids())
    def begin(self, folder):
        self.path = self.tmp / f"{folder}.npy"
        self.first = torch.tensor([0.5, -1.0, 2.0])
        self.rows = ClientRows(self.first, CLIENTS, self.path)
        self.places = torch.zeros(CLIENTS, dtype=torch.uint8)
        self.now = dict.fromkeys(range(CLIENTS), self.first)
        self.saved_places, self.saved = self.places, dict(self.now)
        self.number = 0

    @rule(clients=st.sets(st.integers(0, CLIENTS - 1), min_size=1))
    def write(self, clients):
        self.number += 1
        values = self.number + torch.arange(len(clients)).unsqueeze(1) / 10 + torch.zeros(len(clients), WIDTH)
        before = self.places.clone()
        after = self.rows.write(self.places, torch.tensor(sorted(clients)), values)
        assert self.places.equal(before)  # a state is a value; the next one is another
        self.places = after
        self.now |= dict(zip(sorted(clients), values, strict=True))

    @rule()
    def save(self):
        self.rows.flush()
        self.rows.on_saved(self.places)
        self.saved_places, self.saved = self.places.clone(), dict(self.now)

    @rule()
    def crash_while_saving(self):
        """Rows are on the disk, the checkpoint is, and nobody was told."""
        self.rows.flush()
        self.saved_places, self.saved = self.places.clone(), dict(self.now)
        self.crash()

    @rule()
    def crash(self):
        self.rows = ClientRows(self.first, CLIENTS, self.path, places=self.saved_places)
        self.places, self.now = self.saved_places.clone(), dict(self.saved)

    @invariant()
    def rows_are_there(self):
        if not hasattr(self, "rows"):
            return
        assert self.rows.read(self.places, EVERYONE).equal(torch.stack([self.now[k] for k in range(CLIENTS)]))
        again = ClientRows(self.first, CLIENTS, self.path, places=self.saved_places)
        assert again.read(self.saved_places, EVERYONE).equal(torch.stack([self.saved[k] for k in range(CLIENTS)]))


def test_rows_are_those_of_the_last_save_after_any_crash(tmp_path):
    Kept.tmp = tmp_path
    run_state_machine_as_test(Kept, settings=settings(max_examples=60, stateful_step_count=25, deadline=None))


def test_saved_places_are_not_written_to(tmp_path):
    rows = ClientRows(torch.zeros(2), 2, tmp_path / "rows.npy")
    places = rows.write(torch.zeros(2, dtype=torch.uint8), torch.tensor([0, 1]), torch.ones(2, 2))
    assert places.tolist() == [1, 1]
    assert rows.write(places, torch.tensor([0]), torch.full((1, 2), 2.0)).tolist() == [1, 1]  # nobody relies on it
    rows.on_saved(places)
    moved = rows.write(places, torch.tensor([0]), torch.full((1, 2), 3.0))
    assert moved.tolist() == [2, 1]
    assert rows.read(places, torch.tensor([0])).tolist() == [[2.0, 2.0]]
    assert rows.read(moved, torch.tensor([1, 0, 0])).tolist() == [[1.0, 1.0], [3.0, 3.0], [3.0, 3.0]]
    assert rows.write(moved, torch.tensor([0]), torch.full((1, 2), 4.0)).tolist() == [2, 1]
    rows.on_saved(moved)
    assert rows.write(moved, torch.tensor([0]), torch.zeros(1, 2)).tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_numbers_come_back_as_they_were(dtype, tmp_path):
    values = torch.randn(2, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = ClientRows(torch.zeros(7, dtype=dtype), 4, tmp_path / "rows.npy")
    places = rows.write(torch.zeros(4, dtype=torch.uint8), torch.tensor([3, 1]), values)
    back = rows.read(places, torch.tensor([1, 3, 0]))
    assert back.dtype == dtype
    assert back.equal(torch.stack([values[1], values[0], torch.zeros(7, dtype=dtype)]))


def test_what_is_no_file_of_rows_is_refused(tmp_path):
    places = torch.ones(3, dtype=torch.uint8)
    with pytest.raises(EquipoiseError, match=r"rows\.npy, which holds what clients keep between rounds, is missing"):
        ClientRows(torch.zeros(2), 3, tmp_path / "rows.npy", places=places)
    (tmp_path / "rows.npy").write_bytes(b"something else")
    with pytest.raises(NotWritten, match="cannot be kept"):
        ClientRows(torch.zeros(2), 3, tmp_path / "rows.npy", places=places)
    (tmp_path / "file").write_text("")
    with pytest.raises(NotWritten, match="cannot be kept"):
        ClientRows(torch.zeros(2), 3, tmp_path / "file" / "rows.npy")
    ClientRows(torch.zeros(2), 3, tmp_path / "rows.npy")
    for first, clients in ((torch.zeros(3), 3), (torch.zeros(2), 4), (torch.zeros(2, dtype=torch.float64), 3)):
        with pytest.raises(EquipoiseError, match="Start anew"):
            ClientRows(first, clients, tmp_path / "rows.npy", places=torch.ones(clients, dtype=torch.uint8))


def test_a_temporary_file_goes_with_its_owner():
    rows = ClientRows(torch.zeros(2), 3)
    folder = rows.path.parent
    assert rows.path.exists()
    del rows
    gc.collect()
    assert not folder.exists()


def test_a_new_run_leaves_the_models_of_an_earlier_one_alone(tmp_path):
    data = FederatedData(
        ClientSet.pack((f"c{i}", torch.full((2, 1), float(i)), torch.full((2, 1), float(i))) for i in range(4))
    )
    algorithm, file = eq.Algorithm(personal=eq.personal.Local(), sampler=eq.sampling.Full()), tmp_path / "run.safetensors"
    model = eq.models.MeanEstimator(1)
    first = eq.train(model, data, algorithm, rounds=2, checkpoint=file)
    before = first.personal.params(first.personal.ids)
    file.unlink()
    second = eq.train(model, data, algorithm, rounds=5, checkpoint=file)
    assert first.personal.params(first.personal.ids).equal(before)
    assert not second.personal.params(second.personal.ids).equal(before)


# ------------------------------------------------------------ memory

BIG = """
import sys
import torch
import equipoise as eq
from equipoise.data.clients import ClientSet
from equipoise.data.clients import FederatedData
from equipoise.runs.checkpoint import Checkpoints

def anonymous():
    # Memory of the process itself, in MB; pages of a file that is mapped can be dropped at any time and do not count.
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024

clients, width, rounds = 2000, 20_000, 4
x = torch.rand(2 * clients, width // 2, dtype=torch.float32).mul_(255).to(torch.uint8)
ids, offsets = tuple(f"c{i}" for i in range(clients)), torch.arange(0, 2 * clients + 1, 2)
data = FederatedData(ClientSet(x, torch.arange(2 * clients) % 2, offsets, ids, scale=1 / 255), classes=2)
model = eq.models.Softmax(width // 2, 2, bias=False)
seen = []

class Watch(eq.types.Observer):
    def on_state(self, state):
        seen.append(anonymous())

algorithm = eq.Algorithm(personal=eq.personal.Ditto(strength=1.0))
saving = Checkpoints(sys.argv[1], every=1)
options = {"observers": [Watch()], "checkpoint": saving, "progress": False}
run = eq.train(model, data, algorithm, rounds=rounds, clients_per_round=500, **options)
drawn = int((run.personal._state.personal.places > 0).sum())
print(drawn, max(seen) - seen[0], anonymous() - seen[0])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_many_large_models_are_not_held_in_memory(tmp_path):
    # 2,000 models of 20,000 float32 are 160 MB, and as much again for the second place of each.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": "100000"}
    done = subprocess.run(
        [sys.executable, "-c", BIG, str(tmp_path / "run.safetensors")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    drawn, while_training, at_the_end = map(float, done.stdout.split())
    assert drawn > 1200
    assert while_training < 120  # a cohort's rows, models and updates: 500 · 20,000 · 4 bytes = 40 MB each
    assert at_the_end < 120  # all 2,000 models were scored
    file = (tmp_path / "run.clients.npy").stat()
    assert file.st_size > 320e6
    written = file.st_blocks * 512
    assert written < 0.75 * file.st_size  # places that were never written take no room
    assert written > 0.9 * drawn * 80_000
    assert np.load(tmp_path / "run.clients.npy", mmap_mode="r").shape == (2, 2000, 20_000)
