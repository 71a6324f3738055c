"""The numbers of comparisons: paired differences, bold cells, intervals over seeds, changes of clients, the test of chance."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from report_cases import METHODS, Page, clients, federated, made_of, of_test_clients, offline, softmax, study_of, table_of

import equipoise as eq
from equipoise.cli.listing import worst_lines
from equipoise.compare import Comparison
from equipoise.errors import InvalidParameter
from equipoise.metrics import counts_wrong, share_interval
from equipoise.report import write_report
from equipoise.report.by_client import changes, client_errors, interval_over_seeds, mean_over_seeds
from equipoise.report.formats import ValueFormat, signed_text
from equipoise.report.notices import chance_notices, chance_of_spread
from equipoise.report.over_seeds import one_table, seeds_split_again
from equipoise.report.paired import PairedDifference, paired, separated_methods, student_reach
from equipoise.report.study import Study

# The largest error of six clients is their 90th percentile.
FEDAVG = [[0.1, 0.2, 0.3, 0.4, 0.5, top] for top in (0.50, 0.60, 0.70)]
TAIL = [[0.1, 0.2, 0.3, 0.4, 0.4, top] for top in (0.46, 0.55, 0.64)]  # −0.04, −0.05, −0.06
NOISE = [[0.1, 0.2, 0.3, 0.4, 0.4, top] for top in (0.45, 0.65, 0.69)]  # −0.05, +0.05, −0.01


@pytest.mark.parametrize(("seeds", "expected"), [(2, 12.7062), (3, 4.30265), (4, 3.18245), (5, 2.77645), (10, 2.26216)])
def test_students_quantile_is_that_of_the_printed_tables(seeds, expected):
    assert student_reach(seeds) * math.sqrt(seeds) == pytest.approx(expected, abs=1e-4)


def test_differences_are_of_pairs_with_students_interval(trained):
    made = made_of(trained, {"FedAvg": FEDAVG, "tail": TAIL, "noise": NOISE})
    found = made.differences("FedAvg", figure="percentile_90")
    tail = found["tail"]
    # Each method's percentile varies by ± 0.1 or 0.09 over seeds; the differences by ± 0.01 alone.
    assert (tail.spread.mean, tail.spread.deviation) == pytest.approx((-0.05, 0.01))
    reach = 4.30265 * 0.01 / math.sqrt(3)
    assert (tail.interval.low, tail.interval.high) == pytest.approx((-0.05 - reach, -0.05 + reach), abs=1e-6)
    assert (tail.lower, tail.seeds, tail.verdict) == (3, 3, "lower")
    assert (found["noise"].lower, found["noise"].verdict) == (2, "undecided")
    row = next(line.split() for line in str(found).splitlines() if line.startswith("tail"))
    assert row == ["tail", "−0.050", "±", "0.010", "−0.075", "to", "−0.025", "3", "of", "3", "lower"]
    assert [each.code for each in found.notices] == ["covers-training"]


class Drawn:
    """A sampler of a user's own, which shows itself as Python shows any object."""

    def __call__(self, round_index, alpha, *, clients_per_round, seed):
        raise NotImplementedError


def test_methods_with_other_samplers_are_said_not_to_share_cohorts(trained, tmp_path):
    made = made_of(trained, {"FedAvg": FEDAVG, "tail": TAIL, "own": NOISE, "full": TAIL})
    assert "other-cohorts" not in [each.code for each in made.differences().notices]
    for name, sampler in (("tail", eq.sampling.Uniform()), ("own", Drawn()), ("full", eq.sampling.Full())):
        algorithm = eq.Algorithm(sampler=sampler)  # Uniform is the default
        made.results[name][:] = [replace(run, algorithm=algorithm) for run in made.results[name]]
    (told,) = (each for each in made.differences().notices if each.code == "other-cohorts")
    assert told.fields == {"first": "FedAvg", "methods": "own, full"}
    assert "other-cohorts" in Page(made.report(tmp_path / "r.html")).by_code
    assert str(told) in made.to_latex(baseline="FedAvg")
    assert str(told) in made.summary()


def test_intervals_say_what_they_cover(trained):
    drawn = made_of(trained, {"FedAvg": FEDAVG, "tail": TAIL}, version=str)  # data are a function of the seed
    assert [each.code for each in drawn.differences().notices] == ["covers-data"]
    same = [replace(run, target="y") for run in drawn.all_results]
    assert one_table(same)
    split = Comparison({name: [replace(run, target="y") for run in runs] for name, runs in drawn.results.items()})
    assert [each.code for each in split.differences().notices] == ["covers-split"]


def test_too_few_seeds_and_equal_runs_are_undecided(trained, tmp_path):
    two = made_of(trained, {"FedAvg": FEDAVG, "tail": TAIL, "same": FEDAVG}, seeds=2)
    assert two.differences()["tail"].verdict == two.differences()["same"].verdict_words == "undecided"
    assert two.differences()["tail"].interval.low == -math.inf
    shifted = [[*values[:4], 0.4, values[5] - 0.04] for values in FEDAVG]  # −0.04 in each seed, up to rounding
    three = made_of(trained, {"FedAvg": FEDAVG, "same": FEDAVG, "shifted": shifted})
    said = "undecided (no spread between seeds)"
    for name, lower in (("same", 0), ("shifted", 3)):
        found = three.differences()[name]
        assert (found.constant, found.verdict_words, found.interval.low, found.lower) == (True, said, -math.inf, lower)
    for text in (three.summary(), three.to_latex(baseline="FedAvg"), three.to_markdown(baseline="FedAvg")):
        assert said in text
        assert "0.000 to 0.000" not in text
    page = Page(three.report(tmp_path / "r.html"))
    assert all(said in cell for cell in page.rows["table-differences"][1][1:4])
    assert paired("a", {0: 1.0, 5: 2.0}, {0: 1.0 + 1e-15, 1: 3.0}).values == (0.0,)  # rounding, and one seed in common
    assert PairedDifference("a", (-0.04, -0.04)).verdict_words == "undecided"  # too few seeds is reason enough


def test_the_summary_has_them_from_two_seeds_on(trained):
    methods = {"FedAvg": FEDAVG, "tail": TAIL}
    assert "Paired" in made_of(trained, methods).summary()
    assert "Paired" not in made_of(trained, methods, seeds=1).summary()
    assert "Paired" not in made_of(trained, {"FedAvg": FEDAVG}).summary()


def test_the_mean_and_the_worst_tenth_have_verdicts_beside_the_90th_percentile(trained, tmp_path):
    # The means rise by 0.005, 0.006 and 0.007; the worst client, which is the 90th percentile, changes to both sides.
    shifts = ((0.006, 0.0), (0.0052, 0.004), (0.0096, -0.006))
    errors = [
        [*(value + shift for value in values[:5]), values[5] + last]
        for values, (shift, last) in zip(FEDAVG, shifts, strict=True)
    ]
    made = made_of(trained, {"FedAvg": FEDAVG, "other": errors})
    row = [line for line in made.summary().splitlines() if line.startswith("other")][-1]
    assert row.split()[-3:] == ["undecided", "higher", "undecided"]
    page = Page(made.report(tmp_path / "r.html"))
    assert [cell.split("(")[0].split()[-1] for cell in page.rows["table-differences"][1][1:]] == [
        "higher",
        "undecided",
        "undecided",
    ]
    assert page.by_code["uncorrected"].endswith("methods 1, figures 3.")


def test_the_end_of_an_interval_shows_on_which_side_of_zero_it_is(trained, tmp_path):
    # Lower by 0.1, 1.0 and 1.35 points less a shift: the interval of the mean ends just below 0.
    values = (-0.0010, -0.0100, -0.0135)
    shift = PairedDifference("a", values).interval.high + 0.0002
    lower = [[*each[:4], 0.4, each[5] + value - shift] for each, value in zip(FEDAVG, values, strict=True)]
    made = made_of(trained, {"FedAvg": FEDAVG, "tail": lower})
    assert made.differences()["tail"].verdict == "lower"
    assert "to −0.0002 " in made.summary()
    page = Page(made.report(tmp_path / "r.html"))
    assert "to −0.02 lower" in page.rows["table-differences"][1][2]
    assert "to −0.02)" in page.headline
    assert signed_text(-0.0001) == signed_text(0.0001) == "0.000"


def bold_cells(page):
    """Method and figure of the bold cells of the page's table of numbers."""
    table = page.source.split('id="table-numbers"')[1].split("</table>")[0]
    rows = [row for row in table.split("<tr>") if 'class="best"' in row]
    return {
        (row.split("</span>")[1].split("<")[0], part.split('"')[2]) for row in rows for part in row.split('<td class="best')[1:]
    }


def test_bold_is_what_paired_intervals_separate_from_all_others(trained, tmp_path):
    # Means: tail is below FedAvg by 0.0233, 0.025, 0.0267; the 90th percentile by 0.04, 0.05, 0.06. t(2) · s/√3 is far less.
    two = made_of(trained, {"FedAvg": FEDAVG, "tail": TAIL})
    figures = ["mean", "percentile_90"]
    text = two.to_markdown(figures=figures, percent=True)
    assert "| tail | **32.5 ± 1.5** | **55.0 ± 9.0** |" in text
    assert "| FedAvg | 35.0 ± 1.7 | 60.0 ± 10.0 |" in text
    page = Page(two.report(tmp_path / "two.html"))
    assert {("tail", "mean"), ("tail", "percentile_90")} <= bold_cells(page)
    assert "FedAvg" not in dict(bold_cells(page))
    assert "bold" in page.by_code
    # "noise" has the lowest mean, but tail is not told from it: nothing is bold, although tail differs from FedAvg.
    three = made_of(trained, {"FedAvg": FEDAVG, "tail": TAIL, "noise": NOISE})
    assert "textbf" not in three.to_latex(figures=figures)
    assert "**" not in three.to_markdown(figures=figures)
    assert not {key for _, key in bold_cells(Page(three.report(tmp_path / "three.html")))} & set(figures)
    few = made_of(trained, {"FedAvg": FEDAVG, "tail": TAIL}, seeds=2)
    assert "**" not in few.to_markdown()
    assert "textbf" not in few.to_latex()
    assert "common seeds: 2" in Page(few.report(tmp_path / "few.html")).by_code["nothing-bold"]
    assert "bold" not in made_of(trained, {"FedAvg": FEDAVG}).to_markdown()  # one method


def test_where_more_is_better_the_higher_is_bold():
    low, high = {0: 0.1, 1: 0.21, 2: 0.3}, {0: 0.2, 1: 0.3, 2: 0.41}
    assert separated_methods({"low": low, "high": high}, higher=True) == {"high"}
    assert separated_methods({"low": low, "high": high, "again": high}, higher=True) == frozenset()  # of two equal ones
    assert separated_methods({"low": low, "again": low}) == frozenset()
    assert separated_methods({"low": low, "other seeds": {5: 0.9, 6: 0.8, 7: 0.7}}) == frozenset()
    assert separated_methods({"low": low, "lost": {0: math.nan, 1: math.nan, 2: math.nan}}) == frozenset()


def test_what_does_not_exist_is_refused(trained):
    made = made_of(trained, {"FedAvg": FEDAVG, "tail": TAIL})
    for refused, parameter in (
        (lambda: made.differences("fedavg"), "baseline"),
        (lambda: made.differences()["Tail"], "method"),
        (lambda: made.differences()["FedAvg"], "method"),
        (lambda: made.differences(figure="percentil_95"), "figure"),
        (lambda: made.to_markdown(baseline="x"), "baseline"),
        (lambda: made.differences(column="f1"), "column"),
        (lambda: made_of(trained, {"FedAvg": FEDAVG}).differences(), "baseline"),
    ):
        with pytest.raises(InvalidParameter) as caught:
            refused()
        assert caught.value.parameter == parameter


# ---------------------------------------------------------------------------------------------------- which method is the best


def test_the_page_chooses_on_validation_data_and_shows_all_differences(trained, tmp_path):
    # On test clients "tail" is best; on validation clients "noise" is.
    errors = {"FedAvg": FEDAVG, "tail": TAIL, "noise": NOISE}
    made = made_of(trained, errors, validation={"FedAvg": 0.4, "tail": 0.35, "noise": 0.3})
    assert Study.of(made.all_results).best.name == "noise"
    page = Page(made.report(tmp_path / "r.html"))
    assert page.headline.startswith("noise against FedAvg")
    assert "30.0 %; FedAvg: 40.0 %" in page.headline
    assert [row[2] for row in page.rows["table-validation"]] == ["90th percentile", "40.0 ± 0.0", "35.0 ± 0.0", "30.0 ± 0.0"]
    rows = {row[0]: row[1:] for row in page.rows["table-differences"]}
    assert rows["tail"][1].split()[:7] == ["−5.0", "±", "1.0", "−7.5", "to", "−2.5", "lower"]
    assert rows["noise"][1].endswith(" undecided (lower in 2 of 3)")
    plain = made_of(trained, errors)
    assert Study.of(plain.all_results).best.name == "tail"
    assert "table-validation" not in Page(plain.report(tmp_path / "plain.html")).rows


def test_a_method_that_is_clearly_lower_goes_before_a_lower_one_by_chance(trained):
    def best(seeds=3, **errors):
        return Study.of(made_of(trained, {"FedAvg": FEDAVG, **errors}, seeds=seeds).all_results).best.name

    chance = [
        [*values[:5], top] for values, top in zip(FEDAVG, (0.5, 0.5, 0.5), strict=True)
    ]  # 0, −0.1, −0.2: lower, undecided
    assert best(tail=TAIL, chance=chance) == "tail"
    assert best(worse=[[*values[:5], 0.9] for values in FEDAVG], chance=chance) == "chance"
    assert best(2, tail=TAIL, chance=chance) == "tail"  # of two seeds, lower in both
    assert best(1, tail=TAIL, lowest=[[0.1] * 6] * 3) == "lowest"


def test_numbers_are_written_with_digits_that_fit():
    percent = ValueFormat.fitting(0.3, percent=True)
    assert [percent.value(v) for v in (0.31249, math.nan, 0.0)] == ["31.2 %", "–", "0.0 %"]
    assert [percent.signed(v) for v in (-0.018, 0.018, 0.0001, math.inf)] == ["−1.8", "+1.8", "±0.0", "–"]
    assert ValueFormat.fitting(0.015, percent=True).value(0.0123) == "1.23 %"
    for largest, written in ((2.334, "1.00"), (1234.0, "1"), (0.00123, "1.00000"), (math.inf, "1.00")):
        assert ValueFormat.fitting(largest, percent=False).value(1.0) == written


# ------------------------------------------------------------------------------------------------------- clients over seeds


def test_means_and_intervals_over_seeds_by_hand():
    values = np.array([[0.1, 0.2, 0.3], [0.5, 0.5, 0.5], [0.1, np.nan, 0.3], [0.2, np.inf, 0.2]])
    assert mean_over_seeds(values).tolist() == pytest.approx([0.2, 0.5, 0.2, math.inf])
    low, high = interval_over_seeds(values, 0.0, 1.0)
    # Student's t with 2 degrees of freedom: 4.3027; s = 0.1; 4.3027 · 0.1 / √3 = 0.24842, and below 0 no error lies.
    assert [low[0], high[0]] == pytest.approx([0.0, 0.44842], abs=1e-4)
    assert np.isnan([low[1], high[1]]).all()  # the same in all seeds: no spread, and no interval
    assert np.isnan([*low[2:], *high[2:]]).all()  # two seeds, or an error that is not finite
    low, high = interval_over_seeds(values[:, :2])
    assert [low[0], high[0]] == [0.1, 0.2]
    assert np.isnan(interval_over_seeds(values[:, :1])[0]).all()


def test_gains_are_counted_and_sorted_by_the_mean_over_seeds(run, tmp_path):
    results = study_of(
        run,
        first=[[0.5, 0.5, 0.2, 0.4], [0.6, 0.4, 0.2, 0.4], [0.7, 0.5, 0.2, 0.4]],
        second=[[0.3, 0.6, 0.2, 0.3], [0.3, 0.6, 0.2, 0.5], [0.3, 0.4, 0.2, 0.3]],
    )
    made = changes(client_errors(Study.of(results)))[0]
    assert made.change.tolist() == pytest.approx([-0.3, 0.2 / 3, 0.0, -0.1 / 3])
    assert (int(made.gains.sum()), int(made.pays.sum()), made.alike, made.always) == (2, 1, 1, (1, 0))
    assert (made.most(2, paying=False), made.most(2, paying=True)) == ([0, 3], [1])
    page = Page(write_report(results, tmp_path / "r.html"))
    offline(page)
    assert page.rows["table-gains"] == [
        ["method", "gain", "pay", "unchanged", "not comparable", "mean change"],
        ["second", "2 mean −16.7; in every seed: 1", "1 mean +6.7; in every seed: 0", "1", "0", "−6.7"],
    ]


def test_clients_of_data_that_differ_by_seed_stay_apart(tmp_path):
    made = eq.compare(
        METHODS, softmax(), lambda seed: eq.FederatedData(clients(6, seed=seed), test=clients(8, prefix="t", seed=9 + seed)),
        rounds=2, clients_per_round=4, seeds=3,
    )  # fmt: skip
    assert len({run.data_version for run in made.all_results}) == 3
    found = client_errors(Study.of(made.all_results))
    assert (len(found), found.errors.shape[2]) == (24, 1)
    page = Page(made.report(tmp_path / "r.html"))
    offline(page)
    assert "clients-by-seed" in page.by_code
    assert page.rows["left-behind"][0][:3] == ["client", "seed", "examples"]
    assert {row[1] for row in page.rows["left-behind"][1:]} <= {"0", "1", "2"}
    gain, pay, alike = (int(cell.split()[0]) for cell in page.rows["table-gains"][1][1:4])
    assert gain + pay + alike == 24
    again = eq.compare(METHODS, softmax(), lambda _: federated(), rounds=1, clients_per_round=4, seeds=2)  # made twice, equal
    assert len({run.data_version for run in again.all_results}) == 1


def test_runs_of_train_on_data_that_differ_by_seed_are_told_apart_by_their_tables():
    def made(data):
        return [eq.train(softmax(), data(seed), rounds=1, clients_per_round=4, seed=seed, progress=False) for seed in (0, 1)]

    def drawn(seed):  # clients of one name and size, with other examples
        return eq.FederatedData(clients(6, seed=seed), test=clients(8, prefix="t", seed=9 + seed))

    def split(seed):  # the same clients, split in another way
        return eq.data.split_clients(clients(12, seed=0), test=0.5, seed=seed)

    assert seeds_split_again(made(drawn))
    assert seeds_split_again(made(split))
    assert not seeds_split_again(made(lambda seed: drawn(0)))


def test_a_client_that_is_malicious_in_some_seeds_has_the_mean_of_the_others(run):
    results = study_of(run, a=[[0.1, 0.2], [0.3, 0.4]], b=[[0.1, 0.3], [0.2, 0.2]])
    gone = replace(results[1], clients=results[1].clients.take(torch.tensor([1])))
    found = client_errors(Study.of([results[0], gone, *results[2:]]))
    assert mean_over_seeds(found.of(0)).tolist() == pytest.approx([0.1, 0.3])
    assert mean_over_seeds(found.change(1)).tolist() == pytest.approx([0.0, -0.05])


def test_what_two_methods_do_not_share_is_not_compared(run, tmp_path):
    grown = replace(run, name="grown", clients=replace(run.clients, size=run.clients.size + 1))
    page = Page(write_report([run, grown], tmp_path / "r.html"))
    assert page.rows["table-gains"][1] == ["grown", "0 mean –", "0 mean –", "0", "40", "–"]
    assert "gains" not in page.figures
    assert {row[3] for row in page.rows["left-behind"][1:]} == {"–"}
    other = replace(run, name="other", seed=7)
    page = Page(write_report([run, other], tmp_path / "r.html"))
    assert page.by_code["no-common-seed"].endswith("other.")
    assert "table-gains" not in page.rows
    assert page.rows["still-behind"][0] == ["client", "examples", "other"]


# -------------------------------------------------------------------------------------------------------- chance and few rows

ALIKE, APART = table_of([10, 11, 9, 12, 8], [50] * 5), table_of([10, 11, 9, 12, 30], [50] * 5)


def test_the_test_agrees_with_chi_square_where_clients_have_many_rows():
    from scipy.stats import chi2_contingency

    wrong, sizes = np.array([60, 52, 190, 40, 77]), np.array([300, 250, 900, 120, 300])
    expected = chi2_contingency(np.stack([wrong, sizes - wrong]), correction=False).pvalue
    assert 0.01 < expected < 0.5
    assert chance_of_spread(torch.tensor(wrong), torch.tensor(sizes)) == pytest.approx(expected, abs=0.01)


def test_it_finds_chance_alone_in_five_of_a_hundred_cases_also_for_clients_with_few_rows():
    drawn = np.random.default_rng(1)
    found = []
    for _ in range(300):
        sizes = drawn.integers(1, 30, 10)
        chance = chance_of_spread(torch.tensor(drawn.binomial(sizes, 0.2)), torch.tensor(sizes))
        found.append(1.0 if chance is None else chance)
    assert np.mean(np.array(found) < 0.05) < 0.09  # 0.05 and two and a half standard deviations more, at most
    assert abs(np.mean(np.array(found) < 0.5) - 0.5) < 0.1
    for wrong, sizes in (([3], [9]), ([0, 0], [5, 5]), ([5, 5], [5, 5])):  # nothing to compare
        assert chance_of_spread(torch.tensor(wrong), torch.tensor(sizes)) is None


def test_the_test_is_for_right_and_wrong_rows_of_a_shared_model_that_it_was_not_trained_on():
    assert [each.fields["verdict"] for each in chance_notices(APART)] == ["beyond chance"]
    assert [each.fields["verdict"] for each in chance_notices(ALIKE)] == ["not shown to differ"]
    none = torch.full((5,), torch.nan, dtype=torch.float64)
    assert chance_notices(replace(APART, personal_error=none, personal_loss=none))  # nobody has an own model
    for other in (
        {"split": ("train",) * 5},
        {"split": ("test",) * 4 + ("validation",)},
        {"personal_error": APART.error, "personal_loss": APART.error},
        {"trivial_answer": "mean of the targets"},
        {"trivial_error": None, "trivial_answer": ""},  # as of private runs
        {"error": APART.error + 0.001},
    ):
        assert chance_notices(replace(APART, **other)) == []


def test_the_worst_clients_have_the_interval_of_clopper_and_pearson():
    found = table_of([2, 2, 30], [2, 3, 100]).worst(2)
    # 2 of 2 wrong: the lower end p solves p² = 0.025, the upper one is 1.
    assert (found[0]["error_low"], found[0]["error_high"]) == (pytest.approx(0.025**0.5), 1.0)
    # 2 of 3 wrong: P(≥ 2) = 3p² − 2p³ = 0.025 at the lower end; P(≤ 2) = 1 − p³ = 0.025 at the upper one.
    low, high = found[1]["error_low"], found[1]["error_high"]
    assert 3 * low**2 - 2 * low**3 == pytest.approx(0.025)
    assert high == pytest.approx(0.975 ** (1 / 3))
    lines = str(found).splitlines()
    assert lines[0].split() == ["client", "split", "size", "error", "95", "%", "interval", "trivial", "error"]
    assert lines[1].split() == ["c0", "test", "2", "1.000", "0.158", "to", "1.000", "0.250"]
    assert [row["client"] for row in table_of([2, 2, 30], [2, 3, 100]).worst(5, at_least=30)] == ["c2"]
    assert not counts_wrong(torch.tensor([float("nan")]), torch.tensor([3]))
    assert share_interval(1.5, 3).low < 0.5 < share_interval(1.5, 3).high  # a mean over seeds
    with pytest.raises(InvalidParameter, match="at_least"):
        ALIKE.worst(5, at_least=-1)


def test_the_worst_clients_with_own_models_have_one_error_under_one_name():
    shared = table_of([2, 4], [10, 10])
    own = torch.tensor([0.9, float("nan")], dtype=torch.float64)
    found = replace(shared, personal_error=own, personal_loss=torch.ones(2).double()).worst(2)
    # The first client is wrong on 9 of 10 by its own model; the second one has none, and is served the shared one.
    assert [row["served_error"] for row in found] == pytest.approx([0.9, 0.4])
    assert [row["error"] for row in found] == pytest.approx([0.2, 0.4])
    for row, wrong in zip(found, (9, 4), strict=True):
        between = share_interval(wrong, 10)
        assert (row["served_error_low"], row["served_error_high"]) == (between.low, between.high)
        assert "error_low" not in row
    assert str(found).splitlines()[0].split()[3:5] == ["own", "error"]


def test_the_page_picks_among_clients_with_enough_examples(run, tmp_path):
    def page_of(wrong, sizes, **changes):
        return Page(of_test_clients(run, wrong, sizes, **changes).report(tmp_path / "r.html"))

    page = page_of([10] * 10 + [20, 35], [50] * 12)
    assert page.rows["table-worst"][0] == ["client", "examples", "error", "most frequent class", "loss"]
    assert page.rows["table-worst"][1][0] == "c11"
    assert "worst 10 of 12" in page.by_code["picked"]
    assert page.by_code["chance-of-spread"].endswith("beyond chance.")
    assert "c11, c10" in page.by_code["trivial-behind"]
    small = page_of([1, *[10] * 11], [1, *[50] * 11])
    assert "c0" not in [row[0] for row in small.rows["table-worst"]]
    assert "worst 10 of 11" in small.by_code["picked"]
    few = page_of([1] * 2 + [10] * 10, [1] * 2 + [50] * 10)  # no more than ten others
    assert "c0" in [row[0] for row in few.rows["table-worst"]]
    assert "few-examples" in few.by_code
    lines = worst_lines(of_test_clients(run, [1, 1, *[10] * 10], [1, 1, *[50] * 10]))
    assert "with 30 examples or more" in lines[0]
    assert not any(line.startswith(("  c0 ", "  c1 ")) for line in lines)
    some = of_test_clients(run, [9, *[10] * 12], [10, *[50] * 12]).judged_by(at_least=10)
    assert worst_lines(some)[2].startswith("  c0 ")  # the limit that is asked for takes the place of ours
    assert Page(some.report(tmp_path / "r.html")).rows["table-worst"][1][0] == "c0"
