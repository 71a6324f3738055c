"""The models of a run by version: found on disk, named by the hash of their files, and opened only if they are unchanged."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any
from urllib.parse import quote

from equipoise.core.plain_text import parse_json
from equipoise.data.tables import Schema
from equipoise.errors import EquipoiseError
from equipoise.experiment.family_files import (
    LARGEST,
    MANIFEST,
    MEMBERS,
    SAFETENSORS,
    SERVED,
    SINGLE,
    SINGLE_MANIFEST,
    VERSIONS,
    FamilyManifest,
    StoredFile,
    StoredMember,
)
from equipoise.serve.cached import Cached
from equipoise.serve.library import Library
from equipoise.serve.refusals import Damaged, Gone
from equipoise.serve.safe_files import mark_of, open_below

LATEST = "latest"
LARGEST_SCHEMA = 16 * 2**20


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

    def member(self, value: str) -> StoredMember:
        """A member by the value of the knob, or by its name in addresses, "tail-0.5"; "model" of a run that is no family."""
        for member in self.manifest.members:
            if value in ({SINGLE} if self.single else {member.folder, repr(member.value), f"{member.value:g}"}):
                return member
        known = SINGLE if self.single else ", ".join(f"{member.value:g}" for member in self.manifest.members)
        raise Gone(f"There is no model at {value[:40]!r}. The models are {known}.")


class ModelStore:
    """The models of all runs of a library."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self._versions, self._digests, self._schemas = Cached(64), Cached(512), Cached(32)

    def versions(self, run: str) -> list[ModelVersion]:
        """The versions of a run's models, oldest first; none before it has ended."""
        return self._found(run)[0]

    def _found(self, run: str) -> tuple[list[ModelVersion], list[str]]:
        """The versions of a run's models, and what is wrong with manifests that cannot be read."""
        path = self.library.path(run)
        files = [MANIFEST], [SINGLE_MANIFEST], [SAFETENSORS], [VERSIONS]
        return self._versions.get(run, tuple(mark_of(path, steps) for steps in files), lambda: find_versions(path))

    def version(self, run: str, name: str) -> ModelVersion:
        """A version by its name, or the latest."""
        found, wrong = self._found(run)
        if not found:
            why = "has no models on disk"
            if self.library.state(run).status != "finished":
                why = "has no models yet: it has not ended"
            raise Gone(f"The run {run!r} {why}. {' '.join(wrong)}".strip())
        if name == LATEST:
            return found[-1]
        for each in found:
            if each.name == name:
                return each
        names = ", ".join(version.name for version in found)
        raise Gone(f"The run {run!r} has no version {name[:40]!r}. There are {names}; or ask for {LATEST}.")

    def open(self, run: str, version: ModelVersion, member: StoredMember, file: str) -> tuple[BufferedReader, StoredFile]:
        """A file of a member, checked against its checksum, and its entry in the manifest."""
        stored = member.files.get(file) if file in SERVED else None
        if stored is None:
            why = f": {member.no_onnx.rstrip('.')}" if file.endswith(".onnx") and member.no_onnx else ""
            raise Gone(f"There is no {file[:40]!r} of {member.name or 'this model'}{why}. There are {', '.join(member.files)}.")
        place = version.place(member, file)
        try:
            opened = open_below(self.library.path(run), place)
        except OSError as failure:
            raise Gone(f"{file} of this version is gone from the disk, or is no plain file.") from failure
        about = os.fstat(opened.fileno())
        mark = (about.st_ino, about.st_mtime_ns, about.st_size)
        try:
            digest = self._digests.get((run, *place), mark, lambda: hashlib.file_digest(opened, "sha256").hexdigest())
            if digest != stored.sha256 or about.st_size != stored.bytes:
                words = f"{file} of version {version.name} is not what it was when it was written: versions do not change."
                raise Damaged(words)
            opened.seek(0)
        except BaseException:
            opened.close()
            raise
        return opened, stored

    def schema(self, run: str, version: ModelVersion) -> dict[str, Any] | None:
        """How each column is read, if the data are a table."""
        path, steps = self.library.path(run), [*version.folder, "schema.json"]
        return self._schemas.get((run, *steps), mark_of(path, steps), lambda: _read_schema(path, steps))

    def listing(self, run: str) -> dict[str, Any]:
        """The versions of a run's models and their files, as JSON."""
        latest = self.version(run, LATEST)
        manifest = latest.manifest
        return {
            "run": run, "latest": latest.name, "knob": None if latest.single else manifest.knob,
            "signature": None if manifest.signature is None else manifest.signature.to_table(),
            "classes": list(manifest.classes), "judged_on": manifest.judged_on, "error_is_loss": manifest.error_is_loss,
            "schema": self.schema(run, latest) is not None,
            "versions": [
                {"version": version.name, "models": [
                    {"model": member.folder, "name": member.name, "value": None if version.single else member.value,
                     "no_onnx": member.no_onnx,
                     "files": {
                         name: {"bytes": file.bytes, "sha256": file.sha256, "url": file_address(run, version, member, name)}
                         for name, file in member.files.items() if name in SERVED
                     }}
                    for member in version.manifest.members
                ]}
                for version in self.versions(run)
            ],
        }  # fmt: skip


def models_address(run: str) -> str:
    """Where the models of a run are listed."""
    return f"/api/runs/{quote(run, safe='')}/models"


def file_address(run: str, version: ModelVersion, member: StoredMember, name: str) -> str:
    """The address of a file of a model."""
    return f"{models_address(run)}/{quote(member.folder)}/{version.name}/{quote(name)}"


def find_versions(path: Path) -> tuple[list[ModelVersion], list[str]]:
    """The versions in a run's folder, oldest first, and what is wrong with manifests that cannot be read."""
    found, wrong = [], []
    for folder in ((), *_version_folders(path)):
        for name in (MANIFEST, SINGLE_MANIFEST) if not folder else (MANIFEST,):
            try:
                with open_below(path, [*folder, name]) as file:
                    manifest = FamilyManifest.of_bytes(file.read(LARGEST), "/".join([*folder, name]))
                found.append(ModelVersion(manifest.version, folder, manifest, single=name == SINGLE_MANIFEST))
            except OSError:
                continue
            except EquipoiseError as failure:  # damaged, or being written
                wrong.append(str(failure))
            break
        else:
            if not folder and (bare := _without_manifest(path)) is not None:
                found.append(bare)
    return found, wrong


def _version_folders(path: Path) -> Iterator[tuple[str, ...]]:
    try:
        numbers = sorted(int(each.name) for each in os.scandir(path / VERSIONS) if each.name.isdecimal())
    except OSError:
        return
    yield from ((VERSIONS, str(number)) for number in numbers)


def _without_manifest(path: Path) -> ModelVersion | None:
    """The model of a run that has no manifest: the files that lie in its folder."""
    files = {}
    for name in SERVED:
        try:
            with open_below(path, [name]) as file:
                files[name] = StoredFile(hashlib.file_digest(file, "sha256").hexdigest(), os.fstat(file.fileno()).st_size)
        except OSError:
            continue
    if SAFETENSORS not in files:
        return None
    why = f"this run has no {SINGLE_MANIFEST}. Write it: equipoise export {path.name}"
    manifest = FamilyManifest(SINGLE, "", "", False, (StoredMember(0.0, SINGLE, SINGLE, files, why),))
    return ModelVersion(manifest.version, (), manifest, single=True)


def _read_schema(path: Path, steps: list[str]) -> dict[str, Any] | None:
    try:
        with open_below(path, steps) as file:
            text = file.read(LARGEST_SCHEMA).decode()
        Schema.from_json(text)
        read: dict[str, Any] = parse_json(text)
        return read
    except (OSError, ValueError, RecursionError):
        return None
