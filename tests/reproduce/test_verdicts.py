"""The verdicts on published claims: yes, no or undecided, by paired differences over seeds."""

import pytest

from equipoise.report.paired import LEAST_SEEDS
from equipoise.reproduce import EXPERIMENTS
from equipoise.reproduce.published import table
from equipoise.reproduce.result_tables import Reproduction, Spread, spread_text

ENTRY = EXPERIMENTS["emnist-linear"]
CLAIM = ENTRY.claims[0]
DIGITS = ENTRY.figures[CLAIM.figure].digits


def verdict(lower, higher):
    """The verdict on the first claim with the given figures of its two methods, one per seed."""
    rows = {
        name: {seed: {"figures": {CLAIM.figure: value}} for seed, value in enumerate(values)}
        for name, values in ((CLAIM.lower, lower), (CLAIM.higher, higher))
    }
    made = Reproduction(ENTRY, "small", ENTRY.scales["small"], tuple(range(len(lower))), 0.1, False, rows, 0.0)
    return made.verdict(CLAIM)


@pytest.mark.parametrize(
    ("lower", "higher", "word", "words"),
    [
        # Differences −1, −1.2, −0.8: mean −1, s = 0.2, interval −1 ± 4.303 · 0.2 / √3 = −1 ± 0.50.
        ([29, 28.8, 29.2], [30, 30, 30], "yes", "−1.00 ± 0.20, lower in 3 of 3. 95 % interval −1.50 to −0.50."),
        ([31, 31.2, 30.8], [30, 30, 30], "no", "+1.00 ± 0.20, lower in 0 of 3"),
        # Differences +123 and −215: a coin flip that was once called "holds, by 46 ± 239".
        ([153, 15], [30, 230], "undecided", "−46.00 ± 239.00, lower in 1 of 2"),
        ([29, 29, 29], [30, 30, 30], "undecided (no spread between seeds)", "−1.00 ± 0.00, lower in 3 of 3"),
        ([29, 28], [30, 30], "undecided", "lower in 2 of 2"),
        ([29], [30], "undecided", "−1.00, lower in 1 of 1. An interval needs 3 seeds: add --seeds 3."),
        ([30, 30, 30], [30, 30, 30], "undecided (no spread between seeds)", "0.00 ± 0.00"),
        ([30], [30], "undecided", "0.00, lower in 0 of 1"),
    ],
)
def test_three_verdicts_in_plain_words(lower, higher, word, words):
    text = verdict(lower, higher)
    assert DIGITS == 2
    assert f": **{word}**. Difference " in text
    assert words in text
    assert "by -" not in text


def test_more_seeds_are_advised_where_there_is_a_difference():
    assert "add --seeds 3" in verdict([29, 28], [30, 30])
    assert "add --seeds" not in verdict([0.0, 0.0], [0.0, 0.0])  # a bounded figure at its end
    assert "add --seeds" not in verdict([29, 28.8, 29.2], [30, 30, 30])


def test_what_needs_no_data_files_has_seeds_for_verdicts_at_the_small_scale():
    assert EXPERIMENTS["fairness-synthetic"].scales["small"].seeds >= LEAST_SEEDS


def test_no_seed_in_common():
    assert verdict([], []).endswith("no seed in which both finished.")


def test_no_sign_before_zero_and_no_name_twice():
    assert spread_text(Spread(-0.001, 0.2), 2, 3) == "0.00 ± 0.20"
    entry = EXPERIMENTS["fairness-synthetic"]
    published = next(t for t in map(table, entry.tables) if any(r.parameter and r.parameter in n for n, r in t.rows.items()))
    rows = {name: {} for name in published.rows}
    made = Reproduction(entry, "small", entry.scales["small"], (0,), 0.1, False, rows, 0.0)
    assert "q = 1 (q = 1)" not in "\n".join(made.side_by_side(published))
