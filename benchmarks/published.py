"""What the scripts beside published tables share: Markdown tables, means with their spread, and the options of a command."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from equipoise.compare import Spread


def print_rows(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A Markdown table, each row as soon as it is made."""
    print(f"| {' | '.join(heads)} |\n" + "|---" * len(heads) + "|")
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def spread(values: Iterable[float] | Spread, digits: int = 1) -> str:
    """Mean ± standard deviation over seeds."""
    found = values if isinstance(values, Spread) else Spread.of(values)
    return f"{found.mean:.{digits}f} ± {found.deviation:.{digits}f}"


def options_of(doc: str, **defaults: object) -> argparse.ArgumentParser:
    """A parser with an option for each default; those that are None are numbers that a scale has of its own."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        kind = int if default is None else type(default)
        given = {"action": "store_true"} if kind is bool else {"type": kind, "default": default}
        parser.add_argument(f"--{name.replace('_', '-')}", **given)  # type: ignore[arg-type]
    parser.add_argument("--data", type=Path, default=os.environ.get("EQUIPOISE_DATA"), help="the folder of the real data")
    return parser


def has(folder: Path | str | None, file: str) -> bool:
    """Whether the folder of the data holds a file; says so if not."""
    found = folder is not None and (Path(folder) / file).is_file()
    if not found:
        print(f"\n{file} is not there (--data DIR, or the variable EQUIPOISE_DATA).")
    return found
