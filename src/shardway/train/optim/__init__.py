"""Optimizers by name, on whole, sharded and differently placed parameters in one.

Invariant: a step gives what it would give on one rank, in any layout. Elementwise state is placed as its parameter is
(a plain tensor or a DTensor of the same global shape), so that a checkpoint fits another layout. This room must not
scale, clip or average gradients.
"""

from __future__ import annotations

from shardway.train.optim.base import decay_groups, muon_groups
from shardway.train.optim.build import OPTIMIZERS, build_optimizer

__all__ = ["OPTIMIZERS", "build_optimizer", "decay_groups", "muon_groups"]
