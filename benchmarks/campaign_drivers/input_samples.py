"""Valid inputs of every kind, their mutations, and packed files that are far larger than they look."""

from __future__ import annotations

import gzip
import io
import json
import random
import re
import shutil
import tempfile
import warnings
import zipfile
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import torch

import equipoise as eq
from campaign_drivers import scenes
from equipoise.export import onnx_files
from equipoise.runs.checkpoint import Checkpoints

CONFIG = """
[data]
name = "label_shift"
train_clients = 5
validation_clients = 2
test_clients = 2
examples = 6
[model]
name = "softmax"
[algorithm.risk]
name = "superquantile"
tail = 0.5
[algorithm.solver]
name = "sgd"
lr = 0.1
batch_size = 5
[train]
rounds = 2
clients_per_round = 3
seed = 0
"""
STUDY = """
[study]
seeds = 2
[methods.plain]
[methods.tail]
risk = {name = "superquantile", tail = 0.3}
[sweep]
"algorithm.solver.lr" = [0.03, 0.1]
"""
SEARCH = """
[search]
criterion = "validation_90"
seeds = 1
[search.space]
"algorithm.solver.lr" = [0.03, 0.1]
"""
NUMBERS = [
    "0",
    "-1",
    "1e308",
    "nan",
    "inf",
    "-inf",
    "99999999999999999999",
    "0.1",
    "1e-300",
    "9223372036854775807",
    "true",
    "[]",
    "{}",
]


@cache
def samples() -> dict[str, dict[str, bytes]]:
    """Valid inputs, by kind: the files of each, by name."""
    place = Path(tempfile.mkdtemp(prefix="campaign-samples-"))
    data = scenes.plain()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saving = Checkpoints(place / "run.safetensors", every=1)
        algorithm = eq.Algorithm(personal=eq.personal.Ditto(1.0), server=eq.server_opt.Adam(lr=0.1))
        result = eq.train(scenes.softmax(), data, algorithm, rounds=2, clients_per_round=4, checkpoint=saving, progress=False)
        result.save(place / "folder")
        eq.data.write_store(data, place / "store")
        eq.data.write_store(scenes.trees(), place / "tree store")
        noise = eq.privacy.DifferentialPrivacy(None, 1e-2, 0.5, noise_multiplier=0.8, method="rdp")
        private = {"rounds": 2, "clients_per_round": 4, "progress": False, "ledger": place / "ledgers" / "ledger.jsonl"}
        eq.train(scenes.softmax(), data, eq.Algorithm(privacy=noise), **private).save(place / "private folder")
        onnx, onnx_files.why_no_onnx = onnx_files.why_no_onnx, lambda: "it takes long"  # type: ignore[assignment]
        eq.train_family(scenes.softmax(), data, tails=[1.0, 0.5], rounds=2, clients_per_round=4).save(place / "family")
        onnx_files.why_no_onnx = onnx
        scenes.table().schema.save(place / "schema.json")
    arrays = io.BytesIO()
    x, y, who = (np.arange(24.0).reshape(8, 3), np.arange(8) % 2, np.array([f"c{k // 2}" for k in range(8)]))
    np.savez_compressed(arrays, x=x, y=y, client=who)
    leaf = {"users": ["a", "b"], "num_samples": [2, 1], "user_data": {
        "a": {"x": [[0.5, 1.0], [2.0, 3.0]], "y": [0, 1]}, "b": {"x": [[1.0, 1.0]], "y": [1]}}}  # fmt: skip
    columns = {
        "client": ["a", "a", "b", "b", "c", "c"],
        "age": [1.5, None, 3.0, 4.0, 5.0, 6.0],
        "town": list("xyxyxy"),
        "y": list("010101"),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), place / "data.parquet")
    table = "client,age,city,y\n" + "".join(f"c{k % 3},{20 + k},{'xyz'[k % 3]},{k % 2}\n" for k in range(12))
    found = {
        "configuration": {"run.toml": CONFIG.encode()},
        "checkpoint": _files(place, ["run.safetensors", "run.clients.npy"]),
        "run folder": _tree(place / "folder"),
        "store": _tree(place / "store"),
        "arrays": {"data.npz": arrays.getvalue()},
        "leaf": {f"{split}/data.json": json.dumps(leaf).encode() for split in ("train", "test")},
        "packed JSON": {"data.json.gz": gzip.compress(json.dumps(leaf).encode())},
        "table": {"data.csv": table.encode()},
        "message": {"message": _message()},
        "tree store": _tree(place / "tree store"),
        "private folder": _tree(place / "private folder"),
        "family": _tree(place / "family"),
        "ledger": _tree(place / "ledgers"),
        "schema": _files(place, ["schema.json"]),
        "parquet": _files(place, ["data.parquet"]),
        "study": {"study.toml": (STUDY + CONFIG.replace("seed = 0\n", "")).encode()},
        "search": {"search.toml": (SEARCH + CONFIG.replace("seed = 0\n", "")).encode()},
    }
    shutil.rmtree(place, ignore_errors=True)
    return found


def _message() -> bytes:
    """A message of Flower as it travels, with a part and a tensor."""
    from flwr.common.serde import recorddict_to_proto

    from equipoise.engines.flower.transport import messages, part_messages

    tensors = {"params": torch.arange(6, dtype=torch.float64)}
    solver = part_messages.pack_part("solver", eq.solvers.SGD(lr=0.1, schedule=eq.solvers.Cosine(5)), tensors)
    values = {"seed": 2, "since": 0, "client": "a", "solver": solver}
    written: bytes = recorddict_to_proto(messages.write_message(1, "token", values, tensors)).SerializeToString()
    return written


def _files(place: Path, names: list[str]) -> dict[str, bytes]:
    return {name: (place / name).read_bytes() for name in names}


def _tree(place: Path) -> dict[str, bytes]:
    return {str(p.relative_to(place)): p.read_bytes() for p in sorted(place.rglob("*")) if p.is_file()}


def mutated(chance: random.Random, content: bytes) -> bytes:
    """Bytes with a few changes: flipped, cut, doubled, filled, or numbers that became others."""
    found = bytearray(content)
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        if not found:
            return bytes(found)
        at, length = chance.randrange(len(found)), min(chance.choice([1, 1, 2, 8, 64, 4096]), len(found))
        how = chance.randrange(8)
        if how == 0:
            found[at] ^= 1 << chance.randrange(8)
        elif how == 1:
            del found[at : at + length]
        elif how == 2:
            found[at:at] = found[at : at + length]
        elif how == 3:
            found[at : at + length] = bytes(chance.randrange(256) for _ in range(min(length, len(found) - at)))
        elif how == 4:
            found = found[:at]
        elif how == 5:
            found[at : at + length] = chance.choice([b"\x00", b"\xff"]) * min(length, len(found) - at)
        elif how == 6:
            found = _other_number(chance, found)
        else:
            found[at:at] = chance.choice([b"\n", b'"', b"../../", b"{", b"[", b"\x00", b"\xc3\x28", "Δ".encode()])
    return bytes(found)


def _other_number(chance: random.Random, content: bytearray) -> bytearray:
    spans = [match.span() for match in re.finditer(rb"-?\d+(\.\d+)?", bytes(content[:200_000]))]
    if not spans:
        return content
    start, end = chance.choice(spans)
    content[start:end] = chance.choice(NUMBERS).encode()
    return content


COLUMNS = 100_000


@cache
def wide(kind: str) -> dict[str, bytes] | None:
    """A table, or an array, of 100,000 columns: numbers and words in turn."""
    rows = range(6)
    who, labels, names = [f"c{k // 2}" for k in rows], [str(k % 2) for k in rows], [f"f{k}" for k in range(COLUMNS)]
    cells = {name: [str(row + k % 7) if k % 2 else "xyz"[(row + k) % 3] for row in rows] for k, name in enumerate(names)}
    columns = {"client": who, "y": labels, **cells}
    if kind == "table":
        lines = [",".join(columns), *(",".join(column[row] for column in columns.values()) for row in rows)]
        return {"data.csv": ("\n".join(lines) + "\n").encode()}
    if kind == "parquet":
        written = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table(columns), written)
        return {"data.parquet": written.getvalue()}
    if kind == "arrays":
        packed = io.BytesIO()
        np.savez(packed, x=np.ones((6, COLUMNS)), y=np.arange(6) % 2, client=np.array(who))
        return {"data.npz": packed.getvalue()}
    return None


@cache
def bomb(kind: str) -> dict[str, bytes] | None:
    """A small file that unpacks to gigabytes, for the kinds that are packed."""
    if kind == "arrays":
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            header = io.BytesIO()
            shape = {"descr": "<f8", "fortran_order": False, "shape": (2**29, 1)}
            np.lib.format.write_array_header_1_0(header, shape)
            with archive.open("x.npy", "w", force_zip64=True) as entry:
                entry.write(header.getvalue())
                for _ in range(256):
                    entry.write(bytes(2**24))
            for name in ("y", "client"):
                with archive.open(f"{name}.npy", "w") as entry:
                    np.lib.format.write_array(entry, np.zeros(4, np.int64))
        return {"data.npz": packed.getvalue()}
    if kind == "packed JSON":
        return {"data.json.gz": gzip.compress(b'{"users": [' + b" " * 2**26, 1) + gzip.compress(b" " * 2**26, 1) * 63}
    return None
