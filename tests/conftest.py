"""Shared by all tests: one torch thread per process, small federated data, and the folder of real data if there is one."""

from __future__ import annotations

import atexit
import hashlib
import itertools
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from equipoise.data.clients import FederatedData
from made_clients import make_clients

torch.set_num_threads(1)
for name in ("EQUIPOISE_CONFIG", "EQUIPOISE_CACHE"):  # trusted code and choices measured in tests are no one else's
    os.environ[name] = tempfile.mkdtemp(prefix="equipoise-tests-")
    atexit.register(shutil.rmtree, os.environ[name], ignore_errors=True)
os.environ["EQUIPOISE_ONNX"] = "0"  # tracing a model takes seconds; tests of exports ask for it (fixture `onnx`)
settings.register_profile("default", deadline=None, derandomize=True, print_blob=False)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def known_secrets(monkeypatch):
    """Secrets of private runs in a known order: each run of a test has its own, and the test repeats."""
    numbers = itertools.count()
    drawn = lambda size: hashlib.blake2b(str(next(numbers)).encode(), digest_size=size).digest()  # noqa: E731
    monkeypatch.setattr("equipoise.privacy.noise_plan.urandom", drawn)


@pytest.fixture
def ragged():
    """Eight ragged training clients and three unseen test clients."""
    return FederatedData(
        make_clients([1, 2, 3, 7, 10, 11, 20, 25]), test=make_clients([5, 9, 14], seed=1, prefix="unseen"), name="ragged"
    )


@pytest.fixture
def onnx(monkeypatch):
    """Runs and families leave ONNX files, as they do for users."""
    monkeypatch.delenv("EQUIPOISE_ONNX")


@pytest.fixture
def real_data() -> Path:
    folder = os.environ.get("EQUIPOISE_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("EQUIPOISE_DATA does not name a folder with the real data sets")
    return Path(folder)


@pytest.fixture(scope="module")
def browser(request):
    """Chromium, from the module's CHROMIUM."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=request.module.CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def cluster(request):
    """A real Ray cluster on this machine, as the module's CLUSTER asks for it."""
    from ray_cluster import ray_cluster

    with ray_cluster(**getattr(request.module, "CLUSTER", {})) as running:
        yield running


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of about two clients, so that small cohorts have several."""
    from ray_cluster import cut_small

    cut_small(monkeypatch)
