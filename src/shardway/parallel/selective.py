"""Selective recompute outside of the compiler: results of chosen operators, kept in the forward pass, are handed out
again in the backward pass.

Invariant: the n-th result of an operator in the forward pass is what its n-th call gets when the region is computed
again, as often as that happens; every other operator runs again. This module must not choose operators.

torch's own contexts (`create_selective_checkpoint_contexts`, which the compiler knows and gets) compare every operator
of both passes and allow one backward pass. Weights that are gathered inside a region are gathered once more when it is
computed again, and a schedule that splits the backward pass computes it again twice: both are in order here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from shardway.errors import UserError

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
        """A compiled function inside the region is none of this mode's business."""
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
