import pytest
from report_cases import DITTO, METHODS, federated, softmax, under_attack

import equipoise as eq


@pytest.fixture(scope="session")
def comparison():
    return eq.compare(METHODS, softmax(), federated(), rounds=6, clients_per_round=6, seeds=2, evaluate_every=2)


@pytest.fixture(scope="session")
def attacked():
    """A plain method and one with personal models, under attack."""
    methods = {"FedAvg": eq.Algorithm(), "Ditto": DITTO}
    return eq.compare(methods, softmax(), under_attack(), rounds=6, clients_per_round=8, seeds=2, evaluate_every=2)


@pytest.fixture(scope="session")
def run():
    return eq.train(softmax(), federated(), rounds=4, clients_per_round=6)
