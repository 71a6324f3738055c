"""The documents: Python blocks of the README and of docs/ run, commands exist, configurations are read, promises have tests."""

import csv
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from pathlib import Path

import pytest
import typer.main
from typer.core import TyperGroup

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs" / "_ext"))

import blocks as blocks_of  # noqa: E402

from equipoise.cli import app  # noqa: E402
from equipoise.errors import EquipoiseNotice  # noqa: E402

MADE = {"generated", "gallery", "_build", "_cache"}  # folders that building the site makes
NOTICES = {"docs/howto/predict.md": "'occupation' holds categories that training did not have: 'Astronaut'"}  # as the page says
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if not MADE & set(p.parts))]


COPIED = ("start.md", "federation.md")  # notebooks that are also run as a reader who copies them does: without a notice


def blocks(page: Path) -> list[str]:
    return blocks_of.executed_blocks(page.read_text(encoding="utf-8"), cells=page.name in COPIED)


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def marks(page: Path) -> list[pytest.MarkDecorator]:
    """Pages of the site alone are executed with it, by `make docs`."""
    alone = page.parent.name not in ("docs", "methods", ROOT.name) or page.name in ("start.md", "which-method.md")
    return [pytest.mark.docs] if alone else []


@pytest.mark.parametrize("page", [pytest.param(p, marks=marks(p), id=page_name(p)) for p in PAGES if blocks(p)])
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("flower"))
    names: dict[str, object] = {"__name__": page.stem, "__file__": str(tmp_path / f"{page.stem}.py")}
    told = NOTICES.get(page_name(page))
    with pytest.warns(EquipoiseNotice, match=told) if told else nullcontext():  # no other page gives a notice
        for number, block in enumerate(blocks(page), 1):
            exec(compile(block, f"{page.name}, block {number}", "exec"), names)  # noqa: S102
    if page.name == "README.md":
        assert "Superquantile" in (tmp_path / "report.html").read_text(encoding="utf-8")


def equipoise_commands(block: str) -> list[list[str]]:
    """The words after `equipoise` of each line of a shell block that begins with it, up to the next operator or comment."""
    lines = [line.strip().removeprefix("$ ") for line in block.replace("\\\n", " ").splitlines()]
    found = [shlex.split(re.split(r" [|&;>#] ?| && ", line)[0])[1:] for line in lines if line.startswith("equipoise ")]
    return [words for words in found if "…" not in " ".join(words)]


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_commands_and_their_options_exist(page):
    root = typer.main.get_command(app)
    for block in blocks_of.shell_blocks(page.read_text(encoding="utf-8")):
        for words in equipoise_commands(block):
            command, rest = root, list(words)
            while isinstance(command, TyperGroup) and rest and not rest[0].startswith("-"):
                assert rest[0] in command.commands, f"{page.name}: equipoise {' '.join(words)}"
                command = command.commands[rest.pop(0)]
            known = {each for parameter in command.params for each in (*parameter.opts, *parameter.secondary_opts)}
            passed_on = {"--superlink", "--node-config", "--help"}  # flower-supernode's, behind `flower node`
            given = {word.partition("=")[0] for word in rest if word.startswith("--")}
            assert given <= known | passed_on, f"{page.name}: equipoise {' '.join(words)}"


def test_the_commands_of_start_run(tmp_path, monkeypatch):
    """The file, the configuration and the commands of its part "Without writing code", as a reader copies them."""
    page = ROOT / "docs" / "start.md"
    monkeypatch.chdir(tmp_path)
    for block in blocks(page):
        if 'open("' in block:  # those that write the two tables
            exec(compile(block, page.name, "exec"), {})  # noqa: S102
    text = page.read_text(encoding="utf-8").split("## Without writing code")[1]
    (configuration,) = blocks_of.toml_blocks(text)
    (tmp_path / "visits.toml").write_text(configuration, encoding="utf-8")
    commands = [words for block in blocks_of.shell_blocks(text) for words in equipoise_commands(block)]
    assert [words[0] for words in commands] == ["run", "predict"]
    for words in commands:
        shown = in_shell([sys.executable, "-m", "equipoise", *words], tmp_path)
        assert words[0] != "run" or "90th percentile" in shown
    with (tmp_path / "predictions.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["visit_id"] for row in rows] == ["v1", "v2"]
    assert all(abs(float(row["yes"]) + float(row["no"]) - 1) < 1e-3 for row in rows)


def in_shell(command: list[str], folder: Path) -> str:
    """What a command prints, which succeeds; its `equipoise` and `python` are those of this test."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


FINISHED_RUN = """
import os, shutil, sys
sys.path.insert(0, "app")
import equipoise as eq
from my_federation.data import simulated
from my_federation.task import algorithm, net
from safetensors.torch import save_file

result = eq.train(net(), simulated(), algorithm, rounds=1, clients_per_round=4)
os.makedirs("model")
os.makedirs("runs/federation")
save_file(result.model.state_dict(), "model/model.safetensors")
result.clients.to_parquet("runs/federation/clients.parquet")
os.makedirs("handed-over")
shutil.copy("app/my_federation/schema.json", "handed-over")
with open("predictions.csv", "w") as file:
    file.write("outcome,ill,well\\nill,0.9,0.1\\nwell,0.4,0.6\\n")
"""
SHELL = [page for page in PAGES if blocks_of.shell_programs(page.read_text(encoding="utf-8"))]


@pytest.mark.docs
@pytest.mark.parametrize("page", SHELL, ids=page_name)
def test_python_in_shell_commands_runs(page, tmp_path, monkeypatch):
    """In a folder such as a reader of the page has after a run: the guide's app, a model and the table of clients."""
    text = page.read_text(encoding="utf-8")
    app = tmp_path / "app" / "my_federation"
    app.mkdir(parents=True)
    (tmp_path / "app" / "equipoise").symlink_to(ROOT / "src" / "equipoise")
    monkeypatch.chdir(app)
    for block in blocks(ROOT / "docs" / "operate-federation.md"):  # the schema; then whole files: data.py and task.py
        if "Schema.fit(" in block:
            exec(compile(block, page.name, "exec"), {})  # noqa: S102
        for file, mark in (("data.py", "def load_data("), ("task.py", "def net(")):
            if mark in block:
                (app / file).write_text(block, encoding="utf-8")
    in_shell([sys.executable, "-c", FINISHED_RUN], tmp_path)
    for program in blocks_of.shell_programs(text):
        assert in_shell(["bash", "-c", program], tmp_path).strip()


def complete_files(page: Path) -> list[str]:
    """TOML blocks of a page that are whole files for a command."""
    found = [fence.text for fence in blocks_of.fences(page.read_text(encoding="utf-8")) if fence.language == "toml"]
    return [text for text in found if "[data]" in text and "[train]" in text and "…" not in text]


MY_PARTS = """
import torch
import equipoise as eq


def load(year):
    return eq.data.label_shift(train_clients=year)


class MyNet(torch.nn.Linear):
    def __init__(self, width):
        super().__init__(width, 2)


def focal(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")


def sure(outputs, targets):
    return outputs.softmax(-1).amax(-1).mean()
"""  # the file beside the configuration that docs/howto/config.md speaks of
KIT = {"superlink": "fed.example.org:47090", "client-id": "a", "app": "app", "key": "node.key", "authority": "ca.pem"}


def fragments(page: Path) -> list[str]:
    """TOML blocks of a page that are parts of a file."""
    text, whole = page.read_text(encoding="utf-8"), complete_files(page)
    blocks = [block for block in blocks_of.toml_blocks(text) if block not in whole]
    return [block for block in blocks if "[project" not in block]  # of a package, not of a configuration


@pytest.mark.parametrize("page", [p for p in PAGES if fragments(p)], ids=page_name)
def test_parts_of_configurations_are_accepted(page, tmp_path, monkeypatch):
    """Each is put into the smallest file of its kind, and read by what reads it: a node's kit, a policy, a configuration."""
    from equipoise.engines.flower.apps.node_policy import NodePolicy, read_policy
    from equipoise.engines.flower.operate.kits import Kit
    from equipoise.experiment.config import RunConfig
    from equipoise.experiment.search import read_search
    from equipoise.experiment.toml import dumps

    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_parts.py").write_text(MY_PARTS, encoding="utf-8")
    smallest = {"data": {"name": "label_shift"}, "model": {"name": "softmax"}, "train": {"rounds": 1, "clients_per_round": 4}}
    for number, block in enumerate(fragments(page)):
        given = tomllib.loads(block)
        path = tmp_path / f"{number}.toml"
        if set(given) & set(NodePolicy.__dataclass_fields__):
            path.write_text(block, encoding="utf-8")
            assert read_policy(path)
        elif "node-config" in given or "preload" in given:
            (tmp_path / "node.toml").write_text(dumps(KIT | given), encoding="utf-8")
            assert Kit.read(tmp_path).node_config
        else:
            if not any(isinstance(value, dict) for value in given.values()):
                given = {"train": given}  # lines of this section, as the page says
            table = smallest | given
            table["train"] = smallest["train"] | given.get("train", {})
            path.write_text(dumps(table), encoding="utf-8")
            assert read_search(path).space if "search" in given else RunConfig.read(path, code="run").train.rounds


@pytest.mark.parametrize("page", [p for p in PAGES if complete_files(p)], ids=page_name)
def test_complete_configurations_are_accepted(page, tmp_path, monkeypatch):
    """Each is read and checked by the command that takes it: sections, keys, types, parts."""
    from equipoise.experiment.config import RunConfig
    from equipoise.experiment.search import read_search
    from equipoise.experiment.study import read_study

    monkeypatch.chdir(tmp_path)
    for number, text in enumerate(complete_files(page)):
        path = tmp_path / f"{number}.toml"
        path.write_text(text, encoding="utf-8")
        if "[search" in text:
            assert read_search(path).space
        elif "[study]" in text:
            assert len(read_study(path, out=tmp_path / "runs")) > 1
        else:
            assert RunConfig.read(path).train.rounds > 0


def test_links_of_the_readme_lead_somewhere():
    """Those of all other pages are checked where the site is built."""
    targets = re.findall(r"\]\(([^)#]+)", (ROOT / "README.md").read_text(encoding="utf-8"))
    here = [target for target in targets if "://" not in target and not MADE & set(Path(target).parts)]
    assert [target for target in here if not (ROOT / target).exists()] == []


TEST_LINK = re.compile(r"^\[(\w+)\]: ((?:\.\./)+tests/\S+\.py)#(\w+)$", flags=re.M)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_to_tests_name_tests_that_are_there(page):
    """A promise that links to a test has one; and every link that is used is defined, and the other way round."""
    text = page.read_text(encoding="utf-8")
    for label, file, name in TEST_LINK.findall(text):
        source = (page.parent / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {name}\(", source, flags=re.M), f"{page.name}: {file} has no {name}"
        assert f"][{label}]" in text, f"{page.name} does not use [{label}]"


def test_the_files_and_names_of_the_papers_page_are_there():
    """A cell such as `risk/qfair.py: QFair` names a file of the library, and classes or functions in it."""
    text = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8").split("\n## ")[0]
    cells = re.findall(r"`((?:\w+/)+\w+\.py)(?:: ([\w, ]+))?", text)
    assert len(cells) > 20
    for file, names in cells:
        source = (ROOT / "src" / "equipoise" / file).read_text(encoding="utf-8")
        for name in re.findall(r"\w+", names):
            assert re.search(rf"^\s*(class|def) {name}\b", source, flags=re.M), f"{file} has no {name}"
