"""What observers of a private run try to learn beyond their ε, in simulations: each test is an attack, or its price."""

import json
import math
from dataclasses import replace

import pytest
import torch

import equipoise as eq
from equipoise.errors import EquipoiseNotice, NotWritten
from equipoise.privacy.accounting import epsilon_of, gaussian_epsilon, noise_for
from equipoise.privacy.ledger import Ledger, LedgerEntry, LedgerError, events_of, read_entries, server_epsilon
from equipoise.privacy.ledger_report import entries_below, summarise_ledgers
from equipoise.privacy.noise_plan import PrivateState
from equipoise.privacy.releases import CohortEvent, FixedSampling, PoissonSampling, Release

P = eq.privacy
FAST = {"method": "rdp"}


@pytest.fixture(scope="module")
def data():
    return eq.data.label_shift(train_clients=40, validation_clients=5, test_clients=5, seed=0)


@pytest.fixture(scope="module")
def model(data):
    return eq.models.Softmax(data.features, data.classes)


def noisy(multiplier=1.0, **options):
    return P.DifferentialPrivacy(None, 1e-2, clip=1.0, noise_multiplier=multiplier, **{**FAST, **options})


def trained(model, data, algorithm, *, rounds=3, m=10, seed=0, **options):
    return eq.train(model, data, algorithm, rounds=rounds, clients_per_round=m, seed=seed, progress=False, **options)


# ----------------------------------------------------------------------------------------- the server, from small cohorts


def cohort_of_seed(seed, t, alpha, m=10):
    return eq.sampling.Poisson()(t, alpha, clients_per_round=m, seed=seed)


def small_cohort_seed(rounds=3, m=10, fewest=5):
    """A seed under which a client is in a cohort that is smaller than the noise was calibrated to, and in most rounds."""
    alpha = torch.ones(40, dtype=torch.float64) / 40
    for seed in range(2000):
        cost, rounds_in = torch.zeros(40, dtype=torch.float64), torch.zeros(40)
        for t in range(rounds):
            clients = cohort_of_seed(seed, t, alpha, m).clients
            if len(clients):
                cost[clients] += max(1.0, fewest / len(clients))
                rounds_in[clients] += 1
        if cost.max() > rounds_in.max() + 0.5:
            return seed, float(cost.max())
    raise AssertionError


def test_a_server_takes_its_own_noise_off_the_sums_of_small_cohorts(model, data, monkeypatch):
    """A simulation counts planned rounds with the noise of the fewest clients: who came is secret. A network counts them."""
    seed, cost = small_cohort_seed()
    monkeypatch.setattr("equipoise.rounds.cohorts.draw_unforeseen", lambda run, t, source: cohort_of_seed(seed, t, run.alpha))
    result = trained(model, data, eq.Algorithm(privacy=noisy(1.0, noise="distributed")))
    assert result.epsilon.epsilon_server == pytest.approx(gaussian_epsilon(1.0 / math.sqrt(result.rounds), 1e-2))
    assert PrivateState(1.0).after(clip=1.0, weight=cost).exposure == cost  # of a network's round


# ------------------------------------------------------------------------------------------------ what fixed cohorts cost


@pytest.mark.parametrize(("epsilon", "delta", "m", "n", "rounds"), [(8.0, 1e-2, 5, 8, 2), (5.0, 1e-3, 20, 40, 20)])
def test_fixed_cohorts_cost_no_more_than_no_sampling_at_all(epsilon, delta, m, n, rounds):
    fixed = noise_for(epsilon, delta, rounds=rounds, cohort=m, population=n)
    assert fixed <= 1.001 * noise_for(epsilon, delta, rounds=rounds)
    spent = epsilon_of([(CohortEvent((Release("update", fixed),), FixedSampling(m, n)), rounds)], delta)
    assert spent <= epsilon * (1 + 1e-9)
    assert spent <= gaussian_epsilon(fixed / math.sqrt(rounds), delta)


def test_fixed_cohorts_still_gain_from_sampling_where_it_helps():
    event = CohortEvent((Release("update", 1.5),), FixedSampling(10, 1000))
    assert epsilon_of([(event, 100)], 1e-4) < 0.9 * gaussian_epsilon(0.15, 1e-4)


# ------------------------------------------------------------------------------------- the difference of two released models


def test_the_difference_of_two_methods_has_no_noise_in_common(model, data):
    first, second = eq.Algorithm(privacy=noisy(50.0)), eq.Algorithm(solver=eq.solvers.SGD(lr=0.2), privacy=noisy(50.0))
    both = eq.compare({"a": first, "b": second}, model, data, rounds=1, clients_per_round=10, progress=False)
    one, other = (runs[0].params for runs in both.results.values())
    assert float((one - other).norm()) > 0.5 * float(one.norm())  # independent noise: about √2 of it


@pytest.mark.parametrize("noise", ["central", "distributed"])
def test_a_seed_repeats_the_noise_of_one_method(model, data, noise):
    algorithm = eq.Algorithm(privacy=noisy(noise=noise, noise_seed=0))
    assert torch.equal(trained(model, data, algorithm).params, trained(model, data, algorithm).params)


def test_several_seeds_and_methods_cost_more_than_one(model, data, tmp_path):
    methods = {"a": eq.Algorithm(privacy=noisy()), "b": eq.Algorithm(solver=eq.solvers.SGD(lr=0.2), privacy=noisy())}
    ledger = tmp_path / "ledger.jsonl"
    both = eq.compare(methods, model, data, rounds=2, clients_per_round=10, seeds=2, progress=False, ledger=ledger)
    event = CohortEvent((Release("update", 1.0),), PoissonSampling(0.25))
    together = epsilon_of([(event, 8)], 1e-2)
    assert f"ε = {together:.4g}" in both.summary()
    assert "The 4 private runs" in both.summary()
    assert "nominal" not in both.summary()
    (found,) = summarise_ledgers(entries_below(tmp_path))
    assert (len(found.runs), found.epsilon) == (4, pytest.approx(together))
    with pytest.warns(EquipoiseNotice, match="protected"):
        many = eq.train_many(model, data, methods["a"], seeds=2, rounds=2, clients_per_round=10, progress=False)
    assert f"ε = {epsilon_of([(event, 4)], 1e-2):.4g}" in many.summary()
    page = both.report(tmp_path / "r.html").read_text()
    assert f"ε = {together:.4g}" in page
    assert 'class="observers"' in page


# ------------------------------------------------------------------------------------------------------- one ε per observer


def test_no_observer_is_promised_more_than_it_can_be_held_to(model, data):
    tail = eq.risk.Superquantile(0.5, quantile=P.PrivateQuantile(bound=2.0, bins=4))
    result = trained(model, data, eq.Algorithm(risk=tail, privacy=noisy(2.0)))
    table = result.privacy
    assert table["public"].epsilon == result.epsilon.epsilon
    assert table["server"].epsilon is None
    assert "trusted" in table["server"].assumes
    assert not table.nominal
    spread = trained(model, data, eq.Algorithm(risk=tail, privacy=noisy(2.0, noise="distributed"))).privacy
    assert spread["node"].epsilon > spread["public"].epsilon  # it learns who takes part: no amplification
    assert spread["node"].adjacency == "one client's contribution zeroed"
    assert spread["server"].epsilon is None  # clients that train were evaluated exactly
    assert "evaluated exactly" in spread["server"].assumes
    for plain in (None, P.SecureAggregation()):
        rows = trained(model, data, eq.Algorithm(privacy=plain), rounds=1).privacy.rows
        assert [row.epsilon for row in rows] == [None, None, None]


def test_nodes_that_collude_take_their_own_shares_of_noise_off(model, data):
    privacy = noisy(2.0, noise="distributed", fewest=10)
    table = trained(model, data, eq.Algorithm(sampler=eq.sampling.Uniform(), privacy=privacy)).privacy
    known = table.known
    for colluding in (1, 3):
        z = 2 * 2.0 * math.sqrt((10 - colluding) / 10)  # noise over C: cohorts of fixed size count in 2C
        expected = gaussian_epsilon(z / math.sqrt(known.participations), 1e-2)
        assert table.node(colluding=colluding).epsilon == pytest.approx(expected)
    assert table.node(colluding=10).epsilon is None
    assert table["node"] == table.node()


def test_a_table_outlives_its_folder(model, data, tmp_path):
    result = trained(model, data, eq.Algorithm(privacy=noisy(2.0, noise="distributed")), rounds=2)
    result.save(tmp_path / "run")
    from equipoise.experiment.folder import read_record

    assert read_record(tmp_path / "run").privacy == result.privacy


# ---------------------------------------------------------------------------------------------------------------- the ledger


def test_a_release_is_in_the_ledger_before_it_is_made(model, data, tmp_path, monkeypatch):
    path = tmp_path / "ledger.jsonl"
    seen = []
    plain = eq.privacy.noise_plan.NoisePlan.gaussian

    def gaussian(self, purpose, round_index, count):
        seen.append((purpose, round_index, {(e.purpose, e.round) for e in read_entries(path)}))
        return plain(self, purpose, round_index, count)

    monkeypatch.setattr(eq.privacy.noise_plan.NoisePlan, "gaussian", gaussian)
    trained(model, data, eq.Algorithm(privacy=noisy(clip_rule=P.AdaptiveClip())), ledger=path)
    assert len(seen) == 6
    assert all((purpose, index) in written for purpose, index, written in seen)


def test_a_killed_simulation_goes_on_with_the_same_bits_and_counts_them_once(model, data, tmp_path):
    tail = eq.risk.Superquantile(0.5, quantile=P.PrivateQuantile(bound=2.0, bins=4))
    algorithm = eq.Algorithm(risk=tail, privacy=noisy(2.0, noise_seed=0))
    whole = trained(model, data, algorithm, rounds=4)

    class Killed(eq.types.Observer):
        def on_round(self, report):
            if report.round == 2:
                raise KeyboardInterrupt

    path = tmp_path / "run.ckpt"
    saving = eq.runs.checkpoint.Checkpoints(path, every=2)
    with pytest.raises(KeyboardInterrupt):
        trained(model, data, algorithm, rounds=4, checkpoint=saving, observers=[Killed()])
    before = (tmp_path / "run.ledger.jsonl").read_text()
    resumed = trained(model, data, algorithm, rounds=4, checkpoint=eq.runs.checkpoint.Checkpoints(path, every=2))
    assert torch.equal(resumed.params, whole.params)
    assert resumed.epsilon == whole.epsilon
    after = (tmp_path / "run.ledger.jsonl").read_text()
    assert after.startswith(before)  # append-only
    keys = [(e.round, e.purpose) for e in read_entries(tmp_path / "run.ledger.jsonl") if e.kind == "release"]
    assert len(keys) == len(set(keys)) == 8


def test_a_run_that_was_killed_has_paid_for_what_it_began(model, data, tmp_path):
    class Killed(eq.types.Observer):
        def on_round(self, report):
            if report.round == 1:
                raise KeyboardInterrupt

    ledger = tmp_path / "ledger.jsonl"
    with pytest.raises(KeyboardInterrupt):
        trained(model, data, eq.Algorithm(privacy=noisy()), ledger=ledger, observers=[Killed()])
    trained(model, data, eq.Algorithm(privacy=noisy()), seed=1, ledger=ledger)
    (found,) = summarise_ledgers(entries_below(ledger))
    event = CohortEvent((Release("update", 1.0),), PoissonSampling(0.25))
    assert found.epsilon == pytest.approx(epsilon_of([(event, 5)], 1e-2))


def test_a_run_that_is_made_again_is_another_run_and_costs_as_much_again(model, data, tmp_path):
    event = CohortEvent((Release("update", 1.0),), PoissonSampling(0.25))
    for _ in range(2):
        result = trained(model, data, eq.Algorithm(privacy=noisy()), ledger=tmp_path / "ledger.jsonl")
    assert result.epsilon.epsilon == pytest.approx(epsilon_of([(event, 3)], 1e-2, method="rdp"))
    (found,) = summarise_ledgers(entries_below(tmp_path))
    assert (len(found.runs), found.epsilon) == (2, pytest.approx(epsilon_of([(event, 6)], 1e-2)))


def test_ledgers_that_were_cut_off_are_read_and_damaged_ones_refused(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path, durable=True)
    entry = LedgerEntry("release", "d", "r", 0, "update", 1.0, 1.0, ("poisson", 0.5), 1e-3)
    ledger.write(entry)
    assert not ledger.write(entry)  # the same bits
    with path.open("a") as file:
        file.write('{"kind":"release","da')
    again = Ledger(path)
    assert again.entries == [entry]
    again.write(replace(entry, round=1))
    assert [e.round for e in Ledger(path)] == [0, 1]
    assert path.stat().st_mode & 0o077 == 0  # it may name clients
    path.write_text('{"kind":"release","round":0}\n')
    with pytest.raises(LedgerError, match="line 1"):
        Ledger(path)
    with pytest.raises(LedgerError, match="no ledger"):
        entries_below(tmp_path / "nothing")
    with pytest.raises(NotWritten, match="Nothing is released"):
        Ledger(tmp_path / "ledger.jsonl" / "below").write(entry)


def test_two_writers_share_a_ledger(tmp_path):
    path = tmp_path / "ledger.jsonl"
    writers = {name: Ledger(path) for name in "ab"}  # as two processes do
    for t in range(20):
        for name, ledger in writers.items():
            ledger.write(LedgerEntry("release", "d", name, t, "update", 1.0, 1.0, ("everyone",), 1e-3))
    assert len(read_entries(path)) == 40
    ((event, count),) = events_of(read_entries(path))
    assert (event.multiplier, count) == (1.0, 40)


def test_who_took_part_decides_what_the_server_learns_from_a_ledger():
    def entry(kind, t, **more):
        return LedgerEntry(kind, "d", "r", t, **more)

    def release(t, **more):
        return entry(
            "release", t, purpose="update", zeroed=2.0, sampling=("everyone",), delta=1e-3, shares=5, token=f"{t}", **more
        )

    pages = [entry("cohort", 0, cohort=("a", "b")), release(0), entry("cohort", 1, cohort=("a",)), release(1, contributors=3)]
    assert server_epsilon(pages, 1e-3) == pytest.approx(gaussian_epsilon((2.0**-2 + (4 * 3 / 5) ** -1) ** -0.5, 1e-3))
    pages.append(entry("outcome", 1, purpose="update", token=f"{1}", contributors=5))
    assert server_epsilon(pages, 1e-3) == pytest.approx(gaussian_epsilon(2.0 / math.sqrt(2), 1e-3))
    assert server_epsilon([*pages, release(2)], 1e-3) is None  # nobody knows who took part


def test_the_command_shows_a_ledger_and_observers(model, data, tmp_path):
    from typer.testing import CliRunner

    from equipoise.cli.privacy_commands import app

    result = trained(model, data, eq.Algorithm(privacy=noisy()), ledger=tmp_path / "ledger.jsonl")
    result.save(tmp_path / "run")
    (found,) = json.loads(CliRunner().invoke(app, ["ledger", str(tmp_path), "--json"]).output)["data"]
    assert found["runs"][0]["releases"] == 3
    assert found["epsilon"] <= result.epsilon.epsilon
    words = CliRunner().invoke(app, ["ledger", str(tmp_path)]).output
    assert "nominal" not in words
    shown = CliRunner().invoke(app, ["observers", str(tmp_path / "run")]).output
    assert str(result.privacy) in shown


# ---------------------------------------------------------------------------------------- coins that nodes keep to themselves


def hidden_coins(multiplier=2.0, **options):
    return eq.Algorithm(sampler=eq.sampling.NodePoisson(), privacy=noisy(multiplier, noise="distributed", **options))


def test_amplification_counts_against_a_server_that_cannot_know_the_coins(model, data):
    """40 clients, rate 1/4, 3 rounds: all nodes add noise, so that the server's ε is that of Poisson sampling as well."""
    hidden, seen = (trained(model, data, a) for a in (hidden_coins(), eq.Algorithm(privacy=noisy(2.0, noise="distributed"))))
    event = CohortEvent((Release("update", 2.0),), PoissonSampling(0.25))
    assert hidden.epsilon.epsilon_server == pytest.approx(epsilon_of([(event, 3)], 1e-2, method="rdp"))
    assert seen.epsilon.epsilon_server > 1.5 * hidden.epsilon.epsilon_server
    table = hidden.privacy
    assert table["server"].epsilon is None  # clients that train were evaluated exactly
    known = table.known
    assert (known.rate, known.participations, known.shares, known.calibrated) == (0.25, 3, 40, 21)
    for colluding, left in ((1, 21), (30, 10)):  # of 40 shares, 21 are counted on
        weaker = CohortEvent((Release("update", 2.0 * math.sqrt(left / 21)),), PoissonSampling(0.25))
        assert table.node(colluding=colluding).epsilon == pytest.approx(epsilon_of([(weaker, 3)], 1e-2, method="rdp"))
    assert "coins" in table["node"].assumes


def test_coins_of_nodes_need_noise_of_nodes(model, data):
    for privacy in (None, P.SecureAggregation(), noisy()):
        with pytest.raises(eq.errors.IncompatibleParts, match="distributed"):
            eq.Algorithm(sampler=eq.sampling.NodePoisson(), privacy=privacy)
    options = {"noise_seed": 0, "fewest": 40}
    hidden = hidden_coins(1e-4, **options)
    plain = eq.Algorithm(privacy=noisy(1e-4, noise="distributed", **{**options, "fewest": 10}))
    one, other = (trained(model, data, a, seed=4).params for a in (hidden, plain))
    assert float((one - other).abs().max()) < 1e-3  # the same cohorts and denominators, but for the rounding


def test_few_responders_are_written_down_for_the_server():
    """A round in which 10 of the 21 nodes that the noise counts on have answered has less of it, and costs the server more."""

    def entry(kind, t, **more):
        return LedgerEntry(kind, "d", "r", t, purpose="update", token=f"{t}", **more)

    def release(t):
        return entry("release", t, multiplier=2.0, zeroed=2.0, sampling=("node poisson", 0.25), delta=1e-2, shares=21)

    pages = [release(0), entry("outcome", 0, contributors=40), release(1), entry("outcome", 1, contributors=10)]
    events = [CohortEvent((Release("update", z),), PoissonSampling(0.25)) for z in (2.0, 2.0 * math.sqrt(10 / 21))]
    assert server_epsilon(pages, 1e-2) == pytest.approx(epsilon_of([(event, 1) for event in events], 1e-2))
