"""LEAF's json folders (Caldas et al., LEAF: A Benchmark for Federated Settings, 2018): FEMNIST, Shakespeare, Sent140, …"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.core.files import PathLike
from equipoise.data.clients.client_set import ClientSet
from equipoise.data.clients.federated_data import FederatedData
from equipoise.data.datasets.data_files import load_json, targets
from equipoise.data.datasets.text import WordVectors, encode_characters
from equipoise.data.datasets.text import alphabet as alphabet_of
from equipoise.errors import InvalidData, require

_TEXT_COLUMN = 4  # of Sent140's [id, date, query, user, text, …]


@dataclass(frozen=True)
class _Reader:
    """Turns the examples of a LEAF folder into tensors."""

    shape: tuple[int, ...] | None
    characters: str
    vectors: WordVectors | None
    length: int

    def client(self, source: str, data: Any) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a user; `source` names the file and the user in errors."""
        if not isinstance(data, dict):
            raise InvalidData(f"{source}: must be an object with keys 'x' and 'y'.")
        for key in ("x", "y"):
            if not isinstance(data.get(key), list):
                raise InvalidData(f"{source}: key {key!r} is missing or not a list.")
        x, y = data["x"], data["y"]
        if len(x) != len(y):
            raise InvalidData(f"{source}: {len(x)} inputs but {len(y)} targets.")
        if self.predicts_characters(data):
            return self._characters(source, x), encode_characters("".join(y), self.characters).to(torch.int64)
        return self._inputs(source, x), _targets(source, y)

    def predicts_characters(self, data: dict[str, list[Any]]) -> bool:
        """Whether this is the task of Shakespeare: strings, each followed by one character."""
        strings = all(isinstance(row, str) for row in data["x"] + data["y"])
        return self.vectors is None and strings and all(len(value) == 1 for value in data["y"])

    def _inputs(self, source: str, x: list[Any]) -> Tensor:
        if all(isinstance(row, str) for row in x):
            return self._texts(x)
        if all(isinstance(row, list) and any(isinstance(cell, str) for cell in row) for row in x):
            short = next(
                (i for i, row in enumerate(x) if len(row) <= _TEXT_COLUMN or not isinstance(row[_TEXT_COLUMN], str)), None
            )
            if short is not None:
                raise InvalidData(f"{source}, row {short}: entry {_TEXT_COLUMN} of x must be the text, as in Sent140.")
            return self._texts([row[_TEXT_COLUMN] for row in x])
        return self._numbers(source, x)

    def _characters(self, source: str, x: list[str]) -> Tensor:
        for row, text in enumerate(x):
            if len(text) != len(x[0]):
                raise InvalidData(f"{source}, row {row}: has {len(text)} characters, row 0 has {len(x[0])}.")
        return encode_characters("".join(x), self.characters).reshape(len(x), -1)

    def _texts(self, texts: list[str]) -> Tensor:
        if self.vectors is not None:
            return torch.stack([self.vectors.tokens(text, self.length) for text in texts])
        # Texts of any length become rows of one length: cut, or filled with "other".
        rows = torch.full((len(texts), self.length), len(self.characters), dtype=torch.uint8)
        for row, text in zip(rows, texts, strict=True):
            codes = encode_characters(text[: self.length], self.characters)
            row[: len(codes)] = codes
        return rows

    def _numbers(self, source: str, x: list[Any]) -> Tensor:
        try:
            values = np.asarray(x, dtype=np.float32)
        except (ValueError, TypeError) as error:
            row = next((i for i, value in enumerate(x) if not _same_shape(value, x[0])), 0)
            raise InvalidData(f"{source}, row {row}: x must hold numbers, equally many in every row.") from error
        bad = np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(1))
        if len(bad):
            raise InvalidData(f"{source}, row {bad[0]}: x holds NaN or infinity.")
        if self.shape is None:
            return torch.from_numpy(values)
        if values[0].size != int(np.prod(self.shape)):
            raise InvalidData(f"{source}: examples have {values[0].size} numbers, which do not fill shape {self.shape}.")
        return torch.from_numpy(values.reshape(len(values), *self.shape))


def _targets(source: str, y: list[Any]) -> Tensor:
    try:
        values = np.asarray([float(value) if isinstance(value, str) else value for value in y])
    except (ValueError, TypeError) as error:
        raise InvalidData(f"{source}: y must hold one number per example, or one character per string.") from error
    if values.dtype.kind not in "iufb" or values.ndim != 1:
        raise InvalidData(f"{source}: y must hold one number per example.")
    if values.dtype.kind == "f":
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            raise InvalidData(f"{source}, row {bad[0]}: y holds NaN or infinity.")
        if (values == np.round(values)).all():  # classes written as 3.0 or "3"
            values = values.astype(np.int64)
    return targets(values, source)


def _same_shape(value: Any, first: Any) -> bool:
    """Whether both are arrays of numbers of one shape."""
    try:
        return np.asarray(value, dtype=np.float32).shape == np.asarray(first, dtype=np.float32).shape
    except (ValueError, TypeError):
        return False


def _users(path: Path, content: Any) -> dict[str, int]:
    """The users of one file with their numbers of examples; a file that is not in LEAF's format is refused."""
    if not isinstance(content, dict):
        raise InvalidData(f"{path}: must be a JSON object with keys users, num_samples, user_data.")
    for key, kind in (("users", list), ("num_samples", list), ("user_data", dict)):
        if not isinstance(content.get(key), kind):
            raise InvalidData(f"{path}: key {key!r} is missing or not a {'list' if kind is list else 'JSON object'}.")
    users, counts = content["users"], content["num_samples"]
    if len(users) != len(counts):
        raise InvalidData(f"{path}: {len(users)} users but {len(counts)} entries in num_samples.")
    if len(set(map(str, users))) != len(users):
        raise InvalidData(f"{path}: users are named more than once.")
    for user in users:
        if str(user) not in content["user_data"]:
            raise InvalidData(f"{path}, user {str(user)!r}: is listed in users but missing in user_data.")
    return dict(zip(map(str, users), counts, strict=True))


@dataclass(frozen=True)
class _Split:
    """The users of train/ or test/, those that were left out, and whether the task is to predict characters."""

    clients: ClientSet
    too_small: frozenset[str]
    next_character: bool


def _read_split(folder: Path, reader: _Reader, min_examples: int, skip: frozenset[str] = frozenset()) -> _Split:
    files = sorted(folder.glob("*.json"))
    if not files:
        raise InvalidData(f"{folder}: there is no *.json file.")
    triples: list[tuple[str, Tensor, Tensor]] = []
    seen: dict[str, Path] = {}
    too_small: set[str] = set()
    next_character = False
    for path in files:
        content = load_json(path)
        for user, count in _users(path, content).items():
            source = f"{path}, user {user!r}"
            if user in seen:
                raise InvalidData(f"{source}: appears in {seen[user].name} too.")
            seen[user] = path
            data = content["user_data"][user]
            if isinstance(data, dict) and isinstance(data.get("x"), list) and len(data["x"]) != count:
                raise InvalidData(f"{source}: num_samples says {count!r}, but x has {len(data['x'])} examples.")
            if count == 0 or count < min_examples or user in skip:
                too_small.add(user)
                continue
            x, y = reader.client(source, data)
            next_character = next_character or reader.predicts_characters(data)
            if triples:
                _require_same_kind(source, x, y, triples[0])
            triples.append((user, x, y))
    if not triples:
        raise InvalidData(f"{folder}: no user has {max(min_examples, 1)} examples or more.")
    return _Split(ClientSet.pack(triples, source=str(folder)), frozenset(too_small), next_character)


def _require_same_kind(source: str, x: Tensor, y: Tensor, first: tuple[str, Tensor, Tensor]) -> None:
    for name, mine, theirs in (("x", x, first[1]), ("y", y, first[2])):
        if mine.shape[1:] != theirs.shape[1:] or mine.dtype != theirs.dtype:
            raise InvalidData(
                f"{source}: {name} has shape {tuple(mine.shape[1:])} and type {mine.dtype}, that of user {first[0]!r} "
                f"{tuple(theirs.shape[1:])} and {theirs.dtype}."
            )


def leaf(
    path: PathLike,
    *,
    shape: Sequence[int] | None = None,
    alphabet: str = "leaf",
    vectors: WordVectors | None = None,
    length: int = 140,
    min_examples: int = 1,
    classes: int = 0,
) -> FederatedData:
    """A LEAF folder: train/*.json and, if it is there, test/*.json (directly in `path`, or in its subfolder data).

    LEAF's split is kept: test users are the training users if it was made by sample, others if made by user. What `x` and `y`
    hold decides how they are read. Numbers (FEMNIST): float32, reshaped to `shape` if given. Strings of one length followed by
    one character (Shakespeare): characters of `alphabet` ("leaf": its 80; "letters": a–z and A–Z; any other string: itself),
    all others being one more class. Texts (rows [id, date, query, user, text] as in Sent140, or strings): the first `length`
    words with `vectors` (see `glove`), else the first `length` characters. Users with fewer than `min_examples` training
    examples are left out of both parts. A malformed file fails with file, user and reason.

    Source: the format of LEAF (Caldas et al. 2018).
    """
    root = Path(path).expanduser()
    root = root if (root / "train").is_dir() or not (root / "data" / "train").is_dir() else root / "data"
    if not (root / "train").is_dir():
        raise InvalidData(f"{root}: expected a folder with subfolders train and test, which hold LEAF's *.json files.")
    require(length >= 1, "length", "must be at least 1", length)
    reader = _Reader(None if shape is None else tuple(shape), alphabet_of(alphabet), vectors, length)
    train = _read_split(root / "train", reader, min_examples)
    test = _read_split(root / "test", reader, 1, train.too_small) if (root / "test").is_dir() else None
    if train.next_character and not classes:
        classes = len(reader.characters) + 1  # whether or not each character occurs
    name = root.parent.name if root.name == "data" else root.name
    return FederatedData(train.clients, None, None if test is None else test.clients, name or "leaf", classes)
