"""Compilation: torch.compile of each block, or of the whole model; what was compiled is kept between runs.

Invariant: a module is compiled in place, so that names stay and hooks of what goes around it still run; what is kept
on disk is keyed by its content and written whole, so that ranks and runs may share a folder. This module must not
compile anything itself: that happens at the first call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from shardway.errors import UserError
from shardway.places import expand_place, find_own_folder

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
