"""The laws of quantile sources, clip rules and protections."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from equipoise.algorithm import Algorithm
from equipoise.core.abilities import read
from equipoise.core.rng import torch_generator
from equipoise.core.update_checks import as_local_work
from equipoise.engines.answers import answer_all
from equipoise.errors import Diverged, InvalidParameter, is_number, without_notices
from equipoise.risk import Mean
from equipoise.rounds.drivers import committed, play, together
from equipoise.rounds.one_round import one_round
from equipoise.runs.setup import Setting
from equipoise.testing.laws import agree, check_of, hold, is_finite, unchanged, without_error
from equipoise.testing.small_run import make_small_task, set_up_quietly
from equipoise.types import ClientRisk, ClipRule, Cohort, Privacy, QuantileSource, QuantileTraits, Sampler, ServerState
from equipoise.types.round_contracts import Ask, Stage, View

ROUNDS = 3  # of the run that a protection is tried in
TAILS = (1.0, 0.9, 0.5, 0.25, 0.01)
SHARES = (-1e300, -1e6, -100.0, -1.0, 0.0, 0.1, 0.5, 0.9, 1.0, 2.0, 100.0, 1e6, 1e300)  # noise leaves [0, 1]


@check_of("a quantile source", "__call__", "reads_losses")
def check_quantile_source(
    source: QuantileSource, *, tolerance: float = 0.0, largest: float = 1e30, equal_weights: bool = False, seed: int = 0
) -> None:
    """The quantile is one finite number between the smallest and the largest loss, and does not depend on the clients' order.

    At tail 1 it may be any number below the smallest loss: all clients are kept then. Elsewhere it may lie outside by the
    source's own `tolerance`, a share of the losses' range, and by the `tolerance` given here, a number. Losses up to `largest`
    are tried; with `equal_weights` the clients' base weights are equal. A source that adds noise must draw the same noise in
    each call to be checked. An `exact` source gives the smallest loss with a mass of at most the tail above it. Losses and
    base weights are not written to.

    `source` is the source of quantiles that is checked.

    >>> import equipoise as eq
    >>> check_quantile_source(eq.privacy.Exact())  # nothing is returned: all laws hold
    """
    traits = read(QuantileTraits, source)
    hold(isinstance(source.reads_losses, bool), source, "reads_losses", source.reads_losses)
    gen = torch_generator(seed, "check_quantile_source")
    for losses in _loss_cases(gen, largest):
        alpha = torch.rand(len(losses), generator=gen, dtype=torch.float64) + 0.1
        alpha = torch.ones_like(alpha) if equal_weights else alpha
        alpha = (alpha / alpha.sum()).to(losses.dtype)
        slack = tolerance + traits.tolerance * float(losses.max() - losses.min()) + 1e-9 * float(losses.abs().max())
        order = torch.randperm(len(losses), generator=gen)
        for tail in TAILS:
            with unchanged(source, losses=losses, weights=alpha):
                quantile = source(losses, alpha, tail)
            case = f"quantile {quantile}, tail {tail}, losses {losses.tolist()}"
            hold(quantile.shape == (), source, "one_quantile", tuple(quantile.shape))
            hold(is_finite(quantile), source, "finite_quantile", case)
            lowest = float(losses.min()) - slack if tail < 1 else -math.inf  # all that is no larger is a 0-quantile
            hold(lowest <= float(quantile) <= float(losses.max()) + slack, source, "between", case)
            moved = source(losses[order], alpha[order], tail)
            hold(abs(float(moved - quantile)) <= slack, source, "any_order", (case, float(moved)))
            if traits.exact:
                smallest = min(x for x in losses.tolist() if float(alpha[losses > x].sum()) <= tail + 1e-6)
                hold(float(quantile) == smallest, source, "exact", case)


def _loss_cases(gen: torch.Generator, largest: float) -> list[Tensor]:
    """Losses of one client and of many, with ties, zeros and outliers, none above `largest`."""
    cases = [
        torch.tensor(values, dtype=torch.float64)
        for values in ([0.7], [0.0, 0.0, 0.0], [1.0, 1.0, 2.0, 2.0], [0.0, 1.0, largest], [1e-30, 0.0, 1e-30])
    ]
    cases += [scale * torch.rand(count, generator=gen, dtype=torch.float64) for count in (2, 7, 40) for scale in (0.01, 3.0)]
    return [case.clamp(max=largest).to(dtype) for case in cases for dtype in (torch.float64, torch.float32)]


@check_of("a clip rule", "ratio", "next_bound")
def check_clip_rule(rule: ClipRule, *, rounds: int = 200) -> None:
    """Bounds stay positive and finite for any finite share, also a noisy one outside [0, 1], and over many rounds.

    The more updates are within the bound, the lower the next bound is, or the same; a call repeats.

    >>> import equipoise as eq
    >>> check_clip_rule(eq.privacy.AdaptiveClip())  # nothing is returned: all laws hold
    """
    hold(is_number(rule.ratio) and 0 < rule.ratio < math.inf, rule, "ratio", rule.ratio)
    for bound in (1e-6, 0.1, 1.0, 1e6):
        bounds = [_next_bound(rule, bound, share) for share in SHARES]
        falling = all(after <= before for before, after in itertools.pairwise(bounds))
        shown = f"from {bound}: " + ", ".join(f"{after:g} at {share:g}" for share, after in zip(SHARES, bounds, strict=True))
        hold(falling, rule, "falling", shown)
        repeated = [_next_bound(rule, bound, share) for share in SHARES]
        hold(repeated == bounds, rule, "bound_alone", repeated)
    for share in (0.0, 0.5, 1.0):
        bound = 1.0
        for _ in range(rounds):
            bound = _next_bound(rule, bound, share)


def _next_bound(rule: ClipRule, bound: float, share: float) -> float:
    case = f"bound {bound:g}, share {share:g}: "
    with without_error(rule, "bound", case):
        after = rule.next_bound(bound, share)
    hold(is_number(after) and 0 < after < math.inf, rule, "bound", f"{case}{after!r}")
    return after


@check_of("a protection")
def check_protection(
    privacy: Privacy | None,
    *,
    noiseless: Privacy | None = None,
    risk: ClientRisk | None = None,
    sampler: Sampler | None = None,
    tolerance: float = 0.0,
    seed: int = 0,
) -> None:
    """The protection of a small run weighs and sums as its contract says; None is a run without protection.

    Weights are finite and not negative, also at losses that no protected client may be named for; states are values that no
    call writes to; an empty cohort is handled; ε never falls from one round to the next. One client moves a sum by at most the
    `clip` bound over the denominator, where noise repeats in a second call. Without noise the total is the sum of the plain
    run's client updates under the same weights and denominator, bit for bit or up to `tolerance`: `noiseless` is the part with
    an infinite clip and zero noise, and must be given for a part that has a `clip`. `risk` is the run's risk (None: the mean),
    `sampler` draws its cohorts (None: the default of the protection).

    `privacy` is the protection that is checked.

    >>> import equipoise as eq
    >>> check_protection(eq.privacy.SecureAggregation(), tolerance=1e-6)  # nothing is returned: all laws hold
    """
    algorithm = Algorithm(risk=risk or Mean(), sampler=sampler, privacy=privacy)
    traits = algorithm.traits.privacy
    if traits.clip is not None and noiseless is None:
        fix = "Give the same mechanism with an infinite clip and zero noise, e.g. GaussianMechanism(math.inf, 0.0)."
        raise InvalidParameter("noiseless", "must be given for a protection with a clip bound", None, fix)
    run = ProtectedRounds.begin(algorithm, seed)
    _check_budget(run)
    _check_weights(run)
    state = run.setting.begin()
    for _ in range(ROUNDS):
        state = _check_round(run, state)
    _check_round(run, state, run.setting.draw(ROUNDS).take(torch.zeros(0, dtype=torch.int64)))
    if traits.clip is not None:
        _check_clipping(run, traits.clip, 0.1 if traits.noise == "distributed" else 1e-9)
    _check_noiseless(ProtectedRounds.begin(replace(algorithm, privacy=noiseless or privacy), seed), tolerance)


@dataclass(frozen=True, eq=False)
class _WatchWeights(Stage):
    """Looks at the weights of every round."""

    part: object

    def weights(self, view: View) -> None:
        """One finite weight per client, which is not negative, and a denominator above 0."""
        each, over = torch.as_tensor(view.weights.each), view.weights.over
        hold(each.shape == view.cohort.clients.shape, self.part, "one_weight_each", tuple(each.shape))
        hold(is_finite(each), self.part, "finite_weights", each.tolist())
        hold((each >= 0).all(), self.part, "weights_not_negative", each.tolist())
        hold(over is None or over > 0, self.part, "denominator", over)


@dataclass(frozen=True, eq=False)
class ProtectedRounds:
    """A small run with a protection, whose rounds can be planned and combined one by one."""

    part: object
    setting: Setting

    @classmethod
    def begin(cls, algorithm: Algorithm, seed: int) -> ProtectedRounds:
        """The run of an algorithm on the small task, four of eight clients per round."""
        task, data = make_small_task(seed)
        setting = set_up_quietly(task.module, data, algorithm, 4, rounds=ROUNDS, seed=seed)
        part = algorithm.privacy or setting.protection
        vars(setting)["hooks"] = {**setting.hooks, "weights": (*setting.hooks["weights"], _WatchWeights(part))}
        return cls(part, setting)

    def answered(
        self, state: ServerState, cohort: Cohort, losses: Tensor | None = None, sent: Tensor | None = None
    ) -> tuple[Ask | None, ServerState]:
        """A round whose losses, or whose updates, are these: what it asked for an update, and the state after it."""
        asked: list[Ask] = []

        def answer(ask: Ask) -> Any:
            if ask.what == "loss" and losses is not None:
                return losses
            if ask.what == "update" and ask.fold is not None:
                asked.append(ask)
                if sent is not None:
                    return ask.fold.of(as_local_work(sent[: len(ask.clients)], state.params), ask.clients.shares)
            return answer_all(self.setting.engine, [ask])[0]

        (ended,) = together(lambda asks: [answer(ask) for ask in asks], [one_round(self.setting, state, lambda: cohort)])
        if isinstance(ended, Diverged):
            raise ended
        return (asked[0] if asked else None), committed(self.setting, ended[0])

    def cohort_of_several(self) -> Cohort:
        """The first cohort with two clients or more; Poisson sampling may draw fewer."""
        cohorts = (self.setting.draw(index) for index in itertools.count())
        return next(cohort for cohort in cohorts if len(cohort) > 1)


def _check_budget(run: ProtectedRounds) -> None:
    part, protection = run.part, run.setting.protection
    allowed, text = protection.rounds_allowed, protection.describe()
    hold(isinstance(allowed, int) and 0 <= allowed <= ROUNDS, part, "rounds_allowed", allowed)
    spent = [protection.epsilon_after(rounds) for rounds in range(ROUNDS + 1)]
    known = [epsilon for epsilon in spent if epsilon is not None]
    hold(len(known) in (0, len(spent)), part, "epsilon_known", spent)
    hold(all(0 <= before <= after for before, after in itertools.pairwise(known)), part, "epsilon_rises", spent)
    hold(text is None or isinstance(text, str), part, "text", text)
    again = ProtectedRounds.begin(run.setting.algorithm, run.setting.seed).setting.protection.describe()
    hold(text == again, part, "one_text", (text, again))


def _check_weights(run: ProtectedRounds) -> None:
    """The weights of a cohort at ordinary and at awkward losses."""
    protection, state = run.setting.protection, run.setting.begin()
    cohort = run.cohort_of_several()
    some = torch.linspace(0, 3, len(cohort), dtype=torch.float64)
    plain = [some, *(torch.full_like(some, value) for value in (0.0, 1.0, 1e4, 1e30))]
    hidden = [torch.full_like(some, math.nan), torch.full_like(some, math.inf), torch.where(some == 0, math.nan, 1.0).double()]
    cases = [*plain, *([] if protection.in_the_open else hidden)]
    for losses in cases if run.setting.algorithm.traits.needs_losses else [None]:
        case = f"losses {losses if losses is None else losses.tolist()} give "
        with unchanged(run.part, losses=losses, state=state, cohort=cohort), without_error(run.part, "finite_model", case):
            _, after = run.answered(state, cohort, losses)
        hold(is_finite(after.params), run.part, "finite_model", case)


def _check_round(run: ProtectedRounds, state: ServerState, cohort: Cohort | None = None) -> ServerState:
    """The state after one round of the drawn cohort, or of a given one; neither the state nor the cohort is written to."""
    cohort = run.setting.draw(state.round) if cohort is None else cohort
    law = "nobody" if len(cohort) == 0 else "finite_model"
    with unchanged(run.part, state=state, cohort=cohort), without_error(run.part, law), without_notices():
        return play(run.setting, state, cohort)[0]


def _check_clipping(run: ProtectedRounds, bound: float, rounding: float) -> None:
    """One client that sends a huge update, in place of none, moves the total by at most its clip bound over the denominator.

    Rounding to a grid may add a share of the bound that does not depend on the client's weight: its rounding, and that of the
    others, whose draws follow. With 16 steps per bound and √D it is about √K/32 for K clients.
    """
    state, cohort = run.setting.begin(), run.cohort_of_several()
    asked, _ = run.answered(state, cohort)
    if asked is None:  # nobody reaches the tail
        return
    gen = torch_generator(run.setting.seed, "check_protection")
    sent = 0.01 * torch.randn(len(asked.clients), len(state.params), generator=gen, dtype=state.params.dtype)
    silent, huge = sent.clone(), sent.clone()
    silent[0], huge[0] = 0.0, 1e6 * sent[0]
    first, repeated, moved = (run.answered(state, cohort, sent=each)[1].params for each in (silent, silent, huge))
    if not torch.equal(first, repeated):  # noise that no seed repeats hides what one client moves
        return
    allowed = bound * float(asked.clients.shares[0]) * (1 + rounding)
    distance = float((moved - first).norm())
    hold(distance <= allowed, run.part, "clip", (distance, allowed))


def _check_noiseless(run: ProtectedRounds, tolerance: float) -> None:
    """The total without noise is Σ weights · updates of the plain run; where weights have no fixed sum, over their sum."""
    state = run.setting.begin()
    for _ in range(ROUNDS):
        cohort = run.setting.draw(state.round)
        (asked, after), (_, repeated) = (run.answered(state, cohort) for _ in range(2))
        if asked is not None:
            hold(torch.equal(after.params, repeated.params), run.part, "repeats")
            rule, only_sums = run.setting.algorithm.aggregator, run.setting.algorithm.traits.privacy.only_sums
            weights = asked.clients.shares / asked.clients.shares.sum() if only_sums else asked.clients.shares
            plain = run.setting.engine.summed_update(state.params, asked.clients, asked.rule, weights, rule)
            agree(run.part, "noiseless", after.params, state.params + plain.update, tolerance)
        state = _check_round(run, state)
