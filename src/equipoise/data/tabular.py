"""Tabular data for centralised experiments (tilted losses, fair PCA): one table of examples, no clients."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from equipoise.core.files import PathLike
from equipoise.data.datasets.data_files import as_tensor, data_file, load_arrays, targets
from equipoise.errors import InvalidData

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"


@dataclass(frozen=True, eq=False)
class Table:
    """Inputs x (N, F) with their names and targets y (N,); `group` (N,) and `is_test` (N,) where the data have them."""

    x: Tensor
    y: Tensor
    names: tuple[str, ...]  # of the F inputs
    group: Tensor | None = None
    is_test: Tensor | None = None

    def __post_init__(self) -> None:
        for what, values in (("inputs", self.x), ("targets", self.y)):
            rows = (~torch.isfinite(values.double().flatten(1) if values.dim() > 1 else values.double()[:, None])).any(1)
            if bool(rows.any()):
                raise InvalidData(f"row {int(rows.nonzero()[0])} of the {what} holds NaN or infinity. Repair or drop it.")
        if len(self.x) != len(self.y) or self.x.shape[1] != len(self.names):
            raise InvalidData(
                f"a table of shape {tuple(self.x.shape)} cannot have {len(self.y)} targets, {len(self.names)} names."
            )


def _x_y_names(path: Path) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """The arrays `x`, `y` and `names` of a file."""
    arrays = load_arrays(path, ("x", "y", "names"))
    x, y = as_tensor(arrays["x"], f"{path}: 'x'"), targets(arrays["y"], f"{path}: 'y'")
    return x, y, tuple(arrays["names"].tolist())


def credit_default(folder: PathLike | None = None) -> Table:
    """Default of credit card clients, from credit_default.npz: 30,000 × 23, class 1 is a default; as measured, not scaled.

    Source: Yeh, Lien 2009 (UCI).
    """
    x, y, names = _x_y_names(data_file(folder, "credit_default.npz", "x (N, 23), y (N,) and names"))
    return Table(x.float(), y.to(torch.int64), names)


def california_housing(folder: PathLike | None = None) -> Table:
    """California housing, from california_housing.npz: 20,640 × 8, the median house value in 100,000 dollars.

    Source: Pace, Barry 1997.
    """
    x, y, names = _x_y_names(data_file(folder, "california_housing.npz", "x (N, 8), y (N,) and names"))
    return Table(x, y, names[: x.shape[1]])  # the file's last name is the target's


def abalone(folder: PathLike | None = None) -> Table:
    """Abalone, from abalone.npz: sex as three columns (F, I, M) and seven measures; the target is the number of rings.

    Source: Nash et al. 1994 (UCI).
    """
    path = data_file(folder, "abalone.npz", "sex (N,), x (N, 7), rings (N,) and names")
    arrays = load_arrays(path, ("sex", "x", "rings", "names"))
    kinds = np.array(["F", "I", "M"])
    if strange := sorted(set(arrays["sex"].tolist()) - set(kinds.tolist())):
        raise InvalidData(f"{path}: sex must be F, I or M, found {strange[0]!r}.")
    sex = torch.from_numpy((arrays["sex"][:, None] == kinds).astype(np.float32))
    x = torch.cat([sex, as_tensor(arrays["x"], f"{path}: 'x'")], 1)
    names = (*(f"sex_{kind}" for kind in kinds.tolist()), *arrays["names"].tolist())
    return Table(x, torch.from_numpy(arrays["rings"].astype(np.float32)), names)


def drug_qsar(folder: PathLike | None = None) -> Table:
    """Drug discovery, from drug_qsar.npz: 410 binary features, a number to predict; `is_test` marks the 1,000 test rows.

    Source: the robust regression experiments of Li et al. 2021 (TERM).
    """
    path = data_file(folder, "drug_qsar.npz", "x_train, y_train, x_test, y_test")
    arrays = load_arrays(path, ("x_train", "y_train", "x_test", "y_test"))
    x = torch.cat([as_tensor(arrays[name], f"{path}: {name!r}") for name in ("x_train", "x_test")])
    y = torch.cat([targets(arrays[name], f"{path}: {name!r}") for name in ("y_train", "y_test")])
    is_test = torch.arange(len(x)) >= len(arrays["x_train"])
    return Table(x, y, tuple(f"feature-{i}" for i in range(x.shape[1])), is_test=is_test)


def hiv1(folder: PathLike | None = None) -> Table:
    """HIV-1 protease cleavage, from hiv1_cleavage.npz: 8 residues of 20 amino acids, as 160 columns; class 1 is cleaved.

    `group` is the source set of a row: 746, 1625, impens, schilling.

    Source: Rögnvaldsson, You, Garwicz 2015 (UCI); the class-imbalance experiments of Li et al. 2021 (TERM).
    """
    path = data_file(folder, "hiv1_cleavage.npz", "seq (N,) of 8 letters, y (N,), dataset (N,)")
    arrays = load_arrays(path, ("seq", "y", "dataset"))
    for row, peptide in enumerate(arrays["seq"].tolist()):
        if len(peptide) != 8 or set(peptide) - set(AMINO_ACIDS):
            raise InvalidData(f"{path}: row {row} must be 8 of the letters {AMINO_ACIDS}, but is {peptide!r}.")
    letters = np.array([list(peptide) for peptide in arrays["seq"].tolist()])  # (N, 8)
    x = (letters[:, :, None] == np.array(list(AMINO_ACIDS))).reshape(len(letters), -1).astype(np.float32)
    names = tuple(f"{position + 1}{acid}" for position in range(8) for acid in AMINO_ACIDS)
    group = torch.from_numpy(arrays["dataset"].astype(np.int64))
    return Table(torch.from_numpy(x), targets(arrays["y"], f"{path}: 'y'"), names, group=group)
