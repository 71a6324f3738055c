import math
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.experiment import toml

text = st.text(st.characters(exclude_categories=["Cs"]))
plain = st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), text)
values = st.recursive(plain, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(text, inner, max_size=3)))


@given(st.dictionaries(text, values, max_size=5))
def test_what_is_written_is_read_back(table):
    assert tomllib.loads(toml.dumps(table)) == table


def test_nan_and_infinity_are_written_as_toml_spells_them():
    read = tomllib.loads(toml.dumps({"a": math.nan, "b": -math.inf}))
    assert math.isnan(read["a"])
    assert read["b"] == -math.inf


def test_types_and_order_survive():
    written = toml.dumps({"b": 1.0, "a": 1, "t": {"z": True}, "e": {}})
    assert written.splitlines()[:2] == ["b = 1.0", "a = 1"]
    assert isinstance(tomllib.loads(written)["b"], float)
    assert tomllib.loads(written)["e"] == {}


def test_a_value_without_a_place_in_toml_is_refused():
    with pytest.raises(TypeError, match="NoneType"):
        toml.dumps({"a": None})
