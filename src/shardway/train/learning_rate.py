"""The learning rate that the loop writes: by the schedule of the run file, where that is wished for, and by no other.

Invariant: a learning rate that a script has set is never overwritten; where run file and script both set it, the run
ends with a sentence. This module must not know a formula.
"""

from __future__ import annotations

from typing import Any

from shardway.errors import UserError, list_some
from shardway.train.loop_plan import LoopParts, LoopPlan
from shardway.train.schedule import lr_factor
from shardway.train.session import Session


class ScheduledLR:
    """The learning rates of all groups of a run."""

    def __init__(self, session: Session, plan: LoopPlan, parts: LoopParts) -> None:
        self._session, self._plan, self._parts = session, plan, parts
        self._peaks: list[float] = []
        self._written: list[float] = []

    def begin(self) -> None:
        """Take what the groups have now as their peaks. Raises UserError where the script has schedulers besides."""
        if not self._plan.writes_lr:
            return
        self._peaks = [float(group["lr"]) for group in self._groups()]
        if self._parts.held is not None and self._parts.held.schedulers:
            raise UserError(
                f"{self._describe_key()} sets the learning rate at each step, and the script has made a scheduler for "
                f"it ({list_some(list(self._parts.held.schedulers), 6)}).\n"
                "  To do: leave one of the two out: the scheduler of the script, or optim.schedule."
            )

    def write(self, step: int) -> None:
        """Set the learning rate of the step that follows `step` finished ones; nothing where it is the script's."""
        if not self._plan.writes_lr:
            return
        self.check()
        factor = lr_factor(self._plan.schedule, self._plan.course, step)
        self._written = [peak * factor for peak in self._peaks]
        for group, lr in zip(self._groups(), self._written, strict=True):
            group["lr"] = lr

    def check(self) -> None:
        """Raise UserError where the script has changed what was written."""
        if self._parts.held is None or not self._written:
            return
        found = [group["lr"] for group in self._groups()]
        if found == self._written:
            return
        changed = [pair for pair in zip(found, self._written, strict=False) if pair[0] != pair[1]]
        what, instead = "added a parameter group, whose lr", ""
        if changed:
            what, instead = f"set lr to {float(changed[0][0]):g}, and", f" (to {changed[0][1]:g} the last time)"
        raise UserError(
            f"the script has {what} {self._describe_key()} sets it at each step{instead}.\n"
            "  To do: leave one of the two out: the schedule of the script, or optim.schedule."
        )

    def _groups(self) -> list[dict[str, Any]]:
        return [group for engine in self._parts.engines for group in engine.groups]

    def _describe_key(self) -> str:
        resolved = self._session.resolved
        return f"optim.schedule = {resolved.values.optim.schedule!r} ({resolved.origins['optim.schedule']})"
