"""Stores on disk: what is written is opened, whatever happens between; and what does not fit is refused."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import equipoise as eq
from equipoise.core.trees import leaves, map_tree
from equipoise.data import (
    ClientSet,
    FederatedData,
    check_store,
    open_store,
    refuse_changed_store,
    split_clients,
    write_store,
)
from equipoise.data.clients import Ragged, client_batches
from equipoise.data.store import RowCheck, store_writer
from equipoise.engines.device_sets import DeviceSets, moved_in_pieces
from equipoise.errors import ConfigError, InvalidData, InvalidParameter, NotWritten

SMALL = settings(deadline=None, max_examples=25)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks, batches and notes of progress of a few hundred bytes, so that little data make many."""
    monkeypatch.setattr(store_writer, "BLOCK_BYTES", 256)
    monkeypatch.setattr(store_writer, "JOURNAL_BYTES", 600)
    monkeypatch.setattr(client_batches, "BATCH_BYTES", 300)


def some_clients(count=20, seed=0, kind="tensor"):
    rng = np.random.default_rng(seed)
    for k in range(count):
        size = int(rng.integers(1, 7))
        x = rng.normal(size=(size, 3)).astype(np.float32)
        y = rng.integers(0, 4, size)
        if kind == "tuple":
            yield f"client {k}", (x, rng.integers(0, 255, (size, 2, 2)).astype(np.uint8)), y
        elif kind == "ragged":
            lengths = rng.integers(1, 9, size)
            tokens = Ragged.of([torch.from_numpy(rng.integers(0, 50, n)) for n in lengths], pad=1)
            labels = Ragged.of([torch.from_numpy(rng.integers(0, 4, n)) for n in lengths], pad=-100, mask=None)
            yield f"client {k}", {"input_ids": tokens, "age": x}, labels
        elif kind == "bfloat16":
            yield f"client {k}", torch.from_numpy(x).bfloat16(), torch.from_numpy(rng.normal(size=size) > 0)
        else:
            yield f"client {k}", x, y


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def same_leaf(one, other):
    if isinstance(one, Ragged):
        alike = one.pad == other.pad and one.mask == other.mask and one.longest == other.longest
        return alike and torch.equal(one.values, other.values) and torch.equal(one.offsets, other.offsets)
    return one.dtype == other.dtype and torch.equal(one, other)


def assert_same_clients(one: ClientSet, other: ClientSet):
    assert tuple(one.ids) == tuple(other.ids)
    one, other = (each.take(range(len(each))) for each in (one, other))
    assert torch.equal(one.offsets, other.offsets)
    assert torch.equal(one.host_keys, other.host_keys)
    for a, b in zip((*leaves(one.x), *leaves(one.y)), (*leaves(other.x), *leaves(other.y)), strict=True):
        assert same_leaf(a, b)
    assert type(one.x) is type(other.x)
    assert one.scale == other.scale
    assert one.shift == other.shift


@pytest.mark.parametrize("kind", ["tensor", "tuple", "ragged", "bfloat16"])
def test_what_is_written_is_opened(tmp_path, kind, small_blocks):
    packed = ClientSet.pack(some_clients(kind=kind))
    write_store(some_clients(kind=kind), tmp_path / "a", name="same")
    write_store(packed, tmp_path / "b", name="same")
    assert content(tmp_path / "a") == content(tmp_path / "b")
    for seed in (0, 1):
        opened = open_store(tmp_path / "a", validation=0.1, test=0.3, seed=seed)
        wanted = split_clients(packed, validation=0.1, test=0.3, seed=seed)
        assert opened.classes == wanted.classes
        assert opened.has_ignored == wanted.has_ignored
        for name, part in wanted.splits.items():
            assert_same_clients(opened.splits[name], part)
            for k in (0, len(part) - 1):
                for a, b in zip(opened.splits[name].client(at=k), part.client(part.ids[k]), strict=True):
                    assert all(map(torch.equal, leaves(a), leaves(b)))
    found = check_store(tmp_path / "a")
    assert (found.clients, found.examples) == (20, packed.examples)


@given(
    sizes=st.lists(st.integers(1, 30), min_size=2, max_size=40),
    batch=st.integers(1, 2000),
    block=st.integers(1, 500),
    journal=st.integers(1, 5000),
    seed=st.integers(0, 99),
    cut=st.floats(0.0, 1.0),
)
@SMALL
def test_the_bytes_depend_on_the_clients_alone(tmp_path_factory, sizes, batch, block, journal, seed, cut):
    """However a stream is cut into batches and notes of progress, and where an append begins."""
    tmp_path = tmp_path_factory.mktemp("store")
    rng = np.random.default_rng(seed)
    triples = [
        (f"é{k}" * (1 + k % 3), rng.integers(0, 256, (n, 2), dtype=np.uint8), rng.normal(size=n)) for k, n in enumerate(sizes)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_writer, "BLOCK_BYTES", block)
        write_store(triples, tmp_path / "a", name="s", scale=0.5)
        patch.setattr(store_writer, "JOURNAL_BYTES", journal)
        patch.setattr(client_batches, "BATCH_BYTES", batch)
        write_store(iter(triples), tmp_path / "b", name="s", scale=0.5)
        assert content(tmp_path / "a") == content(tmp_path / "b")
        middle = 1 + int(cut * (len(triples) - 2))
        write_store(triples[:middle], tmp_path / "c", name="s", scale=0.5)
        write_store(triples[middle:], tmp_path / "c", append=True)
        assert content(tmp_path / "a") == content(tmp_path / "c")
    a, b = open_store(tmp_path / "a", test=0.0), open_store(tmp_path / "b", test=0.0)
    assert a.fingerprint == b.fingerprint
    assert_same_clients(a.train, ClientSet.pack(((i, x, y.astype(np.float32)) for i, x, y in triples), scale=0.5))


def test_ids_are_read_when_shown(tmp_path):
    write_store(some_clients(40), tmp_path / "a")
    ids = open_store(tmp_path / "a", test=0.5).train.ids
    assert not isinstance(ids, tuple)
    assert len(ids) == 20
    assert ids[-1] == tuple(ids)[-1] == ids[19]
    assert ids[2:5] == tuple(ids)[2:5]
    assert ids == tuple(ids)
    assert tuple(ids) != ids[1:]
    assert ids != [*list(ids)[1:], "x"]
    for k, name in enumerate(ids):
        assert name in ids
        assert ids.index(name) == k
    assert "client x" not in ids
    assert 3 not in ids
    with pytest.raises(ValueError, match="no client of the store"):
        ids.index("client x")
    with pytest.raises(IndexError):
        ids[20]
    assert "20 ids" in repr(ids)


def test_fingerprints_tell_stores_and_splits_apart(tmp_path):
    write_store(some_clients(), tmp_path / "a", name="one")
    write_store(some_clients(), tmp_path / "b", name="two")
    write_store(some_clients(seed=1), tmp_path / "c")
    found = {(store, seed): open_store(tmp_path / store, test=0.3, seed=seed).fingerprint for store in "abc" for seed in (0, 1)}
    assert found["a", 0] == found["b", 0]
    assert found["a", 1] == found["b", 1]
    assert len(set(found.values())) == 4


def test_splits_of_federated_data_are_kept(tmp_path, small_blocks):
    data = eq.data.split_examples(ClientSet.pack(some_clients()), test=0.3, validation=0.2, name="mine")
    opened = open_store(write_store(data, tmp_path / "a"))
    assert opened.name == "mine"
    assert opened.classes == data.classes
    for name, part in data.splits.items():
        assert_same_clients(opened.splits[name], part)
    for given_too in ({"test": 0.1}, {"validation": 0.1}, {"split_by": "examples"}):
        with pytest.raises(InvalidParameter, match="has its own splits"):
            open_store(tmp_path / "a", **given_too)
    again = FederatedData(opened.train, name="copy")  # from one store to another
    copied = open_store(write_store(again, tmp_path / "b"))
    assert_same_clients(copied.train, data.train)


def test_a_store_of_whole_clients_is_not_split_inside_clients(tmp_path):
    write_store(some_clients(), tmp_path / "a")
    with pytest.raises(InvalidParameter, match="Split before writing"):
        open_store(tmp_path / "a", split_by="examples")


def in_another_process(work, *arguments):
    """A process that does some work, without the time that imports take."""
    process = multiprocessing.get_context("fork").Process(target=work, args=arguments)
    process.start()
    return process


def write_slowly(path, kind):
    torch.set_num_threads(1)
    store_writer.BLOCK_BYTES, store_writer.JOURNAL_BYTES, client_batches.BATCH_BYTES = 4096, 9000, 3000
    write_store(some_clients(2000, kind=kind), path, name="killed")


@pytest.mark.parametrize("kind", ["tensor", "ragged"])
def test_a_killed_write_goes_on_and_ends_with_the_same_bytes(tmp_path, kind):
    began = time.perf_counter()
    in_another_process(write_slowly, tmp_path / "whole", kind).join()
    whole, seconds = content(tmp_path / "whole"), time.perf_counter() - began
    draw = random.Random(0)
    for _ in range(10):
        process = in_another_process(write_slowly, tmp_path / "killed", kind)
        time.sleep(draw.random() * seconds / 4)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        if (tmp_path / "killed" / "manifest.json").exists():  # it was done before
            assert content(tmp_path / "killed").keys() - {".lock", "progress.json"} == whole.keys()
            shutil.rmtree(tmp_path / "killed")
        elif (tmp_path / "killed" / "progress.json").exists():
            with pytest.raises(InvalidData, match=r"interrupted after .* Start the same write_store"):
                open_store(tmp_path / "killed")
    in_another_process(write_slowly, tmp_path / "killed", kind).join()
    assert content(tmp_path / "killed") == whole


class Stop(Exception):
    """Stands for whatever ends a stream before its end."""


def stopping_after(count, clients):
    for k, client in enumerate(clients):
        if k == count:
            raise Stop
        yield client


def test_a_write_that_goes_on_reads_the_same_clients(tmp_path, small_blocks):
    clients = list(some_clients(60))
    write_store(clients, tmp_path / "whole", name="s")
    with pytest.raises(Stop):
        write_store(stopping_after(40, clients), tmp_path / "a", name="s")
    progress = json.loads((tmp_path / "a" / "progress.json").read_bytes())
    assert 0 < progress["sets"]["clients"]["clients"] <= 40
    renamed = [("other", *clients[0][1:]), *clients[1:]]
    larger = [(clients[0][0], np.ones((9, 3), np.float32), np.ones(9, int)), *clients[1:]]
    changed = [(clients[0][0], clients[0][1] + 1, clients[0][2]), *clients[1:]]
    others = {"'client 0'": renamed, "examples of client": larger, "examples of client '": changed, "goes on": clients[:2]}
    for why, other in others.items():
        with pytest.raises(InvalidParameter, match=f"holds another store.*{why}"):
            write_store(other, tmp_path / "a", name="s")
    with pytest.raises(InvalidParameter, match="append must be that of the interrupted call"):
        write_store(clients, tmp_path / "a", name="s", append=True)
    with pytest.raises(InvalidParameter, match="its name is s"):
        write_store(clients, tmp_path / "a", name="t")
    write_store(clients, tmp_path / "a", name="s")
    assert content(tmp_path / "a") == content(tmp_path / "whole")


def test_a_first_client_that_is_refused_leaves_no_folder(tmp_path):
    with pytest.raises(InvalidData, match="client 'a', row 1 of its x holds NaN"):
        write_store([("a", np.array([[1.0], [np.nan]]), np.array([0, 1]))], tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_the_same_write_again_changes_nothing_and_another_is_refused(tmp_path):
    write_store(some_clients(), tmp_path / "a")
    before = content(tmp_path / "a")
    write_store(some_clients(), tmp_path / "a")
    assert content(tmp_path / "a") == before
    for other in (some_clients(seed=1), some_clients(21), some_clients(19)):
        with pytest.raises(InvalidParameter, match=r"It holds another store.*append=True adds"):
            write_store(other, tmp_path / "a")
    assert content(tmp_path / "a") == before


def altered(leaf):
    """The leaf with one other number in the middle."""
    if isinstance(leaf, Ragged):
        return Ragged(altered(leaf.values), leaf.offsets, leaf.pad, leaf.mask)
    values = torch.as_tensor(leaf).clone()
    values.view(-1)[values.numel() // 2] = values.view(-1)[values.numel() // 2] == 0
    return values


@pytest.mark.parametrize("kind", ["tensor", "tuple", "ragged", "bfloat16"])
@pytest.mark.parametrize("finished", [True, False])
def test_another_number_of_any_client_is_noticed(tmp_path, monkeypatch, kind, finished):
    clients = list(some_clients(kind=kind))
    write_store(clients, tmp_path / "a")
    if not finished:
        shutil.rmtree(tmp_path / "a")
        monkeypatch.setattr(store_writer, "JOURNAL_BYTES", 1)
        monkeypatch.setattr(client_batches, "BATCH_BYTES", 300)
        with pytest.raises(Stop):
            write_store(stopping_after(19, clients), tmp_path / "a")
    monkeypatch.undo()
    before = content(tmp_path / "a")
    name, x, y = clients[7]
    for other in ((name, map_tree(altered, x), y), (name, x, altered(y))):
        with pytest.raises(InvalidParameter, match="It holds another store: its examples of client 'client 7' are others"):
            write_store([*clients[:7], other, *clients[8:]], tmp_path / "a")
        assert content(tmp_path / "a") == before


def test_sequences_that_are_cut_elsewhere_are_noticed(tmp_path):
    def clients(*cuts):
        return [(f"c{k}", {"t": Ragged.of(cut)}, np.zeros(2, int)) for k, cut in enumerate(cuts)]

    cut = [[1, 2], [3]]
    write_store(clients(cut, cut, cut), tmp_path / "a")
    with pytest.raises(InvalidParameter, match="its examples of client 'c1' are others"):
        write_store(clients(cut, [[1], [2, 3]], cut), tmp_path / "a")


def test_a_store_that_may_not_be_written_is_named(tmp_path, monkeypatch):
    write_store(some_clients(), tmp_path / "a")
    before, opened = content(tmp_path / "a"), Path.open

    def refuse(path, mode="r", *rest, **options):
        if mode != "rb" and path.parent == tmp_path / "a":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, mode, *rest, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(
        NotWritten, match=r"(?s)/a could not be written on after 0 clients: .*Permission denied.*folder's permissions"
    ):
        write_store(some_clients(1, seed=2), tmp_path / "a", append=True)
    monkeypatch.undo()

    def keep(*rest, **options):
        raise PermissionError(13, "Permission denied")

    for name in ("write_atomically", "Path.unlink"):  # a lock of before may be opened where no file can be made or removed
        monkeypatch.setattr(Path if name == "Path.unlink" else store_writer, name.removeprefix("Path."), keep)
    with pytest.raises(NotWritten, match="Permission denied"):
        write_store(some_clients(1, seed=2), tmp_path / "a", append=True)
    monkeypatch.undo()
    (tmp_path / "a" / ".lock").unlink()
    assert content(tmp_path / "a") == before


def test_an_interrupted_append_leaves_the_store_as_it_was(tmp_path, small_blocks):
    clients = list(some_clients(60))
    write_store(clients, tmp_path / "whole", name="a")
    write_store(clients[:30], tmp_path / "a")
    before = open_store(tmp_path / "a", test=0.0)
    digest = before.fingerprint
    with pytest.raises(Stop):
        write_store(stopping_after(25, clients[30:]), tmp_path / "a", append=True)
    between = open_store(tmp_path / "a", test=0.0)
    assert len(between.train) == 30
    assert between.fingerprint == digest
    assert check_store(tmp_path / "a").clients == 30
    with pytest.raises(InvalidParameter, match="append=True"):
        write_store(clients[:30], tmp_path / "a")
    write_store(clients[30:], tmp_path / "a", append=True)
    assert content(tmp_path / "a") == content(tmp_path / "whole")
    with pytest.raises(InvalidData, match="client 'client 7' comes twice"):
        write_store(clients[7:9], tmp_path / "a", append=True)


def test_append_needs_the_kind_of_clients_that_are_there(tmp_path):
    write_store(some_clients(), tmp_path / "a", scale=0.5)
    images = [("new", np.ones((2, 4), np.float32), [0, 1])]
    kinds = r"clients must match those in the store .*: its x is float32 \(3,\), but is 'float32 \(4,\)'. Convert them"
    with pytest.raises(InvalidParameter, match=kinds) as caught:
        write_store(images, tmp_path / "a", append=True)
    assert "append=True" not in str(caught.value)
    with pytest.raises(InvalidParameter, match=r"its scale is \[0.5\], but is '\[0.25\]'"):
        write_store([("new", np.ones((2, 3), np.float32), [0, 1])], tmp_path / "a", scale=0.25, append=True)
    with pytest.raises(InvalidParameter, match="must be of the splits of the store, clients"):
        write_store(split_clients(ClientSet.pack(some_clients())), tmp_path / "a", append=True)


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([], "there is no client"),
        ([("a", [[1.0]], [0]), ("", [[1.0]], [0])], "id of entry 1 is missing: it is ''. Drop that entry, or name its client"),
        ([("a", [[1.0]], [0]), (None, [[1.0]], [0])], "id of entry 1 is missing: it is None. Drop"),
        ([("a", [[1.0]], [0]), (float("nan"), [[1.0]], [0])], "id of entry 1 is missing: it is nan. Drop"),
        ([("1", [[1.0]], [0]), (1.0, [[1.0]], [0])], "repeated: 1"),
        ([("a", [[1.0]])], "entry 0 must be a triple"),
        ([("\ud800", [[1.0]], [0])], "no valid text"),
        ([("a", [[1.0]], [0]), ("b", [[1.0], [np.inf]], [0, 1])], "client 'b'.*row 1.*inf"),
        ([("a", np.ones((1, 2)), [0]), ("b", np.ones((1, 3)), [0])], r"client 'b' has inputs and targets of shapes \(3,\)"),
        ([("a", np.ones((1, 2)), [0]), ("b", np.ones((2, 2)), [0])], "client 'b' has 2 inputs but 1 targets"),
        ([("a", np.ones((1, 2)), [0]), ("b", np.ones((1, 2)), [0.5])], "types of x and y of client 'b'"),
        ([("a", np.ones((1, 2)), [0]), ("b", np.ones((1, 2), complex), [0])], "client 'b': x holds complex"),
        ([("a", np.ones((1, 2)), [0]), ("b", np.ones((0, 2)), np.ones(0, int))], "no example: b"),
        ([("a", np.ones((1, 2)), [0]), ("a", np.ones((1, 2)), [0])], "repeated: a"),
        ([("a", np.ones((1, 2)), [0]), ("b", np.ones((1, 2)), [-1])], "client 'b' has classes -1"),
        ([("a", np.ones((1, 2)), [0]), ("b", np.ones((1, 2)), [7])], "client 'b' has classes 7 … 7, but they must be 0 … 4"),
        ([("a", np.array([[1e200]]), [0])], "beyond the largest float32"),
        ([("a", np.array([["text"]]), [0])], "client 'a': x holds <U"),
        ({"a": ([[1.0]], [0])}, "must be an iterable of"),
        ("abc", "must be an iterable of"),
        (3, "must be an iterable of"),
    ],
)  # fmt: skip
def test_bad_clients_are_refused_by_name(tmp_path, clients, message):
    with pytest.raises((InvalidData, InvalidParameter), match=message):
        write_store(clients, tmp_path / "a", classes=5)


def test_a_client_that_comes_twice_in_a_long_stream_is_refused(tmp_path, small_blocks):
    with pytest.raises(InvalidData, match="client 'client 3' comes twice"):
        write_store([*some_clients(30), next(c for c in some_clients() if c[0] == "client 3")], tmp_path / "a")


def test_clients_of_another_kind_in_a_later_batch_are_refused(tmp_path, small_blocks):
    late = ("late", np.ones((2, 3), np.float32), np.array([0.5, 1.0], np.float32))
    full = ("full", np.ones((100, 3), np.float32), np.zeros(100, int))  # a batch of its own, or the end of one
    with pytest.raises(InvalidData, match=r"client 'late' are float32 \(3,\) and float32 \(\), those before it float32"):
        write_store([*some_clients(), full, late], tmp_path / "a")


def test_attacked_data_and_scales_of_their_own_are_refused(tmp_path):
    data = split_clients(ClientSet.pack(some_clients()))
    with pytest.raises(InvalidParameter, match="apply the attack to the opened store"):
        write_store(eq.attacks.apply(data, eq.attacks.LabelPoisoning(0.2)), tmp_path / "a")
    with pytest.raises(InvalidParameter, match="the data have their own"):
        write_store(data, tmp_path / "a", scale=0.5)


def test_foreign_folders_and_files_are_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InvalidParameter, match=r"must be a new or empty folder.*'notes.txt'"):
        write_store(some_clients(), tmp_path)
    with pytest.raises(InvalidParameter, match="A file has this name"):
        write_store(some_clients(), tmp_path / "notes.txt")
    with pytest.raises(InvalidData, match="is no store"):
        open_store(tmp_path)
    assert content(tmp_path) == {"notes.txt": b"mine"}


def test_two_writers_do_not_mix(tmp_path):
    def clients():
        yield from some_clients(3)
        with pytest.raises(ConfigError, match="Another process works in"):
            write_store(some_clients(), tmp_path / "a")
        yield "last", np.ones((1, 3), np.float32), np.zeros(1, int)

    write_store([("first", np.ones((1, 3), np.float32), np.zeros(1, int))], tmp_path / "a")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_batches, "BATCH_BYTES", 1)
        write_store(clients(), tmp_path / "a", append=True)
    assert check_store(tmp_path / "a").clients == 5


def test_a_flipped_byte_is_found(tmp_path, small_blocks):
    write_store(some_clients(), tmp_path / "a")
    sizes = {name: len(data) for name, data in content(tmp_path / "a").items() if not name.endswith((".checksums", ".json"))}
    draw = random.Random(1)
    for name, size in sizes.items():
        place = draw.randrange(size)
        with (tmp_path / "a" / name).open("r+b") as file:
            file.seek(place)
            old = file.read(1)
            file.seek(place)
            file.write(bytes([old[0] ^ 1]))
        with pytest.raises(
            InvalidData, match=rf"block {place // 256} of {name} \(bytes {place // 256 * 256} …\).*changed since"
        ):
            check_store(tmp_path / "a")
        with (tmp_path / "a" / name).open("r+b") as file:
            file.seek(place)
            file.write(old)
    assert check_store(tmp_path / "a").clients == 20


@pytest.mark.parametrize("damage", ["cut", "longer", "gone", "checksums", "manifest", "labels", "json", "format", "key"])
def test_a_store_that_does_not_fit_its_manifest_is_refused(tmp_path, damage, small_blocks):
    write_store(some_clients(), tmp_path / "a")
    values, manifest = tmp_path / "a" / "clients" / "x.0.values", tmp_path / "a" / "manifest.json"
    described = json.loads(manifest.read_bytes())
    if damage == "cut":
        values.write_bytes(values.read_bytes()[:-1])
    elif damage == "longer":
        values.write_bytes(values.read_bytes() + b"x")
    elif damage == "gone":
        values.unlink()
    elif damage == "checksums":
        checksums = values.with_name("x.0.values.checksums")
        checksums.write_bytes(checksums.read_bytes()[::-1])
    elif damage == "json":
        manifest.write_bytes(manifest.read_bytes()[:-20])
    else:
        if damage == "manifest":
            described["x"]["leaves"][0]["type"] = "int32"
        elif damage == "labels":
            described["sets"]["clients"]["labels"][1] = 99
        elif damage == "format":
            described["format"] = 99
        else:
            del described["sets"]["clients"]["digest"]
        manifest.write_text(json.dumps(described))
    for read in (open_store, check_store):
        with pytest.raises(InvalidData, match=r"write it again|version of equipoise"):
            read(tmp_path / "a")


def test_a_store_that_changes_while_it_is_open_is_noticed(tmp_path):
    write_store(some_clients(), tmp_path / "a")
    data = open_store(tmp_path / "a")
    refuse_changed_store(data)
    refuse_changed_store(split_clients(ClientSet.pack(some_clients())))  # in memory
    values = tmp_path / "a" / "clients" / "x.0.values"
    old = values.stat()
    os.utime(values, ns=(old.st_atime_ns, old.st_mtime_ns + 1))
    with pytest.raises(InvalidData, match=r"x\.0\.values changed while the store was open"):
        refuse_changed_store(data)
    data = open_store(tmp_path / "a")
    (tmp_path / "a" / "manifest.json").unlink()
    with pytest.raises(InvalidData, match=r"manifest\.json does not exist any more: the store was moved or deleted"):
        refuse_changed_store(data)


def test_a_store_stays_open_when_the_directory_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_store(some_clients(), "a")
    data = open_store("a")
    monkeypatch.chdir("/")
    refuse_changed_store(data)
    assert data.train.store.path == tmp_path / "a"


def test_a_class_that_only_test_clients_have_is_refused(tmp_path):
    x = np.zeros((2, 3), np.float32)
    clients = [(f"client {k}", x, np.array([0, 2 if k == 7 else 1])) for k in range(20)]
    memory = ClientSet.pack(clients)
    seeds = {"client 7" in split_clients(memory, test=0.2, seed=seed).test.ids: seed for seed in range(30)}
    write_store(clients, tmp_path / "a")
    assert open_store(tmp_path / "a", seed=seeds[False]).classes == 3
    with pytest.raises(InvalidData, match=r"test has the class 2, which no training client has.*another seed.*classes=3"):
        open_store(tmp_path / "a", seed=seeds[True])
    write_store(clients, tmp_path / "b", classes=3)
    assert open_store(tmp_path / "b", seed=seeds[True]).classes == 3
    steps = [(i, {"t": Ragged.of([[1]] * 2)}, Ragged.of([[0, c], [0]], pad=-100, mask=None)) for i, _, (_, c) in clients]
    write_store(steps, tmp_path / "c")
    with pytest.raises(InvalidData, match="test has the class 2"):
        open_store(tmp_path / "c", seed=seeds[True])


def flip(file, place, value):
    numbers = np.fromfile(file, np.int64)
    numbers[place] = value
    numbers.tofile(file)


@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize("file", ["offsets", "ids.offsets", "y.0.values", "x.0.offsets"])
def test_a_damaged_store_is_refused_before_it_is_trained_on(tmp_path, engine, file):
    count = 200 if file[0] == "x" else 6  # the model is tried on some of the first 256 sequences
    last = count - 2
    x = [{"t": Ragged.of([[1, 2], [3]])} if file == "x.0.offsets" else np.ones((2, 3), np.float32) for _ in range(count)]
    write_store([(f"c{k}", x[k], np.array([0, 1])) for k in range(count)], tmp_path / "a")
    flip(tmp_path / "a" / "clients" / file, 3 if file.endswith("offsets") and file[0] != "x" else 2 * last + 1, 2**40)
    cure = "The store was damaged: `equipoise data check STORE` says where"
    if file in ("offsets", "ids.offsets"):
        with pytest.raises(InvalidData, match=rf"clients/{file} does not rise.*{cure}"):
            open_store(tmp_path / "a")
        return
    data = open_store(tmp_path / "a", test=0.0)
    whose = {
        "y.0.values": f"client 'c{last}', row 1 of its y holds a class",
        "x.0.offsets": rf"client 'c{last}', row 0 of its x\['t'\] holds",
    }
    model = eq.models.Softmax(3, 2) if file == "y.0.values" else OneMean()
    with pytest.raises(InvalidData, match=rf"{whose[file]}.*{cure}"):
        eq.train(model, data, rounds=1, clients_per_round=count, engine=engine)
    flip(tmp_path / "a" / "clients" / file, 3, 2**40)  # of a client that the model is tried on
    with pytest.raises(InvalidData, match=rf"client 'c1', row . of its .*{cure}"):
        open_store(tmp_path / "a", test=0.0)


class OneMean(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(5, 2)

    def forward(self, t, attention_mask):
        mask = attention_mask.unsqueeze(-1)
        return (self.embed(t) * mask).sum(1) / mask.sum(1)


def test_rows_of_a_store_are_checked_once_and_before_they_are_copied_to_a_device(tmp_path):
    write_store([(k, np.zeros((5, 4), np.float32), np.arange(5)) for k in range(10)], tmp_path / "a")
    data = open_store(tmp_path / "a", test=0.0)
    assert data.train.ids == tuple(map(str, range(10)))
    check = RowCheck(data.train)
    check(torch.tensor([3, 4]))
    assert np.flatnonzero(check.checked).tolist() == [3, 4]
    check.y = None  # so that it cannot be read
    check(torch.tensor([4, 3]))
    flip(tmp_path / "a" / "clients" / "y.0.values", 5 * 9, 7)
    data = open_store(tmp_path / "a", test=0.0)
    sets = DeviceSets(torch.device("cpu"), data, resident=False)
    sets.hold(sets[data.train], torch.tensor([8]))
    with pytest.raises(InvalidData, match="client '9', row 0 of its y holds a class that none had"):
        sets.hold(sets[data.train], torch.tensor([9]))
    with pytest.raises(InvalidData, match="client '9'"):
        moved_in_pieces(data.train, torch.device("meta"))


def test_a_disk_that_runs_full_is_named_and_the_write_goes_on_later(tmp_path):
    def write(path, limit):
        store_writer.JOURNAL_BYTES, client_batches.BATCH_BYTES = 6000, 3000
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            write_store(some_clients(1000), path, name="full")
        except NotWritten as failure:
            (tmp_path / "message").write_text(str(failure))

    in_another_process(write, tmp_path / "a", 20_000).join()
    message = (tmp_path / "message").read_text()
    assert "could not be written on after" in message
    assert "start the same call again" in message
    for name in "ab":
        in_another_process(write, tmp_path / name, None).join()
    assert content(tmp_path / "a") == content(tmp_path / "b")


@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize("kind", ["tensor", "ragged"])
def test_training_from_a_store_is_training_from_memory(tmp_path, engine, kind):
    write_store(some_clients(30, kind=kind), tmp_path / "a")
    memory = split_clients(ClientSet.pack(some_clients(30, kind=kind)), test=0.3, validation=0.1, seed=2)
    stored = open_store(tmp_path / "a", test=0.3, validation=0.1, seed=2)
    algorithm = eq.Algorithm(risk=eq.risk.Superquantile(0.5), solver=eq.solvers.SGD(lr=0.1, batch_size=2, epochs=2))
    torch.manual_seed(0)
    model = eq.models.Softmax(3, 4) if kind == "tensor" else Tagger()
    results = [
        eq.train(
            model, data, algorithm, rounds=4, clients_per_round=5, seed=1,
            engine=engine, progress=False,
        )
        for data in (memory, stored)
    ]  # fmt: skip
    one, other = (torch.cat([p.detach().flatten() for p in result.model.parameters()]) for result in results)
    assert torch.equal(one, other)
    one, other = (result.clients for result in results)
    assert one.client == other.client
    assert torch.equal(one.loss, other.loss)
    assert torch.equal(one.error, other.error)


class Tagger(torch.nn.Module):
    """A class for each token."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(50, 5), torch.nn.Linear(8, 4)

    def forward(self, input_ids, age, attention_mask):
        tokens = self.embedding(input_ids)
        both = torch.cat([tokens, age.unsqueeze(-2).expand(*tokens.shape[:-1], 3)], -1)
        return self.head(both).movedim(-1, 1)


def test_opening_reads_no_values_and_takes_no_memory_for_them(tmp_path):
    def clients():
        for k in range(60):
            yield str(k), torch.zeros(1000, 500), torch.zeros(1000, dtype=torch.long)  # 2 MB each

    write_store(clients(), tmp_path / "a")
    data = open_store(tmp_path / "a")
    before = _anonymous()
    total = sum(float(data.train.inputs(data.train.rows(k)).sum()) for k in range(len(data.train)))
    assert total == 0.0
    assert _anonymous() - before < 30e6


def _anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon")))


def test_nothing_reads_all_ids(tmp_path, monkeypatch):
    """Training, a checkpoint, own models, an attack and saving read the ids of those who are shown, not of all clients.

    Saving own models, which writes a row of each training client, also writes the id of each, once.
    """
    write_store(some_clients(300), tmp_path / "a")
    data = eq.attacks.apply(open_store(tmp_path / "a", test=0.5), eq.attacks.RandomUpdates(share=0.02))
    read = []
    real = eq.data.clients.store_state.StoredIds._decoded

    def counted(self, places):
        read.append(len(places))
        return real(self, places)

    monkeypatch.setattr(eq.data.clients.store_state.StoredIds, "_decoded", counted)
    algorithm = eq.Algorithm(personal=eq.personal.Ditto(strength=0.5))
    model = eq.models.Softmax(data.features, data.classes)
    with pytest.warns(eq.errors.EquipoiseNotice, match="have no models of their own"):
        result = eq.train(
            model, data, algorithm, rounds=2, clients_per_round=5, evaluate_clients=10, checkpoint=tmp_path / "c/state"
        )
    assert sum(read) < 50
    result.save(tmp_path / "run")
    assert result.personal.params([result.personal.ids[3]]).shape == (1, len(result.params))
    assert sum(read) < 150 + 50
    assert json.loads((tmp_path / "run/personal.ids.json").read_text()) == list(data.train.ids)
