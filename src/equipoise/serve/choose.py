"""Chooses a model of a served family by a client's own examples. Only models travel; the examples stay here."""

from __future__ import annotations

import hashlib
import json
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, unquote, urlsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, ProxyHandler, Request, build_opener

import numpy as np

from equipoise.core.files import write_atomically
from equipoise.core.plain_text import parse_json
from equipoise.core.signature import Signature
from equipoise.core.words import joined
from equipoise.data.tables import Schema
from equipoise.errors import ConfigError, InvalidData
from equipoise.export.onnx_files import SCORE
from equipoise.export.onnx_runs import OnnxModel
from equipoise.serve.own_examples import read_examples
from equipoise.serve.verdict import Verdict, judge

LARGEST_ANSWER = 16 * 2**20
LARGEST_FILE = 2 * 2**30
ROWS = 512
SECONDS = 60.0


class NoRedirects(HTTPRedirectHandler):
    """A server that sends elsewhere is not followed: the token would go there, too."""

    def redirect_request(self, *given: Any, **named: Any) -> None:
        """Follow nothing."""
        return


@dataclass(frozen=True)
class FamilyClient:
    """Asks a server for a family. Every request is a GET without a body."""

    base: str
    token: str | None = None
    authority: Path | None = None  # of a certificate that the system does not know

    def get(self, path: str, most: int = LARGEST_ANSWER) -> bytes:
        """The content at a path of the server."""
        headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {self.token}"} if self.token else {})
        try:
            context = ssl.create_default_context(cafile=None if self.authority is None else str(self.authority))
        except (OSError, ValueError) as failure:
            raise ConfigError(f"{self.authority} is no certificate of an authority, as PEM: {failure}.") from failure
        opener = build_opener(NoRedirects, HTTPSHandler(context=context), *([ProxyHandler({})] if _is_local(self.base) else []))
        try:
            with opener.open(Request(self.base + path, headers=headers), timeout=SECONDS) as answer:  # noqa: S310 — http(s), checked
                content: bytes = answer.read(most + 1)
        except HTTPError as failure:
            raise ConfigError(f"{self.base}{path} answers {failure.code}: {_words(failure)}") from failure
        except (URLError, OSError, ValueError) as failure:
            reason = failure.reason if isinstance(failure, URLError) else failure
            raise ConfigError(f"{self.base} cannot be reached: {reason}. Is the server running?") from failure
        if len(content) > most:
            raise ConfigError(f"{self.base}{path} sends more than {most:,} bytes.")
        return content

    def json(self, path: str) -> Any:
        """The JSON at a path."""
        content = self.get(path)
        try:
            return parse_json(content)
        except (ValueError, RecursionError) as failure:
            raise ConfigError(f"{self.base}{path} sends no JSON. Is it a server of equipoise serve?") from failure

    def file(self, about: Any) -> bytes:
        """A file of a model, checked against its SHA-256."""
        try:
            path, size, digest = str(about["url"]), int(about["bytes"]), str(about["sha256"])
        except (KeyError, TypeError, ValueError) as failure:
            raise ConfigError(f"{self.base} describes its models in a way that is not understood.") from failure
        if not path.startswith("/api/") or not 0 <= size <= LARGEST_FILE:
            raise ConfigError(f"{self.base} names a file that is too large or not its own.")
        content = self.get(path, size)
        if hashlib.sha256(content).hexdigest() != digest:
            raise ConfigError(f"{self.base}{path} arrived damaged: its SHA-256 is not {digest}. Try again.")
        return content


@dataclass(frozen=True)
class ChosenModel:
    """What a client's examples say, and the model that was kept."""

    knob: str
    values: tuple[float, ...]
    verdict: Verdict
    version: str
    kept: Path | None = None

    def __str__(self) -> str:
        best, open_ = self.verdict.best, self.verdict.open
        examples = "one example" if self.verdict.examples == 1 else f"{self.verdict.examples} examples"
        words = f"On your {examples}, {self.knob} {self.values[best]:g} serves you best."
        if open_:
            others = ", ".join(f"{self.values[m]:g}" for m in open_)
            words = f"On your {examples}, {self.knob} {self.values[best]:g} has the lowest loss, "
            words += f"but they do not tell it from {others}."
            words += (
                " With more examples they may." if self.verdict.examples < 30 else " For you these models are about as good."
            )
        lines = [f"{self.knob:>8}{'your loss':>12}{'95 % interval':>22}{'more than the best':>24}{'wrong':>8}"]
        for value, row in zip(self.values, self.verdict.members, strict=True):
            behind = "the lowest" if row.behind is None else row.behind.text("{:.4g}".format) + ("" if row.worse else " (open)")
            wrong = "–" if row.wrong is None else str(row.wrong)
            lines.append(f"{value:>8g}{row.mean:>12.5g}{row.interval.text('{:.4g}'.format):>22}{behind:>24}{wrong:>8}")
        return joined([*lines, "", words])


def choose(
    url: str, data: Path, *, run: str | None = None, token: str | None = None, out: Path | None = None,
    authority: Path | None = None, say: Callable[[str], None] = lambda _: None,
) -> ChosenModel:  # fmt: skip
    """Download a family, try its models on the examples in a file, and keep the best one in a new folder `out`.

    Nothing of the examples is sent: all requests are made before the file is read, but for those of the model that is kept,
    and they name the family alone.
    """
    base, named = parse_address(url)
    client = FamilyClient(base, token, authority)
    family = run or named or _only_family(client)
    path = f"/api/runs/{quote(family, safe='')}"
    about = client.json(f"{path}/models")
    try:
        version = next(each for each in about["versions"] if each["version"] == about["latest"])
        members, knob = version["models"], about["knob"]
        if knob is None or about["signature"] is None:
            raise ConfigError(f"{family} is no family: there is nothing to choose.")
        signature, classes = Signature.of_table(about["signature"]), [str(name) for name in about["classes"]]
        values = tuple(float(member["value"]) for member in members)
        missing = next((member for member in members if SCORE not in member["files"]), None)
        if missing is not None:
            raise ConfigError(
                f"The models of {family} cannot be tried elsewhere: {missing['no_onnx'] or 'they have no ONNX file'}."
            )
        schema = Schema.from_json(client.get(f"{path}/schema").decode()) if about["schema"] else None
    except (KeyError, TypeError, ValueError, StopIteration) as failure:
        if isinstance(failure, ConfigError | InvalidData):
            raise
        raise ConfigError(f"{base} describes its models in a way that is not understood.") from failure
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not empty, and nothing is overwritten. Name a new folder: --out DIR.")
    say(f"Fetching {len(members)} models of {family} …")
    files = [client.file(member["files"][SCORE]) for member in members]
    arrays = read_examples(data, signature, classes, schema)
    losses, errors = [], []
    for member, content in zip(members, files, strict=True):
        loss, error = score(OnnxModel(content, source=f"{member['name']} of {base}"), arrays)
        losses.append(loss)
        errors.append(error)
    if not all(np.isfinite(loss).all() for loss in losses):
        raise InvalidData(f"{data}: a loss on these examples is not finite. Is a value outside of what training knew?")
    verdict = judge(losses, errors)
    kept = None
    if out is not None:
        best = members[verdict.best]
        for name, file in best["files"].items():
            if name != SCORE:
                write_atomically(out / Path(name).name, client.file(file))
        text = {"family": family, "knob": knob, "value": values[verdict.best], "version": version["version"], "server": base}
        kept = write_atomically(out / "choice.json", (json.dumps(text, indent=1) + "\n").encode()).parent
    return ChosenModel(str(knob), values, verdict, str(version["version"]), kept)


def score(model: OnnxModel, arrays: list[Any]) -> tuple[Any, Any]:
    """Loss and error per example."""
    parts = [model([array[first : first + ROWS] for array in arrays]) for first in range(0, len(arrays[0]), ROWS)]
    loss, error = (np.concatenate([part[k] for part in parts]).astype(np.float64) for k in (0, 1))
    return loss, error


def parse_address(url: str) -> tuple[str, str | None]:
    """The address of a server, and the run that it names, if it is the address of a run's page.

    >>> parse_address("http://127.0.0.1:8642/run/demo~family")
    ('http://127.0.0.1:8642', 'demo~family')
    """
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port is not None else ""
    except ValueError as failure:
        raise ConfigError(f"{url} is no address: {failure}.") from failure
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url} is no address of a server. It looks like http://127.0.0.1:8642.")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    steps = [step for step in parts.path.split("/") if step]
    return f"{parts.scheme}://{host}{port}", unquote(steps[1]) if len(steps) >= 2 and steps[0] == "run" else None


def _only_family(client: FamilyClient) -> str:
    try:
        runs = client.json("/api/runs")["runs"]
        found = [str(run["id"]) for run in runs if run["kind"] == "family" and run["status"] == "finished"]
    except (KeyError, TypeError) as failure:
        raise ConfigError(f"{client.base} is no server of equipoise serve.") from failure
    if len(found) != 1:
        names = ", ".join(found[:8]) or "none"
        raise ConfigError(f"{client.base} serves {len(found)} families ({names}). Name one: --family ID.")
    return found[0]


def _is_local(base: str) -> bool:
    return urlsplit(base).hostname in ("127.0.0.1", "localhost", "::1")


def _words(failure: HTTPError) -> str:
    try:
        text = str(parse_json(failure.read(65536))["error"])
    except (ValueError, KeyError, TypeError, OSError):
        text = str(failure.reason)
    return text + (" Give it: --token TOKEN." if failure.code == 401 else "")
