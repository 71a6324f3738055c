"""Every public name says what it is: the reference of the documentation is made of docstrings."""

import ast
import dataclasses
import inspect
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "_ext"))

import pytest
from docstrings import comments, descriptions
from public_names import given_types, public_methods, public_modules, values

import equipoise as eq

CLASSES = [value for value in [*values().values(), *given_types()] if inspect.isclass(value)]


def test_every_public_name_and_method_has_a_docstring():
    assert len(values()) > 300
    assert [full for full, value in values().items() if not inspect.getdoc(value)] == []
    methods = [(owner, name) for owner in CLASSES for name in public_methods(owner)]
    assert [f"{owner.__name__}.{name}" for owner, name in methods if not inspect.getdoc(getattr(owner, name))] == []


def test_every_parameter_of_a_public_name_is_explained():
    """In the docstring, by a comment behind it, or by docs/_ext/parameters.toml."""
    unexplained = [(full, name) for full, value in values().items() for name, text in descriptions(full, value).items()
                   if not text and name not in (inspect.getdoc(value) or "")]  # fmt: skip
    assert unexplained == []


def test_every_class_of_the_contracts_is_a_name_of_their_package():
    """Users import contracts from `equipoise.types`, in any of its modules; those of stages are not public."""
    folder = Path(eq.types.__file__).parent
    bodies = {
        path.stem: ast.parse(path.read_text(encoding="utf-8")).body
        for path in folder.glob("*.py")
        if path.stem != "round_contracts"
    }
    classes = ((module, node.name) for module, body in bodies.items() for node in body if isinstance(node, ast.ClassDef))
    written = {name: f"equipoise.types.{module}" for module, name in classes}
    assert {name: getattr(eq.types, name).__module__ for name in eq.types.__all__ if name != "OWN"} == written
    assert public_modules()["equipoise.types"] == [name for name in eq.types.__all__ if name != "OWN"]


@pytest.mark.parametrize(
    "owner", [eq.Result, eq.ClientTable, eq.Comparison, eq.observers.History, eq.types.RoundReport, eq.metrics.Interval]
)
def test_what_users_hold_in_their_hands_says_what_each_attribute_is(owner):
    fields = {each.name for each in dataclasses.fields(owner)}
    assert fields - set(comments(owner)) == set()
