"""Images decoded by NVIDIA DALI, where it is installed: many at once, on the device if there is one, else on the CPU.

Invariant: images are scaled and cut as Pillow's are (`decoded`), up to the interpolation; their pixels differ by a few
levels, so what decodes is a part of a source's fingerprint. DALI is imported when the first batch is decoded.

Source: DALI's reference of `fn.decoders.image`, `fn.resize`, `fn.crop`, `fn.external_source` (version 2.4).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardway.data.content import data_error

MOST_AT_ONCE = 256
"""How many images a pipeline decodes at once."""


class DaliDecoder:
    """Decodes encoded images into uint8 [n, channels, height, width]."""

    def __init__(self, shape: Sequence[int]) -> None:
        """`shape`: channels (1 or 3), height, width. Raises UserError if DALI is not installed."""
        dali = import_dali()
        fn, types = dali.fn, dali.types
        channels, height, width = shape
        on_device = _has_device(dali)
        threads = len(os.sched_getaffinity(0))
        self._pipe = dali.Pipeline(
            batch_size=MOST_AT_ONCE, num_threads=threads, device_id=0 if on_device else None, prefetch_queue_depth=1
        )
        with self._pipe:
            blobs = fn.external_source(name="blobs", dtype=types.UINT8, ndim=1)
            images = fn.decoders.image(
                blobs,
                device="mixed" if on_device else "cpu",
                output_type=types.RGB if channels == 3 else types.GRAY,
                adjust_orientation=False,
            )
            scaled = fn.resize(
                images,
                size=[height, width],
                mode="not_smaller",
                interp_type=types.INTERP_LINEAR,
                antialias=True,
            )
            cut = fn.crop(scaled, crop=[height, width], crop_pos_x=0.5, crop_pos_y=0.5)
            self._pipe.set_outputs(fn.transpose(cut, perm=[2, 0, 1]))
        self._pipe.build()

    def decode(self, blobs: Sequence[bytes]) -> npt.NDArray[np.uint8]:
        """The images, in order. Raises RuntimeError if one of them cannot be decoded."""
        parts = []
        for first in range(0, len(blobs), MOST_AT_ONCE):
            some = [np.frombuffer(blob, np.uint8) for blob in blobs[first : first + MOST_AT_ONCE]]
            self._pipe.feed_input("blobs", some)
            (out,) = self._pipe.run()
            on_host: Any = out.as_cpu() if hasattr(out, "as_cpu") else out
            parts.append(np.array(on_host.as_array()))
        return np.concatenate(parts)


def import_dali() -> Any:
    """The library. Raises UserError if it cannot be imported."""
    try:
        dali = importlib.import_module("nvidia.dali")
        importlib.import_module("nvidia.dali.fn")
        importlib.import_module("nvidia.dali.types")
    except ImportError as error:
        what = f'"dali" needs NVIDIA DALI, which cannot be imported: {error}'
        remedy = 'pip install nvidia-dali-cuda120 (or -cuda130), or set data.decode = "pil"'
        raise data_error("data.decode", what, remedy=remedy) from error
    return dali


def _has_device(dali: Any) -> bool:
    try:
        return int(dali.backend.GetCUDADeviceCount()) > 0
    except (AttributeError, RuntimeError):
        return False
