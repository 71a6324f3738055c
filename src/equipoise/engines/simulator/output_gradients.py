"""The gradient of clients' losses in the outputs of their models."""

from __future__ import annotations

import torch
from torch import Tensor

from equipoise.core.per_example_losses import cross_entropy, per_example
from equipoise.core.task import Task
from equipoise.engines.simulator.example_batches import ExampleBatch


class OutputGradients:
    """∂/∂z of each client's batch loss at outputs z (k · b, C); `finish` adds the losses seen to `seen` (k,).

    Where a batch has `even` shares, the gradient is that of the plain sum over its examples.
    """

    def __init__(self, task: Task, seen: Tensor, *, one_score: bool) -> None:
        self.task, self.seen, self.one_score = task, seen, one_score
        self._waiting, self._kind = list[Tensor](), (0, 0, 0.0)  # few larger sums of losses instead of many small ones
        self._by_hand = task.loss is cross_entropy and not one_score
        self._minus = torch.empty(0)

    def __call__(self, z: Tensor, batch: ExampleBatch) -> Tensor:
        """The gradient (k · b, C)."""
        k, b = batch.shares.shape
        if self._by_hand and batch.y.dim() == 2:  # softmax minus one-hot
            logs = torch.log_softmax(z, 1)
            target = batch.y.reshape(-1, 1)
            chosen = logs.gather(1, target)
            delta = logs.exp_()
            if batch.even is None:
                share = batch.shares.reshape(-1, 1)
                self._saw(chosen.mul_(share), k, b, -1.0)
                return delta.mul_(share).scatter_add_(1, target, share.neg())
            self._saw(chosen, k, b, -batch.even)
            if len(self._minus) != len(z):
                self._minus = z.new_full((len(z), 1), -1.0)
            return delta.scatter_add_(1, target, self._minus)
        z = z.detach().requires_grad_()
        outputs = (z.reshape(k * b) if self.one_score else z).clone()  # a loss may work in place on it
        with torch.enable_grad():
            each = per_example("loss", self.task.loss(outputs, batch.y.flatten(0, 1)), outputs) * batch.shares.flatten()
        (delta,) = torch.autograd.grad(each.sum(), z)
        self._saw(each.detach().unsqueeze(1), k, b, 1.0)
        return delta if batch.even is None else delta / batch.even

    def _saw(self, each: Tensor, k: int, b: int, factor: float) -> None:
        """Losses (k · b, 1) of single examples, each to be multiplied by the factor."""
        if (k, b, factor) != self._kind:
            self.finish()
            self._kind = k, b, factor
        self._waiting.append(each)

    def finish(self) -> None:
        """Add the losses that are waiting."""
        if self._waiting:
            k, _, factor = self._kind
            self.seen[:k] += torch.cat(self._waiting, 1).view(k, -1).sum(1, dtype=torch.float64).mul_(factor)
            self._waiting.clear()
