"""Tensors as the numbers that their bits make, for comparing them without moving them.

Invariant: equal bits give equal sums on every device and in every order, and one flipped bit another sum. This module
must not talk to other ranks.

A sum is that of the elements, read as integers of their own width, modulo 2**64. Several changes can cancel each
other, by chance about as seldom as one in 2**32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardway.models.contract import held_by_rank

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
