"""Tables of public benchmarks: the splits, runs made together, the limit on time, and machines with torch and numpy alone."""

import gzip
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.data.datasets.idx_files import load_idx
from equipoise.errors import ConfigError, InvalidData, InvalidParameter
from equipoise.reproduce import EXPERIMENTS, Scale, image_splits, reproduce
from equipoise.reproduce.__main__ import main
from equipoise.reproduce.batched_runs import AccuracyCurves, OutOfTime, RunsTogether, TimeLimit
from equipoise.reproduce.experiments import MODELS, SEVERAL
from equipoise.reproduce.networks import BucketingNet, _by_windows
from equipoise.reproduce.published import table
from equipoise.reproduce.runner import chosen_methods
from equipoise.reproduce.scores import leaderboard, under_attack
from equipoise.runs import checkpoint

BENCHMARKS = sorted(part for parts in SEVERAL.values() for part in parts)
REAL = os.environ.get("EQUIPOISE_DATA")
NEEDED = (  # what torch itself imports, beside torch and numpy
    "torch", "torchgen", "functorch", "numpy", "numpy.libs", "typing_extensions.py", "filelock", "sympy", "mpmath", "networkx",
    "jinja2", "markupsafe", "fsspec", "nvidia", "triton",
)  # fmt: skip


class SmallNet(nn.Module):
    """A network with a head, for the runs of these tests."""

    def __init__(self):
        super().__init__()
        self.hidden, self.readout = nn.Linear(784, 4), nn.Linear(4, 10)

    def forward(self, x):
        return self.readout(self.hidden(x.flatten(1)).relu())


def write_idx(path, array):
    header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    content = header + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A data folder with a few images in the formats of the real files."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    y = np.tile(np.arange(10), 44)  # 44 images per class, 40 of them "training"
    x = rng.integers(0, 60, (len(y), 28, 28)).astype(np.uint8)
    x[np.arange(len(y)), 2 * y + 4, 4:24] = 255  # a line whose height is the class
    np.savez(folder / "fashion_mnist.npz", x_train=x[:400], y_train=y[:400], x_test=x[400:], y_test=y[400:])
    counts = np.full((20, 10), 2)
    counts[0] += 4
    (folder / image_splits.COUNTS_FILE).write_text(json.dumps({"counts": counts.tolist()}), encoding="utf-8")
    for part, rows in (("train", slice(0, 400)), ("t10k", slice(400, None))):
        suffix = ".gz" if part == "train" else ""
        write_idx(folder / f"{part}-images-idx3-ubyte{suffix}", x[rows])
        write_idx(folder / f"{part}-labels-idx1-ubyte{suffix}", y[rows])
    return folder


@pytest.fixture(autouse=True)
def tiny(monkeypatch, tmp_path):
    """The benchmarks with two rounds and two seeds, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EQUIPOISE_DATA", raising=False)
    for name in BENCHMARKS:
        scale = Scale(2, 25, 2)
        small = {"scales": {"small": scale, "paper": scale}, "model": lambda data, folder, seed: SmallNet()}
        entry = replace(EXPERIMENTS[name], evaluate_every=1, **small)
        monkeypatch.setitem(EXPERIMENTS, name, entry)


def run(name, files, **options):
    return reproduce(name, data=files, out=Path("out"), say=options.pop("say", lambda _: None), **options)


def stored(folder):
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (folder / "runs").iterdir()}


# What the entries say


def test_an_entry_of_several_tables_names_them():
    assert set(SEVERAL) == {"pfllib-fashion-mnist", "bucketing-mnist"}
    assert all(part in EXPERIMENTS for part in BENCHMARKS)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_row_is_an_algorithm_and_has_a_published_row(name):
    entry = EXPERIMENTS[name]
    published = table(entry.tables[0]).rows
    for method in entry.methods:
        entry.algorithm(method, entry.scales["paper"])
        assert method.name in published
        assert published[method.name].figures.keys() <= entry.figures.keys()


def test_published_numbers_are_those_of_the_page():
    # PFLlib's leaderboard, Fashion-MNIST; the bucketing paper's first table and the means of its logs.
    assert table("pfllib/dirichlet").rows["FedPer"].figures["best"] == eq.report.over_seeds.Spread(97.44, 0.06)
    assert table("pfllib/pathological").rows["FedProx"].figures["best"].mean == 78.08
    assert table("pfllib/dirichlet").rows["Local"].figures == {}
    assert table("bucketing/mimic").rows["Krum, label-sorted, s = 2"].figures["last_five"].deviation == 3.96
    row = table("bucketing/attacks").rows["geometric median, IPM"]
    assert row.figures["last"].mean == 16.3
    assert row.means_only == ("last",)


def test_networks_have_the_published_sizes():
    # 5·5·32 + 32 + 5·5·32·64 + 64 + 1024·512 + 512 + 512·10 + 10 = 582,026
    pfllib = MODELS["pfllib-network"](None, None, 0)
    assert sum(p.numel() for p in pfllib.parameters()) == 582_026
    # 3·3·32 + 32 + 3·3·32·64 + 64 + 9216·128 + 128 + 128·10 + 10 = 1,199,882
    assert sum(p.numel() for p in BucketingNet().parameters()) == 1_199_882
    images = torch.zeros(2, 28, 28)
    assert pfllib(images).shape == BucketingNet()(images).shape == (2, 10)


# The splits


def class_counts(*sets):
    return sum(torch.stack([torch.bincount(c.client(at=k)[1], minlength=10) for k in range(len(c))]) for c in sets)


def test_the_published_counts_are_met_exactly(files):
    data = image_splits.pfllib_fashion(files, 0, "dirichlet")
    counts = json.loads((files / image_splits.COUNTS_FILE).read_text(encoding="utf-8"))["counts"]
    assert class_counts(data.train, data.test).tolist() == counts
    assert data.train.ids == data.test.ids
    assert float(data.train.inputs(torch.arange(5), torch.float32).min()) >= -1
    assert data.fingerprint == image_splits.pfllib_fashion(files, 1, "dirichlet").fingerprint  # whatever the seed of a run


def test_counts_that_do_not_fit_are_refused(files, tmp_path):
    y = np.repeat(np.arange(2), 3)
    dealt = image_splits.deal_out(y, np.array([[1, 2], [2, 1]]), shuffled=False)
    assert [rows.tolist() for rows in dealt] == [[0, 3, 4], [1, 2, 5]]
    with pytest.raises(InvalidData, match="Class 1 has 3 images, but clients are to have 2"):
        image_splits.deal_out(y, np.array([[1, 1], [2, 1]]), shuffled=True)
    for content in ({"counts": [[1]]}, {"counts": [[0.5] * 10] * 20}, [], {}):
        (tmp_path / image_splits.COUNTS_FILE).write_text(json.dumps(content), encoding="utf-8")
        with pytest.raises(InvalidData, match="20 lists of 10 whole numbers"):
            image_splits.published_counts(tmp_path)


def test_pathological_clients_share_two_classes_by_four():
    # The script's first draws with seed 1, numpy.random.seed(1); randint(175, 1750, 3): 1236, 410, 1271, then 7000 − 2917.
    counts = image_splits.pathological_counts(np.repeat(np.arange(10), 7000))
    assert counts[:4, 0].tolist() == [1236, 410, 1271, 4083]
    assert (counts.sum(0) == 7000).all()
    for client in range(20):
        assert np.flatnonzero(counts[client]).tolist() == [2 * (client // 4), 2 * (client // 4) + 1]


@pytest.mark.skipif(REAL is None, reason="needs the real files (EQUIPOISE_DATA)")
def test_the_real_split_has_the_published_sizes():
    data = image_splits.pfllib_fashion(Path(REAL), 0, "dirichlet")
    sizes = data.train.sizes + data.test.sizes
    assert (int(sizes.min()), int(sizes.max()), int(sizes.sum())) == (82, 8551, 70_000)
    counts = class_counts(data.train, data.test)
    assert counts.tolist() == json.loads((Path(REAL) / image_splits.COUNTS_FILE).read_text(encoding="utf-8"))["counts"]
    assert float(counts.max(1).values.sum()) / 70_000 == pytest.approx(0.766, abs=5e-4)  # always the majority class


def test_mnist_sorted_by_label_and_dealt_out_fairly(files):
    data = image_splits.bucketing_mnist(files, 0, "sign flip", True)
    assert len(data.train) == 25
    assert data.malicious == {f"attacker-{k}" for k in range(5)}
    assert [len(data.train.client(at=k)[1].unique()) for k in range(20)] == [1] * 20  # 400 images: 20 each of one class
    fair = image_splits.bucketing_mnist(files, 0, "sign flip", False)
    assert [len(fair.train.client(at=k)[1].unique()) for k in range(20)] == [10] * 20
    assert data.test.examples == 40
    flipped = image_splits.bucketing_mnist(files, 0, "label flip", True)
    honest, bad = (torch.cat([c.train.client(at=k)[1] for k in range(20, 25)]) for c in (data, flipped))
    assert torch.equal(bad, 9 - honest)


def test_attackers_mimic_one_client_in_every_round():
    attack = image_splits.MimicOneClient(target=2)
    sent = eq.attacks.malicious.Sent(torch.zeros(2, 1), torch.arange(2), 5, torch.tensor([[1.0], [2.0], [3.0]]))
    assert attack.corrupt(sent).flatten().tolist() == [3.0, 3.0]


def test_idx_files_are_checked(tmp_path):
    path = tmp_path / "a-ubyte"
    write_idx(path, np.arange(6).reshape(2, 3))
    assert load_idx(path).tolist() == [[0, 1, 2], [3, 4, 5]]
    good = path.read_bytes()
    for content, words in (
        (b"", "two zero bytes"),
        (b"\1" + good[1:], "two zero bytes"),
        (b"\0\0\x0d" + good[3:], "type 0xd"),
        (good[:9], "inside its header"),
        (good[:-1], "2 × 3 bytes, but 5 follow"),
    ):
        path.write_bytes(content)
        with pytest.raises(InvalidData, match=words):
            load_idx(path)
    packed = tmp_path / "b-ubyte.gz"
    packed.write_bytes(b"no gzip")
    with pytest.raises(InvalidData, match="cannot be read"):
        load_idx(packed)


# Figures


class Trained:
    """A finished run of two test clients with errors 0.5 (3 examples) and 0 (1 example)."""

    class result:  # noqa: N801
        rounds = 60
        clients = eq.ClientTable(
            ("a", "b"), ("test", "test"), torch.ones(2, dtype=torch.bool), torch.tensor([3, 1]), torch.zeros(2),
            torch.tensor([0.5, 0.0]),
        )  # fmt: skip

    curve: ClassVar = {10: 10.0, 20: 20.0, 30: 70.0, 40: 40.0, 50: 50.0, 60: 62.5}


def test_their_protocol_stands_beside_ours():
    # By examples: (3·50 + 1·100)/4 = 62.5; the best evaluation is 70; clients: 75 on average, 50 the worst.
    figures = leaderboard(Trained)
    assert (figures["best"], figures["last"], figures["client"], figures["worst"]) == (70.0, 62.5, 75.0, 50.0)
    # the last five evaluations: (20 + 70 + 40 + 50 + 62.5)/5 = 48.5
    assert under_attack(Trained) == {"last_five": 48.5, "last": 62.5}


# Runs


def test_seeds_go_together_and_equal_runs_alone(files):
    lines = []
    folder = run("pfllib-fashion-mnist-dirichlet", files, methods="fedavg,delta-fl-0.5,fedper", say=lines.append)
    runs = stored(folder)
    assert {name: made["together"] for name, made in runs.items()} == {
        "fedavg-seed0": 4, "fedavg-seed1": 4, "delta-fl-0.5-seed0": 4, "delta-fl-0.5-seed1": 4,
        "fedper-seed0": 1, "fedper-seed1": 1,
    }  # fmt: skip
    entry = EXPERIMENTS["pfllib-fashion-mnist-dirichlet"]
    method = next(m for m in entry.methods if m.name == "FedAvg")
    data = entry.data(files, 1)
    alone = eq.train(
        lambda seed: SmallNet(), data, entry.algorithm(method, entry.scales["small"]), rounds=2, seed=1, engine="loop",
        clients_per_round=20, evaluate_every=1,
    )  # fmt: skip
    rows = alone.clients.where("test")
    assert runs["fedavg-seed1"]["figures"]["last"] == pytest.approx(100 * (1 - eq.metrics.mean(rows.error, rows.size)), abs=1.0)
    assert runs["fedavg-seed1"]["curve"].keys() == {"1", "2"}
    assert "served_errors" not in runs["fedavg-seed1"]
    own = runs["fedper-seed1"]  # the figures of personal models can be computed from the file
    accuracy, size = 100 * (1 - torch.tensor(own["served_errors"])), torch.tensor(own["test_examples"])
    assert own["figures"]["last"] == pytest.approx(eq.metrics.mean(accuracy, size), abs=1e-3)
    assert own["figures"]["worst"] == pytest.approx(float(accuracy.min()), abs=1e-3)
    assert not list((folder / "checkpoints").iterdir())
    assert "| FedPer | 97.44 ± 0.06 |" in (folder / "result.md").read_text(encoding="utf-8")
    assert "10th percentile of clients" in lines[-1]
    assert "Learning rate 0.005, the default of PFLlib's code (the leaderboard names none)" in lines[-1]
    assert "--tune would choose one for each method by its accuracy on 10% of the examples" in lines[-1]


def test_robust_rows_run(files):
    rows = "centred-clipping-mimic-s-2,geometric-median-alie"
    folder = run("bucketing-mnist-attacks", files, seeds=1, methods=rows)
    assert set(stored(folder)) == {"centred-clipping-mimic-s-2-seed0", "geometric-median-alie-seed0"}


def test_the_limit_stops_between_rounds_and_the_same_command_goes_on(files, monkeypatch):
    name, wanted = "pfllib-fashion-mnist-dirichlet", "fedper,fedavg"
    whole = stored(reproduce(name, data=files, out=Path("whole"), methods=wanted, seeds=1, say=lambda _: None))
    monkeypatch.setattr(checkpoint, "SECONDS", 0.0)  # a checkpoint after every round
    monkeypatch.setattr(checkpoint, "SHARE", 1e9)
    clock = iter(range(10**6))
    monkeypatch.setattr(TimeLimit, "left", property(lambda self: 100.0 if next(clock) % 4 != 3 else -1.0))
    lines, calls = [], 0
    while len(list(Path("out").glob("*/runs/*.json"))) < 2:
        calls += 1
        assert calls < 10
        run(name, files, methods=wanted, seeds=1, minutes=1, say=lines.append)
    assert calls > 1
    assert any("the same command goes on" in line for line in lines)
    for key, made in stored(Path(f"out/{name}-small")).items():
        assert made["figures"] == whole[key]["figures"]
        assert made["curve"] == whole[key]["curve"]


def test_the_time_of_a_run_counts_all_calls(files, monkeypatch):
    name, seconds = "pfllib-fashion-mnist-dirichlet", iter((50.0, 7.0))

    def stopped_once(together, engine, clients_per_round, checkpoint, limit):
        clock.append(clock[-1] + next(seconds))
        if clock[-1] == 50.0:
            raise OutOfTime
        return train(together, engine, clients_per_round, checkpoint, limit)

    clock, train = [0.0], RunsTogether.train
    monkeypatch.setattr(RunsTogether, "train", stopped_once)
    monkeypatch.setattr("equipoise.reproduce.experiment_runs.time.perf_counter", lambda: clock[-1])
    for _ in range(2):
        folder = Path("out") / f"{name}-small"
        run(name, files, methods="fedavg", seeds=1)
    assert stored(folder)["fedavg-seed0"]["seconds"] == 57.0
    assert not list((folder / "checkpoints").iterdir())


def test_a_limit_that_is_over_begins_nothing(files):
    lines = []
    run("pfllib-fashion-mnist-dirichlet", files, minutes=1e-9, say=lines.append)
    assert "The time is over" in lines[-1]
    with pytest.raises(InvalidParameter, match="minutes"):
        run("pfllib-fashion-mnist", files, minutes=0)
    assert TimeLimit.minutes(None).left == float("inf")
    assert TimeLimit(time.monotonic() + 10).left < 10


def test_rows_of_more_rounds_are_for_the_full_scale():
    entry = EXPERIMENTS["pfllib-fashion-mnist-dirichlet"]
    assert len(chosen_methods(entry, None, "paper")) - len(chosen_methods(entry, None, "small")) == 3
    with pytest.raises(ConfigError, match="Unknown method"):
        chosen_methods(entry, "fedavgg", "paper")


def test_curves_survive_a_damaged_file(tmp_path):
    (tmp_path / "curves.json").write_text("{", encoding="utf-8")
    assert AccuracyCurves(tmp_path / "curves.json").curves == {}


def test_it_needs_torch_and_numpy_alone_also_with_checkpoints(files, tmp_path):
    """Python without site-packages, and a folder that has torch, numpy and what torch imports: a bare GPU machine."""
    bare, installed = tmp_path / "bare", Path(torch.__file__).parents[1]
    bare.mkdir()
    for name in NEEDED:
        if (installed / name).exists():
            (bare / name).symlink_to(installed / name)
    code = "import runpy, sys; sys.argv[0] = 'reproduce'; runpy.run_module('equipoise.reproduce', run_name='__main__')"
    options = ["pfllib-fashion-mnist-dirichlet", "--data", str(files), "--seeds", "1", "--methods", "fedper", "--out", "alone"]
    source = str(Path(eq.__file__).parents[1])
    shown = subprocess.run(
        [sys.executable, "-S", "-c", code, *options, "--minutes", "5"], capture_output=True, text=True,
        env={"PYTHONPATH": f"{bare}{os.pathsep}{source}", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    assert "| FedPer | 97.44 ± 0.06 |" in shown.stdout


def test_several_names_share_the_minutes(files, capsys):
    names = ["pfllib-fashion-mnist-dirichlet", "pfllib-fashion-mnist-pathological"]
    assert main([*names, "--data", str(files), "--methods", "fedavg", "--seeds", "1", "--minutes", "1e-7"]) == 0
    assert "pathological" not in capsys.readouterr().out
    assert main(["pfllib-fashion-mist", "--data", str(files)]) == 2
    assert "Did you mean 'pfllib-fashion-mnist'?" in capsys.readouterr().err


@pytest.mark.parametrize(("channels", "kernel", "bias"), [(1, 5, True), (3, 3, True), (2, (3, 5), False)])
def test_a_product_with_windows_is_the_convolution_also_batched_over_clients(channels, kernel, bias):
    """What a GPU computes in place of a convolution: values and gradients, of images and of weights."""
    layer = torch.nn.Conv2d(channels, 4, kernel, bias=bias).double()
    images = torch.randn(6, channels, 9, 10, dtype=torch.float64, requires_grad=True)
    wanted = layer(images)
    found = _by_windows(layer, images)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    given = (images, *layer.parameters())
    weights = torch.randn_like(wanted)
    gradients = [torch.autograd.grad((made * weights).sum(), given) for made in (found, wanted)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    two = torch.stack([images.detach()[:3], images.detach()[3:]])
    batched = torch.func.vmap(lambda x: _by_windows(layer, x))(two)
    torch.testing.assert_close(batched.flatten(0, 1), wanted, rtol=1e-10, atol=1e-12)
