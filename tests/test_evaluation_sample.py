"""A fixed random sample of clients is evaluated: which ones, by which engine, and what results and reports say of it."""

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import equipoise as eq
from equipoise.client_table import ClientTable
from equipoise.core.task import Task
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.engines import Loop, Simulator
from equipoise.engines.simulator import scoring
from equipoise.engines.simulator.calibration import Choice
from equipoise.engines.simulator.cpu.compiled_softmax import CompiledSoftmaxPath
from equipoise.errors import ConfigError, IncompatibleParts, InvalidParameter, ObserverFailed
from equipoise.experiment import folder
from equipoise.experiment.build import build
from equipoise.experiment.config import RunConfig
from equipoise.metrics import Interval, mean_interval, percentile_interval
from equipoise.report.over_seeds import intervals_of
from equipoise.runs.checkpoint import Checkpoints
from equipoise.runs.evaluation_sample import evaluation_sample
from equipoise.testing import check_engine
from equipoise.types import Observer
from made_clients import make_clients

SIZES = [3 + k % 7 for k in range(40)]


@pytest.fixture
def data():
    """40 training clients, and 25 unseen test clients."""
    return FederatedData(make_clients(SIZES), test=make_clients(SIZES[:25], seed=1, prefix="unseen"), name="many")


@pytest.fixture
def inside():
    """40 training clients, each with further examples to test on."""
    return FederatedData(make_clients(SIZES), test=make_clients(SIZES, seed=1), name="inside")


def softmax():
    return eq.models.Softmax(4, 3)


def trained(data, *, algorithm=None, rounds=2, **options):
    return eq.train(softmax(), data, algorithm, rounds=rounds, clients_per_round=5, **{"engine": "loop", **options})


def restricted(full, sample):
    """The rows of a full table whose clients and splits are in another table."""
    wanted = set(zip(sample.client, sample.split, strict=True))
    rows = [k for k, key in enumerate(zip(full.client, full.split, strict=True)) if key in wanted]
    return full.take(torch.tensor(rows))


def assert_same(found, expected, **tolerance):
    assert (found.client, found.split) == (expected.client, expected.split)
    assert found.seen.equal(expected.seen)
    assert found.size.equal(expected.size)
    assert found.columns == expected.columns
    for name in found.columns[4:]:
        torch.testing.assert_close(found[name], expected[name], equal_nan=True, **tolerance)


# -------------------------------------------------------------------------------------------------------------------- the draw


def test_the_sample_is_that_of_the_data_whatever_method_and_seed(data):
    methods = {"mean": eq.Algorithm(), "tail": eq.Algorithm(risk=eq.risk.Superquantile(tail=0.5))}
    options = {"rounds": 1, "clients_per_round": 5, "evaluate_clients": 10}
    one = eq.compare(methods, softmax(), data, seeds=2, engine="loop", **options)
    many = eq.train_many(softmax(), data, methods, seeds=2, **options)
    family = eq.train_family(softmax(), data, tails=[1.0, 0.5], seed=7, **options)
    results = [*one.all_results, *many.all_results, *family.results.values()]
    assert len({(r.clients.client, r.clients.split) for r in results}) == 1
    assert all(r.sampled == {"train": (10, 40), "test": (10, 25)} for r in results)
    assert results[0].clients.seen.tolist() == [True] * 10 + [False] * 10
    other = evaluation_sample(replace(data, name="other"), 10)
    assert other["train"].tolist() != evaluation_sample(data, 10)["train"].tolist()


@given(st.permutations(range(40)), st.integers(1, 39), st.integers(1, 39))
def test_the_draw_depends_on_ids_alone_and_a_smaller_sample_is_part_of_a_larger(order, first, second):
    clients = make_clients(SIZES)
    shuffled = clients.take(list(order))

    def drawn(clients, count):
        positions = evaluation_sample(FederatedData(clients, name="many"), count)["train"]
        assert positions.equal(positions.sort().values)
        return {clients.ids[k] for k in positions.tolist()}

    assert drawn(clients, first) == drawn(shuffled, first)
    assert len(drawn(clients, first)) == first
    assert drawn(clients, min(first, second)) <= drawn(clients, max(first, second))


def test_every_client_is_drawn_about_as_often_over_names_of_data():
    clients, counts = make_clients(SIZES), torch.zeros(40)
    for name in range(400):
        counts[evaluation_sample(FederatedData(clients, name=f"data {name}"), 10)["train"]] += 1
    # Binomial (400, 1/4): mean 100, deviation √75 = 8.7.
    assert float((counts - 100).abs().max()) < 4 * math.sqrt(75)
    assert float((counts - 100).square().mean()) == pytest.approx(75, rel=0.6)


def test_splits_without_more_clients_are_evaluated_in_full(data):
    assert trained(data, evaluate_clients=25).sampled == {"train": (25, 40), "test": (25, 25)}
    full, same = trained(data), trained(data, evaluate_clients=40)
    assert full.sampled is same.sampled is None
    assert str(full.summary()) == str(same.summary())
    assert_same(same.clients, full.clients, rtol=0, atol=0)


@pytest.mark.parametrize("wrong", [0, -1, 2.5, "10", True])
def test_a_wrong_number_is_refused(wrong, data):
    with pytest.raises(InvalidParameter, match="evaluate_clients must be at least 1 client, or None for all clients"):
        trained(data, evaluate_clients=wrong)


# ----------------------------------------------------------------------------------------------------- sets that share rows


def test_a_selection_shares_rows_and_is_as_a_copy_of_them():
    clients = make_clients(SIZES)
    positions = torch.tensor([31, 4, 5, 17])
    shared, copied = clients.select(positions), clients.take(positions)
    assert shared.x is clients.x
    assert not shared.in_turn
    assert shared.ids == copied.ids
    assert shared.host_keys.equal(copied.host_keys)
    assert shared.sizes.equal(copied.sizes)
    assert shared.examples == copied.examples
    for k in range(4):
        assert all(a.equal(b) for a, b in zip(shared.client(at=k), copied.client(at=k), strict=True))
    assert shared.take([2, 0]).x.equal(copied.take([2, 0]).x)
    assert shared.select(torch.tensor([2, 0])).ids == ("client-5", "client-31")
    assert FederatedData(shared).fingerprint != FederatedData(clients.select(positions.flip(0))).fingerprint
    one, other = (eq.data.split_examples(each, test=0.4, seed=1) for each in (shared, copied))
    assert one.fingerprint == other.fingerprint


@pytest.mark.parametrize("engine", [Loop(), Simulator(), Simulator(workers=2)])
def test_engines_train_and_evaluate_a_selection_as_a_copy(engine, monkeypatch):
    monkeypatch.setattr(scoring, "_WORTH_SHARING", 0)
    clients, positions = make_clients(SIZES), torch.tensor([31, 4, 5, 17, 2])
    ended = [
        trained(FederatedData(each, test=each), engine=engine, rounds=3)
        for each in (clients.select(positions), clients.take(positions))
    ]
    assert_same(ended[0].clients, ended[1].clients, rtol=1e-5, atol=1e-6)
    task = Task.of(softmax())
    running = engine.start(task, FederatedData(clients))
    params = task.layout.read(task.module)
    selected = running.evaluate(params, clients.select(positions))  # not one of the splits
    for found, expected in zip(selected, running.evaluate(params, clients, positions), strict=True):
        torch.testing.assert_close(found, expected)


def test_clients_are_found_by_their_ids():
    clients = make_clients([1] * 30)
    other = ClientSet.pack([(i, torch.zeros(1, 4), torch.zeros(1).long()) for i in ("client-7", "x", "client-29", "client-0")])
    assert clients.find(other).tolist() == [7, -1, 29, 0]
    assert other.find(clients).tolist() == [3, *[-1] * 6, 0, *[-1] * 21, 2]


def test_ids_whose_keys_collide_are_told_apart():
    clients = make_clients([1] * 3)
    collided = ClientSet.trusted(**{**vars(clients), "host_keys": torch.tensor([5, 5, 5])})
    other = ClientSet.trusted(
        **{**vars(clients), "ids": ("client-2", "stranger", "client-0"), "host_keys": torch.tensor([5, 5, 5])}
    )
    assert collided.find(other).tolist() == [2, -1, 0]


class CountedIds(Sequence):
    """The ids of many clients, which counts how many are read."""

    def __init__(self, count, prefix):
        self.count, self.prefix, self.read = count, prefix, 0

    def __len__(self):
        return self.count

    def __getitem__(self, k):
        if not 0 <= k < self.count:
            raise IndexError(k)
        self.read += 1
        return f"{self.prefix}{k}"


class Constant:
    """An engine that gives every client the same loss and error."""

    def evaluate(self, params, clients, which=None):
        return torch.ones(2, len(clients if which is None else which), dtype=torch.float64).unbind()


def test_only_the_ids_of_the_sample_are_read():
    n = 50_000
    sets = []
    for prefix, seed in (("a", 0), ("b", 1)):
        keys = torch.from_numpy(np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, n))
        sets.append(
            ClientSet.trusted(x=torch.zeros(n, 1), y=torch.zeros(n), offsets=torch.arange(n + 1), ids=CountedIds(n, prefix),
                              host_keys=keys)
        )  # fmt: skip
    data = FederatedData(sets[0], test=sets[1])
    sample = evaluation_sample(data, 100)
    table = ClientTable.evaluate(Constant(), torch.zeros(1), data, sample)
    assert len(table) == 200
    assert table.seen.tolist() == [True] * 100 + [False] * 100
    assert [each.ids.read for each in sets] == [100, 100]


# ------------------------------------------------------------------------------------------------------------------- engines


@dataclass(frozen=True)
class Compiled:
    """The simulator pinned to compiled code."""

    def start(self, task, data):
        engine = Simulator().start(task, data)
        engine.use(Choice(100, 2, path=CompiledSoftmaxPath.name))
        if engine.compiled.obstacle is not None:
            pytest.skip("this machine has no C compiler")
        return engine


ENGINES = {
    "loop": Loop(),
    "simulator": Simulator(compiled=False, workers=1),
    "compiled": Compiled(),
    "workers": Simulator(workers=2),
}


@pytest.mark.parametrize("name", ENGINES)
def test_the_sample_is_the_full_evaluation_restricted(name, data, monkeypatch):
    monkeypatch.setattr(scoring, "_WORTH_SHARING", 0)
    asked, scored = [], scoring.Scoring.means

    def means(self, models, clients, which, *, with_errors):
        asked.append(which if which is None else len(which))
        return scored(self, models, clients, which, with_errors=with_errors)

    monkeypatch.setattr(scoring.Scoring, "means", means)
    full, sample = (trained(data, engine=ENGINES[name], evaluate_clients=count) for count in (None, 10))
    assert full.params.equal(sample.params)
    exactly = {"rtol": 0, "atol": 0} if name in ("loop", "compiled") else {"rtol": 1e-5, "atol": 1e-7}
    assert_same(sample.clients, restricted(full.clients, sample.clients), **exactly)
    assert len(sample.clients) == 20
    if name in ("loop", "compiled"):
        assert asked == []


@pytest.mark.parametrize("name", ENGINES)
def test_the_law_of_engines_covers_samples(name):
    data = FederatedData(make_clients(SIZES))
    check_engine(ENGINES[name], task=Task.of(softmax()), data=data, solver=eq.solvers.SGD(batch_size=4), tolerance=2e-5)


@dataclass(frozen=True)
class Changed:
    """Starts a loop engine and changes it."""

    change: object

    def start(self, task, data):
        return self.change(Loop().start(task, data))


def remote(engine):
    engine.network = object()
    return engine


def test_a_sample_over_a_network_is_refused(data):
    with pytest.raises(IncompatibleParts, match=r"every node that answers is evaluated\.\s+Leave evaluate_clients"):
        trained(data, engine=Changed(remote), evaluate_clients=10)


# --------------------------------------------------------------------------------------------------- own models and families


OWN = {
    "ditto": eq.personal.Ditto(strength=0.5, solver=eq.solvers.SGD(lr=0.3)),
    "finetune": eq.personal.Finetuning(epochs=2),
}


@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
@pytest.mark.parametrize("unseen", [False, True])
@pytest.mark.parametrize("method", OWN)
def test_own_models_are_evaluated_on_the_sample(method, unseen, data, inside):
    clients, algorithm = data if unseen else inside, eq.Algorithm(personal=OWN[method])
    full, sample = (trained(clients, algorithm=algorithm, evaluate_clients=count) for count in (None, 10))
    assert_same(sample.clients, restricted(full.clients, sample.clients), rtol=0, atol=0)
    assert sample.clients.where("train" if unseen else "test").has_own
    assert len(sample.personal) == 40
    text = str(sample.summary())
    assert text.count("95 % interval") == 2
    assert ("shared error" in text) == (not unseen)


def test_a_family_chooses_and_is_judged_on_the_sample(inside, data):
    options = {"rounds": 2, "clients_per_round": 5, "tails": [1.0, 0.5], "evaluate_clients": 10}
    drawn = set(trained(data, evaluate_clients=10).clients.where("test").client)
    family = eq.train_family(softmax(), data, **options).comparison()
    assert set(family.results["family"][0].clients.client) == drawn
    assert "10 of 25 unseen test clients, drawn at random" in family.summary()
    validated = replace(inside, validation=make_clients(SIZES, seed=2))
    chosen, full = (
        eq.train_family(softmax(), validated, **{**options, "evaluate_clients": count})
        .comparison()
        .results["family"][0]
        .clients
        for count in (10, None)
    )
    assert_same(chosen, restricted(full, chosen), rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------------------------------------------- checkpoints and folders


class StopAt(Observer):
    def __init__(self, round_index):
        self.round = round_index

    def on_round(self, report):
        if report.round + 1 == self.round:
            raise RuntimeError("power cut")


@pytest.mark.parametrize("later", [10, 5, None])
def test_a_run_goes_on_with_its_sample_or_with_another(later, data, tmp_path):
    options = {"rounds": 4, "evaluate_every": 1}
    with pytest.raises(ObserverFailed):
        trained(data, observers=[StopAt(3)], checkpoint=Checkpoints(tmp_path / "c", every=1), evaluate_clients=10, **options)
    resumed = trained(data, checkpoint=tmp_path / "c", evaluate_clients=later, **options)
    whole = trained(data, evaluate_clients=later, **options)
    assert resumed.params.equal(whole.params)
    assert_same(resumed.clients, whole.clients, rtol=0, atol=0)
    assert resumed.sampled == whole.sampled
    assert len(resumed.history.points) == 4


TABLE = {
    "data": {"name": "label_shift", "train_clients": 60, "validation_clients": 2, "test_clients": 50, "examples": 20},
    "model": {"name": "softmax"},
    "train": {"rounds": 2, "clients_per_round": 6, "evaluate_clients": 45, "engine": "loop"},
}


def test_a_run_folder_keeps_the_sample(tmp_path):
    config = RunConfig.of(TABLE)
    assert RunConfig.of(tomllib.loads(config.text())) == config
    result = folder.run(build(config), folder.claim(tmp_path / "run"), progress=False)
    record = folder.read_record(tmp_path / "run")
    assert record.sampled == result.sampled == {"train": (45, 60), "validation": (2, 2), "test": (45, 50)}
    assert str(record.summary()) == str(result.summary())
    full = folder.run(build(RunConfig.of({**TABLE, "train": {**TABLE["train"], "evaluate_clients": "none"}})),
                      folder.claim(tmp_path / "full"), progress=False)  # fmt: skip
    assert full.sampled is None
    assert folder.read_record(tmp_path / "full").sampled is None
    assert "sampled" not in (tmp_path / "full" / "rounds.jsonl").read_text()


def test_a_configuration_with_a_wrong_sample_is_refused():
    wrong = {**TABLE, "train": {**TABLE["train"], "evaluate_clients": 0}}
    with pytest.raises(ConfigError, match=r"train.evaluate_clients must be at least 1.*but is 0"):
        RunConfig.of(wrong)


# ------------------------------------------------------------------------------------------------------------------ intervals


def test_intervals_of_percentiles_by_hand():
    ten = torch.tensor([7.0, 3, 10, 1, 9, 2, 8, 4, 6, 5])
    # Binomial (10, 1/2): P(B ≤ 1) = 11/1024 = 0.011 ≤ 0.025 < P(B ≤ 2) = 56/1024 = 0.055; the other side by symmetry.
    assert percentile_interval(ten, 50) == Interval(2.0, 9.0)
    # P(B = 0) = 2^-n: 0.031 for n = 5, 0.016 for n = 6.
    assert percentile_interval(torch.arange(1.0, 6.0), 50) == Interval(-math.inf, math.inf)
    assert percentile_interval(torch.arange(1.0, 7.0), 50) == Interval(1.0, 6.0)
    # The largest of n values is above the 90th percentile unless all are below: 0.9^35 = 0.02503, 0.9^36 = 0.02253.
    assert percentile_interval(torch.arange(1.0, 36.0), 90).high == math.inf
    assert percentile_interval(torch.arange(1.0, 37.0), 90).high == 36.0


@given(st.integers(1, 120), st.integers(1, 99))
def test_ranks_leave_at_most_a_fortieth_at_each_side(n, percent):
    # In whole numbers: P(B = k) · 100^n = C(n, k) p^k (100 − p)^(n − k).
    mass = [math.comb(n, k) * percent**k * (100 - percent) ** (n - k) for k in range(n + 1)]
    interval, all_mass = percentile_interval(torch.arange(1.0, n + 1), percent), 100**n
    low = 0 if interval.low == -math.inf else int(interval.low)
    high = n + 1 if interval.high == math.inf else int(interval.high)
    assert 40 * sum(mass[:low]) <= all_mass < 40 * sum(mass[: low + 1])
    assert 40 * sum(mass[high:]) <= all_mass < 40 * sum(mass[high - 1 :])


def test_the_interval_of_a_mean_by_hand():
    found = mean_interval(torch.tensor([1.0, 2.0, 3.0]))  # 2 ± 1.96 · 1 / √3
    assert (found.low, found.high) == pytest.approx((2 - 1.1315857, 2 + 1.1315857))
    weighted = mean_interval(torch.tensor([1.0, 3.0]), torch.tensor([3.0, 1.0]))
    # Mean 1.5; 2 / 1 · ((3/4 · 1/2)² + (1/4 · 3/2)²) = 0.5625 = 0.75².
    assert (weighted.low, weighted.high) == pytest.approx((1.5 - 1.4699730, 1.5 + 1.4699730))
    assert mean_interval(torch.tensor([4.0])) == Interval(-math.inf, math.inf)


def test_intervals_cover_the_figures_of_all_clients():
    gen = np.random.default_rng(0)
    sizes = torch.from_numpy(gen.integers(1, 50, 20_000)).double()
    values = torch.from_numpy(gen.exponential(1 + sizes.numpy() / 50))  # large clients fare worse
    true = eq.metrics.percentile(values, 90), eq.metrics.mean(values)
    weighted = eq.metrics.percentile(values, 90, sizes), eq.metrics.mean(values, sizes)
    covered = np.zeros(4)
    for _ in range(500):
        k = torch.from_numpy(gen.choice(20_000, 400, replace=False))
        found = [percentile_interval(values[k], 90), mean_interval(values[k]),
                 percentile_interval(values[k], 90, sizes[k]), mean_interval(values[k], sizes[k])]  # fmt: skip
        covered += [i.low <= figure <= i.high for i, figure in zip(found, (*true, *weighted), strict=True)]
    assert covered[0] / 500 >= 0.94
    assert all(0.92 <= share <= 0.99 for share in covered / 500), covered / 500


def test_intervals_in_words():
    assert Interval(-math.inf, 2.0).text("{:g}".format) == "2 or less"
    assert Interval(math.nan, math.nan).text("{:g}".format) == "–"


# -------------------------------------------------------------------------------------------------------------------- reports


def test_the_summary_says_so_and_has_intervals(data):
    result = trained(data, evaluate_clients=20)
    summary, rows = result.summary(), result.clients.where("test")
    lines = str(summary).splitlines()
    assert lines[0].startswith("run: 20 of 25 unseen test clients, drawn at random")
    assert summary.intervals["error"]["percentile_90"] == percentile_interval(rows.error, 90)
    mean = mean_interval(rows.error)
    assert lines[2].split() == ["95", "%", "interval", *f"{mean.low:.4f} to {mean.high:.4f}".split(),
                                *summary.intervals["loss"]["mean"].text("{:.4f}".format).split()]  # fmt: skip
    assert lines[4].split()[:3] == ["95", "%", "interval"]
    on_training = result.summary("train")
    weights = result.clients.where("train").size.double()
    assert on_training.intervals["error"]["mean"] == mean_interval(result.clients.where("train").error, weights)
    assert "interval" not in str(trained(data, evaluate_clients=25).summary())


def test_tables_of_methods_have_rows_of_intervals(data):
    methods = {"mean": eq.Algorithm(), "tail": eq.Algorithm(risk=eq.risk.Superquantile(tail=0.5))}
    options = {"rounds": 2, "clients_per_round": 5, "engine": "loop", "seeds": 2}
    comparison = eq.compare(methods, softmax(), data, evaluate_clients=20, **options)
    found = intervals_of(comparison.results["mean"])
    both = [run.summary().intervals["error"]["mean"] for run in comparison.results["mean"]]
    assert found["mean"].low == pytest.approx((both[0].low + both[1].low) / 2)
    lines = comparison.summary().splitlines()
    assert lines[0].startswith("0-1 error over 20 of 25 unseen test clients, drawn at random, mean ±")
    assert lines[3].split() == [
        "95",
        "%",
        "interval",
        *(w for key in found for w in found[key].text("{:.3f}".format).split()),
    ]
    plain = eq.compare(methods, softmax(), data, **options)
    assert not any(line.split()[:3] == ["95", "%", "interval"] for line in plain.summary().splitlines())
    assert intervals_of(plain.results["mean"]) == {}


def test_the_page_says_so(data, tmp_path):
    methods = {"mean": eq.Algorithm(), "tail": eq.Algorithm(risk=eq.risk.Superquantile(tail=0.5))}
    comparison = eq.compare(methods, softmax(), data, rounds=2, clients_per_round=5, engine="loop", evaluate_clients=20)
    page = comparison.report(tmp_path / "page.html").read_text().replace("\u00a0", " ")
    assert "over 20 of 25 unseen test clients, drawn at random" in page
    assert 'data-code="sample"' in page
    assert page.count('<tr class="below"><th scope="row" class="short">95 % interval</th>') == 2
    found = intervals_of(comparison.results["tail"])["percentile_90"]
    assert f"<td>{found.text(lambda v: f'{100 * v:.1f}')}</td>" in page
    plain = eq.compare(methods, softmax(), data, rounds=2, clients_per_round=5, engine="loop", evaluate_clients=25)
    other = plain.report(tmp_path / "plain.html").read_text().replace("\u00a0", " ")
    of_sample = ("drawn at random", '<th scope="row" class="short">95 % interval</th>')
    assert not any(words in other for words in of_sample)


def test_malicious_clients_of_the_sample_are_counted_among_those_evaluated(inside, tmp_path):
    attacked = eq.attacks.apply(inside, eq.attacks.LabelPoisoning(share=0.5, seed=1))
    result = trained(attacked, evaluate_clients=20)
    bad = int(result.clients.where("test").malicious.sum())
    assert 0 < bad < 20
    assert result.summary().who == f"{20 - bad} benign test clients, among 20 of 40 drawn at random"
    (told,) = (each for each in result.summary().notices if each.code == "attack")
    assert told.fields == {"bad": str(bad), "all": "20"}
