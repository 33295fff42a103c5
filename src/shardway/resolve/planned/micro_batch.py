"""The fastest micro-batch that fits, where everything else of a run is settled.

Invariant: a size is at most a rank's share. This module must not choose anything else, nor know of pipelines.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardway.errors import UserError
from shardway.plan.case import divisors
from shardway.plan.estimate import estimate
from shardway.plan.machine import Machine
from shardway.plan.search.best import NEAR
from shardway.plan.shapes.measured import Shape
from shardway.resolve.planned.case import case_of, shape_of_run
from shardway.resolve.planned.tell import describe_memory, describe_need
from shardway.runfile.schema import RunFile

LARGEST = 4096
"""No size above it is looked at: a device is busy long before."""


@dataclass(frozen=True)
class Sized:
    """A micro-batch, in samples, and why."""

    samples: int
    reason: str


def fastest_micro_batch(values: RunFile, share: int, machine: Machine, hf: Shape | None) -> Sized | None:
    """Of the sizes that cut a rank's share evenly, and of powers of two, the fastest; of equal ones that with least
    memory. None for a model or a format that the planner cannot price."""
    try:
        shape = shape_of_run(values, hf)
        cases = [case_of(values, shape, size) for size in list_sizes(share)]
        priced = [estimate(case, machine) for case in cases]
    except UserError:
        return None
    fitting = [each for each in priced if each.fits]
    if not fitting:
        return Sized(1, f"even one sample does not fit by the plan: it needs {describe_need(priced[0])}")
    quickest = min(each.time.seconds for each in fitting)
    near = [each for each in fitting if each.time.seconds <= quickest * (1 + NEAR)]
    best = min(near, key=lambda each: each.peak.device)
    told = f"the fastest of {len(fitting)} sizes that fit {machine.accelerator.name}; {describe_memory(best)}"
    return Sized(best.case.micro_batch, told)


def list_sizes(share: int) -> list[int]:
    """Sizes worth a look, smallest first."""
    most = min(share, LARGEST)
    even = {size for size in divisors(share) if size <= most} if share <= LARGEST**2 else set()
    return sorted(even | {2**power for power in range(most.bit_length())})
