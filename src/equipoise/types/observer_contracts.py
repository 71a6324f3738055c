"""The contract of observers, which watch a run."""

from __future__ import annotations

from typing import Any

from equipoise.types.round_values import RoundReport, ServerState


class Observer:
    """Watches a run and never changes it; raising stops the run with the observer's name. Fill in what you need."""

    def on_start(self, run: Any) -> None:
        """The run begins."""

    def on_round(self, report: RoundReport) -> None:
        """A round has ended."""

    def on_state(self, state: ServerState) -> None:
        """The state between two rounds: before the first, and after each."""

    def on_evaluating(self, round_index: int) -> None:
        """The final evaluation of all clients begins; it may take a while."""

    def on_evaluation(self, evaluation: Any) -> None:
        """All clients were evaluated."""

    def on_end(self) -> None:
        """The run has ended, well or not: close what was opened."""
