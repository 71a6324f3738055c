"""How rounds follow each other: those that are begun before the last one is known end as rounds one after another do."""

import gc
import math
import weakref
from dataclasses import dataclass, replace

import pytest
import torch

import equipoise as eq
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.engines import Loop
from equipoise.engines.loop import LoopEngine
from equipoise.errors import Diverged, EquipoiseNotice, ObserverFailed
from equipoise.rounds.ahead import Ahead as RoundsAhead
from equipoise.rounds.ahead import can_begin_early
from equipoise.rounds.driver_choice import choose_driver
from equipoise.runs.checkpoint import Checkpoints, read_checkpoint
from equipoise.types import Cohort, LocalWork, Observer
from made_clients import make_clients
from rounds import start_run

WORK = eq.solvers.SGD(lr=0.2, batch_size=4)


class Later:
    """Work whose numbers are asked for later; `lost` where they would have to be looked at more closely."""

    def __init__(self, engine, works, params):
        self.engine, self.works, self.params = engine, works, params

    def collected(self):
        self.engine.open -= 1
        return self.works if all(bool(torch.isfinite(work.sq_norms).all()) for work in self.works) else None


class EarlyEngine:
    """The loop engine, with rounds that can be begun early; it notes who asked for what."""

    def __init__(self, inner):
        self.inner, self.begun, self.run, self.open, self.most_open, self.room = inner, [], [], 0, 0, True

    def __getattr__(self, name):
        return getattr(self.inner, name)

    @property
    def look_ahead(self):
        return self

    def has_capacity(self):
        return self.room

    def begin_round(self, jobs, solver, aggregator, server):
        self.begun.append(jobs[0].cohort.round)
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        works = self.inner.summed_updates(jobs, solver, aggregator)
        params = [torch.add(job.params, work.update, alpha=server) for job, work in zip(jobs, works, strict=True)]
        return Later(self, works, params)

    def summed_update(self, params, cohort, solver, weights, aggregator):
        self.run.append(cohort.round)
        return self.inner.summed_update(params, cohort, solver, weights, aggregator)


class Early:
    """Starts an EarlyEngine, and keeps it."""

    def start(self, task, data):
        self.engine = EarlyEngine(Loop().start(task, data))
        return self.engine


def data_of(sizes=(5, 8, 3, 9, 6, 7)):
    return FederatedData(make_clients(sizes), classes=3)


def trained(engine, algorithm, data=None, **options):
    given = {"rounds": 7, "clients_per_round": 3, "seed": 1, "engine": engine} | options
    return eq.train(eq.models.Softmax(4, 3), data or data_of(), algorithm, **given)


def started(engine, algorithm):
    return start_run(eq.models.Softmax(4, 3), data_of(), algorithm, rounds=9, engine=engine)


def without_time(history):
    return [replace(report, seconds=0.0, run="") for report in history.rounds]


@pytest.mark.parametrize(
    "algorithm",
    [
        eq.Algorithm(solver=WORK),
        eq.Algorithm(solver=WORK, risk=eq.risk.Superquantile(0.5), server=eq.server_opt.SGD(lr=0.7)),
        eq.Algorithm(solver=WORK, averaging=eq.averaging.Uniform(), sampler=eq.sampling.Poisson()),
        eq.Algorithm(solver=replace(WORK, epochs=3, straggler_share=0.5)),
    ],
    ids=["FedAvg", "Δ-FL", "averaged, Poisson", "stragglers"],
)
def test_results_are_those_of_rounds_one_after_another(algorithm):
    early = Early()
    found, wanted = trained(early, algorithm, evaluate_every=2), trained("loop", algorithm, evaluate_every=2)
    assert torch.equal(found.params, wanted.params)
    assert without_time(found.history) == without_time(wanted.history)
    assert found.history.points == wanted.history.points
    assert early.engine.most_open == 2
    assert max(early.engine.begun) == 6  # none beyond the last


def test_reported_seconds_do_not_overlap():
    found = trained(Early(), eq.Algorithm(solver=WORK))
    assert sum(report.seconds for report in found.history.rounds) <= found.seconds


def test_a_round_with_an_update_that_cannot_be_used_is_done_with_care():
    clean = data_of()
    x = clean.train.x.clone()
    x[clean.train.offsets[2]] *= 1e30  # the third client's first example
    data = FederatedData(replace(clean.train, x=x), classes=3)
    early = Early()
    with pytest.warns(EquipoiseNotice, match="client-2"):
        found = trained(early, eq.Algorithm(solver=WORK), data)
    with pytest.warns(EquipoiseNotice, match="client-2"):
        wanted = trained("loop", eq.Algorithm(solver=WORK), data)
    assert torch.equal(found.params, wanted.params)
    assert without_time(found.history) == without_time(wanted.history)
    careful = [report.round for report in found.history.rounds if report.rejected]
    assert early.engine.run == careful
    assert 0 < len(careful) < 7


def test_an_error_comes_after_the_reports_of_the_rounds_before_it():
    class Failing(EarlyEngine):
        def losses(self, params, cohort, solver=None):
            if cohort.round == 3:
                raise RuntimeError("no more")
            return self.inner.losses(params, cohort, solver)

    class Start:
        def start(self, task, data):
            return Failing(Loop().start(task, data))

    seen = eq.observers.History()
    with pytest.raises(RuntimeError, match="no more"):
        trained(Start(), eq.Algorithm(solver=WORK, risk=eq.risk.Superquantile(0.5)), observers=[seen])
    assert [report.round for report in seen.rounds] == [0, 1, 2]


def test_a_lost_model_is_an_error_of_its_own_round():
    class Lost(EarlyEngine):
        def begin_round(self, jobs, solver, aggregator, server):
            later = super().begin_round(jobs, solver, aggregator, server)
            if jobs[0].cohort.round == 2:
                later.collected = lambda: None
            return later

        def summed_update(self, params, cohort, solver, weights, aggregator):
            work = super().summed_update(params, cohort, solver, weights, aggregator)
            return LocalWork(work.update * math.inf, work.sq_norms, work.losses) if cohort.round == 2 else work

    class Start:
        def start(self, task, data):
            return Lost(Loop().start(task, data))

    with pytest.raises(Diverged) as failure:
        trained(Start(), eq.Algorithm(solver=WORK))
    assert failure.value.round == 2
    assert len(failure.value.history.rounds) == 2


@dataclass(frozen=True)
class OwnRisk:
    """A risk that somebody else wrote."""

    needs_losses: bool = True

    def __call__(self, losses, base_weights, *, clients=None, state=None):
        return eq.risk.RiskValue((losses * base_weights).sum(), base_weights, state)


def test_who_is_not_begun_early():
    def early(**parts):
        setting = started(Early(), eq.Algorithm(**({"solver": WORK} | parts)))
        assert isinstance(choose_driver([setting]), RoundsAhead) is can_begin_early(setting)
        return can_begin_early(setting)

    assert early()
    assert early(risk=eq.risk.Tilted(1.0))
    assert not early(risk=OwnRisk())
    assert not early(risk=eq.risk.QFair(1.0))  # the server's step depends on the work
    assert not early(server=eq.server_opt.Adam())
    assert not early(aggregator=eq.aggregators.Median())
    assert not early(personal=eq.personal.Ditto(0.1))
    assert not early(privacy=eq.privacy.SecureAggregation())


def test_nothing_is_begun_without_room_and_a_state_from_elsewhere_is_begun_anew():
    early = Early()
    setting = started(early, eq.Algorithm(solver=WORK))
    next_round, start = choose_driver([setting]), setting.begin()
    ((first, _),) = next_round([start])
    ((again, _),) = next_round([start])  # what was begun after `first` is of no use
    assert torch.equal(first.params, again.params)
    early.engine.room = False
    begun = list(early.engine.begun)
    ((second, _),) = next_round([again])
    ((third, report),) = next_round([second])
    assert early.engine.begun == begun  # the one under way was used, and the next was run as a whole
    assert early.engine.run == [2]
    assert report.round == 2
    assert third.round == 3


@pytest.mark.parametrize(
    "algorithms",
    [
        eq.Algorithm(solver=WORK),
        {"FedAvg": eq.Algorithm(solver=WORK), "Δ-FL": eq.Algorithm(solver=WORK, risk=eq.risk.Superquantile(0.5))},
        eq.Algorithm(solver=WORK, sampler=eq.sampling.Poisson()),
    ],
    ids=["FedAvg", "two", "Poisson"],
)
def test_runs_that_share_their_rounds_begin_them_early_too(algorithms):
    early, options = Early(), {"rounds": 7, "clients_per_round": 3}
    together = eq.train_many(eq.models.Softmax(4, 3), data_of(), algorithms, seeds=[1, 5], engine=early, **options)
    named = algorithms if isinstance(algorithms, dict) else {"run": algorithms}
    for name, algorithm in named.items():
        for seed, found in zip((1, 5), together.results[name], strict=True):
            wanted = eq.train(eq.models.Softmax(4, 3), data_of(), algorithm, seed=seed, engine="loop", **options)
            assert torch.equal(found.params, wanted.params)
            assert without_time(found.history) == without_time(wanted.history)
    assert early.engine.most_open == 2
    assert max(early.engine.begun) == 6


def test_a_run_that_diverges_leaves_the_others_as_they_are():
    # Seed 1 loses its model in round 2; the rounds of the others go on, begun anew without it.
    class Losing(EarlyEngine):
        def losses(self, params, cohort, solver=None):
            found = self.inner.losses(params, cohort, solver)
            return found * math.nan if cohort.seed == 1 and cohort.round == 2 else found

        def losses_each(self, jobs):
            return [self.losses(job.params, job.cohort) for job in jobs]

    class Start:
        def start(self, task, data):
            self.engine = Losing(Loop().start(task, data))
            return self.engine

    algorithm, start = eq.Algorithm(solver=WORK, risk=eq.risk.Superquantile(0.5)), Start()
    options = {"rounds": 7, "clients_per_round": 3}
    with pytest.raises(Diverged) as failure:
        eq.train_many(eq.models.Softmax(4, 3), data_of(), algorithm, seeds=3, engine=start, **options)
    finished = failure.value.finished.results["run"]
    wanted = [trained("loop", algorithm, seed=seed) for seed in (0, 2)]
    assert [torch.equal(a.params, b.params) for a, b in zip(finished, wanted, strict=True)] == [True, True]
    assert start.engine.most_open == 2


@pytest.mark.parametrize("stop", [1, 4, 6])
def test_runs_that_stop_with_a_round_begun_go_on_as_if_they_had_not(stop, tmp_path):
    class Stop(Observer):
        def on_state(self, state):
            if state.round == stop:
                raise RuntimeError("power cut")

    algorithms = {"FedAvg": eq.Algorithm(solver=WORK), "tail": eq.Algorithm(solver=WORK, risk=eq.risk.Superquantile(0.5))}

    def many(engine, **options):
        given = {"seeds": [1, 5], "rounds": 7, "clients_per_round": 3, "engine": engine} | options
        results = eq.train_many(eq.models.Softmax(4, 3), data_of(), algorithms, **given).results
        return [run for runs in results.values() for run in runs]

    early, saving = Early(), Checkpoints(tmp_path / "state", every=1)
    with pytest.raises(ObserverFailed):
        many(early, observers=[Stop()], checkpoint=saving)
    assert early.engine.most_open == 2
    assert [run.state.round for run in read_checkpoint(saving.path).runs] == [stop - 1] * 4
    for found, wanted in zip(many(Early(), checkpoint=saving), many("loop"), strict=True):
        assert torch.equal(found.params, wanted.params)
        assert without_time(found.history) == without_time(wanted.history)


@pytest.mark.parametrize("kind", ["one run", "many"])
def test_rounds_go_with_their_last_user(kind):
    # An engine's memory on a GPU must not wait for the garbage collector.
    settings = [started(Early(), eq.Algorithm(solver=WORK))] * (1 if kind == "one run" else 2)
    driver, states = choose_driver(settings), [setting.begin() for setting in settings]
    gc.collect()
    gc.disable()
    try:
        driver(states)
        assert isinstance(driver, RoundsAhead)
        known = weakref.ref(driver)
        del driver
        assert known() is None
    finally:
        gc.enable()


def test_families_begin_their_rounds_early_too():
    early, options = Early(), {"rounds": 6, "clients_per_round": 4, "seed": 3}
    family = eq.train_family(
        eq.models.Softmax(4, 3), data_of(), tails=[1.0, 0.5], algorithm=eq.Algorithm(solver=WORK), engine=early, **options
    )
    for tail in (1.0, 0.5):
        algorithm = eq.Algorithm(solver=WORK, risk=eq.risk.Superquantile(tail))
        wanted = eq.train(eq.models.Softmax(4, 3), data_of(), algorithm, engine="loop", **options)
        assert torch.equal(family.results[tail].params, wanted.params)
        assert without_time(family.results[tail].history) == without_time(wanted.history)
    assert early.engine.most_open == 2


def test_losses_are_asked_at_the_tensors_that_work_starts_from(monkeypatch):
    # A GPU has these in place after the last server's step; a copy of them would have to be brought there again.
    scored, started = [], []
    losses_of, begin_round = LoopEngine.losses_of, EarlyEngine.begin_round

    def noted_losses(self, models, cohort):
        scored.append(list(models))
        return losses_of(self, models, cohort)

    def noted_round(self, jobs, *options):
        started.append([job.params for job in jobs])
        return begin_round(self, jobs, *options)

    monkeypatch.setattr(LoopEngine, "losses_of", noted_losses)
    monkeypatch.setattr(EarlyEngine, "begin_round", noted_round)
    algorithm, options = eq.Algorithm(solver=WORK), {"rounds": 3, "clients_per_round": 4}
    eq.train_family(eq.models.Softmax(4, 3), data_of(), algorithm, tails=[1.0, 0.5], engine=Early(), **options)
    assert len(scored) == len(started) == 3
    assert all(a is b for there, here in zip(scored, started, strict=True) for a, b in zip(there, here, strict=True))


# -------------------------------------------------------------------------------------------------------- a group of one


class Recorded:
    """The loop engine, which notes what it is asked for."""

    def __init__(self, inner, calls):
        self.inner, self.calls = inner, calls

    def __getattr__(self, name):
        found = getattr(self.inner, name)
        if not callable(found) or name in ("task",):
            return found

        def noted(*given):
            self.calls.append((name, *(len(each) for each in given if isinstance(each, Cohort | ClientSet))))
            return found(*given)

        return noted


class Record:
    def __init__(self):
        self.calls = []

    def start(self, task, data):
        return Recorded(Loop().start(task, data), self.calls)


@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
@pytest.mark.parametrize(
    "algorithm",
    [
        eq.Algorithm(solver=WORK),
        eq.Algorithm(solver=WORK, risk=eq.risk.Superquantile(0.5)),
        eq.Algorithm(solver=WORK, risk=eq.risk.Superquantile(0.5), sampler=eq.sampling.Poisson()),
        eq.Algorithm(solver=eq.solvers.MAML(), risk=eq.risk.Superquantile(0.5)),
        eq.Algorithm(solver=eq.solvers.AdaptiveProx(WORK), risk=eq.risk.Superquantile(0.5)),
        eq.Algorithm(solver=eq.solvers.FedDane(WORK)),
        eq.Algorithm(solver=WORK, risk=eq.risk.Superquantile(0.5), aggregator=eq.aggregators.Median()),
        eq.Algorithm(solver=WORK, personal=eq.personal.Ditto(0.1)),
        eq.Algorithm(solver=WORK, personal=eq.personal.Mapper()),
        eq.Algorithm(solver=WORK, privacy=eq.privacy.SecureAggregation()),
        eq.Algorithm(solver=WORK, privacy=eq.privacy.GaussianMechanism(clip=1.0, noise_multiplier=1.0, noise_seed=0)),
    ],
    ids=repr,
)
def test_a_group_of_one_asks_the_engine_for_what_a_single_run_asks(algorithm):
    single, many, family = Record(), Record(), Record()
    options = {"rounds": 4, "clients_per_round": 3, "evaluate_every": 2}
    data = data_of()
    alone = eq.train(eq.models.Softmax(4, 3), data, algorithm, seed=1, engine=single, **options)
    (one,) = eq.train_many(eq.models.Softmax(4, 3), data, algorithm, seeds=[1], engine=many, **options).results["run"]
    assert many.calls == single.calls
    assert torch.equal(one.params, alone.params)
    names = {name for name, *_ in single.calls}
    assert not names & {"losses_of", "losses_each", "summed_updates"}  # those are for several runs
    assert "evaluate" in names
    if isinstance(algorithm.risk, eq.risk.Superquantile):
        members = eq.train_family(eq.models.Softmax(4, 3), data, algorithm, tails=[0.5], seed=1, engine=family, **options)
        assert family.calls == single.calls
        assert torch.equal(members.results[0.5].params, alone.params)


def test_runs_with_nothing_in_common_ask_as_single_runs_do():
    # Two runs whose clients cannot work in one call, in one round: each is asked for as if it were alone.
    record = Record()
    algorithms = [eq.Algorithm(solver=WORK), eq.Algorithm(solver=WORK, aggregator=eq.aggregators.Median())]
    settings = [started(record, algorithm) for algorithm in algorithms]
    both = [replace(setting, engine=settings[0].engine) for setting in settings]
    record.calls.clear()
    choose_driver(both)([setting.begin() for setting in both])
    assert sorted(name for name, *_ in record.calls) == ["summed_update", "updates"]
