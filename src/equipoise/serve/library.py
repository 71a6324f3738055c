"""What a server shows: the runs, families and studies below a folder, found again when folders come and go."""

from __future__ import annotations

import hashlib
import io
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

from equipoise.errors import EquipoiseError
from equipoise.experiment.family_files import (
    CLIENTS,
    LARGEST,
    MANIFEST,
    MEMBERS,
    SAFETENSORS,
    SERVED,
    FamilyManifest,
    StoredFile,
    StoredMember,
)
from equipoise.experiment.folder import ORDER
from equipoise.experiment.saved_family import VERSIONS
from equipoise.report.data.knob import MemberClients, knob_data
from equipoise.result import ClientTable
from equipoise.serve.run_states import RunState, WatchedRun
from equipoise.serve.safe_files import open_below

T = TypeVar("T")
DEEPEST = 3  # folders below the served one in which runs are looked for
MOST_RUNS = 5000
MOST_WATCHED = 200  # runs whose curves are kept in memory
MOST_TABLE = 256 * 2**20  # bytes of a table of clients that is read
RESCAN = 2.0  # seconds between two looks at the folders
LATEST = "latest"
SKIPPED = frozenset({MEMBERS, VERSIONS, "checkpoint"})


class Gone(EquipoiseError):
    """What was asked for is not there (any more); `status` is the answer's."""

    status = 404


class Withheld(Gone):
    """What was asked for may not be shown."""

    status = 403


class Damaged(Gone):
    """A file that is not what its manifest says."""

    status = 409


@dataclass
class Cached:
    """Values by key, the most recently used of them, each with a mark of what it was made from."""

    most: int
    kept: OrderedDict[Any, tuple[Any, Any]] = field(default_factory=OrderedDict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, key: Any, mark: Any, make: Callable[[], T]) -> T:
        """The value of a key; made again if its mark has changed."""
        with self.lock:
            if key in self.kept and self.kept[key][0] == mark:
                self.kept.move_to_end(key)
                found: T = self.kept[key][1]
                return found
        made = make()
        with self.lock:
            self.kept[key] = (mark, made)
            self.kept.move_to_end(key)
            while len(self.kept) > self.most:
                self.kept.popitem(last=False)
        return made


@dataclass(frozen=True)
class ModelVersion:
    """One version of the models of a run or a family: immutable, named by the hash of its files."""

    name: str
    folder: tuple[str, ...]  # below the run's folder
    manifest: FamilyManifest
    single: bool = False  # a run of its own, whose files lie in its folder

    def place(self, member: StoredMember, file: str) -> list[str]:
        """The steps from the run's folder to a file of a member."""
        return [*self.folder, file] if self.single else [*self.folder, MEMBERS, member.folder, file]


class Library:
    """Runs by id. An id is the path below the served folder with ~ for /; nothing else becomes a path."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._lock = threading.RLock()
        self._scanned = 0.0
        self._runs: dict[str, Path] = {}
        self._studies: dict[str, list[str]] = {}
        self._watched: OrderedDict[str, WatchedRun] = OrderedDict()
        self._versions, self._knobs, self._digests = Cached(64), Cached(32), Cached(512)

    # ---------------------------------------------------------------------------------------------------------------- folders

    def scan(self, *, force: bool = False) -> None:
        """Look for runs and studies, unless that was just done."""
        with self._lock:
            if not force and time.monotonic() - self._scanned < RESCAN:
                return
            runs: dict[str, Path] = {}
            studies: dict[str, list[str]] = {}
            for path, inside in _folders(self.root, DEEPEST):
                if (path / "config.toml").is_file() and not (path / "config.toml").is_symlink():
                    runs[self._id(path)] = path
                elif any((path / name / "config.toml").is_file() for name in inside[:50]):
                    studies[self._id(path)] = [self._id(path / name) for name in _in_order(path, inside)]
                if len(runs) >= MOST_RUNS:
                    break
            self._runs = runs
            self._studies = {
                name: [run for run in inside if run in runs] for name, inside in studies.items() if name != self._id(self.root)
                or (self.root / ORDER).is_file()
            }  # fmt: skip
            for name in [name for name in self._watched if name not in runs]:
                del self._watched[name]
            self._scanned = time.monotonic()

    def _id(self, path: Path) -> str:
        inside = path.relative_to(self.root).parts
        return "~".join(inside) if inside else self.root.name or "root"

    def ids(self) -> list[str]:
        """The ids of all runs, in order."""
        self.scan()
        return sorted(self._runs)

    def studies(self) -> dict[str, list[str]]:
        """The ids of studies, each with those of its runs."""
        self.scan()
        return {name: runs for name, runs in sorted(self._studies.items()) if runs}

    def path(self, run: str) -> Path:
        """The folder of a run."""
        self.scan()
        found = self._runs.get(run)
        if found is None or not found.is_dir():
            raise Gone(
                f"There is no run {run[:100]!r} here. It may have been moved or deleted; the list of runs is at /api/runs."
            )
        return found

    def watched(self, run: str) -> WatchedRun:
        """A run with its log, up to date."""
        path = self.path(run)
        with self._lock:
            found = self._watched.get(run)
            if found is None or found.path != path:
                found = self._watched[run] = WatchedRun(path)
            self._watched.move_to_end(run)
            while len(self._watched) > MOST_WATCHED:
                self._watched.popitem(last=False)
            found.refresh()
            return found

    def overview(self, run: str) -> dict[str, Any]:
        """A run in a few fields."""
        watched = self.watched(run)
        about, state = watched.about, watched.state()
        return {
            "id": run, "name": about.name, "kind": about.kind, "knob": about.knob, "values": list(about.values),
            "data": about.data, "model": about.model, "method": about.method, "seed": about.seed, "private": about.private,
            "privacy": about.privacy, **state.table(),
        }  # fmt: skip

    def state(self, run: str) -> RunState:
        """How a run stands."""
        return self.watched(run).state()

    # ----------------------------------------------------------------------------------------------------------------- models

    def versions(self, run: str) -> list[ModelVersion]:
        """The versions of a run's models, oldest first; none before it has ended."""
        path = self.path(run)
        mark = tuple(_mark(path, steps) for steps in ([MANIFEST], [SAFETENSORS], [VERSIONS]))
        return self._versions.get((run, "versions"), mark, lambda: list(self._find_versions(path)))

    def _find_versions(self, path: Path) -> Iterator[ModelVersion]:
        try:
            numbers = sorted(int(each.name) for each in os.scandir(path / VERSIONS) if each.name.isdecimal())
        except OSError:
            numbers = []
        for folder in ((), *((VERSIONS, str(number)) for number in numbers)):
            try:
                with open_below(path, [*folder, MANIFEST]) as file:
                    manifest = FamilyManifest.of_bytes(file.read(LARGEST), MANIFEST)
                yield ModelVersion(manifest.version, folder, manifest)
            except OSError:
                if not folder and (single := self._single(path)) is not None:
                    yield single
            except EquipoiseError:  # damaged, or being written
                continue

    def _single(self, path: Path) -> ModelVersion | None:
        """The models of a run that is no family: those of its folder."""
        files = {}
        for name in SERVED:
            try:
                with open_below(path, [name]) as file:
                    files[name] = StoredFile(hashlib.file_digest(file, "sha256").hexdigest(), os.fstat(file.fileno()).st_size)
            except OSError:
                continue
        if SAFETENSORS not in files:
            return None
        manifest = FamilyManifest("model", "", "", False, (StoredMember(0.0, "model", "", files),))
        return ModelVersion(manifest.version, (), manifest, single=True)

    def version(self, run: str, name: str) -> ModelVersion:
        """A version by its name, or the latest."""
        found = self.versions(run)
        if not found:
            why = "has no models yet: it has not ended" if self.state(run).status != "finished" else "has no models on disk"
            raise Gone(f"The run {run!r} {why}.")
        if name == LATEST:
            return found[-1]
        for each in found:
            if each.name == name:
                return each
        raise Gone(
            f"The run {run!r} has no version {name[:40]!r}. There are {', '.join(v.name for v in found)}; or ask for {LATEST}."
        )

    def member(self, version: ModelVersion, value: str) -> StoredMember:
        """A member of a version by the value of the knob, or by its name in addresses, "tail-0.5"; "model" of a single run."""
        for member in version.manifest.members:
            names = {"model"} if version.single else {member.folder, repr(member.value), f"{member.value:g}"}
            if value in names:
                return member
        known = ", ".join(f"{member.value:g}" for member in version.manifest.members) if not version.single else "model"
        raise Gone(f"There is no model at {value[:40]!r}. The models are {known}.")

    def open_model(self, run: str, version: ModelVersion, member: StoredMember, file: str) -> tuple[BufferedReader, StoredFile]:
        """A file of a member, checked against its checksum, and its entry in the manifest."""
        stored = member.files.get(file)
        if stored is None:
            why = f": {member.no_onnx}" if file.endswith(".onnx") and member.no_onnx else ""
            raise Gone(f"There is no {file[:40]!r} of {member.name or 'this model'}{why}. There are {', '.join(member.files)}.")
        place = version.place(member, file)
        try:
            opened = open_below(self.path(run), place)
        except OSError as failure:
            raise Gone(f"{file} of this version is gone from the disk, or is no plain file.") from failure
        about = os.fstat(opened.fileno())
        mark = (about.st_ino, about.st_mtime_ns, about.st_size)
        digest = self._digests.get((run, *place), mark, lambda: hashlib.file_digest(opened, "sha256").hexdigest())
        if digest != stored.sha256:
            opened.close()
            raise Damaged(f"{file} of version {version.name} is not what it was when it was written: versions do not change.")
        opened.seek(0)
        return opened, stored

    # ---------------------------------------------------------------------------------------------------------------- clients

    def tables(self, run: str, version: ModelVersion | None = None) -> list[MemberClients]:
        """The tables of clients of a run, one per member."""
        path = self.path(run)
        try:
            if version is None or version.single:
                return [MemberClients(0.0, self.watched(run).about.name, _read_table(path, [CLIENTS]))]
            manifest = version.manifest
            return [MemberClients(m.value, m.name, _read_table(path, version.place(m, CLIENTS))) for m in manifest.members]
        except (OSError, ValueError, KeyError, TypeError) as failure:  # pyarrow's errors are of these kinds
            raise Gone(f"The clients of {run!r} cannot be read: the run has not ended, or a file is damaged.") from failure

    def knob(self, run: str, version: ModelVersion) -> dict[str, Any]:
        """The numbers of a family's knob."""
        manifest, private = version.manifest, self.watched(run).about.private
        return self._knobs.get(
            (run, "knob"), (version.name, private),
            lambda: knob_data(
                manifest.knob, self.tables(run, version), manifest.judged_on, error_is_loss=manifest.error_is_loss,
                private=private,
            ),
        )  # fmt: skip

    def clients(self, run: str) -> dict[str, Any]:
        """All clients of a run with their errors, as columns; refused where the run protects single clients."""
        watched = self.watched(run)
        if watched.about.private:
            how = watched.about.privacy or "its privacy"
            raise Withheld(f"This run protects single clients ({how}), so the server shows none of them.")
        versions = self.versions(run)
        version = versions[-1] if versions else None
        mark = version.name if version is not None and not version.single else _mark(self.path(run), [CLIENTS])
        return self._knobs.get((run, "clients"), mark, lambda: client_columns(self.tables(run, version)))


def client_columns(members: list[MemberClients]) -> dict[str, Any]:
    """The columns of a table of all clients: client, split, examples, and an error per member."""
    first = members[0].clients
    columns: dict[str, Any] = {
        "client": list(first.client), "split": list(first.split), "examples": first.size.tolist(),
    }  # fmt: skip
    names = ["error"] if len(members) == 1 else [f"error, {member.name}" for member in members]
    for name, member in zip(names, members, strict=True):
        columns[name] = [
            value if value == value and abs(value) != float("inf") else None for value in member.clients.served_error.tolist()
        ]
    return columns


def _read_table(path: Path, steps: list[str]) -> ClientTable:
    with open_below(path, steps) as file:
        if os.fstat(file.fileno()).st_size > MOST_TABLE:
            raise ValueError("the table is too large")
        return ClientTable.from_parquet(io.BytesIO(file.read()))


def _mark(path: Path, steps: list[str]) -> tuple[int, int, int]:
    """What changes when a file or folder changes."""
    try:
        about = path.joinpath(*steps).lstat()
        return about.st_ino, about.st_mtime_ns, about.st_size
    except OSError:
        return 0, 0, 0


def _folders(root: Path, deepest: int) -> Iterator[tuple[Path, list[str]]]:
    """The folders below one, with the names of those inside each; links and hidden folders are not followed."""
    try:
        inside = sorted(
            each.name for each in os.scandir(root)
            if each.is_dir(follow_symlinks=False) and each.name not in SKIPPED
            and not each.name.startswith(".") and "~" not in each.name
        )  # fmt: skip
    except OSError:
        return
    yield root, inside
    if deepest and not (root / "config.toml").is_file():
        for name in inside:
            yield from _folders(root / name, deepest - 1)


def _in_order(path: Path, names: list[str]) -> list[str]:
    """The names of a study's runs in the order of the study."""
    try:
        with open_below(path, [ORDER]) as file:
            order = file.read(2**20).decode().splitlines()
    except (OSError, ValueError):
        return names
    return sorted(names, key=lambda name: order.index(name) if name in order else len(order))
