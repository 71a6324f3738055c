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


def executed_blocks(text: str) -> list[str]:
    """The Python blocks that the tests run, in order: fences of the language `python` at the margin."""
    return [fence.text for fence in fences(text) if fence.language == "python" and not fence.indented]


def unexecuted_blocks(text: str) -> list[str]:
    """Python code of a page that neither the build nor the tests run, with its line."""
    notebook = re.search(r"\A---\n.*?^file_format: mystnb$.*?^---$", text, flags=re.M | re.S)
    found = []
    for fence in fences(text):
        cell = fence.language.startswith("{code-cell}")
        if (cell and notebook) or (fence.language == "python" and not fence.indented and not notebook):
            continue
        if cell or fence.language in _PYTHON or (not fence.language.startswith("{") and _is_python(fence.text)):
            found.append(f"line {fence.line}: {fence.text.strip().splitlines()[0][:80]}")
    return found


def _is_python(text: str) -> bool:
    """Whether a block without that language is a program of this library all the same."""
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return bool(_OURS.search(text))


def wrong_toml(text: str) -> list[str]:
    """TOML blocks of a page that cannot be read; `…` stands for what is left out."""
    wrong = []
    for fence in fences(text):
        if fence.language == "toml":
            try:
                tomllib.loads(re.sub(r"^…$", "", fence.text, flags=re.M))
            except tomllib.TOMLDecodeError as failure:
                wrong.append(f"line {fence.line}: {failure}")
    return wrong


def unknown_commands(text: str, options_of: dict[str, set[str]]) -> list[str]:
    """Lines of shell blocks that name a command or an option which `equipoise` does not have."""
    wrong = []
    for fence in fences(text):
        if fence.language not in ("", "sh", "bash", "console"):
            continue
        for line in fence.text.replace("\\\n", " ").splitlines():
            found = re.match(r"\s*(?:\$ )?(?:RAY_ADDRESS=\S+ )?equipoise (.+)", line)
            if not found:
                continue
            try:
                words = shlex.split(found.group(1), comments=True)
            except ValueError:
                words = found.group(1).split()
            name = next((n for n in (" ".join(words[:2]), words[0]) if n in options_of), None)
            given = {word.partition("=")[0] for word in words if word.startswith("--")} - {"--help", "--version"}
            if name is None and not words[0].startswith("--"):
                wrong.append(f"line {fence.line}: there is no command {' '.join(words[:2])!r}")
            elif name is not None and given - options_of[name]:
                wrong.append(f"line {fence.line}: equipoise {name} has no {', '.join(sorted(given - options_of[name]))}")
    return wrong


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
