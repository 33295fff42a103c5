"""What is found wrong with a run, as values: advice, and a verdict for each accelerator.

Invariant: every piece of advice has its evidence (where, and the numbers), what to change, and how to check that it
helped. Ceilings are upper bounds of what one change can bring; they overlap, so they are never added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from shardway.units import render_clock


@dataclass(frozen=True)
class Advice:
    """One finding. `rule`: its stable name. `ceiling_ms`: at most so much of a step would be saved, `ceiling_percent`
    of the step's time; None where no time can be given. `severity`: a problem costs a tenth or more, or work."""

    rule: str
    evidence: str
    do: str
    check: str
    ceiling_ms: float | None = None
    ceiling_percent: float | None = None
    severity: Literal["problem", "hint"] = "problem"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class GpuVerdict:
    """How one accelerator was used in one start of the samplers: what to change next follows from the newest, while
    totals of a run are over all. `use_mean` in percent, None where it was not sampled. `verdict`: "used", "low",
    "idle", "waiting", "throttled" or "unknown". `start` of `starts`, from 1: the one that is judged; `since` and
    `until`: its first and last sample (Unix seconds)."""

    host: str
    index: int
    use_mean: float | None
    verdict: str
    use_max: float | None = None
    memory_max_bytes: float | None = None
    power_mean_w: float | None = None
    energy_j: float | None = None
    start: int = 1
    starts: int = 1
    since: float | None = None
    until: float | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def describe_coverage(verdicts: Sequence[GpuVerdict]) -> str:
    """ "start 3 of 3, 9:25": which start verdicts are about; "" where there is one."""
    first = next(iter(verdicts), None)
    if first is None or first.starts < 2:
        return ""
    spans = [each.until - each.since for each in verdicts if each.since is not None and each.until is not None]
    return f"start {first.start} of {first.starts}" + (f", {render_clock(max(spans))}" if spans else "")
