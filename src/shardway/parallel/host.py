"""Numbers of the host on their way to a device.

Invariant: the host does not wait for the device, which goes on with what it has to do. A plain copy from memory that
may be swapped waits until all that was asked for before is done; then the device stands still until the host goes on.
This module must not read from a device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def send(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of one dim on `device`. torch keeps the memory that it comes from until it has arrived."""
    here = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return here.to(device, non_blocking=True)
