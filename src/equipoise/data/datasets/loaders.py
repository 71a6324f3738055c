"""The data of the papers from files in a folder: `folder=…`, or the folder that the environment variable EQUIPOISE_DATA names.

Images and characters stay bytes in memory and are converted when a batch is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.core.files import PathLike
from equipoise.data.clients.client_set import ClientSet, large_enough
from equipoise.data.clients.federated_data import FederatedData
from equipoise.data.clients.splits import How, split, split_clients
from equipoise.data.datasets.data_files import data_file, load_arrays, load_json, npz
from equipoise.data.datasets.text import Features, WordVectors, alphabet, encode_characters, from_texts, glove
from equipoise.data.partition import Partitioner, by_id, partitioner, to_clients
from equipoise.errors import FileGuard, InvalidData, require


def femnist(
    folder: PathLike | None = None,
    *,
    min_examples: int = 100,
    split_by: How = "clients",
    validation: float = 0.0,
    test: float = 0.5,
    seed: int = 0,
) -> FederatedData:
    """FEMNIST by writer, from femnist_writers.npz: 28 × 28 images in 62 classes (0–9, A–Z, a–z), seen as ink 1 on paper 0.

    Only writers whose training part is there (`writer_kind` below 2) with at least `min_examples` images. Half of the writers
    are kept for test and redrawn with each seed; `split_by="examples"` splits inside writers instead.
    Source: Pillutla, Laguel, Malick, Harchaoui, Federated Learning with Superquantile Aggregation for Heterogeneous Data
    (journal version), App. C.1 (there 865 + 865 writers).
    """
    path = data_file(folder, "femnist_writers.npz", "FEMNIST images x, y with writer, writer_id, writer_kind")
    arrays = load_arrays(path, ("x", "y", "writer", "writer_id", "writer_kind"))
    x, y, writer = arrays["x"], arrays["y"], arrays["writer"]
    if not len(x) == len(y) == len(writer) or (len(writer) and int(writer.max()) >= len(arrays["writer_id"])):
        raise InvalidData(f"{path}: x, y and writer must have one row per image, and writer must index writer_id.")
    with FileGuard(path, InvalidData, "is no FEMNIST by writer"):
        rows, positions = by_id(writer)
        complete = [(r, int(p)) for r, p in zip(rows, positions, strict=True) if arrays["writer_kind"][int(p)] < 2]
    kept = [complete[k] for k in large_enough([len(r) for r, _ in complete], min_examples, path)]
    with FileGuard(path, InvalidData, "is no FEMNIST by writer"):
        assignment, ids = [r for r, _ in kept], [str(arrays["writer_id"][p]) for _, p in kept]
        images, labels = torch.from_numpy(x), torch.from_numpy(y.astype(np.int64))
        clients = to_clients(images, labels, assignment, ids=ids, scale=-1 / 255, shift=1.0, source=str(path))
    return split(clients, split_by, validation=validation, test=test, seed=seed, name="femnist", classes=62)


def fashion_mnist(
    folder: PathLike | None = None,
    *,
    clients: int = 500,
    partition: str | Partitioner = "dirichlet",
    classes: Sequence[int] | None = None,
    split_by: How = "clients",
    test: float = 0.2,
    validation: float = 0.0,
    seed: int = 0,
) -> FederatedData:
    """Fashion-MNIST, from fashion_mnist.npz: its 70,000 images pooled, dealt out by `partition`, then split.

    The official test part is not kept apart, since a federated test is by client. `classes` keeps some classes only and numbers
    them 0, 1, … in the order given. Agnostic federated learning (Mohri et al. 2019; Tian Li, thesis, section
    4.3.3) is classes=(0, 2, 6), clients=3, partition=functools.partial(by_classes, classes_per_client=1), split_by="examples";
    Ditto (thesis, section 5.6.1) gives each client 5 classes.

    Source: Xiao, Rasul, Vollgraf 2017.
    """
    path = data_file(folder, "fashion_mnist.npz", "arrays x_train, y_train, x_test, y_test")
    arrays = load_arrays(path, ("x_train", "y_train", "x_test", "y_test"))
    with FileGuard(path, InvalidData, "is no Fashion-MNIST"):
        x = np.concatenate([arrays["x_train"], arrays["x_test"]])
        y = np.concatenate([arrays["y_train"], arrays["y_test"]]).astype(np.int64)
        if not len(x) == len(y) == np.count_nonzero((y >= 0) & (y < 10)):
            raise ValueError(f"{len(x)} images need as many labels from 0 to 9")
    kept = tuple(range(10)) if classes is None else tuple(classes)
    rule = "must be at least two different numbers in 0 … 9"
    require(len(set(kept)) == len(kept) >= 2 and set(kept) <= set(range(10)), "classes", rule, classes)
    if classes is not None:
        number = np.full(10, -1)
        number[list(kept)] = np.arange(len(kept))
        rows = np.flatnonzero(number[y] >= 0)
        x, y = x[rows], number[y[rows]]
    labels = torch.from_numpy(y)
    assignment = partitioner(partition)(labels, clients, seed=seed)
    packed = to_clients(torch.from_numpy(x), labels, assignment, scale=1 / 255, source=str(path))
    return split(packed, split_by, validation=validation, test=test, seed=seed, name="fashion_mnist", classes=len(kept))


def omniglot(
    folder: PathLike | None = None, *, split_by: How = "clients", test: float = 0.5, validation: float = 0.0, seed: int = 0
) -> FederatedData:
    """Omniglot's two small background sets, from omniglot_small.npz: one client per drawer and alphabet, 242 characters.

    Each client drew every character of its alphabet once; images are 28 × 28, ink 1. Source: Lake et al. (2015).
    """
    path = data_file(folder, "omniglot_small.npz", "arrays x28, alphabet, character, drawer, alphabet_names")
    arrays = load_arrays(path, ("x28", "alphabet", "character", "drawer", "alphabet_names"))
    with FileGuard(path, InvalidData, "is no Omniglot"):
        names = arrays["alphabet_names"]
        drawn_by = [f"{names[a]}/{d:02d}" for a, d in zip(arrays["alphabet"], arrays["drawer"], strict=True)]
        assignment, ids = by_id(drawn_by)
        y = torch.from_numpy(arrays["character"].astype(np.int64))
        clients = to_clients(torch.from_numpy(arrays["x28"]), y, assignment, ids=ids, scale=1 / 255, source=str(path))
        classes = int(y.max()) + 1
    return split(clients, split_by, validation=validation, test=test, seed=seed, name="omniglot", classes=classes)


def shakespeare(
    folder: PathLike | None = None,
    *,
    length: int = 20,
    step: int = 1,
    min_examples: int = 100,
    alphabet_name: str = "letters",
    validation: float = 0.0,
    test: float = 0.5,
    seed: int = 0,
) -> FederatedData:
    """Next-character prediction by speaking role, from shakespeare_roles.json.gz: windows of `length` characters, and the next.

    Only roles with at least `min_examples` windows are clients.

    A client is a role of a play, its text all it says, lines joined by newlines; a window begins at every `step`-th character.
    The default alphabet gives the 53 classes of the paper, "a–z, A–Z, other": blanks, newlines and punctuation are one class,
    about a quarter of all characters. `alphabet_name="leaf"` keeps them apart (LEAF's 80 characters, and other).
    Windows are bytes, `length` + 1 of them per example with the target. Clients are split, never windows, since
    neighbouring windows overlap. Source: Laguel, Pillutla, Malick, Harchaoui, Device Heterogeneity in
    Federated Learning: A Superquantile Approach, App. C.1.3 (there 544 + 545 roles).
    """
    require(length >= 1, "length", "must be at least 1", length)
    require(step >= 1, "step", "must be at least 1", step)
    characters = alphabet(alphabet_name)
    path = data_file(folder, "shakespeare_roles.json.gz", "roles: a list of {play, role, speeches: [[line, …], …]}")
    texts = dict(_roles(path))
    encoded = [(name, encode_characters(text, characters)) for name, text in texts.items() if len(text) > length]
    # Roles are split before their windows are copied, so that windows are copied once.
    windows = {name: codes.unfold(0, length + 1, step) for name, codes in encoded}  # views, (n, length + 1)
    names = list(windows)
    kept = [names[k] for k in large_enough([len(windows[name]) for name in names], min_examples, path, "role")]
    numbers = torch.arange(len(kept), dtype=torch.uint8 if len(kept) < 256 else torch.int32)
    drawn = split_clients(
        ClientSet(numbers, numbers, torch.arange(len(kept) + 1), tuple(kept)), validation=validation, test=test, seed=seed
    )

    def pack(roles: ClientSet) -> ClientSet:
        return ClientSet.pack(((i, windows[i][:, :-1], windows[i][:, -1]) for i in roles.ids), source=str(path))

    packed = {name: pack(roles) for name, roles in drawn.splits.items()}
    classes = len(characters) + 1
    return FederatedData(packed["train"], packed.get("validation"), packed.get("test"), "shakespeare", classes)


def _roles(path: Path) -> Iterator[tuple[str, str]]:
    """The name and the text of each role."""
    content = load_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("roles"), list):
        raise InvalidData(f"{path}: must be a JSON object whose key 'roles' is a list.")
    seen: set[str] = set()
    for number, role in enumerate(content["roles"]):
        try:
            name = f"{role['play']}/{role['role']}"
            text = "\n".join(line for speech in role["speeches"] for line in speech)
        except (KeyError, TypeError) as error:
            raise InvalidData(f"{path}, role {number}: needs play, role and speeches (lists of lines): {error!r}.") from error
        if name in seen:
            raise InvalidData(f"{path}, role {number}: {name!r} appears twice.")
        seen.add(name)
        yield name, text


def adult(folder: PathLike | None = None) -> FederatedData:
    """Adult census income, from adult.npz: two clients, people with a doctorate and all others; the official test part.

    Features: six numbers, standardised by the training part, and the eight categories one-hot (108 in all); class 1 is an
    income above 50,000. Source: Mohri, Sivek, Suresh, Agnostic Federated Learning (2019); Tian Li, thesis, section 4.3.3.
    """
    path = data_file(folder, "adult.npz", "arrays cat, num, y, is_test, cat_names, categories__education, …")
    arrays = load_arrays(path, ("cat", "cat_names", "categories__education", "is_test", "num", "y"))
    with FileGuard(path, InvalidData, "is no Adult"):
        names = arrays["cat_names"].tolist()
        tested = arrays["is_test"].astype(bool)
        numbers = arrays["num"].astype(np.float64)
        numbers = (numbers - numbers[~tested].mean(0)) / numbers[~tested].std(0)
        columns: list[NDArray[Any]] = [numbers]
        for j, name in enumerate(names):
            choices = len(load_arrays(path, (f"categories__{name}",))[f"categories__{name}"])
            columns.append(arrays["cat"][:, j, None] == np.arange(choices))
        x = torch.from_numpy(np.concatenate(columns, axis=1).astype(np.float32))
        y = torch.from_numpy(arrays["y"].astype(np.int64))
        education = arrays["categories__education"][arrays["cat"][:, names.index("education")]]
        group = np.where(education == "Doctorate", "doctorate", "other")

    def clients(rows: NDArray[np.int64]) -> ClientSet:
        assignment, ids = by_id(group[rows])
        return to_clients(x[rows], y[rows], assignment, ids=ids, source=str(path))

    return FederatedData(clients(np.flatnonzero(~tested)), None, clients(np.flatnonzero(tested)), "adult", 2)


def vehicle(folder: PathLike | None = None, *, validation: float = 0.1, test: float = 0.1, seed: int = 0) -> FederatedData:
    """Vehicle sensors (Duarte and Hu 2004), from vehicle_ditto_train.npz: 23 sensors, 100 standardised features, two classes.

    Split inside clients, as in Tian Li, thesis, section 4.6.2. The file holds the subsample that Ditto trains on (1,860
    examples, 7 to 534 per sensor), so results differ from the papers'.

    Source: Duarte, Hu 2004; the split of Li et al. 2021 (Ditto).
    """
    path = data_file(folder, "vehicle_ditto_train.npz", "arrays x (N, 100), y (−1 / +1), user")
    clients = npz(path, client="user")
    return split(clients, "examples", validation=validation, test=test, seed=seed, name="vehicle", classes=2)


def mocha(folder: PathLike | None = None, *, validation: float = 0.0, test: float = 0.25, seed: int = 0) -> FederatedData:
    """The small set that comes with the code of MOCHA (Smith et al. 2017), from mocha_small.npz: 29 tasks, 9 features.

    Source: Smith et al. 2017 (MOCHA).
    """
    path = data_file(folder, "mocha_small.npz", "arrays x (N, 9), y (−1 / +1), task")
    clients = npz(path, client="task")
    return split(clients, "examples", validation=validation, test=test, seed=seed, name="mocha", classes=2)


_TEXT_FILES = {
    "clothing": ("clothing_reviews_by_product.json.gz", "product", "text", 50),
    "stackoverflow": ("stackoverflow_by_tag.json.gz", "client", "body300", 50),
    "sent140": ("sent140_leaf_testsplit_users.json.gz", "user", "text", 5),
}


def texts(
    name: Literal["clothing", "stackoverflow", "sent140"],
    folder: PathLike | None = None,
    *,
    vectors: WordVectors | None = None,
    features: Features = "tokens",
    length: int = 20,
    min_examples: int | None = None,
    test: float = 0.5,
    seed: int = 0,
) -> FederatedData:
    """Two-class texts by client; clients are split. Words are rows of `vectors`, by default `glove(folder)`.

    "clothing": reviews of women's clothing by product, class 1 = recommended. "stackoverflow": the beginning of questions by
    primary tag, class 1 = still open. "sent140": tweets by user, class 1 = positive, a sample of few tweets per user. The first
    two stand in for Sent140 with 50 tweets or more per user, and results on them must not be called Sent140. `min_examples` is
    50, 50 and 5 unless given. For `features` and `length` see `equipoise.data.from_texts`.

    Source: clothing: Women's E-Commerce Clothing Reviews; stackoverflow: Stack Overflow questions; sent140: Go, Bhayani,
    Huang 2009.
    """
    require(name in _TEXT_FILES, "name", f"must be one of {', '.join(_TEXT_FILES)}", name)
    filename, client_key, text_key, default = _TEXT_FILES[name]
    path = data_file(folder, filename, f"a list of objects with {client_key}, {text_key} and a label")
    records, vectors = _records(path, name, client_key, text_key), glove(folder) if vectors is None else vectors
    least = default if min_examples is None else min_examples
    clients = from_texts(records, vectors, features=features, length=length, min_examples=least, source=str(path))
    return split_clients(clients, test=test, seed=seed, name=name, classes=2)


def _records(path: Path, name: str, client_key: str, text_key: str) -> Iterator[tuple[str, str, int]]:
    """(client id, text, class) of each record of a file."""
    content = load_json(path)
    if not isinstance(content, list):
        raise InvalidData(f"{path}: must be a JSON list of objects.")
    for number, record in enumerate(content):
        try:
            if name == "stackoverflow":
                label = int(record["status"] == "open")
            else:
                label = int(record["recommended" if name == "clothing" else "y"])
            yield str(record[client_key]), str(record[text_key]), label
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidData(f"{path}, record {number}: {type(error).__name__}: {error}.") from error


def imdb(folder: PathLike | None = None, *, words: int = 1000) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """IMDB reviews as word counts, from imdb_bow.npz: (x (50000, words) bytes, y (50000,), vocabulary); class 1 is positive.

    For centralised training; `words` most frequent words are kept. Source: Maas et al. (2011).
    """
    path = data_file(folder, "imdb_bow.npz", "a sparse matrix: data, indices, indptr, with y and vocab")
    arrays = load_arrays(path, ("data", "indices", "indptr", "y", "vocab"))
    total, rows = len(arrays["vocab"]), len(arrays["y"])
    require(1 <= words <= total, "words", f"must lie between 1 and {total}", words)
    with FileGuard(path, InvalidData, "is no IMDB"):
        row = np.repeat(np.arange(rows), np.diff(arrays["indptr"]))
        frequent = arrays["indices"] < words
        x = np.zeros((rows, words), np.uint8)
        x[row[frequent], arrays["indices"][frequent]] = arrays["data"][frequent]
        return torch.from_numpy(x), torch.from_numpy(arrays["y"].astype(np.int64)), tuple(arrays["vocab"][:words].tolist())
