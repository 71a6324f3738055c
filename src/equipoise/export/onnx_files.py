"""Models as ONNX, with a batch of any size, checked against the model that was trained."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from equipoise.core import trees
from equipoise.core.signature import Signature, TensorSpec
from equipoise.core.task import Task
from equipoise.errors import ConfigError
from equipoise.export.modules import CalledByPosition, NotExported, ScoredByPosition, first_reason, refuse_other_outputs

OPSET = 20
MODEL, SCORE = "model.onnx", "score.onnx"


def why_no_onnx() -> str | None:
    """Why models cannot be written as ONNX here; None if they can."""
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    return f'{" and ".join(missing)} not installed: pip install "equipoise[serve]"' if missing else None


def model_onnx(model: nn.Module, signature: Signature, *, like: bytes | None = None) -> bytes:
    """A model as ONNX: inputs by their names in the signature, outputs "output", or "output0", … if there are several.

    `like` is the file of the same model with other parameters, which saves the work of tracing it again.
    """
    wrapped = CalledByPosition(model, signature).eval()
    return _exported(wrapped, signature.inputs, None, like)


def score_onnx(task: Task, model: nn.Module, signature: Signature, *, like: bytes | None = None) -> bytes:
    """Loss and error per example as ONNX: inputs, then targets "y", give "loss" (B,) and "error" (B,)."""
    wrapped = ScoredByPosition(task, model, signature).eval()
    return _exported(wrapped, (*signature.inputs, *signature.targets), ("loss", "error"), like)


def _exported(module: nn.Module, specs: Sequence[TensorSpec], outputs: tuple[str, ...] | None, like: bytes | None) -> bytes:
    if like is not None and find_spec("onnxruntime") is not None:  # else nobody would notice a parameter left behind
        with suppress(NotExported):
            return _with_parameters(like, module, specs)
    if (why := why_no_onnx()) is not None:
        raise ConfigError(f"ONNX cannot be written: {why}.")
    example = tuple(spec.example(2) for spec in specs)
    batch: Any = torch.export.Dim.DYNAMIC
    lengths = [{0: batch} | {1 + k: batch for k, size in enumerate(spec.shape) if size < 0} for spec in specs]
    try:
        with torch.no_grad(), _quiet():
            found = trees.leaves(module(*(each.clone() for each in example)))
            named = list(outputs or ([f"output{k}" for k in range(len(found))] if len(found) > 1 else ["output"]))
            program: Any = torch.onnx.export(
                module, example, dynamo=True, dynamic_shapes=(tuple(lengths),), input_names=[spec.name for spec in specs],
                output_names=named, opset_version=OPSET, verbose=False, optimize=False,
            )  # fmt: skip
            content = io.BytesIO()
            program.save(content)
    except ConfigError:
        raise
    except Exception as failure:  # the exporter raises whatever it meets in the model's code
        raise NotExported("ONNX", module, first_reason(failure)) from failure
    written = _with_free_shapes(content.getvalue())
    _compare(module, written, specs)
    return written


def _with_parameters(like: bytes, module: nn.Module, specs: Sequence[TensorSpec]) -> bytes:
    """The file of a model with the parameters of another; it must give that model's outputs."""
    import onnx
    from onnx import numpy_helper

    model, own = onnx.load_model_from_string(like), module.state_dict()
    for tensor in model.graph.initializer:
        if tensor.name in own:
            tensor.CopyFrom(numpy_helper.from_array(own[tensor.name].detach().cpu().numpy(), tensor.name))
    written: bytes = model.SerializeToString()
    _compare(module, written, specs)
    return written


def _with_free_shapes(content: bytes) -> bytes:
    """The file without shapes of inner values and outputs, which the exporter sometimes gets wrong (a loss per example)."""
    import onnx

    model = onnx.load_model_from_string(content)
    del model.graph.value_info[:]
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    written: bytes = model.SerializeToString()
    return written


def _compare(module: nn.Module, content: bytes, specs: Sequence[TensorSpec]) -> None:
    """Refuse a file whose outputs on random inputs are not those of the model; without onnxruntime nobody knows."""
    if find_spec("onnxruntime") is None:
        return
    from equipoise.export.onnx_runs import OnnxModel

    running = OnnxModel(content, source="the exported model")
    refuse_other_outputs("ONNX", module, specs, lambda *inputs: (*map(torch.from_numpy, running([x.numpy() for x in inputs])),))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's remarks, which are about libraries that nobody asked for."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir", "torch._dynamo")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
