"""`client_app`: the Flower app of a node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.client_metrics import ClientMetrics
from equipoise.core.per_example_losses import PerExample
from equipoise.engines.flower.apps.flower_extra import require_flower
from equipoise.engines.flower.apps.model_source import ModelSource
from equipoise.errors import require
from equipoise.runs.setup import EngineChoice, choose_engine

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.clientapp import ClientApp

    from equipoise.engines.flower.apps.node_policy import NodePolicy


def client_app(
    *,
    model: ModelSource,
    load_data: Callable[[Context], Any],
    loss: PerExample | None = None,
    error: PerExample | None = None,
    engine: EngineChoice | str = "loop",
    only_sums: bool = False,
    minimum_crowd: int = 2,
    allow: Sequence[str] = (),
    answer_after: float = 0.0,
    policy: NodePolicy | str | Path | None = None,
    keep: str | Path | None = None,
    metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
) -> ClientApp:
    """The Flower ClientApp of a node that takes part with its own data. One node is one client.

    `model` is a torch module, its class, or a function of nothing (or of the seed) that makes one; the server's is the same.
    `loss` and `error` are as for `equipoise.train`, and the same as the server's.

    `load_data(context)` gets Flower's Context (`context.node_config`, `context.run_config`, `context.node_id`) and gives the
    node's examples, which never leave it. It may return

    - a dictionary of splits, `{"train": (x, y), "validation": (x, y), "test": (x, y)}`, of which "train" or "test" must be
      there, and `"id"`, the client's name, may be. A node without "train" is only evaluated on.
    - two pairs `(x, y), (x, y)`, to train and to test on; or one pair `x, y` to train on; a torch Dataset may stand for a pair
    - an equipoise FederatedData or ClientSet with exactly one client, whose id is the client's name.

    A client keeps its name for good: batches and the client's own model go by it. Unless the data bring one it is "client-id"
    of the node's configuration (`flower-supernode --node-config 'client-id="hospital-3"'`), else its "partition-id", else
    Flower's node id, which is stable for nodes that authenticate.

    `engine` does the local work: "loop", "simulator", or one with options such as engines.Simulator(device="cuda").

    What the node's owner decides, whatever the server asks: with `only_sums` the node answers only to secure sums, and
    gives no one its single loss, score or update. Each sum, evaluations included, must be over at least `minimum_crowd`
    clients. `allow` names packages, installed here, from which the server may name classes of its own parts; the catalogue
    of Equipoise is always allowed. The node sends an answer `answer_after` seconds after the request, or after a multiple
    of it, so that the time of an answer reveals less about the work. `policy`, a NodePolicy or the path of its file, says
    all of this and more; if a rule is given in both places, both apply. An app that the server sends to a node brings its
    own options: only `equipoise flower node --app … --policy …` enforces the owner's.

    `keep` is a folder of this node in which the client's own model (Ditto and similar methods) remains after the Flower
    run. Without it the model is only in Flower's state of the run. `metrics` are those of `equipoise.train` that the node
    computes for a server which asks for them by name.
    """
    require_flower()
    from equipoise.engines.flower.apps.node_app import make_client_app
    from equipoise.engines.flower.apps.node_policy import NodePolicy, read_policy
    from equipoise.engines.flower.apps.node_session import NodeSetup

    require(callable(load_data), "load_data", "must be a function of Flower's Context that gives the data", load_data)
    good = not isinstance(allow, str) and all(isinstance(name, str) for name in allow)
    require(good, "allow", "must be a list of package names", allow, 'E.g. allow=["my_parts"].')
    folder, measured = Path(keep) if keep else None, ClientMetrics.of(metrics)
    own = NodePolicy(only_sums=only_sums, minimum_crowd=minimum_crowd, allow=tuple(allow), answer_after=answer_after)
    if policy is not None:
        given = policy if isinstance(policy, NodePolicy) else read_policy(policy)
        own = own.stricter(given)
    return make_client_app(NodeSetup(model, load_data, loss, error, choose_engine(engine), own, folder, metrics=measured))
