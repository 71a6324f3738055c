"""The laws of the contracts, as public checks: a part of your own should pass the check of its kind.

Each check raises LawBroken with the law and the numbers that break it, and returns nothing when all hold. They try seeded
random cases and the awkward ones: one client, ties, zero losses, huge losses, zero updates, noise, nobody in the cohort.
"""

from equipoise.testing.client_parts import check_observer, check_schedule, check_solver
from equipoise.testing.engines import check_attack, check_engine
from equipoise.testing.laws import LawBroken
from equipoise.testing.personalisation import check_personalisation
from equipoise.testing.privacy_parts import check_clip_rule, check_protection, check_quantile_source
from equipoise.testing.risks import check_risk
from equipoise.testing.samplers import check_sampler
from equipoise.testing.server_parts import check_aggregator, check_averaging, check_server_optimizer

__all__ = [
    "LawBroken",
    "check_aggregator",
    "check_attack",
    "check_averaging",
    "check_clip_rule",
    "check_engine",
    "check_observer",
    "check_personalisation",
    "check_protection",
    "check_quantile_source",
    "check_risk",
    "check_sampler",
    "check_schedule",
    "check_server_optimizer",
    "check_solver",
]
