"""Forged files: every way in which a good file, as a tree of values or as bytes, may lie about itself."""

import copy
import io
import json
import math
import pickle
import resource
import signal
from contextlib import contextmanager

import numpy as np

DEEP = 10**5
HOSTILE = (
    None, True, -1, 0, 2**62, 2**70, 1e-300, -1.5, math.nan, math.inf, "", "x\x00\x1b[2J", "../../x", [], {}, [None],
    {"a": None},
)  # fmt: skip
TEXTS = {  # of JSON files: each is no tree, or too deep a one
    "empty": b"", "cut": b'{"a": [1', "no object": b"3", "a list": b"[]", "no text": b"\xff\xfe\xff", "zeros": b"\0" * 64,
    "deep lists": b"[" * DEEP + b"]" * DEEP, "deep objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "deep and cut": b'{"a":' * DEEP, "60 deep": b'{"a":' * 60 + b"1" + b"}" * 60,
    "long number": b'{"a": ' + b"9" * 10**4 + b"}", "1e999": b'{"a": 1e999}',
    "NaN": b'{"a": NaN}',
}  # fmt: skip
TOMLS = {
    "cut": b"a = [1", "no text": b"\xff\xfe\xff", "zeros": b"\0" * 64, "deep lists": b"a = " + b"[" * DEEP + b"]" * DEEP,
    "long key": b"a" + b".a" * DEEP + b" = 1", "60 deep": b"a" + b".a" * 60 + b" = 1",
    "deep tables": b"a = " + b"{a = " * 10**4, "long number": b"a = " + b"9" * 10**4,
    "wide number": f"a = {2**70}".encode(), "another": b"a = 1", "ends of texts": b'\\"""\n' * 10**5,
    "beginnings of texts": b'\\"' * 10**5, "too large": b"#" * (1 << 24) + b"\n",
}  # fmt: skip
SHAPES = (2**40, 2), (-6, 2), (2**62, 4), (0, 2**40), (6,), (), (3, 2, 2), (6, 0)
DTYPES = "<f4", "<f8", "|O", "<U5", "|V100000", "<c8", "|S3", "<M8[s]", [("a", "<f4")]


class Evil:
    """Leaves a marker when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


def pickles(marker):
    """Pickles as the formats that may hold one know them."""
    evil = np.array([Evil(marker), None], dtype=object)
    array, archive = io.BytesIO(), io.BytesIO()
    np.save(array, evil, allow_pickle=True)
    np.savez(archive, x=evil, y=evil, client=evil, allow_pickle=True)
    yield "a pickle", pickle.dumps(Evil(marker))
    yield "an old pickle", pickle.dumps(Evil(marker), protocol=0)
    yield "an array of objects", array.getvalue()
    yield "an archive of objects", archive.getvalue()


def places(tree, here=()):
    """The places of all values in a tree of dictionaries and lists; of a list its first and last."""
    if here:
        yield here
    inner = (
        tree.items()
        if isinstance(tree, dict)
        else [(k, tree[k]) for k in sorted({0, len(tree) - 1})]
        if tree and isinstance(tree, list)
        else ()
    )
    for step, value in inner:
        yield from places(value, (*here, step))


def mutants(tree, hostile=HOSTILE):
    """Trees that differ from a good one at one place, each with words on what differs: other values, and none."""
    for place in places(tree):
        for value in (*hostile, ...):
            forged = inner = copy.deepcopy(tree)
            for step in place[:-1]:
                inner = inner[step]
            if value is ...:
                del inner[place[-1]]
            else:
                inner[place[-1]] = copy.deepcopy(value)
            yield f"{'.'.join(map(str, place))} = {value!r}", forged


def json_files(tree):
    """The contents of forged JSON files: what is none, and the mutants of a good one."""
    yield from TEXTS.items()
    yield from ((words, json.dumps(forged).encode()) for words, forged in mutants(tree))


def json_lines(lines):
    """The contents of forged files of JSON lines: strange ones alone and at the end, and mutants of each line."""
    good = [json.dumps(line).encode() + b"\n" for line in lines]
    for words, text in TEXTS.items():
        yield words, text + b"\n"
        yield f"{words} at the end", b"".join(good) + text + b"\n"
    for k, line in enumerate(lines):
        for words, forged in mutants(line):
            yield f"line {k}: {words}", b"".join(good[:k]) + json.dumps(forged).encode() + b"\n" + b"".join(good[k + 1 :])


def toml_files(tree):
    """The contents of forged TOML files: what is none, and the mutants of a good one."""
    from equipoise.experiment import toml

    yield from TOMLS.items()
    for words, forged in mutants(tree, tuple(v for v in HOSTILE if v is not None and v not in ([None], {"a": None}))):
        yield words, toml.dumps(forged).encode()


def byte_files(content, flips=60):
    """The contents of damaged files: cut, extended, and with a changed byte, above all at their beginning and their end."""
    for length in (0, 1, 8, 64, len(content) // 2, len(content) - 1):
        yield f"cut to {length}", content[:length]
    yield "with more bytes", content + b"\0" * 64
    yield "twice", content * 2
    yield "other bytes", b"\xff" * len(content)
    ends = {*range(min(len(content), 64)), *range(max(0, len(content) - 64), len(content))}
    for at in sorted(ends | set(range(0, len(content), max(1, len(content) // flips)))):
        yield f"byte {at} changed", content[:at] + bytes([content[at] ^ 0x55]) + content[at + 1 :]
        yield f"byte {at} full", content[:at] + b"\xff" + content[at + 1 :]


def arrays():
    """The contents of forged .npy files: shapes and types that the file does not hold, and headers that are none."""
    for dtype in DTYPES:
        for shape in ((6, 2), *SHAPES):
            for body in (b"", bytes(48)):
                out = io.BytesIO()
                np.lib.format.write_array_header_1_0(out, {"descr": dtype, "fortran_order": False, "shape": shape})
                yield f"{dtype} {shape}, {len(body)} bytes", out.getvalue() + body
    magic = b"\x93NUMPY\x01\x00"
    yield "a deep header", magic + (9000).to_bytes(2, "little") + b"(" * 8999 + b"\n"
    yield "code", magic + (40).to_bytes(2, "little") + b"__import__('os').system('x')".ljust(39) + b"\n"


def tensor_headers(content):
    """The contents of safetensors files with forged headers."""
    length = int.from_bytes(content[:8], "little")
    header, rest = json.loads(content[8 : 8 + length]), content[8 + length :]
    for words, text in json_files(header):
        yield words, len(text).to_bytes(8, "little") + text + rest
    for other in (2**62, 2**40, length + 1, length - 1, 0):
        yield f"a header of {other} bytes", other.to_bytes(8, "little") + content[8:]
    text = json.dumps({"w": {"dtype": "F32", "shape": [2**62] * 200_000, "data_offsets": [0, 4]}}).encode()
    yield "many axes", len(text).to_bytes(8, "little") + text + bytes(4)


@contextmanager
def little_memory(more=6 << 30):
    """Within it this process gets no more than some bytes of address space beyond what it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class TooLong(BaseException):
    """What was tried took too long; no guard of files takes it for a fault of a file."""


@contextmanager
def little_time(seconds=40):
    """Within it this process has so many seconds."""

    def stop(*_):
        raise TooLong(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
