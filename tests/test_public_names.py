"""Every public name says what it is: the reference of the documentation is made of docstrings."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "_ext"))

from public_names import all_names, docstrings, public_modules, without_docstring
from site_checks import RIDDLES


def test_every_public_name_and_method_has_a_docstring():
    assert without_docstring() == []


def test_docstrings_have_no_riddles():
    found = docstrings()
    assert len(found) > 600
    assert [name for name, text in found.items() for riddle in RIDDLES if riddle in " ".join(text.lower().split())] == []


def test_the_list_of_public_names_is_complete():
    names = set(all_names())
    assert {"equipoise.train", "equipoise.risk.Superquantile", "equipoise.types.ClientRisk"} <= names
    assert len(names) > 300
    assert all(public_modules()[module] for module in ("equipoise.sampling", "equipoise.errors", "equipoise.observers"))
