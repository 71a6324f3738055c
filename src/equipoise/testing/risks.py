"""The law of client risks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from equipoise.core.abilities import read
from equipoise.core.rng import torch_generator
from equipoise.runs.client_form import broken_client_form
from equipoise.runs.own_parts import ARE_EXACT, ARE_TENSORS, EXACT_CURE, NEGATIVE_CURE, RISK_CALL
from equipoise.runs.risk_direction import tell_of_low_losses
from equipoise.runs.state_rules import FINITE, FINITE_CURE, SAME_AGAIN, SAME_CURE
from equipoise.runs.tried_calls import copied
from equipoise.testing.laws import (
    accepts,
    agree,
    check_of,
    equal_values,
    hold,
    is_finite,
    keepable,
    repeated,
    without_error,
)
from equipoise.types import ClientRisk, RiskTraits, RiskValue

ANY_COHORT = "a risk answers for the losses and base weights of a cohort, both float64"
TYPES_CURE = "Make tensors of your own float64, too, e.g. torch.zeros_like(losses) or .to(losses.dtype)."
ANY_SIZE = "a risk weighs a cohort of any size, also one client, at any finite losses"
ALL_ZERO = (
    "All weights are 0, and a round divides them by their sum. exp(-loss) and similar weights underflow at large losses: "
    "they are too small for float64. Add a floor to the value and to the weights, e.g. 1e-9 * base_weights @ losses and "
    "1e-9 * base_weights; or find weights of which only the ratios matter from their logarithms, with torch.softmax."
)
SIZE_CURE = "Let it answer: a round may have few clients, e.g. where others fail."


@check_of("a risk", "__call__", cure=f"Write {RISK_CALL}, which returns a RiskValue.", on_copy=True)
def check_risk(risk: ClientRisk, *, seed: int = 0) -> None:
    """Weights are the gradient of the value and never negative; order and ties do not matter; finite for any finite losses.

    Losses and base weights are float64, as in a round. A notice says if weights fall as losses rise, which is allowed.

    A call writes to nothing that it is given, and the same call again gives the same answer. Three calls in a row pass the
    state on: with a state the weights are the gradient up to a common factor, and order does not matter. Equal losses share
    weight by base weights with a fresh state (None) only: a state may know the past of each client. A state is made of what
    checkpoints keep.

    Finite differences are taken where the value has a derivative; at a kink any subgradient is right. Ties are compared inside
    a group where the risk tells groups apart (`group_of`). A risk with `full_participation` follows a mixture of its own, not
    the base weights: instead of ties its memory is checked, and, if it has a `step`, the ascent on the simplex.

    A risk with `client_form = "loss"`, for secure sums and differential privacy, has a `client_weight` that each client finds
    alone: between 0 and the base weight for any loss, and in proportion to the weights for losses up to the bound.

    `risk` is the risk that is checked.
    """
    accepts(risk, risk, RISK_CALL, (0, 0), clients=(), state=None)
    gen, traits = torch_generator(seed, "check_risk"), read(RiskTraits, risk)
    some = torch.linspace(0.5, 1.5, 12, dtype=torch.float64)
    _check_repeats(risk, some, some / some.sum())
    for count in (1, 2, 3, 7, 20):
        losses = 2 * torch.rand(count, generator=gen, dtype=torch.float64) + 0.1
        alpha = torch.rand(count, generator=gen, dtype=torch.float64) + 0.1
        alpha = alpha / alpha.sum()
        result = _call_risk(risk, losses, alpha)
        shown = f"the value {float(result.value):.6g} and the weights {_shortly(result.weights.tolist())}"
        hold(is_finite(result.value) and is_finite(result.weights), risk, FINITE, shown, FINITE_CURE)
        _check_gradient(risk, losses, alpha, result)
        order = torch.randperm(count, generator=gen)
        moved = _call_risk(risk, losses[order], alpha[order], order)
        agree(risk, "permuting clients permutes the weights", moved.weights, result.weights[order], 1e-5)
        agree(risk, "the value does not depend on the order of clients", moved.value, result.value, 1e-5)
        if not traits.full_participation:
            _check_ties(risk, losses, alpha, 1e-5)
    _check_extremes(risk)
    for _ in range(8):  # in some cohorts clients with and without a past share the weight
        _check_state(risk, gen, 7 if traits.full_participation else 5)
    if traits.full_participation:
        _check_mixture_of_clients(risk, gen)
    for bound in (0.5, 3.0, 20.0):
        if (broken := broken_client_form(risk, bound)) is not None:
            hold(False, risk, *broken)
    if not traits.full_participation:
        tell_of_low_losses(risk)


def _call_risk(
    risk: ClientRisk, losses: Tensor, alpha: Tensor, order: Tensor | None = None, state: Any = None, *, law: str = ANY_SIZE,
    cure: str = SIZE_CURE,
) -> RiskValue:  # fmt: skip
    numbers = range(len(losses)) if order is None else order.tolist()
    case = f"losses {_shortly(losses.tolist())} give "
    ids = tuple(f"client-{i}" for i in numbers)
    with without_error(risk, law, case, cure):
        result = repeated(
            risk, "a call", lambda: risk(losses, alpha, clients=ids, state=state), partial(_answer, risk),
            losses=losses, base_weights=alpha, state=state,
        )  # fmt: skip
    hold(isinstance(result, RiskValue), risk, "a risk returns a RiskValue", type(result).__name__)
    tensors = isinstance(result.value, Tensor) and isinstance(result.weights, Tensor)
    hold(tensors, risk, ARE_TENSORS, (result.value, result.weights), "Write torch.as_tensor(…).")
    hold(result.weights.shape == losses.shape, risk, "there is one weight per client", tuple(result.weights.shape))
    hold(result.value.numel() == 1, risk, "the value is one number", tuple(result.value.shape))
    types = (result.value.dtype, result.weights.dtype)
    hold(types == (torch.float64, torch.float64), risk, ARE_EXACT, types, EXACT_CURE)
    return result  # type: ignore[no-any-return]


def _answer(risk: ClientRisk, result: Any) -> Any:
    """What two answers of a risk are compared by; a state that checkpoints cannot keep is refused first."""
    if not isinstance(result, RiskValue):
        return None
    keepable(risk, result.state)
    return result.value, result.weights, result.state


def _check_repeats(risk: ClientRisk, losses: Tensor, alpha: Tensor) -> None:
    """The same answer again after a call with losses of another order: a memory outside of the state would show first here."""
    first, _, again = (
        copied(_call_risk(risk, values, alpha, law=ANY_COHORT, cure=TYPES_CURE))
        for values in (losses, 100 * losses.flip(0), losses)
    )
    same = equal_values(_answer(risk, first), _answer(risk, again))
    hold(same, risk, SAME_AGAIN, "a call was made again after another one, and differs", SAME_CURE)


def _check_state(risk: ClientRisk, gen: torch.Generator, size: int) -> None:
    """Three rounds, each with the state of the one before; cohorts change, and so does the order of clients."""
    state = None
    for _ in range(3):
        clients = torch.randperm(7, generator=gen)[:size]
        losses, alpha = 2 * torch.rand(2, size, generator=gen, dtype=torch.float64) + 0.1
        alpha, order = alpha / alpha.sum(), torch.randperm(size, generator=gen)
        result = _call_risk(risk, losses, alpha, clients, state=state)
        good = is_finite(result.weights) and (result.weights >= 0).all()
        hold(
            good, risk, "weights are finite and not negative", result.weights, NEGATIVE_CURE * bool((result.weights < 0).any())
        )
        _check_direction(risk, losses, alpha, result, clients, state)
        moved = _call_risk(risk, losses[order], alpha[order], clients[order], state=state)
        agree(risk, "weights follow their clients when the order changes", moved.weights, result.weights[order], 1e-9)
        state = result.state


def _slopes(
    risk: ClientRisk, losses: Tensor, alpha: Tensor, here: float, clients: Tensor | None = None, state: Any = None
) -> list[float | None]:
    """The derivative of the value in each loss by finite differences; None at a kink."""
    step, found = 1e-5, list[float | None]()
    for i in range(len(losses)):
        nudge = torch.zeros_like(losses)
        nudge[i] = step
        up, down = (float(_call_risk(risk, losses + s * nudge, alpha, clients, state).value) for s in (1, -1))
        slope = (up - down) / (2 * step)
        kink = abs((up - here) - (here - down)) > 1e-2 * step * max(1.0, abs(slope))
        found.append(None if kink else slope)
    return found


def _check_gradient(risk: ClientRisk, losses: Tensor, alpha: Tensor, result: RiskValue) -> None:
    slopes = _slopes(risk, losses, alpha, float(result.value))
    rounding = 4e-16 * abs(float(result.value)) / 1e-5  # of the difference of two large values
    for i, (slope, weight) in enumerate(zip(slopes, result.weights.tolist(), strict=True)):
        if slope is None:
            continue
        case = f"client {i} of {len(losses)}: weight {weight:.6g}, finite difference {slope:.6g}"
        good = abs(slope - weight) <= 1e-4 * max(1.0, abs(slope)) + rounding
        hold(good, risk, "the weights are the gradient of the value in the losses", case)
    smooth = len(losses) - slopes.count(None)
    hold(2 * smooth >= len(losses), risk, "the value has a derivative at most losses", f"{smooth} of {len(losses)}")


def _check_direction(risk: ClientRisk, losses: Tensor, alpha: Tensor, result: RiskValue, clients: Tensor, state: Any) -> None:
    """With a state the weights have the direction of the gradient: a round divides them by their sum."""
    slopes = _slopes(risk, losses, alpha, float(result.value), clients, state)
    pairs = [(slope, weight) for slope, weight in zip(slopes, result.weights.tolist(), strict=True) if slope is not None]
    found, expected = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2).flip(1).unbind(1)
    if len(pairs) and float(found.sum()) > 0 and abs(float(expected.sum())) > 1e-9:
        law = "with the state of earlier rounds the weights are the gradient of the value, up to a common factor"
        agree(risk, law, found / found.sum(), expected / expected.sum(), 1e-3)


def _check_ties(risk: ClientRisk, losses: Tensor, alpha: Tensor, tolerance: float) -> None:
    tied = losses.clone()
    tied[: (len(losses) + 1) // 2] = losses.max()
    group_of = read(RiskTraits, risk).group_of
    groups = ["" if group_of is None else group_of(f"client-{i}") for i in range(len(losses))]
    for values in (tied, torch.full_like(losses, 0.7), torch.zeros_like(losses)):
        ratio = _call_risk(risk, values, alpha).weights.double() / alpha.double()
        levels = list(zip(values.tolist(), groups, strict=True))
        for level in set(levels):
            same = ratio[torch.tensor([other == level for other in levels])]
            good = float(same.max() - same.min()) <= 10 * tolerance * max(1.0, float(same.abs().max()))
            hold(good, risk, "equal losses share weight in proportion to the base weights", same.tolist()[:5])


def _check_extremes(risk: ClientRisk) -> None:
    huge = 1e300
    few = [0.0, 0.0, 0.0], [0.0, 1.0, 1e4], [huge, 1.0, 0.0], [huge, huge, huge], [1e-30, 0.0, 1e-30], [1e30, 0.0, 1.0], [1e4]
    for values in (*few, [0.1] + 399 * [1.0], [1.0] + 399 * [0.1]):  # one client unlike all others
        losses = torch.tensor(values, dtype=torch.float64)
        alpha = torch.full_like(losses, 1 / len(values))
        weights = _call_risk(risk, losses, alpha).weights
        shown = f"losses {_shortly(values)} give weights {_shortly(weights.tolist())}"
        law, none = "normalised weights are finite for finite losses", bool((weights == 0).all())
        hold(is_finite(weights / weights.sum()), risk, law, shown, ALL_ZERO * none)
        hold((weights >= 0).all(), risk, "weights are not negative", shown, NEGATIVE_CURE)
    losses, alpha = torch.tensor([[1.0, 2.0], [0.5, 0.5]], dtype=torch.float64)
    _call_risk(risk, losses, alpha, state=_call_risk(risk, losses, alpha).state)


def _shortly(values: list[float]) -> str:
    """The values, of many the first three and their number."""
    text = ", ".join(f"{value:.4g}" for value in values[:3])
    return f"[{text}]" if len(values) <= 3 else f"[{text}, …] of {len(values)} clients"


def _check_mixture_of_clients(risk: ClientRisk, gen: torch.Generator) -> None:
    """The memory of a risk over all clients goes by their ids; an ascent with a `step` starts uniform and projects."""
    step = read(RiskTraits, risk).step
    for count, scale in ((1, 1.0), (2, 1.0), (7, 0.1), (7, 3.0), (20, 30.0), (3, 1e300)):
        alpha = torch.rand(count, generator=gen, dtype=torch.float64) + 0.1
        losses, later = scale * torch.rand(2, count, generator=gen, dtype=torch.float64)
        alpha, order = alpha / alpha.sum(), torch.randperm(count, generator=gen)
        first = _call_risk(risk, losses, alpha)
        second = _call_risk(risk, later, alpha, state=first.state)
        moved = _call_risk(risk, later[order], alpha[order], order, state=first.state)
        agree(risk, "weights follow their clients when the order changes", moved.weights, second.weights[order], 1e-9)
        if step is None:
            continue
        agree(risk, "the mixture starts uniform", first.weights, torch.full_like(alpha, 1 / count), 1e-9)
        third = _call_risk(risk, later, alpha, state=second.state)
        for here, seen, following in ((first.weights, losses, second.weights), (second.weights, later, third.weights)):
            on_simplex = bool((following >= 0).all()) and abs(float(following.sum()) - 1) < 1e-9
            hold(on_simplex, risk, "the next mixture is a point of the simplex", following)
            expected = _projection_by_bisection(here + step * (seen - seen.max()))
            agree(risk, "the next mixture is the projection of λ + step · F", following, expected, 1e-9)


def _projection_by_bisection(point: Tensor) -> Tensor:
    """The projection on the simplex, max(v − τ, 0): slow, and unlike any fast way."""
    low, high = float(point.max()) - 1, float(point.max())
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if float((point - middle).clamp(min=0.0).sum()) > 1 else (low, middle)
    return (point - low).clamp(min=0.0)
