"""Answers small questions to a model: inputs in, outputs out, by the model's ONNX file."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.core.signature import Signature, TensorSpec
from equipoise.errors import InvalidData
from equipoise.export.onnx_runs import OnnxModel

MOST_ROWS = 256
SECONDS = 10.0


def input_arrays(signature: Signature, given: Any) -> list[NDArray[Any]]:
    """The inputs of a request as arrays: a list of examples, or for a model with several inputs a list per name."""
    named = given if isinstance(given, dict) else {signature.inputs[0].name: given}
    wanted = [spec.name for spec in signature.inputs]
    if set(named) != set(wanted):
        raise InvalidData(
            f"inputs must be a list of examples for each of {', '.join(wanted)}; found {', '.join(map(str, named))[:200]}."
        )
    arrays = [_array(spec, named[spec.name]) for spec in signature.inputs]
    if len({len(array) for array in arrays}) > 1:
        raise InvalidData("inputs must have the same number of examples each.")
    return arrays


def _array(spec: TensorSpec, values: Any) -> NDArray[Any]:
    if not isinstance(values, list) or not 1 <= len(values) <= MOST_ROWS:
        raise InvalidData(f"inputs ({spec.name}) must be a list of 1 to {MOST_ROWS} examples.")
    shape = ", ".join("any" if size < 0 else str(size) for size in spec.shape)
    try:
        array = np.array(values)
        if array.dtype.kind not in "iufb":
            raise ValueError("not numbers")
    except ValueError:
        raise InvalidData(f"inputs ({spec.name}) must be numbers, each example of shape ({shape}).") from None
    if not spec.takes(array.shape):
        raise InvalidData(f"inputs ({spec.name}) must be of shape {spec.batch_shape}, but are {array.shape}.")
    if spec.scale is not None and array.dtype.kind in "iu":  # raw values, such as pixels
        array = array * spec.scale + spec.shift
    floating = spec.torch_dtype.is_floating_point
    if not floating and spec.dtype != "bool" and array.dtype.kind == "f":
        raise InvalidData(f"inputs ({spec.name}) must be integers.")
    with np.errstate(over="ignore"):
        ready = array.astype({"bfloat16": "float32"}.get(spec.dtype, spec.dtype))
    if floating and not np.isfinite(ready).all():
        raise InvalidData(f"inputs ({spec.name}) hold NaN or infinity.")
    return ready


def predict(model: OnnxModel, arrays: list[NDArray[Any]]) -> list[Any]:
    """The outputs as lists; numbers that are not finite are null."""
    outputs = model(arrays, seconds=SECONDS)
    return [_plain(output) for output in outputs]


def _plain(array: NDArray[Any]) -> Any:
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return np.where(np.isfinite(array), array, np.array(None, dtype=object)).tolist()
    return array.tolist()
