"""The plan of a run beside what was measured.

Invariant: a run whose site, model or numbers are not enough for a plan has no comparison with one; nothing is raised.
Memory is not compared: a plan counts what torch allocates, samples count all that is taken from the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from pydantic import ValidationError

from shardway.errors import ShardwayError
from shardway.rundir.directory import RunDir
from shardway.runfile.schema import RunFile
from shardway.watch.progress import AttemptProgress
from shardway.watch.report.event_log import EventLog

FEWEST_STEPS = 10  # with fewer steps in an attempt a median means little: the first steps compile and warm up


@dataclass(frozen=True)
class Predicted:
    """Seconds a step: planned, the planned interval that holds four of five measured steps, and measured; MFU with all
    attention scores counted."""

    seconds: float
    low: float
    high: float
    measured_seconds: float
    mfu: float

    @property
    def measured_mfu(self) -> float:
        """MFU: the same FLOPs in the measured time."""
        return self.mfu * self.seconds / self.measured_seconds

    @property
    def held(self) -> bool:
        """Whether the measured step lies in the interval."""
        return self.low <= self.measured_seconds <= self.high

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "measured_mfu": self.measured_mfu, "held": self.held}


def predict(run: RunDir, attempts: Sequence[AttemptProgress], log: EventLog) -> Predicted | None:
    """For the last attempt, in steps without the first ones; None on a CPU, where no site names accelerators, and for
    a model without a plan."""
    rates = log.column("samples_per_s")[log.find_valid()].tolist()
    sound = [each for each in rates if math.isfinite(each) and each > 0]
    if not attempts or attempts[-1].start.device.startswith("cpu") or len(sound) < FEWEST_STEPS:
        return None
    from shardway.plan.case import machine_of_site
    from shardway.plan.huggingface import read_shape
    from shardway.plan.planner import estimate
    from shardway.resolve.planned import case_of, shape_of_run
    from shardway.sites.load import load_site

    try:
        values = RunFile.model_validate(run.read_resolved())
        machine = machine_of_site(load_site(values.site.name))
        shape = shape_of_run(values, read_shape(values.model.hf) if values.model.hf else None)
        found = estimate(case_of(values, shape, machine=machine), machine)
    except (ShardwayError, ValidationError, ValueError, TypeError):
        return None
    step_s = values.train.batch.largest / median(sound[FEWEST_STEPS // 2 :])
    return Predicted(found.time.seconds, found.time.low, found.time.high, step_s, found.mfu(causal=False))
