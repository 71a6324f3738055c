"""Clients of a federation that missed an evaluation: means without them are of other clients, and say so."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equipoise.client_table import ClientTable
    from equipoise.observers import EvaluationPoint

NOUNS = {"train": "training"}
MOST_NAMED = 8  # clients that a sentence names
MOST_ROUNDS = 10  # rounds that a sentence lists


def name_evaluated(table: ClientTable, split: str) -> str:
    """A hash that tells the clients that figures of a split are over: equal for evaluations of the same clients."""
    rows = table.where(split).client
    told = json.dumps([sorted(rows), sorted(table.not_evaluated.get(split, ()))])
    return hashlib.blake2b(told.encode(), digest_size=12).hexdigest()


def count_evaluated(table: ClientTable, split: str) -> int:
    """How many clients the figures of a split are over."""
    rows = table.where(split)
    return len(rows) if rows.clients_in_mean is None else rows.clients_in_mean


def absent_words(table: ClientTable, split: str, *, named: bool = True) -> str:
    """Sentences on the clients that figures of a split leave out, because they were not evaluated; empty without any.

    Names and reasons are left out unless `named`.
    """
    absent = table.not_evaluated.get(split, {})
    if not absent or split not in table.split:
        return ""
    total = len(absent) + count_evaluated(table, split)
    who = f": {list_reasons(absent)}" if named else ""
    verb = "was" if len(absent) == 1 else "were"
    kind = NOUNS.get(split, split)
    return f"{len(absent)} of {total} {kind} clients {verb} not evaluated{who}. Figures are over the others."


def list_reasons(absent: Mapping[str, str]) -> str:
    """Clients and why each was not evaluated.

    >>> list_reasons({"a": "is not connected", "b": "is not connected"})
    'a (is not connected), b (is not connected)'
    """
    shown = [f"{client} ({why})" for client, why in list(absent.items())[:MOST_NAMED]]
    return ", ".join(shown) + (f" and {len(absent) - MOST_NAMED} more" if len(absent) > MOST_NAMED else "")


def changed_clients_words(points: Sequence[EvaluationPoint], split: str, *, named: bool = True) -> str:
    """Sentences on evaluations during a run that are over different clients of a split; empty if all are over the same.

    >>> from equipoise.observers import EvaluationPoint
    >>> without = {"test": {"anna": "is not connected"}}
    >>> points = [EvaluationPoint(1, {}), EvaluationPoint(2, {}, None, without), EvaluationPoint(3, {}, None, without)]
    >>> changed_clients_words(points, "test")[:46]
    'Not evaluated: anna (after rounds 2 and 3). Po'
    """
    rounds: dict[str, list[int]] = {}
    for point in points:
        for client in point.not_evaluated.get(split, ()):
            rounds.setdefault(client, []).append(point.round)
    if len({tuple(sorted(point.not_evaluated.get(split, ()))) for point in points}) < 2:
        return ""
    after = sorted({each for found in rounds.values() for each in found})
    if not named:
        return f"After {_list_rounds(after)} some {NOUNS.get(split, split)} clients were not evaluated. {NOT_COMPARABLE}"
    shown = [f"{client} (after {_list_rounds(found)})" for client, found in list(rounds.items())[:MOST_NAMED]]
    more = f" and {len(rounds) - MOST_NAMED} more" if len(rounds) > MOST_NAMED else ""
    return f"Not evaluated: {', '.join(shown)}{more}. {NOT_COMPARABLE}"


NOT_COMPARABLE = "Points over different clients do not compare: a step between them may come from the clients, not the model."


def _list_rounds(rounds: Sequence[int]) -> str:
    rounds = list(dict.fromkeys(rounds))
    if len(rounds) == 1:
        return f"round {rounds[0]}"
    if len(rounds) > MOST_ROUNDS:
        return f"{len(rounds)} rounds from {rounds[0]} to {rounds[-1]}"
    return f"rounds {', '.join(map(str, rounds[:-1]))} and {rounds[-1]}"
