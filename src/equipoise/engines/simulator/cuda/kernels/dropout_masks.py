"""A Triton kernel for the masks of dropout (`core/dropout.py`): one launch in place of some twenty."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from equipoise.engines.simulator.cuda.kernels.batch_tables import mix

DIMENSIONS = 4  # of a mask, at most


@triton.jit
def masks_kernel(  # type: ignore[no-untyped-def]
    keys, call, masks, count, N0, N1, N2, F0, F1, F2, F3, below, BLOCK: tl.constexpr
):
    """Whether elements of one client's mask are kept: 16 bits of a hash, compared with a level."""
    client, place = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = place.to(tl.int64)
    last, rest = place % N0, place // N0
    index = (last // 4) * F0 + (rest % N1) * F1 + (rest // N1 % N2) * F2 + (rest // N1 // N2) * F3
    bits = mix(tl.load(keys + client) + call + index)
    lane = (bits >> (16 * (last % 4))) & 65535
    signed = tl.where(lane >= 32768, lane - 65536, lane)
    tl.store(masks + client * count + place, signed < below, mask=place < count)


def draw_masks(keys: Tensor, call: int, shape: Sequence[int], factors: Sequence[int], below: int) -> Tensor:
    """Masks (k, *shape) of clients by their keys (k,), for the call of dropout whose key is `call`.

    `factors` multiply an element's index in every dimension, from the last on; it is kept if its 16 bits, as a signed number,
    are less than `below`.
    """
    keys = keys.contiguous()  # the kernel reads them one after another
    count, sizes = math.prod(shape), [*reversed(shape), 1, 1, 1][:DIMENSIONS]
    masks = torch.empty(len(keys), *shape, dtype=torch.bool, device=keys.device)
    block = 512
    masks_kernel[(len(keys), triton.cdiv(count, block))](
        keys, call, masks, count, *sizes[:3], *factors[:DIMENSIONS], below, BLOCK=block
    )
    return masks
