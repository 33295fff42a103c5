"""The learning rate of a step, as a pure function.

Invariant: the factor depends on the step and the lengths alone, so that a resumed run needs no state for it. It must
not know an optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class LRSchedule:
    """Lengths in steps, and the factor at the end as a fraction of the peak."""

    total: int
    warmup: int
    decay: int
    final: float


def lr_factor(name: str, course: LRSchedule, step: int) -> float:
    """The factor on the peak learning rate for the step that follows `step` finished ones (0 is the first).

    Linear warm-up over `warmup` steps, the first of which has 1/warmup of the peak; then the named course.
    """
    if step < course.warmup:
        return (step + 1) / course.warmup
    return COURSES[name](course, min(step, course.total))


def _cosine(course: LRSchedule, step: int) -> float:
    """Half a cosine from 1 to `final` (Loshchilov and Hutter, arXiv:1608.03983)."""
    progress = _progress(step, course.warmup, course.total)
    return course.final + (1 - course.final) * 0.5 * (1 + math.cos(math.pi * progress))


def _linear(course: LRSchedule, step: int) -> float:
    return 1 + (course.final - 1) * _progress(step, course.warmup, course.total)


def _constant(course: LRSchedule, step: int) -> float:
    return 1.0


def _warmup_stable_decay(course: LRSchedule, step: int) -> float:
    """Constant until `decay` steps before the end, then linear to `final` (Hu et al., arXiv:2404.06395)."""
    return 1 + (course.final - 1) * _progress(step, course.total - course.decay, course.total)


def _progress(step: int, start: int, end: int) -> float:
    return min(1.0, max(0.0, (step - start) / max(1, end - start)))


COURSES: dict[str, Callable[[LRSchedule, int], float]] = {
    "cosine": _cosine,
    "linear": _linear,
    "constant": _constant,
    "wsd": _warmup_stable_decay,
}
"""Name in the run file -> factor after the warm-up."""
