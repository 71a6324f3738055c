"""A residual network with BatchNorm from a user's file: trained, evaluated, resumed and reported, also over Flower."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace

import pytest
import torch
from fake_grid import federation, run_app

import equipoise as eq
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.engines.flower import server_app
from equipoise.errors import IncompatibleParts, ObserverFailed
from equipoise.types import Observer

logging.getLogger("flwr").setLevel("ERROR")
pytestmark = pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
SOLVER = eq.solvers.SGD(lr=0.05, batch_size=4)
MODEL = '''
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, wide, out, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(wide, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.downsample = nn.Sequential()
        if stride != 1 or wide != out:
            self.downsample = nn.Sequential(nn.Conv2d(wide, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + self.downsample(x))


class ResNet(nn.Module):
    """Two blocks of an ordinary residual network."""

    def __init__(self, width=4, classes=3):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.layers = nn.Sequential(Block(width, width, 1), Block(width, 2 * width, 2))
        self.fc = nn.Linear(2 * width, classes)

    def forward(self, x):
        return self.fc(self.layers(torch.relu(self.bn1(self.conv1(x)))).mean((2, 3)))
'''


@pytest.fixture
def resnet(tmp_path, monkeypatch):
    (tmp_path / "users_resnet.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("users_resnet", None)
    import users_resnet

    yield users_resnet.ResNet
    del sys.modules["users_resnet"]


@pytest.fixture
def data():
    gen = torch.Generator().manual_seed(0)

    def images(sizes):
        return ClientSet.pack(
            [(f"client-{k}", torch.randn(n, 1, 6, 6, generator=gen), torch.arange(n) % 3) for k, n in enumerate(sizes)]
        )

    return FederatedData(images([5, 8, 6, 9]), test=images([3, 4, 3, 5]), name="images")


class Stop(Observer):
    def on_state(self, state):
        if state.round == 2:
            raise RuntimeError("killed")


def federated(algorithm, grid, model, **options):
    found = []
    options = {"rounds": 3, "timeout": 20.0, "pause": 0.0, "seed": 3, **options}
    run_app(server_app(algorithm, model=model, clients_per_round=3, clients=4, on_result=found.append, **options), grid)
    return found[0]


def simulated(algorithm, data, model, **options):
    return eq.train(lambda seed: model(), data, algorithm, rounds=3, clients_per_round=3, seed=3, engine="loop", **options)


def same(first, second):
    assert torch.equal(first.params, second.params)
    assert torch.equal(first.carried, second.carried)
    for column in ("loss", "error"):
        assert torch.equal(first.clients[column], second.clients[column])
    one, two = first.model.state_dict(), second.model.state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)


TAIL = {"risk": eq.risk.Superquantile(0.7), "solver": SOLVER}


@pytest.mark.parametrize(
    "parts",
    [
        TAIL,
        TAIL | {"personal": eq.personal.Ditto()},
        TAIL | {"personal": eq.personal.Finetuning(epochs=1)},
        {"solver": SOLVER, "personal": eq.personal.FedBN()},
        {"solver": SOLVER, "personal": eq.personal.Split(("statistics",))},
        {"solver": SOLVER, "personal": eq.personal.FedPer("fc")},
        {"solver": SOLVER, "personal": eq.personal.FedRep("fc", 1, 1)},
        {"solver": SOLVER, "personal": eq.personal.FedBABU("fc", 1)},
        {"solver": SOLVER, "personal": eq.personal.LGFedAvg(("conv1", "bn1"))},
        {"solver": SOLVER, "personal": eq.personal.Split(())},
    ],
    ids=["shared", "Ditto", "Finetuning", "FedBN", "statistics", "FedPer", "FedRep", "FedBABU", "LG-FedAvg", "nothing kept"],
)
def test_a_federation_is_a_simulation(resnet, data, parts):
    algorithm = eq.Algorithm(**parts)
    wanted, found = simulated(algorithm, data, resnet), federated(algorithm, federation(data, resnet, engine="loop"), resnet)
    same(found, wanted)
    assert found.carried.shape == (2 * (4 + 4 + 4 + 8 + 8 + 8),)
    kept_by_clients = getattr(algorithm.personal, "kept", ()) in (("normalisation",), ("statistics",), ("conv1", "bn1"))
    assert torch.equal(found.model.bn1.running_var, torch.ones(4)) == kept_by_clients
    if algorithm.personal is not None:
        assert torch.equal(found.clients.personal_loss, wanted.clients.personal_loss)


def test_a_federation_that_was_killed_goes_on_and_reports(resnet, data, tmp_path):
    algorithm = eq.Algorithm(solver=SOLVER)
    wanted = federated(algorithm, federation(data, resnet), resnet)
    grid = federation(data, resnet)
    with pytest.raises(ObserverFailed):
        federated(algorithm, grid, resnet, folder=tmp_path / "run", observers=(Stop(),))
    found = federated(algorithm, grid, resnet, folder=tmp_path / "run")
    same(found, wanted)
    from safetensors.torch import load_file

    stored = load_file(tmp_path / "run" / "model.safetensors")
    assert torch.equal(stored["layers.1.downsample.1.running_var"], wanted.model.layers[1].downsample[1].running_var)
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_a_simulation_that_was_killed_goes_on(resnet, data, tmp_path, engine):
    algorithm, options = eq.Algorithm(solver=SOLVER), {"rounds": 3, "clients_per_round": 3, "engine": engine}
    torch.manual_seed(0)
    model = resnet()
    wanted = eq.train(model, data, algorithm, **options)
    checkpoint = eq.runs.checkpoint.Checkpoints(tmp_path / "run.ckpt", every=1)
    with pytest.raises(ObserverFailed):
        eq.train(model, data, algorithm, observers=[Stop()], checkpoint=checkpoint, **options)
    same(eq.train(model, data, algorithm, checkpoint=checkpoint, **options), wanted)


@pytest.mark.usefixtures("batches_of_the_simulation")
def test_masked_sums_carry_statistics(resnet, data):
    everyone = eq.Algorithm(solver=SOLVER, sampler=eq.sampling.Full())  # whose cohorts are no secret
    algorithm = replace(everyone, privacy=eq.privacy.SecureAggregation())
    grid = federation(data, resnet, engine="loop", only_sums=True)
    found, wanted = federated(algorithm, grid, resnet), simulated(everyone, data, resnet)
    torch.testing.assert_close(found.params, wanted.params, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.carried, wanted.carried, atol=1e-5, rtol=0)


@pytest.mark.parametrize("personal", [None, eq.personal.FedPer("fc")], ids=["shared", "FedPer"])
def test_a_node_that_sends_odd_statistics_is_left_out(resnet, data, personal):
    grid = federation(data, resnet, engine="loop")

    def fault(delivery):
        reply = delivery.answer()
        sends = delivery.action.startswith("train.") and "carried" in reply.content["tensors"]
        if delivery.client == "client-1" and sends:
            array = reply.content["tensors"]["carried"]
            array.data = b"\x00\x00\x00\x00\x00\x00\xf0\x7f" * (len(array.data) // 8)  # infinities
        return reply

    grid.fault = fault
    algorithm = eq.Algorithm(solver=SOLVER, sampler=eq.sampling.Full(), personal=personal)
    found = federated(algorithm, grid, resnet, rounds=1)
    assert found.history.rounds[0].rejected == ("client-1",)
    assert torch.isfinite(found.carried).all()


def test_privacy_is_refused_before_anybody_is_asked_for_work(resnet, data):
    algorithm = eq.Algorithm(privacy=eq.privacy.DifferentialPrivacy(epsilon=5, delta=1e-3, clip=1.0))
    grid = federation(data, resnet)
    with pytest.raises(IncompatibleParts, match="with_group_norm"):
        federated(algorithm, grid, resnet)
    assert {action for _, action, _ in grid.log} == {"query.hello"}


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"privacy": eq.privacy.DifferentialPrivacy(epsilon=5, delta=1e-3, clip=1.0)}, "without noise"),
        ({"aggregator": eq.aggregators.Median()}, "which is averaged"),
        ({"privacy": eq.privacy.SecureAggregation(), "sampler": eq.sampling.Full()}, "not summed securely here"),
    ],
    ids=["privacy", "median", "secure sums"],
)
def test_shared_statistics_of_split_models_are_refused_before_anybody_is_asked_for_work(resnet, data, parts, reason):
    grid = federation(data, resnet)
    with pytest.raises(IncompatibleParts, match=reason):
        federated(eq.Algorithm(personal=eq.personal.FedPer("fc"), **parts), grid, resnet)
    assert {action for _, action, _ in grid.log} <= {"query.hello"}
