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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equipoise.core.update_checks import usable
from equipoise.engines.flower.secure.masking import MaskingClient
from equipoise.engines.flower.transport.messages import BadMessage, blob_of
from equipoise.errors import EquipoiseError
from equipoise.privacy.discrete_gaussian import sample_discrete_gaussian
from equipoise.privacy.private_quantile import client_contributions
from equipoise.privacy.private_run import client_weights
from equipoise.privacy.random_source import RandomSource, Seeded, SystemSource
from equipoise.privacy.secure_sum import EXACT, quantise
from equipoise.risk import Mean, Superquantile
from equipoise.risk.quantile_sources import SecureSums, quantile_by_sums

if TYPE_CHECKING:
    from equipoise.engines.flower.apps.client import Answer, Session

MASKS, ROUND = "equipoise.masks", "equipoise.round"  # records of Flower's state
MOST_SUMS = 4096  # in one message
LARGEST = 1 << 32  # bytes of one masked vector


# ------------------------------------------------------------------------------------------------------ the masking protocol


def keys(session: Session) -> Answer:
    """Answer invitations to sums, of one round and all at once; at the round's first, compute the loss that they are about."""
    if session.parcel.values.get("first"):
        _forget(session)
        if "params" in session.parcel.arrays:
            _remember_loss(session)
    answers = {}
    for name in _names(session):
        client = MaskingClient(session.parcel.blob(name, LARGEST), session.client)
        if client.terms.run != session.parcel.value("run", str) or client.terms.round != session.parcel.round:
            raise BadMessage("an invitation is of another run or round")
        answers[name] = blob_of(client.keys())
        _save(session, name, client)
    return {}, answers


def shares(session: Session) -> Answer:
    """Deal shares of the masks' seeds to the other clients, sealed."""
    answers = {}
    for name in _names(session):
        client = _load(session, name)
        answers[name] = blob_of(client.share(session.parcel.blob(name, LARGEST)))
        _save(session, name, client)
    return {}, answers


def masked(session: Session) -> Answer:
    """What the client adds to one sum, under its mask."""
    (name,) = _names(session)
    client = _load(session, name)
    terms = client.terms
    values = contribution(session, session.parcel.value("sum", dict), terms.length, terms.modulus, len(terms.clients))
    answer = client.mask(session.parcel.blob(name, LARGEST), values.numpy())
    _save(session, name, client)
    return {}, {name: blob_of(answer)}


def reveal(session: Session) -> Answer:
    """Give back what unmasks the sum, and forget the rest."""
    (name,) = _names(session)
    client = _load(session, name)
    answer = client.reveal(session.parcel.blob(name, LARGEST))
    _drop(session, name)
    return {}, {name: blob_of(answer)}


def _names(session: Session) -> list[str]:
    names = [name for name in session.parcel.arrays if name.startswith("sum.")]
    if not 1 <= len(names) <= MOST_SUMS:
        raise BadMessage(f"it is about {len(names)} sums")
    return names


def _save(session: Session, name: str, client: MaskingClient) -> None:
    from flwr.app import ConfigRecord

    record = session.context.state.get(MASKS)
    kept: dict[str, Any] = dict(record.items()) if record is not None else {}
    session.context.state[MASKS] = ConfigRecord({**kept, name: client.save()})


def _load(session: Session, name: str) -> MaskingClient:
    record = session.context.state.get(MASKS)
    state = record.get(name) if record is not None else None
    if not isinstance(state, bytes):
        raise BadMessage("it is about a sum that this node has no part in")
    return MaskingClient.load(state)


def _drop(session: Session, name: str) -> None:
    del session.context.state[MASKS][name]


def _forget(session: Session) -> None:
    """Drop what earlier rounds have left."""
    for key in (MASKS, ROUND):
        if key in session.context.state:
            del session.context.state[key]


def _remember_loss(session: Session) -> None:
    from flwr.app import ConfigRecord

    session.refuse_unless_training()
    loss = float(session.engine.losses(session.params, session.cohort())[0])
    session.context.state[ROUND] = ConfigRecord({"round": session.parcel.round, "loss": loss})


def _loss(session: Session) -> float:
    """The loss at the start of this round."""
    record = session.context.state.get(ROUND)
    if record is None or record.get("round") != session.parcel.round:
        raise BadMessage("this node has computed no loss in this round")
    return float(record["loss"])  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- what goes into each sum


def contribution(session: Session, ask: dict[str, Any], length: int, modulus: int, clients: int) -> Tensor:
    """The whole numbers (length,) int64 that this client adds to a sum."""
    kinds = {
        "quantile": quantile_row,
        "reached": reached_row,
        "update": update_row,
        "histogram": histogram_row,
        "weight": weight_row,
        "private update": private_update_row,
        "scores": scores_row,
    }
    kind = ask.get("kind")
    if kind not in kinds:
        raise BadMessage(f"there is no sum of the kind {kind!r}")
    found = kinds[kind](session, ask, modulus, clients)
    if found.shape != (length,):
        raise BadMessage(f"a sum of {kind!r} has {len(found)} numbers here, and {length} were asked for")
    return found


def rounded(values: Tensor, step: float, modulus: int, clients: int, source: RandomSource) -> Tensor:
    """Floats (d,) as whole numbers of steps; zeros in place of what is not finite or would not fit into the sum."""
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


def quantile_row(session: Session, ask: dict[str, Any], modulus: int, clients: int) -> Tensor:
    """The client's row in sum number t of the quantile, given the t sums before it: the same computation, up to there.

    It is `risk.quantile.quantile_by_sums` over this client alone, with the sums over all in the place of its own.
    """
    risk, before = session.part("risk"), [torch.tensor(s, dtype=torch.float64) for s in ask["before"]]
    if not isinstance(risk, Superquantile) or not isinstance(risk.quantile, SecureSums):
        raise BadMessage("it asks for a quantile by sums, and the risk has none")
    taken = 0

    def replay(rows: Tensor) -> Tensor:
        nonlocal taken
        if taken == len(before):
            raise _Row(rows[0])
        taken += 1
        return before[taken - 1].reshape(rows.shape[1:])

    loss, alpha = _loss(session), float(ask["alpha"])
    counts = math.isfinite(loss)
    try:
        quantile_by_sums(
            torch.tensor([loss if counts else 0.0], dtype=torch.float64), torch.tensor([alpha], dtype=torch.float64), risk.tail,
            iterations=risk.quantile.iterations, tolerance=risk.quantile.tolerance, secure_sum=replay,
        )  # fmt: skip
    except _Row as found:
        row = torch.zeros(2, dtype=torch.float64)  # all sums of a quantile have two numbers; in some the second is 0
        row[: found.row.numel()] = found.row
        return rounded(row if counts else torch.zeros_like(row), float(ask["step"]), modulus, clients, SystemSource())
    raise BadMessage("it asks for a sum after the last of its quantile")


def reached_row(session: Session, ask: dict[str, Any], modulus: int, clients: int) -> Tensor:
    """1 if the client's loss reaches a quantile that was released in an earlier round, else 0."""
    return (_own_weight(session, ask) > 0).long().reshape(1)


def _own_weight(session: Session, ask: dict[str, Any]) -> Tensor:
    """The weight (1,) that the client finds alone: of its base weight, its loss, and what was released."""
    risk, base = session.part("risk"), torch.tensor([float(ask["base"])], dtype=torch.float64)
    if isinstance(risk, Mean):
        return base
    loss = torch.tensor([_loss(session)], dtype=torch.float64)
    if not bool(torch.isfinite(loss)):
        return torch.zeros_like(base)
    return client_weights(risk, loss, base, float(ask["public"]))


def _update(session: Session) -> Tensor | None:
    """The update (D,) of the client's local work; None if it cannot be used."""
    session.refuse_unless_training()
    params = session.params
    work = session.engine.updates(params, session.cohort(), session.solver)
    update = work.update[0]
    good = bool(torch.isfinite(work.sq_norms[0])) and bool(usable(work.sq_norms, work.losses, params)[0])
    return update if good else None


def update_row(session: Session, ask: dict[str, Any], modulus: int, clients: int) -> Tensor:
    """(w · u, w) of the client's weight and update, rounded; zeros outside the tail, where no work is done either."""
    weight = _own_weight(session, ask)
    nothing = torch.zeros(session.task.layout.dimension + 1, dtype=torch.int64)
    if float(weight) <= 0 or (update := _update(session)) is None:
        return nothing
    aggregator = session.part("aggregator")
    if not getattr(aggregator, "linear", False):
        raise BadMessage("an aggregator that is not linear cannot be applied by clients")
    own = aggregator(update.unsqueeze(0), weight.to(update))[0]
    row = torch.cat([own.double().cpu(), weight])
    return rounded(row, float(ask["step"]), modulus, clients, SystemSource())


# ----------------------------------------------------------------------------------------------- with differential privacy


def _source(session: Session, ask: dict[str, Any], purpose: str) -> RandomSource:
    """Noise of the node's operating system; by the seed only where the algorithm says so, and ε is nominal."""
    if ask.get("source") != "seeded":
        return SystemSource()
    return Seeded(session.seed, f"{purpose} of {session.client}", session.parcel.round)


def _noisy(whole: Tensor, ask: dict[str, Any], source: RandomSource) -> Tensor:
    variance = Fraction(int(ask["variance"][0]), int(ask["variance"][1]))
    return whole + sample_discrete_gaussian(variance, len(whole), source=source) if variance > 0 else whole


def _bounded_loss(session: Session, bound: float) -> Tensor:
    """The loss clipped to [0, bound], (1,); one that is no number counts as the bound."""
    return torch.tensor([_loss(session)], dtype=torch.float64).nan_to_num(nan=math.inf).clamp(0.0, bound)


def histogram_row(session: Session, ask: dict[str, Any], modulus: int, clients: int) -> Tensor:
    """The client's hierarchical histogram, with its share of noise (privacy.quantile)."""
    bound = float(ask["bound"])
    return client_contributions(
        _bounded_loss(session, bound), bound=bound, bins=int(ask["bins"]), sigma=float(ask["sigma"]), scale=int(ask["scale"]),
        source=_source(session, ask, "quantile"),
    )[0]  # fmt: skip


def _private_weight(session: Session, ask: dict[str, Any]) -> Tensor:
    """A weight in [0, 1], (1,), that the client finds alone."""
    risk, one = session.part("risk"), torch.ones(1, dtype=torch.float64)
    if isinstance(risk, Mean):
        return one
    bound = float(ask["bound"])
    if isinstance(risk, Superquantile):
        return client_weights(risk, _bounded_loss(session, bound), one, float(ask["public"]))
    loss = torch.tensor([_loss(session)], dtype=torch.float64).nan_to_num(nan=math.inf)
    return client_weights(risk, loss, one, bound).clamp(0.0, 1.0)


def weight_row(session: Session, ask: dict[str, Any], modulus: int, clients: int) -> Tensor:
    """The client's weight, rounded, with its share of noise."""
    scale = int(ask["scale"])
    whole = quantise(
        _private_weight(session, ask).unsqueeze(0), step=1 / scale, source=_source(session, ask, "weight rounding"),
        norm_bound=scale,
    )[0]  # fmt: skip
    return _noisy(whole, ask, _source(session, ask, "weight share"))


def private_update_row(session: Session, ask: dict[str, Any], modulus: int, clients: int) -> Tensor:
    """The client's update, clipped, weighted and rounded, with its share of noise; noise alone outside the tail."""
    weight, row = _private_weight(session, ask), torch.zeros(session.task.layout.dimension, dtype=torch.float64)
    if float(weight) > 0 and (update := _update(session)) is not None:
        norm = max(float(update.double().norm()), 1e-300)
        row = update.double().cpu() * (float(weight) * min(1.0, float(ask["clip"]) / norm))
    whole = quantise(
        row.unsqueeze(0), step=float(ask["step"]), source=_source(session, ask, "rounding"),
        norm_bound=float(ask["norm_bound"]), modulus=modulus,
    )[0]  # fmt: skip
    return _noisy(whole, ask, _source(session, ask, "update share"))


# --------------------------------------------------------------------------------------------------------------- evaluation


def scores_row(session: Session, ask: dict[str, Any], modulus: int, clients: int) -> Tensor:
    """For each split the client's share of the mean loss and error of the shared model, or of its own, and of the weight."""
    from equipoise.engines.flower.apps.client import LostRow, own_scored, scored

    try:
        found = own_scored(session) if ask.get("own") else scored(session, session.params.unsqueeze(0))
    except LostRow:
        found = {}
    row = torch.zeros(len(ask["shares"]), 3, dtype=torch.float64)
    for place, (split, share) in enumerate(sorted(ask["shares"].items())):
        pair = found.get(split)
        if pair is not None and bool(torch.isfinite(pair).all()):
            row[place] = torch.cat([pair, torch.ones(1, dtype=torch.float64)]) * float(share)
    return rounded(row.flatten(), float(ask["step"]), modulus, clients, SystemSource())


HANDLERS = {"train.keys": keys, "train.shares": shares, "train.masked": masked, "train.reveal": reveal}
