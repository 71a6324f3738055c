"""The protection of a run by privacy: weights and sums that show no single client, and perhaps a privacy budget."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from equipoise.privacy.accounting import Spent
from equipoise.privacy.common_clients import join_data, marks_in
from equipoise.privacy.ledger import Ledger, compose, events_of
from equipoise.privacy.noise_plan import NoisePlan, PrivateState
from equipoise.privacy.observer_table import PrivacyTable, unprotected_table
from equipoise.privacy.release_book import ReleaseBook
from equipoise.types.round_contracts import Stage

EVALUATION = "scores"  # what an exact evaluation is called in the ledger


@dataclass(frozen=True, eq=False)
class Protected:
    """The protection of a run by secure aggregation or, with a plan of `noise`, by differential privacy."""

    sums: tuple[Stage, ...]  # how weights and sums are found: in a simulation, or by messages to the nodes of a network
    rounds: int
    noise: NoisePlan | None = None
    evaluates_by_sums: bool = False  # over a network, where each sum is written down by itself
    own_book: ReleaseBook = field(default_factory=ReleaseBook)  # of a run without noise

    @property
    def in_the_open(self) -> bool:
        """Single clients are neither seen nor named."""
        return False

    @property
    def without_clients(self) -> bool:
        """Noise is released even if nobody takes part; secure sums alone are not."""
        return self.noise is not None

    @property
    def rounds_allowed(self) -> int:
        """All rounds, or as many as the budget allows."""
        return self.rounds if self.noise is None else self.noise.rounds_allowed

    def begin(self) -> PrivateState | None:
        """The state before the first round."""
        return None if self.noise is None else self.noise.begin()

    def stages(self, run: Any) -> tuple[Stage, ...]:
        """The features of a round that protect."""
        return self.sums

    @property
    def book(self) -> ReleaseBook:
        """What the run writes into the release ledger."""
        return self.own_book if self.noise is None else self.noise.book

    def open_ledger(self, ledger: Ledger, *, data: str, run: str, once: bool) -> None:
        """Write all releases of the run into a ledger."""
        if once and self.noise is not None:
            self.noise.secret = None  # each number is the operating system's own
        self.book.open(ledger, data=data, run=run, once=once)

    def resume(self, state: Any, rounds: int) -> None:
        """Go on from a checkpoint: with the noise that the run began with, and none of its rounds uncounted."""
        if self.noise is not None:
            self.noise.resume(state, rounds)

    def begin_evaluation(self, round_index: int) -> None:
        """Write into the ledger that clients are evaluated exactly, outside ε."""
        if not self.evaluates_by_sums:
            self.book.begin_exact(round_index, EVALUATION)

    def privacy(self, state: Any) -> PrivacyTable:
        """ε by observer."""
        if self.noise is None:
            return unprotected_table(secure=True)
        table = self.noise.table(state, tuple(p for p in self.book.exact_purposes() if p.startswith(EVALUATION)))
        names = join_data([([self.book.data], set()), *marks_in(self.book.ledger)])  # other splits have the same clients
        whose = names[self.book.data]
        same_clients = [entry for entry in self.book.ledger if names.get(entry.data) == whose]
        others = {entry.run for entry in same_clients if entry.kind == "release"}
        if len(others) < 2:
            return table
        total = compose([events_of(same_clients)], self.noise.privacy.delta)
        nominal = any(entry.nominal for entry in same_clients)
        together = "ε is nominal." if nominal else f"ε = {total}."
        said = f"All {len(others)} runs on these clients in the ledger together: {together}"
        return replace(table, notes=(*table.notes, said))

    def epsilon_after(self, rounds: int) -> float | None:
        """ε for whoever receives the models of the first `rounds` rounds."""
        return None if self.noise is None or self.noise.nominal else self.noise.epsilon_after(rounds)

    def spent(self, state: Any, rounds: int) -> Spent | None:
        """What the run has spent of its budget."""
        return None if self.noise is None else self.noise.spent(state, rounds)

    def describe(self) -> str | None:
        """The noise of the run as text, for its checkpoints."""
        return None if self.noise is None else self.noise.describe()
