"""The libraries that a plan can be exported to, by name.

Invariant: one entry per library; nothing else in Shardway lists them. What they write is their modules' own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from shardway.errors import Problem, UserError, render_problems
from shardway.plan.case import Case
from shardway.plan.emit import accelerate, deepspeed, megatron, nemo, torchtitan
from shardway.plan.emit.common import Emitted, Emitter

EMITTERS: Mapping[str, Emitter] = MappingProxyType(
    {
        "torchtitan": torchtitan.emit,
        "megatron": megatron.emit,
        "deepspeed": deepspeed.emit,
        "accelerate": accelerate.emit,
        "nemo": nemo.emit,
    }
)
"""The writer of each library, by its name."""


ENGINES: Mapping[str, str] = MappingProxyType(
    {
        "torchtitan": "torchtitan",
        "megatron": "megatron",
        "deepspeed": "deepspeed",
        "accelerate": "fsdp2",
        "nemo": "nemo",
    }
)
"""The engine whose prediction goes with a library's configuration."""


def emit(library: str, case: Case, prediction_lines: Sequence[str]) -> Emitted:
    """A case as that library's configuration. Raises UserError with the known libraries."""
    if library not in EMITTERS:
        problem = Problem("--emit", f'"{library}" is not known', allowed=", ".join(EMITTERS))
        raise UserError(render_problems("the plan", [problem]))
    return EMITTERS[library](case, prediction_lines)
