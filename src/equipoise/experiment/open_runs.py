"""Runs in a folder that release exact models, and federations that share data: what a sum over ledgers must not overlook."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from equipoise.core.plain_text import parse_json, parse_toml
from equipoise.errors import CheckpointError
from equipoise.experiment.run_files import RunFolder
from equipoise.privacy.common_clients import join_data, marks_in
from equipoise.privacy.ledger import FILE, find_ledgers, read_entries
from equipoise.runs.checkpoint import read_place

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
        algorithm = parse_toml(config)["algorithm"]
        privacy = algorithm.get("privacy")
    except (OSError, ValueError, KeyError, AttributeError):
        return False  # no run
    return (privacy.get("name") if isinstance(privacy, dict) else privacy) in WITHOUT_NOISE


def _read(path: Path) -> OpenRun:
    try:
        reached, identity = read_place(RunFolder(path).checkpoint)
    except CheckpointError:
        return OpenRun(str(path), 0, "")
    return OpenRun(str(path), reached, identity.get("data", "").rpartition(", ")[2])


def group_data(folder: Path) -> dict[str, str]:
    """For the data sets of runs in a folder that have clients in common: one name for all of them, by fingerprint.

    What two runs reveal about a client that is in both adds up, also if its examples were split differently. Data sets are
    joined if they come from one file, if ledgers have marks of clients in common, or if federations share the data of a node.
    (The fingerprint of a federation changes with the policies and with the nodes; federation.json has a keyed hash of each
    node's data.)
    """
    return join_data(_marked(folder))


def _marked(folder: Path) -> Iterator[tuple[Iterable[str], set[tuple[str, ...]]]]:
    """The data sets of the runs in a folder, with what they may have in common."""
    if folder.is_dir():
        for roster in sorted(folder.glob("**/federation.json")):
            yield _data_of(roster.parent), _nodes_of(roster)
        for config in sorted(folder.glob("**/config.toml")):
            if file := _file_of(config):
                yield _data_of(config.parent), {("file", file)}
    for path in find_ledgers(folder):
        yield from marks_in(read_entries(path))


def _file_of(config: Path) -> str:
    """The file or the folder that the data of a run are read from; empty if they are drawn, or not known."""
    try:
        data = parse_toml(config)["data"]
        found = data.get("path", data.get("folder", ""))
    except (OSError, ValueError, KeyError, AttributeError):
        return ""
    return f"{data.get('name')} {found}" if isinstance(found, str) and found not in ("", "none") else ""


def _data_of(path: Path) -> Iterable[str]:
    """The fingerprints that the runs of a folder give to their data."""
    if (path / FILE).exists():
        return dict.fromkeys(entry.data for entry in read_entries(path / FILE))
    return filter(None, [_read(path).data])


def _nodes_of(roster: Path) -> set[tuple[str, ...]]:
    try:
        members = parse_json(roster)["clients"]
        return {("node", member["client"], member["fingerprint"]) for member in members}
    except (OSError, ValueError, KeyError, TypeError):
        return set()
