"""Counts what a rank hands to collectives, whoever calls them: Python, DTensor, autograd, or DDP's C++ reducer.

    with CollectiveTracer() as tracer:
        take_a_step()
    tracer.tally()    # {Sent("all_reduce", (0, 1)): 64, ...}

Invariant: every collective of this process passes through torch's dispatcher as an operator of `c10d` or
`_c10d_functional`, and one that this module does not know raises, so that none is left out in silence. What counts is
the payload that enters on this rank (`shardway.plan.traffic` says what that is for each kind).

A group of one rank has nobody to talk to: what "enters" there goes nowhere and is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardway.plan.traffic import Kind

COLLECTIVES: Mapping[str, tuple[Kind, int]] = MappingProxyType(
    {
        "c10d.allreduce_": ("all_reduce", 0),
        "c10d._allgather_base_": ("all_gather", 1),
        "c10d.allgather_": ("all_gather", 1),
        "c10d._reduce_scatter_base_": ("reduce_scatter", 1),
        "c10d.alltoall_base_": ("all_to_all", 1),
        "c10d.broadcast_": ("broadcast", 0),
        "c10d.send": ("send", 0),
        "c10d.recv_": ("receive", 0),
        "_c10d_functional.all_reduce": ("all_reduce", 0),
        "_c10d_functional.all_reduce_": ("all_reduce", 0),
        "_c10d_functional.all_gather_into_tensor": ("all_gather", 0),
        "_c10d_functional.reduce_scatter_tensor": ("reduce_scatter", 0),
        "_c10d_functional.all_to_all_single": ("all_to_all", 0),
    }
)
"""Operator -> its kind, and which argument holds what enters (for `receive`, what arrives)."""

SILENT = frozenset({"_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor_autograd"})
"""Operators of these namespaces that send nothing."""


@dataclass(frozen=True)
class Sent:
    """Payloads of one kind in one group, given by its ranks in the whole world."""

    kind: Kind
    ranks: tuple[int, ...]


class CollectiveTracer(TorchDispatchMode):
    """Counts the payload bytes of all collectives inside its context, and lets each happen."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes: Counter[Sent] = Counter()
        self.calls: Counter[Sent] = Counter()

    def tally(self) -> dict[Sent, int]:
        """Bytes by kind and group."""
        return dict(self._bytes)

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # A mode comes before tensor subclasses; DTensor shall first become the collectives that it stands for.
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        self._note(func, args)
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, args: tuple[Any, ...]) -> None:
        if getattr(func, "namespace", "") not in ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"):
            return
        name = str(func.overloadpacket)
        if name in SILENT:
            return
        if name not in COLLECTIVES:
            raise NotImplementedError(f"the tracer does not know the collective {name}")
        kind, place = COLLECTIVES[name]
        ranks = tuple(dist.get_process_group_ranks(_group_of(func, args)))
        if len(ranks) > 1:
            self._bytes[Sent(kind, ranks)] += _count_bytes(args[place])
            self.calls[Sent(kind, ranks)] += 1


def _group_of(func: Any, args: tuple[Any, ...]) -> dist.ProcessGroup:
    """The group among an operator's arguments: by name for functional collectives, as an object for the others."""
    places = {argument.name: place for place, argument in enumerate(func._schema.arguments)}
    if "group_name" in places:
        return _resolve_process_group(args[places["group_name"]])
    return dist.ProcessGroup.unbox(args[places["process_group"]])


def _count_bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tree_leaves(tensors))
