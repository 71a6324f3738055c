"""Opening a store without reading it, and checking it by reading all of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from equipoise.core.plain_text import open_plain
from equipoise.core.task_trial import TRIED_ROWS
from equipoise.data.federated_data import FederatedData
from equipoise.data.file_access import PathLike
from equipoise.data.ragged import Ragged
from equipoise.data.splits import How, split
from equipoise.data.store_files import (
    CHECKSUMS,
    DIGEST_BYTES,
    Content,
    block_digest,
    leaf_names,
    mapped_clients,
    read_manifest,
    read_schema,
)
from equipoise.data.store_rows import RowCheck, refuse_bad_offsets, refuse_unrising, refuse_untrained
from equipoise.errors import InvalidData, InvalidParameter, require

_TRIED = 3  # clients whose rows are read before a run, to try the model on
_SHOWN = 5  # bad blocks in a message


def open_store(
    path: PathLike, *, split_by: How = "clients", validation: float = 0.0, test: float | None = None, seed: int = 0
) -> FederatedData:
    """Open a store that `write_store` wrote. It reads ids and sizes; inputs are read from the disk when they are used.

    Targets are read until each class was seen in a training client, unless `write_store` got `classes`. A share `test` of
    the clients (0.2 if nothing is said) and a share `validation` are kept apart, the same clients as `split_clients`
    chooses in memory. A store that was written from a `FederatedData` or a table has its splits and takes neither; that of
    a table has its `schema`.

    Source: your own data.

    >>> import tempfile
    >>> import equipoise as eq
    >>> folder = Path(tempfile.mkdtemp()) / "store"
    >>> eq.data.open_store(eq.data.write_store([("a", [[0.0], [1.0]], [0, 1]), ("b", [[2.0]], [1])], folder), test=0.5)
    FederatedData('store', train: 1 client / 2 examples, test: 1 client / 1 example)
    """
    folder = Path(path).expanduser().absolute()
    manifest = read_manifest(folder)
    sets = {name: mapped_clients(folder, manifest, name, entry, entry["digest"]) for name, entry in manifest["sets"].items()}
    about: Content = {key: manifest[key] for key in ("name", "classes", "ignore_index")}
    schema = read_schema(folder, manifest)
    for name, clients in sets.items():
        refuse_bad_offsets(folder / name, clients)
        owners = int(torch.searchsorted(clients.offsets, TRIED_ROWS)) if clients.has_sequences else _TRIED
        RowCheck(clients)(torch.arange(min(max(owners, _TRIED), len(clients))))
    if "clients" not in sets:
        given = {"split_by": split_by != "clients", "validation": bool(validation), "test": test is not None}
        for parameter in (name for name, changed in given.items() if changed):
            raise InvalidParameter(
                parameter, "must be left away: this store has its own splits", ", ".join(sets), "Open it by open_store(path)."
            )
        rest = sets.get("validation"), sets.get("test")
        return FederatedData(sets["train"], *rest, **about, schema=schema)
    require(
        split_by != "examples", "split_by", 'must be "clients" for a store of whole clients', split_by,
        "Split before writing: write_store(data.split_examples(clients), path), or write a FederatedData.",
    )  # fmt: skip
    data = split(sets["clients"], split_by, validation=validation, test=0.2 if test is None else test, seed=seed, **about)
    if not manifest["classes"]:
        refuse_untrained(data)
    return replace(data, schema=schema)


def refuse_changed_store(data: FederatedData) -> None:
    """Refuse data whose store changed on disk since it was opened; this takes microseconds, and nothing for data in memory.

    >>> import equipoise as eq
    >>> refuse_changed_store(eq.data.digits())  # data in memory
    """
    for store in {clients.store for clients in data.splits.values() if clients.store is not None}:
        store.refuse_changed()


class StoreCheck(NamedTuple):
    """What a store that was read and found good holds."""

    clients: int
    examples: int
    bytes: int


def check_store(path: PathLike) -> StoreCheck:
    """Read a whole store, and compare every block with its checksum and every offset with its neighbours.

    A block or an offset that is wrong is refused with its place. A good store gives its clients, examples and bytes.

    >>> import tempfile
    >>> import equipoise as eq
    >>> folder = Path(tempfile.mkdtemp()) / "store"
    >>> check_store(eq.data.write_store([("a", [[0.0], [1.0]], [0, 1]), ("b", [[2.0]], [1])], folder)).examples
    3
    """
    folder = Path(path).expanduser()
    manifest = read_manifest(folder)
    read_schema(folder, manifest)
    bad = [
        line
        for name, entry in manifest["sets"].items()
        for file, part in entry["files"].items()
        for line in _bad_blocks(folder / name / file, part, manifest["block"])
    ]
    if bad:
        more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        raise InvalidData(
            f"{folder}: {'; '.join(bad[:_SHOWN])}{more} changed since they were written. Copy the store again, or "
            "write it again."
        )
    for name, entry in manifest["sets"].items():
        _refuse_bad_offsets(folder, manifest, name, entry)
    entries = manifest["sets"].values()
    size = sum(part["bytes"] for entry in entries for part in entry["files"].values())
    return StoreCheck(sum(entry["clients"] for entry in entries), sum(entry["examples"] for entry in entries), size)


def _bad_blocks(file: Path, part: Content, block: int) -> list[str]:
    """The blocks of a file that do not fit their checksums, in words."""
    whole, rest = divmod(part["bytes"], block)
    bad = []
    with open_plain(file) as values, open_plain(file.with_name(f"{file.name}{CHECKSUMS}")) as checksums:
        for k in range(whole + bool(rest)):
            found = block_digest(values.read(block if k < whole else rest)).hexdigest()
            wanted = checksums.read(DIGEST_BYTES).hex() if k < whole else part["rest"]
            if found != wanted:
                bad.append(f"block {k} of {file.parent.name}/{file.name} (bytes {k * block} …)")
    return bad


def _refuse_bad_offsets(folder: Path, manifest: Content, name: str, entry: Content) -> None:
    clients = mapped_clients(folder, manifest, name, entry)
    refuse_bad_offsets(folder / name, clients)
    for leaf_name, leaf in leaf_names(clients).items():
        if isinstance(leaf, Ragged):
            refuse_unrising(folder / name / f"{leaf_name}.offsets", leaf.offsets, len(leaf.values), entry["examples"])
