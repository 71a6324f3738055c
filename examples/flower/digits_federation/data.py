"""The examples of a node: handwritten digits, of which each client has its own share and its own mix of classes."""

from typing import Any

import equipoise as eq


def load_data(context: Any) -> eq.data.FederatedData:
    """What this node trains and tests on; `context.node_config` holds what its owner wrote into --node-config."""
    everyone = simulated()
    mine = [everyone.train.ids.index(str(context.node_config["client-id"]))]
    return eq.data.FederatedData(everyone.train.take(mine), test=everyone.test.take(mine), name="digits", classes=10)


def simulated() -> eq.data.FederatedData:
    """All clients in one place, for trials before anything travels."""
    return eq.data.digits(clients=4, split_by="examples", seed=0)
