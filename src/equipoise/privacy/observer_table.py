"""One ε per observer: what the public, a node and the server can learn from a run about one client, and on which assumptions.

Amplification by sampling counts only against observers who cannot know the cohorts. Whoever sees who takes part (a server that
invites the nodes, a node that exchanges keys with the others) is promised less: of two neighbouring runs, one then
has zero in place of the client's contribution in each round, and sampling amplifies nothing.
An observer who adds noise, or knows some, has that noise taken off.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from equipoise.core.words import joined, table_lines
from equipoise.errors import InvalidParameter, require_integer
from equipoise.privacy.accounting import NOMINAL, Method, epsilon_of, gaussian_epsilon
from equipoise.privacy.ledger import Tally, compose, pack_sampling, unpack_sampling, with_fewer_shares
from equipoise.privacy.releases import CohortEvent, FixedSampling, PoissonSampling, Release

ZEROED = "one client's contribution zeroed"
PUBLIC = "sees every round's model and nothing else, and cannot know who took part"


@dataclass(frozen=True)
class ObserverPrivacy:
    """What one observer is held to: ε (None: nothing holds it), between which neighbours, and on which assumptions."""

    observer: str  # e.g. "public", "server" or "node"
    epsilon: float | None  # None where there is no protection
    adjacency: str  # how neighbouring data sets differ
    assumes: str  # what must hold for ε to hold

    @property
    def shown(self) -> str:
        """ε as text: "none" where there is no protection, "nominal" where the noise follows from a seed."""
        if self.assumes == NOMINAL:
            return "nominal"
        return "none" if self.epsilon is None else f"{self.epsilon:.4g}"


@dataclass(frozen=True)
class KnownCohorts:
    """What decides ε for one who knows the cohorts: the multiplier for a zeroed contribution, and in how many rounds.

    `shares` of noise are in each sum, and `calibrated` of them give `multiplier`. With a `rate` clients keep to themselves
    whether they take part, each by a coin of that chance; `participations` are then all rounds.
    """

    multiplier: float  # z for a contribution that is zeroed
    participations: float  # rounds that one client took part in, at most
    shares: int  # of noise in each sum
    calibrated: int  # shares that give `multiplier`
    rate: float | None = None  # the chance of each client, where clients draw by themselves; else None
    method: Method | None = None  # of accounting, "pld" or "rdp"; None: chosen

    def epsilon(self, delta: float, *, without: int = 0) -> float | None:
        """ε at `delta` if `without` shares of the noise are known to the observer; None if nothing is left."""
        z = with_fewer_shares(self.multiplier, self.shares - without, self.calibrated)
        if self.rate is not None:
            event = CohortEvent((Release("all", z),), PoissonSampling(self.rate, True))
            return _bounded(epsilon_of([(event, round(self.participations))], delta, method=self.method))
        return _bounded(gaussian_epsilon(z / math.sqrt(self.participations), delta) if self.participations else 0.0)


@dataclass(frozen=True)
class PrivacyTable:
    """ε of a run by observer. `table["server"].epsilon` is None where there is no protection; `str()` shows all."""

    rows: tuple[ObserverPrivacy, ...]  # one per observer
    delta: float | None = None  # the probability that ε leaves open; None without differential privacy
    nominal: bool = False  # the noise follows from a seed: no ε holds
    known: KnownCohorts | None = None  # where nodes add the noise and learn who takes part
    events: tuple[tuple[float, tuple[str | float, ...], int], ...] = ()  # multiplier, sampling, how often
    releases: int = 0  # noisy sums that were begun
    notes: tuple[str, ...] = ()  # further sentences that its text shows
    noise: str = ""  # sentences on a released model that is mostly noise; empty if it is not

    def __getitem__(self, observer: str) -> ObserverPrivacy:
        for row in self.rows:
            if row.observer == observer:
                return row
        raise InvalidParameter("observer", f"must be one of {', '.join(row.observer for row in self.rows)}", observer)

    def node(self, *, colluding: int = 1) -> ObserverPrivacy:
        """The row of `colluding` nodes that pool what they know: their own shares of noise are taken off."""
        require_integer("colluding", colluding, 1)
        row = self["node"]
        if self.known is None or self.delta is None or row.epsilon is None:
            return row
        whose = "its own share" if colluding == 1 else f"the {colluding} shares of those who collude"
        found, hidden = self.known.epsilon(self.delta, without=colluding), self.known.rate is not None
        return replace(row, epsilon=found, assumes=_node_assumes(whose, hidden=hidden))

    @property
    def tally(self) -> Tally:
        """The events of the run, for composing it with others."""
        return [(CohortEvent((Release("all", z),), unpack_sampling(sampling)), n) for z, sampling, n in self.events]

    def __str__(self) -> str:
        title = "Privacy by observer" + (f", at δ = {self.delta:.4g}" if self.delta is not None else "")
        head = ("observer", "ε", "neighbours differ by", "because" if all(r.epsilon is None for r in self.rows) else "assuming")
        lines = [head, *((row.observer, row.shown, row.adjacency, row.assumes) for row in self.rows)]
        return joined([title, *table_lines(lines), *self.notes])

    def plain(self) -> dict[str, Any]:
        """The table as plain values, for JSON; an infinite number is None."""
        return {
            "rows": [asdict(row) for row in self.rows], "delta": self.delta, "nominal": self.nominal,
            "events": [[None if z == math.inf else z, list(sampling), count] for z, sampling, count in self.events],
            "known": None if self.known is None else {k: v for k, v in asdict(self.known).items() if v != math.inf},
            "releases": self.releases, "notes": list(self.notes), "noise": self.noise,
        }  # fmt: skip

    @classmethod
    def of_plain(cls, values: Mapping[str, Any]) -> PrivacyTable:
        """The table that `plain` made plain values of."""
        known = values.get("known")
        return cls(
            tuple(ObserverPrivacy(**row) for row in values["rows"]), values["delta"], values["nominal"],
            None if known is None else KnownCohorts(**{"multiplier": math.inf, **known}),
            tuple((math.inf if z is None else z, tuple(sampling), count) for z, sampling, count in values["events"]),
            values["releases"], tuple(values["notes"]), values.get("noise", ""),
        )  # fmt: skip


def _bounded(epsilon: float) -> float | None:
    return epsilon if epsilon < math.inf else None


def _node_assumes(whose: str, *, hidden: bool) -> str:
    knows = "does not know the others' coins" if hidden else "counts as one who knows who takes part"
    return f"{knows}; knows {whose} of the noise, and does not collude with the server"


def unprotected_table(*, secure: bool = False) -> PrivacyTable:
    """The table of a run without differential privacy."""
    model = "the model is exact" if not secure else "sums and model are exact"
    server = "the server sees every update" if not secure else "sums are exact: what they say of one client has no bound"
    none = "—"
    rows = (("public", model), ("node", model), ("server", server))
    return PrivacyTable(tuple(ObserverPrivacy(who, None, none, why) for who, why in rows))


@dataclass(frozen=True)
class ReleasedNoise:
    """What the rows of a table are made of: the releases of a run under differential privacy, and who knows what of them."""

    events: Tally
    delta: float
    known: KnownCohorts  # for a node of a run with distributed noise
    server: float | None  # ε of the noisy sums for the server, with the shares that clients have added in fact
    distributed: bool
    nominal: bool
    clients: int
    evaluated: tuple[str, ...] = ()  # what was evaluated exactly on clients that train
    method: Any = None
    releases: int = 0

    def table(self) -> PrivacyTable:
        """The table of the run."""
        fixed = any(isinstance(event.sampling, FixedSampling) for event, _ in self.events)
        neighbours = "replacing one client" if fixed else ZEROED
        epsilon = epsilon_of(self.events, self.delta, method=self.method)
        public = ObserverPrivacy("public", _bounded(epsilon), neighbours, PUBLIC)
        packed = tuple((event.multiplier, pack_sampling(event.sampling), count) for event, count in self.events)
        rows: tuple[ObserverPrivacy, ...] = (public, self._node(neighbours, epsilon), self._server())
        notes = (
            "ε covers what the rounds release. Evaluations, logs and runs made to choose settings are outside of it.",
            *(["Replacing one client: the smaller of the bounds with and without amplification is given."] if fixed else []),
        )
        known = self.known if self.distributed else None
        if self.nominal:
            rows = tuple(replace(row, assumes=NOMINAL) for row in rows)
        return PrivacyTable(rows, self.delta, self.nominal, known, packed, self.releases, notes)

    def _node(self, neighbours: str, public: float) -> ObserverPrivacy:
        if self.distributed:
            epsilon, hidden = self.known.epsilon(self.delta, without=1), self.known.rate is not None
            return ObserverPrivacy("node", epsilon, ZEROED, _node_assumes("its own share", hidden=hidden))
        # It knows whether it takes part itself: of the others, a fixed cohort is then drawn from one client fewer.
        fewer = [(_among_others(event, self.clients), count) for event, count in self.events]
        epsilon = max(public, epsilon_of(fewer, self.delta, method=self.method))
        return ObserverPrivacy("node", _bounded(epsilon), neighbours, "sees the models, and of the cohorts only itself")

    def _server(self) -> ObserverPrivacy:
        if not self.distributed:
            return ObserverPrivacy("server", None, "—", "it sees each update and adds the noise itself: it is trusted")
        epsilon = self.server
        if self.evaluated:
            sums = "nothing" if epsilon is None else f"the noisy sums alone would be ε = {epsilon:.4g}"
            what = " and ".join(self.evaluated)
            return ObserverPrivacy("server", None, ZEROED, f"clients that train are evaluated exactly ({what}); {sums}")
        knows = "does not know the nodes' coins" if self.known.rate is not None else "picks the cohorts"
        enough = f"the noise of {self.known.calibrated} clients or more"
        return ObserverPrivacy("server", epsilon, ZEROED, f"{knows}, and sees noisy sums with {enough}")


def _among_others(event: CohortEvent, clients: int) -> CohortEvent:
    sampling = event.sampling
    if not isinstance(sampling, FixedSampling) or clients < 2:
        return event
    return CohortEvent(event.releases, FixedSampling(min(sampling.cohort, clients - 1), clients - 1))


def composed_words(tables: Iterable[PrivacyTable | None]) -> str:
    """One sentence on what several runs on one data set cost together; empty for a single one."""
    private = [table for table in tables if table is not None and table.delta is not None and table.events]
    if len(private) < 2:
        return ""
    total = compose([table.tally for table in private], min(table.delta for table in private if table.delta is not None))
    cost = "ε is nominal." if any(table.nominal for table in private) else f"ε = {total}."
    return f"The {len(private)} private runs on these data together: {cost}"
