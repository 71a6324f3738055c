"""Newton's method with conjugate gradients, for gradients that may have kinks: it finds the last digits of a minimum."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Function = Callable[[Tensor], tuple[float, Tensor]]  # value and gradient at a point
Product = Callable[[Tensor], Tensor]  # a direction times the Hessian at some point

SOLVED = 1e-8  # the squared residual, relative to the squared gradient, at which the equation for a step is solved
FLAT = 1e-14  # curvature relative to the largest that is only rounding
ROUNDING = 1e-12  # relative error of values: for smaller differences only gradients tell points apart
ZERO_GAIN = 1e-27  # what a step can gain, g·H⁻¹g, that is 0 up to rounding
ZERO_GRADIENT = 1e-16  # largest entry of a gradient that is 0 up to rounding; where there is no minimum it falls for ever
ZERO_SLOPE = 0.3  # the slope along a step, relative to the slope at its start, that ends a line search


def refine_minimum(
    function: Function, hessian: Callable[[Tensor], Product], point: Tensor, max_steps: int, curvature: float = 0.0
) -> tuple[Tensor, int, float]:
    """Go from `point` towards the minimum. Return the point with the smallest gradient, the steps, and its largest entry.

    `hessian(point)` must be exact: a difference of two gradients is not the Hessian where a kink lies between them. Close to
    the minimum, values no longer tell points apart although the gradient is still 1e-8. There, steps go on as long as each
    one removes nine tenths of the slope along it. `curvature` is the smallest that the Hessian is known to have.
    """
    value, gradient = function(point)
    best, smallest, idle = point, float(gradient.abs().max()), 0
    for used in range(max_steps):
        if smallest <= ZERO_GRADIENT or float(gradient @ gradient) < ZERO_GAIN * curvature:
            return best, used, smallest
        step, curvature = solve_newton_step(hessian(point), gradient)
        slope = float(gradient @ step)
        if not slope < -ZERO_GAIN:
            return best, used, smallest
        before, visible = value, -slope > ROUNDING * abs(value)
        length, value, gradient = search_along(function, point, step, slope, value if visible else None)
        point = point + length * step
        largest = float(gradient.abs().max())
        if largest < smallest:
            best, smallest = point, largest
        progress = (visible and value < before) or abs(float(gradient @ step)) <= -0.1 * slope
        idle = 0 if progress else idle + 1
        if idle > (length < 1.0):  # where a kink cut a step short, the next one begins on its other side
            return best, used, smallest
    return best, max_steps, smallest


def solve_newton_step(product: Product, gradient: Tensor) -> tuple[Tensor, float]:
    """Solve H s = −g by conjugate gradients. Return s, and the smallest curvature along their directions.

    They end early at a direction in which H is not positive.
    """
    step, residual = torch.zeros_like(gradient), -gradient
    direction, size = residual, float(residual @ residual)
    goal, smallest, largest = SOLVED * size, math.inf, 0.0
    for _ in range(2 * len(gradient)):
        if size <= goal:
            break
        curved = product(direction)
        along, square = float(direction @ curved), float(direction @ direction)
        smallest, largest = min(smallest, along / square), max(largest, along / square)
        if smallest <= FLAT * largest:
            break
        step = step + size / along * direction
        residual = residual - size / along * curved
        before, size = size, float(residual @ residual)
        direction = residual + size / before * direction
    return step, smallest


def search_along(
    function: Function, point: Tensor, step: Tensor, slope: float, value: float | None
) -> tuple[float, float, Tensor]:
    """Find the share of a step to take: 1, or less where the whole step goes too far, or 0 where none is good.

    Return it with the value and the gradient there. `slope` is the slope along the step at its start, and `value` an upper
    bound on the value at its end (None: no bound). A step goes too far if the slope at its end is well above 0; the share then
    ends where the slope is about 0.
    """
    low, high, left, right, length = 0.0, 1.0, slope, 0.0, 1.0
    for _ in range(20 if value is not None else 6):
        reached, gradient = function(point + length * step)
        along = float(gradient @ step)
        lower = value is None or reached <= value
        if lower and along <= -ZERO_SLOPE * slope and (length == 1.0 or along >= ZERO_SLOPE * slope):
            return length, reached, gradient
        if lower and along <= 0:
            low, left = length, along
        else:
            high, right = length, along
        share = left / (left - right) if right > 0 else 0.5
        length = low + min(max(share, 0.1), 0.9) * (high - low)
    return low, *function(point + low * step)
