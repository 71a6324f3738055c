"""The loop engine: one client at a time, plain and obviously right. Every other engine is tested against it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.attacks import corrupted
from equipoise.client_metrics import ClientMetrics
from equipoise.core import rng
from equipoise.core.abilities import solver_traits
from equipoise.core.devices import seed_generators, usable_device
from equipoise.core.task import Task
from equipoise.core.update_checks import as_local_work, checked_norms, longest_square
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.engines.device_sets import DeviceSets
from equipoise.solvers.batches import batches_of
from equipoise.types import Aggregator, Cohort, Engine, LocalSolver, LocalWork, Pull


@dataclass(frozen=True)
class Loop:
    """Train clients one after another. `device` is any torch device; None is the CPU.

    Source: ours; the textbook loop.
    """

    device: str | None = None

    def start(self, task: Task, data: FederatedData) -> LoopEngine:
        """The running engine for a task on a data set."""
        return LoopEngine(task, data, usable_device(self.device))


class LoopEngine(Engine):
    """The running loop engine of one task on one data set."""

    def __init__(self, task: Task, data: FederatedData, device: torch.device, sets: DeviceSets | None = None) -> None:
        self.device, self.task, self.sets = device, task.to(device), sets or DeviceSets(device, data)
        self.data, self.train = data, self.sets[data.train]

    @property
    def expect(self) -> Callable[[Tensor], None] | None:
        """Reads ahead the examples of clients at these positions, which take part in the next round; None: all are there."""
        return self.sets.expecting(self.train)

    def losses(self, params: Tensor, cohort: Cohort, solver: LocalSolver | None = None) -> Tensor:
        """F_k(w) of each client of the cohort, (K,); after its inner steps for a solver that adapts."""
        if solver is not None and solver_traits(solver).adapts:
            return torch.stack([self._train_client(params, cohort, place, solver)[1] for place in range(len(cohort))])
        self.sets.hold(self.train, cohort.clients)
        return torch.stack([self._score(params, self.train, k)[0] for k in cohort.clients.tolist()])

    def updates(self, params: Tensor, cohort: Cohort, solver: LocalSolver) -> LocalWork:
        """Local work of each client: updates (K, D)."""
        updates, losses = stack_columns(self._sent(params, cohort, place, solver) for place in range(len(cohort)))
        return as_local_work(updates, params, losses)

    def summed_update(
        self, params: Tensor, cohort: Cohort, solver: LocalSolver, weights: Tensor, aggregator: Aggregator
    ) -> LocalWork:
        """Local work of each client, aggregated and added up client by client: total (D,)."""
        total, sq_norms, losses = torch.zeros_like(params), [], []
        for place, weight in enumerate(weights):
            update, loss = self._sent(params, cohort, place, solver)
            sq_norms.append(checked_norms(update.double().square().sum().cpu(), loss, longest_square(params)))
            if bool(torch.isfinite(sq_norms[-1])):
                total += aggregator(update.unsqueeze(0), weight.reshape(1).to(self.device))[0]
            losses.append(loss)
        return LocalWork(total, torch.stack(sq_norms), torch.stack(losses))

    def own_steps(self, models: Tensor, cohort: Cohort, solver: LocalSolver, pull: Pull | None = None) -> Tensor:
        """Each client's own model after its local work, (K, D)."""
        pulls = [None] * len(cohort) if pull is None else [_one_pull(pull, place) for place in range(len(cohort))]
        work = [self._train_client(models[k], cohort, k, solver, pulls[k])[0] for k in range(len(cohort))]
        return models + torch.stack(work)

    def evaluate_own(self, models: Tensor, clients: ClientSet, which: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss and mean error of clients at their own models, (K,) and (K,)."""
        clients = self.sets[clients]
        positions = self._in_turn(clients, which)
        return stack_columns(self._score(model, clients, k) for model, k in zip(models, positions, strict=True))

    def evaluate(self, params: Tensor, clients: ClientSet, which: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Mean loss and mean error of every client of a set, or of those at positions `which`, (n,) and (n,)."""
        clients = self.sets[clients]
        return stack_columns(self._score(params, clients, k) for k in self._in_turn(clients, which))

    def measure(self, params: Tensor, clients: ClientSet, metrics: ClientMetrics, which: Tensor | None = None) -> Tensor:
        """Each metric of every client, or of those at `which` (n,), at one model (D,) or at their own (n, D): (M, n)."""
        clients, values = self.sets[clients], []
        self.task.scorer.eval()
        for number, k in enumerate(self._in_turn(clients, which)):
            rows = clients.rows(k)
            model = params if params.dim() == 1 else params[number]
            with self._visit(clients, k):
                x, y = clients.inputs(rows, params.dtype), clients.targets(rows, params.dtype)
            client = metrics.begin(clients.ids[k])
            with torch.no_grad():
                client.add(self.task.outputs(model, x), y)
            values.append(torch.tensor(client.values(), dtype=torch.float64))
        return torch.stack(values, 1)

    def _in_turn(self, clients: ClientSet, which: Tensor | None) -> Iterator[int]:
        """Positions of clients, each while its examples are on the device."""
        for part in self.sets.in_parts(clients, which):
            yield from range(len(clients)) if part is None else part.tolist()

    @contextmanager
    def _visit(self, clients: ClientSet, k: int) -> Iterator[None]:
        """Inputs of a Dataset that are read at every visit are augmented by a stream of the client's own."""
        if not clients.is_visited:
            yield
            return
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(clients.host_keys[k]) & (2**63 - 1))
            yield

    def _score(self, params: Tensor, clients: ClientSet, k: int) -> tuple[Tensor, Tensor]:
        """Mean loss and mean error of one client at `params`."""
        self.task.scorer.eval()
        rows = clients.rows(k)
        with self._visit(clients, k):
            x, y = clients.inputs(rows, params.dtype), clients.targets(rows, params.dtype)
        self.task.layout.write(self.task.module, params)
        with torch.no_grad():
            loss, error = self.task.scorer(x, y, True)
        return loss.double().mean().cpu(), error.double().mean().cpu()

    def _sent(self, params: Tensor, cohort: Cohort, place: int, solver: LocalSolver) -> tuple[Tensor, Tensor]:
        """What a client sends: the update of its local work, or what an attack makes of it; and the loss it saw."""
        update, loss = self._train_client(params, cohort, place, solver)
        here = cohort.clients[place : place + 1]
        return corrupted(self.data, update.unsqueeze(0), here, self._key(cohort, int(here)).reshape(1), len(cohort))[0], loss

    def _key(self, cohort: Cohort, k: int) -> Tensor:
        return rng.client_keys(rng.stream_key(cohort.seed, "batches", cohort.round), self.train.keys[k])

    def _train_client(
        self, params: Tensor, cohort: Cohort, place: int, solver: LocalSolver, pull: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Local work of one client from the model `params`: its update (D,) and the mean loss of its batches.

        With a solver that has `finish` the loss is that of the last batch: of the adapted model, on the rest of the data.
        `pull` (anchor, strength) adds strength · (weights − anchor) to every gradient.
        """
        self.sets.hold(self.train, cohort.clients)
        self.task.scorer.train()
        traits = solver_traits(solver)
        k = int(cohort.clients[place])
        first, size = int(self.train.starts[k]), int(self.train.sizes[k])
        key = self._key(cohort, k)
        lr = solver.learning_rate(cohort.round)
        steps = solver.local_steps(size) if cohort.effort is None else solver.local_steps(size, int(cohort.effort[place]))
        weights = params.clone()
        memory = solver.begin(weights)
        seen = []
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):  # dropout and the like draw from the client's own stream
            seed_generators(int(key) & (2**63 - 1), self.device)
            shared = traits.shared_gradient
            correction = shared - self._gradient(params, self.train.rows(k))[0] if shared is not None and steps else 0.0
            for number, batch in enumerate(batches_of(solver, key, size, steps), start=1):
                gradient, loss = self._gradient(weights, batch + first)
                if traits.preconditioner is not None:
                    gradient = gradient / traits.preconditioner
                if pull is not None:
                    gradient = gradient + pull[1] * (weights - pull[0])
                take_step = traits.finish if traits.finish is not None and number == steps else solver.step
                take_step(weights, gradient + correction, memory, anchor=params, lr=lr)
                seen.append(loss)
        if not seen:
            return weights - params, torch.tensor(float("nan"), dtype=torch.float64)
        return weights - params, seen[-1] if traits.finish is not None else torch.stack(seen).mean()

    def _gradient(self, weights: Tensor, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Gradient (D,) and value of the mean loss over some examples."""
        named = dict(self.task.module.named_parameters())
        leaves = {name: named[name] for name in self.task.layout.names}
        x, y = self.train.inputs(rows, weights.dtype), self.train.targets(rows, weights.dtype)
        self.task.layout.write(self.task.module, weights)
        loss = self.task.scorer(x, y, False)[0].mean()
        gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        return self.task.layout.flatten(dict(zip(leaves, gradients, strict=True))), loss.detach().double().cpu()


def stack_columns(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The first tensors of all pairs as one tensor, and the second ones."""
    first, second = zip(*pairs, strict=True)
    return torch.stack(first), torch.stack(second)


def _one_pull(pull: Pull, place: int) -> tuple[Tensor, Tensor]:
    """The anchor (D,) and the strength, () or (D,), of one client."""
    anchor = pull.anchor if pull.anchor.dim() == 1 else pull.anchor[place]
    return anchor, pull.strength[place].to(anchor)
