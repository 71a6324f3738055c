"""Why a node is left out of a run, in the words of its own log: what is wrong, and what its owner can do.

The server sends the key of a sentence and no text: what a node logs is its own, whatever server it has joined.
"""

from __future__ import annotations

INTRODUCTION, KIND, UNLISTED, KEY, UNPROVED = "introduction", "kind", "unlisted", "key", "unproved"
TAKEN, TWICE, DATA, LATE, RETIRED, REPLACED = "taken", "twice", "data", "late", "retired", "replaced"
LONG = "long update"  # of one round: the node itself takes part
NODE_KEY = "the node's key (node.key in the kit)"
WORDS = {
    INTRODUCTION: (
        "what it says of itself is out of bounds, such as its name or its number of examples. The operator's log has the rule. "
        "Correct client-id in node.toml or the data, and start the node again."
    ),
    KIND: (
        "its examples have another shape, type or scale than those of the other sites. Compare the columns of its data and its "
        "folder app/ with what the operator has sent, and start the node again."
    ),
    UNLISTED: (
        "its name is not in the operator's list of nodes. Compare client-id in node.toml with the name that the operator gave "
        "this site, or ask the operator to list it (`equipoise flower site NAME`)."
    ),
    KEY: (
        f"{NODE_KEY} is not the one that the operator's list has for this name. Put the key of the last kit in its place and "
        "start the node again, or ask the operator for a new kit (`equipoise flower site NAME --renew`)."
    ),
    UNPROVED: (f"it has not proved its key. Start it with `equipoise flower node --kit .`, which does so with {NODE_KEY}."),
    TAKEN: (
        "its name belongs to another node, which came with it first. If this site has a new key or disk, the operator must "
        "let the name go (known-nodes.json). Else give this node a name of its own: client-id in node.toml."
    ),
    TWICE: (
        "another node with its name is connected. End the node that runs twice, or give each a name of its own: client-id in "
        "node.toml."
    ),
    DATA: (
        "its data are not those that it had when the run began. Put the earlier data back and start the node again, or wait "
        "for the next run."
    ),
    LATE: "it was not there when the run began. It takes part from the next run on, and nothing needs to be done here.",
    RETIRED: "the operator has retired this site. Stop the node, or ask the operator to list the site again.",
    REPLACED: (
        f"the operator's list has a new key for this site. Put the new key in the place of {NODE_KEY}, with its node.pub, and "
        "start the node again."
    ),
}
LONG_UPDATE = (
    "This node's update was left out of a round: it was far longer than those of the other sites (`longest` of the run). "
    "Compare the units, the scale and the labels of its data with the schema. The node still takes part."
)
OTHERWISE = "the operator's log says why."


def say_why(cause: object) -> str:
    """The line of the node's log for a cause; a server of a later version may know more causes.

    >>> say_why("from a later version")
    "This node is left out of the run: the operator's log says why."
    """
    if cause == LONG:
        return LONG_UPDATE
    words = WORDS.get(cause, OTHERWISE) if isinstance(cause, str) else OTHERWISE
    return f"This node is left out of the run: {words}"
