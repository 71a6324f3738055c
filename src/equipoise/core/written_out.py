"""Attention and recurrent layers in plain tensor operations, equal to torch's.

The fused kernels behind `scaled_dot_product_attention` and `torch.nn.RNN`, `GRU` and `LSTM` cannot be batched over clients by
`torch.func.vmap`, and torch's own dropout inside them cannot be replaced. What is here can, and takes the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Dropout = Callable[[Tensor, float], Tensor]


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *, dropout: Dropout,
) -> Tensor:  # fmt: skip
    """softmax(scale · Q Kᵀ + mask) V, (…, L, E), as `torch.nn.functional.scaled_dot_product_attention`.

    A query for which all keys are masked gets zeros.
    """
    if is_causal and attn_mask is not None:
        raise RuntimeError("scaled_dot_product_attention: is_causal and attn_mask cannot both be given")
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    if is_causal:
        after = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(after, -torch.inf)
    dead = None
    if attn_mask is not None:
        masked = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if masked else scores + attn_mask
        dead = (scores == -torch.inf).all(-1, keepdim=True)
        scores = scores.masked_fill(dead, 0.0)  # their softmax would be NaN, and its gradient with it
    weights = scores.softmax(-1)
    if dead is not None:
        weights = weights.masked_fill(dead, 0.0)
    return (dropout(weights, dropout_p) if dropout_p > 0 else weights) @ value


# --------------------------------------------------------------------------------------------------------- recurrent layers
# A cell takes the projected input of one step (B, gates · H), its state, U (gates · H, H), the bias of the recurrent
# product and, of an LSTM, the projection of its hidden state; it gives the next state. The first tensor of a state is what the
# layer above sees.

State = tuple[Tensor, ...]
Cell = Callable[[Tensor, State, Tensor, Tensor | None, Tensor | None], State]


def lstm_cell(x: Tensor, state: State, weight: Tensor, bias: Tensor | None, projection: Tensor | None) -> State:
    """(i, f, g, o) = (σ, σ, tanh, σ)(x + U h + c);  s ← f ∘ s + i ∘ g;  h ← o ∘ tanh(s), perhaps projected."""
    hidden, memory = state
    enter, forget, new, leave = (x + functional.linear(hidden, weight, bias)).chunk(4, -1)
    memory = torch.sigmoid(forget) * memory + torch.sigmoid(enter) * torch.tanh(new)
    hidden = torch.sigmoid(leave) * torch.tanh(memory)
    return hidden if projection is None else functional.linear(hidden, projection), memory


def gru_cell(x: Tensor, state: State, weight: Tensor, bias: Tensor | None, projection: Tensor | None) -> State:
    """(r, z) = σ(x + U h + c);  n = tanh(x_n + r ∘ (U_n h + c_n));  h ← (1 − z) ∘ n + z ∘ h."""
    (hidden,) = state
    size = hidden.shape[-1]
    inner = functional.linear(hidden, weight, bias)
    reset, update = torch.sigmoid(x[..., : 2 * size] + inner[..., : 2 * size]).chunk(2, -1)
    new = torch.tanh(x[..., 2 * size :] + reset * inner[..., 2 * size :])
    return (torch.lerp(new, hidden, update),)


def _plain_cell(activation: Callable[[Tensor], Tensor]) -> Cell:
    def cell(x: Tensor, state: State, weight: Tensor, bias: Tensor | None, projection: Tensor | None) -> State:
        return (activation(x + functional.linear(state[0], weight, bias)),)

    return cell


CELLS: dict[str, Cell] = {
    "lstm": lstm_cell,
    "gru": gru_cell,
    "rnn_tanh": _plain_cell(torch.tanh),
    "rnn_relu": _plain_cell(torch.relu),
}


def one_cell(kind: str, x: Tensor, state: Tensor | Sequence[Tensor], weight: Tensor, recurrent: Tensor,
             bias: Tensor | None = None, recurrent_bias: Tensor | None = None) -> Any:  # fmt: skip
    """One step, as `torch.lstm_cell` and its kin: the next state, of an LSTM (h, s)."""
    given = (state,) if isinstance(state, Tensor) else tuple(state)
    after = CELLS[kind](functional.linear(x, weight, bias), given, recurrent, recurrent_bias, None)
    return after if kind == "lstm" else after[0]


def scan_layer(kind: str, x: Tensor, state: State, weights: Sequence[Tensor], biased: bool) -> tuple[Tensor, State]:
    """One layer in one direction over x (T, B, I) from a state (B, H): the hidden states (T, B, H) and the last state."""
    bias, recurrent_bias = (weights[2], weights[3]) if biased else (None, None)
    projection = weights[-1] if len(weights) % 2 else None
    projected = functional.linear(x, weights[0], bias)  # of all steps at once
    if recurrent_bias is not None and kind != "gru":  # there it is inside the reset gate
        projected, recurrent_bias = projected + recurrent_bias, None
    seen = []
    for step in projected.unbind(0):  # whose backward pass is one stack
        state = CELLS[kind](step, state, weights[1], recurrent_bias, projection)
        seen.append(state[0])
    return torch.stack(seen), state


Layer = Callable[[str, Tensor, State, Sequence[Sequence[Tensor]], bool], tuple[Tensor, State]]


def scan_directions(
    kind: str, x: Tensor, state: State, weights: Sequence[Sequence[Tensor]], biased: bool
) -> tuple[Tensor, State]:
    """One layer in one direction or both over x (T, B, I) from states (directions, B, H)."""
    outputs, last = [], []
    for place, each in enumerate(weights):
        begin = tuple(part[place] for part in state)
        seen, end = scan_layer(kind, x.flip(0) if place else x, begin, each, biased)
        outputs.append(seen.flip(0) if place else seen)
        last.append(end)
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
    return joined, tuple(torch.stack(parts) for parts in zip(*last, strict=True))


def fused_directions(
    kind: str, x: Tensor, state: State, weights: Sequence[Sequence[Tensor]], biased: bool
) -> tuple[Tensor, State]:
    """What `scan_directions` gives, by torch's own kernel."""
    run, both = getattr(torch, kind), len(weights) == 2
    flat = [weight for each in weights for weight in each]
    output, *last = run(x, state if kind == "lstm" else state[0], flat, biased, 1, 0.0, True, both, False)
    return output, tuple(last)


def recurrent(
    kind: str, x: Tensor, state: Tensor | Sequence[Tensor], weights: Sequence[Tensor], biased: bool, layers: int, p: float,
    training: bool, both: bool, batch_first: bool, *, layer: Layer, dropout: Dropout,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Stacked layers, as `torch.lstm`, `torch.gru`, `torch.rnn_tanh` and `torch.rnn_relu`; `layer` does one of them."""
    given = (state,) if isinstance(state, Tensor) else tuple(state)
    directions = 2 if both else 1
    each = len(weights) // (layers * directions)
    groups = [list(weights[i : i + each]) for i in range(0, len(weights), each)]
    out, last = x.transpose(0, 1) if batch_first else x, []
    for number in range(layers):
        here = slice(number * directions, (number + 1) * directions)
        out, end = layer(kind, out, tuple(part[here] for part in given), groups[here], biased)
        last.append(end)
        if training and p > 0 and number + 1 < layers:
            out = dropout(out, p)
    out = out.transpose(0, 1) if batch_first else out
    return out, *(torch.cat(parts) for parts in zip(*last, strict=True))


def embedding(rows: Tensor, table: Tensor, padding: int) -> Tensor:
    """The rows (…, E) of a table by number, of which the padding row gets no gradient, as `torch.nn.functional.embedding`."""
    values = functional.embedding(rows, table)
    return torch.where((rows == padding % len(table)).unsqueeze(-1), values.detach(), values)


def embedding_bag(
    rows: Tensor, table: Tensor, mode: str = "mean", weights: Tensor | None = None, padding: int | None = None
) -> Tensor:
    """The sum, mean or maximum of the rows of a table that bags (B, n) name, (B, E), as `torch.nn.functional.embedding_bag`."""
    values = functional.embedding(rows, table)
    inside = torch.ones_like(rows, dtype=torch.bool) if padding is None else rows != padding % len(table)
    shares = inside.to(values.dtype).unsqueeze(-1)
    if mode == "max":
        largest = values.masked_fill(~inside.unsqueeze(-1), -torch.inf).amax(1)
        return largest.masked_fill(~inside.any(1, keepdim=True), 0.0)
    if weights is not None:
        values = values * weights.unsqueeze(-1)
    total = (values * shares).sum(1)
    return total if mode == "sum" else total / shares.sum(1).clamp(min=1)


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Weights g · v / ‖v‖, the norm over all dimensions but one, or over all for dim = −1, as `torch._weight_norm`."""
    lengths: Tensor = v.abs()
    others = [each for each in range(v.dim()) if each != dim]
    if dim == -1:
        lengths = torch.linalg.vector_norm(v)
    elif others:
        lengths = torch.linalg.vector_norm(v, dim=others, keepdim=True)
    return v * (g / lengths)
