"""The command line."""

from equipoise.cli.commands import app, main

__all__ = ["app", "main"]
