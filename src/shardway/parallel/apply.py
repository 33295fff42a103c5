"""The one ordered function that makes a model parallel: compile, shard or replicate, materialise, initialise.

Invariant: the order is written here and nowhere else, and the model that comes out computes the same loss whatever
the degrees. This module must not enumerate combinations of axes: each axis is a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardway.errors import UserError
from shardway.parallel.mesh import Mesh
from shardway.parallel.precision import Precision
from shardway.parallel.replicate import broadcast_from_first, replicate
from shardway.parallel.shard import shard
from shardway.parallel.units import find_units
from shardway.runfile.schema import ParallelSection


@dataclass(frozen=True)
class ApplyOptions:
    """What the run file says of how a model becomes parallel, and the seed of its initial weights."""

    parallel: ParallelSection
    precision: Precision
    compile: str = "off"
    seed: int = 0


def apply_parallelism(model: nn.Module, mesh: Mesh, device: torch.device, options: ApplyOptions) -> nn.Module:
    """Make a model parallel on this mesh, in place where it can be, and return what is to be called.

    A model on the meta device is materialised and filled by its own `init_weights(seed)`; a model that already has
    weights keeps those of rank 0. Raises UserError where the model cannot be initialised or split.
    """
    on_meta = _check_device(model)
    if not on_meta:
        model.to(device)
        broadcast_from_first(model, mesh)
    units = find_units(model)
    if options.compile == "blocks":
        for unit in units or [model]:
            unit.compile()
    if mesh.degrees["dp_shard"] > 1:
        shard(model, units, mesh, options.parallel, options.precision)
    if on_meta:
        _materialise(model, device, options.seed)
    if mesh.degrees["dp_replicate"] > 1 and mesh.degrees["dp_shard"] == 1:
        return replicate(model, mesh, options.parallel)
    return model


def _check_device(model: nn.Module) -> bool:
    """Whether the model is on the meta device; UserError where it is so in part, or cannot leave it."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    on_meta = [name for name, tensor in tensors if tensor.is_meta]
    if on_meta and len(on_meta) < len(tensors):
        raise UserError(
            f"{type(model).__name__} is partly on the meta device ({on_meta[0]} and {len(on_meta) - 1} more are, of "
            f"{len(tensors)} tensors).\n  To do: build the whole model under one `with torch.device(...)`."
        )
    if on_meta and not callable(getattr(model, "init_weights", None)):
        raise UserError(
            f"{type(model).__name__} was built on the meta device and has no init_weights(seed) that fills it.\n"
            "  To do: build it on a real device, or give it that method."
        )
    return bool(on_meta)


def _materialise(model: nn.Module, device: torch.device, seed: int) -> None:
    ties = _find_ties(model)
    model.to_empty(device=device)
    for names in ties:
        _tie(model, names)
    model.init_weights(seed)  # type: ignore[operator]


def _find_ties(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several; `to_empty` makes a tensor of its own for each of them."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def _tie(model: nn.Module, names: Sequence[str]) -> None:
    first, *others = names
    for name in others:
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, model.get_parameter(first))
