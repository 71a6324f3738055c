"""The checks of the documentation find what they are there to find: each is shown a break."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "_ext"))

import public_names
import site_checks
from command_page import commands

NOTEBOOK = "---\nfile_format: mystnb\nkernelspec:\n  name: python3\n---\n\n# A\n\nFor you.\n\n"


def site(folder: Path, **pages: str) -> Path:
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    site_checks.anchors.cache_clear()
    return folder


def test_a_broken_link_is_found(tmp_path):
    good = site(tmp_path, index='<a href="other.html#there">x</a> <a href="https://a.b">y</a>', other='<p id="there">')
    assert site_checks.dead_links(good) == []
    gone = site(tmp_path, index='<a href="gone.html">x</a>')
    assert site_checks.dead_links(gone) == ["index.html → gone.html"]
    anchor = site(tmp_path, index='<a href="other.html#nowhere">x</a><img src="other.html">')
    assert site_checks.dead_links(anchor) == ["index.html → other.html#nowhere (no such anchor)"]


@pytest.mark.parametrize(
    "page",
    [
        "```{code-cell}\nx = 1\n```\n",  # of a page that is no notebook
        "```{code-block} python\nx = 1\n```\n",
        "```py\nx = 1\n```\n",
        "- a list\n\n  ```python\n  x = 1\n  ```\n",  # the tests see blocks at the margin
        "```\nresult = eq.train(model, data)\n```\n",  # a program that calls itself text
        "```text\nimport equipoise as eq\n```\n",
        NOTEBOOK + "```python\nx = 1\n```\n",  # a notebook runs its cells alone
    ],
)
def test_an_unexecuted_block_is_found(page):
    assert len(site_checks.unexecuted_blocks(page)) == 1


@pytest.mark.parametrize(
    "page",
    [
        "```python\nx = 1\n```\n",
        NOTEBOOK + "```{code-cell}\nx = 1\n```\n",
        "```\nequipoise run a.toml\n```\n",
        "```toml\na = 1\n```\n",
    ],
)
def test_an_executed_block_is_not_reported(page):
    assert site_checks.unexecuted_blocks(page) == []


def test_code_that_is_marked_by_spaces_is_found():
    assert site_checks.indented_code("# A\n\nType\n\n    equipoise runn a\n") == ["line 5: equipoise runn a"]
    assert site_checks.indented_code("# A\n\n- a list\n\n  of text\n\n```\n    x = 1\n```\n") == []


def test_a_missing_docstring_is_found(monkeypatch):
    import equipoise as eq

    monkeypatch.setattr(eq.risk.Superquantile, "__doc__", None)
    monkeypatch.setattr(eq.averaging.Last, "__doc__", "Last()")  # what a dataclass gets without a docstring
    assert {"equipoise.risk.Superquantile", "equipoise.averaging.Last"} <= set(public_names.without_docstring())


def test_a_code_without_an_entry_is_found(tmp_path):
    folder = tmp_path / "reference" / "generated"
    folder.mkdir(parents=True)
    site(folder, errors='<section id="eq101">')
    assert site_checks.codes_without_entry(tmp_path, ["EQ101"]) == []
    assert site_checks.codes_without_entry(tmp_path, ["EQ101", "EQ999"]) == ["EQ999"]


@pytest.mark.parametrize("before", ["", "$ ", "sudo -u equipoise /srv/venv/bin/", "cd x && ", "A=1 ", "true; "])
def test_a_command_or_an_option_that_does_not_exist_is_found(before):
    def wrong(line: str) -> list[str]:
        return site_checks.unknown_commands(f"```\n{before}equipoise {line}\n```\n", commands(), {})

    assert wrong("run a.toml --out b     # --nonsense") == wrong("methods") == wrong("--version") == []
    assert wrong("run a.toml --uot b") == ["line 1: equipoise run has no --uot"]
    assert wrong("runn a.toml") == ["line 1: there is no command 'runn a.toml'"]
    assert wrong("flower statu a") == ["line 1: there is no command 'flower statu'"]
    assert "not a valid int" in wrong("flower status runs/a --serve port")[0]


def test_a_command_in_a_sentence_is_looked_at():
    assert site_checks.unknown_commands("Type `equipoise\nrun a.toml` or `equipoise`.", commands(), {}) == []
    assert len(site_checks.unknown_commands("Type\n`equipoise\nrunn a`.", commands(), {})) == 1
    passed_on = {"run": {"--other"}}
    assert site_checks.unknown_commands("`equipoise run a.toml --other x`", commands(), passed_on) == []


def test_python_in_a_shell_command_runs_only_by_itself():
    heredoc = "```\npython - <<'END'\nimport equipoise\nEND\n```\n"
    option = "```\nA=1 python -c 'import equipoise'\n```\n"
    assert len(site_checks.shell_programs(heredoc + option)) == 2
    assert site_checks.unexecuted_blocks(heredoc + option) == []
    assert len(site_checks.unexecuted_blocks(heredoc.replace("python -", "cd x\npython -"))) == 1


def test_toml_that_cannot_be_read_is_found():
    assert site_checks.wrong_toml("```toml\na = 1\n…\n```\n") == []
    assert len(site_checks.wrong_toml("```toml\na = \n```\n")) == 1


def test_a_page_without_a_reader_or_with_a_riddle_is_found():
    assert site_checks.stumbling("# A\n\nFor people who read.\n") == []
    assert len(site_checks.stumbling("# A\n\nThis page is about things.\n")) == 1
    assert len(site_checks.stumbling("# A\n\nFor people who read so\nmany things with care.\n")) == 2
