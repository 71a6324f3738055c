"""`equipoise flower check`: everything that can be found out on a node before it joins. It sends nothing."""

from __future__ import annotations

import os
import platform
import resource
import socket
import ssl
import stat
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, RecordDict

from equipoise.core.trees import leaves
from equipoise.core.version import VERSION
from equipoise.data.tables import counting_missing
from equipoise.engines.flower.apps.node_app import NodeApp
from equipoise.engines.flower.apps.node_data import NodeData
from equipoise.engines.flower.apps.node_keys import public_key_text, read_private_key
from equipoise.engines.flower.apps.node_policy import NodePolicy, read_policy
from equipoise.engines.flower.apps.owned_app import load_installed
from equipoise.engines.flower.operate.kit_questions import (
    empty_columns,
    find_algorithm,
    name_comparison,
    open_to_single_requests,
    refused_parts,
    show_gaps,
    show_policy,
    strange_columns,
    unknown_parts,
)
from equipoise.engines.flower.operate.kits import Kit
from equipoise.errors import EquipoiseError, EquipoiseNotice
from equipoise.solvers import SGD
from equipoise.types import Cohort

CLOCK = 10.0  # seconds by which the clocks of node and SuperLink may differ: signatures are refused beyond Flower's bound
ENDS_SOON = 30  # days
WAIT = 5.0  # seconds for the SuperLink
ASKED = "/v1/fleet/health"  # below the one path that a proxy passes on; that nothing is there is an answer, too
UNSEEN = "Whether the operator has registered this node's key cannot be seen from here"


class NotLookedAt(EquipoiseError):
    """Something that cannot be looked at because of a fault that was found before."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: "good", "warning", "fault" or "skipped", and what was found."""

    what: str
    verdict: str
    text: str


class Checks:
    """Looks at a kit, one thing after another; a check that raises is a fault, and the others go on."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        self.app: NodeApp | None = None
        self.node: NodeData | None = None
        self.rules: NodePolicy | None = None
        self.notices: list[str] = []  # that the loading of the data gave
        self.gaps: dict[str, tuple[int, int]] = {}  # missing cells and all cells, by column of a table

    def run(self) -> Iterator[Finding]:
        """All findings, in order."""
        steps: list[tuple[str, Callable[[], tuple[str, str]]]] = [
            ("versions", self.versions),
            ("key", self.key),
            ("policy", self.policy),
            ("app", self.load_app),
            ("parts", self.parts),
            ("data", self.data),
            ("values", self.values),
            ("training", self.training),
            ("certificate", self.certificate),
            ("reachable", self.reachable),
        ]
        for what, look in steps:
            try:
                verdict, text = look()
            except NotLookedAt as failure:
                verdict, text = "skipped", str(failure.args[0])
            except EquipoiseError as failure:
                verdict, text = "fault", str(failure)
            except Exception as failure:  # of the owner's own code
                verdict, text = "fault", f"{type(failure).__name__}: {failure}"
            yield Finding(what, verdict, text)

    # ---------------------------------------------------------------------------------------------------------- what we look at

    def versions(self) -> tuple[str, str]:
        """Versions, which the server is told."""
        try:
            flower = version("flwr")
        except PackageNotFoundError:
            return "fault", 'Flower is not installed: pip install "equipoise[flower]".'
        shown = f"Equipoise {VERSION}, torch {torch.__version__}, flwr {flower}, Python {platform.python_version()}"
        return ("good" if flower.startswith("1.41.") else "warning"), shown

    def key(self) -> tuple[str, str]:
        """The node's key: there, of the right kind, and nobody else's to read."""
        own = public_key_text(read_private_key(self.kit.key).public_key())
        mode = stat.S_IMODE(self.kit.key.stat().st_mode)
        if mode & 0o077:
            return "fault", f"{self.kit.key} can be read by others (mode {mode:03o}). Cure: chmod 600 {self.kit.key}"
        public = self.kit.key.with_name("node.pub")
        try:
            known, name = [*public.read_text(encoding="utf-8").split(maxsplit=2), "", "", ""][1:3]
        except OSError:
            return "warning", f"{public} is not there: whether {self.kit.key} is the listed key cannot be seen"
        if name.strip() not in ("", self.kit.client):
            return "fault", f"{public} is the key of {name.strip()}, and node.toml says client-id = {self.kit.client!r}"
        if known != own.split()[1]:
            cure = "take node.key and node.pub from one kit, or tell the operator the public half of your own key"
            return "fault", f"{self.kit.key} is not the private half of {public}, which the operator has listed: {cure}"
        return "good", f"{self.kit.key} is the key of {public}, and its owner's alone"

    def policy(self) -> tuple[str, str]:
        """The owner's policy."""
        if self.kit.policy is None:
            return "warning", "node.toml names no policy: the node answers whatever the app allows"
        rules = read_policy(self.kit.policy)
        rules.read_identity()
        if unknown := next(unknown_parts(rules), None):
            return "fault", f"{self.kit.policy}: {unknown}"
        self.rules = rules
        return "good", f"{self.kit.policy}: {show_policy(rules)}. A node that runs follows the file as it is now"

    def parts(self) -> tuple[str, str]:
        """Whether the policy allows the algorithm that is in the kit's app."""
        if self.kit.policy is None:
            return "good", "no policy refuses a part"
        if self.rules is None:
            raise NotLookedAt("not looked at, as the policy has a fault")
        algorithm = find_algorithm(self.kit.app)
        if algorithm is None:
            return "good", "the app has no task.py with an algorithm to compare the policy with"
        if refused := list(refused_parts(self.rules, algorithm)):
            return "fault", f"{self.kit.policy}: {'; '.join(refused)}. The node would refuse the run"
        if warning := open_to_single_requests(self.rules, algorithm):
            return "warning", f"{self.kit.policy}: {warning}. Write only_sums = true"
        compared, later = name_comparison(self.rules, algorithm)
        text = f"the policy allows the algorithm of task.py. Compared: {', '.join(compared)}"
        text += f". Only a run decides: {', '.join(later)}" * bool(later)
        return ("warning" if any(each.startswith("noise") for each in later) else "good"), text

    def load_app(self) -> tuple[str, str]:
        """The app that the node runs."""
        app = load_installed(self.kit.app)
        if not isinstance(app, NodeApp):
            return "warning", f"{self.kit.app} is no app of Equipoise: data and training cannot be tried"
        app.own(self.rules)
        self.app = app
        return "good", f"{self.kit.app} is installed"

    def data(self) -> tuple[str, str]:
        """The data: loaded as the node does, with sizes, shapes and classes."""
        app = self._app()
        began = time.perf_counter()
        try:
            with warnings.catch_warnings(record=True) as heard, counting_missing() as self.gaps:
                warnings.simplefilter("always", EquipoiseNotice)
                self.node = app.setup.data(self._context())
            self.notices = [str(each.message) for each in heard if issubclass(each.category, EquipoiseNotice)]
        except KeyError as failure:
            key = str(failure.args[0]) if failure.args else ""
            if key in self.kit.node_config:
                raise
            place = self.kit.path / "node.toml"
            return "fault", f"data.py asks for the setting {key!r}. Write {key} = … below [node-config] in {place}"
        took = time.perf_counter() - began
        sizes = ", ".join(f"{count} to {'train on' if split == 'train' else split}" for split, count in self.node.sizes.items())
        shapes = "; ".join(str(tuple(leaf.shape[1:])) for leaf in leaves(self.node.data.train.x))
        text = f"client {self.node.client!r}: {sizes}; inputs of shape {shapes}, {self.node.data.classes} classes; {took:.1f} s"
        if self.node.client != self.kit.client:
            return "fault", f"load_data names the client {self.node.client!r}, and node.toml {self.kit.client!r}. {text}"
        return "good", text

    def values(self) -> tuple[str, str]:
        """The data's numbers: missing ones, and classes without examples."""
        node = self._node()
        for split, clients in node.data.splits.items():
            for leaf in (*leaves(clients.x), *leaves(clients.y)):
                if torch.is_tensor(leaf) and leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
                    rows = int((~torch.isfinite(leaf.flatten(1) if leaf.dim() > 1 else leaf.unsqueeze(1)).all(1)).sum())
                    return "fault", f"{rows} examples of {split} have missing or infinite values"
        targets, verdict, shown = leaves(node.data.train.y)[0], "good", "all values are finite"
        if node.data.classes and not targets.is_floating_point() and targets.dim() == 1:
            counts = torch.bincount(targets.long(), minlength=node.data.classes).tolist()
            shown = f"examples per class: {', '.join(map(str, counts[:20]))}{', …' if len(counts) > 20 else ''}"
            verdict = "warning" if len([c for c in counts if c]) < 2 else "good"
        shown += show_gaps(self.gaps)
        strange = [*strange_columns(node.data), *empty_columns(self.gaps), *(("warning", text) for text in self.notices)]
        if strange := list(dict.fromkeys(strange)):
            said = " ".join(text if text.endswith(("?", ".")) else f"{text}." for _, text in strange)
            return min(verdict for verdict, _ in strange), f"{said} {shown[0].upper()}{shown[1:]}"
        return verdict, shown

    def training(self) -> tuple[str, str]:
        """One local step on this node's data: its time, and the most memory so far. Nothing is sent."""
        app, node = self._app(), self._node()
        if not node.trains:
            return "good", "this node has no examples to train on, and is evaluated on alone"
        began = time.perf_counter()
        started = app.setup.start(self._context(), 0, node.data.classes)
        one = torch.ones(1, dtype=torch.float64)
        cohort = Cohort(0, 0, torch.zeros(1, dtype=torch.int64), one, one.clone())
        params = started.task.layout.read(started.task.module)
        work = started.engine.updates(params, cohort, SGD(lr=0.01, batch_size=min(10, node.sizes["train"]), epochs=1))
        took, peak = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        if not bool(torch.isfinite(work.update).all()):
            return "fault", "one local step gives an update that is not finite: are the inputs scaled?"
        return "good", f"a local step takes {took:.2f} s; at most {peak:.0f} MB were in memory"

    def certificate(self) -> tuple[str, str]:
        """The authority's certificate."""
        from cryptography import x509

        try:
            found = x509.load_pem_x509_certificate(self.kit.authority.read_bytes())
        except (OSError, ValueError) as failure:
            return "fault", f"{self.kit.authority} is no certificate: {failure}"
        left = (found.not_valid_after_utc - datetime.now(UTC)).days
        if left < ENDS_SOON:
            return (
                "fault" if left < 0 else "warning"
            ), f"{self.kit.authority} ends in {left} days: ask the operator for a new one"
        return "good", f"{self.kit.authority} is good for {left} days"

    def reachable(self) -> tuple[str, str]:
        """Whether the SuperLink answers under its certificate, and what its clock says. The node says nothing of itself."""
        host, _, port = self.kit.superlink.rpartition(":")
        context = ssl.create_default_context(cafile=str(self.kit.authority))
        try:
            with (
                socket.create_connection((host, int(port)), timeout=WAIT) as plain,
                context.wrap_socket(plain, server_hostname=host) as link,
            ):
                link.sendall(f"GET {ASKED} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                answer = link.recv(4096).decode(errors="replace")
        except ssl.SSLCertVerificationError as failure:
            return "fault", f"{self.kit.superlink} answers with a certificate that ca.crt does not vouch for: {failure.reason}"
        except (OSError, ValueError) as failure:
            cure = "is it running, and does a firewall let this machine through?"
            return "fault", f"{self.kit.superlink} cannot be reached ({failure}): {cure}"
        status = answer.split()[1:2]
        if status and status[0].startswith("5"):
            return "fault", f"{self.kit.superlink} is reached, but the SuperLink behind it is not ({status[0]}): is it running?"
        dates = [line[5:].strip() for line in answer.splitlines() if line.lower().startswith("date:")]
        if not dates:
            return "warning", f"{self.kit.superlink} is reached, and does not tell its time"
        off = time.time() - parsedate_to_datetime(dates[0]).timestamp()
        if abs(off) > CLOCK:
            return "fault", f"the clock of this machine is {off:+.0f} s off the SuperLink's: set it (timedatectl set-ntp true)"
        return "good", f"{self.kit.superlink} is reached, its certificate is good, and the clocks agree. {UNSEEN}"

    # ------------------------------------------------------------------------------------------------------------------ helpers

    def _app(self) -> NodeApp:
        if self.app is None:
            raise NotLookedAt("not looked at, as the app cannot be loaded")
        return self.app

    def _node(self) -> NodeData:
        if self.node is None:
            raise NotLookedAt("not looked at, as the data cannot be loaded")
        return self.node

    def _context(self) -> Context:
        return Context(0, 0, dict(self.kit.node_config), RecordDict(), {})


def check_folder(path: Path) -> Finding:
    """Whether others can read a kit's folder."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o007:
        return Finding("folder", "warning", f"{path} is open to others (mode {mode:03o}). Cure: chmod 700 {path}")
    return Finding("folder", "good", f"{path} is its owner's alone")


def verdict_of(findings: list[Finding]) -> tuple[int, str]:
    """The exit code and the last line: 0 and good, or 1 with the number of faults."""
    faults = [finding.what for finding in findings if finding.verdict == "fault"]
    if faults:
        return 1, f"NOT READY: {len(faults)} fault{'s' if len(faults) > 1 else ''} ({', '.join(faults)})."
    warned = [finding.what for finding in findings if finding.verdict == "warning"]
    return 0, "READY." if not warned else f"READY, but look at: {', '.join(warned)}."


def all_findings(kit: Kit) -> list[Finding]:
    """Everything that `equipoise flower check` looks at."""
    os.environ.setdefault("EQUIPOISE_CONFIG", str((kit.path / "state").resolve()))
    return [check_folder(kit.path), *Checks(kit).run()]


def plain(findings: list[Finding]) -> list[dict[str, Any]]:
    """Findings as JSON."""
    return [{"what": f.what, "verdict": f.verdict, "text": f.text} for f in findings]
