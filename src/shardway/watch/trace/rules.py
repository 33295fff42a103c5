"""What to change, by what a trace shows: one function a finding, each with evidence, a ceiling, the change and a check.

Invariants:
- A ceiling is the time that vanishes if the whole cost does; ceilings overlap and are never added up.
- An operator is named by one finding at most, by the most specific one: the order of `RULES`.
"""

from __future__ import annotations

from shardway.hardware.catalogue import Accelerator
from shardway.watch.advice.findings import Advice
from shardway.watch.trace.evidence import Rule, TraceEvidence
from shardway.watch.trace.operators import Operator
from shardway.watch.trace.quality import CaptureFault
from shardway.watch.trace.rules_host import (
    find_allocator,
    find_data_loader,
    find_exposed_communication,
    find_host_syncs,
    find_launch_bound,
    find_pageable_copies,
)
from shardway.watch.trace.rules_operators import (
    find_attention_backend,
    find_few_tiles,
    find_fp32_products,
    find_misaligned,
    find_needless_casts,
    find_no_matrix_units,
    find_slow_attention,
    find_slow_operator,
    find_unfused,
)
from shardway.watch.trace.rules_training import find_recompute, find_unfused_optimizer
from shardway.watch.trace.timeline import Breakdown, Timeline

RULES: tuple[Rule, ...] = (
    find_data_loader,
    find_allocator,
    find_pageable_copies,
    find_host_syncs,
    find_launch_bound,
    find_exposed_communication,
    find_slow_attention,
    find_misaligned,
    find_no_matrix_units,
    find_few_tiles,
    find_needless_casts,
    find_unfused,
    find_slow_operator,
    find_fp32_products,
    find_attention_backend,
    find_unfused_optimizer,
    find_recompute,
)
"""Specific ones before those that take what is left."""


def advise_on_trace(
    timeline: Timeline,
    breakdown: Breakdown,
    operators: list[Operator],
    part: Accelerator | None,
    multiprocessors: int | None,
    faults: list[CaptureFault],
) -> list[Advice]:
    """What to change, the largest ceiling first; none where the capture cannot be relied on."""
    if any(fault.severity == "fatal" for fault in faults):
        return []
    bad = frozenset(fault.rule for fault in faults if fault.severity == "problem")
    seen = TraceEvidence(timeline, breakdown, operators, part, multiprocessors, bad)
    found = [advice for rule in RULES for advice in rule(seen)]
    return sorted(found, key=lambda advice: -(advice.ceiling_ms or 0.0))
