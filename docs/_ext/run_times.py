"""How long each lesson and each example of the gallery took when it was executed: times.json beside the built site."""

import json
from pathlib import Path

import gallery_style


def executed(app) -> dict[str, float]:
    """Seconds by page when it was last executed: by the clock for a notebook, of a processor for an example."""
    kept = getattr(app.env, "nb_metadata", {})
    found = {name: about["exec_data"].get("runtime") for name, about in kept.items() if about.get("exec_data")}
    for path in gallery_style.KEPT.glob("plot_*.json"):
        found[f"gallery/{path.stem}"] = json.loads(path.read_text(encoding="utf-8"))
    return {name: round(seconds, 2) for name, seconds in sorted(found.items()) if seconds is not None}


def write(app, error) -> None:
    """Write the times after the pages."""
    if error is None and app.builder.name == "html":
        path = Path(app.outdir).parent / "times.json"
        path.write_text(json.dumps(executed(app), indent=1) + "\n", encoding="utf-8")


def setup(app) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("build-finished", write)
    return {"parallel_read_safe": True}
