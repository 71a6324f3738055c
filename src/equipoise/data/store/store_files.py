"""The files of a store: flat binary arrays, a checksum of every block of them, and a manifest that says what they mean.

A store is a folder with `manifest.json` and a folder for each set of clients: `clients`, or `train`, `validation` and
`test`. A set has the files `ids.text` and `ids.offsets`, `keys` (of random streams), `offsets` (of clients into rows), and for
each leaf of the inputs and targets `x.0.values`, with `x.0.offsets` if it holds sequences. Beside each file lie the checksums
of its whole blocks; the checksum of the rest is in the manifest. Files only grow: what a manifest describes stays valid while
clients are appended. `schema.json` says how the columns of a table were encoded.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from equipoise.core.numbers import Numbers
from equipoise.core.plain_safetensors import MOST_AXES
from equipoise.core.plain_text import open_plain, parse_json, typed
from equipoise.core.trees import leaves
from equipoise.data.clients.client_set import ClientSet
from equipoise.data.clients.leaves import LabelRange, tree_like
from equipoise.data.clients.ragged import Ragged
from equipoise.data.clients.store_state import StoredIds, StoreState, file_stat
from equipoise.data.store.mapped_files import map_file
from equipoise.data.tables.schema import Schema
from equipoise.errors import FileGuard, InvalidData

FORMAT = 1
BLOCK_BYTES = 1 << 22
DIGEST_BYTES = 20
MANIFEST, PROGRESS, SCHEMA, CHECKSUMS = "manifest.json", "progress.json", "schema.json", ".checksums"
SETS = "clients", "train", "validation", "test"
AGAIN = "Copy the store again, or write it again."
Content = dict[str, Any]
_LARGEST = 3.4e38  # of what float32 holds
# The types of what a manifest says of all its clients, of their inputs or targets, of one tensor of these,
# of a file, and of a set.
_HEADER: Content = {
    "block": int, "name": str, "classes": int, "ignore_index": int, "schema": str | None, "scale": list[float | None],
    "shift": list[float | None],
}  # fmt: skip
_TREE: Content = {"kind": Literal["tensor", "tuple", "dict"], "names": list[str] | None, "leaves": list[dict[str, Any]]}
_TYPES = Literal[
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"
]  # fmt: skip
_LEAF: Content = {"type": _TYPES, "shape": list[int], "ragged": dict[str, Any] | None}
_RAGGED: Content = {"pad": float, "mask": str | None}
_PART: Content = {"bytes": int, "rest": str}
_SET: Content = {
    "clients": int, "examples": int, "labels": list[int | bool] | None, "longest": dict[str, int], "files": dict[str, int],
}  # fmt: skip


def block_digest(data: Any = b"") -> Any:
    """The hash of a block: SHA-1, which is fast and finds every accident; it is no protection from forgery."""
    return hashlib.sha1(data, usedforsecurity=False)


def describe_tree(tree: Any) -> Content:
    """The structure of inputs or targets, as a manifest says it."""
    names = list(tree) if isinstance(tree, dict) else None
    kind = "dict" if names is not None else "tuple" if isinstance(tree, tuple) else "tensor"
    return {"kind": kind, "names": names, "leaves": [_describe_leaf(leaf) for leaf in leaves(tree)]}


def _describe_leaf(leaf: Any) -> Content:
    ragged = {"pad": leaf.pad, "mask": leaf.mask} if isinstance(leaf, Ragged) else None
    shape = leaf.step_shape if isinstance(leaf, Ragged) else leaf.shape[1:]
    return {"type": str(leaf.dtype).removeprefix("torch."), "shape": list(shape), "ragged": ragged}


def describe_clients(clients: ClientSet) -> Content:
    """What all clients of a store share."""
    units = {name: list(map(_number, leaves(tree))) for name, tree in (("scale", clients.scale), ("shift", clients.shift))}
    return {"x": describe_tree(clients.x), "y": describe_tree(clients.y), **units}


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def array_bytes(values: Tensor) -> Numbers:
    """The bytes of a tensor, (B,) uint8."""
    flat: Numbers = values.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return flat


def contents(clients: ClientSet, before: dict[str, int], examples: int) -> dict[str, Numbers]:
    """The bytes that some clients add to each file, which held `before` bytes, and the number of their examples."""
    ids = [name.encode() for name in clients.ids]
    lengths = torch.tensor([len(name) for name in ids])
    files: dict[str, Any] = {
        "ids.text": np.frombuffer(b"".join(ids), np.uint8),
        "ids.offsets": (lengths.cumsum(0), before.get("ids.text", 0)),
        "keys": clients.host_keys,
        "offsets": (clients.offsets[1:], examples),
    }
    for name, leaf in leaf_names(clients).items():
        files[f"{name}.values"] = leaf.values if isinstance(leaf, Ragged) else leaf
        if isinstance(leaf, Ragged):
            step = leaf.values.element_size() * leaf.step_shape.numel()
            files[f"{name}.offsets"] = (leaf.offsets[1:], before.get(f"{name}.values", 0) // max(step, 1))
    return {name: _file_bytes(part, first=not before.get(name)) for name, part in files.items()}


def leaf_names(clients: ClientSet) -> dict[str, Any]:
    """The leaves of the inputs and targets by the names of their files."""
    trees = {"x": clients.x, "y": clients.y}
    return {f"{which}.{place}": leaf for which, tree in trees.items() for place, leaf in enumerate(leaves(tree))}


def _file_bytes(part: Any, first: bool) -> Numbers:
    if isinstance(part, np.ndarray):
        return part
    if isinstance(part, Tensor):
        return array_bytes(part)
    ends, before = part  # offsets go on where the file stopped, and begin with 0
    return array_bytes(torch.cat([torch.zeros(int(first), dtype=torch.int64), ends + before]))


def read_content(path: Path) -> Content:
    """The manifest of a store, or its note of progress, checked: what it says of files fits together."""
    with FileGuard(path, InvalidData, cure=AGAIN):
        content: Content = parse_json(path, finite=True)
        if content["format"] != FORMAT:
            raise ValueError(f"it has the format {content['format']!r}, but this version reads {FORMAT}")
        if path.name == MANIFEST:
            _ = [typed(part, _PART, strict=True) for entry in content["sets"].values() for part in entry["files"].values()]
            _refuse_garbled(content, {name: as_progress_entry(entry) for name, entry in content["sets"].items()})
        else:
            if typed(content, {"append": bool, "base": dict[str, int]}, strict=True)["base"].keys() != content["sets"].keys():
                raise ValueError("it does not say how many clients of each set were there before")
            _refuse_garbled(content["header"], content["sets"])
        return content


def _refuse_garbled(header: Content, sets: Content) -> None:
    """Raise an error unless the header of a store makes sense, and the sizes of the files of its sets follow from it."""
    good = (
        typed(header, _HEADER, strict=True)["block"] > 0 and header["classes"] >= 0 and len(sets) > 0 and set(sets) <= set(SETS)
    )
    for which in ("x", "y"):
        form, names, parts = (typed(header[which], _TREE, strict=True)[key] for key in _TREE)
        alone = len(parts) == 1 if form == "tensor" else len(parts) > 0
        good &= len(set(names)) == len(names) == len(parts) > 0 if form == "dict" else names is None and alone
        for leaf in parts:
            shape = typed(leaf, _LEAF, strict=True)["shape"]
            good &= len(shape) <= MOST_AXES and all(size > 0 for size in shape)
            good &= leaf["ragged"] is None or str(typed(leaf["ragged"], _RAGGED, strict=True)["mask"]).isidentifier()
    units = [*header["scale"], *header["shift"]]
    good &= len(units) == 2 * len(header["x"]["leaves"]) and all(abs(unit or 0) <= _LARGEST for unit in units)
    if not good:
        raise ValueError("it describes clients that no store has")
    for name, entry in sets.items():
        wanted, files = _sizes(header, typed(entry, _SET, strict=True)), entry["files"]
        if entry["clients"] and not (files.keys() == wanted.keys() and all(map(_fits, files.values(), wanted.values()))):
            raise ValueError(f"the sizes of the files of {name} do not fit its {entry['clients']} clients")
        classes = header["y"]["kind"] == "tensor" and "float" not in header["y"]["leaves"][0]["type"]
        if entry["clients"] and (len(entry["labels"] or ()) == 3) != classes:
            raise ValueError(f"it does not say which classes {name} has")


def _sizes(header: Content, entry: Content) -> dict[str, int]:
    """The bytes of each file of a set by what the manifest says; below zero: any multiple of them."""
    clients, examples, longest = entry["clients"], entry["examples"], entry["longest"]
    if not 0 <= clients <= examples:
        raise ValueError(f"it has {clients} clients of {examples} examples")
    sizes = {"ids.text": -1, "ids.offsets": 8 * (clients + 1), "keys": 8 * clients, "offsets": 8 * (clients + 1)}
    for name, leaf in ((f"{which}.{place}", leaf) for which in "xy" for place, leaf in enumerate(header[which]["leaves"])):
        row = getattr(torch, leaf["type"]).itemsize * math.prod(leaf["shape"])
        sizes[f"{name}.values"] = row * examples if leaf["ragged"] is None else -row
        if leaf["ragged"] is not None:
            sizes[f"{name}.offsets"] = 8 * (examples + 1)
            if examples and not 0 < longest[name] <= entry["files"][f"{name}.values"] // row:
                raise ValueError(f"its longest sequence of {name} has {longest[name]} steps")
    return sizes


def read_manifest(path: Path) -> Content:
    """The manifest of a finished store, checked against the sizes of the files and against their checksums' own checksum."""
    if not (path / MANIFEST).exists():
        if (path / PROGRESS).exists():
            done = sum(each["clients"] for each in read_content(path / PROGRESS)["sets"].values())
            raise InvalidData(
                f"{path}: its writing was interrupted after {done} clients. Start the same write_store(…) again; it goes on "
                "there."
            )
        raise InvalidData(
            f"{path} is no store: it has no {MANIFEST}. Write one by data.write_store(clients, path), or "
            "`equipoise data convert SOURCE STORE`."
        )
    manifest = read_content(path / MANIFEST)
    growing = (path / PROGRESS).exists()  # an append that goes on, or was interrupted
    for name, entry in manifest["sets"].items():
        for file, part in entry["files"].items():
            _refuse_size(path / name / file, part["bytes"], growing)
            _refuse_size(path / name / f"{file}{CHECKSUMS}", part["bytes"] // manifest["block"] * DIGEST_BYTES, growing)
        if set_digest(path, manifest, name) != entry.get("digest"):
            raise InvalidData(
                f"{path}: {MANIFEST} and the checksums of {name} do not fit together; one of them was changed. {AGAIN}"
            )
    return manifest


def _refuse_size(file: Path, wanted: int, growing: bool) -> None:
    found = file_stat(file)
    if found is None or found[1] < wanted or (found[1] > wanted and not growing):
        has = "does not exist" if found is None else f"has {found[1]} bytes"
        raise InvalidData(
            f"{file} {has}, but the manifest says {wanted} bytes: the store was cut or changed. Copy it again, or "
            "write it again."
        )


def _fits(size: int, wanted: int) -> bool:
    return size == wanted if wanted >= 0 else size > 0 and size % wanted == 0


def set_digest(path: Path, manifest: Content, name: str) -> str:
    """The digest of a set of clients: of what the manifest says, and of all checksums of its files."""
    entry = manifest["sets"][name]
    shared = {key: value for key, value in manifest.items() if key not in ("name", "sets")}
    described = {key: value for key, value in entry.items() if key != "digest"}
    digest = block_digest(json.dumps([shared, name, described], sort_keys=True).encode())
    for file, part in entry["files"].items():
        with open_plain(path / name / f"{file}{CHECKSUMS}") as checksums:
            digest.update(checksums.read(part["bytes"] // manifest["block"] * DIGEST_BYTES))
    return str(digest.hexdigest())


def schema_digest(schema: Schema | None) -> str | None:
    """What a manifest says of the schema of a table."""
    return None if schema is None else str(block_digest(schema.to_json().encode()).hexdigest())


def read_schema(path: Path, manifest: Content) -> Schema | None:
    """The schema of a store of a table; None if it has none."""
    if manifest["schema"] is None:
        return None
    found = Schema.load(path / SCHEMA)
    if schema_digest(found) != manifest["schema"]:
        raise InvalidData(f"{path / SCHEMA} is not the schema that the store was written with. Copy the store again.")
    return found


def mapped_clients(path: Path, header: Content, name: str, entry: Content, digest: str = "") -> ClientSet:
    """A set of clients of a store whose tensors lie on disk; nothing is read."""
    folder, sizes = path / name, {file: part["bytes"] for file, part in entry["files"].items()}
    integers = {
        file: map_file(folder / file, size).view(torch.int64)
        for file, size in sizes.items()
        if file == "keys" or file.endswith("offsets")
    }

    def tree(which: str) -> Any:
        described = header[which]
        parts = [
            _mapped_leaf(folder, f"{which}.{place}", leaf, sizes, integers, entry)
            for place, leaf in enumerate(described["leaves"])
        ]
        return tree_like(_skeleton(described), parts)

    text = map_file(folder / "ids.text", sizes["ids.text"]).numpy()
    watched = [MANIFEST, *(f"{name}/{file}" for file in sizes)]
    states = tuple((file, state) for file in watched if (state := file_stat(path / file)) is not None)
    labels = entry["labels"]
    return ClientSet.trusted(
        x=tree("x"),
        y=tree("y"),
        offsets=integers["offsets"],
        ids=StoredIds(text, integers["ids.offsets"].numpy(), integers["keys"].numpy()),
        scale=tree_like(_skeleton(header["x"]), header["scale"]),
        shift=tree_like(_skeleton(header["x"]), header["shift"]),
        source=str(path),
        host_keys=integers["keys"],
        label_ranges={header["ignore_index"]: LabelRange(*labels) if labels is not None else None},
        store=StoreState(path, digest, states),
    )


def _skeleton(described: Content) -> Any:
    """A tree of the described structure, without leaves."""
    if described["kind"] == "dict":
        return dict.fromkeys(described["names"])
    return tuple(described["leaves"]) if described["kind"] == "tuple" else None


def _mapped_leaf(
    folder: Path, name: str, leaf: Content, sizes: dict[str, int], integers: dict[str, Tensor], entry: Content
) -> Any:
    kind, shape = getattr(torch, leaf["type"]), leaf["shape"]
    values = map_file(folder / f"{name}.values", sizes[f"{name}.values"]).view(kind)
    if leaf["ragged"] is None:
        return values.view(entry["examples"], *shape)
    steps = values.view(-1, *shape)
    offsets = integers[f"{name}.offsets"]
    return Ragged.trusted(steps, offsets, **leaf["ragged"], longest=entry["longest"][name])


def as_progress_entry(entry: Content) -> Content:
    """The entry of a set in a manifest as a note of progress has it: files with their bytes, and no digest."""
    kept = {key: value for key, value in entry.items() if key != "digest"}
    return kept | {"files": {file: part["bytes"] for file, part in entry["files"].items()}}


def as_manifest_entry(entry: Content) -> Content:
    """The entry of a set in a note of progress as a manifest has it, without checksums."""
    return entry | {"files": {file: {"bytes": size} for file, size in entry["files"].items()}}
