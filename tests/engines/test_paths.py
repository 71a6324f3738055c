"""The list of paths: what each supports and why not, how one is added, what the engine says of them."""

import re
from dataclasses import dataclass, replace

import pytest
import torch
from taken import everyone, paths_of
from torch import nn

import equipoise as eq
from equipoise.core.abilities import engine_traits
from equipoise.core.task import Task
from equipoise.data.clients import FederatedData
from equipoise.engines import Simulator
from equipoise.engines.simulator import paths
from equipoise.engines.simulator.batched_steps import stacked_gradients, take_batched_steps
from equipoise.engines.simulator.calibration import Choice, SpeedMeasurement
from equipoise.engines.simulator.client_queue import ClientQueue
from equipoise.engines.simulator.convnet_path import fastest_gradients, why_not_by_hand
from equipoise.engines.simulator.cpu.c_library import library
from equipoise.engines.simulator.local_rule import LocalRule
from equipoise.engines.simulator.local_work import ChunkWork, LocalPath, Worker, Workplace
from equipoise.engines.simulator.precision import FULL
from equipoise.engines.simulator.workers import threads
from equipoise.solvers import MAML, SGD
from made_clients import make_clients

NAMES = (
    "linear round graph",
    "compiled softmax",
    "example span",
    "GRU programs",
    "step graphs",
    "linear blocks",
    "hand-written ConvNet",
    "batched autograd",
    "recorded steps",
    "side by side",
    "side by side, NHWC",
    "one by one",
)


def softmax(**options):
    return Task.of(eq.models.Softmax(4, 3), **options)


def double():
    return Task.of(eq.models.Softmax(4, 3).double())


def network():
    return Task.of(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))


def squared(outputs, y):
    return (outputs - nn.functional.one_hot(y, 3)).square().sum(1)


def data_of(sizes=(6, 5, 4)):
    return FederatedData(make_clients(list(sizes)))


def worker_of(task, data=None):
    data = data or data_of()
    return Worker(Workplace(task, data, data.train), paths.PATHS)


def chunk_of(worker, rule, **options):
    count = len(worker.clients)
    cohort, params = everyone(count), worker.task.layout.read(worker.task.module)
    queue = ClientQueue.of([eq.types.Job(params, cohort, cohort.weights)], rule, worker.clients)
    return ChunkWork(worker, queue, rule, worker.space, **options)


def test_the_order_of_the_list():
    assert tuple(path.name for path in worker_of(softmax()).paths) == NAMES


class Sharper(eq.models.Softmax):
    def forward(self, x):
        return 5 * super().forward(x)


def frozen():
    model = eq.models.Softmax(4, 3)
    model.bias.requires_grad_(False)
    return Task.of(model)


PLAIN = SGD(lr=0.1)
CUDA = "it needs a CUDA device"
UNCOMPILED = None if library("softmax") is not None else "no C compiler that works"  # a machine may have none
REASONS = [
    ("linear round graph", softmax, LocalRule.of(PLAIN, 0.1), CUDA),
    ("step graphs", network, LocalRule.of(PLAIN, 0.1), CUDA),
    ("compiled softmax", softmax, LocalRule.of(PLAIN, 0.1), UNCOMPILED),
    ("compiled softmax", lambda: softmax(loss=squared), LocalRule.of(PLAIN, 0.1), "not cross-entropy"),
    ("compiled softmax", network, LocalRule.of(PLAIN, 0.1), "Sequential is not one of the linear models"),
    (
        "compiled softmax",
        lambda: Task.of(eq.models.Softmax(4, 3).double()),
        LocalRule.of(PLAIN, 0.1),
        "float32, not torch.float64",
    ),
    ("example span", softmax, LocalRule.of(PLAIN, 0.1), None),
    ("example span", softmax, LocalRule.of(PLAIN, 0.1, True), "models of their own"),
    ("example span", softmax, LocalRule.of(replace(PLAIN, momentum=0.5), 0.1), "SGD has momentum"),
    ("linear blocks", softmax, LocalRule.of(PLAIN, 0.1, True, "one number per client"), None),
    ("linear blocks", softmax, LocalRule.of(PLAIN, 0.1, True, "one number per parameter"), "one number per parameter"),
    ("linear blocks", softmax, LocalRule.of(replace(PLAIN, prox=1.0), 0.1, True, "one number per client"), "two points"),
    ("linear blocks", softmax, LocalRule.of(replace(PLAIN, weight_decay=0.5), 2.0), "1 or more"),
    ("linear blocks", softmax, LocalRule.of(MAML(), 0.1), "the steps of MAML are not those of SGD"),
    ("linear blocks", lambda: Task.of(Sharper(4, 3)), LocalRule.of(PLAIN, 0.1), "a forward pass or a hook of its own"),
    ("linear blocks", frozen, LocalRule.of(PLAIN, 0.1), "frozen"),
    ("hand-written ConvNet", softmax, LocalRule.of(PLAIN, 0.1), "Softmax is not models.ConvNet"),
    ("hand-written ConvNet", lambda: Task.of(eq.models.ConvNet(classes=3)), LocalRule.of(MAML(), 0.1), None),
    ("hand-written ConvNet", lambda: Task.of(eq.models.ConvNet(classes=3).half()), LocalRule.of(PLAIN, 0.1), "neither float32"),
    ("batched autograd", network, LocalRule.of(MAML(), 0.1), None),
    ("one by one", network, LocalRule.of(MAML(), 0.1), None),
]


@pytest.mark.parametrize(("name", "make", "rule", "reason"), REASONS, ids=lambda value: value if isinstance(value, str) else "")
def test_reasons(name, make, rule, reason):
    found = worker_of(make()).path(name).supports_rule(rule)
    assert found is None if reason is None else reason in found


def test_a_path_with_its_own_threads_is_taken_only_if_it_was_chosen():
    worker, rule = worker_of(softmax()), LocalRule.of(PLAIN, 0.1)
    path = worker.path("compiled softmax")
    if path.supports_rule(rule) is None:
        assert path.supports(chunk_of(worker, rule, chosen="compiled softmax", threads=1)) is None
        assert path.supports(chunk_of(worker, rule)) == "it is taken only where measuring finds it the fastest"


def test_a_long_pass_is_not_for_the_span_unless_it_is_chosen():
    data = FederatedData(make_clients([200] * 3, classes=3))
    worker, rule = worker_of(softmax(), data), LocalRule.of(PLAIN, 0.1)
    path = worker.path("example span")
    with threads(1):
        assert "too few for their Gram matrix" in path.supports(chunk_of(worker, rule))
        assert path.supports(chunk_of(worker, rule, chosen="example span")) is None


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (ModuleNotFoundError("No module named 'triton'", name="triton"), "Triton is not installed"),
        (ImportError("cannot import name 'jit'", name="triton.language"), "cannot be imported (cannot import name 'jit')"),
        (AttributeError("no constexpr\nmore"), "cannot be imported (no constexpr)"),
    ],
)
def test_kernels_that_cannot_be_imported_leave_the_work_to_autograd(monkeypatch, failure, reason):
    def broken(name):
        raise failure

    task, device = Task.of(eq.models.ConvNet(classes=3)), torch.device("cuda")
    monkeypatch.setattr("equipoise.engines.simulator.precision.import_module", broken)
    assert why_not_by_hand(task, device).endswith(reason)
    assert fastest_gradients(task, device, FULL) is stacked_gradients


@dataclass
class Counted:
    """What a rule-level question was asked for."""

    times: int = 0


class Dummy(LocalPath):
    """Does all work as batched autograd does it, but for clients with one example."""

    name = "dummy"
    asked = Counted()

    def supports_rule(self, rule):
        self.asked.times += 1
        return

    def supports(self, work):
        return "a client has one example" if int(work.chunk.sizes.min()) == 1 else None

    def run(self, work):
        return take_batched_steps(work, stacked_gradients)


def test_adding_a_path_is_one_entry_of_the_list(monkeypatch):
    monkeypatch.setattr(paths, "PATHS", (Dummy, *paths.PATHS))
    Dummy.asked.times = 0
    data, task = data_of((6, 5, 4, 1)), softmax()
    engine = Simulator(chunk_size=1, workers=1).start(task, data)
    params, cohort = torch.zeros(task.layout.dimension), everyone(4)
    first = engine.summed_update(params, cohort, PLAIN, cohort.weights, eq.aggregators.WeightedMean())
    assert engine.workers.own.taken == {"dummy": 3, "example span": 1}
    engine.summed_update(params, cohort, PLAIN, cohort.weights, eq.aggregators.WeightedMean())
    assert Dummy.asked.times == 1  # once for a rule, not for a chunk or a round
    assert "taken for 3 of 4 chunks; for others not: a client has one example" in engine.explain()
    loop = eq.engines.Loop().start(task, data)
    second = loop.summed_update(params, cohort, PLAIN, cohort.weights, eq.aggregators.WeightedMean())
    torch.testing.assert_close(first.update, second.update)


@pytest.mark.parametrize("path", ["linear blocks", "batched autograd", "example span"])
def test_a_choice_that_names_a_path_is_used(path):
    @dataclass
    class Chosen:
        def start(self, task, data):
            engine = Simulator().start(task, data)
            engine.use(Choice(5, 1, path=path))
            return engine

    assert paths_of(Chosen(), softmax(), data_of(), PLAIN) == (path,)
    expected = ("batched autograd",)  # momentum is for no other: then the order decides
    assert paths_of(Chosen(), softmax(), data_of(), replace(PLAIN, momentum=0.9)) == expected
    assert paths_of(Chosen(), network(), data_of(), PLAIN) == expected


def test_a_name_that_is_not_known_changes_nothing():
    engine = Simulator().start(softmax(), data_of((100, 100)))
    engine.use(Choice(5, 1, path="of another version"))
    cohort = everyone(2)
    engine.updates(torch.zeros(15), cohort, PLAIN)
    assert engine.paths_taken == ("linear blocks",)


def test_a_group_of_one_calls_what_a_single_run_calls():
    data, task = data_of(), softmax()
    cohort, params = everyone(3), torch.randn(15, generator=torch.Generator().manual_seed(0))
    engine, job = Simulator().start(task, data), eq.types.Job(params, cohort, cohort.weights)
    alone = engine.summed_update(params, cohort, PLAIN, cohort.weights, eq.aggregators.WeightedMean())
    (together,) = engine.summed_updates([job], PLAIN, eq.aggregators.WeightedMean())
    assert torch.equal(alone.update, together.update)
    assert torch.equal(engine.losses(params, cohort), engine.losses_each([job])[0])


# ------------------------------------------------------------------------------------------------------------- explanations


def lines_of(engine, algorithm=None):
    text = engine.explain(algorithm)
    return {name: line.strip() for name in NAMES for line in text.splitlines() if line.startswith(f"  {name} ")}, text


def test_an_explanation_names_every_path_with_its_reason():
    engine = Simulator(compiled=False).start(softmax(), data_of((200, 100, 100)))
    with threads(1):
        lines, text = lines_of(engine, eq.Algorithm(solver=PLAIN))
    assert tuple(lines) == NAMES
    assert text.startswith("Local work: Softmax on cpu, SGD(lr=0.1")
    assert lines["linear round graph"].endswith(f"not taken: {CUDA}")
    assert lines["compiled softmax"].endswith("not taken: compiled code is not allowed (compiled=False)")
    assert "too few for their Gram matrix" in lines["example span"]
    assert lines["linear blocks"].endswith("  taken")
    assert lines["batched autograd"].endswith("not needed: linear blocks comes first and can do it")
    assert "Chunks of as many clients as memory allows; processes: 1" in text
    assert "Nothing was measured" in text
    assert engine_traits(engine).explain(eq.Algorithm()) == engine.explain(eq.Algorithm())


def test_what_is_explained_is_what_is_done():
    cases = [
        (softmax(), data_of((6, 5, 4)), PLAIN),
        (softmax(), data_of((200, 100)), PLAIN),
        (softmax(), data_of(), replace(PLAIN, momentum=0.9)),
        (network(), data_of(), PLAIN),
        (softmax(), data_of(), MAML()),
    ]
    for task, data, solver in cases:
        lines, _ = lines_of(Simulator().start(task, data), eq.Algorithm(solver=solver))
        (taken,) = (name for name, line in lines.items() if line.endswith("  taken"))
        assert paths_of(Simulator(), task, data, solver) == (taken,)


def test_personal_models_and_prepared_rounds_are_explained():
    engine = Simulator().start(softmax(), data_of())
    text = engine.explain(eq.Algorithm(personal=eq.personal.Ditto(0.5)))
    own = text.split("Work of personal models")[1]
    assert "example span          not taken: clients have models of their own" in own
    assert "linear blocks         taken" in own
    assert "which prepares every round" in engine.explain(eq.Algorithm(solver=eq.solvers.AdaptiveProx(PLAIN)))


def test_what_was_measured_is_explained(monkeypatch):
    slow, fast = Choice(1, 2), Choice(3, 1)
    found = SpeedMeasurement(replace(fast, clients=3), {slow: 2e-3, fast: 1e-3})
    monkeypatch.setattr("equipoise.engines.simulator.engine.calibrated", lambda task: found)
    engine = Simulator().start(softmax(), data_of())
    cohort = everyone(3)
    engine.updates(torch.zeros(15), cohort, PLAIN)
    text = engine.explain()
    assert "Chunks of 3 clients" in text
    assert "    1.0000  the first path, 1 at once, chunks of 3  (used)" in text
    assert text.index("1.0000") < text.index("    2.0000  the first path, 2 at once, chunks of 1\n".strip())


class Noisy(nn.Module):
    """Draws numbers in its forward pass."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x + torch.randn_like(x) if self.training else x)


@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
def test_a_fall_back_is_explained():
    lines, text = lines_of(Simulator().start(Task.of(Noisy()), data_of()))
    assert lines["one by one"].endswith(" taken")
    batching = [name for name in NAMES[:-1] if not name.startswith(("side by side", "recorded"))]
    assert all("cannot be vectorised over clients (see below)" in lines[name] for name in batching)
    assert text.count("called random operation") == 1
    assert re.search(r"over clients \(vmap: called random operation .* \w+ …\)\.$", text, re.MULTILINE)  # whole words
    assert "Each client is therefore trained on its own, one at a time in each process." in text
    assert "Chunks" in text


@pytest.mark.parametrize(
    ("recorded", "words"),
    [(2e-3, "measured, and slower than batched autograd"), (0.99e-3, "measured, and not clearly faster than batched autograd")],
)
def test_a_path_that_was_measured_and_is_not_taken_says_so(recorded, words, monkeypatch):
    usual, other = Choice(3, 1, path="batched autograd"), Choice(3, 1, path="recorded steps")
    found = SpeedMeasurement(replace(usual, clients=3), {usual: 1e-3, other: recorded})
    monkeypatch.setattr("equipoise.engines.simulator.engine.calibrated", lambda task: found)
    task = network()
    engine = Simulator().start(task, data_of())
    lines, _ = lines_of(engine)
    assert lines["recorded steps"].endswith("not taken: it is taken only where measuring finds it the fastest")
    engine.updates(task.layout.read(task.module), everyone(3), PLAIN)
    lines, text = lines_of(engine)
    assert lines["batched autograd"].endswith("  taken")
    assert lines["recorded steps"].endswith(f"not taken: {words}")
    assert lines["one by one"].endswith("not needed: batched autograd comes first and can do it")  # it was not measured
    assert f"{1e3 * recorded:10.4f}  recorded steps, 1 at once, chunks of 3" in text
    lines, _ = lines_of(engine, eq.Algorithm(solver=eq.solvers.Adam()))
    assert lines["recorded steps"].endswith("not taken: the steps of Adam are not those of SGD")  # whatever was measured
