"""Which kind of part an object of the library is, for messages about a part in the place of another kind."""

from __future__ import annotations

import sys

_PACKAGE = __name__.partition(".")[0]
# Of each kind: what it is called, an example of it, and where it is given.
KINDS: dict[str, tuple[str, str, str]] = {
    "risk": ("a risk", "risk.Superquantile(tail=0.5)", "given as risk=… of Algorithm"),
    "solver": ("a local solver", "solvers.SGD(lr=0.1)", "given as solver=… of Algorithm"),
    "aggregator": ("an aggregator", "aggregators.Median()", "given as aggregator=… of Algorithm"),
    "server": ("a server optimiser", "server_opt.Momentum()", "given as server=… of Algorithm"),
    "sampler": ("a sampler", "sampling.Full()", "given as sampler=… of Algorithm"),
    "averaging": ("an averaging", "averaging.Uniform()", "given as averaging=… of Algorithm"),
    "personal": ("a method for personal models", "personal.Ditto()", "given as personal=… of Algorithm"),
    "privacy": ("a protection", "privacy.SecureAggregation()", "given as privacy=… of Algorithm"),
    "quantile": ("a source of quantiles", "privacy.Exact()", "given as quantile=… of risk.Superquantile"),
    "schedule": ("a schedule", "solvers.Cosine(rounds=100)", "given as schedule=… of a solver"),
    "clip_rule": ("a rule of the clip bound", "privacy.AdaptiveClip()", "given as clip_rule=… of a protection"),
    "attack": ("an attack", "attacks.SignFlip()", "given to attacks.apply(data, attack)"),
    "engine": ("an engine", "engines.Simulator()", "given as engine=… of train"),
    "observer": ("an observer", "observers.History()", "given as observers=[…] of train"),
    "model": ("a model", "models.Softmax(features, classes)", "given as the first argument of train"),
    "data": ("a data set", "data.digits()", "given as the second argument of train"),
    "optimizer": ("an optimiser of one data set", "optim.DPSGD(…)", "for data without clients"),
}
_HOMES = {
    "risk": "risk", "aggregators": "aggregator", "server_opt": "server", "sampling": "sampler", "averaging": "averaging",
    "personal": "personal", "attacks": "attack", "engines": "engine", "observers": "observer", "models": "model",
    "data": "data", "optim": "optimizer",
}  # fmt: skip


def kind_of(value: object) -> str | None:
    """The kind of a public part of the library; None of all else, such as parts of the user's own.

    >>> from equipoise import aggregators, privacy, solvers
    >>> kind_of(aggregators.Median()), kind_of(solvers.Cosine(10)), kind_of(privacy.Exact()), kind_of(0.5)
    ('aggregator', 'schedule', 'quantile', None)
    """
    own = type(value)
    package, _, rest = own.__module__.partition(".")
    home = rest.partition(".")[0]
    if package != _PACKAGE:
        return None
    offered_in = [
        name for name in (home, "privacy") if getattr(sys.modules.get(f"{package}.{name}"), own.__name__, None) is own
    ]
    if not offered_in:
        return None
    home = offered_in[0]
    if home == "solvers":
        return "solver" if hasattr(own, "local_steps") or hasattr(own, "prepare") else "schedule"
    if home == "privacy":
        offered = {"next_bound": "clip_rule", "reads_losses": "quantile", "protect": "privacy"}
        return next((kind for name, kind in offered.items() if hasattr(value, name)), None)
    return _HOMES.get(home)


def text_of_wrong_kind(kind: str, value: object) -> tuple[str, str] | None:
    """The rule and the fix of a message about a part of the library in the place of a part of `kind`; None if it may be one."""
    found = kind_of(value)
    if found is None or found == kind:
        return None
    wanted, example, _ = KINDS[kind]
    given, _, place = KINDS[found]
    return f"must be {wanted}, e.g. {example}", f"That is {given}, {place}."
