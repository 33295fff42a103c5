"""Tiny runs under both engines, for the tests of this folder."""

from __future__ import annotations

import functools
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from runs import TINY, pool_ranks, train_tiny

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")

ZERO = ("train.engine=deepspeed",)
UNEVEN = (*TINY, "train.global_batch=10", "train.micro_batch=3", "train.steps=4")
"""Shares of 5 samples in micro-batches of at most 3: accumulation with parts of unequal size."""


def stage(number: int) -> tuple[str, str]:
    """The overrides of a stage of ZeRO."""
    return (*ZERO, f"deepspeed.stage={number}")


def train_both(
    folder: Path, *overrides: str, zero: tuple[str, ...], base: tuple[str, ...] = UNEVEN
) -> tuple[Path, Path]:
    """The same run under each engine, on the ranks of the pool: the folders of PyTorch's and of ZeRO's."""
    folders = folder / "torch", folder / "zero"
    train_tiny(folders[0], pool_ranks(), *overrides, base=base)
    train_tiny(folders[1], pool_ranks(), *overrides, *zero, base=base)
    return folders


@functools.cache
def what_nvme_lacks() -> str:
    """Why DeepSpeed cannot compile its access to disks here, or ""."""
    if shutil.which("g++") is None:
        return "no g++ to compile DeepSpeed's access to disks"
    look = ["g++", "-E", "-x", "c++", "-include", "libaio.h", "/dev/null"]
    if subprocess.run(look, capture_output=True, check=False).returncode:
        return "libaio.h is missing (Debian: libaio-dev)"
    return ""
