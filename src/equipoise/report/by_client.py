"""The error of every client over seeds, and its change from the first method to another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.metrics import Interval, counts_wrong, share_interval
from equipoise.report.over_seeds import data_differ
from equipoise.report.paired import SAME_IN_ALL_SEEDS
from equipoise.report.study import MethodResults, Numbers, Study

if TYPE_CHECKING:
    from equipoise.client_table import ClientTable

LEAST_SEEDS = 3  # of an interval; with two seeds both are shown
_ALIKE = 1e-9  # changes below this share of the error are rounding
Key = tuple[str, ...]  # what names a client in a table: its id, or split and id


@dataclass(frozen=True, eq=False)
class ClientErrors:
    """The errors of R clients under M methods and the S seeds that these methods share.

    A row is a client. Where the data differ from seed to seed, clients of one name are different clients: a row is then a
    client of one seed, `seed_of_row` has the seed of each row, and S is 1.
    """

    keys: tuple[Key, ...]  # R
    sizes: tuple[int, ...]  # R
    methods: tuple[int, ...]  # M positions in the study
    seeds: tuple[int, ...]
    seed_of_row: tuple[int, ...] | None
    errors: Numbers  # (M, R, S): NaN where a client was not judged, infinite where its error is not finite

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def over_seeds(self) -> bool:
        """Whether a row stands for several seeds."""
        return bool(self.errors.shape[2] > 1)

    def of(self, method: int) -> Numbers:
        """The errors under the method at a position of the study, (R, S)."""
        found: Numbers = self.errors[self.methods.index(method)]
        return found

    def change(self, method: int) -> Numbers:
        """The error under a method minus that under the first one of `methods`, client by client and seed by seed, (R, S)."""
        with np.errstate(invalid="ignore"):  # both may be infinite
            found: Numbers = self.of(method) - self.errors[0]
        return found


def client_errors(
    study: Study,
    start: MethodResults | None = None,
    rows_of: Callable[[MethodResults], Sequence[ClientTable]] = lambda method: method.rows,
    values_of: Callable[[ClientTable], Tensor] = lambda rows: rows.served_error,
    *,
    by_split: bool = False,
) -> ClientErrors:
    """The errors of all clients under `start` (the first method) and under the methods that share seeds with it.

    `rows_of` gives a method's tables, one per run, and `values_of` the column that is taken; with `by_split` a client has a
    row for each of its splits.
    """
    methods = list(study.methods)
    at = 0 if start is None else methods.index(start)
    chosen, seeds = [at], [run.seed for run in methods[at].runs]
    for index, method in enumerate(methods):
        shared = [seed for seed in seeds if any(run.seed == seed for run in method.runs)]
        if index != at and shared:
            chosen, seeds = [*chosen, index], shared
    tables = {
        (index, run.seed): rows
        for index in chosen
        for run, rows in zip(methods[index].runs, rows_of(methods[index]), strict=True)
        if run.seed in seeds
    }
    named = {place: list(_named(rows, by_split=by_split)) for place, rows in tables.items()}
    apart = len(seeds) > 1 and not _same_clients(study, chosen, seeds, named)
    position: dict[tuple[Key, int, int | None], int] = {}
    for (_, seed), rows in named.items():
        for key, size in rows:
            position.setdefault((key, size, seed if apart else None), len(position))
    errors = np.full((len(chosen), len(position), 1 if apart else len(seeds)), np.nan)
    for (index, seed), table in tables.items():
        where = [position[key, size, seed if apart else None] for key, size in named[index, seed]]
        values = values_of(table).double().numpy()
        column = 0 if apart else seeds.index(seed)
        errors[chosen.index(index), where, column] = np.where(np.isfinite(values), values, np.inf)
    order = sorted(chosen)
    return ClientErrors(
        tuple(key for key, _, _ in position), tuple(size for _, size, _ in position), tuple(order), tuple(seeds),
        tuple(int(seed) for _, _, seed in position if seed is not None) if apart else None,
        errors[[chosen.index(index) for index in order]],
    )  # fmt: skip


def _named(rows: ClientTable, *, by_split: bool) -> Iterator[tuple[Key, int]]:
    """What names the client of each row, and its examples."""
    keys = zip(rows.split, rows.client, strict=True) if by_split else ((client,) for client in rows.client)
    yield from zip(keys, rows.size.tolist(), strict=True)


def _same_clients(
    study: Study, chosen: Sequence[int], seeds: Sequence[int], named: dict[tuple[int, int], list[tuple[Key, int]]]
) -> bool:
    """Whether a name stands for one client in all seeds: the data are one, and its examples are as many."""
    if data_differ([run for index in chosen for run in study.methods[index].runs if run.seed in seeds]):
        return False
    for index in chosen:
        first = named[index, seeds[0]]
        sizes = dict(first)
        for seed in seeds[1:]:
            rows = named[index, seed]
            if rows != first and any(sizes.setdefault(key, size) != size for key, size in rows):
                return False
    return True


def trivial_column(rows: ClientTable) -> Tensor:
    """The error of the trivial answer for each row, NaN where it is not known."""
    return torch.full_like(rows.error, torch.nan) if rows.trivial_error is None else rows.trivial_error


def mean_over_seeds(values: Numbers) -> Numbers:
    """The mean of each row (R, S) over the seeds that have a value; NaN if none has."""
    known = (~np.isnan(values)).sum(1)
    with np.errstate(invalid="ignore"):
        found: Numbers = np.where(known > 0, np.nansum(values, 1) / np.maximum(known, 1), np.nan)
    return found


def interval_over_seeds(values: Numbers, low: float = -np.inf, high: float = np.inf) -> tuple[Numbers, Numbers]:
    """The 95 % interval of each row's mean over seeds (R, S), inside [low, high]; with two seeds, the lower and the higher.

    Student's t: mean ± t · s / √n with n − 1 degrees of freedom. It is NaN where a row has fewer seeds, an infinite error,
    or one value in all seeds, which then say nothing about chance.
    """
    finite = np.where(np.isfinite(values), values, np.nan)
    known, middle = (~np.isnan(finite)).sum(1), mean_over_seeds(finite)
    whole = ~np.isinf(values).any(1)
    if values.shape[1] < LEAST_SEEDS:
        both = whole & (known == values.shape[1]) & (known > 1)
        ends = [np.where(both, pick(np.nan_to_num(finite), axis=1), np.nan) for pick in (np.min, np.max)]
        return ends[0], ends[1]
    from scipy.special import stdtrit

    lowest, highest = (np.where(np.isnan(finite), end, finite) for end in (np.inf, -np.inf))
    varied = highest.max(1) - lowest.min(1) > SAME_IN_ALL_SEEDS * np.abs(np.nan_to_num(middle))
    enough = whole & (known >= LEAST_SEEDS) & varied
    squares = np.nansum((finite - middle[:, None]) ** 2, 1)
    freedom = np.maximum(known - 1, 1)
    reach = np.where(enough, stdtrit(freedom, 0.975) * np.sqrt(squares / freedom / np.maximum(known, 1)), np.nan)
    return np.clip(middle - reach, low, high), np.clip(middle + reach, low, high)


def interval_kind(study: Study, found: ClientErrors) -> str:
    """How intervals of clients' errors follow from their examples; empty where seeds alone give one."""
    known = np.nan_to_num(found.errors, nan=0.0)  # (M, R, S)
    sizes = torch.tensor(found.sizes, dtype=torch.float64)[None, :, None].expand(known.shape)
    if study.scale.percent and counts_wrong(torch.from_numpy(known), sizes):
        return "Clopper and Pearson"
    methods = (study.methods[index] for index in found.methods)
    spread = any(all(rows.number_intervals is not None for rows in method.rows) for method in methods)
    return "Student, corrected for skewness" if spread and study.scale.noun != "loss" else ""


def error_intervals(study: Study, found: ClientErrors, start: MethodResults, index: int) -> tuple[Numbers, Numbers]:
    """Both ends of the interval of each client's error under a method, (R,) each; NaN for none.

    It is by the client's examples where these give one, its ends averaged over seeds: the seeds share the examples, so that
    the chance of their choice does not average out. Else it is by the seeds.
    """
    kind = interval_kind(study, found)
    if not kind:
        low = 0.0 if study.never_negative else -np.inf
        return interval_over_seeds(found.of(index), low, 1.0 if study.scale.percent else np.inf)
    if kind == "Clopper and Pearson":
        pairs = zip(mean_over_seeds(found.of(index)), found.sizes, strict=True)
        ends = [share_interval(error * size, size) if np.isfinite(error) else Interval(np.nan, np.nan) for error, size in pairs]
        return np.array([each.low for each in ends]), np.array([each.high for each in ends])

    def end(which: int) -> Numbers:
        def values(rows: ClientTable) -> Tensor:
            ends = rows.number_intervals
            return torch.full_like(rows.error, torch.nan) if ends is None else ends[which]

        return mean_over_seeds(client_errors(study, start, values_of=values).of(index))

    return end(0), end(1)


@dataclass(frozen=True, eq=False)
class Changes:
    """How each of R clients fares under a method, compared with the first one."""

    method: int  # its position in the study
    change: Numbers  # (R,) of the error, mean over seeds; below 0 a client gains; NaN if it is not known
    gains: NDArray[np.bool_]  # (R,)
    pays: NDArray[np.bool_]  # (R,)
    always: tuple[int, int] | None  # clients that gain, and that pay, in every seed; None with one seed

    @property
    def alike(self) -> int:
        """The number of clients whose error does not change."""
        return int((~np.isnan(self.change)).sum()) - int(self.gains.sum()) - int(self.pays.sum())

    @property
    def unknown(self) -> int:
        """The number of clients that were not judged under both methods, or have no finite error under either."""
        return int(np.isnan(self.change).sum())

    def most(self, count: int, *, paying: bool) -> list[int]:
        """Positions of the clients that pay, or gain, the most; the most first."""
        some = np.flatnonzero(self.pays if paying else self.gains)
        sign = -1 if paying else 1
        return [int(k) for k in some[np.argsort(sign * self.change[some], kind="stable")][:count]]


def changes(found: ClientErrors) -> list[Changes]:
    """The changes from the first of the methods to each other one."""
    base = mean_over_seeds(found.errors[0])
    made = []
    for method in found.methods[1:]:
        each = found.change(method)
        change = mean_over_seeds(each)
        least = _ALIKE * np.nan_to_num(np.abs(base), nan=0.0, posinf=0.0)
        always = None
        if found.over_seeds:
            known = ~np.isnan(each).any(1)
            always = int((known & (each < -least[:, None]).all(1)).sum()), int((known & (each > least[:, None]).all(1)).sum())
        made.append(Changes(method, change, change < -least, change > least, always))
    return made
