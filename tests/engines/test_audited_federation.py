"""Audits of a federation at message level: canary nodes, real masks and noise, with lost nodes, retries and kills.

The attacker is the server. It unmasks the sums that the protocol gives it, takes off nothing that it does not know, and, where
a round was released more than once, takes the mean of the sums: what a repeated release would be worth.
"""

from __future__ import annotations

import logging
from collections import defaultdict

import numpy as np
import pytest
import torch
from fake_grid import splits_of
from killed_federation import DELTA, Campaign, KillableGrid, Killed

import equipoise as eq
from equipoise.engines.flower import client_app
from equipoise.engines.flower.secure import masks, secure_node
from equipoise.engines.flower.secure.masked_sums import RoundSums
from equipoise.privacy.canaries import LONG, CanaryModel, canary_data
from equipoise.privacy.claim_audit import audit_claim
from equipoise.privacy.ledger import server_epsilon, with_fewer_shares
from equipoise.privacy.privacy_profile import unsampled_event

logging.getLogger("flwr").setLevel("CRITICAL")
CLIENTS, ROUNDS, CLIP = 8, 48, 1.0


class CanaryCampaign(Campaign):
    """A federation of canaries: half of the nodes send an update at the clip bound, each in a direction of its own."""

    def __post_init__(self) -> None:
        self.clients, self.per_round, self.rounds = CLIENTS, CLIENTS, ROUNDS
        self.data = canary_data(CLIENTS, LONG * CLIP, opposite=False)

        def make_app(name):
            folder = self.folder / "nodes" / name
            return client_app(model=self.make_model, load_data=lambda _: splits_of(self.data, name), keep=folder)

        self.grid = KillableGrid(make_app, list(self.data.train.ids), self.folder)

    @staticmethod
    def make_model():
        return CanaryModel(CLIENTS)


def audited(folder, monkeypatch, factor):
    """Scores of a run in which nodes draw `factor` times the noise that they are asked for; and what its ledger claims."""
    monkeypatch.setattr(masks, "agreed_key", lambda private, public: bytes(32))  # takes long, and has no part in this
    honest, sums = secure_node.sample_discrete_gaussian, defaultdict(list)
    original = RoundSums.updates

    def weaker(variance, *rest, **more):
        return honest(variance * factor**2, *rest, **more)

    kills = [5, 11]

    def updates(self, cohort, workers, ask, *rest):
        total, survivors = original(self, cohort, workers, ask, *rest)
        sums[cohort.round].append((total.double() * ask(survivors[0])["step"] / CLIP, survivors))
        if kills and cohort.round >= kills[0]:
            kills.pop(0)
            raise Killed
        return total, survivors

    monkeypatch.setattr(secure_node, "sample_discrete_gaussian", weaker)
    monkeypatch.setattr(RoundSums, "updates", updates)
    privacy = eq.privacy.DifferentialPrivacy(None, DELTA, CLIP, noise_multiplier=1.0, noise="distributed", method="rdp")
    solver = eq.solvers.SGD(lr=1.0, batch_size=None)
    campaign = CanaryCampaign(folder, eq.Algorithm(solver=solver, sampler=eq.sampling.Full(), privacy=privacy))
    ids, again = campaign.data.train.ids, set()

    def fault(delivery):
        """Three nodes are lost in each round, so that as few shares are there as may be; some rounds need another try."""
        lost = {ids[(delivery.round + k) % CLIENTS] for k in range(3)}
        if delivery.action == "train.masked" and delivery.round % 5 == 2 and delivery.round not in again:
            again.add(delivery.round) if delivery.client == ids[0] else None
            return None
        return None if delivery.action == "train.masked" and delivery.client in lost else delivery.answer()

    campaign.grid.fault = fault
    while not campaign.serve():
        pass
    campaign.check()
    assert max(map(len, sums.values())) == 1  # no release is made twice
    present, absent = [], []
    for released in sums.values():
        mean = torch.stack([total for total, _ in released]).mean(0)
        for k in (k for k, name in enumerate(ids) if name in released[0][1]):
            (present if k < CLIENTS // 2 else absent).append(float(mean[k]))
    entries = campaign.entries
    there = {e.round: e.contributors for e in entries if e.kind == "outcome" and e.purpose == "update"}
    fewest = min(
        with_fewer_shares(e.zeroed, there.get(e.round, e.contributors), e.shares)
        for e in entries if e.kind == "release"
    )  # fmt: skip
    assert server_epsilon(entries, DELTA) > 0
    return np.array(present), np.array(absent), [(unsampled_event(fewest), 1)]


@pytest.mark.long
@pytest.mark.parametrize("factor", [1.0, 0.5], ids=["the noise that is claimed", "half of it"])
def test_what_the_server_tells_of_a_canary_from_unmasked_sums(factor, tmp_path, monkeypatch):
    present, absent, claim = audited(tmp_path, monkeypatch, factor)
    assert min(len(present), len(absent)) >= 100
    found = audit_claim(present, absent, claim, delta=DELTA, threshold=0.5)
    assert found.refuted == (factor < 1), str(found)
    assert (found.shown > found.claimed) == (factor < 1)
