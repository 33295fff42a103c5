"""What is told of data that a run leaves out (`data.skip`).

Invariant: it only tells; which positions are left out is decided by `data.skips` alone. This module must not change how
a run goes on.
"""

from __future__ import annotations

from shardway.train.counters import Counters
from shardway.train.session import Session


def tell_skipped(session: Session, before: Counters, after: Counters) -> None:
    """An event where the step between these counters has left positions out."""
    left_out = (after.position - before.position) - (after.samples - before.samples)
    if left_out:
        reason = f"data.skip left out {left_out} samples between positions {before.position} and {after.position}"
        session.recorder.event("data_skipped", step=after.step, samples=left_out, reason=reason)


def tell_late_spans(session: Session, counters: Counters) -> None:
    """An event where a span that is new lies behind a run that goes on, at least in part: it comes too late."""
    before, now = session.changes.get("data.skip", ([], []))
    late = [span for span in now if span not in before and span[0] < counters.position]
    if late and counters.step:
        reason = (
            f"data.skip: {', '.join(map(str, late))} begins before position {counters.position}, where the run goes "
            "on; what was trained on before that stays learnt. To jump over it, move the checkpoints after it away"
        )
        session.recorder.event("skip_too_late", step=counters.step, spans=late, reason=reason)
