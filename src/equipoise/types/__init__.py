"""The values that pass between the parts, and the contracts of the parts: what each must offer, and what it may offer.

What a part must offer is a protocol. What it may offer is a frozen description (`RiskTraits`, `SolverTraits`, …): each field is
an attribute of that name on the part, and the field's default holds for a part without it. `equipoise.core.abilities` reads the
descriptions, once, at set-up; nothing else asks a part what it is. A field marked `OWN` is a claim of a class about its own
methods: it does not hold for subclasses, which may override them.

Shapes: K clients in a cohort, D parameters, n clients in all. The law of each contract is checked by `equipoise.testing`.
"""

from equipoise.types.attack_contracts import Attack, AttackTraits
from equipoise.types.engine_contracts import Engine, EngineTraits, LookAheadEngine, MeasuredChoice, Network, RoundUnderWay
from equipoise.types.metric_contracts import MetricTraits
from equipoise.types.observer_contracts import Observer
from equipoise.types.own_claims import OWN
from equipoise.types.personal_contracts import Personalisation, PersonalTraits, PersonalWork
from equipoise.types.privacy_contracts import ClipRule, Privacy, PrivacyTraits, Protection, RunSize
from equipoise.types.risk_contracts import ClientRisk, QuantileSource, QuantileTraits, RiskTraits
from equipoise.types.round_values import Cohort, Job, LocalWork, Pull, RiskValue, RoundReport, SentUpdates, ServerState
from equipoise.types.sampler_contracts import Sampler, SamplerTraits
from equipoise.types.server_contracts import Aggregator, AggregatorTraits, Averaging, ServerOptimizer, ServerTraits
from equipoise.types.solver_contracts import LocalSolver, Schedule, SgdRule, SolverMemory, SolverTraits

# Other modules, and users, import from here: in which module of the package a name stands is an inner matter.
__all__ = [  # noqa: RUF022 (in the order of the reference)
    "OWN",
    "Cohort", "RiskValue", "LocalWork", "Job", "SentUpdates", "ServerState", "Pull", "RoundReport",
    "ClientRisk", "RiskTraits", "QuantileSource", "QuantileTraits",
    "LocalSolver", "Schedule", "SgdRule", "SolverTraits",
    "Aggregator", "AggregatorTraits", "ServerOptimizer", "ServerTraits", "Averaging",
    "Sampler", "SamplerTraits",
    "Personalisation", "PersonalTraits", "SolverMemory", "PersonalWork",
    "RunSize", "Privacy", "PrivacyTraits", "Protection", "ClipRule",
    "Attack", "AttackTraits",
    "Engine", "EngineTraits", "LookAheadEngine", "RoundUnderWay", "MeasuredChoice", "Network", "MetricTraits",
    "Observer",
]  # fmt: skip
