import csv
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from rich.cells import cell_len

import equipoise
from equipoise.cli import demo as demo_module
from equipoise.experiment import catalog, folder
from equipoise.experiment.scheduler import usual_workers
from equipoise.experiment.study import read_study

with warnings.catch_warnings():  # typer 0.20 imports names that click 8.5 deprecates; only that import is excused
    warnings.filterwarnings("ignore", message="'click", category=DeprecationWarning)
    from typer.testing import CliRunner

    from equipoise.cli.commands import app

ROOT = Path(__file__).parents[1]
TAIL = str(ROOT / "examples" / "tail.toml")
SMALL = [
    f"--set={setting}"
    for setting in (
        "data.train_clients=12", "data.validation_clients=2", "data.test_clients=3", "data.examples=20",
        "train.rounds=3", "train.clients_per_round=6",
    )
]  # fmt: skip


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("EQUIPOISE_DATA", raising=False)


def call(*arguments):
    return CliRunner().invoke(app, list(arguments))


def refused(*arguments):
    """The one message of a command that must fail."""
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    return result.stderr


def test_version_and_help():
    assert call("--version").stdout.strip() == f"equipoise {equipoise.__version__}"
    help_text = call("--help").stdout
    for command in ("demo", "run", "methods", "data"):
        assert command in help_text


def test_the_package_can_be_run_as_a_module():
    done = subprocess.run([sys.executable, "-m", "equipoise", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"equipoise {equipoise.__version__}\n")
    wrong = subprocess.run([sys.executable, "-m", "equipoise", "nonsense"], capture_output=True, text=True)
    assert wrong.returncode == 2


def test_a_run_from_the_example(tmp_path):
    result = call("run", TAIL, *SMALL, "--set", "train.seed=3", "--out", "runs/tail-3")
    assert result.exit_code == 0, result.output
    assert "3 unseen test clients" in result.stdout
    assert "90th percentile" in result.stdout
    for file in ("config.toml", "rounds.jsonl", "clients.parquet", "model.safetensors", "report.html"):
        assert f"runs/tail-3/{file}" in result.stdout
        assert (tmp_path / "runs" / "tail-3" / file).stat().st_size > 0
    assert len((tmp_path / "runs/tail-3/rounds.jsonl").read_text().splitlines()) == 6
    rows = pyarrow.parquet.read_table(tmp_path / "runs/tail-3/clients.parquet").to_pylist()
    assert {row["split"] for row in rows} == {"train", "validation", "test"}


def test_without_out_runs_are_numbered(tmp_path):
    for expected in ("tail-0", "tail-0-2"):
        assert call("run", TAIL, *SMALL).exit_code == 0
        assert (tmp_path / "runs" / expected / "report.html").exists()


def test_a_taken_folder_is_refused_before_anything_is_read(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    message = refused("run", TAIL, "--set", "data.name=femnist", "--out", "mine")
    assert "mine is not empty" in message
    assert "--out DIR" in message


def test_a_folder_that_cannot_be_written_fails_before_training(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(folder, "run", lambda *_: pytest.fail("trained"))
    assert "file/run cannot be" in refused("run", TAIL, *SMALL, "--out", "file/run")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("algorithm.risk.tial=0.5", "algorithm.risk.tial: Unknown key 'tial'. Did you mean 'tail'? Allowed: "),
        ("algorithm.risk.name=kvar", "algorithm.risk.name: Unknown risk 'kvar'. Allowed: group_dro, hierarchical_tilt, mean"),
        ("algorithm.risk.tail=1.5", "algorithm.risk.tail must lie in (0, 1], but is 1.5."),
        ("algorithm.risk.tail=abc", 'algorithm.risk.tail must be a number, but is "abc".'),
        ("train.clients_per_round=13", "train.clients_per_round must be a whole number between 1 and the number of"),
        ("nothing", "--set nothing must have the form key=value"),
    ],
)  # fmt: skip
def test_mistakes_in_a_config_are_one_message(setting, words, tmp_path):
    assert words in refused("run", TAIL, *SMALL, "--set", setting, "--out", "x")
    assert not (tmp_path / "x").exists()


def test_missing_and_broken_files(tmp_path):
    assert "none.toml does not exist" in refused("run", "none.toml")
    (tmp_path / "bad.toml").write_text("[data]\nname = label_shift\n")
    message = refused("run", "bad.toml")
    assert "bad.toml cannot be read: it is not valid TOML" in message
    assert "line 2" in message


def npz_config(tmp_path, x, client):
    np.savez(tmp_path / "own.npz", x=x.astype(np.float32), y=np.arange(len(x)) % 2, client=client)
    text = '[data]\nname = "npz"\npath = "own.npz"\n[model]\nname = "logistic"\n[train]\nrounds = 2\nclients_per_round = 3\n'
    (tmp_path / "own.toml").write_text(text)


def test_own_data_from_an_npz_file(tmp_path):
    npz_config(tmp_path, np.random.default_rng(0).normal(size=(40, 3)), np.arange(40) % 10)
    assert call("run", "own.toml", "--out", "out").exit_code == 0
    shown = call("data", "show", "npz", "--set", "path=own.npz")
    assert "own  2 classes, examples of shape 3" in shown.stdout


def test_nan_in_a_data_file_is_found(tmp_path):
    x = np.zeros((40, 3))
    x[17, 1] = np.nan
    npz_config(tmp_path, x, np.arange(40) % 10)
    message = refused("run", "own.toml", "--out", "out")
    assert "own.npz" in message
    assert "row 17 of x holds NaN" in message  # the user's own row
    assert not (tmp_path / "out").exists()


def test_a_diverging_run_names_round_and_clients_and_keeps_its_log(tmp_path):
    message = refused("run", TAIL, *SMALL, "--set", "algorithm.solver.lr=1e38", "--set", "train.rounds=20", "--out", "out")
    assert re.search(r"Round \d+: the (loss|update) of client train-\d+", message)
    assert "What was logged is in out/rounds.jsonl." in message
    stopped_at = int(re.search(r"Round (\d+)", message).group(1))
    logged = [json.loads(line) for line in (tmp_path / "out/rounds.jsonl").read_text().splitlines()]
    assert [record["round"] for record in logged[1:-1]] == list(range(stopped_at - 1))
    assert logged[-1]["event"] == "stopped"
    assert f"Round {stopped_at}" in logged[-1]["why"]  # for those who watch it


def test_ctrl_c_ends_with_one_line(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("equipoise.engines.simulator.engine.SimulatorEngine.summed_update", interrupted)
    result = call("run", TAIL, *SMALL, "--out", "out")
    assert result.exit_code == 130
    assert result.stderr == (
        "Stopped by Ctrl-C. What was logged is in out/rounds.jsonl. Rounds in the checkpoint: 0. Go on later: "
        "equipoise run --resume out\n"
    )
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    again = call("run", "--resume", "out")
    assert again.exit_code == 0, again.output
    whole = call("run", TAIL, *SMALL, "--out", "whole")
    assert whole.exit_code == 0
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()


def test_notices_are_plain_lines(tmp_path, monkeypatch):
    monkeypatch.setattr("equipoise.engines.simulator.engine.SimulatorEngine.why_not_vectorised", lambda self: "it is special")
    result = call("run", TAIL, *SMALL, "--out", "out")
    assert result.exit_code == 0
    assert result.stderr.startswith("Note: Softmax cannot be vectorised over clients (it is special)")
    assert "simulator.py" not in result.stderr


@pytest.mark.parametrize("columns", ["100", "44"])
def test_methods_lists_every_part_with_every_parameter(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    lines = call("methods").stdout.splitlines()
    assert max(map(cell_len, lines)) <= int(columns)
    shown = " ".join(" ".join(lines).split())
    for kind in catalog.kinds():
        for part in catalog.parts(kind):
            place = shown.find(f" {part.name} {' '.join(part.summary.split())[:20]}")
            assert place >= 0, part.name
            for parameter in part.all_parameters:
                place = shown.find(" ".join(parameter.text.split()), place)
                assert place >= 0, f"{part.name}.{parameter.name}"


def test_methods_of_one_kind_and_of_an_unknown_one():
    shown = call("methods", "sampler").stdout
    assert "poisson" in shown
    assert "superquantile" not in shown
    assert "Unknown kind 'riks'. Did you mean 'risk'?" in refused("methods", "riks")


def test_data_list_names_all_and_what_they_need():
    shown = call("data", "list").stdout
    for name in catalog.names("data"):
        assert name in shown
    assert re.search(r"label_shift\s+nothing", shown)
    assert re.search(r"femnist\s+a folder", shown)


def test_data_show_describes_splits_and_sizes():
    shown = call("data", "show", "synthetic", "--set", "clients=8", "--set", "alpha=0.5", "--set", "seed=2").stdout
    assert "synthetic(0.5,1)  10 classes, examples of shape 60 (float32)" in shown
    assert re.search(r"train\s+8\s+\d+", shown)
    assert re.search(r"test\s+8\s+0\s+\d+", shown)
    assert "█" in shown


def test_data_show_mistakes(tmp_path):
    assert "Unknown data 'femnits'. Did you mean 'femnist'?" in refused("data", "show", "femnits")
    assert "data.client: Unknown key 'client'. Did you mean 'clients'?" in refused(
        "data", "show", "digits", "--set", "client=3"
    )
    assert "femnist_writers.npz does not exist" in refused("data", "show", "femnist", "--folder", str(tmp_path))
    assert "EQUIPOISE_DATA" in refused("data", "show", "femnist")


def test_the_demo_prints_the_table_and_writes_its_files(tmp_path, monkeypatch):
    full = demo_module.run_demo
    few = {"train_clients": 20, "validation_clients": 2, "test_clients": 10, "examples": 20}
    monkeypatch.setattr(demo_module, "run_demo", lambda *a, **k: full(*a, **k, **few))
    result = call("demo", "--out", "shown", "--seeds", "2", "--rounds", "2")
    assert result.exit_code == 0, result.output
    for words in ("FedAvg", "Δ-FL 0.8", "Δ-FL 0.5", "90th pct.", "worst 10 %", "standard deviation", "±", "seeds (2)"):
        assert words in result.stdout
    assert (tmp_path / "shown/report.html").read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html")
    assert (tmp_path / "shown/histogram.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "shown/table.csv").open() as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["FedAvg", "Δ-FL 0.8", "Δ-FL 0.5"]
    assert 0 <= float(rows["FedAvg"]["percentile_90"]) <= 1


def test_the_command_line_itself_needs_neither_torch_nor_pydantic():
    # The package's __init__ is left out, so that only what cli.py asks for is imported.
    code = (
        "import sys, types; package = types.ModuleType('equipoise'); package.__path__ = [sys.argv[1]];"
        "sys.modules['equipoise'] = package; import equipoise.cli.commands;"
        "print(sorted({'torch', 'numpy', 'pydantic', 'matplotlib'} & sys.modules.keys()))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "src" / "equipoise")], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


def test_runs_of_a_study_have_a_core_each_and_a_gpu_one_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 3, 4}, raising=False)
    study = ROOT / "examples" / "study.toml"
    assert usual_workers(read_study(study, (), out=tmp_path)) == 3
    assert usual_workers(read_study(study, ["train.device=cuda"], out=tmp_path)) == 1


def test_a_study_from_file_to_report(tmp_path):
    options = ("--set", "study.seeds=1", "--set", 'train.metrics=["macro_f1"]', "--workers", "2")
    result = call("compare", str(ROOT / "examples" / "study.toml"), *SMALL, *options)
    assert result.exit_code == 0, result.output
    assert "macro_f1 over the same clients, more is better" in result.stdout
    for method in ("FedAvg", "Δ-FL 0.5", "q-fair"):
        assert method in result.stdout
    assert (tmp_path / "runs/study/report.html").exists()
    again = call("report", "runs/study", "--out", "page.html", "--figures", "figures", "--table", "table.tex")
    assert again.exit_code == 0, again.output
    assert (tmp_path / "page.html").exists()
    assert {path.suffix for path in (tmp_path / "figures").iterdir()} == {".svg", ".png"}
    assert r"$\Delta$-FL 0.5 & " in (tmp_path / "table.tex").read_text()
    vector = call("report", "runs/study", "--out", "page.html", "--figures", "vector", "--format", "pdf")
    assert vector.exit_code == 0, vector.output
    assert {path.suffix for path in (tmp_path / "vector").iterdir()} == {".pdf"}
    assert "format must be one or more of pdf, svg, png" in refused("report", "runs/study", "--figures", "x", "--format", "gif")
    assert "Add --figures DIR." in refused("report", "runs/study", "--format", "pdf")
    large = call("report", "runs/study", "--out", "large.html", "--table", "large.md", "--at-least", "10")
    assert large.exit_code == 0, large.output
    assert re.search(r"over \d+ unseen test clients with 10 examples or more", (tmp_path / "large.md").read_text())
    none = call("report", "runs/study", "--out", "none.html", "--at-least", "100000")
    assert none.exit_code == 2
    assert "at_least must leave a client" in none.stderr
    assert re.search(r"over \d+ unseen validation clients", result.stdout)
    assert call("report", "runs/study", "--out", "page.html").exit_code == 0  # the page of a report is renewed
    taken = refused("report", "runs/study", "--out", "page.html", "--table", "table.tex")
    assert "--table table.tex is there already. Name another file, or add --overwrite." in taken
    (tmp_path / "notes.html").write_text("<title>My notes</title>")
    assert "--out notes.html is there already" in refused("report", "runs/study", "--out", "notes.html")
    assert (tmp_path / "notes.html").read_text() == "<title>My notes</title>"
    assert call("report", "runs/study", "--out", "notes.html", "--overwrite").exit_code == 0
    assert "is a folder" in refused("report", "runs/study", "--out", "figures")
    nothing = call("report", str(tmp_path / "figures"))
    assert nothing.exit_code == 2
    assert "holds no finished run" in nothing.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run"], "Name a configuration"),
        (["run", "--resume", "nowhere"], "is not the folder of a run"),
        (["run", TAIL, "--resume", "somewhere"], "--resume takes all it needs from its folder"),
        (["compare", "nothing.toml"], "nothing.toml does not exist"),
    ],
)
def test_commands_that_cannot_be_are_refused(arguments, words):
    assert words in refused(*arguments)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("train.rouds=3", ("--set train.rouds=3: ", "Did you mean 'rounds'?")),
        ("rounds=3", ("--set rounds=3: ", "Unknown key 'rounds'")),
        ("algoritm.risk.tail=0.3", ("--set algoritm.risk.tail=0.3: ", "Did you mean 'algorithm'?")),
        ("train.rounds=many", ("--set train.rounds=many: train.rounds must be a whole number",)),
        ("algorithm.risk=superquantil", ("--set algorithm.risk=superquantil: ", "Did you mean 'superquantile'?")),
    ],
)
def test_a_refused_setting_is_named_with_the_nearest_key(setting, words):
    message = refused("run", TAIL, "--set", "train.seed=3", "--set", setting)
    assert all(each in message for each in words), message


def test_a_fault_of_the_file_is_not_that_of_a_setting(tmp_path):
    (tmp_path / "wrong.toml").write_text(Path(TAIL).read_text().replace("rounds =", "rouds =", 1))
    assert "--set" not in refused("run", "wrong.toml", "--set", "train.seed=3", "--set", "train.engine=loop")
    assert "--set study.seds=2: study.seds" in refused("compare", str(ROOT / "examples/study.toml"), "--set", "study.seds=2")


def test_run_explains_how_local_work_is_done(tmp_path):
    shown = call("run", TAIL, *SMALL, "--explain").stdout
    assert "linear blocks" in shown
    assert "not taken: it needs a CUDA device" in shown
    assert list(tmp_path.iterdir()) == []


def test_data_convert_check_and_show_a_store(tmp_path):
    npz_config(tmp_path, np.random.default_rng(0).normal(size=(40, 3)), np.arange(40) % 10)
    done = call("data", "convert", "own.npz", "own.store")
    assert done.exit_code == 0, done.output
    assert "own.store: 10 clients, 40 examples" in done.stdout
    assert "all checksums fit" in call("data", "check", "own.store").stdout
    shown = call("data", "show", "own.store").stdout
    assert "own  2 classes, examples of shape 3" in shown
    assert "10" in shown.splitlines()[3]
    shown = call("data", "show", "own.store", "--set", "test=0.3").stdout
    assert "test" in shown
    values = tmp_path / "own.store" / "clients" / "x.0.values"
    values.write_bytes(values.read_bytes()[:-1] + bytes([values.read_bytes()[-1] ^ 1]))
    assert "block 0 of clients/x.0.values" in refused("data", "check", "own.store")
    assert "Unknown parameter of a store 'tset'. Did you mean 'test'?" in refused(
        "data", "show", "own.store", "--set", "tset=1"
    )


def test_data_convert_a_leaf_folder(tmp_path):
    for part, users in (("train", ("a", "b")), ("test", ("c",))):
        (tmp_path / "faces" / part).mkdir(parents=True)
        content = {u: {"x": [[1.0, 2.0], [3.0, 4.0]], "y": [0, 1]} for u in users}
        text = json.dumps({"users": list(users), "num_samples": [2] * len(users), "user_data": content})
        (tmp_path / "faces" / part / "all.json").write_text(text)
    assert "3 clients, 6 examples" in call("data", "convert", "faces", "faces.store").stdout
    shown = call("data", "show", "faces.store").stdout
    assert "train" in shown
    assert "test" in shown


def test_data_convert_mistakes(tmp_path):
    (tmp_path / "table.xlsx").write_text("")
    assert "table.xlsx must be a file that ends in .npz" in refused("data", "convert", "table.xlsx", "s")
    assert "nowhere.npz does not exist" in refused("data", "convert", "nowhere.npz", "s")
    assert "must name parameters of equipoise.data.npz" in refused("data", "convert", "nowhere.npz", "s", "--set", "clint=user")
    shown = refused("data", "check", str(tmp_path))
    assert "is no store" in shown
    assert "`equipoise data convert SOURCE STORE`" in shown


@pytest.fixture
def hospitals(tmp_path):
    """A table of 12 hospitals as hospitals.csv, with a missing age."""
    lines = ["hospital,age,town,ill"]
    lines += [
        f"h{k // 4},{'' if k == 5 else 30 + k % 7},{('Bern', 'Chur')[k % 2]},{('no', 'yes')[k % 3 > 0]}" for k in range(48)
    ]
    (tmp_path / "hospitals.csv").write_text("\n".join(lines))


def test_data_convert_a_table(tmp_path, hospitals):
    columns = "--client", "hospital", "--target", "ill"
    done = call("data", "convert", "hospitals.csv", "h.store", *columns, "--set", "kinds.town=category")
    assert done.exit_code == 0, done.output
    assert "h.store: 12 clients, 48 examples" in done.stdout
    shown = call("data", "show", "h.store").stdout
    assert "hospitals  2 classes" in shown
    assert "town    category  2 numbers      Bern, Chur" in shown
    assert call("data", "convert", "hospitals.csv", "pieces.store", *columns, "--set", "memory=0").exit_code == 0
    assert (tmp_path / "pieces.store/schema.json").read_text() == (tmp_path / "h.store/schema.json").read_text()
    assert "--target is missing" in refused("data", "convert", "hospitals.csv", "s", "--client", "hospital")
    assert "write_table_store" in refused("data", "convert", "hospitals.csv", "s", *columns, "--set", "tset=0.1")


TABLE = """
[data]
name = "csv"
path = "hospitals.csv"
client = "hospital"
target = "ill"
{schema}
[model]
name = "tabular"
[algorithm.risk]
name = "mean"
[train]
rounds = 1
clients_per_round = 2
"""


def test_the_operator_supplies_a_schema_and_a_run_keeps_it(tmp_path, hospitals):
    (tmp_path / "own.toml").write_text(TABLE.format(schema=""))
    assert call("run", "own.toml", "--out", "first").exit_code == 0
    text = (tmp_path / "first/schema.json").read_text().replace('"Bern"', '"Basel"')
    (tmp_path / "given.json").write_text(text)
    (tmp_path / "own.toml").write_text(TABLE.format(schema='schema = "given.json"'))
    done = call("run", "own.toml", "--out", "second")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "second/schema.json").read_text() == text
    assert str(tmp_path / "given.json") in (tmp_path / "second/config.toml").read_text()  # for --resume from anywhere
    shown = call("data", "show", "second").stdout
    assert "town    category  2 numbers      Basel, Chur" in shown
    settings = [each for key in ("path=hospitals.csv", "client=hospital", "target=ill") for each in ("--set", key)]
    assert "town    category  2 numbers      Bern, Chur" in call("data", "show", "csv", *settings).stdout
    (tmp_path / "second/schema.json").unlink()
    assert "has no schema to show" in refused("data", "show", "second")
    (tmp_path / "given.json").write_text("{}")
    assert "given.json" in refused("run", "own.toml", "--out", "third")
