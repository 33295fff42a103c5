"""Weights and states kept in bf16: widened for the update, rounded back stochastically.

Invariant: a rounded value has the exact one as its mean, and how it is rounded is a pure function of step and
row-major index in the whole parameter, so that a run repeats itself, every layout rounds alike and replicas stay
equal. This module must not touch a random generator of torch.

Rounding to the nearest would stall second moments: with beta2 = 0.999 they fall by at most 1/1000 of themselves, and
two neighbours in bf16 lie 1/256 to 1/128 apart. Weights lose small updates in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from shardway.train.optim.parts import Kernel, ParameterPart, split_rows

WORKING = 2**22
WORKING_ON_CPU = 2**18
"""Elements that are widened at once: bounds the working memory to about 100 MiB, or to what caches hold."""

_MIX = ((16, 0x7FEB352D), (15, 0x846CA68B))
_STEP = 0x9E3779B9
_STREAM = 0x85EBCA6B
_LOW = 0xFFFF
_LARGEST = 0x7FFF0000


@dataclass(frozen=True)
class _Column:
    """One tensor of each part of a bucket: `wide` in fp32, looking into `flat` where `narrow` is what they copy."""

    wide: tuple[torch.Tensor, ...]
    narrow: tuple[torch.Tensor, ...]
    flat: torch.Tensor


def is_narrow(part: ParameterPart) -> bool:
    """Whether some tensor of the part is kept in bf16."""
    return torch.bfloat16 in [tensor.dtype for tensor in part.tensors]


def update_widened(parts: Sequence[ParameterPart], kernel: Kernel, working: int | None = None) -> None:
    """Run a kernel on fp32 copies of what parts hold in bf16, then round weights and states back.

    `working` changes memory and speed, never values.
    """
    on_cpu = parts[0].parameter.device.type == "cpu"
    for bucket in _fill_buckets(_sort_by_format(parts), working or (WORKING_ON_CPU if on_cpu else WORKING)):
        columns = [_widen(column) for column in zip(*(part.tensors for part in bucket), strict=True)]
        wide = zip(*(column.wide for column in columns), strict=True)
        kernel([part.with_tensors(tensors) for part, tensors in zip(bucket, wide, strict=True)])
        weights, _, *states = columns
        _narrow([weights, *states], bucket)


def round_stochastically(values: torch.Tensor, noise: torch.Tensor) -> None:
    """Cut fp32 values in place to what bf16 can hold, upwards in magnitude with the probability of what is cut off.

    `noise` holds uniform integers of 16 bits in int32. Infinity and NaN stay what they are.
    """
    bits = values.view(torch.int32)
    bits.clamp_(max=_LARGEST)  # CUDA's NaN is all ones: a carry would wrap it to zero
    bits.add_(noise).bitwise_and_(~_LOW)


def noise_of(part: ParameterPart, stream: int = 0) -> torch.Tensor:
    """32 random bits for each element of a part, int32 in its shape.

    The mixing function is "lowbias32" (Wellons, "Prospecting for Hash Functions", 2018) on index + step * odd.
    """
    state = _index(part)
    state.add_(_signed(part.step * _STEP + stream * _STREAM))
    for shift, factor in _MIX:
        state.bitwise_xor_(_shift_right(state, shift)).mul_(_signed(factor))
    return state.bitwise_xor_(_shift_right(state, 16))


def _sort_by_format(parts: Sequence[ParameterPart]) -> list[list[ParameterPart]]:
    """Parts whose tensors have the same formats, together."""
    alike: dict[tuple[torch.dtype, ...], list[ParameterPart]] = {}
    for part in parts:
        alike.setdefault(tuple(tensor.dtype for tensor in part.tensors), []).append(part)
    return list(alike.values())


def _fill_buckets(groups: Sequence[Sequence[ParameterPart]], working: int) -> Iterator[list[ParameterPart]]:
    for parts in groups:
        bucket: list[ParameterPart] = []
        room = working
        for piece in (piece for part in parts for piece in split_rows(part, working)):
            if bucket and piece.parameter.numel() > room:
                yield bucket
                bucket, room = [], working
            bucket.append(piece)
            room -= piece.parameter.numel()
        if bucket:
            yield bucket


def _widen(tensors: Sequence[torch.Tensor]) -> _Column:
    if tensors[0].dtype is not torch.bfloat16:
        return _Column(tuple(tensors), (), torch.empty(0))
    sizes = [tensor.numel() for tensor in tensors]
    flat = torch.empty(sum(sizes), device=tensors[0].device)
    wide = tuple(piece.view(tensor.shape) for piece, tensor in zip(flat.split(sizes), tensors, strict=True))
    torch._foreach_copy_(list(wide), list(tensors))
    return _Column(wide, tuple(tensors), flat)


def _narrow(columns: Sequence[_Column], bucket: Sequence[ParameterPart]) -> None:
    """Round and write back; each draw of 32 bits serves two columns."""
    noise = torch.empty(0)
    for place, column in enumerate(column for column in columns if column.narrow):
        if place % 2 == 0:
            noise = torch.cat([noise_of(part, place // 2).view(-1) for part in bucket])
        round_stochastically(column.flat, noise >> (16 * (place % 2)) & _LOW)
        torch._foreach_copy_(list(column.narrow), list(column.wide))


def _index(part: ParameterPart) -> torch.Tensor:
    """Row-major indices of a part's elements in the whole parameter, modulo 2**32 as int32."""
    extent, device = part.parameter.shape, part.parameter.device
    index, stride = torch.zeros(extent, dtype=torch.int32, device=device), 1
    for dim in reversed(range(len(extent))):
        along = torch.arange(part.offset[dim], part.offset[dim] + extent[dim], device=device) * stride
        index += along.to(torch.int32).view(-1, *(1 for _ in extent[dim + 1 :]))
        stride *= part.shape[dim]
    return index


def _shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift; torch shifts int32 arithmetically."""
    return (value >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _signed(value: int) -> int:
    """The int32 with the bits of an unsigned number modulo 2**32."""
    value &= 2**32 - 1
    return value - 2**32 if value >= 2**31 else value
