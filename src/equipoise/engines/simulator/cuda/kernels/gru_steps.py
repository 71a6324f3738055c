"""Triton kernels for the element-wise part of a step of a gated recurrent unit (`core/fused_gru.py`), forward and backward."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256


@triton.jit
def gates_of(x, product, bias, H):  # type: ignore[no-untyped-def]
    """Reset and update gate, U_n h + c_n and the candidate state, from the places of their first parts."""
    reset = tl.sigmoid(tl.load(x) + tl.load(product) + tl.load(bias))
    update = tl.sigmoid(tl.load(x + H) + tl.load(product + H) + tl.load(bias + H))
    inner = tl.load(product + 2 * H) + tl.load(bias + 2 * H)
    new = 2 * tl.sigmoid(2 * (tl.load(x + 2 * H) + reset * inner)) - 1  # tanh
    return reset, update, inner, new


@triton.jit(do_not_specialize=["step"])
def forward_kernel(  # type: ignore[no-untyped-def]
    projected, product, bias, states, step, T, B, H, count, BLOCK: tl.constexpr
):
    """h_{t+1} = (1 − z) ∘ n + z ∘ h_t for some elements of the states of all clients."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    place = tl.where(inside, place, 0)
    column, row = place % H, place // H
    client, example = row // B, row % B
    x = projected + ((client * T + step) * B + example) * 3 * H + column
    _, update, _, new = gates_of(x, product + row * 3 * H + column, bias + client * 3 * H + column, H)
    here = states + ((client * (T + 1) + step) * B + example) * H + column
    before = tl.load(here)
    tl.store(here + B * H, new + update * (before - new), mask=inside)


@triton.jit(do_not_specialize=["step"])
def backward_kernel(  # type: ignore[no-untyped-def]
    projected, products, bias, states, outer, carried, from_inputs, from_products, step, T, B, H, count, BLOCK: tl.constexpr
):
    """The gradients in the inputs and products of a step, and the part of that in h_t that does not pass through U."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    place = tl.where(inside, place, 0)
    column, row = place % H, place // H
    client, example = row // B, row % B
    at = ((client * T + step) * B + example) * 3 * H + column
    reset, update, inner, new = gates_of(projected + at, products + at, bias + client * 3 * H + column, H)
    state = ((client * (T + 1) + step) * B + example) * H + column
    before, total = tl.load(states + state), tl.load(carried + place) + tl.load(outer + state + B * H)
    of_new = total * (1 - update) * (1 - new * new)
    of_reset = of_new * inner * reset * (1 - reset)
    of_update = total * (before - new) * update * (1 - update)
    tl.store(from_inputs + at, of_reset, mask=inside)
    tl.store(from_inputs + at + H, of_update, mask=inside)
    tl.store(from_inputs + at + 2 * H, of_new, mask=inside)
    tl.store(from_products + at, of_reset, mask=inside)
    tl.store(from_products + at + H, of_update, mask=inside)
    tl.store(from_products + at + 2 * H, of_new * reset, mask=inside)
    tl.store(carried + place, total * update, mask=inside)


def forward(projected: Tensor, product: Tensor, bias: Tensor, states: Tensor, step: int) -> None:
    """What `TorchSteps.forward` does, for contiguous tensors."""
    models, steps, batch, rows = projected.shape
    count = models * batch * (rows // 3)
    forward_kernel[(triton.cdiv(count, _BLOCK),)](
        projected, product, bias, states, step, steps, batch, rows // 3, count, BLOCK=_BLOCK
    )


def backward(
    projected: Tensor, products: Tensor, bias: Tensor, states: Tensor, outer: Tensor, step: int, carried: Tensor,
    from_inputs: Tensor, from_products: Tensor,
) -> None:  # fmt: skip
    """What `TorchSteps.backward` does, for contiguous tensors."""
    models, steps, batch, rows = projected.shape
    count = models * batch * (rows // 3)
    backward_kernel[(triton.cdiv(count, _BLOCK),)](
        projected, products, bias, states, outer, carried, from_inputs, from_products, step, steps, batch, rows // 3, count,
        BLOCK=_BLOCK,
    )  # fmt: skip
