"""A federation in memory whose server and nodes are killed at chosen moments, and what its messages show was released."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from fake_grid import FakeGrid, run_app, splits_of

import equipoise as eq
from equipoise.data.clients import FederatedData
from equipoise.engines.flower import client_app, server_app
from equipoise.engines.flower.apps.node_policy import EXACT_SUMS, noise_multiplier_of
from equipoise.engines.flower.secure.sum_messages import read_tag
from equipoise.engines.flower.secure.sum_terms import SumTerms
from equipoise.experiment.run_files import RunFolder
from equipoise.privacy.accounting import gaussian_epsilon
from equipoise.privacy.ledger import read_entries, server_epsilon
from made_clients import make_clients

P = eq.privacy
DELTA = 1e-2


class Killed(BaseException):
    """The server's process ends here."""


class KillableGrid(FakeGrid):
    """Counts the server's calls, and ends the server at one of them, or starts a node anew."""

    def __init__(self, make_app, names, folder: Path) -> None:
        self.make_app, self.folder = make_app, folder
        super().__init__({name: make_app(name) for name in names})
        self.calls, self.kill_at, self.restart_at = 0, -1, {}
        self.lingers, self.ghosts = 0.0, {}  # seconds that the id of an ended node counts as connected, and until when

    def _call(self) -> None:
        self.calls += 1
        if self.calls in self.restart_at:
            self.start_anew(*self.restart_at[self.calls])
        if self.calls == self.kill_at:
            raise Killed

    def get_node_ids(self):
        return [*super().get_node_ids(), *(node for node, until in self.ghosts.items() if self.clock.now < until)]

    def start_anew(self, client: str, keep_state: bool) -> None:
        """A node ends and begins again: what its process knew is gone, its folder is there."""
        old = next(node for node, name in self.names.items() if name == client)
        self.ghosts[old] = self.clock.now + self.lingers
        self.restart(client, keep_state=keep_state)
        node = next(node for node, name in self.names.items() if name == client)
        self.apps[node] = self.make_app(client)

    def push_messages(self, messages):
        self._call()
        return super().push_messages(messages)

    def pull_messages(self, message_ids):
        found = super().pull_messages(message_ids)
        if found:  # they have come, and the server ends before it has looked at them
            self._call()
        return found

    def settle(self) -> None:
        """Wait until nodes have answered what was under way."""
        end = time.monotonic() + 60
        while self.clock.working and time.monotonic() < end:
            time.sleep(0.005)


@dataclass
class Campaign:
    """One run with kills: how it is started, and what was seen of it."""

    folder: Path
    algorithm: eq.Algorithm
    clients: int = 5
    per_round: int = 4
    rounds: int = 3
    model: object = None
    results: list = field(default_factory=list)

    def __post_init__(self) -> None:
        self.data = FederatedData(make_clients([8] * self.clients, features=3, classes=2), name="some")

        def make_app(name):
            return client_app(
                model=self.make_model, load_data=lambda _: splits_of(self.data, name), keep=self.folder / "nodes" / name
            )

        self.grid = KillableGrid(make_app, list(self.data.train.ids), self.folder)

    @staticmethod
    def make_model():
        return eq.models.Softmax(3, 2)

    def serve(self) -> bool:
        """Start the server; False if it was killed."""
        place = RunFolder(self.folder / "run")
        if place.config.exists() and place.finished:
            return True
        app = server_app(
            self.algorithm, model=self.make_model, rounds=self.rounds, clients_per_round=self.per_round, clients=self.clients,
            folder=place.path, seed=3, timeout=30.0, pause=1.0, retries=2, on_result=self.results.append,
        )  # fmt: skip
        try:
            run_app(app, self.grid)
        except Killed:
            self.grid.settle()
            if not place.config.exists():  # nothing was begun
                shutil.rmtree(place.path, ignore_errors=True)
            self.grid.new_run()  # Flower starts another run, whose state on the nodes is empty
            return False
        return True

    @property
    def entries(self):
        """The server's ledger."""
        path = self.folder / "run" / "ledger.jsonl"
        return read_entries(path) if path.exists() else []

    # ------------------------------------------------------------------------------------------- what the messages show

    def read_sums(self):
        """Of all messages: the terms of each sum by its tag, what clients were asked, who sent values, and who revealed."""
        terms, asked, came, revealed = {}, {}, defaultdict(set), defaultdict(list)
        for client, message in self.grid.sent:
            values = json.loads(message.content["call"]["values"])
            for name, array in message.content["tensors"].items():
                if name.startswith("sum.") and message.metadata.message_type == "train.keys":
                    found = SumTerms.of_invitation(array.data)
                    terms[found.tag] = found
                elif name.startswith("sum.") and message.metadata.message_type == "train.masked":
                    asked[read_tag(array.data), client] = values["sum"]
        for client, action, reply in self.grid.replies:
            for name, array in reply.content["tensors"].items() if reply.has_content() else ():
                if name.startswith("sum.") and action == "train.masked":
                    came[read_tag(array.data)].add(client)
                elif name.startswith("sum.") and action == "train.reveal":
                    revealed[read_tag(array.data)].append(client)
        return terms, asked, came, revealed

    def released(self):
        """Every sum that could be unmasked from the messages: its terms, and what those in it were asked for."""
        terms, asked, came, revealed = self.read_sums()
        out = [tag for tag, who in revealed.items() if len(set(who)) >= terms[tag].threshold]
        return [(terms[tag], {client: asked[tag, client] for client in came[tag]}) for tag in out]

    def epsilon_of_messages(self) -> float:
        """ε for the server, about the client that fares worst, of all noisy sums that could be unmasked."""
        cost: Counter[str] = Counter()
        for terms, asked in self.released():
            kinds = {each["kind"] for each in asked.values()}
            if kinds & {*EXACT_SUMS, "scores"}:
                continue
            (kind,) = kinds
            z = noise_multiplier_of(kind, next(iter(asked.values())), len(asked), terms.length)
            for client in asked:
                cost[client] += z**-2
        worst = max(cost.values(), default=0)
        return gaussian_epsilon(worst**-0.5 if worst else math.inf, DELTA)

    def check(self) -> None:
        """The ledger's ε is not below that of the messages, and nobody revealed anything twice."""
        assert (server_epsilon(self.entries, DELTA) or 0.0) >= 0.999 * self.epsilon_of_messages()
        begun = Counter((e.round, e.purpose) for e in self.entries if e.kind in ("release", "exact"))
        out = Counter((terms.round, terms.purpose) for terms, _ in self.released())
        assert all(begun[key] >= count for key, count in out.items()), (begun, out)
        answered: Counter = Counter()
        for terms, who in self.all_reveals():
            answered.update((client, terms.run, terms.round, terms.purpose) for client in who)
        assert not answered or max(answered.values()) == 1, answered

    def all_reveals(self):
        """Every reveal that left a node, also of sums that could not be unmasked: terms and clients."""
        terms, _, _, revealed = self.read_sums()
        return [(terms[tag], who) for tag, who in revealed.items()]


def private_tail(**more):
    """Δ-FL under distributed differential privacy."""
    options = {"noise": "distributed", "noise_multiplier": 1.0, "method": "rdp", **more}
    return eq.Algorithm(
        risk=eq.risk.Superquantile(0.5, quantile=P.PrivateQuantile(bound=2.0, bins=2)), sampler=eq.sampling.Uniform(),
        privacy=P.DifferentialPrivacy(None, DELTA, 1.0, **options),
    )  # fmt: skip


def try_kill(folder: Path, moment: int, generator) -> Campaign:
    """A run of which the server is killed at its call number `moment` and nodes at random ones; it then goes on to its end."""
    campaign = Campaign(folder, private_tail())
    campaign.grid.kill_at = moment
    names = list(campaign.data.train.ids)
    for _ in range(int(generator.integers(0, 3))):
        when, who = int(generator.integers(10, 90)), names[int(generator.integers(len(names)))]
        campaign.grid.restart_at[when] = who, bool(generator.integers(2))
    for _ in range(4):
        ended = campaign.serve()
        campaign.check()
        if ended:
            break
    assert campaign.results, "the run did not end"
    assert campaign.results[-1].rounds == campaign.rounds
    return campaign
