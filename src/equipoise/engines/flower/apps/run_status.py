"""What an operator sees of a federated run: status.json and events.jsonl in its folder, written while it goes on.

Both outlive the server: a run that is resumed goes on with them. They say who took part and when, which under differential
privacy is for the operator alone: only the owner of the folder can read them. Losses and errors of single clients are in them
only where nothing protects them.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, median_high
from typing import Any

from equipoise.core.files import GrowingFile, write_atomically
from equipoise.core.plain_text import content_of, parse_json, typed
from equipoise.core.words import counted
from equipoise.engines.flower.apps.members import Member
from equipoise.engines.flower.apps.node_keys import RETIRED
from equipoise.engines.flower.apps.welcome import Welcome
from equipoise.engines.flower.transport.messenger import Messenger, TooFewClients
from equipoise.errors import ConfigError, Diverged, FileGuard
from equipoise.experiment.run_files import RunFolder
from equipoise.metrics import mean
from equipoise.observers import Evaluation
from equipoise.report.notices import count_evaluated
from equipoise.runs.standing_out import is_far_loss, is_lost, suspects
from equipoise.types import Observer, RoundReport

STATUS, EVENTS = "status.json", "events.jsonl"
SAME_ALERT = 6  # characters by which an alert is known again: "has fa…", "has a …"
KEEPS_FAILING = 3  # rounds in a row after which a node is an alert
DIXON = {4: 0.765, 5: 0.642, 6: 0.560, 7: 0.507, 8: 0.468, 9: 0.437, 10: 0.412}  # critical Q by the number of clients
FAR_ERROR = 2.0  # times the next largest error from which the largest of few may be an alert
OTHER_COHORT = (
    "The clients of round {} are not those of the round before ({}). Secure sums without noise are exact: the difference of "
    "two rounds shows about what a client has sent that is in one of them alone."
)
FAR_POINTS = 0.25  # above the median, from which such an error is an alert without any test, if errors are shares
DRIFT = (4.0, 0.05)  # deviations, and amount, above the median of all clients from which an error is an alert
_KINDS: dict[str, Any] = {  # of what a status holds
    "run": str, "state": str, "round": int, "rounds": int, "updated": str, "alerts": list[dict[str, str]],
    "clients": dict[str, dict[str, Any]],
}  # fmt: skip
_COUNTS = dict.fromkeys(("rounds", "failed", "in_a_row", "sent", "received"), int)  # of a client
log = logging.getLogger("flwr")  # Flower shows it to whoever watches the run


def moment(seconds: float | None = None) -> str:
    """A moment as text in UTC, e.g. 2026-03-01T12:00:00Z."""
    return datetime.fromtimestamp(time.time() if seconds is None else seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def read_events(folder: Path) -> list[dict[str, Any]]:
    """The events of a run's folder so far; lines that a full disk or a kill has cut are left out."""
    events, file = [], folder / EVENTS
    with FileGuard(file, ConfigError):
        content = content_of(file) if file.exists() else b""
    for line in content.decode(errors="replace").splitlines():
        try:
            events.append(parse_json(line))
        except ValueError:
            continue
    return [event for event in events if isinstance(event, dict)]


def read_status(file: Path) -> dict[str, Any]:
    """A status as it was written; an error where it is none."""
    about = typed(parse_json(file, finite=True), _KINDS)
    alerts = [typed(each, dict.fromkeys(("time", "client", "text"), str)) for each in about["alerts"]]
    return about | {"alerts": alerts, "clients": {client: typed(each, _COUNTS) for client, each in about["clients"].items()}}


class RunStatus(Observer):
    """Writes status and events of a run. Without a folder it writes nothing, and logs all the same."""

    def __init__(self, folder: Path | None, run: str, rounds: int, *, open_scores: bool) -> None:
        self.folder, self.run, self.open_scores = folder, run, open_scores
        self.messenger: Messenger | None = None
        self.count_trained: Callable[[RoundReport], int] = lambda report: report.trained  # clients whose training counts
        self._events = GrowingFile(folder / EVENTS, durable=False) if folder is not None else None
        self.about: dict[str, Any] = {"run": run, "state": "waiting", "round": 0, "rounds": rounds, "alerts": [], "clients": {}}
        if folder is not None and (folder / STATUS).exists():
            try:
                before = read_status(folder / STATUS)
                kept = "round", "alerts", "clients", "evaluation", "notes"
                self.about |= {key: before[key] for key in kept if key in before}
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                self.event("warning", text=f"{STATUS} could not be read, and begins anew.")
        self._reports: list[RoundReport] = []  # since this server began
        self._took_part: frozenset[str] | None = None  # in the round before, and not without a fault
        self._ended = folder is not None and RunFolder(folder).finished  # a run that is to get more rounds
        self.about |= {"pid": os.getpid(), "began": moment(), "protected": not open_scores}
        self.write()

    # ------------------------------------------------------------------------------------------------------------- writing

    def event(self, event: str, **more: Any) -> None:
        """One line of the log of events, with the time, the run and the round."""
        if self._events is not None:
            line = {"time": moment(), "run": self.run, "round": self.about["round"], "event": event, **more}
            self._events.add(json.dumps(line, allow_nan=False).encode() + b"\n")

    def write(self) -> None:
        """Bring the status to the disk; only the owner may read it."""
        if self.folder is not None:
            self.about["updated"] = moment()
            write_atomically(self.folder / STATUS, (json.dumps(self.about, indent=1) + "\n").encode()).chmod(0o600)

    def say(self, state: str, text: str = "") -> None:
        """The state of the run has changed."""
        self.about |= {"state": state, "text": text}
        self.event(state, **({"text": text} if text else {}))
        self.write()

    def alert(self, client: str, text: str) -> None:
        """Something that the operator should look at; each is told once until it is over, and its figures are kept fresh."""
        start = text[:SAME_ALERT]
        known = [each for each in self.about["alerts"] if each["client"] == client and each["text"].startswith(start)]
        for each in known:
            each["text"] = text
        if not known:
            self.about["alerts"].append({"time": moment(), "client": client, "text": text})
            self.event("alert", client=client, text=text)
            log.warning("Alert: %s %s.", client, text)

    def clear(self, client: str, start: str) -> None:
        """An alert is over."""
        kept = [each for each in self.about["alerts"] if each["client"] != client or not each["text"].startswith(start)]
        self.about["alerts"] = kept

    @property
    def nodes(self) -> dict[int, str]:
        """The clients that nodes were at when the status was written."""
        return {int(entry["node"]): client for client, entry in self.about["clients"].items() if entry.get("node")}

    # ------------------------------------------------------------------------------------------------------------ what happens

    def wait_for(self, welcome: Welcome, wanted: int) -> None:
        """The run waits: who has introduced itself, who is missing, and who was turned away and why."""
        refused = {welcome.messenger.show(node): why for node, why in welcome.introductions.reasons.items()}
        there = sorted(welcome.there)
        arrivals = {"wanted": wanted, "there": there, "missing": welcome.missing, "turned_away": refused}
        if arrivals != self.about.get("arrivals"):
            self.about["arrivals"] = arrivals
            self.about["text"] = f"{len(there)} of {wanted} nodes have introduced themselves"
            self.write()

    def settle(self, members: Mapping[str, Member], messenger: Messenger) -> None:
        """The clients of the run are known."""
        self.messenger = messenger
        self.about.pop("arrivals", None)
        for client, member in members.items():
            entry = self._entry(client)
            entry["versions"] = dict(messenger.versions.get(client, member.versions))
            entry["node"] = str(messenger.nodes.get(client, entry.get("node", "")))
        self.say("running", counted(len(members), "client"))

    def _entry(self, client: str) -> dict[str, Any]:
        fresh = {
            "rounds": 0,
            "failed": 0,
            "in_a_row": 0,
            "fault": "",
            "seconds": None,
            "sent": 0,
            "received": 0,
            "versions": {},
        }
        entry: dict[str, Any] = self.about["clients"].setdefault(client, fresh)
        return entry

    def on_round(self, report: RoundReport) -> None:
        """Count who took part; tell who did not, and why."""
        self.about["round"] = report.round + 1
        messenger, missing = self.messenger, {**report.missing, **dict.fromkeys(report.rejected, "sent an update of no use")}
        for client in self.about["clients"]:
            entry = self._entry(client)
            asked = client in report.bytes_by_client or client in missing
            retired = missing.get(client) == RETIRED
            if retired:
                entry["in_a_row"], entry["fault"] = 0, RETIRED
                self.clear(client, "has ")
            elif client in missing:
                entry["failed"], entry["in_a_row"], entry["fault"] = entry["failed"] + 1, entry["in_a_row"] + 1, missing[client]
            elif asked:
                entry["rounds"], entry["in_a_row"], entry["fault"] = entry["rounds"] + 1, 0, ""
                self.clear(client, "has failed")
            sent, received = report.bytes_by_client.get(client, (0, 0))
            entry["sent"], entry["received"] = entry["sent"] + sent, entry["received"] + received
            entry["last_sent"], entry["last_received"] = sent, received
            if messenger is not None:
                entry["versions"] = dict(messenger.versions.get(client, entry["versions"]))  # it may have been upgraded
                entry["node"] = str(messenger.nodes.get(client, entry.get("node", "")))
                took, heard = messenger.seconds.get(client), messenger.heard.get(client)
                entry["seconds"] = None if took is None else round(took, 3)
                entry["seen"] = None if heard is None else moment(heard)
                absent = "retired" if retired else "failed"
                entry["state"] = "resting" if client in messenger.resting else absent if client in missing else "good"
            if entry["in_a_row"] >= KEEPS_FAILING:
                self.alert(client, f"has failed in {entry['in_a_row']} rounds in a row: it {entry['fault']}")
        if self.open_scores and messenger is not None:
            self._look_at_losses(messenger.losses, report.round + 1)
            self._reports.append(report)
            self._look_at_divergence(report.loss)
        elif not self.open_scores and report.epsilon is None:
            self._look_at_cohort(report)
        numbers = {"seconds": report.seconds, "trained": report.trained, "cohort": report.cohort}
        drawn = len({*report.bytes_by_client, *missing})  # `cohort` is without those that failed before they trained
        numbers |= {"clients_trained": self.count_trained(report), "clients_drawn": drawn}
        if self.open_scores and report.loss == report.loss and abs(report.loss) != float("inf"):
            numbers["loss"] = report.loss
        if report.tail_share is not None:
            numbers["tail_share"] = report.tail_share
        told = {"failed_tries": list(report.failed_tries), "skipped": report.skipped}
        told = {name: value for name, value in told.items() if value}
        self.event("round", **numbers, missing=missing, sent=report.bytes_sent, received=report.bytes_received, **told)
        self.write()

    def _look_at_losses(self, losses: Mapping[str, float], number: int) -> None:
        """A loss far above all others of its round is an alert, until the client sends another."""
        found = dict(far_losses(losses, number))
        for client in losses.keys() - found.keys():
            self.clear(client, "report")
        for client, text in found.items():
            self.alert(client, text)

    def _look_at_cohort(self, report: RoundReport) -> None:
        """Exact sums over cohorts that differ tell about those who are in one alone: said once in a run."""
        took_part = frozenset(report.bytes_by_client.keys() - report.missing.keys())
        before, self._took_part = self._took_part, took_part
        if before is None or before == took_part or report.skipped or self.about.get("notes"):
            return
        changed = [f"without {name}" for name in sorted(before - took_part)]
        changed += [f"with {name}" for name in sorted(took_part - before)]
        note = OTHER_COHORT.format(report.round + 1, ", ".join(changed[:5]) + ", …" * (len(changed) > 5))
        self.about["notes"] = [note]
        self.event("warning", text=note)
        log.warning("%s", note)

    def _look_at_divergence(self, loss: float) -> None:
        """A loss that says that the run has diverged is an alert at the sites that may be why."""
        first = next((report.loss for report in self._reports if math.isfinite(report.loss)), math.nan)
        if is_lost(loss, first, classes=False):
            for client, why in suspects(self._reports).items():
                self.alert(client, f"may be why the run diverges, by wrong units, wrong labels or false numbers: {why}")
        elif math.isfinite(loss):
            for client in self.about["clients"]:
                self.clear(client, "may be")

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Tell who was not evaluated. Where single errors may be known, a site with one far above the others' is an alert."""
        table = evaluation.clients
        counts = {split: count_evaluated(table, split) for split in dict.fromkeys(table.split)}
        absent = {client: why for found in table.not_evaluated.values() for client, why in found.items()}
        told = {"after_round": evaluation.round, "clients": counts, "not_evaluated": absent}
        self.about["evaluation"] = told
        self.event("evaluation", **told)
        self.write()
        if not self.open_scores:
            return
        split = "test" if "test" in table.split else "train"
        errors = {
            client: float(error)
            for client, where, error in zip(table.client, table.split, table.error.tolist(), strict=True)
            if where == split and error == error
        }
        trained_on = table.where("train")
        if len(trained_on):
            self._look_at_divergence(mean(trained_on.loss, trained_on.size))
        for client, error in errors.items():
            self._entry(client)["error"] = round(error, 6)
        found = list(drifted(errors))
        for client in errors.keys() - {client for client, _ in found}:
            self.clear(client, "has a ")
        for client, text in found:
            self.alert(client, text)
        self.write()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Tell how the run ended, whatever happens."""
        try:
            yield
        except BaseException as failure:
            if isinstance(failure, TooFewClients):
                self._note_faults()
            if isinstance(failure, Diverged) and self.open_scores:
                self._look_at_divergence(math.inf)
            if self._ended and self.folder is not None and RunFolder(self.folder).finished:  # no round of it was begun
                self.about["rounds"] = self.about["round"]
                self.event("failed", text=str(failure))
                self.say("finished", f"it could not go on: {failure}")
                raise
            stopped = type(failure).__name__ in ("StoppedByOperator", "KeyboardInterrupt", "SystemExit")
            self.say("stopped" if stopped else "failed", str(failure) or type(failure).__name__)
            raise
        self.say("finished")

    def _note_faults(self) -> None:
        """A run has stopped in a round: those that this round lacked have failed in it."""
        faults = self.messenger.faults if self.messenger is not None else {}
        for client in [each for each in self.about["clients"] if each in faults]:
            entry = self._entry(client)
            entry["failed"], entry["in_a_row"] = entry["failed"] + 1, entry["in_a_row"] + 1
            entry["fault"], entry["state"] = faults[client], "failed"


def far_losses(losses: Mapping[str, float], number: int) -> Iterator[tuple[str, str]]:
    """The client whose loss in round `number` is far above the losses of all others, of three clients or more.

    >>> list(far_losses({"a": 0.7, "b": 0.4, "c": 26.0}, 5))
    [('c', 'reported a loss of 26 in round 5, and the others at most 0.7: wrong labels or units, or a false number')]
    """
    ordered = sorted(losses.items(), key=lambda item: item[1])
    if len(ordered) < 3:
        return
    (_, next_one), (client, largest) = ordered[-2:]
    if is_far_loss(largest, next_one):
        why = f"and the others at most {next_one:.3g}: wrong labels or units, or a false number"
        yield client, f"reported a loss of {largest:.3g} in round {number}, {why}"


def drifted(errors: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """The clients whose error is far above the median of all; with four clients or more.

    Far is more than `DRIFT` deviations, by the median absolute deviation. One of few clients widens that deviation itself, so
    below eleven clients the largest error is also far if two things hold: it is more than `FAR_ERROR` times the next, and
    Dixon's Q, its distance from the next over the range of all, is above the critical value at 5 % (Dean, Dixon 1951). Q alone
    gave twice as many alerts at honest sites, whose errors are no normal numbers and move in steps of one example. A share
    that is more than `FAR_ERROR` times the next and `FAR_POINTS` above the median is far whatever Q is: of four clients the
    lowest decides Q as much as the largest.

    >>> list(drifted({"a": 0.10, "b": 0.11, "c": 0.09, "d": 0.12, "e": 0.60}))
    [('e', 'has a test error of 0.6, and the median of the clients is 0.11')]
    >>> list(drifted({"a": 0.133, "b": 0.10, "c": 0.883, "d": 0.25}))
    [('c', 'has a test error of 0.883, and the median of the clients is 0.192')]
    >>> list(drifted({"a": 0.233, "b": 0.125, "c": 0.18, "d": 0.542}))
    [('d', 'has a test error of 0.542, and the median of the clients is 0.207')]
    >>> list(drifted({"a": 0.133, "b": 0.10, "c": 0.20, "d": 0.25}))
    []
    """
    if len(errors) < 4:
        return
    ordered = sorted(errors.values())
    middle = median_high(ordered)  # the upper one of an even number: with few clients the lower gives more false alerts
    spread = 1.4826 * median_high(abs(error - middle) for error in ordered)
    lowest, next_largest, largest = ordered[0], ordered[-2], ordered[-1]
    apart = largest - next_largest > DIXON.get(len(ordered), math.inf) * (largest - lowest)
    shares = lowest >= 0 and largest <= 1 and len(ordered) in DIXON
    apart = (apart or (shares and largest - middle > FAR_POINTS)) and largest > FAR_ERROR * next_largest
    for client, error in errors.items():
        far = error - middle > DRIFT[0] * spread or (apart and error == largest)
        if far and error - middle > DRIFT[1]:
            yield client, f"has a test error of {error:.3g}, and the median of the clients is {median(ordered):.3g}"
