"""Numbers of things in words."""


def counted(count: int, noun: str) -> str:
    """A number of things: the noun has an s, unless it is one.

    >>> counted(1, "client"), counted(0, "client"), counted(12, "client")
    ('1 client', '0 clients', '12 clients')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
