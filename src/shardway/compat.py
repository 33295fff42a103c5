"""Every place where supported torch releases (2.11 to 2.13) differ, each with its reason.

Invariant: nothing outside this module asks which torch is installed. This module must not do anything else.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch.nn.parallel import DistributedDataParallel


def without_buffer_sync() -> dict[str, Any]:
    """The keyword of DDP that leaves buffers alone in a forward pass: torch 2.13 renamed it and warns of the old."""
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
