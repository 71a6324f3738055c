"""Small data sets, written to files by NumPy alone, so that every tree reads the same bytes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

SIZES = (14, 1, 23, 5, 40, 2, 17, 8, 32, 11, 3, 26, 20, 35, 29, 38)  # examples of the clients c00 … c15
NAMES = [f"c{k:02d}" for k in range(len(SIZES))]
TABLES = {  # what stands in TOML as "{name}"
    "thirds": {name: f"g{k % 3}" for k, name in enumerate(NAMES)},
    "halves": {name: f"g{k % 2}" for k, name in enumerate(NAMES)},
    "even": dict.fromkeys(NAMES, 2.0),
    "uneven": {name: 1.0 + k % 4 for k, name in enumerate(NAMES)},
    "group sizes": {"g0": 90, "g1": 120, "g2": 94},
}


def write_all(folder: Path) -> None:
    """Write every data set into a new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    x, y, who = _gaussian(6, 4)
    np.savez(folder / "gauss.npz", x=x.astype(np.float32), y=y, client=who)
    np.savez(folder / "double.npz", x=x, y=y, client=who)
    np.savez(folder / "numbers.npz", x=x.astype(np.float32), y=(x @ np.arange(1.0, 7.0)).astype(np.float32), client=who)
    x, y, who = _gaussian(5, 2)
    np.savez(folder / "two.npz", x=x.astype(np.float32), y=y, client=who)
    x, y, who = _gaussian(30, 10, tuple(3 * size + 20 for size in SIZES))
    np.savez(folder / "large.npz", x=x.astype(np.float32), y=y, client=who)
    rng = np.random.default_rng(5)
    who, few = _clients((4, 2, 6, 3, 5, 4, 1, 4)), 29
    y = rng.integers(0, 4, few)
    bright = rng.integers(0, 160, (few, 28, 28)) + 24 * y[:, None, None]
    np.savez(folder / "images.npz", x=bright.astype(np.uint8), y=y, client=who)
    np.savez(folder / "small_images.npz", x=bright[:, None, ::3, ::3].astype(np.uint8), y=y, client=who)
    who = _clients(SIZES[:10])
    y = rng.integers(0, 4, len(who))
    tokens = (rng.integers(0, 12, (len(who), 7)) + y[:, None] * (rng.random((len(who), 7)) < 0.3)) % 12
    np.savez(folder / "tokens.npz", x=tokens, y=y, client=who)
    _tables(folder, rng)
    _leaf(folder / "leaf", rng)


def _clients(sizes: tuple[int, ...]) -> np.ndarray:
    return np.repeat(NAMES[: len(sizes)], sizes)


def _gaussian(features: int, classes: int, sizes: tuple[int, ...] = SIZES) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs around a centre per class; which classes a client has differs by client."""
    rng, who = np.random.default_rng(features), _clients(sizes)
    centres = rng.standard_normal((classes, features))
    shift = np.repeat(np.arange(len(sizes)), sizes)
    y = (shift % classes + (rng.random(len(who)) < 0.6) * rng.integers(0, classes, len(who))) % classes
    return centres[y] + 0.8 * rng.standard_normal((len(who), features)), y, who


def _tables(folder: Path, rng: np.random.Generator) -> None:
    """Tables with missing values, a text column, a date and a boolean: a class or a number is predicted."""
    who = _clients(SIZES)
    lines = ["site,age,ward,admitted,smokes,dose,outcome,days"]
    for k, site in enumerate(who):
        age = "" if k % 11 == 3 else f"{rng.normal(50 + k % 7, 12):.2f}"
        ward = "" if k % 13 == 5 else ("north", "south", "east")[int(rng.integers(0, 3))]
        day = f"2023-{1 + int(rng.integers(0, 12)):02d}-{1 + int(rng.integers(0, 28)):02d}"
        dose, smokes = f"{rng.gamma(2.0):.3f}", ("yes", "no")[int(rng.random() < 0.6)]
        outcome = ("well", "ill", "worse")[int(min(2, rng.poisson(0.3 + 0.4 * (smokes == "yes"))))]
        lines.append(f"{site},{age},{ward},{day},{smokes},{dose},{outcome},{rng.gamma(3.0) + (ward == 'east'):.3f}")
    text = "\n".join(lines) + "\n"
    (folder / "table.csv").write_text(text, encoding="utf-8")
    (folder / "comma.csv").write_text(text.replace(",", ";").replace(".", ","), encoding="utf-8")


def _leaf(folder: Path, rng: np.random.Generator) -> None:
    for split, names in (("train", NAMES[:9]), ("test", NAMES[:9])):
        data = {
            name: {"x": rng.normal(size=(3 + k % 5, 4)).round(3).tolist(), "y": [int(c) for c in rng.integers(0, 3, 3 + k % 5)]}
            for k, name in enumerate(names)
        }
        table = {"users": names, "num_samples": [len(each["y"]) for each in data.values()], "user_data": data}
        (folder / split).mkdir(parents=True, exist_ok=True)
        (folder / split / "all.json").write_text(json.dumps(table), encoding="utf-8")
