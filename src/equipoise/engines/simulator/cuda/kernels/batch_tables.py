"""Triton kernels for the batches of many clients: their random permutations (`rng.py`), and tables of all steps, on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from equipoise.core.rng import GOLDEN_GAMMA, MIX_FACTORS, signed
from equipoise.engines.simulator.cuda.graph_capacity import power_of_two

GOLDEN, FIRST, SECOND = (tl.constexpr(signed(value)) for value in (GOLDEN_GAMMA, *MIX_FACTORS))
LARGEST = tl.constexpr((1 << 63) - 1)


@triton.jit
def mix(z):  # type: ignore[no-untyped-def]
    """The hash of rng.py; its shifts are unsigned."""
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * FIRST
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * SECOND
    return z ^ ((z >> 31) & ((1 << 33) - 1))


@triton.jit
def bits_of(key, epoch, places):  # type: ignore[no-untyped-def]
    """63 random bits of a client's examples in an epoch."""
    return mix(key + (places.to(tl.int64) + (epoch.to(tl.int64) << 32)) * GOLDEN) & LARGEST


@triton.jit
def permutations_kernel(  # type: ignore[no-untyped-def]
    names, which, counts, streams, permutations, epochs, batch, together, N, KEYS: tl.constexpr, MINE: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """A client's order of examples in one epoch: the rank of some of them by random bits, as a stable sort gives it.

    `together` clients in a row share a stream; with KEYS, `names` are the clients' own keys already.
    """
    client, epoch, begin = tl.program_id(0), tl.program_id(1), tl.program_id(2) * MINE
    count = tl.load(counts + client)
    if begin < count:
        if KEYS:
            key = tl.load(names + client)
        else:
            key = mix(mix(tl.load(names + tl.load(which + client))) ^ tl.load(streams + client // together))
        mine = begin + tl.arange(0, MINE)
        bits = bits_of(key, epoch, mine)
        rank = tl.zeros((MINE,), dtype=tl.int32)
        for first in range(0, count, PART):
            other = first + tl.arange(0, PART)
            theirs = tl.where(other < count, bits_of(key, epoch, other), LARGEST)
            tie = (theirs[None, :] == bits[:, None]) & (other[None, :] < mine[:, None])
            rank += tl.sum(((theirs[None, :] < bits[:, None]) | tie).to(tl.int32), axis=1)
        rank = tl.where(count > batch, rank, mine)  # a client whose batch is all its data keeps its order
        tl.store(permutations + (client * epochs + epoch) * N + rank, mine, mask=mine < count)


@triton.jit
def tables_kernel(  # type: ignore[no-untyped-def]
    permutations, first, sizes, steps, rows, shares, rates, clients, room, epochs, N, width, B: tl.constexpr, W: tl.constexpr
):
    """One step of one client: the rows of its batch, the weight of each, and the rate 1; zeros if it takes no such step."""
    step, client, lane = tl.program_id(0), tl.program_id(1), tl.arange(0, W)
    known = tl.minimum(client, clients - 1)  # room that is left over repeats somebody's examples, which weigh nothing
    size = tl.load(sizes + known)
    works = (client < clients) & (step < tl.load(steps + known))
    per_epoch = tl.where(size > width, tl.cdiv(size, width), 1)
    epoch = tl.minimum(step // per_epoch, epochs - 1)
    start = (step % per_epoch) * width
    count = tl.minimum(size - start, width)
    inside = lane < count
    place = tl.where(inside, start + lane, start)
    row = tl.load(first + known) + tl.load(permutations + (known * epochs + epoch) * N + place)
    entry = (step.to(tl.int64) * room + client) * B + lane
    tl.store(rows + entry, row, mask=lane < B)
    share = tl.where(inside & works, 1.0 / count.to(tl.float64), 0.0)
    tl.store(shares + entry, share.to(shares.dtype.element_ty), mask=lane < B)
    tl.store(rates + step.to(tl.int64) * room + client, works.to(rates.dtype.element_ty))


def draw_permutations(
    names: Tensor, which: Tensor, counts: Tensor, streams: Tensor | None, permutations: Tensor, batch: int
) -> None:
    """Fill `permutations` (k, E, n) of clients with up to n examples, whose numbers are `counts` (k,).

    Their keys are made of `names` at the positions `which` (k,) and of streams (M,), each that of k / M clients in a row;
    without streams, `names` (k,) are the keys.
    """
    count, epochs, n = permutations.shape
    mine = min(128, power_of_two(n, 16))
    together = 1 if streams is None else count // len(streams)
    permutations_kernel[(count, epochs, triton.cdiv(n, mine))](
        names, which, counts, names if streams is None else streams, permutations, epochs, batch, together, n,
        KEYS=streams is None, MINE=mine, PART=min(32, mine), num_warps=4,
    )  # fmt: skip


def fill_tables(
    permutations: Tensor, first: Tensor, sizes: Tensor, steps: Tensor, tables: tuple[Tensor, Tensor, Tensor], count: int,
    width: int,
) -> None:  # fmt: skip
    """Rows (T, R, B), weights (T, R, B) and rates (T, R), 1 or 0, of the first `count` steps of k ≤ R clients, in batches of
    `width`.

    Clients have `sizes` (k,) examples from the row `first` (k,) on, and take `steps` (k,).
    """
    rows, shares, rates = tables
    _, room, batch = rows.shape
    clients, epochs, n = permutations.shape
    tables_kernel[(count, room)](
        permutations, first, sizes, steps, rows, shares, rates, clients, room, epochs, n, width, B=batch,
        W=power_of_two(batch), num_warps=1,
    )  # fmt: skip
