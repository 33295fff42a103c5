"""Finds out, once, whether a script's loss is a mean over samples: what a run computes depends on its cut otherwise.

The same rows are run through at once and in parts. A mean over samples comes out the same; a mean over targets that
count, of which samples have different numbers, does not, nor does a loss that compares samples with each other.

Invariant: the run is left as it was, to the bit: no gradients, and random numbers, buffers and modes are put back.
Every rank makes the same passes. This module must not train.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardway.data.batch_tree import count_rows, cut_rows
from shardway.errors import LostContact
from shardway.train.before import find_changeable
from shardway.train.passes import Loss, Passes
from shardway.train.session import Session

MOST_ROWS = 16
EXACT, NARROW, LEAST = 1e-4, 1e-2, 1e-6
"""How far the two may be apart by rounding: relatively in fp32 and in narrower formats, and absolutely."""


def probe_loss(session: Session, passes: Passes, model: nn.Module, batch: Any, loss_fn: Loss, rows: int | None) -> None:
    """Say so where the loss of a batch depends on how it is cut; called on all ranks together, after a step on it."""
    if not _can_probe(session, passes) or loss_fn in passes.sum_losses:
        return
    parts = session.ranks.gather(_choose(passes, batch, rows))
    if not all(parts):
        return
    size = min(parts)
    before = find_changeable(passes.parallel).remember(None)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        found = _measure(passes, model, batch, loss_fn, rows, size)
    except LostContact:
        raise
    except Exception:  # a model that cannot be evaluated so is no reason to end a run
        found = None
    finally:
        for module, training in modes.items():
            module.training = training
        before.put_back()
    narrow = _is_narrow(passes)
    every = session.ranks.gather(found)
    apart = [each for each in every if each is not None and _is_apart(*each, NARROW if narrow else EXACT)]
    if apart:
        session.note_once("loss_depends_on_cut", _describe(size, *apart[0]))


def _can_probe(session: Session, passes: Passes) -> bool:
    """The same on every rank: no passes that a compiler, an engine or experts would remember."""
    train, parallel = session.resolved.values.train, passes.parallel
    plain = train.engine == "torch" and train.compile == "off" and parallel.pipeline is None
    return plain and not passes.routers and passes.precision.float8 is None


def _choose(passes: Passes, batch: Any, rows: int | None) -> int:
    """How many rows of this rank's share are looked at; 0 where it cannot be cut."""
    try:
        count = count_rows(batch, rows)
        size = min(count, max(2, min(passes.portions.micro_batch, MOST_ROWS)))
        cut_rows(batch, count, 0, 1)
    except Exception:
        return 0
    return size if size >= 2 else 0


def _measure(
    passes: Passes, model: nn.Module, batch: Any, loss_fn: Loss, rows: int | None, size: int
) -> tuple[float, float] | None:
    """The mean loss of the first rows at once, and as that of parts; None where there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a part that is smaller than any of the run
        whole, *found = passes.measure(model, batch, loss_fn, [(0, size), *_cut_unevenly(size)], rows)
    if loss_fn in passes.sum_losses or not whole[1] or not math.isfinite(whole[0]):
        return None
    return whole[0] / whole[1], _mean(found)


def _cut_unevenly(size: int) -> list[tuple[int, int]]:
    """Parts of odd and even sizes, so that samples of two kinds that take turns are not alike in them."""
    first = 2 if size > 3 else 1
    middle = first + (size - first) // 2 if size > 5 else size
    return [(start, end) for start, end in ((0, first), (first, middle), (middle, size)) if end > start]


def _mean(parts: Sequence[tuple[float, float]]) -> float:
    count = sum(count for _, count in parts)
    return sum(total for total, _ in parts) / count if count else math.nan


def _is_narrow(passes: Passes) -> bool:
    """Whether products are rounded to fewer bits than fp32 has, by kernels that depend on the rows."""
    precision, fast = passes.precision, passes.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    return fast or precision.autocast_dtype is not None or precision.weights_dtype is not torch.float32


def _is_apart(whole: float, parts: float, relative: float) -> bool:
    return not math.isclose(whole, parts, rel_tol=relative, abs_tol=LEAST)


def _describe(rows: int, whole: float, parts: float) -> str:
    return (
        f"the loss of {rows} samples is {whole:.6g} at once and {parts:.6g} as the mean of their parts: it is no mean "
        "over samples, so the result depends on train.micro_batch and on the number of ranks.\n"
        "  To do: return shardway.LossSum(total, count) from the loss function, the sum over all targets and how many "
        "they are: shardway.token_cross_entropy does (targets of -100 do not count), and shardway.causal_lm_loss in "
        "place of model(**batch).loss of Hugging Face. A loss that compares samples with each other needs all of them "
        "on one rank, and train.micro_batch as large as the batch."
    )
