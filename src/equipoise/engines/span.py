"""Local SGD of a linear model without its weights: every iterate lies in the span of the client's own examples.

From a start W_0, the steps of a client with examples X (n, F) stay on W_t = c_t W_0 + A_tᵀ X with few numbers A (n, C). The
outputs at examples i are c_t (X W_0ᵀ)_i + (G A_t)_i with the Gram matrix G = X Xᵀ, so a step of n examples touches (n, C)
numbers and not the C · F of the weights. What is left are three large products: outputs at the start for all clients at once,
the Gram matrices, and the sum of all updates Σ_k π_k A_kᵀ X_k, which needs no client's own update. A bias is one more feature
that is 1. This is the representer theorem at work (Kimeldorf and Wahba, 1971); the products do more arithmetic than the
weights' own path, but in pieces that run at a machine's full rate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.engines.gather import gathered
from equipoise.engines.linear import Losses, fits_linear_steps, output_gradients
from equipoise.engines.stacked import Batch, Starts, runs
from equipoise.engines.workers import Worker
from equipoise.params import ParameterLayout
from equipoise.solvers import SGD
from equipoise.solvers.batches import BatchCursor
from equipoise.task import Task
from equipoise.types import LocalSolver

_WORTH_ON_GPU = 512  # examples of a client: there the three products cost less than the launches of all steps


def fits_span_steps(task: Task, solver: LocalSolver, lr: float, starts: Starts, largest: int, device: torch.device) -> bool:
    """Whether this path does the work, and is the faster one for clients of up to `largest` examples."""
    if starts.pull is not None or starts.each_its_own or not fits_linear_steps(task, solver, lr):
        return False
    if device.type != "cpu":
        return largest <= _WORTH_ON_GPU
    passes = solver.local_steps(largest) * min(solver.batch_size or largest, largest) / largest
    scores = task.layout.shapes[task.layout.names.index("weight")][:-1].numel()
    # 4 C F n each pass against 4 C F n + 2 n² F in all, in products that run about twice as fast.
    return 4 * scores + 2 * largest <= 2.0 * 4 * scores * passes


@dataclass(frozen=True, eq=False)
class SpanUpdates:
    """Updates of k linear models as coefficients of their clients' examples: (c − 1) W_0 + Aᵀ X."""

    layout: ParameterLayout
    starts: Starts
    x: Tensor  # (k, n, F)
    coefficients: Tensor  # A, (k, n, C); 0 for padding
    gram: Tensor  # (k, n, n), of examples with the bias' 1
    outputs: Tensor  # at W_0, (k, n, C)
    factors: Tensor  # c − 1, (k,)

    def dense(self, update: Tensor) -> Tensor:
        """The updates (k, D), written to `update`."""
        named = self.layout.unflatten(update)
        weight = named["weight"].unsqueeze(1) if named["weight"].dim() == 2 else named["weight"]
        weight.copy_(torch.bmm(self.coefficients.transpose(1, 2), self.x))
        if "bias" in named:
            named["bias"].view(len(update), -1).copy_(self.coefficients.sum(1))
        if bool((self.factors != 0).any()):
            for owner, rows in runs(self.starts.owners):
                update[rows].addr_(self.factors[rows].to(update), self.starts.models[owner])
        return update

    def weighted_sum(self, rows: slice, weights: Tensor) -> Tensor:
        """Σ_k π_k u_k over clients of one start, (D,)."""
        owner = int(self.starts.owners[rows][0])
        weighted = self.coefficients[rows] * weights.to(self.coefficients).view(-1, 1, 1)
        x = self.x[rows].flatten(0, 1)
        total = torch.empty_like(self.starts.models[owner])
        named = self.layout.unflatten(total)
        torch.mm(weighted.flatten(0, 1).t(), x, out=named["weight"].view(-1, x.shape[1]))
        if "bias" in named:
            torch.sum(weighted, (0, 1), out=named["bias"].view(-1))
        factor = float(weights.double().cpu() @ self.factors[rows])
        return total.add_(self.starts.models[owner], alpha=factor) if factor else total

    def squares(self) -> Tensor:
        """‖u‖² = (c−1)² ‖W_0‖² + 2 (c−1) ⟨A, X W_0ᵀ⟩ + ⟨A, G A⟩, (k,)."""
        squares = (self.coefficients * torch.bmm(self.gram, self.coefficients)).sum((1, 2))
        if bool((self.factors != 0).any()):
            factors = self.factors.to(squares)
            starts = self.starts.models.square().sum(1)[self.starts.owners.to(squares.device)]
            squares = squares + 2 * factors * (self.coefficients * self.outputs).sum((1, 2)) + factors.square() * starts
        return squares.clamp_(min=0)  # rounding must not make a square negative; NaN stays


def span_steps(
    worker: Worker, which: Tensor, starts: Starts, solver: SGD, lr: float, cursor: BatchCursor
) -> tuple[SpanUpdates, Tensor]:
    """The local work of the clients at the positions `which` (k,), and their summed batch losses (k,)."""
    task, clients, space = worker.task, worker.clients, worker.space
    dtype, device = starts.models.dtype, starts.models.device
    named = task.layout.unflatten(starts.models)
    one_score = named["weight"].dim() == 2
    weight = named["weight"].unsqueeze(1) if one_score else named["weight"]  # (M, C, F)
    k, n, scores = len(which), int(cursor.sizes.max()), weight.shape[1]
    within = torch.minimum(torch.arange(n, device=device), (clients.sizes[which] - 1).unsqueeze(1))
    rows = clients.offsets[which].unsqueeze(1) + within  # padding repeats the last example, and keeps the coefficient 0
    x = gathered(clients, rows, dtype, space).view(k, n, -1)
    targets = clients.targets(rows, dtype)

    gram = torch.bmm(x, x.transpose(1, 2), out=space.empty("gram", (k, n, n), dtype, device))
    outputs = space.empty("start outputs", (k, n, scores), dtype, device)
    for owner, part in runs(starts.owners):
        here = x[part].view(-1, x.shape[2])
        torch.mm(here, weight[owner].t(), out=outputs[part].view(-1, scores))
        if "bias" in named:
            outputs[part] += named["bias"][owner].view(-1)
    if "bias" in named:
        gram += 1
    coefficients = space.empty("coefficients", (k, n, scores), dtype, device).zero_()

    shrink, back = 1 - lr * (solver.weight_decay + solver.prox), lr * solver.prox
    factor, factors = 1.0, torch.zeros(k, dtype=torch.float64)
    seen = torch.zeros(k, dtype=torch.float64, device=device)
    losses = Losses(seen)
    flat = {name: part.flatten(0, 1) for name, part in
            (("gram", gram), ("outputs", outputs), ("coefficients", coefficients), ("targets", targets))}  # fmt: skip
    first = torch.arange(k, device=device).unsqueeze(1) * n
    for step, active in enumerate(cursor.active):
        places, shares = cursor.batch(step, dtype)
        b = places.shape[1]
        here = (first[:active] + places).flatten()
        z = flat["outputs"].index_select(0, here).view(active, b, scores)
        if factor != 1.0:
            z.mul_(factor)
        if step:
            z.baddbmm_(flat["gram"].index_select(0, here).view(active, b, n), coefficients[:active])
        y = flat["targets"].index_select(0, here).view(active, b, *targets.shape[2:])
        batch = Batch(x, y, shares, False)
        delta = output_gradients(task, z.view(active * b, scores), batch, losses, one_score=one_score)
        if shrink != 1.0:
            coefficients[:active] *= shrink
            factor = shrink * factor + back
            factors[:active] = factor - 1
        flat["coefficients"].index_add_(0, here, delta, alpha=-lr)
    losses.finish()
    return SpanUpdates(task.layout, starts, x, coefficients, gram, outputs, factors), seen
