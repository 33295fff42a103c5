"""Recompute: a block is computed again in the backward pass, whole or but for the results of chosen operators.

Invariants:
- The n-th result of an operator in the forward pass is what its n-th call gets when the region is computed again, as
  often as that happens; every other operator runs again.
- Gradients are those without it, bit for bit, random numbers included; no module enters the tree, so the names of
  parameters stay. Recompute is inside the block: what compiles or shards a block goes around it.

torch's own contexts (`create_selective_checkpoint_contexts`, which the compiler knows and gets) compare every operator
of both passes and allow one backward pass. Weights that are gathered inside a region are gathered once more when it is
computed again, and a schedule that splits the backward pass computes it again twice: both are in order here.

Full recompute is that of Chen et al. (arXiv:1604.06174); keeping the results of chosen operators follows Korthikanti
et al. (arXiv:2205.05198, section 5), whose choice was by module.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from shardway.errors import UserError
from shardway.runfile.schema import RecomputeSection

# --- selective recompute without the compiler

Operator = torch._ops.OpOverload


@dataclass(frozen=True)
class _Kept:
    """A result, and how often it had been changed in place when it was new."""

    tensor: torch.Tensor
    version: int

    def hand_out(self, operator: Operator) -> torch.Tensor:
        """The result as a new tensor, to which autograd may attach a history."""
        if self.tensor._version != self.version:
            raise UserError(
                f"the model changes in place what {operator} has returned, and recompute.save_ops keeps that result "
                "for the backward pass.\n  To do: leave that operator out of recompute.save_ops, or write the change "
                "as an operation of its own (`x = x + y`, not `x += y`)."
            )
        return self.tensor.detach()


def keeping(operators: Collection[Operator]) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """What goes around the forward pass of a region and around each time it is computed again (`context_fn` of
    `torch.utils.checkpoint.checkpoint`)."""
    kept: dict[Operator, list[Any]] = defaultdict(list)
    return _Keep(operators, kept), _HandOut(operators, kept)


class _Mode(TorchDispatchMode):
    def __init__(self, operators: Collection[Operator], kept: dict[Operator, list[Any]]) -> None:
        super().__init__()
        self._operators, self._kept = operators, kept

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """This mode ignores a compiled function inside the region."""
        return True


class _Keep(_Mode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self._operators:
            self._kept[func].append(tree_map(_keep, result))
        return result


class _HandOut(_Mode):
    def __enter__(self) -> Any:
        self._calls: dict[Operator, int] = defaultdict(int)
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self._operators:
            return func(*args, **(kwargs or {}))
        call = self._calls[func]
        self._calls[func] += 1
        if call >= len(self._kept[func]):
            raise UserError(
                f"a block calls {func} more often when it is computed again than in the forward pass, so that "
                'recompute.mode = "selective" cannot match its results.\n  To do: set recompute.mode = "full", or '
                "leave that operator out of recompute.save_ops."
            )
        return tree_map(lambda kept: kept.hand_out(func) if isinstance(kept, _Kept) else kept, self._kept[func][call])


def _keep(value: Any) -> Any:
    """Detached, or the history that autograd attaches to the result would keep itself alive; yet as a view that counts
    changes in place with it, which is what this dispatch key is for."""
    if not isinstance(value, torch.Tensor):
        return value
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return _Kept(value.detach(), value._version)


# --- recompute of blocks

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

    Mode "budget" changes nothing here: the compiler chooses (`parallel.compile`). Raises UserError where an
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
