"""What the rules look at, and how they make an advice of it.

Invariants: an operator is named by one finding at most; what costs less than `WORTH` of a step is no advice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from shardway.hardware.catalogue import Accelerator
from shardway.watch.advice.findings import Advice
from shardway.watch.trace.operators import Operator
from shardway.watch.trace.timeline import Breakdown, Timeline

WORTH = 0.03
"""Share of a step from which a cost is advice."""

PROBLEM = 0.10


@dataclass
class TraceEvidence:
    """What the rules look at. `taken`: operators that a finding has named."""

    timeline: Timeline
    breakdown: Breakdown
    operators: list[Operator]
    part: Accelerator | None
    multiprocessors: int | None
    faults: frozenset[str] = frozenset()
    taken: set[tuple[str, str, tuple[str, ...]]] = field(default_factory=set)

    @property
    def step_ms(self) -> float:
        return self.timeline.step_ms

    @property
    def trusts_idle(self) -> bool:
        """Whether idle time in the trace is idle time of the device (of the process, on a CPU)."""
        if not self.timeline.on_device:
            return "no-kernels" not in self.faults
        return not self.faults & {"graph-replay", "graph-capture", "lost-kernels", "clock-skew", "no-kernels"}

    def is_worth(self, ms: float) -> bool:
        return ms >= WORTH * self.step_ms

    def take(self, operators: Iterable[Operator]) -> None:
        self.taken |= {(each.name, each.render_shapes(), each.dtypes) for each in operators}

    def free(self) -> list[Operator]:
        return [each for each in self.operators if (each.name, each.render_shapes(), each.dtypes) not in self.taken]

    def advise(self, rule: str, evidence: str, do: str, check: str, ms: float | None) -> Advice:
        percent = 100 * ms / self.step_ms if ms is not None and self.step_ms > 0 else None
        severity: Literal["problem", "hint"] = "problem" if percent is not None and percent >= 100 * PROBLEM else "hint"
        return Advice(
            rule,
            evidence,
            do,
            check,
            None if ms is None else round(ms, 4),
            None if percent is None else round(percent, 2),
            severity,
        )


Rule = Callable[[TraceEvidence], Iterator[Advice]]
"""One finding: none, or one advice."""
