"""Split models: answers by hand, limits, frozen phases, statistics, engines, resume."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.errors import IncompatibleParts, InvalidParameter
from equipoise.personal import FedBABU, FedBN, FedPer, FedRep, LGFedAvg, Split
from equipoise.personal.context import PersonalContext
from equipoise.personal.split import kept_names


class Net(nn.Module):
    def __init__(self, norm=None):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 5), norm or nn.Identity(), nn.Tanh())
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.body(x))


class TwoNumbers(nn.Module):
    """F_k = ½(a − x_k)² + ½(b − y_k)² on the one example of client k."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(1, dtype=torch.float64)), nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        return torch.cat([(self.a - x[:, :1]), (self.b - x[:, 1:])], 1)

    @staticmethod
    def loss(outputs, targets):
        return 0.5 * outputs.square().sum(1)


def clients(dtype=torch.float32, examples=12, count=8):
    gen = torch.Generator().manual_seed(3)
    x = torch.randn(count * examples, 6, generator=gen).to(dtype)
    y = torch.randint(0, 3, (count * examples,), generator=gen)
    owners = [k % count for k in range(count * examples)]
    return eq.data.from_arrays(x, y, owners, split_by="examples", test=0.25)


def seeded(make=Net, **given):
    torch.manual_seed(0)
    return make(**given)


def run(personal, data=None, model=None, *, rounds=4, solver=None, **given):
    solver = solver or eq.solvers.SGD(lr=0.2, batch_size=4)
    given = {"rounds": rounds, "clients_per_round": 4, "progress": False} | given
    algorithm = eq.Algorithm(personal=personal, solver=solver, risk=given.pop("risk", eq.risk.Mean()))
    return eq.train(model or seeded(), data or clients(), algorithm, **given)


def test_shared_and_kept_numbers_by_hand():
    # a is shared and tends to the mean of x_k, b is kept and tends to y_k. x = (0, 1, 5), y = (2, −1, 7).
    points = torch.tensor([[0.0, 2.0], [1.0, -1.0], [5.0, 7.0]])
    data = eq.FederatedData(
        eq.ClientSet.pack([(str(k), p.reshape(1, 2).double(), torch.zeros(1)) for k, p in enumerate(points)])
    )
    solver = eq.solvers.SGD(lr=0.3, batch_size=None, epochs=2)
    algorithm = eq.Algorithm(personal=Split("b"), solver=solver, sampler=eq.sampling.Full(), weights="uniform")
    result = eq.train(TwoNumbers(), data, algorithm, rounds=80, progress=False)
    own = result.personal.params(result.personal.ids)
    torch.testing.assert_close(own[:, 0], torch.full((3,), 2.0, dtype=torch.float64))
    torch.testing.assert_close(own[:, 1], points[:, 1].double())
    assert result.model.b.tolist() == [0.0]  # the server's own never moves


def two_clients(first, second):
    """Clients with (x, y) each, in double precision."""
    rows = [torch.tensor([row], dtype=torch.float64) for row in (first, second)]
    return eq.FederatedData(eq.ClientSet.pack([(str(k), row, torch.zeros(1)) for k, row in enumerate(rows)]))


@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize(
    "part",
    [
        {"privacy": eq.privacy.GaussianMechanism(clip=1.0, noise_multiplier=0.0)},
        {"aggregator": eq.aggregators.NormClip(1.0)},
    ],
    ids=["noise", "clipping"],
)
def test_clipping_sees_shared_numbers_alone(part, engine):
    # x = 8 and y = 6, one step of rate ½ from 0: a moves by 4, clipped to 1, and b, which is kept, by 3. By the norm of both,
    # which is 5, a would move by 4/5.
    solver = eq.solvers.SGD(lr=0.5, batch_size=None, steps=1)
    algorithm = eq.Algorithm(personal=Split("b"), solver=solver, sampler=eq.sampling.Full(), weights="uniform", **part)
    result = eq.train(TwoNumbers(), two_clients((8.0, 6.0), (8.0, 6.0)), algorithm, rounds=1, engine=engine, progress=False)
    assert result.personal.params(["0", "1"]).tolist() == [[1.0, 3.0]] * 2


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_robust_rules_compare_shared_numbers_alone(engine):
    # x = (2, 8) and y = (20, 0): a moves by 1 and 4, b by 10 and 0. The largest norm is the second's, which is left out; with b
    # it would be the first's, and a = 4.
    solver = eq.solvers.SGD(lr=0.5, batch_size=None, steps=1)
    algorithm = eq.Algorithm(
        personal=Split("b"), solver=solver, aggregator=eq.aggregators.KNorm(1), sampler=eq.sampling.Full(), weights="uniform"
    )
    result = eq.train(TwoNumbers(), two_clients((2.0, 20.0), (8.0, 0.0)), algorithm, rounds=1, engine=engine, progress=False)
    assert result.personal.params(["0", "1"]).tolist() == [[1.0, 10.0], [1.0, 0.0]]


class Sum(TwoNumbers):
    """F = ½(a + b − x)² on the one example x."""

    def forward(self, x):
        return self.a + self.b - x


@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize(("epochs", "kept", "shared"), [((1, 1), 4.0, 2.0), ((2, 1), 6.0, 1.0), ((1, 2), 4.0, 3.0)])
def test_fedrep_trains_what_it_keeps_first_by_hand(engine, epochs, kept, shared):
    """One client with x = 8, b kept, full batches, rate ½, from 0: each step halves what a + b lacks of x.

    One epoch each: b = x/2 = 4, then a = x/4 = 2 (the other order: a = 4, b = 2; together: a = b = 4). Two of b: 3x/4 = 6, then
    a = x/8 = 1. One of b and two of a: 4, then 2 and 1 more.
    """
    data = eq.FederatedData(eq.ClientSet.pack([("0", torch.full((1, 1), 8.0, dtype=torch.float64), torch.zeros(1))]))
    solver = eq.solvers.SGD(lr=0.5, batch_size=None)
    algorithm = eq.Algorithm(personal=FedRep("b", *epochs), solver=solver, sampler=eq.sampling.Full())
    result = eq.train(Sum(), data, algorithm, rounds=1, engine=engine, progress=False)
    assert (result.model.a.tolist(), result.model.b.tolist()) == ([shared], [0.0])
    assert result.personal.params(["0"]).tolist() == [[shared, kept]]


@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize("method", [FedPer("b"), LGFedAvg("b")], ids=["FedPer", "LG-FedAvg"])
def test_all_names_are_trained_together_by_hand(engine, method):
    """x = 8 and 4, b kept, one full-batch step of rate ½ from 0: a and b both move by x/2, 4 and 2, and a to their mean 3.

    In the second round a + b is 3 + 4 = 7 of 8 and 3 + 2 = 5 of 4: both move by ½ and −½. So a stays, and b is 4½ and 1½.
    """
    rows = [(str(k), torch.full((1, 1), x, dtype=torch.float64), torch.zeros(1)) for k, x in enumerate((8.0, 4.0))]
    algorithm = eq.Algorithm(
        personal=method, solver=eq.solvers.SGD(lr=0.5, batch_size=None), sampler=eq.sampling.Full(), weights="uniform"
    )
    data, options = eq.FederatedData(eq.ClientSet.pack(rows)), {"engine": engine, "progress": False}
    for rounds, expected in ((1, [[3.0, 4.0], [3.0, 2.0]]), (2, [[3.0, 4.5], [3.0, 1.5]])):
        result = eq.train(Sum(), data, algorithm, rounds=rounds, **options)
        assert result.personal.params(["0", "1"]).tolist() == expected


def test_numbers_of_epochs_are_those_of_the_authors():
    assert FedRep("head").phases == (("kept", 10), ("shared", 1))
    assert (FedBABU("head").phases, FedBABU("head").finetuning) == ((("shared", None),), 5)


@dataclass(frozen=True)
class OwnSGD(eq.solvers.SGD):
    def step(self, weights, gradient, memory, *, anchor, lr):
        weights.sub_(lr * (gradient + self.weight_decay * weights))


@dataclass(frozen=True)
class ProxByMemory(eq.solvers.SGD):
    def begin(self, weights):
        return (torch.zeros_like(weights),)

    def step(self, weights, gradient, memory, *, anchor, lr):
        memory[0].mul_(0.9).add_(0.1 * gradient.square())
        weights.sub_(lr * (gradient + 0.5 * memory[0].sqrt() * (weights - anchor)))


class OwnAdam(eq.solvers.Adam):
    def step(self, weights, gradient, memory, *, anchor, lr, number):
        weights.sub_(lr * gradient / number)


def test_a_phase_freezes_parameters_beside_a_step_of_ones_own():
    data, net = clients(torch.float64), seeded().double()
    plain, own = (run(FedRep("head", 2, 1), data, net, solver=kind(lr=0.2, batch_size=4)) for kind in (eq.solvers.SGD, OwnSGD))
    ids = plain.personal.ids
    torch.testing.assert_close(own.personal.params(ids), plain.personal.params(ids), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(own.params, plain.params, rtol=1e-9, atol=1e-9)
    solver = ProxByMemory(lr=0.2, batch_size=4)
    loop, fast = (run(FedRep("head", 2, 1), data, net, solver=solver, engine=engine) for engine in ("loop", "simulator"))
    torch.testing.assert_close(loop.personal.params(ids), fast.personal.params(ids), rtol=1e-9, atol=1e-9)
    assert not torch.equal(loop.params, plain.params)


@pytest.mark.parametrize(
    ("solver", "reason", "cure"),
    [
        # five steps of rate 0.1 take 1 − 0.99^5 of the largest weight, 2
        (OwnSGD(weight_decay=0.1), "moves them without a gradient, by up to 0.098 in 5 steps", "leave out weight decay"),
        (OwnSGD(clip_norm=1.0), "clips the norm of the whole gradient", "Leave this option out"),
        (OwnSGD(momentum=0.9, state="kept"), "keeps a memory between rounds", "Leave this option out"),
        (OwnAdam(), "is told the number of its steps", "without `number`"),
        (eq.solvers.Adam(), "may move them without a gradient", "Use solvers.SGD"),
        (eq.solvers.SGD(clip_norm=1.0), "do not know clip_norm of SGD", "Leave out clip_norm"),
    ],
    ids=["decay", "clipped", "kept", "numbered", "adam", "option of SGD"],
)
def test_a_step_that_would_move_frozen_parameters_is_refused(solver, reason, cure):
    with pytest.raises(IncompatibleParts, match=reason) as caught:
        eq.Algorithm(personal=FedRep("head", 2, 1), solver=solver)
    assert cure in str(caught.value)


@pytest.mark.parametrize("method", [eq.personal.APFL(), eq.personal.Mapper(), FedRep("head", 2, 1)])
def test_options_of_sgd_that_a_method_does_not_know_are_named(method):
    solver = eq.solvers.SGD(clip_norm=1.0, momentum=0.9, state="kept")
    with pytest.raises(IncompatibleParts, match="clip_norm and state of SGD") as caught:
        eq.Algorithm(personal=method, solver=solver)
    assert "Leave out clip_norm and state" in str(caught.value)
    assert "Use solvers.SGD" not in str(caught.value)


def test_names_are_found_by_pattern_module_and_type():
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)))
    assert kept_names(net, ("2.*",)) == {"2.0.weight", "2.0.bias", "2.1.weight", "2.1.bias"}
    assert kept_names(net, ("2",)) == kept_names(net, ("2.*",))
    statistics = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert kept_names(net, ("normalisation",)) == {"1.weight", "1.bias", "2.1.weight", "2.1.bias"} | statistics
    assert kept_names(net, ("statistics",)) == statistics
    with pytest.raises(InvalidParameter, match=r"kept must match names(.|\n)*They are: 0.bias"):
        kept_names(net, ("nothing",))


def test_a_tied_weight_is_kept_by_any_of_its_names():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Linear(5, 4, bias=False), nn.Linear(5, 4)
            self.head.weight = self.embedding.weight

    assert kept_names(Tied(), ("head",)) == {"embedding.weight", "head.bias"}
    assert kept_names(Tied(), ("embedding",)) == {"embedding.weight"}
    one = nn.LayerNorm(3)
    twice = nn.ModuleDict({"body": one, "head": one})
    assert kept_names(twice, ("head",)) == kept_names(twice, ("normalisation",)) == {"body.weight", "body.bias"}


def test_a_model_without_normalisation_is_told_so(ragged):
    plain, layers = nn.Linear(ragged.features, ragged.classes), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    algorithm = eq.Algorithm(personal=eq.personal.FedBN())
    with pytest.raises(InvalidParameter, match=r"model must have a normalisation layer.*kept='normalisation', but is 'Linear'"):
        eq.train(plain, ragged, algorithm, rounds=1, clients_per_round=2, progress=False)
    with pytest.raises(InvalidParameter, match="model must have a normalisation layer with running statistics"):
        kept_names(layers, ("statistics",))


def test_with_nothing_of_its_own_to_keep_it_is_fedavg():
    # A pattern must match something, so a parameter without influence is kept: the rest is FedAvg up to rounding.
    class Idle(Net):
        def __init__(self):
            super().__init__()
            self.idle = nn.Parameter(torch.zeros(1))

    split, plain = run(Split("idle"), model=seeded(Idle)), run(None, model=seeded(Idle))
    for one, two in zip(split.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_with_nothing_kept_it_is_fedavg_bit_for_bit(engine):
    split, plain = run(Split(()), engine=engine), run(None, engine=engine)
    assert torch.equal(split.params, plain.params)
    assert torch.equal(split.personal.params(split.personal.ids[:2]), plain.params.expand(2, -1))


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_with_everything_kept_it_is_local_bit_for_bit(engine):
    # Local draws batches of its own, so that full batches are compared.
    solver = eq.solvers.SGD(lr=0.2, batch_size=None, epochs=3)
    split, local = (run(method, solver=solver, engine=engine) for method in (Split("*"), eq.personal.Local()))
    drawn = ~local.clients.where("train").personal_loss.isnan()
    ids = [name for name, there in zip(local.clients.where("train").client, drawn.tolist(), strict=True) if there]
    first = flat(seeded())
    for one, two in zip(split.personal.params(ids), local.personal.params(ids), strict=True):
        assert torch.equal(one, two) or torch.equal(one, first)  # one that was never drawn is served w^0 here, w^T there


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_with_everything_kept_it_is_local_but_for_the_batches_that_are_drawn(engine, monkeypatch):
    # A client of Local works twice in a round, on the shared model and on its own, and each work has batches of its own. One
    # of Split works once, on the batches of FedAvg. Given the same batches, their models are the same bit for bit.
    def models(method):
        return (result := run(method, engine=engine, clients_per_round=8)).personal.params(result.personal.ids)

    split, apart = models(Split("*")), models(eq.personal.Local())
    assert not torch.equal(split, apart)
    monkeypatch.setattr(PersonalContext, "own_stream", lambda self, cohort: cohort.having(effort=None, rows=None))
    assert torch.equal(split, models(eq.personal.Local()))


@pytest.mark.parametrize("privacy", [None, eq.privacy.GaussianMechanism(clip=0.5, noise_multiplier=1.0)], ids=["open", "noise"])
def test_a_client_that_was_never_drawn_has_the_head_that_all_begin_with(privacy):
    # FedRep's code lets heads of unvisited clients follow the averaged head; and noise falls on every number of the server's.
    model, data = seeded(), clients()
    algorithm = eq.Algorithm(solver=eq.solvers.SGD(lr=0.2, batch_size=4), personal=FedRep("head", 2, 1), privacy=privacy)
    result = eq.train(model, data, algorithm, rounds=1, clients_per_round=2, progress=False)
    heads = [result.personal.model(name).head.weight for name in result.personal.ids]
    unmoved = [torch.equal(head, model.head.weight) for head in heads]
    assert 4 <= sum(unmoved) < len(heads)


def flat(model):
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def test_with_everything_kept_nothing_is_shared():
    result = run(Split("*"))
    for moved, first in zip(result.model.parameters(), seeded().parameters(), strict=True):
        assert torch.equal(moved, first)
    own = result.personal.params(result.personal.ids)
    assert len({tuple(row.tolist()) for row in own}) > 1


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_phases_freeze_the_rest(engine):
    decayed = eq.solvers.SGD(lr=0.2, batch_size=4, weight_decay=0.1, prox=0.1, momentum=0.5)
    data, start = clients(), seeded()
    only_kept = run(Split("head", (("kept", 2),)), data, solver=decayed, engine=engine)
    for moved, first in zip(only_kept.model.parameters(), start.parameters(), strict=True):
        assert torch.equal(moved, first)
    babu = run(FedBABU("head", finetuning=0), data, solver=decayed, engine=engine)
    own = babu.personal.model(babu.personal.ids[0])
    assert torch.equal(own.head.weight, start.head.weight)
    assert not torch.equal(own.body[0].weight, start.body[0].weight)
    tuned = run(FedBABU("head", finetuning=1), data, solver=decayed, engine=engine)
    assert not torch.equal(tuned.personal.model(tuned.personal.ids[0]).head.weight, start.head.weight)


METHODS = [FedPer("head"), FedRep("head", 2, 1), FedBABU("head", 1), LGFedAvg("body"), Split(("head.bias", "body.0.weight"))]


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_loop_and_simulator_agree_and_runs_resume(method, tmp_path):
    data, net = clients(torch.float64), seeded().double()
    given = {"risk": eq.risk.Superquantile(0.5), "rounds": 4}
    loop, fast = (run(method, data, net, engine=engine, **given) for engine in ("loop", "simulator"))
    file = tmp_path / "run.safetensors"
    run(method, data, net, checkpoint=file, **(given | {"rounds": 2}))
    again = run(method, data, net, checkpoint=file, **given)
    ids = loop.personal.ids
    torch.testing.assert_close(loop.personal.params(ids), fast.personal.params(ids), rtol=1e-9, atol=1e-9)
    assert torch.equal(again.personal.params(ids), fast.personal.params(ids))
    assert [r.loss for r in loop.history.rounds] == pytest.approx([r.loss for r in fast.history.rounds])


def test_the_risk_sees_the_losses_of_clients_own_models():
    data, seen = clients(), []

    class Spy:
        def __call__(self, losses, base_weights, *, clients=None, state=None):
            seen.append(losses.clone())
            return eq.risk.RiskValue((losses * base_weights).sum(), base_weights, state)

    everyone = {"sampler": eq.sampling.Full(), "solver": eq.solvers.SGD(lr=0.5, batch_size=4)}
    result = eq.train(
        seeded(), data, eq.Algorithm(personal=Split("*"), risk=Spy(), **everyone), rounds=3, engine="loop", progress=False
    )
    # Everything is kept: the shared model never moves, but the losses that the risk sees fall.
    assert float(seen[-1].mean()) < float(seen[0].mean()) - 1e-3
    assert result.history.rounds[-1].loss < result.history.rounds[0].loss


def test_fedbn_keeps_scale_shift_and_statistics():
    data, net = clients(examples=16), seeded(norm=nn.BatchNorm1d(5))  # 12 to train on, in four batches
    result = run(FedBN(), data, net, solver=eq.solvers.SGD(lr=0.1, batch_size=3), engine="loop", clients_per_round=8)
    first, second = (result.personal.model(result.personal.ids[k]) for k in (0, 1))
    assert torch.equal(first.head.weight, second.head.weight)
    assert not torch.equal(first.body[1].weight, second.body[1].weight)
    assert not torch.equal(first.body[1].running_mean, second.body[1].running_mean)


def test_fedbn_agrees_in_loop_and_simulator_and_resumes(tmp_path):
    data, net = clients(torch.float64, examples=16), seeded(norm=nn.BatchNorm1d(5)).double()
    given = {"solver": eq.solvers.SGD(lr=0.1, batch_size=3)}
    loop, fast = (run(FedBN(), data, net, engine=engine, **given) for engine in ("loop", "simulator"))
    file, ids = tmp_path / "run.safetensors", loop.personal.ids
    run(FedBN(), data, net, rounds=2, checkpoint=file, **given)
    again = run(FedBN(), data, net, checkpoint=file, **given)
    torch.testing.assert_close(loop.params, fast.params, rtol=1e-9, atol=1e-9)
    assert torch.equal(again.params, fast.params)
    for name in ids:  # scale and shift, and the running mean and variance, which are no parameters
        one, two, three = (result.personal.model(name).state_dict() for result in (loop, fast, again))
        for key, value in one.items():
            torch.testing.assert_close(value, two[key], rtol=1e-9, atol=1e-9)
            assert torch.equal(two[key], three[key]), key
    moved = [not torch.equal(loop.personal.model(name).body[1].running_mean, torch.zeros(5).double()) for name in ids]
    assert sum(moved) >= 4  # those that were drawn have statistics of their own


def test_statistics_that_clients_keep_agree_in_loop_and_simulator_and_resume(tmp_path):
    data, net = clients(torch.float64, examples=16), seeded(norm=nn.BatchNorm1d(5)).double()
    method, given = Split(("statistics",)), {"solver": eq.solvers.SGD(lr=0.1, batch_size=3)}
    loop, fast = (run(method, data, net, engine=engine, **given) for engine in ("loop", "simulator"))
    file, ids = tmp_path / "run.safetensors", loop.personal.ids
    run(method, data, net, rounds=2, checkpoint=file, **given)
    again = run(method, data, net, checkpoint=file, **given)
    torch.testing.assert_close(loop.params, fast.params, rtol=1e-9, atol=1e-9)
    assert torch.equal(again.params, fast.params)
    first, second = (loop.personal.model(name).body[1] for name in ids[:2])
    assert torch.equal(first.weight, second.weight)  # scale and shift are shared
    for name in ids:
        one, two, three = (result.personal.model(name).state_dict() for result in (loop, fast, again))
        for key, value in one.items():
            torch.testing.assert_close(value, two[key], rtol=1e-9, atol=1e-9)
            assert torch.equal(two[key], three[key]), key
    means = [loop.personal.model(name).body[1].running_mean for name in ids]
    assert sum(bool((mean != 0).any()) for mean in means) >= 4  # of those that were drawn
    assert len({tuple(mean.tolist()) for mean in means}) >= 4  # each its own


NO_CLIP = {"privacy": eq.privacy.GaussianMechanism(clip=1e6, noise_multiplier=0.0)}


@pytest.mark.parametrize("parts", [NO_CLIP, {"aggregator": eq.aggregators.TrimmedMean(0.0)}], ids=["noise", "robust"])
@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_statistics_that_never_leave_clients_need_no_protection(engine, parts):
    # Without noise and clipping, and with nothing trimmed, runs are the plain ones.
    data, net = clients(torch.float64, examples=16), seeded(norm=nn.BatchNorm1d(5)).double()
    solver, runs = eq.solvers.SGD(lr=0.1, batch_size=3), []
    for more in ({}, parts):
        algorithm = eq.Algorithm(personal=FedBN(), solver=solver, sampler=eq.sampling.Full(), weights="uniform", **more)
        runs.append(eq.train(net, data, algorithm, rounds=3, engine=engine, progress=False))
    plain, protected = runs
    torch.testing.assert_close(protected.params, plain.params, rtol=1e-9, atol=1e-12)
    ids = plain.personal.ids
    torch.testing.assert_close(protected.personal.params(ids), plain.personal.params(ids), rtol=1e-9, atol=1e-12)
    for name in ids:
        one, two = (result.personal.model(name).body[1] for result in runs)
        torch.testing.assert_close(one.running_mean, two.running_mean)
        assert bool((two.running_mean != 0).any())
    assert torch.equal(protected.model.body[1].running_mean, torch.zeros(5).double())  # the server has none


SHARED_PARTS = [
    ({"privacy": NO_CLIP["privacy"]}, "statistics-without-noise"),
    ({"privacy": eq.privacy.DifferentialPrivacy(epsilon=5, delta=1e-3, clip=1.0)}, "statistics-without-noise"),
    ({"aggregator": eq.aggregators.Median()}, "statistics-and-robust-rules"),
    ({"aggregator": eq.aggregators.NNM(eq.aggregators.Median())}, "statistics-and-robust-rules"),
]


@pytest.mark.parametrize(("parts", "reason"), SHARED_PARTS, ids=["noise", "privacy", "median", "nnm"])
@pytest.mark.parametrize("method", [FedPer("head"), FedRep("head"), LGFedAvg("body.0"), Split(()), Split("body.1.weight")])
def test_noise_and_robust_rules_refuse_statistics_that_are_shared(method, parts, reason):
    data, net, given = clients(examples=16), seeded(norm=nn.BatchNorm1d(5)), {"rounds": 1, "clients_per_round": 4}
    with pytest.raises(IncompatibleParts) as refusal:
        eq.train(net, data, eq.Algorithm(personal=method, **parts), progress=False, **given)
    assert refusal.value.rule == reason
    kept = replace(method, kept=(*method.kept, "statistics"))  # the cure works
    solver = eq.solvers.SGD(batch_size=3)
    eq.train(net, data, eq.Algorithm(personal=kept, solver=solver, **parts), progress=False, **given)


@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize("method", [FedPer("1"), FedRep("1", 1, 1), LGFedAvg("1"), FedBABU("1", 0), FedBABU("1", 1)], ids=repr)
def test_statistics_that_are_shared_pool_as_those_of_mixed_data_by_hand(method, engine):
    """With momentum 1 running statistics are those of the last batch, here of all examples, whatever is trained.

    The inputs −1, 1 of one client have mean 0 and variance 2 (over n − 1), and 1, 3 of the other 2 and 2. Pooled, with equal
    weights: mean 1, variance (2 + 0²)/2 + (2 + 2²)/2 − 1² = 3. With weights ¾ and ¼ (six examples against two: −1, 1 three
    times, mean 0 and variance 6/5): mean ½, variance ¾·6/5 + ¼·(2 + 2²) − ¼ = 43/20.
    """
    net = nn.Sequential(nn.BatchNorm1d(1, momentum=1.0), nn.Linear(1, 2)).double()
    for first, weights, mean, variance in (([-1.0, 1.0], "uniform", 1.0, 3.0), ([-1.0, 1.0] * 3, "sizes", 0.5, 43 / 20)):
        x = [torch.tensor(each, dtype=torch.float64).unsqueeze(1) for each in (first, [1.0, 3.0])]
        triples = [(name, each, torch.arange(len(each)) % 2) for name, each in zip("ab", x, strict=True)]
        data, solver = eq.FederatedData(eq.ClientSet.pack(triples)), eq.solvers.SGD(lr=0.1, batch_size=None)
        weights = {} if weights == "sizes" else {"weights": weights}
        algorithm = eq.Algorithm(personal=method, solver=solver, sampler=eq.sampling.Full(), **weights)
        result = eq.train(net, data, algorithm, rounds=2, engine=engine, progress=False)
        assert result.carried.tolist() == pytest.approx([mean, variance])
        assert (float(result.model[0].running_mean), float(result.model[0].running_var)) == pytest.approx((mean, variance))
        assert result.model[0].num_batches_tracked.item() == 0
        own = [(float((one := result.personal.model(name)[0]).running_mean), float(one.running_var)) for name in "ab"]
        if method.finetuning:  # a client finetunes from the shared statistics, which its own batch replaces at once
            assert own == [pytest.approx((0.0, x[0].var().item())), pytest.approx((2.0, 2.0))]
        else:
            assert own == [pytest.approx((mean, variance))] * 2


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_every_phase_moves_statistics_and_finetuning_begins_with_the_average_by_hand(engine):
    """One full batch a phase, momentum ½, and inputs of mean 4 and 8, normalised before anything is trained.

    From 0 two phases give 4·¾ = 3 and 8·¾ = 6, on average 4½. Then one epoch of finetuning: (4½ + 4)/2 and (4½ + 8)/2.
    """
    x = torch.tensor([[3.0], [5.0], [7.0], [9.0]], dtype=torch.float64)
    triples = [(name, x[2 * k : 2 * k + 2], torch.tensor([0, 1])) for k, name in enumerate("ab")]
    data = eq.FederatedData(eq.ClientSet.pack(triples))
    net = nn.Sequential(nn.BatchNorm1d(1, momentum=0.5), nn.Linear(1, 2)).double()
    method = Split("1", (("kept", 1), ("shared", 1)), finetuning=1)
    solver = eq.solvers.SGD(lr=0.1, batch_size=None)
    result = run(method, data, net, rounds=1, solver=solver, clients_per_round=2, engine=engine)
    assert float(result.model[0].running_mean) == pytest.approx(4.5)
    means = [float(result.personal.model(name)[0].running_mean) for name in "ab"]
    assert means == pytest.approx([4.25, 6.25])


class TwoNorms(nn.Module):
    """A head with a BatchNorm of its own."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh())
        self.head = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3))

    def forward(self, x):
        return self.head(self.body(x))


def ragged(sizes=(1, 4, 16, 9, 7, 12, 3, 8)):
    """Clients of these sizes, of which the first has one example, which no BatchNorm is trained on."""
    gen = torch.Generator().manual_seed(5)
    rows = [(f"c{k}", torch.randn(n, 6, generator=gen).double() + k, torch.arange(n) % 3) for k, n in enumerate(sizes)]
    return eq.FederatedData(eq.ClientSet.pack(rows))


SHARING = [
    FedPer("head"), FedRep("head", 2, 1), FedBABU("head", 1), LGFedAvg("body.0"), Split(()), Split(("head.1", "body.1")),
    Split(("head.0.weight", "head.0.bias")),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")  # about clients of one example
@pytest.mark.parametrize("method", SHARING, ids=repr)
def test_shared_statistics_agree_in_loop_and_simulator_and_resume(method, tmp_path):
    data, net = ragged(), seeded(TwoNorms).double()
    given = {"risk": eq.risk.Superquantile(0.6), "solver": eq.solvers.SGD(lr=0.1, batch_size=4, weight_decay=0.1, prox=0.1)}
    loop, fast = (run(method, data, net, engine=engine, **given) for engine in ("loop", "simulator"))
    file, ids = tmp_path / "run.safetensors", loop.personal.ids
    run(method, data, net, rounds=2, checkpoint=file, **given)
    again = run(method, data, net, checkpoint=file, **given)
    torch.testing.assert_close(loop.params, fast.params, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(loop.carried, fast.carried, rtol=1e-9, atol=1e-9)
    assert torch.equal(again.params, fast.params)
    assert torch.equal(again.carried, fast.carried)
    torch.testing.assert_close(loop.personal.params(ids), fast.personal.params(ids), rtol=1e-9, atol=1e-9)
    kept = kept_names(net, method.kept)
    for name in ids:
        one, two, three = (result.personal.model(name).state_dict() for result in (loop, fast, again))
        for key, value in one.items():
            torch.testing.assert_close(value, two[key], rtol=1e-9, atol=1e-9)
            assert torch.equal(two[key], three[key]), key
            if "running" in key and key not in kept and not method.finetuning:
                assert torch.equal(value, loop.model.state_dict()[key]), key
    for key, value in loop.model.state_dict().items():  # what clients keep stays as it began in the shared model
        if "running" in key:
            assert torch.equal(value, net.state_dict()[key]) == (key in kept), key


@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_with_nothing_kept_statistics_are_those_of_fedavg_bit_for_bit(engine):
    data, net, given = ragged(), seeded(TwoNorms).double(), {"solver": eq.solvers.SGD(lr=0.1, batch_size=4), "engine": engine}
    split, plain = (run(method, data, net, **given) for method in (Split(()), None))
    assert torch.equal(split.params, plain.params)
    assert torch.equal(split.carried, plain.carried)
    assert torch.equal(split.personal.model("c0").body[1].running_var, plain.model.body[1].running_var)


@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
@pytest.mark.parametrize("parts", [{}, {"aggregator": eq.aggregators.NormClip(0.05)}], ids=["mean", "clipped"])
@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_beside_an_idle_parameter_statistics_are_those_of_fedavg(engine, parts):
    class Idle(TwoNorms):
        def __init__(self):
            super().__init__()
            self.idle = nn.Parameter(torch.zeros(1))

    data, net, solver = ragged(), seeded(Idle).double(), eq.solvers.SGD(lr=0.1, batch_size=4, epochs=2)
    given = {"rounds": 3, "clients_per_round": 4, "engine": engine, "progress": False}
    risk = eq.risk.Superquantile(0.6)
    split, plain = (
        eq.train(net, data, eq.Algorithm(personal=method, solver=solver, risk=risk, **parts), **given)
        for method in (Split("idle"), None)
    )
    torch.testing.assert_close(split.params, plain.params, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(split.carried, plain.carried, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
def test_secure_sums_pool_statistics_of_split_models():
    data, net, given = ragged(), seeded(TwoNorms).double(), {"rounds": 2, "progress": False}
    parts = {"personal": FedPer("head"), "solver": eq.solvers.SGD(lr=0.1, batch_size=4), "sampler": eq.sampling.Full()}
    secure, plain = (
        eq.train(net, data, eq.Algorithm(privacy=privacy, **parts), **given)
        for privacy in (eq.privacy.SecureAggregation(), None)
    )
    torch.testing.assert_close(secure.params, plain.params, atol=1e-5, rtol=0)
    torch.testing.assert_close(secure.carried, plain.carried, atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
def test_an_update_that_is_left_out_takes_its_statistics_along():
    data, net = clients(examples=16), seeded(norm=nn.BatchNorm1d(5))
    bad = eq.attacks.apply(data, eq.attacks.ModelReplacement(share=0.25, factor=1e30))
    given = {"solver": eq.solvers.SGD(lr=0.1, batch_size=4), "engine": "loop", "rounds": 1}
    attacked = run(FedPer("head"), bad, net, clients_per_round=8, **given)
    lost = attacked.history.rounds[0].rejected
    rest = [k for k, client in enumerate(data.train.ids) if client not in lost]
    alone = run(FedPer("head"), eq.FederatedData(data.train.take(rest)), net, clients_per_round=len(rest), **given)
    assert len(lost) == 2
    torch.testing.assert_close(attacked.carried, alone.carried)


def test_a_mean_without_its_variance_is_refused():
    data, net = clients(examples=16), seeded(norm=nn.BatchNorm1d(5))
    with pytest.raises(IncompatibleParts, match=r"keeps one of a layer's running mean and variance"):
        run(FedPer("*.running_mean"), data, net)


@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize("method", [Split(("statistics",)), FedBN()], ids=repr)
def test_kept_statistics_go_on_from_round_to_round_by_hand(method, engine):
    # The inputs 0, 2 of one client and 3, 5 of the other are normalised first: their means are 1 and 4, whatever is trained.
    # From 0, with the momentum 0.1 of BatchNorm and one full batch in a round, the running mean is 0.1, then 0.19 of them.
    x = torch.tensor([[0.0], [2.0], [3.0], [5.0]], dtype=torch.float64)
    triples = [(name, x[2 * k : 2 * k + 2], torch.tensor([0, 1])) for k, name in enumerate("ab")]
    data, net = eq.FederatedData(eq.ClientSet.pack(triples)), nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2)).double()
    solver = eq.solvers.SGD(lr=0.1, batch_size=None)
    result = run(method, data, net, rounds=2, solver=solver, clients_per_round=2, engine=engine)
    means = [float(result.personal.model(name)[0].running_mean) for name in "ab"]
    assert means == pytest.approx([0.19, 0.76])


def test_what_makes_no_sense_is_refused():
    for make in (
        lambda: Split(""),
        lambda: Split(3),
        lambda: Split("head", ()),
        lambda: Split("head", (("tail", 1),)),
        lambda: Split("head", (("kept", 0),)),
        lambda: Split("head", finetuning=-1),
    ):
        with pytest.raises(InvalidParameter):
            make()
    with pytest.raises(IncompatibleParts, match="straggler"):
        eq.Algorithm(personal=Split("head"), solver=eq.solvers.SGD(epochs=3, straggler_share=0.5))
    with pytest.raises(InvalidParameter, match=r"kept must match"):
        run(Split("tail.*"))


def test_attacked_updates_of_split_models_meet_a_robust_aggregator():
    data = eq.attacks.apply(clients(), eq.attacks.ModelReplacement(share=0.25, factor=1e4))
    algorithm = eq.Algorithm(personal=Split("head"), aggregator=eq.aggregators.Median(), solver=eq.solvers.SGD(lr=0.1))
    result = eq.train(seeded(), data, algorithm, rounds=3, clients_per_round=8, progress=False)
    assert all(bool(p.abs().max() < 10) for p in result.model.parameters())


def test_layers_that_nobody_trains_in_the_shared_model_are_no_divergence():
    """Loss ½w², w = 100 at the start: 5000 in the shared model for ever, and little in models that clients keep."""
    data = clients(count=2)
    model = nn.Linear(6, 3)

    def half_square(outputs, targets):
        return 0.5 * (outputs[:, 0] ** 2)

    with torch.no_grad():
        model.weight.zero_()
        model.bias.fill_(100.0)
    algorithm = eq.Algorithm(solver=eq.solvers.SGD(lr=0.5, batch_size=None, steps=8), personal=Split(kept="*"))
    result = eq.train(model, data, algorithm, rounds=2, clients_per_round=2, loss=half_square, progress=False)
    trained = result.clients.where("train")
    assert trained.loss.min() > 4000
    assert trained.served_loss.max() < 100  # a notice would be an error in these tests
