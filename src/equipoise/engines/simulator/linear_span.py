"""Local SGD of a linear model without its weights: every iterate lies in the span of the client's own examples.

From a start W_0, the steps of a client with examples X (n, F) stay on W_t = c_t W_0 + A_tᵀ X with few numbers A (n, C). The
outputs at examples i are c_t (X W_0ᵀ)_i + (G A_t)_i with the Gram matrix G = X Xᵀ, so a step of n examples touches (n, C)
numbers and not the C · F of the weights. What is left are three large products: outputs at the start for all clients at once,
the Gram matrices, and the sum of all updates Σ_k π_k A_kᵀ X_k, which needs no client's own update. A bias is one more feature
that is 1. This is the representer theorem at work (Kimeldorf and Wahba, 1971); the products do more arithmetic than the
weights' own path, but in pieces that run at a machine's full rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from equipoise.core.params import ParameterLayout
from equipoise.core.per_example_losses import cross_entropy
from equipoise.engines.simulator.client_queue import StartModels, owner_stretches
from equipoise.engines.simulator.example_batches import ExampleBatch, gather_inputs
from equipoise.engines.simulator.linear_blocks import weight_shape, why_not_linear
from equipoise.engines.simulator.local_rule import LocalRule
from equipoise.engines.simulator.local_work import ChunkResult, ChunkWork, LocalPath, Workplace, Workspace
from equipoise.engines.simulator.output_gradients import OutputGradients
from equipoise.solvers.batches import BatchCursor
from equipoise.types import SgdRule

_CACHE_NUMBERS = 2**22  # of examples: they stay close while they are multiplied three times
_PARTS = 3  # of a Gram matrix that is needed below its diagonal only
_WORTH_ON_GPU = 512  # examples of a client: there the three products cost less than the launches of all steps


class ExampleSpan(LocalPath):
    """Linear models under SGD without momentum that start from shared models, where it is faster than their weights."""

    name = "example span"

    def __init__(self, place: Workplace) -> None:
        super().__init__(place)
        self.obstacle = place.clients.why_not_plain or why_not_linear(place.task)

    def supports_rule(self, rule: LocalRule) -> str | None:
        """The model must be linear and shared, the rule plain SGD."""
        if rule.own_models:
            return "clients have models of their own"
        return self.obstacle or rule.why_not_plain_sgd() or ("a pull moves the models" if rule.pull != "none" else None)

    def supports(self, work: ChunkWork) -> str | None:
        """Whether it is the faster one, unless it was chosen by name."""
        largest, solver = work.largest, work.rule.solver
        if work.chosen == self.name:
            return None
        if self.place.device.type != "cpu":
            return None if largest <= _WORTH_ON_GPU else f"a client has more than {_WORTH_ON_GPU} examples"
        passes = solver.local_steps(largest) * min(solver.batch_size or largest, largest) / largest
        scores = weight_shape(self.place.task)[:-1].numel()
        # Products in units of n F: 4 C each pass and W itself (its copies cost like 25 examples) against 4 C and the Gram
        # matrix in all. Several threads share the large products of the latter much better, and need only its lower half.
        if torch.get_num_threads() > 1:
            faster = 4 * scores + 1.5 * largest <= 2 * 4 * scores * passes
        else:
            faster = 4 * scores + 2 * largest <= 4 * scores * (passes + 25 / largest)
        return None if faster else f"{passes:g} passes over {largest} examples are too few for their Gram matrix to pay"

    def run(self, work: ChunkWork) -> ChunkResult:
        """Coefficients of the examples instead of weights."""
        return work.result(*span_steps(work))


@dataclass(frozen=True, eq=False)
class SpanUpdates:
    """Updates of k linear models as coefficients of their clients' examples: (c − 1) W_0 + Aᵀ X."""

    layout: ParameterLayout
    starts: StartModels
    x: Tensor  # (k, n, F), as stored: X is x · scale
    scale: float
    coefficients: Tensor  # A, (k, n, C or more); 0 for padding
    factors: Tensor  # c − 1, (k,), on the CPU
    sq_norms: Tensor  # (k,)

    def dense(self, update: Tensor) -> Tensor:
        """The updates (k, D), written to `update`."""
        named = self.layout.unflatten(update)
        weight = named["weight"].unsqueeze(1) if named["weight"].dim() == 2 else named["weight"]
        held = self.coefficients[..., : weight.shape[1]]
        weight.copy_(torch.bmm(held.transpose(1, 2), self.x).mul_(self.scale))
        if "bias" in named:
            named["bias"].view(len(update), -1).copy_(held.sum(1))
        if bool((self.factors != 0).any()):
            for owner, rows in owner_stretches(self.starts.owners):
                update[rows].addr_(self.factors[rows].to(update), self.starts.models[owner])
        return update

    def weighted_sum(self, rows: slice, weights: Tensor, space: Workspace) -> Tensor:
        """Σ_k π_k u_k over clients of one start, (D,)."""
        owner = int(self.starts.owners[rows][0])
        held = self.coefficients[rows]
        weighted = space.empty("weighted", tuple(held.shape), held.dtype, held.device)
        torch.mul(held, weights.to(held).view(-1, 1, 1), out=weighted)
        x = self.x[rows].flatten(0, 1)
        total = torch.empty_like(self.starts.models[owner])
        named = self.layout.unflatten(total)
        weight = named["weight"].view(-1, x.shape[1])
        product = torch.mm(weighted.flatten(0, 1).t(), x)
        torch.mul(product[: len(weight)], self.scale, out=weight)
        if "bias" in named:
            named["bias"].view(-1).copy_(weighted.sum((0, 1))[: len(weight)])
        factor = float(weights.double().cpu() @ self.factors[rows])
        return total.add_(self.starts.models[owner], alpha=factor) if factor else total

    def squares(self) -> Tensor:
        """‖u‖², (k,)."""
        return self.sq_norms


def span_steps(work: ChunkWork) -> tuple[SpanUpdates, Tensor]:
    """The local work of the clients of a chunk, and their summed batch losses (k,)."""
    span, cursor, sgd = _Span(work), work.batches, work.rule.sgd
    seen = torch.zeros(len(work.chunk), dtype=torch.float64, device=work.chunk.models.device)
    every_example_once = cursor.at_once and len(cursor.active) == int(cursor.per_epoch[0])
    if every_example_once and cursor.alike and not (sgd.weight_decay or sgd.prox):
        return span.in_order(work.positions, cursor, work.rule.lr, seen), seen
    return span.in_any_order(work.positions, cursor, sgd, work.rule.lr, seen), seen


class _Span:
    """Examples, outputs at the start and coefficients of k clients."""

    def __init__(self, work: ChunkWork) -> None:
        self.task, self.clients, self.space = work.worker.task, work.worker.clients, work.space
        self.starts, self.k, self.scale = work.starts, len(work.chunk), self.clients.scale or 1.0
        self.dtype, self.device = self.starts.models.dtype, self.starts.models.device
        self.named = self.task.layout.unflatten(self.starts.models)
        self.one_score = self.named["weight"].dim() == 2
        self.weight = self.named["weight"].unsqueeze(1) if self.one_score else self.named["weight"]  # (M, C, F)
        self.scores = self.weight.shape[1]
        self.bias = self.named["bias"].view(len(self.weight), -1) if "bias" in self.named else None  # (M, C)
        classes = self.clients.y.dim() == 1 and not self.clients.y.is_floating_point()  # not a share of each class
        if self.task.loss is cross_entropy and not self.one_score and classes:
            self._round_up()

    def _round_up(self) -> None:
        """Classes that are never chosen, with the output −∞: products of a multiple of 16 columns are up to half faster."""
        more = -self.scores % 16
        if more:
            bias = self.weight.new_zeros(self.weight.shape[:2]) if self.bias is None else self.bias
            self.bias = functional.pad(bias, (0, more), value=-torch.inf)
            self.weight = functional.pad(self.weight, (0, 0, 0, more))
            self.scores += more

    def empty(self, name: str, *shape: int) -> Tensor:
        return self.space.empty(name, shape, self.dtype, self.device)

    def dots(self, a: Tensor, b: Tensor) -> Tensor:
        """⟨a_k, b_k⟩ of k tensors each, (k,) float64."""
        product = torch.mul(a, b, out=self.empty("products", *a.shape))
        return product.view(len(a), -1).sum(1).double()

    def start(self, rows: Tensor, grams: Sequence[tuple[slice, Tensor]]) -> tuple[Tensor, Tensor]:
        """Examples x (k, n, F) of the rows (k, n), as they are stored, and the outputs (k, n, C) at the start.

        Each of `grams` is filled with the products of some examples with all up to the last of them. All is done for a few
        clients at a time, whose examples then are in a cache.
        """
        k, n = rows.shape
        x = self.empty("examples", k, n, self.weight.shape[2])
        outputs = self.empty("start outputs", k, n, self.scores)
        size = max(1, _CACHE_NUMBERS // x[0].numel()) if self.device.type == "cpu" else k
        for first in range(0, k, size):
            block = slice(first, min(first + size, k))
            here = x[block]
            gather_inputs(self.clients, rows[block], self.dtype, self.space, scaled=False, out=here)
            for owner, part in owner_stretches(self.starts.owners[block]):
                flat, out = here[part].view(-1, x.shape[2]), outputs[block][part].view(-1, self.scores)
                if self.bias is not None:
                    torch.addmm(self.bias[owner], flat, self.weight[owner].t(), alpha=self.scale, out=out)
                else:
                    torch.mm(flat, self.weight[owner].t(), out=out).mul_(self.scale)
            for some, gram in grams:
                torch.bmm(here[:, some], here[:, : some.stop].transpose(1, 2), out=gram[block])
        return x, outputs

    def in_order(self, which: Tensor, cursor: BatchCursor, lr: float, seen: Tensor) -> SpanUpdates:
        """One pass over clients of equal size: examples are put in the order of their batches, of which only the earlier ones
        matter to a later one, so that not much more than half of the Gram matrix is computed.
        """
        k, size, width = self.k, int(cursor.sizes[0]), cursor.width
        rows = self.clients.starts[which].unsqueeze(1) + cursor.all_orders[:, 0]
        targets = self.clients.targets(rows, self.dtype)
        cuts = [min(size, (len(cursor.active) * i // _PARTS) * width) for i in range(_PARTS)] + [size]
        parts = [slice(first, last) for first, last in pairwise(cuts) if first < last]
        grams = [(part, self.empty(f"gram {part.start}", k, part.stop - part.start, part.stop)) for part in parts]
        x, outputs = self.start(rows, grams)
        coefficients = self.empty("coefficients", k, size, self.scores)
        square, sq_norms = self.scale**2, torch.zeros(k, dtype=self.dtype, device=self.device)
        gradient_at = OutputGradients(self.task, seen, one_score=self.one_score)
        biases = torch.zeros(k, 1, self.scores, dtype=self.dtype, device=self.device) if "bias" in self.named else None
        for step, count in enumerate(cursor.widest):
            here = slice(step * width, step * width + count)
            part, whole = next((part, gram) for part, gram in grams if here.stop <= part.stop)
            gram = whole[:, here.start - part.start : here.stop - part.start]
            # Results of batched products are contiguous: into a part of a larger tensor they are taken one by one.
            z, moved = self.empty("outputs", k, count, self.scores), self.empty("moved", k, count, self.scores)
            if step:
                torch.bmm(gram[:, :, : here.start], coefficients[:, : here.start], out=moved)
                torch.add(outputs[:, here], moved, alpha=square, out=z)
                if biases is not None:
                    z.add_(biases)
            else:
                moved.zero_()
                z.copy_(outputs[:, here])
            shares = torch.full((1, 1), 1 / count, dtype=self.dtype, device=self.device).expand(k, count)
            batch = ExampleBatch(x, targets[:, here], shares, False, even=1 / count)
            delta = gradient_at(z.view(-1, self.scores), batch)
            delta = delta.view(k, count, self.scores).mul_(-lr / count)
            coefficients[:, here] = delta
            # ⟨A, G A⟩ is the batch with itself, and twice with those before it.
            sq_norms += moved.baddbmm_(gram[:, :, here], delta, beta=2).mul_(delta).view(k, -1).sum(1)
            if biases is not None:
                biases.add_(delta.sum(1, keepdim=True))
        gradient_at.finish()
        sq_norms.mul_(square)
        if biases is not None:
            sq_norms += biases.square().sum((1, 2))
        factors = torch.zeros(k, dtype=torch.float64)
        return SpanUpdates(self.task.layout, self.starts, x, self.scale, coefficients, factors, sq_norms)

    def in_any_order(self, which: Tensor, cursor: BatchCursor, sgd: SgdRule, lr: float, seen: Tensor) -> SpanUpdates:
        """Any number of passes over clients of any sizes."""
        clients, device, k, n = self.clients, self.device, self.k, int(cursor.sizes.max())
        within = torch.minimum(torch.arange(n, device=device), (clients.sizes[which] - 1).unsqueeze(1))
        rows = clients.starts[which].unsqueeze(1) + within  # padding repeats the last example, and keeps the coefficient 0
        gram = self.empty("gram", k, n, n)
        x, outputs = self.start(rows, [(slice(0, n), gram)])
        gram.mul_(self.scale**2)
        targets = clients.targets(rows, self.dtype)
        if "bias" in self.named:
            gram += 1
        coefficients = self.empty("coefficients", k, n, self.scores).zero_()
        shrink, back = 1 - lr * (sgd.weight_decay + sgd.prox), lr * sgd.prox
        factor, factors = 1.0, torch.zeros(k, dtype=torch.float64)
        gradient_at = OutputGradients(self.task, seen, one_score=self.one_score)
        gram_rows, output_rows, held, labels = (v.flatten(0, 1) for v in (gram, outputs, coefficients, targets))
        first = torch.arange(k, device=device).unsqueeze(1) * n
        for step, active in enumerate(cursor.active):
            places, shares = cursor.batch(step, self.dtype)
            here, b = (first[:active] + places).flatten(), places.shape[1]
            z = output_rows.index_select(0, here).view(active, b, self.scores)
            if factor != 1.0:
                z.mul_(factor)
            if step:
                z.baddbmm_(gram_rows.index_select(0, here).view(active, b, n), coefficients[:active])
            batch = ExampleBatch(x, labels.index_select(0, here).view(active, b, *targets.shape[2:]), shares, False)
            delta = gradient_at(z.view(-1, self.scores), batch)
            if shrink != 1.0:
                coefficients[:active] *= shrink
                factor = shrink * factor + back
                factors[:active] = factor - 1
            held.index_add_(0, here, delta, alpha=-lr)
        gradient_at.finish()
        moved = torch.bmm(gram, coefficients, out=self.empty("moved", k, n, self.scores))
        sq_norms = self.dots(moved, coefficients)
        if factor != 1.0:  # ‖u‖² = (c−1)² ‖W_0‖² + 2 (c−1) ⟨A, X W_0ᵀ⟩ + ⟨A, G A⟩
            c = factors.to(device)
            lengths = self.starts.models.double().square().sum(1)[self.starts.owners.to(device)]
            known = self.named["weight"].shape[-2] if not self.one_score else 1
            crossed = self.dots(coefficients[..., :known].contiguous(), outputs[..., :known].contiguous())
            sq_norms += 2 * c * crossed + c.square() * lengths
        return SpanUpdates(self.task.layout, self.starts, x, self.scale, coefficients, factors, sq_norms.clamp_(min=0))
