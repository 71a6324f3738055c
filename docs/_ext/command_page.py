"""The reference of the command line, as typer makes it from the commands themselves."""

import typer.main
from typer.cli import get_docs_for_click

from equipoise.cli import app

LEAD = """# Commands and options

For people who use the shell. After this page you know the arguments, options and defaults of every command, as the
program itself states them (`equipoise COMMAND --help`).

| exit code | of | when |
|---|---|---|
| 2 | every command | a mistake in what was given; one message says which |
| 130 | every command | Ctrl-C |
| 1 | `privacy audit` | the ε that the audit can show exceeds the claim |
| 1, 2, 3, 4 | `flower status` | the run failed, its server is gone, it was stopped, it has alerts |
"""


def page() -> str:
    """The page."""
    command = typer.main.get_command(app)
    context = command.make_context("equipoise", [], resilient_parsing=True)
    return (
        LEAD
        + "\n"
        + get_docs_for_click(obj=command, ctx=context, name="equipoise").partition("\n")[2].replace("```console", "```")
    )
