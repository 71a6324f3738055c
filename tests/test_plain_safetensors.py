"""The safetensors format without the package: files of either kind are read by both, damaged ones are refused."""

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


def test_the_package_reads_what_is_written_plainly(tmp_path):
    (tmp_path / "a").write_bytes(save_plainly(TENSORS, {"about": "é"}))
    with safe_open(tmp_path / "a", framework="pt") as file:
        assert file.metadata() == {"about": "é"}
        assert set(file.keys()) == set(TENSORS)
        for name, value in TENSORS.items():
            assert torch.equal(file.get_tensor(name), value)
            assert file.get_tensor(name).dtype == value.dtype


def test_files_of_the_package_are_read_plainly(tmp_path):
    (tmp_path / "a").write_bytes(save(TENSORS, metadata={"about": "x"}))
    tensors, metadata = read_plainly(tmp_path / "a")
    assert metadata == {"about": "x"}
    assert all(torch.equal(tensors[name], value) and tensors[name].dtype == value.dtype for name, value in TENSORS.items())


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


@pytest.mark.parametrize(
    "content",
    [
        b"", b"short", (2**60).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{x",
        (66).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}             ',
        (66).to_bytes(8, "little") + b'{"a":{"dtype":"Z32","shape":[2],"data_offsets":[0,0]}}             ',
        (66).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,3]}}             ' + b"abc",
        (66).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}             ' + b"abcdefgh",
    ],
)  # fmt: skip
def test_damaged_files_are_refused(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError):  # noqa: PT011 — each with a message of its own
        read_plainly(tmp_path / "a")
