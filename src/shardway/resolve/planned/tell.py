"""What a plan says in the origin of a value.

Invariant: one line without a period. This module must not choose.
"""

from __future__ import annotations

from shardway.plan.estimate import Estimate


def format_gib(count_bytes: float) -> str:
    """Bytes for a person: "71.2 GiB"."""
    return f"{count_bytes / 2**30:,.1f} GiB"


def describe_need(missed: Estimate) -> str:
    """What does not fit: "81.2 GiB of an accelerator, 6.3 GiB more than the 74.9 GiB that a plan may use"."""
    peak, machine = missed.peak, missed.machine
    need, usable, where = peak.device, missed.usable_bytes, "an accelerator"
    if need <= usable and machine.host_bytes is not None:
        need = machine.bytes_of_node(peak.host, missed.case.degrees.world)
        usable = machine.host_bytes * peak.overheads.usable
        where = "a node's own memory"
    return f"{format_gib(need)} of {where}, {format_gib(need - usable)} more than the {format_gib(usable)} that a plan may use"


def describe_memory(estimate: Estimate) -> str:
    """What the fullest device holds: "31.2 of 71.2 GiB by the plan"."""
    return f"{estimate.peak.device / 2**30:,.1f} of {format_gib(estimate.usable_bytes)} by the plan"
