"""`equipoise.evaluate`: the client table of a model that exists."""

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.data.clients import FederatedData
from equipoise.errors import InvalidData, InvalidParameter
from made_clients import make_clients

METRICS = {"f1": eq.metrics.macro_f1}


def same_table(first, second):
    assert first.columns == second.columns
    for name in first.columns:
        if isinstance(first[name], torch.Tensor):
            assert torch.equal(first[name], second[name]), name
        else:
            assert first[name] == second[name]


@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize("count", [None, 2])
def test_the_table_is_that_of_the_run(ragged, engine, count):
    options = {"engine": engine, "metrics": METRICS, "evaluate_clients": count}
    result = eq.train(eq.models.Softmax(4, 3), ragged, rounds=3, clients_per_round=3, **options)
    found = eq.evaluate(result.model, ragged, name="run", **options)
    same_table(found.clients, result.clients)
    for split in ragged.splits:
        judged, trained = found.summary(split), result.summary(split)
        assert (judged.error, judged.loss, judged.metrics) == (trained.error, trained.loss, trained.metrics)


def test_the_page_of_a_model_that_was_only_evaluated_calls_no_client_unseen(ragged, tmp_path):
    result = eq.train(eq.models.Softmax(4, 3), ragged, rounds=1, clients_per_round=3)
    pages = tmp_path / "run.html", tmp_path / "evaluated.html"
    result.report(pages[0])
    eq.evaluate(result.model, ragged).report(pages[1])
    assert "unseen test clients" in pages[0].read_text(encoding="utf-8")
    assert "unseen test clients" not in pages[1].read_text(encoding="utf-8")


def test_the_summary_names_the_splits_that_it_leaves_out_and_calls_no_client_unseen():
    rows = {"sex": ["f", "f", "m", "m", "m"], "age": [20, 30, 40, 50, 60], "ill": ["no", "yes", "no", "yes", "no"]}
    part = {"client": "sex", "target": "ill"}
    schema = eq.data.from_frame(rows, **part, test=0).schema
    model = eq.models.Tabular(schema)
    parts = eq.evaluate(model, eq.data.from_frame(rows, **part, schema=schema)).summary()
    assert parts.who == "1 test client"
    assert "Not in these figures: train (clients: 1, " in str(parts)
    whole = eq.evaluate(model, eq.data.from_frame(rows, **part, schema=schema, test=0)).summary()
    assert whole.who == "2 clients, weighted by examples"
    assert "Not in these figures" not in str(whole)


def test_other_data_loss_and_error(ragged):
    model = nn.Linear(4, 3)
    before = model.weight.detach().clone()
    found = eq.evaluate(model, ragged, loss=lambda o, t: o.sum(1), error=lambda o, t: o[:, 0] * 0 + t)
    for row in found.clients:
        x, y = ragged.splits[row["split"]].client(row["client"])
        assert row["loss"] == pytest.approx(float(model(x).detach().double().sum(1).mean()), rel=1e-5)
        assert row["error"] == pytest.approx(float(y.double().mean()))
    assert torch.equal(before, model.weight)
    assert not found.error_is_loss


def test_a_set_of_clients_is_judged_as_test_clients(ragged, tmp_path):
    clients = make_clients([5, 9], seed=7, prefix="new")
    found = eq.evaluate(eq.models.Softmax(4, 3), clients, name="mine")
    assert set(found.clients.split) == {"test"}
    assert not bool(found.clients.seen.any())
    assert "mine: 2 test clients" in str(found)
    page = found.report(tmp_path / "page.html").read_text()
    assert "without training" in page


def test_a_model_that_cannot_be_vectorised_needs_no_notice(ragged):
    class Branching(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (1.0 if float(x.sum()) > -1e9 else 2.0)

    eq.evaluate(Branching(4, 3), ragged)  # tests take warnings as errors


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda data: eq.evaluate(data, nn.Linear(4, 3)), InvalidParameter, r"Write evaluate\(model, data, …\)"),
        (lambda data: eq.evaluate(nn.Linear(5, 3), data), InvalidParameter, "must fit the data"),
        (lambda data: eq.evaluate(nn.Linear(4, 2), data), InvalidParameter, "with 2 classes"),
        (lambda data: eq.evaluate(lambda seed: nn.Linear(4, 3), data), InvalidParameter, r"must be a torch\.nn\.Module"),
        (lambda data: eq.evaluate(nn.Linear(4, 3), [1, 2]), InvalidParameter, "must be a FederatedData or a ClientSet"),
        (lambda data: eq.evaluate(nn.Linear(4, 3), data, engine="gpu"), InvalidParameter, "engine"),
        (lambda data: eq.evaluate(nn.Linear(4, 3), data, metrics=[1]), InvalidParameter, "must map names"),
    ],
)
def test_what_does_not_fit_is_refused_as_in_train(ragged, call, kind, text):
    with pytest.raises(kind, match=text):
        call(ragged)


def test_data_of_other_classes_are_refused():
    with pytest.raises((InvalidParameter, InvalidData)):
        eq.evaluate(nn.Linear(4, 3), FederatedData(make_clients([5, 9], classes=6)))
