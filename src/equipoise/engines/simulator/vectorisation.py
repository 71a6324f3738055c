"""Whether the clients of a task can be trained as one batch: tried out before the first round."""

from __future__ import annotations

import warnings
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
    size = sum(p.numel() for p in task.module.parameters())
    if task.layout.dtype != torch.float64 and size <= _LARGEST_COPY:
        with suppress(Exception):  # a forward pass that asks for float32, say
            return _tried(task.in_double(), clients, _EXACT)
    try:
        return _tried(task, clients, _EXACT if task.layout.dtype == torch.float64 else _ROUNDED)
    except Exception as failure:  # vmap refuses in many ways
        return BatchingTrial(first_line(failure))


def _tried(task: Task, clients: ClientSet, tolerance: tuple[float, float]) -> BatchingTrial:
    task.scorer.train()
    device, dtype = clients.device, task.layout.dtype
    first, last = clients.rows(0), clients.rows(len(clients) - 1)
    rows = torch.tensor([[first.start, first.stop - 1, first.start], [last.stop - 1, last.start, last.start]], device=device)
    flat = _moved(task).expand(2, -1).contiguous()
    x, y = clients.inputs(rows, dtype), clients.targets(rows, dtype)
    shares = torch.tensor([[0.5, 0.5, 0.0]] * 2, dtype=dtype, device=device)
    keys = rng.step_keys(torch.tensor([1, 2], device=device), 0)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), warnings.catch_warnings(), FULL.products():
        warnings.filterwarnings("error", message="There is a performance drop")  # vmap's own slow loop
        together, _ = stacked_gradients(task, task.layout.unflatten(flat), ExampleBatch(x, y, shares, False, keys=keys))
        single = [_plain_gradient(task, flat[i], clients, rows[i, :2], keys[i]) for i in range(2)]
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
