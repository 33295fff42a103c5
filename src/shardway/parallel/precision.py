"""Number formats of a step.

Invariant: weights and optimizer state stay fp32; only matrix products and what travels change their format. This
module must not decide which format a device can do: that is a rule of `resolve`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

from shardway.runfile.schema import PrecisionSection

_DTYPES = {"fp32": None, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Precision:
    """`autocast_dtype` None computes in fp32; `reduce_dtype` is that of summed sharded gradients."""

    autocast_dtype: torch.dtype | None
    reduce_dtype: torch.dtype
    tf32: bool = False

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """The context in which a forward pass runs."""
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self.autocast_dtype)


def read_precision(section: PrecisionSection) -> Precision:
    """The formats that a run file names (fp16 and float8 are refused before this)."""
    reduce = _DTYPES[section.reduce] or torch.float32
    return Precision(_DTYPES[section.compute], reduce, section.tf32)


def apply_precision(precision: Precision, device: torch.device) -> None:
    """Set the process-wide switch for fp32 products on CUDA."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if precision.tf32 else "highest")
