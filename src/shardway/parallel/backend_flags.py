"""The switches of torch that hold for a whole process, set from a resolved run.

Invariant: `apply_backend_switches` sets every switch each time, so that what a run before left behind in the process
does not count, but for what a script has set before it opened its run. This module is the only one that sets them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
import torch._functorch.config

from shardway.parallel.compile import set_compile_cache
from shardway.runfile.schema import RunFile

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def apply_backend_switches(values: RunFile, device: torch.device, *, leaves_tf32: bool = False) -> None:
    """Set how fp32 products, convolutions, nondeterminism and the compiler behave in this process; `leaves_tf32`: the
    script has set that itself.

    To be called before the device is used. Raises UserError where compiled code has no folder to be kept in.
    """
    if device.type == "cuda" and not leaves_tf32:
        # The older of torch's two interfaces: where both are used, torch raises, and its compiler reads this one.
        torch.set_float32_matmul_precision("high" if values.precision.tf32 is True else "highest")
    torch.backends.cudnn.benchmark = values.train.cudnn_benchmark
    _set_deterministic(values.train.deterministic)
    wants_budget = values.recompute.mode == "budget"
    torch._functorch.config.activation_memory_budget = values.recompute.budget if wants_budget else 1.0
    if values.train.compile in ("blocks", "model"):
        set_compile_cache(values.train.compile_cache)


@contextlib.contextmanager
def tf32_put_back(device: torch.device) -> Iterator[None]:
    """After a run in a process that goes on, TF32 is as it was before, so that the next one does not take it for what
    its script has set."""
    before = None
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # the newer interface is in use, which no run touches
            before = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        if before is not None:
            torch.set_float32_matmul_precision(before)


def _set_deterministic(wanted: bool) -> None:
    if wanted:
        # cuBLAS reads it when its first handle is made; without it torch refuses matrix products on CUDA.
        os.environ.setdefault(_CUBLAS, ":4096:8")
    torch.use_deterministic_algorithms(wanted)
    torch.backends.cudnn.deterministic = wanted
