"""`shardway plan` beside runs of our own engine on one H100 (2026-11-24, docs/numbers.md). Nothing is fitted to it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import Shardway

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(Path(__file__).parents[2] / "bench" / "planner"))
    from own_runs import CASES, COMMON

H100 = ("run.device=cpu", "--gpu", "h100-sxm5-80gb", "--gpus", "1", "--json")
"""Not the device of this machine."""


@dataclass(frozen=True)
class Measured:
    """What a run took: ms a step, GiB of tensors at the peak, GiB that torch's allocator had then."""

    step_ms: float
    allocated: float
    reserved: float


ROWS = {
    "124M, 8 x 1,024": Measured(51.7, 9.68, 11.05),
    "124M, 32 x 1,024": Measured(151.2, 18.12, 21.35),
    "124M, 32 x 1,024, compiled": Measured(128.5, 9.23, 10.11),
    "124M, 32 x 1,024, full recompute": Measured(194.7, 11.84, 12.38),
    "1.3B, 4 x 2,048": Measured(241.7, 31.91, 33.09),
    "1.3B, 16 x 2,048 by 4": Measured(829.4, 42.35, 43.94),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_plan_is_near_what_a_run_took(shardway: Shardway, name: str) -> None:
    measured = ROWS[name]
    Path("run.toml").touch()
    told = shardway("plan", "run.toml", *COMMON, *CASES[name], *H100)
    facts = json.loads(told.out)["plan"]
    assert 1e3 * facts["step_seconds"] == pytest.approx(measured.step_ms, rel=0.16)
    assert facts["peak_bytes"]["allocated"] / 2**30 == pytest.approx(measured.allocated, rel=0.05)
    assert facts["peak_bytes"]["reserved"] / 2**30 == pytest.approx(measured.reserved, rel=0.08)
