"""Whether the clients of a task can be trained as one batch: tried out before the first round."""

from __future__ import annotations

import warnings

import torch

from equipoise.core import trees
from equipoise.core.task import Task
from equipoise.data.clients import ClientSet
from equipoise.engines.simulator.batched_steps import stacked_gradients
from equipoise.engines.simulator.example_batches import ExampleBatch
from equipoise.engines.simulator.precision import first_line


def why_not_vectorised(task: Task, clients: ClientSet) -> str | None:
    """Try two clients with two examples each against one at a time; the reason if that fails or differs."""
    task.scorer.train()
    device = clients.device
    first, last = clients.rows(0), clients.rows(len(clients) - 1)
    rows = torch.tensor([[first.start, first.stop - 1], [last.stop - 1, first.start]], device=device)
    flat = task.layout.read(task.module).expand(2, -1).contiguous()
    params = task.layout.unflatten(flat)
    x, y = clients.inputs(rows, flat.dtype), clients.targets(rows, flat.dtype)
    even = torch.full((2, 2), 0.5, dtype=flat.dtype, device=device)
    single = []
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
        for i in range(2):
            leaf = flat[i].detach().requires_grad_()
            loss = task.losses(leaf, trees.clone(trees.select(x, i)), trees.select(y, i)).mean()
            single.append(task.layout.unflatten(torch.autograd.grad(loss, leaf)[0]))
        warnings.filterwarnings("error", message="There is a performance drop")  # vmap's own slow loop
        try:
            together, _ = stacked_gradients(task, params, ExampleBatch(x, y, even, False))
        except Exception as failure:  # vmap refuses in many ways
            return first_line(failure)
    for name, gradient in together.items():
        expected = torch.stack([s[name] for s in single])
        scale = float(expected.nan_to_num(0, 0, 0).abs().max()) + 1e-3
        if not torch.allclose(gradient, expected, rtol=1e-3, atol=1e-3 * scale, equal_nan=True):
            return f"the batched gradient of {name} differs from the plain one"
    return None
