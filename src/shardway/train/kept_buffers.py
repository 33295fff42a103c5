"""Buffers of modules that a script keeps, averages of weights for one: alike on all ranks before they are saved.

Each rank's running statistics come from its own samples, and so do those that an average makes of them. A checkpoint
has one copy of what is kept, so without this a rank would go on with the statistics of another.

Invariant: only what every rank keeps under the same name takes part, so no rank waits for another. This module must
not save.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor import DTensor

from shardway.parallel.axes.replicate import average_buffers
from shardway.parallel.mesh import Mesh
from shardway.ranks.start import Ranks


def average_kept_buffers(objects: Mapping[str, object], ranks: Ranks, mesh: Mesh) -> None:
    """Set floating-point buffers of kept modules to their mean over the ranks, as those of the run's models are; called
    on all ranks together."""
    if ranks.world == 1:
        return
    modules = {name: each for name, each in objects.items() if isinstance(each, nn.Module) and _has_statistics(each)}
    here = {(name, tuple((key, tuple(each.shape)) for key, each in m.named_buffers())) for name, m in modules.items()}
    for name, _ in sorted(set.intersection(*ranks.gather(here))):
        average_buffers(modules[name], mesh)


def _has_statistics(module: nn.Module) -> bool:
    buffers = list(module.buffers())
    return any(each.is_floating_point() for each in buffers) and not any(isinstance(each, DTensor) for each in buffers)
