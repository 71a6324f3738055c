"""Parameters as one flat vector (D,): the currency between server, engines and aggregators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equipoise.errors import InvalidParameter, require


@dataclass(frozen=True)
class ParameterLayout:
    """Where each trainable parameter of a module lies in the flat vector."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, module: nn.Module) -> ParameterLayout:
        """The layout of a module's trainable parameters (those that require gradients)."""
        trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if any(isinstance(p, nn.UninitializedParameter) for p in trainable.values()):
            fix = "Run one batch through its lazy layers first."
            raise InvalidParameter("model", "must have parameters of known shape", type(module).__name__, fix)
        require(len(trainable) > 0, "model", "must have trainable parameters", type(module).__name__)
        if complexes := [name for name, p in trainable.items() if p.is_complex()]:
            fix = "Keep pairs of real numbers, and call torch.view_as_complex on them in forward."
            raise InvalidParameter("model", "must have real parameters", f"complex numbers in {complexes[0]!r}", fix)
        dtypes = {p.dtype for p in trainable.values()}
        good = len(dtypes) == 1 and next(iter(dtypes)).is_floating_point
        rule = "must keep its trainable parameters in one floating type"
        require(good, "model", rule, sorted(map(str, dtypes)), "Convert it first, e.g. model.float().")
        return cls(tuple(trainable), tuple(p.shape for p in trainable.values()), dtypes.pop())

    @property
    def sizes(self) -> list[int]:
        """The number of values of each parameter."""
        return [shape.numel() for shape in self.shapes]

    @property
    def dimension(self) -> int:
        """D, the number of trainable parameters."""
        return sum(self.sizes)

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Named tensors with any common leading shape (…,) to one (…, D) tensor."""
        parts = [
            tensors[n].flatten(tensors[n].dim() - len(s)) if len(s) else tensors[n].unsqueeze(-1)
            for n, s in zip(self.names, self.shapes, strict=True)
        ]
        return torch.cat(parts, dim=-1)

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """Named views into a (…, D) tensor; writing to a view writes to `flat`."""
        parts = torch.split_with_sizes(flat, self.sizes, dim=-1)
        return {
            name: part.view((*flat.shape[:-1], *shape))
            for name, shape, part in zip(self.names, self.shapes, parts, strict=True)
        }

    def read(self, module: nn.Module) -> Tensor:
        """A copy of the module's trainable parameters as one vector (D,)."""
        named = dict(module.named_parameters())
        return self.flatten({n: named[n].detach() for n in self.names}).clone()

    def write(self, module: nn.Module, flat: Tensor) -> None:
        """Copy the vector (D,) into the module's parameters."""
        named = dict(module.named_parameters())
        with torch.no_grad():
            for name, value in self.unflatten(flat).items():
                named[name].copy_(value)
