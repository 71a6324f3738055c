"""Errors of exports."""

from __future__ import annotations

from torch import nn

from equipoise.errors import EquipoiseError
from equipoise.export.modules import CalledByPosition


class NotExported(EquipoiseError, ValueError):
    """A model that a format cannot hold; the message names the model, the format and the reason."""

    def __init__(self, kind: str, module: nn.Module, reason: str) -> None:
        self.kind, self.reason = kind, reason
        name = type(module.model).__name__ if isinstance(module, CalledByPosition) else "The loss or error of the model"
        super().__init__(
            f"{name} cannot be written as {kind}: {reason}. Use model.safetensors, which holds the parameters of any model, "
            "or change its forward pass: no branches or sizes that depend on values, no code outside torch."
        )


def first_reason(failure: BaseException) -> str:
    """The first line of what caused an error; exporters wrap it in advice about themselves."""
    cause = failure
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return (lines[0] if lines else type(cause).__name__).rstrip(".")[:300]
