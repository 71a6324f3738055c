"""What a trained model says about rows of a table: probabilities of the classes, or numbers in the target's unit."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core.trees import leaves, select
from equipoise.data.tables.target_rule import TargetRule
from equipoise.errors import InvalidParameter

_PIECE = 1 << 16  # rows that are with the model at once


def predicted_columns(model: nn.Module, inputs: Any, target: TargetRule) -> dict[str, Any]:
    """By class the probabilities (N,) of all rows, or by the target's name the numbers (N,), in float64.

    `inputs` is a tensor (N, F), or a dict of tensors that the model takes by name. The model is not changed.
    """
    if not isinstance(model, nn.Module):
        raise InvalidParameter("model", "must be a torch.nn.Module", type(model).__name__, "Give result.model.")
    at = next((value for value in model.parameters() if value.is_floating_point()), torch.empty(0))

    def placed(value: Tensor) -> Tensor:
        return value.to(at.device, at.dtype) if value.is_floating_point() else value.to(at.device)

    rows, training, found = len(leaves(inputs)[0]), model.training, []
    model.eval()
    try:
        with torch.inference_mode():
            for first in range(0, rows, _PIECE):
                piece = select(inputs, slice(first, first + _PIECE))
                if isinstance(piece, dict):
                    found.append(model(**{name: placed(value) for name, value in piece.items()}))
                else:
                    found.append(model(placed(piece)))
    finally:
        model.train(training)
    whole, count = torch.cat(found).double().cpu(), len(target.classes)
    if count and whole.shape == (rows, count):
        return dict(zip(target.classes, whole.softmax(1).t().numpy(), strict=True))
    if not count and whole.shape in ((rows,), (rows, 1)):
        return {target.name: whole.reshape(rows).numpy()}
    wanted = f"logits of shape ({rows}, {count}), one for each class" if count else f"numbers of shape ({rows},)"
    fix = "Give the model that was trained with this schema, e.g. result.model."
    raise InvalidParameter("model", f"must give {wanted}", tuple(whole.shape), fix)


def table_like(frame: Any, columns: dict[str, Any]) -> Any:
    """Columns as a table of the library that `frame` is of, with the index of a pandas frame; else a pyarrow.Table."""
    import pyarrow as pa

    pandas, polars = sys.modules.get("pandas"), sys.modules.get("polars")
    if pandas is not None and isinstance(frame, pandas.DataFrame):
        return pandas.DataFrame(columns, index=frame.index)
    if polars is not None and isinstance(frame, polars.DataFrame):
        return polars.DataFrame(columns)
    return pa.table(columns)
