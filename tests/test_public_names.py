"""Every public name says what it is: the reference of the documentation is made of docstrings."""

import ast
import importlib
import inspect
import re
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "_ext"))

import pytest
from api_pages import ELSEWHERE, GIVEN, full_name
from api_pages import pages as api_pages
from catalogue_examples import WITH_FILES, constructors
from field_comments import field_comments
from generated_pages import pages as generated_pages
from given_types import INNER, given_types, public_classes
from parameters import unexplained
from public_names import all_names, docstrings, public_methods, public_modules, without_docstring
from site_checks import RIDDLES, stumbling
from uses import names_used, used_in, without_example

import equipoise as eq


def test_every_public_name_and_method_has_a_docstring():
    assert without_docstring() == []


def test_docstrings_have_no_riddles():
    found = docstrings()
    assert len(found) > 600
    assert [name for name, text in found.items() for riddle in RIDDLES if riddle in " ".join(text.lower().split())] == []


def test_every_parameter_of_a_public_name_is_explained():
    """In the docstring, by a comment behind it, or by the table of common parameters (docs/_ext/common_parameters.py)."""
    assert unexplained() == []


def test_every_public_name_has_an_example_or_a_page_that_uses_it():
    assert without_example() == []


def test_the_examples_of_parts_run():
    lines = {name: line for name, line in constructors().items() if name not in WITH_FILES}
    assert len(lines) > 80
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", eq.errors.EquipoiseNotice)
        for line in lines.values():
            exec(line, {"eq": eq})  # noqa: S102


@pytest.mark.parametrize("name", WITH_FILES)
def test_the_examples_that_need_files_fit_their_signature(name):
    (call,) = (node for node in ast.walk(ast.parse(WITH_FILES[name])) if isinstance(node, ast.Call))
    assert ast.unparse(call.func) == name.replace("equipoise", "eq", 1)
    function = getattr(importlib.import_module(name.rpartition(".")[0]), name.rpartition(".")[2])
    inspect.signature(function).bind(*call.args, **{each.arg: each.value for each in call.keywords})


def test_uses_are_found_by_what_a_program_calls_them():
    program = "from equipoise import risk as r\nimport equipoise as e\ne.train(r.QFair(q=1.0))"
    assert names_used(program) == {"equipoise.train", "equipoise.risk.QFair"}
    (line,) = used_in("equipoise.train")
    documents = re.findall(r"</([^>]+)>", line)
    root = Path(__file__).parents[1]
    homes = [root / "docs" / f"{each}.md" for each in documents]
    scripts = [root / "examples" / f"{each}.py" for each in documents]
    assert len(documents) == 3
    assert all(page.exists() or script.exists() for page, script in zip(homes, scripts, strict=True))


def test_generated_pages_say_whom_they_are_for_and_what_for():
    for name, text in generated_pages().items():
        assert stumbling(text) == [], name
        assert re.search(r"\A# [^\n]+\n\nFor [^.]+\. After this page you (can|know) ", text), name


def test_the_list_of_public_names_is_complete():
    names = set(all_names())
    assert {"equipoise.train", "equipoise.risk.Superquantile", "equipoise.types.ClientRisk"} <= names
    assert len(names) > 300
    assert all(public_modules()[module] for module in ("equipoise.sampling", "equipoise.errors", "equipoise.observers"))


def test_every_public_name_has_an_entry_in_the_reference():
    made = api_pages()
    for module, names in public_modules().items():
        homes = {name: ELSEWHERE.get(module, {}).get(name, module) for name in names}
        assert [n for n, home in homes.items() if f":: {home}.{n}\n" not in made.get(f"api/{home}.md", "")] == []


def test_every_class_of_the_contracts_is_a_name_of_their_package():
    """Users import contracts from `equipoise.types`, in whichever of its modules they are written."""
    folder = Path(eq.types.__file__).parent
    bodies = {path.stem: ast.parse(path.read_text(encoding="utf-8")).body for path in folder.glob("*.py")}
    classes = ((module, node.name) for module, body in bodies.items() for node in body if isinstance(node, ast.ClassDef))
    written = {name: f"equipoise.types.{module}" for module, name in classes}
    assert {name: getattr(eq.types, name).__module__ for name in eq.types.__all__ if name != "OWN"} == written
    assert public_modules()["equipoise.types"] == [name for name in eq.types.__all__ if name != "OWN"]


def test_every_type_that_public_names_give_back_has_an_entry():
    """Followed through return types and attributes, also of types that are no public names themselves."""
    found, text = given_types(), api_pages()[f"api/{GIVEN}.md"]
    names = {each.__name__ for each in found}
    assert {
        "RunSummary",
        "PersonalModels",
        "Spent",
        "PrivacyTable",
        "ObserverPrivacy",
        "Stopped",
        "Spread",
        "Subgroup",
    } <= names
    assert not names & {each.__name__ for each in public_classes()}
    assert [each for each in found if f".. autoclass:: {full_name(each)}\n" not in text] == []
    assert names >= INNER  # nothing is called inner that nobody meets
    assert all(each.__doc__ for each in found)
    members = [f"{each.__name__}.{m}" for each in found if each.__name__ not in INNER for m in public_methods(each)
               if not getattr(each, m).__doc__]  # fmt: skip
    assert members == []


@pytest.mark.parametrize(
    "owner", [eq.Result, eq.ClientTable, eq.Comparison, eq.observers.History, eq.types.RoundReport, eq.metrics.Interval]
)
def test_what_users_hold_in_their_hands_says_what_each_attribute_is(owner):
    import dataclasses

    fields = {each.name for each in dataclasses.fields(owner)}
    assert fields - set(field_comments(owner)) == set()


def test_results_show_what_they_inherit_and_an_example():
    assert {"summary", "report", "subgroups", "save", "export"} <= set(public_methods(eq.Result))
    assert {"summary", "report"} <= set(public_methods(eq.EvaluatedModel))
    assert all(">>> " in owner.__doc__ for owner in (eq.Result, eq.ClientTable, eq.Comparison))
