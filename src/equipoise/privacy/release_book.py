"""The pages of one run in a release ledger: what it has begun to release, what came of it, and who takes part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from equipoise.privacy.ledger import Ledger, LedgerEntry, Tally, events_of, new_token, pack_sampling
from equipoise.privacy.releases import Release, Sampling


class ReleaseBook:
    """What one run writes into a ledger. Before `open` it is in memory.

    `once` is for a federation: no release of a round is begun twice, by this process or another. A simulation releases the
    same bits again when it repeats a round, which counts once. `nominal` noise follows from a seed: it is written down as none.
    """

    def __init__(self, *, nominal: bool = False) -> None:
        self.ledger, self.data, self.run = Ledger(), "", "run"
        self.nominal, self.once = nominal, False
        self._begun: dict[tuple[int, str], LedgerEntry] = {}
        self._outcomes: dict[tuple[int, str], LedgerEntry] = {}
        self._cohorts: dict[int, LedgerEntry] = {}
        self._clients: LedgerEntry | None = None  # to be written before the first release
        self.releases = 0  # noisy sums that this run has begun to release

    def open(self, ledger: Ledger, *, data: str, run: str, once: bool = False) -> None:
        """Go on in a ledger, as this run on these data."""
        self.ledger, self.data, self.run, self.once = ledger, data, run, once
        for entry in self.pages():
            self._note(entry)

    def set_clients(self, name: str, marks: Sequence[str]) -> None:
        """Say whose data the run is on: written down before its first release. See privacy.common_clients."""
        self._clients = LedgerEntry("clients", self.data, self.run, 0, cohort=tuple(marks), value=name)

    def pages(self) -> Iterable[LedgerEntry]:
        """The entries of this run."""
        return (entry for entry in self.ledger if entry.run == self.run and entry.data == self.data)

    def _note(self, entry: LedgerEntry) -> None:
        if entry.kind == "cohort":
            self._cohorts[entry.round] = entry
        elif entry.kind == "clients":
            self._clients = None
        elif entry.kind == "outcome":
            self._outcomes[entry.round, entry.purpose] = entry
        else:
            self._begun[entry.round, entry.purpose] = entry
            self.releases += entry.kind == "release"

    def _write(self, entry: LedgerEntry) -> None:
        if self._clients is not None:
            self.ledger.write(self._clients)
            self._clients = None
        if self.ledger.write(entry):
            self._note(entry)

    # ----------------------------------------------------------------------------------------------------------- releases

    def begin(
        self, round_index: int, release: Release, *, zeroed: float, sampling: Sampling, delta: float,
        shares: int | None = None, contributors: int | None = None,
    ) -> bool:  # fmt: skip
        """Write down that a noisy sum is about to be released; False if it was begun before and must not be again."""
        if self.once and (round_index, release.name) in self._begun:
            return False
        multiplier, zeroed = (0.0, 0.0) if self.nominal else (release.multiplier, zeroed)
        entry = LedgerEntry(
            "release", self.data, self.run, round_index, release.name, multiplier, zeroed, pack_sampling(sampling), delta,
            shares, new_token() if self.once else "", contributors=contributors, nominal=self.nominal,
        )  # fmt: skip
        self._write(entry)
        return True

    def begin_exact(self, round_index: int, purpose: str, *, about: str | None = None) -> bool:
        """Write down that something exact is about to be released, outside ε; False if it must not be asked for again.

        `about` is a hash of what it is about besides the clients, such as a model.
        """
        if self.once and (round_index, purpose) in self._begun:
            return False
        token = new_token() if self.once else ""
        self._write(LedgerEntry("exact", self.data, self.run, round_index, purpose, token=token, value=about))
        return True

    def find_exact(self, purpose: str, about: str) -> int | None:
        """The first round in which something exact was begun about the same thing; None: there is none."""
        rounds = (entry.round for entry in self._begun.values() if (entry.purpose, entry.value) == (purpose, about))
        return min(rounds, default=None)

    def end(self, round_index: int, purpose: str, value: Any = None, *, contributors: int | None = None) -> None:
        """Note what a release gave, so that a run that goes on need not ask again."""
        if self.once:
            token = self._begun[round_index, purpose].token
            outcome = LedgerEntry("outcome", self.data, self.run, round_index, purpose, token=token, value=value)
            self._write(LedgerEntry(**{**vars(outcome), "contributors": contributors}))

    def value(self, round_index: int, purpose: str) -> Any:
        """What a release of a federation gave, if it is known; else None."""
        outcome = self._outcomes.get((round_index, purpose)) if self.once else None
        return None if outcome is None else outcome.value

    def is_lost(self, round_index: int, purposes: Iterable[str]) -> bool:
        """Whether one of these releases was begun and what it gave is not known; in a federation it is not asked for again."""
        begun = [purpose for purpose in purposes if self.once and self.begun(round_index, purpose)]
        return any(self.value(round_index, purpose) is None for purpose in begun)

    def begun(self, round_index: int, purpose: str) -> bool:
        """Whether a release was begun."""
        return (round_index, purpose) in self._begun

    # -------------------------------------------------------------------------------------------------------- who takes part

    def cohort(self, round_index: int) -> tuple[str, ...] | None:
        """Who takes part in a round, if that was drawn and written down."""
        return self._cohorts[round_index].cohort or () if round_index in self._cohorts else None

    def cohort_weights(self, round_index: int) -> list[float]:
        """The base weights of a round's cohort."""
        return list(self._cohorts[round_index].value or [])

    def set_cohort(self, round_index: int, clients: Sequence[str], weights: Sequence[float]) -> None:
        """Write down who takes part in a round, before anybody is asked."""
        self._write(LedgerEntry("cohort", self.data, self.run, round_index, cohort=tuple(clients), value=list(weights)))

    # ------------------------------------------------------------------------------------------------------------- what it cost

    def fill(self, rounds: int, planned: Mapping[str, tuple[float, float]], sampling: Sampling, delta: float) -> None:
        """Count releases of rounds that have ended and that the ledger lacks.

        They are those of a checkpoint of an earlier version, and of lines that a power cut took from the ledger of a
        simulation. (That of a federation is durable: there a round may have ended after its first release.) `planned` has the
        multiplier, and that of a zeroed contribution, of each release of a round.
        """
        for round_index in range(rounds):
            lacking = [purpose for purpose in planned if (round_index, purpose) not in self._begun]
            if self.once and len(lacking) < len(planned):
                continue
            for purpose in lacking:
                multiplier, zeroed = planned[purpose]
                self.begin(round_index, Release(purpose, multiplier), zeroed=zeroed, sampling=sampling, delta=delta)

    def events(self) -> Tally:
        """The events of this run's releases."""
        return events_of(self.pages())

    def exact_purposes(self) -> tuple[str, ...]:
        """What was released exactly, outside ε."""
        return tuple(sorted({entry.purpose for entry in self.pages() if entry.kind == "exact"}))
