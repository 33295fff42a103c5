"""The schedule and the cut of a pipeline in the terms that libraries share.

Invariant: the layers of each stage are those that memory and time were worked out for. This module must not know a
library.
"""

from __future__ import annotations

from shardway.plan.case import Case, Schedule
from shardway.plan.stages import layers_of_stages


def schedule_of(case: Case) -> Schedule:
    """What the stages work by: 1F1B with several stages a rank is the interleaved one, and the other way round."""
    if case.schedule in ("1f1b", "interleaved"):
        return "interleaved" if case.stages_per_rank > 1 else "1f1b"
    return case.schedule


def is_even(case: Case) -> bool:
    """Whether all stages have as many layers."""
    return len(set(layers_of_stages(case))) == 1


def name_schedule(case: Case) -> str:
    """In a sentence: "interleaved with 3 stages a rank"."""
    stages = "one stage" if case.stages_per_rank == 1 else f"{case.stages_per_rank} stages"
    return f"{case.schedule} with {stages} a rank"


def render_layout(case: Case) -> str:
    """One letter a layer, stages apart by bars, embedding and loss at the ends: "Ett|ttt|ttL"."""
    return f"E{'|'.join('t' * count for count in layers_of_stages(case))}L"
