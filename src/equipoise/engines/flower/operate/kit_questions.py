"""What `equipoise flower check` asks of a kit's policy and of its columns, without a network."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from equipoise.algorithm import Algorithm
from equipoise.core.error_codes import WRITTEN
from equipoise.data.clients import FederatedData
from equipoise.data.tables import OTHER
from equipoise.engines.flower.apps.node_policy import NodePolicy
from equipoise.engines.flower.transport.part_messages import PartNotSent, find_allowed_class, pack_part
from equipoise.errors import unknown_name
from equipoise.experiment import catalog
from equipoise.privacy.releases import split

FAR, STRANGE = 5.0, 3.0  # deviations of the schema that the mean of a column may be off it: a fault, a warning


def show_policy(policy: NodePolicy) -> str:
    """What a policy demands, in a few words."""
    alone = "nobody gets a single loss or update" if policy.only_sums else "the server sees this node's losses and updates"
    said = [alone, f"secure sums over {policy.minimum_crowd} clients or more"]
    limits: dict[str, float | None] = {"rounds": policy.rounds, "evaluations": policy.evaluations}
    limits |= {"noise_multiplier": policy.noise_multiplier, "clip": policy.clip, "ε": policy.epsilon}
    words = {"rounds": "at most {:g} rounds", "noise_multiplier": "noise multiplier at least {:g}", "clip": "clip at most {:g}"}
    said += [words.get(key, f"{key} at most {{:g}}").format(value) for key, value in limits.items() if value is not None]
    said += [] if policy.noisy else ["no noise demanded"]
    if not policy.evaluates:
        said += ["no evaluations" + " (noise is demanded, and evaluate = true is not there)" * (policy.evaluate is None)]
    elif policy.noisy:
        said += ["evaluations are exact, without noise (evaluate = true)"]
    return "; ".join(said)


def unknown_parts(policy: NodePolicy) -> Iterator[str]:
    """The names in `parts` of a policy that are in no catalogue, with the nearest that is."""
    for name in policy.parts or ():
        kind, _, part = name.partition(".")
        if kind not in catalog.kinds():
            yield unknown_name("kind of part", kind, catalog.kinds())
        elif part not in catalog.names(kind):
            yield unknown_name(f"{kind} in `parts` of the policy", part, catalog.names(kind))


def find_algorithm(app: str) -> Algorithm | None:
    """The algorithm in task.py of the package of a kit's app; None where there is no such thing."""
    package = app.partition(":")[0].rpartition(".")[0]
    try:
        found = vars(importlib.import_module(f"{package}.task" if package else "task")).get("algorithm")
    except Exception:  # of the owner's own code: then it cannot be compared
        return None
    return found if isinstance(found, Algorithm) else None


def read_algorithm(folder: Path, package: str) -> Algorithm | None:
    """The algorithm in task.py of an app's folder as it is now; None where there is no such thing, or it cannot be loaded."""

    def forget() -> None:
        for name in [each for each in sys.modules if each == package or each.startswith(f"{package}.")]:
            del sys.modules[name]
        importlib.invalidate_caches()

    kept, path, writes = dict(sys.modules), list(sys.path), sys.dont_write_bytecode
    try:
        forget()
        sys.path.insert(0, str(folder.resolve()))
        sys.dont_write_bytecode = True
        return find_algorithm(f"{package}.client_app:app")
    finally:
        forget()
        sys.path[:], sys.dont_write_bytecode = path, writes
        sys.modules.update({name: module for name, module in kept.items() if name.partition(".")[0] == package})


def demand_sums(policy: str) -> str:
    """The text of a policy with `only_sums = true` in place of false.

    >>> demand_sums("only_sums = false  # a comment")
    'only_sums = true  # a comment'
    """
    return re.sub(r"(?m)^(\s*only_sums\s*=\s*)false\b", r"\1true", policy)


def open_to_single_requests(policy: NodePolicy, algorithm: Algorithm) -> str:
    """A warning if the algorithm uses secure sums alone and the policy would show single updates all the same; else empty."""
    if policy.only_sums or not algorithm.traits.privacy.sums_alone:
        return ""
    return "only_sums = false, although task.py uses secure sums: a server may ask for this node's own loss and update"


def refused_parts(policy: NodePolicy, algorithm: Algorithm) -> Iterator[str]:
    """What the policy refuses of an algorithm before the first round."""
    sums = algorithm.traits.privacy.sums_alone
    if policy.only_sums and not sums:
        yield "only_sums = true, and the algorithm of task.py asks for single updates: it has no privacy=SecureAggregation()"
    sent: dict[str, Any] = {"solver": algorithm.solver, "personal": algorithm.personal}
    if sums:
        sent |= {"risk": algorithm.risk, "aggregator": algorithm.aggregator}
    for kind, part in sent.items():
        try:
            packed = pack_part(kind, part, {})
        except PartNotSent:
            continue  # the server refuses it
        for name in policy.names_refused(packed):
            yield f"`parts` lacks {name}, which the algorithm of task.py uses"
        if isinstance(packed, Mapping) and "class" in packed:
            try:
                find_allowed_class(str(packed["class"]), policy.allow)
            except PartNotSent as failure:
                yield WRITTEN.sub("", str(failure)).rstrip(".")
    yield from refused_noise(policy, algorithm)


def refused_noise(policy: NodePolicy, algorithm: Algorithm) -> Iterator[str]:
    """What the policy refuses of an algorithm's noise and clip bound, as far as it does not depend on the run."""
    asks = [name for name in ("epsilon", "noise_multiplier", "clip") if getattr(policy, name) is not None]
    if not asks:
        return
    privacy, named = algorithm.traits.privacy, ", ".join(asks)
    if not privacy.sums_alone:
        if not policy.only_sums:  # else this was said
            yield f"the policy has {named}, and the algorithm of task.py asks for single updates without noise"
        return
    if privacy.clip is None:
        yield f"the policy has {named}, and the secure sums of task.py have no noise and no clip bound"
        return
    if policy.clip is not None and privacy.clip > policy.clip:
        yield f"clip = {policy.clip:g}, and the algorithm of task.py clips to {privacy.clip:g}"
    if policy.noisy and privacy.noise_seed is not None:
        yield f"the policy has {named}, and the noise of task.py follows from a seed: leave noise_seed out"
    least = least_noise(algorithm)
    if policy.noise_multiplier is not None and least is not None and least < policy.noise_multiplier * (1 - 1e-9):
        yield f"noise_multiplier = {policy.noise_multiplier:g}, and the least noise multiplier of task.py is {least:.4g}"


def least_noise(algorithm: Algorithm) -> float | None:
    """The smallest noise multiplier of a sum, for a node whose contribution is set to zero; None if it depends on the run.

    It depends on the run where it follows from ε, the rounds and the clients, or from a `sigma` of the quantile's own.
    """
    whole, traits = vars(algorithm.privacy).get("noise_multiplier"), algorithm.traits
    own = vars(traits.risk.quantile).get("sigma") if traits.quantile.calibrated is not None else None
    if whole is None or own is not None:
        return None
    rule, sampler = vars(algorithm.privacy).get("clip_rule"), traits.sampler
    rest = split(whole, rule.ratio)[1] if rule is not None else whole
    if traits.risk.needs_losses:
        rest = min(split(rest, vars(algorithm.privacy)["quantile_ratio"]))
    # Noise for replacing one client of a fixed cohort is twice that for setting its contribution to zero.
    return float(rest) * (1.0 if sampler.independent or sampler.everyone else 2.0)


def name_comparison(policy: NodePolicy, algorithm: Algorithm) -> tuple[list[str], list[str]]:
    """The keys of a policy that were compared with the algorithm, and those that only the run decides, with the reason."""
    given = [name for name in ("clip", "noise_multiplier", "epsilon") if getattr(policy, name) is not None]
    compared = ["only_sums", *(name for name in ("parts", "allow") if getattr(policy, name)), *given]
    later = ["minimum_crowd"] if algorithm.traits.privacy.sums_alone else []
    later += [name for name in ("rounds", "evaluations") if getattr(policy, name) is not None]
    if algorithm.traits.risk.needs_losses and algorithm.traits.privacy.only_sums:
        later.append("minimum_tail")
    if policy.noise_multiplier is not None and algorithm.private and least_noise(algorithm) is None:
        compared.remove("noise_multiplier")
        later.append("noise_multiplier (the noise follows from ε, the rounds and the number of sites)")
    if policy.epsilon is not None:
        later.append("the ε that this node will have spent")
    return compared, later


def strange_columns(data: FederatedData) -> Iterator[tuple[str, str]]:
    """Columns of a table that do not look like those of its schema: "fault" or "warning", and what is wrong."""
    schema = data.schema
    if schema is None:
        return
    x: Any = data.train.x
    numbers = x if isinstance(x, Tensor) else x.get("numbers")
    codes = None if isinstance(x, Tensor) else x.get("codes")
    names, embedded = schema.feature_names, list(schema.embedded)
    for rule in schema.columns:
        cure = "Does it have the unit and the meaning that the schema expects?"
        if rule.becomes == "scaled" and numbers is not None and rule.deviation > 0:
            off = float(numbers[:, names.index(rule.name)].double().mean())
            if abs(off) >= STRANGE:
                own = rule.mean + off * rule.deviation
                said = f"its mean is {own:.4g} here and {rule.mean:.4g} in the schema, {abs(off):.1f} standard deviations off"
                yield "fault" if abs(off) >= FAR else "warning", f"column {rule.name!r}: {said}. {cure}"
            continue
        if rule.becomes == "one-hot" and numbers is not None:
            known = numbers[:, [names.index(name) for name in rule.features]].sum(1) > 0  # also where it is missing
            unknown = float((~known).double().mean())
        elif rule.becomes == "codes" and codes is not None:
            unknown = float((codes[:, embedded.index(rule.name)] == OTHER).double().mean())
        else:
            continue
        if unknown >= 0.5:
            some = ", ".join(rule.categories[:5])
            said = (
                f"{unknown:.0%} of its values are none of the schema's categories ({some}{', …' * (len(rule.categories) > 5)})"
            )
            yield "fault" if unknown == 1 else "warning", f"column {rule.name!r}: {said}. {cure}"


def empty_columns(gaps: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, str]]:
    """Columns of which at least half of the cells are missing, and what fills them, by the numbers of missing and of all."""
    for name, (missing, cells) in gaps.items():
        if missing == cells > 0:
            yield "warning", f"column {name!r} is empty: the model gets the same value for every row. Is it the right column?"
        elif 2 * missing >= cells > 0:
            yield "warning", f"column {name!r}: {missing} of {cells} values are missing, and are filled in"


def show_gaps(gaps: Mapping[str, tuple[int, int]]) -> str:
    """The columns with missing values, as the end of a sentence; nothing if none has any.

    >>> show_gaps({"age": (2, 40), "sex": (0, 40)})
    '; missing values, which are filled in: age 2 of 40'
    """
    shown = [f"{name} {missing} of {cells}" for name, (missing, cells) in gaps.items() if missing]
    return f"; missing values, which are filled in: {', '.join(shown)}" if shown else ""
