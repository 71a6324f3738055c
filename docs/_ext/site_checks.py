"""What the site promises, as functions that name every break: links, blocks that run, commands, codes, first lines."""

from __future__ import annotations

import ast
import functools
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

_LINKED = re.compile(r"""<(?:a|img|link|script)\b[^>]*?\b(?:href|src)=["']([^"']+)["']""")
_ELSEWHERE = re.compile(r"(https?:|mailto:|data:|javascript:)")
_FENCE = re.compile(r"^( *)(`{3,}|~{3,})([^\n]*)\n(.*?)^\1\2[ \t]*$", flags=re.M | re.S)
_PYTHON = {"python", "py", "python3", "pycon", "{code-block} python", "{code} python"}
_OURS = re.compile(r"\beq\.|\bequipoise\b.*import|import equipoise")
RIDDLES = ("of the kind", "so many", "what became of", "with care")  # phrases that a reader stumbles over


@functools.cache
def anchors(page: Path) -> frozenset[str]:
    """The ids of an HTML page."""
    return frozenset(re.findall(r"""\bid=["']([^"']+)["']""", page.read_text(encoding="utf-8")))


def html_pages(site: Path) -> list[Path]:
    """The pages of a built site."""
    return [page for page in site.rglob("*.html") if "_static" not in page.parts]


def dead_links(site: Path) -> list[str]:
    """Links and sources inside the built site that lead nowhere: "page → target"."""
    dead = []
    for page in html_pages(site):
        for target in sorted(set(_LINKED.findall(page.read_text(encoding="utf-8")))):
            if _ELSEWHERE.match(target):
                continue
            path, _, fragment = unquote(target).partition("#")
            path = path.partition("?")[0]
            found = (page.parent / path).resolve() if path else page
            if not found.exists():
                dead.append(f"{page.relative_to(site)} → {target}")
            elif fragment and found.suffix == ".html" and fragment not in anchors(found):
                dead.append(f"{page.relative_to(site)} → {target} (no such anchor)")
    return dead


@dataclass(frozen=True)
class Fence:
    """A fenced block of a page: what stands after its ticks, its text, its line."""

    language: str
    text: str
    line: int
    indented: bool


def fences(text: str) -> Iterator[Fence]:
    """The fenced blocks of a Markdown page, also those inside tabs and lists."""
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield Fence(match.group(3).strip(), match.group(4), line, bool(match.group(1)))


_NOTEBOOK = re.compile(r"\A---\n.*?^file_format: mystnb$.*?^---$", flags=re.M | re.S)
_SHELL = ("", "sh", "bash", "console")
_INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")


def executed_blocks(text: str, *, cells: bool = False) -> list[str]:
    """The Python blocks that the tests run, in order: fences of the language `python` at the margin.

    Cells of a notebook are executed by the build; `cells=True` gives these, without their options.
    """
    kinds = ("python", "{code-cell}") if cells else ("python",)
    found = [fence.text for fence in fences(text) if fence.language in kinds and not fence.indented]
    return [re.sub(r"\A(:\w+:[^\n]*\n)+", "", block) for block in found]


def unexecuted_blocks(text: str) -> list[str]:
    """Python code of a page that neither the build nor the tests run, with its line.

    Python inside shell commands is run by the tests if `shell_programs` finds it.
    """
    notebook, run_in_shell = _NOTEBOOK.search(text), len(shell_programs(text))
    found = []
    for fence in fences(text):
        cell = fence.language.startswith("{code-cell}")
        if (cell and notebook) or (fence.language == "python" and not fence.indented and not notebook):
            continue
        if cell or fence.language in _PYTHON or (not fence.language.startswith("{") and _is_python(fence.text)):
            found.append(f"line {fence.line}: {fence.text.strip().splitlines()[0][:80]}")
        elif fence.language in _SHELL:
            run_in_shell -= len(re.findall(r"\bpython3? (?:-c\b|- *<<)|\bpython3? *<<", fence.text))
    return found + (["a shell command with Python in it, which is not by itself in a block"] if run_in_shell else [])


def indented_code(text: str) -> list[str]:
    """Code that a page marks by four spaces, with its line: no check sees its language, its commands or its lines."""
    from markdown_it import MarkdownIt

    body = re.sub(r"\A---\n.*?^---$", lambda head: "\n" * head.group().count("\n"), text, flags=re.M | re.S)
    return [f"line {token.map[0] + 1}: {token.content.strip().splitlines()[0][:80]}"
            for token in MarkdownIt("commonmark").parse(body) if token.type == "code_block" and token.map]  # fmt: skip


def shell_programs(text: str) -> list[str]:
    """Shell blocks that are one command with Python in it, by `python -c` or a here-document."""
    one = re.compile(r"(?:\w+=\S+ )*python3? (?:-c '[^']*'|- <<'(\w+)'\n.*\n\1)", flags=re.S)
    return [fence.text for fence in fences(text) if fence.language in _SHELL and one.fullmatch(fence.text.strip())]


def _is_python(text: str) -> bool:
    """Whether a block without that language is a program of this library all the same."""
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return bool(_OURS.search(text))


def toml_blocks(text: str) -> Iterator[tuple[int, str]]:
    """The TOML blocks of a page with their lines; `…` stands for what is left out."""
    for fence in fences(text):
        if fence.language == "toml":
            yield fence.line, re.sub(r"^…$", "", fence.text, flags=re.M)


def wrong_toml(text: str) -> list[str]:
    """TOML blocks of a page that cannot be read."""
    wrong = []
    for line, block in toml_blocks(text):
        try:
            tomllib.loads(block)
        except tomllib.TOMLDecodeError as failure:
            wrong.append(f"line {line}: {failure}")
    return wrong


def equipoise_commands(text: str) -> Iterator[tuple[int, list[str]]]:
    """The words after `equipoise` in every command of shell blocks and of inline code, with the line.

    Also after `&&`, `;` and `|`, after `sudo -u USER`, behind variables, and with a path before it.
    """
    found = [(f.line, line) for f in fences(text) if f.language in _SHELL
             for line in f.text.replace("\\\n", " ").splitlines()]  # fmt: skip
    prose = _FENCE.sub(lambda block: "\n" * block.group().count("\n"), text)
    inline = [(prose.count("\n", 0, m.start()) + 1, " ".join(m.group(1).split())) for m in _INLINE.finditer(prose)]
    for number, line in found + [(n, code) for n, code in inline if re.search(r"\bequipoise [a-z]", code)]:
        command: list[str] = []
        for word in [*_words(line), ";"]:
            if word and set(word) <= set("();<>|&"):
                while command and re.fullmatch(r"\$|sudo|-u|\w+=.*|nohup|time|exec", command[0]):
                    command = command[2 if command[0] == "-u" else 1 :]
                if command and re.fullmatch(r"(?:\S*/)?equipoise", command[0]):
                    yield number, command[1:]
                command = []
            else:
                command.append(word)


def _words(line: str) -> list[str]:
    """The words and operators of a line of shell, without its comment."""
    reader = shlex.shlex(line, posix=True, punctuation_chars=True)
    reader.whitespace_split = True
    try:
        return list(reader)
    except ValueError:  # a quotation that goes on in the next line
        return line.split()


def unknown_commands(text: str, commands: dict[str, Any], passed_on: dict[str, set[str]]) -> list[str]:
    """Commands of a page that name a command, an option or a value of an option which `equipoise` does not have.

    `commands`: click's, by their words. `passed_on`: options that a command gives to another program.
    """
    wrong = []
    for line, words in equipoise_commands(text):
        name = next((n for n in (" ".join(words[:2]), words[0]) if n in commands), None) if words else None
        if name is None:
            families = {" ".join(n.split()[:1]) for n in commands if " " in n}
            if words and not words[0].startswith("-") and words != [f for f in words[:1] if f in families]:
                wrong.append(f"line {line}: there is no command {' '.join(words[:2])!r}")
            continue
        options = {o: p for p in commands[name].params for o in (*p.opts, *p.secondary_opts) if o.startswith("-")}
        for word, after in zip(words, [*words[1:], ""], strict=True):
            option, joined, value = word.partition("=")
            if not option.startswith("--") or option in {"--help", "--version"} | passed_on.get(name, set()):
                continue
            if option not in options:
                wrong.append(f"line {line}: equipoise {name} has no {option}")
            elif refused := _refused(options[option], value if joined else after):
                wrong.append(f"line {line}: equipoise {name} {option}: {refused}")
    return wrong


def _refused(option: Any, value: str) -> str | None:
    """What an option that takes a number or a choice says against a value; words in capitals and … stand for values."""
    if option.is_flag or re.fullmatch(r"[A-Z_]+|…|", value) or option.type.name not in ("integer", "float", "choice"):
        return None
    try:
        option.type.convert(value, option, None)
    except Exception as failure:  # click's own, without an import of click here
        return str(getattr(failure, "message", failure))
    return None


def codes_without_entry(site: Path, codes: list[str]) -> list[str]:
    """Codes of errors that the built catalogue of errors has no entry for."""
    return [code for code in codes if code.lower() not in anchors(site / "reference" / "generated" / "errors.html")]


def stumbling(text: str) -> list[str]:
    """What is wrong with the words of a page: no reader and no goal in its first lines, or a phrase that is a riddle."""
    body = re.sub(r"\A---\n.*?^---$", "", text, flags=re.M | re.S)
    lead = re.search(r"^# [^\n]+\n\n(.+?)(?:\n\n|\Z)", body, flags=re.M | re.S)
    wrong = [] if lead and lead.group(1).startswith("For ") else ["its first lines do not say whom it is for"]
    prose = " ".join(_FENCE.sub("", body).split()).lower()
    return wrong + [f"it says {phrase!r}" for phrase in RIDDLES if re.search(rf"\b{phrase}\b", prose)]
