"""The written-out cells against torch's own recurrent layers, and what padding does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from equipoise.models import CharGRU, CharLSTM, EmbeddingLSTM
from equipoise.models.recurrent import gru_scan, lstm_scan

VOCABULARY, CLASSES, EMBEDDING, HIDDEN = 7, 5, 3, 4
TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}


def tokens(batch: int = 6, length: int = 9, *, first: int = 0, seed: int = 0) -> Tensor:
    return torch.randint(first, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def make(kind: str, layers: int, embedding: int | None = EMBEDDING, padding: int | None = None) -> nn.Module:
    if kind == "fixed":
        table = torch.randn(VOCABULARY, EMBEDDING, generator=torch.Generator().manual_seed(5))
        return EmbeddingLSTM(table, classes=CLASSES, hidden=HIDDEN, layers=layers, padding=padding, seed=2).double()
    model = CharGRU if kind == "gru" else CharLSTM
    return model(
        vocabulary=VOCABULARY, classes=CLASSES, embedding=embedding, hidden=HIDDEN, layers=layers, padding=padding, seed=2
    ).double()


def oracle(model: nn.Module, x: Tensor) -> tuple[Tensor, nn.Module]:
    """The same model with torch's own layer, which carries copies of the same weights."""
    inputs = model.recurrent.weight_ih_l0.shape[1]
    layer = nn.GRU if isinstance(model, CharGRU) else nn.LSTM
    theirs = layer(inputs, HIDDEN, num_layers=model.recurrent.layers, batch_first=True).double()
    theirs.load_state_dict(model.recurrent.state_dict())  # same names and shapes, or this raises
    if isinstance(model, EmbeddingLSTM):
        embedded = model.embeddings[x]
    elif model.embedding is None:
        embedded = functional.one_hot(x, VOCABULARY).double()
    else:
        embedded = model.embedding(x)
    states, _ = theirs(embedded)
    return model.readout(states[:, -1]), theirs


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize(("kind", "embedding"), [("gru", 3), ("gru", None), ("lstm", 3), ("lstm", None), ("fixed", 3)])
def test_outputs_and_gradients_agree_with_torch(kind: str, embedding: int | None, layers: int) -> None:
    model, x = make(kind, layers, embedding), tokens()
    weights = torch.randn(6, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected, theirs = oracle(model, x)
    torch.testing.assert_close(model(x), expected, **TOLERANCE)

    outer = {n: p for n, p in model.named_parameters() if not n.startswith("recurrent.")}
    inner = dict(model.recurrent.named_parameters())
    ours = torch.autograd.grad((model(x) * weights).sum(), [*outer.values(), *inner.values()])
    them = torch.autograd.grad((expected * weights).sum(), [*outer.values(), *(theirs.get_parameter(n) for n in inner)])
    for name, a, b in zip([*outer, *inner], ours, them, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("scan", "layer", "gates"), [(gru_scan, nn.GRU, 3), (lstm_scan, nn.LSTM, 4)])
def test_scans_give_every_state(scan: object, layer: type[nn.Module], gates: int) -> None:
    generator = torch.Generator().manual_seed(0)
    theirs = layer(EMBEDDING, HIDDEN).double()
    x = torch.randn(5, 2, EMBEDDING, dtype=torch.float64, generator=generator)
    projected = functional.linear(x, theirs.weight_ih_l0, theirs.bias_ih_l0)
    assert projected.shape[-1] == gates * HIDDEN
    torch.testing.assert_close(torch.stack(scan(projected, theirs.weight_hh_l0, theirs.bias_hh_l0)), theirs(x)[0], **TOLERANCE)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", ["gru", "lstm", "fixed"])
def test_padding_before_or_after_changes_nothing(kind: str, layers: int) -> None:
    model, x = make(kind, layers, padding=0), tokens(first=1)
    blank = torch.zeros(6, 4, dtype=torch.int64)
    for padded in (torch.cat([blank, x], 1), torch.cat([x, blank], 1), torch.cat([x[:, :3], blank, x[:, 3:]], 1)):
        torch.testing.assert_close(model(padded), model(x), **TOLERANCE)
    unpadded = make(kind, layers)  # the same weights; without padding, token 0 is a token like any other
    torch.testing.assert_close(unpadded(x), model(x), **TOLERANCE)
    assert not torch.allclose(unpadded(torch.cat([x, blank], 1)), model(x))


@pytest.mark.parametrize("kind", ["gru", "lstm", "fixed"])
def test_ragged_rows_in_one_batch(kind: str) -> None:
    model, x = make(kind, 2, padding=0), tokens(first=1)
    lengths = [1, 2, 3, 5, 9, 0]
    padded = torch.stack([functional.pad(row[:n], (0, 9 - n)) for row, n in zip(x, lengths, strict=True)])
    outputs = model(padded)
    for row, length, output in zip(x[:5], lengths[:5], outputs[:5], strict=True):
        torch.testing.assert_close(model(row[None, :length])[0], output, **TOLERANCE)
    torch.testing.assert_close(outputs[5], model.readout.bias)  # nothing read: the state is still zero


def test_gradient_of_the_padding_embedding_is_zero() -> None:
    model, x = make("gru", 2, padding=0), tokens()
    model(x).square().sum().backward()
    assert (x == 0).any()
    assert not model.embedding.weight.grad[0].any()
    assert model.embedding.weight.grad[1:].any(1).all()


def test_fixed_embeddings_are_a_constant_copy() -> None:
    table = torch.randn(VOCABULARY, EMBEDDING, generator=torch.Generator().manual_seed(5))
    model = EmbeddingLSTM(table, hidden=HIDDEN)
    before = model(tokens())
    table.zero_()
    torch.testing.assert_close(model(tokens()), before)
    assert "embeddings" not in dict(model.named_parameters())
    assert "embeddings" in dict(model.named_buffers())
    assert model.double().embeddings.dtype == torch.float64


def test_tokens_of_any_integer_type() -> None:
    model, x = make("gru", 1), tokens()
    for dtype in (torch.uint8, torch.int16, torch.int32):
        torch.testing.assert_close(model(x.to(dtype)), model(x))


def test_a_small_gru_learns_a_repeating_text() -> None:
    text = torch.arange(60) % 5
    x, y = text.unfold(0, 4, 1)[:-1], text[4:]
    model = CharGRU(vocabulary=5, hidden=16, seed=0)
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(60):
        optimiser.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    assert (model(x).argmax(1) == y).all()


@pytest.mark.parametrize("outside", [-1, VOCABULARY, 10**9])
@pytest.mark.parametrize(("kind", "embedding"), [("gru", 3), ("gru", None), ("lstm", 3), ("fixed", 3)])
def test_tokens_outside_the_vocabulary_never_read_another_client(kind: str, embedding: int | None, outside: int) -> None:
    model, x = make(kind, 1, embedding, padding=0), tokens()
    x[2, 4] = outside
    stacked = {n: torch.stack([p.detach(), p.detach() + 1]) for n, p in model.named_parameters()}
    x = torch.stack([x, tokens()])
    together = vmap(lambda p, one: functional_call(model, p, (one,)))(stacked, x)
    torch.testing.assert_close(together[0], model(x[0]), equal_nan=True)
    assert together[0, 2].isnan().all()
    assert together.isnan().sum() == CLASSES  # that row of that client, nothing else

    def loss(p: dict[str, Tensor], one: Tensor) -> Tensor:
        return functional_call(model, p, (one,)).square().mean()

    gradients = vmap(grad(loss))(stacked, x)
    assert gradients["readout.bias"][0].isnan().all()  # loud: the zero gradient of a masked row would hide it
    assert gradients["readout.bias"][1].isfinite().all()
