"""Check the ConvNet's Triton programs on a CUDA device, compare them with autograd, and time ways to cut their work.

PYTHONPATH=src python benchmarks/tune_convnet_kernels.py

The defaults in equipoise/engines/kernels/convnet.py are the best of such runs on an H200. Needs torch, numpy and triton alone.
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from equipoise.core.task import Task
from equipoise.engines.simulator.batched_steps import stacked_gradients
from equipoise.engines.simulator.cuda.kernels import convnet_kernels as kernels
from equipoise.engines.simulator.example_batches import ExampleBatch
from equipoise.models import ConvNet

TASK = Task.of(ConvNet(classes=62))
SECONDS = float(sys.argv[1]) if len(sys.argv) > 1 else 80.0  # no variant is begun after so many
BEGAN = time.perf_counter()

# What is tried besides the defaults: a program, its (warps, stages) and its sizes, in all pairs.
_TRIED: list[tuple[str, list[tuple[int, int]], list[dict[str, int]]]] = [
    ("first_layer", [(4, 1)], [{"STEPS": 2}, {"STEPS": 4}, {"STEPS": 6}]),
    ("second_layer", [(4, 2), (4, 3), (4, 4)], [{"IMAGES": 1}, {"IMAGES": 2}, {"IMAGES": 4}]),
    ("readout", [(4, 3), (4, 4)], [{"FEATURES": 64}, {"FEATURES": 128}]),
    ("readout_gradients", [(4, 1), (8, 1)], [{"CHANNELS": 4}, {"CHANNELS": 8}]),
    ("second_weights", [(4, 1), (4, 2), (4, 3)],
     [{"TAPS": 2, "POSITIONS": 1}, {"TAPS": 2, "POSITIONS": 2}, {"TAPS": 4, "POSITIONS": 1}, {"TAPS": 4, "POSITIONS": 2}]),
    ("first_map_gradient", [(4, 1), (4, 2), (4, 3)], [{"CHANNELS": 16}, {"CHANNELS": 32}, {"CHANNELS": 64}]),
    ("first_weights", [(4, 1), (4, 2), (4, 3), (8, 1)], [{"PARTS": 4}, {"PARTS": 6}, {"PARTS": 9}]),
]  # fmt: skip


def variants(precision: str) -> Iterator[tuple[str, dict[str, int]]]:
    default = kernels.SETTINGS[precision]
    for field in fields(default):
        yield field.name, getattr(default, field.name)
    for name, runs, sizes in _TRIED:
        for (warps, stages), size in itertools.product(runs, sizes):
            setting = {"num_warps": warps, "num_stages": stages, **size}
            if setting != getattr(default, name):
                yield name, setting


def problem(k: int, b: int, seed: int, device: str = "cuda") -> tuple[dict[str, Tensor], ExampleBatch]:
    """Clients with models and images of their own, in float32."""
    gen = torch.Generator().manual_seed(seed)
    params = {
        name: ((torch.rand(k, *size, generator=gen) * 2 - 1) / max(size[1:].numel(), 1) ** 0.5).to(device)
        for name, size in zip(TASK.layout.names, TASK.layout.shapes, strict=True)
    }
    x, shares = torch.rand(k, b, 28, 28, generator=gen), torch.rand(k, b, generator=gen)
    y = torch.randint(0, 62, (k, b), generator=gen)
    return params, ExampleBatch(x.to(device), y.to(device), (shares / shares.sum(1, keepdim=True)).to(device), last=False)


def kept_in_order(params: dict[str, Tensor], batch: ExampleBatch) -> dict[str, Tensor]:
    """The parameters in the memory order of their gradients, as the simulator keeps them."""
    gradients, _ = kernels.convnet_gradients(TASK, params, batch, precision="tf32")
    return {name: torch.empty_like(gradients[name]).copy_(value) for name, value in params.items()}


def exact(params: dict[str, Tensor], batch: ExampleBatch) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients and losses by autograd in float64, one client after another."""
    found: list[tuple[Tensor, ...]] = []
    losses = []
    for i in range(len(batch.x)):
        named = {name: value[i].double().requires_grad_() for name, value in params.items()}
        first = functional.conv2d(batch.x[i].double().unsqueeze(1), named["conv1.weight"], named["conv1.bias"])
        first = functional.max_pool2d(first, 2).relu()
        second = functional.conv2d(first, named["conv2.weight"], named["conv2.bias"])
        second = functional.max_pool2d(second, 2).relu().flatten(1)
        logits = functional.linear(second, named["readout.weight"], named["readout.bias"])
        loss = (functional.cross_entropy(logits, batch.y[i], reduction="none") * batch.shares[i].double()).sum()
        found.append(torch.autograd.grad(loss, list(named.values())))
        losses.append(loss.detach())
    return {name: torch.stack([one[j] for one in found]) for j, name in enumerate(params)}, torch.stack(losses)


def by_columns(params: dict[str, Tensor], batch: ExampleBatch) -> tuple[tuple[Tensor, ...], Tensor]:
    """The same by patches in columns and batched matrix products, with autograd's backward pass."""
    k, b = batch.shares.shape
    leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
    columns = functional.unfold(batch.x.view(k * b, 1, 28, 28), 5).view(k, b, 25, 576).transpose(1, 2).reshape(k, 25, b * 576)
    z = torch.baddbmm(leaves["conv1.bias"].unsqueeze(2), leaves["conv1.weight"].reshape(k, 32, 25), columns)
    h = functional.max_pool2d(z.view(k * 32, b, 24, 24), 2).relu().view(k, 32, b, 12, 12).transpose(1, 2)
    columns = functional.unfold(h.reshape(k * b, 32, 12, 12), 5).view(k, b, 800, 64).transpose(1, 2).reshape(k, 800, b * 64)
    z = torch.baddbmm(leaves["conv2.bias"].unsqueeze(2), leaves["conv2.weight"].reshape(k, 64, 800), columns)
    h = functional.max_pool2d(z.view(k * 64, b, 8, 8), 2).relu().view(k, 64, b, 16).transpose(1, 2).reshape(k, b, 1024)
    z = torch.baddbmm(leaves["readout.bias"].unsqueeze(1), h, leaves["readout.weight"].transpose(1, 2))
    each = functional.cross_entropy(z.flatten(0, 1), batch.y.flatten(), reduction="none").view(k, b)
    losses = (each * batch.shares).sum(1)
    return torch.autograd.grad(losses.sum(), list(leaves.values())), losses.detach()


def microseconds(work: Callable[[], object], inside: int = 5, repeats: int = 7, *, graph: bool = True) -> float:
    """The median time of one call, from replays of a CUDA graph that holds several or, without it, call by call."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    again = work
    if graph:
        held = torch.cuda.CUDAGraph()
        with torch.cuda.graph(held):
            for _ in range(inside):
                work()
        again = held.replay
    times = []
    for turn in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        again()
        end.record()
        end.synchronize()
        if turn >= 2:
            times.append(start.elapsed_time(end) * 1000 / (inside if graph else 1))
    return statistics.median(times)


def errors(found: dict[str, Tensor], losses: Tensor, expected: dict[str, Tensor], expected_losses: Tensor) -> str:
    pairs = [(found[name], value) for name, value in expected.items()] + [(losses, expected_losses)]
    return "  ".join(f"{float((g.double() - r).norm() / r.norm()):8.1e}" for g, r in pairs)


class Recorder:
    """Runs a gradient under some settings and keeps the launch of one program, to be repeated alone."""

    def __init__(
        self, params: dict[str, Tensor], batch: ExampleBatch, precision: str, name: str, setting: dict[str, int]
    ) -> None:
        self.again: Callable[[], None] | None = None
        plain, settings = kernels._Step._launch, kernels.SETTINGS[precision]

        def launch(step: Any, program: str, *arguments: Any, **constants: Any) -> None:
            plain(step, program, *arguments, **constants)
            if program == name:
                self.again = lambda: plain(step, program, *arguments, **constants)

        kernels._Step._launch = launch
        kernels.SETTINGS[precision] = replace(settings, **{name: setting})
        try:
            self.gradients, _ = kernels.convnet_gradients(TASK, params, batch, precision=precision)
        finally:
            kernels._Step._launch, kernels.SETTINGS[precision] = plain, settings


def compiled(job: tuple[str, str, dict[str, int]]) -> str:
    """Compile a variant, in a process of its own; what went wrong, or nothing."""
    precision, name, setting = job
    try:
        params, batch = problem(2, 16, 0)
        Recorder(kept_in_order(params, batch), batch, precision, name, setting)
    except Exception as failure:  # too much shared memory, say: this variant is left out
        return f"{type(failure).__name__}: {str(failure)[:60]}"
    return ""


def check(seed: int) -> None:
    print("relative errors against float64:", "  ".join(f"{name[-8:]:>8}" for name in TASK.layout.names), "    loss")
    for k, b in ((100, 16), (7, 10), (3, 33)):
        params, batch = problem(k, b, seed)
        expected = exact(params, batch)
        rows: list[tuple[str, dict[str, Tensor], Tensor]] = []
        for tf32 in (False, True):
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
            rows.append(("autograd tf32" if tf32 else "autograd float32", *stacked_gradients(TASK, params, batch)))
        for precision in kernels.SETTINGS:
            found, losses = kernels.convnet_gradients(TASK, params, batch, precision=precision)
            again, losses_again = kernels.convnet_gradients(TASK, params, batch, precision=precision)
            same = all(torch.equal(found[name], again[name]) for name in found) and torch.equal(losses, losses_again)
            rows.append((f"ours {precision}, repeats {same}", found, losses))
        for name, found, losses in rows:
            print(f"  {k:3} × {b:2} {name:27}", errors(found, losses, *expected), flush=True)


def check_poison(seed: int) -> None:
    """What is not a number in one client's data or model must show there, and leave every bit of the others alone."""
    params, batch = problem(4, 16, seed)
    for precision in kernels.SETTINGS:
        clean, clean_losses = kernels.convnet_gradients(TASK, params, batch, precision=precision)
        x, weight = batch.x.clone(), params["conv2.weight"].clone()
        x[1, 0, 0, 0], weight[2, 0, 0, 0, 0] = float("nan"), float("inf")
        poisoned = batch._replace(x=x)
        found, losses = kernels.convnet_gradients(TASK, params | {"conv2.weight": weight}, poisoned, precision=precision)
        kept = all(torch.equal(found[name][[0, 3]], clean[name][[0, 3]]) for name in found)
        shown = all(bool(found[name][i].isnan().any()) for name in found for i in (1, 2))
        kept &= torch.equal(losses[[0, 3]], clean_losses[[0, 3]])
        print(f"{precision}: NaN shown where it belongs {shown and not losses[1:3].isfinite().any()}, others kept {kept}")


def ten_steps(own: dict[str, Tensor], batch: ExampleBatch, precision: str) -> None:
    """A round of ten steps of SGD; the rate is tiny, so that the numbers stay what they are."""
    for _ in range(10):
        gradients, _ = kernels.convnet_gradients(TASK, own, batch, precision=precision)
        torch._foreach_add_(list(own.values()), [gradients[name] for name in own], alpha=-1e-6)


def whole_steps(k: int, seed: int) -> None:
    params, batch = problem(k, 16, seed)
    own = kept_in_order(params, batch)
    for precision in kernels.SETTINGS:
        step = microseconds(partial(kernels.convnet_gradients, TASK, own, batch, precision=precision))
        ten = microseconds(partial(ten_steps, own, batch, precision), inside=1)
        print(f"{k:4} clients × 16, {precision:8} {step:8.0f} µs a gradient, {ten / 1000:6.2f} ms ten SGD steps", flush=True)


def others(k: int, seed: int) -> None:
    """What autograd takes for the same gradients: eagerly, and then from a graph."""
    params, batch = problem(k, 16, seed)
    ways = {
        "vmap and cuDNN": partial(stacked_gradients, TASK, params, batch),
        "columns, bmm": partial(by_columns, params, batch),
    }
    for (name, work), tf32 in itertools.product(ways.items(), (False, True)):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
        eager = microseconds(work, graph=False)
        print(f"{k:4} clients × 16, {name}, tf32 {tf32}: {eager:8.0f} µs eagerly,", end=" ", flush=True)
        print(f"{microseconds(work, inside=1, repeats=3):8.0f} µs from a graph", flush=True)


def tune(seed: int, precisions: list[str]) -> None:
    jobs = [(precision, *one) for precision in precisions for one in variants(precision)]
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        failures = pool.map(compiled, jobs, chunksize=2)
    left_out = [(job, failure) for job, failure in zip(jobs, failures, strict=True) if failure]
    print(f"{len(jobs)} variants compiled, {len(left_out)} left out, {time.perf_counter() - BEGAN:.0f} s", flush=True)
    check(seed)
    check_poison(seed)
    for k in (100, 10, 1000):
        whole_steps(k, seed)
    params, batch = problem(100, 16, seed)
    own = kept_in_order(params, batch)
    for precision in precisions:
        times: dict[str, list[tuple[float, str]]] = {}
        usual, _ = kernels.convnet_gradients(TASK, own, batch, precision=precision)
        for job, failure in zip(jobs, failures, strict=True):
            if job[0] != precision or failure or time.perf_counter() - BEGAN > SECONDS:
                continue
            run = Recorder(own, batch, *job)
            assert run.again is not None
            off = max(float((run.gradients[name] - value).norm() / value.norm()) for name, value in usual.items())
            if not off < 1e-3:
                print(f"{job} differs from the default by {off:.1e}")
            cut = " ".join(f"{key.removeprefix('num_')}={value}" for key, value in job[2].items())
            mark = "*" if job[2] == getattr(kernels.SETTINGS[precision], job[1]) else ""
            times.setdefault(job[1], []).append((microseconds(run.again, inside=10, repeats=5), mark + cut))
        for name, taken in times.items():
            print(f"{precision} {name}:", "; ".join(f"{t:.0f} µs {cut}" for t, cut in sorted(taken)[:6]), flush=True)


if __name__ == "__main__":
    torch.backends.cudnn.deterministic = True
    now = int(time.time())
    tune(now, list(kernels.SETTINGS))
    others(100, now)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {time.perf_counter() - BEGAN:.0f} s")
