"""Recompute: what a block computed in the forward pass is computed again in the backward pass instead of being kept.

Invariant: gradients are those without it, bit for bit, random numbers included; no module enters the tree, so the
names of parameters stay. Recompute is inside the block: what compiles or shards a block goes around it. This module
must not choose what to recompute.

Full recompute is that of Chen et al. (arXiv:1604.06174); keeping the results of chosen operators follows Korthikanti
et al. (arXiv:2205.05198, section 5), whose choice was by module.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from shardway.errors import UserError
from shardway.parallel.selective import keeping
from shardway.runfile.schema import RecomputeSection

OPERATORS = MappingProxyType(
    {
        "matmul": (
            "aten.mm",
            "aten.addmm",
            "aten.bmm",
            "aten.baddbmm",
            "aten.convolution",
            "aten._scaled_mm",
            "aten._grouped_mm",
            "aten._scaled_grouped_mm",
        ),
        "attention": (
            "aten._scaled_dot_product_flash_attention",
            "aten._scaled_dot_product_flash_attention_for_cpu",
            "aten._scaled_dot_product_efficient_attention",
            "aten._scaled_dot_product_cudnn_attention",
        ),
        "collective": (
            "_c10d_functional.all_reduce",
            "_c10d_functional.reduce_scatter_tensor",
            "_c10d_functional.all_to_all_single",
        ),
    }
)
"""Name of a group in `recompute.save_ops` -> its operators; those that this torch lacks do not count."""


def apply_recompute(units: Sequence[nn.Module], section: RecomputeSection) -> None:
    """Let every k-th unit recompute in the backward pass what it does not keep, in place.

    Mode "budget" changes nothing here: the compiler chooses (`parallel.switches`). Raises UserError where an
    operator of `save` does not exist.
    """
    if section.mode not in ("selective", "full"):
        return
    operators = find_operators(section.save_ops)
    contexts = _Contexts(
        partial(keeping, frozenset(operators)), partial(create_selective_checkpoint_contexts, operators)
    )
    for unit in units[:: section.every]:
        forward = unit.forward
        unit.forward = (
            partial(_recompute, forward) if section.mode == "full" else partial(_recompute_part, contexts, forward)
        )


@dataclass(frozen=True)
class _Contexts:
    """What goes around the passes of a region; the compiler knows torch's own and makes them a part of its graph."""

    eager: Callable[[], Any]
    compiled: Callable[[], Any]


# Functions of this module rather than `partial(checkpoint, ...)`: the compiler passes over torch's own frames, and a
# block whose outermost frame is `checkpoint` itself would quietly run uncompiled.
def _recompute(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _recompute_part(contexts: _Contexts, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    context = contexts.compiled if torch.compiler.is_compiling() else contexts.eager
    return checkpoint(forward, *args, use_reentrant=False, context_fn=context, **kwargs)


def find_operators(names: Sequence[str]) -> list[torch._ops.OpOverload]:
    """The operators behind the names of `recompute.save_ops`: groups, or operators such as "aten.mm".

    Raises UserError for a name that is neither.
    """
    found: list[torch._ops.OpOverload] = []
    for name in names:
        if name in OPERATORS:
            found += [overload for each in OPERATORS[name] for overload in _overloads(each)]
        elif overloads := list(_overloads(name)):
            found += overloads
        else:
            raise _no_operator(name)
    return found


def _overloads(name: str) -> Iterator[torch._ops.OpOverload]:
    namespace, _, operator = name.partition(".")
    packet = getattr(getattr(torch.ops, namespace), operator, None)
    if isinstance(packet, torch._ops.OpOverloadPacket):
        yield from (getattr(packet, overload) for overload in packet.overloads())


def _no_operator(name: str) -> UserError:
    near = difflib.get_close_matches(name, [each for group in OPERATORS.values() for each in group], n=1)
    hint = f"; the nearest known is {near[0]}" if near else ""
    return UserError(
        f'recompute.save_ops names "{name}", which is no operator of this torch{hint}.\n'
        f"  allowed: {', '.join(OPERATORS)}, or an operator such as aten.mm"
    )
