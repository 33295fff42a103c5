"""torch.compile of blocks or the whole model, torch's process-wide backend flags, and the units of a model.

Invariants:
- A module is compiled in place, so that names stay and hooks of what goes around it still run; what is kept on disk is
  keyed by its content and written whole, so that ranks and runs may share a folder.
- `apply_backend_switches` sets every switch each time, so that what a run before left behind in the process does not
  count, but for what a script has set before it opened its run. This module is the only one that sets them.
- Units do not contain each other. A model's own plan decides; without one, the repeated parts of the model do.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from torch import nn

from shardway.errors import UserError
from shardway.models.contract import ModelPlan, match_modules
from shardway.places import expand_place, find_own_folder
from shardway.runfile.schema import RunFile

_CACHE = "TORCHINDUCTOR_CACHE_DIR"


@dataclass(frozen=True)
class CompileOptions:
    """`mode` is train.compile; `backend` a backend of torch.compile."""

    mode: str = "off"
    backend: str | Callable[..., Any] = "inductor"


def apply_compile(model: nn.Module, units: Sequence[nn.Module], options: CompileOptions) -> None:
    """Have the units (the model, where it has none) or the whole model compiled at their first call.

    One graph serves all blocks that are built alike. Of a whole model with sharded blocks, each block becomes a graph
    between the hooks that gather its weights. Of a replicated one all gradients are ready only at the end of its one
    graph, so that they do not travel while it computes.
    """
    modules = {"off": (), "blocks": tuple(units) or (model,), "model": (model,)}
    for module in modules[options.mode]:
        if module.forward.__module__.startswith("torch."):
            module.forward = partial(_call, module.forward)
        module.compile(backend=options.backend)


def _call(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A frame outside torch: the compiler passes over torch's own, and a block of one of its classes (such as
    `nn.TransformerEncoderLayer`) would quietly run uncompiled."""
    return forward(*args, **kwargs)


def set_compile_cache(configured: str, environ: Mapping[str, str] = os.environ) -> None:
    """Keep compiled code in train.compile_cache; "auto" is the folder that torch's own variable names, or else
    `compiled` in shardway's part of the user's cache folder.

    torch has no other door to this than an environment variable, which compile workers inherit. Raises UserError
    where "auto" finds no folder or the folder cannot be made.
    """
    if configured == "auto" and environ.get(_CACHE):
        return
    folder = _auto_folder() if configured == "auto" else expand_place(configured)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"train.compile_cache: the folder {folder} cannot be made ({error.strerror}).\n"
            "  To do: set train.compile_cache to a folder that can be written to."
        ) from None
    os.environ[_CACHE] = str(folder.resolve())


def _auto_folder() -> Path:
    folder = find_own_folder("CACHE")
    if folder is None:
        raise UserError(
            'train.compile_cache: "auto" needs a home folder, and this account has none.\n'
            "  To do: set train.compile_cache to a folder."
        )
    return folder / "compiled"


# --- backend flags of the process

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


# --- units of sharding, compilation and recompute


def find_units(model: nn.Module, plan: ModelPlan | None) -> list[nn.Module]:
    """The units of a model, in the order of its modules; empty for one that has no repeated part.

    Without a plan these are the members with parameters of the outermost `nn.ModuleList`s and `nn.Sequential`s.
    """
    if plan is not None:
        return [module for _, module in match_modules(model, plan.blocks)]
    return _repeated_parts(model)


def _repeated_parts(module: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            found += [part for part in child.children() if any(True for _ in part.parameters())]
        else:
            found += _repeated_parts(child)
    return found
