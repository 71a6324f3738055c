"""Faults that were found before: each case fails on the version that it was found on. Power cuts at random moments."""

import gzip
import io
import json
import math
import random
import time
import warnings
import zipfile
from contextlib import closing

import numpy as np
import pytest
import torch

import equipoise as eq
from equipoise.core import files, unpacking
from equipoise.data.datasets import data_files as file_access
from equipoise.errors import ConfigError, EquipoiseError, EquipoiseNotice, InvalidData, InvalidParameter, NotWritten
from equipoise.personal.store import ClientRows
from equipoise.runs.checkpoint import Checkpoints
from equipoise.types import Observer
from power_cut import PowerCut, PowerWentOut


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
    """An archive whose arrays have so many zeros each."""
    packed, header = io.BytesIO(), io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (numbers, 1)})
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("x", "y", "client"):
            archive.writestr(f"{name}.npy", header.getvalue() + bytes(numbers))
    return packed.getvalue()


def test_files_that_unpack_to_far_more_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(unpacking, "MOST_UNPACKED", 2**20)
    monkeypatch.setattr(file_access, "MOST_TEXT", 2**20)
    (tmp_path / "data.npz").write_bytes(packed_zeros(2**22))
    with pytest.raises(InvalidData, match=r"data\.npz: .* unpack to"):
        eq.data.npz(tmp_path / "data.npz")
    (tmp_path / "data.json.gz").write_bytes(gzip.compress(b'{"users": [' + b" " * 2**22))
    with pytest.raises(InvalidData, match=r"data\.json\.gz: .* unpack to"):
        file_access.load_json(tmp_path / "data.json.gz")


@pytest.mark.parametrize(
    "change",
    [("delta", {}), ("delta", math.nan), ("multiplier", -1.0), ("zeroed", "1"), ("round", 0.5), ("run", 3), ("kind", [])],
)
def test_a_field_of_a_ledger_that_no_entry_has_is_refused_by_its_name(change, tmp_path):
    from equipoise.privacy.ledger import LedgerEntry, LedgerError
    from equipoise.privacy.ledger_report import entries_below, summarise_ledgers

    entry = LedgerEntry("release", "data", "run", 0, "update", 0.8, 0.8, ("poisson", 0.5), 0.01, nominal=True)
    (tmp_path / "ledger.jsonl").write_text(json.dumps(json.loads(entry.line()) | dict([change])) + "\n" + entry.line())
    reason = rf"line 1, is no entry of a ledger: ({change[0]} |it has a number that is not finite)"
    with pytest.raises(LedgerError, match=reason):
        summarise_ledgers(entries_below(tmp_path))


def test_the_name_of_a_column_that_is_no_text_is_refused(tmp_path):
    import pyarrow
    import pyarrow.parquet

    file = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"client": ["a"], "age": [1.0], "y": ["0"]}), file)
    file.write_bytes(file.read_bytes().replace(b"age", b"\xffge"))
    with pytest.raises(InvalidData, match="no complete Parquet file"):
        eq.data.parquet(file, client="client", target="y")


def test_a_ledger_with_zeros_that_a_power_cut_left_is_read(tmp_path):
    from equipoise.privacy.ledger import Ledger, LedgerEntry, LedgerError

    path = tmp_path / "run.ledger.jsonl"
    ledger = Ledger(path)
    for number in range(3):
        ledger.write(LedgerEntry("release", "data", "run", number, "update", sampling=("everyone",)))
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


# ------------------------------------------------------------------------------- found by kills, with run folders and studies


class StopBefore(Observer):
    """Stops a run after a round and before its checkpoint, as a kill would."""

    def __init__(self, after):
        self.after = after

    def on_state(self, state):
        if state.round == self.after:
            raise RuntimeError("killed")


def small_run(data, place, algorithm, stop=None, every=2, **more):
    model, saving = eq.models.Softmax(4, 3), Checkpoints(place / "run.safetensors", every=every)
    given = {"rounds": 6, "seed": 1, "engine": "loop", "progress": False, "checkpoint": saving, **more}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EquipoiseNotice)
        return eq.train(model, data, algorithm, observers=[StopBefore(stop)] if stop else [], **given)


CUT = {
    "tail": eq.Algorithm(risk=eq.risk.Superquantile(0.5)),
    "own models": eq.Algorithm(personal=eq.personal.Ditto(), sampler=eq.sampling.Full()),
    "kept rows": eq.Algorithm(solver=eq.solvers.Scaffold(eq.solvers.SGD(steps=2)), sampler=eq.sampling.Full()),
    "private": eq.Algorithm(
        privacy=eq.privacy.GaussianMechanism(0.5, 0.8, clip_rule=eq.privacy.AdaptiveClip(), noise_seed=0),
        sampler=eq.sampling.Full(),
    ),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files that a cut left open
@pytest.mark.parametrize("name", CUT)
def test_a_run_that_power_cuts_interrupt_at_random_writes_ends_like_an_undisturbed_one(name, ragged, tmp_path, monkeypatch):
    some = {"clients_per_round": 4} if name == "tail" else {}
    whole = small_run(ragged, tmp_path / "whole", CUT[name], **some)
    for seed in range(3):
        chance, place, ended, cuts = random.Random(seed), tmp_path / f"{seed}-0", None, 0
        while ended is None:
            place.mkdir(exist_ok=True)
            left = tmp_path / f"{seed}-{cuts + 1}"
            recorder = PowerCut(place, left, chance.randint(1, 60), chance) if cuts < 8 else None
            monkeypatch.setattr(files, "recorder", recorder)
            try:
                ended = small_run(ragged, place, CUT[name], **some)
            except PowerWentOut:
                place, cuts = left, cuts + 1
        monkeypatch.setattr(files, "recorder", None)
        assert torch.equal(ended.params, whole.params)
        assert [r.loss for r in ended.history.rounds] == [r.loss for r in whole.history.rounds]
        assert ended.epsilon == whole.epsilon
        if whole.personal is not None:
            ids = list(whole.personal.ids)
            assert torch.equal(ended.personal.params(ids), whole.personal.params(ids))


def test_epsilon_in_the_history_of_a_resumed_run_is_that_of_an_undisturbed_one(ragged, tmp_path):
    """Killed two rounds after its checkpoint, so that the ledger is ahead of it."""
    noise = eq.privacy.DifferentialPrivacy(None, 1e-2, 0.5, noise_multiplier=0.8, method="rdp")
    private = eq.Algorithm(privacy=noise, sampler=eq.sampling.Full())
    whole = small_run(ragged, tmp_path / "whole", private)
    with pytest.raises(EquipoiseError, match="killed"):
        small_run(ragged, tmp_path / "other", private, stop=4)
    resumed = small_run(ragged, tmp_path / "other", private)
    assert [report.epsilon for report in resumed.history.rounds] == [report.epsilon for report in whole.history.rounds]
    assert resumed.epsilon == whole.epsilon


def test_epsilon_counts_a_release_whose_line_a_power_cut_took_from_the_ledger(ragged, tmp_path):
    """Of a round with two releases, the sum and the count of an adaptive clip, one line is lost: ε must not shrink."""
    noise = eq.privacy.GaussianMechanism(0.5, 0.8, clip_rule=eq.privacy.AdaptiveClip())
    private = eq.Algorithm(privacy=noise, sampler=eq.sampling.Full())
    whole = small_run(ragged, tmp_path / "whole", private)
    with pytest.raises(EquipoiseError, match="killed"):
        small_run(ragged, tmp_path / "other", private, stop=5)
    ledger = next((tmp_path / "other").glob("*.ledger.jsonl"))
    lines = ledger.read_text().splitlines(keepends=True)
    (place,) = (n for n, line in enumerate(lines) if '"round":2' in line and '"purpose":"count"' in line)
    ledger.write_text("".join([*lines[:place], "\0" * 40 + "\n", *lines[place + 1 :]]))
    assert small_run(ragged, tmp_path / "other", private).epsilon == whole.epsilon


@pytest.mark.parametrize("kept", ["own models", "solver"])
def test_a_full_disk_while_rows_are_synced_names_the_file_and_no_observer(kept, ragged, tmp_path, monkeypatch):
    solver = eq.solvers.Adam(lr=0.01, state="kept") if kept == "solver" else eq.solvers.SGD()
    ditto = eq.Algorithm(
        solver=solver, personal=eq.personal.Ditto() if kept == "own models" else None, sampler=eq.sampling.Full()
    )

    def full(operation, path, *details):
        if operation == "sync" and path.suffix == ".npy" and path.stat().st_size and len(list(tmp_path.glob("*.safetensors"))):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "recorder", full)
    with pytest.raises(NotWritten, match=r"cannot be kept in .*run\..*\.npy: No space left on device") as caught:
        small_run(ragged, tmp_path, ditto)
    assert "Observer" not in str(caught.value)
    monkeypatch.setattr(files, "recorder", None)
    assert torch.equal(small_run(ragged, tmp_path, ditto).params, small_run(ragged, tmp_path / "whole", ditto).params)


def test_two_processes_do_not_go_on_with_one_checkpoint(ragged, tmp_path):
    """The second would write over rows that the first one's checkpoint refers to, and both would end with wrong own models."""
    ditto = eq.Algorithm(personal=eq.personal.Ditto(), sampler=eq.sampling.Full())
    path = tmp_path / "run.safetensors"
    with Checkpoints(path).held(), pytest.raises(EquipoiseError, match=r"Another process works with .*run\.safetensors"):
        small_run(ragged, tmp_path, ditto)
    assert list(tmp_path.iterdir()) == []
    small_run(ragged, tmp_path, ditto)
    assert not list(tmp_path.glob("*.lock")) + list(tmp_path.glob(".*"))


def test_a_lock_ends_with_the_process_that_holds_it_and_not_with_its_workers(tmp_path):
    """A forked worker that still computes must not keep the run that was killed from being gone on with."""
    import os
    import time

    told, tell = os.pipe()
    with files.locked(tmp_path / ".lock", wait=False):
        worker = os.fork()
        if worker == 0:
            os.write(tell, b"begun")
            time.sleep(60)
            os._exit(0)
        os.read(told, 5)
    try:
        with files.locked(tmp_path / ".lock", wait=False):
            pass
    finally:
        os.kill(worker, 9)
        os.waitpid(worker, 0)
        os.close(told)
        os.close(tell)


def test_what_a_killed_writer_left_is_removed_by_the_next_run(ragged, tmp_path):
    import os

    dead, alive = 2**22 - 1, os.getppid()  # no process has the largest number that there can be
    left = [tmp_path / f".{name}.{writer}.tmp" for name in ("run.safetensors", "other") for writer in (dead, alive)]
    for file in left:
        file.write_bytes(b"half")
    small_run(ragged, tmp_path, eq.Algorithm(sampler=eq.sampling.Full()))
    assert [file.exists() for file in left] == [False, True, True, True]


def test_a_log_that_ends_well_lacks_no_round_after_a_power_cut(tmp_path, monkeypatch):
    from equipoise.experiment.run_files import RunFolder, log_end

    rounds = b"".join(b'{"event": "round", "round": %d, "text": "%s"}\n' % (n, b"x" * 200) for n in range(40))
    for number in range(60):
        folder, target = RunFolder(tmp_path / f"{number}"), tmp_path / f"left-{number}"
        folder.path.mkdir()
        monkeypatch.setattr(files, "recorder", PowerCut(folder.path, target, 2 + number % 6, random.Random(number)))
        try:
            with closing(files.DurableFile(folder.rounds)) as log:
                log.write(rounds)
            log_end(folder, {"event": "end"})
            files.sync_folder(folder.path)
            files.sync_folder(folder.path)
        except PowerWentOut:
            left = RunFolder(target)
            assert not left.finished or left.rounds.read_bytes().startswith(rounds)


def test_a_flipped_byte_in_the_client_table_of_a_familys_member_is_noticed(ragged, tmp_path, monkeypatch):
    from equipoise.experiment.folder import read_records
    from equipoise.export import onnx_files

    monkeypatch.setattr(onnx_files, "why_no_onnx", lambda: "not in this test")
    family = eq.train_family(eq.models.Softmax(4, 3), ragged, tails=[1.0, 0.5], rounds=1, clients_per_round=4, progress=False)
    family.save(tmp_path / "family")
    assert len(read_records(tmp_path / "family")) == 2
    file = sorted((tmp_path / "family" / "members").glob("*/clients.parquet"))[0]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(EquipoiseError, match=r"clients\.parquet is damaged"):
        read_records(tmp_path / "family")


@pytest.mark.parametrize("sent", [1e200, 1.7e308])
def test_divide_and_conquer_bears_updates_whose_squares_overflow(sent):
    """Four honest updates (1, 2), (1, 4), (3, 2), (3, 4) and one of ±10²⁰⁰: the mean of the honest ones is (2, 3)."""
    updates = torch.tensor([[1.0, 2.0], [1.0, 4.0], [3.0, 2.0], [3.0, 4.0], [sent, -sent]], dtype=torch.float64)
    total, _ = eq.aggregators.DnC(1)(updates, torch.full((5,), 0.2, dtype=torch.float64))
    assert total.tolist() == pytest.approx([2.0, 3.0])


def test_divide_and_conquer_breaks_ties_by_key_and_not_by_rounding():
    """Two clients send the same update with other weights: which of them is dropped must not depend on the order."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        honest = torch.randn(6, 5, generator=generator, dtype=torch.float64)
        updates = torch.cat([honest, torch.full((2, 5), 4.0, dtype=torch.float64) + 1e-3 * honest[0]])
        weights = torch.rand(8, generator=generator, dtype=torch.float64) + 0.1
        weights, keys = weights / weights.sum(), torch.arange(8)
        order = torch.randperm(8, generator=generator)
        first = eq.aggregators.DnC(1)(updates, weights, keys=keys)[0]
        other = eq.aggregators.DnC(1)(updates[order], weights[order], keys=keys[order])[0]
        assert torch.allclose(first, other, rtol=1e-12)


# ------------------------------------------------------------------------------------- found by inputs, in folders and studies


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"seconds"', '"secnds"'), ('"error_is_loss"', '"error_is_los"'), ('"adjacency"', '"adjac%ncy"'),
        ('"assumes"', '"assums"'), ('{"event": "end"', '[{"event": "end"'), ('"sha256": {', '"sha256": [{'),
    ],
)  # fmt: skip
def test_a_damaged_end_of_a_log_is_refused(old, new, ragged, tmp_path):
    from equipoise.experiment.folder import read_record

    noise = eq.privacy.DifferentialPrivacy(None, 1e-2, 0.5, noise_multiplier=0.8, method="rdp")
    private = eq.Algorithm(privacy=noise, sampler=eq.sampling.Full())
    eq.train(eq.models.Softmax(4, 3), ragged, private, rounds=1, progress=False).save(tmp_path / "run")
    log = tmp_path / "run" / "rounds.jsonl"
    *before, end = log.read_text().splitlines(keepends=True)
    assert old in end
    log.write_text("".join([*before, end.replace(old, new)]))
    with pytest.raises(ConfigError, match="run"):
        read_record(tmp_path / "run")


def test_a_study_of_too_many_seeds_is_refused(tmp_path):
    from equipoise.experiment.study import read_study

    (tmp_path / "study.toml").write_text("[study]\nseeds = 9223372036854775807\n[train]\nrounds = 1\n")
    with pytest.raises(ConfigError, match=r"study\.seeds must be at most"):
        read_study(tmp_path / "study.toml", out=tmp_path / "out")


def test_a_sampling_in_a_ledger_that_is_no_number_is_refused():
    from equipoise.privacy.ledger import LedgerError, unpack_sampling

    for values in (("poisson", {}), ("fixed", 1, None), ("fixed", [], 2)):
        with pytest.raises(LedgerError, match="nobody knows"):
            unpack_sampling(values)


def test_a_folder_that_a_power_cut_left_with_nothing_finished_in_it_is_empty(tmp_path):
    """The first file of a run was being written, and its name had not come to the disk."""
    from equipoise.experiment.folder import claim, refuse_taken

    (tmp_path / ".config.toml.123.tmp").write_bytes(b"half")
    claim(tmp_path)
    (tmp_path / ".hidden").write_bytes(b"of somebody")
    with pytest.raises(ConfigError, match="not empty"):
        refuse_taken(tmp_path)


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_scaffold_goes_with_statistics_that_a_model_carries(engine, ragged):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    algorithm = eq.Algorithm(solver=eq.solvers.Scaffold(eq.solvers.SGD(lr=0.1, batch_size=4)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EquipoiseNotice)
        found = eq.train(model, ragged, algorithm, rounds=2, clients_per_round=6, engine=engine, progress=False)
    assert bool(torch.isfinite(found.params).all())


def test_values_that_are_as_far_from_a_median_share_its_border():
    """Updates of SCAFFOLD where clients have no gradient, by 1 to 4 steps: multiples of one number, as two engines had them."""
    weights = torch.tensor([1.0, 1.0, 3.0, 1.0, 2.0, 1.0], dtype=torch.float64) / 9
    first = [-0.00026230900452473525, -0.0009644010265782519, -0.0010492360180989393, -0.00052461800904947051,
             -0.00078692701357420576, -0.00078692701357420403]  # fmt: skip
    second = [-0.00026230900452473525, -0.00096440102657825277, -0.0010492360180989419, -0.00052461800904947137,
              -0.00078692701357420489, -0.00078692701357420489]  # fmt: skip
    totals = [
        float(eq.aggregators.MeaMed(0.2)(torch.tensor(rows, dtype=torch.float64)[:, None], weights)[0])
        for rows in (first, second)
    ]
    assert totals[0] == pytest.approx(totals[1], abs=1e-12)
    # By hand: nearest are the two at 3 and the one at 3.68 parts, mass 4/9; 2 and 4 parts share what is left of 0.8.
    inside, left = 3 * first[4] + first[1], (0.8 * 9 - 4) / 4
    assert totals[0] == pytest.approx((inside + left * (3 * first[2] + first[3])) / (0.8 * 9), rel=1e-9)


def test_a_whole_number_beyond_64_bits_is_refused():
    with pytest.raises(InvalidParameter, match=r"lr must be a number that fits into 64 bits.*Write it as a float"):
        eq.server_opt.Adam(lr=10**20)


def test_opening_a_wide_parquet_file_takes_time_by_its_columns(tmp_path):
    """Each column was looked for in a list of all names that Arrow made anew: 16 times the columns took 150 times as long."""
    import pyarrow as pa
    from pyarrow import parquet

    from equipoise.data.tables.read import parquet_files

    spent = {}
    for wide in (500, 8000):
        path = tmp_path / f"{wide}.parquet"
        parquet.write_table(pa.table({f"f{k}": [1.0, 2.0] for k in range(wide)}), path)
        times = []
        for _ in range(3):
            began = time.process_time()
            assert len(parquet_files(path, "f0").column_names) == wide
            times.append(time.process_time() - began)
        spent[wide] = min(times)
    assert spent[8000] < 50 * spent[500], spent


def test_the_time_of_a_wide_table_does_not_grow_with_the_square_of_its_columns():
    """Each column was looked for in the list of all names."""
    import pyarrow as pa

    from equipoise.data.tables.arrow import TableFiles

    class Names(list):
        looked = 0

        def __contains__(self, name):
            Names.looked += 1
            return super().__contains__(name)

        def count(self, name):
            Names.looked += 1
            return super().count(name)

    columns = {f"f{k}": [0.5 * k, 1.0, 2.0, 3.0] for k in range(60)} | {"y": ["a", "b", "a", "b"]}
    table = pa.table(columns)
    frame = TableFiles("table", Names(columns), 0, lambda names: table.select(names or list(columns)).to_batches())
    schema = eq.data.Schema.fit(frame, target="y", columns=[f"f{k}" for k in range(60)])
    assert schema.transform(frame).shape == (4, 60)
    assert schema.targets(frame).tolist() == [0, 1, 0, 1]
    assert Names.looked <= 10
