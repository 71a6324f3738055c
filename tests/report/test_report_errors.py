"""Tables and pages say which error they show, and of which column."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from report_cases import Page
from torch import nn

import equipoise as eq
from equipoise.core.error_names import error_name
from equipoise.core.task import Task
from equipoise.errors import InvalidParameter
from equipoise.experiment.folder import read_record
from equipoise.report import write_report
from equipoise.report.data.over_seeds import covered_by_seeds
from equipoise.report.data.results_by_method import Study

ROW = np.arange(120)
PRICES = pd.DataFrame({"shop": [f"s{row % 8}" for row in ROW], "a": np.sin(ROW), "b": np.cos(3 * ROW)})
PRICES["price"] = 50 + 9 * PRICES["a"] + ROW % 8
DEAR = PRICES.assign(dear=np.where(PRICES["price"] > 53, "yes", "no")).drop(columns="price")


def mean_absolute_error(outputs, targets):
    return (outputs - targets).abs()


def trained(frame=PRICES, target="price", **options):
    data = eq.data.from_frame(frame, client="shop", target=target, split_by="examples")
    return eq.train(eq.models.Tabular(data.schema, hidden=()), data, rounds=2, clients_per_round=4, progress=False, **options)


@pytest.mark.parametrize(
    ("options", "named", "meant"),
    [
        ({}, "squared error of price", "(prediction − price)², averaged over a client's examples"),
        ({"error": nn.L1Loss(reduction="none")}, "absolute error of price", "|prediction − price|, averaged"),
        (
            {"error": mean_absolute_error},
            "mean_absolute_error of price",
            "mean_absolute_error, averaged over a client's examples",
        ),
        ({"frame": DEAR, "target": "dear"}, "0-1 error", "the share of a client's examples that the model gets wrong"),
    ],
)
def test_tables_and_pages_name_the_error(tmp_path, options, named, meant):
    run = trained(**options)
    assert run.measured == named
    assert "error: " in str(run.summary())
    assert meant in str(run.summary())
    title = named if options.get("error") is mean_absolute_error else named[0].upper() + named[1:]
    assert eq.Comparison({"run": [run]}).summary().startswith(f"{title} over 8 test clients, 1 seed")
    page = Page(run.report(tmp_path / "r.html"))
    assert page.by_id["table-numbers-caption"].startswith(f"{title} over 8 test clients")
    assert named in page.source
    assert meant in page.source.replace("&#x27;", "'").replace("\u00a0", " ")
    assert "the mean error over" not in page.source
    run.save(tmp_path / "run")
    stored = read_record(tmp_path / "run")
    assert (stored.measured, stored.error_name, stored.target) == (named, run.error_name, run.target)


def test_errors_of_a_number_are_never_percent(tmp_path):
    """They may well lie between 0 and 1."""
    run = trained(PRICES.assign(price=PRICES["price"] / 1000))
    assert bool((run.clients.error < 1).all())
    assert "Squared error of price over 8 test clients; one seed" in Page(run.report(tmp_path / "r.html")).source


def labels_of_points(labels: int):
    """40 points of 4 clients, each with several labels."""
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    y = (x @ torch.randn(3, labels, generator=torch.Generator().manual_seed(1)) > 0.5).float()
    return eq.data.from_arrays(x, y, [f"c{row % 4}" for row in range(40)], split_by="examples", test=0.5)


def mean_of_labels(outputs, targets):
    return nn.functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none").mean(1)


@pytest.mark.parametrize("labels", [1, 5])
def test_errors_of_several_labels_count_labels_and_not_examples(labels, tmp_path):
    data = labels_of_points(labels)
    run = eq.train(nn.Linear(3, labels), data, rounds=1, clients_per_round=2, loss=mean_of_labels, progress=False)
    named = "Share of wrong labels" if labels > 1 else "0-1 error"
    assert run.measured == named[:1].lower() + named[1:]
    comparison = eq.Comparison({"run": [run]})
    assert comparison.to_latex(percent=True).split("raggedright ")[1].startswith(rf"{named} in \% over 4 test clients")
    assert comparison.summary().startswith(f"{named} over 4 test clients")
    texts = (str(run.summary()), run.report(tmp_path / "r.html").read_text().replace("&#x27;", "'"))
    for text in texts:
        assert ("the share of a client's examples that the model gets wrong" in text) == (labels == 1)
        assert ("an example's wrong labels divided by all its labels" in text) == (labels > 1)
    clients = data.test
    wrong = [((run.model(x) > 0) != (y > 0.5)).double().mean() for x, y in (clients.client(at=k) for k in range(len(clients)))]
    assert run.summary().error.mean == pytest.approx(float(torch.stack(wrong).mean()))


def test_losses_are_named():
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    data = eq.data.from_arrays(x, x.sum(1), [f"c{row % 4}" for row in range(40)], split_by="examples")
    run = eq.train(eq.models.LinearRegression(3), data, rounds=1, clients_per_round=2, progress=False)
    assert eq.Comparison({"run": [run]}).summary().startswith("Loss (squared error) over 4 test clients")


def test_names_of_methods_and_of_functions():
    class Own(nn.Module):
        def error(self, outputs, targets): ...

    assert error_name(Own().error, "Own") == "Own.error"
    assert error_name(lambda outputs, targets: 0) == "own error"
    assert error_name(mean_absolute_error) == "mean_absolute_error"


def test_functions_called_error_or_loss_are_not_methods_of_the_model():
    def error(outputs, targets):
        return (outputs[:, 0] - targets).abs()

    def loss(outputs, targets):
        return (outputs[:, 0] - targets) ** 2

    class Own(nn.Linear):
        def loss(self, outputs, targets):
            return loss(outputs, targets)

    def named(model, **options):
        return Task.of(model, **options).error_name

    assert named(nn.Linear(2, 1), error=error) == "own error"
    assert named(nn.Linear(2, 1), loss=loss, error=error) == "own error"
    assert named(nn.Linear(2, 1), loss=loss) == "own loss"
    assert named(nn.Linear(2, 1), loss=lambda outputs, targets: loss(outputs, targets)) == "own loss"
    assert named(Own(2, 1)) == "Own.loss"
    assert named(Own(2, 1), error=error) == "own error"
    assert named(Own(2, 1), loss=loss) == "own loss"


def test_the_headline_says_that_a_method_is_no_better_than_the_trivial_answer(tmp_path):
    run = trained()
    table = replace(run.clients, trivial_error=torch.zeros(len(run.clients)).double())
    page = Page(replace(run, clients=table).report(tmp_path / "r.html"))
    assert "are no better than those of the trivial answer (mean of the targets), 0" in page.headline
    table = replace(run.clients, trivial_error=torch.full((len(run.clients),), 1e6).double())
    assert "trivial" not in Page(replace(run, clients=table).report(tmp_path / "r.html")).headline


def test_clients_with_few_examples_are_marked(tmp_path):
    small = PRICES[(PRICES["shop"] != "s3") | (ROW < 24)]  # three rows of s3, one of which is tested on
    run = trained(small)
    table = replace(run.clients, error=torch.where(run.clients.size == 1, 1e4, run.clients.error))
    run, other = replace(run, clients=table), replace(run, name="other")
    words = "* fewer than 30 test examples: much of this number may be chance."
    for runs, names in (([run], ["table-worst"]), ([run, other], ["left-behind", "gain-1"])):
        page = Page(write_report(runs, tmp_path / "r.html"))
        for name in names:
            header, first, *others = page.rows[name]
            assert (first[0], first[header.index("examples")]) == ("s3", "1 *")
            assert all(
                "*" not in each[header.index("examples")]
                for each in others
                if int(each[header.index("examples")].split()[0]) >= 30
            )
            assert page.by_id[f"{name}-caption"].endswith(words)
    run.export(tmp_path / "m.safetensors")
    card = (tmp_path / "m.card.md").read_text(encoding="utf-8")
    assert "Those that fare worst: s3 (1" in card
    assert "(* fewer than 30 test examples: much of this number may be chance)" in card
    many = pd.concat([PRICES.assign(a=PRICES["a"] + k) for k in range(12)])
    enough = Page(trained(many).report(tmp_path / "r.html"))
    assert "may be chance" not in enough.source


def test_the_summary_of_one_run_has_the_trivial_answer():
    run = trained()
    found, lines = run.summary(), str(run.summary()).splitlines()
    errors = run.clients.where("test").trivial_error
    assert found.trivial_error.mean == pytest.approx(float(errors.mean()))
    assert lines[0].split()[-4:] == ["error", "loss", "trivial", "error"]
    assert float(lines[1].split()[-1]) == pytest.approx(float(errors.mean()), abs=1e-4)
    assert lines[-3] == "trivial error: the same answer for every example, the mean of the targets of training."
    assert lines[-2] == "All 8 test clients have fewer than 30 examples: much of their error may be chance."


def test_a_change_of_a_client_is_one_number(tmp_path):
    """0.1804 to 0.1626 is −1.8 points, though 18.0 and 16.3 are 1.7 apart."""
    run = trained(DEAR, "dear")
    table = run.clients.where("test")
    first, second = (
        replace(run, name=name, clients=replace(table, error=torch.tensor([error, *[0.1] * 7], dtype=torch.float64)))
        for name, error in (("first", 0.1804), ("second", 0.1626))
    )
    page = Page(write_report([first, second], tmp_path / "r.html"))
    assert page.rows["gain-1"][1][1:4] == ["−1.8", "18.0", "16.3"]
    assert page.rows["left-behind"][1][-1] == "16.3 −1.8"


def test_intervals_of_errors_do_not_go_below_0(tmp_path):
    run = trained(error=mean_absolute_error)
    table = replace(run.clients.where("test"), error_deviation=None, error_skewness=None)  # intervals are by the seeds
    runs = [
        replace(run, seed=seed, clients=replace(table, error=torch.tensor([error, *[1.0] * 7], dtype=torch.float64)))
        for seed, error in enumerate((2.0, 20.0, 45.0))
    ]
    page = Page(write_report(runs, tmp_path / "r.html"))
    assert page.rows["table-worst"][1][2].split() == ["22.3", "0.0", "to", "76.0"]
    below = [replace(each, clients=replace(each.clients, error=each.clients.error - 1.5)) for each in runs]
    assert "−" in Page(write_report(below, tmp_path / "r.html")).rows["table-worst"][1][2]


def test_messages_name_the_cure():
    data = eq.data.from_frame(PRICES, client="shop", target="price", split_by="examples")
    model = eq.models.Tabular(data.schema, hidden=())
    words = r"For all 8 clients: clients_per_round=len\(data.train\), or Algorithm\(sampler=sampling.Full\(\)\)\."
    with pytest.raises(InvalidParameter, match=words):
        eq.train(model, data, rounds=1, progress=False)
    ditto = eq.Algorithm(personal=eq.personal.Ditto(strength=0.5))
    run = eq.train(model, data, ditto, rounds=1, clients_per_round=4, progress=False)
    with pytest.raises(InvalidParameter, match=r"Known are s0, s1, s2, s3, s4, …\. A client .* shared model: result\.model\."):
        run.personal.model("Shop 99")


def test_a_model_no_better_than_the_trivial_answer_is_said_so_in_words():
    run = trained(error=mean_absolute_error)
    table = run.clients.where("test")
    for factor, said in ((2.0, True), (0.5, False)):
        text = str(replace(run, clients=replace(table, error=factor * table.trivial_error)).summary())
        assert ("are no better than those of the trivial answer (mean of the targets)" in text) is said
    top = float(table.trivial_error.max())
    worse = str(replace(run, clients=replace(table, error=2 * table.trivial_error)).summary())
    assert f" and {2 * top:.4f}, are no better" in worse


def test_a_comparison_names_the_methods_that_are_no_better_than_the_trivial_answer():
    run = trained(error=mean_absolute_error)
    table = run.clients.where("test")
    top = float(table.trivial_error.max())  # the 90th percentile of eight clients is the largest error

    def times(*factors):
        made = [replace(run, clients=replace(table, error=f * table.trivial_error), name=f"× {f:g}") for f in factors]
        return {each.name: [each] for each in made}

    ending, middle = (
        f"no better than that of the trivial answer (mean of the targets), {top:.3f}.",
        float(table.trivial_error.mean()),
    )
    both = (
        f"{2 * middle:.3f} and {2 * top:.3f}, are no better than those of the trivial answer (mean of the targets), "
        f"{middle:.3f} and {top:.3f}."
    )
    for methods, said in (
        (times(0.5, 0.9), ""),
        (times(2), f"and the 90th percentile, {both}"),
        (times(0.5, 2), f"and the 90th percentile of × 2, {both}"),
        (times(1, 0.5, 2), f"The 90th percentiles of × 1 ({top:.3f}) and × 2 ({2 * top:.3f}) are {ending}"),
    ):
        text = eq.Comparison(methods).summary()
        assert text.count("no better") == bool(said)
        assert said in text


def test_axes_name_the_error_and_the_note_has_no_code(tmp_path):
    run = trained(error=mean_absolute_error)
    study = Study.of([run])
    assert study.axis_name == f"{run.measured}"
    assert "price" in study.axis_name
    page = Page(run.report(tmp_path / "r.html"))
    assert "fewer than 30 examples" in page.by_id["note"]
    assert "at_least" not in page.by_id["note"]
    assert page.rows["table-numbers"][1][0] == "this model"


def test_an_interval_over_splits_of_one_table_is_said_to_be_too_narrow():
    def made(change=""):
        def data(seed):
            frame = PRICES[: 120 - seed * (change == "rows")]
            return eq.data.from_frame(frame, client="shop", target="price", split_by="examples", seed=seed)

        runs = [
            eq.train(eq.models.Tabular(data(seed).schema, hidden=()), data(seed), rounds=1, clients_per_round=4, seed=seed,
                     progress=False)
            for seed in (0, 1)
        ]  # fmt: skip
        return covered_by_seeds([replace(run, data_version=str(run.seed)) for run in runs])  # as compare sets it

    assert made().endswith("Seeds split the same rows again, so this interval is somewhat too narrow")
    assert "too narrow in general if the data of seeds share clients" in made("rows")
