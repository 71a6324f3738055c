"""Metrics of single clients: what each is, by hand and by scikit-learn, and how they get into tables, histories and files."""

import math

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn_metrics
from torch import nn

import equipoise as eq
from equipoise.client_table import ClientTable
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.errors import InvalidParameter
from made_clients import make_clients

EVERY = {"f1": eq.metrics.macro_f1, "top": eq.metrics.top_5, "ppl": eq.metrics.perplexity}


def scikit_f1(outputs, targets):
    return sklearn_metrics.f1_score(targets.numpy(), outputs.argmax(1).numpy(), average="macro")


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------------------------------ what they compute


@pytest.mark.parametrize("size", [1, 2, 17, 100])
def test_macro_f1_auc_top_5_and_perplexity_are_those_of_scikit_learn(size):
    outputs, gen = numbers(size, size, 8), torch.Generator().manual_seed(size + 1)
    targets = torch.randint(0, 8, (size,), generator=gen)
    assert float(eq.metrics.macro_f1(outputs, targets)) == pytest.approx(scikit_f1(outputs, targets))
    ranked = sklearn_metrics.top_k_accuracy_score(targets, outputs.numpy(), k=5, labels=range(8))
    assert float(eq.metrics.top_5(outputs, targets)) == pytest.approx(ranked)
    surprise = sklearn_metrics.log_loss(targets, outputs.double().softmax(1).numpy(), labels=range(8))
    assert float(eq.metrics.perplexity(outputs, targets)) == pytest.approx(math.exp(surprise), rel=1e-5)
    rounded = (3 * outputs[:, 0]).round()  # with ties
    absolute = sklearn_metrics.mean_absolute_error(targets, rounded)
    assert float(eq.metrics.mean_absolute_error(rounded, targets)) == pytest.approx(absolute)
    halves = (targets > 3).long()
    if 0 < int(halves.sum()) < size:
        area = sklearn_metrics.roc_auc_score(halves, rounded)
        assert eq.metrics.auc(rounded, halves) == pytest.approx(area)
        assert eq.metrics.auc(rounded.unsqueeze(1), halves.float()) == pytest.approx(area)
        assert eq.metrics.auc(torch.stack([torch.zeros(size), rounded], 1), halves) == pytest.approx(area)
    else:
        assert math.isnan(eq.metrics.auc(rounded, halves))


def test_ignored_places_count_in_none_of_them():
    outputs, targets = numbers(0, 4, 5, 6), torch.randint(0, 5, (4, 6), generator=torch.Generator().manual_seed(1))
    targets[1, 2:], targets[3] = -100, -100
    known = targets >= 0
    flat, classes = outputs.movedim(1, -1)[known], targets[known]
    for metric in (eq.metrics.macro_f1, eq.metrics.top_5, eq.metrics.perplexity):
        assert float(metric(outputs, targets)) == pytest.approx(float(metric(flat, classes)))
        assert math.isnan(metric(outputs, torch.full_like(targets, -100)))


def test_perplexity_weighs_tokens_not_examples():
    outputs, targets = torch.zeros(2, 4, 3), torch.tensor([[0, 1, 2], [3, -100, -100]])
    outputs[1, 3, 0] = math.log(3.0)  # this token has chance 3 / 6, the other three 1 / 4
    by_hand = math.exp((3 * math.log(4) + math.log(2)) / 4)
    assert float(eq.metrics.perplexity(outputs, targets)) == pytest.approx(by_hand)


def test_auc_of_more_than_two_classes_is_refused():
    with pytest.raises(InvalidParameter, match="two classes"):
        eq.metrics.auc(torch.zeros(3, 4), torch.tensor([0, 1, 2]))


def test_the_tail_of_a_metric_is_at_its_bad_end():
    values, sizes = torch.arange(1.0, 11.0), torch.ones(10)
    more, less = (eq.metrics.summarise_metric(values, sizes, higher_is_better=h) for h in (True, False))
    assert (more.worst_10, more.tail_90, more.best_10) == (1.0, 2.0, 10.0)
    assert (less.worst_10, less.tail_90, less.best_10) == (10.0, 9.0, 1.0)
    mirrored = eq.metrics.summarise_metric(-values, sizes, higher_is_better=False)
    assert (-mirrored.tail_90, -mirrored.worst_10, -mirrored.worst_5) == (more.tail_90, more.worst_10, more.worst_5)
    nobody = eq.metrics.summarise_metric(torch.full((3,), math.nan), torch.ones(3))
    assert nobody.clients == 0
    assert nobody.missing == 3
    assert math.isnan(nobody.mean)
    assert math.isnan(nobody.percentiles[90])


# ---------------------------------------------------------------------------------------------------------------- in a run


@pytest.mark.parametrize("engine", ["loop", "simulator", eq.engines.Simulator(chunk_size=3)])
def test_a_runs_metrics_are_those_of_each_clients_outputs(ragged, engine):
    odd = {"odd": lambda outputs, targets: float("nan") if len(targets) % 2 else float(outputs.sum())}
    given = {**EVERY, **odd, "scikit": scikit_f1}
    result = eq.train(eq.models.Softmax(4, 3), ragged, rounds=3, clients_per_round=4, engine=engine, metrics=given)
    for row in result.clients:
        x, y = ragged.splits[row["split"]].client(row["client"])
        outputs = result.model(x).detach()
        for name, metric in given.items():
            assert row[name] == pytest.approx(float(metric(outputs, y)), rel=1e-5, nan_ok=True), name
    summary = result.summary()
    assert summary.metrics["odd"].missing == 2  # of 5, 9 and 14 examples
    assert summary.metrics["odd"].clients == 1
    text = str(summary)
    assert "odd: clients without a value, left out: 2." in text
    assert "More is better: f1, top, odd, scikit" in text
    point = result.history.points[-1].splits["test"]
    assert point["f1"] == pytest.approx(summary.metrics["f1"].mean)
    assert point["f1_90"] == pytest.approx(summary.metrics["f1"].tail_90)


def test_metrics_change_nothing_else(ragged):
    plain, measured = (
        eq.train(eq.models.Softmax(4, 3), ragged, rounds=3, clients_per_round=4, metrics=given) for given in (None, EVERY)
    )
    assert torch.equal(plain.params, measured.params)
    assert torch.equal(plain.clients.loss, measured.clients.loss)
    assert measured.clients.columns == (*plain.clients.columns, *EVERY)


class Tagger(nn.Module):
    """Scores (B, 4, T) of every step, as a dict; the mask keeps padding out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(9, 6), nn.Linear(6, 4)

    def forward(self, input_ids, attention_mask):
        return {"logits": self.head(self.embedding(input_ids) * attention_mask.unsqueeze(-1)).transpose(1, 2)}


def masked_loss(outputs, targets):
    losses = nn.functional.cross_entropy(outputs["logits"], targets, reduction="none", ignore_index=-100)
    return losses.sum(1) / (targets != -100).sum(1).clamp(min=1)


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_sequences_of_different_lengths_and_outputs_by_name(engine, monkeypatch):
    from equipoise.engines.simulator import scoring

    monkeypatch.setitem(scoring._ROWS, "cpu", 7)  # clients larger than a batch, batches padded to different lengths
    gen = np.random.default_rng(0)
    rows = {}
    for client, size in (("a", 3), ("b", 16), ("c", 9)):
        lengths = gen.integers(1, 30, size)
        x = eq.data.Ragged.of([gen.integers(0, 9, n) for n in lengths])
        rows[client] = ({"input_ids": x}, eq.data.Ragged.of([gen.integers(0, 4, n) for n in lengths], pad=-100))
    data = FederatedData(ClientSet.pack([(name, x, y) for name, (x, y) in rows.items()]))
    seen = {}

    def shapes(outputs, targets):
        seen[len(targets)] = tuple(outputs["logits"].shape)
        return float(outputs["logits"].sum(1)[targets >= 0].sum())

    given = {**EVERY, "shapes": shapes}
    result = eq.train(
        Tagger(), data, rounds=1, clients_per_round=2, loss=masked_loss, error=masked_loss, metrics=given, engine=engine
    )
    for row in result.clients:
        x, y = data.train.client(row["client"])
        outputs = {"logits": result.model(**x)["logits"].detach()}
        assert seen[len(y)][0] == len(y)
        assert seen[len(y)][2] == y.shape[1]
        for name in given:
            assert row[name] == pytest.approx(float(given[name](outputs, y)), rel=1e-4), name


class Listed(nn.Module):
    """A model that returns a list."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return [self.linear(x), x]


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_of_outputs_in_a_list_each_client_gets_its_own_rows(engine):
    data = FederatedData(make_clients([3, 5, 9], classes=3))

    def right(outputs, targets):
        return (outputs[0].argmax(1) == targets).double().mean()

    result = eq.train(
        Listed(), data, rounds=1, clients_per_round=2, engine=engine, metrics={"right": right}, progress=False,
        loss=lambda outputs, y: nn.functional.cross_entropy(outputs[0], y, reduction="none"),
        error=lambda outputs, y: (outputs[0].argmax(1) != y).float(),
    )  # fmt: skip
    for row in result.clients:
        assert row["right"] == pytest.approx(1 - row["error"])


def test_clients_with_models_of_their_own_have_metrics_of_those(ragged):
    inside = eq.data.split_examples(make_clients([12, 15, 20, 9]), test=0.4, seed=0)
    algorithm = eq.Algorithm(personal=eq.personal.Ditto(strength=0.1))
    loop, simulated = (
        eq.train(eq.models.Softmax(4, 3), inside, algorithm, rounds=4, clients_per_round=2, metrics=EVERY, engine=engine)
        for engine in ("loop", "simulator")
    )
    for result in (loop, simulated):
        for row in result.clients.where("test"):
            x, y = inside.test.client(row["client"])
            own = result.personal.model(row["client"])(x).detach()
            assert row["personal_f1"] == pytest.approx(float(eq.metrics.macro_f1(own, y)))
        served = result.clients.where("test").served_metrics["f1"]
        assert result.summary().metrics["f1"].mean == pytest.approx(float(served.mean()))


def test_several_runs_and_families_have_them(ragged):
    options = {"rounds": 2, "clients_per_round": 4, "metrics": EVERY}
    alone = eq.train(eq.models.Softmax(4, 3), ragged, seed=1, **options)
    many = eq.train_many(eq.models.Softmax(4, 3), ragged, seeds=2, **options)
    assert torch.allclose(many.results["run"][1].clients.metrics["f1"], alone.clients.metrics["f1"])
    compared = eq.compare({"FedAvg": eq.Algorithm()}, eq.models.Softmax(4, 3), ragged, seeds=[1], **options)
    assert torch.equal(compared.all_results[0].clients.metrics["ppl"], alone.clients.metrics["ppl"])
    assert "f1" in compared.summary()
    family = eq.train_family(eq.models.Softmax(4, 3), ragged, tails=[1.0, 0.5], seed=1, **options)
    rows = family.comparison().results
    chosen = rows["family"][0].clients.metrics["ppl"]
    members = torch.stack([rows[name][0].clients.metrics["ppl"] for name in ("tail 1", "tail 0.5")])
    assert bool((chosen == members).any(0).all())


def test_a_sample_of_clients_is_measured(ragged):
    result = eq.train(eq.models.Softmax(4, 3), ragged, rounds=1, clients_per_round=4, metrics=EVERY, evaluate_clients=2)
    assert [len(result.clients.where(split)) for split in ("train", "test")] == [2, 2]
    for row in result.clients:
        x, y = ragged.splits[row["split"]].client(row["client"])
        assert row["f1"] == pytest.approx(float(eq.metrics.macro_f1(result.model(x).detach(), y)))
    assert "f1" in str(result.summary())


def test_parquet_keeps_metrics_and_their_direction(ragged, tmp_path):
    given = {**EVERY, "none": eq.metrics.Metric(lambda outputs, targets: math.nan, higher_is_better=False)}
    table = eq.train(eq.models.Softmax(4, 3), ragged, rounds=1, clients_per_round=4, metrics=given).clients
    back = ClientTable.from_parquet(table.to_parquet(tmp_path / "clients.parquet"))
    assert back.columns == table.columns
    assert back.higher_is_better == {"f1": True, "top": True, "ppl": False, "none": False}
    assert torch.equal(back.metrics["f1"], table.metrics["f1"])
    assert bool(back.metrics["none"].isnan().all())
    assert back.summaries()["test"]["ppl"] == table.summaries()["test"]["ppl"]
    header = table.to_csv(tmp_path / "clients.csv").read_text().splitlines()[0]
    assert header.endswith("error,f1,top,ppl,none")


# ------------------------------------------------------------------------------------------------------------ what is refused


def fails(outputs, targets):
    raise ZeroDivisionError("no examples of class 2")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([eq.metrics.macro_f1], "must map names to functions"),
        ({"f 1": eq.metrics.macro_f1}, "names of one word"),
        ({"loss": eq.metrics.macro_f1}, "names of one word"),
        ({"personal_f1": eq.metrics.macro_f1}, "names of one word"),
        ({"f1_90": eq.metrics.macro_f1}, "names of one word"),
        ({"f1": 3}, "'f1' is none"),
        ({"f1": fails}, "'f1' failed for client 'client-0'"),
        ({"f1": lambda outputs, targets: outputs}, "must be one number, but is 'a tensor of shape"),
        ({"f1": lambda outputs: 0.0}, "'f1' failed"),
        ({"f1": eq.metrics.Metric(fails, higher_is_better="yes")}, "higher_is_better"),
        ({"f1": eq.metrics.mean_absolute_error}, "as many outputs as targets"),
    ],
)
def test_what_is_no_metric_is_refused_before_any_work(ragged, given, text):
    with pytest.raises(InvalidParameter, match=text):
        eq.train(eq.models.Softmax(4, 3), ragged, rounds=10**6, clients_per_round=4, metrics=given)
