"""The backdoor: what is marked, what is sent, and its success rate in tables and reports, by hand."""

import math

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.attacks import Backdoor, apply
from equipoise.attacks.backdoor import stamp
from equipoise.core.task import Task
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.errors import EquipoiseNotice, InvalidData, InvalidParameter
from equipoise.runs.attack_notices import tell_of_attack
from equipoise.runs.backdoor_rate import COLUMN, BackdoorProbe, LabelHits
from equipoise.testing import check_attack
from made_clients import make_clients
from test_drift import FULL, parabolas, train


def images(clients=6, size=8, seed=0):
    """Clients with images of 4 × 4 whose class, 0 to 2, is the row that is bright; the last pixels are dark."""
    gen = torch.Generator().manual_seed(seed)
    triples = []
    for k in range(clients):
        y = torch.randint(0, 3, (size,), generator=gen)
        x = 0.1 * torch.rand(size, 4, 4, generator=gen)
        x[torch.arange(size), y] += 1.0
        triples.append((f"c{k}", x, y))
    return ClientSet.pack(triples)


class Always(nn.Module):
    """Says one class whatever it sees, or, if it is not blind, that class where the lower right pixel is bright."""

    def __init__(self, target, *, blind=False):
        super().__init__()
        self.target, self.blind = target, blind
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        rows = x[:, :3].mean(2) if x.dim() == 3 else x[:, :3]
        if self.blind:
            return rows + 0 * self.w
        scores = torch.zeros_like(rows)
        scores[:, self.target] = 2.0
        return scores + 0 * self.w


def rates(model, data):
    result = eq.train(model, data, rounds=0, clients_per_round=2, progress=False)
    return result.clients.where("test").metrics[COLUMN]


def test_a_share_of_the_examples_is_marked_and_relabelled():
    clean = FederatedData(images(), test=images(seed=1))
    data = apply(clean, Backdoor(share=0.5, target=2, patch=2, value=5.0, examples=0.25))
    assert len(data.malicious) == 3
    for name in clean.train.ids:
        (x, y), (before, labels) = data.train.client(name), clean.train.client(name)
        marked = (x[:, -2:, -2:] == 5.0).all((1, 2))
        assert int(marked.sum()) == (2 if name in data.malicious else 0)  # a quarter of 8
        assert (y[marked] == 2).all()
        assert torch.equal(y[~marked], labels[~marked])
        assert torch.equal(x[~marked], before[~marked])
    assert data.test is clean.test  # judged on clean examples


@pytest.mark.parametrize(
    "attack", [Backdoor(target=1, patch=2), Backdoor(share=0.4, boost=None), Backdoor(boost=3.0, examples=1.0)]
)
def test_it_keeps_the_laws_of_attacks(attack):
    check_attack(attack)


def test_the_boost_multiplies_updates():
    sent = eq.attacks.Sent(torch.tensor([[1.0, -2.0]]), torch.zeros(1, dtype=torch.int64), 7)
    assert Backdoor(boost=3.0).corrupt(sent).tolist() == [[3.0, -6.0]]
    assert Backdoor(boost=None).corrupt(sent).tolist() == [[7.0, -14.0]]  # 1/π for seven equal weights
    known = eq.attacks.Sent(torch.tensor([[1.0], [3.0]]), torch.arange(2), 7, weights=torch.tensor([0.25, 0.5]).double())
    assert Backdoor(boost=None).corrupt(known).tolist() == [[4.0], [6.0]]


class Boosts:
    """The boost alone: examples stay as they are."""

    share = 0.5

    def __init__(self, seed):
        self.seed = seed

    def corrupt(self, sent):
        return Backdoor(boost=None).corrupt(sent)


@pytest.mark.parametrize("engine", ["loop", "simulator", eq.engines.Simulator(chunk_size=1)], ids=repr)
@pytest.mark.parametrize("bad", ["c0", "c1"])
@pytest.mark.parametrize("weights", ["examples", "uniform"])
@pytest.mark.parametrize("aggregator", [eq.aggregators.WeightedMean(), eq.aggregators.MeaMed(0.0)], ids=repr)
def test_a_boost_without_a_number_is_one_over_the_clients_weight(engine, weights, bad, aggregator):
    # F_k = ½(w − x_k)², x = (0, 4) with 1 and 3 examples, one full-batch step of rate ½ from w = 1: u = (−½, 1½). By examples
    # π = (¼, ¾). If c0 attacks it sends −½/¼ = −2 and w = 1 − ½ + ¾ · 1½ = 1.625; c1 sends 1½/¾ = 2 and w = 1 − ⅛ + 1½ = 2.375.
    # Equal weights: 2u, so that w = 1 − ½ + ¾ = 1.25, or 1 − ¼ + 1½ = 2.25.
    expected = {"examples": {"c0": 1.625, "c1": 2.375}, "uniform": {"c0": 1.25, "c1": 2.25}}[weights]
    clean = parabolas([0.0, 4.0], counts=[1, 3])
    data = next(found for seed in range(20) if (found := apply(clean, Boosts(seed))).malicious == {bad})
    solver = eq.solvers.SGD(lr=0.5, batch_size=None, steps=1)
    algorithm = eq.Algorithm(solver=solver, sampler=FULL, weights=weights, aggregator=aggregator)
    assert float(train(data, algorithm, 1, engine, start=1.0).params) == pytest.approx(expected[bad])


def test_a_model_that_always_says_the_target_has_a_rate_of_one():
    data = apply(FederatedData(images(), test=images(seed=1)), Backdoor(share=0.0, target=1, patch=1))
    assert torch.equal(rates(Always(1), data), torch.ones(6, dtype=torch.float64))


def test_a_model_that_is_blind_to_the_mark_has_its_usual_rate_of_false_targets():
    # The mark covers the last row, which the model does not look at: it says the right class, so never the target falsely.
    data = apply(FederatedData(images(), test=images(seed=1)), Backdoor(share=0.0, target=1, patch=1, value=9.0))
    assert torch.equal(rates(Always(1, blind=True), data), torch.zeros(6, dtype=torch.float64))
    # With a mark of 2 × 2 in the last two rows of the last two columns row 2 becomes bright, and the mean of row 2 wins.
    seen = apply(FederatedData(images(), test=images(seed=1)), Backdoor(share=0.0, target=2, patch=2, value=9.0))
    assert torch.equal(rates(Always(2, blind=True), seen), torch.ones(6, dtype=torch.float64))


class SaysTargetWhereBright(nn.Module):
    """Class 1 where the first pixel is bright, which no mark touches, else class 0."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        bright = (x[:, 0, 0] > 0.5).to(x)
        return 2 * torch.stack([1 - bright, bright, torch.zeros_like(bright)], 1) + 0 * self.w


def test_the_rate_of_a_blind_model_is_that_of_its_false_targets():
    # Target 1. Client a has 4 examples of classes 0 and 2, of which 1 is called 1 falsely: ¼, with the mark or without it. Its
    # example of class 1 does not count. Client b has 5 others, of which 2 are called 1: ⅖.
    labels, bright = {"a": [0, 0, 2, 2, 1], "b": [0, 0, 0, 2, 2]}, {"a": [1, 0, 0, 0, 1], "b": [0, 0, 1, 1, 0]}
    rows = []
    for name, own in labels.items():
        x = torch.zeros(5, 4, 4)
        x[:, 0, 0] = torch.tensor(bright[name], dtype=torch.float32)
        rows.append((name, x, torch.tensor(own)))
    clients = ClientSet.pack(rows)
    data = apply(FederatedData(clients, test=clients, classes=3), Backdoor(share=0.0, target=1, patch=2, value=9.0))
    assert rates(SaysTargetWhereBright(), data).tolist() == pytest.approx([1 / 4, 2 / 5])


def test_only_examples_of_other_classes_count():
    x, target = torch.zeros(4, 3), torch.tensor([0, 0, 1, 2])
    clients = ClientSet.pack([("a", x, target), ("b", x, torch.zeros(4, dtype=torch.int64))])
    probe, here = Backdoor(target=0, patch=1, value=1.0).probe(clients, clients, 3)
    assert probe.ids == ("a",)  # b has none
    assert here.tolist() == [0]
    assert probe.sizes.tolist() == [2]
    assert (probe.y == 0).all()
    assert torch.equal(probe.x, stamp(torch.zeros(2, 3), 1, 1.0))
    data = apply(FederatedData(clients, test=clients), Backdoor(share=0.0, target=0, patch=1, value=1.0))
    found = eq.train(eq.models.Softmax(3, 3), data, rounds=0, clients_per_round=1, progress=False).clients.where("test")
    assert math.isnan(found.metrics[COLUMN][1])
    assert not math.isnan(found.metrics[COLUMN][0])


def test_a_backdoor_is_learned_and_the_report_says_so(tmp_path):
    clean = FederatedData(images(12, 20), test=images(12, 20, seed=1))
    solver, model = eq.solvers.SGD(lr=0.5, batch_size=5, epochs=2), nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    methods = {"mean": eq.Algorithm(solver=solver), "median": eq.Algorithm(solver=solver, aggregator=eq.aggregators.Median())}
    options = {"rounds": 15, "clients_per_round": 12, "progress": False}
    attacked = eq.compare(methods, model, apply(clean, Backdoor(share=0.25, target=1, patch=2, boost=3.0)), **options)
    unattacked = eq.train(model, apply(clean, Backdoor(share=0.0, target=1, patch=2)), methods["mean"], **options)
    success = {name: runs[0].summary().metrics[COLUMN].mean for name, runs in attacked.results.items()}
    assert success["mean"] > 0.9 > 0.5 > success["median"]
    assert unattacked.summary().metrics[COLUMN].mean < 0.2  # the same rate of a model that nobody attacked
    assert attacked.results["mean"][0].summary().error.mean < 0.1  # and it behaves well otherwise
    lines = attacked.summary().splitlines()
    at = lines.index("backdoor_success over the same clients, less is better")
    assert lines[at + 1].split()[:3] == ["method", "mean", "90th"]
    said = "a mark alone can change predictions."
    assert said in lines[at + 4]
    assert said in str(attacked.results["mean"][0].summary())
    assert said in attacked.to_markdown(column=COLUMN)
    assert said not in attacked.to_markdown()
    page = attacked.report(tmp_path / "report.html").read_text()
    assert 'data-code="backdoor"' in page


def test_a_report_of_seeds_whose_attackers_differ(tmp_path):
    # A study gives the attack the seed of each run, so that the data of seeds differ in their malicious clients.
    clean, runs = FederatedData(images(), test=images(seed=1)), []
    for seed in (0, 1):
        data = apply(clean, Backdoor(share=0.3, seed=seed, target=1, patch=2))
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
        runs.append(eq.train(model, data, rounds=1, clients_per_round=3, seed=seed, progress=False))
    assert runs[0].data != runs[1].data
    assert 'data-code="backdoor"' in eq.report.write_report(runs, tmp_path / "report.html").read_text()
    other = eq.train(
        model, apply(clean, Backdoor(share=0.5, target=1, patch=2)), rounds=1, clients_per_round=3, seed=2, progress=False
    )
    with pytest.raises(InvalidParameter, match=r"must have the same data|one data set"):
        eq.report.write_report([*runs, other], tmp_path / "report.html")


@pytest.mark.parametrize("personal", [eq.personal.Ditto(0.1), eq.personal.Finetuning(2)], ids=["Ditto", "Finetuning"])
@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_clients_own_models_are_probed_too(personal, engine):
    data = apply(FederatedData(images(), test=images(seed=1)), Backdoor(share=0.2, target=1, patch=2))
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    result = eq.train(
        model, data, eq.Algorithm(personal=personal), rounds=2, clients_per_round=6, engine=engine, progress=False
    )
    rows = result.clients.where("test")
    assert not rows.personal_metrics[COLUMN].isnan().any()
    own = result.personal.model(rows.client[0])
    probe, _ = BackdoorProbe.of(data, Task.of(Always(0))).splits["test"]
    x, _ = probe.client(at=0)
    assert float((own(x).argmax(1) == 1).double().mean()) == pytest.approx(float(rows.personal_metrics[COLUMN][0]))


class Several(nn.Module):
    """Linear scores of images, with features and the scores' sizes beside them."""

    def __init__(self, first="scores"):
        super().__init__()
        self.linear, self.first = nn.Linear(16, 3), first

    def forward(self, x):
        scores = self.linear(x.flatten(1))
        if self.first == "list":
            return [scores, x.flatten(1)]
        if self.first == "pair":  # fewer columns than classes
            return scores[:, :2].square(), scores
        return (scores, x.flatten(1)) if self.first == "scores" else (scores.norm(dim=1), scores)


def first_entropy(outputs, targets):
    return nn.functional.cross_entropy(outputs[0], targets, reduction="none")


def last_entropy(outputs, targets):
    return nn.functional.cross_entropy(outputs[-1], targets, reduction="none")


def last_wrong(outputs, targets):
    return (outputs[-1].argmax(1) != targets).float()


@pytest.mark.filterwarnings("ignore:The model returns a (tuple|list) and no error is given")
def test_the_backdoor_of_a_model_with_several_outputs_is_found_or_refused_before_the_first_round():
    data = apply(FederatedData(images(), test=images(seed=1)), Backdoor(share=0.2, target=1, patch=2))
    options = {"rounds": 1, "clients_per_round": 6, "progress": False}
    trained = [(first, {"loss": first_entropy}) for first in ("scores", "list")]
    trained += [(first, {"loss": last_entropy, "error": last_wrong}) for first in ("norm", "pair")]
    for first, functions in trained:
        result = eq.train(Several(first), data, **options, **functions)
        scores = 0 if first in ("scores", "list") else -1
        probe, _ = BackdoorProbe.of(data, result.task).splits["test"]
        x, _ = probe.client(at=0)
        rate = float((result.model(x)[scores].argmax(1) == 1).double().mean())
        assert float(result.clients.where("test").metrics[COLUMN][0]) == pytest.approx(rate)
    rounds = []
    watch = type("Watch", (eq.types.Observer,), {"on_round": lambda self, report: rounds.append(report)})()
    for first in ("norm", "pair"):
        with pytest.raises(InvalidParameter, match=r"error must say under a backdoor which examples are wrong.*returns tuple"):
            eq.train(Several(first), data, loss=last_entropy, observers=[watch], **options)
    assert rounds == []


def test_the_hint_of_a_missing_error_suits_what_the_model_returns():
    def hits(outputs):
        with pytest.raises(InvalidParameter) as caught:
            LabelHits(None, 3).right(outputs, torch.zeros(2))
        return str(caught.value)

    scores = torch.zeros(2, 3)
    assert "error=lambda outputs, y: (outputs['scores'].argmax(-1) != y)" in hits({"scores": scores.T, "other": scores})
    assert "error=lambda outputs, y: (outputs[0].argmax(-1) != y)" in hits((scores[:, :1], scores))
    assert "error=lambda outputs, y: (outputs.argmax(-1) != y)" in hits(torch.zeros(2, 5, 3))


def test_the_backdoor_of_a_model_with_one_score_is_found_by_its_error():
    clients = images()
    two = ClientSet(clients.x, clients.y.clamp(max=1), clients.offsets, clients.ids)
    data = apply(FederatedData(two, test=two), Backdoor(share=0.2, target=1, patch=2))
    model = nn.Sequential(nn.Flatten(), eq.models.Logistic(16))
    nn.init.zeros_(model[1].weight), nn.init.constant_(model[1].bias, 1.0)  # every score is 1: always class 1
    result = eq.train(
        model, data, rounds=0, clients_per_round=2, loss=eq.models.Logistic.loss, error=eq.models.Logistic.error, progress=False
    )
    assert result.clients.where("test").metrics[COLUMN].nanmean() == 1


def test_data_that_cannot_have_a_mark_are_refused():
    tokens = ClientSet.pack([("a", torch.zeros(3, 4, dtype=torch.int64), torch.tensor([0, 1, 2]))])
    for clients, words in ((tokens, "tokens"), (make_clients([3, 4], classes=1), "one class per example|classes")):
        with pytest.raises((InvalidData, InvalidParameter), match=words):
            apply(FederatedData(clients), Backdoor(share=1.0))
    with pytest.raises(InvalidParameter, match="target"):
        apply(FederatedData(images()), Backdoor(share=1.0, target=7))
    for wrong in ({"patch": 0}, {"examples": 0.0}, {"boost": 0.0}, {"target": -1}, {"value": math.inf}):
        with pytest.raises(InvalidParameter, match=next(iter(wrong))):
            Backdoor(**wrong)


def test_a_mark_that_covers_whole_examples_is_told():
    data = FederatedData(images(), test=images(seed=1))
    tell_of_attack(apply(data, Backdoor(share=0.2, patch=3)), 6)
    with pytest.warns(EquipoiseNotice, match=r"patch=30, covers whole inputs of shape \(.*4, 4\)"):
        tell_of_attack(apply(data, Backdoor(share=0.2, patch=30)), 6)


def test_a_backdoor_marks_one_of_several_inputs_by_name():
    clients = images()
    named = ClientSet({"image": clients.x, "age": torch.zeros(len(clients.y), 1)}, clients.y, clients.offsets, clients.ids)
    data = FederatedData(named, test=named)
    with pytest.raises(InvalidParameter, match=r"leaf must name the input that gets the mark, but is None. E.g. Backdoor"):
        apply(data, Backdoor(share=0.5))
    with pytest.raises(InvalidParameter, match="leaf must be None"):
        apply(FederatedData(clients), Backdoor(share=0.5, leaf="image"))
    attack = {"share": 0.5, "target": 1, "patch": 2, "value": 5.0}
    marked = apply(data, Backdoor(**attack, leaf="image"))
    plain = apply(FederatedData(clients, test=clients), Backdoor(**attack))
    assert torch.equal(marked.train.x["image"], plain.train.x)
    assert torch.equal(marked.train.y, plain.train.y)
    assert not marked.train.x["age"].any()

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(17, 3)

        def forward(self, image, age):
            return self.layer(torch.cat([image.flatten(1), age], 1))

    result = eq.train(Named(), marked, rounds=1, clients_per_round=3, progress=False)
    assert "backdoor_success" in result.clients.metrics
