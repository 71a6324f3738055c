"""Fixtures of the tests of engines."""

import pytest


@pytest.fixture
def batches_of_the_simulation(monkeypatch):
    """Under privacy nodes get seeds of their own; with the run's seed in their place a run is that of the simulation."""
    from equipoise.engines.flower.apps import federated_run

    monkeypatch.setattr(federated_run, "batch_seed", lambda secret, client, seed: seed)
    monkeypatch.setattr(federated_run, "public_seed", lambda seed: seed)
