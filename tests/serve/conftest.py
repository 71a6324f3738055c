"""A small family and its server, for the tests of serving."""

import pytest
from served import Running

import equipoise as eq


def small_data():
    return eq.data.label_shift(train_clients=30, validation_clients=0, test_clients=25, examples=20, seed=0)


@pytest.fixture(scope="session")
def data():
    return small_data()


@pytest.fixture(scope="session")
def family(data):
    model = eq.models.Softmax(data.features, data.classes)
    options = {"rounds": 12, "clients_per_round": 10, "evaluate_every": 4, "progress": False}
    return eq.train_family(model, data, tails=[1.0, 0.6, 0.2], **options)


@pytest.fixture(scope="session")
def root(family, tmp_path_factory):
    """A folder with a family and, in a study, two finished runs."""
    pytest.importorskip("onnxruntime")
    place = tmp_path_factory.mktemp("served") / "runs"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("EQUIPOISE_ONNX")
        family.save(place / "knob")
        family.results[0.6].save(place / "study" / "tail-0.6-0")
    family.results[1.0].save(place / "study" / "tail-1.0-0")  # without ONNX
    (place / "study" / "order.txt").write_text("tail-1.0-0\ntail-0.6-0\n")
    return place


@pytest.fixture(scope="session")
def server(root):
    with Running(root) as running:
        yield running
