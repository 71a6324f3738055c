"""Loaders on the real files, where there are any: set EQUIPOISE_DATA to their folder."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise import data as d


def needs(filename):
    folder = os.environ.get("EQUIPOISE_DATA")
    missing = not folder or not (Path(folder) / filename).is_file()
    return pytest.mark.skipif(missing, reason=f"EQUIPOISE_DATA names no folder with {filename}")


@needs("adult.npz")
def test_the_sample_of_adult_by_country_is_made_so():
    """Ten people of each country with at least ten; "?" is an empty cell."""
    arrays = np.load(Path(os.environ["EQUIPOISE_DATA"]) / "adult.npz")
    number = dict(zip(arrays["num_names"].tolist(), arrays["num"].T, strict=True))
    columns = {name.replace("-", "_"): number[name] for name in ("age", "hours-per-week", "capital-gain")}
    for place, name in enumerate(arrays["cat_names"].tolist()):
        columns[name.replace("-", "_")] = arrays[f"categories__{name}"][arrays["cat"][:, place]]
    country = columns["country"] = columns.pop("native_country")
    columns["income"] = np.where(arrays["y"] == 1, ">50K", "<=50K")
    draw, rows = np.random.default_rng(0), []
    for each in np.unique(country):
        born = np.flatnonzero(country == each)
        if each != "?" and len(born) >= 10:
            rows += sorted(draw.choice(born, 10, replace=False))
    lines = [",".join(columns), *(",".join(str(values[row]) for values in columns.values()).replace("?", "") for row in rows)]
    sample = Path(__file__).parents[2] / "examples" / "adult-by-country.csv"
    assert sample.read_text(encoding="utf-8").splitlines() == lines


@needs("femnist_writers.npz")
def test_femnist():
    data = d.femnist(seed=0)
    assert len(data.train) + len(data.test) == 359
    assert abs(len(data.train) - len(data.test)) == 1
    assert min(int(part.sizes.min()) for part in data.splits.values()) >= 100
    assert data.classes == 62
    x, _ = data.train.client(at=0)
    assert x.shape[1:] == (28, 28)
    assert 0.02 < x.mean() < 0.3  # ink is 1 and rare
    assert set(d.femnist(seed=1).train.ids) != set(data.train.ids)


@needs("shakespeare_roles.json.gz")
def test_shakespeare():
    data = d.shakespeare()
    assert len(data.train) + len(data.test) == 1115
    assert data.train.x.shape[1] == 20
    assert int(max(part.y.max() for part in data.splits.values())) == 52
    other = (data.train.y == 52).float().mean()
    assert 0.2 < other < 0.27
    # Each window is the one before it, moved by one character.
    rows = data.train.rows(3)
    x, y = data.train.x[rows], data.train.y[rows]
    assert torch.equal(x[1:, :-1], x[:-1, 1:])
    assert torch.equal(x[1:, -1], y[:-1])


@needs("fashion_mnist.npz")
def test_fashion_mnist():
    data = d.fashion_mnist(clients=100)
    assert len(data.train.x) + len(data.test.x) == 70_000
    assert (len(data.train), len(data.test)) == (80, 20)


@needs("adult.npz")
def test_adult():
    data = d.adult()
    assert data.train.sizes.tolist() == [413, 32_148]
    assert data.test.sizes.tolist() == [181, 16_100]
    assert data.features == 108
    rich = [float(data.train.client(at=k)[1].float().mean()) for k in range(2)]
    assert rich[0] > 0.7 > 0.3 > rich[1]


@needs("vehicle_ditto_train.npz")
def test_vehicle():
    data = d.vehicle()
    assert len(data.train) == 23
    assert sum(len(part.x) for part in data.splits.values()) == 1860


@needs("mocha_small.npz")
def test_mocha():
    data = d.mocha()
    assert len(data.train) == 29
    assert float(torch.cat([data.train.y, data.test.y]).float().mean()) == pytest.approx(0.061, abs=0.002)


@needs("omniglot_small.npz")
def test_omniglot():
    data = d.omniglot()
    assert len(data.train) + len(data.test) == 160
    assert data.classes == 242


@needs("glove6B_50d_subset.npz")
def test_glove_and_texts():
    vectors = d.glove()
    assert vectors.vectors.shape == (69_620, 50)
    king, queen, bread = (vectors.vectors[vectors.rows[w]] for w in ("king", "queen", "bread"))
    assert torch.cosine_similarity(king, queen, 0) > torch.cosine_similarity(king, bread, 0) + 0.2
    for name, clients in (("clothing", 98), ("sent140", 86)):
        data = d.texts(name, vectors=vectors)
        assert len(data.train) + len(data.test) == clients
        assert (data.train.x == 1).float().mean() < 0.06  # almost all words are known


@needs("imdb_bow.npz")
def test_imdb():
    x, y, vocabulary = d.imdb(words=500)
    assert x.shape == (50_000, 500)
    assert y.float().mean() == 0.5
    best = vocabulary.index("best")
    assert y[x[:, best] > 0].float().mean() > 0.55
