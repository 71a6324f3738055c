"""The catalogue of errors."""


def page() -> str:
    """The page."""
    return "# Errors\n\nComing.\n"
