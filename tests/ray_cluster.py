"""A real Ray cluster of several nodes on this machine, small and bounded; one at a time over all test processes."""

import os
import shutil
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest

from equipoise.core.files import locked
from equipoise.engines.cluster import pieces
from equipoise.engines.cluster.ray_extra import OUR_OWN

STORE_BYTES = 80 * 2**20  # of each node; Ray wants at least 75 MiB
SHARED_MEMORY = 3 * STORE_BYTES  # of the cluster of three nodes
MEMORY = Path("/dev/shm")  # noqa: S108 (where Ray's object stores are)
# Where nodes are killed, their loss is noticed sooner than Ray would; a busy machine must not look like a dead one elsewhere.
SOON = {"health_check_period_ms": 1000, "health_check_timeout_ms": 5000, "health_check_failure_threshold": 4}


def skip_without_ray() -> None:
    pytest.importorskip("ray")
    free = shutil.disk_usage(MEMORY).free if MEMORY.exists() else 0
    if free < SHARED_MEMORY:
        pytest.skip(f"{MEMORY} has {free >> 20} MB free, and the cluster's object stores take {SHARED_MEMORY >> 20} MB")


def python_path() -> str:
    """Where workers and drivers of their own find the package and what tests import."""
    tests, before = Path(__file__).parent, os.environ.get("PYTHONPATH")
    return os.pathsep.join(map(str, [tests.parent / "src", tests / "engines", tests, *([before] if before else [])]))


def cut_small(monkeypatch) -> None:
    """Pieces of about two clients."""
    for sizes in (pieces.TRAINING, pieces.SCORING):
        monkeypatch.setitem(sizes, "cpu", pieces.PieceSize(1.0, 2))


@contextmanager
def ray_cluster(nodes=2, cpus=1, *, connect=True, kills=False):
    """A cluster of so many nodes with so many CPUs each; what it started is stopped at the end."""
    skip_without_ray()
    with warnings.catch_warnings(), locked(Path(tempfile.gettempdir()) / "equipoise-ray-tests", wait=True):
        warnings.simplefilter("ignore")  # Ray's own
        import ray
        from ray.cluster_utils import Cluster

        options = {"num_cpus": cpus, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = python_path()
        os.environ.setdefault("RAY_worker_niceness", OUR_OWN["RAY_worker_niceness"])  # 15 would starve on a busy machine
        cluster = Cluster(initialize_head=True, head_node_args=options | ({"_system_config": SOON} if kills else {}))
        try:
            for _ in range(nodes - 1):
                cluster.add_node(**options)
            cluster.options = options
            if connect:
                ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before
