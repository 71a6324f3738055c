"""Every entry of `equipoise reproduce`, tiny, on small files in the real formats; resuming; refusals."""

import gzip
import json
import random
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import equipoise as eq
from equipoise.data.clients import FederatedData
from equipoise.errors import ConfigError, InvalidData, InvalidParameter
from equipoise.reproduce import EXPERIMENTS, Scale, reproduce
from equipoise.reproduce import data_sets as sources
from equipoise.reproduce import scores as measures
from equipoise.reproduce.__main__ import main
from equipoise.reproduce.chosen_rates import CHOOSING_SEED
from equipoise.reproduce.experiments import FILES, SEVERAL
from equipoise.reproduce.result_tables import slug

with warnings.catch_warnings():  # typer 0.20 imports names that click 8.5 deprecates; only that import is excused
    warnings.filterwarnings("ignore", message="'click", category=DeprecationWarning)
    from typer.testing import CliRunner

    from equipoise.cli.commands import app

BENCHMARKS = {part for parts in SEVERAL.values() for part in parts}  # test_benchmark_tables.py has them
WORDS = ["good", "bad", "dress", "fits", "tweet", "sun", "rain", "code", "error", "fine"]


def sentence(chance, label):
    return " ".join(chance.choices(WORDS, k=8)) + (" good" if label else " bad")


def write_json(path, content):
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump(content, file)


def leaf_users(chance, names):
    data = {}
    for name in names:
        labels = [i % 2 for i in range(50)]
        data[name] = {"x": [["1", "today", "NO_QUERY", name, sentence(chance, y)] for y in labels], "y": labels}
    return {"users": list(names), "num_samples": [50] * len(names), "user_data": data}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A data folder with a few clients of every data set, in the formats of the real files."""
    folder = tmp_path_factory.mktemp("data")
    rng, chance = np.random.default_rng(0), random.Random(0)
    writers, images = 8, 100
    y = rng.integers(62, size=writers * images).astype(np.uint8)
    x = np.full((len(y), 28, 28), 255, np.uint8)
    x[np.arange(len(y)), y // 8 + 8, y % 8 + 8] = 0  # a dot whose place is the class
    np.savez(
        folder / "femnist_writers.npz", x=x, y=y, writer=np.repeat(np.arange(writers), images).astype(np.uint16),
        writer_id=np.array([f"f{i:04}" for i in range(writers)]), writer_kind=np.zeros(writers, np.uint8),
    )  # fmt: skip
    vectors = rng.normal(size=(len(WORDS), 50)).astype(np.float16)
    np.savez(folder / "glove6B_50d_subset.npz", words=np.array(WORDS), vectors=vectors)
    roles = [{"play": "p", "role": f"r{i}", "speeches": [[sentence(chance, 1)] * 5]} for i in range(6)]
    write_json(folder / "shakespeare_roles.json.gz", {"roles": roles})
    clients = [(f"c{k}", i % 2) for k in range(6) for i in range(50)]
    write_json(
        folder / "clothing_reviews_by_product.json.gz",
        [{"product": c, "text": sentence(chance, y), "recommended": y} for c, y in clients],
    )
    write_json(
        folder / "stackoverflow_by_tag.json.gz",
        [{"client": c, "body300": sentence(chance, y), "status": "open" if y else "closed"} for c, y in clients],
    )
    for part, names in (("train", "abc"), ("test", "def")):
        (folder / "sent140" / part).mkdir(parents=True)
        (folder / "sent140" / part / "all_data.json").write_text(json.dumps(leaf_users(chance, names)), encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def tiny(monkeypatch, tmp_path):
    """All entries with a round or two of two clients, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EQUIPOISE_DATA", raising=False)
    for name, entry in EXPERIMENTS.items():
        network = name.split("-")[-1] in ("convnet", "finetuning", "gru", "lstm")
        scale = Scale(1 if network else 2, 2, 2, train_clients=3, test_clients=2 if network else 3)
        smaller = {"epochs": 2} if name == "fedprox-synthetic" else {}
        monkeypatch.setitem(
            EXPERIMENTS, name, replace(entry, scales={"small": scale, "paper": scale}, solver=replace(entry.solver, **smaller))
        )


def quiet(_):
    pass


def run(name, files, **options):
    return reproduce(name, data=files, out=Path("out"), say=options.pop("say", quiet), **options)


def result(folder):
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", sorted(EXPERIMENTS.keys() - BENCHMARKS))
def test_every_entry_runs_and_says_what_it_did(name, files):
    entry = EXPERIMENTS[name]
    folder = run(name, files, seeds=1)
    found = result(folder)
    assert list(found["measured"]) == [method.name for method in entry.methods]
    for row in found["measured"].values():
        assert row["diverged"] == 0
        assert row["figures"].keys() == entry.figures.keys()
        assert all(np.isfinite(value["mean"]) for value in row["figures"].values())
    assert found["versions"].keys() == {"equipoise", "torch", "numpy", "python"}
    assert found["machine"]
    assert found["seeds"] == [0]
    assert len(found["directions"]) == len(entry.claims)
    text = (folder / "result.md").read_text(encoding="utf-8")
    assert f"`equipoise reproduce {name} --scale small --seeds 1`" in text  # the command that makes these numbers
    for method in entry.methods:
        assert f"| {method.name}" in text
    assert "What differs from the paper" in text
    assert ("published" in text.split("| method")[1].splitlines()[0]) == (bool(entry.tables) and name != "fedprox-synthetic")
    assert ("sent140" in name) == ("Sent140 by user" in text)


def test_published_and_measured_stand_side_by_side(files):
    text = (run("emnist-linear", files) / "result.md").read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith("| q-FFL")).split(" | ")
    assert row[0] == "| q-FFL (q = 1)\\*"
    assert row[1] == "34.34 ± 0.33"
    assert row[3] == "49.90 ± 0.58"
    measured = result(Path("out/emnist-linear-small"))["measured"]["q-FFL"]["figures"]
    assert row[2] == f"{measured['mean']['mean']:.2f} ± {measured['mean']['deviation']:.2f}"
    assert "chose this parameter on the test clients" in text
    assert "3 training and 3 test clients instead of the paper's 865 and 865" in text
    assert "`equipoise reproduce emnist-linear --scale small`" in text


def test_a_half_finished_reproduction_goes_on(files):
    folder = run("emnist-linear", files)
    before = {path.name: path.read_text(encoding="utf-8") for path in (folder / "runs").iterdir()}
    assert len(before) == 18
    (folder / "runs" / "fedavg-seed0.json").unlink()
    (folder / "runs" / "delta-fl-0.5-seed1.json").write_text('{"half', encoding="utf-8")
    table = result(folder)["measured"]
    lines = []
    run("emnist-linear", files, say=lines.append)
    assert "2 runs to make, 16 kept from before" in lines[0]
    for name, text in before.items():
        now = (folder / "runs" / name).read_text(encoding="utf-8")
        if name in ("fedavg-seed0.json", "delta-fl-0.5-seed1.json"):
            # made in another company, so equal up to rounding
            assert json.loads(now)["training_loss"] == pytest.approx(json.loads(text)["training_loss"], rel=1e-6)
        else:
            assert now == text
    after = result(folder)["measured"]
    assert after.keys() == table.keys()
    assert all(after[m]["figures"] == row["figures"] for m, row in table.items() if m not in ("FedAvg", "Δ-FL 0.5"))


def test_runs_of_another_setting_do_not_count(files, monkeypatch):
    run("emnist-linear", files, methods="fedavg", seeds=1)
    entry = EXPERIMENTS["emnist-linear"]
    monkeypatch.setitem(EXPERIMENTS, entry.name, replace(entry, solver=replace(entry.solver, lr=0.01)))
    lines = []
    run("emnist-linear", files, methods="fedavg", seeds=1, say=lines.append)
    assert "1 runs to make" in lines[0]


def test_show_prints_what_is_there_without_data(files, tmp_path):
    run("emnist-linear", files, methods="fedavg,delta-fl-0.5", seeds=1)
    lines = []
    reproduce("emnist-linear", out=Path("out"), show=True, say=lines.append)
    assert "FedAvg — 1 of 2 seeds run" in lines[-1]
    reproduce("emnist-linear", out=Path("out"), show=True, device="cuda", say=lines.append)  # nothing runs: any machine can
    assert lines[-1] == lines[-2]
    assert "Tilted-ERM (t = 1)\\* — 0 of 2 seeds run | 34.02 ± 0.30 | – |" in lines[-1]
    assert "Δ-FL 0.5 below FedAvg" in lines[-1]
    assert "**" not in lines[-1]  # a terminal shows no bold
    assert "**" in next(Path("out").rglob("result.md")).read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no run"):
        reproduce("emnist-convnet", out=Path("out"), show=True, say=quiet)


def test_a_run_that_diverges_is_a_result_too(files, monkeypatch):
    def lost(trained):
        raise eq.errors.Diverged(1, ["client"], "loss")

    entry = EXPERIMENTS["emnist-linear"]
    monkeypatch.setitem(EXPERIMENTS, entry.name, replace(entry, measure=lost))
    folder = run("emnist-linear", files, methods="FedAvg,Δ-FL 0.5")
    assert "FedAvg — 2 of 2 seeds diverged | 34.38 ± 0.38 | – |" in (folder / "result.md").read_text(encoding="utf-8")
    lines = []
    run("emnist-linear", files, methods="FedAvg", say=lines.append)
    assert "0 runs to make, 2 kept" in lines[0]


def test_tuning_takes_the_rate_with_the_smallest_training_loss(files):
    lines = []
    folder = run("emnist-linear", files, methods="fedavg", seeds=1, tune=True, say=lines.append)
    losses = json.loads((folder / "tuning.json").read_text(encoding="utf-8"))["losses"]
    assert result(folder)["learning_rate"] == float(min(losses, key=losses.get))
    assert any("chosen from" in text and "on a seed that is not reported" in text for text in result(folder)["differences"])
    again = []
    run("emnist-linear", files, methods="fedavg", seeds=1, tune=True, say=again.append)
    assert "0 runs to make" in again[0]  # neither tuning nor the run is made again


def test_the_paper_scale_warns_on_a_processor(files):
    lines = []
    run("emnist-linear", files, scale="paper", methods="fedavg", seeds=1, say=lines.append)
    assert any("meant for a GPU" in line and "hours" in line for line in lines)


def test_finetuning_is_training_alone():
    data = eq.data.label_shift(train_clients=4, validation_clients=0, test_clients=3, examples=20)
    model = eq.models.Softmax(data.features, data.classes)
    solver = eq.solvers.SGD(lr=0.1, batch_size=8, epochs=3)
    halves = eq.data.split_examples(data.test, test=0.5, seed=7)
    before, after = measures.errors_of_finetuning(model, halves.train, halves.test, solver, seed=7, device=None)
    for k in range(3):
        alone = FederatedData(halves.train.take([k]), test=halves.test.take([k]), classes=10)
        own = eq.train(model, alone, eq.Algorithm(solver=solver), rounds=1, clients_per_round=1, seed=7, engine="loop")
        assert float(after[k]) == pytest.approx(float(own.clients.where("test").error))
    start = eq.train(model, data, rounds=0, clients_per_round=1)
    assert len(before) == len(start.clients.where("test"))


def test_mean_vectors_are_those_of_the_texts(files):
    data = sources.tweets(files, 0, "mean")
    words = json.loads((files / "sent140" / "test" / "all_data.json").read_text(encoding="utf-8"))["user_data"]["d"]["x"][0][4]
    expected = sources.word_vectors(files).mean(words)
    assert torch.allclose(data.test.client("d")[0][0], expected, atol=1e-6)


def test_sent140_takes_only_splits_by_user(files, tmp_path):
    (tmp_path / "sent140" / "train").mkdir(parents=True)
    (tmp_path / "glove6B_50d_subset.npz").write_bytes((files / "glove6B_50d_subset.npz").read_bytes())
    users = (files / "sent140" / "train" / "all_data.json").read_text(encoding="utf-8")
    (tmp_path / "sent140" / "train" / "all_data.json").write_text(users, encoding="utf-8")
    halves = sources.tweets(tmp_path, 5, "tokens")  # no test part: users are split here, the same for all seeds
    assert not set(halves.train.ids) & set(halves.test.ids)
    assert halves.train.ids == sources.tweets(tmp_path, 6, "tokens").train.ids
    (tmp_path / "sent140" / "test").mkdir()
    (tmp_path / "sent140" / "test" / "all_data.json").write_text(users, encoding="utf-8")
    with pytest.raises(InvalidData, match="the papers split users"):
        sources.tweets(tmp_path, 0, "tokens")


# The command line


def call(*arguments):
    return CliRunner().invoke(app, ["reproduce", *arguments])


def test_the_command_lists_runs_and_prints(files):
    listed = call("--list").stdout
    assert all(name in listed for name in EXPERIMENTS)
    assert call().stdout == listed
    done = call("clothing-linear", "--data", str(files), "--seeds", "1", "--out", "here", "--methods", "fedavg")
    assert done.exit_code == 0, done.output
    assert "No numbers were published for these data" in done.stdout
    assert "| FedAvg | " in done.stdout
    assert Path("here/clothing-linear-small/result.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("emnist-liner",), ("Unknown experiment 'emnist-liner'", "Did you mean 'emnist-linear'?")),
        (("emnist-linear", "--scale", "big"), ("Unknown scale 'big'", "paper, small")),
        (
            ("emnist-linear",),
            ("femnist_writers.npz", "TalwalkarLab/leaf", "--data DIR", "EQUIPOISE_DATA", "no folder was named"),
        ),
        (("sent140-lstm", "--data", "nowhere"), ("sent140", "glove6B_50d_subset.npz", "nowhere):", "clothing-lstm")),
        (("fairness-synthetic", "--methods", "fedavg"), ("Unknown method 'fedavg'",)),
        (("emnist-linear", "--device", "abacus"), ("device", "abacus")),
    ],
)
def test_mistakes_end_in_one_message(arguments, words, capsys):
    failed = call(*arguments)
    assert failed.exit_code == 2
    assert "Traceback" not in failed.output
    assert main(arguments) == 2
    plain = capsys.readouterr().err
    for word in words:
        assert word in " ".join(failed.stderr.split()), failed.stderr
        assert word in plain


def test_missing_files_are_named_alone(files, tmp_path):
    glove = FILES["glove6B_50d_subset.npz"]
    with pytest.raises(InvalidData) as failure:
        sources.require_files("x", (glove, FILES["shakespeare_roles.json.gz"], FILES["sent140"]), tmp_path)
    assert "glove6B_50d_subset.npz" in str(failure.value)
    sources.require_files("x", (glove,), files)
    with pytest.raises(InvalidData, match=r"-k 100 .*\(the papers count 3,460 .*results are of 359 writers"):
        sources.require_files("emnist-linear", EXPERIMENTS["emnist-linear"].needs, tmp_path)
    with pytest.raises(InvalidParameter, match="seeds"):
        run("emnist-linear", files, seeds=0)


def test_it_needs_torch_and_numpy_alone(files):
    """A machine with nothing else, imitated by refusing every other import."""
    code = """
import sys
from importlib.machinery import ModuleSpec
class Refuse:
    def find_spec(self, name, path=None, target=None):
        refused = {"sklearn", "typer", "plotly", "matplotlib", "rich", "pydantic", "scipy", "safetensors", "pyarrow", "pandas"}
        return ModuleSpec(name, self) if name.split(".")[0] in refused else None
    def create_module(self, spec):
        raise ImportError(spec.name)
    def exec_module(self, module): ...
sys.meta_path.insert(0, Refuse())
import runpy
sys.argv = ["reproduce", *sys.argv[1:]]
runpy.run_module("equipoise.reproduce", run_name="__main__")
"""
    options = ["emnist-linear", "--data", str(files), "--seeds", "1", "--methods", "fedavg,delta-fl-0.5", "--out", "alone"]
    shown = subprocess.run([sys.executable, "-c", code, *options], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "| Δ-FL 0.5 | 35.02 ± 0.20 |" in shown.stdout
    assert sorted(p.name for p in Path("alone/emnist-linear-small/runs").iterdir()) == [
        "delta-fl-0.5-seed0.json",
        "fedavg-seed0.json",
    ]


def test_names_of_files():
    assert slug("Δ-FL 0.5") == "delta-fl-0.5"
    assert slug("90 % stragglers, FedProx μ = 1") == "90-stragglers-fedprox-mu-1"
    for entry in EXPERIMENTS.values():
        names = [slug(method.name) for method in entry.methods]
        assert len(set(names)) == len(names)


def test_the_tuning_seed_is_none_of_the_reported():
    assert all(s.first_seed + s.seeds < CHOOSING_SEED for e in EXPERIMENTS.values() for s in e.scales.values())
