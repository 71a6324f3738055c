"""The rules of forward passes: what is written out equals torch's own, and every kind of dropout draws our masks."""

import itertools
import threading
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, vmap
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from equipoise.core.forward_rules import ForwardRules

KEY = torch.tensor(42)
EXACT = {"rtol": 0, "atol": 1e-12}


def gradients(outputs, leaves):
    total = sum((each * torch.linspace(0.5, 1.5, each.numel(), dtype=each.dtype).view(each.shape)).sum() for each in outputs)
    return torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)


def assert_same(module, *inputs, **options):
    """Outputs and gradients of a module under the rules for batches are torch's own."""
    leaves = [*module.parameters(), *(x for x in inputs if isinstance(x, torch.Tensor) and x.is_floating_point())]
    leaves = [leaf.requires_grad_() for leaf in leaves]

    def flat(outputs):
        return [t for out in (outputs if isinstance(outputs, tuple) else (outputs,)) if out is not None
                for t in (out if isinstance(out, tuple) else (out,))]  # fmt: skip

    wanted = flat(module(*inputs, **options))
    with ForwardRules(None, batched=True):
        found = flat(module(*inputs, **options))
    torch.testing.assert_close(found, wanted, **EXACT)
    torch.testing.assert_close(gradients(found, leaves), gradients(wanted, leaves), **EXACT)


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


RECURRENT = list(itertools.product(["LSTM", "GRU", "RNN"], [1, 2], [False, True], [False, True], [False, True]))


@pytest.mark.parametrize(("kind", "layers", "both", "batch_first", "bias"), RECURRENT)
def test_recurrent_layers_are_torchs(kind, layers, both, batch_first, bias):
    module = getattr(nn, kind)(3, 4, layers, bidirectional=both, batch_first=batch_first, bias=bias).double()
    x, state = randn(2, 5, 3) if batch_first else randn(5, 2, 3), randn(layers * (1 + both), 2, 4)
    assert_same(module, x)
    initial = (state, state + 1) if kind == "LSTM" else state
    assert_same(module, x, hx=initial)


def test_further_recurrent_layers_are_torchs():
    assert_same(nn.LSTM(3, 4, 2, proj_size=2, bidirectional=True).double(), randn(5, 2, 3))
    assert_same(nn.LSTM(3, 4, proj_size=2, bias=False).double(), randn(5, 2, 3))
    assert_same(nn.RNN(3, 4, nonlinearity="relu").double(), randn(5, 2, 3))
    assert_same(nn.GRU(3, 4).double(), randn(5, 3))  # one sequence without a batch
    assert_same(nn.LSTMCell(3, 4).double(), randn(2, 3))
    assert_same(nn.GRUCell(3, 4, bias=False).double(), randn(2, 3), randn(2, 4))
    assert_same(nn.RNNCell(3, 4).double(), randn(2, 3), randn(2, 4))


class Attention(nn.Module):
    def forward(self, *args, **options):
        return functional.scaled_dot_product_attention(*args, **options)


def test_attention_is_torchs():
    q, k, v = randn(2, 4, 5, 8), randn(2, 4, 6, 8), randn(2, 4, 6, 3)
    allowed = torch.ones(5, 6, dtype=torch.bool).tril()
    for options in (
        {}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": allowed}, {"attn_mask": randn(2, 1, 5, 6)},
        {"attn_mask": allowed & (torch.arange(5) > 0).unsqueeze(1)},  # a query without a key
    ):  # fmt: skip
        assert_same(Attention(), q, k, v, **options)
    assert_same(Attention(), q, randn(2, 2, 6, 8), randn(2, 2, 6, 3), enable_gqa=True)
    for options in ({}, {"need_weights": False}, {"average_attn_weights": False}):
        module = nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True, add_zero_attn=True, kdim=6, vdim=5).double()
        padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
        assert_same(module, randn(2, 5, 8), randn(2, 6, 6), randn(2, 6, 5), key_padding_mask=padding, **options)
    assert_same(nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True).double(), randn(2, 5, 8), randn(2, 4, 8))


@pytest.mark.parametrize("dim", [0, 1, None])
def test_normalised_weights_are_torchs(dim):
    layer = nn.utils.parametrizations.weight_norm(nn.Conv1d(3, 4, 2).double(), dim=dim)
    assert_same(layer, randn(2, 3, 5))
    params = {name: torch.stack([p.detach(), 2 * p.detach()]) for name, p in layer.named_parameters()}

    def run(params, x):
        with ForwardRules(None, batched=True):
            return functional_call(layer, params, (x,))

    alone = torch.stack([run({name: p[i] for name, p in params.items()}, randn(2, 3, 5)) for i in range(2)])
    torch.testing.assert_close(vmap(run, in_dims=(0, None))(params, randn(2, 3, 5)), alone, **EXACT)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_embeddings_are_torchs(mode):
    rows = torch.tensor([[1, 2, 2], [0, 0, 0], [0, 4, 1]])
    assert_same(nn.EmbeddingBag(5, 3, mode=mode, padding_idx=0).double(), rows)
    assert_same(nn.EmbeddingBag(5, 3, mode=mode).double(), rows)
    assert_same(nn.EmbeddingBag(5, 3, mode=mode).double(), rows.flatten(), torch.tensor([0, 3, 6]))
    if mode == "sum":
        assert_same(nn.EmbeddingBag(5, 3, mode=mode).double(), rows, per_sample_weights=randn(3, 3))


DROPPING = {
    "Dropout": (nn.Dropout(0.4), (6, 8)),
    "Dropout in place": (nn.Sequential(nn.Tanh(), nn.Dropout(0.4, inplace=True)), (6, 8)),
    "Dropout1d": (nn.Dropout1d(0.4), (6, 8, 3)),
    "Dropout2d": (nn.Dropout2d(0.4), (6, 8, 3, 2)),
    "Dropout3d": (nn.Dropout3d(0.4), (6, 8, 3, 2, 2)),
    "AlphaDropout": (nn.AlphaDropout(0.4), (6, 8)),
    "FeatureAlphaDropout": (nn.FeatureAlphaDropout(0.4), (6, 8, 3)),
    "LSTM": (nn.LSTM(8, 5, 3, dropout=0.4, batch_first=True, bidirectional=True), (6, 4, 8)),
    "GRU": (nn.GRU(8, 5, 2, dropout=0.4, batch_first=True), (6, 4, 8)),
    "RNN": (nn.RNN(8, 5, 2, dropout=0.4), (4, 6, 8)),
    "TransformerEncoderLayer": (nn.TransformerEncoderLayer(8, 2, 12, dropout=0.4, batch_first=True), (6, 4, 8)),
    "TransformerDecoderLayer": (nn.TransformerDecoderLayer(8, 2, 12, dropout=0.4), (4, 6, 8)),
    "MultiheadAttention": (nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=True), (6, 4, 8)),
}


def call(module, x):
    if isinstance(module, nn.MultiheadAttention):
        return module(x, x, x)[0]
    out = module(x, x) if isinstance(module, nn.TransformerDecoderLayer) else module(x)
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("name", DROPPING)
def test_every_kind_of_dropout_draws_our_masks(name):
    module, shape = DROPPING[name]
    module, x, keys = module.double().train(), randn(3, *shape), torch.tensor([1, 2, 1])

    def run(x, key, batched):
        with ForwardRules(key, batched=batched) as rules:
            out = call(module, x.clone())
        assert rules.calls > 0
        return out

    before = torch.get_rng_state()
    alone = torch.stack([run(x[0], key, False) for key in keys])
    assert torch.equal(torch.get_rng_state(), before)  # torch's generator is not asked
    assert torch.equal(alone[0], alone[2])
    assert not torch.equal(alone[0], alone[1])
    together = vmap(lambda x, key: run(x, key, True))(x[:1].expand(3, *shape), keys)
    torch.testing.assert_close(together, alone, **EXACT)
    batch = 1 if shape == (4, 6, 8) else 0
    longer = torch.cat([x[0], randn(*shape)], batch)  # more examples behind change nothing for those before
    torch.testing.assert_close(run(longer, keys[0], False).narrow(batch, 0, 6), alone[0], **EXACT)
    module.eval()
    with ForwardRules(KEY, batched=True) as rules:
        found = call(module, x[0].clone())
    torch.testing.assert_close(found, call(module, x[0].clone()), **EXACT)
    assert rules.calls == 0
    module.train()


def test_functions_draw_our_masks():
    x = randn(4, 6, 3)
    named = (functional.dropout, functional.dropout1d, functional.alpha_dropout, functional.feature_alpha_dropout)
    functions = [partial(each, training=True) for each in named]
    functions += [lambda x: torch.dropout(x, 0.5, True), lambda x: torch.native_dropout(x, 0.5, True)[0]]
    functions += [lambda x: torch.feature_dropout(x, 0.5, True), lambda x: torch.dropout_(x.clone(), 0.5, True)]
    functions += [lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)]
    for function in functions:
        outputs = []
        for _ in range(2):
            with ForwardRules(KEY, batched=False) as rules:
                outputs.append(function(x))
            assert rules.calls == 1
        assert torch.equal(*outputs)
        assert not torch.equal(outputs[0], x)


def test_wrong_arguments_raise_torchs_errors():
    with ForwardRules(KEY, batched=False):
        with pytest.raises(ValueError, match="between 0 and 1"):
            functional.dropout(torch.ones(3), 1.5)
        with pytest.raises(RuntimeError, match="at least 2 dimensions"):
            torch.feature_dropout(torch.ones(3), 0.5, True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_that_is_run_again_is_torchs(reentrant):
    """Activation checkpointing runs a part of the pass again in the backward pass, where no rules are in force."""
    layer = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)).double()
    x = randn(4, 6).requires_grad_()
    torch.manual_seed(0)
    with ForwardRules(KEY, batched=False) as rules:
        out = checkpoint(layer, x, use_reentrant=reentrant)
    assert rules.calls == 0
    out.sum().backward()
    torch.manual_seed(0)
    mask = functional.dropout(torch.ones(4, 6, dtype=torch.float64), 0.5)
    torch.testing.assert_close(x.grad, mask @ layer[0].weight.detach(), **EXACT)


def test_rules_hold_in_their_own_thread_only():
    seen = []
    with ForwardRules(KEY, batched=False) as rules:
        thread = threading.Thread(target=lambda: seen.append(functional.dropout(torch.ones(9))))
        thread.start()
        thread.join()
    assert rules.calls == 0
    assert len(seen) == 1


layer_kinds = st.sampled_from(["linear", "dropout", "tanh", "norm", "gru", "attention", "alpha", "residual"])


class Stack(nn.Module):
    """Layers over sequences (B, T, 4), by their names."""

    def __init__(self, kinds):
        super().__init__()
        make = {
            "linear": lambda: nn.Linear(4, 4), "dropout": lambda: nn.Dropout(0.3), "tanh": nn.Tanh,
            "norm": lambda: nn.LayerNorm(4), "alpha": lambda: nn.AlphaDropout(0.2),
            "gru": lambda: nn.GRU(4, 2, 2, dropout=0.3, batch_first=True, bidirectional=True),
            "attention": lambda: nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True),
            "residual": lambda: nn.TransformerEncoderLayer(4, 2, 6, dropout=0.2, batch_first=True, activation="gelu"),
        }  # fmt: skip
        self.layers = nn.ModuleList(make[kind]() for kind in kinds)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for layer in self.layers:
            x = call(layer, x)
        return self.head(x).mean(1)


@given(st.lists(layer_kinds, max_size=4), st.integers(1, 3), st.integers(0, 2))
@settings(max_examples=25, deadline=None)
def test_any_stack_of_layers_is_the_same_alone_in_a_batch_and_padded(kinds, examples, padding):
    torch.manual_seed(0)
    model, keys = Stack(kinds).double(), torch.tensor([5, 9])
    x = randn(2, examples + padding, 3, 4)
    params = {name: torch.stack([p.detach(), p.detach() * 1.1]) for name, p in model.named_parameters()}

    def loss(params, x, key, batched):
        with ForwardRules(key, batched=batched):
            return functional_call(model, params, (x,))[:examples].square().sum()

    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    total = vmap(lambda p, x, key: loss(p, x, key, True))(leaves, x, keys).sum()
    together = torch.autograd.grad(total, list(leaves.values()))
    for client in range(2):
        own = {name: value[client].clone().requires_grad_() for name, value in params.items()}
        alone = torch.autograd.grad(loss(own, x[client, :examples], keys[client], False), list(own.values()))
        for found, wanted in zip(together, alone, strict=True):
            torch.testing.assert_close(found[client], wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("padding", [None, 0, 3, -1])
def test_the_padding_row_of_an_embedding_gets_no_gradient_in_a_batch_of_clients(padding):
    """torch alone leaves the padding row out for the first client only."""
    rows, factors = torch.tensor([[0, 1, 4, 3], [3, 0, 0, 4]]), randn(2, 4, 3)

    def loss(table, rows, factors, batched):
        with ForwardRules(None, batched=batched):
            return (nn.functional.embedding(rows, table, padding_idx=padding) * factors).sum()

    tables = randn(2, 5, 3).requires_grad_()
    total = vmap(lambda *given: loss(*given, True))(tables, rows, factors).sum()
    (together,) = torch.autograd.grad(total, tables)
    for client in range(2):
        alone = torch.autograd.grad(loss(tables[client], rows[client], factors[client], False), tables)[0][client]
        torch.testing.assert_close(together[client], alone)
        if padding is not None:
            assert not together[client, padding].any()
