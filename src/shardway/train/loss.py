"""Losses as sums with their counts, and the factor that keeps fp16 gradients in range.

Invariants:
- Losses: a loss function never divides; the step divides by the global count.
- Loss scale: it follows from the last scale and from whether a gradient overflowed, so ranks that agree on the overflow
  agree on the scale. Its course is that of torch.amp.GradScaler.

A scale that overflows gradients is divided, and the step is skipped; after a run of good steps it is multiplied
(Micikevicius et al., arXiv:1710.03740, section 3.2).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardway.data.batch_tree import map_leaves
from shardway.errors import JobError, UserError

IGNORED = -100
"""Target of a position that does not count."""


@dataclass(frozen=True)
class LossSum:
    """Sum of the losses of a micro-batch (0-dim), and how many targets it counts.

    `count` may be a tensor (it depends on the data). `correct` is the number of right answers, if they exist. `metrics`
    are further sums by name: a validation adds them up over all samples and returns the sums. `outputs` is what metric
    objects of a validation are updated with (predictions, targets), if it differs from the arguments of the loss
    function.
    """

    total: torch.Tensor
    count: torch.Tensor | int
    correct: torch.Tensor | None = None
    metrics: Mapping[str, torch.Tensor | float] = field(default_factory=dict)
    outputs: Sequence[Any] | None = None

    def counted(self, counts: torch.Tensor) -> LossSum:
        """The same if `counts` (a 0-dim bool) is true, else nothing."""
        correct = None if self.correct is None else self.correct * counts
        metrics = {name: value * counts for name, value in self.metrics.items()}
        return LossSum(self.total * counts, self.count * counts, correct, metrics)


LossFunction = Callable[[torch.Tensor, torch.Tensor], "LossSum | torch.Tensor"]
"""(output of the model, targets) -> LossSum, or the mean over the micro-batch as a 0-dim tensor."""


def token_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> LossSum:
    """Cross-entropy in nats over [batch, seq, vocab] logits; targets of -100 do not count.

    In fp32. Where a run compiles (`compiling_losses`), this is one kernel each way on a CUDA device: 4 bytes a logit
    are moved and not some 19.
    """
    plain = type(logits) is torch.Tensor and logits.is_cuda and targets.dtype is torch.int64
    fuses = plain and not torch.compiler.is_compiling() and _COMPILES.get()
    sums = _compiled_sums() if fuses else _sum_cross_entropy
    return LossSum(*sums(logits, targets))


def _sum_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    flat = targets.flatten()
    total = F.cross_entropy(logits.flatten(0, -2).float(), flat, ignore_index=IGNORED, reduction="sum")
    return total, (flat != IGNORED).sum()


_COMPILES: ContextVar[bool] = ContextVar("compiles losses", default=False)


@contextlib.contextmanager
def compiling_losses(wanted: bool) -> Iterator[None]:
    """Meanwhile the cross-entropy over tokens is compiled on a CUDA device, also within a script's own loss."""
    token = _COMPILES.set(wanted)
    try:
        yield
    finally:
        _COMPILES.reset(token)


@cache
def _compiled_sums() -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    return torch.compile(_sum_cross_entropy)


def class_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> LossSum:
    """Cross-entropy in nats over [batch, classes] logits, with the number of right answers; targets of -100 do not
    count."""
    logits = logits.float()
    total = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    return LossSum(total, (targets != IGNORED).sum(), (logits.argmax(-1) == targets).sum())


def causal_lm_loss(model: nn.Module, batch: Mapping[str, Any]) -> LossSum:
    """The loss of a Hugging Face causal language model: cross-entropy in nats of each token of `batch["labels"]` given
    those before it; labels of -100 do not count.

    As `model(**batch).loss`, but the mean is one over all tokens of the global batch. Raises UserError where the batch
    has no labels.
    """
    if not isinstance(batch, Mapping) or batch.get("labels") is None:
        raise UserError(
            'shardway.causal_lm_loss needs a batch with "labels" (token ids, -100 where none counts).\n'
            "  To do: let the dataset give them, for example as a copy of input_ids."
        )
    outputs = model(**{name: value for name, value in batch.items() if name != "labels"})
    return token_cross_entropy(outputs.logits[:, :-1], batch["labels"][:, 1:])


def fill_missing_targets(data: Any, *, pair: bool) -> tuple[Any, torch.Tensor | None]:
    """A batch whose targets are all -100 with others in their place, and False: it must not count; any other batch as
    it is, and True (None: it counts).

    Without, a mean over its targets would be 0 / 0. Targets are those of a pair, or what is called "labels". The device
    is not waited for.
    """
    if pair:
        inputs, targets = data
        filled, counts = _fill(targets)
        return ((inputs, filled), counts) if counts is not None else (data, None)
    if isinstance(data, MutableMapping) and "labels" in data:
        labels, counts = _fill(data["labels"])
        if counts is not None:
            data = map_leaves(lambda leaf: leaf, data)  # the script keeps its own
            data["labels"] = labels
        return data, counts
    return data, None


def _fill(targets: Any) -> tuple[Any, torch.Tensor | None]:
    whole = isinstance(targets, torch.Tensor) and targets.layout is torch.strided and not targets.is_nested
    if not whole or targets.dtype not in (torch.int64, torch.int32) or not targets.ndim:
        return targets, None
    if targets.device.type == "cpu" and type(targets) is torch.Tensor and (targets.numpy() != IGNORED).any():
        return targets, None  # the usual case, at next to no cost
    counts = (targets != IGNORED).any()
    return torch.where(counts, targets, 0), counts


def as_sum(loss: LossSum | torch.Tensor, samples: int) -> LossSum:
    """A user's mean over `samples`, as a sum."""
    if isinstance(loss, LossSum):
        return loss
    return LossSum(loss * samples if samples else torch.zeros_like(loss), samples)


# --- the fp16 loss scale

LOWEST = 2.0**-14
"""The smallest normal fp16 number: a loss near 1 that is scaled below it leaves nothing of its gradients."""

_LARGEST = (2.0 - 2.0**-23) * 2.0**127
"""The largest float32: torch's scaler does not grow beyond it."""


@dataclass(frozen=True)
class LossScale:
    """The current factor, and the steps since it last changed; the other fields are the rules of its changes."""

    scale: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    good_steps: int = 0

    def after(self, found_inf: bool) -> LossScale:
        """The factor of the next step. Raises JobError if it has fallen so far that scaling is not the cause."""
        if found_inf:
            scale = self.scale * self.backoff
            if scale < LOWEST:
                raise JobError(
                    "fp16 gradients overflow however small the loss is scaled: the scale has fallen to "
                    f"{scale:.3g}.\n  To do: the loss itself is not finite or diverges; lower optim.lr, or set "
                    'precision.compute = "bf16".'
                )
            return replace(self, scale=scale, good_steps=0)
        if self.good_steps + 1 < self.interval:
            return replace(self, good_steps=self.good_steps + 1)
        grown = self.scale * self.growth
        return replace(self, scale=grown if grown <= _LARGEST else self.scale, good_steps=0)

    def as_numbers(self) -> tuple[float, int]:
        """The saved numbers: the factor and the steps since it changed."""
        return self.scale, self.good_steps

    def with_numbers(self, numbers: Sequence[float]) -> LossScale:
        """The saved state under the rules of today's run file. Raises JobError for numbers that cannot be one."""
        if len(numbers) != 2 or not all(math.isfinite(number) for number in numbers) or numbers[0] <= 0:
            raise JobError(f"the checkpoint's loss scale is {list(numbers)}, which is no factor and number of steps.")
        return replace(self, scale=float(numbers[0]), good_steps=min(int(numbers[1]), self.interval - 1))
