"""Text as tokens: characters by an alphabet, words by the rows of a table of word vectors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from equipoise.core.files import PathLike
from equipoise.data.clients.client_set import ClientSet, large_enough
from equipoise.data.datasets.data_files import data_file, load_arrays
from equipoise.errors import InvalidData, require

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
# LEAF's order, so that tokens agree with models trained elsewhere (Caldas et al. 2018, Shakespeare).
LEAF_CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
ALPHABETS = {"letters": LETTERS, "leaf": LEAF_CHARACTERS}

Features = Literal["tokens", "mean"]
PADDING, UNKNOWN = 0, 1
# As GloVe's corpus was cut: "don't" is "do" + "n't", "it's" is "it" + "'s", punctuation stands alone.
_WORD = re.compile(r"[a-z]+?(?=n't)|n't|'[a-z]+|[a-z]+|[0-9]+|[^\sa-z0-9]")


def alphabet(name: str) -> str:
    """The characters of a named alphabet; any other string is an alphabet itself."""
    characters = ALPHABETS.get(name, name)
    rule = "must be 'letters', 'leaf', or 1 to 255 different characters"
    require(0 < len(characters) <= 255 and len(set(characters)) == len(characters), "alphabet", rule, name)
    return characters


def encode_characters(text: str, characters: str) -> Tensor:
    """Each character as its position in the alphabet, uint8; other characters as the length of the alphabet.

    >>> encode_characters("abZ ", LETTERS)
    tensor([ 0,  1, 51, 52], dtype=torch.uint8)
    """
    other = len(characters)
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    table = np.full(max(map(ord, characters)) + 2, other, np.uint8)
    for position, character in enumerate(characters):
        table[ord(character)] = position
    return torch.from_numpy(table[np.minimum(points, len(table) - 1)])


def words(text: str) -> list[str]:
    """Lower-case words and punctuation marks.

    >>> words("Don't panic!")
    ['do', "n't", 'panic', '!']
    """
    return _WORD.findall(text.lower())


@dataclass(frozen=True, eq=False)
class WordVectors:
    """A table of word vectors. Row 0 is padding and row 1 the unknown word, both zero; `vocabulary[i]` is the word of row i.

    It makes inputs of texts: `tokens(text, length)` gives rows, `mean(text)` the average vector. See `glove`.

    >>> vectors = WordVectors(("", "?", "good", "bad"), torch.eye(4)[:, 2:])
    >>> vectors.tokens("A good film", 4), vectors.mean("good, not bad")
    (tensor([0, 1, 2, 1], dtype=torch.int32), tensor([0.5000, 0.5000]))
    """

    vocabulary: tuple[str, ...]
    vectors: Tensor  # (V, d) float32

    @cached_property
    def rows(self) -> dict[str, int]:
        """The row of each word."""
        return {word: row for row, word in enumerate(self.vocabulary) if row > UNKNOWN}

    def __repr__(self) -> str:
        return f"WordVectors({len(self.vocabulary)} rows of dimension {self.vectors.shape[1]})"

    def tokens(self, text: str, length: int) -> Tensor:
        """The first `length` words as rows of the table, (length,) int32; a shorter text is padded on the left.

        A recurrent model then ends on a word.
        """
        rows = [self.rows.get(word, UNKNOWN) for word in words(text)[:length]]
        return torch.tensor([PADDING] * (length - len(rows)) + rows, dtype=torch.int32)

    def mean(self, text: str) -> Tensor:
        """The average vector of the known words, (d,); zero if there is none."""
        known = [row for word in words(text) if (row := self.rows.get(word)) is not None]
        return self.vectors[known].mean(0) if known else torch.zeros(self.vectors.shape[1])


def glove(folder: PathLike | None = None) -> WordVectors:
    """GloVe 6B vectors of dimension 50 from glove6B_50d_subset.npz (arrays `words`, `vectors`).

    Source: Pennington, Socher, Manning, GloVe: Global Vectors for Word Representation (2014).
    """
    path = data_file(folder, "glove6B_50d_subset.npz", "arrays words (V,) and vectors (V, 50)")
    arrays = load_arrays(path, ("words", "vectors"))
    vocabulary, vectors = arrays["words"], arrays["vectors"]
    if vectors.ndim != 2 or len(vocabulary) != len(vectors) or vocabulary.dtype.kind != "U":
        raise InvalidData(f"{path}: {len(vocabulary)} words need as many vectors, found shape {vectors.shape}.")
    table = torch.cat([torch.zeros(2, vectors.shape[1]), torch.from_numpy(vectors.astype(np.float32))])
    if not torch.isfinite(table).all():
        raise InvalidData(f"{path}: 'vectors' holds NaN or infinity.")
    return WordVectors(("<padding>", "<unknown>", *vocabulary.tolist()), table)


def from_texts(
    records: Iterable[tuple[str, str, int]],
    vectors: WordVectors,
    *,
    features: Features = "tokens",
    length: int = 20,
    min_examples: int = 1,
    source: str = "",
) -> ClientSet:
    """Clients from (client id, text, class) records, in order of id; clients with fewer than `min_examples` are dropped.

    `features="tokens"` gives the first `length` words as rows of `vectors`, for a model that embeds; "mean" the average
    vector, for a linear model (both as in Laguel, Pillutla, Malick, Harchaoui, Device Heterogeneity in Federated
    Learning: A Superquantile Approach, App. C.1.2).

    `records` are the triples.

    >>> vectors = WordVectors(("", "?", "good", "bad"), torch.eye(4)[:, 2:])  # rows 0 and 1 are zero
    >>> from_texts([("ann", "A good film.", 1), ("bob", "Bad!", 0)], vectors, length=3)
    ClientSet(2 clients, 2 examples of shape (3,))
    """
    require(features in ("tokens", "mean"), "features", 'must be "tokens" or "mean"', features)
    require(length >= 1, "length", "must be at least 1", length)
    by_client: dict[str, tuple[list[str], list[int]]] = {}
    for client, text, label in records:
        texts, labels = by_client.setdefault(client, ([], []))
        texts.append(text)
        labels.append(label)
    names = sorted(by_client)
    kept = [names[k] for k in large_enough([len(by_client[name][0]) for name in names], min_examples, source or "the data")]

    def inputs(texts: list[str]) -> Tensor:
        return torch.stack([vectors.tokens(t, length) if features == "tokens" else vectors.mean(t) for t in texts])

    triples = ((client, inputs(by_client[client][0]), torch.tensor(by_client[client][1])) for client in kept)
    return ClientSet.pack(triples, source=source)
