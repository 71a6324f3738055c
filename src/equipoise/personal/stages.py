"""Models of clients' own as a stage of a round."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from equipoise.core.update_checks import as_local_work
from equipoise.risk.stages import Losses
from equipoise.types import PersonalWork
from equipoise.types.round_contracts import Ask, Kept, Stage, View


@dataclass(frozen=True, eq=False)
class OwnLosses(Losses):
    """The risk sees the losses of clients' own models."""

    work: PersonalWork
    pure = False

    def question(self, view: View) -> Ask:
        """Each client's mean loss over its training data, at its own model."""
        state, model = view.state.personal, view.state.model
        return Ask("own", model, view.cohort, partial(self.work.losses, state, model, view.cohort))


@dataclass(frozen=True, eq=False)
class OwnModels(Stage):
    """Every client of the cohort works on its own model, also one that has no weight in the shared model."""

    work: PersonalWork

    name: ClassVar[str] = "personal"

    def send(self, view: View) -> Generator[Ask, Any, Kept | None]:
        """What clients send, if it is not the work of the rule; and the models after their work."""
        state, model = view.state.personal, view.state.model
        if not len(view.cohort):
            return None
        state = yield Ask("own", model, view.cohort, partial(self.work.work, state, model, view.cohort, view.rule))
        if not len(view.workers):
            return Kept(None, state)
        sent = yield Ask("own", model, view.workers, partial(self.work.updates, state, model, view.workers, view.rule))
        if sent is None:
            return Kept(None, state)
        losses = view.workers.columns.get("losses")
        return Kept(as_local_work(sent.updates, view.state.params, losses, carried=sent.carried), state)

    def commit(self, state: Any) -> Any:
        """Write the models."""
        return self.work.commit(state)
