"""Finds out, once, whether a script's loss is a mean over samples: what a run computes depends on its cut otherwise.

The same rows are run through at once and in parts. A mean over samples comes out the same; a mean over targets that
count, of which samples have different numbers, does not, nor does a loss that compares samples with each other. Of a
loss that draws random numbers nothing can be said so.

Invariant: the run is left as it was, to the bit: no gradients, and random numbers, buffers, modes and what the script
counts in Python objects are put back. Every rank makes the same passes. This module must not train.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardway.data.batch_tree import count_rows, cut_rows
from shardway.errors import LostContact
from shardway.train.passes import Loss, Passes
from shardway.train.python_state import PythonState
from shardway.train.session import Session
from shardway.train.snapshot import find_changeable

MOST_ROWS, MOST_WINDOWS = 16, 4
"""How many rows are looked at, and in how many groups of the size of a micro-batch."""
EXACT, NARROW, LEAST = 1e-4, 1e-2, 1e-6
"""How far the two may be apart by rounding: relatively in fp32 and in narrower formats, and absolutely."""


@dataclass(frozen=True)
class Compared:
    """The mean loss of some rows, at once and in parts."""

    rows: int
    whole: float
    parts: float

    def is_apart(self, relative: float) -> bool:
        """Whether the two differ by more than rounding."""
        return not math.isclose(self.whole, self.parts, rel_tol=relative, abs_tol=LEAST)

    def describe(self) -> str:
        """What it means, and what to do."""
        return (
            f"the loss of {self.rows} samples is {self.whole:.6g} at once and {self.parts:.6g} as the mean of their "
            "parts: it is no mean over samples, so the result depends on train.micro_batch and on the number of ranks."
            "\n  To do: return shardway.LossSum(total, count) from the loss function, the sum over all targets and how "
            "many they are: shardway.token_cross_entropy does (targets of -100 do not count), and "
            "shardway.causal_lm_loss in place of model(**batch).loss of Hugging Face. A loss that compares samples "
            "with each other needs all of them on one rank, and train.micro_batch as large as the batch."
        )


def probe_loss(session: Session, passes: Passes, model: nn.Module, batch: Any, loss_fn: Loss, rows: int | None) -> None:
    """Say so where the loss of a batch depends on how it is cut; called on all ranks together, after a step on it."""
    if not _can_probe(session, passes) or loss_fn in passes.sum_losses:
        return
    count = min(session.ranks.gather(_count_rows(batch, rows)))
    if count < 2:
        return
    before, script = find_changeable(passes.parallel).remember(None), PythonState(loss_fn, passes.parallel.module)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        found = _measure(passes, model, batch, loss_fn, rows, _choose_windows(count, passes.portions.micro_batch))
    except LostContact:
        raise
    except Exception:  # a model that cannot be evaluated so is no reason to end a run
        found = None
    finally:
        for module, training in modes.items():
            module.training = training
        before.put_back()
        script.put_back()
    apart = [each for each in session.ranks.gather(found) if each is not None]
    if apart:
        session.note_once("loss_depends_on_cut", apart[0].describe())


def _can_probe(session: Session, passes: Passes) -> bool:
    """The same on every rank: no passes that a compiler, an engine or experts would remember."""
    train, parallel = session.resolved.values.train, passes.parallel
    plain = train.engine == "torch" and train.compile == "off" and parallel.pipeline is None
    return plain and not passes.routers and passes.precision.float8 is None


def _count_rows(batch: Any, rows: int | None) -> int:
    """The rows of this rank's share; 0 where it cannot be cut."""
    try:
        count = count_rows(batch, rows)
        cut_rows(batch, count, 0, 1)
    except Exception:
        return 0
    return count


def _choose_windows(count: int, micro_batch: int) -> list[tuple[int, int]]:
    """Rows that are compared, from one to another: no more at a time than a micro-batch, but at least two."""
    size = min(count, max(2, min(micro_batch, MOST_ROWS)))
    number = max(1, min(MOST_WINDOWS, count // size, MOST_ROWS // size))
    return [(start, start + size) for start in range(0, number * size, size)]


def _measure(
    passes: Passes,
    model: nn.Module,
    batch: Any,
    loss_fn: Loss,
    rows: int | None,
    windows: Sequence[tuple[int, int]],
) -> Compared | None:
    """The first window whose mean loss is another one at once than in parts; None where there is none."""
    first = None
    for start, end in windows:
        parts = [(start, end)] * 2 + [(start + a, start + b) for a, b in _cut_unevenly(end - start)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a part that is smaller than any of the run
            (total, count), again, *found = passes.measure(model, batch, loss_fn, parts, rows)
        if loss_fn in passes.sum_losses:
            return None
        limit = NARROW if _is_narrow(passes) else EXACT
        is_random = Compared(end - start, total, again[0]).is_apart(limit)  # it draws noise, as a diffusion model does
        if first is None and count and math.isfinite(total) and not is_random:
            compared = Compared(end - start, total / count, _mean(found))
            first = compared if compared.is_apart(limit) else None
    return first


def _cut_unevenly(size: int) -> list[tuple[int, int]]:
    """Parts of odd and even sizes, so that samples of two kinds that take turns are not alike in them."""
    first = 2 if size > 5 else 1
    middle = first + (size - first) // 2 if size > 5 else size
    return [(start, end) for start, end in ((0, first), (first, middle), (middle, size)) if end > start]


def _mean(parts: Sequence[tuple[float, float]]) -> float:
    count = sum(count for _, count in parts)
    return sum(total for total, _ in parts) / count if count else math.nan


def _is_narrow(passes: Passes) -> bool:
    """Whether products are rounded to fewer bits than fp32 has, by kernels that depend on the rows."""
    precision, fast = passes.precision, passes.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    narrow = (precision.autocast_dtype, precision.model_dtype) != (None, None)
    return fast or narrow or precision.weights_dtype is not torch.float32
