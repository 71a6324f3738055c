"""Users' own models behind the server: BatchNorm, several inputs, sequences of any length, losses and errors of one's own."""

import numpy as np
import pytest
import torch
from served import Client, Running
from torch import nn

import equipoise as eq
from equipoise.serve.choose import choose

pytestmark = pytest.mark.usefixtures("onnx")


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3))

    def forward(self, x):
        return self.layers(x)


class Mixed(nn.Module):
    """Two inputs by name: numbers and a token."""

    def __init__(self):
        super().__init__()
        self.word, self.line = nn.Embedding(7, 3), nn.Linear(5, 3)

    def forward(self, numbers, word):
        return self.line(numbers) + self.word(word)


class Pair(nn.Module):
    """Two inputs by position."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(2, 3), nn.Linear(4, 3)

    def forward(self, first, second):
        return self.one(first) * torch.sigmoid(self.two(second))


class Sentences(nn.Module):
    """Sequences of any length, and a mask that says where they end."""

    def __init__(self):
        super().__init__()
        self.word, self.line = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, input_ids, attention_mask):
        known = attention_mask.unsqueeze(-1).to(self.word.weight.dtype)
        return self.line((self.word(input_ids) * known).sum(1) / known.sum(1).clamp(min=1))


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 1)

    def forward(self, x):
        return self.line(x).squeeze(-1)


def pinball(outputs, targets):
    gap = targets - outputs
    return torch.maximum(0.9 * gap, -0.1 * gap)


def off_by_a_lot(outputs, targets):
    return ((outputs - targets).abs() > 1).to(outputs.dtype)


def clients(make, count=12, rows=10):
    gen = torch.Generator().manual_seed(0)
    return [(f"c{k}", *make(gen, rows)) for k in range(count)]


def classes(gen, rows):
    return torch.randint(0, 3, (rows,), generator=gen)


CASES = {
    "BatchNorm": (Normalised, lambda g, n: (torch.randn(n, 4, generator=g), classes(g, n)), {}),
    "a dict": (Mixed, lambda g, n: (
        {"numbers": torch.randn(n, 5, generator=g), "word": torch.randint(0, 7, (n,), generator=g)}, classes(g, n)), {}),
    "a tuple": (Pair, lambda g, n: ((torch.randn(n, 2, generator=g), torch.randn(n, 4, generator=g)), classes(g, n)), {}),
    "a loss of one's own": (Line, lambda g, n: (torch.randn(n, 4, generator=g), torch.randn(n, generator=g)),
                            {"loss": pinball, "error": off_by_a_lot}),
}  # fmt: skip


def trained(model, data, **options):
    torch.manual_seed(0)
    return eq.train_family(model(), data, tails=[1.0, 0.5], rounds=2, clients_per_round=4, progress=False, **options)


@pytest.mark.parametrize("name", CASES)
def test_models_give_the_same_everywhere(name, tmp_path):
    """Losses by `choose` and by PyTorch, and outputs by /predict, on the same examples."""
    model, make, options = CASES[name]
    packed = eq.ClientSet.pack(clients(make))
    data = eq.FederatedData(packed, test=eq.ClientSet.pack(clients(make, count=5)), name=name)
    family = trained(model, data, **options)
    family.save(tmp_path / "runs" / "own")
    x, y = data.test.client(at=0)
    signature = family.results[1.0].signature
    named = {key: value.numpy() for key, value in signature.named(x).items()}
    np.savez(tmp_path / "mine.npz", **named, y=y.numpy())
    with Running(tmp_path / "runs") as server:
        found = choose(server.url, tmp_path / "mine.npz")
    wanted = family.losses((x, y))
    assert [row.mean for row in found.verdict.members] == pytest.approx([wanted[v] for v in found.values], abs=1e-4)
    inputs = {key: value.tolist() for key, value in named.items()}
    given = inputs if len(inputs) > 1 else next(iter(inputs.values()))
    answer = Client(tmp_path / "runs").post("/predict", json={"model": "0.5", "inputs": given})
    assert answer.status_code == 200, answer.text
    served = family.at(0.5).eval()
    with torch.no_grad():
        outputs = served(**x) if isinstance(x, dict) else served(*x) if isinstance(x, tuple) else served(x)
    np.testing.assert_allclose(answer.json()["outputs"], outputs.numpy(), rtol=1e-4, atol=1e-4)


def sentences():
    """Clients with sequences of 1 to 6 tokens."""
    gen = torch.Generator().manual_seed(1)

    def rows(count):
        lengths = torch.randint(1, 7, (count,), generator=gen).tolist()
        return {"input_ids": eq.data.Ragged.of([torch.randint(1, 9, (length,), generator=gen) for length in lengths])}

    made = [(f"c{k}", rows(10), classes(gen, 10)) for k in range(12)]
    return eq.FederatedData(eq.ClientSet.pack(made), test=eq.ClientSet.pack(made[:5]), name="sentences")


def test_sequences_of_any_length(tmp_path):
    data = sentences()
    family = trained(Sentences, data)
    family.save(tmp_path / "runs" / "own")
    x, y = data.test.client(at=0)
    padded = data.test.inputs(slice(0, len(y)), torch.float32)
    assert set(padded) == {"input_ids", "attention_mask"}
    with Running(tmp_path / "runs") as server:
        for wider in (0, 3):  # more padding than needed
            wide = {name: nn.functional.pad(values, (0, wider)).numpy() for name, values in padded.items()}
            np.savez(tmp_path / f"mine{wider}.npz", **wide, y=y.numpy())
            found = choose(server.url, tmp_path / f"mine{wider}.npz")
            wanted = family.losses((x, y))
            assert [row.mean for row in found.verdict.members] == pytest.approx([wanted[v] for v in found.values], abs=1e-4)
    given = {name: values.tolist() for name, values in padded.items()}
    answer = Client(tmp_path / "runs").post("/predict", json={"model": "0.5", "inputs": given})
    with torch.no_grad():
        np.testing.assert_allclose(answer.json()["outputs"], family.at(0.5)(**padded).numpy(), rtol=1e-4, atol=1e-4)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 3)

    def forward(self, x):
        return self.line(x) if float(x.detach().sum()) > 0 else self.line(x) * 1.0


def test_a_model_that_cannot_be_exported_is_saved_and_says_why(tmp_path):
    make = CASES["BatchNorm"][1]
    data = eq.FederatedData(eq.ClientSet.pack(clients(make)), test=eq.ClientSet.pack(clients(make, count=5)))
    model = Branching()
    result = eq.train(model, data, rounds=1, clients_per_round=4, progress=False, engine=eq.engines.Loop())
    result.save(tmp_path / "runs" / "one")
    ask = Client(tmp_path / "runs")
    assert ask.get("/api/runs/one/models/model/latest/model.safetensors").status_code == 200
    answer = ask.post("/predict", json={"inputs": [[0.0] * 4]})
    assert answer.status_code == 404
    assert "Branching cannot be written as ONNX" in answer.json()["error"]
    assert "Branching cannot be written as ONNX" in ask.get("/run/one").text
