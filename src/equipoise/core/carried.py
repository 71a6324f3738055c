"""Carried values: float buffers that a forward pass in training mode changes, such as a BatchNorm's running statistics.

They are a second vector (C,) beside the parameters (D,). Clients start from the server's values, and their own values after
local work are averaged under the aggregation weights; no solver, clip bound, norm, noise or server optimiser touches them. A
mean and its variance are averaged as mean and second moment (variance + mean²), so that variances pool as those of mixed data
do. A model as engines take it is one vector: parameters, then carried values, (D + C,).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from equipoise.errors import InvalidParameter

_NormBase = nn.modules.batchnorm._NormBase


@dataclass(frozen=True, eq=False)
class CarriedLayout:
    """Where each carried buffer of a module lies in the vector (C,); and buffers that local work changes and nobody averages.

    Law: `from_moments(to_moments(v))` is v up to rounding, for variances ≥ 0.
    """

    names: tuple[str, ...] = ()
    shapes: tuple[torch.Size, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    moments: tuple[tuple[slice, slice], ...] = ()  # where a mean is, and where its variance is
    counters: dict[str, Tensor] = field(default_factory=dict)  # integer buffers: the server's values, which stay

    @classmethod
    def of(cls, module: nn.Module, changed: Iterable[str] = ()) -> CarriedLayout:
        """The layout of a module in training mode: its running statistics, and the buffers that are known to be changed.

        Normalisation layers are found by their type; a layer in evaluation mode keeps its statistics, and is not among them.
        """
        buffers, pairs = dict(module.named_buffers()), _running_statistics(module)
        counting = [f"{name.rpartition('.')[0]}.num_batches_tracked".lstrip(".") for name, _ in pairs]
        wanted = {*(name for pair in pairs for name in pair), *changed}
        names = tuple(name for name in buffers if name in wanted and buffers[name].is_floating_point())
        starts, place = {}, 0
        for name in names:
            starts[name] = slice(place, place + buffers[name].numel())
            place += buffers[name].numel()
        moments = tuple((starts[mean], starts[variance]) for mean, variance in pairs)
        still = [name for name in buffers if (name in wanted or name in counting) and name not in names]
        counters = {name: buffers[name].detach().clone() for name in still}
        shapes, dtypes = tuple(buffers[name].shape for name in names), tuple(buffers[name].dtype for name in names)
        return cls(names, shapes, dtypes, moments, counters)

    @property
    def size(self) -> int:
        """C, the number of carried values."""
        return sum(shape.numel() for shape in self.shapes)

    def unflatten(self, values: Tensor) -> dict[str, Tensor]:
        """Named views into a (…, C) tensor; copies where a buffer is of another type."""
        parts = torch.split_with_sizes(values, [shape.numel() for shape in self.shapes], dim=-1)
        return {
            name: part.reshape((*values.shape[:-1], *shape)).to(dtype)
            for name, shape, dtype, part in zip(self.names, self.shapes, self.dtypes, parts, strict=True)
        }

    def flatten(self, buffers: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Named buffers with any common leading shape (…,) as one tensor (…, C)."""
        parts = [
            buffers[name].detach().to(dtype).flatten(buffers[name].dim() - len(shape)) if len(shape) else
            buffers[name].detach().to(dtype).unsqueeze(-1)
            for name, shape in zip(self.names, self.shapes, strict=True)
        ]  # fmt: skip
        return torch.cat(parts, -1)

    def read(self, module: nn.Module, dtype: torch.dtype) -> Tensor:
        """A copy of the module's carried buffers as one vector (C,)."""
        return self.flatten(dict(module.named_buffers()), dtype)

    def write(self, module: nn.Module, values: Tensor) -> None:
        """Copy the vector (C,) into the module's buffers; counters go back to the server's values."""
        if self.names or self.counters:
            self.write_named(module, self.unflatten(values) | self.counters)

    def write_named(self, module: nn.Module, named: Mapping[str, Tensor]) -> None:
        """Copy values into the module's buffers of these names."""
        buffers = dict(module.named_buffers())
        with torch.no_grad():
            for name, value in named.items():
                buffers[name].copy_(value)

    def sent(self, values: Tensor) -> Tensor:
        """What clients with these carried values (…, C) send for the average, on the CPU: all infinite if one is not finite."""
        moments = self.to_moments(values).cpu()
        return torch.where(torch.isfinite(moments).all(-1, keepdim=True), moments, torch.inf)

    def to_moments(self, values: Tensor) -> Tensor:
        """Values (…, C) as they are averaged, in float64: a second moment in place of each variance."""
        moments = values.to(torch.float64, copy=True)
        for mean, variance in self.moments:
            moments[..., variance] += moments[..., mean].square()
        return moments

    def from_moments(self, moments: Tensor) -> Tensor:
        """The values (…, C) whose averaged form is given; a variance is never below 0.

        >>> layout = CarriedLayout.of(nn.BatchNorm1d(1))
        >>> two_clients = torch.tensor([[0.0, 1.0], [2.0, 1.0]])  # means 0 and 2, variances 1 and 1
        >>> layout.from_moments(layout.to_moments(two_clients).mean(0))
        tensor([1., 2.], dtype=torch.float64)
        """
        values = moments.clone()
        for mean, variance in self.moments:
            values[..., variance] = (values[..., variance] - values[..., mean].square()).clamp(min=0)
        return values


def _running_statistics(module: nn.Module) -> list[tuple[str, str]]:
    """The names of running mean and variance of each normalisation layer that is in training mode, each buffer once."""
    known = dict(module.named_buffers())
    pairs = []
    for name, layer in module.named_modules():
        if isinstance(layer, _NormBase) and layer.training and isinstance(layer.running_mean, Tensor):
            mean, variance = (f"{name}.{part}".lstrip(".") for part in ("running_mean", "running_var"))
            if mean in known and variance in known:
                pairs.append((mean, variance))
    return pairs


def join_model(params: Tensor, carried: Tensor | None) -> Tensor:
    """A model as engines take it: parameters (…, D), then carried values (…, C), if there are any."""
    return params if carried is None else torch.cat([params, carried.to(params)], -1)


def split_model(model: Tensor, dimension: int, carried: int) -> tuple[Tensor, Tensor]:
    """The parameters (…, D) and the carried values (…, C) of a model as engines take it."""
    if model.shape[-1] != dimension + carried:
        rule = f"must hold {dimension} parameters" + (f" and {carried} carried values after them" if carried else "")
        raise InvalidParameter("params", rule, f"of {model.shape[-1]} numbers", "Use core.carried.join_model.")
    return model[..., :dimension], model[..., dimension:]


def move_model(model: Tensor, update: Tensor) -> Tensor:
    """A model (D + C,) with an update (D,) added to its parameters; its carried values stay."""
    return torch.cat([model[: len(update)] + update, model[len(update) :]])


class CarriedMean:
    """The mean of clients' carried values under their weights, client by client or part by part."""

    def __init__(self) -> None:
        self.total: Tensor | None = None  # (C,) float64
        self.mass = 0.0

    def add(self, moments: Tensor, weight: float) -> None:
        """Count moments (C,) with a weight; those of a client that took no step are NaN, and do not count."""
        if weight > 0 and bool(torch.isfinite(moments).all()):
            self.total = weight * moments if self.total is None else self.total + weight * moments
            self.mass += weight

    def value(self) -> Tensor | None:
        """The mean (C,) of what was counted; None if nothing was."""
        return None if self.total is None else self.total / self.mass


def count_carried(moments: Tensor | None, weights: Sequence[float]) -> CarriedMean:
    """Clients' moments (K, C), counted under weights."""
    mean = CarriedMean()
    for row, weight in zip(() if moments is None else moments, weights, strict=moments is not None):
        mean.add(row, float(weight))
    return mean


def mean_carried(moments: Tensor | None, weights: Sequence[float]) -> Tensor | None:
    """The mean (C,) of clients' moments (K, C) under weights; None if there are none, or none that count."""
    return count_carried(moments, weights).value()
