"""States kept in bf16: widened for the update, rounded back stochastically.

Invariant: a rounded value has the exact one as its mean, and how it is rounded is a pure function of step and
row-major index in the whole parameter, so that a run repeats itself and every layout rounds alike. This module must
not touch a random generator of torch.

Rounding to the nearest would stall second moments: with beta2 = 0.999 they move by at most 1/1000 of themselves when
they fall, and two neighbours in bf16 lie 1/256 to 1/128 apart (measured in docs/decisions/0011).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from shardway.train.optim.parts import Kernel, Part, split_rows

WORKING = 2**22
WORKING_ON_CPU = 2**18
"""Elements that are widened at once: bounds the working memory to about 100 MiB, or to what caches hold."""

_MIX = ((16, 0x7FEB352D), (15, 0x846CA68B))
_STEP = 0x9E3779B9
_LOW = 0xFFFF
_LARGEST = 0x7FFF0000


@dataclass(frozen=True)
class _Wide:
    """fp32 copies of the states of some parts: `flat[k]` holds state k of all of them, the parts look into it."""

    flat: tuple[torch.Tensor, ...]
    parts: tuple[Part, ...]


def update_widened(parts: Sequence[Part], kernel: Kernel, working: int | None = None) -> None:
    """Run a kernel on fp32 copies of at most two states a part, then round those back into the states.

    `working` changes memory and speed, never values.
    """
    on_cpu = parts[0].parameter.device.type == "cpu"
    for bucket in _fill_buckets(parts, working or (WORKING_ON_CPU if on_cpu else WORKING)):
        wide = _widen(bucket)
        kernel(wide.parts)
        _narrow(wide, bucket)


def round_stochastically(values: torch.Tensor, noise: torch.Tensor) -> None:
    """Cut fp32 values in place to what bf16 can hold, upwards in magnitude with the probability of what is cut off.

    `noise` holds uniform integers of 16 bits in int32. Infinity and NaN stay what they are.
    """
    bits = values.view(torch.int32)
    bits.clamp_(max=_LARGEST)  # CUDA's NaN is all ones: a carry would wrap it to zero
    bits.add_(noise).bitwise_and_(~_LOW)


def noise_of(part: Part) -> torch.Tensor:
    """32 random bits for each element of a part, int32 in its shape.

    The mixing function is "lowbias32" (Wellons, "Prospecting for Hash Functions", 2018) on index + step * odd.
    """
    state = _index(part)
    state.add_(_signed(part.step * _STEP))
    for shift, factor in _MIX:
        state.bitwise_xor_(_shift_right(state, shift)).mul_(_signed(factor))
    return state.bitwise_xor_(_shift_right(state, 16))


def _fill_buckets(parts: Sequence[Part], working: int) -> Iterator[list[Part]]:
    bucket: list[Part] = []
    room = working
    for part in parts:
        for piece in split_rows(part, working):
            if bucket and piece.parameter.numel() > room:
                yield bucket
                bucket, room = [], working
            bucket.append(piece)
            room -= piece.parameter.numel()
    if bucket:
        yield bucket


def _widen(bucket: Sequence[Part]) -> _Wide:
    sizes = [part.parameter.numel() for part in bucket]
    flat = tuple(torch.empty(sum(sizes), device=bucket[0].parameter.device) for _ in bucket[0].states)
    columns = [
        [piece.view(part.parameter.shape) for piece, part in zip(each.split(sizes), bucket, strict=True)]
        for each in flat
    ]
    for views, narrow in zip(columns, zip(*(part.states for part in bucket), strict=True), strict=True):
        torch._foreach_copy_(views, list(narrow))
    parts = (replace(part, states=states) for part, states in zip(bucket, zip(*columns, strict=True), strict=True))
    return _Wide(flat, tuple(parts))


def _narrow(wide: _Wide, bucket: Sequence[Part]) -> None:
    noise = torch.cat([noise_of(part).view(-1) for part in bucket])
    for place, flat in enumerate(wide.flat):
        round_stochastically(flat, noise >> (16 * place) & _LOW)
        torch._foreach_copy_([part.states[place] for part in bucket], [part.states[place] for part in wide.parts])


def _index(part: Part) -> torch.Tensor:
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
