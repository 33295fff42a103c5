"""How an attempt ends: which of the things that asked for a stop gives it its name.

Invariant: what a person asked for wins over the clock, so that the next attempt of a chain is held. This module must
not look for wishes nor write results.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardway.ranks.agreement import Decision
from shardway.rundir.attempts import BY_SIGNAL, Ending

_BY_SCRIPT = {"deadline": Ending.DEADLINE, "preempted": Ending.PREEMPTED}
"""First word of a stop file that a job script wrote when the scheduler warned it -> how the attempt ends."""


@dataclass(frozen=True)
class End:
    """How an attempt ends, and why in a sentence."""

    state: Ending
    reason: str
    failure: str = ""
    """BY_SIGNAL where a signal was obeyed, whose meaning only the scheduler knows."""


def read_words(words: str) -> Ending:
    """What the words in a stop file ask for: a stop, or that of a job script that was warned."""
    first = words.replace(":", " ").replace(",", " ").split()[:1]
    return _BY_SCRIPT.get(first[0].lower() if first else "", Ending.STOPPED)


def find_end(decision: Decision, stop_file: str | None, deadline: str = "") -> End:
    """The end that all ranks have agreed on, in the words of rank 0.

    `stop_file` is what the stop file says (None: there is none), `deadline` how the clock stands.
    """
    if stop_file is not None:
        if stop_file.startswith(f"{BY_SIGNAL} "):
            return End(Ending.STOPPED, f"a {stop_file}", BY_SIGNAL)
        state, (_, _, rest) = read_words(stop_file), stop_file.partition(" ")
        return End(state, (rest if state in _BY_SCRIPT.values() else "") or stop_file or decision.stop_reason)
    if decision.deadline:
        return End(Ending.DEADLINE, deadline or decision.stop_reason)
    return End(Ending.STOPPED, decision.stop_reason, BY_SIGNAL)
