"""What a federated run is to do, checked before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from equipoise.algorithm import Algorithm
from equipoise.core.task import PerExample
from equipoise.engines.flower.apps.model_source import ModelSource
from equipoise.errors import InvalidParameter, is_number, is_whole, require
from equipoise.result import Result
from equipoise.types import Observer


@dataclass(frozen=True, eq=False)
class ServerPlan:
    """What `server_app` was given, checked."""

    algorithm: Algorithm
    model: ModelSource
    rounds: int
    clients_per_round: int | None
    clients: int | None
    seed: int
    folder: str | None
    loss: PerExample | None
    error: PerExample | None
    evaluate_every: int | None
    timeout: float
    minimum: int
    retries: int
    pause: float
    patience: float
    data: str
    name: str | None
    observers: tuple[Observer, ...]
    on_result: Callable[[Result], None] | None

    def __post_init__(self) -> None:
        if not isinstance(self.algorithm, Algorithm):
            raise InvalidParameter("algorithm", "must be an equipoise.Algorithm", self.algorithm, "Write Algorithm(risk=…).")
        for key, least in (("rounds", 0), ("seed", 0), ("minimum", 1), ("retries", 0)):
            value = getattr(self, key)
            require(is_whole(value) and value >= least, key, f"must be a whole number ≥ {least}", value)
        for key in ("clients_per_round", "clients", "evaluate_every"):
            value = getattr(self, key)
            require(value is None or (is_whole(value) and value >= 1), key, "must be a whole number ≥ 1, or None", value)
        for key in ("timeout", "patience"):
            require(is_number(getattr(self, key)) and getattr(self, key) > 0, key, "must be seconds > 0", getattr(self, key))
        require(is_number(self.pause) and self.pause >= 0, "pause", "must be seconds ≥ 0", self.pause)
        enough = self.clients_per_round is None or self.minimum <= self.clients_per_round
        require(enough, "minimum", f"must not exceed clients_per_round ({self.clients_per_round})", self.minimum)
        given = self.clients is not None or self.clients_per_round is not None
        require(given, "clients", "or clients_per_round must be given", None, "Say how many nodes the run waits for.")

    def configured(self, config: Mapping[str, Any]) -> ServerPlan:
        """The plan with what Flower's run configuration says otherwise."""
        whole = ("rounds", "clients_per_round", "clients", "seed", "evaluate_every", "minimum", "retries")
        numbers, texts = ("timeout", "pause", "patience"), ("folder", "data", "name")
        changed: dict[str, Any] = {}
        for key in (*whole, *numbers, *texts):
            value = config.get(key.replace("_", "-"))
            if value is None or value == "":
                continue
            good = is_whole(value) if key in whole else is_number(value) if key in numbers else isinstance(value, str)
            kind = "a whole number" if key in whole else "a number" if key in numbers else "text"
            require(good, key.replace("_", "-"), f"of the run configuration must be {kind}", value)
            changed[key] = value
        return replace(self, **changed) if changed else self

    @property
    def awaited(self) -> int:
        """How many nodes the run waits for."""
        return max(self.clients or 0, self.clients_per_round or 0)
