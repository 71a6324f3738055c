"""Docstrings are plain text with `code`; this makes them reStructuredText, in which no character of a formula is markup.

A parameter that its docstring does not explain gets the comment at it in the source, or the text of parameters.toml.
"""

import ast
import functools
import html
import inspect
import io
import re
import textwrap
import tokenize
import tomllib
from pathlib import Path

from public_names import is_contract, values

COMMON = tomllib.loads(Path(__file__).with_name("parameters.toml").read_text(encoding="utf-8"))
LONG = ("train", "train_many", "train_family", "compare", "tune", "evaluate", "explain")  # their lists of parameters are whole
_CODE = re.compile(r"``.+?``|`[^`]+`")
_BULLET = re.compile(r"\s*([-*]|\d+\.) ")
_FOR_TOOLS = ("fmt:", "noqa", "type:", "mypy:", "pragma", "ruff:", "---")


def converted(text: str) -> str:
    """One line of prose: code in double backquotes, the rest without markup."""
    plain = [re.sub(r"([\\*|_])", r"\\\1", part) for part in _CODE.split(text)]
    codes = [f"``{each.strip('`')}``\\ " for each in _CODE.findall(text)]
    return "".join(a + b for a, b in zip(plain, [*codes, ""], strict=True))


def marked_up(text: str) -> str:
    """The same as HTML."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))


def reflowed(lines: list[str]) -> list[str]:
    """A docstring: tests stay, indented lines after a paragraph are formulas, items and sources begin paragraphs of their own."""
    out, kind = [], ""
    for line in whole_spans(lines):
        if not line.strip():
            new = ""
        elif line.lstrip().startswith(">>>") or kind == "test":
            new = "test"
        elif _BULLET.match(line) or (kind == "item" and line[:1] == " "):
            new = "item"
        else:
            new = "formula" if line[:1] == " " else "text"
        if new != kind or line.startswith(("Source: ", "Sources: ")):
            out += ["", "::", ""] if new == "formula" else [""]
        kind = new
        head = _head(line)
        out.append(line if new == "test" else f"   {line}" if new == "formula" else head + converted(line[len(head) :]))
    return [re.sub(r"^Sources?: ", "**Source:** ", line) for line in out] + [""]


def whole_spans(lines: list[str]) -> list[str]:
    """Lines in which no code span is cut by the end of a line."""
    whole: list[str] = []
    for line in lines:
        if whole and whole[-1].count("`") % 2 and line.strip():
            whole[-1] += f" {line.strip()}"
        else:
            whole.append(line)
    return whole


def _head(line: str) -> str:
    bullet = _BULLET.match(line)
    return bullet.group(0) if bullet else line[: len(line) - len(line.lstrip())]


@functools.cache
def comments(value: object) -> dict[str, str]:
    """Field or parameter → the comment behind it or above it in the source, also of a class's bases."""
    owners = [b for b in reversed(value.__mro__) if b.__module__.startswith("equipoise")] if inspect.isclass(value) else [value]
    found: dict[str, str] = {}
    for owner in owners:
        try:
            source = textwrap.dedent(inspect.getsource(inspect.unwrap(owner)))
        except (OSError, TypeError):
            continue
        tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT]
        said = {t.start[0]: (t.string.lstrip("# "), not t.line[: t.start[1]].strip()) for t in tokens}
        said = {line: each for line, each in said.items() if not each[0].startswith(_FOR_TOOLS)}
        body = ast.parse(source).body[0]
        functions = [body, *(n for n in getattr(body, "body", ()) if getattr(n, "name", "") == "__init__")]
        nodes = [n for n in getattr(body, "body", ()) if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
        nodes += [n for f in functions if isinstance(f, ast.FunctionDef) for n in ast.walk(f.args) if isinstance(n, ast.arg)]
        for node in nodes:
            behind = [said[line][0] for line in range(node.lineno, node.end_lineno + 1) if line in said]
            above, line = [], node.lineno - 1
            while said.get(line, ("", False))[1]:
                above.insert(0, said[line][0])
                line -= 1
            if behind or above:
                found[node.arg if isinstance(node, ast.arg) else node.target.id] = " ".join(behind or above)
    return found


def descriptions(full: str, value: object) -> dict[str, str]:
    """Parameter → its description in the list of parameters; "" where the docstring explains it, or nothing does."""
    if inspect.isclass(value) and (is_contract(value) or issubclass(value, BaseException)):
        return {}
    text, whole = inspect.getdoc(value) or "", full.rpartition(".")[2] in LONG
    spans = " ".join([*_CODE.findall(text), *re.findall(r"^([\w, ]+) : ", text, flags=re.M)])
    found = {}
    for name in (n for n in inspect.signature(value).parameters if not n.startswith("_")):
        told = re.search(rf"(?<!\w){name}(?!\w)", spans) and not whole
        places = (COMMON.get(place, {}).get(name) for place in (full, full.rpartition(".")[0], "all"))
        found[name] = comments(value).get(name) or ("" if told else next(filter(None, places), ""))
    return found


def process(app, what, name, obj, options, lines) -> None:
    """Rewrite the lines of a docstring in place."""
    if name.startswith("equipoise") and what != "module":
        lines[:] = reflowed(lines)
        if what in ("class", "function") and (name in values() or inspect.isclass(obj)):
            kinds = inspect.signature(obj).parameters if descriptions(name, obj) else {}
            stars = {"VAR_POSITIONAL": r"\*", "VAR_KEYWORD": r"\*\*"}
            lines += [f":param {stars.get(kinds[each].kind.name, '')}{each}: {converted(text)}".rstrip()
                      for each, text in descriptions(name, obj).items()]  # fmt: skip


def without_contract_signature(app, what, name, obj, options, signature, returned):
    """No signature for a contract: nobody makes one, and what typing offers is (*args, **kwargs)."""
    return ("", None) if what == "class" and is_contract(obj) else None


def setup(app):
    """Register the conversion."""
    app.connect("autodoc-process-docstring", process)
    app.connect("autodoc-process-signature", without_contract_signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
