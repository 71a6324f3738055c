"""Differential privacy without sampling (DP-FTRL): noise that is correlated over the rounds of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor

from equipoise.errors import InvalidParameter, require, require_integer, require_number
from equipoise.privacy import accounting, releases
from equipoise.privacy.correlated_noise import BLT, Banded
from equipoise.privacy.noise_plan import Calibration, NoisePlan, PrivateState
from equipoise.privacy.observer_table import ZEROED, PrivacyTable
from equipoise.privacy.private_sums import PrivateSums
from equipoise.privacy.protected import Protected
from equipoise.privacy.releases import check_delta
from equipoise.types import ClipRule, RunSize

if TYPE_CHECKING:
    from equipoise.algorithm import Algorithm

_KNOWN = "sees every round's model, and may know who took part: nothing is hidden by chance"


@dataclass(frozen=True)
class DPFTRL:
    """Client-level differential privacy by noise that is correlated over rounds: cohorts need not be random samples.

    Every update is clipped to a norm of `clip`. Round t adds (C⁻¹Z)_t to the sum, with C lower-triangular and Z independent
    Gaussian noise, so that later rounds cancel some of the noise of earlier rounds. C is a BLT, given by `decays` and
    `scales` (privacy.correlated_noise.fit_blt finds good ones), or banded, given by `bands`; with neither it is the
    identity. Clients must be drawn by sampling.MinSeparation (or Full, or FedBuff with `apart`), which promises how far apart
    the rounds of one client are: the noise depends on that.

    The whole run is one Gaussian release with the multiplier z, so ε is the same after the first round as after the last. z
    is the least within `epsilon` at `delta`, or `noise_multiplier`. Neighbours differ by one client's contributions zeroed.
    The noise is made for the number of rounds: such a run gets no more of them, not even by a checkpoint.
    The server is trusted; it adds the noise. It works only with risk.Mean() and plain sums, because a tail's quantile would
    be a second release. It works with any server optimiser, as post-processing.

    `noise_seed` is as in DifferentialPrivacy. A simulation that resumes from a checkpoint continues as if it had never
    stopped. Over a network it begins a new mechanism, which counts as one more release.

    Source: Kairouz et al. 2021 (DP-FTRL, arXiv 2103.00039); Choquette-Choo et al. 2023 (banded, arXiv 2306.08153); McMahan et
    al. 2024 (BLT, arXiv 2408.08868).

    >>> DPFTRL(None, delta=1e-5, clip=1.0, noise_multiplier=1.0, bands=(1.0, 0.5)).matrix
    Banded(bands=(1.0, 0.5))
    """

    epsilon: float | None  # the budget of the run; None: none
    delta: float  # the probability that ε leaves open, in (0, 1)
    clip: float  # the largest norm of an update
    noise_multiplier: float | None = None  # noise over sensitivity; None: the least within `epsilon`
    decays: tuple[float, ...] = ()  # of the BLT, in [0, 1)
    scales: tuple[float, ...] = ()  # of the BLT, ≥ 0, with a sum of at most 1
    bands: tuple[float, ...] = ()  # coefficients of a banded matrix, in place of a BLT
    noise_seed: int | None = None  # of noise that repeats, for tests: no ε holds then; None: a secret of the system

    correlated: ClassVar[bool] = True
    # What a plan of noise asks of any mechanism, and this one does not have.
    quantile_ratio: ClassVar[float] = 0.25
    clip_rule: ClassVar[ClipRule | None] = None
    loss_bound: ClassVar[float | None] = None
    noise: ClassVar[Literal["central"]] = "central"
    step: ClassVar[float | None] = None
    fewest: ClassVar[int | None] = None
    method: ClassVar[Literal["pld"] | None] = None

    def __post_init__(self) -> None:
        require_number("epsilon", self.epsilon, "(0, ∞)", none="no budget")
        check_delta(self.delta)
        none = self.epsilon is None and self.noise_multiplier is None
        require(not none, "epsilon", "or noise_multiplier must be given", None, "Say how much privacy, or how much noise.")
        require_number("noise_multiplier", self.noise_multiplier, "[0, ∞)", none="the least noise within the budget")
        require_number("clip", self.clip, "(0, ∞]")
        good = self.clip < math.inf or self.noise_multiplier == 0
        require(good, "clip", "must be finite where there is noise", self.clip, "An update's norm is what noise hides.")
        both = bool(self.bands) and bool(self.decays or self.scales)
        require(not both, "bands", "must not be given beside decays and scales", self.bands, "Choose a BLT or a banded matrix.")
        require_integer("noise_seed", self.noise_seed, 0, none="noise from a secret")
        matrix = self.matrix
        for name in ("decays", "scales") if isinstance(matrix, BLT) else ("bands",):
            object.__setattr__(self, name, getattr(matrix, name))

    @property
    def matrix(self) -> BLT | Banded:
        """C."""
        return Banded(self.bands) if self.bands else BLT(self.decays, self.scales)

    def protect(self, algorithm: Algorithm, size: RunSize) -> Protected:
        """The protection of one run of `algorithm`, with the noise that the size of the run needs.

        `size` holds the numbers of rounds and of clients.
        """
        noise = CorrelatedPlan(self, algorithm, size)
        return Protected((PrivateSums(noise),), size.rounds, noise)


class CorrelatedPlan(NoisePlan):
    """The noise of a run whose rounds together are one release."""

    def __init__(self, privacy: DPFTRL, algorithm: Algorithm, size: RunSize) -> None:
        self.matrix, self.separation = privacy.matrix, int(algorithm.traits.sampler.separation or 1)
        self._began: int | None = None  # the round in which the mechanism at work began
        super().__init__(privacy, algorithm, size)  # type: ignore[arg-type]
        self.sensitivity = 1.0  # in units of the clip bound
        if self.rounds:
            most = self.participations(self.rounds)
            self.sensitivity = self.matrix.sensitivity(self.rounds, separation=self.separation, participations=most)
        budget = self.privacy.epsilon
        if budget is not None and self.rounds and self.accountant.exact_after(1) > budget * (1 + 1e-9):
            rule = f"must be large enough for the budget of {budget:g}"
            fix = "Leave it out: the least noise within epsilon is then found."
            raise InvalidParameter("noise_multiplier", rule, self.privacy.noise_multiplier, fix)

    def _sampling(self) -> releases.Sampling:
        """None that hides anyone."""
        return releases.NoSampling()

    def _calibrate(self) -> Calibration:
        """The multiplier of the one release."""
        whole = self.privacy.noise_multiplier
        if whole is None:
            whole = accounting.noise_for(float(self.privacy.epsilon or 0), self.privacy.delta, rounds=1)
        return Calibration(whole, whole)

    @cached_property
    def accountant(self) -> accounting.Accountant:
        """The accountant of this run: all of it is one event."""
        event = releases.CohortEvent((releases.Release("update", self.calibration.update),), self.sampling)
        return accounting.Accountant(event, self.privacy.delta, horizon=1)

    @cached_property
    def rounds_allowed(self) -> int:
        """All rounds: they cost as much as the first."""
        return self.rounds

    def describe(self) -> str:
        """The noise of this run, for its checkpoints."""
        return f"{self.privacy!r} with {self.calibration!r}, rounds {self.separation} apart, for {self.rounds} rounds"

    def resume(self, state: PrivateState, rounds: int) -> None:
        """Go on from a checkpoint: with the same noise, but over a network with a new mechanism."""
        if rounds:
            self.book.fill(1, self.planned, self.sampling, self.privacy.delta)
        if rounds and not self.book.once:
            self._began = 0

    def begin_release(self, round_index: int, purpose: str, *, contributors: int | None = None) -> bool:
        """Write the release into the ledger when the mechanism begins; its later rounds belong to it."""
        if self._began is not None and self._began <= round_index:
            return True
        begun = super().begin_release(round_index, purpose, contributors=contributors)
        self._began = round_index
        return begun

    def update_noise(self, state: PrivateState, round_index: int, count: int) -> tuple[Tensor, PrivateState]:
        """(C⁻¹Z)_t for Z of the deviation of the sensitivity, and the state with what later rounds take back."""
        independent = self.gaussian("update", round_index, count) * self.sensitivity
        fresh = state.buffers is None or self._began == round_index
        buffers = self.matrix.begin(independent) if fresh or state.buffers is None else state.buffers
        noise, after = self.matrix.step(independent, buffers.to(independent))
        return noise, replace(state, buffers=after)

    def epsilon_after(self, rounds: int) -> float:
        """ε after a number of rounds: that of the whole run, from the first round on."""
        return self._events_epsilon() if self.book.releases else self.accountant.exact_after(min(rounds, 1))

    def _server(self, state: PrivateState) -> float | None:
        """ε for one who knows the cohorts: the same, since no chance hides anyone."""
        return self._events_epsilon()

    def table(self, state: PrivateState, evaluated: tuple[str, ...]) -> PrivacyTable:
        """ε by observer."""
        table = super().table(state, evaluated)
        if self.nominal:
            return table
        rows = tuple(
            replace(row, adjacency=ZEROED, assumes=_KNOWN) if row.observer in ("public", "node") else row for row in table.rows
        )
        return replace(table, rows=rows)
