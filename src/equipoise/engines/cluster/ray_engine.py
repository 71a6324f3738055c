"""The Ray engine: cohorts are cut into pieces, which long-lived workers on many machines train by their own simulators.

The driver cuts, sends, and adds up; everything it does in a round is of the order of cohort and parameters. A piece's numbers
depend on the piece alone, and sums of pieces are added in a fixed order: neither the number of workers nor who was lost on the
way changes a bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from equipoise.attacks.malicious import corrupted_work, sees_all_updates, summed_rows
from equipoise.client_metrics import ClientMetrics
from equipoise.core.abilities import solver_traits
from equipoise.core.task import Task
from equipoise.core.update_checks import with_carried
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.engines.cluster.piece_work import Phase, PieceSums, Stretch, add_sums
from equipoise.engines.cluster.pieces import SCORING, TRAINING, JobPieces, add_nodes, cut_job
from equipoise.engines.cluster.ray_extra import connect, connection
from equipoise.engines.cluster.shared_phases import SharedPhases, StretchOf
from equipoise.engines.cluster.worker_pool import WorkerPool
from equipoise.engines.simulator.calibration import Choice, StoredChoice
from equipoise.engines.simulator.local_rule import LocalRule
from equipoise.engines.simulator.simulator_options import Simulator, refuse_visited
from equipoise.errors import is_integer, is_number, require, require_number
from equipoise.types import Aggregator, Cohort, Job, LocalSolver, LocalWork, Pull

if TYPE_CHECKING:
    from equipoise.algorithm import Algorithm

_ASKED_FOR = ("num_cpus", "num_gpus")
_pools: dict[tuple[object, ...], WorkerPool] = {}  # of the cluster that this process is connected to: workers wait for runs

_ONE_PIECE = JobPieces(None, np.array([0, 1]), np.ones(1))  # something that one worker is asked


@dataclass(frozen=True)
class Ray:
    """Train on the machines of a Ray cluster.

    `address` is the cluster's: "auto" for the one that runs here or that RAY_ADDRESS names, or else this machine's cores;
    "local" for this machine's cores in any case. `workers` is how many workers there are at most, None for as many as the
    cluster has room for; each asks for `per_worker`, e.g. {"num_cpus": 1} or {"num_gpus": 1} (None: for one CPU, and with
    device="cuda" for one GPU), and works on `device`. A worker is a simulator with one process; more CPUs give it more torch
    threads.

    A worker that is lost, or does not answer for `patience` seconds more than ten times its usual time, is replaced, and
    others do its work in the same round. Results do not depend on the number of workers, nor on which were lost.

    `chunk_size`, `precision`, `compiled` and `resident` are those of the simulator.

    Source: ours; Ray (Moritz et al. 2018) places and watches the workers.
    """

    address: str = "auto"
    workers: int | None = None
    per_worker: Mapping[str, float] | None = None
    device: str | None = None
    patience: float = 20.0
    chunk_size: int | None = None
    precision: str = "float32"
    compiled: bool = True
    resident: bool | None = None

    def __post_init__(self) -> None:
        require(isinstance(self.address, str) and bool(self.address), "address", 'must be text, e.g. "auto"', self.address)
        good = self.workers is None or (is_integer(self.workers) and self.workers >= 1)
        require(good, "workers", "must be an integer of at least 1, or None", self.workers)
        require_number("patience", self.patience, "(0, inf)")
        given = self.per_worker
        good = given is None or (isinstance(given, Mapping) and bool(given) and set(given) <= set(_ASKED_FOR))
        require(good, "per_worker", 'must map "num_cpus" or "num_gpus" to numbers', given, 'E.g. {"num_cpus": 1}.')
        counts = [] if given is None else list(given.values())
        good = all(is_number(count) and count >= 0 for count in counts) and (given is None or any(counts))
        require(good, "per_worker", "must ask for a positive number of CPUs or GPUs", given)
        fix = 'Write per_worker={"num_gpus": 1}: Ray hides GPUs from workers that do not ask for them.'
        require(
            not self.on_gpu or bool(self.asked["num_gpus"]), "device", "is a GPU, but no worker asks for one", self.device, fix
        )
        self.simulator  # noqa: B018 (refuses what the simulator refuses)

    @property
    def on_gpu(self) -> bool:
        """Whether workers are told to use a GPU."""
        return self.device is not None and str(self.device).startswith("cuda")

    @property
    def asked(self) -> dict[str, float]:
        """What each worker asks Ray for. A worker with a GPU asks for one CPU, too, unless something else is said."""
        given = dict(self.per_worker or ({"num_gpus": 1.0} if self.on_gpu else {}))
        return {"num_cpus": given.get("num_cpus", 1.0), "num_gpus": given.get("num_gpus", 0.0)}

    @property
    def simulator(self) -> Simulator:
        """The simulator of each worker."""
        device = self.device or ("cuda" if self.asked["num_gpus"] else None)
        on_cpu = device is None or str(device).startswith("cpu")
        return Simulator(self.chunk_size, device, 1 if on_cpu else None, self.precision, self.compiled, self.resident)

    def start(self, task: Task, data: FederatedData) -> RayEngine:
        """The running engine for a task on a data set.

        Engines that ask for the same kind of workers share them. Workers wait for the next run until this process ends, calls
        `ray.shutdown()`, or asks for workers of another kind.
        """
        refuse_visited(data)
        ray = connect(self.address)
        key = (connection(ray), tuple(sorted(self.asked.items())))
        if key not in _pools:
            _pools.clear()  # their workers would take what the new ones ask for
            _pools[key] = WorkerPool(ray, self.asked)
        return RayEngine(task, data, _pools[key], self)


class RayEngine:
    """The running Ray engine of one task on one data set: the driver's side."""

    device = torch.device("cpu")  # of models at the driver

    def __init__(self, task: Task, data: FederatedData, pool: WorkerPool, given: Ray) -> None:
        simulator = given.simulator
        self.task, self.data, self.pool = task.to(torch.device("cpu")), data, pool
        self.omniscient_attack = sees_all_updates(data)
        self.kind_of_device = "cuda" if str(simulator.device).startswith("cuda") else "cpu"
        self.choice = Choice(simulator.chunk_size, simulator.workers)
        self.session = pool.open_session(simulator, task, data, given.workers, given.patience)
        weakref.finalize(self, pool.close_session, self.session)
        self._others: weakref.WeakKeyDictionary[ClientSet, str] = weakref.WeakKeyDictionary()
        self.sizes = data.train.host_sizes.numpy()
        self.dimension = self.task.layout.dimension
        # An example costs as much as the model has numbers, also those that are not trained.
        self.numbers = max(self.dimension, sum(each.numel() for each in self.task.module.parameters()))
        self.item = self.task.layout.dtype.itemsize
        self.phases = SharedPhases(pool, self.session)

    @property
    def measured(self) -> StoredChoice:
        """The one choice of the run that was made by measuring, for checkpoints."""
        return StoredChoice(self)

    def use(self, choice: Choice) -> None:
        """Go on with a choice that was measured before, here or by the simulator; workers have one process each."""
        self.choice = replace(choice, workers=self.choice.workers)

    # ----------------------------------------------------------------------------------------------------------------- losses

    def losses(self, params: Tensor, cohort: Cohort, solver: LocalSolver | None = None) -> Tensor:
        """F_k(w) of each client of the cohort, (K,); after the inner steps of a solver that adapts."""
        if solver is None or not solver_traits(solver).adapts:
            return self._losses((params,), [cohort], together=False)[0][0]
        jobs = [self._cut(cohort, LocalRule.of(solver, solver.learning_rate(cohort.round)))]
        phase = self._phase("adapted_losses", (params,), [cohort], solver)
        phase = self._calibrate(phase, jobs, [cohort], solver)
        found = self.phases.share_out(phase, jobs, lambda job, number, first, last: _stretch(job, number, first, last, cohort))
        return self._in_place(jobs[0], found[0])

    def losses_of(self, models: Sequence[Tensor], cohort: Cohort) -> Tensor:
        """`losses` of several models, (D,) each, at once: (M, K)."""
        return self._losses(tuple(models), [cohort], together=True)[0]

    def losses_each(self, jobs: Sequence[Job]) -> list[Tensor]:
        """`losses` of several models, each with a cohort of its own: (K,) each."""
        found = self._losses(tuple(job.params for job in jobs), [job.cohort for job in jobs], together=False)
        return [each[0] for each in found]

    def _losses(self, models: tuple[Tensor, ...], cohorts: Sequence[Cohort], *, together: bool) -> list[Tensor]:
        """Of each cohort the losses at its model, (1, K), or at all models, (M, K)."""
        cost = float(self.numbers * (len(models) if together else 1))
        jobs = [self._cut_sizes(self.sizes[cohort.clients.numpy()], cost, reorder=True) for cohort in cohorts]
        phase = replace(self._phase("losses", models, cohorts), together=together)
        found = self.phases.share_out(phase, jobs, lambda job, n, first, last: _stretch(job, n, first, last, cohorts[n]))
        return [self._in_place(job, parts, dim=1) for job, parts in zip(jobs, found, strict=True)]

    # ------------------------------------------------------------------------------------------------------------- local work

    def updates(self, params: Tensor, cohort: Cohort, solver: LocalSolver) -> LocalWork:
        """Local work of each client: updates (K, D)."""
        jobs = [self._cut(cohort, LocalRule.of(solver, solver.learning_rate(cohort.round)))]
        phase = self._phase("updates", (params,), [cohort], solver)
        phase = self._calibrate(phase, jobs, [cohort], solver)
        (parts,) = self.phases.share_out(
            phase, jobs, lambda job, n, first, last: _stretch(job, n, first, last, cohort),
            row_bytes=self.item * (self.dimension + (0 if cohort.rows is None else cohort.rows.shape[1])),
        )  # fmt: skip

        def field_of(name: str) -> Tensor | None:
            found = [(places, getattr(work, name)) for places, work in parts]
            return None if found[0][1] is None else self._in_place(jobs[0], found)

        update, norms, losses = (_known(field_of(name)) for name in ("update", "sq_norms", "losses"))
        work, carried = LocalWork(update, norms, losses, rows=field_of("rows")), field_of("carried")
        if self.omniscient_attack:
            work = corrupted_work(self.data, work, self.task.split(params)[0], cohort)
        return work if carried is None else with_carried(work, carried)

    def summed_update(
        self, params: Tensor, cohort: Cohort, solver: LocalSolver, weights: Tensor, aggregator: Aggregator
    ) -> LocalWork:
        """Local work, aggregated and added up piece by piece: total (D,)."""
        return self.summed_updates([Job(params, cohort, weights)], solver, aggregator)[0]

    def summed_updates(self, jobs: Sequence[Job], solver: LocalSolver, aggregator: Aggregator) -> list[LocalWork]:
        """`summed_update` of several models in one phase: one per job. Their cohorts are of one round."""
        if self.omniscient_attack:
            return [summed_rows(self.updates(job.params, job.cohort, solver), job.weights, aggregator) for job in jobs]
        cohorts, rule = [job.cohort for job in jobs], LocalRule.of(solver, solver.learning_rate(jobs[0].cohort.round))
        cuts = [self._cut(cohort, rule) for cohort in cohorts]
        phase = replace(self._phase("sums", tuple(job.params for job in jobs), cohorts, solver), aggregator=aggregator)
        phase = self._calibrate(phase, cuts, cohorts, solver)
        kept = jobs[0].cohort.rows
        found = self.phases.share_out(
            phase, cuts, lambda job, n, first, last: _stretch(job, n, first, last, cohorts[n], weights=jobs[n].weights),
            row_bytes=0 if kept is None else kept.shape[1] * 8,
            fixed_bytes=2 * (self.dimension * self.item + 8 * self.task.carried.size),
        )  # fmt: skip
        return [self._added(cut, parts) for cut, parts in zip(cuts, found, strict=True)]

    def _added(self, job: JobPieces, parts: Sequence[tuple[Tensor, PieceSums]]) -> LocalWork:
        """The work of a job, of the sums of its pieces."""
        nodes = {node: value for _, sums in parts for node, value in sums.nodes.items()}
        total, carried = add_nodes((0, len(job)), nodes, add_sums)
        norms, losses = (self._in_place(job, [(p, getattr(s, name)) for p, s in parts]) for name in ("sq_norms", "losses"))
        rows = [(places, sums.rows) for places, sums in parts if sums.rows is not None]
        mass = 0.0 if carried is None else float(carried[-1])
        mean = carried[:-1] / mass if carried is not None and mass > 0 else None
        # The answers' memory is read-only, or Ray's.
        return LocalWork(total.clone(), norms, losses, mean, self._in_place(job, rows) if rows else None, mass)

    def own_steps(self, models: Tensor, cohort: Cohort, solver: LocalSolver, pull: Pull | None = None) -> Tensor:
        """Each client's own model after its local work, (K, D)."""
        rule = LocalRule.of(solver, solver.learning_rate(cohort.rate_round), own_models=True)
        jobs = [self._cut(cohort, rule)]
        phase = self._phase("own_steps", (), [cohort], solver)

        def stretch_of(job: JobPieces, number: int, first: int, last: int) -> Stretch:
            places = job.places(first, last)
            return replace(_stretch(job, number, first, last, cohort), own_models=models[places], pull=_pull_on(pull, places))

        phase = self._calibrate(phase, jobs, [cohort], solver, stretch_of)
        found = self.phases.share_out(phase, jobs, stretch_of, row_bytes=self.item * models.shape[1])
        return self._in_place(jobs[0], found[0])

    # ------------------------------------------------------------------------------------------------------------- evaluation

    def evaluate(self, params: Tensor, clients: ClientSet, which: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Mean loss and mean error of every client of a set, or of those at positions `which`, (n,) and (n,)."""
        loss, error = self._evaluate("evaluate", (params,), clients, which)
        return loss, error

    def evaluate_own(self, models: Tensor, clients: ClientSet, which: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss and mean error of clients at their own models, (K,) and (K,)."""
        loss, error = self._evaluate("evaluate", (), clients, which, own_models=models)
        return loss, error

    def measure(self, params: Tensor, clients: ClientSet, metrics: ClientMetrics, which: Tensor | None = None) -> Tensor:
        """Each metric of every client, or of those at `which` (n,), at one model (D,) or at their own (n, D): (M, n)."""
        shared, own = ((params,), None) if params.dim() == 1 else ((), params)
        return self._evaluate("measure", shared, clients, which, own_models=own, metrics=metrics)

    def _evaluate(
        self, kind: str, models: tuple[Tensor, ...], clients: ClientSet, which: Tensor | None, *,
        own_models: Tensor | None = None, metrics: ClientMetrics | None = None,
    ) -> Tensor:  # fmt: skip
        sizes = clients.host_sizes.numpy() if which is None else clients.host_sizes.numpy()[which.numpy()]
        job = self._cut_sizes(sizes, float(self.numbers), reorder=False)

        def stretch_of(job: JobPieces, number: int, first: int, last: int) -> Stretch:
            begin, end = int(job.bounds[first]), int(job.bounds[last])
            return replace(
                _stretch(job, number, first, last, None), which=range(begin, end) if which is None else which[begin:end],
                own_models=None if own_models is None else own_models[begin:end],
            )  # fmt: skip

        phase = Phase(kind, self.session, models, choice=asdict(self.choice), clients=self._name_of(clients), metrics=metrics)
        count = 2 if metrics is None else len(metrics)
        (parts,) = self.phases.share_out(phase, [job], stretch_of, row_bytes=8 * count)
        return self._in_place(job, parts, dim=1)

    def _name_of(self, clients: ClientSet) -> str:
        """The name under which workers know a set; one from elsewhere is sent to them first."""
        for name, split in self.data.splits.items():
            if split is clients:
                return name
        if clients not in self._others:
            self._others[clients] = f"other {len(self._others)}"
            self.pool.add_clients(self.session, self._others[clients], clients)
        return self._others[clients]

    def explain(self, algorithm: Algorithm | None = None) -> str:
        """Where work is done, and for this model, these data and an algorithm how a worker does it, and why."""
        phase = replace(self._phase("explain", (), []), solver=algorithm)
        (((_, text),),) = self.phases.share_out(
            phase, [_ONE_PIECE], lambda job, n, first, last: _stretch(job, n, first, last, None)
        )
        nodes = sorted({worker.name for worker in self.pool.workers})
        return f"{len(self.pool.workers)} workers of a Ray cluster on {len(nodes)} nodes: {', '.join(nodes)}\n{text}"

    # --------------------------------------------------------------------------------------------------------- pieces and sums

    def _cut(self, cohort: Cohort, rule: LocalRule) -> JobPieces:
        """A cohort in pieces of similar cost: local steps × examples of a step × parameters."""
        sizes = self.sizes[cohort.clients.numpy()]
        steps = rule.steps_each(sizes, cohort.effort)
        batch = sizes if rule.solver.batch_size is None else np.minimum(sizes, rule.solver.batch_size)
        costs = (steps * batch + 1).astype(np.float64) * self.numbers
        return cut_job(costs, TRAINING[self.kind_of_device], reorder=True)

    def _cut_sizes(self, sizes: Any, cost: float, *, reorder: bool) -> JobPieces:
        return cut_job((sizes + 1) * cost, SCORING[self.kind_of_device], reorder=reorder)

    def _phase(
        self, kind: str, models: tuple[Tensor, ...], cohorts: Sequence[Cohort], solver: LocalSolver | None = None
    ) -> Phase:
        sizes = tuple(len(cohort) for cohort in cohorts)
        return Phase(kind, self.session, models, solver, choice=asdict(self.choice), cohort_sizes=sizes)

    def _calibrate(
        self, phase: Phase, jobs: Sequence[JobPieces], cohorts: Sequence[Cohort], solver: LocalSolver,
        stretch_of: StretchOf | None = None,
    ) -> Phase:  # fmt: skip
        """Fix the choice of the run where it is not: one worker measures, on the piece with most clients; all follow."""
        if self.kind_of_device != "cpu":
            return phase
        lengths = [(length, n, piece) for n, job in enumerate(jobs) for piece, length in enumerate(job.lengths(0, len(job)))]
        clients, number, piece = max(lengths, key=lambda each: (each[0], -each[1], -each[2]))
        asked_for = self.choice.clients or 0
        if self.choice.serves(clients) or (self.choice.chunk_size is None and clients <= 2 * asked_for):
            return phase
        job, cohort = jobs[number], cohorts[number]

        def one_piece(_: JobPieces, __: int, ___: int, ____: int) -> Stretch:
            if stretch_of is not None:
                return stretch_of(job, number, piece, piece + 1)
            return _stretch(job, number, piece, piece + 1, cohort, weights=cohort.weights)

        measuring = replace(phase, kind="calibrate")
        ((_, found),) = self.phases.share_out(measuring, [_ONE_PIECE], one_piece)[0]
        self.choice = replace(Choice(**found), clients=clients)  # too little work to measure has no chunk size: remember that
        return replace(phase, choice=asdict(self.choice))

    @staticmethod
    def _in_place(job: JobPieces, parts: Sequence[tuple[Tensor, Tensor]], dim: int = 0) -> Tensor:
        """The numbers of all clients as in the cohort: (K, …), or (M, K) with dim=1."""
        shape = list(parts[0][1].shape)
        shape[dim] = int(job.bounds[-1])
        whole = torch.empty(shape, dtype=parts[0][1].dtype)
        for places, values in parts:
            whole.index_copy_(dim, places, values)
        return whole


def _stretch(
    job: JobPieces, number: int, first: int, last: int, cohort: Cohort | None, *, weights: Tensor | None = None
) -> Stretch:
    """Pieces first … last − 1 of a job, with their part of the cohort."""
    places = job.places(first, last)
    return Stretch(
        number, (first, last), len(job), job.lengths(first, last), None if cohort is None else cohort.take(places),
        None if weights is None else weights[places],
    )  # fmt: skip


def _pull_on(pull: Pull | None, places: Tensor) -> Pull | None:
    """The pull on some of the clients."""
    if pull is None:
        return None
    return Pull(pull.anchor if pull.anchor.dim() == 1 else pull.anchor[places], pull.strength[places])


def _known(values: Tensor | None) -> Tensor:
    if values is None:
        raise TypeError("a worker left out a part of its answer")
    return values
