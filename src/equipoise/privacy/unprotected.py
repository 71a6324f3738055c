"""A run without protection: the server sees every loss and every client update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from equipoise.privacy.observer_table import PrivacyTable, unprotected_table
from equipoise.types.round_contracts import Stage

if TYPE_CHECKING:
    from equipoise.privacy.ledger import Ledger


@dataclass(frozen=True, eq=False)
class Unprotected:
    """The protection of a run without privacy."""

    rounds_allowed: int
    in_the_open: bool = True  # single clients may be named
    without_clients: bool = False  # a round without clients releases nothing

    def stages(self, run: Any) -> tuple[Stage, ...]:
        """Nothing protects."""
        return ()

    def begin(self) -> None:
        """There is no state."""

    def epsilon_after(self, rounds: int) -> None:
        """There is no ε."""

    def spent(self, state: Any, rounds: int) -> None:
        """Nothing was spent."""

    def describe(self) -> None:
        """There is no noise."""

    def privacy(self, state: Any) -> PrivacyTable:
        """No observer is held to anything."""
        return unprotected_table()

    @property
    def book(self) -> None:
        """There is no ledger: everything is open."""

    def open_ledger(self, ledger: Ledger, *, data: str, run: str, once: bool) -> None:
        """Nothing is written down: everything is open."""

    def resume(self, state: Any, rounds: int) -> None:
        """There is nothing to go on with."""

    def begin_evaluation(self, round_index: int) -> None:
        """Nothing is written down."""
