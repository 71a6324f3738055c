"""Draws when training on the tail helps, from the runs of `equipoise reproduce emnist-tail` in a folder.

python benchmarks/tail_plot.py RESULTS/emnist-tail-paper docs/images/when-the-tail-helps.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean, stdev

import matplotlib.pyplot as plt

DEMO = {"mean": 0.2, "percentile_90": -3.6}  # `make demo`: mean 23.4 → 23.6, 90th percentile 55.8 → 52.2, five seeds
FIGURES = {"mean": ("mean error", "#8a8a8a"), "percentile_90": ("90th percentile", "#1f5fa8")}


def changes(folder: Path) -> dict[str, dict[str, list[float]]]:
    """By factor, the mean error and 90th percentile of Δ-FL 0.5 minus FedAvg's, seed by seed."""
    runs: dict[str, dict[int, dict[str, float]]] = {}
    for path in sorted((folder / "runs").glob("*.json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        if "figures" in run:
            runs.setdefault(run["method"], {})[run["seed"]] = run["figures"]
    factors = {name.removesuffix(", FedAvg") for name in runs if name.endswith(", FedAvg")}
    found = {}
    for factor in sorted(factors):
        plain, tail = runs[f"{factor}, FedAvg"], runs.get(f"{factor}, Δ-FL 0.5", {})
        both = sorted(plain.keys() & tail.keys())
        found[factor] = {f: [tail[s][f] - plain[s][f] for s in both] for f in ("mean", "percentile_90")}
    return found


def main() -> None:
    """Draw the figure."""
    found = {name: each for name, each in changes(Path(sys.argv[1])).items() if "inverted" not in name}
    names = sorted(found, key=lambda name: mean(found[name]["percentile_90"]), reverse=True)
    figure, axes = plt.subplots(figsize=(7.2, 5.0))
    for place, (key, (label, colour)) in enumerate(FIGURES.items()):
        rows = [row + 0.15 * (2 * place - 1) for row in range(len(names))]
        values = [found[name][key] for name in names]
        middle, spread = [mean(each) for each in values], [stdev(each) for each in values]
        axes.errorbar(middle, rows, xerr=spread, fmt="o", markersize=4, color=colour, capsize=2, label=label)
        axes.plot(DEMO[key], len(names) + 0.15 * (2 * place - 1), "s", markersize=5, color=colour)
    axes.set_yticks(range(len(names) + 1), [*names, "label-shift data (the demo)"], fontsize=8)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel("Δ-FL 0.5 minus FedAvg, points of test error: left of the line the tail has gained", fontsize=9)
    axes.legend(fontsize=8, loc="lower left")
    figure.tight_layout()
    figure.savefig(sys.argv[2], dpi=110)


if __name__ == "__main__":
    main()
