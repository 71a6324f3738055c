"""A node's side of secure sums: what it puts into each, and the masks that hide it. Nothing leaves the node unmasked.

A round asks for several sums. Before the first the node computes its loss and keeps it, in Flower's state of the run; each sum
is then a request that says what to add up. Whether the client is in the tail only the node knows: outside it does the same
work and sends zeros, masked like any other numbers.

As the masks do, this assumes a server that follows the protocol and looks at all it gets. One that does not could give all
clients but one a weight of 0, and no client can see that alone.
"""

from __future__ import annotations

import hashlib
import json
import math
from fractions import Fraction
from typing import Any

import torch
from flwr.app import ConfigRecord
from torch import Tensor

from equipoise.core.abilities import read
from equipoise.engines.flower.apps.node_policy import EXACT_SUMS, noise_multiplier_of
from equipoise.engines.flower.apps.node_session import Answer, Handler, NodeSession
from equipoise.engines.flower.personal.node_models import LostRow, score_own_model
from equipoise.engines.flower.personal.solver_memory import NodeWork
from equipoise.engines.flower.secure.masked_sums import ALIAS, OWN_VALUE, split_of
from equipoise.engines.flower.secure.masking_client import MaskingClient
from equipoise.engines.flower.secure.sum_messages import MessageKind
from equipoise.engines.flower.secure.sum_terms import SCORES, SumTerms
from equipoise.engines.flower.transport.messages import BadMessage, MessageContent, bytes_to_tensor
from equipoise.errors import is_number
from equipoise.privacy.discrete_gaussian import sample_discrete_gaussian
from equipoise.privacy.private_quantile import client_contributions
from equipoise.privacy.private_sums import client_weights
from equipoise.privacy.random_source import RandomSource, SystemSource
from equipoise.privacy.secure_aggregate import carried_rows
from equipoise.privacy.secure_sum import EXACT, quantise
from equipoise.solvers.batches import normalisers_of
from equipoise.types import AggregatorTraits, LocalSolver, QuantileTraits, RiskTraits

MASKS, ROUND, COSTS = "equipoise.masks", "equipoise.round", "equipoise.costs"  # records of Flower's state
MOST_SUMS = 4096  # in one message
LARGEST = 1 << 32  # bytes of one masked vector


# ------------------------------------------------------------------------------------------------------ the masking protocol


def answer_invitations(session: NodeSession) -> Answer:
    """Answer invitations to sums, of one round and all at once; at the round's first, compute the loss that they are about.

    Parts that the owner does not allow are refused here, before any sum of the round is released.
    """
    for kind in ("risk", "aggregator"):
        session.policy.check_part(session.request.values.get(kind))
    if session.request.values.get("first"):
        for key in (MASKS, ROUND, COSTS):  # what earlier rounds have left
            session.context.state.pop(key, None)
        if "params" in session.request.arrays:
            session.refuse_unless_training()
            loss = float(session.engine.losses(session.params, session.cohort)[0])
            about = hash_request(session.given)  # in a signed sum all clients answer for the model that the loss is of
            session.context.state[ROUND] = ConfigRecord({"round": session.request.round, "loss": loss, "about": about})
    answers = {}
    called = session.client if session.identity is not None else session.request.value(ALIAS, str)
    for name in _names(session):
        client = MaskingClient(session.request.raw_bytes(name, LARGEST), called, session.identity)
        if client.terms.run != session.request.value("run", str) or client.terms.round != session.request.round:
            raise BadMessage("an invitation is of another run or round")
        session.policy.check_terms(client.terms)
        if is_evaluation(client.terms):
            session.ledger.check_evaluations(client.terms.run, client.terms.round, session.policy.evaluations)
        else:
            session.policy.check_round(client.terms.round)
        answers[name] = bytes_to_tensor(client.keys())
        _masks(session)[name] = client.save()
    return {}, answers


def go_on_with_sums(session: NodeSession) -> Answer:
    """The next step of sums: deal shares of the masks' seeds, add a contribution under its mask, or reveal what unmasks."""
    answers, masks = {}, _masks(session)
    for name in _names(session):
        state = masks.get(name)
        if not isinstance(state, bytes):
            raise BadMessage("it is about a sum that this node has no part in")
        client, values, subject = MaskingClient.load(state, session.identity), None, b""
        if client.awaits == MessageKind.INBOX:
            values, subject = compute_contribution(session, client.terms).numpy(), describe_subject(session)
            set_cost(session, name, client.terms)
        answers[name] = bytes_to_tensor(client.answer(session.request.raw_bytes(name, LARGEST), values, subject))
        if client.awaits is None:  # what it reveals completes the sum: that is written down first, and once
            begin_release(session, name, client.terms)
            del masks[name]  # nothing is left to do: forget the rest
        else:
            masks[name] = client.save()
    return {}, answers


def set_cost(session: NodeSession, name: str, terms: SumTerms) -> None:
    """Keep, until the sum is revealed, how much noise it has; a sum that the owner's budget does not allow is refused."""
    asked = session.request.value("sum", dict)
    exact = is_evaluation(terms) or asked["kind"] in EXACT_SUMS
    noise = -1.0 if exact else noise_multiplier_of(asked["kind"], asked, terms.fewest, terms.length)
    if noise >= 0:
        session.ledger.check_budget(noise, session.policy.epsilon, session.policy.budget_delta)
    records = session.context.state.config_records
    if COSTS not in records:
        records[COSTS] = ConfigRecord({})
    records[COSTS][name] = noise


def begin_release(session: NodeSession, name: str, terms: SumTerms) -> None:
    """Write into the node's own ledger what it is about to reveal; what it has revealed before is refused."""
    noise = float(session.context.state.config_records[COSTS][name])  # type: ignore[arg-type]
    policy, multiplier = session.policy, noise if noise >= 0 else None
    session.ledger.begin(
        terms.run, terms.round, terms.purpose, multiplier, epsilon=policy.epsilon, delta=policy.budget_delta,
        evaluations=policy.evaluations,
    )  # fmt: skip


def hash_request(request: MessageContent) -> bytes:
    """A hash of what a request asks for: all of its values but the client's own batch seed, and its tensors but the masks."""
    values = {key: value for key, value in request.values.items() if key != OWN_VALUE}
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
    for name, array in sorted(request.arrays.items()):
        if not name.startswith("sum."):
            digest.update(json.dumps([name, array.dtype, list(array.shape), len(array.data)]).encode() + array.data)
    return digest.digest()


def describe_subject(session: NodeSession) -> bytes:
    """A hash of what a sum is about: the request that asks for it, and the one that the loss of the round was computed by."""
    record = session.context.state.config_records.get(ROUND)
    about = record.get("about") if record is not None and record.get("round") == session.request.round else None
    return hashlib.sha256(hash_request(session.given) + (about if isinstance(about, bytes) else b"")).digest()


def is_evaluation(terms: SumTerms) -> bool:
    """Whether a sum is an evaluation, by its purpose."""
    return terms.purpose.startswith(SCORES)


def _names(session: NodeSession) -> list[str]:
    names = [name for name in session.request.arrays if name.startswith("sum.")]
    if not 1 <= len(names) <= MOST_SUMS:
        raise BadMessage(f"it is about {len(names)} sums")
    return names


def _masks(session: NodeSession) -> ConfigRecord:
    """What the node keeps of its sums between two messages, by their names."""
    records = session.context.state.config_records
    if MASKS not in records:
        records[MASKS] = ConfigRecord({})
    return records[MASKS]


def _loss(session: NodeSession) -> float:
    """The loss at the start of this round."""
    record = session.context.state.config_records.get(ROUND)
    if record is None or record.get("round") != session.request.round:
        raise BadMessage("this node has computed no loss in this round")
    return float(record["loss"])  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- what goes into each sum


def compute_contribution(session: NodeSession, terms: SumTerms) -> Tensor:
    """The integers (length,) int64 that this client adds to a sum."""
    asked = session.request.value("sum", dict)
    kinds = {
        "counts": make_counts_row,
        "update": make_update_row,
        "histogram": make_histogram_row,
        "weight": make_weight_row,
        "private update": make_private_update_row,
        "scores": make_scores_row,
    }
    kind = asked.get("kind")
    if kind not in kinds:
        raise BadMessage(f"no kind of sum is called {kind!r}")
    if (kind == "scores") != is_evaluation(terms):
        raise BadMessage(f"{terms} is asked for a sum called {kind!r}")
    session.check_weights(asked, split_of(terms.purpose))
    session.policy.check_sum(kind, {**asked, "filtered": kind == "update" and _risk(session).client_form == "filter"}, terms)
    asked = {**asked, "split": split_of(terms.purpose)}
    row = kinds[kind](session, asked, terms.modulus, len(terms.clients))
    if row.shape != (terms.length,):
        raise BadMessage(f"a sum of {kind!r} has {len(row)} numbers here, and {terms.length} were asked for")
    return row


def round_to_steps(values: Tensor, step: float, modulus: int, clients: int, source: RandomSource) -> Tensor:
    """Floats (d,) as integer multiples of a step; zeros in place of what is not finite or would not fit into the sum."""
    room = min((modulus - 1) // 2 // clients, EXACT - 1) * step
    values = values.double()
    if not bool((values.abs() <= room).all()):  # NaN compares as False
        values = torch.zeros_like(values)
    return quantise(values.unsqueeze(0), step=step, source=source, modulus=modulus)[0]


def make_counts_row(session: NodeSession, asked: dict[str, Any], modulus: int, clients: int) -> Tensor:
    """1 in the bin of the client's loss; nowhere if it is not finite, as such a client takes no part."""
    histogram = _risk(session).quantile
    source = read(QuantileTraits, histogram).histogram
    if source is None or (source.bound, source.bins) != (asked["bound"], asked["bins"]):
        raise BadMessage("it asks for a histogram that the risk does not have")
    loss = torch.tensor([_loss(session)], dtype=torch.float64)
    return source.rows(torch.where(loss.isfinite(), loss, math.nan))[0]


def _risk(session: NodeSession) -> RiskTraits:
    """What the round's risk offers."""
    return read(RiskTraits, session.part("risk"))


def _own_weight(session: NodeSession, asked: dict[str, Any]) -> Tensor:
    """The weight (1,) that the client finds alone: of its base weight, its loss, and what was released."""
    risk, base = _risk(session), torch.tensor([float(asked["base"])], dtype=torch.float64)
    if risk.client_form == "base":
        return base
    loss = torch.tensor([_loss(session)], dtype=torch.float64)
    if not bool(torch.isfinite(loss)):
        return torch.zeros_like(base)
    return client_weights(risk, loss, base, float(asked["public"]))


def _length(session: NodeSession, solver: LocalSolver) -> tuple[float, AggregatorTraits] | None:
    """The length a of the client's steps, and what the aggregator offers, if it divides updates by it (FedNova); else None."""
    aggregator = read(AggregatorTraits, session.part("aggregator"))
    if aggregator.normalises is None:
        return None
    least = session.task.smallest_batch
    length = float(normalisers_of(session.cohort, solver, session.started.data.train, least)[0])
    return max(length, 1e-300), aggregator  # a client without a step has no weight


def make_update_row(session: NodeSession, asked: dict[str, Any], modulus: int, clients: int) -> Tensor:
    """(w · u, w) of the client's weight and update, rounded. Outside the tail the work is done as well, and zeros are sent.

    It is done whatever the client's weight is: how long a node takes must not tell whether it is in the tail. What is for
    carried values comes first. FedNova's row is (w · u/a, w · a, w), or (w · u · steps/a, w) with a public number of steps.
    """
    done, weight = NodeWork(session), _own_weight(session, asked)
    work, more = done.work, weight[:0]
    update = work.update[0]
    if (normalised := _length(session, done.solver)) is not None:
        length, traits = normalised
        update = update * ((1.0 if traits.steps is None else traits.steps) / length)
        more = weight * length if traits.steps is None else more
    aggregator = session.part("aggregator")
    if not read(AggregatorTraits, aggregator).linear:
        raise BadMessage("an aggregator that is not linear cannot be applied by clients")
    own = aggregator(update.unsqueeze(0), weight.to(update))[0]
    row = torch.cat([carried_rows(work, weight)[0], own.double().cpu(), more, weight])
    usable = bool(work.arrived[0]) & (float(weight) > 0)
    done.keep(counts=usable)
    return round_to_steps(torch.where(torch.tensor(usable), row, 0.0), float(asked["step"]), modulus, clients, SystemSource())


# ----------------------------------------------------------------------------------------------- with differential privacy


def takes_part(session: NodeSession, asked: dict[str, Any]) -> bool:
    """Whether this client is in the round: by a coin of the node, where the server asks for coins, else always.

    The coin is one for all sums of a round, and for all tries of it. The work and the noise do not depend on it.
    """
    rate = asked.get("rate", 1.0)
    if not is_number(rate) or not 0 < rate <= 1:
        raise BadMessage("its rate is no chance to take part")
    return session.ledger.coin(session.request.value("run", str), session.request.round) < float(rate)


def _noisy(whole: Tensor, asked: dict[str, Any], source: RandomSource) -> Tensor:
    variance = Fraction(int(asked["variance"][0]), int(asked["variance"][1]))
    return whole + sample_discrete_gaussian(variance, len(whole), source=source) if variance > 0 else whole


def _bounded_loss(session: NodeSession, bound: float) -> Tensor:
    """The loss clipped to [0, bound], (1,); one that is no number counts as the bound."""
    return torch.tensor([_loss(session)], dtype=torch.float64).nan_to_num(nan=math.inf).clamp(0.0, bound)


def make_histogram_row(session: NodeSession, asked: dict[str, Any], modulus: int, clients: int) -> Tensor:
    """The client's hierarchical histogram, with its share of noise (equipoise.privacy.private_quantile)."""
    bound = float(asked["bound"])
    return client_contributions(
        _bounded_loss(session, bound), bound=bound, bins=int(asked["bins"]), sigma=float(asked["sigma"]),
        scale=int(asked["scale"]) * takes_part(session, asked), source=SystemSource(),
    )[0]  # fmt: skip


def _private_weight(session: NodeSession, asked: dict[str, Any]) -> Tensor:
    """A weight in [0, 1], (1,), that the client finds alone."""
    risk, one = _risk(session), torch.ones(1, dtype=torch.float64)
    if risk.client_form == "base":
        return one
    bound = float(asked["bound"])
    if risk.client_form == "filter":
        return client_weights(risk, _bounded_loss(session, bound), one, float(asked["public"]))
    loss = torch.tensor([_loss(session)], dtype=torch.float64).nan_to_num(nan=math.inf)
    return client_weights(risk, loss, one, bound)


def make_weight_row(session: NodeSession, asked: dict[str, Any], modulus: int, clients: int) -> Tensor:
    """The client's weight, rounded, with its share of noise."""
    scale, source = int(asked["scale"]), SystemSource()
    weight = _private_weight(session, asked) * takes_part(session, asked)
    whole = quantise(weight.unsqueeze(0), step=1 / scale, source=source, norm_bound=scale)[0]
    return _noisy(whole, asked, source)


def make_private_update_row(session: NodeSession, asked: dict[str, Any], modulus: int, clients: int) -> Tensor:
    """The client's update, clipped, weighted and rounded, with its share of noise; outside the tail its weight is 0."""
    done, weight = NodeWork(session), float(_private_weight(session, asked)) * takes_part(session, asked)
    work, update = done.work, done.work.update[0].double().cpu()
    if (normalised := _length(session, done.solver)) is not None:
        update = update * (float(normalised[1].steps or 0.0) / normalised[0])
    norm = max(float(update.norm()), 1e-300)
    usable = bool(work.arrived[0]) & math.isfinite(norm) & (weight > 0)
    done.keep(counts=usable)
    row = torch.where(torch.tensor(usable), update * (weight * min(1.0, float(asked["clip"]) / norm)), 0.0)
    step, bound, source = float(asked["step"]), float(asked["norm_bound"]), SystemSource()
    whole = quantise(row.unsqueeze(0), step=step, source=source, norm_bound=bound, modulus=modulus)[0]
    return _noisy(whole, asked, source)


# --------------------------------------------------------------------------------------------------------------- evaluation


def make_scores_row(session: NodeSession, asked: dict[str, Any], modulus: int, clients: int) -> Tensor:
    """The client's share of the mean loss and error, on one split, of the shared model or of its own; and of the weight.

    A client without that split refuses: a mean over clients that have nothing to add would be that of the others.
    """
    split, row = asked["split"], torch.zeros(3, dtype=torch.float64)
    if split not in session.node.sizes:
        raise BadMessage(f"it asks for scores on {split!r}, and this node has no such examples")
    try:
        scores = session.own_scores(score_own_model) if asked.get("own") else session.shared_scores
    except LostRow:
        scores = {}
    pair = scores.get(split)
    if pair is not None and bool(torch.isfinite(pair).all()):
        row = torch.cat([pair, torch.ones(1, dtype=torch.float64)]) * float(asked["shares"][split])
    return round_to_steps(row, float(asked["step"]), modulus, clients, SystemSource())


HANDLERS: dict[str, Handler] = {
    "train.keys": answer_invitations,
    "train.shares": go_on_with_sums,
    "train.masked": go_on_with_sums,
    "train.confirm": go_on_with_sums,
    "train.reveal": go_on_with_sums,
}
