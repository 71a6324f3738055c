"""The ConvNet's gradient in Triton: autograd's numbers, on a GPU or, without one, in the interpreter (a process of its own)."""

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import version

import numpy as np
import pytest
import torch
from torch.nn import functional

import equipoise as eq
from equipoise.core.task import Task
from equipoise.engines.simulator.batched_steps import stacked_gradients
from equipoise.engines.simulator.example_batches import ExampleBatch
from equipoise.errors import InvalidParameter

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
on_a_device = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="no CUDA device: `test_interpreted` runs it")
pytestmark = pytest.mark.filterwarnings(  # by NumPy in the interpreter
    "ignore:Conversion of an array:DeprecationWarning", "ignore:invalid value:RuntimeWarning"
)


@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the tests below run as they are")
@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "2.4.0" and version("triton") < "3.9",
    reason="the interpreter of this Triton needs NumPy below 2.4",
)
@pytest.mark.long
def test_interpreted():
    """Two gradients; all of them, in some minutes, with TRITON_INTERPRET=1 and this file."""
    names = ("test_it_is_autograds_gradient[2-3-62-shape0]", "test_results_are_float32_where_torch_casts_products[32]")
    command = [sys.executable, "-m", "pytest", *(f"{__file__}::{name}" for name in names)]
    run = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
    assert "failed" not in run.stdout


@pytest.fixture(autouse=True)
def _fewer_steps(monkeypatch):
    """The interpreter's time goes by the number of operations, whatever their size."""
    if INTERPRETED:
        from equipoise.engines.simulator.cuda.kernels.convnet_kernels import SETTINGS

        for precision, settings in SETTINGS.items():
            monkeypatch.setitem(SETTINGS, precision, settings | {"first_map_gradient": {"CHANNELS": 32}})


def problem(k, b, classes, seed=0, shape=(28, 28), hidden=None):
    """A task and, for k clients of their own models and images, parameters and a batch: float32 numbers held in float64.

    Draws in which the maximum of a pooling window hangs on the last bits are passed over: there any rounding may choose.
    """
    task = Task.of(eq.models.ConvNet(classes=classes, hidden=hidden).double())
    gen = torch.Generator().manual_seed(seed)
    while True:
        params = {
            name: ((torch.rand(k, *size, generator=gen) * 2 - 1) / size[1:].numel() ** 0.5).double()
            for name, size in zip(task.layout.names, task.layout.shapes, strict=True)
        }
        shares = torch.rand(k, b, generator=gen)
        shares[:, -1] *= float(b == 1)  # padding
        images = torch.rand(k, b, *shape, generator=gen).double()
        y = torch.randint(0, classes, (k, b), generator=gen)
        batch = ExampleBatch(images, y, (shares / shares.sum(1, keepdim=True)).double(), last=False)
        if all(closest({name: value[i] for name, value in params.items()}, images[i]) > 1e-6 for i in range(k)):
            return task, params, batch


def closest(params, images):
    """The smallest distance of a pooling window's maximum from its second and, where that decides, from 0."""
    below, least = images.view(-1, 1, 28, 28), []
    for layer in ("conv1", "conv2"):
        z = functional.conv2d(below, params[f"{layer}.weight"], params[f"{layer}.bias"])
        first, second = z.unfold(2, 2, 2).unfold(3, 2, 2).flatten(4).topk(2).values.unbind(-1)
        least += [(first - second)[first > 0].min(), first.abs().min()]
        below = first.relu()
    return float(torch.stack(least).min())


def on_device(params, batch):
    moved = {name: value.float().to(DEVICE) for name, value in params.items()}
    return moved, ExampleBatch(batch.x.float().to(DEVICE), batch.y.to(DEVICE), batch.shares.float().to(DEVICE), last=False)


def gradients_of(task, params, batch, **options):
    from equipoise.engines.simulator.cuda.kernels.convnet_kernels import convnet_gradients

    params, batch = on_device(params, batch)
    return convnet_gradients(task, params, batch, **options)


def worst(found, losses, expected, expected_losses):
    """The largest of the relative errors ‖g − r‖ / ‖r‖."""
    pairs = [(found[name], value) for name, value in expected.items()] + [(losses, expected_losses)]
    return max(float((g.cpu().double() - r).norm() / r.norm()) for g, r in pairs)


@on_a_device
@pytest.mark.parametrize(("k", "b", "classes", "shape"), [(2, 3, 62, (28, 28)), (1, 17, 5, (784,)), (2, 1, 100, (1, 28, 28))])
def test_it_is_autograds_gradient(k, b, classes, shape):
    task, params, batch = problem(k, b, classes, shape=shape)
    expected, expected_losses = stacked_gradients(task, params, batch)
    found, losses = gradients_of(task, params, batch)
    assert list(found) == list(params)
    assert {name: value.shape for name, value in found.items()} == {name: value.shape for name, value in expected.items()}
    assert worst(found, losses, expected, expected_losses) < 1e-5


@on_a_device
@pytest.mark.parametrize("hidden", [32, 512])
def test_a_hidden_layer(hidden):
    """Gradients and logits of a network with a hidden layer are autograd's."""
    from equipoise.engines.simulator.cuda.kernels.convnet_kernels import convnet_logits

    task, params, batch = problem(2, 3, 10, hidden=hidden)
    expected, expected_losses = stacked_gradients(task, params, batch)
    found, losses = gradients_of(task, params, batch)
    assert list(found) == list(params)
    assert worst(found, losses, expected, expected_losses) < 1e-5
    logits = torch.func.vmap(lambda named, x: torch.func.functional_call(task.module, named, x))(params, batch.x)
    moved, there = on_device(params, batch)
    assert torch.allclose(convnet_logits(moved, there.x).cpu().double(), logits, rtol=1e-4, atol=1e-5)


@on_a_device
@pytest.mark.parametrize("hidden", [None, 32])
def test_results_are_float32_where_torch_casts_products(hidden):
    """With precision="bf16" a step runs under autocast, and its weights have the type of the gradients."""
    task, params, batch = problem(1, 2, 10, hidden=hidden)
    with torch.autocast(DEVICE, torch.bfloat16):
        found, losses = gradients_of(task, params, batch, precision="tf32")
    assert {value.dtype for value in (*found.values(), losses)} == {torch.float32}


@on_a_device
@pytest.mark.parametrize(
    ("precision", "limit"),
    [
        ("tf32", 0.2),
        pytest.param("bf16", 0.5, marks=pytest.mark.skipif(INTERPRETED, reason="the interpreter has no products in bfloat16")),
    ],
)
def test_shorter_products_are_near(precision, limit):
    """Rounding may move the maximum of a pooling window, and with it a whole gradient: the limits are wide."""
    task, params, batch = problem(1, 2, 10, seed=1)
    expected, expected_losses = stacked_gradients(task, params, batch)
    found, losses = gradients_of(task, params, batch, precision=precision)
    assert worst(found, losses, expected, expected_losses) < limit
    assert torch.allclose(losses.cpu().double(), expected_losses, rtol=1e-2)


@on_a_device
def test_parameters_in_any_memory_order_and_shared_ones():
    task, params, batch = problem(2, 2, 10, seed=2)
    shared = {name: value[:1].expand_as(value) for name, value in params.items()}
    expected, expected_losses = stacked_gradients(task, shared, batch)
    vectors = task.layout.flatten({name: value[:1].float().to(DEVICE) for name, value in params.items()})
    named = task.layout.unflatten(vectors)
    from equipoise.engines.simulator.cuda.kernels.convnet_kernels import convnet_gradients

    _, moved = on_device(params, batch)
    found, losses = convnet_gradients(task, {name: v.expand(2, *v.shape[1:]) for name, v in named.items()}, moved)
    assert worst(found, losses, expected, expected_losses) < 1e-5
    own = {name: torch.empty_like(found[name]).copy_(value) for name, value in named.items()}  # as the simulator keeps them
    again, losses_again = convnet_gradients(task, own, moved)
    assert all(torch.equal(again[name], found[name]) for name in found)
    assert all(again[name].stride() == own[name].stride() for name in found)
    assert torch.equal(losses_again, losses)


@on_a_device
def test_what_is_not_a_number_stays_with_its_client():
    task, params, batch = problem(3, 2, 10, seed=3)
    alone = ExampleBatch(batch.x[1:2], batch.y[1:2], batch.shares[1:2], last=False)
    clean, clean_losses = gradients_of(task, {name: value[1:2] for name, value in params.items()}, alone)
    batch.x[0].view(-1)[0] = float("nan")
    params["conv2.weight"][2].view(-1)[0] = float("inf")
    found, losses = gradients_of(task, params, batch)
    assert losses.isfinite().tolist() == [False, True, False]
    assert torch.equal(losses[1:2], clean_losses)
    for name, value in found.items():
        assert value.isnan().flatten(1).any(1).tolist() == [True, False, True]
        assert torch.equal(value[1:2], clean[name])


@on_a_device
def test_ties_go_to_the_first_and_a_dead_unit_learns_nothing():
    """Equal numbers in a pooling window, as on an empty background: max_pool2d takes the first; ReLU has slope 0 at 0."""
    task, params, batch = problem(1, 2, 10, seed=4)
    batch.x[:, :, 5:, :] = 0.0
    params["conv1.bias"][:, ::2] = 0.0
    params["conv2.bias"][:, 0] = -100.0
    expected, expected_losses = stacked_gradients(task, params, batch)
    found, losses = gradients_of(task, params, batch)
    assert worst(found, losses, expected, expected_losses) < 1e-5
    assert not found["conv2.weight"][:, 0].any()


@on_a_device
def test_pixels_as_bytes_with_a_scale_and_targets_to_ignore():
    task, params, batch = problem(1, 3, 10, seed=5)
    pixels = (batch.x * 255).to(torch.uint8)
    batch.y[0, 1] = -100
    seen = ExampleBatch(pixels.double() / 255, batch.y, batch.shares, last=False)
    expected, expected_losses = stacked_gradients(task, params, seen)
    from equipoise.engines.simulator.cuda.kernels.convnet_kernels import convnet_gradients

    moved, plain = on_device(params, batch)
    bytes_ = ExampleBatch(pixels.to(DEVICE), plain.y, plain.shares, last=False, scale=1 / 255)
    found, losses = convnet_gradients(task, moved, bytes_)
    assert worst(found, losses, expected, expected_losses) < 1e-5


@on_a_device
def test_what_it_cannot_do_is_refused():
    task, params, batch = problem(1, 1, 10)
    with pytest.raises(InvalidParameter, match="precision must be one of"):
        gradients_of(task, params, batch, precision="float16")
    with pytest.raises(InvalidParameter, match="28 × 28"):
        gradients_of(task, params, ExampleBatch(batch.x[..., 1:], batch.y, batch.shares, last=False))
    with pytest.raises(InvalidParameter, match="one class per example"):
        gradients_of(task, params, ExampleBatch(batch.x, batch.y.double(), batch.shares, last=False))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
def test_a_cuda_graph_holds_it_and_repeats_its_bits(precision):
    from equipoise.engines.simulator.cuda.kernels.convnet_kernels import convnet_gradients

    task, params, batch = problem(2, 16, 62, seed=6)
    params, batch = on_device(params, batch)
    first, losses = convnet_gradients(task, params, batch, precision=precision)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held, held_losses = convnet_gradients(task, params, batch, precision=precision)
    for _ in range(2):
        graph.replay()
        assert all(torch.equal(held[name], first[name]) for name in first)
        assert torch.equal(held_losses, losses)
