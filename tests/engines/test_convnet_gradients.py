"""The hand-written gradient of the ConvNet is autograd's: random clients, ties, ragged batches, memory orders, threads."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import equipoise as eq
from equipoise.core.task import Task
from equipoise.engines.simulator.batched_steps import stacked_gradients
from equipoise.engines.simulator.cpu.convnet_gradients import convnet_gradients, convnet_scores, is_plain_convnet
from equipoise.engines.simulator.example_batches import ExampleBatch
from equipoise.errors import InvalidParameter

SHAPES = ((784,), (28, 28), (1, 28, 28))


def make_task(classes=5, dtype=torch.float64, **given):
    return Task.of(eq.models.ConvNet(classes=classes).to(dtype), **given)


def made_params(task, k, gen, spread=0.05):
    """Parameters of k different clients."""
    start = task.layout.read(task.module)
    noise = torch.randn(k, len(start), generator=gen, dtype=torch.float64)
    return task.layout.unflatten(start + spread * noise.to(start))


def made_batch(k, b, gen, classes=5, shape=(784,), dtype=torch.float64):
    """Examples whose shares sum to 1; the last of every second client are padding."""
    x = torch.rand(k, b, *shape, generator=gen, dtype=torch.float64)
    shares = torch.rand(k, b, generator=gen, dtype=torch.float64) + 0.1
    shares[::2, max(1, b - b // 3) :] = 0
    shares /= shares.sum(1, keepdim=True)
    return ExampleBatch(x.to(dtype), torch.randint(0, classes, (k, b), generator=gen), shares.to(dtype), False)


def assert_same(found, expected, rtol=1e-9):
    gradients, losses = found
    assert list(gradients) == list(expected[0])
    torch.testing.assert_close(losses, expected[1], rtol=rtol, atol=1e-12)
    for name, gradient in gradients.items():
        scale = float(expected[0][name].abs().max())
        torch.testing.assert_close(
            gradient, expected[0][name], rtol=rtol, atol=1e-3 * rtol * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


@settings(max_examples=15)
@given(
    k=st.integers(1, 4),
    b=st.integers(1, 70),
    shape=st.sampled_from(SHAPES),
    order=st.sampled_from(["as made", "shared", "permuted"]),
    seed=st.integers(0, 2**30),
)
def test_gradients_are_those_of_autograd(k, b, shape, order, seed):
    gen = torch.Generator().manual_seed(seed)
    task, batch = make_task(), made_batch(k, b, gen, shape=shape)
    params = made_params(task, 1 if order == "shared" else k, gen)
    if order == "shared":
        params = {name: value.expand(k, *value.shape[1:]) for name, value in params.items()}
    if order == "permuted":  # the memory of every parameter runs backwards through its dimensions
        params = {n: v.permute(*range(v.dim())[::-1]).contiguous().permute(*range(v.dim())[::-1]) for n, v in params.items()}
    before = [value.clone() for value in (*params.values(), batch.x, batch.y, batch.shares)]
    assert_same(convnet_gradients(task, params, batch), stacked_gradients(task, params, batch))
    for value, old in zip((*params.values(), batch.x, batch.y, batch.shares), before, strict=True):
        assert torch.equal(value, old)


@pytest.mark.parametrize("images", ["whole numbers", "blank"])
def test_ties_in_a_pooling_window_and_zeros_before_relu(images):
    gen = torch.Generator().manual_seed(3)
    task, batch = make_task(), made_batch(2, 5, gen)
    x = torch.randint(0, 2, batch.x.shape, generator=gen).double() if images == "whole numbers" else torch.zeros_like(batch.x)
    batch = ExampleBatch(x, batch.y, batch.shares, False)
    params = {n: torch.randint(-1, 2, v.shape, generator=gen).double() for n, v in made_params(task, 2, gen).items()}
    params["readout.weight"] *= 1e-3  # sums of whole numbers are exact: ties are ties in any order of summation
    first = nn.functional.conv2d(x[0].view(5, 1, 28, 28), params["conv1.weight"][0], params["conv1.bias"][0])
    windows = first.unfold(2, 2, 2).unfold(3, 2, 2).flatten(4)  # (5, 32, 12, 12, 4)
    peak = windows.amax(-1, keepdim=True)
    assert float(((windows == peak).sum(-1) > 1).double().mean()) > 0.2
    assert bool((peak == 0).any())
    assert_same(convnet_gradients(task, params, batch), stacked_gradients(task, params, batch))


def test_single_precision_is_as_close_to_the_truth_as_autograd():
    gen = torch.Generator().manual_seed(0)
    exact, task = make_task(62), make_task(62, torch.float32)
    params = {name: value.float() for name, value in made_params(exact, 3, gen).items()}
    batch = made_batch(3, 40, gen, 62, dtype=torch.float32)
    truth, losses = stacked_gradients(
        exact,
        {name: value.double() for name, value in params.items()},
        ExampleBatch(batch.x.double(), batch.y, batch.shares.double(), False),
    )
    found, found_losses = convnet_gradients(task, params, batch)
    assert found_losses.dtype == torch.float32
    torch.testing.assert_close(found_losses.double(), losses, rtol=1e-5, atol=0)
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32
        assert float((gradient - truth[name]).norm()) < 1e-5 * float(truth[name].norm()), name


def test_steps_in_the_memory_order_of_the_gradients_with_fewer_clients_at_the_end():
    gen = torch.Generator().manual_seed(1)
    task = make_task()
    anchor = made_params(task, 1, gen)
    plain = {name: value.repeat(3, *(1,) * (value.dim() - 1)) for name, value in anchor.items()}
    ours = {name: value.expand(3, *value.shape[1:]) for name, value in anchor.items()}
    for step, (k, b) in enumerate([(3, 16), (3, 16), (2, 16), (1, 3)]):
        batch = made_batch(k, b, gen)
        gradients, losses = convnet_gradients(task, {name: value[:k] for name, value in ours.items()}, batch)
        if step == 0:
            ours = {name: torch.empty_like(gradients[name]).copy_(value) for name, value in anchor.items()}
            assert all(ours[name].stride() == gradients[name].stride() for name in ours)
        expected, expected_losses = stacked_gradients(task, {name: value[:k] for name, value in plain.items()}, batch)
        torch.testing.assert_close(losses, expected_losses, rtol=1e-9, atol=0)
        for name, gradient in gradients.items():
            ours[name][:k].sub_(gradient, alpha=0.3)
            plain[name][:k].sub_(expected[name], alpha=0.3)
    for name, value in plain.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-9, atol=1e-12)
        assert not torch.equal(value[0], anchor[name][0])


def test_the_gradient_is_the_slope_of_the_loss():
    gen = torch.Generator().manual_seed(2)
    task, batch = make_task(3), made_batch(1, 2, gen, 3)
    params = made_params(task, 1, gen)
    gradients = {name: value.clone() for name, value in convnet_gradients(task, params, batch)[0].items()}
    for name, value in params.items():
        direction = torch.randn(value.shape, generator=gen, dtype=torch.float64)
        ends = [convnet_gradients(task, params | {name: value + step * direction}, batch)[1] for step in (1e-6, -1e-6)]
        slope = float((ends[0] - ends[1]) / 2e-6)
        assert slope == pytest.approx(float((gradients[name] * direction).sum()), rel=1e-5, abs=1e-8), name


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", [name for name, _ in eq.models.ConvNet().named_parameters()])
def test_a_diverged_client_is_seen_and_does_not_touch_the_others(name, bad):
    gen = torch.Generator().manual_seed(4)
    task, batch = make_task(), made_batch(3, 20, gen)
    params = made_params(task, 3, gen)
    clean, clean_losses = convnet_gradients(task, params, batch)
    clean = {n: value.clone() for n, value in clean.items()}
    params[name][1].flatten()[0] = bad
    found, losses = convnet_gradients(task, params, batch)
    assert not all(bool(value[1].isfinite().all()) for value in (*found.values(), losses))
    for i in (0, 2):
        assert torch.equal(losses[i], clean_losses[i])
        assert all(torch.equal(found[n][i], clean[n][i]) for n in found)


def test_threads_at_once_give_the_bits_of_one_after_another():
    gen = torch.Generator().manual_seed(5)
    tasks = [make_task(62, torch.float32) for _ in range(2)]
    work = [(made_params(tasks[0], 2, gen), made_batch(2, b, gen, 62, dtype=torch.float32)) for b in (16, 33)]
    together = Barrier(2)

    def several(index, wait):
        torch.set_num_threads(1)
        results = []
        for repeat in range(4):
            if wait:
                together.wait(60)
            params, batch = work[(index + repeat) % 2]
            gradients, losses = convnet_gradients(tasks[index], params, batch)
            results.append([losses, *(value.clone() for value in gradients.values())])
        return results

    alone = [several(index, False) for index in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for index, future in enumerate([pool.submit(several, index, True) for index in range(2)]):
            for found, expected in zip(future.result(), alone[index], strict=True):
                assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", ["probabilities", "ignored"])
def test_other_targets_of_the_cross_entropy(kind):
    gen = torch.Generator().manual_seed(6)
    task, batch = make_task(), made_batch(2, 35, gen)
    y = torch.rand(2, 35, 5, generator=gen, dtype=torch.float64).softmax(2) if kind == "probabilities" else batch.y.clone()
    if kind == "ignored":
        y[:, ::3] = -100
    batch, params = ExampleBatch(batch.x, y, batch.shares, False), made_params(task, 2, gen)
    assert_same(convnet_gradients(task, params, batch), stacked_gradients(task, params, batch))


def test_a_target_beyond_the_classes_is_refused():
    gen = torch.Generator().manual_seed(7)
    task, batch = make_task(), made_batch(2, 3, gen)
    batch.y[1, 1] = 5
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        convnet_gradients(task, made_params(task, 2, gen), batch)


def test_images_of_another_size_are_refused():
    gen = torch.Generator().manual_seed(8)
    task, batch = make_task(), made_batch(2, 3, gen, shape=(14, 56))
    with pytest.raises(InvalidParameter, match="28 × 28"):
        convnet_gradients(task, made_params(task, 2, gen), batch)


@pytest.mark.parametrize("count", [1, 32, 33, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_are_those_of_the_task(count, dtype):
    gen = torch.Generator().manual_seed(count)
    task = make_task(7, dtype, error=lambda outputs, y: outputs.argmax(1).ne(y).to(outputs.dtype) + 2)
    x = torch.rand(count, 28, 28, generator=gen, dtype=torch.float64).to(dtype)
    y = torch.randint(0, 7, (count,), generator=gen)
    flat = task.layout.flatten(made_params(task, 1, gen))[0]
    losses, errors = task.scores(flat, x, y)
    for params in (flat, task.layout.unflatten(flat)):
        found = convnet_scores(task, params, x, y)
        torch.testing.assert_close(found[0], losses)
        assert torch.equal(found[1], errors)


def test_scores_leave_gradients_in_use_alone():
    gen = torch.Generator().manual_seed(9)
    task, batch = make_task(), made_batch(2, 4, gen)
    params = made_params(task, 2, gen)
    gradients, _ = convnet_gradients(task, params, batch)
    before = {name: value.clone() for name, value in gradients.items()}
    convnet_scores(task, {name: value[0] for name, value in params.items()}, batch.x[0], batch.y[0])
    assert all(torch.equal(gradients[name], value) for name, value in before.items())


def test_which_tasks_are_a_plain_convnet():
    class Doubled(eq.models.ConvNet):
        def forward(self, x):
            return 2 * super().forward(x)

    def changed(change):
        model = eq.models.ConvNet()
        change(model)
        return Task.of(model)

    shared = eq.models.ConvNet()

    class WithParameters(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = shared.conv1.bias

        def forward(self, outputs, y):
            return outputs[:, 0] * self.weight.sum()

    assert is_plain_convnet(Task.of(eq.models.ConvNet()))
    assert is_plain_convnet(Task.of(eq.models.ConvNet(classes=10).double(), error=lambda outputs, y: outputs[:, 0]))
    refused = [
        Task.of(Doubled()),
        Task.of(eq.models.Softmax(784, 62)),
        Task.of(eq.models.ConvNet(), loss=nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1)),
        Task.of(eq.models.ConvNet(), loss=lambda outputs, y: nn.functional.cross_entropy(outputs, y, reduction="none")),
        Task.of(shared, error=WithParameters()),
        Task.of(eq.models.ConvNet().bfloat16()),
        changed(lambda m: m.conv2.requires_grad_(False)),
        changed(lambda m: m.conv2.bias.requires_grad_(False)),
        changed(lambda m: m.register_forward_hook(lambda *_: None)),
        changed(lambda m: m.conv2.register_forward_pre_hook(lambda *_: None)),
        changed(lambda m: setattr(m, "forward", lambda x: x)),
        changed(lambda m: setattr(m.conv1, "dilation", (2, 2))),
        changed(lambda m: setattr(m, "conv1", nn.Conv2d(1, 32, 5, bias=False))),
        changed(lambda m: setattr(m, "readout", nn.Sequential(m.readout, nn.ReLU()))),
        changed(lambda m: m.register_parameter("extra", nn.Parameter(torch.zeros(1)))),
    ]
    assert not any(is_plain_convnet(task) for task in refused)
