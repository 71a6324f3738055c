"""A worker of a cluster as the driver knows it: where it is, what it was sent, how fast it is and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

FIRST_SECONDS = 600.0  # for work of a kind that a worker has not done before
_SLOWER = 10.0  # times its usual time that a worker may take


@dataclass(eq=False)
class PooledWorker:
    """A worker, as the driver sees it."""

    actor: Any
    node: str  # Ray's name of its node
    hello: Any  # the reference to its first answer
    name: str = ""  # its node's name for people
    process: int = 0  # its number on its node
    opening: dict[int, Any] = field(default_factory=dict)  # answers to `open`, by session
    speeds: dict[str, float] = field(default_factory=dict)  # cost per second, by kind of phase
    calls: dict[int, Any] = field(default_factory=dict)  # its method `work`, by number of results
    models: dict[int, int] = field(default_factory=dict)  # the number of the models that it has, by session

    def call(self, count: int) -> Any:
        """The method `work` with a given number of results."""
        if count not in self.calls:
            self.calls[count] = self.actor.work.options(num_returns=count)
        return self.calls[count]

    def took(self, kind: str, cost: float, seconds: float) -> None:
        """Remember how fast it was."""
        speed = cost / max(seconds, 1e-6)
        self.speeds[kind] = 0.7 * self.speeds[kind] + 0.3 * speed if kind in self.speeds else speed

    def most_seconds(self, kind: str, cost: float, patience: float) -> float:
        """How long it may take, by its own past."""
        if kind not in self.speeds:
            return max(FIRST_SECONDS, patience)
        return patience + _SLOWER * cost / self.speeds[kind]
