"""What a GPU offers: how exactly it multiplies, in full float32 or one of its fast modes, and kernels written in Triton."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module

import torch

PRECISIONS = ("float32", "tf32", "bf16")
_LONGEST = 160  # characters of an error message that is shown inside another text


@dataclass(frozen=True)
class Precision:
    """float32 is exact to rounding; tf32 keeps 10 bits of each factor in matrix products, bf16 7 bits in the forward pass too.

    Parameters, gradients and sums stay float32 in all of them.
    """

    name: str = "float32"

    @property
    def reduced(self) -> bool:
        """Whether products may use the fast modes."""
        return self.name != "float32"

    @contextmanager
    def products(self) -> Iterator[None]:
        """Matrix products and convolutions inside run with this precision."""
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic
        matmul.allow_tf32 = cudnn.allow_tf32 = self.reduced
        cudnn.deterministic = True  # the same bits on every repeat
        try:
            yield
        finally:
            matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic = before

    @contextmanager
    def forward(self, device: torch.device) -> Iterator[None]:
        """A model's forward pass inside runs with this precision."""
        with self.products(), torch.autocast(device.type, torch.bfloat16) if self.name == "bf16" else nullcontext():
            yield


FULL = Precision()


def why_no_kernels(module: str) -> str | None:
    """Why the Triton kernels of a module of `cuda.kernels` cannot be used here; None if they can."""
    try:
        import_module(f"equipoise.engines.simulator.cuda.kernels.{module}")
    except Exception as failure:  # Triton may be absent, or another version than they are written for
        if isinstance(failure, ImportError) and failure.name == "triton":
            return "Triton is not installed"
        return f"its Triton kernels cannot be imported ({first_line(failure)})"
    return None


def first_line(failure: BaseException) -> str:
    """What an error says, in short: its first line, and of a long line the whole words of its beginning.

    >>> first_line(ValueError("no such file")), first_line(ValueError("x" * 155 + " long words"))[-8:]
    ('no such file', 'xxxxxx …')
    """
    line = (str(failure).strip().splitlines() or [type(failure).__name__])[0]
    return line if len(line) <= _LONGEST else line[:_LONGEST].rpartition(" ")[0] + " …"
