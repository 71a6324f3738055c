"""What a node's owner demands, whatever the server asks: a policy, from a file on the node, and the checks of each request."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from equipoise.engines.flower.secure.identities import Identity, read_identity
from equipoise.engines.flower.secure.sum_terms import SumTerms
from equipoise.errors import ConfigError, EquipoiseError, require, require_integer, require_number
from equipoise.experiment.values import check_value
from equipoise.privacy.discrete_gaussian import concentrated_epsilon
from equipoise.privacy.private_quantile import ENOUGH_NOISE

EXACT_SUMS = ("update", "counts")  # sums without noise
NOISY_SUMS = ("histogram", "weight", "private update")
USUAL_DELTA = 1e-5  # of a budget whose owner names none
LEAST_SHARE = 0.5  # steps: the narrowest share of noise for which there is a bound on what sums of them hide


class PolicyRefusal(EquipoiseError):
    """The node's owner does not allow what was asked for; the reason is for the node's own log."""


class PartNotAllowed(EquipoiseError):
    """The algorithm has a part that the node's owner has not named; which one is for the node's own log."""


class SumsOnly(EquipoiseError):
    """The node takes part in secure sums only."""


@dataclass(frozen=True)
class NodePolicy:
    """What a node refuses, by its owner's word. `docs/protect-federation.md` has the reference of the file.

    `only_sums`: nobody gets a single loss, score or update. `minimum_crowd`: the fewest clients in any secure sum,
    evaluations included. `minimum_tail`: the fewest in the tail of Δ-FL without noise. `rounds`: the most rounds of a run,
    and `evaluations`: the most evaluations of a run. A sum must have noise of at least `noise_multiplier` times what the
    clipped contribution of this node moves it by, and updates a `clip` of at most that much. With `epsilon` every sum must
    have noise; what all of them cost together, at `delta` (None: 10⁻⁵), is for the node's ledger to count. `evaluate`:
    whether loss and error, which no noise covers, may be asked for: exact means over clients and, without `only_sums`,
    those of this client alone (None: yes, unless the policy demands noise by `noise_multiplier` or `epsilon`; `evaluates`
    is the answer). `parts`: the parts of the catalogue that may run here, as "kind.name" (None: all), and `allow`: packages
    whose classes may. Answers leave `answer_after` seconds after their request, or at a multiple of it. With `key`, the
    file of this node's private key, and `peers`, that of the other nodes' public keys, the node takes part in signed sums
    alone, and withstands `colluders` nodes that help the server (None: just below a third).
    """

    only_sums: bool = True
    minimum_crowd: int = 3
    minimum_tail: int = 2
    rounds: int | None = None
    noise_multiplier: float | None = None
    clip: float | None = None
    epsilon: float | None = None
    delta: float | None = None
    evaluate: bool | None = None
    parts: tuple[str, ...] | None = None
    allow: tuple[str, ...] = ()
    answer_after: float = 0.0
    key: str | None = None
    peers: str | None = None
    colluders: int | None = None
    evaluations: int | None = None

    def __post_init__(self) -> None:
        for name in ("minimum_crowd", "minimum_tail"):
            require_integer(name, getattr(self, name), 2, fix="A sum over one client is its own.")
        require_integer("rounds", self.rounds, 1, none="any number")
        fix = "To allow none, write evaluate = false."
        require_integer("evaluations", self.evaluations, 1, none="any number", fix=fix)
        for name in ("noise_multiplier", "clip", "epsilon"):
            require_number(name, getattr(self, name), "(0, ∞)", none="any")
        require_number("delta", self.delta, "(0, 1)", none=f"{USUAL_DELTA:g}")
        require_number("answer_after", self.answer_after, "[0, ∞)")
        require_integer("colluders", self.colluders, 0, none="just below a third of the clients")
        together = (self.key is None) == (self.peers is None)
        require(together, "key", "and peers must be given together", self.key, "`equipoise flower key FILE` makes a key.")
        for name in ("parts", "allow"):
            value = getattr(self, name)
            good = value is None or all(isinstance(each, str) and each for each in value)
            require(good, name, "must be a list of names", value, 'E.g. parts = ["risk.mean", "solver.sgd"].')

    @property
    def noisy(self) -> bool:
        """Whether the owner demands noise in all that leaves the node."""
        return self.noise_multiplier is not None or self.epsilon is not None

    @property
    def protection_words(self) -> str:
        """Which keys of the policy demand noise or a clip bound, as its owner wrote them."""
        written = ((key, getattr(self, key)) for key in ("noise_multiplier", "epsilon", "clip"))
        keys = ", ".join(f"{key} = {value:g}" for key, value in written if value is not None)
        return f"The policy has {keys}, which demands {'noise' if self.noisy else 'a clip bound'}"

    @property
    def budget_delta(self) -> float:
        """δ of the budget: the owner's, else 10⁻⁵."""
        return USUAL_DELTA if self.delta is None else self.delta

    @property
    def evaluates(self) -> bool:
        """Whether exact evaluations are allowed: by the owner's word, and without it only where no noise is demanded."""
        return self.evaluate if self.evaluate is not None else not self.noisy

    def read_identity(self) -> Identity | None:
        """The node's key and those of its peers, where the owner has named them."""
        if self.key is None or self.peers is None:
            return None
        return read_identity(Path(self.key), Path(self.peers), self.colluders)

    def stricter(self, other: NodePolicy) -> NodePolicy:
        """The policy that refuses what either does. Packages that `other`, the owner's, allows are allowed.

        Exact evaluations beside noise are allowed if the owner of the noise says so: an app cannot say it for its node's owner.
        """

        def smaller(name: str) -> Any:
            given = [value for value in (getattr(self, name), getattr(other, name)) if value is not None]
            return min(given, default=None)

        noise = [z for z in (self.noise_multiplier, other.noise_multiplier) if z is not None]
        parts = [set(names) for names in (self.parts, other.parts) if names is not None]
        evaluate = other.evaluate if other.evaluate is not None or other.noisy else self.evaluate
        if self.evaluate is False:
            evaluate = False
        return NodePolicy(
            only_sums=self.only_sums or other.only_sums,
            minimum_crowd=max(self.minimum_crowd, other.minimum_crowd),
            minimum_tail=max(self.minimum_tail, other.minimum_tail),
            noise_multiplier=max(noise, default=None),
            evaluate=evaluate,
            parts=tuple(sorted(set.intersection(*parts))) if parts else None,
            allow=other.allow,
            answer_after=max(self.answer_after, other.answer_after),
            key=self.key or other.key,
            peers=self.peers or other.peers,
            colluders=max((c for c in (self.colluders, other.colluders) if c is not None), default=None),
            delta=min((each.budget_delta for each in (self, other) if each.delta or each.epsilon), default=None),
            **{name: smaller(name) for name in ("rounds", "evaluations", "clip", "epsilon")},
        )

    # ---------------------------------------------------------------------------------------------------- checks of a request

    def check_single(self) -> None:
        """Refuse a request for something of this client alone."""
        if self.only_sums:
            raise SumsOnly("This node takes part in secure sums only.")
        if self.noisy or self.clip is not None:
            raise PolicyRefusal(f"{self.protection_words}, and a single update or loss has neither noise nor a clip bound.")

    def check_round(self, round_index: int) -> None:
        """Refuse a round beyond the last that the owner allows."""
        if self.rounds is not None and round_index >= self.rounds:
            raise PolicyRefusal(f"Round {round_index + 1} is beyond the {self.rounds} rounds that the policy allows.")

    def check_evaluation(self) -> None:
        """Refuse an evaluation if the owner allows none."""
        if not self.evaluates:
            cure = ": it demands noise, and an evaluation is exact. To allow exact evaluations, write evaluate = true"
            why = "" if self.evaluate is False else cure
            raise PolicyRefusal(f"The policy allows no evaluations{why}.")

    def check_terms(self, terms: SumTerms) -> None:
        """Refuse a sum over too few clients: those that must be in it, not those that are invited."""
        if terms.fewest < self.minimum_crowd:
            raise PolicyRefusal(f"{terms} may be over {terms.fewest} clients, and the policy demands {self.minimum_crowd}.")

    def check_sum(self, kind: str, asked: Mapping[str, Any], terms: SumTerms) -> None:
        """Refuse a sum with less noise than the owner demands, of too small a tail, or an evaluation that he does not allow."""
        if kind == "scores":
            self.check_evaluation()
            return
        if kind in EXACT_SUMS:
            if self.noisy or self.clip is not None:
                raise PolicyRefusal(f"{terms} has neither noise nor a clip bound. {self.protection_words}.")
            kept = asked.get("kept", 0)
            if kind == "update" and asked.get("filtered") and not (type(kept) is int and kept >= self.minimum_tail):
                raise PolicyRefusal(f"The tail has {kept} clients, and the policy demands {self.minimum_tail}.")
            return
        noise = noise_multiplier_of(kind, asked, terms.fewest, terms.length)
        if self.noise_multiplier is not None and not noise >= self.noise_multiplier * (1 - 1e-9):
            raise PolicyRefusal(f"{terms} has a noise multiplier of {noise:.4g}; the policy demands {self.noise_multiplier:g}.")
        if kind == "private update" and self.clip is not None and not float(asked["clip"]) <= self.clip:
            raise PolicyRefusal(f"Updates are clipped to {asked['clip']}, and the policy demands {self.clip:g} or less.")

    def check_part(self, packed: Any) -> None:
        """Refuse a part of the catalogue that the owner has not named."""
        for name in self.names_refused(packed):
            raise PartNotAllowed(f"The policy does not allow the part {name}. Add it to `parts` in policy.toml to allow it.")

    def names_refused(self, packed: Any) -> Iterator[str]:
        """The names of a part that travels, and of the parts in it, that the owner has not named."""
        if self.parts is None or not isinstance(packed, Mapping) or "table" not in packed:
            return  # classes by path need `allow`
        yield from (name for name in _part_names(str(packed.get("kind")), packed["table"]) if name not in self.parts)


def _part_names(kind: str, table: Any) -> Iterator[str]:
    """The names of a part and of the parts in it, each with its kind."""
    if isinstance(table, Mapping):
        if "name" in table:
            yield f"{kind}.{table['name']}"
        for key, inner in table.items():
            yield from _part_names(str(key), inner)
    elif isinstance(table, list):
        for inner in table:
            yield from _part_names(kind, inner)


def noise_multiplier_of(kind: str, asked: Mapping[str, Any], contributors: int, length: int) -> float:
    """The noise of a sum of at least `contributors` shares, over what the contribution of one client moves it by.

    It is that of the Gaussian with the same concentrated privacy. The adjacency is "the client's contribution zeroed": an
    update moves the sum of `length` integers by its norm bound, a histogram by c√(log2 b) and a weight by 1.

    0 where the whole noise is so few steps wide that the sum of discrete shares is not as good as a Gaussian. Shares of far
    less than one step are nearly always 0, so that many of them have the variance that is asked for, and hide nothing.
    """
    try:
        if kind == "histogram":
            variance, moves = float(asked["sigma"]) ** 2, int(asked["scale"]) * math.sqrt(math.log2(int(asked["bins"])))
        else:
            above, below = asked["variance"]
            variance = int(above) / int(below)
            moves = float(asked["scale"]) if kind == "weight" else float(asked["norm_bound"])
        share = math.sqrt(variance)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError) as failure:
        raise PolicyRefusal(f"The request for the sum {kind!r} does not say how much noise it adds.") from failure
    wide = share >= LEAST_SHARE and math.sqrt(contributors) * share >= ENOUGH_NOISE * (1 - 1e-9)
    if not (wide and math.isfinite(share) and 0 < moves < math.inf):
        return 0.0
    return 1 / concentrated_epsilon(moves, share, contributors, length)


# --------------------------------------------------------------------------------------------------------------- the file


def read_policy(path: str | Path) -> NodePolicy:
    """The policy in a TOML file of the node; unknown keys and wrong values are named."""
    file = Path(path)
    try:
        given = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as failure:
        raise ConfigError(f"The policy {file} cannot be read: {failure.strerror}.") from failure
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as failure:
        raise ConfigError(f"The policy {file} is no TOML: {failure}.") from failure
    kinds = get_type_hints(NodePolicy)
    if unknown := [key for key in given if key not in kinds]:
        known = ", ".join(each.name for each in fields(NodePolicy))
        raise ConfigError(f"The policy {file} has the key {unknown[0]!r}, which is none of: {known}.")
    values = {}
    for key, value in given.items():
        listed = tuple(value) if isinstance(value, list) else value
        values[key] = check_value(listed, kinds[key], f"{key} of the policy {file}")
    for name in ("key", "peers"):  # as seen from the policy's file
        if values.get(name) is not None:
            values[name] = str(file.resolve().parent / values[name])
    return replace(NodePolicy(), **values)
