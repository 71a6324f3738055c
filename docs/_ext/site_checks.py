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

_TAG = re.compile(r"<[a-z][^<>]*>", flags=re.I)
_ADDRESS = re.compile(r"""\s(href|src|srcset|data|poster|action)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""", flags=re.I)
_NOT_OPENED = re.compile(r"^<(?:a|area|form)\b|\brel=[\"']?(?:canonical|license|next|prev)", flags=re.I)
_ASKED = re.compile(r"""(?:url\(|@import|\bimport|\bfrom|fetch\(|open\()\s*\(?["']?\s*((?:https?:)?//[^\s"')]+)""")
_ELSEWHERE = re.compile(r"(https?://|mailto:|data:|javascript:)")
_FENCE = re.compile(r"^( *)(`{3,}|~{3,})([^\n]*)\n(.*?)^\1\2[ \t]*$", flags=re.M | re.S)
_PYTHON = {"python", "py", "python3", "pycon", "{code-block} python", "{code} python"}
_OURS = re.compile(r"\beq\.|\bequipoise\b.*import|import equipoise")
# What may stand after the ticks of a block, and after the colons of a box: each of them is looked at by a check below.
_MARKS = {
    "",
    "python",
    "toml",
    "sh",
    "bash",
    "console",
    "{code-cell}",
    "{toctree}",
    "{literalinclude}",
    "{include}",
    "{figure}",
}
_BOXES = {"tab-set", "tab-item", "grid", "grid-item-card", "note", "tip", "important", "warning", "admonition", "dropdown"}
RIDDLES = ("of the kind", "so many", "what became of", "with care")  # phrases that a reader stumbles over


@functools.cache
def anchors(page: Path) -> frozenset[str]:
    """The ids of an HTML page."""
    return frozenset(re.findall(r"""\bid=["']([^"']+)["']""", page.read_text(encoding="utf-8")))


def html_pages(site: Path) -> list[Path]:
    """The pages of a built site."""
    return [page for page in site.rglob("*.html") if "_static" not in page.parts]


def addresses(text: str) -> Iterator[tuple[str, str, str]]:
    """(tag, attribute, address) of whatever a page of HTML links to or loads."""
    for tag in _TAG.findall(text):
        for attribute, *quoted in _ADDRESS.findall(tag):
            value = "".join(quoted)
            parts = [part.split()[0] for part in value.split(",") if part.strip()] if attribute.lower() == "srcset" else [value]
            for part in parts:
                yield tag, attribute.lower(), part


def dead_links(site: Path) -> list[str]:
    """Links and sources inside the built site that lead nowhere: "page → target"."""
    dead = []
    for page in html_pages(site):
        for target in sorted({each for _, _, each in addresses(page.read_text(encoding="utf-8"))}):
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


def loaded_from_elsewhere(site: Path) -> list[str]:
    """What pages and their style sheets ask of other hosts when they are opened: "page → address". Links are not opened."""
    found = []
    for page in html_pages(site):
        text = page.read_text(encoding="utf-8")
        for tag, _, target in addresses(text):
            if re.match(r"(https?:)?//", target) and not _NOT_OPENED.search(tag):
                found.append(f"{page.relative_to(site)} → {target}")
        code = "\n".join(["", *re.findall(r"<(?:script|style)\b[^>]*>(.*?)</", text, flags=re.S | re.I),
                          *re.findall(r"""\sstyle="([^"]*)\"""", text)])  # fmt: skip
        found += [f"{page.relative_to(site)} → {target}" for target in _ASKED.findall(code)]
    for sheet in site.rglob("*.css"):
        code = re.sub(r"/\*.*?\*/", "", sheet.read_text(encoding="utf-8"), flags=re.S)
        found += [f"{sheet.relative_to(site)} → {target}" for target in _ASKED.findall(code)]
    return found


def images_without_text(site: Path) -> list[str]:
    """Images of the built site for which a screen reader has no words, or only the name of a file: "page → source".

    A thumbnail stands beside the title of its example, and needs no words of its own.
    """
    found = []
    for page in html_pages(site):
        for tag in re.findall(r"<img\b[^>]*>", page.read_text(encoding="utf-8")):
            source, words = (re.search(rf"""\b{name}=["']([^"']*)""", tag) for name in ("src", "alt"))
            name = "" if source is None else source.group(1)
            told = "" if words is None else words.group(1).strip()
            if not name.endswith("_thumb.png") and (len(told) < 8 or " " not in told or re.match(r"plot \d", told)):
                found.append(f"{page.relative_to(site)} → {name}")
    return found


def links_of(text: str) -> list[str]:
    """Where the links and images of a Markdown page lead, also those that are written as HTML."""
    from markdown_it import MarkdownIt

    found = [target for _, _, target in addresses(_FENCE.sub("", text))]
    for token in MarkdownIt("commonmark").parse(text):
        for inner in token.children or ():
            found += [str(inner.attrs[name]) for name in ("href", "src") if name in inner.attrs]
    return found


def undefined_labels(text: str) -> list[str]:
    """Labels of links such as `[words][label]` that a page does not define: they are shown as they are written."""
    from markdown_it import MarkdownIt

    read = (inner for token in MarkdownIt("commonmark").parse(text) for inner in token.children or () if inner.type == "text")
    return [label for inner in read for label in re.findall(r"\]\[(\w[^\]]*)\]|\w\]\[\]", inner.content)]


def headings(text: str) -> set[str]:
    """The anchors that a code host gives to the headings of a Markdown page."""
    found: dict[str, int] = {}
    made = set()
    for heading in re.findall(r"^#{1,6} +(.+?)(?: +#+)?$", _FENCE.sub("", text), flags=re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        number = found[slug] = found.get(slug, -1) + 1
        made.add(f"{slug}-{number}" if number else slug)
    return made


@dataclass(frozen=True)
class Fence:
    """A fenced block of a page: what stands after its ticks, its text, its line."""

    language: str
    text: str
    line: int
    indented: bool


def fences(text: str) -> Iterator[Fence]:
    """The fenced blocks of a Markdown page, also those inside boxes, lists and quotations, closed or not."""
    from markdown_it import MarkdownIt

    lines = text.splitlines()
    for token in MarkdownIt("commonmark").parse(text):
        if token.type == "fence" and token.map:
            first = token.map[0]
            yield Fence(token.info.strip(), token.content, first + 1, token.level > 0 or lines[first].startswith(" "))


def unknown_marks(text: str) -> list[str]:
    """Blocks and boxes that no check looks into, with their line: a language, a directive or an option that pages do not use.

    So code cannot be left out by another mark: `{code-block} python`, `ipython`, `shell`, a cell that is skipped, HTML.
    """
    found = []
    for fence in fences(text):
        mark, _, option = fence.language.partition(" ")
        if mark not in _MARKS or (option and mark in ("python", "toml", "sh", "bash", "console")):
            found.append(f"line {fence.line}: ```{fence.language}")
        if mark == "{code-cell}" and re.search(r"\A(?::\w+:.*\n)*:tags:.*skip-execution", fence.text):
            found.append(f"line {fence.line}: a cell that is not executed")
        if mark == "{code-cell}" and re.search(r"^(?:!|%(?!%writefile))", fence.text, flags=re.M):
            found.append(f"line {fence.line}: a command in a cell, which no check reads")
    bare = _INLINE.sub("", _FENCE.sub(lambda block: "\n" * block.group().count("\n"), text))
    boxes = re.finditer(r"^[ \t>-]*:{3,}\s*\{([^}]+)\}|^.*<(?:pre|code|script)\b", bare, flags=re.M | re.I)
    others = [box for box in boxes if box.group(1) not in _BOXES]
    found += [f"line {bare[: box.start()].count(chr(10)) + 1}: {box.group().strip()[:80]}" for box in others]
    if head := _NOTEBOOK.search(text):
        found += ["its cells are not executed"] if re.search(r"execution_mode", head.group()) else []
    return found


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
    """Whether a block without that language is a program all the same: of this library, with imports, or behind prompts."""
    if re.search(r"^>>> ", text, flags=re.M):
        return True
    try:
        body = ast.parse(text).body
    except SyntaxError:
        return False
    return bool(_OURS.search(text)) or any(isinstance(each, ast.Import | ast.ImportFrom | ast.FunctionDef) for each in body)


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


_BEFORE = re.compile(
    r"\$|sudo|-u|\w+=(?!\S*/equipoise$).*|nohup|time|exec|env|do|then|else|if|while|!|uv|run|(?:\S*/)?python3?|-m"
)
_OF_ALL = {"--help", "--version", "--install-completion", "--show-completion"}
_CALLED = re.compile(r"(?:\w+=)?(?:\S*/)?equipoise")


def equipoise_commands(text: str) -> Iterator[tuple[int, list[str]]]:
    """The words after `equipoise` in every command of shell blocks and of inline code, with the line.

    Also after `&&`, `;` and `|`, after `sudo -u USER`, `env` and `python -m`, behind variables, in loops, and with a path before it.
    """
    found = [(f.line, line) for f in fences(text) if f.language in _SHELL
             for line in f.text.replace("\\\n", " ").splitlines()]  # fmt: skip
    prose = _FENCE.sub(lambda block: "\n" * block.group().count("\n"), text)
    inline = [(prose.count("\n", 0, m.start()) + 1, " ".join(m.group(1).split())) for m in _INLINE.finditer(prose)]
    for number, line in found + [(n, code) for n, code in inline if re.search(r"\bequipoise [a-z]", code)]:
        command: list[str] = []
        for word in [*_words(line), ";"]:
            if word and set(word) <= set("();<>|&"):
                while command and _BEFORE.fullmatch(command[0]):
                    command = command[2 if command[0] == "-u" else 1 :]
                if command and _CALLED.fullmatch(command[0]):
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
            if words and words[0].startswith("-"):
                wrong += [f"line {line}: equipoise has no {words[0]}"] if words[0] not in _OF_ALL else []
            elif words and words != [f for f in words[:1] if f in families]:
                wrong.append(f"line {line}: there is no command {' '.join(words[:2])!r}")
            continue
        options = {o: p for p in commands[name].params for o in (*p.opts, *p.secondary_opts) if o.startswith("-")}
        for word, after in zip(words, [*words[1:], ""], strict=True):
            option, joined, value = word.partition("=")
            if not re.match(r"--?[A-Za-z]", option) or option in {"--help", "--version"} | passed_on.get(name, set()):
                continue
            if option not in options:
                wrong.append(f"line {line}: equipoise {name} has no {option}")
            elif refused := _refused(options[option], value if joined else after):
                wrong.append(f"line {line}: equipoise {name} {option}: {refused}")
    return wrong


def unknown_targets(text: str, makefile: str) -> list[str]:
    """Targets of `make` in shell blocks and inline code that the Makefile does not have."""
    known = set(re.findall(r"^([\w-]+):", makefile, flags=re.M))
    shell = [fence.text for fence in fences(text) if fence.language in _SHELL]
    named = re.findall(r"^make ([\w-]+)", "\n".join([*shell, *_INLINE.findall(_FENCE.sub("", text))]), flags=re.M)
    return [name for name in named if name not in known]


def unknown_scripts(text: str, root: Path) -> list[str]:
    """Commands of a page that run a script of benchmarks/ or examples/ which is not there, or by an option that it lacks."""
    shell = [line for fence in fences(text) if fence.language in _SHELL for line in fence.text.splitlines()]
    inline = [" ".join(code.split()) for code in _INLINE.findall(_FENCE.sub("", text))]
    wrong = []
    for command in shell + inline:
        found = re.search(r"(?:^|python )((?:benchmarks|examples)/[\w/]+\.py)(.*)", command)
        script = root / found.group(1) if found else None
        if found and script and not script.exists():
            wrong.append(found.group(1))
        elif found and script:
            source = script.read_text(encoding="utf-8")
            options = re.findall(r"(?<=\s|\[)--[\w-]+", found.group(2).partition(" #")[0])
            wrong += [f"{found.group(1)} {option}" for option in options if f'"{option}"' not in source]
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
