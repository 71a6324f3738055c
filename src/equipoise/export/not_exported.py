"""Errors of exports."""

from __future__ import annotations

from torch import nn

from equipoise.errors import EquipoiseError
from equipoise.export.modules import CalledByPosition


class NotExported(EquipoiseError, ValueError):
    """A model that a format cannot hold; the message names the model, the format and the reason."""

    def __init__(self, kind: str, module: nn.Module, reason: str) -> None:
        self.kind, self.reason = kind, reason
        inner = module.model if isinstance(module, CalledByPosition) else module
        name = type(inner).__name__ if inner is not module or isinstance(module, CalledByPosition) else "its loss"
        super().__init__(
            f"{name} cannot be written as {kind}: {reason}. Use model.safetensors, which holds the parameters of any model, "
            "or change its forward pass: no branches or sizes that depend on values, no code outside torch."
        )


def first_reason(failure: BaseException) -> str:
    """The first line of an error, or of the one that caused it, that says something."""
    texts = []
    cause: BaseException | None = failure
    while cause is not None:
        texts += [line.strip() for line in str(cause).splitlines() if line.strip()]
        cause = cause.__cause__
    skipped = ("Failed to export the model", "This is step", "## ", "- ", "Please ", "Refer to", "If ", "To ")
    useful = [text for text in texts if not text.startswith(skipped)]
    chosen = (useful or texts or [type(failure).__name__])[0]
    return chosen.rstrip(".")[:300]
