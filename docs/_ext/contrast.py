"""Colours of code with a contrast of at least 4.5 to 1 on Furo's backgrounds, in light and dark mode."""

from typing import ClassVar

from pygments.style import Style
from pygments.token import Comment, Error, Generic, Keyword, Name, Number, Operator, Punctuation, String, Token


def _style(plain: str, comment: str, keyword: str, name: str, text: str, number: str) -> dict:
    return {
        Token: plain, Comment: f"italic {comment}", Keyword: keyword, Name.Builtin: name, Name.Decorator: name,
        Name.Class: name, Name.Function: name, Name.Namespace: plain, Name.Tag: keyword, Name.Attribute: name,
        String: text, Number: number, Operator: plain, Punctuation: plain, Operator.Word: keyword, Error: plain,
        Generic.Prompt: comment, Generic.Output: plain, Generic.Heading: f"bold {plain}", Generic.Traceback: keyword,
    }  # fmt: skip


class Light(Style):
    """For light pages."""

    background_color = "#f8f9fb"
    styles: ClassVar = _style("#24292f", "#57606a", "#a0111f", "#5a32a3", "#0a4a82", "#0550ae")


class Dark(Style):
    """For dark pages."""

    background_color = "#1b1f24"
    styles: ClassVar = _style("#e6e8eb", "#a5adb6", "#ff9e96", "#d6b8ff", "#a5d6ff", "#8cc2ff")
