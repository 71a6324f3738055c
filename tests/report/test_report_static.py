"""The figures for papers."""

import sys
from dataclasses import replace

import pytest
from report_cases import ALL_TRAINED, FIGURES, OF_SEVERAL, federated, softmax

import equipoise as eq
from equipoise.errors import ConfigError, InvalidParameter, NotWritten
from equipoise.report import export_figures, histogram_picture


def test_pictures(comparison, tmp_path):
    png = histogram_picture(comparison.all_results, tmp_path / "deep" / "h.png").read_bytes()
    width, height = (int.from_bytes(png[i : i + 4], "big") for i in (16, 20))
    assert png.startswith(b"\x89PNG")
    assert (width, height) == (1200, 500)
    svg = histogram_picture(comparison.all_results, tmp_path / "h.SVG").read_text()
    assert "<svg" in svg
    assert "Δ-FL 0.5" in svg
    with pytest.raises(InvalidParameter, match=r"\.png or \.svg"):
        histogram_picture(comparison.all_results, tmp_path / "h.pdf")


def test_every_figure_is_exported_in_every_format(comparison, tmp_path):
    written = export_figures(comparison.all_results, tmp_path / "figures")
    assert {path.name for path in written} == {f"{name}.{kind}" for name in FIGURES for kind in ("svg", "png")}
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == sorted(path.name for path in written)
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG" if path.suffix == ".png" else b"<?xml")
    for name in FIGURES - {"histogram"}:
        assert "Δ-FL 0.5" in (tmp_path / "figures" / f"{name}.svg").read_text()
    # Evaluated on the way: the curves are of the error, not of the training loss.
    assert "error (%)" in (tmp_path / "figures" / "curves.svg").read_text()


def test_a_comparison_and_a_run_write_pdf_with_embedded_truetype_fonts(comparison, run, tmp_path):
    written = comparison.figures(tmp_path / "pdf")
    assert {path.name for path in written} == {f"{name}.pdf" for name in FIGURES}
    for path in written:
        content = path.read_bytes()
        assert content.startswith(b"%PDF")
        # Type 42 is a TrueType font, in a stream FontFile2; Type 3 is what conferences refuse.
        assert b"/FontFile2" in content
        assert b"/Type3" not in content
    again = comparison.figures(tmp_path / "again")
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in written]
    alone = run.figures(tmp_path / "alone", format=["png", "svg"])
    assert {path.suffix for path in alone} == {".png", ".svg"}
    assert {path.stem for path in alone} == FIGURES - OF_SEVERAL - ALL_TRAINED


def test_without_matplotlib_the_cure_is_named(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="matplotlib, which is not installed: pip install matplotlib"):
        run.figures(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_what_there_is_nothing_for_is_not_exported(tmp_path):
    bare = eq.train(softmax(), federated(spread=False), rounds=0, clients_per_round=4)
    assert [path.name for path in export_figures([bare], tmp_path, ["svg"])] == ["histogram.svg", "percentiles.svg"]
    one = eq.train(softmax(), federated(), rounds=2, clients_per_round=4)
    written = export_figures([one], tmp_path, "svg")
    assert {path.stem for path in written} == FIGURES - OF_SEVERAL - ALL_TRAINED
    assert "round's clients" in (tmp_path / "curves.svg").read_text()


@pytest.mark.parametrize("formats", [(), "eps", ("svg", "gif"), 3])
def test_other_formats_are_refused(run, formats, tmp_path):
    with pytest.raises(InvalidParameter, match="pdf, svg, png"):
        export_figures([run], tmp_path / "new", formats)
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_made_is_named(run, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(NotWritten, match=str(tmp_path / "file")):
        export_figures([run], tmp_path / "file", ("svg",))


def test_a_users_matplotlib_settings_neither_reach_the_figures_nor_change(run, tmp_path):
    import matplotlib

    plain = [path.read_bytes() for path in export_figures([run], tmp_path / "a", "svg")]
    with matplotlib.rc_context({"axes.facecolor": "black", "font.size": 30, "svg.fonttype": "path"}):
        assert [path.read_bytes() for path in export_figures([run], tmp_path / "b", "svg")] == plain
        assert matplotlib.rcParams["font.size"] == 30


def test_lines_of_28_methods_differ_in_colour_or_dashes():
    from equipoise.report.palette import colour
    from equipoise.report.static.drawing import dash

    assert len({(colour(index), dash(index)) for index in range(28)}) == 28
    assert dash(0) != dash(1)  # the second is seen where it lies on the first


def test_long_names_that_differ_in_their_middle_differ_in_figures_too(run, tmp_path):
    from equipoise.report.palette import distinct_names

    names = [f"method number {i} with a rather long name of its own" for i in range(1, 10)]
    short = distinct_names(names)
    assert len(set(short)) == 9
    assert all(text.startswith(f"…{i} with") and len(text) <= 28 for i, text in enumerate(short, start=1))
    one_word = ["x" * 20 + str(i) + "y" * 20 for i in (1, 2)]
    assert [text[:3] for text in distinct_names(one_word)] == ["1: ", "2: "]
    assert distinct_names(["FedAvg", "Δ-FL 0.5"]) == ["FedAvg", "Δ-FL 0.5"]
    written = export_figures([replace(run, name=name) for name in names[:2]], tmp_path, "svg")
    drawn = next(path for path in written if path.stem == "percentiles").read_text()
    assert "…1 with" in drawn
    assert "…2 with" in drawn
