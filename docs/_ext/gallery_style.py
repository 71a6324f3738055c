"""How figures of the gallery look; the scripts themselves run without it."""

import matplotlib as mpl
import torch

STYLE = {
    "figure.figsize": (7.0, 4.2), "figure.dpi": 100, "savefig.dpi": 100, "font.size": 11, "axes.titlesize": 12,
    "axes.titleweight": "bold", "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
    "axes.axisbelow": True, "legend.frameon": False, "figure.constrained_layout.use": True, "lines.linewidth": 2.0,
    "axes.prop_cycle": "cycler('color', ['3b6ea8', 'd1602b', '3a8f5c', '8d5aa8', 'b58900', '5f6b73', 'c0447b', '2aa5b5'])",
}  # fmt: skip


def reset(gallery_conf, fname, when) -> None:
    """Before every example: set the style, and torch to one thread."""
    if when == "before":
        mpl.rcParams.update(STYLE)
        torch.set_num_threads(1)
