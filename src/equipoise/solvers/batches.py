"""Which examples a client sees at which local step: a pure function of the client's key.

Each epoch goes through the client's examples in a fresh random order, in batches of `batch_size`; the last one may be
smaller. `client_batches` says this plainly for one client (the loop engine); `BatchCursor` gives the same batches for many
ragged clients at once (the simulator). A solver that evaluates several gradients on one batch says so by `repeats`: every batch
is then used for that many steps in a row. A solver with a `split` sees the same share of its examples in every step but the
last, and the others in the last: `split_batches` and `SplitCursor`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from equipoise.rng import random_bits
from equipoise.types import LocalSolver


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


class BatchCursor:
    """Steps through the batches of K clients together: `batch(step)` gives rows (k, b) and their weights (k, b).

    Clients are sorted by falling number of steps, so that the k clients still working at a step are the first k. Padding
    repeats a real example with weight 0; the weights of a client's batch sum to 1. Each batch comes `repeats` times in a row.
    """

    def __init__(self, keys: Tensor, sizes: Tensor, batch_size: int | None, steps: Tensor, repeats: int = 1) -> None:
        self.keys, self.sizes, self.steps, self.repeats = keys, sizes, steps, repeats
        largest = int(sizes.max())
        self.width = largest if batch_size is None else min(batch_size, largest)
        whole = sizes <= self.width if batch_size is not None else torch.ones_like(sizes, dtype=torch.bool)
        self.shuffled = ~whole
        self.per_epoch = torch.where(whole, 1, -(-sizes // max(self.width, 1)))
        self.active = [int((steps > step).sum()) for step in range(int(steps.max()))]
        # Clients whose batch is all their data keep this natural order for ever.
        self.orders = torch.arange(largest, device=keys.device).expand(len(keys), largest).clone()

    def _shuffle(self, fresh: Tensor, epochs: Tensor) -> None:
        """Draw the next epoch's order for the clients at the positions `fresh`."""
        sizes = self.sizes[fresh]
        width = int(sizes.max())
        bits = random_bits(self.keys[fresh], epochs[fresh] << 32, width)
        # Places beyond a client's size sort to the end.
        bits.masked_fill_(torch.arange(width, device=bits.device) >= sizes.unsqueeze(1), torch.iinfo(torch.int64).max)
        self.orders[fresh, :width] = bits.argsort(dim=1, stable=True)

    def batch(self, step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Example numbers inside each client (k, b), and the weight of each in its batch's mean (k, b), in `dtype`."""
        k = self.active[step]
        number, again = divmod(step, self.repeats)
        epochs = torch.div(number, self.per_epoch, rounding_mode="floor")
        position = number - epochs * self.per_epoch
        fresh = ((position == 0) & self.shuffled)[:k].nonzero().flatten()
        if len(fresh) and not again:
            self._shuffle(fresh, epochs)
        start = position[:k] * self.width
        count = (self.sizes[:k] - start).clamp(max=self.width)
        widest = int(count.max())
        offsets = torch.arange(widest, device=self.keys.device)
        inside = offsets < count.unsqueeze(1)
        places = torch.where(inside, start.unsqueeze(1) + offsets, 0)
        return self.orders[:k].gather(1, places), inside.to(dtype) / count.unsqueeze(1)


def batches_of(solver: LocalSolver, key: Tensor, size: int, steps: int) -> Iterator[Tensor]:
    """The example numbers of each local step of one client, as the solver wants them."""
    share = getattr(solver, "split", None)
    if share is None:
        return client_batches(key, size, solver.batch_size, steps, getattr(solver, "repeats", 1))
    return split_batches(key, size, share, steps)


def cursor_of(solver: LocalSolver, keys: Tensor, sizes: Tensor, steps: Tensor) -> BatchCursor | SplitCursor:
    """The same for many clients at once."""
    share = getattr(solver, "split", None)
    if share is None:
        return BatchCursor(keys, sizes, solver.batch_size, steps, getattr(solver, "repeats", 1))
    return SplitCursor(keys, sizes, share, steps)


def first_part(sizes: Tensor, share: float) -> Tensor:
    """How many examples of each client are in the first part of a split: to the nearest, and one or more in either part."""
    nearest = (sizes.double() * share + 0.5).floor().long()
    return torch.maximum(torch.minimum(nearest, sizes - 1), torch.ones_like(sizes))


def split_batches(key: Tensor, size: int, share: float, steps: int) -> Iterator[Tensor]:
    """In random order, the first part of a client's examples at every step but the last, the second part at the last.

    A client with a single example has it in both parts.
    """
    order = epoch_order(key, 0, size)
    first = int(first_part(torch.tensor(size), share))
    for _ in range(steps - 1):
        yield order[:first]
    if steps:
        yield order[first:] if size > 1 else order


class SplitCursor:
    """`split_batches` of K clients together, with the interface of BatchCursor; all take the same number of steps."""

    def __init__(self, keys: Tensor, sizes: Tensor, share: float, steps: Tensor) -> None:
        self.last = int(steps.max()) - 1
        self.active = [len(keys)] * (self.last + 1)
        width = int(sizes.max())
        places = torch.arange(width, device=keys.device)
        bits = random_bits(keys, 0, width).masked_fill_(places >= sizes.unsqueeze(1), torch.iinfo(torch.int64).max)
        self.orders = bits.argsort(dim=1, stable=True)
        first = first_part(sizes, share)
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
