"""Clients with few examples: how many there are, what that means for their errors, and figures that leave them out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch

from equipoise.errors import InvalidParameter, require_integer
from equipoise.metrics import counts_wrong

if TYPE_CHECKING:
    from equipoise.client_table import ClientTable
    from equipoise.run_record import RunRecord

FEW_EXAMPLES = 30  # on fewer, chance moves a client's error by 10 points and more
FAR_WORSE = 2  # times the mean error of the others: clients left out that err more are spoken of
HINT = f"at_least={FEW_EXAMPLES} leaves them out"
_NOUNS = {"train": "training"}

Record = TypeVar("Record", bound="RunRecord")


def without_small_clients(run: Record, at_least: int) -> Record:
    """The record without test and validation clients of fewer than `at_least` examples, and how many of them there were.

    Training clients stay unless the run is judged on them. Rows that are means over clients have no sizes to go by.
    """
    require_integer("at_least", at_least, 0)
    if at_least <= run.at_least:
        return run
    table, judged = run.clients, run.judged_on
    rows = table.where(judged)
    if rows.clients_in_mean is not None:
        raise InvalidParameter("at_least", "must be 0 for runs of which means alone are known", at_least, "Leave it out.")
    if not bool((rows.benign.size >= at_least).any()):
        rule = f"must leave a client, and no {_NOUNS.get(judged, judged)} client has more than {int(rows.size.max())} examples"
        raise InvalidParameter("at_least", rule, at_least, "Lower it.")
    spared = torch.tensor([split == "train" and judged != "train" for split in table.split])
    kept = (table.size >= at_least) | spared
    judged_splits = set(table.split) - ({"train"} if judged != "train" else set())
    left_out, left_out_error = {}, {}
    for split in judged_splits:
        benign = table.where(split).benign
        errors = benign.served_error[benign.size < at_least].double()
        before = run.left_out.get(split, 0)
        left_out[split] = before + len(errors)
        if left_out[split]:
            total = float(errors.sum()) + (before * run.left_out_error[split] if before else 0.0)
            left_out_error[split] = total / left_out[split]
    rest = table.take(kept.nonzero().flatten())
    return replace(run, clients=rest, at_least=at_least, left_out=left_out, left_out_error=left_out_error)


def small_clients_words(runs: Sequence[RunRecord], hint: str = HINT, judged_rows: Sequence[ClientTable] | None = None) -> str:
    """A sentence on judged clients with few examples: how many, or that they are left out; empty if all have enough.

    `hint` says how to leave them out. Seeds may have other clients: of these the largest count is given. `judged_rows` are
    the rows that the runs are judged on, if they are known already.
    """
    every = [run.clients.where(run.judged_on) for run in runs] if judged_rows is None else judged_rows
    tables = [rows.benign for rows in every]
    if any(rows.clients_in_mean is not None for rows in tables):
        return ""
    least = max(run.at_least for run in runs)
    few = least or FEW_EXAMPLES
    counts = [
        (run.left_out.get(run.judged_on, 0) if least else int((rows.size < few).sum()), len(rows))
        for run, rows in zip(runs, tables, strict=True)
    ]
    small, rest = max(counts)
    total = small + rest if least else rest
    kind = _NOUNS.get(runs[0].judged_on, runs[0].judged_on)
    kind = f"{'benign ' * (sum(map(len, tables)) < sum(map(len, every)))}{kind}"
    kind = f"{'evaluated ' * any(run.sample_of(run.judged_on) is not None for run in runs)}{kind}"
    upto = "Up to " if len(set(counts)) > 1 else ""
    all_have = f"All {total:,} {kind} clients have" if total > 1 else f"The only {kind} client has"
    if not small:
        return f"{all_have} {few} examples or more." if least else ""
    who = f"{upto}{small:,} of {total:,} {kind} clients {'have' if small > 1 else 'has'}"
    if least:
        worse = _worse_left_out(runs, tables, hint)
        return f"{who} fewer than {few} examples and {'are' if small > 1 else 'is'} left out.{worse}"
    if small == total and not upto:
        who, hint = all_have, ""
    whose = "its" if small == 1 else "their"
    shares = all(counts_wrong(rows.served_error, rows.size) for rows in tables)
    largest = max((int(rows.size[rows.size < few].max()) for rows in tables if bool((rows.size < few).any())), default=few - 1)
    moves = f" (one example moves it by {100 // largest} points or more)" if shares else ""
    text = f"{who} fewer than {few} examples: much of {whose} error may be chance{moves}"
    how = hint.replace("leaves them out", "leaves it out") if small == 1 else hint
    return f"{text}; {how}." if how else f"{text}."


def _worse_left_out(runs: Sequence[RunRecord], tables: Sequence[ClientTable], hint: str) -> str:
    """A sentence if those left out have more than twice the mean error of the others, both averaged over runs; else empty."""
    from equipoise.report.data.over_seeds import in_percent

    pairs = [
        (run.left_out_error[run.judged_on], float(rows.served_error.double().mean()))
        for run, rows in zip(runs, tables, strict=True)
        if run.judged_on in run.left_out_error
    ]
    theirs, others = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))
    if not (math.isfinite(theirs) and theirs > FAR_WORSE * others):
        return ""
    percent = in_percent(runs) and theirs <= 1
    write = "{:.1%}".format if percent else "{:.3g}".format
    said = [write(value).replace("%", " %") for value in (theirs, others)]
    over = " over all runs" if len(runs) > 1 else ""
    alone = max(run.left_out.get(run.judged_on, 0) for run in runs) == 1
    who = "The one left out has" if alone else "Those left out have"
    how = f": look at {'it' if alone else 'them'} with worst()" if hint == HINT else ""
    noun = "loss" if runs[0].error_is_loss else "error"
    return f" {who} a mean {noun} of {said[0]}{over}, the others {said[1]}{how}."
