"""Docstrings are plain text with `code` and *stress*; this makes them reStructuredText, so that no character of a formula is markup."""

import html
import itertools
import re

from parameters import descriptions, parameters
from public_names import is_contract

_CODE = re.compile(r"``.+?``|`[^`]+`")
_STRESS = re.compile(r"(?<![\w*])\*([A-Za-z](?:[\w ,-]*\w)?)\*(?![\w*])")  # no product: that has spaces, or no second asterisk
_BULLET = re.compile(r"^(\s*)([-*]|\d+\.) ")
_SOURCE = re.compile(r"\bSources?: ")


def _plain(text: str) -> str:
    parts = _STRESS.split(text)  # stressed words are at odd places
    escaped = (re.sub(r"([\\*|_])", r"\\\1", part) for part in parts)
    return "".join(f"*{part}*" if place % 2 else part for place, part in enumerate(escaped))


def marked_up(text: str) -> str:
    """A docstring's text as HTML: `code` and *stress* are elements, the rest is as it is."""
    parts = _CODE.split(text), [match.group().strip("`") for match in _CODE.finditer(text)]
    prose = [_STRESS.sub(r"<em>\1</em>", html.escape(part)) for part in parts[0]]
    codes = [f"<code>{html.escape(code)}</code>" for code in parts[1]]
    return "".join(piece for pair in itertools.zip_longest(prose, codes, fillvalue="") for piece in pair)


def markdown(text: str) -> str:
    """A docstring's text for a cell of a Markdown table."""
    cells = []
    for part in re.split(r"(`[^`]*`)", text):  # code stays as it is, elsewhere only stress is markup
        pieces = [part] if part.startswith("`") else _STRESS.split(part)
        escaped = [re.sub(r"([|*$_<\\])" if not part.startswith("`") else r"(\|)", r"\\\1", piece) for piece in pieces]
        cells += [f"*{piece}*" if place % 2 else piece for place, piece in enumerate(escaped)]
    return "".join(cells)


def converted(line: str) -> str:
    """One line of prose: code in double backquotes, the rest without markup."""
    bullet = _BULLET.match(line)
    head = bullet.group(0) if bullet else ""
    parts, end = [], 0
    body = line[len(head) :]
    for match in _CODE.finditer(body):
        parts += [_plain(body[end : match.start()]), f"``{match.group().strip('`')}``\\ "]
        end = match.end()
    return head + "".join([*parts, _plain(body[end:])])


def process(app, what, name, obj, options, lines) -> None:
    """Rewrite the lines of a docstring in place."""
    if name.startswith("equipoise") and what != "module":
        lines[:] = reflowed(lines)
        if what in ("class", "function"):
            told = descriptions(name, obj)
            lines += [f":param {_field(obj, each)}: {converted(text)}".rstrip() for each, text in told.items()]


def _field(obj: object, parameter: str) -> str:
    """A parameter as a field names it: with its asterisks, if it has any."""
    stars = {"VAR_POSITIONAL": r"\*", "VAR_KEYWORD": r"\*\*"}
    return stars.get(parameters(obj)[parameter].kind.name, "") + parameter


def without_contract_signature(app, what, name, obj, options, signature, returned):
    """No signature for a contract: nobody makes one, and what typing offers is (*args, **kwargs)."""
    return ("", None) if what == "class" and is_contract(obj) else None


def joined_spans(lines: list[str]) -> list[str]:
    """Lines in which no code span is cut by the end of a line."""
    whole: list[str] = []
    for line in lines:
        if whole and whole[-1].count("`") % 2 and line.strip():
            whole[-1] += " " + line.strip()
        else:
            whole.append(line)
    return whole


def reflowed(lines: list[str]) -> list[str]:
    """The whole docstring: doctests stay, lists get their blank line, indented blocks after a paragraph are formulas."""
    out: list[str] = []
    in_test = in_block = False
    for line in joined_spans(lines):
        text = line.strip()
        if text.startswith(">>>") or (in_test and text):
            if not in_test and out and out[-1].strip():
                out.append("")
            in_test = True
            out.append(line)
            continue
        in_test = False
        indented = line[:1] == " " and bool(text)
        if indented and not in_block and not _in_list(out):
            out += ["", "::", ""]
            in_block = True
        elif text and not indented and in_block:
            out.append("")
            in_block = False
        if in_block:
            out.append("   " + line if text else "")
            continue
        if _BULLET.match(line) and out and out[-1].strip() and not _BULLET.match(out[-1]) and not out[-1].startswith(" "):
            out.append("")
        source = _SOURCE.search(line)
        if source and not _BULLET.match(line):  # a paragraph of its own
            before = line[: source.start()].rstrip()
            if before:
                out.append(converted(before))
            if out and out[-1].strip():
                out.append("")
            line = line[source.start() :]
            out.append("**Source:** " + converted(line[len(source.group()) :]))
            continue
        out.append(converted(line))
    return [*out, ""]


def _in_list(out: list[str]) -> bool:
    for line in reversed(out):
        if _BULLET.match(line):
            return True
        if line.strip() and line[:1] != " ":
            return False
    return False


def setup(app):
    """Register the conversion."""
    app.connect("autodoc-process-docstring", process)
    app.connect("autodoc-process-signature", without_contract_signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
