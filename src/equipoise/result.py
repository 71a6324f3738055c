"""What a run leaves: the model, one row per client, and the history."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from equipoise.algorithm import Algorithm
from equipoise.data.clients import FederatedData
from equipoise.errors import InvalidParameter
from equipoise.files import write_atomically
from equipoise.metrics import Summary, summarise
from equipoise.observers import History
from equipoise.types import Engine

COLUMNS = ("client", "split", "seen", "size", "loss", "error")


@dataclass(frozen=True, eq=False)
class ClientTable:
    """One row per client and split: id, split, whether it is a training client, examples, mean loss, mean error.

    Iterating gives dictionaries, so `pandas.DataFrame(table)` works.
    """

    client: tuple[str, ...]
    split: tuple[str, ...]
    seen: Tensor  # (R,) bool
    size: Tensor  # (R,) int64
    loss: Tensor  # (R,) float64
    error: Tensor  # (R,) float64

    @classmethod
    def evaluate(cls, engine: Engine, params: Tensor, data: FederatedData) -> ClientTable:
        """Every client of every split at `params`."""
        seen_ids = set(data.train.ids)
        ids: list[str] = []
        splits: list[str] = []
        columns: dict[str, list[Tensor]] = {"size": [], "loss": [], "error": []}
        for name, clients in data.splits.items():
            loss, error = engine.evaluate(params, clients)
            ids += clients.ids
            splits += [name] * len(clients)
            for column, values in (("size", clients.sizes.cpu()), ("loss", loss), ("error", error)):
                columns[column].append(values)
        seen = torch.tensor([i in seen_ids for i in ids])
        return cls(tuple(ids), tuple(splits), seen, *(torch.cat(columns[c]) for c in ("size", "loss", "error")))

    def __len__(self) -> int:
        return len(self.client)

    def __getitem__(self, column: str) -> Tensor | tuple[str, ...]:
        """A column by name."""
        if column not in COLUMNS:
            raise InvalidParameter("column", f"must be one of {', '.join(COLUMNS)}", column)
        found: Tensor | tuple[str, ...] = getattr(self, column)
        return found

    def __iter__(self) -> Iterator[dict[str, object]]:
        for i in range(len(self)):
            yield {
                "client": self.client[i], "split": self.split[i], "seen": bool(self.seen[i]), "size": int(self.size[i]),
                "loss": float(self.loss[i]), "error": float(self.error[i]),
            }  # fmt: skip

    def __repr__(self) -> str:
        lines = ["  ".join(f"{c:>12}" for c in COLUMNS)]
        lines += [
            "  ".join(f"{v:>12.4f}" if isinstance(v, float) else f"{v!s:>12}" for v in row.values())
            for row in itertools.islice(self, 5)
        ]
        if len(self) > 5:
            lines.append(f"… {len(self)} rows")
        return "\n".join(lines)

    def where(self, split: str) -> ClientTable:
        """The rows of one split."""
        keep = [i for i, s in enumerate(self.split) if s == split]
        if not keep:
            raise InvalidParameter("split", f"must be one of {', '.join(sorted(set(self.split)))}", split)
        rows = torch.tensor(keep)
        return ClientTable(
            tuple(self.client[i] for i in keep), tuple(self.split[i] for i in keep), self.seen[rows], self.size[rows],
            self.loss[rows], self.error[rows],
        )  # fmt: skip

    def summaries(self) -> dict[str, dict[str, Summary]]:
        """Per split, the summary of losses and of errors: weighted by examples on training clients, unweighted elsewhere."""
        result = {}
        for split in dict.fromkeys(self.split):
            rows = self.where(split)
            weights = rows.size.double() if split == "train" else None
            result[split] = {
                "loss": summarise(rows.loss, rows.size, weights),
                "error": summarise(rows.error, rows.size, weights),
            }
        return result

    def worst(self, count: int = 10) -> list[dict[str, object]]:
        """The rows with the largest error (then loss), worst first."""
        return sorted(self, key=lambda row: (row["error"], row["loss"]), reverse=True)[:count]

    def to_parquet(self, path: str | Path, **constants: str | int) -> Path:
        """Write the rows as Parquet, with further columns of one value each; the file is whole or absent."""
        import pyarrow
        import pyarrow.parquet

        columns: dict[str, object] = {
            "client": list(self.client), "split": list(self.split), "seen": self.seen.numpy(), "size": self.size.numpy(),
            "loss": self.loss.numpy(), "error": self.error.numpy(),
        }  # fmt: skip
        columns |= {name: [value] * len(self) for name, value in constants.items()}
        buffer = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table(columns), buffer)
        return write_atomically(Path(path), buffer.getvalue())

    @classmethod
    def from_parquet(cls, path: str | Path) -> ClientTable:
        """The rows of a Parquet file that `to_parquet` wrote."""
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(path, columns=list(COLUMNS)).to_pydict()
        numbers = {
            "seen": torch.bool, "size": torch.int64, "loss": torch.float64, "error": torch.float64,
        }  # fmt: skip
        tensors = {name: torch.tensor(table[name], dtype=dtype) for name, dtype in numbers.items()}
        return cls(tuple(table["client"]), tuple(table["split"]), **tensors)

    def to_csv(self, path: str | Path) -> Path:
        """Write the rows as CSV; the file is whole or absent."""
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS)
        writer.writeheader()
        writer.writerows(self)
        return write_atomically(Path(path), text.getvalue().encode())


@dataclass(frozen=True, eq=False)
class RunSummary:
    """The figures people ask for first, of the clients a model was judged on. `str()` is a table."""

    name: str
    split: str
    unseen: bool
    error: Summary
    loss: Summary

    def __str__(self) -> str:
        who = f"{self.error.clients} {'unseen ' if self.unseen else ''}{self.split} clients"
        rows = [
            (f"{self.name}: {who}", "error", "loss"),
            ("mean", self.error.mean, self.loss.mean),
            ("90th percentile", self.error.percentiles[90], self.loss.percentiles[90]),
            ("worst 10 %", self.error.worst_10, self.loss.worst_10),
            ("standard deviation", self.error.standard_deviation, self.loss.standard_deviation),
        ]
        width = max(len(r[0]) for r in rows)
        return "\n".join(
            f"{label:<{width}}  " + "  ".join(v.rjust(8) if isinstance(v, str) else f"{v:8.4f}" for v in values)
            for label, *values in rows
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class RunRecord:
    """What is known of a finished run without its model: all that a report needs."""

    name: str
    algorithm: Algorithm
    seed: int
    clients: ClientTable
    history: History
    seconds: float
    data: str  # the name of the data
    rounds: int
    clients_per_round: int
    error_is_loss: bool = False  # a task without a notion of error of its own

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.name!r}, seed {self.seed}, {self.rounds} rounds on {self.data!r})\n{self.summary()}"
        )

    @property
    def judged_on(self) -> str:
        """The split that a summary speaks of: test clients if there are any, else validation, else training clients."""
        return next(s for s in ("test", "validation", "train") if s in self.clients.split)

    def summary(self, split: str | None = None) -> RunSummary:
        """Mean, 90th percentile, worst 10 % and standard deviation over clients."""
        split = split or self.judged_on
        rows = self.clients.where(split)
        summaries = rows.summaries()[split]
        return RunSummary(self.name, split, not bool(rows.seen.any()), summaries["error"], summaries["loss"])

    def report(self, path: str | Path) -> Path:
        """Write one HTML page that opens offline."""
        from equipoise.report import write_report

        return write_report([self], path)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Result(RunRecord):
    """A finished run: the trained `model`, `clients` (one row each), `history`, `summary()` and `report(path)`."""

    model: nn.Module
    params: Tensor  # (D,)
