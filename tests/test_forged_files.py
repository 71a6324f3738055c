"""Every reader of files and messages meets forged ones: each is refused by an error of the library that names the file.

No reader takes memory by what a file claims, and none unpickles. A forged file that is not refused is read as what it says.
"""

import ast
import gzip
import hashlib
import io
import json
import os
import pickle
import shutil
import tarfile
import tomllib
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import equipoise as eq
from equipoise.cli.commands import app
from equipoise.client_table import ClientTable
from equipoise.core.tensor_files import read_tensor_file, tensor_file_bytes
from equipoise.core.unpacking import claimed_bytes
from equipoise.data.clients import FederatedData, Ragged
from equipoise.data.datasets import idx_files
from equipoise.data.store import store_files
from equipoise.engines.simulator import calibration
from equipoise.errors import EquipoiseError
from equipoise.experiment import folder, open_runs, trusted_code
from equipoise.experiment.config import RunConfig
from equipoise.experiment.family_files import read_manifest
from equipoise.experiment.search import read_search
from equipoise.experiment.study import read_study
from equipoise.privacy.ledger import Ledger, LedgerEntry, read_entries
from equipoise.privacy.ledger_report import entries_below, summarise_ledgers
from equipoise.runs.checkpoint import read_checkpoint, read_place
from forged import (
    TEXTS,
    TOMLS,
    TooLong,
    arrays,
    byte_files,
    json_files,
    json_lines,
    little_memory,
    little_time,
    mutants,
    pickles,
    tensor_headers,
    toml_files,
)
from made_clients import make_clients

pytestmark = pytest.mark.filterwarnings("ignore")
CONFIG = """
data = {name = "label_shift", train_clients = 6, validation_clients = 2, test_clients = 2, examples = 10}
model = "softmax"
[algorithm]
risk = {name = "mixture", terms = [{coefficient = 1.0, name = "superquantile", tail = 0.5}]}
[train]
rounds = 2
clients_per_round = 3
"""
FRAME = {"who": ["a", "a", "b", "b", "c", "c"] * 4, "age": [30.0, 50, 31, 45, 22, 60] * 4, "ill": ["no", "yes"] * 12}
SOME = 120  # forged files of a reader that takes long


def four():
    return FederatedData(make_clients([6, 9, 12, 15]), test=make_clients([5, 9], seed=1, prefix="t"), name="four")


def some(files, most=SOME):
    """At most about so many of the files, evenly spread."""
    files = list(files)
    return files[:: max(1, len(files) // most)]


READERS = {}  # name → a function of a folder: the file to forge, its forged contents, how it is read; False: no error names it


def reader(name, *, named=True):
    def add(make):
        READERS[name] = make, named
        return make

    return add


# --------------------------------------------------------------------------------------------------- configurations and runs


@reader("the configuration of a run", named=False)  # errors name its keys
def _(place):
    return place / "run.toml", toml_files(tomllib.loads(CONFIG)), lambda: RunConfig.read(place / "run.toml").text()


@reader("a study", named=False)
def _(place):
    tree = tomllib.loads(
        CONFIG + '[study]\nseeds = 2\n[methods.A]\nrisk = "mean"\n[sweep]\n"algorithm.solver.lr" = [0.1, 1.0]\n'
    )
    return place / "study.toml", some(toml_files(tree)), lambda: read_study(place / "study.toml", out=place / "out")


@reader("a search", named=False)
def _(place):
    tree = tomllib.loads(CONFIG + '[search]\nseeds = 1\n[search.space]\n"algorithm.solver.lr" = [0.1, 1.0]\n')
    return place / "search.toml", some(toml_files(tree)), lambda: read_search(place / "search.toml")


@reader("the list of trusted code")
def _(place):
    path = trusted_code.list_path()
    path.parent.mkdir(parents=True)
    return path, toml_files({"/a": ["0" * 64]}), trusted_code.trusted_pairs


def saved_run(place):
    data = eq.data.from_frame(FRAME, client="who", target="ill", split_by="examples")
    ditto = eq.Algorithm(personal=eq.personal.Ditto())
    result = eq.train(eq.models.Tabular(data.schema), data, ditto, rounds=2, clients_per_round=2, evaluate_every=1)
    return result, result.save(place / "run")


@reader("the log of a run", named=False)
def _(place):
    _, run = saved_run(place)
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    return run / "rounds.jsonl", some(json_lines(lines), 500), lambda: [repr(each) for each in folder.read_records(run)]


@reader("the configuration in a run's folder", named=False)
def _(place):
    _, run = saved_run(place)
    tree = tomllib.loads((run / "config.toml").read_text())
    return run / "config.toml", some(toml_files(tree), 400), lambda: folder.read_records(run)


@reader("the manifest of a model")
def _(place):
    _, run = saved_run(place)
    return (
        run / "model.json",
        json_files(json.loads((run / "model.json").read_text())),
        lambda: read_manifest(run, "model.json"),
    )


@reader("the schema of a table")
def _(place):
    _, run = saved_run(place)
    path = run / "schema.json"
    return path, json_files(json.loads(path.read_text())), lambda: eq.data.Schema.load(path)


@reader("the ids of clients with own models")
def _(place):
    result, run = saved_run(place)
    return run / "personal.ids.json", json_files(list(result.personal.ids)), lambda: eq.read_personal_models(run)


@reader("own models", named=False)  # the log has their checksum, which is compared first
def _(place):
    _, run = saved_run(place)
    path = run / "personal.npy"
    end = (run / "rounds.jsonl").read_text().replace('"personal.npy"', '"another"')
    (run / "rounds.jsonl").write_text(end)
    return path, [*arrays(), *byte_files(path.read_bytes())], lambda: eq.read_personal_models(run)


@reader("the table of clients")
def _(place):
    import pyarrow as pa
    from pyarrow import parquet

    path = place / "clients.parquet"
    result, _ = saved_run(place)
    result.clients.to_parquet(path, method="a", seed=1)
    good = parquet.read_table(path)
    about = {
        "higher_is_better": {"more": True},
        "attributes": ["ward"],
        "miss": 0.1,
        "trivial_answer": "x",
        "not_evaluated": {},
    }
    wide = good.append_column("more", good["loss"]).append_column("ward", pa.array(["x"] * len(good)))

    def written(table):
        out = io.BytesIO()
        parquet.write_table(table, out)
        return out.getvalue()

    def columns():
        values = None, "x", -5, 2**62, [1.0], b"\xff", float("nan"), {"a": 1}
        for k, name in enumerate(good.column_names):
            for value in values:
                yield f"{name} = {value!r}", written(good.set_column(k, name, pa.array([value] * len(good))))
            yield f"no {name}", written(good.drop_columns([name]))
            yield f"two of {name}", written(pa.table([*good.columns, good[name]], names=[*good.column_names, name]))
        for words, said in [*((w, json.dumps(forged)) for w, forged in mutants(about)), *TEXTS.items()]:
            yield words, written(wide.replace_schema_metadata({"equipoise.metrics": said}))
        extension = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": pickle.dumps(1)}
        yield "a pickled type", written(good.replace_schema_metadata(extension))
        yield "many rows", written(good.take(pa.array([0] * 300_000)))  # in fewer bytes
        many, one = good.take(pa.array([0] * 500)), pa.array([0] * 500, pa.int32())
        long = pa.DictionaryArray.from_arrays(one, ["x" * 20_000_000])
        for name in ("client", "split", "loss"):
            bomb = many.set_column(many.column_names.index(name), name, long)
            parquet.write_table(bomb, out := io.BytesIO(), compression="zstd", store_schema=False)
            yield f"a long {name} many times", out.getvalue()

    files = [*columns(), *byte_files(path.read_bytes())]
    return path, files, lambda: (repr(ClientTable.from_parquet(path)), ClientTable.from_parquet(path).summaries())


@reader("a file of tensors")
def _(place):
    path = place / "model.safetensors"
    content = tensor_file_bytes({"w": torch.arange(6.0).view(2, 3), "none": torch.zeros(0, 3)}, text="about", kind="x")
    return path, [*tensor_headers(content), *byte_files(content)], lambda: read_tensor_file(path)


def checkpoint_of(place, algorithm):
    """A checkpoint of two rounds: forged states, and forged tensors; resumed for a third round."""
    path, data = place / "run.ckpt", four()
    options = {"clients_per_round": 2, "checkpoint": path, "seed": 1, "engine": "loop"}
    eq.train(eq.models.Softmax(4, 3), data, algorithm, rounds=2, **options)
    whole = {file: file.read_bytes() for file in place.iterdir()}
    file = read_tensor_file(path)
    tree = json.loads(file.text)

    def files():
        for words, text in [*((w, json.dumps(forged)) for w, forged in mutants(tree)), ("deep", TEXTS["deep lists"].decode())]:
            yield words, tensor_file_bytes(file.tensors, text=text, kind="checkpoint")
        for name, value in file.tensors.items():
            twice = torch.cat([value.flatten()] * 2)
            for other in (value.double(), value.long(), twice, value.flatten()[:0], value[None], value.to(torch.complex64)):
                yield (
                    f"{name}: {other.dtype}, {other.shape}",
                    tensor_file_bytes({**file.tensors, name: other}, text=file.text, kind="checkpoint"),
                )

    def read():
        for other, content in whole.items():
            if other != path:
                other.write_bytes(content)
        read_place(path)
        read_checkpoint(path)
        eq.train(eq.models.Softmax(4, 3), data, algorithm, rounds=3, **options)

    return path, some(files(), 400), read


@reader("a checkpoint", named=False)
def _(place):
    return checkpoint_of(place, eq.Algorithm(averaging=eq.averaging.Geometric(0.5)))


@reader("a checkpoint with own models", named=False)
def _(place):
    return checkpoint_of(place, eq.Algorithm(server=eq.server_opt.Adam(lr=0.1), personal=eq.personal.Ditto()))


@reader("rows that clients keep", named=False)
def _(place):
    ditto = eq.Algorithm(personal=eq.personal.Ditto())
    path, _, _ = checkpoint_of(place, ditto)
    rows, content = path.with_suffix(".clients.npy"), path.read_bytes()

    def read():
        path.write_bytes(content)
        options = {"clients_per_round": 2, "checkpoint": path, "seed": 1, "engine": "loop"}
        eq.train(eq.models.Softmax(4, 3), four(), ditto, rounds=3, **options)

    return rows, some([*arrays(), *byte_files(rows.read_bytes())]), read


@reader("a ledger", named=False)
def _(place):
    entries = [
        LedgerEntry("cohort", "d", "r", 0, cohort=("a", "b")), LedgerEntry("exact", "d", "r", 0, "scores"),
        LedgerEntry("release", "d", "r", 0, "sum", 2.0, 2.0, ("poisson", 0.3), 1e-5, 3, "token", None, 2),
        LedgerEntry("release", "d", "r", 1, "sum", 2.0, 2.0, ("fixed", 3, 8), 1e-5),
        LedgerEntry("outcome", "d", "r", 0, "sum", contributors=2),
    ]  # fmt: skip
    path = place / "ledger.jsonl"

    def read():
        assert read_entries(path) == list(Ledger(path))
        return [str(each) for each in summarise_ledgers(entries_below(path))]

    return path, some(json_lines([json.loads(entry.line()) for entry in entries]), 300), read


# ---------------------------------------------------------------------------------------------------------------------- data


@reader("a NumPy archive")
def _(place):
    good = {"x": np.ones((6, 2), np.float32), "y": np.array([0, 1] * 3), "client": np.array(list("aabbcc"))}

    def archive(**members):
        out, content = io.BytesIO(), io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as members_of:
            for name, array in good.items():
                content = io.BytesIO()
                np.lib.format.write_array(content, array)
                members_of.writestr(f"{name}.npy", members.get(name, content.getvalue()))
        return out.getvalue()

    def files():
        for name in good:
            for words, content in arrays():
                yield f"{name}: {words}", archive(**{name: content})
        out = io.BytesIO()
        np.lib.format.write_array_header_1_0(out, {"descr": "|u1", "fortran_order": False, "shape": (2**31,)})
        with (
            zipfile.ZipFile(bomb := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as members_of,
            members_of.open("x.npy", "w", force_zip64=True) as member,
        ):
            for part in (out.getvalue(), *[bytes(1 << 27)] * 16):
                member.write(part)
        yield "a bomb", bomb.getvalue()
        for dtype, shape in (("<U0", (10**9,)), ("|V0", (10**12,)), ("<f4", (10**9, 0)), ("<i8", (10**9, 0, 3))):
            out = io.BytesIO()
            np.lib.format.write_array_header_1_0(out, {"descr": dtype, "fortran_order": False, "shape": shape})
            yield f"{shape} of {dtype}", archive(**dict.fromkeys(good, out.getvalue()))
        yield from byte_files(archive())

    return place / "a.npz", files(), lambda: eq.data.npz(place / "a.npz")


def folders(place):
    for client in "ab":
        (place / "all" / client).mkdir(parents=True)
        for k in range(3):
            np.save(place / "all" / client / f"{k}.npy", np.zeros(3, np.float32))
            (place / "all" / client / f"{k}.cls").write_text(str(k % 2))
    return place / "all"


@reader("a folder of arrays", named=False)
def _(place):
    path = folders(place) / "a" / "0.npy"
    return path, [*arrays(), *byte_files(path.read_bytes())], lambda: eq.data.from_folders(place / "all")


@reader("a folder of classes", named=False)
def _(place):
    texts = "", "1e999", "nan", "9" * 5000, "-1", "9" * 20, "x", "0x1", "1.5", "\0"
    files = [(text, text.encode()) for text in texts] + [("no text", b"\xff\xfe")]
    return folders(place) / "a" / "0.cls", files, lambda: eq.data.from_folders(place / "all")


@reader("idx files", named=False)
def _(place):
    good = b"\0\0\x08\x03" + b"".join(n.to_bytes(4, "big") for n in (2, 3, 3)) + bytes(18)
    claims = [b"\0\0\x08\x03" + b"\xff" * 12, b"\0\0\x08\xff" + b"\0\0\0\1" * 255 + b"\0", b"\0\0\x08\x03" + bytes(12)]
    return place / "a", [*(("claims", each) for each in claims), *byte_files(good)], lambda: idx_files.load_idx(place / "a")


@reader("a Parquet file", named=False)
def _(place):
    import pyarrow as pa
    from pyarrow import parquet

    path = place / "t.parquet"
    parquet.write_table(pa.table(FRAME), path)
    same = pa.chunked_array([pa.array([0.0] * 10**6)] * 150)
    parquet.write_table(pa.table({"who": same, "age": same, "ill": same}), bomb := io.BytesIO())

    def files():
        yield "a bomb", bomb.getvalue()
        one, few = pa.array([0] * 2000, pa.int32()), [k % 2 for k in range(2000)]
        for kind in (pa.string(), pa.binary(), pa.large_string()):
            long = pa.DictionaryArray.from_arrays(one, pa.array([b"x" * 20_000_000]).cast(kind))
            for names in (("who", "age", "ill"), ("age", "who", "ill"), ("ill", "age", "who")):
                table = pa.table(dict(zip(names, (long, few, few), strict=True)))
                parquet.write_table(table, out := io.BytesIO(), compression="zstd", store_schema=False)
                yield f"a long {names[0]} many times", out.getvalue()
        yield from byte_files(path.read_bytes())

    return path, files(), lambda: eq.data.parquet(path, client="who", target="ill", split_by="examples")


@reader("a CSV file", named=False)
def _(place):
    good = b"who,age,ill\n" + b"a,3,no\nb,4,yes\na,5,yes\nb,6,no\n" * 9
    texts = b'who,age,ill\na,"' + b"x" * 10**6, b"who,age,ill\n" + b"," * 10**5, b"\0" * 100, b"who,age,ill\na,1e999,no\n" * 9
    rows = b"a,3,no\nb,4,yes\n" * (1 << 20)
    packed = {"gzip": gzip.compress(good) + gzip.compress(rows, 1) * 400, "zip": b"PK\x03\x04"}
    files = [*((str(text[:20]), text) for text in texts), *packed.items(), *byte_files(good, 20)]
    return place / "a.csv", files, lambda: eq.data.csv(place / "a.csv", client="who", target="ill", split_by="examples")


@reader("LEAF's files", named=False)
def _(place):
    tree = {"users": ["a", "b"], "num_samples": [2, 2]}
    tree["user_data"] = {user: {"x": [[0.5, 1.0], [2.0, 3.0]], "y": [0, 1]} for user in "ab"}
    for part in ("train", "test"):
        (place / part).mkdir()
        (place / part / "all.json").write_text(json.dumps(tree))
    return place / "train" / "all.json", json_files(tree), lambda: eq.data.leaf(place)


@reader("Shakespeare's roles", named=False)
def _(place):
    tree = {"roles": [{"play": "p", "role": name, "speeches": [["to be or not to be, that is"] * 5]} for name in "abcd"]}
    files = [(words, gzip.compress(content)) for words, content in json_files(tree)]
    path = place / "shakespeare_roles.json.gz"
    lists = gzip.compress(b"[" + b"[]," * (1 << 25) + b"[]]")
    bomb = [
        ("a bomb", gzip.compress(bytes(1 << 27)) * 12),
        ("lists", lists),
        *byte_files(gzip.compress(json.dumps(tree).encode()), 10),
    ]
    return path, [*files, *bomb], lambda: eq.data.shakespeare(place, min_examples=1)


def store_readers(name, data):
    def header(place):
        path = eq.data.write_store(data(), place / "store")
        tree = json.loads((path / "manifest.json").read_text())

        def redigested(manifest):
            """The manifest with the digests that fit what it says, as far as it makes sense."""
            try:
                for each in manifest["sets"]:
                    manifest["sets"][each]["digest"] = store_files.set_digest(path, manifest, each)
            except Exception:  # noqa: S110 — it makes none
                pass
            return manifest

        def read():
            opened = eq.data.open_store(path)
            eq.data.check_store(path)
            opened.train.inputs(torch.arange(3), torch.float32)
            opened.train.targets(torch.arange(3), torch.float32)

        files = [(words, json.dumps(redigested(forged)).encode()) for words, forged in mutants(tree)]
        return path / "manifest.json", [*TEXTS.items(), *some(files, 500)], read

    READERS[f"the manifest of a store of {name}"] = header, False

    def numbers(place):
        path = eq.data.write_store(data(), place / "store")
        inner = next(each for each in ("clients", "train") if (path / each).is_dir())
        names = sorted(each.name for each in (path / inner).iterdir() if each.suffix != ".checksums")
        wholes = {each: (path / inner / each).read_bytes() for each in names}

        def files():
            """All files of the set one after the other, one of them forged."""
            for each, content in wholes.items():
                forged = list(byte_files(content, 6))
                if each == "ids.text":
                    forged.append(("no text", b"\xff" * len(content)))
                if each.endswith("offsets"):
                    for at, value in ((0, -1), (1, 2**62), (-1, 2**62), (1, 0), (-1, 7)):
                        changed = np.frombuffer(content, np.int64).copy()
                        changed[at] = value
                        forged.append((f"{at} = {value}", changed.tobytes()))
                yield from ((f"{each}: {words}", json.dumps([each]).encode() + b"\n" + other) for words, other in forged)

        def read():
            each, _, content = (place / "forged").read_bytes().partition(b"\n")
            forged = path / inner / (json.loads(each)[0] if each[:2] == b'["' else "offsets")
            forged.write_bytes(content)
            try:
                opened = eq.data.open_store(path)
                opened.train.inputs(torch.arange(3), torch.float32)
                assert len(list(opened.train.ids)) == len(opened.train)
            finally:
                forged.write_bytes(wholes[forged.name])

        return place / "forged", files(), read

    READERS[f"the files of a store of {name}"] = numbers, False


store_readers("numbers", four)
store_readers(
    "sequences", lambda: [(f"c{k}", {"tokens": Ragged.of([[1, 2, 3], [4], [5, 6]])}, torch.tensor([0, 1, 2])) for k in range(6)]
)


@reader("the note of progress of a store", named=False)
def _(place):
    path = eq.data.write_store(four(), place / "store")
    manifest = json.loads((path / "manifest.json").read_text())
    sets = {name: store_files.as_progress_entry(entry) for name, entry in manifest["sets"].items()}
    rests = {name: {file: part["rest"] for file, part in entry["files"].items()} for name, entry in manifest["sets"].items()}
    tree = {
        "format": 1, "header": {key: value for key, value in manifest.items() if key != "sets"}, "append": False,
        "base": dict.fromkeys(sets, 0), "sets": {name: entry | {"rests": rests[name]} for name, entry in sets.items()},
    }  # fmt: skip
    (path / "manifest.json").unlink()

    def read():
        shutil.rmtree(place / "again", ignore_errors=True)
        shutil.copytree(path, place / "again")
        eq.data.write_store(four(), place / "again")

    return path / "progress.json", some(json_files(tree), 300), read


@reader("measured speeds", named=False)
def _(place):
    path = place / "speeds.json"
    tree = {"work": {"chunk_size": 3, "workers": 1, "clients": 4, "path": "x", "tried": [[{"chunk_size": 3}, 0.5]]}}
    return path, json_files(tree), lambda: calibration._stored(path)


# ---------------------------------------------------------------------------------------------------------------- federations


@reader("an order", named=True)
def _(place):
    from equipoise.engines.flower.apps.run_control import read_order

    return place / "control.json", json_files({"state": "run", "rounds": 3}), lambda: read_order(place)


ROSTER = {
    "run": "r",
    "clients": [
        {"client": "a", "splits": {"train": 3, "test": 2}, "x": {"shape": [4]}, "y": {}, "classes": 3, "fingerprint": "f",
         "metrics": ["m"], "versions": {"equipoise": "1"}, "at_start": {}},
    ],
}  # fmt: skip


@reader("who takes part")
def _(place):
    from equipoise.engines.flower.apps.federated_run import read_roster

    path = place / "federation.json"
    (place / "config.toml").write_text("")

    def read():
        open_runs.group_data(place)
        folder.count_training_clients(place, None)
        read_roster(path)

    return path, json_files(ROSTER), read


STATUS = {
    "run": "r", "state": "running", "round": 3, "rounds": 9, "updated": "2026-03-01T12:00:00Z", "pid": 12, "text": "hm",
    "alerts": [{"time": "t", "client": "a", "text": "x"}], "notes": ["n"], "protected": False,
    "clients": {"a": {"rounds": 1, "failed": 0, "in_a_row": 0, "fault": "", "seconds": 1.5, "sent": 3, "received": 4,
                      "versions": {"equipoise": "1"}, "last_sent": 4, "last_received": 5, "node": "7", "state": "good"}},
    "arrivals": {"there": ["a"], "missing": ["b"], "turned_away": {"n": "why"}, "wanted": 2},
    "evaluation": {"after_round": 2, "clients": {"train": 3}, "not_evaluated": {"b": "x"}},
}  # fmt: skip


@reader("a status")
def _(place):
    from equipoise.engines.flower.operate.run_view import RunView

    def read():
        for view in (RunView(place), RunView(place, for_others=True)):
            view.lines(), view.page(), view.metrics()

    return place / "status.json", json_files(STATUS), read


@reader("the status of a run that goes on", named=False)
def _(place):
    from equipoise.engines.flower.apps.run_status import RunStatus

    def read():
        status = RunStatus(place, "r", 3, open_scores=True)
        status.alert("b", "x")
        (place / "events.jsonl").unlink()

    return place / "status.json", json_files(STATUS), read


@reader("events", named=False)
def _(place):
    from equipoise.engines.flower.apps.run_status import read_events

    return place / "events.jsonl", json_lines([{"event": "round", "round": 1}]), lambda: read_events(place)


@reader("known nodes")
def _(place):
    from equipoise.engines.flower.apps.node_keys import KnownNodes, read_node_names

    path = place / "node-names.json"

    def read():
        read_node_names(place)
        KnownNodes(path)

    return path, json_files({"a": {"key": "k", "node": 3}}), read


def federation_tomls():
    kit = {"superlink": "h:1", "client-id": "a", "app": "x.y:z", "key": "k", "authority": "a", "policy": "p.toml"}
    project = {"tool": {"flwr": {"app": {"components": {"clientapp": "a.b:c"}, "config": {"rounds": 3}}}}}
    yield "node.toml", kit | {"preload": ["m"], "node-config": {"file": "x", "n": 3}}, lambda o: o.Kit.read(o.place).arguments
    yield "superlink.toml", {"host": "h", "port": 3, "hosts": ["h"]}, lambda o: o.OperatorFolder(o.place).address
    yield "pyproject.toml", project, lambda o: (o.OperatorFolder(o.place).package, o.options(o.place, "rounds=3"))
    yield "nodes.toml", {"a": "ssh-ecdsa x"}, lambda o: o.read_node_list(o.place / "nodes.toml")
    yield "policy.toml", {"epsilon": 3.0, "delta": 1e-5, "minimum_crowd": 3}, lambda o: o.read_policy(o.place / "policy.toml")
    yield "peers.toml", {"a": "0" * 44}, lambda o: o.read_identity(o.place / "key.pem", o.place / "peers.toml")


def federation_reader(name, tree, call):
    @reader(f"a federation's {name}", named=name != "peers.toml")
    def _(place):
        from types import SimpleNamespace

        from equipoise.engines.flower.apps.node_keys import read_node_list
        from equipoise.engines.flower.apps.node_policy import read_policy
        from equipoise.engines.flower.operate.kits import Kit, OperatorFolder
        from equipoise.engines.flower.operate.run_options import refuse_unknown_options
        from equipoise.engines.flower.secure.identities import read_identity, write_identity

        write_identity(place / "key.pem")
        names = SimpleNamespace(
            place=place, Kit=Kit, OperatorFolder=OperatorFolder, options=refuse_unknown_options, read_node_list=read_node_list,
            read_policy=read_policy, read_identity=read_identity,
        )  # fmt: skip
        return place / name, toml_files(tree), lambda: call(names)


for each in federation_tomls():
    federation_reader(*each)


@reader("published models", named=False)
def _(place):
    from equipoise.engines.flower.operate.fetching import find_fetched, read_entries

    tree = {
        "models": [{"name": "a", "file": "a.safetensors", "bytes": 12, "sha256": "0" * 64}],
        "client": "a",
        "sha256": "0" * 64,
    }

    def read():
        content = (place / "choice.json").read_bytes()
        find_fetched(place, "a", overwrite=True)
        read_entries(content)

    return place / "choice.json", json_files(tree), read


@reader("a backup", named=False)
def _(place):
    from equipoise.engines.flower.operate.backups import back_up, restore

    (place / "folder").mkdir()
    (place / "folder" / "a.toml").write_text("a = 1\n")
    back_up(place / "folder", place / "good.tgz")

    def archive(*names, sums=None, kind=tarfile.REGTYPE, content=b"1"):
        members = [(name, kind, content) for name in names]
        listed = "".join(f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name in names).encode()
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w:gz") as tar:
            for name, of, text in [*members, ("SHA256SUMS", tarfile.REGTYPE, listed if sums is None else sums)]:
                entry = tarfile.TarInfo(name)
                entry.size, entry.type = len(text), of
                tar.addfile(entry, io.BytesIO(text))
        return out.getvalue()

    def files():
        large = tarfile.TarInfo("a")
        large.size = 1 << 33
        zeros = gzip.compress(bytes(1 << 27)) * 64
        yield "a bomb", gzip.compress(large.tobuf()) + zeros
        large.type = tarfile.XHDTYPE  # a header that is read whole
        yield "a long header", gzip.compress(large.tobuf()) + zeros
        yield "no end of empty members", zeros
        yield "sums in no text", archive("a", sums=b"\xff\xfe\n")
        yield "a sparse file", archive("a", kind=tarfile.GNUTYPE_SPARSE)
        for names in (("a", "a"), ("a", "a/b"), (".",), ("a/b", "../c"), ("/c",), ("a" * 300,), ("SHA256SUMS",)):
            yield str(names)[:40], archive(*names)
        yield from byte_files((place / "good.tgz").read_bytes(), 30)

    def read():
        shutil.rmtree(place / "restored", ignore_errors=True)
        try:
            restore(place / "forged.tgz", place / "restored")
        except EquipoiseError:
            assert not any((place / "restored").iterdir())
            raise

    return place / "forged.tgz", files(), read


@reader("messages", named=False)
def _(place):
    from flwr.app import ConfigRecord, RecordDict

    from equipoise.engines.flower.transport.messages import read_message
    from equipoise.engines.flower.transport.part_messages import list_part_tensors, unpack_part

    parts = [
        {"kind": "risk", "table": {"name": "mixture", "terms": [{"coefficient": 1.0, "name": "superquantile", "tail": 0.5}]}},
        {"class": "equipoise.solvers.sgd:SGD", "fields": {"lr": {"float": "inf"}, "x": {"list": [1], "tuple": True}}},
        {"class": "equipoise.solvers:SGD", "fields": {"lr": {"tensor": "part.0", "shape": [2], "dtype": "float32"}}},
    ]

    def read():
        text = (place / "message").read_bytes().decode("utf-8", "replace")
        call = {"protocol": 1, "round": 0, "token": "t", "values": text, "arrays": text, "bytes": b"x" * 8}
        content = read_message(RecordDict({"call": ConfigRecord({**call, "arrays": "[]"})}))
        for part in content.values.get("parts", ()) if isinstance(content.values.get("parts"), list) else ():
            list_part_tensors(part)
            unpack_part(part, {"part.0": torch.zeros(2)}, ["numpy"])
        read_message(RecordDict({"call": ConfigRecord(call)}))

    return place / "message", json_files({"parts": parts}), read


# ---------------------------------------------------------------------------------------------------------------------- tests


def marked(*arguments, **options):
    raise AssertionError("a pickle was read")


@pytest.mark.parametrize("name", READERS)
def test_a_forged_file_is_refused_by_its_name_or_read_as_what_it_says(name, tmp_path, monkeypatch):
    monkeypatch.setenv("EQUIPOISE_CONFIG", str(tmp_path / "settings"))
    make, named = READERS[name]
    path, files, read = make(tmp_path)
    files, marker = [*files, *pickles(tmp_path / "marker")], tmp_path / "marker"
    for function in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, function, marked)
    wrong = []
    with little_memory():
        for words, content in files:
            path.write_bytes(content)
            try:
                with little_time():
                    read()
            except EquipoiseError as failure:
                if isinstance(failure.__cause__, MemoryError) or "allocate" in str(failure.__cause__):
                    wrong.append(f"{words}: {failure.__cause__!r}")
                if named and path.name not in str(failure):
                    wrong.append(f"{words}: no name in {failure}")
            except (Exception, TooLong) as failure:
                wrong.append(f"{words}: {type(failure).__name__}: {failure}")
    assert not wrong, f"{len(wrong)} of {len(files)}:\n" + "\n".join(each[:200] for each in wrong[:20])
    assert not marker.exists()
    assert len(files) > 10


COPIED = "messages", "published models", "the note of progress of a store"  # by their readers above


@pytest.mark.parametrize("name", [name for name in READERS if name not in COPIED and "files of" not in name])
def test_no_reader_waits_for_the_writer_of_a_pipe(name, tmp_path, monkeypatch):
    monkeypatch.setenv("EQUIPOISE_CONFIG", str(tmp_path / "settings"))
    path, _, read = READERS[name][0](tmp_path)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with little_time(), suppress(EquipoiseError):  # or it is read as none
        read()


def test_what_a_parquet_file_claims_is_known_before_it_is_read():
    import pyarrow as pa
    from pyarrow import parquet

    columns = {"a": [1] * 1000, "b": [0.5] * 1000, "c": pa.array([bytes(20)] * 1000, pa.binary(20)), "d": ["x"] * 1000}
    parquet.write_table(pa.table(columns), out := io.BytesIO(), row_group_size=300)
    assert claimed_bytes(parquet.read_metadata(out)) == 1000 * (8 + 8 + 20 + 8)
    parquet.write_table(pa.table({"a": [[1] * 50_000]}), out := io.BytesIO())  # in fewer bytes
    assert claimed_bytes(parquet.read_metadata(out)) == 50_000 * 8


COMMANDS = {
    "run": "run {0} --out {1}/out", "explain": "run {0} --explain", "resume": "run --resume {1}",
    "compare": "compare {0} --out {1}/out", "tune": "tune {0} --out {1}/out", "check": "data check {0}",
    "report": "report {1}", "export": "export {1}", "predict": "predict {1} {0}",
    "ledger": "privacy ledger {1}/ledger.jsonl", "node": "flower node --kit {1}", "status": "flower status {1}",
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_tells_of_a_forged_file_in_words(command, tmp_path, monkeypatch):
    monkeypatch.setenv("EQUIPOISE_CONFIG", str(tmp_path / "settings"))
    monkeypatch.chdir(tmp_path)
    for words, text, log in [
        *((w, t, TEXTS["deep lists"]) for w, t in TOMLS.items()),
        *((w, TOMLS["another"], t) for w, t in TEXTS.items()),
    ]:
        for name in ("config.toml", "given.toml", "node.toml"):
            (tmp_path / name).write_bytes(text)
        for name in ("rounds.jsonl", "ledger.jsonl", "status.json"):
            (tmp_path / name).write_bytes(log + b"}\n")
        found = CliRunner().invoke(app, COMMANDS[command].format(tmp_path / "given.toml", tmp_path).split())
        assert found.exception is None or isinstance(found.exception, SystemExit), (words, found.exception)
        torn = command == "ledger" and log == TEXTS["zeros"]  # as a power cut leaves a line, which is skipped
        assert found.exit_code == (0 if torn else 2), (words, found.output)


SOURCE = Path(eq.__file__).parent
PARSERS = {("json", "loads"), ("json", "load"), ("tomllib", "loads"), ("tomllib", "load"), ("np", "load"), ("numpy", "load")}
UNPICKLERS = {
    ("pickle", "load"),
    ("pickle", "loads"),
    ("pickle", "Unpickler"),
    ("torch", "load"),
    ("joblib", "load"),
    ("pd", "read_pickle"),
}
OWN_PIPES = {"engines/simulator/workers.py", "engines/cluster/packing.py"}  # between processes of one run


def calls(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            yield (node.func.value.id, node.func.attr), {key.arg: ast.unparse(key.value) for key in node.keywords}


def test_each_format_is_parsed_in_one_place_and_nothing_is_unpickled():
    found = {(path.relative_to(SOURCE).as_posix(), *call): keys for path in SOURCE.rglob("*.py") for call, keys in calls(path)}
    parsers = {where: keys for where, keys in found.items() if where[1:] in PARSERS and where[0] != "core/plain_text.py"}
    assert not parsers
    assert {where[0] for where in found if where[1:] in UNPICKLERS} == OWN_PIPES
