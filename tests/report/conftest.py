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


@pytest.fixture(scope="session")
def trained():
    """Three seeds of one method, with six test clients of 20 examples."""
    data = eq.data.label_shift(train_clients=8, validation_clients=6, test_clients=6, examples=20)
    return eq.compare({"FedAvg": eq.Algorithm()}, eq.models.Softmax(20, 10), data, rounds=1, clients_per_round=3, seeds=3)
