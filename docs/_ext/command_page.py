"""The reference of the command line, made from the commands themselves."""

import re

import typer.main

from equipoise.cli import app


def _walk(command, path: tuple[str, ...]):
    inner = getattr(command, "commands", None)
    if inner:
        for name in inner:
            yield from _walk(inner[name], (*path, name))
    else:
        yield path, command


def _plain(text: str | None) -> str:
    return re.sub(r"\[/?(dim|bold|red|green|cyan)\]", "", " ".join((text or "").split())).replace("|", "\\|")


def _default(parameter) -> str:
    if parameter.required:
        return "required"
    value = parameter.default
    if callable(value) or value is None or value is False or value in ((), []):
        return "–"
    return f"`{value}`"


def _rows(command) -> list[str]:
    rows = []
    for parameter in command.params:
        if parameter.name == "help":
            continue
        option = parameter.param_type_name == "option"
        name = (
            ", ".join([*parameter.opts, *parameter.secondary_opts]) if option else (parameter.metavar or parameter.name).upper()
        )
        rows.append(f"| `{name}` | {_plain(getattr(parameter, 'help', ''))} | {_default(parameter)} |")
    return rows


def commands() -> dict[str, object]:
    """Every command by its words, e.g. "privacy noise"."""
    root = typer.main.get_command(app)
    return {" ".join(path): command for path, command in _walk(root, ())}


def page() -> str:
    """The page."""
    lines = [
        "# Commands and options", "",
        "For people who use the shell. This page lists every command with its arguments, options and defaults, as the program",
        "itself states them (`equipoise COMMAND --help`). [The command line](../../cli.md) explains how to use them.", "",
    ]  # fmt: skip
    for words, command in commands().items():
        lines += [f"## equipoise {words}", "", _plain(command.help), ""]
        arguments = " ".join((p.metavar or p.name).upper() for p in command.params if p.param_type_name == "argument")
        lines += ["```", f"equipoise {words} {arguments} [OPTIONS]".replace("  ", " "), "```", ""]
        if rows := _rows(command):
            lines += ["| argument or option | what it does | default |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)
