"""The reference of the command line, made from the commands themselves."""

import re

import typer.main

from equipoise.cli import app

# What the help of a command does not say.
NOTES = {
    "run": "[Run from a file](../../howto/config.md) explains the file, [File formats](../files.md) what the command leaves.",
    "compare": "[Compare methods](../../howto/compare.md) explains the file.",
    "tune": "[Tune](../../howto/tune.md) explains the file.",
    "reproduce": "[Reproduce a published table](../../howto/reproduce.md) says what is printed.",
    "plan": "[Use many machines](../../scale.md#how-long-a-round-would-take) has the formula.",
    "report": "[Report](../../howto/report.md) explains the page.",
    "serve": "[Hand out models](../../howto/serving.md) explains the pages and the HTTP API.",
    "predict": "[Predict new rows](../../howto/predict.md) explains it.",
    "data convert": "[Use your own data](../../howto/data.md#data-larger-than-memory) explains stores.",
    "privacy epsilon": "It prints the cost once for anyone who receives the models, and once for an observer who knows the cohorts.",
    "privacy audit": "The exit code is 1 if the ε that the audit can show exceeds the claim.",
    "flower node": "A node that cannot reach the SuperLink, is refused by it or loses it starts again after 1, 2, 4 … 30 s. With an "
                   "installed app the data are loaded once, and again when a file that they were read from has changed.",
    "flower status": "The exit code is 0 if the run goes on or has finished, 1 if it failed, 2 if its server is gone, 3 if it was "
                     "stopped, 4 if it has alerts.",
    "flower key": "It prints the line for the other nodes' files of peers ([signed sums](../../protect-federation.md#signed-sums)).",
}  # fmt: skip


def _walk(command, path: tuple[str, ...]):
    inner = getattr(command, "commands", None)
    if inner:
        for name in inner:
            yield from _walk(inner[name], (*path, name))
    else:
        yield path, command


def _plain(text: str | None) -> str:
    return (
        re.sub(r"\[/?(dim|bold|red|green|cyan)\]", "", " ".join((text or "").split())).replace("|", "\\|").replace("<", "&lt;")
    )


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
        "For people who use the shell. After this page you know the arguments, options and defaults of every command. They are as",
        "the program itself states them (`equipoise COMMAND --help`). A mistake ends with one message and exit code 2, Ctrl-C with",
        "exit code 130. `equipoise --version` prints the version.", "",
    ]  # fmt: skip
    for words, command in commands().items():
        lines += [f"## equipoise {words}", "", _plain(command.help), ""]
        arguments = " ".join((p.metavar or p.name).upper() for p in command.params if p.param_type_name == "argument")
        lines += ["```", f"equipoise {words} {arguments} [OPTIONS]".replace("  ", " "), "```", ""]
        if rows := _rows(command):
            lines += ["| argument or option | what it does | default |", "|---|---|---|", *rows, ""]
        if words in NOTES:
            lines += [NOTES[words], ""]
    return "\n".join(lines)
