"""Which examples a client sees at which local step: a pure function of the client's key.

Each epoch goes through the client's examples in a fresh random order, in batches of `batch_size`; the last one may be
smaller. `client_batches` says this plainly for one client (the loop engine); `BatchCursor` gives the same batches for many
ragged clients at once (the simulator). A solver that evaluates several gradients on one batch says so by `repeats`: every batch
is then used for that many steps in a row. A solver with a `split` sees the same share of its examples in every step but the
last, and the others in the last: `split_batches` and `SplitCursor`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from equipoise.core.abilities import solver_traits
from equipoise.core.numbers import Numbers
from equipoise.core.rng import random_bits
from equipoise.data.clients import ClientSet
from equipoise.errors import EquipoiseError
from equipoise.types import Cohort, LocalSolver


def epoch_order(key: Tensor, epoch: int, size: int) -> Tensor:
    """The order of a client's examples in one epoch: a random permutation of 0 … size − 1."""
    return random_bits(key.reshape(1), epoch << 32, size)[0].argsort(stable=True)


def client_batches(key: Tensor, size: int, batch_size: int | None, steps: int, repeats: int = 1) -> Iterator[Tensor]:
    """The example numbers of each of `steps` local steps of one client with `size` examples; each batch `repeats` times."""
    if batch_size is None or batch_size >= size:  # the full batch has no order
        for _ in range(steps):
            yield torch.arange(size, device=key.device)
        return
    per_epoch = -(-size // batch_size)
    order = torch.empty(0)
    for step in range(steps):
        epoch, position = divmod(step // repeats, per_epoch)
        if position == 0 and step % repeats == 0:
            order = epoch_order(key, epoch, size)
        yield order[position * batch_size : (position + 1) * batch_size]


TABLE = 2**22  # numbers: beyond this, batches are made step by step on a CPU
_GPU_TABLE = 2**27  # the same on a GPU, where a step that is made alone cannot be part of a graph
_BYTES_PER_NUMBER = 512  # of a GPU's memory, so that a table and what it is made from take an eighth of it


def largest_table(device: torch.device) -> int:
    """How many example numbers the batches of all steps may have to be made at once on a device."""
    if device.type != "cuda":
        return TABLE
    return max(TABLE, min(_GPU_TABLE, torch.cuda.get_device_properties(device).total_memory // _BYTES_PER_NUMBER))


class _StepTable(NamedTuple):
    """What a step is about, for each of T steps or of T steps and K clients."""

    active: list[int]
    widest: list[int]
    epochs: Tensor  # (T, K) in which epoch a client is
    starts: Tensor  # (T, K) where in its order the batch begins
    counts: Tensor  # (T, K)


class BatchCursor:
    """Steps through the batches of K clients together: `batch(step)` gives rows (k, b) and their weights (k, b).

    Clients are sorted by falling number of steps, so that the k clients still working at a step are the first k. Padding
    repeats a real example with weight 0; the weights of a client's batch sum to 1. Each batch comes `repeats` times in a row.
    All batches are made at once where they are few enough, so that a GPU need not be asked between two steps.
    """

    def __init__(self, keys: Tensor, sizes: Tensor, batch_size: int | None, steps: Tensor, repeats: int = 1) -> None:
        self.keys, self.sizes, self.steps, self.repeats = keys, sizes.cpu(), steps.cpu(), repeats
        size, taken = self.sizes.numpy(), self.steps.numpy()  # NumPy is faster than torch with a few thousand numbers
        largest = int(size.max())
        self.width = largest if batch_size is None else min(batch_size, largest)
        whole = size <= self.width if batch_size is not None else np.ones(len(size), dtype=bool)
        per_epoch = np.where(whole, 1, -(-size // max(self.width, 1)))
        epochs_begun = -(-taken // (per_epoch * repeats))  # epochs
        self.drawn = max(1, int(epochs_begun.max(initial=1, where=~whole)))  # that need an order
        self.shuffled, self.per_epoch = torch.from_numpy(~whole), torch.from_numpy(per_epoch)
        self.at_once = len(keys) * max(self.drawn * largest, int(taken.max()) * self.width) <= largest_table(keys.device)
        if not self.at_once:  # clients whose batch is all their data keep this natural order for ever
            self.orders = torch.arange(largest, device=keys.device).expand(len(keys), largest).clone()

    @cached_property
    def _table(self) -> _StepTable:
        size, taken, per_epoch = self.sizes.numpy(), self.steps.numpy(), self.per_epoch.numpy()
        count = int(taken.max())
        working = np.arange(count)[:, None] < taken  # (T, K)
        numbers = (np.arange(count) // self.repeats)[:, None]
        epochs = numbers // per_epoch
        starts = (numbers - epochs * per_epoch) * self.width
        counts = np.minimum(size - starts, self.width)
        widest = np.where(working, counts, 0).max(1, initial=0)
        tables = (torch.from_numpy(table) for table in (epochs, starts, counts))
        return _StepTable(working.sum(1).tolist(), widest.tolist(), *tables)

    @property
    def active(self) -> list[int]:
        """How many clients are at work at each step."""
        return self._table.active

    @property
    def widest(self) -> list[int]:
        """The size of the largest of their batches."""
        return self._table.widest

    @property
    def counts(self) -> Tensor:
        """The size of every client's batch at each step, (T, K)."""
        return self._table.counts

    def _orders(self, which: Tensor, epochs: Tensor, width: int) -> Tensor:
        """The orders (m, width) of m pairs of a client and an epoch; places beyond a client's size come last."""
        device = self.keys.device
        bits = random_bits(self.keys[which.to(device)], (epochs << 32).to(device), width)
        sizes = self.sizes[which]
        if int(sizes.min()) < width:
            beyond = torch.arange(width) >= sizes.unsqueeze(1)
            bits.masked_fill_(beyond.to(device), torch.iinfo(torch.int64).max)
        if device.type == "cpu":  # not stable, and three times faster: 63 bits of two examples are never the same
            return torch.from_numpy(bits.numpy().argsort(1))
        return bits.argsort(dim=1, stable=True)

    @cached_property
    def all_orders(self) -> Tensor:
        """The orders of all clients in all epochs, (K, E, n)."""
        count, epochs, largest = len(self.keys), self.drawn, int(self.sizes.max())
        natural = torch.arange(largest, device=self.keys.device).expand(count, epochs, largest)
        if not bool(self.shuffled.any()):
            return natural
        which, when = np.repeat(np.arange(count), epochs), np.tile(np.arange(epochs), count)
        drawn = self._orders(torch.from_numpy(which), torch.from_numpy(when), largest).view(count, epochs, largest)
        if bool(self.shuffled.all()):
            return drawn
        return torch.where(self.shuffled.view(-1, 1, 1).to(self.keys.device), drawn, natural)

    @cached_property
    def batches(self) -> tuple[Tensor, Tensor]:
        """All example numbers (T, K, b), and which of them are no padding (T, K, b)."""
        device = self.keys.device
        offsets = torch.arange(self.width, device=device)
        inside = offsets < self.counts.unsqueeze(2).to(device)
        clients, epochs, largest = self.all_orders.shape
        # A client that has done all its steps keeps its last epoch: nobody asks for those batches.
        which = torch.arange(clients) * epochs + torch.where(self.shuffled, self._table.epochs, 0).clamp(max=epochs - 1)
        first = (which * largest + self._table.starts).unsqueeze(2).to(device)  # (T, K, 1)
        return self.all_orders.reshape(-1)[first + torch.where(inside, offsets, 0)], inside

    @property
    def alike(self) -> bool:
        """Whether all clients have as many examples and take as many steps."""
        return self.active[0] == self.active[-1] == len(self.sizes) and int(self.sizes.min()) == int(self.sizes.max())

    def batch(self, step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Example numbers inside each client (k, b), and the weight of each in its batch's mean (k, b), in `dtype`."""
        k, widest = self.active[step], self.widest[step]
        counts = self.counts[step, :k].unsqueeze(1).to(self.keys.device)
        if self.at_once:
            places, inside = (part[step, :k, :widest] for part in self.batches)
            return places, inside.to(dtype) / counts
        starts = self._table.starts[step, :k]
        fresh = ((starts == 0) & self.shuffled[:k]).nonzero().flatten()
        if len(fresh) and step % self.repeats == 0:  # their next epoch begins
            width = int(self.sizes[fresh].max())
            self.orders[fresh.to(self.keys.device), :width] = self._orders(fresh, self._table.epochs[step][fresh], width)
        offsets = torch.arange(widest, device=self.keys.device)
        inside = offsets < counts
        places = torch.where(inside, starts.unsqueeze(1).to(self.keys.device) + offsets, 0)
        return self.orders[:k].gather(1, places), inside.to(dtype) / counts


def batches_of(solver: LocalSolver, key: Tensor, size: int, steps: int) -> Iterator[Tensor]:
    """The example numbers of each local step of one client, as the solver wants them."""
    traits = solver_traits(solver)
    if traits.split is None:
        return client_batches(key, size, solver.batch_size, steps, traits.repeats)
    return split_batches(key, size, traits.split, steps)


def cursor_of(solver: LocalSolver, keys: Tensor, sizes: Tensor, steps: Tensor) -> BatchCursor | SplitCursor:
    """The examples of each local step of many clients at once, by their keys, sizes and numbers of steps (K,)."""
    traits = solver_traits(solver)
    if traits.split is None:
        return BatchCursor(keys, sizes, solver.batch_size, steps, traits.repeats)
    return SplitCursor(keys, sizes, traits.split, steps)


def support_sizes(sizes: Tensor, share: float) -> Tensor:
    """How many examples of each client are in the first part of a split: to the nearest, and one or more in either part."""
    nearest = (sizes.double() * share + 0.5).floor().long()
    return torch.maximum(torch.minimum(nearest, sizes - 1), torch.ones_like(sizes))


def batch_sizes(solver: LocalSolver, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest batch of clients with these numbers of examples, (n,) and (n,)."""
    traits = solver_traits(solver)
    if traits.split is not None:
        first = support_sizes(sizes, traits.split)
        second = torch.where(sizes > 1, sizes - first, 1)
        return torch.minimum(first, second), torch.maximum(first, second)
    if solver.batch_size is None:
        return sizes, sizes
    largest, rest = sizes.clamp(max=solver.batch_size), sizes % solver.batch_size
    return torch.where((rest > 0) & (sizes > solver.batch_size), rest, largest), largest


def steps_taken(solver: LocalSolver, size: int, steps: int, least: int) -> int:
    """How many of a client's local steps are taken, if those on batches of less than `least` examples are left out."""
    batch_size = solver.batch_size
    if least < 2 or solver_traits(solver).split is not None:
        return steps
    if batch_size is None or batch_size >= size:
        return steps if size >= least else 0
    if batch_size < least:
        return 0
    if not 0 < size % batch_size < least:
        return steps
    repeats, whole = solver_traits(solver).repeats, size // batch_size  # the batch after the whole ones is too small
    epochs, more = divmod(steps, (whole + 1) * repeats)
    return (epochs * whole * repeats) + min(more, whole * repeats)


def split_batches(key: Tensor, size: int, share: float, steps: int) -> Iterator[Tensor]:
    """In random order, the first part of a client's examples at every step but the last, the second part at the last.

    A client with a single example has it in both parts.
    """
    order = epoch_order(key, 0, size)
    first = int(support_sizes(torch.tensor(size), share))
    for _ in range(steps - 1):
        yield order[:first]
    if steps:
        yield order[first:] if size > 1 else order


class SplitCursor:
    """`split_batches` of K clients together, with the interface of BatchCursor; all take the same number of steps."""

    def __init__(self, keys: Tensor, sizes: Tensor, share: float, steps: Tensor) -> None:
        self.last, sizes = int(steps.max()) - 1, sizes.to(keys.device)
        self.active = [len(keys)] * (self.last + 1)
        width = int(sizes.max())
        places = torch.arange(width, device=keys.device)
        bits = random_bits(keys, 0, width).masked_fill_(places >= sizes.unsqueeze(1), torch.iinfo(torch.int64).max)
        self.orders = bits.argsort(dim=1, stable=True)
        first = support_sizes(sizes, share)
        self.start = torch.where(sizes > 1, first, 0)  # of the second part
        self.counts = first, sizes - self.start

    def batch(self, step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Example numbers inside each client (k, b), and the weight of each in its batch's mean (k, b), in `dtype`."""
        second = step == self.last
        count = self.counts[int(second)].unsqueeze(1)
        places = torch.arange(int(count.max()), device=self.orders.device)
        inside = places < count
        shifted = places + self.start.unsqueeze(1) if second else places.expand(len(count), -1)
        return self.orders.gather(1, torch.where(inside, shifted, 0)), inside.to(dtype) / count


def steps_of(cohort: Cohort, solver: LocalSolver, clients: ClientSet, least: int) -> Numbers:
    """How many local steps each client of a cohort takes, (K,); batches of less than `least` examples are left out."""
    sizes = clients.host_sizes.numpy()[cohort.clients.numpy()].tolist()
    efforts = [] if cohort.effort is None else [cohort.effort.tolist()]
    asked = [(one[0], solver.local_steps(*one)) for one in zip(sizes, *efforts, strict=True)]
    return np.array([steps_taken(solver, size, steps, least) for size, steps in asked], dtype=np.int64)


def normalisers_of(cohort: Cohort, solver: LocalSolver, clients: ClientSet, least: int) -> Tensor:
    """a_k of each client of a cohort, (K,) float64: what its steps add up to under a gradient of 1, in units of the rate."""
    rule = solver_traits(solver).normalisers
    if rule is None:
        raise EquipoiseError(f"{type(solver).__name__} does not say what its steps add up to.")
    return rule(torch.from_numpy(steps_of(cohort, solver, clients, least)), solver.learning_rate(cohort.rate_round))
