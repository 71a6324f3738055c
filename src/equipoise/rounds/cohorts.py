"""The cohorts of a run, drawn when its rounds begin."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from equipoise.core import rng
from equipoise.core.abilities import named_part
from equipoise.core.equality import same_part
from equipoise.runs.secret_cohorts import draw_unforeseen
from equipoise.types import Cohort


class Cohorts:
    """Draws the cohort of a round, and of further tries of it. Runs that draw alike may share one."""

    def __init__(self, run: Any) -> None:
        self.run, self.drawn_by = run, self
        self.drawn: dict[int, Cohort] = {}

    def __call__(self, round_index: int, attempt: int = 0) -> Cohort:
        """Who takes part in a round; other clients are drawn for a further try."""
        if attempt:
            return self._draw(round_index, rng.stream_key(self.run.seed, f"cohort, try {attempt}") >> 1)
        if self.drawn_by is not self:
            return self.drawn_by(round_index)
        if self.is_secret:
            return draw_unforeseen(self.run, round_index, self.run.noise.source("cohort", round_index))
        if round_index not in self.drawn:
            known = {index: cohort for index, cohort in self.drawn.items() if index >= round_index - 1}
            self.drawn = known | {round_index: self._draw(round_index, self.run.seed)}
        return self.drawn[round_index]

    @property
    def is_secret(self) -> bool:
        """Whether nobody can foresee who is drawn: the cohorts of a run with noise follow from its secret."""
        noise = self.run.noise
        return noise is not None and not noise.nominal

    def like(self, other: Cohorts) -> bool:
        """Whether two runs have the same cohorts in every round: not if one draws them from a secret of its own."""
        if self.is_secret or other.is_secret:
            return False
        first, second = self.run, other.run
        same = first.seed == second.seed and first.clients_per_round == second.clients_per_round
        return same and same_part(first.sampler, second.sampler) and torch.equal(first.alpha, second.alpha)

    def further(self, round_index: int, purpose: str) -> Cohort:
        """A second cohort of a round, for a purpose."""
        return self._draw(round_index, rng.stream_key(self.run.seed, purpose) >> 1, keep_seed=False)

    def _draw(self, round_index: int, seed: int, *, keep_seed: bool = True) -> Cohort:
        run = self.run
        with named_part("sampler", run.sampler):
            drawn: Cohort = run.sampler(round_index, run.alpha, clients_per_round=run.clients_per_round, seed=seed)
        return replace(drawn, seed=run.seed) if keep_seed and seed != run.seed else drawn
