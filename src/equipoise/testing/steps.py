"""The laws of the steps of a solver: they act on each number alone, and many of them go in the right direction.

Laws of direction compare steps that differ in one thing, so that corrections that all share cancel. Wrong signs break one.
Honest optimisers keep them: momentum, Adam and its kin, sign descent, decaying steps, Lookahead, proximal terms, weight decay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from equipoise.core.abilities import is_of_user, solver_traits
from equipoise.runs.tried_calls import close, or_none
from equipoise.solvers.local_optimizer import LocalOptimizer
from equipoise.testing.laws import Tried, is_finite, try_laws, unchanged
from equipoise.types import SolverTraits

KEPT_SHARE = 0.15  # of the first step; Lookahead and optimistic steps keep a half of it
SLACK, MANY, RATE = 1e-12, 60, 1e-4
WEIGHTS = torch.linspace(0.5, 2.0, 8, dtype=torch.float64) * torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(4)
OTHER, ZERO = WEIGHTS.flip(0) + 0.3, torch.zeros_like(WEIGHTS)
CUTS = ((2, 3), (4,), (2, 2, 2), (1, 6))  # the shapes of tensors that 24 numbers of a client are cut into


@dataclass(frozen=True, eq=False)
class TriedSteps(Tried):
    """A solver whose steps are taken without clients."""

    @property
    def traits(self) -> SolverTraits:
        """What the solver says of itself."""
        return solver_traits(self.part)

    @property
    def each(self) -> int:
        """After how many steps the weights are the solver's answer: inside of a group of steps it looks ahead."""
        return max(1, self.traits.repeats)

    def random(self, *shape: int) -> Tensor:
        """Random numbers."""
        return torch.randn(shape, generator=self.gen, dtype=torch.float64)

    def step(self, weights: Tensor, gradient: Tensor, memory: Any, anchor: Tensor, number: Any, lr: float = RATE) -> None:
        """One step, in place."""
        told = {"number": number} if self.traits.numbered else {}
        self.part.step(weights, gradient.clone(), memory, anchor=anchor.clone(), lr=lr, **told)

    def path(
        self,
        start: Tensor,
        anchor: Tensor,
        gradients: Iterable[Tensor | None],
        lr: float = RATE,
        memory: Any = None,
        taken: int = 0,
    ) -> list[Tensor]:
        """The weights after each step from `start`, where some are `taken`; the gradient None is that of ½‖w‖²."""
        weights, points = start.clone(), []
        memory = self.part.begin(weights) if memory is None else memory
        for number, gradient in enumerate(gradients, 1 + taken):
            self.step(weights, weights if gradient is None else gradient, memory, anchor, number, lr)
            points.append(weights.clone())
        return points[self.each - 1 :: self.each]

    def few(self, lr: float = 0.1, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        """The weights of a client before and after a few steps; always the same ones."""
        gen = torch.Generator().manual_seed(1)
        start, anchor, *gradients = torch.randn(2 + 3 * self.each, 8, generator=gen)
        return start, self.path(start, anchor, [factor * each for each in gradients], lr)[-1]


def callable_as(case: TriedSteps) -> None:
    """Engines can call the step."""
    told, fix = ({"number": 1}, "Add the parameter `number` to step, or set `numbered = False` in the class.")
    told, fix = (told, fix) if case.traits.numbered else ({}, "")
    shown = f"step(weights, gradient, memory, anchor=…, lr=…{', number=…' * bool(told)})"
    case.accepts(case.part.step, shown, 0, 0, 0, anchor=0, lr=0, fix=fix, **told)


def numbers_of_steps(case: TriedSteps) -> None:
    """Numbers of steps and rates."""
    for size in (1, 2, 7, 9, 10, 11, 1000):
        steps = case.part.local_steps(size)
        case.hold(isinstance(steps, int) and steps >= 0, "local_steps", (size, steps))
        case.hold(case.quick or steps <= case.part.local_steps(size + 1), "more_data_more_steps", size)
    for index in (0,) if case.quick else (0, 1, 1000):
        lr = case.part.learning_rate(index)
        case.hold(math.isfinite(lr) and lr > 0, "positive_rate", (index, lr))


def memory_form(case: TriedSteps) -> None:
    """What `begin` returns, and that it returns what the step looks for."""
    for weights in (torch.zeros(5), torch.zeros(3, 5)):
        with case.without_error("memory_form", ""):
            memory = TriedSteps(case.part).part.begin(weights)
        good = isinstance(memory, tuple) and all(isinstance(each, Tensor) and each.shape == weights.shape for each in memory)
        case.hold(good, "memory_form", type(memory).__name__)
    if not memory:
        try:
            TriedSteps(case.part).few()
        except IndexError as failure:
            case.hold(False, "memory_missing", f"the memory is empty, and a step gives {failure!r}")
        except Exception:
            return  # another error is shown where it happens


def same_again(case: TriedSteps) -> None:
    """The same steps again after others; numbers stay finite, and some move."""
    start, once = case.few()
    case.few(factor=-3.0)
    again = case.few()[1]
    case.hold(is_finite(once), "finite", f"the parameters are {once.tolist()}")
    case.hold(torch.equal(once, again), "same_again", (once.tolist(), again.tolist()))
    case.hold(not torch.equal(start, once), "moves", f"{start.tolist()} before and after {3 * case.each} steps")


def each_client(case: TriedSteps) -> None:
    """Steps on many clients are the step on each: with one number for all, and with a number of each client."""
    firsts = (torch.zeros(3), torch.tensor([0.0, 4.0, 1000.0]))
    for first in firsts[: 1 if case.quick else 2]:
        together, anchor = case.random(3, 5).float(), case.random(5).float()
        alone = [row.clone() for row in together]
        memory, memories = case.part.begin(together), [case.part.begin(row) for row in alone]
        for number in range(1, 1 + max(3, case.each)):
            gradients = case.random(3, 5).float()
            told = {"number": (first + number).unsqueeze(1).double() if first.any() else number}
            with unchanged(case.part, gradient=gradients):
                case.part.step(
                    together, gradients, memory, anchor=anchor, lr=0.1, **told if case.traits.numbered else {}
                )  # fmt: skip
            for row, gradient, own, before in zip(alone, gradients, memories, first.tolist(), strict=True):
                case.step(row, gradient, own, anchor, int(before) + number, 0.1)
        apart = float((together - torch.stack(alone)).abs().max())
        same = close(together, torch.stack(alone), 1e-5 if case.quick else 1e-6)
        case.hold(same, "each_client", f"differences of up to {apart:.3g}")


def memory_in_place(case: TriedSteps) -> None:
    """Tensors in the memory that begin at zero, that steps use and that no step changes, are lost."""
    start, count = WEIGHTS.abs(), 5 * case.each
    plain, memory = start.clone(), case.part.begin(start.clone())
    lost = {place for place, each in enumerate(memory) if not bool((each != 0).any())}
    for number in range(1, 1 + count):  # Lookahead empties its memory again every few steps
        case.step(plain, plain, memory, start, number, 0.1)
        lost -= {place for place, each in enumerate(memory) if bool((each != 0).any())}
    for place in lost:
        other = case.part.begin(start.clone())
        other[place].copy_(torch.linspace(-3.0, 3.0, 8, dtype=torch.float64))
        moved = case.path(start, start, count * [None], 0.1, other)[-1]
        case.hold(torch.equal(moved, plain), "memory_in_place", f"memory[{place}] is not")


def lowers(case: TriedSteps) -> None:
    """½‖w‖² falls; the proximal term and the decay point downwards, too."""
    weights = case.path(WEIGHTS, WEIGHTS, 5 * case.each * [None])[-1]
    before, after = (float(each.square().sum() / 2) for each in (WEIGHTS, weights))
    case.hold(after < before, "lowers", f"{before:.6g} before and {after:.6g} after")


def options(case: TriedSteps) -> None:
    """A step of the user's own that extends SGD or Adam uses the options that are set."""
    if not _has_own_step(case.part):
        return
    ignored = ["lr"] * torch.equal(case.few(0.1)[1], case.few(0.2)[1])
    for name, strong in {"momentum": 0.9, "weight_decay": 1e3, "prox": 1e3}.items():
        if not (value := vars(case.part).get(name, 0.0)):
            continue
        found = [
            or_none(lambda size=size: TriedSteps(replace(case.part, **{name: size})).few()[1])  # type: ignore[misc]  # noqa: B023
            for size in (strong, 0.0)
        ]
        if all(each is not None for each in found) and torch.equal(*found):  # else another option or the step needs it
            ignored.append(f"{name}={value:g}")
    case.hold(not ignored, "options", f"without effect: {', '.join(ignored)}")


def _has_own_step(solver: Any) -> bool:
    kind: Any = type(solver)
    return issubclass(kind, LocalOptimizer) and is_of_user(kind.step)


def toward_anchor(case: TriedSteps) -> None:
    """Of two anchors the farther one along a direction moves weights along it, also after gradients have filled the memory.

    After gradients both anchors are equally far from the weights, so that squares of a proximal term in the memory are equal.
    """
    near, far = (case.path(WEIGHTS, anchor, 3 * case.each * [ZERO])[-1] for anchor in (WEIGHTS + OTHER, WEIGHTS - OTHER))
    filling, ends = [WEIGHTS * (-0.5) ** (number // case.each) for number in range(3 * case.each)], []
    for sign in (1.0, -1.0):
        memory = case.part.begin(WEIGHTS.clone())
        now = case.path(WEIGHTS, WEIGHTS, filling, memory=memory)[-1]
        ends.append(case.path(now, now + sign * OTHER, case.each * [ZERO], memory=memory, taken=len(filling))[-1])
    for pull in (float((near - far) @ OTHER), later := float((ends[0] - ends[1]) @ OTHER)):
        case.hold(pull >= -SLACK, "to_anchor", f"an anchor farther along a direction moves the weights by {pull:.3g} along it")
    ignored = later == 0 and torch.equal(near, far) and _has_own_step(case.part) and vars(case.part).get("prox", 0.0)
    case.hold(not ignored, "anchor_used", "the anchor changes no step")


def toward_zero(case: TriedSteps) -> None:
    """Weights do not grow without a gradient."""
    steps = 3 * case.each * [ZERO]
    small, large, back = (case.path(start, start, steps)[-1] for start in (WEIGHTS, 2 * WEIGHTS, -WEIGHTS))
    growth = float((large - small - WEIGHTS) @ WEIGHTS)
    case.hold(growth <= SLACK, "to_zero", f"twice the weights move by {growth:.3g} more along themselves")
    grown = min(float(end.norm() - WEIGHTS.norm()) for end in (small, back))  # a constant in the step lengthens one only
    case.hold(grown <= SLACK, "to_zero", f"{len(steps)} steps lengthen the weights by {grown:.3g}")


def on_and_on(case: TriedSteps) -> None:
    """Equal gradients at every step, and one gradient followed by none."""
    size, every = float(WEIGHTS.square().sum()), case.each * [WEIGHTS]
    down, up = (case.path(ZERO, ZERO, [sign * each for each in MANY * every]) for sign in (1, -1))
    for number, (low, high) in enumerate(zip(down, up, strict=True), 1):
        along = float((low - high) @ WEIGHTS)
        case.hold(
            along <= SLACK * size, "on_and_on", f"after {number} steps the weights have moved by {along / 2:.3g} along them"
        )
    if not case.part.begin(WEIGHTS.clone()):  # without a memory nothing can be taken back
        return
    single = [*every, *19 * case.each * [ZERO]]
    down, up = (case.path(ZERO, ZERO, [sign * each for each in single], 1e-6) for sign in (1, -1))
    reached = [float((high - low) @ WEIGHTS) for low, high in zip(down, up, strict=True)]
    kept = min(reached) >= KEPT_SHARE * reached[0] - SLACK * 1e-6
    case.hold(kept, "not_back", f"the least of {reached[0]:.3g} that is left is {min(reached):.3g}")


def one_by_one(case: TriedSteps) -> None:
    """Steps on the vector of each client are the steps on its numbers cut into tensors, as the simulator has them.

    Gradients of several lengths are tried, since a bound of their norm acts on long ones only.
    """
    parts = [math.prod(shape) for shape in CUTS]
    for clients, length in ((1, 1e-3), (1, 1.0), (1, 1e3), (3, 1e-3), (3, 1.0), (3, 1e3)):
        start, anchor = case.random(clients, sum(parts)), case.random(sum(parts))

        def cut(values: Tensor) -> list[Tensor]:
            shapes = (((*values.shape[:-1], *shape)) for shape in CUTS)
            return [piece.reshape(shape).clone() for piece, shape in zip(torch.split(values, parts, -1), shapes, strict=True)]

        whole, pieces, centres = [row.clone() for row in start], cut(start), cut(anchor)
        memories, kept = [case.part.begin(row) for row in whole], [case.part.begin(piece) for piece in pieces]
        for number in range(1, 1 + max(3, case.each)):
            gradients = length * case.random(clients, sum(parts))
            for row, gradient, memory in zip(whole, gradients, memories, strict=True):
                case.step(row, gradient, memory, anchor, number, 0.01)
            for given in zip(pieces, cut(gradients), kept, centres, strict=True):
                case.step(*given, number, 0.01)
        flat = torch.stack(whole)
        apart = float((torch.cat([piece.flatten(1) for piece in pieces], 1) - flat).abs().max())
        moved = float((flat - start).abs().max())
        case.hold(apart <= 1e-6 * moved, "one_by_one", f"steps of up to {moved:.3g} differ by {apart:.3g} if they are cut")


DIRECTIONS = (toward_anchor, toward_zero, on_and_on, one_by_one)
STEP_LAWS = (
    callable_as, numbers_of_steps, memory_form, same_again, each_client, memory_in_place, lowers, options, *DIRECTIONS,
)  # fmt: skip


def try_solver(solver: Any) -> None:
    """The quick trial of a solver; one that is prepared anew for each round is tried by what it wraps."""
    if solver_traits(solver).prepare is None:
        try_laws(STEP_LAWS, lambda: TriedSteps(solver, True))
