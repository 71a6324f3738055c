"""What fields and parameters are: the comments at them in the source, as the reference shows them.

A comment stands behind the field, or on lines of its own directly above it.
"""

import ast
import functools
import inspect
import io
import textwrap
import tokenize
from collections.abc import Callable

_FOR_TOOLS = ("fmt:", "noqa", "type:", "mypy:", "pragma", "ruff:", "---")


@functools.cache
def field_comments(owner: type) -> dict[str, str]:
    """Field → the comment at it, for the annotated fields of a class and of its bases in this library."""
    found: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        if base.__module__.startswith("equipoise"):
            found |= _own_comments(base)
    return found


@functools.cache
def parameter_comments(function: Callable) -> dict[str, str]:
    """Parameter → the comment at it, for the parameters of a function that stand on lines of their own."""
    body, comments = _parsed(function)
    if not isinstance(body, ast.FunctionDef):
        return {}
    taken = body.args
    given = [*taken.posonlyargs, *taken.args, *taken.kwonlyargs, *filter(None, (taken.vararg, taken.kwarg))]
    return {each.arg: text for each in given if (text := _comment(each, comments))}


def _own_comments(owner: type) -> dict[str, str]:
    body, comments = _parsed(owner)
    lines = body.body if isinstance(body, ast.ClassDef) else []
    fields = [node for node in lines if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    return {node.target.id: text for node in fields if (text := _comment(node, comments))}


def _comment(node: ast.AST, comments: dict[int, tuple[str, bool]]) -> str:
    """The comment behind a field or a parameter, else the lines of comment above it."""
    behind = [comments[line][0] for line in range(node.lineno, node.end_lineno + 1) if line in comments]
    above, line = [], node.lineno - 1
    while comments.get(line, ("", False))[1]:
        above.insert(0, comments[line][0])
        line -= 1
    return " ".join(behind or above)


def _parsed(value: object) -> tuple[ast.AST | None, dict[int, tuple[str, bool]]]:
    """The syntax tree of a class or a function, and by line the comments in its source and whether they stand alone."""
    try:
        source = textwrap.dedent(inspect.getsource(value))
    except (OSError, TypeError):
        return None, {}
    found = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == tokenize.COMMENT]
    comments = {token.start[0]: (token.string.lstrip("# "), not token.line[: token.start[1]].strip()) for token in found}
    return ast.parse(source).body[0], {line: each for line, each in comments.items() if not each[0].startswith(_FOR_TOOLS)}
