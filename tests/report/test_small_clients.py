"""Clients with few examples: where figures say so, and figures that leave them out."""

from dataclasses import replace

import pytest
import torch
from report_cases import Page

import equipoise as eq
from equipoise.client_table import ClientTable
from equipoise.compare import Comparison
from equipoise.errors import InvalidParameter
from equipoise.small_clients import small_clients_words

SIZES = [3, 4, 10, 40, 40, 50, 60, 100]
ERRORS = [1 / 3, 1.0, 0.5, 0.1, 0.2, 0.1, 0.3, 0.2]


@pytest.fixture(scope="module")
def runs():
    data = eq.data.label_shift(train_clients=4, validation_clients=0, test_clients=4, examples=20)
    model = eq.models.Softmax(data.features, data.classes)
    options = {"rounds": 1, "clients_per_round": 2}
    return [eq.train(model, data, **options, name=name, seed=seed) for name in ("FedAvg", "tail") for seed in (0, 1)]


def rows(split, sizes, errors, **more):
    names = tuple(f"{split[:2]}{k}" for k in range(len(sizes)))
    error = torch.tensor(errors, dtype=torch.float64)
    return ClientTable(names, (split,) * len(sizes), error < 0, torch.tensor(sizes), error, error, **more)


def joined(*tables):
    columns = {name: torch.cat([getattr(t, name) for t in tables]) for name in ("seen", "size", "loss", "error")}
    return ClientTable(sum((t.client for t in tables), ()), sum((t.split for t in tables), ()), **columns)


@pytest.fixture
def run(runs):
    return replace(runs[0], clients=joined(rows("train", [1, 2], [0.5, 0.5]), rows("test", SIZES, ERRORS)))


def test_a_summary_leaves_them_out_and_says_so(run):
    found = run.summary(at_least=30)
    # Errors of the five clients with 40 examples or more: 0.1, 0.2, 0.1, 0.3, 0.2.
    assert found.error.clients == 5
    assert found.error.mean == pytest.approx(0.18)
    assert found.error.percentiles[90] == 0.3
    assert found.who == "5 unseen test clients with 30 examples or more"
    assert "3 of 8 test clients have fewer than 30 examples and are left out." in str(found)
    assert run.summary().error.percentiles[90] == 1.0  # of eight clients the eighth, which has four examples
    assert "All 8 test clients have 3 examples or more." in str(run.summary(at_least=3))
    assert "1 of 8 test clients has fewer than 4 examples and is left out." in str(run.summary(at_least=4))


def test_clients_left_out_that_fare_far_worse_are_spoken_of(run):
    # Errors of those left out: (1/3 + 1 + 1/2) / 3 = 0.611; of the others 0.18.
    words = "Those left out have a mean error of 61.1 %, the others 18.0 %: look at them with worst()."
    assert run.summary(at_least=30).small_clients.endswith(f"are left out. {words}")
    twice = run.judged_by(at_least=4).judged_by(at_least=30)
    assert small_clients_words([twice]).endswith(words)
    several = small_clients_words([twice, replace(twice, seed=1)])
    assert "a mean error of 61.1 % over all runs, the others 18.0 %" in several
    assert "worst()" not in small_clients_words([twice], hint="")
    numbers = replace(run, clients=rows("test", [3, 40, 50], [4.1, 0.98, 1.0]))
    assert "The one left out has a mean error of 4.1, the others 0.99: look at it" in numbers.summary(at_least=30).small_clients
    alike = replace(run, clients=rows("test", [3, 40, 50], [1.9, 0.98, 1.0]))
    assert alike.summary(at_least=30).small_clients.endswith("is left out.")


def test_a_summary_without_a_threshold_warns_of_them(run):
    assert (
        "3 of 8 test clients have fewer than 30 examples: much of their error may be chance (one example moves it by 10 "
        "points or more); at_least=30 leaves them out."
    ) in str(run.summary()).splitlines()
    large = replace(run, clients=rows("test", [30, 31], [0.1, 0.0]))
    assert "examples" not in str(replace(large.summary(), error_name=""))
    four = replace(run, clients=rows("test", [4, 50], [0.5, 0.0]))
    assert "one example moves it by 25 points or more" in small_clients_words([four])
    few = replace(run, clients=rows("test", [2, 29], [0.5, 0.0]))
    assert small_clients_words([few]).startswith("All 2 test clients have fewer than 30 examples")
    assert "at_least" not in small_clients_words([few])  # it would leave nobody
    one = replace(run, clients=rows("test", [2, 50], [0.5, 0.0]))
    assert small_clients_words([one]).startswith("1 of 2 test clients has fewer than 30 examples: much of its error may be")
    assert small_clients_words([one]).endswith("at_least=30 leaves it out.")
    assert small_clients_words([one], "report runs/themes leaves them out").endswith("; report runs/themes leaves it out.")
    alone = replace(run, clients=rows("test", [50], [0.0]))
    assert alone.summary(at_least=40).small_clients == "The only test client has 40 examples or more."
    numbers = replace(run, clients=rows("test", [2, 50], [7.25, 8.5]))
    assert "points" not in small_clients_words([numbers])
    assert small_clients_words([one, replace(run, clients=rows("test", [50, 50], [0.5, 0.0]))]).startswith("Up to 1 of 2")


def test_training_clients_stay_unless_they_are_judged(run):
    kept = run.judged_by(at_least=30).clients
    assert kept.split.count("train") == 2
    assert run.summary("train", at_least=2).error.clients == 1
    both = replace(run, clients=joined(rows("validation", [5, 50], [0.2, 0.4]), rows("test", SIZES, ERRORS)))
    assert run.judged_by(at_least=30).judged_by(None).summary().error.clients == 5
    assert both.judged_by(at_least=30).summary("validation").error.clients == 1
    assert both.summary("validation", at_least=6).error.mean == 0.4


def test_malicious_clients_are_not_counted(run):
    table = rows("test", SIZES, ERRORS, malicious=torch.tensor([True, *[False] * 6, True]))
    assert small_clients_words([replace(run, clients=table)]).startswith("2 of 6 benign test clients have fewer")
    assert "2 of 6 benign test clients have fewer than 30 examples and are left out." in str(
        replace(run, clients=table).summary(at_least=30)
    )


@pytest.mark.parametrize("bad", [-1, 2.5, True, "30", 101])
def test_a_threshold_that_means_nothing_is_refused(run, bad):
    with pytest.raises(InvalidParameter, match="at_least must"):
        run.summary(at_least=bad)


def test_secure_sums_have_no_sizes_to_go_by(run):
    means = replace(run, clients=replace(rows("test", [80], [0.2]), client=("mean of 8 clients",)))
    assert small_clients_words([means]) == ""
    with pytest.raises(InvalidParameter, match="must be 0 for runs of which means alone are known"):
        means.summary(at_least=30)


@pytest.fixture
def comparison(runs):
    def of(run, shift):
        return replace(run, clients=rows("test", SIZES, [*ERRORS[:5], *(error + shift for error in ERRORS[5:])]))

    shifts = {id(run): shift for run, shift in zip(runs, (0.0, 0.02, 0.1, 0.1), strict=True)}
    results = {name: [of(run, shifts[id(run)]) for run in runs if run.name == name] for name in ("FedAvg", "tail")}
    return Comparison(results)


def test_a_comparison_takes_the_same_threshold_everywhere(comparison):
    assert comparison.table(at_least=30)["FedAvg"]["percentile_90"].mean == pytest.approx((0.3 + 0.32) / 2)
    # Among all clients the one with four examples decides the percentile under both methods.
    assert comparison.differences()["tail"].values == (0.0, 0.0)
    assert comparison.differences(at_least=30)["tail"].values == pytest.approx((0.1, 0.08))
    text = comparison.summary(at_least=30)
    assert text.startswith("0-1 error over 5 unseen test clients with 30 examples or more, mean ±")
    assert "3 of 8 test clients have fewer than 30 examples and are left out." in text
    assert "at_least=30 leaves them out." in comparison.summary()
    markdown, latex = (
        write(at_least=30, percent=True, baseline="FedAvg") for write in (comparison.to_markdown, comparison.to_latex)
    )
    for table in (markdown, latex):
        assert "over 5 unseen test clients with 30 examples or more" in table
        assert "3 of 8 test clients have fewer than 30 examples and are left out." in table
    assert "at_least" not in comparison.to_markdown()  # a reader of a paper cannot give it
    assert "3 of 8 test clients have fewer than 30 examples" in comparison.to_markdown()


def test_seeds_with_other_clients_are_counted_from_the_fewest_to_the_most(comparison):
    def of(run):
        sizes = [40, *SIZES] if run.seed == 1 else SIZES
        return replace(run, clients=rows("test", sizes, [0.1] * len(sizes)))

    made = Comparison({name: [of(run) for run in runs] for name, runs in comparison.results.items()})
    words = "0-1 error over 5 to 6 unseen test clients with 30 examples or more, mean ±"
    assert made.summary(at_least=30).startswith(words)
    assert "(each seed has data or a split of its own)" in made.summary(at_least=30)
    assert made.to_markdown(at_least=30).startswith(words)
    assert words in made.to_latex(at_least=30).replace("$\\pm$", "±")
    assert made.summary().startswith("0-1 error over 8 to 9 unseen test clients, mean ±")
    assert "5 to 6 unseen test clients with 30 examples or more" in str(made.differences(at_least=30))


def test_a_page_leaves_them_out_and_says_so(comparison, run, tmp_path):
    page = Page(comparison.report(tmp_path / "r.html", at_least=30))
    assert "over 5 unseen test clients with 30 examples or more" in page.headline
    assert page.by_id["note"].startswith(
        "3 of 8 test clients have fewer than 30 examples and are left out. Those left out have"
    )
    assert page.cell("FedAvg", "90th percentile").startswith("31.0")
    assert "te0" not in page.source
    whole = Page(comparison.report(tmp_path / "whole.html"))
    assert whole.by_id["note"].startswith("3 of 8 test clients have fewer than 30 examples: much of their error may be chance")
    assert "te0" in whole.source
    alone = Page(run.report(tmp_path / "one.html", at_least=30))
    assert alone.headline.startswith(
        "Half of the 5 unseen test clients with 30 examples or more see an error of 20.0 % or less; "
        "the one that fares worst sees 30.0 %."
    )


def test_one_thing_is_written_as_one(run):
    one = replace(run, clients=rows("test", [50], [0.5]), rounds=1)
    assert one.summary().who == "1 unseen test client"
    assert "1 round on" in repr(one)
    assert repr(Comparison({"FedAvg": [one]})).startswith("Comparison(1 method)\n0-1 error over 1 unseen test client, 1 seed")
    numbers = ClientTable(
        ("a", "b"), ("test",) * 2, torch.zeros(2, dtype=torch.bool), torch.tensor([40, 40]), torch.ones(2), torch.zeros(2),
        metrics={"auc": torch.tensor([0.5, float("nan")])}, higher_is_better={"auc": True},
    )  # fmt: skip
    lacking = replace(run, clients=numbers)
    assert "1 of 2 clients has no auc and is left out of its figures." in str(lacking.summary())
    assert "Up to 1 client has no auc and is left out of its figures." in Comparison({"FedAvg": [lacking]}).summary()
    data = eq.data.from_arrays(torch.zeros(3, 2), torch.tensor([0, 1, 1]), ["a", "a", "b"], test=0.5)
    assert "1 client / 1 example" in repr(data)


# ------------------------------------------------------------------------------------------------------------ few clients


def judged_on(run, count, split="test", **changes):
    """The run, judged on `count` clients of 40 examples, with errors 0.01, 0.02 and so on."""
    table = joined(rows("train", [50, 50], [0.5, 0.5]), rows(split, [40] * count, [k / 100 for k in range(1, count + 1)]))
    return replace(run, clients=table, **changes)


WORST = "of fewer than 10, the 90th percentile is the one that fares worst, as is the worst 10 %."


def test_of_fewer_than_ten_clients_the_90th_percentile_is_the_worst(run):
    # By the definition: 8 of 9 clients are 88.9 %, less than 90 %; 9 of 10 are 90 %.
    nine, ten = judged_on(run, 9).summary(), judged_on(run, 10).summary()
    assert nine.error.percentiles[90] == 0.09
    assert ten.error.percentiles[90] == 0.09
    assert nine.few_clients == f"There are only 9 test clients: {WORST}"
    assert str(nine).count("fares worst") == 1
    assert ten.few_clients == ""
    assert "fares worst" not in str(ten)
    one = judged_on(run, 1).summary()
    assert one.few_clients == "There is only one test client: mean, 90th percentile and worst 10 % are its own."
    assert judged_on(run, 3, "validation").summary().few_clients == f"There are only 3 validation clients: {WORST}"
    assert judged_on(run, 12).summary("train").few_clients == ""  # two clients, which count by their examples
    assert run.summary(at_least=30).few_clients == f"There are only 5 test clients with 30 examples or more: {WORST}"
    sampled = judged_on(run, 5, sampled={"train": (2, 2), "test": (5, 60)})
    assert sampled.summary().few_clients == f"There are only 5 evaluated test clients: {WORST}"


def test_tables_of_methods_and_pages_say_so_once(run, tmp_path):
    def methods(*counts):
        return {f"method {k}": [judged_on(run, count, name=f"method {k}")] for k, count in enumerate(counts)}

    for counts, said in (
        ((8, 8), f"There are only 8 test clients: {WORST}"),
        ((7, 8), f"There are only 7 to 8 test clients: {WORST}"),
        ((8, 20), f"Some runs have only 8 test clients: {WORST}"),
        ((20, 20), ""),
    ):
        comparison = Comparison(methods(*counts))
        page = Page(comparison.report(tmp_path / "r.html"))
        texts = [comparison.summary(), comparison.to_markdown()]
        for text in (*texts, page.by_id.get("note", "")):
            assert text.count("fewer than 10") == bool(said)
            assert said in text
    assert "fewer than 10" in Comparison(methods(8, 8)).to_latex()
