"""Number formats of a step.

Invariant: one `Precision` says all of it, and where weights are kept in fp32 the optimizer works on fp32. This module
must not decide which format a device can do: that is a rule of `resolve`, and for float8 of `parallel.formats.float8`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import torch

from shardway.parallel.formats.float8 import Float8Options
from shardway.parallel.formats.parameters import Formats
from shardway.runfile.schema import PrecisionSection

_COMPUTE = {"auto": None, "fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16, "float8": torch.bfloat16}
"""Format of products; with float8 that of everything which is not a converted linear layer. "auto" is of a section that
was not resolved, for weights that are read or written and not trained."""

_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Precision:
    """`autocast_dtype` None computes in the format of the weights; `reduce_dtype` is that of summed sharded gradients.

    `scales_loss`: fp16, whose gradients need a `LossScale`. `float8` None: no layer is converted.
    """

    autocast_dtype: torch.dtype | None
    reduce_dtype: torch.dtype
    weights_dtype: torch.dtype = torch.float32
    float8: Float8Options | None = None
    model_dtype: torch.dtype | None = None
    """What a script's model computes its products in by hooks of its own, where no autocast is around its loss."""

    @property
    def scales_loss(self) -> bool:
        """Whether the loss must be scaled, lest small gradients vanish."""
        return self.autocast_dtype == torch.float16

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """The context in which a forward pass runs; none where weights are kept in the format of products."""
        if self.autocast_dtype in (None, self.weights_dtype):
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self.autocast_dtype)


def read_precision(section: PrecisionSection) -> Precision:
    """The formats that a resolved run file names."""
    return Precision(
        _COMPUTE[section.compute],
        _FORMATS[section.reduce],
        _FORMATS[section.weights],
        _read_float8(section) if section.compute == "float8" else None,
    )


def left_to_model(precision: Precision) -> Precision:
    """The same formats where the model itself sees to its products (`formats.model_autocast`)."""
    return replace(precision, autocast_dtype=None, model_dtype=precision.autocast_dtype)


def _read_float8(section: PrecisionSection) -> Float8Options:
    return Float8Options(
        section.float8_recipe,
        section.float8_engine,
        section.float8_emulate,
        section.float8_all_gather is True,
        section.first_last,
    )


def formats_of(precision: Precision, *, channels_last: bool = False) -> Formats:
    """What `apply_formats` is to do to the model, or to each stage of a pipeline."""
    dtype = precision.weights_dtype
    return Formats(None if dtype == torch.float32 else dtype, channels_last)
