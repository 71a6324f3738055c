"""Runs as they grow, in a terminal: what the pages of the server show, as text."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from equipoise.core.screen import Screen
from equipoise.errors import ConfigError
from equipoise.serve.library import Library
from equipoise.serve.log_tail import Curve
from equipoise.serve.pages_text import duration, sparkline
from equipoise.serve.refusals import Gone
from equipoise.serve.run_states import WatchedRun

STYLES = {"running": "cyan", "finished": "green", "stopped": "red", "waiting": "dim"}
MOST_SHOWN = 40


def watch(folder: Path, *, console: Screen, once: bool = False, every: float = 1.0) -> None:
    """Show all runs below a folder until each has ended or stopped; `once` shows them one time."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder. Name one with runs, e.g. equipoise watch runs.")
    library = Library(folder)
    if once or not console.is_terminal:
        console.print(frame(library)[0])
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            shown, going = frame(library)
            live.update(shown, refresh=True)
            if not going:
                return
            time.sleep(every)


def frame(library: Library) -> tuple[Any, bool]:
    """What is shown now, and whether any run is still going (or none is there yet)."""
    runs: list[WatchedRun] = []
    for name in library.ids()[:MOST_SHOWN]:
        with suppress(Gone):  # deleted since it was listed
            runs.append(library.watched(name))
    if not runs:
        return Text(f"There is no run in {library.root} yet."), True
    table = Table(title_justify="left", expand=False)
    for title in ("run", "state", "rounds", "loss", "worst tenth", "trained", "ε", "left"):
        table.add_column(title, justify="left" if title in ("run", "state") else "right", no_wrap=title != "run")
    notes: list[Any] = []
    going = False
    for run in runs:
        going = _add(table, notes, run) or going
    more = len(library.ids()) - len(runs)
    return Group(table, *notes, *([Text(f"… and {more} more")] if more > 0 else [])), going


def _add(table: Table, notes: list[Any], run: WatchedRun) -> bool:
    state = run.state()
    style = STYLES[state.status]
    curves: dict[str, Curve | None] = {**run.log.curves} or {"": None}
    for place, (name, curve) in enumerate(curves.items()):
        last = curve.last if curve is not None else None
        loss, tail, epsilon = ("–" if last is None or last[k] is None else f"{last[k]:.4f}" for k in (1, 2, 4))
        label = run.about.name if not name else f"{run.about.name}: {name}" if place == 0 else f"  {name}"
        spark = "" if curve is None else f" {sparkline([row[1] for row in curve.rows])}"
        table.add_row(
            Text(label + spark), Text(state.status if place == 0 else "", style=style),
            f"{state.rounds_done}/{state.rounds}" if place == 0 else "", loss, tail,
            "–" if last is None or curve is None else f"{last[3]}/{curve.cohort}", epsilon,
            duration(state.seconds_left) if state.status == "running" and place == 0 else "",
        )  # fmt: skip
    if run.log.evaluations:
        newest = run.log.evaluations[-1]
        split = next((name for name in ("test", "validation", "train") if name in newest["splits"]), None)
        if split is not None:
            numbers = newest["splits"][split]
            words = ", ".join(
                f"{title} {numbers[key]:.4f}"
                for title, key in (("mean error", "error"), ("90th percentile", "error_90"))
                if numbers.get(key) is not None
            )
            counts = newest["histogram"]["counts"] if newest["histogram"] and not run.about.private else []
            notes.append(
                Text(f"{run.about.name}, after round {newest['round']}, {split} clients: {words}  {sparkline(counts)}")
            )
    if state.status == "stopped":
        notes.append(Text(f"{run.about.name} stopped: {state.why} Go on with it: {state.resume}", style="red"))
    return state.status in ("running", "waiting")
