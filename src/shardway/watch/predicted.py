"""What the planner says of a run beside what was measured in it.

Invariant: a run whose site, model or numbers say too little for a plan has none: nothing is raised. Memory is not
compared: events do not tell its peak. This module must not price: it asks the planner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from pydantic import ValidationError

from shardway.errors import ShardwayError
from shardway.rundir.directory import RunDir
from shardway.rundir.events import Event
from shardway.runfile.schema import RunFile
from shardway.watch.progress import AttemptProgress

FEWEST_STEPS = 10
"""Steps of an attempt, below which a median says little; the first ones compile and warm up."""


@dataclass(frozen=True)
class Predicted:
    """Seconds of a step as the plan has them, with the interval that holds four of five measured steps, and as they
    were; MFU with all scores of attention counted."""

    seconds: float
    low: float
    high: float
    measured_seconds: float
    mfu: float

    @property
    def measured_mfu(self) -> float:
        """The same FLOPs in the time that was measured."""
        return self.mfu * self.seconds / self.measured_seconds

    @property
    def held(self) -> bool:
        """Whether the interval held the step."""
        return self.low <= self.measured_seconds <= self.high


def predict(run: RunDir, attempts: Sequence[AttemptProgress], events: Sequence[Event]) -> Predicted | None:
    """Of the last attempt; None on a CPU, where no site names accelerators, and of a model that has no plan."""
    rate = _median_rate(events)
    if not attempts or attempts[-1].start.device.startswith("cpu") or rate is None:
        return None
    try:
        return _price(RunFile.model_validate(run.read_resolved()), rate)
    except (ShardwayError, ValidationError, ValueError, TypeError):
        return None


def _median_rate(events: Sequence[Event]) -> float | None:
    """Samples a second of the steps since the run was started last, without the first ones."""
    starts = [number for number, event in enumerate(events) if event.get("event") == "started"]
    steps = [event for event in events[starts[-1] if starts else 0 :] if event.get("event") == "step"]
    rates = [event.get("samples_per_s") for event in steps]
    sound = [float(each) for each in rates if isinstance(each, int | float) and math.isfinite(each) and each > 0]
    return median(sound[FEWEST_STEPS // 2 :]) if len(sound) >= FEWEST_STEPS else None


def _price(values: RunFile, rate: float) -> Predicted:
    from shardway.plan.estimate import estimate
    from shardway.plan.shapes.hf import read_shape
    from shardway.plan.site import machine_of_site
    from shardway.resolve.planned import case_of, shape_of_run
    from shardway.sites.load import load_site

    machine = machine_of_site(load_site(values.site.name))
    shape = shape_of_run(values, read_shape(values.model.hf) if values.model.hf else None)
    found = estimate(case_of(values, shape), machine)
    measured = values.train.global_batch / rate
    return Predicted(found.time.seconds, found.time.low, found.time.high, measured, found.mfu(causal=False))
