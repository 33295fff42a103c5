"""How all ranks come to the same decision between two steps.

Invariant: every rank puts its own wishes into one small vector, the vector is summed over the ranks, and each reads
the same decision out of the sum; no rank acts on a wish of its own. It must not know where wishes come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

WISH_SLOTS = 7
"""Numbers that one rank's wishes take up in the vector."""


@dataclass(frozen=True)
class Wishes:
    """What one rank wants to happen after the current step.

    `deadline`: a stop, since the wall-time is about to end. `void`: the step must not count, since a stop ended this
    rank's wait for its batch. `finish`: the script says that the run is done. `log`: the script has logged values.
    """

    stop_signal: bool = False
    stop_file: bool = False
    save: bool = False
    deadline: bool = False
    void: bool = False
    finish: bool = False
    log: bool = False

    def as_numbers(self) -> list[float]:
        """One slot a wish: 1.0 where this rank has it."""
        wishes = (self.stop_signal, self.stop_file, self.save, self.deadline, self.void, self.finish, self.log)
        return [float(wish) for wish in wishes]


@dataclass(frozen=True)
class Decision:
    """What all ranks do after the current step; `stop_reason` is empty where they go on.

    `deadline`: nothing but the end of the wall-time asked for the stop. `void`: the step did not count. `finish`: the
    run is done with it, whatever steps are left. `log`: values that scripts have logged are to be joined.
    """

    stop_reason: str = ""
    save: bool = False
    deadline: bool = False
    void: bool = False
    finish: bool = False
    log: bool = False

    def also(self, other: Decision) -> Decision:
        """What follows from this decision and a later one of the same step."""
        stop = self if self.stop_reason or not other.stop_reason else other
        return replace(
            stop,
            save=self.save or other.save,
            finish=self.finish or other.finish,
            log=self.log or other.log,
        )


def read_decision(summed: Sequence[float]) -> Decision:
    """The decision in the sum of all ranks' wishes."""
    signals, files, saves, deadlines, voids, finishes, logs = summed
    reasons = []
    if signals:
        reasons.append("a signal asked for a stop")
    if files:
        reasons.append("the stop file asked for a stop")
    alone = bool(deadlines) and not reasons
    if deadlines:
        reasons.append("the wall-time is about to end")
    if voids and not reasons and not finishes:
        reasons.append("a rank gave up waiting for its data")
    return Decision(
        " and ".join(reasons), save=saves > 0, deadline=alone, void=voids > 0, finish=finishes > 0, log=logs > 0
    )
