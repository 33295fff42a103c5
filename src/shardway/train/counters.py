"""How far a run is.

Invariant: the data position is the number of samples consumed by all ranks together, so that it means the same on
any world size. This module must not know how samples are chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Counters:
    """Finished steps, samples consumed (the data position), and targets that counted in the loss."""

    step: int = 0
    samples: int = 0
    targets: int = 0

    def after(self, samples: int, targets: float) -> Counters:
        """The counters once one more step is done."""
        return Counters(self.step + 1, self.samples + samples, self.targets + round(targets))

    def as_numbers(self) -> dict[str, Any]:
        """For a checkpoint's manifest."""
        return {"step": self.step, "samples": self.samples, "targets": self.targets}


def read_counters(numbers: Mapping[str, Any]) -> Counters:
    """The counters of a manifest."""
    return Counters(int(numbers["step"]), int(numbers["samples"]), int(numbers["targets"]))
