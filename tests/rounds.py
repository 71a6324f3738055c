"""One round of one run, for tests that compute a round by hand."""

from equipoise import round as rounds
from equipoise.core.abilities import engine_traits
from equipoise.data.federated_data import FederatedData
from equipoise.errors import Diverged
from equipoise.runs.setup import Setting, set_up


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
        protection=protection or rounds.Unprotected(algorithm, clients, state.round + 1),
        engine_traits=engine_traits(engine),
    )
    return round_of(setting, state, cohort)


def round_of(setting, state, cohort):
    """The same of a run that is set up."""
    with setting.engine_traits.round_context():
        (outcome,) = rounds.run_round([setting], [state], [cohort], setting.engine)
    if isinstance(outcome, Diverged):
        raise outcome
    return outcome


def start_run(model, data, algorithm, **options):
    """A run that is set up but has not begun."""
    given = {"rounds": 3, "clients_per_round": 3, "seed": 0, "loss": None, "error": None, "engine": "loop"} | options
    return set_up(model, data, algorithm, **given)
