"""Triton kernels for local SGD of softmax regression in the span of the clients' examples (`linear_span.py`), on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from equipoise.engines.simulator.cuda.graph_capacity import power_of_two


@triton.jit
def gather_kernel(  # type: ignore[no-untyped-def]
    data, which, offsets, counts, rows_at, x, features, scale, shift, SOME: tl.constexpr, R: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Some examples of a client as a model sees them, a few at a time."""
    client, begin = tl.program_id(0), tl.program_id(1) * SOME
    end = tl.minimum(tl.load(counts + client), begin + SOME)
    if begin < end:
        offset, own = tl.load(offsets + tl.load(which + client)), tl.load(rows_at + client)
        column = tl.arange(0, F)
        for first in range(begin, end, R):
            row = first + tl.arange(0, R).to(tl.int64)
            inside = (row < end)[:, None] & (column < features)[None, :]
            values = tl.load(data + (offset + row)[:, None] * features + column[None, :], mask=inside, other=0)
            target = (own + row)[:, None] * features + column[None, :]
            tl.store(x + target, values.to(x.dtype.element_ty) * scale + shift, mask=inside)


@triton.jit
def gram_kernel(x, counts, rows_at, grams_at, gram, features, scale, T: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """One tile of a client's Gram matrix, and the one across the diagonal; tiles are numbered row by row."""
    client, number = tl.program_id(0), tl.program_id(1)
    line = ((tl.sqrt(8.0 * number + 1.0) - 1.0) * 0.5).to(tl.int32)
    line = tl.where(line * (line + 1) // 2 > number, line - 1, line)  # a root may be rounded
    line = tl.where((line + 1) * (line + 2) // 2 <= number, line + 1, line)
    high, low = line * T, (number - line * (line + 1) // 2) * T
    count = tl.load(counts + client)
    if high < count:
        own, base = tl.load(rows_at + client), tl.load(grams_at + client)
        above, below = high + tl.arange(0, T), low + tl.arange(0, T)
        product = tl.zeros((T, T), dtype=tl.float32)
        for first in range(0, features, K):
            column = first + tl.arange(0, K)
            known = (column < features)[None, :]
            one_at, two_at = ((own + above)[:, None] * features, (own + below)[:, None] * features)
            one = tl.load(x + one_at + column[None, :], mask=(above < count)[:, None] & known, other=0.0)
            two = tl.load(x + two_at + column[None, :], mask=(below < count)[:, None] & known, other=0.0)
            product = tl.dot(one, tl.trans(two), product, input_precision=PRECISION)
        product = product * scale
        inside = (above < count)[:, None] & (below < count)[None, :]
        tl.store(gram + base + above.to(tl.int64)[:, None] * count + below[None, :], product, mask=inside)
        if low < high:
            tl.store(gram + base + below.to(tl.int64)[None, :] * count + above[:, None], product, mask=inside)


@triton.jit
def load_outputs(outputs, place, column, mask, P: tl.constexpr, TWO: tl.constexpr):  # type: ignore[no-untyped-def]
    """Outputs at rows `place` (n, 1) and classes `column` (1, m): whole, or as the sum of TWO parts side by side."""
    if TWO:
        z = tl.load(outputs + place * (2 * P) + column, mask=mask, other=0.0)
        z += tl.load(outputs + place * (2 * P) + P + column, mask=mask, other=0.0)
    else:
        z = tl.load(outputs + place * P + column, mask=mask, other=0.0)
    return z


@triton.jit
def load_bias(biases, model, stride, column, C: tl.constexpr, P: tl.constexpr, BIAS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A model's bias of the classes `column` (P,); zeros without one."""
    bias = tl.zeros((P,), dtype=tl.float32)
    if BIAS:
        bias += tl.load(biases + model * stride + column, mask=column < C, other=0.0)
    return bias


@triton.jit
def nearest_tf32(value):  # type: ignore[no-untyped-def]
    """The nearest number of ten bits after the leading one: that is what tensor cores see of a float32."""
    return ((value.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def split_kernel(  # type: ignore[no-untyped-def]
    source, factors, high, low, scale, rows, columns, group_in, row_in, group_out, row_out, R: tl.constexpr, C: tl.constexpr,
    TWO: tl.constexpr,
):  # fmt: skip
    """Numbers times the factor of their group: as they are, or as the sum of two numbers that tensor cores hold exactly."""
    group = tl.program_id(0).to(tl.int64)
    row, column = tl.program_id(1) * R + tl.arange(0, R), tl.program_id(2) * C + tl.arange(0, C)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    value = tl.load(source + group * group_in + row[:, None] * row_in + column[None, :], mask=inside, other=0.0)
    value = value * (tl.load(factors + group) * scale)
    target = group * group_out + row[:, None] * row_out + column[None, :]
    if TWO:
        most = nearest_tf32(value)
        tl.store(high + target, most, mask=inside)
        tl.store(low + target, nearest_tf32(value - most), mask=inside)
    else:
        tl.store(high + target, value, mask=inside)


@triton.jit
def weighted_kernel(  # type: ignore[no-untyped-def]
    coefficients, weights, scales, counts, rows_at, weighted, scale, P: tl.constexpr, R: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """Coefficients times their client's weight and scale, whole or as two numbers that tensor cores hold exactly."""
    client, first = tl.program_id(0), tl.program_id(1) * R
    count = tl.load(counts + client)
    if first < count:
        row, column = first + tl.arange(0, R), tl.arange(0, P)
        inside = (row < count)[:, None] & (column >= 0)[None, :]
        place = (tl.load(rows_at + client) + row)[:, None]
        value = tl.load(coefficients + place * P + column[None, :], mask=inside, other=0.0)
        value = value * (tl.load(weights + client) * tl.load(scales + client) * scale)
        if TWO:
            most = nearest_tf32(value)
            tl.store(weighted + place * (2 * P) + column[None, :], most, mask=inside)
            tl.store(weighted + place * (2 * P) + P + column[None, :], nearest_tf32(value - most), mask=inside)
        else:
            tl.store(weighted + place * P + column[None, :], value, mask=inside)


@triton.jit
def crossed_kernel(  # type: ignore[no-untyped-def]
    coefficients, outputs, biases, scales, counts, rows_at, crossed, together, bias_stride, C: tl.constexpr, P: tl.constexpr,
    R: tl.constexpr, TWO: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """⟨A, X W_0ᵀ⟩ of one client: its coefficients times its outputs at the start."""
    client = tl.program_id(0)
    count, own, column = tl.load(counts + client), tl.load(rows_at + client), tl.arange(0, P)
    start_bias = load_bias(biases, client // together, bias_stride, column, C, P, BIAS)
    total = 0.0
    for first in range(0, count, R):
        row = first + tl.arange(0, R)
        inside = (row < count)[:, None] & (column < C)[None, :]
        place = (own + row)[:, None]
        value = tl.load(coefficients + place * P + column[None, :], mask=inside, other=0.0)
        z = load_outputs(outputs, place, column[None, :], inside, P, TWO)
        total += tl.sum(tl.sum(value * (z + start_bias[None, :]), axis=1), axis=0)
    tl.store(crossed + client, total * tl.load(scales + client))


@triton.jit
def steps_kernel(  # type: ignore[no-untyped-def]
    outputs, biases, gram, targets, which, offsets, counts, rows_at, grams_at, steps, orders, rate, coefficients, summed_up,
    squares, seen, factors, scales, epochs, batch, decay, prox, together, bias_stride, N, STRIDE: tl.constexpr,
    TWO: tl.constexpr, BIAS: tl.constexpr, C: tl.constexpr, B: tl.constexpr, CP: tl.constexpr, PART: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """All local steps of one client: U_t = A_tᵀ X moves by a gradient g of few examples, and ‖U‖² with it.

    Coefficients are kept divided by `scale`, the product of shrinking factors so far. Outputs without bias come whole, or in
    TWO parts side by side.
    """
    client = tl.program_id(0)
    size, offset, lr = tl.load(counts + client), tl.load(offsets + tl.load(which + client)), tl.load(rate).to(tl.float32)
    shrink, back = 1.0 - lr * (decay + prox), lr * prox
    per_epoch = tl.where(size > batch, tl.cdiv(size, batch), 1)
    width = tl.minimum(size, batch)
    column, lane = tl.arange(0, CP), tl.arange(0, B)
    inside = column < C
    own, near_by = tl.load(rows_at + client), gram + tl.load(grams_at + client)
    summed = tl.zeros((CP,), dtype=tl.float32)
    start_bias = load_bias(biases, client // together, bias_stride, column, C, CP, BIAS)
    loss, factor, scale, square = 0.0, 1.0, 1.0, 0.0
    for step in range(0, tl.load(steps + client)):
        epoch = step // per_epoch
        start = (step - epoch * per_epoch) * width
        count = tl.minimum(size - start, width)
        here = lane < count
        mask = here[:, None] & inside[None, :]
        row = tl.load(orders + (client * epochs + epoch) * N + start + lane, mask=here, other=0).to(tl.int64)
        entry = (own + row)[:, None] * STRIDE + column[None, :]
        z = load_outputs(outputs, (own + row)[:, None], column[None, :], mask, STRIDE, TWO) + start_bias[None, :]
        moved = tl.zeros((B, CP), dtype=tl.float32)
        for first in range(0, size, PART):
            place = first + tl.arange(0, PART)
            known = place < size
            near = tl.load(near_by + row[:, None] * size + place[None, :], mask=here[:, None] & known[None, :], other=0.0)
            others = coefficients + (own + place)[:, None] * STRIDE + column[None, :]
            held = tl.load(others, mask=known[:, None] & inside[None, :], other=0.0)
            moved = tl.dot(near, held, moved, input_precision=PRECISION)
        if BIAS:
            moved += summed[None, :]
        moved = scale * moved
        z = tl.where(inside[None, :], factor * z + moved, float("-inf"))
        top = tl.max(z, axis=1)
        grown = tl.exp(z - top[:, None])
        total = tl.sum(grown, axis=1)
        label = tl.load(targets + offset + row, mask=here, other=0)
        hit = column[None, :] == label[:, None]
        each = top + tl.log(total) - tl.sum(tl.where(hit, z, 0.0), axis=1)
        share = 1.0 / count.to(tl.float32)
        loss += tl.sum(tl.where(here, each, 0.0), axis=0) * share
        change = tl.where(mask, (grown / total[:, None] - hit.to(tl.float32)) * (lr * share), 0.0)
        near = tl.load(near_by + row[:, None] * size + row[None, :], mask=here[:, None] & here[None, :], other=0.0)
        if BIAS:
            near += 1.0
        back_on_it = tl.dot(near, change, input_precision=PRECISION)
        crossed = tl.sum(tl.sum(change * tl.where(mask, back_on_it - 2.0 * shrink * moved, 0.0), axis=1), axis=0)
        square = shrink * shrink * square + crossed
        factor = shrink * factor + back
        scale = scale * shrink
        change = change / scale
        tl.store(coefficients + entry, tl.load(coefficients + entry, mask=mask, other=0.0) - change, mask=mask)
        summed -= tl.sum(change, axis=0)
        tl.debug_barrier()  # the next step reads what other threads have written
    tl.store(summed_up + client * STRIDE + column, summed * scale, mask=inside)
    tl.store(squares + client, square)
    tl.store(seen + client, loss)
    tl.store(factors + client, factor - 1.0)
    tl.store(scales + client, scale)


@triton.jit
def losses_kernel(  # type: ignore[no-untyped-def]
    outputs, biases, targets, which, offsets, counts, rows_at, losses, together, bias_stride, parts, SOME: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, P: tl.constexpr, TWO: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """The summed losses of some examples of a client."""
    client, part = tl.program_id(0), tl.program_id(1)
    end = tl.minimum(tl.load(counts + client), (part + 1) * SOME)
    offset, own, column = tl.load(offsets + tl.load(which + client)), tl.load(rows_at + client), tl.arange(0, P)
    bias = load_bias(biases, client // together, bias_stride, column, C, P, BIAS)
    total = tl.zeros((R,), dtype=tl.float64)
    for first in range(part * SOME, end, R):
        row = first + tl.arange(0, R).to(tl.int64)
        here = row < end
        mask, place = here[:, None] & (column < C)[None, :], (own + row)[:, None]
        z = load_outputs(outputs, place, column[None, :], mask, P, TWO)
        z = tl.where((column < C)[None, :], z + bias[None, :], float("-inf"))
        top = tl.max(z, axis=1)
        grown = tl.sum(tl.exp(z - top[:, None]), axis=1)
        label = tl.load(targets + offset + row, mask=here, other=0)
        own_output = tl.sum(tl.where(column[None, :] == label[:, None], z, 0.0), axis=1)
        total += tl.where(here, top + tl.log(grown) - own_output, 0.0).to(tl.float64)
    tl.store(losses + client * parts + part, tl.sum(total, axis=0))


@dataclass(frozen=True, eq=False)
class RaggedClients:
    """Where k clients lie in memory, one after the other: positions in the training set, numbers of examples, and the places
    of their first example and of their Gram matrix; (k,) int64 each. `largest` is the most examples that one may have.
    """

    which: Tensor
    counts: Tensor
    rows_at: Tensor
    grams_at: Tensor
    largest: int


def gather_examples(data: Tensor, clients: RaggedClients, offsets: Tensor, x: Tensor, scale: float, shift: float) -> None:
    """Fill `x` (R, F) with clients' examples."""
    some = 4 if clients.largest <= 128 else 32  # many programs fill a GPU, but those without work are no good
    gather_kernel[(len(clients.which), triton.cdiv(clients.largest, some))](
        data, clients.which, offsets, clients.counts, clients.rows_at, x, x.shape[1], scale, shift, SOME=some, R=4,
        F=power_of_two(x.shape[1]), num_warps=4,
    )  # fmt: skip


def gram_matrices(x: Tensor, clients: RaggedClients, gram: Tensor, scale: float, precision: str) -> None:
    """Fill `gram` with x xᵀ · scale of every client."""
    tile = 64 if clients.largest > 32 else 32
    tiles = triton.cdiv(clients.largest, tile)
    gram_kernel[(len(clients.which), tiles * (tiles + 1) // 2)](
        x, clients.counts, clients.rows_at, clients.grams_at, gram, x.shape[1], scale, T=tile, K=32, PRECISION=precision,
        num_warps=4, num_stages=4,
    )  # fmt: skip


def split_in_two(source: Tensor, factors: Tensor, scale: float, parts: Sequence[Tensor]) -> None:
    """Write source (G, R, L) · factors (G,) · scale to the one or two `parts` (G, R, L), whose sum it is."""
    groups, rows, columns = source.shape
    wide = min(256, power_of_two(columns, 16))
    grid = groups, triton.cdiv(rows, 16), triton.cdiv(columns, wide)
    split_kernel[grid](
        source, factors, parts[0], parts[-1], scale, rows, columns, source.stride(0), source.stride(1), parts[0].stride(0),
        parts[0].stride(1), R=16, C=wide, TWO=len(parts) == 2, num_warps=4,
    )  # fmt: skip


def weigh(
    coefficients: Tensor, weights: Tensor, scales: Tensor, clients: RaggedClients, scale: float, weighted: Tensor
) -> None:
    """Coefficients (R, P) · weights (k,) · scales (k,) · scale, written to `weighted` (R, P), or as a sum to (R, 2 P)."""
    width = coefficients.shape[1]
    weighted_kernel[(len(weights), triton.cdiv(clients.largest, 16))](
        coefficients, weights, scales, clients.counts, clients.rows_at, weighted, scale, P=width, R=16,
        TWO=weighted.shape[1] > width, num_warps=4,
    )  # fmt: skip


def _bias_of(biases: Tensor | None, other: Tensor, count: int) -> tuple[Tensor, int, int, bool]:
    """The biases (M, C), how many of `count` clients share one, their stride, and whether there are any; else `other`."""
    return (other, count, 0, False) if biases is None else (biases, count // len(biases), biases.stride(0), True)


def crossed_with_start(
    coefficients: Tensor, outputs: Tensor, biases: Tensor | None, scales: Tensor, clients: RaggedClients, classes: int,
    crossed: Tensor,
) -> None:  # fmt: skip
    """⟨A, X W_0ᵀ⟩ of every client, (k,)."""
    count, width = len(scales), coefficients.shape[1]
    biases, together, bias_stride, has_bias = _bias_of(biases, outputs, count)
    crossed_kernel[(count,)](
        coefficients, outputs, biases, scales, clients.counts, clients.rows_at, crossed, together, bias_stride, C=classes,
        P=width, R=16, TWO=outputs.shape[1] > width, BIAS=has_bias, num_warps=4,
    )  # fmt: skip


def take_steps(
    outputs: Tensor, biases: Tensor | None, gram: Tensor, targets: Tensor, clients: RaggedClients, offsets: Tensor,
    steps: Tensor, orders: Tensor, rate: Tensor, coefficients: Tensor, results: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    *, classes: int, batch: int, decay: float, prox: float, tf32: bool,
) -> None:  # fmt: skip
    """All local steps of all clients: `coefficients` (R, P) begin at 0, P ≥ `classes`.

    `outputs` (R, P) are those at the start without `biases` (M, C), or (R, 2 P), which are to be added up.
    `results` are sums of coefficients (k, P), then of each client ‖Aᵀ X‖², its summed losses, c − 1 and scale, (k,).
    """
    count, epochs, n = orders.shape
    stride = coefficients.shape[1]
    biases, together, bias_stride, has_bias = _bias_of(biases, outputs, count)
    steps_kernel[(count,)](
        outputs, biases, gram, targets, clients.which, offsets, clients.counts, clients.rows_at,
        clients.grams_at, steps, orders, rate, coefficients, *results, epochs, batch, decay, prox, together, bias_stride, n,
        STRIDE=stride, TWO=outputs.shape[1] > stride, BIAS=has_bias, C=classes,
        B=power_of_two(min(batch, n), 16), CP=power_of_two(classes, 16), PART=64 if n > 32 else 32,
        PRECISION="tf32" if tf32 else "ieee", num_warps=4,
    )  # fmt: skip


def sum_losses(
    outputs: Tensor, biases: Tensor | None, targets: Tensor, clients: RaggedClients, offsets: Tensor, losses: Tensor,
    classes: int, width: int,
) -> None:  # fmt: skip
    """Each client's summed losses (k,) at `outputs` (R, P) without `biases` (M, C), or (R, 2 P), which are to be added up."""
    count, some = len(losses), 64
    parts = triton.cdiv(clients.largest, some)
    sums = losses if parts == 1 else losses.new_empty(count, parts)
    biases, together, bias_stride, has_bias = _bias_of(biases, outputs, count)
    losses_kernel[(count, parts)](
        outputs, biases, targets, clients.which, offsets, clients.counts, clients.rows_at, sums, together, bias_stride, parts,
        SOME=some, R=16, C=classes, P=width, TWO=outputs.shape[1] > width, BIAS=has_bias, num_warps=4,
    )  # fmt: skip
    if parts > 1:
        torch.sum(sums, 1, out=losses)
