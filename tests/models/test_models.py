"""What every model promises: parameter counts, gradients, vectorisation over clients, seeds, and refusals in words."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from equipoise import models
from equipoise.core.task import Task
from equipoise.data import Schema
from equipoise.errors import InvalidParameter
from equipoise.models import (
    MLP,
    CharGRU,
    CharLSTM,
    ConvNet,
    EmbeddingLSTM,
    LinearRegression,
    LinearSVM,
    Logistic,
    MeanEstimator,
    Softmax,
    Tabular,
)

CLIENTS, BATCH = 3, 4


def table(words: int = 6, size: int = 3) -> Tensor:
    return torch.randn(words, size, generator=torch.Generator().manual_seed(9))


def features(*shape: int) -> Callable[[torch.Generator, torch.dtype], Tensor]:
    return lambda generator, dtype: torch.rand(CLIENTS, BATCH, *shape, generator=generator, dtype=dtype)


def integers(below: int, *shape: int) -> Callable[[torch.Generator, torch.dtype], Tensor]:
    return lambda generator, dtype: torch.randint(below, (CLIENTS, BATCH, *shape), generator=generator)


def table_schema(target: list[float] | list[str]) -> Schema:
    """Of two columns of numbers, and the target."""
    return Schema.fit({"a": [0.0, 1.0, 3.0], "b": [2.0, 0.0, 1.0], "y": target}, target="y")


SMALL = {
    "softmax": (lambda: Softmax(6, 3), features(2, 3), integers(3)),
    "softmax without bias": (lambda: Softmax(6, 3, bias=False), features(6), integers(3)),
    "logistic": (lambda: Logistic(4), features(4), integers(2)),
    "svm": (lambda: LinearSVM(4), features(4), integers(2)),
    "regression": (lambda: LinearRegression(4), features(4), features()),
    "mean": (lambda: MeanEstimator(2), features(2), features(2)),
    "perceptron": (lambda: MLP(6, 3, hidden=(4, 5), seed=1), features(2, 3), integers(3)),
    "convnet": (lambda: ConvNet(classes=4, seed=1), features(28, 28), integers(4)),
    "convnet, hidden": (lambda: ConvNet(classes=4, hidden=16, seed=1), features(28, 28), integers(4)),
    "gru": (lambda: CharGRU(vocabulary=6, hidden=5, seed=1), integers(6, 5), integers(6)),
    "gru, one-hot, 2 layers": (lambda: CharGRU(vocabulary=6, embedding=None, hidden=5, layers=2), integers(6, 5), integers(6)),
    "lstm": (lambda: CharLSTM(vocabulary=6, classes=3, embedding=2, hidden=4, layers=1), integers(6, 5), integers(3)),
    "lstm, 2 layers, padding": (lambda: CharLSTM(vocabulary=6, hidden=4, padding=0), integers(6, 5), integers(6)),
    "table of classes": (lambda: Tabular(table_schema(["u", "v", "w"]), hidden=(3,)), features(2), integers(3)),
    "table of numbers": (lambda: Tabular(table_schema([0.5, 1.0, 9.5]), hidden=(3,)), features(2), features()),
    "fixed embedding": (lambda: EmbeddingLSTM(table(), hidden=4, padding=0), integers(6, 5), integers(2)),
}
every_model = pytest.mark.parametrize("name", SMALL)


def small(name: str, dtype: torch.dtype = torch.float64) -> tuple[Task, Tensor, Tensor, Tensor]:
    """A task, parameters per client (K, D), inputs (K, B, …) and targets (K, B, …)."""
    make, inputs, targets = SMALL[name]
    generator = torch.Generator().manual_seed(7)
    task = Task.of(make().to(dtype))
    start = task.layout.read(task.module)
    params = start + 0.3 * torch.randn(CLIENTS, len(start), generator=generator, dtype=dtype)
    return task, params, inputs(generator, dtype), targets(generator, dtype)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Softmax(784, 62, bias=False), 784 * 62),
        (Softmax(784, 62), 784 * 62 + 62),
        (Logistic(50), 51),
        (Logistic(50, bias=False), 50),
        (LinearSVM(100), 101),
        (LinearRegression(7), 8),
        (MeanEstimator(2), 2),
        (MLP(784, 62, hidden=(200, 200)), 784 * 200 + 200 + 200 * 200 + 200 + 200 * 62 + 62),
        (MLP(5, 3, hidden=()), 18),
        (ConvNet(), 115_646),  # 832 + 51,264 + 63,550
        (ConvNet(classes=10), 832 + 51_264 + 10_250),
        (ConvNet(classes=10, hidden=512), 832 + 51_264 + 524_800 + 5_130),
        (CharGRU(vocabulary=53), 53 * 8 + 384 * 8 + 384 * 128 + 768 + 53 * 129),
        (CharGRU(vocabulary=53, embedding=None), 384 * 53 + 384 * 128 + 768 + 53 * 129),
        (CharGRU(vocabulary=10, classes=4, embedding=2, hidden=3, layers=2), 20 + 18 + 27 + 18 + 27 + 27 + 18 + 16),
        (CharLSTM(vocabulary=80), 640 + 1024 * (8 + 256 + 2) + 1024 * (256 + 256 + 2) + 80 * 257),
        (CharLSTM(vocabulary=10, classes=4, embedding=2, hidden=3, layers=1), 20 + 24 + 36 + 24 + 16),
        (Tabular(table_schema(["u", "v", "w"]), hidden=(5, 4)), 5 * 3 + 4 * 6 + 3 * 5),
        (EmbeddingLSTM(torch.zeros(400, 50)), 200 * (50 + 50 + 2) + 2 * 51),
        (EmbeddingLSTM(torch.zeros(4, 5), classes=3, hidden=2, layers=2), 40 + 16 + 16 + 16 + 16 + 16 + 9),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_parameter_counts(model: nn.Module, expected: int) -> None:
    assert count(model) == expected
    assert Task.of(model).layout.dimension == expected


def test_every_public_model_is_tested() -> None:
    no_models = {"with_group_norm", "freeze_lora_a", "language"}
    assert {type(make()).__name__ for make, _, _ in SMALL.values()} == set(models.__all__) - no_models


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_model
def test_vectorised_gradients_are_those_of_each_client(name: str, dtype: torch.dtype) -> None:
    task, params, x, y = small(name, dtype)

    def loss(one: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        return task.losses(one, inputs, targets).mean()

    together = vmap(grad(loss))(params, x, y)
    assert together.dtype == dtype
    assert together.abs().sum() > 0
    for k in range(CLIENTS):
        one = copy.deepcopy(task.module)  # the plain way: a module with the client's parameters, and backward()
        task.layout.write(one, params[k])
        task.loss(one(x[k]), y[k]).mean().backward()
        alone = task.layout.flatten({n: p.grad for n, p in one.named_parameters()})
        # Entries are sums in which large terms cancel: rounding is relative to the gradient, not to the entry.
        assert float((together[k] - alone).norm() / alone.norm()) < 100 * torch.finfo(dtype).eps


@every_model
def test_vectorised_losses_and_errors(name: str) -> None:
    task, params, x, y = small(name)
    for of in (task.loss, task.error):
        together = vmap(lambda p, a, b, of=of: of(task.outputs(p, a), b))(params, x, y)
        alone = torch.stack([of(task.outputs(params[k], x[k]), y[k]) for k in range(CLIENTS)])
        assert together.shape == (CLIENTS, BATCH)
        torch.testing.assert_close(together, alone)


@every_model
def test_shared_parameters_with_batches_per_client(name: str) -> None:
    task, params, x, y = small(name)
    shared = vmap(grad(lambda p, a, b: task.losses(p, a, b).mean()), in_dims=(None, 0, 0))(params[0], x, y)
    own = vmap(grad(lambda p, a, b: task.losses(p, a, b).mean()))(params[:1].expand(CLIENTS, -1), x, y)
    torch.testing.assert_close(shared, own)


@pytest.mark.parametrize("name", [n for n in SMALL if not n.startswith("convnet")])
def test_gradients_by_finite_differences(name: str) -> None:
    task, params, x, y = small(name)
    assert torch.autograd.gradcheck(lambda p: task.losses(p, x[0], y[0]), params[0].requires_grad_())


@pytest.mark.parametrize("name", [n for n in SMALL if n.startswith("convnet")])
def test_convnet_gradient_by_finite_differences_along_random_directions(name: str) -> None:
    task, params, x, y = small(name)
    generator = torch.Generator().manual_seed(11)
    loss = lambda p: task.losses(p, x[0], y[0]).mean()  # noqa: E731
    gradient = grad(loss)(params[0])
    for _ in range(5):
        direction = torch.randn(len(gradient), generator=generator, dtype=torch.float64)
        direction /= direction.norm()
        difference = (loss(params[0] + 1e-6 * direction) - loss(params[0] - 1e-6 * direction)) / 2e-6
        torch.testing.assert_close(difference, gradient @ direction, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("ours", "above"),
    [
        (ConvNet(seed=3), [nn.Linear(1024, 62)]),
        (ConvNet(classes=10, hidden=512, seed=3), [nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10)]),
    ],
)
def test_convnet_is_the_published_architecture(ours: ConvNet, above: list[nn.Module]) -> None:
    ours = ours.double()
    theirs = nn.Sequential(
        nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), *above
    ).double()  # fmt: skip
    theirs.load_state_dict(dict(zip(theirs.state_dict(), ours.state_dict().values(), strict=True)))
    x = torch.rand(3, 1, 28, 28, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(x), theirs(x))
    mine, reference = (torch.autograd.grad(m(x).square().sum(), list(m.parameters())) for m in (ours, theirs))
    for a, b in zip(mine, reference, strict=True):
        torch.testing.assert_close(a, b)


def test_convnet_takes_images_in_three_shapes() -> None:
    model, x = ConvNet(), torch.rand(2, 28, 28)
    torch.testing.assert_close(model(x), model(x.unsqueeze(1)))
    torch.testing.assert_close(model(x), model(x.flatten(1)))


SEEDED = {
    "convnet": lambda seed: ConvNet(seed=seed),
    "gru": lambda seed: CharGRU(vocabulary=6, seed=seed),
    "gru, one-hot": lambda seed: CharGRU(vocabulary=6, embedding=None, seed=seed),
    "lstm": lambda seed: CharLSTM(vocabulary=6, hidden=8, seed=seed),
    "fixed embedding": lambda seed: EmbeddingLSTM(table(), seed=seed),
}


@pytest.mark.parametrize("name", SEEDED)
def test_initial_parameters_are_a_function_of_the_seed(name: str) -> None:
    make = SEEDED[name]
    before = torch.random.get_rng_state()
    first = make(0)
    assert torch.equal(torch.random.get_rng_state(), before)  # the global generator is neither used …
    torch.manual_seed(123)
    second, other = make(0), make(1)
    for (parameter, a), b, c in zip(first.named_parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), parameter  # … nor read
        assert not torch.equal(a, c), parameter
        assert a.isfinite().all()


@pytest.mark.parametrize("name", SMALL)
def test_building_any_model_leaves_the_global_generator_alone(name: str) -> None:
    before = torch.random.get_rng_state()
    SMALL[name][0]()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_initial_law_is_torchs() -> None:
    model = ConvNet(seed=5)
    for layer, fan_in in ((model.conv1, 25), (model.conv2, 800), (model.readout, 1024)):
        bound = fan_in**-0.5
        assert layer.weight.abs().max() <= bound
        assert layer.bias.abs().max() <= bound
        assert float(layer.weight.detach().std()) == pytest.approx(bound / 3**0.5, rel=0.05)
    gru = CharGRU(vocabulary=200, hidden=64, seed=5)
    assert float(gru.embedding.weight.detach().std()) == pytest.approx(1, rel=0.1)
    for parameter in gru.recurrent.parameters():
        assert parameter.abs().max() <= 1 / 8
        assert float(parameter.detach().std()) == pytest.approx(1 / 8 / 3**0.5, rel=0.15)


@every_model
def test_an_empty_batch_gives_no_losses(name: str) -> None:
    task, params, x, y = small(name)
    assert task.losses(params[0], x[0, :0], y[0, :0]).shape == (0,)


@every_model
def test_state_dicts_round_trip(name: str) -> None:
    task, params, x, _ = small(name)
    task.layout.write(task.module, params[0])
    fresh = SMALL[name][0]().double()
    fresh.load_state_dict(task.module.state_dict())
    torch.testing.assert_close(fresh(x[0]), task.outputs(params[0], x[0]))


@pytest.mark.parametrize(
    ("model", "x", "message"),
    [
        (Softmax(6, 3), torch.zeros(4, 5), "x must hold 6 features per example, shape (B, 6)"),
        (Logistic(6), torch.zeros(6), "x must hold 6 features"),
        (LinearSVM(6), torch.zeros(()), "x must hold 6 features"),
        (LinearRegression(2), torch.zeros(3, 2, dtype=torch.int64), "x must hold floating numbers, but is torch.int64"),
        (MeanEstimator(2), torch.zeros(4, 3), "x must hold 2 features"),
        (ConvNet(), torch.zeros(2, 32, 32), "x must hold grey images of 28 × 28 pixels"),
        (ConvNet(), torch.zeros(2, 3, 28, 28), "but is (2, 3, 28, 28)"),
        (ConvNet(), torch.zeros(2, 28, 28, dtype=torch.uint8), "x must hold floating numbers, but is torch.uint8"),
        (CharGRU(vocabulary=5), torch.zeros(20, dtype=torch.int64), "tokens must have shape (B, T)"),
        (CharGRU(vocabulary=5), torch.zeros(2, 0, dtype=torch.int64), "tokens must have shape (B, T)"),
        (CharLSTM(vocabulary=5, hidden=4), torch.zeros(2, 20, 5), "tokens must have shape (B, T)"),
        (CharLSTM(vocabulary=5, hidden=4), torch.zeros(2, 20), "tokens must be integers, but is torch.float32"),
        (EmbeddingLSTM(table()), torch.zeros(2, 20, dtype=torch.bool), "tokens must be integers, but is torch.bool"),
    ],
)
def test_wrong_inputs_are_refused_in_words(model: nn.Module, x: Tensor, message: str) -> None:
    with pytest.raises(InvalidParameter, match=re.escape(message)) as caught:
        model(x)
    assert caught.value.fix


def test_wrong_inputs_are_refused_under_vmap() -> None:
    with pytest.raises(InvalidParameter, match="6 features"):
        vmap(Softmax(6, 3))(torch.zeros(2, 4, 5))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Softmax(0, 3), "features must be a whole number of at least 1, but is 0"),
        (lambda: Softmax(6, 2.5), "classes must be a whole number"),
        (lambda: Logistic(True), "features must be a whole number"),
        (lambda: MeanEstimator(-1), "features must be a whole number"),
        (lambda: ConvNet(classes=0), "classes must be a whole number"),
        (lambda: ConvNet(seed=0.5), "seed must be a whole number"),
        (lambda: CharGRU(vocabulary=0), "vocabulary must be a whole number"),
        (lambda: CharGRU(vocabulary=5, embedding=0), "embedding must be a whole number"),
        (lambda: CharGRU(vocabulary=5, hidden=0), "hidden must be a whole number"),
        (lambda: CharLSTM(vocabulary=5, layers=0), "layers must be a whole number"),
        (lambda: CharLSTM(vocabulary=5, padding=5), "padding must be a token, 0 … 4, or None, but is 5"),
        (lambda: EmbeddingLSTM(torch.zeros(5)), "embeddings must be a floating tensor of shape (V, E)"),
        (lambda: EmbeddingLSTM([[1.0]]), "embeddings must be a floating tensor"),
        (lambda: EmbeddingLSTM(torch.zeros(5, 2, dtype=torch.int64)), "embeddings must be a floating tensor"),
        (lambda: EmbeddingLSTM(torch.tensor([[1.0], [float("nan")]])), "NaN or infinite in rows [1]"),
        (lambda: EmbeddingLSTM(table(), padding=6), "padding must be a token, 0 … 5"),
    ],
)
def test_wrong_sizes_are_refused(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(InvalidParameter, match=re.escape(message)):
        make()


def test_sizes_may_be_numpy_integers() -> None:
    numpy = pytest.importorskip("numpy")
    assert count(Softmax(numpy.int64(3), numpy.int32(2))) == 8
