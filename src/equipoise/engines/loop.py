"""The loop engine: one client at a time, plain and obviously right. Every other engine is tested against it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from equipoise.attacks.malicious import corrupted, corrupted_work, sees_all_updates, summed_rows
from equipoise.client_metrics import ClientMetrics
from equipoise.core import rng
from equipoise.core.abilities import solver_traits
from equipoise.core.carried import CarriedMean
from equipoise.core.devices import seed_generators, usable_device
from equipoise.core.forward_rules import ForwardRules
from equipoise.core.task import Task
from equipoise.core.update_checks import as_local_work, checked_norms, longest_square, with_carried
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.engines.device_sets import DeviceSets
from equipoise.solvers.batches import batches_of
from equipoise.solvers.client_steps import ClientSteps
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


class ClientWork(NamedTuple):
    """What the local work of one client gives."""

    update: Tensor  # (D,)
    loss: Tensor  # ()
    carried: Tensor  # (C,) float64, as carried values are averaged; NaN if no step was taken, infinite if they cannot be used
    row: Tensor | None = None  # (width,) what the client keeps for its solver until its next round


class LoopEngine(Engine):
    """The running loop engine of one task on one data set."""

    def __init__(self, task: Task, data: FederatedData, device: torch.device, sets: DeviceSets | None = None) -> None:
        self.device, self.task, self.sets = device, task.to(device), sets or DeviceSets(device, data)
        self.data, self.train = data, self.sets[data.train]
        self.omniscient_attack = bool(data.malicious) and sees_all_updates(data)

    @property
    def expect(self) -> Callable[[Tensor], None] | None:
        """Reads ahead the examples of clients at these positions, which take part in the next round; None: all are there."""
        return self.sets.expecting(self.train)

    def losses(self, params: Tensor, cohort: Cohort, solver: LocalSolver | None = None) -> Tensor:
        """F_k(w) of each client of the cohort, (K,); after its inner steps for a solver that adapts."""
        if solver is not None and solver_traits(solver).adapts:
            return torch.stack([self._train_client(params, cohort, place, solver).loss for place in range(len(cohort))])
        self.sets.hold(self.train, cohort.clients)
        return torch.stack([self._score(params, self.train, k)[0] for k in cohort.clients.tolist()])

    def updates(self, params: Tensor, cohort: Cohort, solver: LocalSolver) -> LocalWork:
        """Local work of each client: updates (K, D)."""
        sent, own = [self._sent(params, cohort, place, solver) for place in range(len(cohort))], self.task.split(params)[0]
        work = as_local_work(torch.stack([each.update for each in sent]), own, _losses(sent))
        if self.omniscient_attack:
            work = corrupted_work(self.data, work, own, cohort)
        work = replace(work, rows=_stacked_rows(sent))
        return with_carried(work, torch.stack([each.carried for each in sent])) if self.task.carried.names else work

    def summed_update(
        self, params: Tensor, cohort: Cohort, solver: LocalSolver, weights: Tensor, aggregator: Aggregator
    ) -> LocalWork:
        """Local work of each client, aggregated and added up client by client: total (D,)."""
        if self.omniscient_attack:
            return summed_rows(self.updates(params, cohort, solver), weights, aggregator)
        own = self.task.split(params)[0]
        total, sq_norms, sent, mean = torch.zeros_like(own), [], [], CarriedMean()
        for place, weight in enumerate(weights):
            each = self._sent(params, cohort, place, solver)
            norm = checked_norms(each.update.double().square().sum().cpu(), each.loss, longest_square(own))
            sq_norms.append(torch.where(torch.isinf(each.carried).any(), torch.inf, norm))
            if bool(torch.isfinite(sq_norms[-1])):
                total += aggregator(each.update.unsqueeze(0), weight.reshape(1).to(self.device))[0]
                mean.add(each.carried, float(weight))
            sent.append(each)
        carried = mean.value() if self.task.carried.names else None
        return LocalWork(total, torch.stack(sq_norms), _losses(sent), carried, _stacked_rows(sent))

    def own_steps(self, models: Tensor, cohort: Cohort, solver: LocalSolver, pull: Pull | None = None) -> Tensor:
        """Each client's own model after its local work, (K, D), followed by its own carried values (K, C)."""
        pulls = [None] * len(cohort) if pull is None else [self._one_pull(pull, place) for place in range(len(cohort))]
        work = [self._train_client(models[k], cohort, k, solver, pulls[k]) for k in range(len(cohort))]
        updates, carried = torch.stack([each.update for each in work]), torch.stack([each.carried for each in work])
        return self.task.after_work(models, updates, carried)

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
        self._write(params)
        with torch.no_grad():
            loss, error = self.task.scorer(x, y, True)
        return loss.double().mean().cpu(), error.double().mean().cpu()

    def _write(self, model: Tensor) -> None:
        """Make the module the given model: parameters and carried values."""
        params, carried = self.task.split(model)
        self.task.layout.write(self.task.module, params)
        if self.task.carried.names:
            self.task.carried.write(self.task.module, carried)

    def _sent(self, params: Tensor, cohort: Cohort, place: int, solver: LocalSolver) -> ClientWork:
        """What a client sends: the update of its local work, or what an attack makes of it; and the loss it saw."""
        work = self._train_client(params, cohort, place, solver)
        if not self.data.malicious:
            return work
        here = cohort.clients[place : place + 1]
        key = self._key(cohort, int(here)).reshape(1)
        share = None if cohort.shares is None else cohort.shares[place : place + 1]
        return work._replace(update=corrupted(self.data, work.update.unsqueeze(0), here, key, len(cohort), share)[0])

    def _key(self, cohort: Cohort, k: int) -> Tensor:
        return rng.client_keys(rng.stream_key(cohort.seed, "batches", cohort.round), self.train.keys[k])

    def _train_client(
        self, model: Tensor, cohort: Cohort, place: int, solver: LocalSolver, pull: tuple[Tensor, Tensor] | None = None
    ) -> ClientWork:
        """Local work of one client from a model: its update (D,), the mean loss of its batches, its carried values.

        With a solver that has `finish` the loss is that of the last batch: of the adapted model, on the rest of the data.
        `pull` (anchor, strength) adds strength · (weights − anchor) to every gradient. A batch that is too small for the model
        is left out.
        """
        self.sets.hold(self.train, cohort.clients)
        self.task.scorer.train()
        traits = solver_traits(solver)
        k = int(cohort.clients[place])
        first, size = int(self.train.starts[k]), int(self.train.sizes[k])
        key, row = self._key(cohort, k), None if cohort.rows is None else cohort.rows[place]
        steps = solver.local_steps(size) if cohort.effort is None else solver.local_steps(size, int(cohort.effort[place]))
        params, carried = self.task.split(model)
        memory = row if traits.shift is None else None
        work = ClientSteps(solver, self.task.layout, params, cohort.rate_round, memory)
        seen = []
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):  # random operations other than dropout draw from the client's own stream
            seed_generators(int(key) & (2**63 - 1), self.device)
            masks = rng.step_keys(key, torch.arange(max(1, steps), device=self.device))
            shared, enough = traits.shared_gradient, self.task.smallest_batch
            self.task.carried.write(self.task.module, carried)
            correction: Tensor | float = 0.0
            if cohort.prox is not None and pull is None:
                pull = params, cohort.prox[place].to(params)
            if traits.shift is not None:
                correction = traits.shift if row is None else traits.shift - row.to(params)
            if shared is not None and steps and size >= enough:
                correction = shared - self._gradient(params, self.train.rows(k), masks[0])[0]
                self.task.carried.write(self.task.module, carried)  # that was no step
            for number, batch in enumerate(batches_of(solver, key, size, steps), start=1):
                if len(batch) < enough:
                    continue
                gradient, loss = self._gradient(work.weights, batch + first, masks[(number - 1) // traits.repeats])
                gradient = work.clipped(gradient)
                if traits.preconditioner is not None:
                    gradient = gradient / traits.preconditioner
                if pull is not None:
                    gradient = gradient + pull[1] * (work.weights - pull[0])
                work.take(gradient + correction, last=number == steps)
                seen.append(loss)
        if not seen:
            nothing = torch.full((1 + self.task.carried.size,), float("nan"), dtype=torch.float64)
            return ClientWork(work.weights - params, nothing[0], nothing[1:], row if traits.shift is not None else work.row())
        loss = seen[-1] if traits.finish is not None else torch.stack(seen).mean()
        update, kept = work.weights - params, work.row()
        if traits.next_rows is not None and row is not None and traits.shift is not None:
            taken, prox = torch.tensor([work.number]), None if cohort.prox is None else cohort.prox[place : place + 1]
            kept = traits.next_rows(row.to(params).unsqueeze(0), update.unsqueeze(0), taken, work.lr, prox)[0]
        return ClientWork(update, loss, self.task.sent_carried(), kept)

    def _one_pull(self, pull: Pull, place: int) -> tuple[Tensor, Tensor]:
        """The anchor (D,) and the strength, () or (D,), of one client; nothing pulls at carried values."""
        anchor = pull.anchor if pull.anchor.dim() == 1 else pull.anchor[place]
        strength, dimension = pull.strength[place].to(anchor), self.task.layout.dimension
        return anchor[:dimension], strength[:dimension] if strength.dim() else strength

    def _gradient(self, weights: Tensor, rows: Tensor | slice, key: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient (D,) and value of the mean loss over some examples; `key` fixes the masks of dropout."""
        named = dict(self.task.module.named_parameters())
        leaves = {name: named[name] for name in self.task.layout.names}
        x, y = self.train.inputs(rows, weights.dtype), self.train.targets(rows, weights.dtype)
        self.task.layout.write(self.task.module, weights)
        with ForwardRules(key, batched=False):
            loss = self.task.scorer(x, y, False)[0].mean()
        gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        return self.task.layout.flatten(dict(zip(leaves, gradients, strict=True))), loss.detach().double().cpu()


def _stacked_rows(sent: Iterable[ClientWork]) -> Tensor | None:
    """What all clients keep for their solver, (K, width) on the CPU; None if they keep nothing."""
    kept = [each.row for each in sent if each.row is not None]
    return torch.stack(kept).cpu() if kept else None


def stack_columns(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The first tensors of all pairs as one tensor, and the second ones."""
    first, second = zip(*pairs, strict=True)
    return torch.stack(first), torch.stack(second)


def _losses(sent: Iterable[ClientWork]) -> Tensor:
    return torch.stack([each.loss for each in sent])
