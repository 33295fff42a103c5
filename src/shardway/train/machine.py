"""The states of the loop and the order in which they follow each other, as a pure function.

    RESTORE ─► STEP ─► SAVE ─► VALIDATE ─► STEP ...        (SAVE and VALIDATE only when due)
       └─────────┴───────┴─────────┴─► STOP ─► END         (asked to stop: save first, do not validate)
                                   └─► FINISH ─► END       (the last step: save and validate first)

    VALIDATE ─► SAVE ─► STEP ...                           (the result asks for a checkpoint: it is one of the best)

    STEP or RESTORE ─► GO_BACK ─► as after RESTORE         (a spike: nothing of it is validated or saved)

A save comes before the validation of its step, so that an error in a validation costs no work. A validation that a stop
broke off is followed by the save of the stop. One that a stop left out is due again after RESTORE; a run that owes one
stops rather than finishes.

Invariant: every phase that is entered on one rank is entered on all, since the facts it follows from are agreed.
This module must not do anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class LoopPhase(Enum):
    """What the loop does now."""

    RESTORE = auto()
    STEP = auto()
    GO_BACK = auto()
    VALIDATE = auto()
    SAVE = auto()
    STOP = auto()
    FINISH = auto()
    END = auto()


@dataclass(frozen=True)
class Facts:
    """What the next phase follows from; the same on every rank.

    `validate_due`: a validation belongs after the step that was done last, and was not made. `goes_back`: the last
    steps were a spike that the run goes back before. `save_owed`: the run directory lacks the step that the run went on
    from. `result_save_due`: the validation of this step asks for a checkpoint of it in the run directory.
    """

    done: bool
    stop: bool
    validate_due: bool
    save_due: bool
    goes_back: bool = False
    save_owed: bool = False
    result_save_due: bool = False


def next_phase(phase: LoopPhase, facts: Facts) -> LoopPhase:
    """The phase after `phase`."""
    if phase in (LoopPhase.STOP, LoopPhase.FINISH, LoopPhase.END):
        return LoopPhase.END
    if phase in (LoopPhase.RESTORE, LoopPhase.STEP) and facts.goes_back:
        return LoopPhase.GO_BACK
    if (phase is LoopPhase.STEP or (phase is LoopPhase.VALIDATE and facts.stop)) and facts.save_due:
        return LoopPhase.SAVE
    if phase in (LoopPhase.RESTORE, LoopPhase.GO_BACK, LoopPhase.VALIDATE) and facts.result_save_due:
        return LoopPhase.SAVE
    if phase is LoopPhase.RESTORE and facts.save_owed and (facts.done or facts.stop):
        return LoopPhase.SAVE
    if phase is not LoopPhase.VALIDATE and facts.validate_due and not facts.stop:
        return LoopPhase.VALIDATE
    if facts.stop and not (facts.done and not facts.validate_due):
        return LoopPhase.STOP
    return LoopPhase.FINISH if facts.done else LoopPhase.STEP
