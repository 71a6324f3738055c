"""Reference pages from docstrings: contracts show the call that they ask for, and marks of docstrings are rendered."""

import io
import sys
from pathlib import Path

import pytest

EXTENSIONS = Path(__file__).parents[2] / "docs" / "_ext"
sys.path.insert(0, str(EXTENSIONS))

import api_pages  # noqa: E402
import catalogue_page  # noqa: E402
import configuration_page  # noqa: E402
import docstrings  # noqa: E402
import parameters  # noqa: E402

import equipoise.types  # noqa: E402


def built(tmp_path: Path, entry: str, builder: str = "text") -> str:
    """The text of a page with an entry of the reference."""
    sphinx = pytest.importorskip("sphinx.application")
    conf = {"extensions": ["sphinx.ext.autodoc", "docstrings"], "default_role": "code", "autodoc_typehints": "description",
            "autodoc_typehints_description_target": "all", "add_module_names": False}  # fmt: skip
    (tmp_path / "conf.py").write_text("")
    (tmp_path / "index.rst").write_text(f"Page\n====\n\n{entry}")
    app = sphinx.Sphinx(
        tmp_path, tmp_path, tmp_path / "out", tmp_path / "trees", builder, conf, status=None, warning=io.StringIO()
    )
    app.build()
    return (tmp_path / "out" / f"index.{builder.replace('text', 'txt')}").read_text()


def test_a_contract_shows_the_call_that_it_asks_for(tmp_path):
    entries = [api_pages._entry("equipoise.types", name) for name in ("ClientRisk", "Aggregator", "Sampler", "LocalSolver")]
    text = built(tmp_path, "\n".join(entries))
    assert "args" not in text
    assert "class ClientRisk\n" in text
    assert "__call__(losses, base_weights, *, clients=None, state=None)" in text
    assert "__call__(round_index, alpha, *, clients_per_round, seed)" in text
    assert equipoise.types.Sampler.__call__.__doc__.split(".")[0].split()[0] in text
    assert text.count("__call__(") == 3  # a solver is no function


def test_public_values_have_entries(tmp_path):
    lines = api_pages._values("equipoise.metrics")
    page = "\n".join(lines[lines.index("```{eval-rst}") + 1 : -1])
    text = built(tmp_path, page)
    assert "macro_f1\n\n   The F1 of each class" in text
    assert '<dt class="sig sig-object py" id="equipoise.metrics.macro_f1">' in built(tmp_path, page, "html")
    assert "| [`macro_f1`](#equipoise.metrics.macro_f1) | The F1 of" in api_pages.pages()["api/equipoise.metrics.md"]


def test_stress_in_a_docstring_is_rendered_and_a_formula_is_not():
    assert docstrings.converted("two kinds: *by client* (a `b`) and x * y * z, w*_i, 2*a*b") == (
        r"two kinds: *by client* (a ``b``\ ) and x \* y \* z, w\*\_i, 2\*a\*b"
    )
    assert docstrings.markdown("*inverse* to s_j|t, `a|b`") == r"*inverse* to s\_j\|t, `a\|b`"
    assert docstrings.marked_up("`a<b` is *not* 2*a*b <") == "<code>a&lt;b</code> is <em>not</em> 2*a*b &lt;"


def test_the_catalogue_has_no_marks_left():
    assert "`" not in catalogue_page.page().partition("<tbody>")[2].partition("</tbody>")[0]


def test_an_index_of_pages_says_what_an_example_shows():
    soup = pytest.importorskip("bs4").BeautifulSoup
    whole_site = pytest.importorskip("whole_site")
    page = (
        '<article><div class="sphx-glr-download-link-note admonition note"><p class="admonition-title">Note</p>'
        "<p><a>Go to the end</a> to download the full example code.</p></div><h1>Title</h1>"
        "<p>FedAvg on clients that differ, and who is\nleft behind by it.</p></article>"
    )
    assert whole_site.lead(soup(page, "html.parser")) == "FedAvg on clients that differ, and who is left behind by it."


def test_a_picture_of_the_gallery_is_described_by_the_title_of_its_example():
    whole_site = pytest.importorskip("whole_site")
    page = '<h1>Fair <em>PCA</em><a class="headerlink">#</a></h1><img src="../_images/sphx_glr_plot_22_001.png" alt="{}"/>'
    assert whole_site.accessible(page.format("plot 22 fair pca")) == page.format("Fair PCA")
    assert whole_site.accessible(page.format("Two groups")) == page.format("Fair PCA: Two groups")
    assert whole_site.accessible(page.format("Fair PCA: Two groups")) == page.format("Fair PCA: Two groups")


def test_the_reference_of_configuration_files_says_which_way_a_metric_is_better():
    page = " ".join(configuration_page.page().split())
    assert "Of a plain function more is better." in page
    assert "`equipoise.metrics.Metric(function, higher_is_better=False)`" in page


def with_comments(
    first: int,  # behind it
    # above it
    second: int = 0,
    third: int = 0,
):
    """A function for the tests, which explains `third`."""


def test_comments_at_parameters_are_their_descriptions():
    assert parameters.descriptions("tests.with_comments", with_comments) == {
        "first": "behind it",
        "second": "above it",
        "third": "",
    }
    assert [parameters.mentioned("sets `lr=0.1`, and a `b` too, not seed", name) for name in ("lr", "b", "and", "seed")] == [
        True,
        True,
        False,
        False,
    ]
