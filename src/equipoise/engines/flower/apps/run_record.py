"""What a federated run's config.toml says, and how it is read back for reports.

A run of a configuration names its data and model by the catalogue. A federation's data are with its nodes, and its model is a
class of the user's: the file says what they were called, and everything else as any run's does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from equipoise.algorithm import Algorithm
from equipoise.engines.flower.transport.part_messages import describe_part
from equipoise.errors import ConfigError
from equipoise.experiment import catalog, toml
from equipoise.experiment.config import TrainRecord, check_part, installed_versions, read_toml

SECTION = "federation"


@dataclass(frozen=True, eq=False)
class FederatedConfig:
    """A federated run as its folder describes it. `algorithm()` and `train` are what a report asks for."""

    made: Algorithm
    train: TrainRecord
    federation: Mapping[str, Any] = field(default_factory=dict)

    def algorithm(self) -> Algorithm:
        """The algorithm that the folder describes."""
        return self.made

    def text(self) -> str:
        """The complete TOML."""
        tables = {SECTION: dict(self.federation), "algorithm": algorithm_table(self.made), "train": self.train.table()}
        return toml.dumps({**tables, "versions": installed_versions("equipoise", "torch", "numpy", "flwr")})

    @classmethod
    def read(cls, path: str | Path) -> FederatedConfig:
        """From the config.toml of a federated run."""
        table = read_toml(path)
        if SECTION not in table:
            raise ConfigError(f"{path} is not the configuration of a federated run: it has no [{SECTION}].")
        try:
            options: dict[str, Any] = {key: None if value == "none" else value for key, value in table["train"].items()}
            return cls(read_algorithm(table["algorithm"]), TrainRecord(**options), table[SECTION])
        except (KeyError, TypeError) as failure:
            raise ConfigError(f"{path} is damaged: {failure}.") from failure


def is_federated(path: str | Path) -> bool:
    """Whether a config.toml is that of a federated run."""
    return SECTION in read_toml(path)


def algorithm_table(algorithm: Algorithm) -> dict[str, Any]:
    """An algorithm as TOML tables; a part of the user's own by its class and how it shows itself."""
    table: dict[str, Any] = {"weights": algorithm.weights or "none"}
    for kind in (*catalog.ALGORITHM_PARTS, *catalog.OPTIONAL_PARTS):
        part = getattr(algorithm, kind)
        if part is None:
            table[kind] = "none"
            continue
        try:
            table[kind] = describe_part(kind, part)
        except (ConfigError, AttributeError):
            table[kind] = {"class": f"{type(part).__module__}:{type(part).__qualname__}", "shown": repr(part)}
    return table


def read_algorithm(table: Mapping[str, Any]) -> Algorithm:
    """The algorithm that `algorithm_table` wrote; one with parts of the user's own cannot be made again from a file."""
    parts: dict[str, Any] = {}
    for kind, value in table.items():
        if kind == "weights" or value == "none":
            continue
        if "class" in value:
            raise ConfigError(f"algorithm.{kind} was {value['shown']}, a part of your own, which a file cannot bring back.")
        parts[kind] = check_part(kind, value, f"algorithm.{kind}").make(f"algorithm.{kind}")
    weights = table.get("weights")
    return Algorithm(**parts, weights=None if weights == "none" else weights)
