"""Whether the clients of a task can be trained as one batch: tried out before the first round."""

from __future__ import annotations

import warnings
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core import rng, trees
from equipoise.core.forward_rules import ForwardRules
from equipoise.core.task import Task
from equipoise.data.clients import ClientSet
from equipoise.engines.simulator.batched_steps import stacked_gradients
from equipoise.engines.simulator.example_batches import ExampleBatch
from equipoise.engines.simulator.precision import FULL, first_line

_EXACT, _ROUNDED = (1e-6, 1e-8), (1e-3, 1e-3)  # what two gradients may differ by, of the parameter's and of the whole one
_LARGEST_COPY = 2**28  # parameters of a model that is copied to float64


@dataclass(frozen=True)
class BatchingTrial:
    """What a trial of batching has shown: why clients cannot be batched (None if they can), and by how much it differs."""

    reason: str | None
    difference: float | None = None  # of the batched gradient from the plain one, as a share of the gradient
    exact: bool = False  # whether it was found in float64

    def __str__(self) -> str:
        if self.difference is None:
            return ""
        kind = "float64" if self.exact else "the model's own precision"
        return f"In a trial, batched and plain gradients differ by {self.difference:.1e} of the gradient, in {kind}."


def try_batching(task: Task, clients: ClientSet) -> BatchingTrial:
    """Try two clients with two examples each, and a third as padding, against one client at a time without padding.

    They are compared in float64 if the model runs in it, where only a real difference is one, and else relative to the whole
    gradient.
    """
    if (counter := counts_on(task)) is not None:
        return BatchingTrial(f"it counts in {counter!r}, which clients would share")
    size = sum(p.numel() for p in task.module.parameters())
    if task.layout.dtype != torch.float64 and size <= _LARGEST_COPY:
        with suppress(Exception):  # a forward pass that asks for float32, say
            return _tried(task.in_double(), clients, _EXACT)
    try:
        return _tried(task, clients, _EXACT if task.layout.dtype == torch.float64 else _ROUNDED)
    except Exception as failure:  # vmap refuses in many ways
        return BatchingTrial(first_line(failure))


def counts_on(task: Task) -> str | None:
    """An integer buffer that a client's work changes and may depend on; None if there is none.

    A BatchNorm layer counts its batches, but goes by the count only without a momentum.
    """
    layers = dict(task.module.named_modules())
    for name in task.carried.counters:
        owner, _, own = name.rpartition(".")
        layer = layers[owner]
        known = isinstance(layer, nn.modules.batchnorm._NormBase) and own == "num_batches_tracked"
        if not known or layer.momentum is None:
            return name
    return None


def _tried(task: Task, clients: ClientSet, tolerance: tuple[float, float]) -> BatchingTrial:
    task.scorer.train()
    device, dtype = clients.device, task.layout.dtype
    first, last = clients.rows(0), clients.rows(len(clients) - 1)
    middle = [(part.start + part.stop) // 2 for part in (first, last)]
    third = middle if task.mixes else (first.start, last.start)
    rows = torch.tensor([[first.start, first.stop - 1, third[0]], [last.stop - 1, last.start, third[1]]], device=device)
    flat = _moved(task).expand(2, -1).contiguous()
    x, y = clients.inputs(rows, dtype), clients.targets(rows, dtype)
    # A model that mixes the examples of a batch is never padded.
    count = 3 if task.mixes else 2
    shares = torch.tensor([[1 / count] * count + [0.0] * (3 - count)] * 2, dtype=dtype, device=device)
    start = task.carried.read(task.module, dtype) if task.carried.names else torch.zeros(0, dtype=dtype, device=device)
    buffers = {name: value.clone() for name, value in task.carried.unflatten(start.expand(2, -1)).items()}
    keys = rng.step_keys(torch.tensor([1, 2], device=device), 0)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), warnings.catch_warnings(), FULL.products():
        warnings.filterwarnings("error", message="There is a performance drop")  # vmap's own slow loop
        asked = ExampleBatch(x, y, shares, False, keys=keys, buffers=buffers)
        together, _ = stacked_gradients(task, task.layout.unflatten(flat), asked)
        single, after = [], []
        for i in range(2):
            task.carried.write(task.module, start)
            single.append(_plain_gradient(task, flat[i], clients, rows[i, :count], keys[i]))
            after.append({name: value.clone() for name, value in task.module.named_buffers() if name in buffers})
        task.carried.write(task.module, start)
    if odd := [name for name, value in buffers.items() if not torch.allclose(value, torch.stack([a[name] for a in after]))]:
        return BatchingTrial(f"its buffer {odd[0]!r} is not changed as it is by one client alone")
    expected = {name: torch.stack([each[name] for each in single]) for name in together}
    whole = _size(torch.cat([value.flatten() for value in expected.values()]))
    worst, exact = 0.0, dtype == torch.float64
    for name, value in together.items():
        difference = _size(value - expected[name]) if _same_places(value, expected[name]) else float("inf")
        worst = max(worst, difference / max(whole, 1e-30))
        if difference > tolerance[0] * _size(expected[name]) + tolerance[1] * whole:
            reason = f"the batched gradient of {name} differs from the plain one by {worst:.1e} of the whole gradient"
            if _drops(task, flat[0], clients, rows[0, :2], keys[0]):
                reason += "; the model has dropout, whose masks may depend on padding"
            return BatchingTrial(reason, worst, exact)
    return BatchingTrial(None, worst, exact)


def _moved(task: Task) -> Tensor:
    """The parameters (D,) a little away from their start, where a layer of zeros may hide what is below it."""
    params = task.layout.read(task.module)
    noise = torch.sin(torch.arange(len(params), device=params.device, dtype=torch.float64) * 12.9898).to(params.dtype)
    return params + noise * (0.01 * params.abs() + 0.001)


def _plain_loss(task: Task, leaf: Tensor, clients: ClientSet, rows: Tensor, rules: ForwardRules) -> Tensor:
    x, y = clients.inputs(rows, leaf.dtype), clients.targets(rows, leaf.dtype)
    with rules:
        return task.losses(leaf, trees.clone(x), y).mean()


def _plain_gradient(task: Task, params: Tensor, clients: ClientSet, rows: Tensor, key: Tensor) -> dict[str, Any]:
    leaf = params.detach().requires_grad_()
    loss = _plain_loss(task, leaf, clients, rows, ForwardRules(key, batched=False))
    return task.layout.unflatten(torch.autograd.grad(loss, leaf)[0])


def _drops(task: Task, params: Tensor, clients: ClientSet, rows: Tensor, key: Tensor) -> bool:
    """Whether a forward pass calls dropout."""
    rules = ForwardRules(key, batched=False)
    _plain_loss(task, params, clients, rows, rules)
    return rules.calls > 0


def _size(values: Tensor) -> float:
    return float(values.double().nan_to_num(0, 0, 0).norm())


def _same_places(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are not finite at the same places."""
    return one.shape == other.shape and torch.equal(one.isfinite(), other.isfinite())
