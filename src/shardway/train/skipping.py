"""What is told of data that a run leaves out: by `data.skip`, or by itself after a spike.

Invariant: it only tells; which positions are left out is decided by `data.skips` alone. This module must not change how
a run goes on.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardway.rundir.left_out import SkippedRange
from shardway.train.counters import Counters
from shardway.train.session import Session


def report_skipped(session: Session, before: Counters, after: Counters, own: Sequence[SkippedRange] = ()) -> None:
    """An event where the step between these counters has left positions out; `own` are those of the run itself."""
    left_out = (after.position - before.position) - (after.samples - before.samples)
    if left_out:
        lists = {"data.skip": session.resolved.values.data.skip, "guard.on_spike": [each.span for each in own]}
        reach = (before.position, after.position)
        who = [name for name, spans in lists.items() if any(_meet(span, reach) for span in spans)]
        reason = (
            f"{' and '.join(who)} left out {left_out} samples between positions {before.position} and {after.position}"
        )
        session.recorder.event("data_skipped", step=after.step, samples=left_out, reason=reason)


def _meet(one: Sequence[int], other: Sequence[int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def report_late_spans(session: Session, counters: Counters) -> None:
    """An event where a span that is new lies behind a run that goes on, at least in part: it comes too late."""
    before, now = session.changes.get("data.skip", ([], []))
    late = [span for span in now if span not in before and span[0] < counters.position]
    if late and counters.step:
        reason = (
            f"data.skip: {', '.join(map(str, late))} begins before position {counters.position}, where the run goes "
            "on; what was trained on before that stays learnt. To jump over it, move the checkpoints after it away"
        )
        session.recorder.event("skip_too_late", step=counters.step, spans=late, reason=reason)
