"""Each check catches a part that breaks the law: one deliberately broken part per law."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch

import equipoise.attacks.malicious as attack_module
from equipoise import engines, personal, privacy, risk
from equipoise.aggregators import WeightedMean
from equipoise.errors import InvalidParameter
from equipoise.personal.personal_run import PersonalRun
from equipoise.privacy.private_sums import PrivateSums
from equipoise.privacy.protected import Protected
from equipoise.risk.quantile_sources import tail_quantile
from equipoise.testing import (
    LawBroken,
    check_attack,
    check_clip_rule,
    check_engine,
    check_personalisation,
    check_protection,
    check_quantile_source,
)
from equipoise.types import Job, LocalWork
from equipoise.types.round_contracts import Fold

# ------------------------------------------------------------------------------------------------------------ quantile sources


@dataclass(frozen=True)
class OwnQuantile:
    """The exact quantile, of which each piece can be wrong."""

    change: Callable = lambda quantile, losses, alpha: quantile
    reads_losses: object = True

    def __call__(self, losses, base_weights, tail):
        return self.change(tail_quantile(losses, base_weights, tail), losses, base_weights)


class WronglyExact(OwnQuantile):
    exact = True


def subtract_in_place(quantile, losses, alpha):
    losses -= 1e-3
    return quantile


BROKEN_QUANTILES = [
    (OwnQuantile(lambda q, losses, alpha: q * math.nan), "finite_quantile"),
    (OwnQuantile(lambda q, losses, alpha: q.reshape(1)), "one_quantile"),
    (OwnQuantile(lambda q, losses, alpha: losses.max() + 0.01), "between"),
    (OwnQuantile(lambda q, losses, alpha: losses.min() - 0.01), "between"),
    (OwnQuantile(lambda q, losses, alpha: losses[0]), "any_order"),
    (OwnQuantile(subtract_in_place), "writes"),
    (OwnQuantile(lambda q, losses, alpha: q + 0 * alpha.fill_(1).sum()), "writes"),
    (OwnQuantile(reads_losses="yes"), "reads_losses"),
    (WronglyExact(lambda q, losses, alpha: losses.max()), "exact"),
]


@pytest.mark.parametrize(("broken", "law"), BROKEN_QUANTILES, ids=[law for _, law in BROKEN_QUANTILES])
def test_check_quantile_source_catches(broken, law):
    with pytest.raises(LawBroken) as caught:
        check_quantile_source(broken)
    assert caught.value.law == law


def test_a_quantile_source_of_ones_own_passes():
    check_quantile_source(OwnQuantile())


# ----------------------------------------------------------------------------------------------------------------- clip rules


@dataclass(frozen=True)
class OwnClip:
    """A clip bound that moves by at most a factor of 2 in a round and stays in [1e-9, 1e9], of which pieces can be wrong."""

    step: Callable = lambda bound, share: bound * 2.0 ** (0.5 - min(max(share, 0.0), 1.0))
    ratio: float = 0.05

    def next_bound(self, bound, share):
        return min(max(self.step(bound, share), 1e-9), 1e9)


@dataclass(frozen=True)
class UnlimitedClip(OwnClip):
    def next_bound(self, bound, share):
        return self.step(bound, share)


calls = itertools.count()
BROKEN_CLIP_RULES = [
    (UnlimitedClip(lambda bound, share: bound - 0.1 * (share - 0.5)), "bound"),
    (UnlimitedClip(lambda bound, share: bound * math.exp(-0.2 * (share - 0.5))), "bound"),  # raises
    (UnlimitedClip(lambda bound, share: bound * (1e-3 if share >= 1 else 1.0)), "bound"),  # vanishes in time
    (UnlimitedClip(lambda bound, share: math.inf), "bound"),
    (OwnClip(lambda bound, share: bound * 2.0 ** (min(max(share, 0.0), 1.0) - 0.5)), "falling"),
    (OwnClip(lambda bound, share: 1.0 + 1.0 / (1 + next(calls))), "bound_alone"),
    (OwnClip(ratio=0.0), "ratio"),
]


@pytest.mark.parametrize(("broken", "law"), BROKEN_CLIP_RULES, ids=[law for _, law in BROKEN_CLIP_RULES])
def test_check_clip_rule_catches(broken, law):
    with pytest.raises(LawBroken) as caught:
        check_clip_rule(broken)
    assert caught.value.law == law


def test_a_clip_rule_of_ones_own_passes():
    check_clip_rule(OwnClip())


# -------------------------------------------------------------------------------------------------------------------- attacks


@dataclass(frozen=True)
class OwnAttack:
    """An attack on updates that does nothing wrong by itself."""

    share: float = 0.4
    seed: int = 0
    change: Callable = lambda sent: -sent.updates

    def corrupt(self, sent):
        return self.change(sent)


@dataclass(frozen=True)
class OwnPoison:
    """An attack on data that shifts the labels of the chosen clients, or what `change` makes of them."""

    share: float = 0.4
    seed: int = 0
    change: Callable = lambda clients, chosen: shift_labels(clients, chosen)

    def poison(self, clients, chosen, classes):
        return self.change(clients, chosen)


def shift_labels(clients, chosen):
    y = clients.y.clone()
    for name in chosen:
        rows = clients.rows(clients.ids.index(name))
        y[rows] = (y[rows] + 1) % 3
    return replace(clients, y=y)


def write_in_place(clients, chosen):
    clients.y[clients.rows(clients.ids.index(chosen[0]))] = 0
    clients.y[clients.rows(clients.ids.index(chosen[0]))] = 1
    return clients


def shift_at_random(clients, chosen):
    moved = shift_labels(clients, chosen)
    first = clients.rows(clients.ids.index(chosen[-1]))
    x = moved.x.clone()
    x[first] += next(calls)
    return replace(moved, x=x)


def drop_examples(clients, chosen):
    return type(clients).pack(
        (name, *(values[:1] if name in chosen else values for values in clients.client(name))) for name in clients.ids
    )


@dataclass(frozen=True)
class DeafToSeed(OwnAttack):
    def __post_init__(self):
        object.__setattr__(self, "seed", 0)


@dataclass(frozen=True)
class NeverIdle(OwnAttack):
    def __post_init__(self):
        object.__setattr__(self, "share", max(self.share, 0.2))


def mean_of_all(sent):
    return sent.updates.mean(0, keepdim=True).expand_as(sent.updates)


BROKEN_ATTACKS = [
    (OwnAttack(share=1.5), "share"),
    (OwnAttack(seed=0.5), "seed"),
    (DeafToSeed(), "other_seed"),
    (NeverIdle(), "nobody_malicious"),
    (OwnPoison(change=write_in_place), "data_unwritten"),
    (OwnPoison(change=shift_at_random), "data_again"),
    (OwnPoison(change=drop_examples), "sizes"),
    (OwnPoison(change=lambda clients, chosen: shift_labels(clients, clients.ids)), "clean_examples"),
    (OwnPoison(change=lambda clients, chosen: replace(clients, scale=0.5)), "clean_examples"),
    (OwnAttack(change=lambda sent: sent.updates.tolist()), "update_tensor"),
    (OwnAttack(change=lambda sent: sent.updates[:, 1:]), "update_shape"),
    (OwnAttack(change=lambda sent: sent.updates.mul_(-1)), "writes"),
    (OwnAttack(change=lambda sent: torch.randn_like(sent.updates)), "sent_again"),
    (OwnAttack(change=mean_of_all), "sent_alone"),
]


@pytest.mark.parametrize(("broken", "law"), BROKEN_ATTACKS, ids=[law for _, law in BROKEN_ATTACKS])
def test_check_attack_catches(broken, law):
    with pytest.raises(LawBroken) as caught:
        check_attack(broken)
    assert caught.value.law == law


def test_check_attack_catches_one_malicious_client_too_many(monkeypatch):
    plain = attack_module.malicious_clients
    monkeypatch.setattr(attack_module, "malicious_clients", lambda clients, share, seed: plain(clients, share + 0.125, seed))
    with pytest.raises(LawBroken, match="share_malicious"):
        check_attack(OwnAttack())


def test_check_attack_catches_an_engine_without_it():
    with pytest.raises(LawBroken, match="under_attack"):
        check_attack(OwnAttack(), engines=[IgnoresAttacks()])


def test_attacks_of_ones_own_pass():
    check_attack(OwnAttack())
    check_attack(OwnPoison())


# ---------------------------------------------------------------------------------------------------------------- protections


@dataclass(frozen=True)
class OwnPrivacy:
    """A Gaussian mechanism of which pieces are changed: methods of its sums by name, and attributes of its protection."""

    changes: dict = field(default_factory=dict)
    clip: float = 0.5
    noise_multiplier: float = 1.0
    loss_bound: float = 3.0

    def check(self, algorithm):
        """Nothing is refused."""

    def protect(self, algorithm, size):
        plain = privacy.GaussianMechanism(self.clip, self.noise_multiplier, loss_bound=3.0).protect(algorithm, size)
        of_sums = {name: change for name, change in self.changes.items() if hasattr(PrivateSums, name)}
        sums = type("OwnSums", (PrivateSums,), of_sums)(plain.noise)
        others = {name: change for name, change in self.changes.items() if name not in of_sums}
        return type("OwnProtected", (Protected,), others)((sums,), plain.rounds, plain.noise)


def weights_by(change):
    def weights(self, view):
        plain = PrivateSums.weights(self, view)
        return plain._replace(each=change(plain.each))

    return {"weights": weights}


def total_by(change):
    def total(self, view):
        made = PrivateSums.total(self, view)
        return made._replace(value=change(made.value))

    return {"total": total}


def count_in_place(self, view):
    view.state.params.mul_(2.0)
    return PrivateSums.total(self, view)


def sort_losses_in_place(self, view):
    view.losses.copy_(view.losses.sort().values.flip(0))
    return PrivateSums.weights(self, view)


def refuse_nobody(self, view):
    if len(view.cohort) == 0:
        raise ZeroDivisionError("nobody is there")
    return PrivateSums.total(self, view)


random_text = (f"noise {number}" for number in itertools.count())
BROKEN_PROTECTIONS = [
    (weights_by(lambda each: -each), "weights_not_negative"),
    (weights_by(lambda each: each * math.nan), "finite_weights"),
    (weights_by(lambda each: each[1:]), "one_weight_each"),
    ({"weights": lambda self, view: PrivateSums.weights(self, view)._replace(over=0.0)}, "denominator"),
    ({"total": count_in_place}, "writes_state"),
    ({"weights": sort_losses_in_place}, "writes"),
    ({"total": refuse_nobody}, "nobody"),
    (total_by(lambda total: total * math.nan), "finite_model"),
    ({"fold": lambda self, view: Fold(WeightedMean())}, "clip"),
    ({"rounds_allowed": 10}, "rounds_allowed"),
    ({"epsilon_after": lambda self, rounds: 1.0 / (1 + rounds)}, "epsilon_rises"),
    ({"epsilon_after": lambda self, rounds: 1.0 if rounds else None}, "epsilon_known"),
    ({"describe": lambda self: 5}, "text"),
    ({"describe": lambda self: next(random_text)}, "one_text"),
]


@pytest.mark.parametrize(("changes", "law"), BROKEN_PROTECTIONS, ids=[law for _, law in BROKEN_PROTECTIONS])
def test_check_protection_catches(changes, law):
    with pytest.raises(LawBroken) as caught:
        check_protection(OwnPrivacy(changes), noiseless=OwnPrivacy({}, math.inf, 0.0), risk=risk.Tilted(1.0))
    assert caught.value.law == law


BROKEN_NOISELESS = [
    (OwnPrivacy(total_by(lambda total: total * (1 + 1e-15)), math.inf, 0.0), "noiseless"),
    (OwnPrivacy(total_by(lambda total: total + next(calls)), math.inf, 0.0), "repeats"),
    (OwnPrivacy(clip=1e-3, noise_multiplier=0.0), "noiseless"),  # still clips
    (OwnPrivacy(clip=10.0, noise_multiplier=1e-6), "noiseless"),  # still noisy
]


@pytest.mark.parametrize(("broken", "law"), BROKEN_NOISELESS, ids=["scaled", "not repeated", "clipped", "noisy"])
def test_check_protection_catches_what_is_not_the_plain_run(broken, law):
    with pytest.raises(LawBroken) as caught:
        check_protection(OwnPrivacy(), noiseless=broken)
    assert caught.value.law == law


def test_protections_of_ones_own_pass():
    check_protection(OwnPrivacy(), noiseless=OwnPrivacy(clip=math.inf, noise_multiplier=0.0))


def test_check_protection_asks_for_the_part_without_noise():
    with pytest.raises(InvalidParameter, match="noiseless"):
        check_protection(OwnPrivacy())


# ------------------------------------------------------------------------------------------------------------ personalisation


@dataclass(frozen=True)
class OwnMethod:
    """Local training, of which each piece can be replaced."""

    replaced: dict = field(default_factory=dict)
    inner = personal.Local()

    def width(self, dimension):
        return self._piece("width")(dimension)

    def begin(self, context, params):
        return self._piece("begin")(context, params)

    def work(self, context, params, cohort, rows, solver, shared):
        return self._piece("work")(context, params, cohort, rows, solver, shared)

    def models(self, context, params, cohort, rows, solver, shared):
        return self._piece("models")(context, params, cohort, rows, solver, shared)

    def _piece(self, name):
        return self.replaced[name] if name in self.replaced else getattr(self.inner, name)


class SendsUpdates(OwnMethod):
    def updates(self, context, params, cohort, rows, solver):
        return self._piece("updates")(context, params, cohort, rows, solver)


class CountsBegins(OwnMethod):
    """Keeps a number outside the state that a run which goes on does not know."""

    def begin(self, context, params):
        self.replaced.setdefault("begins", []).append(1)
        return super().begin(context, params)

    def work(self, context, params, cohort, rows, solver, shared):
        after, shared = super().work(context, params, cohort, rows, solver, shared)
        return after + 1e-3 * len(self.replaced["begins"]), shared


class Mixing(OwnMethod):
    """Moves every client of a cohort to their mean."""

    def work(self, context, params, cohort, rows, solver, shared):
        after, shared = super().work(context, params, cohort, rows, solver, shared)
        return after.mean(0, keepdim=True).expand_as(after).clone(), shared


def train_then(change):
    def work(context, params, cohort, rows, solver, shared):
        after, shared = personal.Local().work(context, params, cohort, rows, solver, shared)
        return change(after), shared

    return work


def work_in_place(context, params, cohort, rows, solver, shared):
    return rows.add_(1.0), shared


def scale_data(context, params, cohort, rows, solver, shared):
    if cohort.round > 0:
        context.data.train.x.mul_(1.1)
    return personal.Local().work(context, params, cohort, rows, solver, shared)


def shared_in_place(context, params, cohort, rows, solver, shared):
    shared += 1
    return rows, shared


def models_by(change):
    return lambda context, params, cohort, rows, solver, shared: change(rows)


def sends(change):
    return SendsUpdates({"updates": lambda context, params, cohort, rows, solver: change(rows - params)})


BROKEN_METHODS = [
    (OwnMethod({"width": lambda dimension: -1}), "width"),
    (OwnMethod({"begin": lambda context, params: (params[:-1], None)}), "first_row"),
    (OwnMethod({"begin": lambda context, params: (params.float(), None)}), "first_row"),
    (OwnMethod({"begin": lambda context, params: (params.add_(1).clone(), None)}), "writes"),
    (OwnMethod({"begin": lambda context, params: (params + 1, None)}), "not_worked"),
    (OwnMethod({"work": train_then(lambda rows: rows[:, 1:])}), "numbers_each"),
    (OwnMethod({"work": train_then(lambda rows: rows / 0)}), "finite_call"),
    (OwnMethod({"work": train_then(lambda rows: rows + torch.randn_like(rows))}), "second_call"),
    (OwnMethod({"work": work_in_place}), "writes"),
    (
        OwnMethod({"begin": lambda context, params: (params, torch.zeros(1)), "work": shared_in_place}),
        "writes",
    ),
    (Mixing(), "client_alone"),
    (
        OwnMethod({"models": models_by(lambda rows: rows + rows.square().mean() - rows[0].square().mean())}),
        "client_alone",
    ),
    (OwnMethod({"models": models_by(lambda rows: rows[:, 1:]), "width": lambda dimension: 0,
                "begin": lambda context, params: (params[:0], None)}), "numbers_each"),
    (OwnMethod({"models": models_by(lambda rows: rows.add_(1.0))}), "writes"),
    (OwnMethod({"models": models_by(lambda rows: rows + next(calls))}), "second_call"),
    (OwnMethod({"models": models_by(lambda rows: torch.where(rows == rows, math.nan, rows))}), "finite_call"),
    (OwnMethod({"work": scale_data}), "plain_run"),
    (CountsBegins(), "resumed"),
    (sends(lambda updates: updates[:, 1:]), "numbers_each"),
    (sends(lambda updates: updates / 0), "finite_call"),
    (sends(lambda updates: updates + next(calls)), "second_call"),
    (
        SendsUpdates({"updates": lambda context, params, cohort, rows, solver: rows.sub_(params)}),
        "writes",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("broken", "law"), BROKEN_METHODS, ids=[law for _, law in BROKEN_METHODS])
def test_check_personalisation_catches(broken, law):
    with pytest.raises(LawBroken) as caught:
        check_personalisation(broken)
    assert caught.value.law == law


class ServesRows(PersonalRun):
    """Serves whoever never took part the first row, not the shared model."""

    def models(self, state, params, clients, round_index):
        models = super().models(state, params, clients, round_index)
        never = state.places[clients] == 0
        return torch.where(never.unsqueeze(1), self.rows.first, models)


@dataclass(frozen=True)
class ForgetfulNodes:
    """An engine over a network whose nodes serve the wrong model; also the network itself."""

    def start(self, task, data):
        engine = engines.Loop().start(task, data)
        engine.network = self
        return engine

    def gone(self, cohort):
        return torch.zeros(len(cohort), dtype=torch.bool)

    def protect(self, protection, algorithm):
        return protection

    def personal_work(self, method, context, solver, seed):
        return ServesRows(method, context, solver, seed)


def test_check_personalisation_catches_a_run_that_serves_the_wrong_model():
    with pytest.raises(LawBroken, match="never_took_part"):
        check_personalisation(personal.Local(), engine=ForgetfulNodes())


def test_methods_of_ones_own_pass():
    check_personalisation(OwnMethod())
    check_personalisation(sends(lambda updates: updates))


# -------------------------------------------------------------------------------------------------------------------- engines


@dataclass(frozen=True)
class OwnEngine:
    """The loop engine with some of its methods replaced: each is given the plain method and its arguments."""

    replaced: dict = field(default_factory=dict)

    def start(self, task, data):
        engine = engines.Loop().start(task, data)
        for name, change in self.replaced.items():
            plain = getattr(engine, name)
            setattr(engine, name, lambda *given, plain=plain, change=change: change(plain, *given))
        return engine


@dataclass(frozen=True)
class IgnoresAttacks:
    """An engine that does not corrupt updates."""

    def start(self, task, data):
        return engines.Loop().start(task, replace(data, attack=None, malicious=frozenset()))


def shift(answer):
    """An answer that is wrong in the eighth digit."""
    match answer:
        case torch.Tensor():
            return answer + 1e-7
        case LocalWork():
            return replace(answer, update=shift(answer.update))
        case list():
            return [*answer[:-1], shift(answer[-1])]
    return answer[0], shift(answer[1])


def shift_result(plain, *given):
    return shift(plain(*given))


def other_batches(plain, params, cohort, *rest):
    return plain(params, replace(cohort, seed=cohort.seed + 1), *rest)


def first_cohort_for_all(plain, jobs, *rest):
    return plain([Job(job.params, jobs[0].cohort, jobs[0].weights) for job in jobs], *rest)


def first_model_for_all(plain, jobs, *rest):
    return plain([replace(job, params=jobs[0].params) for job in jobs], *rest)


def without_solver(plain, params, cohort, solver=None):
    return plain(params, cohort)


def without_gradient_correction(plain, params, cohort, solver):
    return plain(params, cohort, getattr(solver, "solver", solver))


def attack_own_models(plain, models, cohort, solver, pull=None):
    return -plain(models, cohort, solver, pull) if pull is None else plain(models, cohort, solver, pull)


def without_pull(plain, models, cohort, solver, pull=None):
    return plain(models, cohort, solver)


def whole_data(plain, models, clients, which):
    return plain(models, clients, torch.arange(len(which)))


def wrong_norms(plain, *given):
    works = plain(*given)
    return [replace(work, sq_norms=work.sq_norms.sqrt()) for work in works]


BROKEN_ENGINES = [
    *(({name: shift_result}, "agree with the loop engine") for name in (
        "losses", "losses_of", "losses_each", "updates", "summed_update", "summed_updates", "own_steps", "evaluate",
        "evaluate_own",
    )),
    ({"updates": other_batches}, "updates agree"),
    ({"own_steps": other_batches}, "own models agree"),
    ({"own_steps": attack_own_models}, "own models agree"),
    ({"own_steps": without_pull}, "pulled to one model agree"),
    (
        {"own_steps": lambda plain, models, cohort, solver, pull=None: plain(
            models, cohort, solver, pull and replace(pull, strength=pull.strength.reshape(len(models), -1)[:, 0]))},
        "pulled by parameter agree",
    ),
    ({"evaluate_own": whole_data}, "of own models agree"),
    ({"losses_each": first_cohort_for_all}, "another shape"),
    ({"losses_each": first_model_for_all}, "losses of several jobs agree"),
    ({"summed_updates": first_cohort_for_all}, "summed updates of several jobs agree"),
    ({"summed_updates": first_model_for_all}, "summed updates of several jobs agree"),
    ({"summed_updates": wrong_norms}, "update norms of several jobs agree"),
    ({"losses": without_solver}, "losses for a solver agree"),
    ({"updates": without_gradient_correction}, "updates agree"),
]  # fmt: skip


@pytest.mark.parametrize(("methods", "law"), BROKEN_ENGINES)
def test_check_engine_catches(methods, law):
    with pytest.raises(LawBroken, match=law):
        check_engine(OwnEngine(methods))


def test_check_engine_catches_attacks_that_are_left_out():
    with pytest.raises(LawBroken, match="under attack agree"):
        check_engine(IgnoresAttacks())


def test_an_engine_of_ones_own_passes():
    check_engine(OwnEngine())
