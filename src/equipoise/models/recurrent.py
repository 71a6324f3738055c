"""Recurrent networks for text, written out in tensor operations.

The fused kernels behind torch.nn.GRU and torch.nn.LSTM cannot be vectorised over clients, so the cells are spelled out here,
in torch's parameterisation: the same names, gate order and two bias vectors, so that their state dicts can be exchanged. Time
comes first inside, all input projections of a layer are one product before the loop over time, and the loop walks over
`unbind`, whose backward pass is a single stack (indexing step by step would add up T full-size gradients).

A token outside the vocabulary cannot raise an error in a vectorised pass, nor on a GPU. It makes the logits of its row NaN in
every kind of pass, so that the loss is not finite and training stops with the client's name.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise.core import fused_gru
from equipoise.core.rng import torch_generator
from equipoise.errors import InvalidParameter, require
from equipoise.models.layers import checked_seed, positive, seeded, uniform

States = list[Tensor] | Tensor  # h_1, …, h_T, each (B, H)
Scan = Callable[[Tensor, Tensor, Tensor, Tensor | None], States]


def gru_scan(projected: Tensor, weight: Tensor, bias: Tensor, skip: Tensor | None = None) -> States:
    """The hidden states h_1, …, h_T, each (B, H), of a gated recurrent unit (Cho et al. 2014) started at h_0 = 0.

    r = σ(x_r + U_r h + c_r),  z = σ(x_z + U_z h + c_z),  n = tanh(x_n + r ∘ (U_n h + c_n)),  h ← (1 − z) ∘ n + z ∘ h,

    where (x_r, x_z, x_n) is one step of `projected` (T, B, 3H), U is `weight` (3H, H) and c is `bias` (3H,). Where `skip`
    (T, B, 1) is true, the state stays as it was.
    """
    if skip is None and fused_gru.is_worth_it(projected):
        return fused_gru.gru_states(projected, weight, bias)
    size = weight.shape[1]
    gates, candidates = torch.split(projected, [2 * size, size], dim=-1)
    gate_bias, candidate_bias = torch.split(bias, [2 * size, size])
    gates = gates + gate_bias  # once for all steps
    recurrent = weight.t()  # (H, 3H)
    hidden = projected.new_zeros(projected.shape[1], size)
    states = []
    for gate, candidate, skipped in zip(gates.unbind(), candidates.unbind(), _skips(skip), strict=False):
        from_gates, from_candidate = torch.split(hidden @ recurrent, [2 * size, size], dim=1)
        reset, update = torch.sigmoid(gate + from_gates).chunk(2, dim=1)
        new = torch.tanh(candidate + reset * (from_candidate + candidate_bias))
        hidden = _where_not(skipped, torch.lerp(new, hidden, update), hidden)
        states.append(hidden)
    return states


def lstm_scan(projected: Tensor, weight: Tensor, bias: Tensor, skip: Tensor | None = None) -> list[Tensor]:
    """The hidden states h_1, …, h_T, each (B, H), of a long short-term memory (Hochreiter and Schmidhuber 1997).

    (i, f, g, o) = (σ, σ, tanh, σ)(x + U h + c),  s ← f ∘ s + i ∘ g,  h ← o ∘ tanh(s),  with h_0 = s_0 = 0,

    where x is one step of `projected` (T, B, 4H), U is `weight` (4H, H) and c is `bias` (4H,). Where `skip` (T, B, 1) is true,
    both states stay as they were.
    """
    recurrent = weight.t()  # (H, 4H)
    hidden = memory = projected.new_zeros(projected.shape[1], weight.shape[1])
    states = []
    for gates, skipped in zip((projected + bias).unbind(), _skips(skip), strict=False):
        enter, forget, new, leave = (gates + hidden @ recurrent).chunk(4, dim=1)
        changed = torch.sigmoid(forget) * memory + torch.sigmoid(enter) * torch.tanh(new)
        hidden = _where_not(skipped, torch.sigmoid(leave) * torch.tanh(changed), hidden)
        memory = _where_not(skipped, changed, memory)
        states.append(hidden)
    return states


class _Cell(NamedTuple):
    """A kind of recurrent cell: how it goes through time, and the number of its gates."""

    scan: Scan
    gates: int


_GRU = _Cell(gru_scan, 3)
_LSTM = _Cell(lstm_scan, 4)


class _Recurrent(nn.Module):
    """Stacked recurrent layers over vectors (T, B, E), or tokens (T, B) taken as one-hot; gives the last state of the top one.

    Parameters are named, shaped and initialised as in torch.nn.GRU and torch.nn.LSTM: U(−1/√H, 1/√H) throughout.
    """

    def __init__(self, cell: _Cell, inputs: int, hidden: int, layers: int, generator: torch.Generator) -> None:
        super().__init__()
        self.cell, self.inputs, self.hidden, self.layers = cell, inputs, hidden, layers
        rows = cell.gates * hidden
        for layer in range(layers):
            shapes = {
                "weight_ih": (rows, inputs if layer == 0 else hidden),
                "weight_hh": (rows, hidden),
                "bias_ih": (rows,),
                "bias_hh": (rows,),
            }
            for name, shape in shapes.items():
                self.register_parameter(f"{name}_l{layer}", nn.Parameter(uniform(shape, hidden**-0.5, generator)))

    def extra_repr(self) -> str:
        return f"{self.inputs}, {self.hidden}, layers={self.layers}, gates={self.cell.gates}"

    def forward(self, inputs: Tensor, skip: Tensor | None) -> Tensor:
        below, states = inputs, None
        for layer in range(self.layers):
            weight, recurrent, bias, recurrent_bias = (
                getattr(self, f"{name}_l{layer}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            )
            if states is not None:
                below = states if isinstance(states, Tensor) else torch.stack(states)
            if below.is_floating_point():
                projected = functional.linear(below, weight, bias)  # (T, B, rows)
            else:  # a matrix times a one-hot vector is one of its columns
                projected = functional.embedding(below, weight.t()) + bias
            states = self.cell.scan(projected, recurrent, recurrent_bias, skip)
        return inputs if states is None else states[-1]


class _CharModel(nn.Module):
    """Characters (B, T), embedded or one-hot, through recurrent layers; the last state gives the logits of the next one."""

    cell: _Cell

    def __init__(
        self,
        *,
        vocabulary: int,
        classes: int | None = None,
        embedding: int | None = 8,
        hidden: int = 128,
        layers: int = 1,
        padding: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        inputs = self.vocabulary = positive("vocabulary", vocabulary)
        classes = self.vocabulary if classes is None else positive("classes", classes)
        if embedding is not None:
            inputs = positive("embedding", embedding)
        hidden, layers = positive("hidden", hidden), positive("layers", layers)
        generator = torch_generator(checked_seed(seed), f"{type(self).__name__} parameters")
        self.padding = _checked_padding(padding, self.vocabulary)
        self.embedding: nn.Embedding | None = None
        if embedding is not None:  # torch's default law, N(0, 1)
            self.embedding = nn.Embedding(self.vocabulary, inputs, device="meta").to_empty(device="cpu")
            nn.init.normal_(self.embedding.weight, generator=generator)
        self.recurrent = _Recurrent(self.cell, inputs, hidden, layers, generator)
        self.readout = seeded(nn.Linear(hidden, classes, device="meta"), generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits (B, classes) of the next character after tokens (B, T)."""
        steps, skip, nan_rows = _read(tokens, self.vocabulary, self.padding)
        inputs = steps if self.embedding is None else self.embedding(steps)
        logits: Tensor = self.readout(self.recurrent(inputs, skip))
        return logits + nan_rows.to(logits.dtype)


class CharGRU(_CharModel):
    """Predicts the next character from the T before it: embedding, gated recurrent unit, linear layer on the last state.

    Inputs are tokens (B, T) in 0 … vocabulary − 1, outputs logits (B, classes); `classes` is the vocabulary unless given. Loss
    and error are cross-entropy and misclassification. With `vocabulary=53, embedding=None` (one-hot characters) and the
    default 128 hidden units it is the Shakespeare model of the superquantile papers on sequences of 20 characters (Laguel,
    Pillutla, Malick and Harchaoui, 2020). Steps that hold the token `padding` leave the state as it was, so that texts padded
    before or after give the same logits as unpadded ones.

    Initial parameters follow torch's default laws and depend on `seed` alone. Parameters: V·E for the embedding, then
    3H(E + H + 2) for the first layer, 3H(2H + 2) for each further one, and C(H + 1); with `embedding=None`, E is V and the
    first term is absent.

    `hidden` is H, the width of the state; `layers` are stacked.

    Source: the Shakespeare model of Laguel et al. 2020 and Pillutla et al. 2023.

    >>> import torch
    >>> model = CharGRU(vocabulary=53, embedding=None)
    >>> model(torch.randint(53, (5, 20))).shape, sum(p.numel() for p in model.parameters())
    (torch.Size([5, 53]), 77109)
    """

    cell = _GRU


class CharLSTM(_CharModel):
    """Predicts the next character from the T before it: embedding, long short-term memory, linear layer on the last state.

    Inputs are tokens (B, T) in 0 … vocabulary − 1, outputs logits (B, classes); `classes` is the vocabulary unless given. Loss
    and error are cross-entropy and misclassification. The defaults, with `vocabulary=80` and sequences of 80 characters, are
    the Shakespeare model of LEAF (Caldas et al. 2018); FedProx (Li et al. 2020) used it with `hidden=100`. With
    `embedding=None` characters are one-hot. Steps that hold the token `padding` leave the state as it was.

    Initial parameters follow torch's default laws (no raised forget bias) and depend on `seed` alone. Each layer has
    torch's two bias vectors; LEAF's TensorFlow cells have one, hence 817,872 parameters there. Parameters: V·E for the
    embedding, then 4H(E + H + 2) for the first layer, 4H(2H + 2) for each further one, and C(H + 1).

    Source: LEAF's Shakespeare model (Caldas et al. 2018).

    >>> import torch
    >>> model = CharLSTM(vocabulary=80)
    >>> model(torch.randint(80, (2, 80))).shape, sum(p.numel() for p in model.parameters())
    (torch.Size([2, 80]), 819920)
    """

    cell = _LSTM

    def __init__(
        self,
        *,
        vocabulary: int,
        classes: int | None = None,
        embedding: int | None = 8,
        hidden: int = 256,
        layers: int = 2,
        padding: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            vocabulary=vocabulary, classes=classes, embedding=embedding, hidden=hidden, layers=layers, padding=padding,
            seed=seed,
        )  # fmt: skip


class EmbeddingLSTM(nn.Module):
    """Classifies texts by a long short-term memory over fixed word vectors and a linear layer on its last state.

    `embeddings` (V, E) holds a vector per word, for instance GloVe (Pennington et al. 2014). It is a constant: copied into a
    buffer, never trained, never sent, no part of the parameter vector. Inputs are tokens (B, T) in 0 … V − 1, outputs logits
    (B, classes); loss and error are cross-entropy and misclassification. With 50-dimensional GloVe, the default 50 hidden
    units and 20 tokens it is the Sent140 model of the superquantile papers (Laguel, Pillutla, Malick and Harchaoui, 2020), with
    two logits where they have one; FedProx (Li et al. 2020) used two layers of 256 over 300-dimensional GloVe. Steps that hold
    the token `padding` leave the state as it was. Parameters: 4H(E + H + 2), 4H(2H + 2) for each further layer, and C(H + 1).

    `hidden` is H, the width of the state; `layers` are stacked.

    Source: the Sent140 model of Laguel et al. 2020 and Pillutla et al. 2023.

    >>> import torch
    >>> model = EmbeddingLSTM(torch.zeros(400, 50), padding=0)
    >>> model(torch.randint(400, (5, 20))).shape, sum(p.numel() for p in model.parameters())
    (torch.Size([5, 2]), 20502)
    """

    embeddings: Tensor

    def __init__(
        self,
        embeddings: Tensor,
        *,
        classes: int = 2,
        hidden: int = 50,
        layers: int = 1,
        padding: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        table = _checked_table(embeddings)
        self.vocabulary, self.padding = len(table), _checked_padding(padding, len(table))
        self.register_buffer("embeddings", table)
        generator = torch_generator(checked_seed(seed), "EmbeddingLSTM parameters")
        hidden = positive("hidden", hidden)
        self.recurrent = _Recurrent(_LSTM, table.shape[1], hidden, positive("layers", layers), generator)
        self.readout = seeded(nn.Linear(hidden, positive("classes", classes), device="meta"), generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits (B, classes) of tokens (B, T)."""
        steps, skip, nan_rows = _read(tokens, self.vocabulary, self.padding)
        logits: Tensor = self.readout(self.recurrent(functional.embedding(steps, self.embeddings), skip))
        return logits + nan_rows.to(logits.dtype)


def _skips(skip: Tensor | None) -> tuple[Tensor, ...] | repeat[None]:
    """The mask of each step; None for ever if nothing is skipped."""
    return repeat(None) if skip is None else skip.unbind()


def _where_not(skipped: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    """The new values, but the old ones where a step is skipped."""
    return new if skipped is None else torch.where(skipped, old, new)


class _Tokens(NamedTuple):
    """Checked tokens with time first."""

    steps: Tensor  # (T, B), all inside the vocabulary
    skip: Tensor | None  # (T, B, 1), where they are padding
    nan_rows: Tensor  # (B, 1), NaN for a row that held a token outside the vocabulary, else 0


def _read(tokens: Tensor, vocabulary: int, padding: int | None) -> _Tokens:
    """Check tokens (B, T) as far as shapes tell, and put time first."""
    if tokens.dim() != 2 or tokens.shape[1] == 0:
        raise InvalidParameter(
            "tokens",
            "must have shape (B, T), one row of T ≥ 1 tokens per example",
            tuple(tokens.shape),
            "A single sequence is tokens.unsqueeze(0); one-hot or embedded inputs are not taken: pass the indices.",
        )
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise InvalidParameter(
            "tokens", "must be integers", tokens.dtype, "Convert them, e.g. tokens.long(), and give token data no scale."
        )
    tokens = tokens.long()
    inside = tokens.clamp(0, vocabulary - 1)
    # Left alone, such a token would read another client's table under vmap, and end the process on a GPU.
    nan_rows = torch.where((tokens != inside).any(1, keepdim=True), torch.nan, 0.0)
    steps = inside.transpose(0, 1)
    return _Tokens(steps, None if padding is None else (steps == padding).unsqueeze(-1), nan_rows)


def _checked_padding(padding: int | None, vocabulary: int) -> int | None:
    if padding is None:
        return None
    integer = isinstance(padding, int) and not isinstance(padding, bool)
    require(integer and 0 <= padding < vocabulary, "padding", f"must be a token, 0 … {vocabulary - 1}, or None", padding)
    return padding


def _checked_table(embeddings: Tensor) -> Tensor:
    rule, fix = "must be a floating tensor of shape (V, E), a vector per word", "Stack the vectors, e.g. torch.stack(vectors)."
    if not isinstance(embeddings, Tensor):
        raise InvalidParameter("embeddings", rule, type(embeddings).__name__, "Convert it, e.g. torch.tensor(vectors).")
    require(embeddings.dim() == 2 and embeddings.numel() > 0, "embeddings", rule, tuple(embeddings.shape), fix)
    require(embeddings.is_floating_point(), "embeddings", rule, embeddings.dtype, "Convert it, e.g. embeddings.float().")
    bad = (~embeddings.isfinite()).any(1).nonzero().flatten().tolist()
    require(
        not bad, "embeddings", "must be finite", f"NaN or infinite in rows {bad[:5]}", "Give those words a vector, e.g. zeros."
    )
    return embeddings.detach().clone().to(torch.get_default_dtype())
