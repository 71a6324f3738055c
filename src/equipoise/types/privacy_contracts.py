"""The contracts of privacy: the description of a protection, its work in one run, and the rule of a clip bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from equipoise.algorithm import Algorithm
    from equipoise.privacy.accounting import Spent
    from equipoise.privacy.ledger import Ledger
    from equipoise.privacy.observer_table import PrivacyTable
    from equipoise.privacy.release_book import ReleaseBook
    from equipoise.types.round_contracts import Stage


@dataclass(frozen=True)
class RunSize:
    """What the amount of noise of a run depends on."""

    clients: int  # how many there are to train on, n
    clients_per_round: int  # how many a round asks for
    rounds: int  # how many the run has
    dimension: int  # of the model
    seed: int  # of the run
    ids: Sequence[str] = field(default=(), repr=False, compare=False)  # of the training clients


class Privacy(Protocol):
    """A description of protection: differential privacy or secure aggregation (equipoise.privacy)."""

    def protect(self, algorithm: Algorithm, size: RunSize) -> Protection:
        """The protection of one run."""


@dataclass(frozen=True, eq=False)
class PrivacyTraits:
    """What a description of protection may offer."""

    protect: Callable[[Algorithm, RunSize], Protection] | None = None  # (algorithm, size): the protection of one run
    clip: float | None = None  # the bound on updates; None without differential privacy
    noise: Literal["central", "distributed"] = "central"  # who adds it: the server to the sum, or each client a part
    only_sums: bool = False  # whether the server sees secure sums alone
    fewest: int | None = None  # clients whose sum is unmasked; None: as the rule of noise says, or nothing is masked
    noise_seed: int | None = None  # of noise that repeats: no ε holds then
    correlated: bool = False  # whether the noise is correlated over rounds
    loss_bound: float | None = None  # public: larger losses count as this one in the weights that clients find alone

    @property
    def sums_alone(self) -> bool:
        """Whether clients are asked for secure sums, and for nothing of one client."""
        return self.only_sums or self.noise == "distributed"


class Protection(Protocol):
    """How a run finds weights and sums: in the open (`privacy.unprotected`), by secure sums, or with noise.

    Law: infinite clip and zero noise equal the plain run with the same weights and denominator, bit for bit (central noise).
    """

    @property
    def in_the_open(self) -> bool:
        """Whether the server sees single clients, and so may name them in errors and reports."""

    @property
    def without_clients(self) -> bool:
        """Whether a round without any client still releases something (noise)."""

    @property
    def rounds_allowed(self) -> int:
        """How many rounds the run may have: all, or as many as a privacy budget allows."""

    def begin(self) -> Any:
        """The state before the first round."""

    def stages(self, run: Any) -> Sequence[Stage]:
        """The features of a round that protect; none for a run in the open."""

    def epsilon_after(self, rounds: int) -> float | None:
        """ε for whoever receives the models of the first `rounds` rounds; None without differential privacy."""

    def spent(self, state: Any, rounds: int) -> Spent | None:
        """What the run has spent of its privacy budget; None without differential privacy."""

    def describe(self) -> str | None:
        """The noise of the run as text, for its checkpoints: a run goes on with the noise that it began with."""

    def privacy(self, state: Any) -> PrivacyTable:
        """ε of the run by observer: the public, a node, the server."""

    @property
    def book(self) -> ReleaseBook | None:
        """What the run writes into the release ledger; None for a run in the open."""

    def open_ledger(self, ledger: Ledger, *, data: str, run: str, once: bool) -> None:
        """Write all releases of the run into a ledger; with `once` none of them may be begun twice."""

    def resume(self, state: Any, rounds: int) -> None:
        """Resume from a checkpoint that was written after `rounds` rounds."""

    def begin_evaluation(self, round_index: int) -> None:
        """Clients are about to be evaluated exactly, after `round_index` rounds."""


class ClipRule(Protocol):
    """How a clip bound moves over the rounds, by a private count. Law: bounds stay positive."""

    @property
    def ratio(self) -> float:
        """What the count costs, relative to all other releases of a round."""

    def next_bound(self, bound: float, share: float) -> float:
        """The bound after a round in which a noisy `share` of the updates were within `bound`."""
