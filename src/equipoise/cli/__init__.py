"""The command line: options and printed lines. What a command does belongs to the room that it calls."""

from equipoise.cli.commands import app, main

__all__ = ["app", "main"]
