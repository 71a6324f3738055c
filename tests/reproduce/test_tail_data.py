"""EMNIST with one thing changed at a time, on a small file of writers; and the figures of its table."""

import numpy as np
import pytest
import torch

from equipoise.reproduce.scores import tail_errors
from equipoise.reproduce.tail_data import emnist_varied


@pytest.fixture
def folder(tmp_path):
    drawn, writers, each = np.random.default_rng(0), 12, 110
    y = np.tile(np.arange(62), 30)[: writers * each].astype(np.uint8)
    x = drawn.integers(0, 256, (writers * each, 28, 28)).astype(np.uint8)
    arrays = {"x": x, "y": y, "writer": np.repeat(np.arange(writers), each).astype(np.uint16)}
    arrays |= {"writer_id": np.array([f"w{k}" for k in range(writers)]), "writer_kind": np.zeros(writers, np.uint8)}
    np.savez(tmp_path / "femnist_writers.npz", **arrays)
    return tmp_path


def test_each_option_changes_one_thing(folder):
    plain = emnist_varied(folder, 0)
    fewer = emnist_varied(folder, 0, writers=2)
    assert len(fewer.train) == 2
    assert set(fewer.train.ids) <= set(plain.train.ids)
    assert fewer.test.ids == plain.test.ids
    assert torch.equal(fewer.test.x, plain.test.x)

    scaled = emnist_varied(folder, 0, over_mean=True).train
    assert scaled.inputs(slice(None), torch.float32).mean() == pytest.approx(1.0, rel=1e-4)

    mixed = emnist_varied(folder, 0, shuffled=1.0).train
    assert torch.equal(mixed.sizes, plain.train.sizes)
    assert torch.equal(mixed.y.sort().values, plain.train.y.sort().values)
    assert not torch.equal(mixed.y, plain.train.y)

    few = emnist_varied(folder, 0, classes=0.25)
    for clients in (few.train, few.test):
        assert all(len(set(clients.y[a:b].tolist())) <= 16 for a, b in zip(clients.offsets, clients.offsets[1:], strict=False))

    short = emnist_varied(folder, 0, test_examples=30)
    assert short.test.sizes.tolist() == [30] * len(short.test)
    assert torch.equal(short.train.x, plain.train.x)


def test_a_share_of_writers_is_inverted_in_training_and_in_test(folder):
    plain, turned = emnist_varied(folder, 1), emnist_varied(folder, 1, inverted=0.5)
    flipped = 0
    for before, after in ((plain.train, turned.train), (plain.test, turned.test)):
        for k in range(len(before)):
            rows = slice(int(before.offsets[k]), int(before.offsets[k + 1]))
            same, inverse = torch.equal(before.x[rows], after.x[rows]), torch.equal(255 - before.x[rows], after.x[rows])
            assert same != inverse
            flipped += inverse
    assert 0 < flipped < len(plain.train) + len(plain.test)


def test_figures_of_the_tail():
    """Errors 0.1 … 1.0 of ten clients with 25 images: ours is the 9th, interpolation goes a tenth of the way to the 10th."""

    class Rows:
        error, size = torch.arange(1, 11) / 10, torch.full((10,), 25)

        def where(self, split):
            return self

    class Run:
        class result:  # noqa: N801
            clients = Rows()

    found = tail_errors(Run)
    assert found["percentile_90"] == pytest.approx(90)
    assert found["interpolated"] == pytest.approx(91)
    assert found["by_examples"] == pytest.approx(90)
    assert found["worst_half"] == pytest.approx(80)
    assert found["sampling"] == pytest.approx(100 * (0.55 * 0.45 / 25) ** 0.5)
