import os

import pytest

from equipoise.core.files import write_atomically
from equipoise.errors import NotWritten


def test_a_file_is_replaced_whole_and_its_folder_made(tmp_path):
    target = tmp_path / "deep" / "clients.csv"
    assert write_atomically(target, b"old") == target
    write_atomically(target, b"new")
    assert [(p.name, p.read_bytes()) for p in target.parent.iterdir()] == [("clients.csv", b"new")]


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    target = tmp_path / "clients.csv"
    target.write_text("old")

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NotWritten, match=r"clients\.csv could not be written: No space left on device"):
        write_atomically(target, b"new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("clients.csv", "old")]
