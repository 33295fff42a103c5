"""What PBS says of a job that waits or that has ended, in sentences.

Invariant: words that nobody knows are handed on as they are, never guessed at. This module must not decide what became
of a run: that is what the job wrote, too.
Sources: qstat(1B), PBS Professional Reference Guide "Job Exit Codes"; `reasons.toml` beside this module.
"""

from __future__ import annotations

from shardway.launch.schedulers import explain
from shardway.launch.schedulers.records import Asked, Explanation, JobRecord

_NOTHING = Asked()


def explain_pending(record: JobRecord, asked: Asked = _NOTHING) -> Explanation | None:
    """Why a job waits; `hopeless` where it will never start as it is. None for one that does not wait."""
    return explain.explain_pending(explain.load_rules("pbs/reasons", "pending"), record, asked)


def explain_ending(record: JobRecord, asked: Asked = _NOTHING) -> Explanation | None:
    """How a job ended; None for one that has not."""
    return explain.explain_ending(explain.load_rules("pbs/reasons", "ending"), record, asked)
