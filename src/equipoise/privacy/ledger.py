"""The release ledger: every release about clients, written down before it is made, in a file that only grows.

One line of JSON is one entry. A *release* is a noisy sum; an *exact* one has no noise and is outside ε; a *cohort* says who
takes part in a round, an *outcome* how a release ended, and *clients* whose data the run is on. ε counts every release that
was begun, also one that failed: a run that is killed after a release has paid for it.

All releases of one round of one run come from one cohort (a round that is tried again keeps it) and are one event for the
accountant. A release whose noise can be drawn again, as in a seeded simulation, is the same bits when it is repeated, and
counts once; any other counts as often as it was begun.
"""

from __future__ import annotations

import json
import math
import reprlib
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from equipoise.core.files import GrowingFile
from equipoise.core.plain_text import content_of, parse_json
from equipoise.errors import EquipoiseError, NotWritten, is_integer, is_number
from equipoise.privacy.accounting import Method, epsilon_of, gaussian_epsilon
from equipoise.privacy.releases import CohortEvent, FixedSampling, NoSampling, PoissonSampling, Release, Sampling, adjacency_of

FILE = "ledger.jsonl"
_LONGEST_LINE = 1 << 24  # a longer one is no entry
Kind = Literal["release", "exact", "cohort", "outcome", "clients"]


class LedgerError(EquipoiseError):
    """A ledger that cannot be read, or written to: without it nothing may be released."""


@dataclass(frozen=True)
class LedgerEntry:
    """One line of a ledger.

    `multiplier` is the noise over the sensitivity under the adjacency of `sampling`; `zeroed` over that of one client's
    contribution replaced by nothing; both are of `shares` shares of noise where clients add them (None: the server adds it).
    """

    kind: Kind
    data: str  # the fingerprint of the data set
    run: str
    round: int
    purpose: str = ""
    multiplier: float = math.inf
    zeroed: float = math.inf
    sampling: tuple[str | float, ...] = ()
    delta: float = 0.0
    shares: int | None = None
    token: str = ""  # drawn for a release that cannot be repeated; "" where a repetition has the same bits
    cohort: tuple[str, ...] | None = None  # of clients: their marks, see privacy.common_clients
    contributors: int | None = None  # of an outcome: whose shares of noise are in the sum
    # Of an outcome: what was released, if it is small; of an exact release: a hash of what it is about; of clients: the data.
    value: Any = None
    nominal: bool = False  # the noise can be drawn again by whoever knows the seed

    def line(self) -> str:
        """The entry as JSON; fields that say nothing are left out."""
        said = {name: value for name, value in asdict(self).items() if name in _KEYS or value != _USUAL[name]}
        return json.dumps(said, allow_nan=False, ensure_ascii=True, separators=(",", ":")) + "\n"

    @classmethod
    def of_line(cls, line: str) -> LedgerEntry:
        """The entry that `line` wrote; ValueError for a field with a value that no entry has."""
        said: dict[str, Any] = parse_json(line, finite=True)
        for name in ("sampling", "cohort"):
            if said.get(name) is not None:
                said[name] = tuple(said[name])
        entry = cls(**said)
        if wrong := next((name for name, fits in _FITS.items() if not fits(getattr(entry, name))), None):
            raise ValueError(f"{wrong} is {reprlib.repr(getattr(entry, wrong))}")
        if entry.kind == "release":
            unpack_sampling(entry.sampling)
        return entry

    @property
    def key(self) -> tuple[str, str, int, str]:
        """What the entry is about: data, run, round and purpose."""
        return self.data, self.run, self.round, self.purpose


_KEYS = ("kind", "data", "run", "round")
_USUAL = {each.name: each.default for each in fields(LedgerEntry)}


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_count(value: object) -> bool:
    return value is None or (is_integer(value) and value >= 0)  # type: ignore[operator]


def _is_noise(value: object) -> bool:
    return is_number(value) and (value in (0, math.inf) or 1e-100 < value < 1e15)  # type: ignore[operator] # not so for NaN


# What the fields of an entry may hold: a sum over entries with anything else would be no bound on what was released.
_FITS: dict[str, Callable[[Any], bool]] = {
    "kind": lambda value: value in get_args(Kind),
    "data": _is_text,
    "run": _is_text,
    "round": lambda value: is_integer(value) and value >= 0,
    "purpose": _is_text,
    "multiplier": _is_noise,
    "zeroed": _is_noise,
    "delta": lambda value: is_number(value) and 0 <= value < 1,
    "shares": _is_count,
    "token": _is_text,
    "sampling": lambda value: isinstance(value, tuple),
    "cohort": lambda value: value is None or all(map(_is_text, value)),
    "contributors": _is_count,
    "nominal": lambda value: isinstance(value, bool),
}


class Ledger:
    """Entries in a file that only grows, or in memory where there is no path. A `durable` one is on disk before it says so."""

    def __init__(self, path: str | Path | None = None, *, durable: bool = False) -> None:
        self._file: GrowingFile | None = None
        self.path, self.durable = Path(path) if path is not None else None, durable
        self.entries: list[LedgerEntry] = []
        self._repeatable: set[tuple[str, str, str, int, str]] = set()
        if self.path is not None:
            for entry in read_entries(self.path) if self.path.exists() else ():
                self._take(entry)

    @classmethod
    def at(cls, place: Ledger | str | Path | None, *, durable: bool) -> Ledger:
        """The ledger of a file, or one that is open already."""
        ledger = place if isinstance(place, Ledger) else cls(place)
        ledger.durable = ledger.durable or durable
        return ledger

    def _take(self, entry: LedgerEntry) -> None:
        self.entries.append(entry)
        if not entry.token:
            self._repeatable.add((entry.kind, *entry.key))

    def write(self, entry: LedgerEntry) -> bool:
        """Append an entry. One that repeats the same bits is there already, and is not written again: False."""
        if not entry.token and entry.kind in ("release", "exact", "clients") and (entry.kind, *entry.key) in self._repeatable:
            return False
        if self.path is not None:
            self._append(self.path, entry.line().encode())
        self._take(entry)
        return True

    def _append(self, path: Path, line: bytes) -> None:
        try:
            if self._file is None:
                self._file = GrowingFile(path, durable=self.durable)
            self._file.add(line)
        except OSError as failure:
            raise NotWritten(
                f"{path} could not be written: {failure.strerror}. Nothing is released that is not in the ledger."
            ) from failure

    def close(self) -> None:
        """Close the file; another entry opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __del__(self) -> None:
        self.close()

    def __iter__(self) -> Iterator[LedgerEntry]:
        return iter(self.entries)


def read_entries(path: Path) -> list[LedgerEntry]:
    """The entries of a ledger file. A line that a kill or a power cut left in pieces is skipped.

    In a durable ledger the release of such a line was never asked for. In simulations a run that is resumed counts its rounds
    again.
    """
    try:
        text = content_of(path).decode()
    except (OSError, UnicodeDecodeError) as failure:
        raise LedgerError(f"{path} cannot be read: {failure}.") from failure
    entries, lines = [], text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            if len(line) > _LONGEST_LINE:
                raise ValueError("too long")
            entries.append(LedgerEntry.of_line(line))
        except Exception as failure:
            if not line.endswith("}") or "\0" in line:  # cut off, or zeros that a power cut left of what was not synced
                continue
            raise LedgerError(f"{path}, line {number}, is no entry of a ledger: {failure}.") from failure
    return entries


def find_ledgers(folder: Path) -> list[Path]:
    """The ledger of a run's or a study's folder, or of a path that is one, and all below it."""
    if folder.is_file():
        return [folder]
    return sorted({*folder.glob(f"**/{FILE}"), *folder.glob("**/*.ledger.jsonl")}) if folder.is_dir() else []


# --------------------------------------------------------------------------------------------------------- what it has cost

Tally = list[tuple[CohortEvent, int]]


def pack_sampling(sampling: Sampling) -> tuple[str | float, ...]:
    """A sampling as plain values."""
    if isinstance(sampling, PoissonSampling):
        return "node poisson" if sampling.by_nodes else "poisson", sampling.rate
    if isinstance(sampling, FixedSampling):
        return "fixed", sampling.cohort, sampling.population
    return ("everyone",)


def unpack_sampling(values: Sequence[str | float]) -> Sampling:
    """The sampling that `pack_sampling` made plain; LedgerError for anything else."""
    kind, *numbers = values or ("",)
    if not all(map(is_number, numbers)):
        raise LedgerError(f"A ledger names a sampling {values!r} that nobody knows.")
    if kind in ("poisson", "node poisson") and len(numbers) == 1:
        return PoissonSampling(float(numbers[0]), kind == "node poisson")
    if kind == "fixed" and len(numbers) == 2:
        return FixedSampling(int(numbers[0]), int(numbers[1]))
    if kind == "everyone" and not numbers:
        return NoSampling()
    raise LedgerError(f"A ledger names a sampling {values!r} that nobody knows.")


def events_of(entries: Iterable[LedgerEntry]) -> Tally:
    """The events of all releases, each with how often it happened: all releases of one round of a run are one event."""
    rounds: dict[tuple[str, str, int], list[LedgerEntry]] = {}
    for entry in entries:
        if entry.kind == "release":
            rounds.setdefault((entry.data, entry.run, entry.round), []).append(entry)
    counts: Counter[CohortEvent] = Counter()
    for released in rounds.values():
        noisy = tuple(Release(entry.purpose, entry.multiplier) for entry in released)
        counts[CohortEvent(noisy, unpack_sampling(released[0].sampling))] += 1
    return list(counts.items())


class Total(NamedTuple):
    """What several runs on one data set cost together; its text is for the public."""

    epsilon: float
    delta: float
    adjacency: str  # how neighbouring data sets differ

    def __str__(self) -> str:
        return f"{self.epsilon:.4g} at δ = {self.delta:.4g} for the public ({self.adjacency})"


def compose(tallies: Iterable[Tally], delta: float) -> Total:
    """What several runs on one data set cost together, under one adjacency.

    Events of one kind of sampling compose as one run, also beside those of everyone. Where Poisson and fixed cohorts meet,
    neighbours differ by replacing one client: for Poisson cohorts that is removing one and adding one, so their ε counts twice,
    and the ε and δ of both add up.
    """
    whole = [item for tally in tallies for item in tally]
    adjacency = adjacency_of(event.sampling for event, _ in whole)
    poisson = [item for item in whole if isinstance(item[0].sampling, PoissonSampling) and item[0].sampling.rate < 1]
    rest = [item for item in whole if item not in poisson]
    if not poisson or not any(isinstance(event.sampling, FixedSampling) for event, _ in rest):
        return Total(epsilon_of(whole, delta), delta, adjacency)
    added = epsilon_of(poisson, delta)
    return Total(epsilon_of(rest, delta) + 2 * added, delta * (2 + math.exp(min(added, 700.0))), adjacency)


def server_epsilon(entries: Iterable[LedgerEntry], delta: float, *, method: Method | None = None) -> float | None:
    """ε for one who knows the cohorts and the shares of noise that the server added, about the client who fares worst.

    The adjacency is "the client's contribution zeroed". A release of c contributors, calibrated to f shares, has a noise
    multiplier of z √(min(c, f)/f); where the outcome is not known, c is the fewest that may have been. None where the ledger
    does not say who took part, or the server itself added the noise. Where nodes keep their coins to themselves, the rounds
    are sampled for this observer, too.
    """
    entries = list(entries)
    cohorts = {(e.data, e.run, e.round): e.cohort for e in entries if e.kind == "cohort" and e.cohort is not None}
    there = {(*e.key, e.token): e.contributors for e in entries if e.kind == "outcome" and e.contributors is not None}
    cost: Counter[str] = Counter()
    hidden: dict[tuple[str, str, int], list[tuple[Release, Sampling]]] = {}
    for entry in entries:
        if entry.kind != "release":
            continue
        cohort = cohorts.get((entry.data, entry.run, entry.round))
        if entry.shares is None:
            return None
        contributors = there.get((*entry.key, entry.token), entry.contributors)
        seen = with_fewer_shares(entry.zeroed, entry.shares if contributors is None else contributors, entry.shares)
        sampling = unpack_sampling(entry.sampling)
        if isinstance(sampling, PoissonSampling) and sampling.by_nodes:
            hidden.setdefault(entry.key[:3], []).append((Release(entry.purpose, seen), sampling))
            continue
        if cohort is None:
            return None
        for client in cohort:
            cost[client] += math.inf if seen == 0 else seen**-2  # type: ignore[assignment]
    worst = max(cost.values(), default=0)
    known = worst**-0.5 if worst > 0 else math.inf
    if not hidden:
        return gaussian_epsilon(known, delta)
    events = [(CohortEvent(tuple(r for r, _ in noisy), noisy[0][1]), 1) for noisy in hidden.values()]
    return epsilon_of([*events, (CohortEvent((Release("known", known),), NoSampling()), 1)], delta, method=method)


def with_fewer_shares(multiplier: float, shares: int, calibrated: int) -> float:
    """The multiplier of a sum with `shares` shares of noise, if `calibrated` of them give `multiplier`; never more."""
    return multiplier * math.sqrt(min(max(shares, 0), calibrated) / calibrated)


def new_token() -> str:
    """What tells a release that cannot be repeated from all others."""
    return secrets.token_hex(8)
