"""Every place where supported torch releases (2.11 to 2.13) differ, each with its reason.

Invariant: nothing outside this module asks which torch release is installed, and this module does nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel


def without_buffer_sync() -> dict[str, Any]:
    """The keyword of DDP that skips buffers in a forward pass: torch 2.13 renamed it and warns about the old one."""
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if renamed else "broadcast_buffers": False}


def all_gather_along(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """torch's functional all-gather, which torch 2.13 renamed."""
    gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
    return gather(x, dim, group)


def library_collectives() -> dict[str, Callable[..., Any]]:
    """Eager all-gather and reduce-scatter under the names that DeepSpeed uses: torch 2.13 renamed both and warns at
    each call of an old name."""
    return {
        "all_gather_function": getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor,
        "reduce_scatter_function": getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor,
    }


def reduce_scatter_along(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """torch's functional reduce-scatter (a sum), which torch 2.13 renamed."""
    scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
    return scatter(x, "sum", dim, group)


def runs_v_schedules(device: torch.device) -> bool:
    """Whether a rank may hold two neighbouring stages of a pipeline. Before torch 2.13 the warm-up of a schedule sends
    messages from such a rank to itself, which gloo does not support."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return device.type != "cpu" or (major, minor) >= (2, 13)
