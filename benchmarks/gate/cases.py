"""The runs of the gate, as the TOML files beside this one describe them, and which parts of the catalogue they have."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from benchmarks.gate import made

HERE = Path(__file__).parent
SECTIONS = ("data", "model", "algorithm", "train", "attack", "family")
PARTS = ("risk", "solver", "aggregator", "server", "sampler", "averaging", "personal", "privacy", "weights")
KEYS = {"base", "engines", "how", "resume", "quick", "choice", "needs", "expect", "methods", "seeds", "space", "covers",
        "server_app", "node", "keep", "close", "engine", "faults"}  # fmt: skip
KIND_OF = {"terms": "risk", "local_schedule": "schedule"}  # keys of tables that hold a part of another kind's name
ON_ENGINES = ("risk", "quantile", "solver", "schedule", "aggregator", "server", "sampler", "averaging", "personal", "privacy",
              "clip_rule", "attack", "model")  # fmt: skip
DEFAULTS = {"risk": "mean", "solver": "sgd", "aggregator": "weighted_mean", "server": "sgd", "sampler": "uniform",
            "averaging": "last"}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One run on one engine: the configuration, and what is done with it."""

    name: str
    engine: str
    how: str  # a function of `doing.py`
    table: dict[str, Any]  # the sections of a configuration
    given: dict[str, Any] = field(default_factory=dict)  # all other keys
    quick: bool = False

    @property
    def slug(self) -> str:
        """The name as a name of files."""
        return "".join(c if c.isalnum() else "-" for c in self.name)


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Tables laid over one another; a part with another name takes the place of the one before."""
    found = dict(base)
    for key, value in over.items():
        before = found.get(key)
        same = isinstance(value, Mapping) and isinstance(before, Mapping) and value.get("name") in (None, before.get("name"))
        found[key] = merged(before, value) if same and isinstance(before, Mapping) else value
    return found


def sections(run: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of a configuration in a run, where parts of the algorithm may stand alone."""
    named = {key: {"name": value} if isinstance(value, str) and key != "weights" else value for key, value in run.items()}
    parts = {key: named[key] for key in PARTS if key in named}
    return merged({key: named[key] for key in SECTIONS if key in named}, {"algorithm": parts} if parts else {})


def filled(value: Any, places: Mapping[str, Any]) -> Any:
    """A value with "{name}" replaced by the table of that name, and by paths inside of texts."""
    if isinstance(value, str):
        whole = places.get(value[1:-1]) if value[:1] + value[-1:] == "{}" else None
        if whole is None:
            for name, text in places.items():
                value = value.replace(f"{{{name}}}", text) if isinstance(text, str) else value
        return value if whole is None else whole
    if isinstance(value, Mapping):
        return {key: filled(inner, places) for key, inner in value.items()}
    return [filled(inner, places) for inner in value] if isinstance(value, list) else value


def all_cases(folder: Path, data: str = "") -> list[Case]:
    """Every run on each of its engines. `folder` holds what `made.write_all` wrote, `data` is the folder of real data."""
    places: dict[str, Any] = made.TABLES | {"made": str(folder), "data": data}
    bases = tomllib.loads((HERE / "bases.toml").read_text(encoding="utf-8"))
    found = []
    for file in sorted(HERE.glob("runs_*.toml")):
        content = tomllib.loads(file.read_text(encoding="utf-8"))
        usual = content.pop("usual", {})
        for name, run in content.items():
            run = merged(usual, run)
            unknown = set(run) - KEYS - set(SECTIONS) - set(PARTS)
            assert not unknown, f"{file.name}, {name}: unknown keys {unknown}"
            table = filled(merged(_base(bases, run.get("base", "plain")), sections(run)), places)
            given = filled({key: value for key, value in run.items() if key in KEYS}, places)
            how = run.get("how", "family" if "family" in run else "train")
            for engine in run.get("engines", ["loop", "simulator"]):
                train = _train(table["train"], engine)
                full = f"{file.stem.removeprefix('runs_')}: {name} @ {engine}"
                found.append(Case(full, engine, how, table | {"train": train}, given, run.get("quick", False)))
    assert len({case.slug for case in found}) == len(found), "two runs have one name"
    return sorted(found, key=lambda case: case.engine in ("flower", "ray"))  # a process with gRPC forks no workers any more


def _base(bases: Mapping[str, Any], name: str) -> dict[str, Any]:
    own = bases[name]
    return merged(_base(bases, own["base"]) if "base" in own else {}, sections(own))


def _train(train: Mapping[str, Any], engine: str) -> dict[str, Any]:
    """The section [train] for an engine; the simulator is told chunks, so that nothing is measured."""
    if engine == "simulator":
        return {"chunk_size": 5, "workers": 1} | dict(train) | {"engine": engine}
    kept = {key: value for key, value in train.items() if key not in ("chunk_size", "workers", "compiled")}
    return kept | {"engine": engine if engine in ("loop", "ray") else "loop"} | ({"workers": 2} if engine == "ray" else {})


def refusals() -> dict[str, dict[str, Any]]:
    """Combinations that are refused."""
    found: dict[str, dict[str, Any]] = tomllib.loads((HERE / "refused.toml").read_text(encoding="utf-8"))
    return found


def refused_table(run: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The configuration of a combination that is refused."""
    bases = tomllib.loads((HERE / "bases.toml").read_text(encoding="utf-8"))
    return filled(merged(_base(bases, run.get("base", "plain")), sections(run)), made.TABLES | {"made": str(folder)})


def parts_in(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every part that a configuration names, as (kind, name)."""
    kind = KIND_OF.get(key, key)
    if isinstance(value, str) and kind in (*ON_ENGINES, "data"):
        yield kind, value
    if isinstance(value, Mapping):
        if "name" in value and kind:
            yield kind, value["name"]
        elif kind in DEFAULTS and value:
            yield kind, DEFAULTS[kind]
        for inner, each in value.items():
            if inner not in ("name", "groups", "durations", "kinds"):
                yield from parts_in(each, inner)
    if isinstance(value, list):
        for each in value:
            yield from parts_in(each, key)


def without_run(catalogue: Mapping[str, list[str]], cases: list[Case]) -> list[str]:
    """The parts of the catalogue that no run has; those of algorithms need one on the loop and one on the simulator."""
    seen: set[tuple[str, str, str]] = set()
    for case in cases:
        tables = [case.table["algorithm"], {key: case.table[key] for key in ("data", "model", "attack") if key in case.table}]
        tables += case.given.get("methods", {}).values()
        seen |= {(kind, name, case.engine) for table in tables for kind, name in parts_in(table)}
        seen |= {(kind, name, case.engine) for kind, name in DEFAULTS.items() if kind not in case.table["algorithm"]}
        seen |= {
            ("engine", case.engine, case.engine),
            *(("function", name, case.engine) for name in case.given.get("covers", ())),
        }
    missing = []
    for kind, names in catalogue.items():
        for name in names:
            if kind in ON_ENGINES:
                missing += [f"{kind} {name} @ {e}" for e in ("loop", "simulator") if (kind, name, e) not in seen]
            elif not any((kind, name) == each[:2] for each in seen):
                missing.append(f"{kind} {name}")
    return missing


def wanted(cases: list[Case], only: str | None, quick: bool) -> list[Case]:
    """The runs that are asked for: whose name fits a pattern or holds its words, and the quick ones alone if so asked."""
    found = [case for case in cases if case.quick or not quick]
    return [case for case in found if only is None or fnmatch(case.name, only) or only.lower() in case.name.lower()]
