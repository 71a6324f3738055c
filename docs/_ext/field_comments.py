"""What the fields of a class are: the comments behind them in the source, as the reference shows them."""

import ast
import functools
import inspect
import io
import textwrap
import tokenize


@functools.cache
def field_comments(owner: type) -> dict[str, str]:
    """Field → the comment on its line, for the annotated fields of a class and of its bases in this library."""
    found: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        if base.__module__.startswith("equipoise"):
            found |= _own_comments(base)
    return found


def _own_comments(owner: type) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(owner))
    except (OSError, TypeError):
        return {}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    body = ast.parse(source).body[0].body
    fields = [node for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    return {node.target.id: comments[node.end_lineno] for node in fields if node.end_lineno in comments}
