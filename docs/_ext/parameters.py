"""What each parameter of a public name is: said in its docstring, by a comment behind it, or by the table of common parameters."""

import fnmatch
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Mapping

from common_parameters import COMMON, LISTED
from field_comments import field_comments, parameter_comments
from public_names import is_contract, public_modules

_CODE = re.compile(r"``.+?``|`[^`]+`")
_LISTED = re.compile(r"^([\w, ]+) : ", flags=re.M)


def parameters(value: object) -> Mapping[str, inspect.Parameter]:
    """The parameters that a user of a class or a function may give; none for contracts and exceptions, which users do not make."""
    if inspect.isclass(value) and (is_contract(value) or issubclass(value, BaseException)):
        return {}
    try:
        taken = inspect.signature(value).parameters
    except (TypeError, ValueError):
        return {}
    return {name: each for name, each in taken.items() if not name.startswith("_")}


def common(full: str, parameter: str) -> str:
    """What the table of common parameters says about a parameter of a public name; "" if nothing."""
    for text, names in COMMON.get(parameter, {}).items():
        if any(fnmatch.fnmatchcase(full, name) for name in names):
            return text
    return ""


def mentioned(docstring: str, parameter: str) -> bool:
    """Whether a docstring names a parameter in backquotes, alone or in code, or in a list `name, name : what they are`."""
    word = re.compile(rf"(?<!\w){re.escape(parameter)}(?!\w)")
    spans = [*_CODE.findall(docstring), *_LISTED.findall(docstring)]
    return any(word.search(span) for span in spans)


@functools.cache
def commented(value: Callable) -> dict[str, str]:
    """Parameter → the comment behind it: of a class its fields and the parameters of its own `__init__`."""
    if not inspect.isclass(value):
        return parameter_comments(inspect.unwrap(value))
    begin = vars(value).get("__init__")
    return field_comments(value) | (parameter_comments(begin) if inspect.isfunction(begin) else {})


def descriptions(full: str, value: object) -> dict[str, str]:
    """Parameter → its description in the list of parameters; "" where the docstring explains it, or nothing does."""
    text, comments = inspect.getdoc(value) or "", commented(value)
    told = {name for name in parameters(value) if full not in LISTED and mentioned(text, name)}
    return {name: comments.get(name) or ("" if name in told else common(full, name)) for name in parameters(value)}


def unexplained() -> list[tuple[str, str]]:
    """(public name, parameter) wherever neither the docstring, nor a comment, nor the table says what the parameter is."""
    found = []
    for module, names in public_modules().items():
        for name in names:
            value = getattr(importlib.import_module(module), name)
            text = inspect.getdoc(value) or ""
            told = descriptions(f"{module}.{name}", value)
            found += [(f"{module}.{name}", each) for each, said in told.items() if not said and not mentioned(text, each)]
    return found
