"""The fused gated recurrent unit: its gradient by hand against autograd, in batches of models, and its kernels."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import grad, vmap

from equipoise.core import fused_gru
from equipoise.core.fused_gru import GruStates, gru_states, plain_states
from equipoise.models.recurrent import gru_scan

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}


def problem(models: int, steps: int, batch: int, size: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(models, steps, batch, 3 * size), (models, 3 * size, size), (models, 3 * size), (models, batch, size)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def gradients(states: Tensor, inputs: list[Tensor], seed: int = 1) -> tuple[Tensor, ...]:
    outer = torch.randn(states.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(states)
    return torch.autograd.grad(states, inputs, outer)


def test_states_are_those_of_torch() -> None:
    torch.manual_seed(0)
    layer, x = nn.GRU(3, 4).double(), torch.randn(5, 2, 3, dtype=torch.float64)
    projected = torch.nn.functional.linear(x, layer.weight_ih_l0, layer.bias_ih_l0)
    torch.testing.assert_close(gru_states(projected, layer.weight_hh_l0, layer.bias_hh_l0), layer(x)[0], **TOLERANCE)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.integers(0, 1000))
def test_the_gradient_by_hand_is_autograds(models: int, steps: int, batch: int, size: int, seed: int) -> None:
    inputs = [value.requires_grad_() for value in problem(models, steps, batch, size, seed)]
    ours, plain = GruStates.apply(*inputs), plain_states(*inputs)
    torch.testing.assert_close(ours, plain, **TOLERANCE)
    for found, wanted in zip(gradients(ours, inputs), gradients(plain, inputs), strict=True):
        torch.testing.assert_close(found, wanted, **TOLERANCE)


@pytest.mark.parametrize("shared", [False, True])
def test_many_clients_under_vmap_are_each_alone(shared: bool) -> None:
    projected, weight, bias, _ = [value.requires_grad_() for value in problem(3, 4, 2, 5)]
    own = (0, None, None) if shared else (0, 0, 0)
    given_parts = (projected, weight[0], bias[0]) if shared else (projected, weight, bias)
    together = vmap(gru_states, in_dims=own)(*given_parts)
    alone = torch.stack(
        [torch.stack(list(gru_scan(projected[i], *(p if shared else p[i] for p in given_parts[1:])))) for i in range(3)]
    )
    torch.testing.assert_close(together, alone, **TOLERANCE)
    for found, wanted in zip(
        gradients(together, [projected, weight, bias]), gradients(alone, [projected, weight, bias]), strict=True
    ):
        torch.testing.assert_close(found, wanted, **TOLERANCE)


def test_a_gradient_inside_vmap_and_a_gradient_of_a_gradient() -> None:
    projected, weight, bias, start = problem(2, 3, 2, 2)

    def energy(p: Tensor, u: Tensor, c: Tensor) -> Tensor:
        return gru_states(p, u, c).square().sum()

    def plain_energy(p: Tensor, u: Tensor, c: Tensor) -> Tensor:
        return torch.stack(list(gru_scan(p, u, c))).square().sum()

    for position in range(3):
        found, wanted = (vmap(grad(f, argnums=position))(projected, weight, bias) for f in (energy, plain_energy))
        torch.testing.assert_close(found, wanted, **TOLERANCE)
    inputs = [value.requires_grad_() for value in (projected, weight, bias, start)]
    assert torch.autograd.gradgradcheck(GruStates.apply, inputs)


def test_it_is_left_alone_on_a_cpu_and_where_steps_are_skipped() -> None:
    assert not fused_gru.is_worth_it(torch.zeros(2, 3, 6))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(INTERPRETED, reason="it starts the test below")
def test_kernels_by_the_interpreter() -> None:
    """Kernels are imported after TRITON_INTERPRET is set, so in a process of their own."""
    name = "test_kernels_agree_with_the_steps_in_torch"
    command = [sys.executable, "-m", "pytest", f"{__file__}::{name}"]
    run = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "1 passed" in run.stdout, run.stdout


@pytest.mark.skipif(not INTERPRETED, reason="test_kernels_by_the_interpreter runs it")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
def test_kernels_agree_with_the_steps_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from equipoise.core.forward_rules import ForwardRules

    inputs = [value.requires_grad_() for value in problem(3, 4, 5, 7, dtype=torch.float32)]
    wanted = GruStates.apply(*inputs)
    wanted_gradients = gradients(wanted, inputs)
    monkeypatch.setattr(fused_gru, "steps_for", lambda tensor: fused_gru._kernels())
    with ForwardRules(None, batched=True):  # which hides where tensors are
        found = GruStates.apply(*inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    for one, other in zip(gradients(found, inputs), wanted_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
