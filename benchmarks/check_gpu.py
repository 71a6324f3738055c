"""Check every path of the simulator on a CUDA device against the loop engine on the CPU. Needs torch and numpy alone.

PYTHONPATH=src python benchmarks/check_gpu.py
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

import zoo

import equipoise as eq
from equipoise.aggregators import WeightedMean
from equipoise.core.task import Task
from equipoise.core.task_trial import try_task
from equipoise.engines.simulator.calibration import Choice
from equipoise.personal.pfedme import EnvelopeSteps
from equipoise.solvers.prepared import AdjustedSolver
from equipoise.testing import check_engine
from models import cohort_of, data_of

SIZES = [5, 17, 37, 60, 23, 41, 8, 12, 30, 30]


def offsets(sizes: list[int]) -> torch.Tensor:
    return torch.tensor([0, *sizes]).cumsum(0)


def images(sizes: list[int] = SIZES, seed: int = 0) -> eq.FederatedData:
    gen = torch.Generator().manual_seed(seed)
    count = sum(sizes)
    x = torch.randint(0, 256, (count, 28, 28), generator=gen, dtype=torch.uint8)
    y = torch.randint(0, 62, (count,), generator=gen)
    ids = tuple(f"client {i}" for i in range(len(sizes)))
    return eq.FederatedData(eq.ClientSet(x, y, offsets(sizes), ids, scale=1 / 255), classes=62)


def texts(seed: int = 0) -> eq.FederatedData:
    gen = torch.Generator().manual_seed(seed)
    tokens, y = torch.randint(0, 50, (sum(SIZES), 20), generator=gen), torch.randint(0, 50, (sum(SIZES),), generator=gen)
    return eq.FederatedData(eq.ClientSet(tokens, y, offsets(SIZES), tuple(map(str, range(len(SIZES))))), classes=50)


def must_be_taken(engine: Any, path: str, work: str) -> None:
    """Stop if the last call of an engine took another path than the one that is to be checked."""
    if engine.paths_taken != (path,):
        raise SystemExit(f"{work}: {', '.join(engine.paths_taken)} instead of {path}\n{engine.explain()}")


def in_double(device: str) -> None:
    """The general path, as CUDA graphs and without, in float64."""
    solvers = [
        eq.solvers.SGD(),
        eq.solvers.SGD(batch_size=3, steps=7, momentum=0.9, weight_decay=0.01),
        eq.solvers.SGD(batch_size=None, epochs=2),
        eq.solvers.SGD(batch_size=3, epochs=4, prox=0.5, straggler_share=0.6),
        eq.solvers.MAML(),
        eq.solvers.FedDane(eq.solvers.SGD(prox=0.5)),
        eq.solvers.SGD(batch_size=3, epochs=2, momentum=0.9, nesterov=True, clip_norm=0.1),
        eq.solvers.Adam(lr=0.05, batch_size=3, epochs=2, clip_norm=0.1, state="kept"),
        eq.solvers.AdamW(lr=0.05, batch_size=3, epochs=2, local_schedule=eq.solvers.Cosine(5), rates={"weight": 0.5}),
    ]
    for solver in solvers:
        for chunk in (None, 3):
            check_engine(eq.engines.Simulator(device=device, chunk_size=chunk), solver=solver, tolerance=1e-9)
    for model, data in (
        (eq.models.ConvNet(classes=62), images()),
        (eq.models.CharGRU(vocabulary=50, hidden=16), texts()),
        (eq.models.CharLSTM(vocabulary=50, hidden=16, layers=2), texts()),
    ):
        check_engine(
            eq.engines.Simulator(device=device), task=Task.of(model.double()), data=data,
            solver=eq.solvers.SGD(lr=0.05, batch_size=8), tolerance=1e-8,
        )  # fmt: skip
    for path, solver in (
        ("example span", solvers[0]),
        ("step graphs", solvers[1]),
        ("batched autograd", solvers[4]),
        ("batched autograd", solvers[7]),
    ):
        task, data = Task.of(eq.models.Softmax(784, 62).double()), images()
        engine = eq.engines.Simulator(device=device).start(task, data)
        cohort = eq.sampling.Full()(0, torch.full((len(SIZES),), 0.1, dtype=torch.float64), clients_per_round=1, seed=5)
        engine.updates(task.layout.read(task.module).to(device), cohort, solver)
        must_be_taken(engine, path, f"float64, {solver}")
    print("float64: general path agrees with the loop on the CPU (softmax with nine solvers, ConvNet, GRU, LSTM)")


def with_statistics(device: str) -> None:
    """Running statistics: batched without padding, and side by side where a batch has one example, in float64."""
    nn = torch.nn
    network = nn.Sequential(
        nn.Unflatten(1, (1, 28)), nn.Conv2d(1, 4, 5, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
        nn.Linear(4 * 144, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 62),
    ).double()  # fmt: skip
    data = images()
    task = try_task(Task.of(network), data)
    cohort = eq.sampling.Full()(0, torch.full((len(SIZES),), 0.1, dtype=torch.float64), clients_per_round=1, seed=5)
    for path, batch_size in (("batched autograd", 13), ("side by side", 4)):  # of 5 examples, fours leave one over
        solver = eq.solvers.SGD(lr=0.05, batch_size=batch_size, epochs=2)
        check_engine(eq.engines.Simulator(device=device), task=task, data=data, solver=solver, tolerance=1e-8)
        engine = eq.engines.Simulator(device=device).start(task, data)
        engine.use(Choice(path=path))
        work = engine.updates(task.read_model().to(device), cohort, solver)
        must_be_taken(engine, path, f"running statistics, {solver}")
        wanted = eq.engines.Loop().start(task, data).updates(task.read_model(), cohort, solver)
        torch.testing.assert_close(work.update.cpu(), wanted.update, rtol=1e-8, atol=1e-10)
    print("float64: running statistics agree with the loop on the CPU, batched and side by side")


def round_after_round(device: str) -> None:
    """Several rounds of a network with dropout by every captured path: from the third on, a chunk is one graph."""
    nn = torch.nn
    for sizes, name in (
        ([30] * 10, "step graphs"),
        (SIZES, "step graphs"),
        ([30] * 10, "side by side"),
        (SIZES, "side by side"),
    ):
        data = images(sizes)
        task = try_task(
            Task.of(nn.Sequential(nn.Flatten(), nn.Linear(784, 9), nn.Dropout(0.3), nn.Linear(9, 62)).double()), data
        )
        engine, loop = eq.engines.Simulator(device=device).start(task, data), eq.engines.Loop().start(task, data)
        engine.use(Choice(path=name))
        solver, mean, params = eq.solvers.SGD(lr=0.1, batch_size=8, epochs=2), WeightedMean(), task.read_model()
        for index in range(7):
            alpha = torch.full((10,), 0.1, dtype=torch.float64)
            cohort = eq.sampling.Uniform()(index, alpha, clients_per_round=6, seed=3)
            works = [e.summed_update(params.to(e.device), cohort, solver, cohort.weights, mean) for e in (engine, loop)]
            for part in ("update", "sq_norms", "losses"):
                found, wanted = (getattr(work, part).cpu() for work in works)
                torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)
            must_be_taken(engine, name, f"round {index}")
            params = params + works[1].update
        if name == "step graphs" and len(set(sizes)) == 1 and not engine.step_graphs.buffers.whole:
            raise SystemExit("no chunk was made one graph")
    print("float64: seven rounds of one network by captured paths agree with the loop on the CPU")


def own_models(device: str) -> None:
    """Captured steps of clients' own models, pulled, with frozen parts, by shifted gradients and by turns, for three rounds."""
    data, rng = images(), torch.Generator().manual_seed(4)
    task = try_task(Task.of(eq.models.ConvNet(classes=62, hidden=512).double()), data)
    wide, count = task.layout.dimension, len(SIZES)
    engine, loop = eq.engines.Simulator(device=device).start(task, data), eq.engines.Loop().start(task, data)
    engine.use(Choice(path="step graphs"))
    sgd = eq.solvers.SGD(lr=0.02, batch_size=8)
    frozen = AdjustedSolver(sgd, preconditioner=torch.where(torch.arange(wide) % 3 == 0, 1.0, torch.inf).double())
    params = task.read_model()
    own = params + 0.01 * torch.randn(count, wide, generator=rng, dtype=torch.float64)
    each, every = torch.rand(count, generator=rng).double(), torch.rand(count, wide, generator=rng).double()
    cases: dict[str, Any] = {
        "own models": (sgd, None),
        "pulled": (sgd, eq.types.Pull(params, each)),
        "pulled by parameter": (sgd, eq.types.Pull(own.flip(0), every)),
        "frozen parts": (frozen, None),
    }

    def on(value: Any, device: Any) -> Any:
        return None if value is None else eq.types.Pull(value.anchor.to(device), value.strength.to(device))

    def moved(solver: Any, device: Any) -> Any:
        return AdjustedSolver(solver.solver, preconditioner=solver.preconditioner.to(device)) if solver is frozen else solver

    def close(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
        off = float((found.cpu().double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30))
        if not off < 1e-7:
            raise SystemExit(f"{what}: off by {off:.1e}")

    for index in range(3):
        cohort = eq.sampling.Full()(index, torch.full((count,), 0.1, dtype=torch.float64), clients_per_round=1, seed=5)
        for name, (solver, pull) in cases.items():
            found = engine.own_steps(own.to(device), cohort, moved(solver, device), on(pull, device))
            must_be_taken(engine, "step graphs", name)
            close(found - own.to(device), loop.own_steps(own, cohort, solver, pull) - own, name)
        shift = 0.01 * torch.randn(wide, generator=rng, dtype=torch.float64)
        rows = replace(cohort, rows=0.01 * torch.randn(count, wide, generator=rng, dtype=torch.float64))
        turns = replace(cohort, rows=torch.zeros(count, wide + 1))
        for name, solver, given in (
            ("SCAFFOLD", lambda where, shift=shift: AdjustedSolver(sgd, shift=shift.to(where)), rows),
            ("Per-FedAvg", lambda where: eq.solvers.PerFedAvg(lr=0.02, inner_lr=0.02, delta=0.01, batch_size=8), cohort),
            ("pFedMe", lambda where: EnvelopeSteps(sgd, strength=2.0, inner=3), turns),
        ):
            found = engine.updates(params.to(device), given, solver(device))
            must_be_taken(engine, "step graphs", name)
            wanted = loop.updates(params, given, solver("cpu"))
            close(found.update, wanted.update, name)
            if wanted.rows is not None:
                close(found.rows, wanted.rows, f"rows of {name}")
    print("float64: own models, pulls, frozen parts, SCAFFOLD, Per-FedAvg and pFedMe as captured steps agree with the loop")


def recurrent_in_single(device: str) -> None:
    """Gated recurrent units, which have kernels for float32, at every precision: against the loop in float64."""
    from equipoise.core import fused_gru
    from equipoise.engines.simulator.precision import PRECISIONS

    if not fused_gru.is_worth_it(torch.zeros(1, 1, 3, device=device)):
        raise SystemExit("the kernels of gated recurrent units cannot be used here")
    allowed = {"float32": 1e-4, "tf32": 2e-2, "bf16": 2e-1}
    data = texts()
    cohort = eq.sampling.Full()(3, torch.full((len(SIZES),), 0.1, dtype=torch.float64), clients_per_round=1, seed=5)
    # A layer of 32 units has programs of its own where products may be rough.
    for layers, hidden, embedding, prox in ((1, 24, None, 0.0), (2, 24, 8, 0.1), (1, 32, None, 0.1)):
        options = {"vocabulary": 50, "hidden": hidden, "layers": layers, "embedding": embedding}
        solver = eq.solvers.SGD(lr=0.5, batch_size=8, epochs=2, prox=prox)
        exact = Task.of(eq.models.CharGRU(**options).double())
        wanted = eq.engines.Loop().start(exact, data).updates(exact.read_model(), cohort, solver).update
        for precision in PRECISIONS:
            task = Task.of(eq.models.CharGRU(**options))
            engine = eq.engines.Simulator(device=device, precision=precision).start(task, data)
            found = [engine.updates(task.read_model().to(device), cohort, solver).update.cpu() for _ in range(2)]
            path = "GRU programs" if hidden == 32 and precision != "float32" else "step graphs"
            must_be_taken(engine, path, f"GRU of {layers} layers, {precision}")
            difference = float((found[0].double() - wanted).norm() / wanted.norm())
            if not torch.equal(*found) or difference > allowed[precision]:
                raise SystemExit(f"GRU of {layers} layers, {precision}: off by {difference:.1e}, or other bits the second time")
            print(f"GRU of {layers} layers of {hidden}, {precision}: differs by {difference:.1e}, the same bits twice")


def in_single(device: str) -> None:
    """The paths written for float32: graphs of softmax regression, the ConvNet's kernels; at every precision, twice."""
    from equipoise.engines.simulator.precision import PRECISIONS

    solvers = {
        "one step": eq.solvers.SGD(lr=0.1, steps=1),
        "one epoch": eq.solvers.SGD(lr=0.1),
        "three epochs": eq.solvers.SGD(lr=0.1, batch_size=7, epochs=3),
        "FedProx, weight decay": eq.solvers.SGD(lr=0.1, batch_size=5, steps=9, prox=0.3, weight_decay=0.05),
        "momentum": eq.solvers.SGD(lr=0.1, batch_size=5, momentum=0.5),
    }
    models = {"softmax": lambda: eq.models.Softmax(784, 62), "no bias": lambda: eq.models.Softmax(784, 62, bias=False),
              "ConvNet": lambda: eq.models.ConvNet(classes=62),
              "ConvNet, hidden": lambda: eq.models.ConvNet(classes=62, hidden=512)}  # fmt: skip
    allowed = {"float32": 2e-5, "tf32": 5e-3, "bf16": 5e-2}
    # A rounded factor may decide which of two pixels is the larger, and another pixel then has the gradient.
    one_step = {"float32": 1e-4, "tf32": 3e-2, "bf16": 2e-1}
    # Over many steps of a network the smallest difference grows, as it decides which of two pixels is the larger: there only
    # float32 is held to a bound.
    after_steps = {"float32": 1e-2, "tf32": float("inf"), "bf16": float("inf")}
    print(f"{'model':<17}{'solver':<24}" + "".join(f"{p:>12}" for p in PRECISIONS) + "   relative error of the sum of updates")
    for name, make in models.items():
        for solver_name, solver in solvers.items():
            data = images(seed=1)
            cohort = eq.sampling.Full()(3, torch.full((len(SIZES),), 0.1, dtype=torch.float64), clients_per_round=1, seed=5)
            weights = torch.rand(len(SIZES), dtype=torch.float64, generator=torch.Generator().manual_seed(2))
            exact = Task.of(make().double())
            start = exact.layout.read(exact.module) + 0.02 * torch.randn(
                exact.layout.dimension, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
            )
            wanted = eq.engines.Loop().start(exact, data).summed_update(start, cohort, solver, weights, WeightedMean())
            errors = []
            for precision in PRECISIONS:
                engine = eq.engines.Simulator(device=device, precision=precision).start(Task.of(make()), data)
                runs = [
                    engine.summed_update(start.float().to(device), cohort, solver, weights, WeightedMean()) for _ in range(2)
                ]
                graph = "ConvNet" not in name and solver_name != "momentum"
                must_be_taken(engine, "linear round graph" if graph else "step graphs", f"{name}, {solver_name}, {precision}")
                if not torch.equal(runs[0].update, runs[1].update):
                    raise SystemExit(f"{name}, {solver_name}, {precision}: two runs differ")
                difference = float((runs[0].update.cpu().double() - wanted.update).norm() / wanted.update.norm())
                limit = allowed if "ConvNet" not in name else one_step if solver_name == "one step" else after_steps
                if not difference <= limit[precision]:
                    raise SystemExit(f"{name}, {solver_name}, {precision}: off by {difference:.1e}")
                errors.append(difference)
                norms = float((runs[0].sq_norms / wanted.sq_norms - 1).abs().max())
                losses = float((runs[0].losses - wanted.losses).abs().max())
                if max(norms, losses) > 20 * limit[precision]:
                    raise SystemExit(f"{name}, {solver_name}, {precision}: norms off by {norms:.1e}, losses by {losses:.1e}")
            print(f"{name:<17}{solver_name:<24}" + "".join(f"{e:>12.1e}" for e in errors))


def scores_of_own_models(device: str) -> None:
    """Losses and errors of clients' own ConvNets, by programs written for it."""
    data, rng = images(seed=2), torch.Generator().manual_seed(6)
    for hidden in (None, 512):
        task = Task.of(eq.models.ConvNet(classes=62, hidden=hidden))
        own = task.read_model() + 0.01 * torch.randn(len(SIZES), task.layout.dimension, generator=rng)
        which = torch.arange(len(SIZES))
        wanted = torch.stack(eq.engines.Loop().start(task, data).evaluate_own(own, data.train, which))
        engine = eq.engines.Simulator(device=device).start(task, data)
        found = torch.stack(engine.evaluate_own(own.to(device), data.train, which)).cpu()
        if not float((found - wanted).abs()[0].max()) < 1e-4 or not float((found - wanted).abs()[1].max()) < 0.02:
            raise SystemExit(f"own ConvNets with {hidden} hidden units: off by {(found - wanted).abs().amax(1).tolist()}")
    print("losses of clients' own ConvNets agree with the loop's")


def a_whole_run(device: str) -> None:
    data = eq.data.label_shift(train_clients=200, validation_clients=20, test_clients=50, seed=0)
    tail = eq.Algorithm(risk=eq.risk.Superquantile(tail=0.5))
    runs = {
        where: eq.train(
            eq.models.Softmax(data.features, data.classes).double(), data, tail, rounds=20, clients_per_round=40, seed=0,
            engine=eq.engines.Simulator(device=where),
        )
        for where in ("cpu", device)
    }  # fmt: skip
    difference = float((runs["cpu"].params - runs[device].params.cpu()).abs().max())
    print(f"20 rounds of Δ-FL: largest difference between cpu and {device} {difference:.2e}")
    if difference > 1e-8:
        raise SystemExit("the device disagrees with the CPU")


def small_memory(device: str) -> None:
    """A thousand ConvNet clients in a round on a card that pretends to have 8 GB."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(8 * 2**30 / total)
    torch.cuda.reset_peak_memory_stats()
    data = images([32] * 1000)
    engine = eq.engines.Simulator(device=device).start(Task.of(eq.models.ConvNet(classes=62)), data)
    cohort = eq.sampling.Full()(0, torch.full((1000,), 0.001, dtype=torch.float64), clients_per_round=1000, seed=0)
    params = engine.task.layout.read(engine.task.module).to(device)
    work = engine.summed_update(params, cohort, eq.solvers.SGD(batch_size=16), cohort.weights, WeightedMean())
    torch.cuda.set_per_process_memory_fraction(1.0)
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(f"1000 ConvNet clients with 8 GB: peak {peak:.2f} GB, all finite: {bool(torch.isfinite(work.sq_norms).all())}")


def models_of_users(device: str) -> None:
    """Every model of benchmarks/zoo.py: its round in float64 on the device against the loop engine on the CPU, twice."""
    for name, entry in zoo.ZOO.items():
        data, clients = data_of(entry, 2, torch.float64), 2
        torch.manual_seed(0)
        task = try_task(Task.of(entry.model().double(), loss=zoo.loss_of), data)
        solver, cohort = eq.solvers.SGD(lr=0.05, batch_size=entry.batch), cohort_of(clients, 0)
        wanted = eq.engines.Loop().start(task, data).updates(task.read_model(), cohort, solver).update
        engine = eq.engines.Simulator(device=device).start(task, data)
        found = [engine.updates(task.read_model().to(device), cohort, solver).update.cpu() for _ in range(2)]
        difference = float((found[0] - wanted).norm() / wanted.norm())
        same = "the same bits twice" if torch.equal(*found) else "other bits the second time"
        print(f"{name}: {' and '.join(engine.paths_taken)}, differs by {difference:.1e}, {same}")
        if difference > 1e-8:
            raise SystemExit(f"{name} on {device} disagrees with the loop engine")


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device on this machine")
    print(torch.cuda.get_device_name(0), "torch", torch.__version__)
    if "--own" in sys.argv:
        own_models("cuda")
        sys.exit()
    if "--recurrent" in sys.argv:
        recurrent_in_single("cuda")
        sys.exit()
    in_double("cuda")
    with_statistics("cuda")
    round_after_round("cuda")
    own_models("cuda")
    in_single("cuda")
    recurrent_in_single("cuda")
    scores_of_own_models("cuda")
    models_of_users("cuda")
    a_whole_run("cuda")
    small_memory("cuda")
    for model in (eq.models.Softmax(784, 62), eq.models.ConvNet(classes=62)):
        print(eq.engines.Simulator(device="cuda").start(Task.of(model), images()).explain())
