"""Whether ranks that hold the same part of a parameter hold the same bits: checksums are compared, not tensors.

Invariants:
- Equal bits give equal sums on every device and in every order, and one flipped bit another sum.
- All ranks come to the same list of differences, and what travels is a few numbers a rank while there are none.

A sum is that of the elements, read as integers of their own width, modulo 2**64. Several changes can cancel each
other, by chance about as seldom as one in 2**32.

Copies that start alike and take the same updates stay alike bit for bit, over dp_replicate and over every axis on which
a parameter is whole; a difference means that a rank has computed, moved or kept something wrong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardway.models.contract import canonical_name, held_by_rank
from shardway.parallel.mesh import Mesh, Part
from shardway.ranks.start import Ranks

# --- bit checksums of tensors

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


@torch.no_grad()
def sum_bits(tensors: Iterable[torch.Tensor]) -> list[int]:
    """One number for each tensor, of the part that this rank holds."""
    sums = [_sum(held_by_rank(tensor)) for tensor in tensors]
    places: dict[torch.device, list[int]] = {}
    for place, each in enumerate(sums):
        places.setdefault(each.device, []).append(place)
    found = [0] * len(sums)
    for own in places.values():  # one read for each device
        for place, value in zip(own, torch.stack([sums[place] for place in own]).tolist(), strict=True):
            found[place] = value
    return found


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    parts = [_as_integers(part).sum(dtype=torch.int64) for part in _plain(tensor)]
    return torch.stack(parts).sum() if len(parts) > 1 else parts[0]


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor, or those that one of a library's own class is made of."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        inner = getattr(tensor, name)
        if inner is not None:
            yield from _plain(inner)


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    width = tensor.element_size()
    if width > 8:  # complex128
        tensor, width = torch.view_as_real(tensor), 8
    return tensor.detach().view(_INTEGERS[width.bit_length() - 1])


# --- the comparison of replicas

Sums = Mapping[Part, Mapping[str, int]]
"""Part that a rank holds -> name of a parameter -> sum of its bits."""


@dataclass(frozen=True)
class ReplicaDifference:
    """A parameter whose copies differ, and the ranks whose copies are not those of the majority.

    Without a majority (`decided` False) these are all ranks that should have held the same.
    """

    parameter: str
    ranks: tuple[int, ...]
    decided: bool


def compare_replicas(model: nn.Module, mesh: Mesh, ranks: Ranks) -> list[ReplicaDifference]:
    """The parameters of a model (of this rank's stages) that are not alike where they should be; on all ranks."""
    own = _sum_parts(model, mesh)
    digests = ranks.gather({part: _digest(sums) for part, sums in own.items()})
    if not any(len({each[part] for each in digests if part in each}) > 1 for each in digests for part in each):
        return []
    return list(_find_differences(ranks.gather(own)))


def _sum_parts(model: nn.Module, mesh: Mesh) -> Sums:
    named = [(canonical_name(name), parameter) for name, parameter in model.named_parameters()]
    found: dict[Part, dict[str, int]] = {}
    for (name, parameter), value in zip(named, sum_bits(parameter for _, parameter in named), strict=True):
        found.setdefault(mesh.part_held(parameter), {})[name] = value
    return found


def _digest(sums: Mapping[str, int]) -> str:
    return hashlib.blake2b(repr(sorted(sums.items())).encode(), digest_size=16).hexdigest()


def _find_differences(gathered: list[Sums]) -> Iterator[ReplicaDifference]:
    holders: dict[tuple[Part, str], dict[int, list[int]]] = {}
    for rank, parts in enumerate(gathered):
        for part, sums in parts.items():
            for name, value in sums.items():
                holders.setdefault((part, name), {}).setdefault(value, []).append(rank)
    for (_, name), by_value in sorted(holders.items(), key=lambda item: (item[0][1], item[0][0])):
        if len(by_value) > 1:
            yield _judge(name, list(by_value.values()))


def _judge(name: str, camps: list[list[int]]) -> ReplicaDifference:
    """Ranks that agree are a camp; one with more than half of all ranks is right."""
    everyone = sorted(rank for camp in camps for rank in camp)
    right = next((camp for camp in camps if 2 * len(camp) > len(everyone)), [])
    return ReplicaDifference(name, tuple(rank for rank in everyone if rank not in right), bool(right))
