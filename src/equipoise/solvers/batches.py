"""Which examples a client sees at which local step: a pure function of the client's key.

Each epoch goes through the client's examples in a fresh random order, in batches of `batch_size`; the last one may be
smaller. `client_batches` says this plainly for one client (the loop engine); `BatchCursor` gives the same batches for many
ragged clients at once (the simulator).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from equipoise.rng import random_bits


def epoch_order(key: Tensor, epoch: int, size: int) -> Tensor:
    """The order of a client's examples in one epoch: a random permutation of 0 … size − 1."""
    return random_bits(key.reshape(1), epoch << 32, size)[0].argsort(stable=True)


def client_batches(key: Tensor, size: int, batch_size: int | None, steps: int) -> Iterator[Tensor]:
    """The example numbers of each of `steps` local steps of one client with `size` examples."""
    if batch_size is None or batch_size >= size:  # the full batch has no order
        for _ in range(steps):
            yield torch.arange(size, device=key.device)
        return
    per_epoch = -(-size // batch_size)
    order = torch.empty(0)
    for step in range(steps):
        epoch, position = divmod(step, per_epoch)
        if position == 0:
            order = epoch_order(key, epoch, size)
        yield order[position * batch_size : (position + 1) * batch_size]


class BatchCursor:
    """Steps through the batches of K clients together: `batch(step)` gives rows (k, b) and their weights (k, b).

    Clients are sorted by falling number of steps, so that the k clients still working at a step are the first k. Padding
    repeats a real example with weight 0; the weights of a client's batch sum to 1.
    """

    def __init__(self, keys: Tensor, sizes: Tensor, batch_size: int | None, steps: Tensor) -> None:
        self.keys, self.sizes, self.steps = keys, sizes, steps
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
        epochs = torch.div(step, self.per_epoch, rounding_mode="floor")
        position = step - epochs * self.per_epoch
        fresh = ((position == 0) & self.shuffled)[:k].nonzero().flatten()
        if len(fresh):
            self._shuffle(fresh, epochs)
        start = position[:k] * self.width
        count = (self.sizes[:k] - start).clamp(max=self.width)
        widest = int(count.max())
        offsets = torch.arange(widest, device=self.keys.device)
        inside = offsets < count.unsqueeze(1)
        places = torch.where(inside, start.unsqueeze(1) + offsets, 0)
        return self.orders[:k].gather(1, places), inside.to(dtype) / count.unsqueeze(1)
