"""Triton programs for `models.CharGRU` over one-hot characters: one program takes all local steps of a client.

A program holds the recurrent matrix U in registers while it goes through time, so that a step through time is one product and
some element-wise work, with no word to the host and none to other programs. Factors of products are float16: they keep 10 bits,
as TF32 does, in half the space. Gradients are scaled by `SCALE` meanwhile, or the smallest would vanish. Weights, states and
sums are float32.

A row of `weights` is the model as its layout has it, but for the input matrix W, which is kept transposed: (V, 3H), U (3H, H),
b (3H,), c (3H,), readout (C, H) and its bias (C,). The notation is that of `core/fused_gru.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

SCALE = tl.constexpr(256.0)
LARGEST = tl.constexpr(60000.0)  # of a float16, about
IGNORED = tl.constexpr(-100)  # the target that cross-entropy passes over


@triton.jit
def recurrent_part(recurrent, gate: tl.constexpr, H: tl.constexpr):  # type: ignore[no-untyped-def]
    """U of one gate (H, H) as a factor."""
    k, n = tl.arange(0, H)[:, None], tl.arange(0, H)[None, :]
    return tl.load(recurrent + (gate * H + k) * H + n).to(tl.float16)


@triton.jit
def biases(weights, V: tl.constexpr, H: tl.constexpr):  # type: ignore[no-untyped-def]
    """b_r + c_r, b_z + c_z, b_n and c_n, (1, H) each."""
    n = tl.arange(0, H)[None, :]
    b, c = weights + V * 3 * H + 3 * H * H, weights + V * 3 * H + 3 * H * H + 3 * H
    of_reset, of_update = tl.load(b + n) + tl.load(c + n), tl.load(b + H + n) + tl.load(c + H + n)
    return of_reset, of_update, tl.load(b + 2 * H + n), tl.load(c + 2 * H + n)


@triton.jit
def cell(h, token, weights, reset_part, update_part, new_part, b_r, b_z, b_n, c_n, H: tl.constexpr):  # type: ignore[no-untyped-def]
    """One step through time of states h (B, H) that see tokens (B,): gates r and z, U_n h + c_n, the candidate, the state."""
    x = weights + token[:, None] * (3 * H) + tl.arange(0, H)[None, :]
    x_r, x_z, x_n = tl.load(x), tl.load(x + H), tl.load(x + 2 * H)
    factor = h.to(tl.float16)
    reset = tl.sigmoid(tl.dot(factor, tl.trans(reset_part)) + b_r + x_r)
    update = tl.sigmoid(tl.dot(factor, tl.trans(update_part)) + b_z + x_z)
    inner = tl.dot(factor, tl.trans(new_part)) + c_n
    new = 2 * tl.sigmoid(2 * (x_n + b_n + reset * inner)) - 1  # tanh
    return reset, update, inner, new, new + update * (h - new)


@triton.jit
def pack(low, high):  # type: ignore[no-untyped-def]
    """Two numbers as halves of 32 bits."""
    bits = high.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    return bits | low.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def unpack(pair):  # type: ignore[no-untyped-def]
    """The two numbers of `pack`."""
    low = (pair & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    return low.to(tl.float32), (pair >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def read_tokens(tokens, rows, t, V: tl.constexpr, T: tl.constexpr):  # type: ignore[no-untyped-def]
    """The characters (B,) at time t, and where they are outside the vocabulary."""
    token = tl.load(tokens + rows * T + t).to(tl.int64)
    outside = (token < 0) | (token >= V)
    return tl.where(outside, 0, token), outside


@triton.jit
def softmax_losses(h, outside, y, readout, C: tl.constexpr, CP: tl.constexpr, H: tl.constexpr):  # type: ignore[no-untyped-def]
    """Cross-entropy (B,) of the logits of states (B, H) at targets y, and its gradient in the logits (B, CP)."""
    k, column = tl.arange(0, H), tl.arange(0, CP)
    known = column < C
    matrix = tl.load(readout + column[None, :] * H + k[:, None], mask=known[None, :], other=0.0).to(tl.float16)
    logits = tl.dot(h.to(tl.float16), matrix) + tl.load(readout + C * H + column, mask=known, other=0.0)[None, :]
    logits = tl.where(known[None, :], logits, float("-inf"))
    top = tl.max(logits, 1)
    powers = tl.exp(logits - top[:, None])
    total = tl.sum(powers, 1)
    hit = column[None, :] == y[:, None]
    chosen = tl.sum(tl.where(hit, logits, 0.0), 1)
    passed = y == IGNORED
    wrong = outside | ((y < 0) & (y != IGNORED)) | (y >= C)
    losses = tl.where(passed, 0.0, tl.log(total) + top - chosen) + tl.where(wrong, float("nan"), 0.0)
    gradient = tl.where(passed[:, None], 0.0, powers / total[:, None] - hit.to(tl.float32))
    return losses, gradient


@triton.jit
def as_factor(value):  # type: ignore[no-untyped-def]
    """A scaled gradient as a factor."""
    return tl.minimum(tl.maximum(value, -LARGEST), LARGEST).to(tl.float16)


@triton.jit
def descend(place, start, gradient, mask, lr, decay, prox, PULLED: tl.constexpr):  # type: ignore[no-untyped-def]
    """A step at some places, w ← w − γ (g + λ w + μ (w − w^t)), from a scaled gradient."""
    value = tl.load(place, mask=mask, other=0.0)
    gradient = gradient / SCALE
    if PULLED:
        gradient += decay * value + prox * (value - tl.load(start, mask=mask, other=0.0))
    tl.store(place, value - lr * gradient, mask=mask)


@triton.jit
def train_kernel(  # type: ignore[no-untyped-def]
    weights, models, owners, tokens, targets, order, begins, sizes, steps, losses, scratch, lr, decay, prox, batch, D,
    T: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, H: tl.constexpr, B: tl.constexpr,
    ROWS: tl.constexpr, PULLED: tl.constexpr,
):  # fmt: skip
    """All local steps of a client, from and to its row of `weights`; `order` has its examples in the order of its visits."""
    client = tl.program_id(0).to(tl.int64)
    w, w_start = weights + client * D, models + tl.load(owners + client) * D
    recurrent, readout = V * 3 * H, V * 3 * H + 3 * H * H + 6 * H  # where they begin in a row
    size, begin = tl.load(sizes + client), tl.load(begins + client)
    per_epoch = (size + batch - 1) // batch
    part = T * B * H
    gates = scratch + client * (9 * part + B * H)  # the gradients of r, z, U_n h + c_n and n of all times
    pairs = (gates + 4 * part).to(tl.pointer_type(tl.uint32))  # these themselves, as pairs (r, z) and (U_n h + c_n, n)
    states = gates + 8 * part  # h_0, …, h_T
    example, n = tl.arange(0, B), tl.arange(0, H)
    here = example[:, None] * H + n[None, :]
    zeros = tl.zeros((B, H), tl.float32)
    tl.store(states + here, zeros.to(tl.float16))
    seen = 0.0
    for step in range(tl.load(steps + client)):
        epoch = step // per_epoch
        first = (step - epoch * per_epoch) * batch
        count = tl.minimum(batch, size - first)
        inside = example < count
        rows = tl.load(order + begin + epoch * size + first + tl.where(inside, example, 0))
        shares = tl.where(inside, 1.0, 0.0) / count
        # Forward.
        reset_part = recurrent_part(w + recurrent, 0, H)
        update_part = recurrent_part(w + recurrent, 1, H)
        new_part = recurrent_part(w + recurrent, 2, H)
        b_r, b_z, b_n, c_n = biases(w, V, H)
        h = zeros
        outside = example < 0
        for t in range(T):
            token, out = read_tokens(tokens, rows, t, V, T)
            outside = outside | out
            reset, update, inner, new, h = cell(h, token, w, reset_part, update_part, new_part, b_r, b_z, b_n, c_n, H)
            at = pairs + t * (B * H) + here
            tl.store(at, pack(reset, update))
            tl.store(at + part, pack(inner, new))
            tl.store(states + (t + 1) * (B * H) + here, h.to(tl.float16))
        # The loss and the readout.
        y = tl.load(targets + rows).to(tl.int64)
        each, of_logits = softmax_losses(h, outside, y, w + readout, C, CP, H)
        seen += tl.sum(tl.where(inside, each, 0.0) * shares, 0)
        column = tl.arange(0, CP)
        of_logits = of_logits * shares[:, None] * SCALE
        matrix_at = readout + column[:, None] * H + n[None, :]
        matrix = tl.load(w + matrix_at, mask=column[:, None] < C, other=0.0).to(tl.float16)
        carried = tl.dot(as_factor(of_logits), matrix)
        of_matrix = tl.dot(tl.trans(as_factor(of_logits)), h.to(tl.float16))
        tl.debug_barrier()  # all have read the readout; and gates and states are written
        descend(w + matrix_at, w_start + matrix_at, of_matrix, column[:, None] < C, lr, decay, prox, PULLED)
        bias_at = readout + C * H + column
        descend(w + bias_at, w_start + bias_at, tl.sum(of_logits, 0), column < C, lr, decay, prox, PULLED)
        # Backward.
        reset_part = recurrent_part(w + recurrent, 0, H)
        update_part = recurrent_part(w + recurrent, 1, H)
        new_part = recurrent_part(w + recurrent, 2, H)
        for back in range(T):
            t = T - 1 - back
            reset, update = unpack(tl.load(pairs + t * (B * H) + here))
            inner, new = unpack(tl.load(pairs + part + t * (B * H) + here))
            before = tl.load(states + t * (B * H) + here).to(tl.float32)
            of_new = carried * (1 - update) * (1 - new * new)
            of_reset = as_factor(of_new * inner * reset * (1 - reset))
            of_update = as_factor(carried * (before - new) * update * (1 - update))
            of_inner = as_factor(of_new * reset)
            at = gates + t * (B * H) + here
            tl.store(at, of_reset)
            tl.store(at + part, of_update)
            tl.store(at + 2 * part, of_inner)
            tl.store(at + 3 * part, as_factor(of_new))
            carried = tl.dot(of_reset, reset_part, carried * update)
            carried = tl.dot(of_update, update_part, carried)
            carried = tl.dot(of_inner, new_part, carried)
        tl.debug_barrier()  # gradients are written, and U and W were read
        # The weights of each gate: products over all times and examples.
        vocabulary = tl.arange(0, VP)
        for gate in range(3):
            of_recurrent = tl.zeros((H, H), tl.float32)
            of_input = tl.zeros((VP, H), tl.float32)
            of_b = tl.zeros((H,), tl.float32)
            of_c = tl.zeros((H,), tl.float32)
            for k0 in range(0, T * B, ROWS):
                k = k0 + tl.arange(0, ROWS)
                real = k < T * B
                there = k[:, None] * H + n[None, :]
                of_gate = tl.load(gates + gate * part + there, mask=real[:, None], other=0.0)
                before = tl.load(states + there, mask=real[:, None], other=0.0)
                of_recurrent = tl.dot(tl.trans(of_gate), before, of_recurrent)
                of_c += tl.sum(of_gate.to(tl.float32), 0)
                # The candidate's input has a gradient of its own: r does not act on it.
                of_gate = tl.load(gates + (gate + gate // 2) * part + there, mask=real[:, None], other=0.0)
                of_b += tl.sum(of_gate.to(tl.float32), 0)
                number = k % B
                visit = tl.where(real & (number < count), number, 0)
                row = tl.load(order + begin + epoch * size + first + visit)
                token = tl.load(tokens + row * T + tl.where(real, k // B, 0)).to(tl.int32)
                one_hot = (vocabulary[:, None] == token[None, :]).to(tl.float16)
                of_input = tl.dot(one_hot, of_gate, of_input)
            at_u = recurrent + (gate * H + n[:, None]) * H + n[None, :]
            descend(w + at_u, w_start + at_u, of_recurrent, (n < H)[:, None], lr, decay, prox, PULLED)
            at_w = vocabulary[:, None] * (3 * H) + gate * H + n[None, :]
            descend(w + at_w, w_start + at_w, of_input, vocabulary[:, None] < V, lr, decay, prox, PULLED)
            at_b = recurrent + 3 * H * H + gate * H + n
            descend(w + at_b, w_start + at_b, of_b, n < H, lr, decay, prox, PULLED)
            descend(w + at_b + 3 * H, w_start + at_b + 3 * H, of_c, n < H, lr, decay, prox, PULLED)
        tl.debug_barrier()  # the next step reads the weights
    tl.store(losses + client, seen)


@triton.jit
def score_kernel(  # type: ignore[no-untyped-def]
    models, owners, tokens, targets, rows_of, begins, ends, losses, D,
    T: tl.constexpr, V: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, H: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """The losses of a stretch of the examples whose rows `rows_of` lists, at the model that owns the stretch."""
    piece = tl.program_id(0)
    w = models + tl.load(owners + piece).to(tl.int64) * D
    recurrent, readout = V * 3 * H, V * 3 * H + 3 * H * H + 6 * H
    reset_part = recurrent_part(w + recurrent, 0, H)
    update_part = recurrent_part(w + recurrent, 1, H)
    new_part = recurrent_part(w + recurrent, 2, H)
    b_r, b_z, b_n, c_n = biases(w, V, H)
    end, example = tl.load(ends + piece), tl.arange(0, B)
    for first in range(tl.load(begins + piece), end, B):
        inside = first + example < end
        rows = tl.load(rows_of + first + example, mask=inside, other=0)
        h = tl.zeros((B, H), tl.float32)
        outside = example < 0
        for t in range(T):
            token, out = read_tokens(tokens, rows, t, V, T)
            outside = outside | out
            _, _, _, _, h = cell(h, token, w, reset_part, update_part, new_part, b_r, b_z, b_n, c_n, H)
        y = tl.load(targets + rows).to(tl.int64)
        each, _ = softmax_losses(h, outside, y, w + readout, C, CP, H)
        tl.store(losses + first + example, each, mask=inside)
