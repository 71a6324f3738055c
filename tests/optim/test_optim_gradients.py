"""Per-example gradients against a loop, the fast path against the general one, and the clipping law."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from equipoise.core.per_example_losses import cross_entropy
from equipoise.errors import IncompatibleParts, InvalidParameter
from equipoise.models import ConvNet, LinearSVM, Logistic, Softmax
from equipoise.optim.gradients import ExampleGradients, OuterGradients, Query, RowGradients, clipped_sum


class Bag(nn.Module):
    """Mean embedding of tokens, with a frozen part and a loss that uses a parameter of its own."""

    def __init__(self):
        super().__init__()
        source = torch.Generator().manual_seed(3)
        self.table = nn.Embedding(7, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.out = nn.Linear(4, 3)
        self.log_scale = nn.Parameter(torch.tensor(0.3))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=source))

    def forward(self, x):
        return self.out(torch.tanh(self.frozen(self.table(x).mean(1))))

    def loss(self, outputs, targets):
        return cross_entropy(outputs * self.log_scale.exp(), targets)


def filled(model, seed=0):
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=source))
    return model


def cases():
    source = torch.Generator().manual_seed(1)
    classes = torch.randint(0, 3, (6,), generator=source)
    two = torch.randint(0, 2, (6,), generator=source)
    x = torch.randn(6, 5, generator=source)
    mlp = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 3))
    images = torch.rand(6, 28, 28, generator=source)
    yield "logistic", filled(Logistic(5)), x, two
    yield "svm", filled(LinearSVM(5, bias=False)), x, two
    yield "softmax", filled(Softmax(5, 3)), x, classes
    yield "softmax, no bias", filled(Softmax(5, 3, bias=False)), x, classes
    yield "linear", filled(nn.Linear(5, 3)), x, classes
    yield "network", filled(mlp), x, classes
    yield "tokens", Bag(), torch.randint(0, 7, (6, 9), generator=source), classes
    yield "images", ConvNet(classes=3), images, classes


CASES = {name: (model, x, y) for name, model, x, y in cases()}
LINEAR = [name for name in CASES if name in ("logistic", "svm", "softmax", "softmax, no bias", "linear")]


def by_loop(model, x, y):
    """One backward pass per example."""
    loss = getattr(model, "loss", cross_entropy)
    trained = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for i in range(len(x)):
        found = torch.autograd.grad(loss(model(x[i : i + 1]), y[i : i + 1]).sum(), trained)
        rows.append(torch.cat([g.flatten() for g in found]))
    return torch.stack(rows)


@pytest.mark.parametrize("name", CASES)
def test_rows_are_the_gradients_of_single_examples(name):
    model, x, y = CASES[name]
    examples = ExampleGradients(model)
    params = examples.layout.read(model)
    rows = examples.rows(params, x, y)
    reference = by_loop(model, x, y)
    assert rows.shape == (len(x), examples.layout.dimension)
    torch.testing.assert_close(rows, reference, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(examples.mean(params, x, y), reference.mean(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("elements", [1, 10**9])
def test_clipped_sums_do_not_depend_on_how_they_are_computed(name, elements):
    model, x, y = CASES[name]
    examples = ExampleGradients(model, elements=elements)
    params = examples.layout.read(model)
    rows = by_loop(model, x, y)
    source = torch.Generator().manual_seed(2)
    scale = torch.rand(rows.shape[1], generator=source) * 5
    shift = torch.randn(rows.shape[1], generator=source)
    queries = [Query(0.7), Query(1.5, scale=scale), Query(0.9, scale=scale, shift=shift), Query(math.inf, scale=scale)]
    for query, total in zip(queries, examples.clipped_sums(params, x, y, queries), strict=True):
        wanted = torch.zeros(rows.shape[1])
        for row in rows:
            one = row if query.scale is None else row * query.scale
            one = one if query.shift is None else one + query.shift
            wanted += one * min(1.0, query.clip / float(one.norm()))
        torch.testing.assert_close(total, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_only_linear_models_with_known_losses_take_the_short_way(name):
    model, x, y = CASES[name]
    examples = ExampleGradients(model)
    (kind,) = {type(part) for part in examples.chunks(examples.layout.read(model), x, y)}
    assert kind is (OuterGradients if name in LINEAR else RowGradients)


def test_whatever_bends_a_linear_model_takes_the_long_way():
    def kind(model, loss=None):
        examples = ExampleGradients(model, loss)
        parts = list(examples.chunks(examples.layout.read(model), torch.randn(3, 5), torch.tensor([0, 1, 1])))
        return type(parts[0])

    hooked, frozen = nn.Linear(5, 2), nn.Linear(5, 2)
    hooked.register_forward_hook(lambda module, inputs, outputs: outputs * 2)
    frozen.bias.requires_grad_(False)

    class Bent(Logistic):
        def forward(self, x):
            return super().forward(x) ** 3

    assert kind(nn.Linear(5, 2)) is OuterGradients
    assert kind(hooked) is kind(frozen) is kind(Bent(5)) is RowGradients
    assert kind(nn.Linear(5, 2), lambda z, y: cross_entropy(z, y)) is RowGradients


def test_a_penalty_on_the_weights_is_part_of_each_gradient():
    net = filled(nn.Linear(4, 2))
    x, y = torch.randn(3, 4), torch.tensor([0, 1, 0])
    plain, ridged = ExampleGradients(net), ExampleGradients(net, lambda z, t: cross_entropy(z, t) + net.weight.square().sum())
    params = plain.layout.read(net)
    extra = torch.cat([2 * net.weight.detach().flatten(), torch.zeros(2)])
    torch.testing.assert_close(ridged.rows(params, x, y), plain.rows(params, x, y) + extra)


def test_a_loss_that_looks_at_the_batch_sees_one_example_at_a_time():
    net = filled(nn.Linear(4, 2))
    examples = ExampleGradients(net, lambda z, y: cross_entropy(z, y) * len(z))  # a batch of three would triple it
    x, y = torch.randn(3, 4), torch.tensor([0, 1, 0])
    (total,) = examples.clipped_sums(examples.layout.read(net), x, y, [Query(math.inf)])
    torch.testing.assert_close(total, by_loop(net, x, y).sum(0))


@given(
    seed=st.integers(0, 10_000),
    clip=st.floats(1e-3, 1e3),
    size=st.floats(1e-6, 1e6),
    outputs=st.integers(1, 3),
    bias=st.booleans(),
    form=st.sampled_from(["plain", "scaled", "shifted"]),
)
def test_no_example_contributes_more_than_the_clip(seed, clip, size, outputs, bias, form):
    source = torch.Generator().manual_seed(seed)
    x, slopes = size * torch.randn(4, 6, generator=source), torch.randn(4, outputs, generator=source)
    outer = OuterGradients(x, slopes, bias)
    rows = outer._rows()
    scale = torch.rand(rows.rows.shape[1], generator=source) * 100 if form != "plain" else None
    shift = torch.randn(rows.rows.shape[1], generator=source) if form == "shifted" else None
    for gradients in (outer, rows):
        for i in range(4):
            one = gradients.select(torch.arange(4) == i)
            clipped, free = (clipped_sum(one, Query(bound, scale, shift)).double() for bound in (clip, math.inf))
            assert clipped.norm() <= clip * (1 + 1e-5)
            assert clipped @ free >= (1 - 1e-5) * clipped.norm() * free.norm()  # the same direction
            if free.norm() < clip * (1 - 1e-4):
                torch.testing.assert_close(clipped, free, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("long_way", [False, True])
def test_an_example_with_an_impossible_gradient_moves_the_sum_no_further_than_the_clip(bad, long_way):
    net = filled(nn.Linear(3, 2))
    examples = ExampleGradients(net, (lambda z, y: cross_entropy(z, y)) if long_way else None)
    params = examples.layout.read(net)
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    spoilt = torch.cat([x, torch.full((1, 3), bad)])
    (clean,) = examples.clipped_sums(params, x, y, [Query(0.5)])
    (total,) = examples.clipped_sums(params, spoilt, torch.cat([y, y[:1]]), [Query(0.5)])
    assert (total - clean).norm() <= 0.5 * (1 + 1e-5)


def test_no_examples_add_up_to_zero():
    for model, x, y in CASES.values():
        examples = ExampleGradients(model)
        (total,) = examples.clipped_sums(examples.layout.read(model), x[:0], y[:0], [Query(1.0)])
        assert total.shape == (examples.layout.dimension,)
        assert not total.any()


def test_models_and_losses_that_cannot_work_are_refused():
    normalised = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with pytest.raises(IncompatibleParts, match=r"(?s)model\.1 is a BatchNorm1d.*GroupNorm\(groups, 4\)") as error:
        ExampleGradients(normalised)
    assert "gradient of one example" in str(error.value)
    with pytest.raises(IncompatibleParts, match=r"^model is a InstanceNorm1d"):
        ExampleGradients(nn.InstanceNorm1d(4, affine=True, track_running_stats=True))

    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            return self.layer(x) if x.sum() > 0 else -self.layer(x)

    x, y = torch.randn(2, 3), torch.tensor([0, 1])
    examples = ExampleGradients(Branching())
    with pytest.raises(IncompatibleParts, match="Branching cannot be differentiated one example at a time"):
        examples.rows(examples.layout.read(Branching()), x, y)
    averaged = ExampleGradients(nn.Linear(3, 2), nn.CrossEntropyLoss())
    with pytest.raises(InvalidParameter, match="one number per example"):
        averaged.rows(torch.zeros(8), x, y)
    with pytest.raises(InvalidParameter, match="trainable parameters"):
        ExampleGradients(nn.Linear(3, 2).requires_grad_(False))
    with pytest.raises(InvalidParameter, match="float32 or float64"):
        ExampleGradients(nn.Linear(3, 2).bfloat16())
    with pytest.raises(InvalidParameter, match=r"torch\.nn\.Module"):
        ExampleGradients("net")
    with pytest.raises(InvalidParameter, match="function of"):
        ExampleGradients(nn.Linear(3, 2), "cross-entropy")
