"""A gated recurrent unit over time whose steps are two operations each, forward and backward: a product and one kernel.

Autograd of the written-out cell takes some eight short kernels a step forward and fourteen backward. On a GPU, where clients
with many examples take thousands of local steps in a row, the time goes into starting them. Here the gradient is written by
hand, the element-wise part of a step is one Triton kernel, and all that does not depend on the step before it is done for all
steps at once. The models of many clients are one batch, also under `torch.func.vmap`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function


class GruGates(NamedTuple):
    """The element-wise part of a step: r = σ(x_r + u_r + c_r), z likewise, q = u_n + c_n, n = tanh(x_n + r ∘ q), u = U h."""

    reset: Tensor
    update: Tensor
    inner: Tensor
    new: Tensor

    @classmethod
    def of(cls, x: Tensor, product: Tensor, bias: Tensor) -> GruGates:
        """From one step of the projected inputs (C, B, 3H), U h (C, B, 3H) and c (C, 3H)."""
        x_r, x_z, x_n = x.chunk(3, -1)
        u_r, u_z, inner = (product + bias.unsqueeze(1)).chunk(3, -1)
        reset, update = torch.sigmoid(x_r + u_r), torch.sigmoid(x_z + u_z)
        return cls(reset, update, inner, torch.tanh(x_n + reset * inner))


class TorchSteps:
    """The element-wise steps in torch operations: what the kernels must agree with."""

    @staticmethod
    def forward(projected: Tensor, product: Tensor, bias: Tensor, states: Tensor, step: int) -> None:
        """Write h_{t+1} = (1 − z) ∘ n + z ∘ h_t into the states (C, T + 1, B, H)."""
        gates = GruGates.of(projected[:, step], product, bias)
        states[:, step + 1] = torch.lerp(gates.new, states[:, step], gates.update)

    @staticmethod
    def backward(
        projected: Tensor, products: Tensor, bias: Tensor, states: Tensor, outer: Tensor, step: int, carried: Tensor,
        from_inputs: Tensor, from_products: Tensor,
    ) -> None:  # fmt: skip
        """Write the gradients in x_t and in U h_t + c; `carried` (C, B, H), that in h_{t+1}, becomes its part z ∘ carried."""
        gates, before = GruGates.of(projected[:, step], products[:, step], bias), states[:, step]
        total = carried + outer[:, step + 1]
        new = total * (1 - gates.update) * (1 - gates.new.square())
        reset = new * gates.inner * gates.reset * (1 - gates.reset)
        update = total * (before - gates.new) * gates.update * (1 - gates.update)
        from_inputs[:, step] = torch.cat([reset, update, new], -1)
        from_products[:, step] = torch.cat([reset, update, new * gates.reset], -1)
        torch.mul(total, gates.update, out=carried)


@cache
def _kernels() -> Any:
    """The Triton kernels of the steps; None where they cannot be used."""
    try:
        return import_module("equipoise.engines.simulator.cuda.kernels.gru_steps")
    except Exception:  # Triton may be absent, or another version than they are written for
        return None


def is_worth_it(projected: Tensor) -> bool:
    """Whether the fused steps are for such inputs: float32 on a GPU for which there are kernels, and no automatic casts."""
    plain = projected.device.type == "cuda" and projected.dtype == torch.float32 and not torch.is_autocast_enabled("cuda")
    return plain and _kernels() is not None


def plain_states(projected: Tensor, weight: Tensor, bias: Tensor, start: Tensor) -> Tensor:
    """What `GruStates` gives, by operations of torch alone: a gradient of a gradient goes through them."""
    hidden, states = start, [start]
    for step in projected.unbind(1):
        gates = GruGates.of(step, hidden @ weight.transpose(1, 2), bias)
        hidden = torch.lerp(gates.new, hidden, gates.update)
        states.append(hidden)
    return torch.stack(states, 1)


class GruStates(Function):
    """The states h_0, …, h_T (C, T + 1, B, H) of C models, each with its own inputs, weights and start.

    `projected` (C, T, B, 3H) are the input projections, `weight` (C, 3H, H) is U, `bias` (C, 3H) is c, `start` (C, B, H) is
    h_0. With dh the gradient in h_{t+1}, and da that in a pre-activation:

    da_n = dh ∘ (1 − z) ∘ (1 − n²),  da_z = dh ∘ (h_t − n) ∘ z ∘ (1 − z),  da_r = da_n ∘ q ∘ r ∘ (1 − r),
    p = (da_r, da_z, da_n ∘ r),  dh_t = dh ∘ z + Uᵀ p,  dU = Σ_t p h_tᵀ,  dc = Σ_t p.
    """

    @staticmethod
    def forward(projected: Tensor, weight: Tensor, bias: Tensor, start: Tensor) -> Tensor:
        """All states, a product and a kernel after the other."""
        with torch._C.DisableTorchFunction():  # a kernel asks where tensors are, which rules of a forward pass may hide
            steps, (models, count, batch, rows) = steps_for(projected), projected.shape
            projected, bias = projected.contiguous(), bias.contiguous()
            states = start.new_empty(models, count + 1, *start.shape[1:])
            states[:, 0] = start
            product, turned = start.new_empty(models, batch, rows), weight.transpose(1, 2)
            for step in range(count):
                torch.bmm(states[:, step], turned, out=product)
                steps.forward(projected, product, bias, states, step)
            return states

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the gradient needs: gates are computed again from the states."""
        projected, weight, bias, start = inputs
        ctx.save_for_backward(projected, weight, bias, start, output)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, ...]:
        """The gradients in all inputs."""
        projected, weight, bias, start, states = ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody wants a gradient of this gradient
            gradients: tuple[Tensor, ...] = torch.func.vjp(plain_states, projected, weight, bias, start)[1](outer[0])
            return gradients
        with torch._C.DisableTorchFunction():
            return backward_steps(projected, weight, bias, states, outer[0])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor) -> tuple[Tensor, int]:
        """Models of a further dimension are more models."""
        spread = [
            value.unsqueeze(0).expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)
            for value, dim in zip(inputs, in_dims, strict=True)
        ]
        states = GruStates.apply(*(value.flatten(0, 1) for value in spread))  # type: ignore[no-untyped-call]
        return states.unflatten(0, (info.batch_size, -1)), 0


def steps_for(tensor: Tensor) -> Any:
    """The kernels where a tensor is on a GPU, else the steps in torch."""
    return _kernels() if tensor.device.type == "cuda" and tensor.dtype == torch.float32 else TorchSteps


def backward_steps(projected: Tensor, weight: Tensor, bias: Tensor, states: Tensor, outer: Tensor) -> tuple[Tensor, ...]:
    """The gradients in projected inputs, weight, bias and start, from those in the states (C, T + 1, B, H)."""
    steps, (models, count, batch, rows) = steps_for(projected), projected.shape
    projected, bias, outer = projected.contiguous(), bias.contiguous(), outer.contiguous()
    # One view of all h_0, …, h_{T−1} (C, T · B, H): the states of a model follow each other in memory.
    before = states[:, :count].flatten(1, 2)
    products = projected.new_empty(models, count * batch, rows)
    torch.bmm(before, weight.transpose(1, 2), out=products)
    products = products.view_as(projected)
    from_inputs, from_products = torch.empty_like(projected), torch.empty_like(projected)
    carried = torch.zeros_like(states[:, 0], memory_format=torch.contiguous_format)
    for step in reversed(range(count)):
        steps.backward(projected, products, bias, states, outer, step, carried, from_inputs, from_products)
        carried.baddbmm_(from_products[:, step], weight)
    flat = from_products.flatten(1, 2)
    return from_inputs, torch.bmm(flat.transpose(1, 2), before), flat.sum(1), carried + outer[:, 0]


def gru_states(projected: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The states h_1, …, h_T (T, B, H) of one model started at 0; arguments as those of `models.recurrent.gru_scan`."""
    start = projected.new_zeros(projected.shape[1], weight.shape[1])
    given = (value.unsqueeze(0) for value in (projected, weight, bias, start))
    states: Tensor = GruStates.apply(*given)  # type: ignore[no-untyped-call]
    return states[0, 1:]
