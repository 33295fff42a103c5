"""How an attempt ends: which of the things that asked for a stop gives it its name.

Invariant: what a person asked for wins over the clock, so that the next attempt of a chain is held. This module must
not look for wishes nor write results.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardway.ranks.agreement import Decision
from shardway.rundir.attempts import BY_SIGNAL, Ending

_BY_SCRIPT = {"deadline": Ending.DEADLINE, "preempted": Ending.PREEMPTED}
"""First word of a stop file that a job script wrote when the scheduler warned it -> how the attempt ends."""


_END_OF_WORD = re.compile(r"[\s:,]+")


@dataclass(frozen=True)
class AttemptEnd:
    """How an attempt ends, and why in a sentence."""

    state: Ending
    reason: str
    failure: str = ""
    """BY_SIGNAL where a signal was obeyed, whose meaning only the scheduler knows."""


def find_end(decision: Decision, stop_file: str | None, deadline: str = "") -> AttemptEnd:
    """The end that all ranks have agreed on, in the words of rank 0.

    `stop_file` is what the stop file says (None: there is none), `deadline` how the clock stands.
    """
    if stop_file is not None:
        if stop_file.startswith(f"{BY_SIGNAL} "):
            return AttemptEnd(Ending.STOPPED, f"a {stop_file}", BY_SIGNAL)
        first, *rest = _END_OF_WORD.split(stop_file.strip(), maxsplit=1)
        if (state := _BY_SCRIPT.get(first.lower())) is not None:
            return AttemptEnd(state, "".join(rest) or stop_file)
        return AttemptEnd(Ending.STOPPED, stop_file or decision.stop_reason)
    if decision.deadline:
        return AttemptEnd(Ending.DEADLINE, deadline or decision.stop_reason)
    return AttemptEnd(Ending.STOPPED, decision.stop_reason, BY_SIGNAL)
