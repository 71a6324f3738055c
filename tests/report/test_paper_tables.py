"""Tables for papers: Markdown and LaTeX with the figures that the clients' table gives."""

import math
import re
from dataclasses import replace

import pytest
import torch
from report_cases import DITTO, inside, softmax

import equipoise as eq
from equipoise.compare import Comparison
from equipoise.report import write_table
from equipoise.report.text.paper_tables import HEADINGS


@pytest.fixture(scope="module")
def comparison():
    data = eq.data.label_shift(train_clients=8, validation_clients=4, test_clients=6, examples=20)
    methods = {"Fed_Avg": eq.Algorithm(), "Δ-FL 50 %": eq.Algorithm(risk=eq.risk.Superquantile(tail=0.5))}
    f1 = {"f1": eq.metrics.macro_f1}
    return eq.compare(methods, eq.models.Softmax(20, 10), data, rounds=2, clients_per_round=3, seeds=3, metrics=f1)


def known(comparison, *errors):
    """The comparison's first method with known errors of the six test clients, one list per seed."""
    runs = []
    for run, values in zip(comparison.results["Fed_Avg"], errors, strict=False):
        rows = run.clients.where("test")
        runs.append(replace(run, clients=replace(rows, error=torch.tensor(values, dtype=torch.float64))))
    return Comparison({"known": runs})


def cells(text):
    """The rows of a Markdown table as lists of cells, none of them bold, without the line below the headings."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("*") for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in (rows[0], *rows[2:])]


def test_numbers_are_mean_and_deviation_with_n_minus_1_over_seeds(comparison):
    # Means 0.35 and 0.45: mean 0.4, deviation √(2 · 0.05² / 1) = 0.0707. The largest of six are 0.6 and 0.7.
    made = known(comparison, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
    text = made.to_markdown(figures=["mean", "percentile_95", "percentile_50", "worst_10"], trivial=False)
    over = "mean ± standard deviation over 2 seeds, the same split for all seeds"
    assert text.startswith(f"0-1 error over 6 unseen test clients, {over}.\n\n| method |")
    assert cells(text) == [
        ["method", "mean", "95th percentile", "50th percentile", "worst 10 %"],
        ["known", "0.400 ± 0.071", "0.650 ± 0.071", "0.350 ± 0.071", "0.650 ± 0.071"],
    ]
    latex = made.to_latex(figures=["mean", "variance", "gini"], percent=True, trivial=False).splitlines()
    # The variance over clients is 35/1200 = 2.917 %² · 100 in both seeds; Gini is (35/6)/(36 · 0.35) and over 0.45.
    gini = [0.35 / 6 / 0.35 / 0.6, 0.35 / 6 / 0.45 / 0.6]
    mean, deviation = sum(gini) / 2, abs(gini[0] - gini[1]) / math.sqrt(2)
    assert (
        latex[latex.index(r"\bottomrule") - 1]
        == rf"known & 40.0 $\pm$ 7.1 & 291.7 $\pm$ 0.0 & {mean:.3f} $\pm$ {deviation:.3f} \\"
    )
    one = known(comparison, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert cells(one.to_markdown(figures="mean", digits=2, trivial=False))[1] == ["known", "0.35"]


def test_a_table_has_the_trivial_answer_unless_it_is_not_wanted(comparison):
    assert [row[0] for row in cells(comparison.to_markdown())] == ["method", r"Fed\_Avg", "Δ-FL 50 %", "most frequent class"]
    assert "most frequent" not in comparison.to_markdown(trivial=False)
    assert "most frequent" not in comparison.to_latex(column="loss")


def test_latex_is_a_tabular_of_booktabs_with_names_escaped(comparison):
    text = comparison.to_latex()
    assert all(line.count("%") == line.count(r"\%") for line in text.splitlines())  # no sign hides the rest of its line
    assert r"Fed\_Avg &" in text
    assert r"$\Delta$-FL 50 \% &" in text
    body = text.splitlines()
    assert "0-1 error over" in body[-1]
    assert r"mean $\pm$ standard deviation over 3 seeds" in body[-1]  # readers of the PDF see it: it is no comment
    assert "test clients have fewer than 30 examples: much of their error may be chance" in body[-1]
    assert re.search(r"[Bb]old", body[-1])  # readers of the PDF see what bold means: it is no comment
    assert body[-1].startswith(r"{\footnotesize\raggedright ")
    assert body[-1].endswith(r"\par}")
    assert body[:2] == [r"\begin{tabular}{lrrrr}", r"\toprule"]
    assert body[-4:-1] == [r"\bottomrule", r"\end{tabular}", r"\par\smallskip"]
    assert all(line.count(" & ") == 4 for line in body if line.endswith(r"\\"))


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_every_split_has_its_own_figures(comparison, split):
    means = [run.summary(split).error.mean for run in comparison.results["Fed_Avg"]]
    assert comparison.table(split)["Fed_Avg"]["mean"].mean == pytest.approx(sum(means) / 3, abs=1e-12)
    assert comparison.results["Fed_Avg"][0].summary(split).who in comparison.summary(split).splitlines()[0]
    assert cells(comparison.to_markdown(split, figures=["mean"]))[1][1].startswith(f"{sum(means) / 3:.3f}")
    if split == "test":
        assert comparison.summary(split) == comparison.summary()


def test_metrics_have_their_worst_end_where_more_is_better(comparison):
    text = comparison.to_markdown("train", column="f1", figures=["percentile_90", "worst_10"])
    assert text.startswith("f1 (more is better) over 8 train clients")
    runs = [run.summary("train").metrics["f1"] for run in comparison.results["Fed_Avg"]]
    expected = [sum(run.tail_90 for run in runs) / 3, sum(run.worst_10 for run in runs) / 3]
    assert [cell.split(" ± ")[0] for cell in cells(text)[1][1:]] == [f"{value:.3f}" for value in expected]


def test_every_heading_is_a_figure(comparison):
    rows = cells(comparison.to_markdown(figures=HEADINGS))
    assert rows[0][1:] == list(HEADINGS.values())
    assert all(re.match(r"−?\d|–", cell) for cell in rows[1][1:])


def test_what_a_table_cannot_have_is_refused(comparison):
    for options, what in [
        ({"figures": ["median"]}, "figures must be some of mean"),
        ({"figures": []}, "figures must be some of mean"),
        ({"column": "auc"}, "column must be one of error, loss, f1"),
        ({"split": "tests"}, "split must be one of test, train, validation"),
        ({"digits": -1}, "digits must be"),
        ({"percent": 1}, "percent must be True or False"),
        ({"column": "loss", "percent": True}, "percent must be False for the column 'loss', whose values are no shares"),
    ]:
        with pytest.raises(eq.errors.InvalidParameter, match=what):
            comparison.to_markdown(**options)


def test_errors_of_numbers_are_not_in_percent(comparison, tmp_path):
    numbers = known(comparison, [0.1, 2.0, 0.3, 0.4, 0.5, 0.6])  # mean 0.65
    small = known(comparison, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    squared = Comparison({"known": [replace(run, error_name="squared error") for run in small.all_results]})
    loss = Comparison({"known": [replace(run, error_is_loss=True) for run in small.all_results]})
    for made, mean in ((numbers, "0.650"), (squared, "0.350"), (loss, "0.350")):
        with pytest.raises(eq.errors.InvalidParameter, match="percent must be False for the column 'error'"):
            made.to_latex(percent=True)
        text = write_table(made.all_results, tmp_path / "t.md").read_text()
        assert "in %" not in text.splitlines()[0]
        assert cells(text)[1][1] == mean
    assert "f1 in % (more is better)" in comparison.to_markdown(column="f1", percent=True)


def test_a_table_says_whose_models_it_judges():
    run = eq.train(softmax(), inside(), DITTO, rounds=2, clients_per_round=6, name="Ditto")
    text = Comparison({"Ditto": [run]}).to_markdown()
    rows = run.clients.where("test")
    worse = int((rows.personal_error > rows.error).sum())
    said = f" Own models have a larger error than the shared model for {worse} of 20 clients." if worse else ""
    assert f"\n\nUnder Ditto, clients are served their own models.{said} All 20 test clients have fewer than 30 examp" in text
    assert f"| Ditto | {run.summary().error.mean:.3f} |" in text


def test_a_table_is_written_by_the_suffix(comparison, tmp_path):
    written = write_table(comparison.all_results, tmp_path / "t.tex").read_text()
    assert written == comparison.to_latex(percent=True) + "\n"
    assert write_table(comparison.all_results, tmp_path / "t.md").read_text() == comparison.to_markdown(percent=True) + "\n"
    with pytest.raises(eq.errors.InvalidParameter, match=r"must end in \.md or \.tex"):
        write_table(comparison.all_results, tmp_path / "t.csv")
