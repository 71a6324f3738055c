"""Whether the noise of a private run drowns the sum that it protects: with few clients it does, and nothing is learned."""

from __future__ import annotations

import math

DROWNED = 3.0  # times that the noise is as long as the sum can be, from which it is told


def drowning_words(multiplier: float, parameters: int, clients: float) -> str:
    """What to say of noise that drowns the sum of a round; empty where it does not.

    The noise has the standard deviation z · clip in each of D parameters, so a norm of about z √D · clip. The sum of m clipped
    updates has a norm of m · clip at most.

    >>> drowning_words(1.0, 100, 10)
    ''
    """
    if not (0 < multiplier < math.inf) or clients <= 0 or parameters < 1:
        return ""
    norm = multiplier * math.sqrt(parameters)
    if norm < DROWNED * clients:
        return ""
    return (
        f"Noise drowns the sum of updates: its standard deviation is {multiplier:.3g} × clip in each of {parameters} "
        f"parameters, a norm of about {norm:.3g} × clip, and the sum of {clients:g} clipped updates has at most {clients:g} × "
        f"clip. The model learns little. About {math.ceil(norm)} clients in each round would match the noise. With few sites "
        "use secure sums."
    )
