"""Which validation of a run is the best, and how many came after it.

Invariant: a value that is not finite is never the best, and of equal values the earlier one is, so the same results
always give the same steps. `parse_monitor(str(monitor)) == monitor`. Where results come from is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

Results = Mapping[int, Mapping[str, float]]
"""Metrics of validations by their step."""

_IS_HIGHER_BETTER = {"loss": False, "accuracy": True, "bits_per_byte": False}
"""Metrics whose direction is known."""


@dataclass(frozen=True)
class Monitor:
    """A metric of validations, and whether more of it is better: "loss", "accuracy", "max f1", "min rmse"."""

    metric: str
    highest: bool

    def __str__(self) -> str:
        if self.metric in _IS_HIGHER_BETTER:
            return self.metric
        return f"{'max' if self.highest else 'min'} {self.metric}"

    def rank(self, results: Results) -> list[int]:
        """The steps whose value is a finite number, the best first."""
        values = {step: float(metrics.get(self.metric, math.nan)) for step, metrics in results.items()}
        sign, finite = -1 if self.highest else 1, [step for step, value in values.items() if math.isfinite(value)]
        return sorted(finite, key=lambda step: (sign * values[step], step))

    def find_best(self, results: Results) -> BestResult | None:
        """The best validation; None if no value is a finite number."""
        ranked = self.rank(results)
        return BestResult(ranked[0], results[ranked[0]]) if ranked else None

    def count_since_best(self, results: Results) -> int:
        """The number of validations with this metric after the best one; all of them if there is no best."""
        best = self.find_best(results)
        return sum(self.metric in results[step] for step in results if best is None or step > best.step)

    def render(self, metrics: Mapping[str, float]) -> str:
        """The metric and its value: "loss 2.314"."""
        return f"{self.metric} {metrics.get(self.metric, math.nan):.4g}"


@dataclass(frozen=True)
class BestResult:
    """The best validation so far: its step and all metrics of it."""

    step: int
    metrics: Mapping[str, float]


LOSS = Monitor("loss", highest=False)


def parse_monitor(text: str) -> Monitor:
    """A Monitor from "loss", "max f1" or "min rmse"; ValueError with a sentence for anything else."""
    words, directions = text.split(maxsplit=1), {"max": True, "min": False}
    known = ", ".join(f'"{name}"' for name in _IS_HIGHER_BETTER)
    if len(words) == 2 and words[0] in directions:
        metric, highest = words[1].strip(), directions[words[0]]
        if _IS_HIGHER_BETTER.get(metric, highest) is not highest:
            raise ValueError(f'"{text}" would take the worst {metric} for the best; allowed: "{metric}"')
        return Monitor(metric, highest)
    metric = text.strip()
    if metric in _IS_HIGHER_BETTER:
        return Monitor(metric, _IS_HIGHER_BETTER[metric])
    if not metric or metric in directions:
        raise ValueError(f'"{text}" names no metric; allowed: {known}, or any other with its direction: "max f1"')
    raise ValueError(
        f'whether more or less of "{metric}" is better is not known; allowed: "max {metric}" or "min {metric}", or '
        f"{known}"
    )
