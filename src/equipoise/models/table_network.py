"""A network for tables: embeddings of codes beside numbers, through fully connected layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from equipoise.core.rng import torch_generator
from equipoise.data.tables import MISSING, Schema
from equipoise.errors import InvalidParameter, require, require_number
from equipoise.models.layers import checked_seed, positive, seeded
from equipoise.models.linear import squared_error


def embedding_size(codes: int) -> int:
    """The width of the embedding of a column: 1.6 · codes^0.56, at most 50 (the rule of the library fastai).

    >>> embedding_size(44)
    13
    """
    width: float = 1.6 * codes**0.56
    return min(50, round(width))


class Tabular(nn.Module):
    """Fully connected layers with ReLU over the numbers of a table and embeddings of its codes; `hidden=()` is linear.

    It fits the inputs x that a `Schema` makes, called as model(x): numbers (B, F), or a dict of "numbers" and of "codes"
    (B, C). model(numbers=…, codes=…) is the same. If the target is a class, the outputs are logits (B, classes), loss and error
    are cross-entropy and misclassification. If it is a number, the outputs z (B,) are in the target's own unit; the loss is
    ((z − y) / s)² with the deviation s of the target among training clients, so that a learning rate suits every unit, and the
    error is (z − y)².

    Initial parameters depend on `seed` alone: torch's default laws, but embeddings of "other" and "missing" start at zero, so
    that a category that training did not have is neutral. A code outside its column makes the outputs of its row NaN.

    `schema` is the schema of the table, e.g. `data.schema`. `hidden` are the widths of the hidden layers, and `dropout` is
    the share of their outputs that training sets to zero.

    Source: Guo, Berkhahn 2016 (entity embeddings of categorical variables).

    >>> import equipoise as eq
    >>> frame = {"who": ["a", "b"], "age": [30, 50], "ill": ["no", "yes"]}
    >>> schema = eq.data.Schema.fit(frame, target="ill", client="who")
    >>> Tabular(schema, hidden=(8,))(schema.transform(frame)).shape
    torch.Size([2, 2])
    """

    largest: Tensor

    def __init__(self, schema: Schema, *, hidden: Sequence[int] = (64,), dropout: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        if not isinstance(schema, Schema):
            fix = "Give data.schema, of data made by data.from_frame, data.csv or data.parquet."
            raise InvalidParameter("schema", "must be a data.Schema", type(schema).__name__, fix)
        require(isinstance(hidden, Sequence), "hidden", "must be the widths of the hidden layers, such as (64,)", hidden)
        require_number("dropout", dropout, "[0, 1)")
        generator = torch_generator(checked_seed(seed), "Tabular parameters")
        self.target, self.features = schema.target, len(schema.feature_names)
        sizes = list(schema.embedded.values())
        self.register_buffer("largest", torch.tensor(sizes, dtype=torch.int64) - 1, persistent=False)
        self.embeddings = nn.ModuleList(_seeded_embedding(size, generator) for size in sizes)
        widths = [self.features + sum(map(embedding_size, sizes)), *(positive("hidden", width) for width in hidden)]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [seeded(nn.Linear(inputs, outputs, device="meta"), generator), nn.ReLU()]
            layers += [nn.Dropout(dropout)] if dropout else []
        outputs = len(self.target.classes) or 1
        self.layers = nn.Sequential(*layers, seeded(nn.Linear(widths[-1], outputs, device="meta"), generator))

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """The loss for a number; None for classes, which stands for cross-entropy."""
        return None if self.target.classes else self._scaled_error

    @property
    def error(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """The error for a number; None for classes, which stands for misclassification."""
        return None if self.target.classes else squared_error

    def _scaled_error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return squared_error(outputs / self.target.deviation, targets / self.target.deviation)

    def forward(self, numbers: Tensor | Mapping[str, Tensor] | None = None, codes: Tensor | None = None) -> Tensor:
        """Logits (B, classes), or numbers (B,), of numbers (B, F) and codes (B, C), or of a dict of both."""
        if isinstance(numbers, Mapping):
            given: Mapping[str, Tensor] = numbers
            if codes is not None or given.keys() - {"numbers", "codes"}:
                fix = "Make it by schema.transform(frame), and give nothing beside it."
                raise InvalidParameter("inputs", 'must be one dict of "numbers" and "codes"', list(given), fix)
            numbers, codes = given.get("numbers"), given.get("codes")
        self._check("numbers", numbers, self.features, floating=True)
        self._check("codes", codes, len(self.embeddings), floating=False)
        parts = [] if numbers is None else [numbers]
        strange = None
        if codes is not None:
            inside = torch.minimum(codes.clamp(min=0), self.largest)
            # Left alone, such a code would read another client's table under vmap, and end the process on a GPU.
            strange = torch.where((codes != inside).any(1, keepdim=True), torch.nan, 0.0)
            parts += [embedding(inside[:, place]) for place, embedding in enumerate(self.embeddings)]
        outputs: Tensor = self.layers(torch.cat(parts, 1))
        outputs = outputs if strange is None else outputs + strange.to(outputs.dtype)
        return outputs if self.target.classes else outputs.squeeze(1) * self.target.deviation + self.target.mean

    def _check(self, name: str, values: Tensor | None, width: int, *, floating: bool) -> None:
        if values is None and not width:
            return
        good = values is not None and values.dim() == 2 and values.shape[1] == width and values.is_floating_point() == floating
        if not good:
            kind = "floating numbers" if floating else "integers"
            raise InvalidParameter(
                name, f"must be {kind} of shape (B, {width}), as the schema makes them",
                "missing" if values is None else (tuple(values.shape), values.dtype),
                "Make inputs by schema.transform(frame), and the model by models.Tabular(data.schema).",
            )  # fmt: skip


def _seeded_embedding(codes: int, generator: torch.Generator) -> nn.Embedding:
    embedding = nn.Embedding(codes, embedding_size(codes), device="meta").to_empty(device="cpu")
    nn.init.normal_(embedding.weight, generator=generator)
    with torch.no_grad():
        embedding.weight[: MISSING + 1] = 0
    return embedding
