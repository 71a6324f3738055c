"""The blocks of a Markdown page: what the tests run, and what the checks of configurations read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from markdown_it import MarkdownIt


@dataclass(frozen=True)
class Fence:
    """A fenced block: what stands after its ticks, its text, and whether it is inside a list or a box."""

    language: str
    text: str
    indented: bool


def fences(text: str) -> Iterator[Fence]:
    """The fenced blocks of a page."""
    lines = text.splitlines()
    for token in MarkdownIt("commonmark").parse(text):
        if token.type == "fence" and token.map:
            yield Fence(token.info.strip(), token.content, token.level > 0 or lines[token.map[0]].startswith(" "))


def executed_blocks(text: str, *, cells: bool = False) -> list[str]:
    """The Python blocks at the margin, in order; `cells=True` also gives the cells of a notebook, without their options."""
    kinds = ("python", "{code-cell}") if cells else ("python",)
    found = [fence.text for fence in fences(text) if fence.language in kinds and not fence.indented]
    return [re.sub(r"\A(:\w+:[^\n]*\n)+", "", block) for block in found]


def shell_blocks(text: str) -> list[str]:
    """Blocks of shell commands."""
    return [fence.text for fence in fences(text) if fence.language in ("", "sh", "bash", "console")]


def shell_programs(text: str) -> list[str]:
    """Shell blocks that are one command with Python in it, by `python -c` or a here-document."""
    one = re.compile(r"(?:\w+=\S+ )*python3? (?:-c '[^']*'|- <<'(\w+)'\n.*\n\1)", flags=re.S)
    return [block for block in shell_blocks(text) if one.fullmatch(block.strip())]


def toml_blocks(text: str) -> list[str]:
    """The TOML blocks of a page, without the `…` that stands for what is left out."""
    return [re.sub(r"^…$", "", fence.text, flags=re.M) for fence in fences(text) if fence.language == "toml"]
