"""How figures of the gallery look; the scripts themselves run without it."""

import json
import os
from pathlib import Path

KEPT = Path(__file__).parents[1] / "_cache" / "processor"  # one file for each example, as of when it was last executed

STYLE = {
    "figure.figsize": (7.0, 4.2), "figure.dpi": 100, "savefig.dpi": 100, "font.size": 11, "axes.titlesize": 12,
    "axes.titleweight": "bold", "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
    "axes.axisbelow": True, "legend.frameon": False, "figure.constrained_layout.use": True, "lines.linewidth": 2.0,
    "axes.prop_cycle": None,
}  # fmt: skip
COLOURS = ["#3b6ea8", "#d1602b", "#3a8f5c", "#8d5aa8", "#b58900", "#5f6b73", "#c0447b", "#2aa5b5"]


STARTED: dict[str, float] = {}  # seconds of this process and its children before an example


def processor_seconds() -> float:
    """Seconds of processors that this process and its finished children have used."""
    return sum(os.times()[:4])


def reset(gallery_conf, fname, when) -> None:
    """Before every example: set the style, and torch to one thread. After it: keep the processor seconds that it took."""
    if when == "after":
        path = KEPT / f"{Path(fname).stem}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(processor_seconds() - STARTED.pop(fname)), encoding="utf-8")
        return
    import matplotlib as mpl
    import torch
    from cycler import cycler

    mpl.rcParams.update(STYLE | {"axes.prop_cycle": cycler(color=COLOURS)})
    torch.set_num_threads(1)
    STARTED[fname] = processor_seconds()
