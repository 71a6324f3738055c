"""Provisioning: the operator's folder of a federation, and one kit per site with all that its node needs.

The operator's folder is that of the app (`equipoise flower init`). `set_up` makes certificates, Flower's settings and the files
of the server; `make_kit` makes the kit of a site, renews its key, or retires it. Nothing that exists is replaced unasked.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from equipoise.algorithm import Algorithm
from equipoise.core.files import write_atomically
from equipoise.core.plain_text import made_of, parse_toml, typed
from equipoise.engines.flower.apps.node_keys import read_node_list
from equipoise.engines.flower.apps.node_policy import read_policy
from equipoise.engines.flower.operate.authority import Authority, new_node_key, write_file
from equipoise.engines.flower.operate.kit_questions import (
    demand_sums,
    open_to_single_requests,
    read_algorithm,
    refused_parts,
)
from equipoise.errors import ConfigError, FileGuard, require

DEPLOY = Path(__file__).parents[1] / "deploy"
NODE_LIST, SETTINGS, KIT = "nodes.toml", "superlink.toml", "node.toml"
LOCAL = ("localhost", "127.0.0.1")
PORT = 47090
PATHS = ("file", "folder")  # settings below [node-config] with these names, or that end in -file or -folder, are paths


@dataclass(frozen=True)
class OperatorFolder:
    """The folder of an app whose federation somebody operates."""

    path: Path

    @property
    def authority(self) -> Authority:
        """Its certificates."""
        return Authority(self.path / "certificates")

    @property
    def package(self) -> str:
        """The app's Python package."""
        file = self.path / "pyproject.toml"
        with FileGuard(file, ConfigError, "says no clientapp", "Write an app: equipoise flower init DIR"):
            return str(parse_toml(file)["tool"]["flwr"]["app"]["components"]["clientapp"]).partition(".")[0]

    @property
    def settings(self) -> dict[str, Any]:
        """Where the SuperLink is: "host", the first of its names, and "port"."""
        cure = "Say where the SuperLink is first: equipoise flower authority --host NAME"
        with FileGuard(self.path / SETTINGS, ConfigError, cure=cure):
            given = parse_toml(self.path / SETTINGS)
            return {"host": str(given["host"]), "port": int(given["port"]), "hosts": made_of(list[str], given["hosts"])}

    @property
    def address(self) -> str:
        """Where nodes reach the SuperLink."""
        return f"{self.settings['host']}:{self.settings['port']}"

    def listen(self, host: str) -> int:
        """The port for a SuperLink that listens at `host`; operators' commands find it there from now on.

        One that only this machine reaches, while nodes are elsewhere, leaves the nodes' port to the proxy and takes the next.
        """
        settings = self.settings
        port = int(settings["port"]) + (host in LOCAL and settings["host"] not in LOCAL)
        flower = f'[superlink]\ndefault = "federation"\n\n[superlink.federation]\naddress = "127.0.0.1:{port}"\n'
        flower += f"root-certificates = {json.dumps(str(self.authority.certificate.resolve()))}\n"
        write_file(self.path / ".flwr" / "config.toml", flower.encode(), secret=False)
        return port

    def set_up(self, hosts: Sequence[str], port: int, *, renew: bool = False) -> list[str]:
        """Make or renew the certificates, Flower's settings and the files of the server; says what was done."""
        package = self.package
        if not hosts and (self.path / SETTINGS).exists():
            hosts, port = self.settings["hosts"], self.settings["port"]
        hosts = list(hosts) or ["127.0.0.1"]
        for host in hosts:
            good = re.fullmatch(r"[A-Za-z0-9.:-]+", host) is not None
            require(good, "--host", "must be the name or address of the SuperLink's machine", host, "E.g. fed.example.org.")
        before = self.authority.server.read_bytes() if self.authority.server.exists() else None
        done = self.authority.prepare([*hosts, *LOCAL], renew=renew)
        if before is not None and before != self.authority.server.read_bytes():
            done.append("A SuperLink and a proxy that run have the old certificate: start them again.")
        settings = f'host = "{hosts[0]}"\nport = {port}\nhosts = {json.dumps(hosts)}\n'
        write_atomically(self.path / SETTINGS, settings.encode())
        inside = self.listen(LOCAL[1])
        if not (self.path / NODE_LIST).exists():
            write_file(
                self.path / NODE_LIST,
                b"# The public key of each node: no other node takes part under its name.\n",
                secret=False,
            )
        values = {
            "package": package, "host": hosts[0], "port": str(port), "inside": str(inside), "folder": str(self.path.resolve()),
            "equipoise": str(Path(sys.executable).with_name("equipoise")),
        }  # fmt: skip
        done += [f"wrote {path}" for path in render(DEPLOY / "server", self.path / "deploy", values)]
        return done

    def make_kit(self, name: str, *, renew: bool = False) -> Path:
        """The kit of a site. One that is there keeps its key, unless it is renewed; the old key is kept beside.

        A site on the list whose private key is not here has it itself: its kit is made without.
        """
        require(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name) is not None, "NAME", "must be a short plain name", name)
        kit, address = self.path / "sites" / name, self.address
        known = read_node_list(self.path / NODE_LIST)
        private, public = kit / "node.key", kit / "node.pub"
        if renew:
            stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
            for file in (file for file in (private, public) if file.exists()):
                file.rename(file.with_name(f"{file.name}.until-{stamp}"))
        if not private.exists():
            if name in known and not renew:
                write_file(public, f"{known[name]} {name}\n".encode(), secret=False)
            else:
                new_node_key(private, public, name)
        self.list_key(name, public.read_text(encoding="utf-8"))
        write_file(kit / "ca.crt", self.authority.certificate.read_bytes(), secret=False)
        values = {"package": self.package, "name": name, "address": address}
        render(DEPLOY / "site", kit, values, keep=(KIT, "policy.toml"))
        if not (kit / "policy.toml").exists():
            policy, algorithm = (self.path / "policy.toml").read_text(encoding="utf-8"), self.algorithm
            sums = algorithm is not None and algorithm.traits.privacy.sums_alone
            write_file(kit / "policy.toml", (demand_sums(policy) if sums else policy).encode(), secret=False)
        app = kit / "app" / self.package
        if app.exists():
            shutil.rmtree(app)
        shutil.copytree(self.path / self.package, app, ignore=shutil.ignore_patterns("__pycache__"))
        return kit

    @cached_property
    def algorithm(self) -> Algorithm | None:
        """The algorithm in the app's task.py, once read; None where it cannot be."""
        return read_algorithm(self.path, self.package)

    def doubts(self, name: str) -> list[str]:
        """What the policy of a site's kit gets wrong about the algorithm in task.py."""
        file, algorithm = self.path / "sites" / name / "policy.toml", self.algorithm
        if algorithm is None:
            return [f"{self.package}/task.py has no `algorithm` that can be loaded: {file} is not compared with it."]
        try:
            policy = read_policy(file)
        except ConfigError as failure:
            return [str(failure)]
        found = [open_to_single_requests(policy, algorithm), *refused_parts(policy, algorithm)]
        return [f"{file}: {text}." for text in found if text]

    def list_key(self, name: str, public: str) -> None:
        """Write a node's public key into the operator's list: no other node takes part under its name."""
        known = read_node_list(self.path / NODE_LIST) | {name: " ".join(public.split()[:2])}
        self._write_list(known)

    def retire(self, name: str) -> None:
        """Take a node off the list: it no longer takes part, whatever the SuperLink still knows."""
        known = read_node_list(self.path / NODE_LIST)
        if name not in known:
            raise ConfigError(f"{name} is not in {self.path / NODE_LIST}, which has: {', '.join(known) or 'nobody'}.")
        del known[name]
        self._write_list(known)

    def _write_list(self, known: Mapping[str, str]) -> None:
        text = "# The public key of each node: no other node takes part under its name.\n"
        text += "".join(f"{json.dumps(name)} = {json.dumps(key)}\n" for name, key in sorted(known.items()))
        write_file(self.path / NODE_LIST, text.encode(), secret=False)


def render(source: Path, target: Path, values: Mapping[str, str], keep: Sequence[str] = ()) -> list[Path]:
    """Write the files of a folder of the package, with {{names}} filled in; those in `keep` only where they are missing."""
    written = []
    for file in sorted(source.glob("*.txt")):
        path = target / file.name.removesuffix(".txt")
        if path.name in keep and path.exists():
            continue
        text = re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], file.read_text(encoding="utf-8"))
        written.append(write_file(path, text.encode(), secret=False))
    return written


# ----------------------------------------------------------------------------------------------------------- a kit on its site


@dataclass(frozen=True)
class Kit:
    """A site's kit, as its node is started from it: node.toml and the files that it names."""

    path: Path
    superlink: str
    client: str
    app: str
    key: Path
    authority: Path
    policy: Path | None
    preload: tuple[str, ...]
    node_config: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Kit:
        """The kit in a folder; what is missing in it is named."""
        file = path / KIT
        texts = ("superlink", "client-id", "app", "key", "authority")
        others = {"policy": str, "preload": list[str], "node-config": dict[str, bool | int | float | str]}
        with FileGuard(file, ConfigError, "is no kit"):
            given = typed(
                {"policy": "", "preload": [], "node-config": {}} | parse_toml(file), dict.fromkeys(texts, str) | others
            )
            if unknown := [name for name in given if name not in (*texts, *others)]:
                raise ValueError(f"it says {unknown[0]!r}, which is none of: {', '.join(sorted((*texts, *others)))}")
            if empty := [name for name in texts if not given[name]]:
                raise KeyError(empty[0])
            config = {name: _seen_from(path, name, value) for name, value in given["node-config"].items()}
        policy = path / given["policy"] if given["policy"] else None
        return cls(
            path, given["superlink"], given["client-id"], given["app"], path / given["key"], path / given["authority"], policy,
            tuple(given["preload"]), {"client-id": given["client-id"], **config},
        )  # fmt: skip

    @property
    def arguments(self) -> list[str]:
        """The arguments of `flower-supernode` that the kit stands for."""
        config = " ".join(f"{name}={json.dumps(value)}" for name, value in self.node_config.items())
        return [
            "--superlink", self.superlink, "--root-certificates", str(self.authority), "--auth-supernode-private-key",
            str(self.key), "--node-config", config,
        ]  # fmt: skip


def _seen_from(kit: Path, name: str, value: Any) -> Any:
    """A setting of [node-config]; one that names a file or folder is seen from the kit, wherever the node is started."""
    return str((kit / value).resolve()) if isinstance(value, str) and name.rpartition("-")[2] in PATHS else value
