"""The headline says what the numbers say, and no more."""

import math

import pytest

from equipoise.compare import Spread
from equipoise.core.error_names import error_name, error_words
from equipoise.report.text.phrases import capital
from equipoise.report.text.sentences import (
    JudgedClients,
    ValidationFigures,
    ValueFormat,
    clearly_lower,
    comparison_sentence,
    method_sentence,
    trivial_sentence,
)

PERCENT = ValueFormat(percent=True, decimals=1)
JUDGED = JudgedClients((500, 500), "test", unseen=True, weighted=False)


def row(mean, tail, worst=0.5):
    values = {"mean": mean, "percentile_90": tail, "worst_10": worst, "standard_deviation": 0.1, "trained": 9.0, "seconds": 1.0}
    return {key: Spread(value, 0.0) for key, value in values.items()}


def test_abbreviations_of_errors_are_capitals():
    def mae(outputs, targets): ...

    assert error_name(mae) == "MAE"
    assert capital(error_words(error_name(mae), "stay")) == "MAE of stay"


def test_an_improvement_names_both_percentiles_and_its_price():
    table = {"FedAvg": row(0.120, 0.312), "Δ-FL 0.5": row(0.123, 0.279), "other": row(0.11, 0.30)}
    assert comparison_sentence(table, JUDGED, PERCENT) == (
        "Δ-FL 0.5 lowers the 90th percentile of the error over 500 unseen test clients from 31.2 % to 27.9 %, "
        "against FedAvg. The mean error rises from 12.0 % to 12.3 %. It is the best of 2 methods on these same clients, "
        "and the figure therefore optimistic."
    )
    two = {name: table[name] for name in ("FedAvg", "Δ-FL 0.5")}  # nothing was picked
    assert comparison_sentence(two, JUDGED, PERCENT).endswith("against FedAvg. The mean error rises from 12.0 % to 12.3 %.")


def test_a_method_is_not_called_the_best_while_an_undecided_one_is_lower():
    table = {"FedAvg": row(1.0, 3.59), "Ditto": row(1.0, 2.20), "Finetuning": row(1.0, 2.03), "APFL": row(1.0, 3.0)}
    differences = {"Ditto": [-1.3, -1.4, -1.47], "Finetuning": [-0.2, -0.4, -4.08], "APFL": [-0.5, -0.6, -0.67]}
    plain = ValueFormat(percent=False, decimals=2)
    text = comparison_sentence(table, JUDGED, plain, differences)
    assert text.startswith("Ditto lowers the 90th percentile")
    assert "from 3.59 to 2.20" in text
    assert "95 % interval of the difference: −1.60 to −1.18)" in text
    assert "best" not in text
    assert text.endswith(
        "Of 3 methods it is the lowest of those whose difference is significant on these same clients, and the figure "
        "therefore optimistic; lower still: Finetuning at 2.03 (undecided)."
    )
    two = {"Ditto": [-1.3, -1.4], "Finetuning": [0.2, -3.3], "APFL": [-0.5, -0.6]}
    assert "the lowest of those that are lower in every seed on" in comparison_sentence(table, JUDGED, plain, two)


VALIDATION = "100 unseen validation clients"


def test_the_method_is_chosen_on_validation_data_and_not_on_the_test_clients():
    # The case of a report that picked tail 0.7 because it is the lowest on the test clients.
    table = {"FedAvg": row(0.20, 0.384), "tail 0.7": row(0.20, 0.360), "tail 0.5": row(0.21, 0.374)}
    differences = {"tail 0.7": [-0.023, -0.024, -0.025], "tail 0.5": [-0.009, -0.010, -0.011]}
    validation = ValidationFigures({"FedAvg": 0.381, "tail 0.7": 0.372, "tail 0.5": 0.370}, VALIDATION)
    assert comparison_sentence(table, JUDGED, PERCENT, differences, validation) == (
        "tail 0.5, chosen by its 90th percentile on 100 unseen validation clients (37.0 % against 38.1 % under FedAvg), lowers "
        "the 90th percentile of the error over 500 unseen test clients from 38.4 % to 37.4 %, against FedAvg (lower in 3 of 3 "
        "seeds; 95 % interval of the difference: −1.2 to −0.8 points). The mean error rises from 20.0 % to 21.0 %."
    )


def test_validation_data_may_choose_a_method_that_does_not_help_or_none():
    table = {"FedAvg": row(0.20, 0.384), "tail 0.5": row(0.21, 0.390)}
    validation = ValidationFigures({"FedAvg": 0.381, "tail 0.5": 0.370}, VALIDATION)
    assert comparison_sentence(table, JUDGED, PERCENT, {"tail 0.5": [0.006]}, validation) == (
        "tail 0.5, chosen by its 90th percentile on 100 unseen validation clients (37.0 % against 38.1 % under FedAvg), does "
        "not lower the 90th percentile of the error over 500 unseen test clients: 38.4 % under FedAvg, 39.0 % under tail 0.5."
    )
    unclear = {"FedAvg": row(0.20, 0.384), "tail 0.5": row(0.21, 0.374)}
    text = comparison_sentence(unclear, JUDGED, PERCENT, {"tail 0.5": [-0.05, 0.01, 0.01]}, validation)
    assert "does not clearly lower" in text
    none = ValidationFigures({"FedAvg": 0.36, "tail 0.5": 0.37}, VALIDATION)
    assert comparison_sentence(unclear, JUDGED, PERCENT, None, none) == (
        "No method has a lower 90th percentile on 100 unseen validation clients than FedAvg (36.0 %), so none is chosen; the "
        "90th percentile of the error over 500 unseen test clients is 38.4 % under FedAvg."
    )


@pytest.mark.parametrize(
    ("mean", "words"),
    [(0.116, ". The mean error falls from 12.0 % to 11.6 %."), (0.12004, ". The mean error is the same.")],
)
def test_a_mean_that_falls_or_stays_is_said_so(mean, words):
    assert words in comparison_sentence({"a": row(0.12, 0.3), "b": row(mean, 0.2)}, JUDGED, PERCENT)


def test_the_price_is_said_in_the_numbers_that_are_written():
    text = comparison_sentence({"a": row(0.1204, 0.3), "b": row(0.1236, 0.2)}, JUDGED, PERCENT)
    assert "rises from 12.0 % to 12.4 %" in text


@pytest.mark.parametrize("tail", [0.312, 0.35, 0.31196])
def test_no_improvement_is_admitted_also_when_it_vanishes_in_rounding(tail):
    text = comparison_sentence({"FedAvg": row(0.12, 0.312), "b": row(0.10, tail)}, JUDGED, PERCENT)
    assert text.startswith("No method lowers the 90th percentile")
    assert "31.2 % of FedAvg" in text


def test_few_seeds_that_agree_are_named():
    table = {"a": row(0.1, 0.3), "b": row(0.1, 0.2)}
    agreed = [-0.1, -0.12, -0.11, -0.1, 0.001]
    interval = "; 95 % interval of the difference: −14.7 to −2.5 points"
    assert f"(lower in 4 of 5 seeds{interval})" in comparison_sentence(table, JUDGED, PERCENT, {"b": agreed})
    assert "(one seed, which does not rule out chance)" in comparison_sentence(table, JUDGED, PERCENT, {"b": [-0.1]})
    two = comparison_sentence(table, JUDGED, PERCENT, {"b": [-0.1, -0.2]})
    assert "(lower in 2 of 2 seeds, too few to rule out chance)" in two
    assert "(but the two have no seed in common)" in comparison_sentence(table, JUDGED, PERCENT, {"b": []})


def test_a_gain_within_its_spread_over_seeds_is_no_gain():
    table, apart = {"FedAvg": row(0.1, 0.265), "tail 0.5": row(0.1, 0.261)}, [-0.026, -0.009, 0.022, -0.003]
    assert comparison_sentence(table, JUDGED, PERCENT, {"tail 0.5": apart}) == (
        "No method clearly lowers the 90th percentile of the error over 500 unseen test clients: 26.5 % under FedAvg, 26.1 % "
        "under tail 0.5; the difference varies by ± 2.0 over 4 seeds (lower in 3 of them)."
    )


@pytest.mark.parametrize(
    ("differences", "clear"),
    [
        ([-1.0, -1.2], True),  # two seeds: both are lower
        ([-1.0, 0.1], False),
        ([-1.0, -2.0, -3.0], False),  # −2 ± 4.303 · 1 / √3 = −2 ± 2.48
        ([-1.0, -1.5, -2.0], True),  # −1.5 ± 1.24
        ([-1.0, -1.0, -1.0, 0.1], False),  # −0.725 ± 3.182 · 0.55 / 2 = −0.725 ± 0.875
        ([-1.0, -1.0, -1.0, -1.0, 0.1], True),  # −0.78 ± 2.776 · 0.492 / √5 = −0.78 ± 0.611
        ([1.0, 1.2, 1.1], False),
        ([-1.0], False),
        ([-1.0, math.nan], False),
        ([], False),
    ],
)
def test_what_is_clearly_lower(differences, clear):
    assert clearly_lower(differences) is clear


def test_a_method_that_is_clearly_lower_goes_before_a_lower_one_by_chance():
    table = {"FedAvg": row(0.1, 0.3), "chance": row(0.1, 0.2), "clear": row(0.1, 0.25)}
    differences = {"chance": [-0.4, 0.2], "clear": [-0.05, -0.05]}
    assert comparison_sentence(table, JUDGED, PERCENT, differences).startswith("clear lowers the 90th percentile")


def test_no_better_than_the_trivial_answer():
    known = {**row(0.2, 0.4), "trivial_percentile_90": Spread(0.38, 0.0)}
    assert trivial_sentence(known, PERCENT, "most frequent class", "FedAvg") == (
        "The 90th percentile of FedAvg, 40.0 %, is no better than that of the trivial answer (most frequent class), 38.0 %."
    )
    assert trivial_sentence(known | {"percentile_90": Spread(0.379, 0.0)}, PERCENT, "most frequent class") == ""
    assert trivial_sentence(row(0.2, 0.4), PERCENT, "") == ""
    same_mean = known | {"trivial_mean": Spread(0.2, 0.0)}
    assert trivial_sentence(same_mean, PERCENT, "most frequent class") == (
        "The mean error and the 90th percentile, 20.0 % and 40.0 %, are no better than those of the trivial answer "
        "(most frequent class), 20.0 % and 38.0 %."
    )
    assert trivial_sentence(same_mean | {"percentile_90": Spread(0.379, 0.0)}, PERCENT, "most frequent class") == (
        "The mean error, 20.0 %, is no better than that of the trivial answer (most frequent class), 20.0 %."
    )


@pytest.mark.parametrize(("before", "after"), [(math.nan, 0.2), (0.2, math.nan), (math.nan, math.inf)])
def test_numbers_that_do_not_exist_are_not_written(before, after):
    text = comparison_sentence({"a": row(0.1, before), "b": row(0.1, after)}, JUDGED, PERCENT)
    assert "nan" not in text
    assert "inf " not in text


def test_one_method_says_who_is_left_behind():
    assert method_sentence(row(0.2, 0.4, 0.41), 0.123, JUDGED, PERCENT) == (
        "Half of the 500 unseen test clients see an error of 12.3 % or less; the worst 10 % see 41.0 % on average."
    )
    training = JudgedClients((20, 20), "train", unseen=False, weighted=True)
    assert method_sentence(row(0.2, 0.4), 0.1, training, PERCENT, seeds=3).startswith(
        "Half of the 20 training clients, weighted by their examples, see"
    )
    assert "(mean over 3 seeds)" in method_sentence(row(0.2, 0.4), 0.1, training, PERCENT, seeds=3)


def test_one_client_and_no_finite_number():
    one = JudgedClients((1, 1), "test", unseen=True, weighted=False)
    assert method_sentence(row(0.25, 0.25), 0.25, one, PERCENT) == "The one unseen test client sees an error of 25.0 %."
    assert "not finite" in method_sentence(row(math.nan, 0.25), 0.25, one, PERCENT)


def test_plain_numbers_have_three_digits_and_no_percent():
    scale = ValueFormat.fitting(12.3, percent=False, noun="loss")
    text = comparison_sentence({"a": row(4.0, 12.34), "b": row(4.5, 9.87)}, JUDGED, scale)
    assert "of the loss over" in text
    assert "from 12.3 to 9.9, against a. The mean loss rises from 4.0 to 4.5." in text
    assert ValueFormat.fitting(0.01234, percent=False).number(0.01234) == "0.0123"
    assert ValueFormat.fitting(1e12, percent=False).number(1e12) == "1e+12"
    assert ValueFormat.fitting(0.0, percent=False).number(0.0) == "0.00"
    assert ValueFormat.fitting(0.004, percent=True).value(0.0041) == "0.41 %"
