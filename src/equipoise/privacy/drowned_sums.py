"""Whether the noise of a private run drowns the sums that it protects, and whether it has left much of the model.

All that is said follows from public settings, from the first model and from the released one. It costs no further release.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from equipoise.averaging import Last

if TYPE_CHECKING:
    from equipoise.privacy.noise_plan import NoisePlan

DROWNS = "Noise drowns the sum of updates"
DROWNED = 3.0  # times that the noise is as long as the sum can be, from which it is told
MOSTLY = math.sqrt(0.5)  # noise over model, both as norms, from which it is told: noise is half of the squared norm


def drowning_words(multiplier: float, parameters: int, clients: float, clip: float = math.inf) -> str:
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
    moved = f"In a mean of {clients:g} updates that is {norm * clip / clients:.3g} in each round. " if clip < math.inf else ""
    return (
        f"{DROWNS}: its standard deviation is {multiplier:.3g} × clip in each of {parameters} "
        f"parameters, a norm of about {norm:.3g} × clip, and the sum of {clients:g} clipped updates has at most {clients:g} × "
        f"clip. {moved}A smaller clip keeps the noise small next to the model. About {math.ceil(norm)} clients in each round "
        "would match the noise. With few sites use secure sums."
    )


def added_noise(plan: NoisePlan, parameters: int, rounds: int) -> float | None:
    """The norm of all noise that `rounds` rounds have added to D parameters, about; None where it does not add up plainly.

    A round adds γ z s clip/m in each parameter: γ is the rate of the server's step, s the sensitivity in clip bounds, m the
    clients that a sum is divided by. Independent noise of T rounds has a norm of √(T D) times that.
    """
    privacy, algorithm = plan.privacy, plan.algorithm
    rate = algorithm.traits.server.linear_rate
    last = algorithm.reported == Last()
    plain = privacy.clip_rule is None and not algorithm.traits.privacy.correlated and last
    if rate is None or not plain or not 0 < plan.calibration.update < math.inf or not privacy.clip < math.inf:
        return None
    shares = math.sqrt(plan.shares / plan.fewest) if plan.distributed else 1.0  # more of them than it is calibrated to
    deviation = rate * plan.calibration.update * plan.change * privacy.clip * shares / plan.workers
    return deviation * math.sqrt(parameters * rounds)


def noisy_model_words(plan: NoisePlan | None, first: Any, released: Any, rounds: int) -> str:
    """What to say of a released model (D,) that is mostly noise, beside the first one (D,); empty if it is not.

    A model that noise alone has made has a norm of about that of the noise and the first model together.
    """
    noise = None if plan is None or rounds == 0 else added_noise(plan, len(released), rounds)
    if plan is None or noise is None:
        return ""
    before, after = float(first.double().norm()), float(released.double().norm())
    if not noise >= MOSTLY * after:
        return ""
    drowned = drowning_words(plan.calibration.update, len(released), plan.expected, float(plan.privacy.clip))
    clip = float(plan.privacy.clip)
    much = before * clip / noise
    smaller = f" (with clip = {much:.1g} the noise would be as large as the first model)" if 0 < much < clip else ""
    return (
        f"The model is mostly noise: the noise of {rounds} rounds has a norm of about {noise:.3g}, and the parameters of the "
        f"model have {after:.3g}, before training {before:.3g}. Lower clip, which is {clip:g}{smaller}, take more clients in "
        "each round or a model with fewer parameters, make fewer rounds, or allow a larger ε. Another learning rate of "
        f"clients hardly changes it. {drowned}"
    ).rstrip()
