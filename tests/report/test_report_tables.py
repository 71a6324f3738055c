"""Text tables and tables for papers: their figures, who is left out, and that names are safe in Markdown and LaTeX."""

import math
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from report_cases import DITTO, inside, joined, known, numbers, softmax
from torch import nn

import equipoise as eq
from equipoise.client_table import ClientTable
from equipoise.compare import Comparison
from equipoise.core.error_names import error_name
from equipoise.errors import InvalidParameter
from equipoise.experiment.folder import read_record
from equipoise.report import write_table
from equipoise.report.notices import size_notices
from equipoise.report.paper_tables import HEADINGS
from equipoise.subgroups import subgroup_lines


@pytest.fixture(scope="module")
def made():
    data = eq.data.label_shift(train_clients=8, validation_clients=4, test_clients=6, examples=20)
    methods = {"Fed_Avg": eq.Algorithm(), "Δ-FL 50 %": eq.Algorithm(risk=eq.risk.Superquantile(tail=0.5))}
    f1 = {"f1": eq.metrics.macro_f1}
    return eq.compare(methods, eq.models.Softmax(20, 10), data, rounds=2, clients_per_round=3, seeds=3, metrics=f1)


def with_known(comparison, *errors):
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


def test_numbers_are_mean_and_deviation_with_n_minus_1_over_seeds(made):
    # Means 0.35 and 0.45: mean 0.4, deviation √(2 · 0.05² / 1) = 0.0707. The largest of six are 0.6 and 0.7.
    two = with_known(made, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
    assert cells(two.to_markdown(figures=["mean", "percentile_95", "percentile_50", "worst_10"], trivial=False)) == [
        ["method", "mean", "95th percentile", "50th percentile", "worst 10 %"],
        ["known", "0.400 ± 0.071", "0.650 ± 0.071", "0.350 ± 0.071", "0.650 ± 0.071"],
    ]
    latex = two.to_latex(figures=["mean", "variance", "gini"], percent=True, trivial=False).splitlines()
    # The variance over clients is 35/1200 = 2.917 %² · 100 in both seeds; Gini is (35/6)/(36 · 0.35) and over 0.45.
    gini = [0.35 / 6 / 0.35 / 0.6, 0.35 / 6 / 0.45 / 0.6]
    mean, deviation = sum(gini) / 2, abs(gini[0] - gini[1]) / math.sqrt(2)
    row = rf"known & 40.0 $\pm$ 7.1 & 291.7 $\pm$ 0.0 & {mean:.3f} $\pm$ {deviation:.3f} \\"
    assert latex[latex.index(r"\bottomrule") - 1] == row
    assert cells(with_known(made, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]).to_markdown(figures="mean", digits=2, trivial=False))[1] == [
        "known", "0.35",
    ]  # fmt: skip


def test_latex_is_a_tabular_of_booktabs_with_names_escaped(made):
    text = made.to_latex()
    assert all(line.count("%") == line.count(r"\%") for line in text.splitlines())  # no sign hides the rest of its line
    assert r"Fed\_Avg &" in text
    assert r"$\Delta$-FL 50 \% &" in text
    body = text.splitlines()
    assert body[:2] == [r"\begin{tabular}{lrrrr}", r"\toprule"]
    assert body[-4:-1] == [r"\bottomrule", r"\end{tabular}", r"\par\smallskip"]
    assert body[-1].startswith(r"{\footnotesize\raggedright 0-1 error over")  # readers of the PDF see it: it is no comment
    assert "at_least" not in text  # a reader of a paper cannot give it
    assert all(line.count(" & ") == 4 for line in body if line.endswith(r"\\"))
    assert [row[0] for row in cells(made.to_markdown())] == ["method", r"Fed\_Avg", "Δ-FL 50 %", "most frequent class"]
    assert "most frequent" not in made.to_markdown(trivial=False)
    assert "most frequent" not in made.to_latex(column="loss")
    assert made.to_latex(baseline="Fed_Avg").count(r"\begin{tabular}") == 2


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_every_split_has_its_own_figures(made, split):
    means = [run.summary(split).error.mean for run in made.results["Fed_Avg"]]
    assert made.table(split)["Fed_Avg"]["mean"].mean == pytest.approx(sum(means) / 3, abs=1e-12)
    assert cells(made.to_markdown(split, figures=["mean"]))[1][1].startswith(f"{sum(means) / 3:.3f}")
    row = next(line for line in made.summary(split).splitlines() if line.startswith("Fed_Avg"))
    assert numbers(row)[0] == pytest.approx(sum(means) / 3, abs=5e-4)


def test_metrics_have_their_worst_end_where_more_is_better(made):
    text = made.to_markdown("train", column="f1", figures=["percentile_90", "worst_10"])
    runs = [run.summary("train").metrics["f1"] for run in made.results["Fed_Avg"]]
    expected = [sum(run.tail_90 for run in runs) / 3, sum(run.worst_10 for run in runs) / 3]
    assert [cell.split(" ± ")[0] for cell in cells(text)[1][1:]] == [f"{value:.3f}" for value in expected]
    rows = cells(made.to_markdown(figures=HEADINGS))
    assert rows[0][1:] == list(HEADINGS.values())
    assert all(re.match(r"−?\d|–", cell) for cell in rows[1][1:])


def test_what_a_table_cannot_have_is_refused(made, tmp_path):
    for options, parameter in [
        ({"figures": ["median"]}, "figures"), ({"figures": []}, "figures"), ({"column": "auc"}, "column"),
        ({"split": "tests"}, "split"), ({"digits": -1}, "digits"), ({"percent": 1}, "percent"),
        ({"column": "loss", "percent": True}, "percent"),
    ]:  # fmt: skip
        with pytest.raises(InvalidParameter) as caught:
            made.to_markdown(**options)
        assert caught.value.parameter == parameter
    written = write_table(made.all_results, tmp_path / "t.tex").read_text()
    assert written == made.to_latex(percent=True) + "\n"
    with pytest.raises(InvalidParameter, match=r"\.md or \.tex"):
        write_table(made.all_results, tmp_path / "t.csv")
    small = with_known(made, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    squared = Comparison({"known": [replace(run, error_name="squared error") for run in small.all_results]})
    loss = Comparison({"known": [replace(run, error_is_loss=True) for run in small.all_results]})
    for numeric, mean in ((with_known(made, [0.1, 2.0, 0.3, 0.4, 0.5, 0.6]), "0.650"), (squared, "0.350"), (loss, "0.350")):
        with pytest.raises(InvalidParameter, match="percent"):
            numeric.to_latex(percent=True)
        assert cells(write_table(numeric.all_results, tmp_path / "t.md").read_text())[1][1] == mean


def test_own_and_shared_models_in_text_tables(attacked):
    one = Comparison({name: runs[:1] for name, runs in attacked.results.items()})
    columns = {name: runs[0].clients.where("test") for name, runs in one.results.items()}
    benign = ~columns["Ditto"].malicious
    _, _, plain, ditto, shared, *_ = one.summary().splitlines()
    assert shared.startswith("  shared model")
    for line, errors in (
        (plain, columns["FedAvg"].error),
        (ditto, columns["Ditto"].personal_error),
        (shared, columns["Ditto"].error),
    ):
        assert numbers(line)[0] == pytest.approx(float(errors[benign].mean()), abs=0.00051)
    told = {each.code: each.fields for each in one.results["Ditto"][0].summary().notices}
    worse = int((columns["Ditto"].personal_error > columns["Ditto"].error)[benign].sum())
    assert (told["own-worse"]["worse"], told["own-worse"]["known"]) == (str(worse), str(int(benign.sum())))
    assert told["attack"] == {"bad": str(int((~benign).sum())), "all": "20"}
    run = eq.train(softmax(), inside(), DITTO, rounds=2, clients_per_round=6, name="Ditto")
    assert f"| Ditto | {run.summary().error.mean:.3f} |" in Comparison({"Ditto": [run]}).to_markdown()


def test_subgroups_have_lines(trained):
    regions = {"region": ("north", "south") * 6}
    rows = replace(trained.all_results[0].clients.where("test"), error=torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6]).double())
    run = replace(trained.all_results[0], clients=replace(rows, attributes={"region": regions["region"][:6]}))
    lines = subgroup_lines({"a": [run]}, percent=True)
    assert [line.split()[1:4] for line in lines[2:]] == [["south", "(3)", "40.0"], ["north", "(3)", "30.0"]]
    assert subgroup_lines({"a": trained.all_results}) == []


# ------------------------------------------------------------------------------------------------------- which error it is

ROW = np.arange(240)
PRICES = pd.DataFrame({"shop": [f"s{k % 8}" for k in ROW], "a": ROW * 37 % 11, "price": 50.0 + ROW * 37 % 11 + ROW % 3})


def mean_absolute_error(outputs, targets):
    return (outputs - targets).abs()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "squared error of price"),
        ({"error": nn.L1Loss(reduction="none")}, "absolute error of price"),
        ({"error": mean_absolute_error}, "mean_absolute_error of price"),
    ],
)
def test_tables_name_the_error_and_numbers_are_never_percent(tmp_path, options, named):
    prices = PRICES.assign(price=PRICES["price"] / 1000)  # errors that lie between 0 and 1
    data = eq.data.from_frame(prices, client="shop", target="price", split_by="examples")
    run = eq.train(eq.models.Tabular(data.schema, hidden=()), data, rounds=2, clients_per_round=4, progress=False, **options)
    assert run.measured == named
    assert bool((run.clients.error < 1).all())
    run.save(tmp_path / "run")
    stored = read_record(tmp_path / "run")
    assert (stored.measured, stored.error_name, stored.target) == (named, run.error_name, run.target)
    assert torch.equal(stored.clients.trivial_error, run.clients.trivial_error)
    assert error_name(lambda outputs, targets: 0) == "own error"


def test_the_median_and_the_mean_as_trivial_answers():
    """By hand: targets 0, 0, 0, 1 and 9 have the mean 2 and the median 0, whose mean absolute error is 2 and not 2.8."""
    x, y = torch.randn(5, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([0.0, 0.0, 0.0, 1.0, 9.0])
    data = eq.data.from_arrays(torch.cat([x, x]), torch.cat([y, y]), ["a"] * 5 + ["b"] * 5, test=0.0)
    doubted = {}
    for error, answer, wanted in (
        (nn.L1Loss(reduction="none"), "median", 2.0),
        (mean_absolute_error, "mean", 2.8),
        (None, "mean", 12.4),
    ):
        run = eq.train(eq.models.LinearRegression(2), data, rounds=1, clients_per_round=2, error=error, progress=False)
        assert run.clients.trivial_answer == f"{answer} of the targets"
        assert run.clients.trivial_error.tolist() == pytest.approx([wanted] * 2)
        doubted[error] = "need not be the best constant" in str(run.summary())
    assert list(doubted.values()) == [False, True, False]


# ------------------------------------------------------------------------------------------------- few clients, few examples

SIZES = [3, 4, 6, 40, 50, 60, 70, 100]
ERRORS = [1 / 3, 1.0, 1 / 2, 0.1, 0.2, 0.1, 0.3, 0.2]


def rows(split, sizes, errors, **more):
    names = tuple(f"{split[:2]}{k}" for k in range(len(sizes)))
    error = torch.tensor(errors, dtype=torch.float64)
    return ClientTable(names, (split,) * len(sizes), error < 0, torch.tensor(sizes), error, error, **more)


@pytest.fixture
def some(trained):
    run = trained.all_results[0]
    return replace(run, clients=joined(rows("train", [1, 2], [0.5, 0.5]), rows("test", SIZES, ERRORS)))


def told(run):
    return {each.code: each.fields for each in size_notices([run])}


def test_small_clients_are_left_out_on_request_and_told_of_else(some):
    found = some.summary(at_least=30)
    # Errors of the five clients with 40 examples or more: 0.1, 0.2, 0.1, 0.3, 0.2.
    assert (found.error.clients, found.error.percentiles[90]) == (5, 0.3)
    assert found.error.mean == pytest.approx(0.18)
    assert some.summary().error.percentiles[90] == 1.0  # of eight clients the eighth, which has four examples
    assert told(some)["small-clients"] == {"kind": "Test clients", "limit": 30, "few": "3", "all": "8"}
    judged = some.judged_by(at_least=30)
    assert told(judged)["left-out"] == {"kind": "Test clients", "limit": 30, "few": "3", "all": "8"}
    # Errors of those left out: (1/3 + 1 + 1/2) / 3 = 0.611; of the others 0.18.
    twice = some.judged_by(at_least=4).judged_by(at_least=30)
    for each in (judged, twice):
        assert told(each)["left-out-worse"] == {"noun": "error", "theirs": "61.1 %", "others": "18.0 %"}
    alike = replace(some, clients=rows("test", [3, 40, 50], [1.9, 0.98, 1.0]))
    assert "left-out-worse" not in told(alike.judged_by(at_least=30))
    assert told(replace(some, clients=rows("test", [30, 31] * 5, [0.1, 0.0] * 5))) == {}
    bad = rows("test", SIZES, ERRORS, malicious=torch.tensor([True, *[False] * 6, True]))
    assert told(replace(some, clients=bad))["small-clients"]["few"] == "2"  # malicious clients are not counted


def test_training_clients_stay_unless_they_are_judged(some):
    assert some.judged_by(at_least=30).clients.split.count("train") == 2
    assert some.summary("train", at_least=2).error.clients == 1
    both = replace(some, clients=joined(rows("validation", [5, 50], [0.2, 0.4]), rows("test", SIZES, ERRORS)))
    assert both.judged_by(at_least=30).summary("validation").error.clients == 1
    assert both.summary("validation", at_least=6).error.mean == 0.4
    for bad in (-1, 2.5, True, "30", 101):
        with pytest.raises(InvalidParameter, match="at_least"):
            some.summary(at_least=bad)
    means = replace(some, clients=replace(rows("test", [80], [0.2]), client=("mean of 8 clients",)))
    assert told(means) == {}
    with pytest.raises(InvalidParameter, match="at_least"):
        means.summary(at_least=30)


def test_a_comparison_takes_the_same_threshold_everywhere(trained, tmp_path):
    shifts = {("FedAvg", 0): 0.0, ("FedAvg", 1): 0.02, ("tail", 0): 0.1, ("tail", 1): 0.1}
    results = {"FedAvg": [], "tail": []}
    for (name, seed), shift in shifts.items():
        run = trained.results["FedAvg"][seed]
        table = rows("test", SIZES, [*ERRORS[:5], *(error + shift for error in ERRORS[5:])])
        results[name].append(replace(run, name=name, clients=table))
    comparison = Comparison(results)
    assert comparison.table(at_least=30)["FedAvg"]["percentile_90"].mean == pytest.approx((0.3 + 0.32) / 2)
    # Among all clients the one with four examples decides the percentile under both methods.
    assert comparison.differences()["tail"].values == (0.0, 0.0)
    assert comparison.differences(at_least=30)["tail"].values == pytest.approx((0.1, 0.08))
    for text in (comparison.summary(at_least=30), comparison.to_markdown(at_least=30, baseline="FedAvg")):
        assert "over 5 unseen test clients with 30 examples or more" in text
    page = comparison.report(tmp_path / "r.html", at_least=30).read_text()
    assert "te0" not in page
    assert "te0" in comparison.report(tmp_path / "r.html").read_text()


def test_of_fewer_than_ten_clients_the_90th_percentile_is_the_worst(some):
    def judged_on(count, split="test"):
        return replace(some, clients=rows(split, [40] * count, [k / 100 for k in range(1, count + 1)]))

    # By the definition: 8 of 9 clients are 88.9 %, less than 90 %; 9 of 10 are 90 %.
    nine, ten = judged_on(9), judged_on(10)
    assert nine.summary().error.percentiles[90] == ten.summary().error.percentiles[90] == 0.09
    assert told(nine) == {"few-clients": {"count": "9"}}
    assert told(ten) == told(judged_on(2, "train")) == {}  # training clients count by their examples
    assert size_notices([judged_on(7), judged_on(20), judged_on(8)])[0].fields == {"count": "7 to 8"}


def test_evaluation_of_a_family_and_signs(trained):
    data = eq.data.label_shift(train_clients=6, validation_clients=0, test_clients=4, examples=20)
    family = eq.train_family(eq.models.Softmax(20, 10), data, tails=[1.0, 0.5], rounds=1, clients_per_round=3)
    assert "half of their examples" in family.comparison().summary().splitlines()[0]
    table = replace(trained.all_results[0].clients.where("test"), loss=torch.full((6,), -1e-9, dtype=torch.float64))
    assert "-0.0000" not in str(replace(trained.all_results[0], clients=table).summary())
    assert known(trained.all_results[0], None, [0.25] * 3).summary().error.mean == 0.25
