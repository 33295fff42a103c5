"""Initial values that do not depend on the layout.

Invariant: every value is a pure function of (seed, parameter name, row-major index of the element in the whole
parameter). A rank computes only the slice that it holds, with the same bits on CPU and CUDA, in any sharding and any
world size: all arithmetic is on integers until one float32 multiplication. This module must not touch torch's random
generators.

Element i takes outputs 2i and 2i+1 of splitmix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
Generators", OOPSLA 2014), whose state starts at a hash of seed and name. Their eight 16-bit pieces are summed: the
Irwin-Hall approximation of a normal variable (Johnson, Kotz and Balakrishnan, "Continuous Univariate Distributions"
vol. 2, section 26.9).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shardway.errors import Bug
from shardway.models.contract import canonical_name

CHUNK = 2**18
"""Elements computed at once: bounds the working memory to about 16 MiB however large the parameter is."""

_GAMMA = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LANES = 0x0000FFFF0000FFFF
_PIECES = 8
_CENTRE = _PIECES * (2**16 - 1) // 2
_SPREAD = math.sqrt(_PIECES * (2**32 - 1) / 12)


@dataclass(frozen=True)
class HeldSlice:
    """The part of a parameter that this rank holds: `local` starts at `offset` of a tensor of `shape`."""

    local: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]


@torch.no_grad()
def normal_(tensor: torch.Tensor, *, seed: int, name: str, std: float, chunk: int = CHUNK) -> None:
    """Fill a floating-point tensor or DTensor with approximately normal values of mean 0.

    The discrete distribution has exactly the standard deviation `std` (before rounding to the dtype), skewness 0,
    excess kurtosis -6/(5*8) = -0.15 and no value beyond sqrt(3*8) = 4.9 std. Values are computed in float32 and
    then rounded to the tensor's dtype. `chunk` changes memory and speed, never values.
    """
    held = held_part(tensor, name)
    key = _signed(stream_key(seed, name))
    buffer = held.local.contiguous()
    _fill(held, buffer.view(-1), key, std, chunk)
    if buffer is not held.local:
        held.local.copy_(buffer)


@torch.no_grad()
def constant_(tensor: torch.Tensor, value: float, *, name: str) -> None:
    """Fill a tensor or DTensor with one value."""
    held_part(tensor, name).local.fill_(value)


def fill_parameters(
    model: nn.Module,
    seed: int,
    std: Callable[[str, nn.Parameter], float],
    zeros: tuple[str, ...] = ("bias",),
    name_of: Callable[[str], str] = canonical_name,
) -> None:
    """Fill every parameter of a model: matrices with the standard deviation `std` of a name, vectors with 1, or with 0
    where their names end with one of `zeros`. The values depend on seed and name alone. `name_of` gives that name; a
    parameter for which it is "" is left alone."""
    for own_name, parameter in model.named_parameters():
        if not (name := name_of(own_name)):
            continue
        if parameter.dim() < 2:
            constant_(parameter, 0.0 if name.endswith(zeros) else 1.0, name=name)
        else:
            normal_(parameter, seed=seed, name=name, std=std(name, parameter))


def stream_key(seed: int, name: str) -> int:
    """The 64-bit start of the stream of one parameter."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")


def held_part(tensor: torch.Tensor, name: str) -> HeldSlice:
    """What this rank holds of a tensor. Raises Bug for a meta tensor or a layout that has no single slice."""
    if tensor.is_meta:
        raise Bug(f'parameter "{name}" is still on the meta device; call to_empty before init_weights')
    if not isinstance(tensor, DTensor):
        return HeldSlice(tensor, tuple(tensor.shape), (0,) * tensor.dim())
    local = tensor.to_local()
    extent, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if any(placement.is_partial() for placement in tensor.placements) or tuple(local.shape) != tuple(extent):
        raise Bug(f'parameter "{name}" is laid out as {tensor.placements}, which is no slice of it')
    return HeldSlice(local, tuple(tensor.shape), tuple(offset))


def _fill(held: HeldSlice, out: torch.Tensor, key: int, std: float, chunk: int) -> None:
    # Dims that are held whole are folded into the dim before them: a slice of rows becomes one range.
    dims: list[tuple[int, int, int]] = []  # (size in the whole tensor, length here, first of it)
    for size, length, first in zip(held.shape, held.local.shape, held.offset, strict=True):
        if dims and size == length:
            dims[-1] = (dims[-1][0] * size, dims[-1][1] * size, dims[-1][2] * size)
        else:
            dims.append((size, length, first))
    (_, _, outermost), *inner = dims or [(1, 1, 0)]
    for start in range(0, out.numel(), chunk):
        piece = out[start : start + chunk]
        # Row-major positions in the local tensor -> row-major indices in the whole one.
        positions = torch.arange(start, start + piece.numel(), dtype=torch.int64, device=out.device)
        index, stride = torch.zeros_like(positions), 1
        for size, length, first in reversed(inner):
            index += (positions % length + first) * stride
            positions, stride = positions // length, stride * size
        piece.copy_(_values(index.add_((positions + outermost) * stride), key, std))


def _values(index: torch.Tensor, key: int, std: float) -> torch.Tensor:
    counter = index * _signed(2 * _GAMMA) + key
    lanes = _sum_lanes(_splitmix64(counter + _signed(_GAMMA)))
    lanes += _sum_lanes(_splitmix64(counter + _signed(2 * _GAMMA)))
    total = (lanes & 0xFFFFFFFF) + (lanes >> 32)
    return (total - _CENTRE).to(torch.float32) * (std / _SPREAD)  # |total - centre| < 2**24: exact in float32


def _splitmix64(state: torch.Tensor) -> torch.Tensor:
    """The output function of splitmix64; int64 products wrap as its unsigned ones do."""
    for shift, factor in _ROUNDS:
        state ^= _shift_right(state, shift)
        state *= _signed(factor)
    return state ^ _shift_right(state, 31)


def _shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift; torch shifts int64 arithmetically."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _sum_lanes(word: torch.Tensor) -> torch.Tensor:
    """The four 16-bit pieces of each word, added pairwise into its two 32-bit halves."""
    return (word & _LANES) + ((word >> 16) & _LANES)


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned number modulo 2**64."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value
