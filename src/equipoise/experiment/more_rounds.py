"""More rounds for the run of a folder: `equipoise run --resume DIR --set train.rounds=200`.

Cohorts and batches depend on the seed and the round alone. A run of 100 rounds that goes on to 200 therefore ends as a run of
200 rounds does, bit for bit. A private run is refused: its noise is made for its number of rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from equipoise.core.files import write_atomically
from equipoise.errors import ConfigError
from equipoise.experiment import toml
from equipoise.experiment.config import RunConfig
from equipoise.experiment.config_tables import read_toml
from equipoise.experiment.run_files import ORDER, RunFolder
from equipoise.types import Observer

if TYPE_CHECKING:
    from equipoise.observers import Run

KEY = "train.rounds"
HOW = f"equipoise run --resume DIR --set {KEY}=200"


def refuse_other_settings(settings: Sequence[str]) -> None:
    """Refuse settings of a run that goes on, other than its number of rounds."""
    if any(setting.partition("=")[0].strip() != KEY for setting in settings):
        raise ConfigError(f"--resume takes all it needs from its folder; --set can only change {KEY} there: {HOW}")


def refuse_no_more(folder: RunFolder, config: RunConfig) -> None:
    """Refuse a folder whose run cannot have as many rounds as a configuration says.

    As many as before are no change of a run that has not ended: the same command goes on after Ctrl-C.
    """
    before, after = read_toml(folder.config)["train"]["rounds"], config.train.rounds
    if after == before and not folder.finished:
        return
    if after <= before:
        raise ConfigError(f"{KEY} must be more than the {before} rounds of the run in {folder.path}, but is {after}.")
    if config.algorithm().private:
        raise ConfigError(
            f"The run in {folder.path} is private, and its noise and its ε are made for {before} rounds, not for {after}. "
            "Start another run with as many rounds; on the same data its ε adds to that of this one."
        )
    order = folder.path.parent / ORDER
    if order.exists() and folder.path.resolve().name in order.read_text(encoding="utf-8").splitlines():
        fix = f"Run the study in another folder: equipoise compare STUDY.toml --set {KEY}={after} --out DIR"
        raise ConfigError(f"{folder.path} is a run of a study, whose runs all have {before} rounds. {fix}")
    if folder.finished and not folder.checkpoint.exists():
        raise ConfigError(f"{folder.path} has no checkpoint any more, so that its run cannot go on. Run it anew: --out DIR.")


class MoreRounds(Observer):
    """Writes the new number of rounds into the folder of a run, once its checkpoint has been accepted.

    The log of rounds comes first, and has lost its end then: whatever happens next, the folder holds a run that can go on.
    """

    def __init__(self, folder: RunFolder, rounds: int) -> None:
        self.folder, self.rounds = folder, rounds

    def on_start(self, run: Run) -> None:
        """The run goes on."""
        table = read_toml(self.folder.config)
        if table["train"]["rounds"] == self.rounds:  # a family begins once for each member
            return
        table["train"]["rounds"] = self.rounds
        write_atomically(self.folder.config, toml.dumps(table).encode())
