"""How the package is put together: who imports whom, and what a round knows."""

import ast
import inspect
import re
import sys
from collections import defaultdict
from dataclasses import fields
from pathlib import Path

import pytest

import equipoise as eq
from equipoise.rounds import one_round
from equipoise.rounds.drivers import play
from equipoise.types.round_contracts import View
from rounds import start_run

SOURCE = Path(eq.__file__).parent
FILES = {
    ".".join(("equipoise", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}
TREES = {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in FILES.items()}

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


# ------------------------------------------------------------------------------------------------------------------- one round


FEATURES = "privacy|private|secure|secret|personal|own_model|kept_row|buffer|straggler|attack|malicious|nova|scaffold|dane|dyn"


@pytest.mark.parametrize("module", ["equipoise.rounds.one_round", "equipoise.rounds.drivers", "equipoise.engines.answers"])
def test_the_round_and_its_drivers_name_no_feature_and_ask_no_part(module):
    names = {node.id for node in ast.walk(TREES[module]) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(TREES[module]) if isinstance(node, ast.Attribute)} | set(imports(module))
    assert not {name for name in names if re.search(FEATURES, name, re.IGNORECASE)}
    assert not names & {"hasattr", "getattr", "type"} - ({"getattr"} if module != "equipoise.engines.answers" else set())


def test_a_round_is_one_short_function_and_little_passes_between_its_stages():
    lines, _ = inspect.getsourcelines(one_round.one_round)
    assert len(lines) <= 60
    assert len(fields(View)) <= 12


def test_a_plain_round_enters_no_module_of_a_feature_that_it_does_not_use():
    entered: set[str] = set()
    by_file = {str(path): module for module, path in FILES.items()}

    def watch(frame, event, _):
        if event == "call" and (module := by_file.get(frame.f_code.co_filename)):
            entered.add(module)

    data = eq.data.label_shift(train_clients=6, validation_clients=0, test_clients=2, examples=8)
    run = start_run(eq.models.Softmax(data.features, data.classes), data, eq.Algorithm())
    state, _ = play(run, run.begin())
    sys.setprofile(watch)
    try:
        play(run, state)
    finally:
        sys.setprofile(None)
    used = {"equipoise.rounds.one_round", "equipoise.engines.loop", "equipoise.solvers.sgd"}
    assert used <= entered
    assert not {module for module in entered if re.search(FEATURES, module)}, entered
