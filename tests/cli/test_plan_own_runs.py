"""`shardway plan` beside runs of our own engine on one H200 (2026-11-26, docs/numbers.md). Nothing is fitted to it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import Shardway

from outside import modules_of

with modules_of("bench/planner"):
    from own_runs import CASES, COMMON

H200 = ("run.device=cpu", "--gpu", "h200-sxm-141gb", "--gpus", "1", "--json")
"""Not the device of this machine."""


@dataclass(frozen=True)
class Measured:
    """What a run took: ms a step, GiB of tensors at the peak, GiB that torch's allocator had then."""

    step_ms: float
    allocated: float
    reserved: float


ROWS = {
    "124M, 8 x 1,024": Measured(29.2, 8.99, 11.79),
    "124M, 32 x 1,024": Measured(106.0, 16.69, 19.86),
    "124M, 32 x 1,024, compiled": Measured(72.5, 6.05, 6.83),
    "124M, 32 x 1,024, full recompute": Measured(145.1, 11.53, 12.05),
    "1.3B, 4 x 2,048": Measured(176.6, 30.06, 31.42),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_plan_is_near_what_a_run_took(shardway: Shardway, name: str) -> None:
    """Time within 22 %: operators of blocks that are not compiled take longer than is counted."""
    measured = ROWS[name]
    Path("run.toml").touch()
    told = shardway("plan", "run.toml", *COMMON, *CASES[name], *H200)
    facts = json.loads(told.out)["plan"]
    assert 1e3 * facts["step_seconds"] == pytest.approx(measured.step_ms, rel=0.22)
    assert facts["peak_bytes"]["allocated"] / 2**30 == pytest.approx(measured.allocated, rel=0.05)
    # Passes that are replayed have memory of their own, beside what they took while they were timed.
    replayed = measured.reserved / measured.allocated > 1.3
    assert facts["peak_bytes"]["reserved"] / 2**30 == pytest.approx(measured.reserved, rel=0.15 if replayed else 0.09)
