"""LEAF's json folders (Caldas et al., LEAF: A Benchmark for Federated Settings, 2018): FEMNIST, Shakespeare, Sent140, …"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
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
        x, y = (data.get(key) if isinstance(data, dict) else None for key in ("x", "y"))
        if not (isinstance(x, list) and isinstance(y, list) and len(x) == len(y)):
            raise InvalidData(f"{source}: must hold x and y, two lists of one length.")
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
            good = [len(row) > _TEXT_COLUMN and isinstance(row[_TEXT_COLUMN], str) for row in x]
            if not all(good):
                raise InvalidData(
                    f"{source}, row {good.index(False)}: entry {_TEXT_COLUMN} of x must be the text, as in Sent140."
                )
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
            row = next((i for i, value in enumerate(x) if _shape(value) != _shape(x[0])), 0)
            raise InvalidData(f"{source}, row {row}: x must hold numbers, equally many in every row.") from error
        _refuse_non_finite(source, "x", values)
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
    _refuse_non_finite(source, "y", values)
    if values.dtype.kind == "f" and (values == np.round(values)).all():  # classes written as 3.0 or "3"
        values = values.astype(np.int64)
    return targets(values, source)


def _refuse_non_finite(source: str, name: str, values: NDArray[Any]) -> None:
    if not (finite := np.isfinite(values.reshape(len(values), -1)).all(1)).all():
        raise InvalidData(f"{source}, row {int(finite.argmin())}: {name} holds NaN or infinity.")


def _shape(value: Any) -> tuple[int, ...] | None:
    """The shape of an array of numbers; None of something else."""
    try:
        return np.asarray(value, dtype=np.float32).shape
    except (ValueError, TypeError):
        return None


def _users(path: Path, content: Any) -> dict[str, tuple[Any, Any]]:
    """The users of one file with their numbers of examples and their data; a file that is not in LEAF's format is refused."""
    try:
        users, counts, data = content["users"], content["num_samples"], content["user_data"]
        found = {str(user): (count, data[str(user)]) for user, count in zip(users, counts, strict=True)}
        if len(found) != len(users):
            raise ValueError("users are named more than once")
    except (KeyError, TypeError, ValueError) as failure:
        rule = "must be a JSON object with users, num_samples and user_data, which fit together"
        raise InvalidData(f"{path}: {rule}: {type(failure).__name__}: {failure}.") from failure
    return found


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
        for user, (count, data) in _users(path, load_json(path)).items():
            source = f"{path}, user {user!r}"
            if user in seen:
                raise InvalidData(f"{source}: appears in {seen[user].name} too.")
            seen[user] = path
            if isinstance(data, dict) and isinstance(data.get("x"), list) and len(data["x"]) != count:
                raise InvalidData(f"{source}: num_samples says {count!r}, but x has {len(data['x'])} examples.")
            if count == 0 or count < min_examples or user in skip:
                too_small.add(user)
                continue
            x, y = reader.client(source, data)
            next_character = next_character or reader.predicts_characters(data)
            pairs = zip((x, y), triples[0][1:], strict=True) if triples else ()
            if any(a.shape[1:] != b.shape[1:] or a.dtype != b.dtype for a, b in pairs):
                raise InvalidData(f"{source}: shapes or types of x and y differ from those of user {triples[0][0]!r}.")
            triples.append((user, x, y))
    if not triples:
        raise InvalidData(f"{folder}: no user has {max(min_examples, 1)} examples or more.")
    return _Split(ClientSet.pack(triples, source=str(folder)), frozenset(too_small), next_character)


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
