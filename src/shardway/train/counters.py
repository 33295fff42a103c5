"""How far a run is.

Invariant: the position is where the next step begins in the order of samples, whatever was skipped before it, so that
it means the same on any world size and under any `data.skip`. This module must not know how samples are chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Counters:
    """Finished steps, samples that were trained on, targets that counted in the loss, and the position in the data.

    Where nothing was skipped, the position is the number of samples.
    """

    step: int = 0
    samples: int = 0
    targets: int = 0
    position: int = 0

    def after(self, samples: int, targets: float, next_position: int) -> Counters:
        """The counters once one more step is done."""
        return Counters(self.step + 1, self.samples + samples, self.targets + round(targets), next_position)

    def as_numbers(self) -> dict[str, Any]:
        """For a checkpoint's manifest."""
        return {"step": self.step, "samples": self.samples, "targets": self.targets, "position": self.position}


def read_counters(numbers: Mapping[str, Any]) -> Counters:
    """The counters of a manifest; one without a position is from before any could be skipped."""
    samples = int(numbers["samples"])
    return Counters(int(numbers["step"]), samples, int(numbers["targets"]), int(numbers.get("position", samples)))
