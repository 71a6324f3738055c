"""The driver's pool of workers, without Ray: what it says to workers of a connection that has ended."""

from types import SimpleNamespace

import pytest

from equipoise.engines.cluster.pooled_worker import PooledWorker
from equipoise.engines.cluster.worker_pool import Session, WorkerPool


class FakeRay:
    """A module `ray` that is connected to one cluster after the other."""

    def __init__(self):
        self.job, self.connected = "01", True

    def is_initialized(self):
        return self.connected

    def get_runtime_context(self):
        return SimpleNamespace(gcs_address="here", get_job_id=lambda: self.job)

    def kill(self, actor, no_restart):
        """Nothing runs."""


@pytest.mark.parametrize(("after", "told"), [("the same", [7]), ("another", []), ("none", [])])
def test_only_workers_of_the_same_connection_are_told_that_a_run_is_over(after, told):
    """A run that is forgotten after ray.shutdown() has no workers left, also if this process is connected again."""
    ray, heard = FakeRay(), []
    pool = WorkerPool(ray, {"num_cpus": 1})
    pool.sessions[7] = Session((), None, 20.0)
    close = SimpleNamespace(remote=heard.append)
    pool.workers.append(PooledWorker(SimpleNamespace(close=close), "a node", None))
    ray.job, ray.connected = "01" if after == "the same" else "02", after != "none"
    pool.close_session(7)
    assert heard == told
    assert not pool.sessions
