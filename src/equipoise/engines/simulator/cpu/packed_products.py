"""Products with matrices that no step changes, such as those of frozen layers: packed once, as a processor reads them.

Every product packs its factors anew otherwise. oneDNN takes a packed matrix; with one thread that is some per cent faster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.engines.simulator.cpu.step_recorder import Recording, Value

_aten = torch.ops.aten
_TURNED = {_aten.t.default, _aten.transpose.int}
_LEAST = 2**22  # multiplications: a smaller product does not gain
_MOST = 2**26  # numbers in all packed matrices: they are copies, and every process has its own


@dataclass(frozen=True)
class PackedProduct:
    """A product x · Mᵀ (+ bias) of a recording with a constant matrix M or its transpose."""

    matrix: Value
    turned: bool  # whether it is Mᵀ whose rows are packed
    rows: int  # of x
    x: Value
    bias: Value | None

    def packed(self, matrix: Tensor) -> Tensor:
        """The matrix as oneDNN wants it."""
        right = matrix.detach().t().contiguous() if self.turned else matrix.detach().contiguous()
        made: Tensor = torch.ops.mkldnn._reorder_linear_weight(right, self.rows)
        return made

    def call(self, place: int) -> str:
        """The product in TorchScript, with the packed matrix number `place`."""
        bias = "None" if self.bias is None else f"v{self.bias.number}"
        return f'torch.ops.mkldnn._linear_pointwise(v{self.x.number}, k[{place}], {bias}, "none", nothing, "")'


def packed_products(recording: Recording) -> dict[int, PackedProduct]:
    """The operations of a recording, by number, that are large products with a matrix that is never written to."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return {}
    written = {memory for _, memory in recording.writes}
    views: dict[Value, tuple[Value, bool]] = {}  # of a matrix: itself or its transpose
    for operation in recording.operations:
        if operation.target in _TURNED and len(recording.shapes[operation.results[0]]) == 2:
            if sum(operation.args[1:]) % 2 == 0 and operation.args[1:]:
                continue  # a dimension, exchanged with itself
            matrix, turned = views.get(operation.args[0], (operation.args[0], False))
            views[operation.results[0]] = matrix, not turned
    found, held = {}, 0
    for number, operation in enumerate(recording.operations):
        if operation.kwargs or operation.target not in (_aten.mm.default, _aten.addmm.default):
            continue
        *bias, x, right = operation.args
        matrix, turned = views.get(right, (right, False))
        constant = matrix in recording.constants and recording.storages[matrix] not in written
        if not constant or recording.constants[matrix].dtype != torch.float32 or x in recording.constants:
            continue
        if bias and len(recording.shapes[bias[0]]) != 1:
            continue
        rows, across = recording.shapes[x][0], recording.shapes[right]
        if rows * math.prod(across) >= _LEAST and held + math.prod(across) <= _MOST:
            held += math.prod(across)
            found[number] = PackedProduct(matrix, not turned, rows, x, bias[0] if bias else None)
    return found
