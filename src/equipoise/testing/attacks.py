"""The law of attacks: the same malicious clients and the same noise on every engine."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from equipoise.attacks import Sent, apply
from equipoise.core import rng
from equipoise.core.abilities import attack_traits
from equipoise.core.rng import torch_generator
from equipoise.core.task import Task
from equipoise.data.federated_data import FederatedData
from equipoise.engines import Loop, Simulator
from equipoise.errors import is_integer, is_number
from equipoise.runs.setup import EngineChoice
from equipoise.runs.tried_calls import same_state
from equipoise.solvers import SGD
from equipoise.testing.laws import agree, check_of, hold, unchanged
from equipoise.testing.small_run import draw_everyone, make_small_task, perturb_params
from equipoise.types import Attack


@check_of("an attack", "share", "seed")
def check_attack(
    attack: Attack,
    *,
    task: Task | None = None,
    data: FederatedData | None = None,
    engines: Sequence[EngineChoice] = (Simulator(chunk_size=3),),
    tolerance: float = 1e-9,
    seed: int = 0,
) -> None:
    """The attack has the same malicious clients and sends the same updates on every engine, and spares all other clients.

    `share` of the training clients, to the nearest, are malicious; another `seed` draws others. Data that the attack poisons
    keep their clients, sizes and the examples of clean clients; the data it is given are not written to, and applying it
    again repeats. What a malicious client sends depends on its own update, its key, its weight and the cohort's size alone (if
    it is omniscient also on the honest updates, in any order), so that engines may ask for one client or for many; clean
    clients send what they send without the attack.

    >>> import equipoise as eq
    >>> check_attack(eq.attacks.SignFlip())  # nothing is returned: all laws hold
    """
    if task is None or data is None:
        task, data = make_small_task(seed)
    hold(is_number(attack.share) and 0 <= attack.share <= 1, attack, "share", attack.share)
    hold(is_integer(attack.seed) and attack.seed >= 0, attack, "seed", attack.seed)
    attacked = _check_data(attack, data)
    if is_dataclass(attack):  # a part whose fields can be replaced
        _check_seed(attack, data)
    _check_corruption(attack, torch_generator(seed, "check_attack"), seed)
    params, solver = perturb_params(task, torch_generator(seed, "check_attack engines")), SGD(batch_size=5)
    cohort = draw_everyone(data, seed)
    honest, expected = (Loop().start(task, each).updates(params, cohort, solver).update for each in (data, attacked))
    clean = torch.tensor([name not in attacked.malicious for name in data.train.ids])
    agree(attack, "spares_clean", honest[clean], expected[clean])
    for engine in engines:
        updates = engine.start(task, attacked).updates(params, cohort, solver).update.cpu()
        agree(attack, "under_attack", updates, expected, tolerance, engine=repr(engine))


def _check_data(attack: Attack, data: FederatedData) -> FederatedData:
    """The data under attack, after a look at who and what has changed."""
    before = copy.deepcopy(data)
    attacked, again = apply(data, attack), apply(data, attack)
    hold(before.fingerprint == data.fingerprint, attack, "data_unwritten")
    same = attacked.fingerprint == again.fingerprint and attacked.malicious == again.malicious
    hold(same, attack, "data_again")
    count, expected = len(attacked.malicious), attack.share * len(data.train)
    hold(abs(count - expected) <= 0.5, attack, "share_malicious", (count, expected))
    agree(attack, "sizes", attacked.train.sizes, data.train.sizes)
    for position, name in enumerate(data.train.ids):
        same = all(map(torch.equal, attacked.train.client(at=position), data.train.client(at=position)))
        hold(same or name in attacked.malicious, attack, "clean_examples", name)
    return attacked


def _check_seed(attack: Attack, data: FederatedData) -> None:
    """Another seed draws other clients, where there is a choice; a share of 0 changes nothing."""
    other = cast(Any, attack)
    none = apply(data, replace(other, share=0.0))
    hold(not none.malicious and none.train is data.train, attack, "nobody_malicious")
    drawn = {apply(data, replace(other, share=0.5, seed=seed)).malicious for seed in range(6)}
    hold(len(drawn) > 1 or len(data.train) < 2, attack, "other_seed", drawn)


def _check_corruption(attack: Attack, gen: torch.Generator, seed: int) -> None:
    """What malicious clients send: one by one as together, again as before, and from updates that are not written to."""
    corrupt, omniscient = attack_traits(attack).corrupt, attack_traits(attack).omniscient
    if corrupt is None:
        return
    for dtype in (torch.float64, torch.float32):
        updates = torch.randn(5, 7, generator=gen, dtype=torch.float64).to(dtype)
        keys = rng.client_keys(rng.stream_key(seed, "batches", 3), torch.arange(5))
        honest = torch.randn(7, 7, generator=gen, dtype=torch.float64).to(dtype) if omniscient else None
        sent = Sent(updates, keys, 12, honest)
        with unchanged(attack, updates=updates, keys=keys):
            together = corrupt(sent)
        hold(isinstance(together, Tensor), attack, "update_tensor", type(together).__name__)
        hold(together.shape == updates.shape, attack, "update_shape", tuple(together.shape))
        hold(same_state(corrupt(sent), together), attack, "sent_again")
        if honest is not None:
            moved = corrupt(Sent(updates, keys, 12, honest.flip(0)))
            agree(attack, "honest_order", moved, together, 1e-6)
            continue
        alone = torch.cat([corrupt(Sent(updates[k : k + 1], keys[k : k + 1], 12)) for k in range(5)])
        agree(attack, "sent_alone", alone, together, 1e-6)
