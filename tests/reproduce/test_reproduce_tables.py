"""The descriptions: every method of every published table is there, its numbers parse, its source is named."""

import math

import pytest

import equipoise as eq
from equipoise.reproduce import EXPERIMENTS
from equipoise.reproduce.experiments import SEVERAL
from equipoise.reproduce.published import table

NAMES = {
    "emnist-tail",
    "emnist-linear", "emnist-convnet", "sent140-linear", "sent140-lstm", "shakespeare-gru", "delta-fl-finetuning",
    "fairness-synthetic", "fedprox-synthetic", "clothing-linear", "clothing-lstm", "stackoverflow-linear", "stackoverflow-lstm",
}  # fmt: skip
NINE = ["FedAvg", "FedAvg-Sub", "FedProx", "q-FFL", "Tilted-ERM", "AFL", "Δ-FL 0.8", "Δ-FL 0.5", "Δ-FL 0.1"]
JOURNAL = ("emnist-linear", "emnist-convnet", "sent140-linear", "sent140-lstm")


def methods(name):
    return {method.name: method for method in EXPERIMENTS[name].methods}


def test_all_entries_are_there():
    assert set(EXPERIMENTS) == NAMES | {part for parts in SEVERAL.values() for part in parts}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_descriptions_are_complete(name):
    entry = EXPERIMENTS[name]
    assert entry.scales.keys() == {"small", "paper"}
    small, paper = entry.scales["small"], entry.scales["paper"]
    assert small.rounds * small.seeds < paper.rounds * paper.seeds
    for claim in entry.claims:
        assert {claim.lower, claim.higher} <= methods(name).keys()
        assert claim.figure in entry.figures
        assert claim.source
    for method in entry.methods:
        entry.algorithm(method, paper)  # parts that do not fit are refused here
    stands_in = name.split("-")[0] in ("clothing", "stackoverflow")
    assert (not entry.tables) == stands_in
    if stands_in:
        assert any("not Sent140" in text for text in entry.differences)
        twin = EXPERIMENTS[name.replace("clothing", "sent140").replace("stackoverflow", "sent140")]
        assert (entry.methods, entry.solver, entry.decay_after) == (twin.methods, twin.solver, twin.decay_after)


@pytest.mark.parametrize("name", sorted(n for n in NAMES if EXPERIMENTS[n].tables))
def test_every_published_row_has_a_method_and_a_source(name):
    entry = EXPERIMENTS[name]
    rows = {}
    for place in entry.tables:
        published = table(place)
        assert published.document
        assert any(word in published.source for word in ("Table", "Figure"))
        rows |= published.rows
        for row in published.rows.values():
            assert row.figures
            assert row.figures.keys() <= entry.figures.keys()
            for value in row.figures.values():
                assert math.isfinite(value.mean)
                assert value.mean > 0
                assert value.deviation >= 0
            if row.chosen_on_test:
                assert row.parameter
    if name != "fedprox-synthetic":  # a figure: curves, no numbers
        assert rows.keys() == methods(name).keys()


def test_rows_are_those_of_the_tables():
    for name in JOURNAL:
        assert list(methods(name)) == NINE == list(table(f"journal/{name}").rows)
    assert list(methods("shakespeare-gru")) == [n for n in NINE if n not in ("FedAvg-Sub", "Tilted-ERM")]
    assert list(methods("delta-fl-finetuning")) == ["FedAvg", "Δ-FL 0.8", "Δ-FL 0.5", "Δ-FL 0.1"]
    assert len(methods("fairness-synthetic")) == 12
    assert len(table("thesis/fairness-4-1").rows) == 2
    assert len(table("thesis/fairness-4-10").rows) == 12


def test_rows_chosen_on_test_clients_are_marked():
    for name in JOURNAL:
        marked = [n for n, row in table(f"journal/{name}").rows.items() if row.chosen_on_test]
        assert marked == ["FedAvg-Sub", "q-FFL", "Tilted-ERM"]
    assert [n for n, row in table("slides/shakespeare-gru").rows.items() if row.chosen_on_test] == ["q-FFL"]


def test_methods_use_the_published_parameters():
    for name, share, q in zip(JOURNAL, (0.5, 0.5, 0.8, 0.8), (1.0, 0.001, 1.0, 0.01), strict=True):
        rows = methods(name)
        assert rows["FedAvg-Sub"].sampler == eq.sampling.Uniform(share)
        assert rows["q-FFL"].risk == eq.risk.QFair(q)
        assert rows["AFL"].risk == eq.risk.QFair(10.0)
        assert rows["Tilted-ERM"].risk == eq.risk.Tilted(1.0)
        assert [rows[f"Δ-FL {t}"].risk.tail for t in (0.8, 0.5, 0.1)] == [0.8, 0.5, 0.1]
        published = table(f"journal/{name}").rows
        assert published["q-FFL"].parameter == f"q = {q:g}"
        assert published["FedAvg-Sub"].parameter == f"θ = {share:g}"


def test_settings_of_the_papers():
    """Appendix C.2 of the journal version and METHODS: rounds, clients per round, batch, halvings."""
    expected = {
        "emnist-linear": (3000, 100, 10, None), "emnist-convnet": (1000, 100, 16, 400), "sent140-linear": (1000, 100, 10, None),
        "sent140-lstm": (600, 50, 10, 200), "shakespeare-gru": (600, 100, 16, 200),
    }  # fmt: skip
    for name, (rounds, clients, batch, halving) in expected.items():
        entry = EXPERIMENTS[name]
        paper = entry.scales["paper"]
        assert (paper.rounds, paper.clients_per_round, paper.seeds) == (rounds, clients, 5)
        solver = entry.local_solver(entry.methods[0], paper)
        assert (solver.batch_size, solver.epochs) == (batch, 1)
        if halving is None:
            assert solver.lr_decay == 1.0
        else:
            assert (solver.lr_decay, solver.lr_decay_every) == (0.5, halving)
    linear = methods("emnist-linear")
    assert linear["FedAvg"].solver["weight_decay"] == 1e-9
    assert linear["Δ-FL 0.5"].solver["weight_decay"] == 1e-7
    fedprox = EXPERIMENTS["fedprox-synthetic"]
    assert (fedprox.solver.lr, fedprox.solver.epochs, fedprox.scales["paper"].rounds) == (0.01, 20, 200)


def test_numbers_read_from_the_documents_by_hand():
    def pair(place, row, figure):
        value = table(place).rows[row].figures[figure]
        return value.mean, value.deviation

    assert pair("journal/emnist-linear", "Δ-FL 0.5", "percentile_90") == (48.44, 0.38)
    assert pair("journal/emnist-convnet", "AFL", "mean") == (33.01, 0.37)
    assert pair("journal/sent140-linear", "q-FFL", "percentile_90") == (46.39, 0.40)
    assert pair("journal/sent140-lstm", "Δ-FL 0.1", "percentile_90") == (86.45, 10.95)
    assert pair("journal/delta-fl-finetuning", "Δ-FL 0.8", "percentile_90_after") == (8.69, 0.12)
    assert pair("slides/shakespeare-gru", "AFL", "mean") == (73.28, 1.13)
    assert pair("thesis/fairness-4-1", "Synthetic(1,1), 100 clients, q = 1", "variance") == (472, 14)
    assert pair("thesis/fairness-4-10", "Synthetic(1,1), 100 clients, q = 1", "variance") == (362, 58)
