"""The process of a node that forks for every message, without Flower: deadlines, and data that are loaded once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'equipoise[flower]'")
if "fork" not in vars(os):
    pytest.skip("needs fork", allow_module_level=True)

import equipoise as eq
from equipoise.engines.flower import client_app
from equipoise.engines.flower.apps import app_forks
from equipoise.engines.flower.apps.app_forks import AppForks
from equipoise.engines.flower.apps.kept_data import KeptData, WatchedFiles
from equipoise.engines.flower.apps.owned_app import OwnedApp

SOON = 20.0  # seconds in which things must have happened on a busy machine


class Node:
    """The forking process in a fork of its own; `work` is done for each message, in place of Flower's runtime."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, work, owner: OwnedApp | None = None) -> None:
        monkeypatch.setattr(app_forks, "run_client_app", work)
        self.folder = folder
        self.reading, self.writing = os.pipe()
        forks = AppForks(self.reading, owner or OwnedApp(), {"client-id": "a"}, keep=True)
        self.process = app_forks.fork(forks.serve, closed=(self.writing,))

    def tell(self, **what: object) -> None:
        os.write(self.writing, json.dumps(what).encode() + b"\n")

    def wait_for(self, name: str) -> str:
        end = time.monotonic() + SOON
        while not (self.folder / name).exists() or not (self.folder / name).read_text():
            assert time.monotonic() < end, f"{name}: {sorted(p.name for p in self.folder.iterdir())}"
            time.sleep(0.01)
        return (self.folder / name).read_text()

    def close(self) -> int:
        os.close(self.writing)
        end = time.monotonic() + SOON
        while time.monotonic() < end:
            ended, status = os.waitpid(self.process, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        raise AssertionError("the process did not end")


def test_an_app_that_waits_for_objects_that_never_come_does_not_block_the_next(tmp_path, monkeypatch):
    """As after a SuperLink's restart: the first app never gets its message, and the next one must be forked all the same."""
    monkeypatch.setattr(app_forks, "TO_END", (0.3, 5.0))

    def work(spec, parent, owner, begun, answered):
        (tmp_path / spec["name"]).write_text(str(os.getpid()))
        time.sleep(1000 if spec["name"] == "stuck" else 0)

    node = Node(tmp_path, monkeypatch, work)
    node.tell(name="stuck")
    stuck = int(node.wait_for("stuck"))
    node.tell(name="next")
    node.wait_for("next")
    with pytest.raises(ProcessLookupError):
        os.kill(stuck, 0)
    assert node.close() == 0


def test_an_app_ends_at_the_deadline_of_its_message(tmp_path, monkeypatch):
    monkeypatch.setattr(app_forks, "GRACE", 0.2)

    def work(spec, parent, owner, begun, answered):
        begun(0.3)
        (tmp_path / "pid").write_text(str(os.getpid()))
        while True:
            time.sleep(1)

    node = Node(tmp_path, monkeypatch, work)
    node.tell(name="hangs")
    hanging, end = int(node.wait_for("pid")), time.monotonic() + SOON
    while time.monotonic() < end:
        try:
            os.kill(hanging, 0)
        except ProcessLookupError:
            break
        time.sleep(0.05)
    else:
        raise AssertionError("it still runs")
    assert node.close() == 0


def test_an_app_that_has_answered_may_hand_in_its_context(tmp_path, monkeypatch):
    monkeypatch.setattr(app_forks, "TO_END", (0.1, SOON))

    def work(spec, parent, owner, begun, answered):
        begun(60.0)
        answered()
        time.sleep(0.6)
        (tmp_path / f"context-{spec['name']}").write_text("handed in")

    node = Node(tmp_path, monkeypatch, work)
    node.tell(name="1")
    node.tell(name="2")
    node.wait_for("context-2")
    assert node.wait_for("context-1") == "handed in"
    assert node.close() == 0


def installed(folder: Path, loads: Path):
    def load(context):
        with loads.open("a") as file:
            file.write(f"{os.getpid()}\n")
        found = np.load(folder / "data.npz")
        return {"id": "a", "train": (found["x"], found["y"])}

    return OwnedApp(installed=client_app(model=lambda: eq.models.Softmax(4, 3), load_data=load))


def test_data_are_loaded_once_and_again_when_their_file_changes(tmp_path, monkeypatch):
    """26 messages loaded them 26 times."""
    x = torch.randn(12, 4).numpy()
    np.savez(tmp_path / "data.npz", x=x, y=np.arange(12) % 3)
    owner = installed(tmp_path, tmp_path / "loads")

    def work(spec, parent, owner, begun, answered):
        from flwr.app import Context, RecordDict

        node = owner.installed.setup.data(Context(1, 5, {"client-id": "a"}, RecordDict(), {}))
        (tmp_path / f"seen-{spec['name']}").write_text(node.data.fingerprint)

    node = Node(tmp_path, monkeypatch, work, owner)
    node.tell(node=5)
    seen = []
    for k in range(5):
        node.tell(name=str(k))
        seen.append(node.wait_for(f"seen-{k}"))
    assert len((tmp_path / "loads").read_text().splitlines()) == 1
    np.savez(tmp_path / "data.npz", x=x + 1, y=np.arange(12) % 3)
    node.tell(name="changed")
    assert len(set(seen)) == 1
    assert node.wait_for("seen-changed") != seen[0]
    assert len((tmp_path / "loads").read_text().splitlines()) == 2
    assert node.close() == 0


def test_data_whose_loading_starts_threads_are_not_kept(tmp_path, monkeypatch):
    def load(context):
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
        return {"id": "a", "train": (torch.randn(6, 4), torch.arange(6) % 3)}

    owner = OwnedApp(installed=client_app(model=lambda: eq.models.Softmax(4, 3), load_data=load))
    node = Node(tmp_path, monkeypatch, lambda *_: None, owner)
    node.tell(node=5)
    end = time.monotonic() + SOON
    while (ended := os.waitpid(node.process, os.WNOHANG))[0] == 0 and time.monotonic() < end:
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == app_forks.NOT_KEPT


def test_tables_that_pandas_reads_are_kept(tmp_path):
    """pandas loads pyarrow, whose allocator has a thread of its own: the data were loaded anew for every message."""
    pytest.importorskip("pandas")
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    reads = "import pandas, pyarrow; pandas.read_csv('a.csv')"
    code = f"from equipoise.engines.flower.apps.kept_data import has_threads; {reads}; print(has_threads())"
    path = str(Path(app_forks.__file__).parents[4])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.strip() == "False"


def test_a_loader_that_fails_is_tried_again_by_each_message(tmp_path):
    calls = []
    kept = KeptData(lambda: calls.append(1) or 1 / 0, lambda: None)
    kept.refresh()
    kept.refresh()
    assert calls == [1, 1]
    assert not kept.loaded


def test_files_are_watched(tmp_path):
    (tmp_path / "a.csv").write_text("1")
    files = WatchedFiles()
    assert files.watch((tmp_path / "a.csv").read_text) == "1"
    assert not files.changed
    (tmp_path / "a.csv").write_text("22")
    assert files.changed
