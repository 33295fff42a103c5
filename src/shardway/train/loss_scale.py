"""The factor on the loss that keeps fp16 gradients above the smallest number of the format.

Invariant: a value that follows from the one before and from whether a gradient overflowed, so that all ranks that agree
on the overflow agree on the factor. Its course is that of torch.amp.GradScaler. This module must not touch gradients.

A factor that overflows gradients is divided, and the step is skipped; after a run of good steps it is multiplied
(Micikevicius et al., arXiv:1710.03740, section 3.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardway.errors import JobError

LOWEST = 2.0**-14
"""The smallest normal fp16 number: a loss near 1 that is scaled below it leaves nothing of its gradients."""

_LARGEST = (2.0 - 2.0**-23) * 2.0**127
"""The largest float32: torch's scaler does not grow beyond it."""


@dataclass(frozen=True)
class LossScale:
    """The factor now, and the steps since it last changed; the rest says how it changes."""

    scale: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    good_steps: int = 0

    def after(self, found_inf: bool) -> LossScale:
        """The factor of the next step. Raises JobError where it has fallen so far that scaling is not the cause."""
        if found_inf:
            return self._lowered()
        if self.good_steps + 1 < self.interval:
            return replace(self, good_steps=self.good_steps + 1)
        grown = self.scale * self.growth
        return replace(self, scale=grown if grown <= _LARGEST else self.scale, good_steps=0)

    def _lowered(self) -> LossScale:
        scale = self.scale * self.backoff
        if scale < LOWEST:
            raise JobError(
                f"fp16 gradients overflow however small the loss is scaled: the scale has fallen to {scale:.3g}.\n"
                '  To do: the loss itself is not finite or diverges; lower optim.lr, or set precision.compute = "bf16".'
            )
        return replace(self, scale=scale, good_steps=0)

    def as_numbers(self) -> tuple[float, int]:
        """What a checkpoint keeps: the factor and the steps since it changed."""
        return self.scale, self.good_steps

    def with_numbers(self, numbers: Sequence[float]) -> LossScale:
        """The saved state under the rules of today's run file. Raises JobError for numbers that cannot be one."""
        if len(numbers) != 2 or not all(math.isfinite(number) for number in numbers) or numbers[0] <= 0:
            raise JobError(f"the checkpoint's loss scale is {list(numbers)}, which is no factor and number of steps.")
        return replace(self, scale=float(numbers[0]), good_steps=min(int(numbers[1]), self.interval - 1))
