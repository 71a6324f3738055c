"""Laws of the steps of a solver and of a server optimiser: most wrong signs break one of them.

Steps of a solver act on each number alone. The other laws are of the direction of many steps. Each of these compares runs that
differ in one thing, so that corrections which all runs share cancel. Honest optimisers keep them: momentum, Nesterov, Adam and
its kin, sign descent, decaying steps, Lookahead, a proximal term, weight decay.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.core.abilities import is_of_user, solver_traits
from equipoise.solvers.local_optimizer import LocalOptimizer

Broken = tuple[str, str, str]  # the law, what was found, and the cure

TO_ANCHOR = "the anchor attracts the weights, or does not matter"
TO_ANCHOR_CURE = "A proximal term is part of the gradient: gradient + prox * (weights - anchor)."
ANCHOR_USED = "an inherited `prox` that is set pulls to the anchor"
TO_ZERO = "without a gradient, steps bring weights nearer to zero, or leave them alone"
TO_ZERO_CURE = (
    "Write gradient + weight_decay * weights, or, where the decay is no part of the gradient, "
    "weights.mul_(1 - lr * weight_decay)."
)
ON_AND_ON = "equal gradients at every step move the weights against them, however many steps there are"
ON_AND_ON_CURE = "Momentum adds to the gradient: memory[0].mul_(0.9).add_(gradient), weights.sub_(lr * memory[0])."
NOT_BACK = "after one gradient, steps without a gradient do not take its step back"
SERVER_ON = "equal updates in every round move the parameters along them, however many rounds there are"
SERVER_NOT_BACK = "after one update, rounds without an update do not take its step back"
SERVER_CURE = "Momentum adds to the total: velocity = 0.9 * state + total; return params + velocity, velocity."
OPPOSITE = "opposite updates move the parameters by as much in the opposite direction, also in later rounds"
OPPOSITE_CURE = "Leave out constants that do not depend on the updates."
STATE_CHANGES = "a state that begins at zero and that a step uses is changed by steps"
STATE_CHANGES_CURE = "Return the next state: velocity = 0.9 * state + total; return params + velocity, velocity."
EACH_CLIENT = "a step on many clients is the step on each"
EACH_CLIENT_CURE = (
    "A step must work element by element: it must take no mean, norm or sort over the gradient; clip_norm bounds the norm."
)
ONE_BY_ONE = "a step acts on each number alone, whatever tensors the numbers are cut into"
ONE_BY_ONE_CURE = (
    "Engines differ in this: the loop engine gives a step all parameters of one client (D,), the simulator one tensor of many "
    "clients (K, …). Take no norm, mean, sort or sum in a step. clip_norm= bounds the norm of a client's gradient, and rates= "
    "scales the rate of tensors."
)
_CUTS = ((2, 3), (4,), (2, 2, 2), (1, 6))  # the shapes of tensors that 24 numbers of a client are cut into
_KEPT_SHARE = 0.15  # of the first step; Lookahead and optimistic steps keep a half of it
_SLACK = 1e-12
_MANY, _RATE = 60, 1e-4


def _path(solver: Any, start: Tensor, anchor: Tensor, gradients: Sequence[Tensor], rate: float = _RATE) -> list[Tensor]:
    """The weights of a client after each of some steps."""
    traits, weights, points = solver_traits(solver), start.clone(), []
    memory = solver.begin(weights)
    for number, gradient in enumerate(gradients, 1):
        told = {"number": number} if traits.numbered else {}
        solver.step(weights, gradient.clone(), memory, anchor=anchor.clone(), lr=rate, **told)
        points.append(weights.clone())
    each = max(1, traits.repeats)  # steps in the middle of a group look ahead, and are not the solver's answer
    return points[each - 1 :: each]


def broken_step_law(solver: Any) -> Broken | None:
    """The first law of direction, or of acting on each number alone, that steps of a solver break; None if they break none."""
    return _broken_direction(solver) or _broken_alone(solver)


def _broken_alone(solver: Any) -> Broken | None:
    """Whether steps on the vector of each client are the steps on its numbers cut into tensors, as the simulator has them.

    Gradients of several lengths are tried, since a bound of their norm acts on long ones only.
    """
    traits, gen = solver_traits(solver), torch.Generator().manual_seed(5)
    parts = [math.prod(shape) for shape in _CUTS]
    for clients in (1, 3):
        for length in (1e-3, 1.0, 1e3):
            start = torch.randn(clients, sum(parts), generator=gen, dtype=torch.float64)
            anchor = torch.randn(sum(parts), generator=gen, dtype=torch.float64)
            whole, cut = [row.clone() for row in start], [
                piece.reshape(clients, *shape).clone() for piece, shape in zip(torch.split(start, parts, 1), _CUTS, strict=True)
            ]  # fmt: skip
            centres = [piece.reshape(shape) for piece, shape in zip(torch.split(anchor, parts), _CUTS, strict=True)]
            memories, kept = [solver.begin(row) for row in whole], [solver.begin(piece) for piece in cut]
            for number in range(1, 1 + max(3, traits.repeats)):
                told = {"number": number} if traits.numbered else {}
                gradients = length * torch.randn(clients, sum(parts), generator=gen, dtype=torch.float64)
                for row, gradient, memory in zip(whole, gradients, memories, strict=True):
                    solver.step(row, gradient.clone(), memory, anchor=anchor.clone(), lr=0.01, **told)
                for place, piece in enumerate(torch.split(gradients, parts, 1)):
                    weights, gradient = cut[place], piece.reshape(cut[place].shape).clone()
                    solver.step(weights, gradient, kept[place], anchor=centres[place].clone(), lr=0.01, **told)
            flat = torch.stack(whole)
            apart = float((torch.cat([piece.flatten(1) for piece in cut], 1) - flat).abs().max())
            moved = float((flat - start).abs().max())
            if not apart <= 1e-6 * moved:
                shown = f"{number} steps move numbers by up to {moved:.3g}, and by up to {apart:.3g} otherwise if they are cut"
                return ONE_BY_ONE, shown, ONE_BY_ONE_CURE
    return None


def _broken_direction(solver: Any) -> Broken | None:
    """The first law of direction that the steps of a solver break; None if they break none."""
    weights = torch.linspace(0.5, 2.0, 8, dtype=torch.float64) * torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(4)
    other, zero = weights.flip(0) + 0.3, torch.zeros_like(weights)
    each = max(1, solver_traits(solver).repeats)
    few = 3 * each * [zero]
    near, far = (_path(solver, weights, anchor, few)[-1] for anchor in (weights + other, weights - other))
    pull = float((near - far) @ other)
    if pull < -_SLACK:
        shown = f"an anchor that lies farther along a direction moves the weights by {pull:.3g} along it"
        return TO_ANCHOR, shown, TO_ANCHOR_CURE
    if (pull := _pull_with_memory(solver, weights, other)) < -_SLACK:
        shown = f"after some gradients an anchor that lies farther along a direction moves the weights by {pull:.3g} along it"
        return TO_ANCHOR, shown, TO_ANCHOR_CURE
    if pull == 0 and torch.equal(near, far) and _sets_prox(solver):
        return ANCHOR_USED, f"prox={solver.prox:g}, and the anchor changes no step", TO_ANCHOR_CURE
    small, large = (_path(solver, start, start, few)[-1] - start for start in (weights, 2 * weights))
    growth = float((large - small) @ weights)
    if growth > _SLACK:
        return TO_ZERO, f"twice the weights move by {growth:.3g} more along themselves", TO_ZERO_CURE
    grown = [float(_path(solver, start, start, few)[-1].norm() - start.norm()) for start in (weights, -weights)]
    if min(grown) > _SLACK:  # of both: a constant in the step lengthens one, and shortens the other
        return TO_ZERO, f"{len(few)} steps lengthen the weights by {min(grown):.3g}", TO_ZERO_CURE
    size = float(weights.square().sum())
    gradients = _MANY * each * [weights]
    down, up = (_path(solver, zero, zero, [sign * every for every in gradients]) for sign in (1, -1))
    for number, (low, high) in enumerate(zip(down, up, strict=True), 1):
        along = float((low - high) @ weights)
        if along > _SLACK * size:
            return ON_AND_ON, f"after {number} steps the weights have moved by {along / 2:.3g} along them", ON_AND_ON_CURE
    if not solver.begin(weights.clone()):  # without a memory nothing can be taken back
        return None
    single = each * [weights] + 19 * each * [zero]
    down, up = (_path(solver, zero, zero, [sign * every for every in single], 1e-6) for sign in (1, -1))
    reached = [float((high - low) @ weights) for low, high in zip(down, up, strict=True)]
    if min(reached) < _KEPT_SHARE * reached[0] - _SLACK * 1e-6:
        return NOT_BACK, f"{100 * min(reached) / reached[0]:.3g} % of the first step are left", ON_AND_ON_CURE
    return None


def _sets_prox(solver: Any) -> bool:
    """Whether a step of the user's own has inherited the option `prox` of SGD and Adam, and it is set."""
    kind: Any = type(solver)
    return issubclass(kind, LocalOptimizer) and is_of_user(kind.step) and bool(vars(solver).get("prox", 0.0))


def _pull_with_memory(solver: Any, weights: Tensor, other: Tensor) -> float:
    """How far anchors ahead and behind pull weights apart along `other` in a step without a gradient: ≥ 0 if attract.

    Gradients fill the memory before, which may scale the proximal term. Both anchors are then equally far from the weights, so
    that squares of the proximal term in the memory are equal, too.
    """
    traits = solver_traits(solver)
    each, ends = max(1, traits.repeats), []
    for sign in (1.0, -1.0):
        now, anchor = weights.clone(), weights.clone()
        memory = solver.begin(now)
        for number in range(1, 4 * each + 1):
            filling = number <= 3 * each
            told = {"number": number} if traits.numbered else {}
            if number == 3 * each + 1:
                anchor = now + sign * other
            gradient = weights * (-0.5) ** ((number - 1) // each) if filling else torch.zeros_like(weights)
            solver.step(now, gradient, memory, anchor=anchor.clone(), lr=_RATE, **told)
        ends.append(now)
    return float((ends[0] - ends[1]) @ other)


def memory_of_server(server: Any, params: Tensor, total: Tensor) -> str:
    """By how much what one call of a server optimiser gives differs before and after other calls; empty if it does not.

    The other calls have long opposite totals, which turn around even the sign of a slow mean in self.
    """

    def step(factor: float) -> Tensor | None:
        answer = server.step(params.clone(), factor * total, copy.deepcopy(state))
        return answer[0].clone() if isinstance(answer, tuple) and answer and isinstance(answer[0], Tensor) else None

    state = server.begin(params.clone())
    first = step(1.0)
    for _ in range(20):
        step(-10.0)
    again = step(1.0)
    if first is None or again is None or torch.equal(first.nan_to_num(), again.nan_to_num()):
        return ""
    return f"differences of up to {float((first - again).abs().max()):.3g}"


def _rounds(server: Any, params: Tensor, totals: Sequence[Tensor]) -> list[Tensor]:
    """The parameters after each of some rounds with these totals."""
    state, now, points = server.begin(params.clone()), params.clone(), []
    for total in totals:
        now, state = server.step(now.clone(), total.clone(), state)
        points.append(now.clone())
    return points


def broken_server_law(server: Any) -> Broken | None:
    """The first law of direction that the rounds of a server optimiser break; None if they break none.

    Parameters and totals have no coordinate in common, so that steps by their norms (LARS, LAMB) treat a total and its opposite
    alike.
    """
    params = torch.tensor([0.5, -1.0, 2.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    total = torch.tensor([0.0, 0.0, 0.0, 0.5, -0.25, 0.125], dtype=torch.float64)
    size, zero = float(total @ total), torch.zeros_like(total)
    if lost := _unchanged_state(server, params, total):
        return STATE_CHANGES, lost, STATE_CHANGES_CURE
    still, along, against = (_rounds(server, params, _MANY * [sign * total]) for sign in (0, 1, -1))
    for number, (rest, there, back) in enumerate(zip(still, along, against, strict=True), 1):
        moved = float((there - rest) @ total)
        if moved < -_SLACK * size or (moved <= 0 and bool((there != rest).any())):
            shown = f"after {number} rounds of one update their inner product is {moved:.3g}"
            return SERVER_ON, shown, SERVER_CURE
        drift, length = float((there + back - 2 * rest).norm()) / 2, float((there - back).norm()) / 2
        if drift > 0.1 * length + 1e-9:
            shown = f"after {number} rounds the steps of both are {length:.3g} long, and their middle has moved by {drift:.3g}"
            return OPPOSITE, shown, OPPOSITE_CURE
    after = _rounds(server, params, [total] + 4 * [zero])  # few: parameters may be drawn back to where they began
    left = [float((point - rest) @ total) for point, rest in zip(after, still[:5], strict=True)]
    if min(left) < _KEPT_SHARE * left[0] - _SLACK * size:
        return SERVER_NOT_BACK, f"{100 * min(left) / left[0]:.3g} % of the first step are left", SERVER_CURE
    return None


def _unchanged_state(server: Any, params: Tensor, total: Tensor) -> str:
    """What is wrong with a state that begins at zero, stays so and has an effect on a step; else no text.

    No number of the total is 0 and no two are alike, so that a server that keeps what it leaves out of a step has something.
    """
    total = total + torch.linspace(0.05, 0.1, len(total), dtype=total.dtype)
    state, now = server.begin(params.clone()), params.clone()
    for factor in (1.0, -0.5, 2.0):
        now, state = server.step(now, factor * total, state)
    first, places = server.begin(params.clone()), []
    for place, (early, late) in enumerate(zip(_tensors(first), _tensors(state), strict=False)):
        if early.shape == late.shape and early.is_floating_point() and not bool(early.any() or late.any()):
            places.append(place)
    plain = server.step(params.clone(), total.clone(), server.begin(params.clone()))[0]
    for place in places:
        other = server.begin(params.clone())
        _tensors(other)[place].fill_(0.7)
        if not torch.equal(server.step(params.clone(), total.clone(), other)[0], plain):
            return "it is still zero after three rounds, although another value changes the step"
    return ""


def _tensors(state: Any) -> list[Tensor]:
    """The tensors of a state, in order."""
    if isinstance(state, Tensor):
        return [state]
    inside: list[Any] = []
    if isinstance(state, tuple | list):
        inside = list(state)
    elif isinstance(state, dict):
        inside = list(state.values())
    elif is_dataclass(state) and not isinstance(state, type):
        inside = [getattr(state, each.name) for each in fields(state)]
    return [tensor for each in inside for tensor in _tensors(each)]
