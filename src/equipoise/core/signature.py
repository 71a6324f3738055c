"""What a model takes and what it is judged by: names, shapes and types of inputs and targets, without any value of the data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from equipoise.core import trees
from equipoise.core.plain_text import made_of, parse_json
from equipoise.errors import FileGuard, InvalidData

if TYPE_CHECKING:
    from equipoise.data.clients import FederatedData

Form = Literal["tensor", "tuple", "dict"]
_KNOWN = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool)
DTYPES = {str(each).removeprefix("torch."): each for each in _KNOWN}


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of an example: its name, type and shape; −1 is a length that differs between batches.

    `scale` and `shift` turn raw integers, such as pixels, into what a model sees: x · scale + shift.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    scale: float | None = None
    shift: float = 0.0

    @property
    def features(self) -> int:
        """The number of values of an example; 0 if its length differs."""
        return 0 if -1 in self.shape else int(torch.Size(self.shape).numel())

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type as torch names it."""
        return DTYPES[self.dtype]

    @property
    def batch_shape(self) -> str:
        """The shape of a batch in words.

        >>> TensorSpec("x", "float32", (3, -1)).batch_shape
        '(examples, 3, any)'
        """
        return f"({', '.join(['examples', *('any' if size < 0 else str(size) for size in self.shape)])})"

    def takes(self, shape: Sequence[int]) -> bool:
        """Whether an array of this shape is a batch of such tensors.

        >>> TensorSpec("x", "float32", (3, -1)).takes((5, 3, 7)), TensorSpec("x", "float32", (3, -1)).takes((5, 3))
        (True, False)
        """
        pairs = zip(self.shape, shape[1:], strict=False)
        return len(shape) == 1 + len(self.shape) and all(size in (-1, found) for size, found in pairs)

    def example(self, rows: int, length: int = 8) -> Tensor:
        """A batch of zeros; `length` stands for lengths that differ."""
        sizes = [length if size < 0 else size for size in self.shape]
        return torch.zeros(rows, *sizes, dtype=self.torch_dtype)


@dataclass(frozen=True)
class Signature:
    """The inputs and targets of a model, in order, and how it is called: model(x), model(*x) or model(**x)."""

    form: Form
    inputs: tuple[TensorSpec, ...]
    targets: tuple[TensorSpec, ...]
    classes: int = 0

    @classmethod
    def of(cls, data: FederatedData, dtype: torch.dtype) -> Signature:
        """The signature of models on these data, whose floating numbers are of type `dtype`."""
        clients = data.train
        rows = clients.first_rows(256) if clients.has_sequences else slice(0, 1)
        x, wide = clients.inputs(rows, dtype), clients.inputs(rows, dtype, wider=8) if clients.has_sequences else None
        y, wide_y = clients.targets(rows, dtype), clients.targets(rows, dtype, wider=8) if clients.has_sequences else None
        scales = _by_leaf(clients.scale, x, None), _by_leaf(clients.shift, x, 0.0)
        return cls(
            "dict" if isinstance(x, dict) else "tuple" if isinstance(x, tuple) else "tensor",
            _specs("x", x, wide, *scales), _specs("y", y, wide_y, {}, {}), data.classes,
        )  # fmt: skip

    @property
    def plain(self) -> bool:
        """Whether an example is one tensor of a fixed shape, and its target one value: what a row of a table can hold."""
        one = len(self.inputs) == 1 and len(self.targets) == 1
        return one and self.inputs[0].features > 0 and self.targets[0].shape == ()

    def tree(self, tensors: Mapping[str, Any]) -> Any:
        """Named inputs as a model takes them."""
        found = [tensors[spec.name] for spec in self.inputs]
        if self.form == "dict":
            return {spec.name: value for spec, value in zip(self.inputs, found, strict=True)}
        return tuple(found) if self.form == "tuple" else found[0]

    def named(self, x: Any) -> dict[str, Any]:
        """The inputs of a model by name."""
        return {spec.name: value for spec, value in zip(self.inputs, trees.leaves(x), strict=True)}

    def example(self, rows: int = 2) -> Any:
        """Inputs of zeros, as a model takes them."""
        return self.tree({spec.name: spec.example(rows) for spec in self.inputs})

    def to_table(self) -> dict[str, Any]:
        """The signature as JSON."""
        table: dict[str, Any] = parse_json(json.dumps(asdict(self)))
        return table

    @classmethod
    def of_table(cls, table: Any) -> Signature:
        """The signature that `to_table` wrote; anything else is refused."""
        with FileGuard("The signature of a model", InvalidData):
            read: Signature = made_of(cls, table)
            for spec in (*read.inputs, *read.targets):
                if spec.dtype not in DTYPES or any(size < -1 for size in spec.shape):
                    raise ValueError(f"it is damaged at {spec.name!r}: {spec.dtype} {spec.shape}")
            return read


def _by_leaf(values: Any, tree: Any, default: Any) -> dict[str, Any]:
    """A value per leaf of a tree by the name of the leaf."""
    if isinstance(tree, dict):
        return {name: values.get(name, default) if isinstance(values, dict) else default for name in tree}
    if isinstance(tree, tuple):
        return {f"x{place}": value for place, value in enumerate(values)} if isinstance(values, tuple) else {}
    return {"x": values}


def _specs(name: str, tree: Any, wide: Any, scales: dict[str, Any], shifts: dict[str, Any]) -> tuple[TensorSpec, ...]:
    """The tensors of a batch; a place whose size is another with more padding, in `wide`, differs between batches."""
    if isinstance(tree, dict):
        names = list(tree)
    else:
        names = [f"{name}{place}" for place in range(len(tree))] if isinstance(tree, tuple) else [name]
    found = []
    padded = trees.leaves(tree if wide is None else wide)
    for each, leaf, other in zip(names, trees.leaves(tree), padded, strict=True):
        shape = tuple(-1 if here != there else here for here, there in zip(leaf.shape[1:], other.shape[1:], strict=True))
        scale = scales.get(each)
        shift = shifts.get(each, 0.0) if scale is not None else 0.0
        units = (float(scale), float(shift)) if scale is not None else (None, 0.0)
        found.append(TensorSpec(each, str(leaf.dtype).removeprefix("torch."), shape, *units))
    return tuple(found)
