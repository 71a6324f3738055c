"""Softmax regression on a CPU: the steps in which every client of a block has a full batch, with as little Python as can be.

Between products that fill a core's cache every line of Python is cold and costs microseconds. So what is the same at every step
is made once for all blocks of a chunk, and a step is eight calls.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from equipoise.engines.simulator.example_batches import FlatBatches


class SoftmaxSteps:
    """Steps of k clients whose weights are `whole` (k, C, P)."""

    def __init__(self, batches: FlatBatches, whole: Tensor, lr: float, keep: float) -> None:
        (k, scores, _), b = whole.shape, batches.cursor.width
        self.batches, self.whole, self.keep, self.k, self.b = batches, whole, keep, k, b
        self.memory = batches.memory(torch.Size((k, b)))
        self.forward, self.back = batches.scale, -lr * batches.scale / b
        space = batches.space
        self.outputs, self.logs = (
            space.empty(name, (k * b, scores), whole.dtype, whole.device) for name in ("outputs", "logs")
        )
        with torch.inference_mode():  # nothing is recorded, not even that views are views
            self.turned, self.z = whole.mT, self.outputs.view(k, b, scores)
            self.delta = self.logs.view(k, b, scores).mT  # (k, C, b)
            self.minus = self.logs.new_full((k * b, 1), -1.0)
            self.rows, self.targets = batches.rows.flatten(1), batches.y.flatten(1).unsqueeze(2)  # (T, K · b), (T, K · b, 1)

    def take(self, block: slice, steps: slice, seen: Tensor, pull: Callable[[Tensor], None] | None) -> None:
        """Take these steps of the clients of a block; their losses are added to `seen` (K,), and `pull` moves the weights."""
        whole, keep, turned, z, delta, minus = self.whole, self.keep, self.turned, self.z, self.delta, self.minus
        outputs, logs, forward, back = self.outputs, self.logs, self.forward, self.back
        raw, raw_rows, features, x = self.memory
        stored, shift = self.batches.clients.x, self.batches.shift
        with torch.inference_mode():
            here = slice(block.start * self.b, block.stop * self.b)
            rows, targets = self.rows[steps, here].unbind(0), self.targets[steps, here].unbind(0)
            chosen = logs.new_empty(len(rows), self.k * self.b, 1)
            for row, target, log in zip(rows, targets, chosen.unbind(0), strict=True):
                torch.index_select(stored, 0, row, out=raw)
                features.copy_(raw_rows)
                if shift:
                    features.add_(shift)
                torch.baddbmm(z, x, turned, beta=0, alpha=forward, out=z)  # with β = 0 what was in z does not matter
                torch.log_softmax(outputs, 1, out=logs)
                torch.gather(logs, 1, target, out=log)
                logs.exp_()
                logs.scatter_add_(1, target, minus)  # softmax minus one-hot
                if pull is not None:
                    pull(whole)
                whole.baddbmm_(delta, x, beta=keep, alpha=back)
            losses = chosen.view(len(rows), self.k, self.b).sum((0, 2), dtype=torch.float64)
            seen[block].sub_(losses, alpha=1 / self.b)
