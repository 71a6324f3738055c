"""A slice of the campaign, and what the campaign has found before: each case fails on the version that it was found on."""

import gzip
import io
import random
import sys
import zipfile
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

import equipoise as eq
from equipoise.core import files
from equipoise.data import file_access
from equipoise.errors import EquipoiseError, InvalidData
from equipoise.personal.store import ClientRows

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
if not (BENCHMARKS / "campaign.py").is_file():
    pytest.skip("the benchmarks are not part of this copy", allow_module_level=True)
sys.path.insert(0, str(BENCHMARKS))

import campaign  # noqa: E402 — from benchmarks
from campaign_drivers.crash_states import PowerCut, PowerWentOut  # noqa: E402
from campaign_drivers.findings import SLICE  # noqa: E402


@pytest.mark.campaign
@pytest.mark.parametrize("driver", campaign.DRIVERS)
def test_a_slice_of_the_campaign_finds_nothing(driver, tmp_path):
    tally = campaign.run(driver, seconds=SLICE, seed=0, folder=tmp_path)
    assert tally.counts["cases"] > 0
    assert not tally.findings, "\n".join(path.read_text() for path in tally.findings)


# ---------------------------------------------------------------------------------------------- the drivers can find something


@pytest.mark.parametrize("broken", ["no sync", "no rename"])
def test_a_power_cut_finds_a_write_that_is_not_synced(broken, tmp_path, monkeypatch):
    """Write twice without one of the steps of `write_atomically`: some power cut leaves neither the old nor the new content."""
    if broken == "no sync":
        monkeypatch.setattr(files.DurableFile, "sync", lambda self: None)
    left = set()
    for number in range(60):
        folder, target = tmp_path / f"{number}", tmp_path / f"left-{number}"
        folder.mkdir()
        (folder / "file").write_bytes(b"old" * 4000)
        monkeypatch.setattr(files, "recorder", PowerCut(folder, target, number % 8, random.Random(number)))
        try:
            if broken == "no rename":
                with closing(files.DurableFile(folder / "file")) as file:
                    file.write(b"new" * 4000)
                    file.sync()
            else:
                files.write_atomically(folder / "file", b"new" * 4000)
            files.sync_folder(folder)
            files.sync_folder(folder)
        except PowerWentOut:
            left.add((target / "file").read_bytes() if (target / "file").exists() else b"")
    assert left - {b"old" * 4000, b"new" * 4000}


def test_a_power_cut_leaves_the_old_file_or_the_new_one(tmp_path, monkeypatch):
    left = set()
    for number in range(80):
        folder, target = tmp_path / f"{number}", tmp_path / f"left-{number}"
        folder.mkdir()
        (folder / "file").write_bytes(b"old" * 4000)
        monkeypatch.setattr(files, "recorder", PowerCut(folder, target, number % 8, random.Random(number)))
        try:
            files.write_atomically(folder / "file", b"new" * 4000)
            files.sync_folder(folder)
        except PowerWentOut:
            left.add((target / "file").read_bytes())
    assert left == {b"old" * 4000, b"new" * 4000}


# -------------------------------------------------------------------------------------------------------------- found before


@pytest.mark.parametrize(
    ("old", "new"), [(b"(2, 3, 2)", b"2, 3, 2)"), (b"(2, 3, 2), }", b"(2, 3, 9223372036854775807), }"), (b"<f4", b"<q4")]
)
def test_a_damaged_header_of_rows_is_refused(old, new, tmp_path):
    rows = ClientRows(torch.zeros(2), 3, tmp_path / "rows.npy")
    places = rows.write(torch.zeros(3, dtype=torch.uint8), torch.tensor([1]), torch.ones(1, 2))
    rows.flush()
    content = (tmp_path / "rows.npy").read_bytes()
    assert old in content
    changed = content.replace(old, new, 1)
    changed = changed.replace(b" " * max(0, len(changed) - len(content)), b"", 1)
    (tmp_path / "damaged.npy").write_bytes(changed)
    with pytest.raises(EquipoiseError, match=r"damaged\.npy"):
        ClientRows(torch.zeros(2), 3, tmp_path / "damaged.npy", places=places)


def packed_zeros(numbers):
    """An archive whose array x has so many zeros."""
    packed, header = io.BytesIO(), io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (numbers, 1)})
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("x.npy", "w") as entry:
        entry.write(header.getvalue())
        entry.write(bytes(numbers))
    return packed.getvalue()


def test_files_that_unpack_to_far_more_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(file_access, "MOST_UNPACKED", 2**20)
    (tmp_path / "data.npz").write_bytes(packed_zeros(2**22))
    with pytest.raises(InvalidData, match=r"data\.npz: .* unpack to"):
        eq.data.npz(tmp_path / "data.npz")
    (tmp_path / "data.json.gz").write_bytes(gzip.compress(b'{"users": [' + b" " * 2**22))
    with pytest.raises(InvalidData, match=r"data\.json\.gz: .* unpack to"):
        file_access.load_json(tmp_path / "data.json.gz")


def test_a_ledger_with_zeros_that_a_power_cut_left_is_read(tmp_path):
    from equipoise.privacy.ledger import Ledger, LedgerEntry, LedgerError

    path = tmp_path / "run.ledger.jsonl"
    ledger = Ledger(path)
    for number in range(3):
        ledger.write(LedgerEntry("release", "data", "run", number, "update"))
    ledger.close()
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], b"\0" * 40 + lines[1][40:], lines[2], b""]))
    assert [entry.round for entry in Ledger(path)] == [0, 2]
    path.write_bytes(b"\n".join([lines[0], b'{"nothing": 1}', lines[2], b""]))
    with pytest.raises(LedgerError, match="line 2, is no entry"):
        Ledger(path)


def test_a_batch_size_that_no_integer_of_64_bits_holds_is_refused():
    with pytest.raises(EquipoiseError, match="batch_size must be a whole number between 1 and 9223372036854775807"):
        eq.solvers.SGD(batch_size=10**20)
