"""Losses and errors of many clients' examples at given models: large batches over clients' borders, then means by client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from equipoise.client_metrics import ClientMetrics
from equipoise.core import trees
from equipoise.core.task import Task
from equipoise.data.clients import ClientSet
from equipoise.engines.loop import stack_columns
from equipoise.engines.measuring import measure_clients
from equipoise.engines.simulator.convnet_path import logits_of_own_models, why_not_by_hand
from equipoise.engines.simulator.cpu.convnet_gradients import convnet_scores, is_plain_convnet
from equipoise.engines.simulator.cuda.gru_clients import GruShape, example_losses, why_not_on_device
from equipoise.engines.simulator.linear_blocks import linear_losses, why_not_linear
from equipoise.engines.simulator.local_work import Worker
from equipoise.engines.simulator.precision import FULL, Precision
from equipoise.engines.simulator.workers import Workers

_ROWS = {"cpu": 192, "cuda": 8192}  # per batch of a network: its activations stay in a cache, or fill a GPU
_LINEAR_NUMBERS = 2**19  # input numbers per batch of a linear model
_WORTH_BATCHING = 2e9  # parameters of all models × examples of a cohort
_BATCHED_NUMBERS = 2**28  # input numbers of all cohorts
_OWN_NUMBERS = {"cpu": 2**21, "cuda": 2**23}  # input numbers per batch where every client has its own model
_OWN_BYTES = {"cpu": 64 * 2**20, "cuda": 2 * 2**30}


def score_clients(worker: Worker, asked: tuple[Tensor, str, Tensor, bool]) -> tuple[Tensor, ...]:
    """What `Scoring.means` gives, by one of several processes, for models (M, D), a split, and clients' positions (n,)."""
    models, split, which, with_errors = asked
    return Scoring(worker.task, torch.device("cpu")).means(models, worker.data.splits[split], which, with_errors=with_errors)


_WORTH_SHARING = 5e7  # examples × parameters: below this it is done before other processes are asked


class Scoring:
    """Scores examples of a task on one device."""

    def __init__(self, task: Task, device: torch.device, precision: Precision = FULL) -> None:
        self.task, self.device, self.precision = task, device, precision
        self.by_hand = device.type == "cpu" and is_plain_convnet(task)
        self.by_programs = device.type == "cuda" and why_not_by_hand(task, device) is None
        self.models_together = True  # whether several models can score shared examples in one call

    def means(self, models: Tensor, clients: ClientSet, which: Tensor | None, *, with_errors: bool) -> tuple[Tensor, ...]:
        """Mean loss (and error) per model (M, D) and client, (M, n) each; `which` (n,) are clients' positions, on the CPU."""
        if which is None and not clients.in_turn:
            which = torch.arange(len(clients))
        sizes = clients.host_sizes if which is None else clients.host_sizes[which]
        lengths = sizes.to(self.device, non_blocking=True)
        count = int(sizes.sum())  # not asked of a GPU, as that would wait for it
        rows, first = None, 0
        if which is not None and _in_a_row(which) and clients.in_turn:
            first = int(clients.starts[which[0]])
        elif which is not None or not clients.in_turn:
            rows = _rows_of(clients, torch.arange(len(clients)) if which is None else which, lengths, count)
        width = _ROWS.get(self.device.type, 1024)
        if clients.why_not_plain is None and why_not_linear(self.task) is None:
            width = max(width, _LINEAR_NUMBERS // max(1, clients.features))
        scores = torch.empty(1 + with_errors, len(models), count, dtype=torch.float64, device=self.device)

        self.task.scorer.eval()
        with torch.no_grad(), self.precision.products():
            for start in range(0, count, width):
                part = slice(start, min(start + width, count))
                here = slice(first + part.start, first + part.stop) if rows is None else rows[part]
                x, y = clients.inputs(here, models.dtype), clients.targets(here, models.dtype)
                for place, values in enumerate(self._scores(models, x, y, with_errors)):
                    scores[place, :, part] = values
        return tuple(torch.segment_reduce(v.t().contiguous(), "mean", lengths=lengths, unsafe=True).t().cpu() for v in scores)

    def measure(self, params: Tensor, clients: ClientSet, metrics: ClientMetrics, which: Tensor) -> Tensor:
        """Each metric of the clients at positions `which` (n,), at one model (D,) or at a model of each one's own: (M, n)."""
        self.task.scorer.eval()
        with torch.no_grad(), self.precision.products():
            at_once = _ROWS.get(self.device.type, 1024)
            return measure_clients(self.task.outputs, params, clients, metrics, which, at_once)

    def can_batch(self, models: Tensor, clients: ClientSet, cohorts: Sequence[Tensor]) -> bool:
        """Whether `means_each` is worth it: on a GPU, by programs, or for work that takes its host longer than itself."""
        if why_not_on_device(self.task, clients, self.precision) is None:
            return True
        rows, inputs = max(int(clients.host_sizes[which].sum()) for which in cohorts), clients.features
        little = models.numel() * rows <= _WORTH_BATCHING and len(models) * rows * inputs <= _BATCHED_NUMBERS
        return self.device.type == "cuda" and self.models_together and little

    def means_each(self, models: Tensor, clients: ClientSet, cohorts: Sequence[Tensor]) -> list[Tensor] | None:
        """Mean losses (K,) of several cohorts, each at its own of the models (M, D), in one batch; None if it cannot be."""
        counts = [clients.host_sizes[which] for which in cohorts]
        sizes, ends = torch.cat(counts), torch.tensor([int(count.sum()) for count in counts]).cumsum(0)
        lengths = sizes.to(self.device, non_blocking=True)
        rows = _rows_of(clients, torch.cat(list(cohorts)), lengths, int(ends[-1]))
        if why_not_on_device(self.task, clients, self.precision) is None:
            totals = [int(count.sum()) for count in counts]
            flat = example_losses(models, clients, rows, totals, GruShape.of(self.task)).double()
            return self._means_of(flat, lengths, cohorts)
        padded = nn.utils.rnn.pad_sequence(list(rows.tensor_split(ends[:-1])), batch_first=True)  # (M, n)
        inside = [slice(0, int(count.sum())) for count in counts]
        self.task.scorer.eval()
        with torch.no_grad(), self.precision.products():
            x, y = clients.inputs(padded, models.dtype), clients.targets(padded, models.dtype)
            try:
                each = vmap(self.task.batched_losses)(models, x, y).double()
            except RuntimeError:
                self.models_together = False
                return None
        flat = torch.cat([losses[part] for losses, part in zip(each, inside, strict=True)])
        return self._means_of(flat, lengths, cohorts)

    @staticmethod
    def _means_of(flat: Tensor, lengths: Tensor, cohorts: Sequence[Tensor]) -> list[Tensor]:
        """The mean of each client's losses, (K,) for each cohort, from those of all their examples one after the other."""
        means = torch.segment_reduce(flat, "mean", lengths=lengths, unsafe=True).cpu()
        return list(torch.split(means, [len(which) for which in cohorts]))

    def shared_means(
        self, workers: Workers, models: Tensor, clients: ClientSet, which: Tensor | None, *, with_errors: bool
    ) -> tuple[Tensor, ...]:
        """`means` by several processes, if that is worth it: each has about as many examples."""
        split = next((name for name, held in workers.own.data.splits.items() if held is clients), None)
        positions = torch.arange(len(clients)) if which is None else which
        ends = clients.host_sizes[positions].cumsum(0)
        if workers.count == 1 or split is None or int(ends[-1]) * models.numel() < _WORTH_SHARING:
            return self.means(models, clients, which, with_errors=with_errors)
        cuts = torch.searchsorted(ends, ends[-1] * torch.arange(1, workers.count) / workers.count)
        parts = [(models, split, part, with_errors) for part in positions.tensor_split(cuts) if len(part)]
        means = workers.share(score_clients, parts)
        return tuple(torch.cat(values, 1) for values in zip(*means, strict=True))

    def _scores(self, models: Tensor, x: Any, y: Any, with_errors: bool) -> tuple[Tensor, ...]:
        """Losses (and errors) of shared examples under several models, (M, B) each; one model needs no batching."""
        by_hand = self.by_hand and isinstance(x, Tensor)

        def score(params: Tensor, x: Any) -> tuple[Tensor, ...]:
            if by_hand:
                return convnet_scores(self.task, params, x, y)[: 1 + with_errors]
            return self.task.scores(params, x, y) if with_errors else (self.task.losses(params, x, y),)

        def score_batched(params: Tensor, x: Any) -> tuple[Tensor, ...]:
            return self.task.batched_scores(params, x, y) if with_errors else (self.task.batched_losses(params, x, y),)

        if len(models) == 1:
            return tuple(values.unsqueeze(0) for values in score(models[0], x))
        if not with_errors and isinstance(x, Tensor) and isinstance(y, Tensor) and why_not_linear(self.task) is None:
            return (linear_losses(self.task, models, x, y),)
        if self.by_programs and isinstance(x, Tensor) and isinstance(y, Tensor):
            each = [part.unsqueeze(0).expand(len(models), *part.shape) for part in (x, y)]
            return self._scores_by_programs(models, *each)[: 1 + with_errors]
        if self.models_together and not by_hand:
            try:
                scores: tuple[Tensor, ...] = vmap(score_batched, in_dims=(0, None))(models, trees.clone(x))
                return scores
            except RuntimeError:  # a forward pass that writes to the inputs, which models share, or reads a number off a tensor
                self.models_together = False
        alone = [score(params, x if by_hand else trees.clone(x)) for params in models]
        return tuple(torch.stack(values) for values in zip(*alone, strict=True))

    def _scores_by_programs(self, models: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Losses and errors (k, b) of examples (k, b, …) under ConvNets (k, D), by programs written for a GPU."""
        logits = logits_of_own_models(self.task, models, x, self.precision)
        flat, targets = logits.flatten(0, 1), y.flatten(0, 1)
        losses, errors = (rule(flat, targets).view(logits.shape[:2]) for rule in (self.task.loss, self.task.error))
        return losses, errors

    def own_means(self, models: Tensor, clients: ClientSet, which: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss and mean error of clients at their own models (K, D), (K,) and (K,)."""
        sizes = clients.sizes.cpu()[which]
        totals = torch.zeros(2, len(which), dtype=torch.float64)
        order = sizes.argsort(descending=True, stable=True)
        numbers = max(1, clients.features)
        together = max(1, _OWN_BYTES.get(self.device.type, 2**26) // (models[0].nbytes + 4 * numbers))

        self.task.scorer.eval()
        for first in range(0, len(order), together):
            places = order[first : first + together]  # of similar size
            width = max(1, _OWN_NUMBERS.get(self.device.type, 2**21) // (len(places) * numbers))
            for start in range(0, int(sizes[places[0]]), width):
                here = places[sizes[places] > start]
                totals[:, here] += self._own_totals(models, clients, which, here, slice(start, start + width))
        return totals[0] / sizes, totals[1] / sizes

    def _own_totals(self, models: Tensor, clients: ClientSet, which: Tensor, here: Tensor, part: slice) -> Tensor:
        """Summed losses and errors of a part of the examples of the clients `here`, padded to one length: (2, k)."""
        positions = which[here].to(self.device)
        sizes, first = clients.sizes[positions], clients.starts[positions]
        end = min(part.stop, int(sizes.max()))
        numbers = torch.arange(part.start, end, device=self.device)
        inside = numbers < sizes.unsqueeze(1)  # (k, b)
        rows = first.unsqueeze(1) + torch.where(inside, numbers, 0)
        x, y = clients.inputs(rows, models.dtype), clients.targets(rows, models.dtype)
        with torch.no_grad(), self.precision.products():
            scores = self._own_scores(models[here.to(self.device)], x, y)
        return torch.stack([torch.where(inside, values.double(), 0.0).sum(1).cpu() for values in scores])

    def _own_scores(self, models: Tensor, x: Any, y: Any) -> tuple[Tensor, Tensor]:
        """Losses and errors (k, b) of examples (k, b, …) under clients' own models (k, D)."""
        if self.by_programs and isinstance(x, Tensor) and isinstance(y, Tensor):
            return self._scores_by_programs(models, x, y)
        if self.models_together:
            try:
                scores: tuple[Tensor, Tensor] = vmap(self.task.batched_scores)(models, x, y)
                return scores
            except RuntimeError:  # an error, say, that reads a number off a tensor
                self.models_together = False
        each = ((model, trees.select(x, k), trees.select(y, k)) for k, model in enumerate(models))
        return stack_columns(self.task.scores(*one) for one in each)


def _rows_of(clients: ClientSet, which: Tensor, lengths: Tensor, count: int) -> Tensor:
    """The rows of clients one after another: of each as many as `lengths` (n,) says, `count` in all."""
    begins = clients.starts[which.to(lengths.device)] - lengths.cumsum(0) + lengths
    return torch.arange(count, device=lengths.device) + begins.repeat_interleave(lengths, output_size=count)


def _in_a_row(which: Tensor) -> bool:
    """Whether positions follow on each other."""
    return len(which) > 0 and torch.equal(which, torch.arange(len(which)) + which[0])
