"""Clients picked as the worst: what is said of the choice, and the test of whether clients differ beyond chance."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from report_cases import Page

import equipoise as eq
from equipoise.cli.listing import worst_lines
from equipoise.client_table import ClientTable
from equipoise.export import model_card
from equipoise.picked_clients import beyond_chance_words, chance_of_spread
from equipoise.report import write_report
from equipoise.runs.trivial_answer import CLASS

DIFFER, UNSHOWN = "clients differ beyond chance", "do not show that the"


def table(wrong, sizes, **others):
    count = len(wrong)
    error = torch.tensor(wrong, dtype=torch.float64) / torch.tensor(sizes)
    made = ClientTable(
        tuple(f"c{k}" for k in range(count)), ("test",) * count, torch.zeros(count, dtype=torch.bool), torch.tensor(sizes),
        loss=error, error=error, trivial_error=torch.full_like(error, 0.25), trivial_answer=CLASS,
    )  # fmt: skip
    return replace(made, **others)


ALIKE, APART = table([10, 11, 9, 12, 8], [50] * 5), table([10, 11, 9, 12, 30], [50] * 5)


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


def test_nothing_to_compare():
    for wrong, sizes in (([3], [9]), ([0, 0], [5, 5]), ([5, 5], [5, 5])):
        assert chance_of_spread(torch.tensor(wrong), torch.tensor(sizes)) is None


def test_the_list_says_that_its_clients_were_picked_and_whether_all_differ():
    text = str(APART.worst(2))
    assert "These are the worst 2 of 5 clients. Part of that is chance: expect them nearer to the others on new rows." in text
    assert "The intervals do not allow for this choice." in text
    assert f"The 5 {DIFFER}: if each row of every client were equally likely to be wrong" in text
    assert "takes the rows to be independent of each other" in text
    assert f"These rows {UNSHOWN} 5 clients differ" in str(ALIKE.worst(2))
    assert "of 4 clients" in str(replace(APART, size=torch.tensor([50, 50, 50, 50, 10])).worst(2, at_least=20))
    assert "These are the worst" not in str(APART.worst())  # all of them


def test_the_list_has_the_error_of_the_trivial_answer():
    lines = str(APART.worst(1)).splitlines()
    assert lines[0].endswith("95 % interval   trivial error")
    assert lines[1].endswith("0.250")
    assert f"trivial error: of the same answer for every example, the {CLASS} of training." in lines
    assert "trivial" not in str(replace(APART, trivial_error=None, trivial_answer="").worst(1))


def test_the_test_is_for_right_and_wrong_rows_of_a_shared_model_that_it_was_not_trained_on():
    none = torch.full((5,), torch.nan, dtype=torch.float64)
    assert beyond_chance_words(replace(APART, personal_error=none, personal_loss=none))  # nobody has an own model
    for other in (
        {"split": ("train",) * 5},
        {"split": ("test",) * 4 + ("validation",)},
        {"personal_error": APART.error, "personal_loss": APART.error},
        {"trivial_answer": "mean of the targets"},
        {"trivial_error": None, "trivial_answer": ""},  # as of private runs
        {"error": APART.error + 0.001},
    ):
        assert beyond_chance_words(replace(APART, **other)) == ""


@pytest.fixture(scope="module")
def run():
    data = eq.data.label_shift(train_clients=8, validation_clients=0, test_clients=12, examples=60)
    return eq.train(eq.models.Softmax(20, 10), data, rounds=1, clients_per_round=4)


def of(run, wrong, sizes):
    return replace(run, clients=table(wrong, sizes))


def test_the_page_says_it_and_names_who_is_worse_off_than_with_the_trivial_answer(run, tmp_path):
    wrong = [10] * 10 + [20, 35]
    page = Page(of(run, wrong, [50] * 12).report(tmp_path / "r.html"))
    header, first, *_ = page.rows["table-worst"]
    assert header == ["client", "examples", "error (%)", "trivial error (%)", "loss"]
    assert (first[0], first[3]) == ("c11", "25.0")
    said = page.by_id["picked"]
    assert "These are the worst 10 of 12 clients. Part of that is chance" in said
    assert "The intervals do not allow for this choice." in said
    assert f"The 12 {DIFFER}" in said
    assert "worse off than with this answer: 2 (c11 and c10; some of them by chance)." in page.by_id["trivial"].replace(
        "\u00a0", " "
    )
    assert "<details><summary>The algorithm, as code</summary>" in page.source
    assert "a branch, a hospital or a phone" in page.source


def test_the_card_says_that_they_were_picked(run, tmp_path):
    card = model_card.card_markdown(model_card.card(of(run, [10] * 10 + [20, 35], [50] * 12))).decode()
    assert "These are the worst 5 of 12 clients. Part of that is chance" in card


def test_a_protected_run_has_neither_names_nor_the_test(run, tmp_path):
    algorithm = replace(run.algorithm, privacy=eq.privacy.SecureAggregation())
    protected = replace(of(run, [10] * 10 + [20, 35], [50] * 12), algorithm=algorithm)
    page = Page(protected.report(tmp_path / "r.html"))
    for text in ("c11", "beyond chance", "Part of that is chance"):
        assert text not in page.source
        assert text not in "\n".join(worst_lines(protected))


def test_commands_list_large_clients_first_and_name_both_commands(run, tmp_path):
    few = of(run, [1, 1, *[10] * 10], [1, 1, *[50] * 10])
    lines = worst_lines(few)
    assert lines[0] == "The clients that are served worst, by their 0-1 error, with 30 examples or more:"
    assert not any(re.match(r"  c[01] ", line) for line in lines)
    small = of(run, [1] * 12, [10] * 12)  # all have few: all are listed
    assert worst_lines(small)[0] == "The clients that are served worst, by their 0-1 error:"


def test_a_limit_that_is_asked_for_takes_the_place_of_ours(run, tmp_path):
    some = of(run, [9, *[10] * 12], [10, *[50] * 12]).judged_by(at_least=10)
    assert worst_lines(some)[0] == "The clients that are served worst, by their 0-1 error, with 10 examples or more:"
    assert re.match(r"  c0 ", worst_lines(some)[2])
    page = Page(some.report(tmp_path / "r.html"))
    assert page.rows["table-worst"][1][0] == "c0"
    assert "These are the worst 10 of 13 clients." in page.by_id["picked"]


def test_the_page_lists_no_client_with_few_examples_where_enough_others_are_there(run, tmp_path):
    small = of(run, [1, *[10] * 11], [1, *[50] * 11])
    page = Page(small.report(tmp_path / "r.html"))
    assert "c0" not in [row[0] for row in page.rows["table-worst"]]
    assert page.by_id["table-worst-caption"].startswith(
        "The 10 clients with the largest error, of the 11 with 30 examples or more."
    )
    assert "These are the worst 10 of 11 clients." in page.by_id["picked"]
    assert f"These rows {UNSHOWN} 11 clients differ" in page.by_id["picked"]
    two = Page(write_report([small, replace(small, name="other")], tmp_path / "r.html"))
    assert "c0" not in [row[0] for row in two.rows["left-behind"]]
    few = Page(of(run, [1] * 2 + [10] * 10, [1] * 2 + [50] * 10).report(tmp_path / "r.html"))  # no more than ten others
    assert "c0" in [row[0] for row in few.rows["table-worst"]]
