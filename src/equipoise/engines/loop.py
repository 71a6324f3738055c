"""The loop engine: one client at a time, plain and obviously right. Every other engine is tested against it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise import rng
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.errors import InvalidParameter
from equipoise.solvers.batches import client_batches
from equipoise.task import Task
from equipoise.types import Aggregator, Cohort, LocalSolver, LocalWork


@dataclass(frozen=True)
class Loop:
    """Train clients one after another. `device` is any torch device; None is the CPU.

    Source: ours; the textbook loop.
    """

    device: str | None = None

    def start(self, task: Task, data: FederatedData) -> LoopEngine:
        return LoopEngine(task, data, usable_device(self.device))


def usable_device(name: str | None) -> torch.device:
    """The device by name (None: the CPU), refused if torch does not know it or this machine has none."""
    try:
        device = torch.device(name or "cpu")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as failure:  # torch asserts that it was compiled with CUDA
        reason = (str(failure).strip().splitlines() or ["unknown"])[0].rstrip(".")
        raise InvalidParameter("device", "must be a device of this machine", name, f'{reason}. Try "cpu".') from failure
    return device


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed torch's CPU generator, and the device's if there is one; torch.manual_seed would seed every device."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


class ResidentSets:
    """Client sets on a device, each moved there once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._moved: dict[int, tuple[ClientSet, ClientSet]] = {}  # the original is kept, so that its id stays its own

    def __getitem__(self, clients: ClientSet) -> ClientSet:
        if id(clients) not in self._moved:
            self._moved[id(clients)] = (clients, clients.to(self.device))
        return self._moved[id(clients)][1]


class LoopEngine:
    """The running loop engine of one task on one data set."""

    def __init__(self, task: Task, data: FederatedData, device: torch.device) -> None:
        self.device, self.task, self.sets = device, task.to(device), ResidentSets(device)
        self.train = self.sets[data.train]

    def losses(self, params: Tensor, cohort: Cohort) -> Tensor:
        """F_k(w) of each client of the cohort, (K,)."""
        return torch.stack([self._score(params, self.train, k)[0] for k in cohort.clients.tolist()])

    def updates(self, params: Tensor, cohort: Cohort, solver: LocalSolver) -> LocalWork:
        """Local work of each client: updates (K, D)."""
        work = [self._train_client(params, k, cohort, solver) for k in cohort.clients.tolist()]
        updates = torch.stack([update for update, _ in work])
        return LocalWork(updates, updates.double().square().sum(1).cpu(), torch.stack([loss for _, loss in work]))

    def summed_update(
        self, params: Tensor, cohort: Cohort, solver: LocalSolver, weights: Tensor, aggregator: Aggregator
    ) -> LocalWork:
        """The same work, aggregated and added up client by client: total (D,)."""
        total, sq_norms, losses = torch.zeros_like(params), [], []
        for k, weight in zip(cohort.clients.tolist(), weights, strict=True):
            update, loss = self._train_client(params, k, cohort, solver)
            total += aggregator(update.unsqueeze(0), weight.reshape(1).to(self.device))[0]
            sq_norms.append(update.double().square().sum().cpu())
            losses.append(loss)
        return LocalWork(total, torch.stack(sq_norms), torch.stack(losses))

    def evaluate(self, params: Tensor, clients: ClientSet) -> tuple[Tensor, Tensor]:
        """Mean loss and mean error of every client of a set, (n,) and (n,)."""
        clients = self.sets[clients]
        scores = [self._score(params, clients, k) for k in range(len(clients))]
        return torch.stack([loss for loss, _ in scores]), torch.stack([error for _, error in scores])

    def _score(self, params: Tensor, clients: ClientSet, k: int) -> tuple[Tensor, Tensor]:
        """Mean loss and mean error of one client at `params`."""
        self.task.scorer.eval()
        rows = clients.rows(k)
        x, y = clients.inputs(rows, params.dtype), clients.targets(rows, params.dtype)
        self.task.layout.write(self.task.module, params)
        with torch.no_grad():
            loss, error = self.task.scorer(x, y, True)
        return loss.double().mean().cpu(), error.double().mean().cpu()

    def _train_client(self, params: Tensor, k: int, cohort: Cohort, solver: LocalSolver) -> tuple[Tensor, Tensor]:
        """Local work of one client from the model `params`: its update (D,) and the mean loss of its batches."""
        self.task.scorer.train()
        first, size = int(self.train.offsets[k]), int(self.train.sizes[k])
        key = rng.client_keys(rng.stream_key(cohort.seed, "batches", cohort.round), self.train.keys[k])
        lr = solver.learning_rate(cohort.round)
        named = dict(self.task.module.named_parameters())
        leaves = {name: named[name] for name in self.task.layout.names}
        weights = params.clone()
        memory = solver.begin(weights)
        seen = []
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):  # dropout and the like draw from the client's own stream
            seed_generators(int(key) & (2**63 - 1), self.device)
            for batch in client_batches(key, size, solver.batch_size, solver.local_steps(size)):
                rows = batch + first
                x, y = self.train.inputs(rows, params.dtype), self.train.targets(rows, params.dtype)
                self.task.layout.write(self.task.module, weights)
                loss = self.task.scorer(x, y, False)[0].mean()
                gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
                gradient = self.task.layout.flatten(dict(zip(leaves, gradients, strict=True)))
                solver.step(weights, gradient, memory, anchor=params, lr=lr)
                seen.append(loss.detach().double().cpu())
        return weights - params, torch.stack(seen).mean() if seen else torch.tensor(float("nan"), dtype=torch.float64)
