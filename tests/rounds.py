"""One round of one run, for tests that compute a round by hand."""

from functools import partial
from types import SimpleNamespace

from equipoise.core.abilities import engine_traits
from equipoise.data.clients import FederatedData
from equipoise.engines.answers import answer_all
from equipoise.errors import Diverged
from equipoise.privacy.unprotected import Unprotected
from equipoise.rounds.drivers import committed, play, together
from equipoise.rounds.one_round import one_round
from equipoise.runs.setup import Setting, set_up
from equipoise.types.round_contracts import Kept, Stage, View


def run_round(state, algorithm, engine, cohort, clients, *, clients_per_round=None, personal=None, protection=None):
    """The state after one round of a single run with this cohort, and the round's report; a run that diverges raises."""
    setting = Setting(
        model=None,
        data=FederatedData(clients),
        algorithm=algorithm,
        task=engine.task,
        engine=engine,
        sampler=algorithm.drawn_by,
        alpha=algorithm.base_weights(clients),
        clients_per_round=clients_per_round or len(cohort),
        rounds=state.round + 1,
        seed=cohort.seed,
        personal=personal,
        protection=protection or Unprotected(state.round + 1),
        engine_traits=engine_traits(engine),
    )
    return play(setting, state, cohort)


round_of = play


def start_run(model, data, algorithm, **options):
    """A run that is set up but has not begun."""
    given = {"rounds": 3, "clients_per_round": 3, "seed": 0, "loss": None, "error": None, "engine": "loop"} | options
    return set_up(model, data, algorithm, **given)


def draw_cohort(setting, index, attempt=0):
    """The cohort of a round."""
    return setting.draw(index, attempt)


def weighed(protection, cohort, losses, state=None):
    """What the stages of a protection make of a cohort's losses: its value, weights, and what they are divided by."""
    before = SimpleNamespace(risk=state)
    view = View(None, before, cohort.having(losses=losses), None)
    (stage,) = [each for each in protection.sums if type(each).weights is not Stage.weights]
    given = stage.weights(view)
    return given.value if isinstance(given, Kept) else given


def rounds_of(settings, states, cohorts):
    """One round of each of some runs, driven together: states and reports, or the errors."""
    begun = [one_round(*each, partial(lambda cohort: cohort, c)) for *each, c in zip(settings, states, cohorts, strict=True)]
    ended = together(partial(answer_all, settings[0].engine), begun)
    return [
        each if isinstance(each, Diverged) else (committed(run, each[0]), each[1](0.0))
        for run, each in zip(settings, ended, strict=True)
    ]
