"""How subgroups of clients fare: mean, 90th percentile and gap to the others, with 95 % intervals.

A subgroup are the clients with one value of an attribute: a country, a device, a hospital. Attributes come with the data
(`FederatedData.with_attributes`), or from a CSV file with one row per client (`read_attributes`).
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equipoise.core.plain_text import open_plain
from equipoise.core.words import cells, padded
from equipoise.errors import InvalidData, InvalidParameter, require
from equipoise.metrics import Interval, counts_wrong, mean, mean_interval, percentile, percentile_interval

if TYPE_CHECKING:
    from equipoise.client_table import ClientTable
    from equipoise.run_record import RunRecord

NO_VALUE = "–"  # stands for the attribute of a client that has none
_TAKEN = (
    "client", "split", "seen", "size", "loss", "error", "malicious", "method", "seed", "personal_loss", "personal_error",
    "backdoor_success", "coverage", "set_size",
)  # fmt: skip


@dataclass(frozen=True)
class Subgroup:
    """The clients of one value of an attribute, and the error of the models that they are served.

    `gap` is their mean minus that of all other clients: above 0 they fare worse. Intervals are of 95 %, for the clients that
    these stand for: those of the mean and the gap are normal, that of the percentile lies between two order statistics.
    """

    attribute: str  # e.g. "country"
    value: str  # e.g. "AT"
    clients: int  # how many have this value
    mean: float  # of their errors
    mean_interval: Interval  # 95 %
    percentile_90: float  # of their errors
    percentile_90_interval: Interval  # 95 %
    gap: float  # their mean minus that of all other clients
    gap_interval: Interval  # 95 %


def checked_attributes(given: Any) -> dict[str, dict[str, str]]:
    """Attributes as {name: {client id: value}}; values become text."""
    fix = 'E.g. {"country": {"anna": "AT", "ben": "DE"}}.'
    require(isinstance(given, Mapping), "attributes", "must map names to a value for each client", given, fix)
    for name, values in given.items():
        good = isinstance(name, str) and name.strip() != "" and name not in _TAKEN
        require(good, "attributes", "must have names that no column of the client table has", name, fix)
        good = isinstance(values, Mapping) and all(isinstance(client, str) for client in values)
        require(good, f"attributes[{name!r}]", "must map client ids to values", values, fix)
    return {name: {client: str(value) for client, value in values.items()} for name, values in given.items()}


def read_attributes(path: str | Path) -> dict[str, dict[str, str]]:
    """Attributes of a CSV file: the first column are client ids, every other column is an attribute; empty fields are none."""
    try:
        with io.TextIOWrapper(open_plain(path), encoding="utf-8-sig", newline="") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as failure:
        raise InvalidData(f"{path} cannot be read as a table of attributes: {failure}.") from failure
    if len(rows) < 2 or len(rows[0]) < 2:
        raise InvalidData(f"{path} needs a header, a column of client ids and a column per attribute, and a row per client.")
    header = [name.strip() for name in rows[0]]
    for number, row in enumerate(rows[1:], start=2):
        if row and len(row) != len(header):
            raise InvalidData(f"{path}, line {number}: {len(row)} fields, and the header has {len(header)}.")
    clients = [row[0] for row in rows[1:] if row]
    if len(set(clients)) < len(clients):
        twice = next(client for client in clients if clients.count(client) > 1)
        raise InvalidData(f"{path}: client {twice!r} has more than one row.")
    columns = {
        name: {row[0]: row[place] for row in rows[1:] if row and row[place]} for place, name in enumerate(header) if place
    }
    return checked_attributes(columns)


def difference_interval(values: Tensor, others: Tensor, weights: Tensor | None, other_weights: Tensor | None) -> Interval:
    """The normal interval of the difference of two means over different clients: their variances add up.

    >>> difference_interval(torch.tensor([1.0, 3.0]), torch.tensor([0.0, 2.0]), None, None).low.__round__(3)
    -1.772
    """
    first, second = mean_interval(values, weights), mean_interval(others, other_weights)
    centre = (mean(values, weights)) - mean(others, other_weights)
    reach = math.hypot((first.high - first.low) / 2, (second.high - second.low) / 2)
    return Interval(centre - reach, centre + reach)


def _within(interval: Interval, *, positive: bool, shares: bool) -> Interval:
    """An interval cut off where no mean can be: below 0 of errors that are never negative, above 1 of shares."""
    low = max(interval.low, 0.0) if positive and math.isfinite(interval.low) else interval.low
    return Interval(low, min(interval.high, 1.0) if shares and math.isfinite(interval.high) else interval.high)


def subgroups_of(table: ClientTable, attribute: str, split: str) -> list[Subgroup]:
    """The subgroups of an attribute among the benign clients of a split, by falling mean error."""
    if attribute not in table.attributes:
        known = ", ".join(table.attributes) or "none: give them by data.with_attributes({…})"
        fix = 'Groups of rows, such as men and women within a client: see "Groups of rows" in the how-to guide on results.'
        raise InvalidParameter("attribute", f"must be one of {known}", attribute, fix)
    rows = table.where(split).benign
    error, sizes = rows.served_error.double(), rows.size.double() if split == "train" else None
    values = rows.attributes[attribute]
    possible = {"positive": bool((error >= 0).all()), "shares": counts_wrong(error, rows.size)}
    found = []
    for value in dict.fromkeys(values):
        here = torch.tensor([each == value for each in values])
        weights, others = (None, None) if sizes is None else (sizes[here], sizes[~here])
        alone = bool(here.all())
        gap = math.nan if alone else mean(error[here], weights) - mean(error[~here], others)
        between = Interval(-math.inf, math.inf) if alone else difference_interval(error[here], error[~here], weights, others)
        figures = mean(error[here], weights), _within(mean_interval(error[here], weights), **possible)
        tail = percentile(error[here], 90, weights), percentile_interval(error[here], 90, weights)
        found.append(Subgroup(attribute, value, int(here.sum()), *figures, *tail, gap, between))
    return sorted(found, key=lambda each: (-each.mean, each.value))


def subgroups_over_seeds(runs: Sequence[RunRecord], attribute: str) -> list[Subgroup]:
    """The subgroups of one method: figures and the ends of intervals are averaged over its seeds, which share their clients."""
    seeds = [{each.value: each for each in subgroups_of(run.clients, attribute, run.judged_on)} for run in runs]
    values = [value for value in seeds[0] if all(value in each for each in seeds)]

    def average(value: str, name: str) -> float:
        return math.fsum(getattr(each[value], name) for each in seeds) / len(seeds)

    def interval(value: str, name: str) -> Interval:
        ends = [getattr(each[value], name) for each in seeds]
        return Interval(*(sum(getattr(end, side) for end in ends) / len(ends) for side in ("low", "high")))

    return [
        Subgroup(
            attribute, value, seeds[0][value].clients, average(value, "mean"), interval(value, "mean_interval"),
            average(value, "percentile_90"), interval(value, "percentile_90_interval"), average(value, "gap"),
            interval(value, "gap_interval"),
        )
        for value in values
    ]  # fmt: skip


def subgroup_lines(methods: Mapping[str, Sequence[RunRecord]], *, percent: bool = False) -> list[str]:
    """The subgroups of all attributes and methods as lines of text, perhaps in %; none where the runs have no attributes."""
    lines, unit = [], " in %" * percent

    def number(value: float) -> str:
        return f"{100 * value:z.1f}" if percent else f"{value:z.3f}"

    for attribute in attributes_of([run for runs in methods.values() for run in runs]):
        lines += ["", f"By {attribute}: mean, 90th percentile and gap to all other clients{unit}, with 95 % intervals"]
        rows = [(method, each) for method, runs in methods.items() for each in subgroups_over_seeds(runs, attribute)]
        names = [(method, f"{each.value} ({each.clients})") for method, each in rows]
        widths = [max(cells(pair[i]) for pair in names) + 2 for i in (0, 1)]
        for (method, named), (_, each) in zip(names, rows, strict=True):
            shown = [
                f"{number(figure)} [{between.text(number)}]"
                for figure, between in (
                    (each.mean, each.mean_interval), (each.percentile_90, each.percentile_90_interval),
                    (each.gap, each.gap_interval),
                )
            ]  # fmt: skip
            named = "".join(map(padded, (method, named), widths))
            lines.append(f"{named}{'  '.join(f'{text:<26}' for text in shown)}".rstrip())
    return lines


def attributes_of(runs: Sequence[RunRecord]) -> list[str]:
    """The attributes that all runs have, in order."""
    return [name for name in runs[0].clients.attributes if all(name in run.clients.attributes for run in runs)]
