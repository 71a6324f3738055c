"""ResNet-18 with BatchNorm from a user's file: it trains, is evaluated, resumes bit for bit, is reported, also over Flower."""

import sys
import tomllib

import pytest
import torch
from fake_grid import federation
from safetensors.torch import load_file
from test_flower_carried import Stop, federated, same, simulated
from typer.testing import CliRunner

import equipoise as eq
from equipoise.cli.commands import app
from equipoise.errors import ObserverFailed

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")]
PARAMETERS, STATISTICS = 11_173_962, 2 * 4_800  # of the network as published, for small images and ten classes
FILE = '''
import torch
from torch import nn

import equipoise as eq


class BasicBlock(nn.Module):
    def __init__(self, wide, out, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(wide, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.relu, self.downsample = nn.ReLU(inplace=True), None
        if stride != 1 or wide != out:
            self.downsample = nn.Sequential(nn.Conv2d(wide, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet18(nn.Module):
    def __init__(self, classes: int = 10):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64)
        wide, layers = 64, []
        for out, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            layers.append(nn.Sequential(BasicBlock(wide, out, stride), BasicBlock(out, out, 1)))
            wide = out
        self.layer1, self.layer2, self.layer3, self.layer4 = layers
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(512, classes)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        return self.fc(self.avgpool(self.layer4(self.layer3(self.layer2(self.layer1(x))))).flatten(1))


def load():
    """Images of three classes, which differ in brightness."""
    gen = torch.Generator().manual_seed(0)

    def images(y):
        return torch.randn(len(y), 3, 8, 8, generator=gen) + y.view(-1, 1, 1, 1)

    def clients(sizes):
        labels = [torch.arange(n) % 3 for n in sizes]
        return eq.ClientSet.pack([(f"client-{k}", images(y), y) for k, y in enumerate(labels)])

    return eq.FederatedData(clients([5, 8, 6, 9]), test=clients([6, 6, 6, 9]), name="images", classes=10)
'''
CONFIG = """
[data]
name = "users_resnet18:load"
[model]
name = "users_resnet18:ResNet18"
[algorithm.solver]
name = "sgd"
lr = 0.005
batch_size = 4
[train]
rounds = 3
clients_per_round = 3
"""
ALGORITHM = eq.Algorithm(solver=eq.solvers.SGD(lr=0.005, batch_size=4))


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "users_resnet18.py").write_text(FILE)
    (tmp_path / "run.toml").write_text(CONFIG)
    monkeypatch.setenv("EQUIPOISE_CONFIG", str(tmp_path / "settings"))
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("users_resnet18", None)
    yield tmp_path
    sys.modules.pop("users_resnet18", None)


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_it_trains_resumes_bit_for_bit_and_is_evaluated(project, engine):
    import users_resnet18

    data, options = users_resnet18.load(), {"rounds": 4, "clients_per_round": 4, "engine": engine}
    torch.manual_seed(0)
    model = users_resnet18.ResNet18()
    wanted = eq.train(model, data, ALGORITHM, **options)
    assert wanted.params.shape == (PARAMETERS,)
    assert wanted.carried.shape == (STATISTICS,)
    assert wanted.history.rounds[-1].loss < wanted.history.rounds[0].loss
    checkpoint = eq.runs.checkpoint.Checkpoints(project / "run.ckpt", every=1)
    with pytest.raises(ObserverFailed):
        eq.train(model, data, ALGORITHM, observers=[Stop()], checkpoint=checkpoint, **options)
    same(eq.train(model, data, ALGORITHM, checkpoint=checkpoint, **options), wanted)
    table = eq.evaluate(wanted.model, data).clients
    torch.testing.assert_close(table["loss"], wanted.clients["loss"], rtol=1e-5, atol=1e-6)


def test_the_command_trains_it_and_writes_a_report(project):
    done = CliRunner().invoke(app, ["run", str(project / "run.toml"), "--out", str(project / "run")])
    assert done.exit_code == 0, done.output
    stored = load_file(project / "run" / "model.safetensors")
    assert sum(value.numel() for name, value in stored.items() if "running" not in name and "num_" not in name) == PARAMETERS
    assert not torch.equal(stored["layer4.1.bn2.running_var"], torch.ones(512))
    assert tomllib.loads((project / "run" / "config.toml").read_text())["model"]["name"] == "users_resnet18:ResNet18"
    reported = CliRunner().invoke(app, ["report", str(project / "run"), "--out", str(project / "report.html")])
    assert reported.exit_code == 0, reported.output
    assert (project / "report.html").stat().st_size > 10_000


def test_a_federation_over_flower_is_a_simulation(project):
    import users_resnet18

    data = users_resnet18.load()
    wanted = simulated(ALGORITHM, data, users_resnet18.ResNet18)
    found = federated(ALGORITHM, federation(data, users_resnet18.ResNet18, engine="loop"), users_resnet18.ResNet18)
    same(found, wanted)
