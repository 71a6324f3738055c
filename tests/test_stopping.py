"""Early stopping: what it changes and what it does not, the best iterate, resuming, and what is refused."""

import math
from dataclasses import dataclass, field, replace

import pytest
import torch

import equipoise as eq
from equipoise.data.clients import FederatedData
from equipoise.errors import IncompatibleParts, InvalidParameter
from equipoise.experiment.config import RunConfig
from equipoise.experiment.folder import read_record
from equipoise.runs.checkpoint import CheckpointError, Checkpoints
from equipoise.runs.stopping import StopState
from equipoise.types import Observer
from made_clients import make_clients


@pytest.fixture
def data():
    return FederatedData(
        make_clients([9, 12, 20, 25, 14, 8]),
        validation=make_clients([15, 11, 9, 20], seed=1, prefix="held"),
        test=make_clients([12, 14, 8], seed=2, prefix="unseen"),
    )


def model():
    return eq.models.Softmax(4, 3)


WILD = eq.Algorithm(solver=eq.solvers.SGD(lr=3.0, batch_size=2))  # errors jump, so that no iterate stays the best for long
RUN = {"algorithm": WILD, "rounds": 20, "clients_per_round": 3, "seed": 1}


def run(data, **options):
    return eq.train(model(), data, **RUN | options)


def values(result, name="error_90", split="validation"):
    return {point.round: point.splits[split][name] for point in result.history.points}


def same_result(first, second):
    assert torch.equal(first.params, second.params)
    assert torch.equal(first.clients.loss, second.clients.loss)
    assert [replace(r, seconds=0.0) for r in first.history.rounds] == [replace(r, seconds=0.0) for r in second.history.rounds]


# --------------------------------------------------------------------------------------------------------------------- laws


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_a_stop_that_never_triggers_changes_nothing(data, engine):
    plain = run(data, engine=engine, evaluate_every=1)
    stopped = run(data, engine=engine, stop=eq.EarlyStopping(patience=1000))
    same_result(plain, stopped)
    assert stopped.history.stopped is None
    assert stopped.rounds == 20
    assert plain.history.points == stopped.history.points  # without evaluate_every every round is evaluated


@pytest.mark.parametrize(("figure", "every"), [("validation.error_90", 1), ("validation.loss", 3), ("test.error", 2)])
def test_the_best_iterate_is_reported_and_the_run_ends_when_patience_does(data, figure, every):
    result = run(data, rounds=40, stop=eq.EarlyStopping(figure, patience=2), evaluate_every=every)
    split, name = figure.split(".")
    seen = values(result, name, split)
    stopped = result.history.stopped
    best, waited, ended = None, 0, None
    for index in sorted(seen):  # by hand
        if best is None or seen[index] < seen[best]:
            best, waited = index, 0
        else:
            waited += 1
            if waited == 2:
                ended = index
                break
    assert (stopped.reported, stopped.rounds, stopped.value) == (best, ended, seen[best])
    assert result.rounds == len(result.history.rounds) == ended < 40
    alone = run(data, rounds=best)
    assert torch.equal(result.params, alone.params)
    assert torch.equal(result.clients.error, alone.clients.error)
    assert str(result.summary()) == str(alone.summary())
    assert torch.equal(alone.model.weight, result.model.weight)
    assert f"The model after {best} rounds is reported" in str(stopped)


def test_more_of_a_metric_is_better_and_a_small_gain_is_none(data):
    options = {"metrics": {"f1": eq.metrics.macro_f1}, "evaluate_every": 1}
    seen = values(run(data, **options), "f1")
    stopped = run(data, **options, stop=eq.EarlyStopping("validation.f1", patience=3)).history.stopped
    assert stopped.value == max(value for index, value in seen.items() if index <= stopped.rounds)
    lazy = run(data, **options, stop=eq.EarlyStopping("validation.f1", patience=3, min_change=1.0)).history.stopped
    assert (lazy.reported, lazy.rounds) == (1, 4)


def test_the_tails_of_all_figures_can_be_watched(data):
    table = run(data, rounds=3, metrics={"f1": eq.metrics.macro_f1}).clients
    error, f1 = table.where("validation").error, table.where("validation").metrics["f1"]
    watched = {
        "error": error.mean(), "error_90": error.sort().values[3], "error_worst_10": error.max(),
        "f1": f1.mean(), "f1_90": f1.min(), "f1_worst_10": f1.min(),
    }  # fmt: skip
    for name, value in watched.items():
        found, higher = eq.EarlyStopping(f"validation.{name}").value(table)
        assert found == pytest.approx(float(value)), name
        assert higher == name.startswith("f1")


def test_the_reported_mean_of_iterates_is_that_of_the_best_round(data):
    algorithm = replace(WILD, averaging=eq.averaging.Uniform())
    result = run(data, algorithm=algorithm, stop=eq.EarlyStopping(patience=1))
    alone = run(data, algorithm=algorithm, rounds=result.history.stopped.reported)
    assert torch.equal(result.params, alone.params)


def test_values_that_are_no_numbers_never_improve():
    @dataclass
    class Table:
        value: float
        client: tuple[str, ...] = ("one",)
        not_evaluated: dict[str, str] = field(default_factory=dict)

        def where(self, split):
            return self

    class Rule(eq.EarlyStopping):
        def value(self, clients):
            return clients.value, False

    rule, state = Rule(patience=2), StopState()
    states = []
    for value in (math.nan, math.nan, math.nan, 1.0, math.nan, math.inf):
        state = rule.seen(state, Table(value), eq.types.ServerState(0, torch.zeros(1)))
        states.append((state.value, state.over))
    assert [over for _, over in states] == [False, False, False, False, False, True]  # never before there is a best one
    assert state.value == 1.0


# ------------------------------------------------------------------------------------------------------------ several runs


def test_runs_that_share_rounds_stop_by_themselves(data):
    stop = eq.EarlyStopping(patience=2)
    methods = {"mean": WILD, "tail": replace(WILD, risk=eq.risk.Superquantile(tail=0.5))}
    options = {"rounds": 20, "clients_per_round": 3, "stop": stop}
    many = eq.train_many(model(), data, methods, seeds=2, **options)
    ends = set()
    for name, results in many.results.items():
        for result in results:
            alone = eq.train(model(), data, methods[name], seed=result.seed, **options)
            assert result.history.stopped.rounds == alone.history.stopped.rounds
            assert result.history.stopped.reported == alone.history.stopped.reported
            assert torch.allclose(result.params, alone.params, atol=1e-5)
            ends.add(result.rounds)
    assert len(ends) > 1  # the others went on
    compared = eq.compare(methods, model(), data, seeds=[1], **options)
    assert compared.results["mean"][0].rounds == many.results["mean"][1].rounds
    assert "Stopped after" in compared.summary()


def test_members_of_a_family_stop_by_themselves(data, tmp_path):
    family = eq.train_family(
        model(), data, WILD, tails=[1.0, 0.5], rounds=20, clients_per_round=3, stop=eq.EarlyStopping(patience=2)
    )
    ends = [result.rounds for result in family.results.values()]
    assert max(ends) < 20
    together = family.comparison().results["family"][0]
    assert len(together.history.rounds) == max(ends)
    assert family.report(tmp_path / "family.html").exists()


# -------------------------------------------------------------------------------------------------------------- checkpoints


class Killed(Exception):
    pass


class KillAt(Observer):
    def __init__(self, index):
        self.index = index

    def on_state(self, state):
        if state.round == self.index:
            raise Killed


def test_a_killed_run_goes_on_bit_for_bit(data, tmp_path):
    stop = eq.EarlyStopping(patience=4)
    whole = run(data, stop=stop)
    end, best = whole.history.stopped.rounds, whole.history.stopped.reported
    for kill in {best - 1, best, best + 1, end - 1} - {0}:
        path = tmp_path / f"{kill}.ckpt"
        with pytest.raises(eq.errors.ObserverFailed):
            run(data, stop=stop, checkpoint=Checkpoints(path, every=1), observers=[KillAt(kill)])
        again = run(data, stop=stop, checkpoint=path)
        same_result(whole, again)
        assert again.history.stopped == whole.history.stopped
    once_more = run(data, stop=stop, checkpoint=path)  # has ended: nothing is trained again
    same_result(whole, once_more)
    assert once_more.history.stopped == whole.history.stopped


def test_a_run_with_more_rounds_is_stopped_where_the_longer_run_is(data, tmp_path):
    stop = eq.EarlyStopping(patience=4)
    whole = run(data, stop=stop)
    path = tmp_path / "run.ckpt"
    run(data, stop=stop, rounds=whole.history.stopped.reported, checkpoint=path)
    again = run(data, stop=stop, checkpoint=path)
    same_result(whole, again)
    assert again.history.stopped == whole.history.stopped


def test_a_group_of_runs_goes_on_bit_for_bit(data, tmp_path):
    options = {"rounds": 20, "clients_per_round": 3, "stop": eq.EarlyStopping(patience=2), "seeds": 3}
    whole = eq.train_many(model(), data, WILD, **options).results["run"]
    ends = sorted(result.rounds for result in whole)
    path = tmp_path / "many.ckpt"
    saving = Checkpoints(path, every=1)
    with pytest.raises(eq.errors.ObserverFailed):
        eq.train_many(model(), data, WILD, checkpoint=saving, observers=[KillAt(ends[-1] - 1)], **options)
    again = eq.train_many(model(), data, WILD, checkpoint=path, **options).results["run"]
    for first, second in zip(whole, again, strict=True):
        same_result(first, second)
        assert first.history.stopped == second.history.stopped


@pytest.mark.parametrize(("before", "after"), [(None, 3), (3, None), (3, 4)])
def test_another_rule_does_not_go_on_from_a_checkpoint(data, tmp_path, before, after):
    rules = [None if patience is None else eq.EarlyStopping(patience=patience) for patience in (before, after)]
    path = tmp_path / "run.ckpt"
    run(data, rounds=2, stop=rules[0], checkpoint=path)
    with pytest.raises(CheckpointError, match="rule of early stopping"):
        run(data, rounds=4, stop=rules[1], checkpoint=path)


# --------------------------------------------------------------------------------------------------------- folders and files


def test_saved_runs_and_reports_say_that_a_run_was_stopped(data, tmp_path):
    result = run(data, stop=eq.EarlyStopping(patience=2), metrics={"f1": eq.metrics.macro_f1})
    folder = result.save(tmp_path / "run")
    record = read_record(folder)
    assert record.history.stopped == result.history.stopped
    assert record.rounds == result.rounds
    assert record.summary().metrics["f1"] == result.summary().metrics["f1"]
    page = (folder / "report.html").read_text()
    assert "Stopped early" in page
    assert str(result.history.stopped).split(":")[0] in page
    assert 'id="table-metrics"' in page


CONFIG = """
[data]
name = "digits"
[model]
name = "softmax"
[algorithm.solver]
lr = 5.0
[train]
rounds = 20
clients_per_round = 5
metrics = ["macro_f1"]
[train.stop]
figure = "test.macro_f1_worst_10"
patience = 2
"""


def small_config(tmp_path, text=CONFIG):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return RunConfig.read(path)


def test_a_configuration_has_stop_and_metrics(tmp_path):
    from equipoise.experiment import folder
    from equipoise.experiment.build import build

    config = small_config(tmp_path)
    assert config.train.stop == eq.EarlyStopping("test.macro_f1_worst_10", patience=2)
    again = small_config(tmp_path, config.text())
    assert again == config
    result = folder.run(build(config), folder.claim(tmp_path / "run"), progress=False)
    assert result.history.stopped is not None
    record = read_record(tmp_path / "run")
    assert record.history.stopped == result.history.stopped
    assert record.clients.higher_is_better == {"macro_f1": True}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (('figure = "test.macro_f1_worst_10"', 'figure = "test.top_5"'), "train.stop.figure must be a figure of"),
        (("patience = 2", "patience = 0"), "train.stop.patience must be a whole number of at least 1"),
        (("patience = 2", "patients = 2"), "Did you mean 'patience'"),
        (('["macro_f1"]', '["macro_f2"]'), "train.metrics must be"),
        ((CONFIG[CONFIG.index("[train.stop]") :], "stop = 3"), "train.stop must be a section"),
    ],
)
def test_a_wrong_configuration_is_refused_at_its_key(tmp_path, change, text):
    from equipoise.experiment.build import build

    with pytest.raises(eq.errors.ConfigError, match=text):
        build(small_config(tmp_path, CONFIG.replace(*change)))


# -------------------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"figure": "error_90"}, "must be a split and a figure"),
        ({"figure": "held.error"}, "must be a split and a figure"),
        ({"figure": 3}, "figure"),
        ({"patience": 0}, "at least 1"),
        ({"patience": 2.5}, "at least 1"),
        ({"min_change": -1.0}, "min_change"),
        ({"public": "yes"}, "public"),
    ],
)
def test_wrong_rules_are_refused(given, text):
    with pytest.raises(InvalidParameter, match=text):
        eq.EarlyStopping(**{"figure": "validation.error_90"} | given)


def test_figures_that_do_not_exist_are_listed(data, ragged):
    with pytest.raises(InvalidParameter, match=r"Did you mean 'error_90'.*Allowed: error, error_90, error_worst_10, loss,"):
        run(data, stop=eq.EarlyStopping("validation.eror_90"))
    with pytest.raises(InvalidParameter, match="f1, f1_90, f1_worst_10"):
        run(data, stop=eq.EarlyStopping("validation.f2"), metrics={"f1": eq.metrics.macro_f1})
    with pytest.raises(InvalidParameter, match=r"a split that the data have \(train, test\)"):
        run(ragged, stop=eq.EarlyStopping("validation.error"))
    with pytest.raises(InvalidParameter, match=r"must be an equipoise\.EarlyStopping"):
        run(data, stop="validation.error")


PRIVATE = eq.Algorithm(privacy=eq.privacy.DifferentialPrivacy(epsilon=8.0, delta=0.1, clip=1.0))


def test_differential_privacy_wants_public_clients(data):
    with pytest.raises(IncompatibleParts, match="public=True"):
        run(data, algorithm=PRIVATE, stop=eq.EarlyStopping())
    with pytest.raises(IncompatibleParts, match="figures of training clients"):
        run(data, algorithm=PRIVATE, stop=eq.EarlyStopping("train.loss", public=True))
    inside = eq.data.split_examples(make_clients([12, 15, 20, 9]), validation=0.3, test=0.3, seed=0)
    with pytest.raises(IncompatibleParts, match="figures of training clients"):
        run(inside, algorithm=PRIVATE, stop=eq.EarlyStopping(public=True))
    result = run(data, algorithm=PRIVATE, rounds=6, stop=eq.EarlyStopping(patience=1, public=True))
    assert result.rounds < 6
    assert result.epsilon.rounds == result.rounds  # every round that was run is paid for, the reported one being earlier
    assert result.history.stopped.reported < result.rounds


def test_models_of_their_own_that_grow_with_the_rounds_are_refused(data):
    with pytest.raises(IncompatibleParts, match="Finetuning"):
        run(data, algorithm=eq.Algorithm(personal=eq.personal.Ditto()), stop=eq.EarlyStopping())
