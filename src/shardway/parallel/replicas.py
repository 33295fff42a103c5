"""Whether ranks that hold the same part of a parameter hold the same bits.

Invariant: all ranks come to the same list of differences, and what travels is a few numbers a rank while there are
none. This module must not decide what a difference means.

Copies that start alike and take the same updates stay alike bit for bit, over dp_replicate and over every axis on which
a parameter is whole; a difference means that a rank has computed, moved or kept something wrong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from shardway.models.contract import canonical_name
from shardway.parallel.bit_checksum import sum_bits
from shardway.parallel.mesh import Mesh, Part
from shardway.ranks.start import Ranks

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
