"""What a knob shows: for each member of a family, how clients fare, who gains and who loses beside the first member."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from equipoise.metrics import summarise

if TYPE_CHECKING:
    from equipoise.client_table import ClientTable

BINS = 20
NAMED = 8  # clients that are named among those that gain most, and lose most


@dataclass(frozen=True, eq=False)
class MemberClients:
    """A member of a family: the value of the knob, its name, and its table of clients."""

    value: float
    name: str
    clients: ClientTable


def knob_data(
    knob: str, members: Sequence[MemberClients], judged_on: str, *, error_is_loss: bool, private: bool = False
) -> dict[str, Any]:
    """The numbers of a knob as JSON, from the average to the tail; the first member is what gains and losses are against.

    With `private` there are no single clients in it: neither names nor a histogram.
    """
    ordered = sorted(members, key=lambda member: -member.value if knob == "tail" else member.value)
    tables = [member.clients.where(judged_on).benign for member in ordered]
    errors = [table.served_error.double() for table in tables]
    finite = torch.cat(errors)
    finite = finite[finite.isfinite()]
    percent = not error_is_loss and bool(((finite >= 0) & (finite <= 1)).all())
    edges = _edges(finite, percent)
    weights = tables[0].size.double() if judged_on == "train" else None
    shown = []
    for member, error in zip(ordered, errors, strict=True):
        found = summarise(error, tables[0].size, weights)
        numbers = {
            "mean": found.mean, "percentile_90": found.percentiles[90], "worst_10": found.worst_10,
            "standard_deviation": found.standard_deviation,
        }  # fmt: skip
        about: dict[str, Any] = {"value": member.value, "name": member.name, "words": in_words(knob, member.value)}
        about |= {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        if not private:
            about["counts"] = np.histogram(error[error.isfinite()].numpy(), edges)[0].tolist()
            about |= _moves(tables[0], errors[0], error)
        shown.append(about)
    return {
        "knob": knob, "noun": "loss" if error_is_loss else "error", "percent": percent, "judged_on": judged_on,
        "clients": len(tables[0]), "unseen": not bool(tables[0].seen.any()), "private": private,
        "edges": [] if private else edges.tolist(), "members": shown,
    }  # fmt: skip


def _edges(finite: Tensor, percent: bool) -> Any:
    if percent:
        return np.linspace(0.0, 1.0, BINS + 1)
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    return np.linspace(low, high if high > low else low + 1.0, BINS + 1)


def _moves(table: ClientTable, before: Tensor, after: Tensor) -> dict[str, Any]:
    """How many clients gain and lose beside the first member, and those that do most."""
    change = torch.nan_to_num(after - before, nan=0.0)
    # Loads of clients have the same change; among these the order is that of the table.
    order = torch.argsort(change, stable=True).tolist()

    def row(place: int) -> dict[str, Any]:
        return {
            "client": table.client[place], "examples": int(table.size[place]),
            "before": _finite(before[place]), "after": _finite(after[place]),
        }  # fmt: skip

    gain = [row(place) for place in order[:NAMED] if change[place] < -1e-12]
    lose = [row(place) for place in order[::-1][:NAMED] if change[place] > 1e-12]
    return {"gains": int((change < -1e-12).sum()), "loses": int((change > 1e-12).sum()), "gain": gain, "lose": lose}


def _finite(value: Tensor) -> float | None:
    return float(value) if bool(value.isfinite()) else None


def in_words(knob: str, value: float) -> str:
    """What a value of the knob means.

    >>> in_words("tail", 1.0), in_words("tail", 0.5)
    ('trained for the average client', 'trained for the worse 50 % of the clients')
    """
    if (knob == "tail" and value == 1.0) or (knob != "tail" and value == 0.0):
        return "trained for the average client"
    if knob == "tail":
        return f"trained for the worse {100 * value:.4g} % of the clients"
    less = knob == "tilt" and value < 0
    return (
        f"trained with {knob} = {value:g}: {'typical clients count more' if less else 'clients with a large loss count more'}"
    )
