"""The terminal, or what stands for it: the one place through which commands, bars and tables of the library are printed."""

from __future__ import annotations

from typing import Any

from rich.console import Console  # noqa: TID251
from rich.text import Text

from equipoise.core.words import joined


class Screen(Console):
    """A console of rich that shows text as it is: it reads no markup in names, and no name moves a cursor or sets a colour."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """A string as text, also that of a cell of a table, before its width is measured."""
        return super().render_str(joined(text.split("\n")), **options)

    def render(self, renderable: Any, options: Any = None) -> Any:
        """What is printed; rich asks this of every text, wherever it stands."""
        if isinstance(renderable, Text):
            renderable = renderable.copy()
            renderable.plain = joined(renderable.plain.split("\n"))
        return super().render(renderable, options)

    def say(self, *lines: object) -> None:
        """Print lines, each as one, as long as they are."""
        if lines:
            self.print(joined(lines), soft_wrap=True)


def say(*lines: object, err: bool = False) -> None:
    """Print lines to standard output, or to standard error."""
    Screen(stderr=err).say(*lines)
