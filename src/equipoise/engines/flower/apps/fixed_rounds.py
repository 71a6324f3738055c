"""Under differential privacy the noise is calibrated for a number of rounds: a run gets no more of them."""

from __future__ import annotations

from pathlib import Path

from equipoise.core.plain_text import parse_toml
from equipoise.errors import CheckpointError
from equipoise.experiment.run_files import RunFolder

WITHOUT_NOISE = (None, "none", "secure_aggregation")  # names of privacy in config.toml that leave the rounds open


def refuse_more_rounds(folder: Path, rounds: int) -> None:
    """Refuse more rounds for a run in this folder whose noise was calibrated for fewer; nothing is changed."""
    try:
        config = parse_toml(RunFolder(folder).config)
        privacy, begun_with = config["algorithm"].get("privacy"), int(config["train"]["rounds"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return  # not begun yet, or damaged, which whoever goes on with the run is told
    name = privacy.get("name") if isinstance(privacy, dict) else privacy
    if name not in WITHOUT_NOISE and rounds > begun_with:
        raise CheckpointError(
            f"The run in {folder} has differential privacy. Its noise and ε are calibrated for {begun_with} rounds, so it "
            f"cannot have {rounds}. Begin a new run in another folder, with rounds={rounds}. What both runs reveal adds up."
        )
