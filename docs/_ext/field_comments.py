"""What fields and parameters are: the comments behind them in the source, as the reference shows them."""

import ast
import functools
import inspect
import io
import textwrap
import tokenize
from collections.abc import Callable


@functools.cache
def field_comments(owner: type) -> dict[str, str]:
    """Field → the comment on its line, for the annotated fields of a class and of its bases in this library."""
    found: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        if base.__module__.startswith("equipoise"):
            found |= _own_comments(base)
    return found


@functools.cache
def parameter_comments(function: Callable) -> dict[str, str]:
    """Parameter → the comment on its line, for the parameters of a function that stand on lines of their own."""
    body, comments = _parsed(function)
    if not isinstance(body, ast.FunctionDef):
        return {}
    taken = body.args
    given = [*taken.posonlyargs, *taken.args, *taken.kwonlyargs, *filter(None, (taken.vararg, taken.kwarg))]
    return {each.arg: comments[each.end_lineno] for each in given if each.end_lineno in comments}


def _own_comments(owner: type) -> dict[str, str]:
    body, comments = _parsed(owner)
    lines = body.body if isinstance(body, ast.ClassDef) else []
    fields = [node for node in lines if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    return {node.target.id: comments[node.end_lineno] for node in fields if node.end_lineno in comments}


def _parsed(value: object) -> tuple[ast.AST | None, dict[int, str]]:
    """The syntax tree of a class or a function, and the comments in its source by line."""
    try:
        source = textwrap.dedent(inspect.getsource(value))
    except (OSError, TypeError):
        return None, {}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    return ast.parse(source).body[0], comments
