"""Numbers and settings of a plan in words: sizes, times, a layout in a sentence.

Invariant: three figures, a unit, and the same words wherever a plan is shown. This module must not see a whole answer.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardway.plan.case import Case
from shardway.units import render_count

GIB, MIB = 2**30, 2**20
_DAY, _HOUR, _MINUTE = 86400.0, 3600.0, 60.0


def gib(size: float) -> str:
    """ "12.3 GiB", or in MiB where that says more."""
    return f"{size / GIB:,.1f} GiB" if size >= 0.1 * GIB else f"{size / MIB:,.1f} MiB"


def duration(seconds: float) -> str:
    """Three figures in the unit that suits: "4.71 s", "2.5 h", "3.02 days"."""
    if seconds < 1:
        return f"{_three(seconds * 1000)} ms"
    for unit, size in (("days", _DAY), ("h", _HOUR), ("min", _MINUTE)):
        if seconds >= 2 * size:
            return f"{_three(seconds / size)} {unit}"
    return f"{_three(seconds)} s"


def amount(value: float) -> str:
    """A number with separators, without digits that nobody believes: 12345.6 -> "12,300"."""
    if abs(value) < 999.5:
        return f"{value:.3g}"
    return f"{round(value, 3 - len(str(round(abs(value))))):,.0f}"


def _three(value: float) -> str:
    return f"{value:,.0f}" if value >= 999.5 else f"{value:#.3g}".rstrip(".")


def count(value: float) -> str:
    """With a suffix for thousands and more: "8.03B"."""
    return render_count(value)


def percent(share: float) -> str:
    """ "41.2 %"."""
    return f"{share * 100:.1f} %"


def describe_layout(case: Case) -> str:
    """Degrees, and how the batch goes through them."""
    return ", ".join([case.degrees.render(), *_describe_passes(case)])


def _describe_passes(case: Case) -> Iterator[str]:
    passes = case.micro_batches
    yield f"micro-batch {case.micro_batch}" + (f" x {passes} a step" if passes > 1 else "")
    if case.degrees.pp > 1:
        stages = f", {case.stages_per_rank} stages a rank" if case.stages_per_rank > 1 else ""
        yield f"schedule {case.schedule}{stages}"
    yield f"recompute {case.recompute}"
    if case.degrees.shards > 1:
        yield _describe_sharing(case)
    if case.offload:
        yield f"{'all' if case.zero == 3 else 'optimizer'} states in the host's memory"


def _describe_sharing(case: Case) -> str:
    if case.zero == 3:
        return "weights sharded" + (" and freed after use" if case.reshard else ", kept gathered within a step")
    return {0: "states copied", 1: "optimizer states sharded", 2: "optimizer states and gradients sharded"}[case.zero]
