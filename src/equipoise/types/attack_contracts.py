"""The contract of attacks by malicious clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


class Attack(Protocol):
    """What malicious clients do. Law: the same clients and the same noise on every engine.

    `share` of the training clients (to the nearest) are malicious, drawn by `seed`.
    """

    @property
    def share(self) -> float:
        """The share of malicious clients."""

    @property
    def seed(self) -> int:
        """What decides which clients are malicious, and the noise of their attack."""


@dataclass(frozen=True, eq=False)
class AttackTraits:
    """What an attack may offer: it poisons training data, or what clients send, or both."""

    share: float | None = None  # of the training clients that are malicious
    seed: int | None = None  # what decides which clients these are
    poison: Callable[..., Any] | None = None  # what malicious clients train on, made of their examples
    corrupt: Callable[..., Any] | None = None  # what malicious clients send, made of their honest updates
    # (clients, train, classes): marked examples on which a backdoor is judged, and the positions of their clients
    probe: Callable[..., Any] | None = None
    # (clients, classes, attackers, cohort): why the attack hardly acts on these, for a notice; "" if nothing is known
    weakness: Callable[..., str] | None = None
    omniscient: bool = False  # whether `corrupt` sees the honest updates of the whole cohort
