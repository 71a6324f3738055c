"""Models that nobody has tuned for: loop and simulator agree, by whichever path; and what models may take and give."""

import sys
from pathlib import Path

import pytest
import torch
from taken import everyone
from test_model_kinds import doubles
from torch import nn
from torch.nn import functional

import equipoise as eq
from equipoise.core.task import Task
from equipoise.core.task_trial import try_task
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.engines import Loop, Simulator
from equipoise.engines.simulator.calibration import Choice

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import zoo
from other_models import OTHERS

UNBATCHED = {"binarised", "spectral norm"}  # torch has no batching rule for what they call
SOLVER = eq.solvers.SGD(lr=0.05, batch_size=3)


def compared(task, data, solver=SOLVER, paths=("batched autograd", "one by one", "recorded steps")):
    """By path, how much an update, losses and carried values differ from the loop's, of their size."""
    wanted = Loop().start(task, data).updates(task.read_model(), everyone(len(data.train)), solver)
    engine, worst = Simulator(chunk_size=2, workers=1).start(task, data), {}
    for path in paths if engine.unvectorised is None else paths[1:]:
        engine.use(Choice(path=path))
        found = engine.updates(task.read_model(), everyone(len(data.train)), solver)
        taken = " and ".join(engine.paths_taken)
        pairs = [(found.update, wanted.update), (found.losses, wanted.losses)]
        pairs += [] if wanted.carried is None else [(found.carried, wanted.carried)]
        worst[taken] = max(float((one - other).norm() / other.norm()) for one, other in pairs)
    return worst, engine


@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
@pytest.mark.parametrize("name", OTHERS)
def test_every_path_agrees_with_the_loop(name):
    entry, generator = OTHERS[name], torch.Generator().manual_seed(0)
    parts = [entry.data(size, generator) for size in (7, 6, 3)]
    data = FederatedData(ClientSet.pack([(str(i), doubles(x), y) for i, (x, y) in enumerate(parts)]))
    torch.manual_seed(0)
    worst, engine = compared(try_task(Task.of(entry.model().double(), loss=zoo.loss_of), data), data)
    assert (engine.unvectorised is not None) == (name in UNBATCHED), engine.unvectorised
    assert any("recorded steps" in path for path in worst), worst
    assert max(worst.values()) <= 1e-9, worst


class Several(nn.Module):
    """A dict goes in, and a dict comes out."""

    def __init__(self):
        super().__init__()
        self.codes, self.net = nn.Embedding(9, 4), nn.Linear(10, 3)
        self.spread = nn.Linear(10, 1)

    def forward(self, job, facts, place):
        known = torch.cat([self.codes(job.long()), facts, place], -1)
        return {"logits": self.net(known), "scale": functional.softplus(self.spread(known)).squeeze(-1)}


def scaled_loss(outputs, targets):
    losses = functional.cross_entropy(outputs["logits"], targets, reduction="none")
    return losses / (1 + outputs["scale"]) + outputs["scale"].log1p()


def several(n):
    return {"job": torch.randint(0, 9, (n,)), "facts": torch.randn(n, 4).double(), "place": torch.randn(n, 2).double()}


def test_a_dict_in_and_a_dict_out():
    torch.manual_seed(0)
    clients = [(str(k), several(n), torch.randint(0, 3, (n,))) for k, n in enumerate((7, 6, 3))]
    data = FederatedData(ClientSet.pack(clients))
    worst, engine = compared(try_task(Task.of(Several().double(), loss=scaled_loss), data), data)
    assert engine.unvectorised is None
    assert len(worst) == 3
    assert max(worst.values()) <= 1e-9, worst


def test_dicts_of_dicts_are_refused_with_what_is_taken_instead():
    with pytest.raises(eq.errors.InvalidData, match="a tuple or dict of them, but one is a dict"):
        ClientSet.pack([("a", {"person": several(3)}, torch.zeros(3, dtype=torch.int64))])


class Dispatched(nn.Module):
    """Each example goes to one expert alone: how many an expert sees depends on the values."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(5, 3), nn.ModuleList(nn.Linear(5, 4) for _ in range(3))

    def forward(self, x):
        gates = self.gate(x).softmax(-1)
        value, which = gates.max(-1)
        out = torch.zeros(len(x), 4, dtype=x.dtype)
        for number, expert in enumerate(self.experts):
            here = (which == number).nonzero().flatten()
            out = out.index_add(0, here, expert(x[here]) * value[here].unsqueeze(-1))
        return out


class Complex(nn.Module):
    """A parameter of complex numbers."""

    def __init__(self):
        super().__init__()
        self.factors = nn.Parameter(torch.randn(5, 4, dtype=torch.complex128))

    def forward(self, x):
        return (x.to(torch.complex128) @ self.factors).abs()


def plain_data():
    torch.manual_seed(0)
    return FederatedData(
        ClientSet.pack([(str(k), torch.randn(n, 5).double(), torch.randint(0, 4, (n,))) for k, n in enumerate((7, 6, 3))])
    )


@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
def test_examples_that_go_different_ways():
    data = plain_data()
    worst, engine = compared(try_task(Task.of(Dispatched().double()), data), data)
    assert engine.unvectorised is not None
    assert set(worst) == {"one by one"}  # neither batched nor recorded
    assert max(worst.values()) <= 1e-9, worst


def test_parameters_of_complex_numbers_are_refused_by_name():
    with pytest.raises(eq.errors.InvalidParameter, match=r"complex numbers in 'factors'.*view_as_complex"):
        try_task(Task.of(Complex()), plain_data())
