"""A node's side of secure sums: what it puts into each, and the masks that hide it. Nothing leaves the node unmasked.

A round asks for several sums. Before the first the node computes its loss and keeps it, in Flower's state of the run; each sum
is then a request that says what to add up. Whether the client is in the tail only the node knows: outside it sends zeros,
masked like any other numbers.

As the masks do, this assumes a server that follows the protocol and looks at all it gets. One that does not could give all
clients but one a weight of 0, and no client can see that alone.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import torch
from flwr.app import ConfigRecord
from torch import Tensor

from equipoise.core.abilities import read
from equipoise.engines.flower.apps.node_session import Answer, Handler, NodeSession
from equipoise.engines.flower.personal.node_models import LostRow, score_own_model
from equipoise.engines.flower.secure.masking_client import MaskingClient
from equipoise.engines.flower.secure.sum_messages import MessageKind
from equipoise.engines.flower.secure.sum_terms import SumTerms
from equipoise.engines.flower.transport.messages import BadMessage, bytes_to_tensor
from equipoise.errors import EquipoiseError
from equipoise.privacy.discrete_gaussian import sample_discrete_gaussian
from equipoise.privacy.private_quantile import client_contributions
from equipoise.privacy.private_sums import client_weights
from equipoise.privacy.random_source import RandomSource, Seeded, SystemSource
from equipoise.privacy.secure_aggregate import carried_rows, secure_row_length
from equipoise.privacy.secure_sum import EXACT, quantise
from equipoise.risk.quantile_sources import quantile_by_sums
from equipoise.types import AggregatorTraits, LocalWork, QuantileTraits, RiskTraits

MASKS, ROUND = "equipoise.masks", "equipoise.round"  # records of Flower's state
MOST_SUMS = 4096  # in one message
LARGEST = 1 << 32  # bytes of one masked vector


# ------------------------------------------------------------------------------------------------------ the masking protocol


def answer_invitations(session: NodeSession) -> Answer:
    """Answer invitations to sums, of one round and all at once; at the round's first, compute the loss that they are about."""
    if session.request.values.get("first"):
        for key in (MASKS, ROUND):  # what earlier rounds have left
            session.context.state.pop(key, None)
        if "params" in session.request.arrays:
            session.refuse_unless_training()
            loss = float(session.engine.losses(session.params, session.cohort)[0])
            session.context.state[ROUND] = ConfigRecord({"round": session.request.round, "loss": loss})
    answers = {}
    for name in _names(session):
        client = MaskingClient(session.request.raw_bytes(name, LARGEST), session.client)
        if client.terms.run != session.request.value("run", str) or client.terms.round != session.request.round:
            raise BadMessage("an invitation is of another run or round")
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
        client = MaskingClient.load(state)
        values = compute_contribution(session, client.terms).numpy() if client.awaits == MessageKind.INBOX else None
        answers[name] = bytes_to_tensor(client.answer(session.request.raw_bytes(name, LARGEST), values))
        if client.awaits is None:  # nothing is left to do: forget the rest
            del masks[name]
        else:
            masks[name] = client.save()
    return {}, answers


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
        "quantile": make_quantile_row,
        "reached": make_reached_row,
        "update": make_update_row,
        "histogram": make_histogram_row,
        "weight": make_weight_row,
        "private update": make_private_update_row,
        "scores": make_scores_row,
    }
    kind = asked.get("kind")
    if kind not in kinds:
        raise BadMessage(f"there is no sum of the kind {kind!r}")
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


class _Row(EquipoiseError):
    """Carries a client's row out of the computation of a quantile."""

    def __init__(self, row: Tensor) -> None:
        super().__init__()
        self.row = row


def make_quantile_row(session: NodeSession, asked: dict[str, Any], modulus: int, clients: int) -> Tensor:
    """The client's row in sum number t of the quantile, given the t sums before it.

    The row is found by `quantile_by_sums` over this client alone, with the sums over all clients in the place of its own.
    """
    before = [torch.tensor(s, dtype=torch.float64) for s in asked["before"]]
    risk = _risk(session)
    source = read(QuantileTraits, risk.quantile)
    if risk.client_form != "filter" or source.iterations is None:
        raise BadMessage("it asks for a quantile by sums, and the risk has none")
    taken = 0

    def replay(rows: Tensor) -> Tensor:
        nonlocal taken
        if taken == len(before):
            raise _Row(rows[0])
        taken += 1
        return before[taken - 1].reshape(rows.shape[1:])

    loss, alpha = _loss(session), float(asked["alpha"])
    counts = math.isfinite(loss)
    try:
        quantile_by_sums(
            torch.tensor([loss if counts else 0.0], dtype=torch.float64), torch.tensor([alpha], dtype=torch.float64), risk.tail,
            iterations=source.iterations, tolerance=source.tolerance, secure_sum=replay,
        )  # fmt: skip
    except _Row as carried:
        row = torch.zeros(2, dtype=torch.float64)  # all sums of a quantile have two numbers; in some the second is 0
        row[: carried.row.numel()] = carried.row
        return round_to_steps(row if counts else torch.zeros_like(row), float(asked["step"]), modulus, clients, SystemSource())
    raise BadMessage("it asks for a sum after the last of its quantile")


def make_reached_row(session: NodeSession, asked: dict[str, Any], modulus: int, clients: int) -> Tensor:
    """1 if the client's loss reaches a quantile that was released in an earlier round, else 0."""
    return (_own_weight(session, asked) > 0).long().reshape(1)


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


def _work(session: NodeSession) -> LocalWork | None:
    """The client's local work; None if it cannot be used."""
    session.refuse_unless_training()
    work = session.engine.updates(session.params, session.cohort, session.solver)
    return work if bool(work.arrived[0]) else None


def make_update_row(session: NodeSession, asked: dict[str, Any], modulus: int, clients: int) -> Tensor:
    """(w · u, w) of the client's weight and update, rounded; zeros outside the tail, where no work is done either.

    What is for carried values comes first.
    """
    weight = _own_weight(session, asked)
    nothing = torch.zeros(secure_row_length(session.task), dtype=torch.int64)
    if float(weight) <= 0 or (work := _work(session)) is None:
        return nothing
    update = work.update[0]
    aggregator = session.part("aggregator")
    if not read(AggregatorTraits, aggregator).linear:
        raise BadMessage("an aggregator that is not linear cannot be applied by clients")
    own = aggregator(update.unsqueeze(0), weight.to(update))[0]
    row = torch.cat([carried_rows(work, weight)[0], own.double().cpu(), weight])
    return round_to_steps(row, float(asked["step"]), modulus, clients, SystemSource())


# ----------------------------------------------------------------------------------------------- with differential privacy


def _source(session: NodeSession, asked: dict[str, Any], purpose: str) -> RandomSource:
    """Noise of the node's operating system; by the seed only where the algorithm says so, and ε is nominal."""
    if asked.get("source") != "seeded":
        return SystemSource()
    return Seeded(session.seed, f"{purpose} of {session.client}", session.request.round)


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
        scale=int(asked["scale"]), source=_source(session, asked, "quantile"),
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
    return client_weights(risk, loss, one, bound).clamp(0.0, 1.0)


def make_weight_row(session: NodeSession, asked: dict[str, Any], modulus: int, clients: int) -> Tensor:
    """The client's weight, rounded, with its share of noise."""
    scale, source = int(asked["scale"]), _source(session, asked, "weight rounding")
    whole = quantise(_private_weight(session, asked).unsqueeze(0), step=1 / scale, source=source, norm_bound=scale)[0]
    return _noisy(whole, asked, _source(session, asked, "weight share"))


def make_private_update_row(session: NodeSession, asked: dict[str, Any], modulus: int, clients: int) -> Tensor:
    """The client's update, clipped, weighted and rounded, with its share of noise; noise alone outside the tail."""
    weight, row = _private_weight(session, asked), torch.zeros(session.task.layout.dimension, dtype=torch.float64)
    if float(weight) > 0 and (work := _work(session)) is not None:
        update = work.update[0]
        norm = max(float(update.double().norm()), 1e-300)
        row = update.double().cpu() * (float(weight) * min(1.0, float(asked["clip"]) / norm))
    step, bound, source = float(asked["step"]), float(asked["norm_bound"]), _source(session, asked, "rounding")
    whole = quantise(row.unsqueeze(0), step=step, source=source, norm_bound=bound, modulus=modulus)[0]
    return _noisy(whole, asked, _source(session, asked, "update share"))


# --------------------------------------------------------------------------------------------------------------- evaluation


def make_scores_row(session: NodeSession, asked: dict[str, Any], modulus: int, clients: int) -> Tensor:
    """For each split the client's share of the mean loss and error of the shared model, or of its own, and of the weight."""
    try:
        scores = score_own_model(session) if asked.get("own") else session.score(session.params.unsqueeze(0))
    except LostRow:
        scores = {}
    row = torch.zeros(len(asked["shares"]), 3, dtype=torch.float64)
    for place, (split, share) in enumerate(sorted(asked["shares"].items())):
        pair = scores.get(split)
        if pair is not None and bool(torch.isfinite(pair).all()):
            row[place] = torch.cat([pair, torch.ones(1, dtype=torch.float64)]) * float(share)
    return round_to_steps(row.flatten(), float(asked["step"]), modulus, clients, SystemSource())


HANDLERS: dict[str, Handler] = {
    "train.keys": answer_invitations,
    "train.shares": go_on_with_sums,
    "train.masked": go_on_with_sums,
    "train.reveal": go_on_with_sums,
}
