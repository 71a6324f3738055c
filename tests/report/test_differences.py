"""Paired differences over seeds: golden numbers by hand, and where tables and pages show them."""

import math
import re
from dataclasses import replace

import pytest
import torch
from report_cases import Page

import equipoise as eq
from equipoise.compare import Comparison
from equipoise.errors import InvalidParameter
from equipoise.report.data.paired import PairedDifference, paired, separated_methods, signed_text, student_quantile

# The largest error of six clients is their 90th percentile.
FEDAVG = [[0.1, 0.2, 0.3, 0.4, 0.5, top] for top in (0.50, 0.60, 0.70)]
TAIL = [[0.1, 0.2, 0.3, 0.4, 0.4, top] for top in (0.46, 0.55, 0.64)]  # −0.04, −0.05, −0.06
NOISE = [[0.1, 0.2, 0.3, 0.4, 0.4, top] for top in (0.45, 0.65, 0.69)]  # −0.05, +0.05, −0.01


@pytest.fixture(scope="module")
def trained():
    data = eq.data.label_shift(train_clients=8, validation_clients=6, test_clients=6, examples=20)
    return eq.compare({"FedAvg": eq.Algorithm()}, eq.models.Softmax(20, 10), data, rounds=1, clients_per_round=3, seeds=3)


def made_of(trained, errors, *, seeds=3, validation=None, version=lambda seed: ""):
    """A comparison with known errors of the six test clients, by method and seed, and perhaps of the validation clients."""
    results = {}
    for name, by_seed in errors.items():
        runs = []
        for run, values in zip(trained.results["FedAvg"][:seeds], by_seed, strict=False):
            rows = run.clients.where("test")
            rows = replace(rows, error=torch.tensor(values, dtype=torch.float64), trivial_error=None)
            if validation is not None:
                other = replace(rows, split=("validation",) * 6, error=torch.full((6,), validation[name], dtype=torch.float64))
                rows = joined(other, rows)
            runs.append(replace(run, name=name, clients=rows, data_version=version(run.seed)))
        results[name] = runs
    return Comparison(results)


def joined(first, second):
    names = ("seen", "size", "loss", "error")
    columns = {name: torch.cat([getattr(first, name), getattr(second, name)]) for name in names}
    return replace(second, client=first.client + second.client, split=first.split + second.split, **columns)


@pytest.mark.parametrize(("freedom", "expected"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (9, 2.26216)])
def test_students_quantile_is_that_of_the_printed_tables(freedom, expected):
    assert student_quantile(0.95, freedom) == pytest.approx(expected, abs=1e-4)


def test_differences_are_of_pairs_with_students_interval(trained):
    found = made_of(trained, {"FedAvg": FEDAVG, "tail": TAIL, "noise": NOISE}).differences("FedAvg", figure="percentile_90")
    tail = found["tail"]
    # Each method's percentile varies by ± 0.1 or 0.09 over seeds; the differences by ± 0.01 alone.
    assert tail.spread.mean == pytest.approx(-0.05)
    assert tail.spread.deviation == pytest.approx(0.01)
    reach = 4.30265 * 0.01 / math.sqrt(3)
    assert (tail.interval.low, tail.interval.high) == pytest.approx((-0.05 - reach, -0.05 + reach), abs=1e-6)
    assert (tail.lower, tail.seeds, tail.verdict) == (3, 3, "lower")
    assert (found["noise"].lower, found["noise"].verdict) == (2, "undecided")
    assert [row.method for row in found] == ["tail", "noise"]
    text = str(found)
    assert "−0.050 ± 0.010  −0.075 to −0.025   lower in 3 of 3 lower" in text
    assert "Student's t" in text
    assert "not the choice of clients" in text
    assert "not corrected for looking at 2 methods" in text


class Drawn:
    """A sampler of a user's own, which shows itself as Python shows any object."""

    def __call__(self, round_index, alpha, *, clients_per_round, seed):
        raise NotImplementedError


def test_methods_with_other_samplers_are_said_not_to_share_cohorts(trained, tmp_path):
    made = made_of(trained, {"FedAvg": FEDAVG, "tail": TAIL, "own": NOISE, "full": TAIL})
    assert "cohorts in another way" not in made.summary() + made.to_latex(baseline="FedAvg")
    for name, sampler in (("tail", eq.sampling.Uniform()), ("own", Drawn()), ("full", eq.sampling.Full())):
        algorithm = eq.Algorithm(sampler=sampler)  # Uniform is the default
        made.results[name][:] = [replace(run, algorithm=algorithm) for run in made.results[name]]
    said = "own and full draw cohorts in another way than FedAvg: these differences are paired by data, batches and initial"
    page = made.report(tmp_path / "r.html").read_text().replace("\u00a0", " ")
    for text in (made.summary(), str(made.differences()), made.to_latex(baseline="FedAvg"), page):
        assert said in text
    alike = eq.Comparison({name: made.results[name] for name in ("FedAvg", "tail")})
    assert "cohorts in another way" not in alike.summary()
    one = eq.Comparison({name: made.results[name] for name in ("FedAvg", "full")})
    assert "full draws cohorts in another way than FedAvg: this difference is paired by data" in one.summary()


def test_bold_cells_say_what_their_intervals_cover_without_a_baseline_too(trained):
    errors = {"FedAvg": [[0.1 * k, 0.2, 0.3, 0.4, 0.5, 0.6] for k in (1, 2, 3)], "tail": [[0.0] * 6] * 3}
    same = made_of(trained, errors).to_latex(figures=["mean"])
    assert r"\textbf{0.000" in same
    assert "Each interval covers the randomness of training, and not the choice of clients" in same
    drawn = made_of(trained, errors, version=str)  # data are a function of the seed
    for text in (drawn.to_latex(figures=["mean"]), drawn.to_latex(figures=["mean"], baseline="FedAvg")):
        assert text.count("too narrow in general if the data of seeds share clients or examples") == 1
    assert "Each interval covers" not in made_of(trained, {"FedAvg": FEDAVG, "noise": NOISE}).to_latex(figures=["mean"])


def test_too_few_seeds_are_undecided_and_so_are_equal_runs(trained, tmp_path):
    two = made_of(trained, {"FedAvg": FEDAVG, "tail": TAIL, "same": FEDAVG}, seeds=2)
    assert two.differences()["tail"].verdict == "undecided"
    assert two.differences()["same"].verdict_words == "undecided"  # too few seeds is reason enough
    three = made_of(trained, {"FedAvg": FEDAVG, "same": FEDAVG})  # a difference of 0 in all seeds has no spread either
    said = "undecided (no spread between seeds)"
    assert three.differences()["same"].verdict_words == said
    assert three.differences()["same"].interval.low == -math.inf
    for text in (three.summary(), three.to_latex(baseline="FedAvg"), three.to_markdown(baseline="FedAvg")):
        assert said in text
        assert "0.000 to 0.000" not in text
    assert all(cell.endswith(said) for cell in Page(three.report(tmp_path / "r.html")).rows["table-differences"][1][1:4])
    assert two.differences()["tail"].interval.low == -math.inf
    assert "An interval needs 3 seeds." in two.summary()
    assert paired("a", {0: 1.0, 5: 2.0}, {0: 1.0 + 1e-15, 1: 3.0}).values == (0.0,)  # rounding, and one seed in common


def test_the_same_difference_in_all_seeds_is_undecided(trained, tmp_path):
    shifted = [[*values[:4], 0.4, values[5] - 0.04] for values in FEDAVG]  # −0.04 in each seed, up to rounding
    made = made_of(trained, {"FedAvg": FEDAVG, "shifted": shifted})
    found = made.differences()["shifted"]
    assert (found.lower, found.constant, found.verdict) == (3, True, "undecided")
    assert (found.interval.low, found.interval.high) == (-math.inf, math.inf)
    assert "undecided (no spread between seeds)" in made.summary()
    assert "undecided (no spread between seeds)" in made.to_latex(figures="percentile_90", baseline="FedAvg")
    page = Page(made.report(tmp_path / "r.html"))
    assert page.rows["table-differences"][1][2].endswith(" undecided (no spread between seeds)")
    assert "the difference is the same in all 3 seeds, which then do not tell it from chance" in page.headline
    assert PairedDifference("a", (0.0, 0.0, 0.0)).constant
    assert PairedDifference("a", (-0.04, -0.04)).verdict_words == "undecided"  # too few seeds is reason enough


def test_the_summary_has_them_from_two_seeds_on(trained):
    made = made_of(trained, {"FedAvg": FEDAVG, "tail": TAIL})
    text = made.summary()
    assert "Paired differences of the 90th percentile from FedAvg" in text
    assert "(the same split for all seeds)" in text
    covers = (
        "The interval covers the randomness of training, and not the choice of clients and examples, which all seeds share. "
        "It is not corrected for looking at 3 figures."
    )
    assert covers in text.splitlines()
    assert "Paired" not in made_of(trained, {"FedAvg": FEDAVG, "tail": TAIL}, seeds=1).summary()
    assert "Paired" not in made_of(trained, {"FedAvg": FEDAVG}).summary()
    again = made_of(trained, {"FedAvg": FEDAVG, "tail": TAIL}, version=str)
    assert "(each seed has data or a split of its own)" in again.summary()
    assert "and of the split" in str(again.differences())
    shared = "too narrow in general if the data of seeds share clients or examples, and not if each seed generates them anew."
    assert shared in again.summary()


def test_tables_for_papers_have_them_below_and_latex_the_best_in_bold(trained):
    made = made_of(trained, {"FedAvg": FEDAVG, "tail": TAIL})
    text = made.to_markdown(figures=["percentile_90"], percent=True, baseline="FedAvg")
    assert "| tail | 90th percentile | −5.0 ± 1.0 | −7.5 to −2.5 | 3 of 3 | lower |" in text
    assert "| method | figure | difference | 95 % interval | lower in | verdict |" in text
    latex = made.to_latex(figures=["mean", "percentile_90"], percent=True, baseline="FedAvg")
    assert r"tail & \textbf{32.5 $\pm$ 1.5} & \textbf{55.0 $\pm$ 9.0} \\" in latex
    assert r"FedAvg & 35.0 $\pm$ 1.7 & 60.0 $\pm$ 10.0 \\" in latex
    assert latex.count(r"\begin{tabular}") == 2
    assert r"method & figure & difference & 95 \% interval & lower in & verdict \\" in latex
    assert r"tail & mean & " in latex
    assert r"tail & 90th percentile & $-$5.0 $\pm$ 1.0 & $-$7.5 to $-$2.5 & 3 of 3 & lower \\" in latex
    assert BOLD.replace("%", r"\%") in latex  # in a note, not in a comment
    assert not any(line.startswith("%") for line in latex.splitlines())
    assert r"Paired differences from FedAvg, seed by seed, mean $\pm$ standard deviation over 3 seeds." in latex
    assert "Paired" not in made.to_markdown()


def test_every_table_says_that_intervals_are_not_corrected_for_looking_at_several_methods(trained):
    made, two = (made_of(trained, dict(items)) for items in (METHODS, METHODS[:2]))
    said = "It is not corrected for looking at {}."
    assert said.format("2 methods and 3 figures") in made.summary()
    assert said.format("3 figures") in two.summary()
    assert said.format("2 methods") in str(made.differences())
    assert "not corrected" not in str(two.differences())
    for table in ("to_latex", "to_markdown"):
        assert said.format("2 methods and 4 figures") in getattr(made, table)(baseline="FedAvg")
        assert said.format("2 methods") in getattr(made, table)(baseline="FedAvg", figures=["mean"])
        assert "not corrected" not in getattr(two, table)(baseline="FedAvg", figures=["mean"])


def test_the_mean_and_the_worst_tenth_have_verdicts_beside_the_90th_percentile(trained, tmp_path):
    # The means rise by 0.005, 0.006 and 0.007; the worst client, which is the 90th percentile, changes to both sides.
    shifts = ((0.006, 0.0), (0.0052, 0.004), (0.0096, -0.006))
    errors = [
        [*(value + shift for value in values[:5]), values[5] + last]
        for values, (shift, last) in zip(FEDAVG, shifts, strict=True)
    ]
    made = made_of(trained, {"FedAvg": FEDAVG, "other": errors})
    mean, tail = (made.differences(figure=figure)["other"].verdict for figure in ("mean", "percentile_90"))
    assert (mean, tail) == ("higher", "undecided")
    lines = made.summary().splitlines()
    start = next(k for k, line in enumerate(lines) if line.startswith("Paired differences"))
    assert "At the right: verdicts by the same rule on the mean and the worst 10 %." in lines[start]
    assert lines[start + 1].split()[-5:] == ["verdict", "mean", "worst", "10", "%"]
    assert lines[start + 2].split()[-3:] == ["undecided", "higher", "undecided"]
    page = Page(made.report(tmp_path / "r.html"))
    assert [cell.split()[-1] for cell in page.rows["table-differences"][1][1:4]] == ["higher", "undecided", "undecided"]
    assert "not corrected for looking at 3 figures." in page.by_id["table-differences-caption"]


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
    assert "to −0.02 points" in page.headline


METHODS = [("FedAvg", FEDAVG), ("tail", TAIL), ("noise", NOISE)]
BOLD = "Bold: better than every other method; the 95 % intervals of the paired differences do not contain 0."


def bold_cells(source):
    """Method and figure of the bold cells of the page's table of numbers."""
    table = source.split('id="table-numbers"')[1].split("</table>")[0]
    rows = [row for row in table.split("<tr>") if 'class="best"' in row]
    return [
        (re.search(r"</span>([^<]*)</th>", row)[1], key) for row in rows for key in re.findall(r'"best" data-key="(\w+)', row)
    ]


def test_bold_is_what_paired_intervals_separate_from_all_others(trained, tmp_path):
    # Means: tail is below FedAvg by 0.0233, 0.025, 0.0267; the 90th percentile by 0.04, 0.05, 0.06. t(2) · s/√3 is far less.
    two = made_of(trained, {"FedAvg": FEDAVG, "tail": TAIL})
    figures = ["mean", "percentile_90"]
    text = two.to_markdown(figures=figures, percent=True)
    assert BOLD in text
    assert "| tail | **32.5 ± 1.5** | **55.0 ± 9.0** |" in text
    assert "| FedAvg | 35.0 ± 1.7 | 60.0 ± 10.0 |" in text
    page = Page(two.report(tmp_path / "two.html"))
    assert {("tail", "mean"), ("tail", "percentile_90")} <= set(bold_cells(page.source))
    assert "FedAvg" not in dict(bold_cells(page.source))
    assert BOLD in page.source.replace("\u00a0", " ")

    # "noise" has the lowest mean, but tail is not told from it: nothing is bold, although tail differs from FedAvg.
    three = made_of(trained, {"FedAvg": FEDAVG, "tail": TAIL, "noise": NOISE})
    text = three.to_latex(figures=figures)
    assert "textbf" not in text
    assert r"Nothing is bold: no 95 \% intervals of paired differences separate one method from every other." in text
    assert "**" not in three.to_markdown(figures=figures)
    page = Page(three.report(tmp_path / "three.html"))
    assert not {key for _, key in bold_cells(page.source)} & set(figures)


def test_with_too_few_seeds_nothing_is_bold_and_the_table_says_so(trained, tmp_path):
    for seeds, words in ((1, "with one seed"), (2, "with 2 seeds")):
        few = made_of(trained, {"FedAvg": FEDAVG, "tail": TAIL}, seeds=seeds)
        said = f"Nothing is bold: {words}, methods cannot be told apart; that takes 3 or more."
        assert said in few.to_markdown()
        assert said in few.to_latex()
        assert "**" not in few.to_markdown()
        assert "textbf" not in few.to_latex()
        page = Page(few.report(tmp_path / "few.html"))
        assert said in page.source.replace("\u00a0", " ")
        assert 'class="best"' not in page.source
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
    with pytest.raises(InvalidParameter, match=r"baseline must be one of FedAvg, tail.*Did you mean 'FedAvg'\?"):
        made.differences("fedavg")
    with pytest.raises(InvalidParameter, match=r"method must be one of tail.*Did you mean 'tail'\?"):
        made.differences()["Tail"]
    with pytest.raises(InvalidParameter, match=r"Did you mean 'percentile_95'\?"):
        made.differences(figure="percentil_95")
    with pytest.raises(InvalidParameter, match="baseline must be one of"):
        made.to_markdown(baseline="x")
    with pytest.raises(InvalidParameter, match="figure must be one of"):
        made.differences(figure="p90")
    with pytest.raises(InvalidParameter, match="column must be one of"):
        made.differences(column="f1")
    with pytest.raises(InvalidParameter, match="method must be one of tail"):
        made.differences()["FedAvg"]
    with pytest.raises(InvalidParameter, match="another method"):
        made_of(trained, {"FedAvg": FEDAVG}).differences()


def test_the_page_chooses_on_validation_data_and_shows_all_differences(trained, tmp_path):
    # On test clients "tail" is best; on validation clients "noise" is.
    errors = {"FedAvg": FEDAVG, "tail": TAIL, "noise": NOISE}
    made = made_of(trained, errors, validation={"FedAvg": 0.4, "tail": 0.35, "noise": 0.3})
    page = Page(made.report(tmp_path / "r.html"))
    chosen = "noise, chosen by its 90th percentile on 6 unseen validation clients (30.0 % against 40.0 % under FedAvg), "
    assert page.headline.startswith(f"{chosen}does not clearly lower")
    assert [row[2] for row in page.rows["table-validation"]] == ["90th percentile", "40.0 ± 0.0", "35.0 ± 0.0", "30.0 ± 0.0"]
    rows = {row[0]: row[1:] for row in page.rows["table-differences"]}
    assert rows.keys() == {"method", "tail", "noise"}
    assert rows["tail"][1].split() == ["−5.0", "±", "1.0", "−7.5", "to", "−2.5", "lower"]
    assert rows["tail"][3:] == ["lower in 3 of 3"]
    assert rows["noise"][3:] == ["lower in 2 of 3"]
    assert rows["noise"][1].endswith(" undecided")
    plain = Page(made_of(trained, errors).report(tmp_path / "plain.html"))
    assert "best of 2 methods on these same clients, and the figure therefore optimistic" in plain.headline
    assert "table-validation" not in plain.rows


def validated(made, changes, *, names=("tail",), others=False, sizes=None):
    """The comparison with validation data whose 90th percentile under `names` differs from FedAvg by `changes`, by seed.

    With `others` the validation clients are not the test clients. `sizes` are the validation examples of each client.
    """
    results = {}
    for name, runs in made.results.items():
        results[name] = []
        for run, change in zip(runs, changes, strict=True):
            rows = run.clients.where("test")
            top = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.4, 0.4 + (change if name in names else 0.0)], dtype=torch.float64)
            client = tuple(f"other {each}" for each in rows.client) if others else rows.client
            size = rows.size if sizes is None else torch.tensor(sizes)
            rows = replace(rows, size=torch.full((6,), 40))
            other = replace(rows, client=client, split=("validation",) * 6, error=top, size=size)
            results[name].append(replace(run, clients=joined(other, rows)))
    return Comparison(results)


def test_verdicts_that_contradict_each_other_are_said_so(trained, tmp_path):
    made = made_of(trained, {"FedAvg": FEDAVG, "tail": TAIL})
    said = (
        "Validation and test examples contradict each other on the 90th percentile over the 6 clients that have both: against "
        "FedAvg, tail is higher on validation examples, and lower on test examples. The seeds agree on both, so that the "
        "examples are the reason: claim neither."
    )
    against = validated(made, (0.05, 0.06, 0.07))
    assert against.differences(split="validation")["tail"].verdict == "higher"
    assert said in against.summary()
    assert said in Page(against.report(tmp_path / "r.html")).by_id["note"]
    for agreeing in ((-0.05, -0.06, -0.07), (0.05, -0.06, 0.07)):  # lower, too, or undecided
        assert "contradict" not in validated(made, agreeing).summary()
    assert "contradict" not in against.summary("validation")
    assert "contradict" not in made.summary()


def test_other_clients_contradict_with_their_counts_and_methods_share_a_sentence(trained):
    made = made_of(trained, {"FedAvg": FEDAVG, "tail": TAIL, "q": TAIL})
    against = validated(made, (0.05, 0.06, 0.07), names=("tail", "q"), others=True, sizes=[5, 40, 40, 40, 40, 40])
    said = (
        "Validation and test clients contradict each other on the 90th percentile: against FedAvg, tail and q are higher on "
        "{} validation clients, and lower on 6 test clients. The seeds agree on both, so that the clients are the reason: "
        "claim neither."
    )
    assert said.format(6) in against.summary()
    assert said.format(5) in against.summary(at_least=20)
    assert against.summary().count("contradict") == 1


def test_clients_that_at_least_leaves_in_one_split_alone_contradict_nothing(trained, tmp_path):
    # The last client decides the test percentile and has few validation examples: on validation data another one decides.
    made = made_of(trained, {"FedAvg": FEDAVG, "tail": TAIL})
    results = {}
    for name, runs in validated(made, (0.0, 0.0, 0.0), sizes=[40, 40, 40, 40, 40, 5]).results.items():
        results[name] = []
        for number, run in enumerate(runs):
            error = run.clients.error.clone()
            worse = (0.02, 0.021, 0.022)[number] * (name == "tail")
            error[4], error[10] = 0.42 + worse, 0.42 + worse  # the fifth client is worse off under tail in both splits
            results[name].append(replace(run, clients=replace(run.clients, error=error)))
    against = Comparison(results)
    found = {split: against.differences(split=split, at_least=20)["tail"].verdict for split in ("validation", "test")}
    assert found == {"validation": "higher", "test": "lower"}
    assert "contradict" not in against.summary(at_least=20)
    assert "contradict" not in Page(against.report(tmp_path / "r.html", at_least=20)).by_id["note"]


def test_no_sign_before_zero():
    assert signed_text(-0.0001) == signed_text(0.0001) == "0.000"
    assert PairedDifference("a", (0.2, 0.4)).words("b", "{:.1f}".format) == (
        "a is higher than b by 0.3 ± 0.1 (higher in 2 of 2 seeds)"
    )
    assert PairedDifference("a", (0.0,)).words("b", "{:.1f}".format) == "a equals b in the only seed"


def test_a_method_without_a_trivial_answer_is_named(trained, tmp_path):
    made = made_of(trained, {"FedAvg": FEDAVG, "private": TAIL})
    hidden = [replace(run, clients=replace(run.clients, trivial_error=None)) for run in made.results["private"]]
    known = [
        replace(run, clients=replace(run.clients, trivial_error=run.clients.error + 0.01, trivial_answer="most frequent class"))
        for run in made.results["FedAvg"]
    ]
    page = Page(Comparison({"FedAvg": known, "private": hidden}).report(tmp_path / "r.html"))
    said = "worse off than with this answer (mean over seeds): FedAvg: 0; private: not known, as for every private run"
    assert said in " ".join(page.source.replace("\u00a0", " ").split())
    assert "Where the change reaches 0, read the share of clients that gain." in page.source
