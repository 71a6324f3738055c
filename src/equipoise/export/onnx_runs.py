"""Runs ONNX models that came from elsewhere: they may not read files, and what is no model is refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.errors import ConfigError, InvalidData

MOST_MEMORY = 4 << 30  # bytes of all models of a process together


class TookTooLong(InvalidData):
    """A model that was stopped."""


class OnnxModel:
    """An ONNX model on the CPU with one thread. `names` are its inputs; calling it takes arrays in that order.

    A model with parameters in other files is refused: its file could name any file of this machine.
    """

    def __init__(self, content: bytes, *, source: str) -> None:
        try:
            import onnxruntime
        except ImportError as failure:
            raise ConfigError('onnxruntime is not installed: pip install "equipoise[serve]".') from failure
        refuse_outside_files(content, source)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 4
        options.add_session_config_entry("session.use_env_allocators", "1")
        _limit_memory()
        try:
            self._session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        except Exception as failure:  # onnxruntime's errors have no common class
            raise InvalidData(f"{source} is no ONNX model that can be run: {_short(failure)}.") from failure
        self._source = source
        self.names = [each.name for each in self._session.get_inputs()]

    def __call__(self, arrays: Sequence[NDArray[Any]], *, seconds: float | None = None) -> list[NDArray[Any]]:
        """The outputs, in order; a model that takes longer than `seconds` is stopped."""
        from onnxruntime import RunOptions

        options, began = RunOptions(), time.monotonic()
        watch = threading.Timer(seconds or 0.0, setattr, (options, "terminate", True))
        if seconds is not None:
            watch.start()
        try:
            given = dict(zip(self.names, arrays, strict=True))
            found: list[Any] = self._session.run(None, given, options)
        except Exception as failure:  # onnxruntime's errors have no common class
            if seconds is not None and time.monotonic() - began >= seconds:
                raise TookTooLong(f"{self._source} took longer than {seconds:g} seconds, and was stopped.") from failure
            raise InvalidData(f"{self._source} does not take these inputs: {_short(failure)}.") from failure
        finally:
            watch.cancel()
        return [np.asarray(each) for each in found]


@cache
def _limit_memory() -> None:
    import onnxruntime as ort

    place = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(place, ort.OrtArenaCfg({"max_mem": MOST_MEMORY, "arena_extend_strategy": 1}))


def refuse_outside_files(content: bytes, source: str) -> None:
    """Refuse what is no ONNX model, and a model that reads its parameters from other files."""
    import onnx

    try:
        model = onnx.load_model_from_string(content)
    except Exception as failure:  # protobuf's error, whose class differs between versions
        raise InvalidData(f"{source} is no ONNX model: {_short(failure)}.") from failure
    if not model.graph.node and not model.graph.output:
        raise InvalidData(f"{source} is no ONNX model: it holds no graph.")
    graphs, tensors = [model.graph], []
    attributes = [attribute for function in model.functions for node in function.node for attribute in node.attribute]
    while graphs or attributes:
        if graphs:
            graph = graphs.pop()
            tensors += [
                *graph.initializer,
                *(part for each in graph.sparse_initializer for part in (each.values, each.indices)),
            ]
            attributes += [attribute for node in graph.node for attribute in node.attribute]
            continue
        attribute = attributes.pop()
        graphs += [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]
        tensors += [*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors]
    if any(tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data for tensor in tensors):
        raise InvalidData(f"{source} reads parameters from other files, which a model from elsewhere must not.")


def _short(failure: Exception) -> str:
    text = " ".join(str(failure).split())
    return (text or type(failure).__name__).rstrip(".")[:200]
