"""Whether what an attacker manages contradicts what an accountant claims: a test of the claim's whole privacy profile.

A claim is a list of events; its profile δ(ε) bounds what any attacker can do: for every set A of scores and every ε ≥ 0

    P(A | present) ≤ e^ε P(A | absent) + δ(ε)    and the same with the two worlds exchanged.

Half of the scores choose the set ("at least" or "below" a threshold) and the direction; the other half, which nobody has looked
at, gives Clopper–Pearson bounds of its two chances. If these contradict the profile at any ε, the claim is refuted, with the
stated confidence. A single ε at one δ can be tested in this way, too (`audit`), but needs far more runs.

What was shown is told as an ε at the δ of the claim: that of the same events with the least noise that the chances refute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from equipoise.errors import InvalidData, require_number
from equipoise.privacy.accounting import epsilon_of
from equipoise.privacy.audit import chance_bounds
from equipoise.privacy.privacy_profile import Counted, privacy_profile, with_noise

Array = NDArray[np.float64]
_EPSILONS = np.concatenate([np.linspace(0.0, 4.0, 81), np.linspace(4.25, 20.0, 64)])
_THRESHOLDS = 200
_LEAST, _MOST, _HALVINGS = 2.0**-3, 2.0**5, 5  # factors of the claimed noise, between which what was shown is found


@dataclass(frozen=True)
class ClaimAudit:
    """What an attack shows about a claim: `shown` is an ε at `delta`, which must not exceed `claimed`.

    The set was "score at least (or below) `threshold`"; its chance is at least `chance` in the world in which it is likelier,
    and at most `chance_other` in the other one. `trials` counts the scores of each world.
    """

    claimed: float
    shown: float
    refuted: bool
    delta: float
    confidence: float
    trials: tuple[int, int]
    threshold: float
    side: Literal["at least", "below"]
    likelier: Literal["present", "absent"]
    chance: float
    chance_other: float

    def __str__(self) -> str:
        return (
            f"claimed ε = {self.claimed:.4g} at δ = {self.delta:.4g}, shown ε ≥ {self.shown:.4g} with confidence "
            f"{self.confidence:.4g} (a score {self.side} {self.threshold:.4g} has chance ≥ {self.chance:.3g} with the canary "
            f"{self.likelier}, ≤ {self.chance_other:.3g} otherwise; {min(self.trials)} trials of each)"
        )


def audit_claim(
    present: Array, absent: Array, events: Counted, *, delta: float, confidence: float = 0.95, claimed: float | None = None
) -> ClaimAudit:
    """Test the claim that `events` are all that was released, by scores of independent trials with and without the canary.

    `claimed` is the ε that is said to be claimed; None: that of the events at `delta`.
    """
    require_number("confidence", confidence, "(0, 1)")
    for values in (present, absent):
        if len(values) < 20 or not np.isfinite(values).all():
            raise InvalidData(f"An audit needs 20 finite scores or more of each world, and one has {len(values)}.")
    error = (1 - confidence) / 2
    first, second = ({True: p, False: a} for p, a in ((present[::2], absent[::2]), (present[1::2], absent[1::2])))
    profile = privacy_profile(events, _EPSILONS)
    best = (-np.inf, 0.0, False, True)  # excess, threshold, below, present is likelier
    levels = np.linspace(0.002, 0.998, _THRESHOLDS // 2)
    thresholds = np.unique(np.concatenate([np.quantile(first[world], levels) for world in (True, False)]))
    for below in (False, True):
        for world in (True, False):
            lower = chance_bounds(_hits(first[world], thresholds, below), len(first[world]), error)[0]
            upper = chance_bounds(_hits(first[not world], thresholds, below), len(first[not world]), error)[1]
            excess = _excess(lower[:, None], upper[:, None], profile).max(1)
            place = int(excess.argmax())
            best = max(best, (float(excess[place]), float(thresholds[place]), below, world))
    _, threshold, below, world = best
    at = np.array([threshold])
    lower = chance_bounds(_hits(second[world], at, below), len(second[world]), error)[0]
    upper = chance_bounds(_hits(second[not world], at, below), len(second[not world]), error)[1]
    refuted = bool((_excess(lower, upper, profile) > 0).any())
    return ClaimAudit(
        epsilon_of(events, delta) if claimed is None else claimed, _shown(events, lower, upper, delta), refuted, delta,
        confidence, (len(present), len(absent)), threshold, "below" if below else "at least",
        "present" if world else "absent", float(lower[0]), float(upper[0]),
    )  # fmt: skip


def _hits(values: Array, thresholds: Array, below: bool) -> Array:
    under = np.searchsorted(np.sort(values), thresholds, side="left").astype(np.float64)
    return under if below else len(values) - under


def _excess(likelier: Array, other: Array, profile: Array) -> Array:
    """By how much chances break the profile, at each ε: log((p − δ(ε))/q) − ε; negative where they do not."""
    with np.errstate(all="ignore"):
        found: Array = np.log(np.maximum(likelier - profile, 0.0)) - np.log(other) - _EPSILONS
    return np.nan_to_num(found, nan=-np.inf)


def _shown(events: Counted, lower: Array, upper: Array, delta: float) -> float:
    """ε at `delta` of the events with the least noise that the chances refute; 0 if they refute nothing."""

    def refutes(factor: float) -> bool:
        return bool((_excess(lower, upper, privacy_profile(with_noise(events, factor), _EPSILONS)) > 0).any())

    low = high = 1.0  # noise that may be there, and noise that is not
    if refutes(1.0):
        while refutes(low):
            high, low = low, low / 2
            if low < _LEAST:
                return epsilon_of(with_noise(events, high), delta)
    else:
        while not refutes(high):
            low, high = high, 2 * high
            if high > _MOST:
                return 0.0
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if refutes(middle) else (middle, high)
    return epsilon_of(with_noise(events, high), delta)
