"""Training end to end: what a result holds, and what bad input is told."""

import dataclasses
import json
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.core.params import ParameterLayout
from equipoise.data.clients import FederatedData
from equipoise.errors import EquipoiseNotice, IncompatibleParts, InvalidParameter, ObserverFailed
from equipoise.experiment.folder import read_record
from made_clients import make_clients


def softmax():
    return eq.models.Softmax(4, 3)


def test_a_result_holds_model_clients_and_history(ragged):
    model = softmax()
    result = eq.train(model, ragged, rounds=6, clients_per_round=4, seed=2, evaluate_every=2, name="FedAvg")
    assert torch.equal(ParameterLayout.of(model).read(model), torch.zeros(15))  # the given model is not changed
    assert torch.equal(ParameterLayout.of(result.model).read(result.model), result.params)
    assert [r.round for r in result.history.rounds] == list(range(6))
    assert [e.round for e in result.history.evaluations] == [2, 4, 6]
    assert set(result.clients.client) == set(ragged.train.ids) | set(ragged.test.ids)
    rows = {(row["client"], row["split"]): row for row in result.clients}
    assert rows["unseen-1", "test"]["size"] == 9
    assert not rows["unseen-1", "test"]["seen"]
    assert rows["client-3", "train"]["seen"]
    x, y = ragged.test.client("unseen-1")
    wrong = (result.model(x).argmax(1) != y).double().mean()
    assert rows["unseen-1", "test"]["error"] == pytest.approx(float(wrong))


def drawn(data, sampler, rounds, m, seed):
    """Who the sampler draws, asked by hand."""
    alpha = data.train.host_sizes.double() / data.train.host_sizes.sum()
    cohorts = [sampler(t, alpha, clients_per_round=m, seed=seed).clients.tolist() for t in range(rounds)]
    return [tuple(data.train.ids[client] for client in cohort) for cohort in cohorts]


SAMPLERS = {
    "uniform": eq.sampling.Uniform(),
    "poisson": eq.sampling.Poisson(),  # some of whose cohorts are empty
    "by weight": eq.sampling.Proportional(),
    "everyone": eq.sampling.Full(),
    "apart": eq.sampling.MinSeparation(2),
}


@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_a_result_says_who_was_in_which_cohort(ragged, sampler, engine, tmp_path):
    """Also after a resume, in the folder of the run, and where some of a cohort have no weight."""
    m = {SAMPLERS["everyone"]: 8, SAMPLERS["poisson"]: 1}.get(sampler, 2)
    algorithm = eq.Algorithm(sampler=sampler, risk=eq.risk.Superquantile(0.5))
    options = {"clients_per_round": m, "seed": 3, "engine": engine, "progress": False}
    result = eq.train(softmax(), ragged, algorithm, rounds=12, **options)
    assert result.cohorts == drawn(ragged, sampler, 12, m, 3)
    assert [len(cohort) for cohort in result.cohorts] == [report.cohort for report in result.history.rounds]
    assert (() in result.cohorts) == (sampler == SAMPLERS["poisson"])
    eq.train(softmax(), ragged, algorithm, rounds=5, checkpoint=tmp_path / "run.ckpt", **options)
    resumed = eq.train(softmax(), ragged, algorithm, rounds=12, checkpoint=tmp_path / "run.ckpt", **options)
    assert resumed.cohorts == result.cohorts
    assert read_record(resumed.save(tmp_path / "run")).cohorts == result.cohorts


@pytest.mark.parametrize("several", [eq.train_many, eq.compare])
def test_several_runs_say_who_was_in_which_cohort(ragged, several):
    methods = {"plain": eq.Algorithm(), "tail": eq.Algorithm(risk=eq.risk.Superquantile(0.5))}
    given = (methods, softmax(), ragged) if several is eq.compare else (softmax(), ragged, methods)
    runs = several(*given, rounds=3, clients_per_round=4, seeds=[1, 2], progress=False)
    for run in runs.all_results:
        assert run.cohorts == drawn(ragged, eq.sampling.Uniform(), 3, 4, run.seed)


def test_the_members_of_a_family_say_who_was_in_which_cohort(ragged):
    family = eq.train_family(softmax(), ragged, tails=[1.0, 0.5], rounds=3, clients_per_round=4, seed=2, progress=False)
    for run in family.results.values():
        assert run.cohorts == drawn(ragged, eq.sampling.Uniform(), 3, 4, 2)


def test_where_clients_come_and_go_a_cohort_are_those_who_came_back(ragged):
    algorithm = eq.Algorithm(sampler=eq.sampling.FedBuff(3, spread=0.8))
    result = eq.train(softmax(), ragged, algorithm, rounds=5, clients_per_round=4, progress=False)
    came_back = [sorted(client for client, _, _ in report.arrivals) for report in result.history.rounds]
    assert [sorted(cohort) for cohort in result.cohorts] == came_back


PROTECTED = {
    "sums": {"privacy": eq.privacy.SecureAggregation()},
    "budget": {"privacy": eq.privacy.DifferentialPrivacy(8.0, 1e-2, clip=0.5)},
    "distributed": {"privacy": eq.privacy.DifferentialPrivacy(8.0, 1e-2, clip=0.5, noise="distributed")},
    "mechanism": {"privacy": eq.privacy.GaussianMechanism(0.5, 1.0, 1e-2)},
    "correlated": {"privacy": eq.privacy.DPFTRL(8.0, 1e-2, clip=0.5), "sampler": eq.sampling.MinSeparation(2)},
}


@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
@pytest.mark.parametrize("parts", PROTECTED.values(), ids=PROTECTED)
def test_who_took_part_in_a_protected_run_is_secret(ragged, parts, tmp_path):
    result = eq.train(softmax(), ragged, eq.Algorithm(**parts), rounds=3, clients_per_round=4, progress=False)
    for run in (result, read_record(result.save(tmp_path / "run"))):
        with pytest.raises(IncompatibleParts):
            run.cohorts  # noqa: B018
        assert [report.clients for report in run.history.rounds] == [None] * 3
    log = (tmp_path / "run" / "rounds.jsonl").read_text()
    assert not any(client in log for client in ragged.train.ids)


def test_a_summary_speaks_of_unseen_clients(ragged):
    summary = eq.train(softmax(), ragged, rounds=3, clients_per_round=4).summary()
    text = str(summary)
    for words in ("3 unseen test clients", "mean", "90th percentile", "worst 10 %", "standard deviation"):
        assert words in text
    only_train = FederatedData(ragged.train)
    assert "8 training clients" in str(eq.train(softmax(), only_train, rounds=1, clients_per_round=4).summary())


def test_training_lowers_the_loss_from_its_known_start():
    data = FederatedData(make_clients([30] * 12), test=make_clients([20] * 5, seed=1, prefix="unseen"))
    start = eq.train(softmax(), data, rounds=0, clients_per_round=4).summary().loss.mean
    assert start == pytest.approx(1.0986, abs=1e-4)  # log 3 at zero parameters
    end = eq.train(softmax(), data, rounds=40, clients_per_round=4).summary()
    assert end.loss.mean < 0.6 * start


def test_the_client_table(ragged, tmp_path):
    table = eq.train(softmax(), ragged, rounds=1, clients_per_round=4).clients
    assert len(table) == 11
    assert len(table.where("test")) == 3
    worst = table.worst(2)
    assert worst[0]["error"] >= worst[1]["error"] == sorted(table.error.tolist())[-2]
    table.to_csv(tmp_path / "clients.csv")
    lines = (tmp_path / "clients.csv").read_text().splitlines()
    assert lines[0] == "client,split,seen,size,loss,error,trivial_error"
    assert len(lines) == 12
    assert "… 11 rows" in repr(table)
    with pytest.raises(InvalidParameter, match="split must be one of test, train"):
        table.where("validation")


def test_model_and_data_may_depend_on_the_seed():
    seen = []

    def data(seed):
        seen.append(seed)
        return FederatedData(make_clients([5, 6], seed=seed))

    methods = {"a": eq.Algorithm(), "b": eq.Algorithm(risk=eq.risk.Superquantile(0.5))}
    eq.compare(methods, lambda seed: softmax(), data, rounds=1, clients_per_round=2, seeds=[3, 5])
    assert seen == [3, 5]  # once per seed, not once per method


def test_compare_puts_methods_on_the_same_cohorts(ragged):
    methods = {"FedAvg": eq.Algorithm(), "Δ-FL 0.5": eq.Algorithm(risk=eq.risk.Superquantile(tail=0.5))}
    comparison = eq.compare(methods, softmax(), ragged, rounds=4, clients_per_round=4, seeds=2)
    assert [len(runs) for runs in comparison.results.values()] == [2, 2]
    table = comparison.table()
    assert table["FedAvg"]["trained"].mean == 4
    assert table["Δ-FL 0.5"]["trained"].mean < 4
    errors = [run.summary().error.mean for run in comparison.results["FedAvg"]]
    assert table["FedAvg"]["mean"].mean == pytest.approx(sum(errors) / 2)
    assert table["FedAvg"]["mean"].deviation == pytest.approx(abs(errors[0] - errors[1]) / 2**0.5)
    assert "Δ-FL 0.5" in comparison.summary()
    assert "seeds (2)" in comparison.summary()


@pytest.mark.parametrize("many", [eq.compare, lambda methods, *rest, **more: eq.train_many(*rest, methods, **more)])
def test_several_runs_give_the_same_notice_once(ragged, many):
    methods = {"Ditto": eq.Algorithm(personal=eq.personal.Ditto(1.0)), "local": eq.Algorithm(personal=eq.personal.Local())}
    options = {"rounds": 1, "clients_per_round": 4}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        many(methods, softmax(), ragged, seeds=3, **options)
        assert sum("took no part in training" in str(each.message) for each in caught) == 1
        eq.train(softmax(), ragged, methods["Ditto"], **options)  # another call says it again
        assert sum("took no part in training" in str(each.message) for each in caught) == 2


def test_each_run_of_a_comparison_has_a_checkpoint_of_its_own(ragged, tmp_path):
    methods = {"FedAvg": eq.Algorithm(), "Δ-FL 0.5": eq.Algorithm(risk=eq.risk.Superquantile(tail=0.5))}
    options = {"clients_per_round": 4, "seeds": 2}
    eq.compare(methods, softmax(), ragged, rounds=2, checkpoint=tmp_path / "c.ckpt", **options)
    names = {path.name for path in tmp_path.glob("c*.ckpt")}
    assert len(names) == 4
    assert {"c-FedAvg-seed0.ckpt", "c-FedAvg-seed1.ckpt"} < names
    resumed = eq.compare(methods, softmax(), ragged, rounds=4, checkpoint=str(tmp_path / "c.ckpt"), **options)
    whole = eq.compare(methods, softmax(), ragged, rounds=4, **options)
    for one, other in zip(resumed.all_results, whole.all_results, strict=True):
        assert torch.equal(one.params, other.params)
    more = {"FedProx": eq.Algorithm(solver=eq.solvers.SGD(prox=0.1)), **methods}  # a method in front, and one more seed
    longer = eq.compare(more, softmax(), ragged, rounds=4, clients_per_round=4, seeds=3, checkpoint=tmp_path / "c.ckpt")
    for name, runs in whole.results.items():
        for one, other in zip(longer.results[name], runs, strict=False):
            assert torch.equal(one.params, other.params)
    assert len(list(tmp_path.glob("c*.ckpt"))) == 9


@pytest.mark.parametrize(
    "last", [eq.Algorithm(aggregator=eq.aggregators.Median()), eq.Algorithm(personal=eq.personal.FedRep("*.running_mean"))]
)
def test_a_comparison_refuses_what_does_not_go_together_before_the_first_round(ragged, last):
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    heard = []

    class Watch(eq.types.Observer):
        def on_round(self, report):
            heard.append(report)

    with pytest.raises(IncompatibleParts) as caught:
        eq.compare({"FedAvg": eq.Algorithm(), "last": last}, model, ragged, rounds=1, clients_per_round=4, observers=[Watch()])
    assert heard == []
    assert "This was method 'last'. No method was trained." in caught.value.__notes__


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"clients_per_round": 9},
            "clients_per_round must be a whole number between 1 and the number of training clients, 8, but is 9",
        ),
        ({"rounds": -1}, "rounds must be a whole number ≥ 0"),
        ({"rounds": 2.5}, "rounds must be a whole number"),
        ({"seed": "x"}, "seed must be a whole number"),
        ({"seed": -1}, "seed must be a whole number from 0"),
        ({"engine": "warp"}, 'engine must be "simulator", "loop", "ray" or an engine object'),
        ({"engine": 3}, "engine must be"),
        ({"evaluate_every": 0}, "evaluate_every must be at least 1"),
        ({"algorithm": "fedavg"}, "algorithm must be an equipoise.Algorithm"),
        ({"model": 3}, "model must be a Module"),
        ({"data": [1]}, "data must be a FederatedData"),
        ({"model": FederatedData(make_clients([3])), "data": softmax()}, "model comes first and the data second"),
        ({"model": nn.Linear}, "model must be a Module, or a function of the seed that makes one, but is 'Linear'"),
        ({"model": lambda: softmax()}, "model must be a Module, or a function of the seed"),
        ({"engine": eq.engines.Simulator}, "engine must be"),
        ({"engine": eq.engines.Simulator(device="abacus")}, "device must be a device of this machine, but is 'abacus'"),
        ({"clients_per_round": 3.0}, "clients_per_round must be a whole number"),
        ({"evaluate_every": "2"}, "evaluate_every must be at least 1"),
        ({"model": nn.Flatten()}, "model must have trainable parameters"),
        ({"model": nn.Linear(7, 3)}, "model must fit the data 'ragged': inputs of shape (4,) and type float32"),
        ({"model": nn.Linear(4, 2)}, "(0 to 2) apart, but is 'Linear with 2 classes'. Give it"),
        ({"model": eq.models.Softmax(4, 2)}, "classes of 'ragged' (0 to 2) apart, but is 'Softmax with 2 classes'."),
        ({"model": eq.models.Logistic(4)}, "classes of 'ragged' (0 to 2) apart, but is 'Logistic with 2 classes'."),
    ],
)
def test_bad_input_is_named(options, words, ragged):
    arguments = {"model": softmax(), "data": ragged, "rounds": 1, "clients_per_round": 2} | options
    with pytest.raises(InvalidParameter) as caught:
        eq.train(**arguments)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (
            {"risk": eq.risk.Superquantile},
            "risk must be an object, but is 'Superquantile'. Write equipoise.risk.Superquantile(tail=…)",
        ),
        ({"risk": 0.5}, "risk must offer __call__"),
        ({"solver": eq.risk.Mean()}, "That is a risk, given as risk=… of Algorithm. [EQ116]"),
        ({"aggregator": eq.risk.Mean()}, "aggregator must be an aggregator, e.g. aggregators.Median(), but is Mean()"),
        ({"server": 1}, "server must offer begin, step, but is 1. See equipoise.server_opt."),
        ({"sampler": 10}, "sampler must offer __call__, but is 10. See equipoise.sampling."),
        ({"weights": "size"}, 'weights must be "examples", "uniform" or None'),
    ],
)
def test_bad_parts_are_named(parts, words):
    with pytest.raises(InvalidParameter) as caught:
        eq.Algorithm(**parts)
    assert words in str(caught.value)


def test_sampling_by_weight_with_equal_weights_is_refused():
    with pytest.raises(IncompatibleParts, match=r"Use sampling.Uniform"):
        eq.Algorithm(sampler=eq.sampling.Proportional(), weights="uniform")


def test_an_observer_that_fails_is_named(ragged):
    class Fragile(eq.observers.History):
        def on_round(self, report):
            if report.round == 2:
                raise OSError("disk full")

    with pytest.raises(ObserverFailed, match="Observer Fragile failed in on_round: disk full"):
        eq.train(softmax(), ragged, rounds=5, clients_per_round=2, observers=[Fragile()])


def test_every_observer_can_close_what_it_opened(ragged, tmp_path):
    class BadEnd(eq.observers.History):
        def on_end(self):
            raise OSError("no")

    log = eq.observers.JsonLines(tmp_path / "rounds.jsonl")
    with pytest.raises(ObserverFailed, match="BadEnd failed in on_end: no"):
        eq.train(softmax(), ragged, rounds=1, clients_per_round=2, observers=[BadEnd(), log])
    assert log._file is None
    wild = eq.Algorithm(solver=eq.solvers.SGD(lr=1e38))
    with pytest.raises(eq.errors.Diverged):  # not hidden by the observer's own failure
        eq.train(softmax(), ragged, wild, rounds=9, clients_per_round=4, observers=[BadEnd(), log])

    class BadStart(eq.observers.History):
        def on_start(self, run):
            raise OSError("no")

    with pytest.raises(ObserverFailed, match="BadStart"):
        eq.train(softmax(), ragged, rounds=1, clients_per_round=2, observers=[log, BadStart()])
    assert log._file is None


def test_an_observer_needs_only_the_methods_it_uses(ragged):
    class OnlyRounds:
        seen = 0

        def on_round(self, report):
            self.seen += 1

    observer = OnlyRounds()
    eq.train(softmax(), ragged, rounds=3, clients_per_round=2, observers=[observer])
    assert observer.seen == 3


def test_a_log_keeps_all_runs_of_a_comparison(ragged, tmp_path):
    log = eq.observers.JsonLines(tmp_path / "rounds.jsonl")
    methods = {"a": eq.Algorithm(), "b": eq.Algorithm()}
    eq.compare(methods, softmax(), ragged, rounds=2, clients_per_round=2, seeds=2, observers=[log])
    records = [json.loads(line) for line in log.path.read_text().splitlines()]
    starts = [(r["name"], r["seed"]) for r in records if r["event"] == "start"]
    assert starts == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert sum(r["event"] == "round" for r in records) == 8


def test_the_log_has_one_valid_json_object_per_line(ragged, tmp_path):
    log = eq.observers.JsonLines(tmp_path / "deep" / "rounds.jsonl")
    algorithm = eq.Algorithm(sampler=eq.sampling.Poisson())
    eq.train(softmax(), ragged, algorithm, rounds=12, clients_per_round=1, observers=[log], evaluate_every=6)
    records = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert records[0] == {"event": "start", "name": "run", "rounds": 12, "seed": 0, "first_round": 0}
    rounds = [r for r in records if r["event"] == "round"]
    assert [r["round"] for r in rounds] == list(range(12))
    assert any(r["cohort"] == 0 and r["loss"] is None for r in rounds)
    assert [r["round"] for r in records if r["event"] == "evaluation"] == [6, 12]


def test_the_progress_bar_shows_the_numbers(ragged):
    import io

    from rich.console import Console

    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=140)
    bar = eq.observers.Progress(console)
    eq.train(softmax(), ragged, rounds=3, clients_per_round=4, observers=[bar], progress=False, name="FedAvg")
    drawn = screen.getvalue()
    for words in ("FedAvg", "3/3", "loss", "worst 10 %", "trained 4/4", "evaluating all clients"):
        assert words in drawn


def test_importing_is_light():
    heavy = ("sklearn", "typer", "plotly", "matplotlib", "rich", "pydantic", "scipy", "pandas")
    code = f"import sys, equipoise; print([m for m in {heavy!r} if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_training_needs_torch_and_numpy_alone():
    """A machine with nothing else, imitated by refusing every other import."""
    code = """
import sys
from importlib.machinery import ModuleSpec
class Refuse:
    def find_spec(self, name, path=None, target=None):
        refused = {"sklearn", "typer", "plotly", "matplotlib", "rich", "pydantic", "scipy", "safetensors"}
        return ModuleSpec(name, self) if name.split(".")[0] in refused else None
    def create_module(self, spec):
        raise ImportError(spec.name)
    def exec_module(self, module): ...
sys.meta_path.insert(0, Refuse())
import equipoise as eq
data = eq.data.label_shift(train_clients=12, validation_clients=2, test_clients=4, examples=20)
tail = eq.Algorithm(risk=eq.risk.Superquantile(tail=0.5))
print(eq.train(eq.models.Softmax(data.features, data.classes), data, tail, rounds=2, clients_per_round=4).summary())
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "4 unseen test clients" in shown.stdout


def test_scalar_parameters_train(ragged):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(1.0))

        def forward(self, x):
            return self.linear(x) * self.scale

    result = eq.train(Scaled(), ragged, rounds=2, clients_per_round=3)
    loop = eq.train(result.model, ragged, rounds=0, clients_per_round=3, engine="loop")
    assert torch.equal(loop.params, result.params)
    assert float(result.model.scale.detach()) != 1.0


def test_mixed_precision_models_are_refused(ragged):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3).double())
    with pytest.raises(InvalidParameter, match="one floating type"):
        eq.train(model, ragged, rounds=1, clients_per_round=2)


FAST = eq.Algorithm(solver=eq.solvers.SGD(lr=30.0, batch_size=None))


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (lambda *given, **options: eq.train(*given, FAST, **options), "left out: client-2"),
        (lambda *given, **options: eq.train_family(*given, FAST, tails=[1.0, 0.9], **options), "left out: client-2"),
        (lambda *given, **options: eq.train_many(*given, FAST, seeds=2, **options), "left out: client-2"),
        (
            lambda *given, **options: eq.train_many(
                *given, {"a": FAST, "b": dataclasses.replace(FAST, aggregator=eq.aggregators.Median())}, seeds=1, **options
            ),
            "None of the 2 runs can be trained together",
        ),
    ],
    ids=["train", "train_family", "train_many", "one by one"],
)
def test_notices_point_at_the_line_of_the_call(train, words, ragged):
    x = ragged.train.x.clone()
    x[ragged.train.offsets[2]] *= 1e30  # an update of the third client that cannot be used
    data = FederatedData(dataclasses.replace(ragged.train, x=x))
    with pytest.warns(EquipoiseNotice) as said:
        train(softmax(), data, rounds=2, clients_per_round=8, progress=False)
    assert any(words in str(notice.message) for notice in said)
    assert {notice.filename for notice in said} == {__file__}


@pytest.mark.parametrize("seeds", ["x", 2.5, 0, [0, 0], [0.5], None])
def test_seeds_of_a_comparison_are_different_whole_numbers(seeds):
    data = eq.data.label_shift(train_clients=4, validation_clients=0, test_clients=2, examples=10)
    with pytest.raises(InvalidParameter, match="seeds must be one or more different whole numbers, or how many"):
        eq.compare({"a": eq.Algorithm()}, eq.models.Softmax(20, 10), data, rounds=1, clients_per_round=2, seeds=seeds)


def test_the_notice_on_a_run_that_diverges_names_method_and_seed():
    data = eq.data.label_shift(train_clients=8, validation_clients=0, test_clients=2, examples=20)
    methods = {"usual": eq.Algorithm(), "too fast": eq.Algorithm(solver=eq.solvers.SGD(lr=1e5))}
    with pytest.warns(EquipoiseNotice, match="'too fast' with seed 4 diverged") as told:
        eq.compare(methods, eq.models.Softmax(20, 10), data, rounds=4, clients_per_round=4, seeds=[4])
    assert not any("usual" in str(each.message) for each in told)


def test_a_model_that_takes_one_dict_is_told_how_it_is_called():
    class OfDict(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x):
            return self.linear(x["age"])

    x = {"age": torch.randn(8, 3), "city": torch.randn(8, 1)}
    data = eq.data.from_dict({name: (x, torch.tensor([0, 1] * 4)) for name in ("a", "b", "c")}, test=0)
    with pytest.raises(InvalidParameter, match=r"keyword arguments: def forward\(self, age, city\)"):
        eq.train(OfDict(), data, rounds=1, clients_per_round=2)
    x = (torch.randn(8, 3), torch.randn(8, 1))
    data = eq.data.from_dict({name: (x, torch.tensor([0, 1] * 4)) for name in ("a", "b", "c")}, test=0)
    with pytest.raises(InvalidParameter, match="Inputs of a tuple are 2 arguments of forward, in their order"):
        eq.train(OfDict(), data, rounds=1, clients_per_round=2)


@pytest.mark.filterwarnings("ignore:.* runs can be trained together")
@pytest.mark.parametrize("function", ["compare", "train_many"])
def test_an_error_of_an_own_part_names_the_run_and_leaves_what_had_ended(function):
    class Breaks:
        linear = False

        def __call__(self, updates, weights, *, losses=None, state=None):
            if state == 2 and updates.shape[1] > 100:  # not in the trial before the run
                raise ZeroDivisionError("a mistake of mine")
            return weights.to(updates.dtype) @ updates, (state or 0) + 1

    data = eq.data.label_shift(train_clients=8, validation_clients=0, test_clients=2, examples=20)
    methods = {"usual": eq.Algorithm(), "mine": eq.Algorithm(aggregator=Breaks())}
    model, usual = eq.models.Softmax(20, 10), {"rounds": 4, "clients_per_round": 4, "seeds": 1}
    given = (methods, model, data) if function == "compare" else (model, data, methods)
    with pytest.raises(ZeroDivisionError, match="a mistake of mine") as caught:
        getattr(eq, function)(*given, **usual)
    assert list(caught.value.finished.results) == ["usual"]
    assert "This was method 'mine' with seed 0." in caught.value.__notes__
