"""Numbers in groups by any relation of two of them, such as runs that can share their work."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def grouped(numbers: Iterable[int], alike: Callable[[int, int], bool]) -> list[list[int]]:
    """Numbers in groups whose members are alike, in the order of their first members.

    >>> grouped([4, 7, 1, 10], lambda i, j: i % 3 == j % 3)
    [[4, 7, 1, 10]]
    >>> grouped([4, 5, 1], lambda i, j: i % 3 == j % 3)
    [[4, 1], [5]]
    """
    groups: list[list[int]] = []
    for number in numbers:
        for group in groups:
            if alike(group[0], number):
                group.append(number)
                break
        else:
            groups.append([number])
    return groups
