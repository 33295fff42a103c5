"""What is assumed where a person says nothing: batch, sequence, length, what saving and starting take.

Invariant: each assumption comes with a sentence that names its value, its reason, and how to say otherwise. This module
must not see a layout.

Sources: batches: Brown et al., arXiv:2005.14165, table 2.1; tokens for a model's size: Hoffmann et al.,
arXiv:2203.15556, section 3; images: Dosovitskiy et al., arXiv:2010.11929, table 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardway.plan.case import divisors
from shardway.plan.economy import Faults, Slot
from shardway.plan.shapes.architecture import Architecture
from shardway.units import render_count

USUAL_SEQ = 4096
USUAL_IMAGES = 4096
BATCH_TOKENS = ((1e9, 0.5e6), (5e9, 1e6), (20e9, 2e6))
"""Parameters up to which a batch of so many tokens is usual."""
LARGE_BATCH_TOKENS = 3.2e6
TOKENS_PER_PARAMETER = 20

SAVED_BYTES = 12
"""Of a parameter in a checkpoint: in fp32 with two moments."""
WRITE_RATE = 1e9
"""Bytes per second that a node writes to the shared file system."""
MOST_WRITE_RATE = 50e9
START_SECONDS = 180.0
"""From the start of a job to its first step: imports, communicators, kernels that are compiled."""
NOTICE_SECONDS = 120.0
"""From a failure to a new start."""
MARGIN_SECONDS = 60.0
"""Kept at the end of a job beside the time of a save."""


@dataclass(frozen=True)
class Assumed:
    """A value that nobody said, and the sentence that tells it."""

    value: int
    told: str


def assume_seq_len(model: Architecture) -> Assumed:
    """Of a text model; of an image model the patches that it has positions for."""
    if model.patch_features:
        length = model.positions or 197
        return Assumed(length, f"{length:,} patches an image, as many as the model has positions for")
    length = min(USUAL_SEQ, model.positions or USUAL_SEQ)
    reason = "all that the model has positions for" if length < USUAL_SEQ else "usual for pre-training"
    return Assumed(length, f"sequences of {length:,} tokens, {reason} (--seq-len)")


def assume_batch(model: Architecture, seq_len: int, ranks: int) -> Assumed:
    """Sequences that make a usual batch, as many for each rank where there are enough of them."""
    if model.patch_features:
        batch = _split_over(USUAL_IMAGES, ranks)
        return Assumed(batch, f"a global batch of {batch:,} images, about {USUAL_IMAGES:,} (--global-batch)")
    sizes = (tokens for parameters, tokens in BATCH_TOKENS if model.active_parameters <= parameters)
    tokens = next(sizes, LARGE_BATCH_TOKENS)
    batch = _split_over(tokens / seq_len, ranks)
    told = f"a global batch of {batch:,} sequences, near the {tokens / 1e6:g} M tokens that GPT-3 had at this size"
    return Assumed(batch, f"{told} (--global-batch)")


def _split_over(batch: float, ranks: int) -> int:
    """Next to a batch, so many for each rank that micro-batches divide them: a power of two or three times one.

    Where there are more ranks, their largest divisor that is no more than the batch.
    """
    if batch >= ranks:
        shares = [number << power for power in range(int(batch / ranks).bit_length() + 1) for number in (1, 3)]
        return ranks * min(shares, key=lambda share: abs(math.log(share * ranks / batch)))
    return max(size for size in divisors(ranks) if size <= max(1.0, batch))


def assume_tokens(model: Architecture) -> Assumed:
    """What a model of this size should see at least."""
    tokens = TOKENS_PER_PARAMETER * model.active_parameters
    told = f"{render_count(tokens)} tokens, {TOKENS_PER_PARAMETER} for each parameter that a token meets"
    return Assumed(tokens, f"{told} (Hoffmann et al.; --tokens)")


@dataclass(frozen=True)
class SaveTime:
    """How long a checkpoint takes, and the sentence that tells why."""

    seconds: float
    told: str

    @property
    def faults(self) -> Faults:
        """Training stands still for a save; after a failure the job starts anew and loads."""
        return Faults(save_seconds=self.seconds, restart_seconds=NOTICE_SECONDS + START_SECONDS + self.seconds)

    def slot(self, wall_seconds: float) -> Slot:
        """A job of so much wall-time."""
        return Slot(
            seconds=wall_seconds,
            start_seconds=START_SECONDS,
            resume_seconds=self.seconds,
            margin_seconds=MARGIN_SECONDS + self.seconds,
        )


def assume_saving(parameters: int, nodes: int) -> SaveTime:
    """Of weights and moments in fp32, written by all nodes at once."""
    size, rate = parameters * SAVED_BYTES, min(nodes * WRITE_RATE, MOST_WRITE_RATE)
    told = (
        f"a checkpoint of {size / 1e9:,.3g} GB takes {size / rate:,.3g} s ({WRITE_RATE / 1e9:g} GB/s a node, at most "
        f"{MOST_WRITE_RATE / 1e9:g}); a start takes {START_SECONDS:g} s, and {NOTICE_SECONDS:g} s more after a failure"
    )
    return SaveTime(size / rate, told)
