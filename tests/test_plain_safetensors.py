"""The safetensors format: files of the package and of ours are read by both, damaged and forged ones are refused."""

import json
import pickle
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

from equipoise.core import tensor_files
from equipoise.core.plain_safetensors import DTYPES, read_plainly, save_plainly

TENSORS = {
    name: torch.tensor([[1, 0, 1], [0, 1, 1]]).to(dtype) for name, dtype in DTYPES.items()
} | {"empty": torch.empty(0, 3), "one": torch.tensor(2.5)}  # fmt: skip


def same(one, other):
    """The same numbers of one type; some types know no equality."""
    bits = (value.flatten().view(torch.uint8).tolist() if value.numel() else [] for value in (one, other))
    return one.dtype == other.dtype and len({tuple(each) for each in bits}) == 1


def test_the_package_reads_what_is_written_plainly(tmp_path):
    (tmp_path / "a").write_bytes(save_plainly(TENSORS, {"about": "é"}))
    with safe_open(tmp_path / "a", framework="pt") as file:
        assert file.metadata() == {"about": "é"}
        assert set(file.keys()) == set(TENSORS)
        for name, value in TENSORS.items():
            assert same(file.get_tensor(name), value)


def test_files_of_the_package_are_read_plainly():
    tensors, metadata = read_plainly(save(TENSORS, metadata={"about": "x"}))
    assert metadata == {"about": "x"}
    assert {name: value.shape for name, value in tensors.items()} == {name: value.shape for name, value in TENSORS.items()}
    assert all(same(tensors[name], value) for name, value in TENSORS.items())


def test_tensor_files_need_no_package(tmp_path, monkeypatch):
    with_package = tensor_files.tensor_file_bytes({"w": torch.arange(3.0)}, text="hello", kind="test")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    without = tensor_files.tensor_file_bytes({"w": torch.arange(3.0)}, text="hello", kind="test")
    for content in (with_package, without):
        (tmp_path / "a").write_bytes(content)
        found = tensor_files.read_tensor_file(tmp_path / "a")
        assert (found.tensors["w"].tolist(), found.text, found.about) == ([0.0, 1.0, 2.0], "hello", {"kind": "test"})
        for at in (3, len(content) - 1):
            (tmp_path / "a").write_bytes(content[:at] + bytes([content[at] ^ 64]) + content[at + 1 :])
            with pytest.raises(tensor_files.DamagedFile):
                tensor_files.read_tensor_file(tmp_path / "a")


def forged(header, numbers=b"", length=None):
    """A file with this header, which may say another length of itself."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + numbers


def about(shape, first, last, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"short", forged(b"{}", length=2**62), forged(b"{}", length=3), forged(b"[]"), forged(b"{x"), forged(b"3"),
        forged(b"[" * 10**5 + b"]" * 10**5), forged(b'{"a":' * 10**4 + b"1" + b"}" * 10**4), forged(b'{"a": NaN}'),
        forged({"a": 3}), forged({"a": {}}), forged({"__metadata__": 3}), forged({"a": about([2], 0, 8)}),
        forged({"a": about([2], 0, 0, "Z32")}), forged({"a": about([2], 0, 3)}, b"abc"),
        forged({"a": about([3], 0, 8)}, bytes(8)), forged({"a": about([-2], 0, 8)}, bytes(8)),
        forged({"a": about([-1, 2], 0, 8)}, bytes(8)),
        forged({"a": about([2.0], 0, 8)}, bytes(8)), forged({"a": about([True, 2], 0, 8)}, bytes(8)),
        forged({"a": about([2**40, 0], 0, 0)} | {"b": about([2**62, 4], 0, 0)}), forged({"a": about([0, 2**63], 0, 0)}),
        forged({"a": about(2, 0, 8)}, bytes(8)), forged({"a": about([2], 0, 8)}, bytes(9)),  # more than it says
        forged({"a": about([2], 4, 12)}, bytes(12)),  # a gap
        forged({str(k): about([10**6], 0, 4 * 10**6) for k in range(1000)}, bytes(4 * 10**6)),  # many share the same bytes
        forged({"a": about([2], 0, 8), "b": about([2], 4, 12)}, bytes(12)), forged({"a": about([2], -8, 0)}, bytes(8)),
        forged({"a": about([2], 0, 2**63)}, bytes(8)), forged({"a": about([2], 8, 0)}, bytes(8)),
        forged({"__metadata__": {"equipoise": "["}}), forged({"__metadata__": {"equipoise": "[]"}}),
        forged({"__metadata__": {"equipoise": "{}"}}), pickle.dumps([0] * 100),
    ],
)  # fmt: skip
def test_damaged_and_forged_files_are_refused_with_their_path(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(tensor_files.DamagedFile) as caught:
        tensor_files.read_tensor_file(tmp_path / "a")
    assert str(tmp_path / "a") in str(caught.value)
    assert not isinstance(caught.value.__cause__, MemoryError)
