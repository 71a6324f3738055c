"""The app that a node's owner has chosen: installed on the node, or pinned by its hash, in place of what the server hands over.

Flower's SuperNode runs the app bundle that comes with a run, whatever is in it. `equipoise flower node --app` never unpacks
that bundle; with `--pin` it does so only if it is, byte for byte, the one that the owner has looked at.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp

from equipoise.engines.flower.apps.kept_data import KeptData
from equipoise.engines.flower.apps.node_app import NodeApp
from equipoise.engines.flower.apps.node_policy import NodePolicy, read_policy
from equipoise.engines.flower.transport.messenger import name_type
from equipoise.errors import ConfigError, EquipoiseError, require


class NotPinned(EquipoiseError):
    """The server has handed over another app than the one that the node's owner has pinned."""


@dataclass(frozen=True, eq=False)
class OwnedApp:
    """What the owner has chosen: an installed app, or the SHA-256 of a bundle; and a policy. Neither: the server's bundles."""

    installed: ClientApp | None = None
    pinned: str | None = None
    policy: NodePolicy | None = None
    file: Path | None = None  # of the policy

    @classmethod
    def choose(cls, app: str | None, pinned: str | None, policy: Path | None) -> OwnedApp:
        """The choice of the command line, checked; the installed app is loaded."""
        if app is not None and pinned is not None:
            raise ConfigError("--app and --pin are two ways to name the app of this node. Give one of them.")
        if policy is not None and app is None and pinned is None:
            raise ConfigError(
                "--policy needs --app or --pin: an app that the server hands over need not follow the policy. Install the app "
                "on this node, or pin the hash of its bundle."
            )
        good = pinned is None or re.fullmatch("[0-9a-f]{64}", pinned) is not None
        require(good, "--pin", "must be the SHA-256 of the bundle in 64 hexadecimal digits", pinned, "sha256sum app.fab")
        rules = read_policy(policy) if policy is not None else None
        if rules is not None:
            rules.read_identity()  # or the first message would find that the key cannot be read
        installed = load_installed(app) if app is not None else None
        choice = cls(installed, pinned, rules, policy.resolve() if policy is not None else None)
        if installed is not None:
            choice.hold(installed)
        return choice

    def hold(self, app: ClientApp) -> ClientApp:
        """The app, held to the policy; one that cannot be held to it is refused."""
        if isinstance(app, NodeApp):
            app.own(self.policy, self.file)
        elif self.policy is not None:
            raise ConfigError("A policy can hold only an app of equipoise.engines.flower.client_app, and this is another.")
        return app

    def keep_data(self, node: int, node_config: dict[str, Any]) -> KeptData | None:
        """What loads the data of the installed app once for all messages; None for an app that comes with each run."""
        app = self.installed
        if not isinstance(app, NodeApp):
            return None
        context = Context(0, node, node_config, RecordDict(), {})

        def load() -> None:
            _ = app.setup.data(context).data.fingerprint  # which introductions and answers name

        return KeptData(load, app.setup.forget)

    def name_error(self, text: str | None) -> str:
        """Of an exception the server learns the type, and not its text."""
        return name_type(text)

    def refuse_other(self, digest: str) -> None:
        """Refuse a bundle with another hash."""
        if digest != self.pinned:
            raise NotPinned(f"The server hands over the bundle {digest[:64]}, and this node runs {self.pinned} alone.")


def load_installed(reference: str) -> ClientApp:
    """The app at "package.module:name", from what is installed on this machine."""
    module, _, name = reference.partition(":")
    if not module or not name.isidentifier():
        raise ConfigError(f"--app must be package.module:name, e.g. my_federation.client_app:app, but is {reference!r}.")
    try:
        app = vars(importlib.import_module(module)).get(name)
    except ImportError as failure:
        raise ConfigError(
            f"The app {reference} cannot be loaded: {failure}. Is its package installed, or in PYTHONPATH?"
        ) from failure
    if not isinstance(app, ClientApp):
        raise ConfigError(f"{reference} is no ClientApp. client_app(…) of equipoise.engines.flower makes one.")
    return app
