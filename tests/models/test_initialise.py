from __future__ import annotations

import math
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardway.errors import Bug
from shardway.models.initialise import HeldSlice, _fill, _signed, _splitmix64, constant_, normal_, stream_key

MASK = 2**64 - 1


def splitmix64(state: int):
    """The generator of Steele, Lea and Flood with Python's unbounded integers."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        yield z ^ (z >> 31)


def reference_normal(count: int, seed: int, name: str, std: float) -> torch.Tensor:
    """The documented definition, one element at a time."""
    stream = splitmix64(stream_key(seed, name))
    scale = torch.tensor(std / math.sqrt(8 * (2**32 - 1) / 12), dtype=torch.float32)
    totals = []
    for _ in range(count):
        words = [next(stream), next(stream)]
        totals.append(sum((word >> shift) & 0xFFFF for word in words for shift in (0, 16, 32, 48)) - 4 * 65535)
    return torch.tensor(totals, dtype=torch.float32) * scale


def filled(shape, *, seed=0, name="w", std=1.0, dtype=torch.float32, **more) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    normal_(tensor, seed=seed, name=name, std=std, **more)
    return tensor


def test_the_reference_generator_gives_the_published_outputs():
    # seed 1234567 of Vigna's splitmix64.c, the vector that implementations of it are compared with
    assert list(islice(splitmix64(1234567), 3)) == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@given(st.lists(st.integers(0, MASK), min_size=1, max_size=20))
def test_int64_tensors_hash_as_unsigned_integers_do(states):
    hashed = _splitmix64(torch.tensor([_signed(state + 0x9E3779B97F4A7C15) for state in states]))
    assert [value & MASK for value in hashed.tolist()] == [next(splitmix64(state)) for state in states]


def test_values_are_those_of_the_documented_definition():
    assert torch.equal(filled(257, seed=7, name="a.b", std=0.02), reference_normal(257, 7, "a.b", 0.02))


def test_moments_are_those_of_the_docstring():
    values = filled(2**22, std=0.5).double() / 0.5
    error = 1 / math.sqrt(values.numel())  # standard error of the mean of a unit variable
    assert abs(values.mean().item()) < 5 * error
    assert abs(values.var().item() - 1) < 5 * error * math.sqrt(2)
    assert abs((values**3).mean().item()) < 5 * error * math.sqrt(15)
    assert abs((values**4).mean().item() - 2.85) < 5 * error * math.sqrt(96)
    assert 4.0 < values.abs().max().item() <= math.sqrt(24)


def test_streams_of_names_and_seeds_are_uncorrelated():
    streams = [filled(2**18, seed=s, name=n) for s, n in ((0, "a"), (0, "b"), (1, "a"), (10, "a"), (1, "0/a"))]
    correlation = torch.corrcoef(torch.stack(streams))
    off_diagonal = correlation - torch.eye(len(streams))
    assert off_diagonal.abs().max() < 5 / math.sqrt(2**18)


def test_neighbours_in_a_stream_are_uncorrelated():
    values = filled(2**18)
    for lag in (1, 2, 64, 128):
        assert abs(torch.corrcoef(torch.stack([values[:-lag], values[lag:]]))[0, 1]) < 5 / math.sqrt(2**18)


def test_the_seed_and_the_name_are_kept_apart_in_the_key():
    assert stream_key(1, "2/w") != stream_key(12, "/w")


@given(
    shape=st.lists(st.integers(1, 9), min_size=0, max_size=4),
    chunk=st.integers(1, 200),
    data=st.data(),
)
@settings(deadline=None, max_examples=60)
def test_the_fill_of_a_slice_is_the_slice_of_the_fill(shape, chunk, data):
    bounds = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    whole = filled(shape)
    part = whole[tuple(slice(low, high) for low, high in bounds)]
    local = torch.full(part.shape, torch.nan)
    held = HeldSlice(local, tuple(shape), tuple(low for low, _ in bounds))
    _fill(held, local.view(-1), _signed(stream_key(0, "w")), 1.0, chunk)
    assert torch.equal(local, part)


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_the_chunk_does_not_change_values(chunk):
    assert torch.equal(filled((13, 11), chunk=chunk), filled((13, 11)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_dtype_holds_the_rounded_float32_values(dtype):
    assert torch.equal(filled(1000, dtype=dtype), filled(1000).to(dtype))


def test_the_memory_format_does_not_change_values():
    last = torch.empty(4, 3, 5, 5).to(memory_format=torch.channels_last)
    normal_(last, seed=0, name="w", std=1.0)
    assert torch.equal(last, filled((4, 3, 5, 5)))


def test_torch_random_state_is_left_alone():
    before = torch.get_rng_state()
    filled(100)
    assert torch.equal(torch.get_rng_state(), before)


def test_constant_fills_a_parameter():
    parameter = torch.nn.Parameter(torch.empty(3))
    constant_(parameter, 1.5, name="w")
    assert parameter.tolist() == [1.5, 1.5, 1.5]


def test_a_meta_tensor_is_refused():
    with pytest.raises(Bug, match=r'parameter "w" is still on the meta device'):
        normal_(torch.empty(3, device="meta"), seed=0, name="w", std=1.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_gives_the_bits_of_the_cpu(dtype):
    device = torch.empty(1000, 1001, dtype=dtype, device="cuda")
    normal_(device, seed=3, name="w", std=0.02)
    assert torch.equal(device.cpu(), filled((1000, 1001), seed=3, std=0.02, dtype=dtype))
