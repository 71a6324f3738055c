"""Files of strangers: configurations, run folders, checkpoints, stores, arrays, LEAF's JSON, tables and messages, mutated.

Each ends in an error of our own or in a result, within a bound of time and memory, and writes nothing outside its folder. Many
inputs are read by one forked child; the child says which one it reads before it reads it.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import resource
import shutil
import signal
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch

import equipoise as eq
from campaign_drivers import scenes
from campaign_drivers.findings import Finding, in_child
from equipoise.data.file_access import load_json
from equipoise.errors import EquipoiseError
from equipoise.runs.checkpoint import Checkpoints

TOGETHER = 12  # inputs per child
MEMORY = 3 * 2**30  # bytes that a child may take beyond what it begins with
SECONDS = 60  # for one child
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


# ----------------------------------------------------------------------------------------------------------------- valid inputs


@cache
def samples() -> dict[str, dict[str, bytes]]:
    """Valid inputs, by kind: the files of each, by name."""
    import tempfile

    place = Path(tempfile.mkdtemp(prefix="campaign-samples-"))
    data = scenes.plain()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saving = Checkpoints(place / "run.safetensors", every=1)
        algorithm = eq.Algorithm(personal=eq.personal.Ditto(1.0), server=eq.server_opt.Adam(lr=0.1))
        result = eq.train(scenes.softmax(), data, algorithm, rounds=2, clients_per_round=4, checkpoint=saving, progress=False)
        result.save(place / "folder")
        eq.data.write_store(data, place / "store")
    arrays = io.BytesIO()
    x, y, who = (np.arange(24.0).reshape(8, 3), np.arange(8) % 2, np.array([f"c{k // 2}" for k in range(8)]))
    np.savez_compressed(arrays, x=x, y=y, client=who)
    leaf = {"users": ["a", "b"], "num_samples": [2, 1], "user_data": {
        "a": {"x": [[0.5, 1.0], [2.0, 3.0]], "y": [0, 1]}, "b": {"x": [[1.0, 1.0]], "y": [1]}}}  # fmt: skip
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
        "message": {"message.json": json.dumps({"values": {"round": 1, "seed": 2, "since": 0}}).encode()},
    }
    shutil.rmtree(place, ignore_errors=True)
    return found


def _files(place: Path, names: list[str]) -> dict[str, bytes]:
    return {name: (place / name).read_bytes() for name in names}


def _tree(place: Path) -> dict[str, bytes]:
    return {str(p.relative_to(place)): p.read_bytes() for p in sorted(place.rglob("*")) if p.is_file()}


# -------------------------------------------------------------------------------------------------------------------- mutations


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
    import re

    spans = [match.span() for match in re.finditer(rb"-?\d+(\.\d+)?", bytes(content[:200_000]))]
    if not spans:
        return content
    start, end = chance.choice(spans)
    content[start:end] = chance.choice(NUMBERS).encode()
    return content


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


# ---------------------------------------------------------------------------------------------------------------------- readers


def read_configuration(place: Path) -> None:
    """Check a configuration and, if it is small, run it."""
    from equipoise.experiment.build import build
    from equipoise.experiment.config import RunConfig

    config = RunConfig.read(place / "run.toml")
    options = config.train
    if options.rounds <= 5 and options.clients_per_round <= 20:
        size = {name: value for name, value in config.data.table().items() if isinstance(value, int | float)}
        if all(abs(value) <= 300 for value in size.values()):
            build(config).train(name="run", progress=False, observers=(), checkpoint=None)


def read_checkpointed(place: Path) -> None:
    """Go on from a checkpoint; a result must be that of the undamaged one."""
    algorithm = eq.Algorithm(personal=eq.personal.Ditto(1.0), server=eq.server_opt.Adam(lr=0.1))
    saving = Checkpoints(place / "run.safetensors", every=1)
    given = {"rounds": 3, "clients_per_round": 4, "progress": False}
    found = eq.train(scenes.softmax(), scenes.plain(), algorithm, checkpoint=saving, **given)
    whole = _whole_run()
    if not torch.equal(found.params, whole):
        raise Finding("a damaged checkpoint ended in another model")


@cache
def _whole_run() -> torch.Tensor:
    algorithm = eq.Algorithm(personal=eq.personal.Ditto(1.0), server=eq.server_opt.Adam(lr=0.1))
    given = {"rounds": 3, "clients_per_round": 4, "progress": False}
    return eq.train(scenes.softmax(), scenes.plain(), algorithm, **given).params


def read_run_folder(place: Path) -> None:
    """What `equipoise report` reads."""
    from equipoise.experiment.folder import finished_runs, read_record

    for folder in finished_runs([place]):
        read_record(folder).summary()


def read_store(place: Path) -> None:
    """Open a store, check it, and read all of it."""
    data = eq.data.open_store(place)
    eq.data.check_store(place)
    for clients in data.splits.values():
        for k in range(min(len(clients), 20)):
            clients.client(at=k)


def read_arrays(place: Path) -> None:
    """Read an archive of arrays."""
    eq.data.npz(place / "data.npz")


def read_leaf(place: Path) -> None:
    """Read LEAF's files."""
    eq.data.leaf(place)


def read_packed_json(place: Path) -> None:
    """Read JSON that is packed by gzip."""
    load_json(place / "data.json.gz")


def read_table(place: Path) -> None:
    """Read a table."""
    eq.data.csv(place / "data.csv", client="client", target="y")


def read_message(place: Path) -> None:
    """Read the values of a node's message."""
    from equipoise.engines.flower.transport.messages import BadMessage, MessageContent

    try:
        values = json.loads((place / "message.json").read_bytes())["values"]
        content = MessageContent(values, {})
    except (ValueError, KeyError, TypeError):  # no JSON, so no message: the network never hands it on
        return
    for name, kind in (("round", int), ("seed", int), ("since", int), ("client", str)):
        try:
            content.value(name, kind)
        except BadMessage:
            continue


READERS: dict[str, Callable[[Path], None]] = {
    "configuration": read_configuration, "checkpoint": read_checkpointed, "run folder": read_run_folder, "store": read_store,
    "arrays": read_arrays, "leaf": read_leaf, "packed JSON": read_packed_json, "table": read_table, "message": read_message,
}  # fmt: skip


def try_inputs(chance: random.Random, folder: Path, counts: Counter[str]) -> None:
    """Some inputs of one kind, read by one child."""
    kind = chance.choice([name for name in READERS for _ in range(3 if name in ("configuration", "table", "leaf") else 2)])
    valid = samples()[kind]
    places = []
    for number in range(TOGETHER):
        place = folder / str(number)
        changed = chance.choice(sorted(valid))
        content = dict(valid)
        content[changed] = mutated(chance, content[changed])
        if chance.random() < 0.004 and (packed := bomb(kind)) is not None:
            content = packed
        for name, written in content.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(written)
        places.append((place, changed))
    note = folder / "note"
    code = in_child(lambda: _read_all(READERS[kind], places, note, folder), limit=SECONDS + 10)
    done = note.read_text().splitlines() if note.exists() else []
    counts["inputs"] += sum(line.startswith("begun") for line in done)
    for word in ("read", "refused"):
        counts[word] += sum(line.startswith(word) for line in done)
    if code != 0:
        last = int(next(line.split()[1] for line in reversed(done) if line.startswith("begun")))
        place, changed = places[last]
        said = [line for line in done if line.startswith("raised")]
        content = (place / changed).read_bytes() if (place / changed).exists() else b""
        shown = content.decode(errors="backslashreplace")[:3000] if len(content) < 10_000 else f"{len(content)} bytes"
        raise Finding(f"{kind}: exit code {code}", said=said, file=changed, content=shown)


def _read_all(read: Callable[[Path], None], places: list[tuple[Path, str]], note: Path, folder: Path) -> None:
    """Read inputs one after another, in bounds, and note each; ends at the first that breaks a promise."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    signal.alarm(SECONDS)
    warnings.simplefilter("ignore")
    away = folder / "away"
    away.mkdir()
    os.chdir(away)
    before = {path for path, _ in places}
    with note.open("a", buffering=1) as log:
        for number, (place, _) in enumerate(places):
            log.write(f"begun {number}\n")
            try:
                read(place)
                log.write("read\n")
            except EquipoiseError as refusal:
                log.write("refused\n" if str(refusal).strip() else "raised an error without words\n")
            except BaseException as failure:
                log.write("raised " + " | ".join(traceback.format_exception(failure)[-6:]).replace("\n", " ")[:1500] + "\n")
                os._exit(72)
            if any(away.iterdir()) or set(folder.iterdir()) - before - {note, away}:
                log.write("raised: something was written outside the folder\n")
                os._exit(73)
