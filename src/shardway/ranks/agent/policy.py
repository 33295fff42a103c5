"""Whether the ranks start again after a failure: a pure function of what has failed so far.

Invariant: a run that makes progress starts again however often it fails, one that makes none does not for ever; what a
person has to change is never tried again. Progress is a checkpoint that is newer than all before, nothing else. A
checkpoint on the disks of the nodes may be the fault itself, so a run does not end before it has begun from another.
This module must not start anything nor wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SAME_TWICE = 2
WITHOUT_PROGRESS = 3
"""How many failures in a row between two checkpoints end the run, whatever they were."""


FROM_NODES = 2
"""How many starts from one checkpoint on the disks of the nodes may fail; the next one leaves these out."""


@dataclass(frozen=True)
class RepeatedFailure:
    """A failure of the ranks: a line that is the same for the same failure, and the newest complete checkpoint's step.

    `hopeless`: a person has to change something first, such as a run file. `from_nodes`: the ranks had begun from that
    checkpoint, and it stood on the disks of the nodes alone.
    """

    signature: str
    saved_step: int
    hopeless: bool = False
    from_nodes: bool = False


@dataclass(frozen=True)
class RestartDecision:
    """Whether the ranks start again; if not, why."""

    restart: bool
    reason: str = ""


def decide(failures: Sequence[RepeatedFailure], most: int | None = None) -> RestartDecision:
    """What follows from all failures of this start so far, the newest last; `most` restarts are allowed (None: any)."""
    newest = failures[-1]
    if newest.hopeless:
        return RestartDecision(False)
    if most is not None and len(failures) > most:
        return RestartDecision(False, "" if most == 0 else f"run.max_restarts allows {most}")
    stuck = [failure for failure in failures if failure.saved_step >= newest.saved_step]
    where = f"with step {newest.saved_step} as the last that was saved" if newest.saved_step else "with nothing saved"
    from_nodes = [failure for failure in stuck if failure.from_nodes]
    if newest.from_nodes and len(from_nodes) <= FROM_NODES:
        return RestartDecision(True)  # it may be that checkpoint: the third start does not begin from it
    if [failure.signature for failure in stuck].count(newest.signature) >= SAME_TWICE:
        return RestartDecision(False, f"the same failure came twice {where}")
    if len(stuck) - min(len(from_nodes), FROM_NODES) >= WITHOUT_PROGRESS:
        return RestartDecision(False, f"{len(stuck)} failures came one after another {where}")
    return RestartDecision(True)
