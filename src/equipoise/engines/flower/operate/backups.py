"""Backup and restore of the folder of a server or a node: one archive with checksums, and the database copied whole."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import sqlite3
import tarfile
import tempfile
from pathlib import Path

from equipoise.core.files import make_folder, move
from equipoise.core.plain_text import open_plain
from equipoise.core.unpacking import Unpacked
from equipoise.errors import ConfigError, FileGuard

SKIPPED = ("__pycache__", ".server.lock", ".lock")
DATABASE = "superlink.db"
SUMS = "SHA256SUMS"


def back_up(folder: Path, archive: Path) -> int:
    """Write all files of a folder into a new archive that only its owner can read; how many there are.

    The SuperLink may run meanwhile: SQLite copies its database as it is at one moment.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder.")
    if archive.exists():
        raise ConfigError(f"{archive} is there already, and a backup replaces none. Name another file.")
    make_folder(archive.resolve().parent)
    beside = archive.with_name(f".{archive.name}.{os.getpid()}.tmp")
    sums, count = [], 0
    try:
        with (
            open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as raw,
            tarfile.open(fileobj=raw, mode="w:gz") as tar,
        ):
            for file in sorted(folder.rglob("*")):
                name = file.relative_to(folder)
                if not file.is_file() or file.is_symlink() or any(part in SKIPPED for part in name.parts):
                    continue
                if file.resolve() in (beside.resolve(), archive.resolve()) or name.name.startswith(f"{DATABASE}-"):
                    continue
                content = _copy_of_database(file) if name.name == DATABASE else file.read_bytes()
                entry = tar.gettarinfo(str(file), arcname=name.as_posix())
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
                sums.append(f"{hashlib.sha256(content).hexdigest()}  {name.as_posix()}\n")
                count += 1
            listed = "".join(sums).encode()
            entry = tarfile.TarInfo(SUMS)
            entry.size, entry.mode = len(listed), 0o600
            tar.addfile(entry, io.BytesIO(listed))
        move(beside, archive)
    finally:
        beside.unlink(missing_ok=True)
    return count


def _copy_of_database(file: Path) -> bytes:
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / DATABASE
        source, target = sqlite3.connect(file), sqlite3.connect(copy)
        try:
            source.backup(target)
        finally:
            source.close()
            target.close()
        return copy.read_bytes()


def restore(archive: Path, folder: Path) -> int:
    """Unpack a backup into a new or empty folder, after all its checksums were compared; how many files there are."""
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty, and a restore replaces nothing. Name a new folder.")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = folder.resolve() / f".{os.getpid()}.tmp"
    try:
        with FileGuard(archive, ConfigError, "cannot be restored"):
            count = _unpack(archive, beside)
            for each in beside.iterdir():
                move(each, folder / each.name)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return count


def _unpack(archive: Path, folder: Path) -> int:
    """Unpack a backup into a new folder; how many files there are. What is too large, damaged or no backup is refused."""
    found: dict[str, str] = {}
    folder.mkdir(mode=0o700)
    with (
        open_plain(archive) as packed,
        gzip.open(packed) as stream,
        tarfile.open(fileobj=Unpacked(stream, archive), mode="r|") as tar,
    ):
        for entry in filter(tarfile.TarInfo.isfile, tar):
            target = (folder / entry.name).resolve()
            if entry.issparse() or not target.is_relative_to(folder):
                raise ValueError(f"it holds {entry.name!r}")
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL, entry.mode & 0o777), "w+b") as file:
                shutil.copyfileobj(tar.extractfile(entry), file)  # type: ignore[arg-type]
                file.seek(0)
                found[entry.name] = hashlib.file_digest(file, "sha256").hexdigest()
    found.pop(SUMS)
    listed = (line.partition("  ") for line in (folder / SUMS).read_text(encoding="utf-8").splitlines())
    if {name: digest for digest, _, name in listed} != found:
        raise ValueError("its checksums differ")
    (folder / SUMS).unlink()
    return len(found)
