"""Groups of clients: which group each client belongs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from equipoise.errors import InvalidParameter, require

Groups = Mapping[str, str] | Callable[[str], str]
_FIX = 'E.g. groups={"client-0": "north", "client-1": "south"}, or a function that does so for every id.'


def checked_groups(groups: Groups) -> Groups:
    """The groups, a mapping as a copy that later changes of the caller's do not reach; refused if they name none."""
    if isinstance(groups, Mapping):
        require(len(groups) > 0, "groups", "must name a group for every client", {}, _FIX)
        for client, group in groups.items():
            good = isinstance(client, str) and isinstance(group, str)
            rule = "must be a text, the name of a group, and its key a client id"
            require(good, f"groups[{client!r}]", rule, group, _FIX)
        return dict(groups)
    require(callable(groups), "groups", "must be a mapping or a function of client ids", groups, _FIX)
    return groups


def group_name(groups: Groups, client: str) -> str:
    """The name of a client's group."""
    if not isinstance(groups, Mapping):
        group = groups(client)
        require(isinstance(group, str), f"groups({client!r})", "must be the name of a group, a text", group, _FIX)
        return group
    if client not in groups:
        raise InvalidParameter("groups", f"must name a group for client {client!r}", sorted(groups)[:5], _FIX)
    return groups[client]
