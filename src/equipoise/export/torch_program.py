"""Models as programs of torch.export (.pt2), which run without the code of their class."""

from __future__ import annotations

import io
import warnings
from typing import Any

import torch
from torch import nn

from equipoise.core.signature import Signature
from equipoise.export.modules import CalledByPosition, NotExported, first_reason, refuse_other_outputs


def model_program(model: nn.Module, signature: Signature) -> bytes:
    """A model as a .pt2 file, with a batch of any size; it takes its inputs one after the other, in the signature's order."""
    wrapped = CalledByPosition(model, signature).eval()
    batch: Any = torch.export.Dim.DYNAMIC
    example = tuple(spec.example(2) for spec in signature.inputs)
    sizes = [{0: batch} | {1 + k: batch for k, size in enumerate(spec.shape) if size < 0} for spec in signature.inputs]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about itself
        try:
            program = torch.export.export(wrapped, example, dynamic_shapes=(tuple(sizes),))
            content = io.BytesIO()
            torch.export.save(program, content)
        except Exception as failure:  # the exporter raises whatever it meets in the model's code
            raise NotExported("a torch program", wrapped, first_reason(failure)) from failure
    refuse_other_outputs("a torch program", wrapped, signature.inputs, program.module())
    return content.getvalue()
