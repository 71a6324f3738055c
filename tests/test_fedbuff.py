"""FedBuff on its simulated clock: known answers, determinism, checkpoints with jobs in flight, refusals."""

import itertools
import math
from dataclasses import dataclass, replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import equipoise as eq
from equipoise.core.task import Task
from equipoise.core.task_trial import try_task
from equipoise.data import ClientSet, FederatedData
from equipoise.errors import EquipoiseNotice, IncompatibleParts, InvalidParameter
from equipoise.report import figures as interactive
from equipoise.report.series import participation
from equipoise.report.study import Study
from equipoise.rounds.clock import Flight, FlightState, RunOnClock
from equipoise.sampling import TICKS, FedBuff, Uniform


def points(**clients):
    """One-dimensional clients with F_k(w) = (w − x_k)²: at rate ¼ a step is ½ (x_k − w)."""
    packed = ClientSet.pack([(name, torch.tensor([[x]]), torch.tensor([[x]])) for name, x in clients.items()])
    return FederatedData(packed, name="points")


def mean_run(data, sampler, rounds, at_work, **options):
    model = eq.models.MeanEstimator(1)
    parts = {"solver": eq.solvers.SGD(lr=0.25, batch_size=None, epochs=1), "weights": "uniform"} | options.pop("parts", {})
    algorithm = eq.Algorithm(sampler=sampler, **parts)
    return eq.train(model, data, algorithm, rounds=rounds, clients_per_round=at_work, progress=False, **options)


def arrivals(result):
    return [(report.clock, report.arrivals) for report in result.history.rounds]


SUMS = eq.privacy.SecureAggregation(fewest=2)
AB = FedBuff(buffer=1, durations={"A": 1, "B": 3})


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_the_slow_client_comes_back_three_versions_old(engine):
    """A takes 1, B takes 3, two at work, a buffer of 1: A at 1, 2, 3 with s = 0, then B at 3 with s = 3 and factor ½.

    With steps ½(x − w), x_A = 8, x_B = 4 and w = 0: A moves w by ½(8 − w): 4, 6, 7. B worked from w = 0: its update is
    ½ · 4 = 2, and counts ½: 7 + 1 = 8.
    """
    result = mean_run(points(A=8.0, B=4.0), AB, 4, 2, engine=engine)
    assert arrivals(result) == [
        (1.0, (("A", 1.0, 0),)), (2.0, (("A", 1.0, 0),)), (3.0, (("A", 1.0, 0),)), (3.0, (("B", 3.0, 3),)),
    ]  # fmt: skip
    assert float(result.params) == pytest.approx(8.0)
    # Without damping B counts in full: 7 + 2 = 9.
    undamped = mean_run(points(A=8.0, B=4.0), replace(AB, damped=False), 4, 2, engine=engine)
    assert float(undamped.params) == pytest.approx(9.0)


def test_a_buffer_of_two_divides_by_base_weights_alone():
    """A takes 1, B takes 2, C takes 2, all at work, a buffer of 2, steps ½(x − w), w = 0, x = (8, 4, 0).

    At 1 A is back (s = 0) and, having begun at this version, waits. At 2 B is back, then C waits for the next version: step
    (4 + 2)/2 = 3. Still at 2, C is taken with s = 1 before anyone begins: its update from w = 0 is 0 and counts 2^(−½). A and B
    begin at version 1 (w = 3); A is back at 3 with ½ · (8 − 3) = 2.5 and s = 0: step (0 · 2^(−½) + 2.5)/2 = 1.25.
    """
    sampler = FedBuff(buffer=2, durations={"A": 1, "B": 2, "C": 2})
    result = mean_run(points(A=8.0, B=4.0, C=0.0), sampler, 2, 3, engine="loop")
    assert arrivals(result) == [(2.0, (("A", 1.0, 0), ("B", 2.0, 0))), (3.0, (("C", 2.0, 1), ("A", 1.0, 0)))]
    assert float(result.params) == pytest.approx(4.25)


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_a_risk_that_clients_weigh_alone_by_hand(engine):
    """Equal durations, x = (2, 1), w = 0: losses 4 and 1, updates 1 and ½. With t = ln 2 weights are 2⁴ : 2¹ = 8 : 1.

    The step is (8 · 1 + 1 · ½)/9 = 17/18. With a bound of 1 both losses count as 1, and the step is ¾.
    """
    sampler = FedBuff(buffer=2, durations={"A": 1, "B": 1}, loss_bound=5.0)
    tilted = {"risk": eq.risk.Tilted(math.log(2))}
    assert float(mean_run(points(A=2.0, B=1.0), sampler, 1, 2, engine=engine, parts=tilted).params) == pytest.approx(17 / 18)
    low = replace(sampler, loss_bound=1.0)
    assert float(mean_run(points(A=2.0, B=1.0), low, 1, 2, engine=engine, parts=tilted).params) == pytest.approx(0.75)


def test_a_stale_client_weighs_by_the_loss_at_the_model_that_it_began_with():
    """The clients of the buffer of two above, x = (8, 4, 0), and t = ln 2 / 16.

    A and B at w = 0: losses 64 and 16, weights 2⁴ : 2 = 8 : 1, step (8 · 4 + 2)/9 = 34/9. Then C, which began at w = 0 with
    loss 0, weight 1 and update 0, and A, which began at 34/9 with loss (38/9)², weight 2^((38/9)²/16) and update 19/9.
    """
    sampler = FedBuff(buffer=2, durations={"A": 1, "B": 2, "C": 2}, loss_bound=70.0)
    parts = {"risk": eq.risk.Tilted(math.log(2) / 16)}
    found = float(mean_run(points(A=8.0, B=4.0, C=0.0), sampler, 2, 3, engine="loop", parts=parts).params)
    weight = 2 ** ((38 / 9) ** 2 / 16)
    assert found == pytest.approx(34 / 9 + weight * (19 / 9) / (weight + 1))


@dataclass(frozen=True)
class AboveOne:
    """Losses above 1 count: a client finds the weight (F_k − 1)⁺/(B − 1) of its base weight."""

    client_form = "loss"

    def __call__(self, losses, base_weights, *, clients=None, state=None):
        kept = base_weights * (losses - 1).clamp(min=0)
        return eq.types.RiskValue((kept * (losses - 1)).sum() / 2, kept, None)

    def client_weight(self, losses, base_weights, public):
        return base_weights * ((losses - 1).clamp(min=0) / (public - 1)).clamp(max=1)


class UnweightedMedian:
    """The median of whoever is in the cohort."""

    linear = False

    def __call__(self, updates, weights, *, losses=None, state=None):
        return updates.median(0).values, state


def test_a_client_that_finds_the_weight_zero_takes_no_part():
    """x = (4, ½, ¼), w = 0: only A has a loss above 1, so that a median without weights sees its update 2 alone."""
    sampler, parts = FedBuff(buffer=3, spread=0.0, loss_bound=20.0), {"risk": AboveOne(), "aggregator": UnweightedMedian()}
    with pytest.warns(eq.errors.EquipoiseNotice, match="to which it gives the weight 0"):
        result = mean_run(points(A=4.0, B=0.5, C=0.25), sampler, 1, 3, parts=parts)
    assert float(result.params) == pytest.approx(2.0)


def test_the_model_stays_if_nobody_has_a_weight():
    sampler = FedBuff(buffer=3, spread=0.0, loss_bound=20.0)
    with pytest.warns(eq.errors.EquipoiseNotice, match="Nobody was trained in 1 of 1 rounds"):
        result = mean_run(points(A=1.0, B=0.5, C=0.25), sampler, 1, 3, parts={"risk": AboveOne()})
    assert float(result.params) == 0.0
    assert math.isnan(result.history.rounds[0].loss)


def test_a_buffer_of_lost_updates_alone_stops_the_run_as_a_round_of_them_does():
    """x = (4, ½) and A's update is lost: B found the weight 0 and did not work, so that nothing can be used."""
    attacked = (eq.attacks.apply(points(A=4.0, B=0.5), SendsNaN(seed=seed)) for seed in range(9))
    data = next(data for data in attacked if set(data.malicious) == {"A"})
    sampler = FedBuff(buffer=2, spread=0.0, loss_bound=20.0)
    with pytest.raises(eq.errors.Diverged) as failure:
        mean_run(data, sampler, 1, 2, parts={"risk": AboveOne()})
    assert failure.value.clients == ("A",)


def test_a_risk_that_clients_weigh_alone_needs_a_public_bound():
    for sampler, parts in (
        (FedBuff(buffer=2), {"risk": eq.risk.Tilted(1.0)}),
        (FedBuff(buffer=2, loss_bound=5.0), {"risk": eq.risk.Tilted(1.0, tracked=True)}),
        (FedBuff(buffer=2, loss_bound=5.0), {"risk": eq.risk.Superquantile(0.5)}),
        (FedBuff(buffer=2, damped=False, loss_bound=5.0), {"risk": eq.risk.Tilted(1.0), "privacy": SUMS}),
    ):
        with pytest.raises(IncompatibleParts, match="loss"):
            eq.Algorithm(sampler=sampler, **parts)


def softmax_run(sampler, *, at_work=6, rounds=8, engine="simulator", **options):
    data = eq.data.label_shift(train_clients=20, validation_clients=0, test_clients=3, examples=12)
    model = eq.models.Softmax(data.features, data.classes)
    parts = {"solver": eq.solvers.SGD(lr=0.1, batch_size=5, lr_decay=0.9)} | options.pop("parts", {})
    algorithm = eq.Algorithm(sampler=sampler, **parts)
    return eq.train(
        model, data, algorithm, rounds=rounds, clients_per_round=at_work, progress=False, engine=engine, seed=3, **options
    )


@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize("aggregator", [eq.aggregators.WeightedMean(), eq.aggregators.Median()], ids=repr)
def test_equal_durations_are_synchronous_bit_for_bit(engine, aggregator):
    parts = {"aggregator": aggregator}
    clock = softmax_run(FedBuff(buffer=6, spread=0.0), engine=engine, parts=parts)
    rounds = softmax_run(Uniform(), engine=engine, parts=parts)
    assert torch.equal(clock.params, rounds.params)
    assert [r.loss for r in clock.history.rounds] == [r.loss for r in rounds.history.rounds]
    assert [r.clock for r in clock.history.rounds] == [float(t) for t in range(1, 9)]


@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")  # a few rounds may stand still
@settings(max_examples=8, deadline=None)
@given(at_work=st.integers(1, 7), rounds=st.integers(1, 5), seed=st.integers(0, 2**30), unequal=st.booleans())
def test_equal_durations_are_synchronous_for_any_number_of_clients_and_rounds(at_work, rounds, seed, unequal):
    # Everyone begins at a version and is back at one instant: nobody is stale, and a buffer of all is the round.
    columns = [torch.full((1 + k % 3, 1), float(k * k)) for k in range(7)]  # 1, 2 or 3 equal examples
    data = FederatedData(ClientSet.pack([(f"c{k}", x, x) for k, x in enumerate(columns)]), name="points")
    parts = {"weights": "examples" if unequal else "uniform"}
    clock, plain = (
        mean_run(data, sampler, rounds, at_work, engine="loop", seed=seed, parts=dict(parts))
        for sampler in (FedBuff(buffer=at_work, spread=0.0), Uniform())
    )
    assert torch.equal(clock.params, plain.params)
    assert [report.trained for report in clock.history.rounds] == [at_work] * rounds


MIXED = FedBuff(buffer=3, per_step=0.1, spread=0.8)


def test_engines_and_chunks_do_not_matter():
    runs = [softmax_run(MIXED, engine=engine) for engine in ("loop", eq.engines.Simulator(chunk_size=2), "simulator")]
    assert arrivals(runs[0]) == arrivals(runs[1]) == arrivals(runs[2])
    for other in runs[1:]:
        assert torch.allclose(runs[0].params, other.params, atol=1e-6)
    assert any(age > 0 for report in runs[0].history.rounds for _, _, age in report.arrivals)


@settings(max_examples=20, deadline=None)
@given(
    st.permutations("ABCDE"),
    st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=5, max_size=5),
    st.integers(1, 4),
)
def test_the_order_of_clients_in_the_data_does_not_matter(order, times, buffer):
    # Everyone is at work, and those who are back at one instant are taken by their ids.
    sampler = FedBuff(buffer=buffer, durations=dict(zip("ABCDE", times, strict=True)))
    one, other = (
        mean_run(points(**{name: 2.0 * ord(name) - 130 for name in names}), sampler, 6, 5, engine="loop")
        for names in ("ABCDE", order)
    )
    assert arrivals(one) == arrivals(other)
    torch.testing.assert_close(one.params, other.params, rtol=1e-5, atol=1e-5)


def test_those_who_are_back_at_one_instant_are_taken_by_their_ids():
    # All take 1. At 1 A and B fill the buffer of 2. C, one version old, is the first of the next. All three begin at version 1
    # and are back at 2: A comes first.
    data, sampler = points(C=4.0, A=8.0, B=0.0), FedBuff(buffer=2, spread=0.0)
    first, second = arrivals(mean_run(data, sampler, 2, 3, engine="loop"))
    assert first == (1.0, (("A", 1.0, 0), ("B", 1.0, 0)))
    assert second == (2.0, (("C", 1.0, 1), ("A", 1.0, 0)))


def test_updates_are_those_of_the_version_at_the_start():
    """Replays the server's steps by hand: α_k (1 + s)^(−½) u_k / Σ α_k, u_k from the version it began with."""
    result = softmax_run(MIXED, engine="loop", rounds=6)
    data = eq.data.label_shift(train_clients=20, validation_clients=0, test_clients=3, examples=12)
    versions = [torch.zeros_like(result.params)]
    for report in result.history.rounds:
        step, alpha_sum = torch.zeros_like(versions[0]), 0.0
        for client, _, age in report.arrivals:
            model = eq.models.Softmax(data.features, data.classes)
            torch.nn.utils.vector_to_parameters(versions[report.round - age].clone(), model.parameters())
            position, size = data.train.ids.index(client), 12
            cohort = eq.types.Cohort(
                report.round - age, 3, torch.tensor([position]), torch.ones(1).double(), torch.ones(1).double()
            )
            task = try_task(Task.of(model), data)
            engine = eq.engines.Loop().start(task, data)
            solver = eq.solvers.SGD(lr=0.1, batch_size=5, lr_decay=0.9)
            step += size * (1 + age) ** -0.5 * engine.updates(versions[report.round - age], cohort, solver).update[0]
            alpha_sum += size
        versions.append(versions[-1] + step / alpha_sum)
    assert torch.allclose(versions[-1], result.params, atol=1e-6)


@pytest.mark.parametrize("stop", [1, 4])
def test_a_run_with_jobs_in_flight_goes_on_bit_for_bit(tmp_path, stop):
    whole = softmax_run(MIXED)
    softmax_run(MIXED, rounds=stop, checkpoint=tmp_path / "run.ckpt")
    with pytest.warns(eq.errors.EquipoiseNotice, match="Going on"):
        resumed = softmax_run(MIXED, checkpoint=tmp_path / "run.ckpt")
    assert torch.equal(whole.params, resumed.params)
    assert arrivals(whole) == arrivals(resumed)


def test_models_are_kept_while_a_job_that_began_with_them_is_under_way():
    # A takes 1 and B takes 3, a buffer of 1: B works from version 0 until it is back at 3, after A's three times.
    kept, now = [], []

    class Watch(eq.types.Observer):
        def on_state(self, state):
            if state.flights is not None:
                kept.append(sorted(state.flights.models))
                now.append({int(row[1]): int(row[2]) for row in state.flights.flights})

    mean_run(points(A=8.0, B=4.0), AB, 4, 2, observers=[Watch()])
    assert [sorted(set(jobs.values())) for jobs in now] == kept
    assert kept[:2] == [[0], [0]]  # B alone is under way; A begins with the next step
    assert now[:2] == [{1: 0}, {1: 0}]
    assert 0 not in kept[-1]  # B is back


def test_fast_clients_take_part_more_often():
    result = softmax_run(FedBuff(buffer=2, spread=1.0), rounds=60)
    took = {client: time for report in result.history.rounds for client, time, _ in report.arrivals}
    count = dict.fromkeys(took, 0)
    for report in result.history.rounds:
        for client, _, _ in report.arrivals:
            count[client] += 1
    fast, slow = (sorted(took, key=took.get)[i] for i in (0, -1))
    assert count[fast] > count[slow]


def test_at_most_so_many_are_at_work_and_each_begins_once_per_version():
    result = softmax_run(MIXED, rounds=40)
    begun = [(client, report.round - age) for report in result.history.rounds for client, _, age in report.arrivals]
    assert len(set(begun)) == len(begun)


def test_durations():
    # a + b τ with spread 0: 2 + 0.5 · 4 = 4 units; fractions are whole ticks.
    assert FedBuff(fixed=2.0, per_step=0.5, spread=0.0).ticks(["x"], [4]) == [4 * TICKS]
    assert FedBuff(durations={"x": 0.1, "y": 0.3}).ticks(["y", "x"], [1, 1]) == [300_000, 100_000]
    rule = FedBuff(spread=1.0)
    ids = [f"client-{k}" for k in range(4000)]
    logs = torch.tensor(rule.ticks(ids, [1] * 4000)).double().div(TICKS).log()
    assert abs(float(logs.mean())) < 0.06  # lognormal with median 1; standard error 1/√4000 = 0.016
    assert float(logs.std()) == pytest.approx(1.0, abs=0.05)
    assert rule.ticks(ids[:3], [1] * 3) == rule.ticks(ids, [1] * 4000)[:3]  # whoever else there is
    assert rule.factor(3) == 0.5
    assert rule.order(0, 10, 4, 1)[:4] == eq.core.rng.generator(1, "cohort", 0).choice(10, size=4, replace=False).tolist()
    assert sorted(rule.order(5, 10, 4, 1)) == list(range(10))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"buffer": 0}, "buffer"), ({"spread": -1}, "spread"), ({"fixed": 0.0}, "work takes time"), ({"damped": 1}, "damped"),
        ({"durations": {"a": 0}}, "durations"), ({"durations": [1]}, "durations"), ({"schedule": -1}, "schedule"),
        ({"per_step": float("inf")}, "per_step"),
    ],
)  # fmt: skip
def test_wrong_parameters_are_refused(wrong, words):
    with pytest.raises(InvalidParameter, match=words):
        FedBuff(**wrong)


def test_a_buffer_that_never_fills_is_refused():
    with pytest.raises(InvalidParameter, match="buffer must not exceed the number of training clients, 2"):
        mean_run(points(A=1.0, B=2.0), FedBuff(buffer=3), 1, 2)
    with pytest.raises(InvalidParameter, match="must name a time for every training client"):
        mean_run(points(A=1.0, C=2.0), AB, 1, 2)
    with pytest.raises(InvalidParameter, match="spread"):
        softmax_run(FedBuff(buffer=2, spread=1e6))


@pytest.mark.parametrize(
    "parts",
    [
        {"risk": eq.risk.Superquantile(0.5)},
        {"risk": eq.risk.QFair(1.0)},
        {"aggregator": eq.aggregators.CentredClipping()},
        {"aggregator": eq.aggregators.Bucketing(eq.aggregators.CentredClipping())},
        {"aggregator": eq.aggregators.FedNova()},
        {"aggregator": eq.aggregators.KLoss(1)},
        {"solver": eq.solvers.Scaffold()},
        {"solver": eq.solvers.FedDyn()},
        {"solver": eq.solvers.SGD(epochs=2, straggler_share=0.5)},
        {"solver": eq.solvers.Adam(state="kept")},
        {"personal": eq.personal.Ditto()},
        {"privacy": eq.privacy.DifferentialPrivacy(epsilon=5.0, delta=1e-4, clip=1.0)},
        {"privacy": eq.privacy.SecureAggregation()},
    ],
    ids=repr,
)
def test_what_does_not_go_with_it_is_refused(parts):
    with pytest.raises(IncompatibleParts):
        eq.Algorithm(sampler=FedBuff(), **parts)


SECURE = eq.privacy.SecureAggregation()


def test_a_buffer_by_secure_sums_is_the_plain_one_but_for_rounding():
    """Sums are rounded to multiples of 2⁻²⁴; without factors of staleness nothing else differs."""
    sampler = FedBuff(buffer=3, damped=False)
    plain, masked = softmax_run(sampler), softmax_run(sampler, parts={"privacy": SECURE})
    torch.testing.assert_close(masked.params, plain.params, rtol=0, atol=1e-4)
    assert not torch.equal(masked.params, plain.params)
    assert [report.arrivals for report in masked.history.rounds] == [report.arrivals for report in plain.history.rounds]


def test_factors_of_staleness_and_small_buffers_are_refused_under_secure_sums():
    with pytest.raises(IncompatibleParts, match="damped=False"):
        eq.Algorithm(sampler=FedBuff(buffer=3), privacy=SECURE)
    with pytest.raises(IncompatibleParts, match="buffer=2 or more"):
        eq.Algorithm(sampler=FedBuff(buffer=1, damped=False), privacy=SECURE)


def test_a_sum_over_one_client_that_came_twice_stays_masked():
    """In the third version D comes back from the second, begins again and is back before anyone else: the model stays."""
    sampler, data = (
        FedBuff(buffer=2, damped=False, durations={"A": 4, "B": 2, "C": 6, "D": 1}),
        points(A=1.0, B=2.0, C=3.0, D=4.0),
    )
    with pytest.warns(EquipoiseNotice, match="1 of at least 2 clients"):
        run = mean_run(data, sampler, 3, 2, parts={"privacy": SECURE})
    assert [who for who, _, _ in run.history.rounds[2].arrivals] == ["D", "D"]
    before = mean_run(data, sampler, 2, 2, parts={"privacy": SECURE})
    assert torch.equal(run.params, before.params)
    assert float(run.params) != 0


def test_running_statistics_are_refused():
    data = eq.data.label_shift(train_clients=4, validation_clients=0, test_clients=2, examples=12)
    model = torch.nn.Sequential(torch.nn.Linear(data.features, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, data.classes))
    with pytest.raises(IncompatibleParts, match="with_group_norm"):
        eq.train(model, data, eq.Algorithm(sampler=FedBuff(buffer=2)), rounds=1, clients_per_round=2, progress=False)


@dataclass(frozen=True)
class SendsNaN:
    """Malicious clients send NaN."""

    share: float = 0.5
    seed: int = 0

    def corrupt(self, sent):
        return torch.full_like(sent.updates, float("nan"))


@pytest.mark.parametrize("aggregator", [eq.aggregators.WeightedMean(), eq.aggregators.Median()], ids=repr)
def test_an_update_that_cannot_be_used_leaves_its_weight_to_the_others(aggregator):
    """Two clients at once, a buffer of 2: one update is lost, so that the other, ½ x, counts in full."""
    where = {"A": 8.0, "B": 4.0}
    data = eq.attacks.apply(points(**where), SendsNaN())
    (bad,) = data.malicious
    with pytest.warns(eq.errors.EquipoiseNotice, match="was left out"):
        result = mean_run(data, FedBuff(buffer=2, spread=0.0), 1, 2, parts={"aggregator": aggregator})
    assert result.history.rounds[0].rejected == (bad,)
    assert float(result.params) == pytest.approx(sum(x / 2 for name, x in where.items() if name != bad))


def test_several_seeds_are_made_one_by_one():
    data = eq.data.label_shift(train_clients=8, validation_clients=0, test_clients=2, examples=10)
    model = eq.models.Softmax(data.features, data.classes)
    algorithm = eq.Algorithm(sampler=FedBuff(buffer=2))
    with pytest.warns(eq.errors.EquipoiseNotice, match="a clock of the run's own"):
        both = eq.train_many(model, data, algorithm, seeds=2, rounds=3, clients_per_round=4, progress=False)
    alone = eq.train(model, data, algorithm, rounds=3, clients_per_round=4, seed=1, progress=False)
    assert torch.allclose(both.results["run"][1].params, alone.params, atol=1e-7)


def test_the_report_shows_participation_against_speed(tmp_path):
    study = Study.of([softmax_run(MIXED, rounds=12), softmax_run(Uniform(), name="rounds")])
    seen = participation(study.methods[0])
    assert sum(seen.jobs) == 12 * 3
    trace = interactive.participation(study).data
    assert len(trace) == 1  # the other method has rounds
    assert list(trace[0]["y"]) == list(seen.jobs)
    assert interactive.participation(Study.of([softmax_run(Uniform())])) is None
    softmax_run(MIXED).report(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert 'id="figure-participation"' in page
    assert "<dt>clients per round</dt><dd>3 updates (buffer)</dd>" in page  # 6 are at work


def test_the_factor_of_staleness_is_the_papers():
    """(1 + s)^(−½): 1, 1/√2, …, ½ at s = 3. Scaled to 1 at staleness 1, as some code has it, it would be √2 times as much."""
    rule = eq.sampling.FedBuff(2)
    assert [rule.factor(s) for s in (0, 3, 8)] == pytest.approx([1.0, 1 / 2, 1 / 3])
    assert rule.factor(1) == pytest.approx(2**-0.5)
    assert eq.sampling.FedBuff(2, damped=False).factor(5) == 1.0


APART = {"privacy": eq.privacy.DPFTRL(None, 1e-4, 0.1, noise_multiplier=1.0), "sampler": FedBuff(buffer=2, apart=2)}


def steps_by_client(result):
    """The steps of the server that each client contributed to, in order."""
    steps = {}
    for report in result.history.rounds:
        for client, _, _ in report.arrivals:
            steps.setdefault(client, []).append(report.round)
    return steps


@settings(max_examples=60, deadline=None)
@given(data=st.data(), buffer=st.integers(1, 3), apart=st.integers(1, 4), further=st.integers(0, 3), rounds=st.integers(1, 20))
def test_contributions_are_apart_and_no_run_stalls(data, buffer, apart, further, rounds):
    """For any durations and any number at work, from n = apart · buffer clients on."""
    clients = apart * buffer + further
    times = data.draw(st.lists(st.sampled_from([0.5, 1.0, 1.5, 7.0, 60.0]), min_size=clients, max_size=clients))
    where = {f"c{k}": float(k) for k in range(clients)}
    sampler = FedBuff(buffer=buffer, apart=apart, durations=dict(zip(where, times, strict=True)))
    at_work, seed = data.draw(st.integers(1, clients)), data.draw(st.integers(0, 2**30))
    result = mean_run(points(**where), sampler, rounds, at_work, engine="loop", seed=seed)
    assert [len(report.arrivals) for report in result.history.rounds] == [buffer] * rounds
    for steps in steps_by_client(result).values():
        assert len(set(steps)) == len(steps) <= math.ceil(rounds / apart)
        assert all(later - earlier >= apart for earlier, later in itertools.pairwise(steps))


def test_a_client_waits_by_hand():
    """A takes 1 and B takes 3, a buffer of 1, 2 apart, both at work, steps ½(x − w), x = (8, 4).

    At 1 A is back (step 0: w = 4) and may begin at version 2, so B comes next: at 3, one version old, with 2 · 2^(−½) (step 1).
    At version 2 A begins from w = 4 + √2 and is back at 4 (step 2); B begins at version 3 and is back at 7.
    """
    sampler = replace(AB, apart=2)
    result = mean_run(points(A=8.0, B=4.0), sampler, 4, 2, engine="loop")
    assert arrivals(result) == [
        (1.0, (("A", 1.0, 0),)), (3.0, (("B", 3.0, 1),)), (4.0, (("A", 1.0, 0),)), (7.0, (("B", 3.0, 0),)),
    ]  # fmt: skip
    two = 4 + 2 * 2**-0.5
    three = two + (8 - two) / 2
    assert float(result.params) == pytest.approx(three + (4 - three) / 2)


@pytest.mark.parametrize("stop", [1, 4])
def test_who_has_to_wait_is_in_checkpoints(tmp_path, stop):
    sampler = replace(MIXED, apart=5)
    whole = softmax_run(sampler, rounds=12)
    assert arrivals(whole) != arrivals(softmax_run(MIXED, rounds=12))
    softmax_run(sampler, rounds=stop, checkpoint=tmp_path / "run.ckpt")
    with pytest.warns(EquipoiseNotice, match="Going on"):
        resumed = softmax_run(sampler, rounds=12, checkpoint=tmp_path / "run.ckpt")
    assert torch.equal(whole.params, resumed.params)
    assert arrivals(whole) == arrivals(resumed)


def test_a_checkpoint_of_another_wait_is_refused(tmp_path):
    softmax_run(MIXED, rounds=2, checkpoint=tmp_path / "run.ckpt")
    with pytest.raises(eq.errors.CheckpointError, match="apart"):
        softmax_run(replace(MIXED, apart=2), checkpoint=tmp_path / "run.ckpt")
    assert "apart" not in repr(MIXED)  # checkpoints from before there was one
    assert repr(replace(MIXED, apart=2)).endswith(", apart=2)")


def test_a_driver_that_breaks_the_promise_is_stopped():
    flights = FlightState(0, torch.zeros(0, 4), torch.zeros(3), {}, torch.tensor([4, 3, -1]))
    clock = RunOnClock.__new__(RunOnClock)
    clock.rule, clock.ids = FedBuff(buffer=1, apart=3), ("A", "B", "C")
    jobs = [Flight(1, client, 6, 0) for client in range(3)]
    clock.refuse_too_close(jobs[1:], flights, 6)  # 6 − 3 = 3
    for buffer, words in ((jobs, "A"), ([jobs[2]] * 2, "too soon")):
        with pytest.raises(eq.errors.EquipoiseError, match=words):
            clock.refuse_too_close(buffer, flights, 6)
    with pytest.raises(eq.errors.EquipoiseError, match="does not say when"):
        clock.refuse_too_close(jobs, FlightState.first(3), 6)


def test_too_few_clients_to_wait_are_refused():
    where = points(**{f"c{k}": float(k) for k in range(5)})
    with pytest.raises(InvalidParameter, match=r"apart.* must not exceed the number of training clients, 5"):
        mean_run(where, FedBuff(buffer=2, apart=3), 1, 2)
    for wrong in (0, 1.5, True):
        with pytest.raises(InvalidParameter, match="apart"):
            FedBuff(apart=wrong)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"sampler": FedBuff(buffer=2)}, "Set apart"),
        ({"privacy": eq.privacy.DifferentialPrivacy(5.0, 1e-4, 1.0)}, "random cohorts"),
        ({"privacy": eq.privacy.GaussianMechanism(1.0, 1.0, 1e-4)}, "random cohorts"),
        ({"sampler": FedBuff(buffer=2, apart=2, loss_bound=1.0)}, "Leave out loss_bound"),
        ({"sampler": FedBuff(buffer=2, apart=2, loss_bound=1.0), "risk": eq.risk.Tilted(1.0)}, "without privacy"),
        ({"sampler": FedBuff(buffer=2, apart=2, per_step=0.1)}, "how many examples"),
        ({"weights": "examples"}, "many examples"),
        ({"aggregator": eq.aggregators.Median()}, "no plain sum"),
        ({"solver": eq.solvers.Scaffold(eq.solvers.SGD(steps=2))}, "keeps a state"),
        ({"personal": eq.personal.Ditto()}, "own models"),
    ],
)
def test_what_noise_does_not_cover_is_refused(parts, words):
    with pytest.raises(IncompatibleParts, match=words):
        eq.Algorithm(**APART | parts)


def test_secure_sums_of_buffers_refuse_what_open_buffers_refuse():
    with pytest.raises(IncompatibleParts, match="own models"):
        eq.Algorithm(sampler=FedBuff(buffer=3, damped=False), privacy=SECURE, personal=eq.personal.Ditto())


def test_a_sampler_of_ones_own_does_not_inherit_the_promise():
    class Mine(FedBuff):
        pass

    with pytest.raises(IncompatibleParts, match="Set apart"):
        eq.Algorithm(**APART | {"sampler": Mine(buffer=2, apart=2)})
    eq.Algorithm(**APART | {"sampler": FedBuff(2, per_step=0.1, apart=2), "solver": eq.solvers.SGD(steps=3)})


def test_explain_drives_a_buffer_on_its_clock():
    data = eq.data.label_shift(train_clients=6, validation_clients=0, test_clients=2, examples=8)
    assert eq.explain(eq.models.Softmax(data.features, data.classes), data, eq.Algorithm(sampler=FedBuff(2)))
