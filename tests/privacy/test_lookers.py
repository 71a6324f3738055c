"""Who looks at training clients under protection: the list, each entry tried, and what is not on it found out.

Two data sets that differ in one client who never takes part give the same sums. All that is released, chosen or said must then
be the same, whatever that client's examples are: nothing but the sums is covered by noise.
"""

import re
import sys
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise import privacy
from equipoise.client_table import ClientTable
from equipoise.data.clients import ClientSet, FederatedData, Ragged
from equipoise.errors import Diverged, IncompatibleParts, InvalidParameter, ObserverFailed
from equipoise.experiment.search import CRITERIA, check_first_trial, read_search
from equipoise.privacy.accounting import epsilon_of
from equipoise.privacy.ledger import read_entries
from equipoise.privacy.lookers import LOOKERS, data_to_try, may_look, refuse_looking
from equipoise.privacy.releases import CohortEvent, PoissonSampling, Release
from equipoise.report.notices import notice
from equipoise.rounds import one_round
from equipoise.runs.input_scales import cause_of_divergence, far_inputs
from equipoise.runs.setup import set_up
from equipoise.types import RoundReport

ROOT = Path(__file__).parents[2]
CLIENTS, ROUNDS, CLIP = 12, 6, 1.0
# Without noise the sums are the same if the cohorts are (`one_secret`), and all rules of differential privacy hold.
NOISE = privacy.DifferentialPrivacy(None, 1e-3, CLIP, noise_multiplier=0.0)
SUMS = privacy.SecureAggregation()
NOISY, SECURE = eq.Algorithm(privacy=NOISE), eq.Algorithm(privacy=SUMS)
TAIL = eq.Algorithm(risk=eq.risk.Superquantile(0.5, quantile=privacy.PrivateQuantile(2.0, 8)), privacy=NOISE)
ADAPTIVE = eq.Algorithm(privacy=replace(NOISE, clip_rule=privacy.AdaptiveClip()))
WEIGHED = eq.Algorithm(risk=eq.risk.Tilted(1.0), privacy=replace(NOISE, loss_bound=2.0))
OWN = eq.Algorithm(personal=eq.personal.Ditto(), privacy=NOISE)
VICTIM = 0

CHANGES = {  # of the examples of one client
    "none": lambda x, y: (x, y),
    "huge": lambda x, y: (torch.full_like(x, 3e38), y),
    "far": lambda x, y: (x * 1e5, y),
    "tiny": lambda x, y: (x * 1e-30, y),
    "labels": lambda x, y: (x, torch.full_like(y, 2)),
    "one": lambda x, y: (x[:1], y[:1]),
    "many": lambda x, y: (x.repeat(40, 1), y.repeat(40)),
}


def people(count, seed, prefix):
    generator = torch.Generator().manual_seed(seed)
    return [
        (f"{prefix}-{k}", torch.randn(11, 4, generator=generator), torch.randint(0, 3, (11,), generator=generator))
        for k in range(count)
    ]


def made(change="none", *, inside=False):
    """Twelve training clients, of whom one is changed; validation and test clients are others, or `inside` the same."""
    train = people(CLIENTS, 0, "client")
    name, x, y = train[VICTIM]
    train[VICTIM] = (name, *CHANGES[change](x, y))
    others = [
        people(CLIENTS, seed, "client") if inside else people(5, seed, prefix) for seed, prefix in ((1, "held"), (2, "new"))
    ]
    return FederatedData(ClientSet.pack(train), *map(ClientSet.pack, others), name="walk", classes=3)


def model(seed=0):
    return eq.models.Softmax(4, 3)


def absent_seed(algorithm):
    """A seed with which the victim is in no cohort of a run that draws by its seed, and not all cohorts are empty."""
    alpha = algorithm.base_weights(made().train)
    for seed in range(1000):
        drawn = [algorithm.drawn_by(t, alpha, clients_per_round=3, seed=seed).clients for t in range(ROUNDS)]
        if VICTIM not in torch.cat(drawn) and sum(map(len, drawn)) > ROUNDS:
            return seed
    raise AssertionError("no seed")


@cache
def secret_number(takes_part, rounds=ROUNDS, clients_per_round=3):
    """A secret, as a number, with which the victim of a run under noise is in all cohorts or in none; not all are empty."""
    given = {"rounds": rounds, "clients_per_round": clients_per_round, "seed": 0, "loss": None, "error": None, "engine": "loop"}
    setting = set_up(model(), made(), NOISY, **given)
    for number in range(1000):
        setting.noise.inject(number)
        drawn = [setting.draw(t).clients for t in range(rounds)]
        if {VICTIM in clients for clients in drawn} == {takes_part} and sum(map(len, drawn)) > rounds:
            return number
    raise AssertionError("no secret")


def use_secret(patch, number):
    """All private runs draw their noise and cohorts from one secret."""
    patch.setattr("equipoise.privacy.noise_plan.urandom", lambda size: number.to_bytes(size, "little"))


@pytest.fixture(autouse=True)
def one_secret(monkeypatch, known_secrets):
    """Also methods and trials share their cohorts, and the victim is in none."""
    use_secret(monkeypatch, secret_number(False))


SEED = absent_seed(SECURE)
OPTIONS = {"rounds": ROUNDS, "clients_per_round": 3, "progress": False}


def told(run):
    """What a call gives or raises, and the notices that it gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = run()
        except Exception as failure:  # a refusal is said, too
            found = f"{type(failure).__name__}: {failure}"
    return found, sorted(str(each.message) for each in caught)


def trained(data, algorithm=NOISY, seed=SEED, **options):
    return eq.train(model(), data, algorithm, seed=seed, **OPTIONS | options)


# ------------------------------------------------------------------------------------------- a client who never takes part


def said_by_train(**options):
    def run(data):
        result = trained(data, **options)
        texts = [str(each) for each in (result.summary("test"), result.summary("validation"), result.privacy, result.epsilon)]
        return result.params.tolist(), [repr(value) for value in result.model.state_dict().values()], texts

    return run


def said_by_compare(data):
    methods = {"plain": NOISY, "tail": TAIL}
    found = eq.compare(methods, model, data, seeds=[SEED], **OPTIONS)
    return found.summary("test"), found.to_markdown("test"), str(found.differences(split="test"))


def said_by_tune(data, **options):
    def method(lr):
        return replace(NOISY, solver=eq.solvers.SGD(lr=lr))

    found = eq.tune(method, {"lr": [0.01, 0.1, 1.0]}, model, data, seeds=[SEED], **OPTIONS | options)
    return found.values, found.trials, found.summary()


PUBLIC = eq.EarlyStopping("validation.error", patience=1, public=True)
SAYS = {
    "train": said_by_train(),
    "train on the loop": said_by_train(engine="loop"),
    "train with metrics": said_by_train(metrics={"f1": eq.metrics.macro_f1}, evaluate_every=1),
    "train with a sample": said_by_train(evaluate_clients=3),
    "a stop by public clients": said_by_train(stop=PUBLIC, evaluate_every=1),
    "a private tail": said_by_train(algorithm=TAIL),
    "weights by losses": said_by_train(algorithm=WEIGHED),
    "an adaptive clip": said_by_train(algorithm=ADAPTIVE),
    "own models": said_by_train(algorithm=OWN),
    "finetuning": said_by_train(algorithm=replace(OWN, personal=eq.personal.Finetuning())),
    "compare": said_by_compare,
    "train_many": lambda data: eq.train_many(model, data, NOISY, seeds=[SEED], **OPTIONS).summary("test"),
    "tune": said_by_tune,
    "explain": lambda data: eq.explain(model(), data, NOISY, clients_per_round=3, seed=SEED),  # numbers of examples apart
}


@cache
def said_without_change(what):
    return told(lambda: SAYS[what](made()))


@pytest.mark.parametrize("change", [change for change in CHANGES if change != "none"])
@pytest.mark.parametrize("what", SAYS)
def test_a_client_who_never_takes_part_changes_nothing(what, change):
    if what == "explain" and change in ("one", "many"):
        return
    without = said_without_change(what)
    assert not isinstance(without[0], str) or what in ("explain", "train_many"), without  # it did not fail
    assert told(lambda: SAYS[what](made(change))) == without


# ----------------------------------------------------------------------------------------------- who reads training examples

# Outside of rounds and evaluations. The engine looks at shapes and sizes, and tries whether clients can be batched: "speed".
READERS = {
    "core.signature": "shape of the data",
    "privacy.lookers": "shape of the data",
    "runs.identity": "identity",
    "train": "identity",
    "engines": "speed",
}


@pytest.fixture
def readers(monkeypatch):
    """Modules that read examples of watched clients, but in rounds and evaluations; and the list of those that are watched."""
    found, watched = set(), []

    def note(clients):
        x = vars(clients).get("x")
        if not isinstance(x, torch.Tensor) or x.untyped_storage().data_ptr() not in watched:
            return
        frame, names = sys._getframe(2), []
        while frame is not None:
            names.append((frame.f_globals.get("__name__", ""), frame.f_code.co_name))
            frame = frame.f_back
        ours = [(name.removeprefix("equipoise."), function) for name, function in names if name.startswith("equipoise.")]
        if not {("round", "run_round"), ("runs.setup", "evaluation")} & set(ours):
            outside = [name for name, _ in ours if not name.startswith(("data.", "core.trees"))]
            found.add(re.sub(r"^engines.*", "engines", outside[0]) if outside else "user")

    def watching(read):
        def watched_read(self, *given, **named):
            note(self)
            return read(self, *given, **named)

        return watched_read

    for name in ("inputs", "targets", "client"):
        monkeypatch.setattr(ClientSet, name, watching(getattr(ClientSet, name)))
    for name in ("x", "y"):
        value = property(
            watching(lambda self, name=name: vars(self)[name]), lambda self, x, name=name: vars(self).update({name: x})
        )
        monkeypatch.setattr(ClientSet, name, value, raising=False)
    return found, watched


@pytest.mark.parametrize("algorithm", [NOISY, TAIL, OWN, SECURE], ids=["noise", "tail", "own models", "sums"])
@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
def test_nobody_reads_training_examples_who_is_not_on_the_list(readers, algorithm, engine, tmp_path):
    (found, watched), data = readers, made("far")
    watched.append(vars(data.train)["x"].untyped_storage().data_ptr())
    given = {"engine": engine, "evaluate_every": 2, "metrics": {"f1": eq.metrics.macro_f1}, "checkpoint": tmp_path / "a.ckpt"}
    result = trained(data, replace(algorithm, solver=eq.solvers.SGD(weight_decay=0.1)), **given)
    str(result), result.save(tmp_path / "run")
    assert found <= READERS.keys(), found - READERS.keys()
    assert set(READERS.values()) <= LOOKERS.keys()
    far_inputs(data)  # as one more notice would: it is found out
    assert "runs.input_scales" in found


@pytest.mark.parametrize("algorithm", [NOISY, SECURE], ids=["noise", "sums"])
@pytest.mark.parametrize("inside", [False, True])
def test_parts_are_tried_on_other_people_or_on_made_up_examples(algorithm, inside):
    shown = data_to_try(made(inside=inside), algorithm)
    x = vars(made().train)["x"]
    assert shown.splits.keys() == {"train"}
    assert not any(bool((row == x).all(1).any()) for row in shown.train.x)
    assert (shown.train.ids == made().validation.ids) is not inside
    assert shown.classes == 3
    assert data_to_try(made(inside=inside), eq.Algorithm()).train.ids[0] == "client-0"
    words = Ragged.of([[5, 7, 2]] * 3)
    both = {"words": words, "age": torch.rand(3, 2).double(), "seen": torch.tensor([True, False, True])}
    places = torch.tensor([[0, 2], [-100, 1], [1, 1]])
    alone = ClientSet.pack([("a", both, places), ("b", both, places)])
    shown = data_to_try(FederatedData(alone, classes=3), algorithm)
    seen, like = shown.train.inputs(slice(0, 8)), alone.inputs(slice(0, 3))
    assert {name: value.dtype for name, value in seen.items()} == {name: value.dtype for name, value in like.items()}
    assert {name: value.shape[2:] for name, value in seen.items()} == {name: value.shape[2:] for name, value in like.items()}
    assert not bool(seen["words"].any())
    assert shown.train.y.dtype == alone.y.dtype
    assert shown.has_ignored  # public, as the number of classes is


# ----------------------------------------------------------------------------------------------------------- every entry, tried


def sums_and_ledger(tmp_path):
    """A client moves the sum of one round by at most the clip bound, and what is released is in the ledger."""
    options = {"rounds": 1, "clients_per_round": 6, "ledger": tmp_path / "l"}
    with pytest.MonkeyPatch.context() as patch:
        use_secret(patch, secret_number(True, rounds=1, clients_per_round=6))
        for algorithm in (NOISY, TAIL, WEIGHED):
            changes = ("none", "far", "labels", "many")
            first, *others = (trained(made(change), algorithm, **options).params for change in changes)
            moved = max(float((other - first).norm()) for other in others)
            assert 0 < moved <= 2 * CLIP / (6 * algorithm.traits.risk.tail) + 1e-5
    assert {entry.purpose for entry in read_entries(tmp_path / "l") if entry.kind == "release"} == {
        "update",
        "quantile",
        "weights",
    }


def shape_of_the_data(tmp_path):
    """What is declared does not depend on any example: shapes, types, classes, numbers and ids of clients."""
    assert len({trained(made(change)).signature for change in CHANGES}) == 1


def trials(tmp_path):
    """A model, a loss and a metric get no training example before the first round."""
    given = []

    def note(x):
        given.append(x.detach().clone())

    noting = [note]  # a module that notes is refused; one that calls what others hold is looked at here
    monkeypatch = pytest.MonkeyPatch()
    plain = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: (noting[0](x), plain(self, x))[1])

    class Spy(nn.Linear):
        pass

    def metric(outputs, targets):
        return 0.0

    class Stop(eq.types.Observer):
        def on_start(self, run):
            raise KeyboardInterrupt

    data = made("far")
    for algorithm in (NOISY, SECURE):
        with pytest.raises(KeyboardInterrupt):
            eq.train(
                Spy(4, 3), data, algorithm, metrics={"m": metric}, observers=[Stop()], engine="loop", **OPTIONS,
                checkpoint=tmp_path / "c.ckpt",
            )  # fmt: skip
    monkeypatch.undo()
    rows = torch.cat([x.reshape(-1, 4) for x in given if x.shape[-1] == 4])
    assert len(rows)
    assert not any(bool((row == rows).all(1).any()) for row in data.train.x)


def input_scales(tmp_path):
    """Means and deviations are those of other people."""
    train = ClientSet.pack([(name, x * 1e6, y) for name, x, y in people(CLIENTS, 0, "client")])
    for algorithm in (eq.Algorithm(), NOISY, SECURE):
        given = {"rounds": 1, "clients_per_round": 3, "seed": 0, "loss": None, "error": None, "engine": "loop"}
        text = cause_of_divergence(set_up(model(), replace(made(), train=train), algorithm, **given))
        assert (text is None) is (algorithm.privacy is not None)


def small_batches(tmp_path):
    """Who has a batch of one example is not said, and decides nothing."""
    kept = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    algorithm = replace(NOISY, personal=eq.personal.FedBN())
    first, other = (told(lambda c=change: trained_with(kept, made(c), algorithm).params.tolist()) for change in ("none", "one"))
    assert first == other
    assert not isinstance(first[0], str)
    assert "batch of one example" in str(told(lambda: trained_with(kept, made("one"), eq.Algorithm(), seed=0))[1])


def trained_with(net, data, algorithm, seed=SEED):
    return eq.train(net, data, algorithm, seed=seed, **OPTIONS)


def notices(tmp_path):
    """No exact loss or number of clients is in a notice. Under secure sums means are, as the server has them."""
    steep = eq.server_opt.SGD(1e9)
    for algorithm in (NOISY, replace(NOISY, server=steep), replace(TAIL, server=steep)):
        assert not told(lambda a=algorithm: trained(made("far"), a, clients_per_round=1))[1]  # cohorts are mostly empty
    assert "diverged" in str(told(lambda: trained(made("far"), replace(SECURE, server=steep)))[1])


def end_of_the_run(tmp_path):
    """A loss that is not finite stops a run in the open, and no run that noise protects."""
    steep = eq.server_opt.SGD(100.0)
    lost = trained(made("huge"), replace(NOISY, server=steep))
    assert not bool(lost.clients.where("train").loss.isfinite().all())
    with pytest.raises(Diverged):
        trained(made("huge"), eq.Algorithm(server=steep), seed=absent_seed(eq.Algorithm()))


def trivial_answer(tmp_path):
    """It is chosen by training targets."""
    for algorithm in (NOISY, SECURE):
        assert trained(made(), algorithm).clients.trivial_error is None
    assert trained(made(), eq.Algorithm()).clients.trivial_error is not None


SEARCH = """
[data]
name = "label_shift"
train_clients = 8
validation_clients = 4
test_clients = 4
examples = 10
[model]
name = "softmax"
[algorithm]
privacy = {{name = "{privacy}"{more}}}
[train]
rounds = 2
clients_per_round = 3
[search]
criterion = "{criterion}"
{strategy}
[search.space]
"{axis}" = {values}
"""
WITH_NOISE = {"privacy": "differential_privacy", "more": ', epsilon = "none", delta = 0.01, clip = 1.0, noise_multiplier = 1.0'}


def search(tmp_path):
    """Nothing is chosen by training clients, or by models without noise beside those with: in Python, and from a file."""

    def by_rate(lr, privacy=NOISE):
        return eq.Algorithm(solver=eq.solvers.SGD(lr=lr), privacy=privacy)

    space, given = {"lr": [0.1, 0.2]}, OPTIONS | {"rounds": 1}
    for criterion in CRITERIA:
        inside = made(inside=True)
        with pytest.raises(IncompatibleParts, match="figures of training clients"):
            eq.tune(by_rate, space, model, inside, criterion=criterion, **given)
    with pytest.raises(IncompatibleParts, match="figures of training clients"):
        eq.tune(by_rate, space, model, made(), criterion="train_loss", **given)
    both = eq.tune(by_rate, {"lr": [0.1], "privacy": [NOISE, None]}, model, made(), **given)
    assert [trial.criterion is None for trial in both.trials] == [False, True]
    assert both.best.private
    eq.tune(lambda lr: by_rate(lr, SUMS), space, model, made(), criterion="train_loss", **given)  # a mean, as the server has it
    grid, optuna = "", "trials = 2"
    rates = {"axis": "algorithm.solver.lr", "values": "[0.1, 0.2]"}
    parts = {"axis": "algorithm.privacy", "values": '["none", {name = "secure_aggregation"}]'}
    for strategy in (grid, optuna):
        for refused, options in ((True, WITH_NOISE | rates), (False, {"privacy": "secure_aggregation", "more": ""} | rates)):
            file = tmp_path / "search.toml"
            file.write_text(SEARCH.format(criterion="train_loss", strategy=strategy, **options))
            if refused:
                with pytest.raises(IncompatibleParts, match="figures of training clients"):
                    check_first_trial(read_search(file))
            else:
                check_first_trial(read_search(file))
    file.write_text(SEARCH.format(criterion="validation_90", strategy=grid, **WITH_NOISE | rates))
    check_first_trial(read_search(file))
    mixed = '[{name = "differential_privacy", epsilon = "none", delta = 0.01, clip = 1.0, noise_multiplier = 1.0}, "none"]'
    file.write_text(SEARCH.format(criterion="validation_90", strategy=grid, **WITH_NOISE | parts | {"values": mixed}))
    with pytest.raises(IncompatibleParts, match="with and without"):
        check_first_trial(read_search(file))


def early_stopping(tmp_path):
    """Training clients stop no run that noise protects, whatever is declared of them; secure sums have means alone."""
    for figure in ("loss", "error", "error_90", "error_worst_10"):
        for public in (False, True):
            stop = eq.EarlyStopping(f"train.{figure}", public=public)
            for algorithm in (NOISY, SECURE) if figure not in ("loss", "error") else (NOISY,):
                with pytest.raises(IncompatibleParts):
                    trained(made(), algorithm, stop=stop)
            for split in ("validation", "test"):
                with pytest.raises(IncompatibleParts):
                    trained(made(inside=True), stop=replace(stop, figure=f"{split}.{figure}"))
    trained(made(), SECURE, stop=eq.EarlyStopping("train.loss"))


def family(tmp_path):
    """Members share their rounds, which no protection covers."""
    for protection in (replace(NOISE, loss_bound=2.0), replace(SUMS, loss_bound=2.0)):
        with pytest.raises(InvalidParameter, match="privacy"):
            eq.train_family(model(), made(), eq.Algorithm(privacy=protection), tilts=[0.5, 1.0], rounds=1, clients_per_round=3)


def heterogeneity(tmp_path):
    """The gradients of all clients are measured for no run that noise protects."""
    with pytest.raises(ObserverFailed) as caught:
        trained(made(), observers=[eq.heterogeneity.Heterogeneity()], evaluate_every=1)
    assert isinstance(caught.value.__cause__, IncompatibleParts)
    with pytest.raises(IncompatibleParts):
        eq.heterogeneity.dissimilarity(model(), made(), algorithm=NOISY)
    watch = eq.heterogeneity.Heterogeneity()  # means over clients, as the server of secure sums could have them
    trained(made(), SECURE, observers=[watch], evaluate_every=1)
    assert sorted(watch.rounds) == [1, 2, 3, 4, 5, 6]


def evaluations(tmp_path):
    """They are in the ledger as exact, and any other figures of training clients change nothing that is released or said."""
    plain = ClientTable.evaluate.__func__

    def absurd(cls, *given, **named):
        table = plain(cls, *given, **named)
        train = torch.tensor([split == "train" for split in table.split])
        return replace(table, loss=torch.where(train, 1e30, table.loss), error=torch.where(train, 1e30, table.error))

    def run(ledger):  # one of its own: a second run in a ledger says what both have cost
        return told(lambda: said_by_train(evaluate_every=1, ledger=tmp_path / ledger)(made()))

    as_they_are = run("first")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ClientTable, "evaluate", classmethod(absurd))
        assert run("second") == as_they_are
    for ledger in ("first", "second"):
        exact = [entry.round for entry in read_entries(tmp_path / ledger) if entry.kind == "exact"]
        assert sorted(set(exact)) == [1, 2, 3, 4, 5, 6]


def history(tmp_path):
    """Any other losses and numbers of the rounds change nothing that is released or said; observers change nothing, either."""

    def absurd(**told):
        return replace(RoundReport(**told), loss=1e30, tail_loss=1e30, risk=1e30, trained=0, dropped=9, tail_share=1.0)

    for algorithm in (NOISY, TAIL):
        as_they_are = told(lambda a=algorithm: said_by_train(algorithm=a)(made()))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(one_round, "RoundReport", absurd)
            assert told(lambda a=algorithm: said_by_train(algorithm=a)(made())) == as_they_are


def identity(tmp_path):
    """A hash of all examples is for the operator: whoever knows all clients but one can try that one."""
    data = made()
    result = trained(data, checkpoint=tmp_path / "run.ckpt")
    names = {data.fingerprint, replace(data, test=None).fingerprint, read_entries(tmp_path / "run.ledger.jsonl")[0].run}
    noisy = replace(NOISE, noise_multiplier=1.0)
    found = eq.tune(
        lambda lr: eq.Algorithm(solver=eq.solvers.SGD(lr=lr), privacy=noisy), {"lr": [0.1, 0.2]}, model, data, **OPTIONS
    )
    assert "ε" in found.summary()
    files = [path.read_bytes() for path in result.save(tmp_path / "saved").rglob("*") if path.is_file()]
    texts = [
        found.summary(),
        str(result.privacy),
        str(result.epsilon),
        str(result),
        result.report(tmp_path / "a.html").read_text(),
    ]
    assert not any(name in text for name in names for text in texts)
    assert not any(name.encode() in file for name in names for file in files)


def speed(tmp_path):
    """Another order of additions changes the last bits, as floating-point numbers do."""
    first, *others = (
        trained(made("many"), engine=engine, seed=0).params
        for engine in ("loop", eq.engines.Simulator(chunk_size=1), eq.engines.Simulator(chunk_size=4, compiled=False))
    )
    assert all(torch.allclose(first, other, atol=1e-5) for other in others)


TRIES = {
    "rounds": sums_and_ledger, "shape of the data": shape_of_the_data, "trials": trials, "input scales": input_scales,
    "small batches": small_batches, "notices": notices, "end of the run": end_of_the_run, "trivial answer": trivial_answer,
    "search": search, "early stopping": early_stopping, "family": family, "heterogeneity": heterogeneity,
    "evaluations": evaluations, "history": history, "identity": identity, "speed": speed,
}  # fmt: skip


@pytest.mark.parametrize("who", LOOKERS)
def test_every_entry_of_the_list_is_tried(who, tmp_path):
    TRIES[who](tmp_path)


def test_nobody_looks_who_is_not_on_the_list():
    assert TRIES.keys() == LOOKERS.keys()
    for ask in (may_look, refuse_looking):
        with pytest.raises(KeyError):
            ask("a new notice", NOISY)
    strange = eq.Algorithm()
    assert all(may_look(who, strange) for who in LOOKERS)
    refused = [who for who in LOOKERS if not may_look(who, NOISY)]
    assert {who for who in refused if LOOKERS[who].noise == "refused"} == {
        "search",
        "early stopping",
        "family",
        "heterogeneity",
    }


def test_the_list_is_in_the_docs():
    page = (ROOT / "docs" / "privacy.md").read_text()
    section = page.split("## Who looks at training clients")[1].split("\n## ")[0]
    rows = [[cell.strip(" *") for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| ")][1:]
    assert {row[0]: tuple(row[2:]) for row in rows} == {who: (each.noise, each.sums) for who, each in LOOKERS.items()}


# ------------------------------------------------------------------------------------------------------- what a search costs


@pytest.mark.parametrize("kept", [False, True])
def test_a_search_counts_every_trial_also_those_that_fail(kept, tmp_path):
    """Of three trials one diverges in its first round, after its release: 1 + 2 · 6 rounds are paid for, and said."""

    def method(lr):
        return eq.Algorithm(server=eq.server_opt.SGD(lr), privacy=replace(NOISE, clip=100.0, noise_multiplier=2.0))

    given = {"folder": tmp_path / "tune"} if kept else {}
    for _ in range(2):  # again from its folder: nothing is counted twice
        found = eq.tune(method, {"lr": [3e38, 1.0, 0.5]}, model, made(), **given, **OPTIONS)
    event = CohortEvent((Release("update", 2.0),), PoissonSampling(3 / CLIENTS))
    assert f"ε = {epsilon_of([(event, 13)], 1e-3):.4g} at" in found.summary()
    assert sum(trial.criterion is None for trial in found.trials) == 1
    assert "not covered" in found.summary()  # the validation clients


def test_a_comparison_says_what_its_epsilon_does_not_cover():
    noisy = eq.Algorithm(privacy=replace(NOISE, noise_multiplier=2.0))
    both = eq.compare({"a": noisy, "b": noisy}, model, made(), seeds=2, **OPTIONS)
    assert str(notice("not-covered")) in both.summary("train")
    assert str(notice("not-covered")) not in eq.compare({"a": eq.Algorithm()}, model, made(), **OPTIONS).summary()
