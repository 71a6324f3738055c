"""How heavy the project is, room by room, against the ceilings of weight.toml: a room may not grow past its own.

    python benchmarks/weight.py [--write]        from the project's root; --write sets the ceilings to what is there now

Lines are lines of Python code, without docstrings, comments and blank lines; other files count by lines that are not blank.
Words are those of texts of four words and more, in code and in tables. A file belongs to the longest prefix in the table.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

TABLE = Path(__file__).with_name("weight.toml")
UNITS = ("lines", "modules", "words")
SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
OTHERS = (".c", ".cc", ".cpp", ".h", ".cu", ".js", ".mjs", ".css", ".html")
MADE = {"generated", "_build", "_cache", "gallery", "__pycache__"}  # folders that git ignores
TABLES = (".toml", ".txt", ".md", ".yaml", ".yml", ".json")


def of_python(text: str) -> Counter[str]:
    """Lines of code, whether there are any, and words in texts."""
    tree, docs, pieces = ast.parse(text), set(), set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            docs.add(first.value)
        pieces |= set(node.values) if isinstance(node, ast.JoinedStr) else set()
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        lines |= set(range(token.start[0], token.end[0] + 1)) if token.type not in SILENT else set()
    for doc in docs:
        lines -= set(range(doc.lineno, (doc.end_lineno or doc.lineno) + 1))
    texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and n not in docs | pieces]
    joined = [n.values for n in ast.walk(tree) if isinstance(n, ast.JoinedStr)]
    texts += [" ".join(str(v.value) for v in each if isinstance(v, ast.Constant)) for each in joined]
    return Counter(lines=len(lines), modules=int(bool(lines)), words=words([t for t in texts if isinstance(t, str)]))


def words(texts: list[str]) -> int:
    """The words of texts that have four or more."""
    return sum(count for count in (len(text.split()) for text in texts) if count >= 4)


def measured(rooms: list[str]) -> dict[str, Counter[str]]:
    """What each room weighs."""
    found = {room: Counter(dict.fromkeys(UNITS, 0)) for room in rooms}
    for path in sorted(p for top in {room.split("/")[0] for room in rooms} for p in Path(top).rglob("*") if p.is_file()):
        room = max((r for r in rooms if f"{path.as_posix()}/".startswith(f"{r}/")), key=len, default=None)
        if room is None or MADE & set(path.parts):
            continue
        if path.suffix == ".py":
            found[room] += of_python(path.read_text(encoding="utf-8"))
        elif room.startswith("src") and path.suffix in OTHERS and "onnxruntime" not in path.parts:
            found[room]["lines"] += sum(bool(line.strip()) for line in path.read_text(encoding="utf-8").splitlines())
        elif room.startswith("src") and path.suffix in TABLES:
            found[room]["words"] += words(re.findall(r'"([^"]*)"', path.read_text(encoding="utf-8")))
        elif room == "docs" and path.suffix == ".md":
            found[room]["words"] += len(path.read_text(encoding="utf-8").split())
    return found


def main() -> None:
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    found, heavy = measured(list(table)), 0
    head = TABLE.read_text(encoding="utf-8").partition("\n[")[0]
    if "--write" in sys.argv:
        rows = [f'["{room}"]\n' + "".join(f"{unit} = {now[unit]}\n" for unit in UNITS) for room, now in found.items()]
        TABLE.write_text("\n".join([head.rstrip(), *(f"\n{row}".rstrip() for row in rows)]) + "\n", encoding="utf-8")
        return
    for room, most in table.items():
        over = [unit for unit in UNITS if found[room][unit] > most[unit]]
        heavy += len(over)
        print(f"{room:40}" + "".join(f"{found[room][u]:8} of {most[u]:6} {u}{'!' * (u in over)}" for u in UNITS))
    total = sum((now for room, now in found.items() if room.startswith("src")), Counter())
    print(f"{'src in all':40}" + "".join(f"{total[unit]:8} {unit:>13}" for unit in UNITS))
    if heavy:
        sys.exit("A room is heavier than its ceiling in benchmarks/weight.toml: take something away there.")


if __name__ == "__main__":
    main()
