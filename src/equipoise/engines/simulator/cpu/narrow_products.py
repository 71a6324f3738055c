"""Products of matrices with few columns, such as those of low-rank adapters: the transpose is multiplied instead.

MKL takes up to five times as long for a large product with fewer than 16 columns as for its transpose.
"""

from __future__ import annotations

import torch

from equipoise.engines.simulator.cpu.step_recorder import Operation, Recording

_aten = torch.ops.aten
_FEW = 16  # columns
_LEAST = 2**15  # numbers of the left factor: a smaller one does not gain


def narrow_products(recording: Recording) -> set[int]:
    """The operations of a recording, by number, that are such products."""
    return {
        number
        for number, operation in enumerate(recording.operations)
        if operation.target is _aten.mm.default and is_narrow(recording, operation, recording.shapes[operation.results[0]][1])
    }


def is_narrow(recording: Recording, product: Operation, columns: int) -> bool:
    """Whether a product is large, but its result lies in memory in rows of few numbers."""
    rows, inner = recording.shapes[product.args[0]]
    across = recording.shapes[product.args[1]][1]
    return columns < _FEW and rows * across // max(1, columns) * inner >= _LEAST


def turned_call(operation: Operation) -> str:
    """The product in TorchScript; its result lies in memory as usual."""
    left, right = (f"torch.ops.aten.t(v{value.number})" for value in operation.args[:2])
    return f"torch.ops.aten.contiguous(torch.ops.aten.t(torch.ops.aten.mm({right}, {left})))"
