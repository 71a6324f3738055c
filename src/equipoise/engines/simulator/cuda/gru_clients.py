"""`models.CharGRU` over one-hot characters on a GPU: all local steps of a client are one Triton program.

Clients with thousands of examples take thousands of local steps in a row, each of which goes through time. Step by step for all
clients at once, such a round is a million short kernels, most of them for the few largest clients. Here clients do not wait for
each other: a processor of the device takes the next client when it has done one, the largest first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core.per_example_losses import cross_entropy
from equipoise.core.rng import random_bits
from equipoise.core.task import Task
from equipoise.data.clients import ClientSet
from equipoise.engines.simulator.local_rule import LocalRule
from equipoise.engines.simulator.local_work import ChunkResult, ChunkWork, LocalPath, Workplace
from equipoise.engines.simulator.precision import Precision, why_no_kernels
from equipoise.models.recurrent import CharGRU
from equipoise.solvers.batches import BatchCursor

_PARAMETERS = (
    "recurrent.weight_ih_l0", "recurrent.weight_hh_l0", "recurrent.bias_ih_l0", "recurrent.bias_hh_l0", "readout.weight",
    "readout.bias",
)  # fmt: skip
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LARGEST = 128  # units, characters and classes: a program holds matrices of such a side in registers
_MOST_EXAMPLES = 32  # of a batch
_ROWS = 64  # pairs of a time and an example that a product over them takes at once
_PIECE = 1024  # examples that one program scores
_WARPS, _STAGES = 8, 2


def why_not_gru(task: Task) -> str | None:
    """Why the programs are not for this task; None if they are."""
    module = task.module
    if type(module) is not CharGRU:
        return f"{type(module).__name__} is not models.CharGRU"
    if task.loss is not cross_entropy:
        return "the loss is not cross-entropy"
    cell, readout = module.recurrent, module.readout
    if module.embedding is not None or module.padding is not None or cell.layers != 1:
        return "it has an embedding, padding or several layers"
    if cell.hidden not in (16, 32, 64, 128):
        return f"it has {cell.hidden} hidden units: programs are for 16, 32, 64 and 128"
    if max(module.vocabulary, readout.out_features) > _LARGEST:
        return f"it has more than {_LARGEST} characters or classes"
    hooked = any(getattr(layer, hooks) for layer in module.modules() for hooks in _HOOKS)
    as_made = not hooked and "forward" not in vars(module) and type(readout) is nn.Linear
    if not as_made or tuple(task.layout.names) != _PARAMETERS or len(list(task.scorer.parameters())) != len(_PARAMETERS):
        return "its layers were changed, have hooks, or are frozen"
    return None if task.layout.dtype == torch.float32 else "its programs are for float32"


def why_not_on_device(task: Task, clients: ClientSet, precision: Precision) -> str | None:
    """Why the programs are not for this task, these clients, their device and its precision; None if they are."""
    reason = clients.why_not_plain or why_not_gru(task)
    if reason is not None:
        return reason
    if clients.x.dim() != 2 or clients.x.is_floating_point() or clients.y.is_floating_point():
        return "inputs are no rows of characters"
    if not precision.reduced:
        return 'its products keep 10 bits of each factor, which precision="tf32" allows'
    return why_no_kernels("gru_programs") if clients.device.type == "cuda" else "it needs a CUDA device"


def power_of_two_from_16(count: int) -> int:
    """The smallest power of two that is at least `count`, and at least 16."""
    return max(16, 1 << (count - 1).bit_length())


@dataclass(frozen=True)
class GruShape:
    """The sizes of a model, and its parameters in the order of the programs."""

    vocabulary: int
    classes: int
    hidden: int

    @classmethod
    def of(cls, task: Task) -> GruShape:
        """That of a task which `why_not_gru` admits."""
        (rows, vocabulary), *_, (classes,) = task.layout.shapes
        return cls(vocabulary, classes, rows // 3)

    def sizes(self, times: int, batch: int) -> dict[str, int]:
        """The constants of a program for examples of some characters, in batches of some examples."""
        classes = power_of_two_from_16(self.classes)
        return {"T": times, "V": self.vocabulary, "C": self.classes, "CP": classes, "H": self.hidden, "B": batch}

    def turned(self, models: Tensor) -> Tensor:
        """A copy of models (M, D) with their input matrices transposed."""
        return self._with_input(models, 3 * self.hidden, self.vocabulary)

    def turned_back(self, models: Tensor) -> Tensor:
        """A copy of models (M, D), whose input matrices are transposed, in the layout's order."""
        return self._with_input(models, self.vocabulary, 3 * self.hidden)

    def _with_input(self, models: Tensor, rows: int, columns: int) -> Tensor:
        copy, count = models.clone(), rows * columns
        copy[:, :count].view(-1, columns, rows).copy_(models[:, :count].view(-1, rows, columns).transpose(1, 2))
        return copy


@dataclass(frozen=True, eq=False)
class Visits:
    """The rows of all examples of some clients in the order in which their steps see them, one client after the other."""

    rows: Tensor  # (sum of epochs · examples,)
    begins: Tensor  # (k,)

    @classmethod
    def of(cls, cursor: BatchCursor, first_rows: Tensor) -> Visits:
        """Those of a cursor without repeats, for clients whose examples begin at rows `first_rows` (k,)."""
        device, sizes = cursor.keys.device, cursor.sizes
        epochs = (-(-cursor.steps // cursor.per_epoch)).clamp(min=1)  # begun
        which = torch.repeat_interleave(torch.arange(len(sizes)), epochs)  # of every pair of a client and an epoch
        lengths = sizes[which]
        offsets = lengths.cumsum(0) - lengths
        begins = (epochs * sizes).cumsum(0) - epochs * sizes
        epoch = (offsets - begins[which]) // lengths
        rows = torch.empty(int(lengths.sum()), dtype=torch.int64, device=device)
        widths = torch.tensor([(size - 1).bit_length() for size in lengths.tolist()])
        for width in sorted(set(widths.tolist())):  # pairs of similar length together, so that little is padded
            here = (widths == width).nonzero().flatten()
            longest, clients = int(lengths[here].max()), which[here].to(device)
            inside = torch.arange(longest, device=device) < lengths[here].to(device).unsqueeze(1)
            bits = random_bits(cursor.keys[clients], (epoch[here] << 32).to(device), longest)
            order = bits.masked_fill_(~inside, torch.iinfo(torch.int64).max).argsort(dim=1, stable=True)
            natural = torch.arange(longest, device=device).expand_as(order)
            order = torch.where(cursor.shuffled[which[here]].to(device).unsqueeze(1), order, natural)
            places = offsets[here].to(device).unsqueeze(1) + torch.arange(longest, device=device)
            rows[places[inside]] = (order + first_rows[clients].unsqueeze(1))[inside]
        return cls(rows, begins.to(device))


class GruClients(LocalPath):
    """Plain SGD of `models.CharGRU` over one-hot characters, perhaps with weight decay or a proximal term."""

    name = "GRU programs"

    def __init__(self, place: Workplace) -> None:
        super().__init__(place)
        self.obstacle = why_not_on_device(place.task, place.clients, place.precision)

    def supports_rule(self, rule: LocalRule) -> str | None:
        """Plain SGD in small batches."""
        if self.obstacle is not None:
            return self.obstacle
        if rule.pull != "none" or rule.traits.repeats != 1 or rule.traits.split is not None:
            return "models are pulled elsewhere, or batches are not those of SGD"
        if rule.solver.batch_size is None or rule.solver.batch_size > _MOST_EXAMPLES:
            return f"batches have more than {_MOST_EXAMPLES} examples"
        return rule.why_not_plain_sgd()

    def run(self, work: ChunkWork) -> ChunkResult:
        """A program per client."""
        shape = GruShape.of(self.place.task)
        updates, seen = local_updates(work, self.place.clients, shape)
        return work.result(work.new_updates().copy_(updates), seen)


def local_updates(work: ChunkWork, clients: ClientSet, shape: GruShape) -> tuple[Tensor, Tensor]:
    """The updates (k, D) of the clients of a chunk, and the summed losses of their batches (k,)."""
    from equipoise.engines.simulator.cuda.kernels.gru_programs import train_kernel

    chunk, starts, sgd, batch_size = work.chunk, work.starts, work.rule.sgd, work.rule.solver.batch_size or 1
    visits, device = Visits.of(work.batches, work.first_rows.squeeze(1)), starts.models.device
    models, owners = shape.turned(starts.models), starts.owners.to(device)
    weights = models.index_select(0, owners)
    times, batch = clients.x.shape[1], power_of_two_from_16(batch_size)
    seen = torch.zeros(len(chunk), dtype=torch.float32, device=device)
    scratch = work.space.empty(
        "gates and states", (len(chunk), (9 * times + 1) * batch * shape.hidden), torch.float16, device
    )  # fmt: skip
    vocabulary = power_of_two_from_16(shape.vocabulary)
    train_kernel[(len(chunk),)](
        weights, models, owners, clients.x, clients.y, visits.rows, visits.begins, chunk.sizes.to(device),
        chunk.steps.to(device), seen, scratch, work.rule.lr, sgd.weight_decay, sgd.prox, batch_size, weights.shape[1],
        VP=vocabulary, ROWS=_ROWS, PULLED=not sgd.is_plain, num_warps=_WARPS, num_stages=_STAGES, **shape.sizes(times, batch),
    )  # fmt: skip
    return shape.turned_back(weights.sub_(models.index_select(0, owners))), seen.double()


def example_losses(models: Tensor, clients: ClientSet, rows: Tensor, counts: list[int], shape: GruShape) -> Tensor:
    """The losses (n,) of examples at `rows` (n,): the first counts[0] of them at the first model (M, D), and so on."""
    from equipoise.engines.simulator.cuda.kernels.gru_programs import score_kernel

    ends = torch.tensor(counts).cumsum(0)
    pieces = [
        (owner, begin, min(begin + _PIECE, end))
        for owner, (end, count) in enumerate(zip(ends.tolist(), counts, strict=True))
        for begin in range(end - count, end, _PIECE)
    ]
    owners, begins, stops = torch.tensor(pieces, device=rows.device).unbind(1)
    losses = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
    sizes: dict[str, Any] = shape.sizes(clients.x.shape[1], 16)
    score_kernel[(len(pieces),)](
        shape.turned(models), owners.contiguous(), clients.x, clients.y, rows, begins.contiguous(), stops.contiguous(), losses,
        models.shape[1], num_warps=_WARPS, num_stages=_STAGES, **sizes,
    )  # fmt: skip
    return losses
