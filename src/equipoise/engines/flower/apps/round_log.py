"""What the operator of a run reads in Flower's log: a line for each round, and who is missing from it."""

from __future__ import annotations

import logging
import math

from equipoise.algorithm import Algorithm
from equipoise.client_table import ClientTable
from equipoise.engines.flower.apps.node_keys import RETIRED
from equipoise.engines.flower.apps.run_status import moment
from equipoise.observers import Evaluation
from equipoise.report.notices import absent_notices
from equipoise.runs.crowded_tail import SEVERAL, crowded_tail
from equipoise.types import Observer, RoundReport

log = logging.getLogger("flwr")  # Flower shows it to whoever watches the run


class LogRounds(Observer):
    """One line per round in Flower's log, which is the operator's."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm
        self._rounds: list[RoundReport] = []  # of which nothing was said yet
        self._told = False  # that the tail holds too many

    def trained(self, report: RoundReport) -> int:
        """How many clients have trained: under differential privacy a report counts those that were asked."""
        sums = self.algorithm.traits.privacy.sums_alone
        asked = self.algorithm.private and (sums or report.loss_from == "work")
        return max(0, report.trained - len(report.missing)) if asked else report.trained

    def on_round(self, report: RoundReport) -> None:
        """Log the round, and a warning for each client that it went on without; losses that nobody knows are left out."""
        known = {"loss": report.loss, "worst 10 %": report.tail_loss}
        losses = [f"{name} {value:.4f}" for name, value in known.items() if not math.isnan(value)]
        noisy = " by noisy counts" * self.algorithm.private
        tail = [] if report.tail_share is None else [f"{100 * report.tail_share:.0f} % in the tail{noisy}"]
        text = f"Round {report.round + 1}: {', '.join([*losses, *tail, f'{self.trained(report)} trained'])}"
        text += f", {report.bytes_sent / 1e3:.1f} kB out, {report.bytes_received / 1e3:.1f} kB in"
        log.info("%s %s", moment(), text)
        if report.skipped:
            log.warning("Round %d is skipped, and leaves the model as it is: %s.", report.round + 1, report.skipped)
        for why in report.failed_tries:
            log.warning("Round %d was tried again: %s", report.round + 1, why)
        for client in report.rejected:
            log.warning("Round %d goes on without the update of %s, which is of no use.", report.round + 1, client)
        for client, why in report.missing.items():
            if why != RETIRED:  # of which the log has told
                log.warning("Round %d goes on without %s, who %s.", report.round + 1, client, why)
        self._rounds = [*self._rounds, report][-SEVERAL:]
        for text in () if self._told else crowded_tail(self.algorithm, self._rounds):
            self._told = True
            log.warning("%s", text)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Log the figures of an evaluation, and who is not in them: means over other clients do not compare with these."""
        if said := figures_of(evaluation.clients, names=self.algorithm.privacy is None):
            log.info("Evaluation after round %d: %s.", evaluation.round, said)
        table, told = evaluation.clients, {RETIRED}  # of which the log has told
        lacking = [split for split, absent in table.not_evaluated.items() if set(absent.values()) - told]
        for split in [each for each in ("test", "validation", "train") if each in lacking][:1]:
            log.warning("Evaluation after round %d: %s", evaluation.round, " ".join(map(str, absent_notices(table, split))))


def figures_of(table: ClientTable, *, names: bool) -> str:
    """The mean error over the clients to test on, or else to train on; with `names` also the client with the largest error.

    Where secure sums hide single clients, the table has the mean alone. Empty if nothing is known.
    """
    for split in ("test", "train"):
        rows = zip(table.client, table.split, table.error.tolist(), strict=True)
        errors = {client: error for client, where, error in rows if where == split and math.isfinite(error)}
        if errors:
            mean = f"mean {split} error {sum(errors.values()) / len(errors):.4g}"
            worst = max(errors, key=lambda client: errors[client])
            return f"{mean}, worst {worst} {errors[worst]:.4g}" if names and len(errors) > 1 else mean
    return ""
