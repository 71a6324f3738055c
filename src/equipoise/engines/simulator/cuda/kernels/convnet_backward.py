"""The device programs of the backward pass of `kernels.convnet`; `convnet_programs` holds the others and says how they work."""

from __future__ import annotations

import triton
import triton.language as tl

from equipoise.engines.simulator.cuda.kernels.convnet_programs import (
    FIRST,
    PIXELS,
    SECOND,
    SUMS,
    TAP,
    add_chained,
    add_product,
    as_operand,
    begin_chain,
    end_chain,
)


@triton.jit
def readout_gradients(  # type: ignore[no-untyped-def]
    features, weight, code, slopes, losses, weight_gradient, bias_gradient,
    second_bias_gradient, client_loss, back, back_turned, code_turned, weight_stride, b,
    blocks, CLASSES: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """∂W = δᵀ a and ∂b = Σ δ of the readout, and the gradient δ W of a few channels of the second map, in two orders."""
    client = tl.program_id(1).to(tl.int64)
    part = tl.program_id(0)
    label = tl.arange(0, PADDED)
    feature = part * (CHANNELS * 16) + tl.arange(0, CHANNELS * 16)  # channel, position
    known = (label < CLASSES)[:, None]
    w = tl.load(weight + client * weight_stride + label[:, None] * SECOND + feature[None, :], mask=known, other=0.0)
    w = as_operand(w, PRECISION)
    gradient = tl.zeros((PADDED, CHANNELS * 16), tl.float32)
    second_bias = tl.zeros((CHANNELS * 16,), tl.float32)
    image = tl.arange(0, 16)
    position = tl.arange(0, 16)
    channel = part * CHANNELS + tl.arange(0, CHANNELS)
    for block in range(blocks):
        row = client * b + block * 16 + image
        here = (block * 16 + image < b)[:, None]
        slope = tl.load(slopes + row[:, None] * PADDED + label[None, :], mask=here, other=0.0)
        a = tl.load(features + row[:, None] * SECOND + feature[None, :], mask=here, other=0.0)
        mark = tl.load(code + row[:, None] * SECOND + feature[None, :], mask=here, other=4)
        slope = as_operand(slope, PRECISION)
        d = add_product(slope, w, tl.zeros((16, CHANNELS * 16), tl.float32), PRECISION)
        d = tl.where(mark < 4, d, 0.0)
        gradient = add_product(tl.trans(slope), a, gradient, PRECISION)
        second_bias += tl.sum(d, 0)
        short = as_operand(d, PRECISION).to(back.dtype.element_ty)
        to = (client * blocks + block) * (16 * SECOND)
        last = tl.permute(tl.reshape(short, (16, CHANNELS, 16)), (0, 2, 1))  # image, position, channel
        tl.store(back + to + image[:, None, None] * SECOND + position[None, :, None] * 64 + channel[None, None, :], last)
        turned = to + (feature % 16 * SECOND + feature // 16 * 16)[:, None] + image[None, :]  # position, channel, image
        tl.store(back_turned + turned, tl.trans(short))
        tl.store(code_turned + turned, tl.trans(mark))
    tl.store(weight_gradient + client * (CLASSES * SECOND) + label[:, None] * SECOND + feature[None, :], gradient, mask=known)
    tl.store(second_bias_gradient + client * 64 + channel, tl.sum(tl.reshape(second_bias, (CHANNELS, 16)), 1))
    if part == 0:
        bias = tl.zeros((PADDED,), tl.float32)
        total = 0.0
        for block in range(blocks):
            row = client * b + block * 16 + image
            here = block * 16 + image < b
            bias += tl.sum(tl.load(slopes + row[:, None] * PADDED + label[None, :], mask=here[:, None], other=0.0), 0)
            total += tl.sum(tl.load(losses + row, mask=here, other=0.0))
        tl.store(bias_gradient + client * CLASSES + label, bias, mask=label < CLASSES)
        tl.store(client_loss + client, total)


@triton.jit
def second_weights(  # type: ignore[no-untyped-def]
    pooled, back, code, weight_gradient, blocks,
    PRECISION: tl.constexpr, TAPS: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """∂W at a few taps: the sum over images and positions of the first map, moved by the tap, times the second's gradient."""
    client = tl.program_id(1).to(tl.int64)
    row = tl.arange(0, TAPS * 32)  # tap, input channel
    asked = tl.program_id(0) * TAPS + row // 32
    tap = tl.minimum(asked, 24)
    term = tl.arange(0, POSITIONS * 16)  # position, image
    outputs = tl.arange(0, 64)
    gradient = tl.zeros((TAPS * 32, 64), tl.float32)
    moved = (tap // 5 * 12 + tap % 5) * 512 + row % 32 * 16
    a = pooled + client * blocks * (16 * FIRST) + (moved[:, None] + (term // 16 * 1024 + term % 16)[None, :])
    at = client * blocks * (16 * SECOND) + ((term // 16 * SECOND + term % 16)[:, None] + outputs[None, :] * 16)
    for step in range(blocks * (16 // POSITIONS)):
        position = step % (16 // POSITIONS) * POSITIONS
        d = tl.load(back + at + step * (POSITIONS * SECOND))
        mark = tl.load(code + at + step * (POSITIONS * SECOND))
        corner = step // (16 // POSITIONS) * (16 * FIRST) + (position // 4 * 24 + position % 4 * 2) * 512
        for window in tl.static_range(4):
            own = tl.load(a + corner + (window // 2 * 12 + window % 2) * 512)
            gradient = add_product(own, tl.where(mark == window, d, 0.0), gradient, PRECISION)
    to = weight_gradient + client * (25 * TAP) + (tl.program_id(0) * TAPS * 32 + row)[:, None] * 64 + outputs[None, :]
    tl.store(to, gradient, mask=(asked < 25)[:, None])


@triton.jit
def first_map_gradient(  # type: ignore[no-untyped-def]
    back, code, weight, out, weight_stride, blocks,
    PRECISION: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The gradient of the first map at 4 × 4 positions (2r + s, 2t + u) of 16 images, r and t being two neighbours each.

    Pooled position (r − i, t − j) of the second map reaches it from window (v, w) by tap (2i + s − v, 2j + u − w), i and j
    being 0, 1 or 2: a window's gradients are read once for four products, and a tap's weights once for up to four as well.
    """
    client = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) // 9
    r0 = tl.program_id(0) % 9 // 3 * 2
    t0 = tl.program_id(0) % 3 * 2
    row = tl.arange(0, 64)  # r, t, image
    image = row % 16
    r = r0 + row // 32
    t = t0 + row // 16 % 2
    outputs = tl.arange(0, CHANNELS)
    inputs = tl.arange(0, 32)
    base = (client * blocks + block) * (16 * SECOND) + image[:, None] * SECOND + outputs[None, :]
    w = weight + client * weight_stride + inputs[None, :] * 64 + outputs[:, None]  # (CHANNELS, 32)
    d00 = tl.zeros((64, 32), tl.float32)
    d01 = tl.zeros((64, 32), tl.float32)
    d10 = tl.zeros((64, 32), tl.float32)
    d11 = tl.zeros((64, 32), tl.float32)
    i0 = tl.maximum(r0 - 3, 0)
    j0 = tl.maximum(t0 - 3, 0)
    wide = tl.minimum(t0 + 2, 3) - j0
    parts: tl.constexpr = 64 // CHANNELS
    everywhere = tl.zeros((1, 32), tl.int32)
    for step in range((tl.minimum(r0 + 2, 3) - i0) * wide * parts):
        i = i0 + step // parts // wide
        j = j0 + step // parts % wide
        start = step % parts * CHANNELS
        y = r - i
        x = t - j
        inside = ((y >= 0) & (y < 4) & (x >= 0) & (x < 4))[:, None]
        at = base + ((y * 4 + x) * 64 + start)[:, None]
        d = tl.load(back + at, mask=inside, other=0.0)
        mark = tl.load(code + at, mask=inside, other=4)
        middle = w + (i * 10 + j * 2) * TAP + start
        above = i + everywhere > 0
        below = i + everywhere < 2
        left = j + everywhere > 0
        right = j + everywhere < 2
        w_middle = tl.load(middle)
        w_left = tl.load(middle - TAP, mask=left, other=0.0)
        w_right = tl.load(middle + TAP, mask=right, other=0.0)
        w_above = tl.load(middle - 5 * TAP, mask=above, other=0.0)
        w_below = tl.load(middle + 5 * TAP, mask=below, other=0.0)
        w_above_left = tl.load(middle - 6 * TAP, mask=above & left, other=0.0)
        w_above_right = tl.load(middle - 4 * TAP, mask=above & right, other=0.0)
        w_below_left = tl.load(middle + 4 * TAP, mask=below & left, other=0.0)
        w_below_right = tl.load(middle + 6 * TAP, mask=below & right, other=0.0)
        s00 = begin_chain(d00, PRECISION)
        s01 = begin_chain(d01, PRECISION)
        s10 = begin_chain(d10, PRECISION)
        s11 = begin_chain(d11, PRECISION)
        own = tl.where(mark == 0, d, 0.0)
        s00 = add_chained(own, w_middle, s00, PRECISION)
        s01 = add_chained(own, w_right, s01, PRECISION)
        s10 = add_chained(own, w_below, s10, PRECISION)
        s11 = add_chained(own, w_below_right, s11, PRECISION)
        own = tl.where(mark == 1, d, 0.0)
        s00 = add_chained(own, w_left, s00, PRECISION)
        s01 = add_chained(own, w_middle, s01, PRECISION)
        s10 = add_chained(own, w_below_left, s10, PRECISION)
        s11 = add_chained(own, w_below, s11, PRECISION)
        own = tl.where(mark == 2, d, 0.0)
        s00 = add_chained(own, w_above, s00, PRECISION)
        s01 = add_chained(own, w_above_right, s01, PRECISION)
        s10 = add_chained(own, w_middle, s10, PRECISION)
        s11 = add_chained(own, w_right, s11, PRECISION)
        own = tl.where(mark == 3, d, 0.0)
        s00 = add_chained(own, w_above_left, s00, PRECISION)
        s01 = add_chained(own, w_above, s01, PRECISION)
        s10 = add_chained(own, w_left, s10, PRECISION)
        s11 = add_chained(own, w_middle, s11, PRECISION)
        d00 = end_chain(d00, s00, PRECISION)
        d01 = end_chain(d01, s01, PRECISION)
        d10 = end_chain(d10, s10, PRECISION)
        d11 = end_chain(d11, s11, PRECISION)
    to = out + (client * blocks + block) * (16 * FIRST) + ((r * 24 + t * 2) * 512 + image)[:, None] + inputs[None, :] * 16
    tl.store(to, as_operand(d00, PRECISION).to(out.dtype.element_ty))
    tl.store(to + 512, as_operand(d01, PRECISION).to(out.dtype.element_ty))
    tl.store(to + 12 * 512, as_operand(d10, PRECISION).to(out.dtype.element_ty))
    tl.store(to + 13 * 512, as_operand(d11, PRECISION).to(out.dtype.element_ty))


@triton.jit
def first_weights(x, back, code, sums, blocks, PRECISION: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Over a part of the positions, Σ of the gradient at (window, channel) times the 6×6 pixels; without them in column 36."""
    client = tl.program_id(1).to(tl.int64)
    part = tl.program_id(0)
    pixel = tl.arange(0, 64)  # 36 of them are there
    window = tl.arange(0, 4)[:, None, None]
    channel = tl.arange(0, 32)
    term = tl.arange(0, 64)  # position, image
    gradient = tl.zeros((128, 64), tl.float32)  # window, channel; pixel
    all_windows = tl.zeros((32, 64), tl.float32)
    own = client * blocks * (16 * FIRST) + ((term // 16 * 512 + term % 16)[None, :] + channel[:, None] * 16)
    corner = (term // 16 * 32 + term % 16)[:, None] + ((pixel // 6 * 28 + pixel % 6) * 16)[None, :]
    images = x + client * blocks * (16 * PIXELS) + corner
    count = tl.cdiv(blocks * 36, PARTS)
    for group in range(part * count, tl.minimum(blocks * 36, (part + 1) * count)):
        position = group % 36 * 4
        moved = (group // 36 * PIXELS + position // 12 * 56 + position % 12 * 2) * 16
        d = tl.load(back + own + group * 2048)  # (32, 64)
        mark = tl.load(code + own + group * 2048)
        patch = tl.load(images + moved, mask=(pixel < 36)[None, :], other=0.0)
        all_windows += tl.where(mark < 4, d, 0.0)
        spread = tl.where(mark[None, :, :] == window, d[None, :, :], 0.0)
        gradient = add_product(tl.reshape(spread, (128, 64)), patch, gradient, PRECISION)
    to = sums + (client * PARTS + part) * SUMS
    row = tl.arange(0, 128)
    tl.store(to + row[:, None] * 64 + pixel[None, :], gradient, mask=(pixel < 36)[None, :])
    tl.store(to + channel * 64 + 36, tl.sum(all_windows, 1))


@triton.jit
def first_weights_sum(sums, weight_gradient, bias_gradient, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """∂W of eight channels: at tap (i, j) the sum over windows (u, v) of pixel (i + u, j + v), and over the parts."""
    client = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * 8 + tl.arange(0, 8)
    tap = tl.arange(0, 32)
    gradient = tl.zeros((8, 32), tl.float32)
    bias = tl.zeros((8,), tl.float32)
    base = sums + client * PARTS * SUMS + channel * 64
    for part in tl.static_range(PARTS):
        for window in tl.static_range(4):
            pixel = (tap // 5 + window // 2) * 6 + tap % 5 + window % 2
            at = base[:, None] + (part * SUMS + window * 2048) + pixel[None, :]
            gradient += tl.load(at, mask=(tap < 25)[None, :], other=0.0)
        bias += tl.load(base + part * SUMS + 36)
    tl.store(weight_gradient + client * 800 + channel[:, None] * 25 + tap[None, :], gradient, mask=(tap < 25)[None, :])
    tl.store(bias_gradient + client * 32 + channel, bias)
