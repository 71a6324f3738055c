"""The device programs of `kernels.convnet`, in the order in which a gradient runs them. See there for what they compute.

A program works for one client (the second grid axis). Windows of a 2×2 pooling are numbered 0 … 3 in scan order; `code` says
which of them held the maximum (the first of equals), and is 4 where the maximum was not positive, so that nothing flows back.

Tensor cores read both operands along the dimension that is summed over, and for float32 numbers that dimension must be the
contiguous one. What a product sums over is channels in the forward pass and examples in the weights' gradients, so that the
first map and the second map's gradient are kept in two orders: channels last, and with a block of 16 images last ("turned").
Turned buffers are padded to whole blocks, with gradients of 0 and codes of 4.
"""

from __future__ import annotations

import triton
import triton.language as tl

PIXELS = tl.constexpr(28 * 28)
FIRST = tl.constexpr(144 * 32)  # the pooled first map of an image: 12 × 12 positions, 32 channels
SECOND = tl.constexpr(16 * 64)  # the pooled second map: 4 × 4 positions, 64 channels
TAP = tl.constexpr(32 * 64)  # the second layer's weights at one of 25 taps
WEIGHTS = tl.constexpr(25 * 32 * 64)
SUMS = tl.constexpr(128 * 64)  # one part of the sums of `first_weights`
IGNORED = tl.constexpr(-100)  # the target that cross-entropy passes over


@triton.jit
def _high(value):  # type: ignore[no-untyped-def]
    """The nearest number with the sign, exponent and 10 bits that TF32 holds. Not for NaN, whose bits may run over."""
    return ((value.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def as_operand(value, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """A float32 number as products in this precision take it. Tensor cores cut TF32 off where this rounds to the nearest."""
    if PRECISION == "tf32":
        value = tl.where(value == value, _high(value), value)
    return value


@triton.jit
def add_chained(a, b, total, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum total + a b, all of it on tensor cores.

    "float32" splits a = a₁ + a₂ and b likewise into TF32 numbers and takes a₂ b₁ + a₁ b₂ + a₁ b₁. NaN and infinity leave NaN
    in a₂ and b₂.
    """
    if PRECISION == "bf16":
        total = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), total)
    elif PRECISION == "tf32":
        total = tl.dot(a, b, total, input_precision="tf32")
    else:
        a_high = _high(a)
        b_high = _high(b)
        total = tl.dot(a - a_high, b_high, total, input_precision="tf32")
        total = tl.dot(a_high, b - b_high, total, input_precision="tf32")
        total = tl.dot(a_high, b_high, total, input_precision="tf32")
    return total


@triton.jit
def begin_chain(total, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a chain begins. Tensor cores round sums towards 0, which adds up: "float32" chains are short, and begin at 0."""
    if PRECISION == "float32":
        total = tl.zeros(total.shape, tl.float32)
    return total


@triton.jit
def end_chain(total, chain, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum that a chain which began so has reached."""
    if PRECISION == "float32":
        chain += total
    return chain


@triton.jit
def add_product(a, b, total, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum total + a b: a chain of one product."""
    return end_chain(total, add_chained(a, b, begin_chain(total, PRECISION), PRECISION), PRECISION)


@triton.jit
def _pooled(z0, z1, z2, z3):  # type: ignore[no-untyped-def]
    """The maximum of four windows and its number, as max_pool2d: the first of equals, and not a number beats any number."""
    best = z0
    better = (z1 > best) | (z1 != z1)
    best = tl.where(better, z1, best)
    which = tl.where(better, 1, 0)
    better = (z2 > best) | (z2 != z2)
    best = tl.where(better, z2, best)
    which = tl.where(better, 2, which)
    better = (z3 > best) | (z3 != z3)
    best = tl.where(better, z3, best)
    which = tl.where(better, 3, which)
    return best, which


@triton.jit
def turn_inputs(  # type: ignore[no-untyped-def]
    weight, weight_copy, x, turned, weight_stride, b, blocks, scale, PRECISION: tl.constexpr,
):  # fmt: skip
    """Copy the second layer's weights (25, 32, 64) to (25, 64, 32), or as they are to bfloat16; turn images to (784, 16)."""
    client = tl.program_id(1).to(tl.int64)
    job = tl.program_id(0)
    if job < 25:
        inputs = tl.arange(0, 32)
        outputs = tl.arange(0, 64)
        tile = tl.load(weight + client * weight_stride + job * TAP + inputs[:, None] * 64 + outputs[None, :])
        to = weight_copy + client * WEIGHTS + job * TAP
        if PRECISION == "bf16":
            tl.store(to + inputs[:, None] * 64 + outputs[None, :], tile.to(weight_copy.dtype.element_ty))
        else:
            tl.store(to + outputs[:, None] * 32 + inputs[None, :], tl.trans(as_operand(tile, PRECISION)))
    else:
        block = (job - 25) // 7
        image = tl.arange(0, 16)
        pixel = (job - 25) % 7 * 128 + tl.arange(0, 128)
        here = (block * 16 + image < b)[:, None] & (pixel < PIXELS)[None, :]
        at = client * b * PIXELS + (block * 16 + image)[:, None] * PIXELS + pixel[None, :]
        value = tl.load(x + at, mask=here, other=0).to(tl.float32) * scale
        place = turned + (client * blocks + block) * (16 * PIXELS) + pixel[None, :] * 16 + image[:, None]
        tl.store(place, as_operand(value, PRECISION).to(turned.dtype.element_ty), mask=(pixel < PIXELS)[None, :])


@triton.jit
def first_layer(  # type: ignore[no-untyped-def]
    x, weight, bias, pooled, turned, code, weight_stride, bias_stride, b,
    blocks, scale, PRECISION: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Convolution, pooling and ReLU of the images; each of STEPS (a divisor of 36) does 4 pooled positions of 16 images.

    The 6×6 pixels under a pooling window times one matrix (36, 4 · 32) give all four windows: row (i, j) of it holds tap
    (i − u, j − v) for window (u, v), or 0 where there is none.
    """
    client = tl.program_id(1).to(tl.int64)
    pixel = tl.arange(0, 64)  # 36 of them are there
    column = tl.arange(0, 128)  # window, channel
    channel = tl.arange(0, 32)
    ky = (pixel // 6)[:, None] - (column // 64)[None, :]
    kx = (pixel % 6)[:, None] - (column // 32 % 2)[None, :]
    tap = (ky >= 0) & (ky < 5) & (kx >= 0) & (kx < 5)
    taps = tl.load(
        weight + client * weight_stride + (column % 32)[None, :] * 25 + ky * 5 + kx, mask=tap, other=0.0
    )  # (64, 128)
    taps = as_operand(taps * scale, PRECISION)
    offset = tl.load(bias + client * bias_stride + channel)[None, :]
    row = tl.arange(0, 64)  # position, image
    for step in range(STEPS):
        group = tl.program_id(0) * STEPS + step
        position = group % 36 * 4
        image = group // 36 * 16 + row % 16
        here = image < b
        corner = image * PIXELS + (position // 12 * 56 + position % 12 * 2) + row // 16 * 2
        at = client * b * PIXELS + (corner[:, None] + (pixel // 6 * 28 + pixel % 6)[None, :])
        patch = tl.load(x + at, mask=here[:, None] & (pixel < 36)[None, :], other=0).to(tl.float32)  # (64, 64)
        z = add_product(as_operand(patch, PRECISION), taps, tl.zeros((64, 128), tl.float32), PRECISION)
        upper, lower = tl.split(tl.permute(tl.reshape(z, (64, 2, 64)), (0, 2, 1)))
        z0, z1 = tl.split(tl.permute(tl.reshape(upper, (64, 2, 32)), (0, 2, 1)))
        z2, z3 = tl.split(tl.permute(tl.reshape(lower, (64, 2, 32)), (0, 2, 1)))
        best, which = _pooled(z0 + offset, z1 + offset, z2 + offset, z3 + offset)
        off = (best <= 0) | (image >= b)[:, None]
        value = as_operand(tl.where(off, 0.0, best), PRECISION).to(pooled.dtype.element_ty)
        to = client * b * FIRST + (image * FIRST + (position + row // 16) * 32)[:, None] + channel[None, :]
        tl.store(pooled + to, value, mask=here[:, None])
        to = client * blocks * (16 * FIRST) + group * 2048 + (row // 16 * 512 + row % 16)[:, None] + channel[None, :] * 16
        tl.store(turned + to, value)
        tl.store(code + to, tl.where(off, 4, which).to(tl.uint8))


@triton.jit
def second_layer(  # type: ignore[no-untyped-def]
    pooled, weight, bias, features, code, feature_code, bias_stride, b, blocks,
    PRECISION: tl.constexpr, IMAGES: tl.constexpr, INPUT_STRIDE: tl.constexpr, OUTPUT_STRIDE: tl.constexpr,
):  # fmt: skip
    """Convolution, pooling and ReLU of a few images' first maps: one product per tap, with no columns in memory."""
    client = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * IMAGES
    columns: tl.constexpr = IMAGES * 64
    column = tl.arange(0, columns)  # row of the window, image, position, column of the window
    position = column // 2 % 16
    image = first + column // 32 % IMAGES
    y = position // 4 * 2 + column // (IMAGES * 32)
    corner = (image * 144 + y * 12 + position % 4 * 2 + column % 2) * 32
    inputs = tl.arange(0, 32)
    outputs = tl.arange(0, 64)
    w = weight + client * WEIGHTS + inputs[None, :] * INPUT_STRIDE + outputs[:, None] * OUTPUT_STRIDE
    a = pooled + client * b * FIRST + (corner[None, :] + inputs[:, None])
    here = (image < b)[None, :]
    z = tl.zeros((64, columns), tl.float32)
    for tap in range(25):
        shifted = tl.load(a + (tap // 5 * 12 + tap % 5) * 32, mask=here, other=0.0)  # (32, columns)
        z = add_product(tl.load(w + tap * TAP), shifted, z, PRECISION)
    z += tl.load(bias + client * bias_stride + outputs)[:, None]
    left, right = tl.split(tl.reshape(z, (64, columns // 2, 2)))
    z0, z2 = tl.split(tl.permute(tl.reshape(left, (64, 2, columns // 4)), (0, 2, 1)))
    z1, z3 = tl.split(tl.permute(tl.reshape(right, (64, 2, columns // 4)), (0, 2, 1)))
    best, which = _pooled(z0, z1, z2, z3)  # (64, IMAGES · 16)
    off = best <= 0
    mark = tl.where(off, 4, which).to(tl.uint8)
    place = tl.arange(0, columns // 4)
    here = (first + place // 16 < b)[None, :]
    to = (client * b + first) * SECOND + (place // 16 * SECOND + place % 16)[None, :] + outputs[:, None] * 16
    tl.store(features + to, as_operand(tl.where(off, 0.0, best), PRECISION), mask=here)
    tl.store(feature_code + to, mark, mask=here)
    tl.store(code + (client * blocks * 16 + first) * SECOND + place[None, :] * 64 + outputs[:, None], mark, mask=here)


@triton.jit
def readout(  # type: ignore[no-untyped-def]
    features, weight, bias, y, shares, slopes, losses, weight_stride,
    bias_stride, b, CLASSES: tl.constexpr, PADDED: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Logits z of 16 images from WIDE features, losses share · (log Σ exp z − z_y), slopes share · (softmax z − onehot y)."""
    client = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * 16 + tl.arange(0, 16)
    here = row < b
    label = tl.arange(0, PADDED)
    feature = tl.arange(0, FEATURES)
    a = features + client * b * WIDE + row[:, None] * WIDE + feature[None, :]
    w = weight + client * weight_stride + label[None, :] * WIDE + feature[:, None]
    z = tl.zeros((16, PADDED), tl.float32)
    for start in range(0, WIDE, FEATURES):
        own = tl.load(a + start, mask=here[:, None], other=0.0)
        weights = tl.load(w + start, mask=(label < CLASSES)[None, :], other=0.0)
        z = add_product(own, as_operand(weights, PRECISION), z, PRECISION)
    z += tl.load(bias + client * bias_stride + label, mask=label < CLASSES, other=0.0)[None, :]
    z = tl.where((label < CLASSES)[None, :], z, float("-inf"))
    target = tl.load(y + client * b + row, mask=here, other=0)
    share = tl.load(shares + client * b + row, mask=here, other=0.0)
    top = tl.max(z, 1)
    powers = tl.exp(z - top[:, None])
    total = tl.sum(powers, 1)
    hit = label[None, :] == target[:, None]
    loss = tl.log(total) + top - tl.sum(tl.where(hit, z, 0.0), 1)
    loss = tl.where((target >= 0) & (target < CLASSES), loss, float("nan"))
    loss = tl.where(target == IGNORED, 0.0, loss) * share
    slope = (powers / total[:, None] - hit.to(tl.float32)) * share[:, None]
    slope = tl.where((target == IGNORED)[:, None], 0.0, slope)
    tl.store(losses + client * b + row, loss, mask=here)
    tl.store(slopes + (client * b + row[:, None]) * PADDED + label[None, :], slope, mask=here[:, None])
