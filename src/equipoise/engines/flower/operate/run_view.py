"""What a run's status says, as text, page and metrics, with an exit code that tells the truth."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from equipoise.core.words import printable, table_lines
from equipoise.engines.flower.apps.run_control import read_order
from equipoise.engines.flower.apps.run_status import STATUS, read_status
from equipoise.errors import ConfigError, FileGuard
from equipoise.report.notices import list_reasons

STALE = 3600.0  # seconds without a word after which a server that is not on this machine counts as gone
HEAD = (  # of the table of clients; seconds and kilobytes are those of the last round
    "client", "state", "last seen", "rounds", "failed", "s", "kB out", "kB in", "version", "node", "fault"
)  # fmt: skip
GOING_ON, FINISHED, FAILED, GONE, STOPPED, ALERTS = 0, 0, 1, 2, 3, 4  # exit codes


class RunView:
    """The status of the run in a folder, read when it is asked for.

    `for_others` leaves out what only the operator may know of a run under privacy: who took part, when and how fast. A status
    that does not say whether its run was protected counts as one that was.
    """

    def __init__(self, folder: Path, *, for_others: bool = False) -> None:
        self.folder, self.for_others = folder, for_others

    def read(self) -> dict[str, Any]:
        """status.json, with whether the server that wrote it still lives, and the exit code."""
        with FileGuard(
            self.folder / STATUS, ConfigError, cure="Name the folder of a federated run, which writes it each round."
        ):
            about = read_status(self.folder / STATUS)
            datetime.fromisoformat(about["updated"])
            _ = [_row(client, entry) for client, entry in about["clients"].items()]  # what cannot be shown is damaged
            _ = arrival_lines(about.get("arrivals")), evaluation_lines(about.get("evaluation")), list(about.get("notes", ()))
        if about["state"] != "finished":
            with suppress(ConfigError):  # an order that cannot be read: the run itself says so
                about["rounds"] = max(about["rounds"], read_order(self.folder).rounds or 0)
        silent = time.time() - datetime.fromisoformat(about["updated"]).timestamp()
        about["silent_seconds"] = round(max(silent, 0.0), 1)
        if about["state"] in ("running", "waiting", "paused") and (not _lives(about.get("pid")) or silent > STALE):
            about["state"] = "gone"
            about["text"] = f"the server has ended without a word (its state was written {silent:.0f} s ago): start it again"
        codes = {"failed": FAILED, "gone": GONE, "stopped": STOPPED}
        about["exit_code"] = codes.get(about["state"], ALERTS if about["alerts"] else FINISHED)
        if self.for_others and about.get("protected", True):
            hidden = "the operator's `equipoise flower status` names it"
            about["clients"] = {}
            if "evaluation" in about:
                about["evaluation"] = {**about["evaluation"], "not_evaluated": {}}
            about.pop("arrivals", None)
            about.pop("notes", None)
            about["alerts"] = [{"time": each["time"], "client": "a client", "text": hidden} for each in about["alerts"]]
            about["text"] = about["text"] if about["state"] == "gone" else ""  # a failure may name clients
        return about

    def lines(self) -> list[str]:
        """The status as text."""
        about = self.read()
        text = f": {about['text']}" if about.get("text") else ""
        lines = [
            f"{about['run']}: {about['state']}, round {about['round']} of {about['rounds']}{text}",
            f"updated {about['updated']}",
        ]
        lines += arrival_lines(about.get("arrivals"))
        lines += evaluation_lines(about.get("evaluation"))
        lines += [f"note: {note}" for note in about.get("notes", ())]
        if about["clients"]:
            lines += table_lines([HEAD, *(_row(client, entry) for client, entry in sorted(about["clients"].items()))])
        lines += [f"ALERT since {each['time']} {each['client']} {each['text']}" for each in about["alerts"]]
        return lines

    def page(self) -> str:
        """The status as a page that renews itself."""
        about = self.read()
        rows = "".join(
            "<tr>" + "".join(f"<td>{_html(cell)}</td>" for cell in _row(client, entry)) + "</tr>"
            for client, entry in sorted(about["clients"].items())
        )
        alerts = "".join(f"<li>{_html(a['time'])} {_html(a['client'])} {_html(a['text'])}</li>" for a in about["alerts"])
        evaluated = "".join(f"<p>{_html(line)}</p>" for line in evaluation_lines(about.get("evaluation")))
        title = f"{_html(about['run'])}: {_html(about['state'])}"
        return (
            f"<!doctype html><html lang=en><meta charset=utf-8><meta http-equiv=refresh content=5><title>{title}</title>"
            "<style>body{font:16px sans-serif;margin:2em}td,th{padding:.2em .8em;text-align:left}</style>"
            f"<h1>{title}</h1><p>Round {about['round']} of {about['rounds']}. {_html(about.get('text') or '')}</p>"
            f"<p>Updated {_html(about['updated'])}.</p>{evaluated}{'<h2>Alerts</h2><ul>' + alerts + '</ul>' if alerts else ''}"
            f"<table><tr>{''.join(f'<th scope=col>{name}</th>' for name in HEAD)}</tr>{rows}</table></html>"
        )

    def metrics(self) -> str:
        """The status in Prometheus' text format."""
        about = self.read()
        lines = [
            "# HELP equipoise_round Rounds that are done.", "# TYPE equipoise_round gauge", f"equipoise_round {about['round']}",
            "# HELP equipoise_up 1 while the run goes on or has finished.", "# TYPE equipoise_up gauge",
            f"equipoise_up {int(about['state'] in ('running', 'waiting', 'paused', 'finished'))}",
            "# HELP equipoise_alerts Things to look at.", "# TYPE equipoise_alerts gauge",
            f"equipoise_alerts {len(about['alerts'])}",
        ]  # fmt: skip
        series = {
            "rounds_total": ("counter", "rounds", "Rounds that a client took part in."),
            "failed_total": ("counter", "failed", "Rounds that went on without a client."),
            "sent_bytes_total": ("counter", "sent", "Bytes sent to a client."),
            "received_bytes_total": ("counter", "received", "Bytes received from a client."),
            "answer_seconds": ("gauge", "seconds", "Seconds of a client's last answer."),
        }
        for name, (kind, key, text) in series.items():
            lines += [f"# HELP equipoise_client_{name} {text}", f"# TYPE equipoise_client_{name} {kind}"]
            for client, entry in sorted(about["clients"].items()):
                if entry.get(key) is not None:
                    label = printable(client).replace("\\", "\\\\").replace('"', '\\"')
                    lines.append(f'equipoise_client_{name}{{client="{label}"}} {entry[key]}')
        return "\n".join(lines) + "\n"


def arrival_lines(arrivals: dict[str, Any] | None) -> list[str]:
    """Who has introduced itself to a run that has not begun, who is missing, and who was turned away and why."""
    if not arrivals:
        return []
    there, missing, refused = arrivals["there"], arrivals["missing"], arrivals["turned_away"]
    named = [f"{name} (turned away)" if any(name in node for node in refused) else name for name in missing]
    lines = [f"here: {', '.join(there) or 'nobody'} ({len(there)} of {arrivals['wanted']})"]
    lines += [f"missing: {', '.join(named)}"] if named else []
    return lines + [f"turned away: {node}: {why}" for node, why in refused.items()]


def evaluation_lines(evaluation: dict[str, Any] | None) -> list[str]:
    """After which round clients were last evaluated, how many of each split, and who was not and why."""
    if not evaluation:
        return []
    counts = ", ".join(f"{count} {split}" for split, count in evaluation["clients"].items())
    lines = [f"last evaluation: after round {evaluation['after_round']}, clients: {counts}"]
    if absent := evaluation["not_evaluated"]:
        lines.append(f"not evaluated then: {list_reasons(absent)}. Its figures are over the others")
    return lines


def _row(client: str, entry: dict[str, Any]) -> tuple[str, ...]:
    took = entry.get("seconds")
    return (
        client, str(entry.get("state", "waiting")), str(entry.get("seen") or "never"), str(entry["rounds"]),
        str(entry["failed"]),
        "" if took is None else f"{took:.2f}", f"{entry.get('last_sent', 0) / 1e3:.1f}",
        f"{entry.get('last_received', 0) / 1e3:.1f}", str(entry.get("versions", {}).get("equipoise", "unknown")),
        str(entry.get("node") or ""), str(entry.get("fault") or ""),
    )  # fmt: skip


def _html(text: object) -> str:
    return escape(printable(text))


def _lives(pid: Any) -> bool:
    """Whether a process of this machine is at work; one that was killed may be listed until its parent looks at it."""
    if not isinstance(pid, int):
        return True
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # of another user, or a system without /proc; or no number of a process
        return True
    return state[:1] not in (["Z"], ["X"])
