"""Runs in a folder that release exact models, and federations that share data: what a sum over ledgers must not overlook."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from equipoise.errors import CheckpointError
from equipoise.experiment.run_files import RunFolder
from equipoise.privacy.ledger import FILE, read_entries
from equipoise.runs.checkpoint import read_checkpoint

WITHOUT_NOISE = (None, "none", "secure_aggregation")  # names of privacy in config.toml that add no noise


@dataclass(frozen=True)
class OpenRun:
    """A run without noise: its folder, how many rounds it made, and the fingerprint of its data ("": not known)."""

    folder: str
    rounds: int
    data: str


def find_open_runs(folder: Path) -> list[OpenRun]:
    """The runs without noise in a folder that have begun: those of secure sums, too, whose sums and model are exact."""
    configs = sorted(folder.glob("**/config.toml")) if folder.is_dir() else []
    return [_read(config.parent) for config in configs if _is_open(config)]


def _is_open(config: Path) -> bool:
    try:
        algorithm = tomllib.loads(config.read_text(encoding="utf-8"))["algorithm"]
        privacy = algorithm.get("privacy")
    except (OSError, ValueError, KeyError, AttributeError):
        return False  # no run
    return (privacy.get("name") if isinstance(privacy, dict) else privacy) in WITHOUT_NOISE


def _read(path: Path) -> OpenRun:
    try:
        saved = read_checkpoint(RunFolder(path).checkpoint).runs[0]
    except CheckpointError:
        return OpenRun(str(path), 0, "")
    return OpenRun(str(path), saved.state.round, saved.identity.get("data", "").rpartition(", ")[2])


def group_data(folder: Path) -> dict[str, str]:
    """For the data sets of federations in a folder that share the data of a node: one name for all of them, by fingerprint.

    The fingerprint of a federation changes with the policies and with the nodes that take part. What two runs reveal about a
    node that took part in both adds up all the same. federation.json has a keyed hash of each node's data.
    """
    groups: list[tuple[dict[str, None], set[tuple[str, str]]]] = []
    for roster in sorted(folder.glob("**/federation.json")) if folder.is_dir() else ():
        ids, nodes = _data_of(roster.parent), _nodes_of(roster)
        together = [group for group in groups if group[1] & nodes]
        groups = [group for group in groups if not group[1] & nodes]
        names = dict.fromkeys([*(name for group in together for name in group[0]), *ids])
        groups.append((names, nodes.union(*(group[1] for group in together))))
    return {name: ", ".join(names) for names, _ in groups for name in names}


def _data_of(path: Path) -> Iterable[str]:
    """The fingerprints that the runs of a folder give to their data."""
    if (path / FILE).exists():
        return dict.fromkeys(entry.data for entry in read_entries(path / FILE))
    return filter(None, [_read(path).data])


def _nodes_of(roster: Path) -> set[tuple[str, str]]:
    try:
        members = json.loads(roster.read_text(encoding="utf-8"))["clients"]
        return {(member["client"], member["fingerprint"]) for member in members}
    except (OSError, ValueError, KeyError, TypeError):
        return set()
