"""Tiny runs under both engines, for the tests of this folder."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from runs import TINY

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")

ZERO = ("train.engine=deepspeed",)
UNEVEN = (*TINY, "train.global_batch=10", "train.micro_batch=3", "train.steps=8")
"""Shares of 5 samples in micro-batches of at most 3: accumulation with parts of unequal size."""


def stage(number: int) -> tuple[str, str]:
    """The overrides of a stage of ZeRO."""
    return (*ZERO, f"deepspeed.stage={number}")
