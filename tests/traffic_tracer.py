"""Counts what a rank hands to collectives, whoever calls them: Python, DTensor, autograd, or DDP's C++ reducer.

    with CollectiveTracer() as tracer:
        take_a_step()
    tracer.tally()    # {Sent("all_reduce", (0, 1)): 64, ...}

Invariant: none is left out in silence. Each passes through torch's dispatcher as an operator of `c10d` or
`_c10d_functional`, where an unknown one raises; and at the end as many must have been seen as the groups themselves
have numbered (gloo numbers every collective, sends and receives included). What counts is the payload that enters on
this rank (`exact_traffic` says what that is for each kind).

A group of one rank has nobody to talk to: what "enters" there goes nowhere and is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group, _world
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COLLECTIVES: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "c10d.allreduce_": ("all_reduce", 0),
        "c10d._allgather_base_": ("all_gather", 1),
        "c10d._reduce_scatter_base_": ("reduce_scatter", 1),
        "c10d.alltoall_base_": ("all_to_all", 1),
        "c10d.broadcast_": ("broadcast", 0),
        "c10d.send": ("send", 0),
        "c10d.recv_": ("receive", 0),
        "_c10d_functional.all_reduce": ("all_reduce", 0),
        "_c10d_functional.all_gather_into_tensor": ("all_gather", 0),
        "_c10d_functional.reduce_scatter_tensor": ("reduce_scatter", 0),
    }
)
"""Operator -> its kind, and which argument holds what enters (for `receive`, what arrives)."""

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
SILENT = frozenset({"_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor_autograd"})
"""Operators of these namespaces that send nothing."""


@dataclass(frozen=True)
class Sent:
    """Payloads of one kind in one group, given by its ranks in the whole world."""

    kind: str
    ranks: tuple[int, ...]


class CollectiveTracer(TorchDispatchMode):
    """Counts the payload bytes of all collectives inside its context, and lets each happen."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes: Counter[Sent] = Counter()
        self._seen: Counter[str] = Counter()
        self._numbers: dict[str, int] = {}

    def tally(self) -> dict[Sent, int]:
        """Bytes by kind and group."""
        return dict(self._bytes)

    def __enter__(self) -> CollectiveTracer:
        self._numbers = _sequence_numbers()
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        happened = {name: number - self._numbers.get(name, 0) for name, number in _sequence_numbers().items()}
        assert error is not None or happened == {name: self._seen[name] for name in happened}

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # A mode comes before tensor subclasses; DTensor shall first become the collectives that it stands for.
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if getattr(func, "namespace", "") in NAMESPACES and str(func.overloadpacket) not in SILENT:
            self._note(func, args)
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, args: tuple[Any, ...]) -> None:
        name = str(func.overloadpacket)
        if name not in COLLECTIVES:
            raise NotImplementedError(f"the tracer does not know the collective {name}")
        kind, place = COLLECTIVES[name]
        group = _group_of(func, args)
        ranks = tuple(dist.get_process_group_ranks(group))
        self._seen[group.group_name] += 1
        if len(ranks) > 1:
            self._bytes[Sent(kind, ranks)] += _count_bytes(args[place])


def _sequence_numbers() -> dict[str, int]:
    """How many collectives each group of this process has numbered so far."""
    return {group.group_name: group._get_sequence_number_for_group() for group in _world.pg_map}


def _group_of(func: Any, args: tuple[Any, ...]) -> dist.ProcessGroup:
    """The group among an operator's arguments: by name for functional collectives, as an object for the others."""
    places = {argument.name: place for place, argument in enumerate(func._schema.arguments)}
    if "group_name" in places:
        return _resolve_process_group(args[places["group_name"]])
    return dist.ProcessGroup.unbox(args[places["process_group"]])


def _count_bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tree_leaves(tensors))
