"""How the package is put together: who asks parts what they are, who imports whom, and how many files one round takes."""

import ast
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.experiment import catalog

SOURCE = Path(eq.__file__).parent
FILES = {
    ".".join(("equipoise", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}
TREES = {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in FILES.items()}

READS_ABILITIES = "equipoise.core.abilities"  # the one module that asks parts what they can do
VALIDATES = ("equipoise.algorithm", "equipoise.core.part_kinds")  # refuse parts that are wrong together or in a wrong place

# Questions about values that are no parts of an algorithm: module → expressions, each with its reason.
NOT_PARTS = {
    "equipoise.core.batch_trial": {"getattr(layer, 'num_features', 'channels')": "a layer of a model, for a message"},
    "equipoise.core.equality": {"hasattr(value, '__dict__')": "attributes of a module"},
    "equipoise.core.files": {"getattr(failure, 'strerror', None)": "an error of the system"},
    "equipoise.core.numbers": {"hasattr(values, 'tolist')": "an array, a tensor or a list"},
    "equipoise.core.task": {
        "getattr(self.module, 'loss', None)": "a model may have its own loss",
        "getattr(self.module, 'error', None)": "a model may have its own error",
    },
    "equipoise.core.task_trial": {"getattr(task.module, 'classes', None)": "a model may know its classes"},
    "equipoise.data.clients.arrays": {
        "hasattr(type(value), '__array__')": "an array of whatever library",
        "hasattr(type(value), '__len__')": "an array of whatever library",
        "getattr(values, 'column_names', None)": "the columns of an Arrow table, for a message",
        "getattr(values, 'columns', None)": "the columns of a frame, for a message",
    },
    "equipoise.engines.simulator.cpu.convnet_gradients": {"getattr(_held, 'space', None)": "memory of a thread"},
    "equipoise.engines.simulator.cuda.kernels.convnet_kernels": {"getattr(programs, name, None)": "a module's function"},
    "equipoise.engines.simulator.linear_blocks": {"getattr(task.loss, '__self__', None)": "whose method a loss is"},
    "equipoise.engines.simulator.workers": {"getattr(mmap, 'MAP_NORESERVE', 16384)": "a flag of the system"},
    "equipoise.errors": {
        "getattr(value, 'shape', None)": "an array in a message",
        "getattr(value, 'dtype', type(value).__name__)": "an array in a message",
    },
    "equipoise.observers": {"getattr(member, event, lambda *_: None)": "an observer fills in what it needs"},
    "equipoise.optim.gradients": {
        "getattr(model, 'bias', None)": "a parameter of a model",
    },
    "equipoise.personal.regularise": {"getattr(loss, '__name__', type(loss).__name__)": "a function's name, for a message"},
    "equipoise.runs.checked_first": {"isinstance(engine, str | Simulator | Loop)": "whether the data are on this machine"},
    "equipoise.runs.checkpoint": {
        "getattr(state_class, step, None)": "a class in a module, by name",
    },
    "equipoise.runs.identity": {"getattr(function, '__qualname__', type(function).__name__)": "a function's name"},
    "equipoise.runs.setup": {"getattr(maker, '__name__', maker)": "a function's name, for a message"},
    "equipoise.tilted.estimators": {"getattr(self, '_warm', [])": "whether an estimator was fitted before"},
    "equipoise.tilted.hierarchy": {
        "hasattr(groups, '__array__')": "labels as an array or a list",
        "hasattr(each, '__array__')": "labels as an array or a list",
        "getattr(each, 'ndim', 1)": "labels as an array or a list",
    },
}

# Modules and classes that have one name because they are one idea in two places.
SAME_IDEA = {
    "figures": "one figure on the page, and for a paper",
    "AdaDPS": "the method among clients, and as an optimiser",
    "Adam": "the step of a client, and of the server",
    "SGD": "the step of a client, and of the server",
    "Uniform": "alike for all: clients that are drawn, iterates that are averaged",
}


def concrete_parts() -> set[str]:
    """The names of all classes that an algorithm can be made of, and of the engines."""
    kinds = [kind for kind in catalog.kinds() if kind not in ("data", "model")]
    names = {part.target.__name__ for kind in kinds for part in catalog.parts(kind)}
    return names | {"LoopEngine", "SimulatorEngine", "FlowerEngine", "Loop", "Simulator"}


def names_in(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} | {
        n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)
    }


def probes(tree: ast.AST, parts: set[str]) -> list[str]:
    """The expressions of a module that ask an object what it is or what it has."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            name = node.func.id
            asks = name == "hasattr" or (name == "getattr" and len(node.args) == 3)
            if asks or (name == "isinstance" and names_in(node.args[1]) & parts):
                found.append(ast.unparse(node))
        if isinstance(node, ast.Compare) and any(
            isinstance(op, ast.Is | ast.IsNot | ast.Eq | ast.NotEq | ast.In) for op in node.ops
        ):
            sides = [node.left, *node.comparators]
            of_type = [s for s in sides if isinstance(s, ast.Call) and isinstance(s.func, ast.Name) and s.func.id == "type"]
            if of_type and any(names_in(side) & parts for side in sides if side not in of_type):
                found.append(ast.unparse(node))
    return found


def test_the_search_for_probes_finds_them():
    code = "hasattr(solver, 'prepare'); getattr(risk, 'tail', 1); type(s) is SGD; isinstance(r, (Mean, int)); type(x) is int"
    assert len(probes(ast.parse(code), {"SGD", "Mean"})) == 4


def test_no_part_is_asked_what_it_is():
    parts = concrete_parts()
    assert {"SGD", "Superquantile", "WeightedMean", "Ditto", "DifferentialPrivacy", "Poisson"} <= parts
    asked = {
        module: left
        for module, tree in TREES.items()
        if module not in (READS_ABILITIES, *VALIDATES)
        and (left := [text for text in probes(tree, parts) if text not in NOT_PARTS.get(module, {})])
    }
    assert not asked, "\n".join(f"{module}: {text}" for module, texts in asked.items() for text in texts)


def test_the_list_of_other_questions_is_up_to_date():
    parts = concrete_parts()
    for module, texts in NOT_PARTS.items():
        assert set(texts) <= set(probes(TREES[module], parts)), module


# ---------------------------------------------------------------------------------------------------------------------- imports


def imports(module: str) -> dict[str, list[tuple[str, str]]]:
    """The modules of the package that a module imports, also inside functions but not for type checking, with the names."""
    tree = TREES[module]
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    targets = defaultdict(list)
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in FILES:
                    targets[alias.name].append((alias.name, ""))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "equipoise":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                targets[inner if inner in FILES else node.module].append((node.module, alias.name))
    return targets


def strongly_connected(graph: dict[str, set[str]]) -> list[set[str]]:
    """The groups of nodes that reach each other."""
    reach = {node: reachable(graph, node) & set(graph) for node in graph}
    groups: list[set[str]] = []
    for node in graph:
        group = {other for other in reach[node] if node in reach[other]}
        if group and not any(node in known for known in groups):
            groups.append(group | {node})
    return groups


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    edge = set(graph[start])
    while edge:
        seen |= edge
        edge = {following for node in edge for following in graph.get(node, ())} - seen
    return seen


def test_cycles_are_found():
    assert strongly_connected({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]


def test_no_imports_form_a_cycle():
    assert strongly_connected({module: set(imports(module)) for module in FILES}) == []


def test_nothing_private_is_imported_from_another_module():
    private = [
        f"{module} imports {name or source} from {source}"
        for module in FILES
        for names in imports(module).values()
        for source, name in names
        if (name.startswith("_") and name != "__version__") or any(step.startswith("_") for step in source.split("."))
    ]
    assert not private, private


def test_one_name_is_one_thing():
    """No two modules, and no two classes, have one name unless they are one idea in two places."""
    modules, classes = defaultdict(set), defaultdict(set)
    for module, tree in TREES.items():
        if not FILES[module].name.startswith("__"):
            modules[module.rsplit(".", 1)[1]].add(module)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].add(module)
    twice = {name: where for names in (modules, classes) for name, where in names.items() if len(where) > 1}
    assert {name: where for name, where in twice.items() if name not in SAME_IDEA} == {}
    assert set(SAME_IDEA) <= set(twice), "these are no longer there twice"


# ------------------------------------------------------------------------------------------------------- one round, four files


class Watched(nn.Module):
    """A linear model whose forward pass ends the watch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


HELPERS = {  # small pure helpers that a round of the loop engine passes through on its way
    "equipoise.sampling",  # the part that draws the cohort
    "equipoise.data.clients.client_set",  # a client's examples
    "equipoise.data.clients.leaves",  # one tensor of them
    "equipoise.engines.device_sets",  # where they are
    "equipoise.solvers.batches",  # which of them a step sees
    "equipoise.solvers.client_steps",  # a client's weights and memory between two steps
    "equipoise.solvers.local_optimizer",  # the options that SGD shares with other solvers
    "equipoise.types.round_values",  # the values that are passed on
    "equipoise.errors",  # checks of arguments
    "equipoise.core.abilities",
    "equipoise.core.carried",  # running statistics, of models that have them
    "equipoise.core.devices",
    "equipoise.core.forward_rules",  # the masks of dropout
    "equipoise.core.grouping",  # which of several runs can work in one call
    "equipoise.core.numbers",
    "equipoise.core.params",
    "equipoise.core.per_example_losses",
    "equipoise.core.rng",
    "equipoise.core.task",
    "equipoise.core.trees",  # a model's inputs
}


def test_one_round_of_the_loop_engine_is_read_in_four_files():
    """The modules that are entered between the loop in `train` and the model's forward pass."""
    generator = torch.Generator().manual_seed(0)
    clients = [
        (f"client-{k}", torch.randn(6, 3, generator=generator), torch.randint(0, 2, (6,), generator=generator))
        for k in range(4)
    ]
    data = eq.FederatedData(eq.ClientSet.pack(clients), classes=2)
    entered: list[str] = []
    state = {"watching": False, "done": False}
    by_file = {str(path): module for module, path in FILES.items()}

    def watch(frame, event, _):
        module = by_file.get(frame.f_code.co_filename)
        if event != "call" or state["done"]:
            return
        if frame.f_code is Watched.forward.__code__ and state["watching"]:
            state["done"] = True
        caller = frame.f_back and by_file.get(frame.f_back.f_code.co_filename)
        if module == "equipoise.round" and caller == "equipoise.train":
            state["watching"] = True
        if state["watching"] and module is not None and module not in entered:
            entered.append(module)

    sys.setprofile(watch)
    try:
        eq.train(Watched(), data, rounds=1, clients_per_round=2, engine="loop", progress=False)
    finally:
        sys.setprofile(None)
    assert state["done"]
    main = [module for module in entered if module not in HELPERS]
    assert main == ["equipoise.round", "equipoise.engines.loop", "equipoise.solvers.sgd"], entered
    assert set(entered) - set(main) <= HELPERS


@pytest.mark.parametrize("module", ["equipoise.train", "equipoise.round"])
def test_the_loop_and_the_round_ask_no_part_anything(module):
    """Neither probes an object at all, of whatever class."""
    calls = [node for node in ast.walk(TREES[module]) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    assert not [ast.unparse(call) for call in calls if call.func.id in ("hasattr", "getattr", "type")]
    checked = [ast.unparse(call.args[1]) for call in calls if call.func.id == "isinstance"]
    assert set(checked) <= {"Diverged", "Sequence", "str | Path"}
