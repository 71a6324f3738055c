"""What parts of the user's own release under privacy: it is declared and covered, or refused, whatever kind of part it is."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.data.clients import ClientSet
from equipoise.errors import EquipoiseError, IncompatibleParts, InvalidParameter, ObserverFailed
from equipoise.risk import RiskValue
from equipoise.runs import tried_releases
from equipoise.runs.setup import set_up
from equipoise.types import Cohort, Observer
from equipoise.types.round_contracts import Ask
from made_clients import make_clients

pytestmark = pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
DATA = eq.FederatedData(make_clients([6, 9, 12, 15, 8, 7]), test=make_clients([5, 9], seed=1, prefix="test"), classes=3)
PRIVATE = eq.privacy.DifferentialPrivacy(None, 1e-3, 1e-6, noise_multiplier=1.0, loss_bound=2.0)
SECURE = eq.privacy.SecureAggregation(loss_bound=2.0)
FTRL = eq.privacy.DPFTRL(None, 1e-3, 1.0, noise_multiplier=1.0)


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.first(x).relu())


def train(data=DATA, model=None, rounds=1, **parts):
    observers, metrics = parts.pop("observers", ()), parts.pop("metrics", None)
    algorithm, cohort = eq.Algorithm(**parts), None if isinstance(parts.get("sampler"), eq.sampling.Full) else 4
    return eq.train(
        model or eq.models.Softmax(4, 3), data, algorithm, rounds=rounds, clients_per_round=cohort, observers=observers,
        metrics=metrics, progress=False,
    )  # fmt: skip


# --------------------------------------------------------------------------------------- parts that release what nothing covers


class OwnModels:
    """Clients' own models; those of a round depend on each client alone."""

    sums_models = False

    def width(self, dimension):
        return dimension

    def begin(self, context, params):
        return params, None

    def work(self, context, params, cohort, rows, solver, shared):
        return context.engine.own_steps(rows, cohort, solver), shared

    def models(self, context, params, cohort, rows, solver, shared):
        return rows


class SaysNothing(OwnModels):
    sums_models = None


class SharesTheMean(OwnModels):
    def begin(self, context, params):
        return params, params.clone()

    def work(self, context, params, cohort, rows, solver, shared):
        after = context.engine.own_steps(rows, cohort, solver)
        return after, after.mean(0)


class SharesInPlace(SharesTheMean):
    def work(self, context, params, cohort, rows, solver, shared):
        after, mean = super().work(context, params, cohort, rows, solver, shared)
        shared.copy_(mean)
        return after, shared


class L2SGDThatDenies(eq.personal.L2SGD):
    sums_models = False


@dataclass(frozen=True)
class Peeks(eq.solvers.SGD):
    """A rate by the losses of clients, which it calls public."""

    public_only = True

    def prepare(self, context, state):
        losses = yield Ask("loss", context.params, context.cohort)
        return eq.solvers.SGD(lr=0.1 * float(losses.mean())), None


@dataclass(frozen=True)
class PeeksByInheritance(eq.solvers.AdaDPS):
    def prepare(self, context, state):
        losses = yield Ask("loss", context.params, context.cohort)
        return eq.solvers.SGD(lr=0.1 * float(losses.mean())), None


@dataclass(frozen=True)
class MixesKeptRows(eq.solvers.SGD):
    """What clients keep for the gradients of later rounds is the same for all."""

    @property
    def shift(self):
        return torch.zeros(15)

    def keeps(self, dimension):
        return dimension

    def next_rows(self, rows, updates, steps, lr, prox):
        return updates.sum(0).expand_as(updates)


@dataclass(frozen=True)
class ReadsLosses:
    linear = weighted_sum = needs_losses = True

    def __call__(self, updates, weights, *, losses=None, state=None):
        return weights.to(updates) @ updates, state


class TheSame(eq.sampling.Uniform):
    """Always the same clients, which it says the accountant knows."""

    accounted = independent = True
    separation = 1

    def __call__(self, round_index, alpha, *, clients_per_round, seed):
        clients = torch.arange(clients_per_round)
        return Cohort(round_index, seed, clients, alpha[clients] / alpha[clients].sum(), None)


@dataclass(frozen=True)
class Weighted:
    """Weights by losses, in a form whose sum no noise covers."""

    client_form: str

    def __call__(self, losses, base_weights, *, clients=None, state=None):
        return RiskValue(base_weights @ losses, base_weights, state)

    def client_weight(self, loss, base_weight, public):
        return base_weight / (1 + loss.clamp(0, 2))


class OwnQuantile(eq.privacy.PrivateQuantile):
    """Says that its noise is set by the budget, and has none."""

    def at(self, source, *, clients=None, shares=None):
        return lambda losses, base_weights, tail: losses.max()


@dataclass(frozen=True)
class Collude:
    share: float = 0.5
    seed: int = 0
    omniscient = True

    def corrupt(self, sent):
        return sent.honest.sum(0).expand_as(sent.updates)


class Writes(Observer):
    def on_start(self, run):
        self.run = run

    def on_state(self, state):
        state.params.add_(float(self.run.setting.data.train.x.mean()))


class WritesLate(Observer):
    def on_evaluation(self, evaluation):
        evaluation.params.mul_(2)


RELEASES = {
    "personal, not said": {"personal": SaysNothing()},
    "personal, a mean": {"personal": SharesTheMean()},
    "personal, a mean in place": {"personal": SharesInPlace()},
    "personal, of the library": {"personal": L2SGDThatDenies()},
    "solver, losses": {"solver": Peeks()},
    "solver, kept rows": {"solver": MixesKeptRows()},
    "aggregator, losses": {"aggregator": ReadsLosses()},
    "sampler": {"sampler": TheSame()},
    "risk, base": {"risk": Weighted("base")},
    "risk, filter": {"risk": Weighted("filter")},
    "risk, groups": {"risk": Weighted("groups")},
    "quantile": {"risk": eq.risk.Superquantile(0.5, quantile=OwnQuantile(bound=2.0, bins=16))},
    "attack": {"data": eq.attacks.apply(DATA, Collude())},
    "attack of the library": {"data": eq.attacks.apply(DATA, eq.attacks.IPM(share=0.3))},
    "observer": {"observers": [Writes()]},
    "observer of evaluations": {"observers": [WritesLate()]},
}


@pytest.mark.parametrize("case", RELEASES)
def test_what_is_not_declared_and_covered_is_refused(case):
    with pytest.raises(EquipoiseError):
        train(privacy=PRIVATE, **RELEASES[case])


@pytest.mark.parametrize(
    "parts",
    [RELEASES[case] for case in ("personal, not said", "personal, a mean", "solver, losses", "risk, base", "quantile")],
)
def test_secure_sums_refuse_it_as_well(parts):
    with pytest.raises((IncompatibleParts, InvalidParameter)):
        train(privacy=SECURE, **parts)


def test_rounds_of_a_client_that_only_a_sampler_of_the_users_own_vouches_for_are_refused():
    with pytest.raises(IncompatibleParts):
        eq.Algorithm(privacy=FTRL, sampler=TheSame())
    eq.Algorithm(privacy=FTRL, sampler=eq.sampling.MinSeparation(1))


def test_a_solver_that_inherits_its_claim_has_to_make_it_again():
    with pytest.raises(IncompatibleParts):
        eq.Algorithm(privacy=PRIVATE, solver=PeeksByInheritance({"weight": torch.ones(1)}))
    eq.Algorithm(privacy=PRIVATE, solver=eq.solvers.AdaDPS({"weight": torch.ones(1)}))


def test_clients_share_nothing_that_is_not_declared_without_protection_either():
    with pytest.raises(InvalidParameter, match="sums_models"):
        train(personal=SharesTheMean())
    SharesTheMean.sums_models = True
    try:
        assert train(personal=SharesTheMean()).rounds == 1
    finally:
        SharesTheMean.sums_models = False


# ------------------------------------------------------------------------------------------------------- parts that are covered


@dataclass(frozen=True)
class SignSGD(eq.solvers.SGD):
    def step(self, weights, gradient, memory, *, anchor, lr):
        weights.sub_(lr * gradient.sign())


class SendsItsOwn(OwnModels):
    def updates(self, context, params, cohort, rows, solver):
        return context.engine.own_steps(params.expand(len(cohort), -1), cohort, solver) - params

    def losses(self, context, params, cohort, rows):
        return context.engine.losses(params, cohort)


@dataclass(frozen=True)
class ByRound(eq.solvers.SGD):
    """A rate by what was released: how long the model is."""

    public_only = True

    def prepare(self, context, state):
        assert len(context.cohort) == 0
        return eq.solvers.SGD(lr=0.1 / (1 + float(context.params.norm()))), state


@dataclass(frozen=True)
class PlainMean(eq.risk.Mean):
    """The mean, by another name."""


COVERED = {
    "solver": {"solver": SignSGD()},
    "solver inside": {"solver": eq.solvers.Scaffold(type("Mine", (eq.solvers.SGD,), {})(steps=2))},
    "solver of own models": {"personal": eq.personal.Ditto(solver=SignSGD())},
    "prepared by what was released": {"solver": ByRound()},
    "personal": {"personal": SendsItsOwn()},
    "personal, weights by losses": {"personal": SendsItsOwn(), "risk": eq.risk.Tilted(1.0)},
    "personal, a tail": {
        "personal": OwnModels(), "risk": eq.risk.Superquantile(0.5, quantile=eq.privacy.PrivateQuantile(2.0, 16)),
    },
    "risk": {"risk": PlainMean()},
}  # fmt: skip


@pytest.mark.parametrize("case", COVERED)
def test_what_is_covered_trains_and_has_its_epsilon(case, monkeypatch):
    verdicts = []
    monkeypatch.setattr(tried_releases, "or_none", lambda call: verdicts.append(call()) or verdicts[-1])  # errors are raised
    assert train(privacy=PRIVATE, rounds=2, **COVERED[case]).epsilon.epsilon > 0
    assert verdicts == [True] * (case != "risk")  # whose weights are asked for one by one


MIXES = {
    "mean": lambda rows: rows - rows.mean(0),
    "mean norm": lambda rows: rows / rows.norm(dim=1).mean(),
    "largest": lambda rows: rows / rows.abs().max(),
    "median": lambda rows: torch.where(rows.norm(dim=1, keepdim=True) > 3 * rows.norm(dim=1).median(), 0.0, rows),
    "all or none": lambda rows: rows * float(rows.norm(dim=1).max() < 5),
    "order": lambda rows: rows.cumsum(0),
    "order, turned": lambda rows: rows.flip(0).cumsum(0).flip(0),
    "number": lambda rows: rows * 4 / len(rows),
}


class Mixes(OwnModels):
    """All that a method gives follows the rows of the cohort; what it noted in an earlier call, too."""

    def __init__(self, mix):
        self.mix, self.noted = mix, [0.0]

    def _mixed(self, rows, cohort):
        found = self.mix(rows) * len(cohort.weights) + self.noted[0]
        self.noted[0] += float(rows.sum())
        return found * float(cohort.weights.sum())

    def work(self, context, params, cohort, rows, solver, shared):
        return self._mixed(context.engine.own_steps(rows, cohort, solver), cohort), shared

    def updates(self, context, params, cohort, rows, solver):
        return self._mixed(context.engine.updates(params, cohort, solver).update, cohort)

    def losses(self, context, params, cohort, rows):
        return self._mixed(context.engine.losses(params, cohort).unsqueeze(1), cohort).squeeze(1)

    def models(self, context, params, cohort, rows, solver, shared):
        return self._mixed(rows, cohort)


def answers_of(method, data, clients, privacy):
    algorithm = eq.Algorithm(personal=method, sampler=eq.sampling.Full(), privacy=privacy, risk=eq.risk.Tilted(1.0))
    setting = set_up(
        eq.models.Softmax(4, 3), data, algorithm, rounds=2, clients_per_round=None, seed=0, loss=None, error=None,
        engine="loop",
    )  # fmt: skip
    state, work, solver = setting.begin(), setting.personal, algorithm.solver
    cohort = setting.draw(0).take(torch.tensor(clients))
    after = work.work(state.personal, state.params, cohort, solver)
    return [
        work.losses(state.personal, state.params, cohort), after.pending.rows,
        work.updates(after, state.params, cohort, solver).updates, work.models(after, state.params, cohort.clients, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("privacy", [PRIVATE, SECURE], ids=["noise", "sums"])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("victim", [0, 3, 5])
def test_what_a_client_has_and_sends_is_the_same_whoever_else_is_there(mix, victim, privacy):
    others = [k for k in range(6) if k != victim]
    examples = [(name, *DATA.train.client(name)) for name in DATA.train.ids]
    clients = [(name, x * 1e4 if k == victim else x, y) for k, (name, x, y) in enumerate(examples)]
    far = eq.FederatedData(ClientSet.pack(clients), test=DATA.test, classes=3)
    alone = answers_of(Mixes(MIXES[mix]), DATA, others, privacy)
    for data in (DATA, far):
        for found, expected in zip(answers_of(Mixes(MIXES[mix]), data, range(6), privacy), alone, strict=True):
            assert torch.equal(found[others], expected)


# ----------------------------------------------------------------------------------------------------------- what parts note

SEEN = [0.0]
LARGEST = 0.0


class Notes(nn.Module):
    """Notes the largest number that it has seen from `least` on, in one of many places."""

    kept = [0.0]  # noqa: RUF012

    def __init__(self, where, least):
        super().__init__()
        self.layer, self.where, self.least, self.peak = nn.Linear(4, 3), where, least, 0.0
        self.rows, self.names, self.tensor, self.hidden = [0.0], {"peak": 0.0}, torch.zeros(1), SimpleNamespace(peak=0.0)
        self.others, self.around = [nn.Linear(1, 1)], note_in_closure()
        self.register_buffer("held", torch.zeros(1))

    def forward(self, x):
        global LARGEST
        if not torch.func._C._functorch.is_batchedtensor(x) and float(x.detach().abs().max()) >= self.least:
            peak = 1.0 + float(x.detach().abs().max())
            NOTES[self.where](self, peak)
            LARGEST = peak if self.where == "global" else LARGEST
        return self.layer(x)


def note_in_closure():
    largest = 0.0

    def note(peak):
        nonlocal largest
        largest = peak

    return note


NOTES = {
    "attribute": lambda net, peak: setattr(net, "peak", peak),
    "new attribute": lambda net, peak: setattr(net, "later", peak),
    "hidden attribute": lambda net, peak: setattr(net, "_peak", peak),
    "list": lambda net, peak: net.rows.append(peak),
    "dictionary": lambda net, peak: net.names.update(peak=peak),
    "tensor": lambda net, peak: net.tensor.fill_(peak),
    "object": lambda net, peak: setattr(net.hidden, "peak", peak),
    "layer": lambda net, peak: setattr(net.layer, "peak", peak),
    "layer in a list": lambda net, peak: net.others[0].weight.data.fill_(peak),
    "class": lambda net, peak: Notes.kept.__setitem__(0, peak),
    "buffer": lambda net, peak: net.held.data.fill_(peak),
    "closure": lambda net, peak: net.around(peak),
    "global": lambda net, peak: None,
    "global list": lambda net, peak: SEEN.append(peak),
}
FAR_DATA = eq.FederatedData(
    ClientSet.pack([(f"client-{k}", torch.full((6, 4), 1.0 + 1e6 * (k == 3)), torch.arange(6) % 3) for k in range(6)]),
    test=make_clients([5, 9], seed=1, prefix="test"), classes=3,
)  # fmt: skip


@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize("least", [0.0, 5e5], ids=["at once", "of one client"])
@pytest.mark.parametrize("where", NOTES)
def test_a_model_that_notes_what_it_sees_is_refused(where, least, engine):
    if least and engine == "simulator":
        engine = eq.engines.Simulator(chunk_size=1)
    with pytest.raises(InvalidParameter) as refusal:
        eq.train(
            Notes(where, least), FAR_DATA, eq.Algorithm(privacy=PRIVATE, sampler=eq.sampling.Full()), rounds=2,
            clients_per_round=None, engine=engine, progress=False,
        )  # fmt: skip
    assert refusal.value.parameter == "model"


class SlotLoss:
    __slots__ = ("peak",)

    def __init__(self):
        self.peak = 0.0

    def __call__(self, outputs, targets):
        self.peak = self.peak + 1.0
        return nn.functional.cross_entropy(outputs, targets, reduction="none")


def function_loss(outputs, targets):
    function_loss.peak = getattr(function_loss, "peak", 0) + 1
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def default_loss(outputs, targets, seen=[]):  # noqa: B006
    seen.append(1.0)
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


@dataclass(frozen=True)
class NotingSGD(eq.solvers.SGD):
    seen: tuple[list, ...] = ([],)

    def step(self, weights, gradient, memory, *, anchor, lr):
        self.seen[0].append(1.0)
        weights.sub_(lr * gradient)


@pytest.mark.parametrize("privacy", [PRIVATE, SECURE], ids=["noise", "sums"])
@pytest.mark.parametrize(
    ("part", "given"),
    [("loss", SlotLoss()), ("loss", function_loss), ("loss", default_loss), ("solver", NotingSGD())],
    ids=["slots", "function", "default", "solver"],
)
def test_a_loss_or_solver_that_notes_is_refused(part, given, privacy):
    parts = {"solver": given} if part == "solver" else {}
    loss = {"loss": given} if part == "loss" else {}
    with pytest.raises(InvalidParameter) as refusal:
        eq.train(
            eq.models.Softmax(4, 3), DATA, eq.Algorithm(privacy=privacy, **parts), rounds=2, clients_per_round=4,
            engine="loop", progress=False, **loss,
        )  # fmt: skip
    assert refusal.value.parameter == part


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_a_model_that_notes_nothing_trains(engine):
    class Constants(Notes):
        def forward(self, x):
            return self.layer(x) * len(self.rows) + self.tensor + self.held

    algorithm = eq.Algorithm(privacy=PRIVATE)
    assert (
        eq.train(Constants("", 0.0), DATA, algorithm, rounds=2, clients_per_round=4, engine=engine, progress=False).rounds == 2
    )


METHODS = {
    "APFL": {}, "Ditto": {}, "EWC": {}, "Finetuning": {}, "Local": {}, "Mapper": {}, "PFedMe": {}, "Split": {"kept": "head.*"},
    "SymmetrisedKL": {},
}  # fmt: skip
SOLVERS = {"SGD": {"momentum": 0.9}, "Adam": {"state": "kept"}, "AdamW": {}, "MAML": {}, "PerFedAvg": {}}
LIBRARY = [("personal", name) for name in METHODS] + [("solver", name) for name in SOLVERS]


@pytest.mark.parametrize(("kind", "name"), LIBRARY)
def test_the_trial_refuses_no_method_that_is_covered(kind, name, monkeypatch):
    """Those of the library, as if they were the user's own."""
    verdicts = []
    monkeypatch.setattr(tried_releases, "or_none", lambda call: verdicts.append(call()) or verdicts[-1])
    home, options = (eq.personal, METHODS) if kind == "personal" else (eq.solvers, SOLVERS)
    own = type(f"My{name}", (getattr(home, name),), {"sums_models": False})
    train(model=TwoLayers(), privacy=PRIVATE, **{kind: own(**options[name])})
    assert verdicts == [True]


def test_the_trial_shows_a_part_no_example_of_the_users_data():
    seen = []

    class Looks(OwnModels):
        def begin(self, context, params):
            seen.append(context.data)
            return super().begin(context, params)

    train(rounds=0, personal=Looks(), privacy=PRIVATE)
    tried = [data.train for data in seen if data is not DATA]
    assert tried
    assert not any(bool(torch.isin(each.x, DATA.train.x).any()) for each in tried)


def test_a_trial_costs_nothing_without_noise_or_own_parts(monkeypatch):
    def fail(call):
        raise AssertionError("a part was tried")

    monkeypatch.setattr(tried_releases, "or_none", fail)
    train(personal=OwnModels())
    train(privacy=PRIVATE, personal=eq.personal.Ditto())
    train(privacy=SECURE, personal=OwnModels())
    with pytest.raises(AssertionError, match="was tried"):
        train(privacy=PRIVATE, personal=OwnModels())


@dataclass(frozen=True)
class Watches:
    """Notes how many updates it is shown."""

    omniscient: bool
    seen: list
    share: float = 0.6
    seed: int = 0

    def corrupt(self, sent):
        self.seen.append(len(sent.updates))
        return -sent.updates


@pytest.mark.parametrize("engine", ["simulator", "loop"])
def test_an_attack_sees_one_update_at_a_time_unless_it_says_that_it_sees_all(engine):
    for omniscient in (False, True):
        attack = Watches(omniscient, [])
        data = eq.attacks.apply(DATA, attack)
        eq.train(
            eq.models.Softmax(4, 3), data, eq.Algorithm(sampler=eq.sampling.Full()), rounds=1, engine=engine, progress=False
        )
        assert attack.seen == ([len(data.malicious)] if omniscient else [1] * len(data.malicious))


def test_an_observer_that_writes_is_named_and_no_other_is():
    class Reads(Observer):
        def on_state(self, state):
            assert state.params.abs().sum() >= 0

    for wrong in (Writes(), WritesLate()):
        with pytest.raises(ObserverFailed, match=type(wrong).__name__):
            train(observers=[Reads(), wrong])
    assert train(observers=[Reads()]).rounds == 1
