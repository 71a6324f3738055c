"""Tables from small files written here, from the real ones where they are, and from broken ones."""

import numpy as np
import pytest
import torch

from equipoise.data import tabular
from equipoise.errors import InvalidData


def test_small_files(tmp_path):
    np.savez(tmp_path / "credit_default.npz", x=np.array([[1, 2], [3, 4]], np.int32), y=np.uint8([0, 1]), names=["a", "b"])
    credit = tabular.credit_default(tmp_path)
    assert credit.x.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert credit.y.tolist() == [0, 1]

    np.savez(
        tmp_path / "california_housing.npz", x=np.ones((2, 2), np.float32), y=np.float32([1, 2]), names=["a", "b", "target"]
    )
    assert tabular.california_housing(tmp_path).names == ("a", "b")

    np.savez(tmp_path / "abalone.npz", sex=["M", "F"], x=np.float32([[0.5], [0.7]]), rings=np.int16([9, 4]), names=["length"])
    snails = tabular.abalone(tmp_path)
    torch.testing.assert_close(snails.x, torch.tensor([[0.0, 0.0, 1.0, 0.5], [1.0, 0.0, 0.0, 0.7]]))
    assert snails.names == ("sex_F", "sex_I", "sex_M", "length")
    assert snails.y.tolist() == [9.0, 4.0]

    rows = {"x_train": np.zeros((3, 2), "f4"), "y_train": np.zeros(3, "f4"), "x_test": np.ones((1, 2), "f4")}
    np.savez(tmp_path / "drug_qsar.npz", **rows, y_test=np.ones(1, "f4"))
    assert tabular.drug_qsar(tmp_path).is_test.tolist() == [False, False, False, True]

    np.savez(tmp_path / "hiv1_cleavage.npz", seq=["AAAAAAAC", "YAAAAAAA"], y=np.int8([-1, 1]), dataset=np.uint8([0, 3]))
    hiv = tabular.hiv1(tmp_path)
    assert hiv.x.shape == (2, 160)
    assert hiv.x.sum(1).tolist() == [8.0, 8.0]
    assert next(name for name, on in zip(hiv.names, hiv.x[1].tolist(), strict=True) if on) == "1Y"
    assert (hiv.y.tolist(), hiv.group.tolist()) == ([0, 1], [0, 3])


def test_broken_files_are_named(tmp_path):
    np.savez(tmp_path / "hiv1_cleavage.npz", seq=["AAAAAAAA", "AAAXAAAA"], y=np.int8([-1, 1]), dataset=np.uint8([0, 0]))
    with pytest.raises(InvalidData, match=r"hiv1_cleavage\.npz: row 1 must be 8 of the letters"):
        tabular.hiv1(tmp_path)
    np.savez(tmp_path / "abalone.npz", sex=["M", "Q"], x=np.zeros((2, 1), "f4"), rings=np.int16([1, 2]), names=["length"])
    with pytest.raises(InvalidData, match=r"sex must be F, I or M, found 'Q'"):
        tabular.abalone(tmp_path)
    np.savez(tmp_path / "california_housing.npz", x=np.float32([[1.0], [np.nan]]), y=np.float32([1, 2]), names=["a", "t"])
    with pytest.raises(InvalidData, match="row 1 of the inputs holds NaN"):
        tabular.california_housing(tmp_path)
    with pytest.raises(InvalidData, match=r"credit_default\.npz"):
        tabular.credit_default(tmp_path)


def test_the_real_files(real_data):
    shapes = {
        "credit_default": (30000, 23),
        "california_housing": (20640, 8),
        "abalone": (4177, 10),
        "drug_qsar": (4085, 410),
        "hiv1": (6590, 160),
    }
    for name, shape in shapes.items():
        assert tuple(getattr(tabular, name)(real_data).x.shape) == shape
    assert float(tabular.credit_default(real_data).y.double().mean()) == pytest.approx(0.2212, abs=1e-4)
    assert int(tabular.hiv1(real_data).y.sum()) == 1360
    assert int(tabular.drug_qsar(real_data).is_test.sum()) == 1000
