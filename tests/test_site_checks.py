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


LINKS = [
    "<a href=gone.html>",
    '<A HREF="gone.html">',
    '<img src="a.html" srcset="gone.html 2x">',
    '<video src="gone.html">',
    '<object data="gone.html">',
    '<a href="http:gone.html">',
]


@pytest.mark.parametrize("link", LINKS)
def test_a_broken_link_is_found_however_it_is_written(tmp_path, link):
    assert len(site_checks.dead_links(site(tmp_path, a=link))) == 1


ASKS = [
    '<script async\nsrc="https://c.d/a.js"></script>',
    "<script src=//c.d/a.js></script>",
    '<script type="module">import "https://c.d/a.js"</script>',
    '<img srcset="https://c.d/a.png 2x">',
    "<style>@import url(https://c.d/a.css)</style>",
    '<p style="background:url(https://c.d/a.png)">',
    '<link rel="preconnect" href="https://c.d">',
    '<iframe src="//c.d"></iframe>',
]


@pytest.mark.parametrize("asks", ASKS)
def test_what_a_page_asks_of_another_host_is_found(tmp_path, asks):
    assert len(site_checks.loaded_from_elsewhere(site(tmp_path, a=asks))) == 1
    (tmp_path / "b.css").write_text("/* from https://c.d */ p {background: url(//c.d/e.png)}", encoding="utf-8")
    linked = site(tmp_path, a='<a href="https://c.d">x</a><link rel="canonical" href="https://c.d">')
    assert site_checks.loaded_from_elsewhere(linked) == ["b.css → //c.d/e.png"]


def test_a_picture_without_words_is_found(tmp_path):
    good = '<img src="a.png" alt="Two histograms"><img src="b_thumb.png" alt="">'
    assert site_checks.images_without_text(site(tmp_path, a=good)) == []
    for words in ("", 'alt=""', 'alt="a.png"', 'alt="plot 01 knob"'):
        assert site_checks.images_without_text(site(tmp_path, a=f'<img src="a.png" {words}>')) == ["a.html → a.png"]


def test_links_of_a_page_are_found_however_they_are_written():
    page = '[a](b.md#c "d") ![e](f.png) [g][h] <img src="i.png">\n\n[h]: j.md\n\n```\n[k](l.md)\n```\n'
    assert set(site_checks.links_of(page)) == {"b.md#c", "f.png", "j.md", "i.png"}
    assert site_checks.undefined_labels(page) == []
    assert site_checks.undefined_labels("[g][h] and `x[0][1]`") == ["h"]
    assert site_checks.headings("# A `b`, c!\n\n```\n# d\n```\n\n## e\n\n## e\n") == {"a-b-c", "e", "e-1"}


MARKS = [
    "{code-block} python",
    "{code-block} sh",
    "ipython",
    "shell",
    "text",
    "python title=a",
    "{eval-rst}",
    "{python}",
    "Python",
]


@pytest.mark.parametrize("mark", MARKS)
def test_a_block_that_no_check_looks_into_is_found(mark):
    assert site_checks.unknown_marks(f"```{mark}\nx = 1\n```\n") == [f"line 1: ```{mark}"]


def test_what_is_not_executed_in_other_ways_is_found():
    boxed = "```{code-cell}\n%%writefile a.py\nx = 1\n```\n\n:::{note}\nA `<pre>`.\n:::\n"
    assert site_checks.unknown_marks(NOTEBOOK + boxed) == []
    for cell in (":tags: [skip-execution]\nx = 1", "!equipoise runn"):
        assert len(site_checks.unknown_marks(NOTEBOOK + f"```{{code-cell}}\n{cell}\n```\n")) == 1
    assert len(site_checks.unknown_marks(NOTEBOOK.replace("---\n\n", "mystnb:\n  execution_mode: off\n---\n\n"))) == 1
    assert len(site_checks.unknown_marks(":::{code-block} python\nx = 1\n:::\n")) == 1
    assert len(site_checks.unknown_marks("<pre>\nx = 1\n</pre>\n")) == 1


@pytest.mark.parametrize(
    "page",
    [
        "```{code-cell}\nx = 1\n```\n",  # of a page that is no notebook
        "```{code-block} python\nx = 1\n```\n",
        "```py\nx = 1\n```\n",
        "- a list\n\n  ```python\n  x = 1\n  ```\n",  # the tests see blocks at the margin
        "```\nresult = eq.train(model, data)\n```\n",  # a program that calls itself text
        "```text\nimport equipoise as eq\n```\n",
        "```\nimport torch\nprint(torch.zeros(3))\n```\n",
        "```\n>>> eq.train(model, data)\n```\n",
        "> ```python\n> x = 1\n> ```\n",
        "- ```python\n  x = 1\n  ```\n",
        NOTEBOOK + "```python\nx = 1\n```\n",  # a notebook runs its cells alone
    ],
)
def test_an_unexecuted_block_is_found(page):
    assert len(site_checks.unexecuted_blocks(page)) == 1


@pytest.mark.parametrize("end", ["", "`````\n", "  ```\n"])
def test_a_block_that_ends_in_another_way_is_executed(end):
    assert site_checks.executed_blocks(f"# A\n\n```python\nx = 1\n{end}") == ["x = 1\n"]


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


def test_a_missing_docstring_of_what_keeps_its_answers_and_of_a_value_is_found(monkeypatch):
    import functools

    import equipoise as eq

    class New(eq.risk.Superquantile):
        """A class with a method that says nothing."""

        @functools.cache  # noqa: B019
        def silent(self): ...

    monkeypatch.setattr(eq.risk, "New", New, raising=False)
    monkeypatch.setattr(eq.risk, "silent", functools.lru_cache(lambda: None), raising=False)
    monkeypatch.setattr(eq.risk, "constant", 3, raising=False)
    monkeypatch.setattr(eq.risk, "__all__", [*eq.risk.__all__, "New", "silent", "constant"])
    expected = {"equipoise.risk.New.silent", "equipoise.risk.silent", "equipoise.risk.constant"}
    assert expected <= set(public_names.without_docstring())


def test_a_code_without_an_entry_is_found(tmp_path):
    folder = tmp_path / "reference" / "generated"
    folder.mkdir(parents=True)
    site(folder, errors='<section id="eq101">')
    assert site_checks.codes_without_entry(tmp_path, ["EQ101"]) == []
    assert site_checks.codes_without_entry(tmp_path, ["EQ101", "EQ999"]) == ["EQ999"]


BEFORE = [
    "",
    "$ ",
    "sudo -u equipoise /srv/venv/bin/",
    "cd x && ",
    "A=1 ",
    "true; ",
    "python -m ",
    "env A=1 ",
    "ExecStart=/srv/bin/",
    "for i in 1 2; do ",
]


@pytest.mark.parametrize("before", BEFORE)
def test_a_command_or_an_option_that_does_not_exist_is_found(before):
    def wrong(line: str) -> list[str]:
        return site_checks.unknown_commands(f"```\n{before}equipoise {line}\n```\n", commands(), {})

    assert wrong("run a.toml --out b     # --nonsense") == wrong("methods") == wrong("--version") == []
    assert wrong("run a.toml --uot b") == ["line 1: equipoise run has no --uot"]
    assert wrong("run a.toml -x") == ["line 1: equipoise run has no -x"]
    assert wrong("--vers") == ["line 1: equipoise has no --vers"]
    assert wrong("runn a.toml") == ["line 1: there is no command 'runn a.toml'"]
    assert wrong("flower statu a") == ["line 1: there is no command 'flower statu'"]
    assert "not a valid int" in wrong("flower status runs/a --serve port")[0]


def test_a_target_of_make_that_does_not_exist_is_found():
    page = "```\nmake docs     # the site\nmake docks\n```\n\n`make tset`, and we make text."
    assert site_checks.unknown_targets(page, "docs: docs-only\n\nlint:\n") == ["docks", "tset"]


def test_a_script_or_an_option_of_it_that_does_not_exist_is_found(tmp_path):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "a.py").write_text('parser.add_argument("--only")', encoding="utf-8")
    page = "`python benchmarks/a.py\n--only x` `benchmarks/b.py`\n\n```\nA=1 python benchmarks/a.py --onyl x  # --other\n```\n"
    assert site_checks.unknown_scripts(page, tmp_path) == ["benchmarks/a.py --onyl", "benchmarks/b.py"]


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
