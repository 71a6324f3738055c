"""The documents: Python blocks of the README and of docs/ run, links lead somewhere, lines wrap at 120 columns."""

import csv
import os
import re
import shutil
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs" / "_ext"))

import site_checks  # noqa: E402

from equipoise.errors import EquipoiseNotice  # noqa: E402

MADE = {"generated", "gallery", "_build", "_cache"}  # folders that building the site makes
NOTICES = {"docs/howto/predict.md": "'occupation' holds categories that training did not have: 'Astronaut'"}  # as the page says
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if not MADE & set(p.parts))]


COPIED = ("start.md", "federation.md")  # notebooks that are also run as a reader who copies them does: without a notice


def blocks(page: Path) -> list[str]:
    return site_checks.executed_blocks(page.read_text(encoding="utf-8"), cells=page.name in COPIED)


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


LESSONS = [page for page in PAGES if page.parent.name == "tutorials"]
EXTRAS = {"machines.md": {"ray"}, "own-parts.md": {"my_parts"}}  # what a lesson has its reader install, or write


@pytest.mark.parametrize("page", LESSONS, ids=page_name)
def test_a_lesson_needs_nothing_that_installing_the_library_does_not_bring(page):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    brought = {re.match(r"[\w-]+", each).group().replace("scikit-learn", "sklearn") for each in project["dependencies"]}
    fences = site_checks.fences(page.read_text(encoding="utf-8"))
    cells = [each.text for each in fences if each.language == "python" or each.language.startswith("{code-cell}")]
    needed = {name for cell in cells for name in re.findall(r"^\s*(?:import|from) (\w+)", cell, flags=re.M)}
    assert needed <= brought | {"equipoise"} | sys.stdlib_module_names | EXTRAS.get(page.name, set())


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_no_block_of_code_is_left_out(page):
    """Python is run by the tests or by the build, TOML can be read, and commands, options and targets of make exist."""
    text = page.read_text(encoding="utf-8")
    from command_page import commands

    passed_on = {"flower node": {"--superlink", "--node-config"}}  # options of flower-supernode
    assert site_checks.unexecuted_blocks(text) + site_checks.indented_code(text) + site_checks.unknown_marks(text) == []
    assert site_checks.wrong_toml(text) + site_checks.unknown_commands(text, commands(), passed_on) == []
    assert site_checks.unknown_scripts(text, ROOT) == []
    assert site_checks.unknown_targets(text, (ROOT / "Makefile").read_text(encoding="utf-8")) == []


def test_the_commands_of_start_run(tmp_path, monkeypatch):
    """The file, the configuration and the commands of its part "Without writing code", as a reader copies them."""
    page = ROOT / "docs" / "start.md"
    monkeypatch.chdir(tmp_path)
    for block in blocks(page):
        if 'open("' in block:  # those that write the two tables
            exec(compile(block, page.name, "exec"), {})  # noqa: S102
    text = page.read_text(encoding="utf-8").split("## Without writing code")[1]
    ((_, configuration),) = site_checks.toml_blocks(text)
    (tmp_path / "visits.toml").write_text(configuration, encoding="utf-8")
    commands = [words for fence in site_checks.fences(text) if not fence.language
                for _, words in site_checks.equipoise_commands(f"```\n{fence.text}```\n")]  # fmt: skip
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
SHELL = [page for page in PAGES if site_checks.shell_programs(page.read_text(encoding="utf-8"))]


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
    for program in site_checks.shell_programs(text):
        assert in_shell(["bash", "-c", program], tmp_path).strip()


def complete_files(page: Path) -> list[str]:
    """TOML blocks of a page that are whole files for a command."""
    found = [fence.text for fence in site_checks.fences(page.read_text(encoding="utf-8")) if fence.language == "toml"]
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
    blocks = [block for _, block in site_checks.toml_blocks(text) if block not in whole]
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


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "README.md"], ids=page_name)
def test_a_page_says_whom_it_is_for_in_plain_words(page):
    assert site_checks.stumbling(page.read_text(encoding="utf-8")) == []


BESIDE = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]


@pytest.mark.parametrize("page", [*BESIDE, *sorted((ROOT / "examples" / "gallery").glob("plot_*.py"))], ids=page_name)
def test_text_beside_the_pages_has_no_riddles(page):
    words = " ".join(page.read_text(encoding="utf-8").lower().split())
    assert [riddle for riddle in site_checks.RIDDLES if re.search(rf"\b{riddle}\b", words)] == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=page_name)
def test_links_lead_somewhere(page):
    """Also links with a label, and those written as HTML. Anchors inside the site are looked at where it is built."""
    text = page.read_text(encoding="utf-8")
    assert site_checks.undefined_labels(text) == []
    for target in site_checks.links_of(text):
        path, _, anchor = unquote(target).partition("#")
        if re.match(r"https?://|mailto:", target) or MADE & set(Path(path).parts):  # made pages: where the site is built
            continue
        home = page.parent / path if path else page
        assert home.exists(), f"{page.name} links to {target}, which does not exist"
        if anchor and page in BESIDE and home.suffix == ".md":
            assert anchor in site_checks.headings(home.read_text(encoding="utf-8")), f"{page.name}: {target} is no heading"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=page_name)
def test_lines_wrap_at_120_columns(page):
    """Prose wraps. Tables, code fences, HTML and single words, such as a URL, need not."""
    in_fence, too_long = False, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        text = line.strip()
        if text.startswith("```"):
            in_fence = not in_fence
        elif not in_fence and len(line) > 120 and " " in text and not text.startswith(("|", "<")):
            too_long.append(number)
    assert not too_long, f"{page.name} has lines of more than 120 columns: {too_long}"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_no_line_of_prose_is_a_comment(page):
    """A line that begins with a percent sign is a comment, and one that begins with a plus an item of a list."""
    in_fence, lost = False, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        text = line.strip()
        if text.startswith("```"):
            in_fence = not in_fence
        elif not in_fence and text.startswith(("%", "+ ")):
            lost.append(number)
    assert not lost, f"{page.name} has lines that MyST leaves out, or takes for items of a list: {lost}"


def test_the_home_page_counts_lessons_and_pictures():
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    lessons = len(LESSONS) - 1  # without the list of them
    pictures = len(list((ROOT / "examples" / "gallery").glob("plot_*.py")))
    words = {9: "Nine", 10: "Ten", 11: "Eleven", 39: "Thirty-nine", 40: "Forty", 41: "Forty-one", 42: "Forty-two"}
    assert f"{words[lessons]} lessons" in text
    assert f"{words[pictures]} pictures" in text


TEST_LINK = re.compile(r"^\[(\w+)\]: ((?:\.\./)+tests/\S+\.py)#(\w+)$", flags=re.M)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_to_tests_name_tests_that_are_there(page):
    """A promise that links to a test has one; and every link that is used is defined, and the other way round."""
    text = page.read_text(encoding="utf-8")
    for label, file, name in TEST_LINK.findall(text):
        source = (page.parent / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {name}\(", source, flags=re.M), f"{page.name}: {file} has no {name}"
        assert f"][{label}]" in text, f"{page.name} does not use [{label}]"


def test_each_cell_of_who_learns_what_links_to_a_test():
    text = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8")
    tests = {label for label, _, _ in TEST_LINK.findall(text)}
    section = text.split("## Who learns what")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")][2:]
    assert len(rows) >= 8
    for name, *cells in rows:
        assert len(cells) == 3
        for cell in cells:
            used = set(re.findall(r"\]\[(\w+)\]", cell))
            assert used & tests, f"{name.strip()}: {cell.strip()!r} links to no test"
    for page in ("federation", "operate-federation", "protect-federation"):  # the table is there once
        assert "| the server |" not in (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")


REFERENCE = re.compile(r"^\[`(\w+)`\]: (\S+\.py)#L(\d+)$", flags=re.M)


def defined_at(page: Path, name: str, file: str) -> int:
    """The line of a Python file on which a class or function is defined; the first, if several have the name."""
    lines = (page.parent / file).read_text(encoding="utf-8").splitlines()
    return next((n for n, line in enumerate(lines, 1) if re.match(rf"\s*(class|def) {name}\b", line)), 0)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_line_references_are_true(page):
    """The target of a link such as [`run_round`] is the line that defines the name."""
    for name, file, line in REFERENCE.findall(page.read_text(encoding="utf-8")):
        assert defined_at(page, name, file) == int(line), f"{name} of {file}: run python tests/test_docs.py to renew the lines"


def test_the_files_and_names_of_the_papers_page_are_there():
    """A cell such as `risk/qfair.py: QFair` names a file of the library, and classes or functions in it."""
    text = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8").split("\n## ")[0]
    cells = re.findall(r"`((?:\w+/)+\w+\.py)(?:: ([\w, ]+))?", text)
    assert len(cells) > 20
    for file, names in cells:
        source = (ROOT / "src" / "equipoise" / file).read_text(encoding="utf-8")
        for name in re.findall(r"\w+", names):
            assert re.search(rf"^\s*(class|def) {name}\b", source, flags=re.M), f"{file} has no {name}"


def test_the_explanation_walks_through_one_round():
    named = {file for _, file, _ in REFERENCE.findall((ROOT / "docs" / "explanation" / "round.md").read_text(encoding="utf-8"))}
    assert {f"../../src/equipoise/{file}" for file in ("train.py", "round.py", "engines/loop.py", "solvers/sgd.py")} <= named


def renew_lines(page: Path) -> None:
    """Write the true line numbers into the references of a page."""
    text = page.read_text(encoding="utf-8")
    page.write_text(REFERENCE.sub(lambda m: f"[`{m[1]}`]: {m[2]}#L{defined_at(page, m[1], m[2])}", text), encoding="utf-8")


if __name__ == "__main__":
    for page in PAGES:
        renew_lines(page)


def test_the_page_of_errors_links_whatever_page_a_cause_or_cure_names():
    import error_page

    from equipoise.core.error_codes import families

    text = " ".join(f"{family.cause} {family.cure}" for family in families().values())
    for name, target in error_page.NAMED.items():
        assert name in text, f"no family names {name}"
        assert MADE & set(Path(target).parts) or (ROOT / "docs" / target.partition("#")[0]).exists(), (
            f"{name} leads to {target}"
        )
    left = re.sub("|".join(map(re.escape, error_page.NAMED)), "", text)
    assert re.findall(r"(?i)the (?:page on|guide (?:on|to)|matrix of|reference of) [^.;]+|`examples/[^`]+`", left) == []
    assert "](" not in text  # plain where no page is made of it
    assert "[the guide on tuning](../../howto/tune.md)" in error_page.page()


MOST_BULLETS = 60  # of a section, so that people read it


def test_no_section_of_the_changelog_is_too_long_to_read():
    sections: dict[str, int] = {}
    heading = ""
    for line in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            heading = version = line
        elif line.startswith("### "):
            heading = f"{version} / {line}"
        sections[heading] = sections.get(heading, 0) + line.lstrip().startswith("- ")
    assert {name: count for name, count in sections.items() if count > MOST_BULLETS} == {}
