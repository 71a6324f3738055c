"""Data that need no files: Synthetic(α, β), label shift, mean estimation, and scikit-learn's digits.

Everything is drawn from (seed, client id), so a client's examples do not change when more clients are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from equipoise.core.rng import generator
from equipoise.data.clients.client_set import ClientSet
from equipoise.data.clients.federated_data import FederatedData
from equipoise.data.clients.splits import How, split, split_examples
from equipoise.data.datasets.class_law import CLASSES, FLIPPED, INFORMATIVE, NOISE, published_law, random_law
from equipoise.data.partition import Partitioner, partitioner, to_clients
from equipoise.errors import require


def _require_at_least(values: dict[str, float], least: float) -> None:
    """Refuse parameters that are not finite numbers of at least `least`."""
    for name, value in values.items():
        require(bool(np.isfinite(value)) and value >= least, name, f"must be a finite number, at least {least}", value)


def synthetic(
    alpha: float = 1.0,
    beta: float = 1.0,
    *,
    clients: int = 30,
    iid: bool = False,
    features: int = 60,
    classes: int = 10,
    validation: float = 0.0,
    test: float = 0.1,
    seed: int = 0,
) -> FederatedData:
    """Synthetic(α, β): a linear classifier and an input law of its own for each client, split inside clients.

    For client k: u_k ~ N(0, α²), W_k and b_k have entries N(u_k, 1), B_k ~ N(0, β²), v_k has entries N(B_k, 1); x ~ N(v_k,
    Σ) with Σ_jj = j^(−1.2), y = argmax(W_k x + b_k), and n_k = ⌊exp(N(4, 2²))⌋ + 50 examples. β sets how much the inputs
    differ. α should set how much the models differ, but u_k adds u_k (Σ_j x_j + 1) to the score of every class, so labels
    do not depend on α. Models differ between clients at α = 0, too. The parameter exists because the name of the data
    contains it. α and β are standard deviations, as in the published code. The text reads as if they were variances, which
    is the same at 0 and 1. With `iid=True` α and β are unused: one W, b with entries N(0, 1) for all, and x ~ N(0, Σ).

    `alpha` is α and `beta` β. `clients`, `features` and `classes` are numbers of them. `validation` and `test` are the shares
    of each client's examples that are set aside. `seed` decides all draws. `iid` gives all clients one law.

    Sources: Tian Li, thesis, section 3.7.1 (30 clients) and section 4.6.1 (100 clients); Li et al., Federated Optimization in
    Heterogeneous Networks (FedProx), section 5.1. The sizes printed in the thesis, Table 4.4 (12,697 examples, standard
    deviation 73 for 100 clients) cannot come from the stated law, whose mean size is about 450.

    >>> synthetic(0.5, 0.5, clients=3, seed=1).train
    ClientSet(3 clients, 422 examples of shape (60,))
    """
    _require_at_least({"alpha": alpha, "beta": beta}, 0)
    _require_at_least({"clients": clients, "features": features}, 1)
    _require_at_least({"classes": classes}, 2)
    shared = generator(seed, "synthetic model")
    common = shared.normal(size=(classes, features)), shared.normal(size=classes)
    deviation = np.arange(1, features + 1) ** -0.6
    triples = []
    for k in range(clients):
        name = f"client-{k}"
        rng = generator(seed, "synthetic", client=name)
        size = int(rng.lognormal(4.0, 2.0)) + 50
        centre, shift = alpha * rng.normal(), beta * rng.normal()
        W, b = rng.normal(centre, 1.0, (classes, features)), rng.normal(centre, 1.0, classes)
        v = rng.normal(shift, 1.0, features)
        if iid:
            (W, b), v = common, np.zeros(features)
        x = v + deviation * rng.normal(size=(size, features))
        triples.append((name, torch.from_numpy(x).float(), torch.from_numpy((x @ W.T + b).argmax(1))))
    name = "synthetic-iid" if iid else f"synthetic({alpha:g},{beta:g})"
    packed = ClientSet.pack(triples, source=name)
    return split_examples(packed, validation=validation, test=test, seed=seed, name=name, classes=classes)


def label_shift(
    *,
    train_clients: int = 2500,
    validation_clients: int = 500,
    test_clients: int = 500,
    examples: int = 100,
    train_concentration: float = 0.5,
    test_concentration: float = 0.01,
    geometry: Literal["published", "seeded"] = "published",
    seed: int = 0,
) -> FederatedData:
    """Ten classes in 20 dimensions whose proportions differ by client: Dir(0.5) in training, Dir(0.01) when tested.

    Client i draws label proportions q_i ~ Dir(concentration · 1), `examples` labels from q_i, and an input for each from the
    law of that class, which is the same for all clients. Test clients hold almost a single class each.

    The class laws are those of scikit-learn's `make_classification(n_features=20, n_informative=15, n_redundant=2,
    n_classes=10, n_clusters_per_class=1, class_sep=5.0, hypercube=False)`, see `equipoise.data.datasets.class_law.ClassLaw`.
    The paper's text says covariance I, but that function gives each class its own random covariance. The published call made
    the data, so this function follows the call. It also follows the default `flip_y=0.01`: with probability 0.01 an input
    comes from a uniformly random class instead of its label's class. (Given the label, `make_classification` draws examples
    in the same way, and the labels of client i still follow q_i.) Inputs are not shifted or scaled, as in the defaults of
    `make_classification`.

    `geometry` "published" takes the class laws of the published call (random_state=2345), and `seed` draws clients and
    their examples. "seeded" draws the class laws from `seed`, too. Their difficulty then varies much between seeds.
    Examples are drawn afresh, and not from a pool of 500,000 as in the paper.

    `train_clients`, `validation_clients` and `test_clients` are numbers of clients. `train_concentration` and
    `test_concentration` are the parameters of the Dirichlet laws of label proportions; `test_concentration` is also that of
    validation clients.

    Source: Pillutla, Laguel, Malick, Harchaoui, Federated Learning with Superquantile Aggregation for Heterogeneous Data
    (journal version), App. D.2.

    >>> label_shift(train_clients=5, validation_clients=0, test_clients=2, examples=10)
    FederatedData('label_shift', train: 5 clients / 50 examples, test: 2 clients / 20 examples)
    """
    _require_at_least({"train_clients": train_clients, "examples": examples}, 1)
    _require_at_least({"validation_clients": validation_clients, "test_clients": test_clients}, 0)
    for name, value in (("train_concentration", train_concentration), ("test_concentration", test_concentration)):
        require(np.isfinite(value) and value > 0, name, "must be positive", value)
    require(geometry in ("seeded", "published"), "geometry", 'must be "seeded" or "published"', geometry)
    law = published_law() if geometry == "published" else random_law(generator(seed, "label shift classes"))

    def clients(split: str, count: int, concentration: float) -> ClientSet:
        ids = tuple(f"{split}-{i}" for i in range(count))
        labels = np.empty((count, examples), np.int64)
        origins = np.empty((count, examples), np.int64)
        normals = np.empty((count, examples, INFORMATIVE + NOISE))
        for i, name in enumerate(ids):
            rng = generator(seed, "label shift", client=name)
            proportions = rng.dirichlet(np.full(CLASSES, float(concentration)))
            labels[i] = rng.choice(CLASSES, size=examples, p=proportions)
            flipped = rng.random(examples) < FLIPPED
            origins[i] = np.where(flipped, rng.integers(CLASSES, size=examples), labels[i])
            rng.standard_normal(out=normals[i])
        x = law.transform(origins.reshape(-1), normals.reshape(count * examples, -1))
        offsets = torch.arange(0, (count + 1) * examples, examples)
        return ClientSet(torch.from_numpy(x), torch.from_numpy(labels.reshape(-1)), offsets, ids, source="label_shift")

    train = clients("train", train_clients, train_concentration)
    validation = clients("validation", validation_clients, test_concentration) if validation_clients else None
    test = clients("test", test_clients, test_concentration) if test_clients else None
    return FederatedData(train, validation, test, "label_shift", CLASSES)


def gaussian_means(
    means: Sequence[Sequence[float]] | Tensor = ((0.0, 0.0), (2.0, 0.0), (0.8, 1.6)),
    *,
    examples: int = 100,
    exact: bool = False,
    seed: int = 0,
) -> FederatedData:
    """Mean estimation: client k holds draws of N(μ_k, I). Inputs and targets are the same tensor; there is no test part.

    The default means form an acute triangle.

    With `exact` = True all clients share one noise sample with mean 0 and covariance I to rounding error (so examples >
    dimension is needed). Then F_k(w) = ‖w − μ_k‖² + const for the squared loss, with one constant, and answers are known. For
    three means in the plane the superquantile with tail 2/3 is least at the midpoint of the longest side if the triangle is
    right or obtuse, else at the circumcentre. With tail 1 it is least at the centroid.

    `means` (n, d) are the μ_k, one per client; `examples` is the number of each client's examples, and `seed` decides the
    draws.

    Source: Laguel, Pillutla, Malick, Harchaoui, Device Heterogeneity in Federated Learning: A Superquantile Approach,
    section 3, which says midpoint for every triangle.

    >>> data = gaussian_means([[0.0, 0.0], [4.0, 0.0], [0.0, 3.0]], examples=50, exact=True)
    >>> torch.allclose(data.train.client(at=1)[0].mean(0), torch.tensor([4.0, 0.0]), atol=1e-6)
    True
    """
    centres = torch.as_tensor(means, dtype=torch.float64)
    require(
        centres.dim() == 2 and centres.numel() > 0, "means", "must be a list of points, one per client", tuple(centres.shape)
    )
    require(bool(torch.isfinite(centres).all()), "means", "must be finite", means)
    clients, dimension = centres.shape
    least = dimension + 1 if exact else 1
    fix = "With exact=True the noise needs more examples than dimensions." if exact else ""
    require(examples >= least, "examples", f"must be at least {least}", examples, fix)
    ids = tuple(f"client-{k}" for k in range(clients))

    def normals(client: str | None) -> Tensor:
        return torch.from_numpy(generator(seed, "gaussian means", client=client).normal(size=(examples, dimension)))

    if exact:
        noise = normals(None)
        # Orthonormal columns, scaled: (1/n) zᵀz = I, and centring comes first so that they are orthogonal to 1.
        noise = torch.linalg.qr(noise - noise.mean(0)).Q * examples**0.5
        x = (centres[:, None, :] + noise).reshape(-1, dimension)
    else:
        x = torch.cat([centre + normals(name) for centre, name in zip(centres, ids, strict=True)])
    train = ClientSet(x, x, torch.arange(0, (clients + 1) * examples, examples), ids, source="gaussian_means")
    return FederatedData(train, name="gaussian_means")


def digits(
    *,
    clients: int = 60,
    partition: str | Partitioner = "dirichlet",
    validation: float = 0.0,
    test: float = 1 / 3,
    split_by: How = "clients",
    seed: int = 0,
) -> FederatedData:
    """scikit-learn's 1,797 handwritten digits (8 × 8 pixels), dealt out to clients; a third of the clients is kept for test.

    `split_by` "clients" sets whole clients aside, and "examples" a part of every client's examples, as personal models need.

    `partition` is a name ("dirichlet", "classes", "power_law", "iid") or a function of `equipoise.data.partition` with its
    options set, such as functools.partial(dirichlet, concentration=0.1).

    `clients` is the number of clients. `validation` and `test` are the shares of the clients, or of each client's examples,
    that are set aside. `seed` decides the partition and the split.

    Source: the UCI digits test set (Alpaydin, Kaynak 1998), as in scikit-learn.

    >>> data = digits(clients=6, partition="iid", test=1 / 3)
    >>> len(data.train), len(data.test), len(data.train.client(at=0)[1]) in (299, 300)  # 1797/6 = 299.5
    (4, 2, True)
    """
    from sklearn.datasets import load_digits

    raw = load_digits()
    x, y = torch.from_numpy(raw.images.astype(np.uint8)), torch.from_numpy(raw.target.astype(np.int64))
    packed = to_clients(x, y, partitioner(partition)(y, clients, seed=seed), scale=1 / 16, source="digits")
    return split(packed, split_by, validation=validation, test=test, seed=seed, name="digits", classes=10)
