"""What the config.toml of a run says to a report: the algorithm and the options, read without any code of the user's own.

The folder of a run may come from someone else. Parts that the catalogue does not have are shown, never made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from equipoise.algorithm import Algorithm
from equipoise.errors import ConfigError
from equipoise.experiment import catalog, toml
from equipoise.experiment.config import PYTHON, RunConfig, installed_versions
from equipoise.experiment.config_tables import read_toml, section
from equipoise.experiment.part_config import check_part, describe_part
from equipoise.experiment.train_options import TrainRecord
from equipoise.experiment.values import NONE, check_value, toml_text

FEDERATION = "federation"  # the section of a federated run: its data are with the nodes, its model is the user's


@dataclass(frozen=True)
class RecordedPart:
    """A part that is not in the catalogue, as it showed itself."""

    shown: str

    def __repr__(self) -> str:
        return self.shown


@dataclass(frozen=True)
class RecordedAlgorithm:
    """An algorithm with parts that are not in the catalogue: a report shows it, and nothing can train with it."""

    risk: Any
    solver: Any
    aggregator: Any
    server: Any
    sampler: Any = None
    averaging: Any = None
    personal: Any = None
    privacy: Any = None
    weights: str | None = None

    def __repr__(self) -> str:
        return f"Algorithm({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in fields(self))})"


@dataclass(frozen=True, eq=False)
class RecordedConfig:
    """A run as its folder describes it to a report, and what else is known of it, in sections of their own."""

    made: Algorithm | RecordedAlgorithm
    train: TrainRecord
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    libraries: tuple[str, ...] = ("equipoise", "torch", "numpy")

    def algorithm(self) -> Algorithm | RecordedAlgorithm:
        """The algorithm that the folder describes."""
        return self.made

    def text(self) -> str:
        """The complete TOML."""
        tables = {**self.sections, "algorithm": algorithm_table(self.made), "train": self.train.table()}
        return toml.dumps({**tables, "versions": installed_versions(*self.libraries)})


def read_config(path: str | Path) -> RunConfig | RecordedConfig:
    """The config.toml of any run, for a report: of a configuration, of a federation, of Python. No code of the user's runs."""
    table = read_toml(path)
    if not table.keys() & {FEDERATION, PYTHON, "code"}:
        return RunConfig.of(table)
    try:
        types = {name: parameter.annotation for name, parameter in catalog.signature_of(TrainRecord).items()}
        given = {name: value for name, value in section(table, "train").items() if name in types}
        train = TrainRecord(**{name: check_value(value, types[name], f"train.{name}") for name, value in given.items()})
        sections = {name: section(table, name) for name in (FEDERATION, PYTHON, "family") if name in table}
        return RecordedConfig(read_algorithm(section(table, "algorithm")), train, sections)
    except (KeyError, TypeError) as failure:
        raise ConfigError(f"{path} is damaged: {failure}.") from failure


def algorithm_table(algorithm: Algorithm | RecordedAlgorithm) -> dict[str, Any]:
    """An algorithm as TOML tables; a part that is not in the catalogue by its class and how it shows itself."""
    table: dict[str, Any] = {"weights": algorithm.weights or NONE}
    for kind in (*catalog.ALGORITHM_PARTS, *catalog.OPTIONAL_PARTS):
        part = getattr(algorithm, kind)
        if part is None:
            table[kind] = NONE
            continue
        try:
            described = describe_part(kind, part)
            toml.dumps(described)  # TypeError: a parameter is an object that only Python can give
            table[kind] = described
        except (ConfigError, AttributeError, TypeError):
            table[kind] = {"class": f"{type(part).__module__}:{type(part).__qualname__}", "shown": repr(part)}
    return table


def read_algorithm(table: Mapping[str, Any]) -> Algorithm | RecordedAlgorithm:
    """The algorithm that a config.toml describes. Parts of the catalogue are made, others only shown."""
    parts: dict[str, Any] = {}
    for kind, value in table.items():
        if kind == "weights" or value == NONE:
            continue
        if kind not in (*catalog.ALGORITHM_PARTS, *catalog.OPTIONAL_PARTS):
            raise ConfigError(f"algorithm.{kind} is no part of an algorithm: the file is damaged.")
        if shown := _shown(value):
            parts[kind] = RecordedPart(shown)
        else:
            parts[kind] = check_part(kind, value, f"algorithm.{kind}").make(f"algorithm.{kind}")
    weights = None if table.get("weights") == NONE else table.get("weights")
    if any(isinstance(part, RecordedPart) for part in parts.values()):
        return RecordedAlgorithm(**parts, weights=weights)
    return Algorithm(**parts, weights=weights)


def _shown(value: Any) -> str | None:
    """How a report shows the table of a part that is, or holds, one of the user's own; None for parts of the catalogue."""
    table = {"name": value} if isinstance(value, str) else value
    if not isinstance(table, Mapping):
        return None
    if isinstance(table.get("shown"), str):
        return str(table["shown"])
    if not _names_own(table):
        return None
    return f"{table.get('name')}({', '.join(f'{k}={toml_text(v)}' for k, v in table.items() if k != 'name')})"


def _names_own(value: Any) -> bool:
    """Whether tables name, however deep, a part by import path."""
    if isinstance(value, Mapping):
        return ":" in str(value.get("name", "")) or any(map(_names_own, value.values()))
    return isinstance(value, list) and any(map(_names_own, value))
