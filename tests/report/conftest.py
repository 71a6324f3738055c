import pytest
from report_cases import METHODS, federated, softmax

import equipoise as eq


@pytest.fixture(scope="session")
def comparison():
    return eq.compare(METHODS, softmax(), federated(), rounds=6, clients_per_round=6, seeds=2, evaluate_every=2)


@pytest.fixture(scope="session")
def run():
    return eq.train(softmax(), federated(), rounds=4, clients_per_round=6)
