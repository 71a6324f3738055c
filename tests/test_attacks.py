"""Attacks: who is malicious, what they do, the same on every engine; and metrics over those who are not."""

import math
from dataclasses import dataclass, replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from scipy import stats

import equipoise as eq
from equipoise import attacks
from equipoise.attacks.single import normal_noise
from equipoise.client_table import ClientTable
from equipoise.core import rng
from equipoise.core.task import Task
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.engines import Loop, Simulator
from equipoise.errors import InvalidData, InvalidParameter
from equipoise.runs.checkpoint import CheckpointError
from equipoise.solvers import SGD
from made_clients import make_clients
from rounds import run_round

SIZES = [1, 2, 3, 7, 10, 11, 20, 25]
WORK = SGD(lr=0.2, batch_size=4, epochs=2)


def everyone(data, round_index=0, seed=0):
    return eq.sampling.Full()(round_index, eq.Algorithm().base_weights(data.train), clients_per_round=1, seed=seed)


def sent(data, choice=None, *, round_index=0, seed=0, solver=WORK, model=None):
    """What all clients of the data send in a round, (n, D)."""
    task = Task.of(model or eq.models.Softmax(4, 3).double())
    engine = (choice or Simulator()).start(task, data)
    params = torch.full((task.layout.dimension,), 0.1, dtype=torch.float64)
    return engine.updates(params, everyone(data, round_index, seed), solver).update


def ragged_data(dtype=torch.float64, **options):
    return FederatedData(
        make_clients(SIZES, dtype=dtype, **options), test=make_clients(SIZES, seed=5), classes=3, name="ragged"
    )


def malicious_rows(data):
    return torch.tensor([i in data.malicious for i in data.train.ids])


# ------------------------------------------------------------ who is malicious


@given(count=st.integers(1, 60), share=st.floats(0, 1), seed=st.integers(0, 2**63 - 1), order=st.randoms())
def test_a_seeded_share_of_clients_in_any_order(count, share, seed, order):
    clients = make_clients([1] * count)
    chosen = attacks.malicious_clients(clients, share, seed)
    assert abs(len(chosen) - share * count) <= 0.5
    assert len(set(chosen)) == len(chosen)
    shuffled = list(range(count))
    order.shuffle(shuffled)
    assert set(attacks.malicious_clients(clients.take(shuffled), share, seed)) == set(chosen)
    assert attacks.malicious_clients(clients, share, seed) == chosen


def test_every_client_is_malicious_equally_often():
    clients, times = make_clients([1] * 20), torch.zeros(20)
    for seed in range(500):
        for name in attacks.malicious_clients(clients, 0.2, seed):
            times[clients.ids.index(name)] += 1
    assert float(times.sum()) == 500 * 4
    # Each count is binomial(500, 0.2): 100 ± 8.9; five deviations for twenty of them.
    assert float((times - 100).abs().max()) < 45


# ------------------------------------------------------------ the same on all engines

ATTACKS = [
    eq.attacks.LabelPoisoning(share=0.4, seed=1),
    eq.attacks.RandomUpdates(share=0.4, seed=1),
    eq.attacks.RandomUpdates(share=0.4, seed=1, scale=3.0),
    eq.attacks.ModelReplacement(share=0.4, seed=1),
    eq.attacks.ModelReplacement(share=0.4, seed=1, update="negated"),
    eq.attacks.ModelReplacement(share=0.4, seed=1, update="honest", factor=7.5),
]


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 23), min_size=1, max_size=8),
    attack=st.sampled_from(ATTACKS),
    chunk=st.sampled_from([None, 1, 2, 5]),
    seed=st.integers(0, 2**40),
)
def test_engines_and_chunks_agree_on_what_arrives(sizes, attack, chunk, seed):
    data = eq.attacks.apply(FederatedData(make_clients(sizes, dtype=torch.float64), classes=3), replace(attack, seed=seed))
    loop, fast = sent(data, Loop(), seed=seed), sent(data, Simulator(chunk_size=chunk), seed=seed)
    torch.testing.assert_close(fast, loop, rtol=1e-9, atol=1e-11)
    task, cohort = Task.of(eq.models.Softmax(4, 3).double()), everyone(data, seed=seed)
    params = torch.full((task.layout.dimension,), 0.1, dtype=torch.float64)
    for choice in (Loop(), Simulator(chunk_size=chunk)):
        work = choice.start(task, data).summed_update(params, cohort, WORK, cohort.weights, eq.aggregators.WeightedMean())
        torch.testing.assert_close(work.update, cohort.weights @ loop, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(work.sq_norms, loop.square().sum(1), rtol=1e-9, atol=1e-20)


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_whole_run_under_attack_agrees(attack):
    data = eq.attacks.apply(ragged_data(), attack)
    model, algorithm = eq.models.Softmax(4, 3).double(), eq.Algorithm(solver=SGD(lr=0.05))
    runs = [
        eq.train(model, data, algorithm, rounds=4, clients_per_round=5, engine=e) for e in (Loop(), Simulator(chunk_size=2))
    ]
    torch.testing.assert_close(runs[0].params, runs[1].params, rtol=1e-8, atol=1e-10)


# ------------------------------------------------------------ A1: poisoned labels


def test_two_classes_are_flipped_for_malicious_training_clients_only():
    clean = FederatedData(
        make_clients(SIZES, classes=2), make_clients(SIZES, classes=2, seed=2), make_clients(SIZES, seed=3, classes=2)
    )
    data = eq.attacks.apply(clean, eq.attacks.LabelPoisoning(share=0.5, seed=3))
    assert len(data.malicious) == 4
    for k, name in enumerate(clean.train.ids):
        rows = clean.train.rows(k)
        expected = 1 - clean.train.y[rows] if name in data.malicious else clean.train.y[rows]
        assert data.train.y[rows].equal(expected)
    assert data.train.x.equal(clean.train.x)
    assert data.validation is clean.validation
    assert data.test is clean.test
    assert clean.attack is None
    assert clean.malicious == frozenset()
    assert (data.name, data.classes) == ("data under " + repr(data.attack), 2)


def test_more_classes_become_uniformly_random():
    clients = ClientSet.pack((f"c{i}", torch.zeros(3000, 1), torch.full((3000,), i % 3)) for i in range(6))
    clean = FederatedData(clients, classes=5)
    data = eq.attacks.apply(clean, eq.attacks.LabelPoisoning(share=0.5))
    drawn = []
    for k, name in enumerate(clients.ids):
        labels = data.train.y[clients.rows(k)]
        if name not in data.malicious:
            assert labels.equal(clients.y[clients.rows(k)])
            continue
        drawn.append(labels)
        counts = labels.bincount(minlength=5).tolist()
        assert stats.chisquare(counts).pvalue > 1e-4, counts
    assert len(drawn) == 3
    assert 0.15 < float((drawn[0] == drawn[1]).double().mean()) < 0.25  # each has labels of its own, whatever they were


def test_labels_do_not_depend_on_the_other_clients():
    alone, among = FederatedData(make_clients([9], classes=3), classes=3), ragged_data()
    attack = eq.attacks.LabelPoisoning(share=1.0, seed=8)
    first = eq.attacks.apply(alone, attack).train
    several = [("client-0", torch.ones(9, 4), torch.zeros(9).long()), ("b", torch.ones(1, 4), torch.ones(1).long())]
    second = eq.attacks.apply(FederatedData(ClientSet.pack(several), classes=3), attack).train
    assert first.y[:9].equal(second.y[:9])
    assert eq.attacks.apply(among, attack).malicious == frozenset(among.train.ids)


# ------------------------------------------------------------ A2: random updates


def wide_data():
    """Clients whose model has 6 · 800 weights, so that a standard deviation is known to 1 %."""
    gen = torch.Generator().manual_seed(0)
    clients = [
        (f"c{i}", torch.randn(20, 800, generator=gen, dtype=torch.float64), torch.randint(0, 6, (20,), generator=gen))
        for i in range(6)
    ]
    return FederatedData(ClientSet.pack(clients), classes=6)


def test_random_updates_have_the_standard_deviation_of_the_honest_one():
    clean = wide_data()
    data = eq.attacks.apply(clean, eq.attacks.RandomUpdates(share=0.5, seed=4))
    twice = eq.attacks.apply(clean, eq.attacks.RandomUpdates(share=0.5, seed=4, scale=2.0))
    model = eq.models.Softmax(800, 6, bias=False).double()
    honest, noisy, double = (sent(d, model=model) for d in (clean, data, twice))
    bad, count = malicious_rows(data), 4800
    assert int(bad.sum()) == 3
    assert noisy[~bad].equal(honest[~bad])
    spread = honest[bad].std(1, correction=0)
    torch.testing.assert_close(noisy[bad].std(1, correction=0), spread, rtol=5 / math.sqrt(2 * count), atol=0)
    assert bool((noisy[bad].mean(1).abs() < 5 * spread / math.sqrt(count)).all())
    for row, s in zip(noisy[bad], spread, strict=True):
        assert stats.kstest((row / s).numpy(), "norm").pvalue > 1e-4
    torch.testing.assert_close(double[bad], 2 * noisy[bad])
    # It does not resemble the honest update, nor another client's noise.
    related = torch.corrcoef(torch.cat([honest[bad], noisy[bad]])).fill_diagonal_(0)[3:]
    assert float(related.abs().max()) < 5 / math.sqrt(count)


def test_random_updates_differ_by_client_round_seed_of_run_and_of_attack_and_are_reproducible():
    clean = wide_data()
    data = eq.attacks.apply(clean, eq.attacks.RandomUpdates(share=1.0, seed=4))
    model = eq.models.Softmax(800, 6, bias=False).double()
    first, again = sent(data, model=model), sent(data, model=model)
    assert first.equal(again)
    assert len({tuple(row[:3].tolist()) for row in first}) == 6
    other = eq.attacks.apply(clean, eq.attacks.RandomUpdates(share=1.0, seed=5))
    for changed in (sent(data, model=model, round_index=1), sent(data, model=model, seed=1), sent(other, model=model)):
        assert float(torch.corrcoef(torch.stack([first[0], changed[0]]))[0, 1].abs()) < 5 / math.sqrt(4800)


def test_normal_noise_is_finite_at_both_ends_of_its_stream(monkeypatch):
    for bits in (0, 2**63 - 1):
        monkeypatch.setattr(rng, "random_bits", lambda keys, first, count, bits=bits: torch.full((len(keys), count), bits))
        assert bool(torch.isfinite(normal_noise(torch.zeros(1, dtype=torch.int64), 5)).all())


def test_clients_that_do_nothing_send_nothing():
    data = eq.attacks.apply(ragged_data(), eq.attacks.RandomUpdates(share=1.0))
    for choice in (Loop(), Simulator()):
        assert float(sent(data, choice, solver=SGD(epochs=0)).abs().max()) == 0


# ------------------------------------------------------------ A3: model replacement


def points(*groups):
    """One client per group of numbers on a line; the task is mean estimation, F_k(w) = mean (w − x)²."""
    clients = [(f"c{i}", torch.tensor(g, dtype=torch.float64).unsqueeze(1)) for i, g in enumerate(groups)]
    return FederatedData(ClientSet.pack((name, x, x) for name, x in clients))


def one_round(data, algorithm, engine):
    task = Task.of(eq.models.MeanEstimator(1).double())
    running = {"loop": Loop(), "simulator": Simulator()}[engine].start(task, data)
    state = eq.types.ServerState(0, torch.zeros(1, dtype=torch.float64))
    return run_round(state, algorithm, running, everyone(data), data.train)


@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize(
    ("update", "factor", "times"),
    [("honest", None, 3.0), ("negated", None, -3.0), ("honest", 10.0, 10.0), ("negated", 0.5, -0.5)],
)
def test_one_round_of_model_replacement_by_hand(engine, update, factor, times):
    # At w = 0 the updates of {1}, {2}, {3} are 0.2, 0.4, 0.6, each with weight 1/3.
    data = eq.attacks.apply(
        points([1.0], [2.0], [3.0]), eq.attacks.ModelReplacement(share=0.3, seed=0, update=update, factor=factor)
    )
    (bad,) = data.malicious
    honest = {"c0": 0.2, "c1": 0.4, "c2": 0.6}
    expected = sum(u * (times if name == bad else 1) for name, u in honest.items()) / 3
    state, report = one_round(data, eq.Algorithm(solver=SGD(lr=0.1, batch_size=None)), engine)
    assert float(state.params) == pytest.approx(expected, abs=1e-12)
    assert report.rejected == ()


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_only_clients_that_send_count_in_the_factor(engine):
    # Losses at 0 are 1, 4, 9, 16; with θ = 0.5 only the last two send, with weight 1/2 each, and everyone is malicious.
    data = eq.attacks.apply(points([1.0], [2.0], [3.0], [4.0]), eq.attacks.ModelReplacement(share=1.0, update="honest"))
    algorithm = eq.Algorithm(risk=eq.risk.Superquantile(0.5), solver=SGD(lr=0.1, batch_size=None))
    state, report = one_round(data, algorithm, engine)
    assert report.trained == 2
    assert float(state.params) == pytest.approx(2 * (0.6 + 0.8) / 2)


def test_poisoned_replacement_is_label_poisoning_scaled():
    clean = ragged_data()
    poisoned = eq.attacks.apply(clean, eq.attacks.LabelPoisoning(share=0.4, seed=1))
    replaced = eq.attacks.apply(clean, eq.attacks.ModelReplacement(share=0.4, seed=1))
    assert replaced.malicious == poisoned.malicious
    assert replaced.train.y.equal(poisoned.train.y)
    assert eq.attacks.apply(clean, eq.attacks.ModelReplacement(share=0.4, seed=1, update="negated")).train.y.equal(
        clean.train.y
    )
    factors = torch.where(malicious_rows(replaced), 8.0, 1.0).double()
    torch.testing.assert_close(sent(replaced), factors.unsqueeze(1) * sent(poisoned))


# ------------------------------------------------------------ one's own attack


@dataclass(frozen=True)
class Backdoor:
    """A pixel is set and the label is 0; the update is pushed along with the sign of the honest one."""

    share: float = 0.25
    seed: int = 0

    def poison(self, clients, chosen, classes):
        x, y = clients.x.clone(), clients.y.clone()
        for name in chosen:
            rows = clients.rows(clients.ids.index(name))
            x[rows, 0], y[rows] = 5.0, 0
        return replace(clients, x=x, y=y)

    def corrupt(self, sent):
        return sent.updates.sign() * sent.cohort


def test_an_attack_of_ones_own_poisons_and_corrupts():
    clean = ragged_data()
    data = eq.attacks.apply(clean, Backdoor())
    bad = malicious_rows(data)
    assert int(bad.sum()) == 2
    for k, hit in enumerate(bad.tolist()):
        rows = clean.train.rows(k)
        assert bool((data.train.x[rows, 0] == 5).all()) is hit
        assert data.train.x[rows, 1:].equal(clean.train.x[rows, 1:])
    for choice in (Loop(), Simulator(chunk_size=3)):
        arrived = sent(data, choice)
        assert set(arrived[bad].unique().tolist()) <= {-8.0, 0.0, 8.0}
        torch.testing.assert_close(arrived[~bad], sent(clean, choice)[~bad])


@dataclass(frozen=True)
class OnlyCorrupt:
    share: float = 0.5
    seed: int = 0

    def corrupt(self, sent):
        return -sent.updates.float()  # another type of numbers is fine


@dataclass(frozen=True)
class Bystander:
    share: float = 0.5
    seed: int = 0


def test_what_an_attack_does_not_do_it_need_not_have():
    clean = ragged_data()
    data, idle = eq.attacks.apply(clean, OnlyCorrupt()), eq.attacks.apply(clean, Bystander())
    assert data.train is clean.train
    bad, honest = malicious_rows(data), sent(clean)
    torch.testing.assert_close(sent(data)[bad], -honest[bad], rtol=1e-6, atol=1e-8)
    assert sent(idle).equal(honest)
    assert idle.malicious == data.malicious


# ------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("make", "parameter"),
    [
        (lambda: eq.attacks.LabelPoisoning(share=1.5), "share"),
        (lambda: eq.attacks.LabelPoisoning(share=float("nan")), "share"),
        (lambda: eq.attacks.LabelPoisoning(share=True), "share"),
        (lambda: eq.attacks.RandomUpdates(seed=-1), "seed"),
        (lambda: eq.attacks.RandomUpdates(seed=0.5), "seed"),
        (lambda: eq.attacks.RandomUpdates(scale=-1.0), "scale"),
        (lambda: eq.attacks.RandomUpdates(scale=math.inf), "scale"),
        (lambda: eq.attacks.ModelReplacement(update="inverted"), "update"),
        (lambda: eq.attacks.ModelReplacement(factor=0.0), "factor"),
        (lambda: eq.attacks.apply(ragged_data(), eq.attacks.LabelPoisoning), "attack"),
        (lambda: eq.attacks.apply(ragged_data(), "labels"), "attack"),
        (lambda: eq.attacks.apply(make_clients(SIZES), eq.attacks.LabelPoisoning()), "data"),
        (lambda: eq.attacks.apply(ragged_data(), Backdoor(share=2.0)), "share"),
        (lambda: eq.attacks.apply(ragged_data(), Backdoor(share="half")), "share"),
        (lambda: eq.attacks.apply(ragged_data(), Backdoor(seed=-3)), "seed"),
    ],
)
def test_bad_parameters_are_named(make, parameter):
    with pytest.raises(InvalidParameter) as caught:
        make()
    assert caught.value.parameter == parameter


@dataclass(frozen=True)
class BadPoison:
    result: object
    share: float = 0.5
    seed: int = 0

    def poison(self, clients, chosen, classes):
        return self.result(clients)


def test_what_cannot_be_attacked_is_said():
    once = eq.attacks.apply(ragged_data(), eq.attacks.LabelPoisoning())
    with pytest.raises(InvalidParameter, match="must not be under attack already"):
        eq.attacks.apply(once, eq.attacks.RandomUpdates())
    for attack in (eq.attacks.LabelPoisoning(share=1.0), eq.attacks.ModelReplacement(share=1.0)):
        with pytest.raises(InvalidData, match="needs classes as targets"):
            eq.attacks.apply(points([1.0], [2.0]), attack)
    eq.attacks.apply(points([1.0], [2.0]), eq.attacks.ModelReplacement(share=1.0, update="negated"))  # needs no labels
    for wrong in (lambda c: c.take([0, 1]), lambda c: c.take([1, 0, *range(2, 8)]), lambda c: None):
        with pytest.raises(InvalidData, match="must keep the clients"):
            eq.attacks.apply(ragged_data(), BadPoison(wrong))
    with pytest.raises(InvalidData, match="classes must be"):
        eq.attacks.apply(ragged_data(), BadPoison(lambda c: replace(c, y=c.y + 7)))


# ------------------------------------------------------------ identity


class PlainAttack:
    share, seed = 0.5, 0

    def corrupt(self, sent):
        return sent.updates


def test_data_under_attack_have_another_fingerprint(tmp_path):
    clean = ragged_data()
    kinds = [
        None, eq.attacks.LabelPoisoning(), eq.attacks.LabelPoisoning(seed=1), eq.attacks.RandomUpdates(),
        eq.attacks.RandomUpdates(scale=2.0), eq.attacks.ModelReplacement(share=0.2, update="negated"), Bystander(),
    ]  # fmt: skip
    prints = [(clean if attack is None else eq.attacks.apply(clean, attack)).fingerprint for attack in kinds]
    assert len(set(prints)) == len(prints)
    assert eq.attacks.apply(clean, eq.attacks.RandomUpdates()).fingerprint == prints[3]
    # An object that shows where it lies in memory is the same attack elsewhere.
    several = [PlainAttack() for _ in range(3)]
    assert len({eq.attacks.apply(clean, attack).fingerprint for attack in several}) == 1

    file, model = tmp_path / "run.safetensors", eq.models.Softmax(4, 3).double()
    options = {"clients_per_round": 4, "checkpoint": file}
    eq.train(model, eq.attacks.apply(clean, eq.attacks.RandomUpdates()), rounds=1, **options)
    with pytest.raises(CheckpointError, match="differs in data: "):
        eq.train(model, eq.attacks.apply(clean, eq.attacks.RandomUpdates(seed=3)), rounds=2, **options)


# ------------------------------------------------------------ metrics


def table(malicious):
    count = len(malicious)
    return ClientTable(
        tuple(f"c{i}" for i in range(count)) * 2, ("train",) * count + ("test",) * count, torch.ones(2 * count).bool(),
        torch.arange(1, 2 * count + 1), torch.arange(2.0 * count).double(), torch.arange(2.0 * count).double() / 10,
        malicious=torch.tensor(malicious * 2),
    )  # fmt: skip


def test_summaries_are_over_benign_clients():
    rows = table([False, True, False, True])
    found = rows.summaries()
    assert found["test"]["error"].mean == pytest.approx((0.4 + 0.6) / 2)
    assert found["test"]["error"].standard_deviation == pytest.approx(0.1)
    assert found["test"]["error"].clients == 2
    assert found["train"]["loss"].mean == pytest.approx((0 * 1 + 2 * 3) / 4)  # weighted by examples
    assert rows.benign.client == ("c0", "c2") * 2
    assert table([False] * 3).benign.client == table([False] * 3).client
    assert len(table([True] * 3).benign) == 6  # there is nobody else to judge by


def test_a_run_under_attack_is_judged_by_benign_clients(tmp_path):
    clean = eq.data.split_examples(make_clients([30] * 10), validation=0.1, test=0.2)
    data = eq.attacks.apply(replace(clean, classes=3), eq.attacks.RandomUpdates(share=0.3, seed=1))
    run = eq.train(eq.models.Softmax(4, 3), data, rounds=3, clients_per_round=5, evaluate_every=1)
    good = [i for i, name in enumerate(data.test.ids) if name not in data.malicious]
    rows = run.clients.where("test")
    assert rows.malicious.tolist() == [name in data.malicious for name in rows.client]
    summary = run.summary()
    assert summary.error.mean == pytest.approx(float(rows.error[good].mean()))
    assert summary.error.standard_deviation == pytest.approx(float(rows.error[good].std(correction=0)))
    assert (summary.error.clients, summary.malicious) == (7, 3)
    assert "7 benign test clients" in str(summary)
    last = run.history.points[-1].splits
    assert last["test"]["error"] == pytest.approx(summary.error.mean)
    assert last["validation"]["loss"] == pytest.approx(run.summary("validation").loss.mean)

    back = ClientTable.from_parquet(run.clients.to_parquet(tmp_path / "clients.parquet", method="x"))
    known = ("client", "split", "seen", "size", "loss", "error", "malicious", "trivial_error")
    assert back.columns == run.clients.columns == known
    for column in back.columns:
        first, second = run.clients[column], back[column]
        assert first.equal(second) if isinstance(first, torch.Tensor) else first == second
    assert str(back.summaries()) == str(run.clients.summaries())
    header = run.clients.to_csv(tmp_path / "clients.csv").read_text().splitlines()[0]
    assert header == ",".join(run.clients.columns)
    plain = eq.train(eq.models.Softmax(4, 3), clean, rounds=1, clients_per_round=5).clients
    assert plain.malicious is None
    assert ClientTable.from_parquet(plain.to_parquet(tmp_path / "plain.parquet")).malicious is None


def test_unseen_clients_are_benign(ragged):
    data = eq.attacks.apply(ragged, eq.attacks.LabelPoisoning(share=0.5))
    rows = eq.train(eq.models.Softmax(4, 3), data, rounds=1, clients_per_round=4).clients
    assert not bool(rows.where("test").malicious.any())
    assert int(rows.where("train").malicious.sum()) == 4


def test_methods_side_by_side_under_attack():
    clean = eq.data.split_examples(make_clients([20] * 12), test=0.25)
    poisoned = eq.attacks.apply(clean, eq.attacks.LabelPoisoning(share=0.25, seed=1))
    found = eq.compare(
        {"mean": eq.Algorithm(), "Krum": eq.Algorithm(aggregator=eq.aggregators.Krum(malicious=3)),
         "Ditto": eq.Algorithm(personal=eq.personal.Ditto())},
        eq.models.Softmax(4, 3), poisoned, rounds=3, clients_per_round=12, progress=False,
    )  # fmt: skip
    rows = found.results["Ditto"][0].clients.where("test").benign
    assert len(rows) == 9
    assert found.table()["Ditto"]["mean"].mean == pytest.approx(float(rows.personal_error.mean()))
    assert found.table()["mean"]["mean"].mean == pytest.approx(float(rows.error.mean()))  # the same shared model
    assert "Ditto" in found.summary()


def test_a_family_under_attack_is_judged_by_benign_clients():
    clean = eq.data.split_examples(make_clients([30] * 10), validation=0.2, test=0.2)
    data = eq.attacks.apply(clean, eq.attacks.LabelPoisoning(share=0.3, seed=1))
    family = eq.train_family(eq.models.Softmax(4, 3), data, tails=[1.0, 0.5], rounds=2, clients_per_round=5)
    for (run,) in family.comparison().results.values():
        assert run.summary().error.clients == 7
