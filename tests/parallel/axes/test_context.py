"""The context axis against attention of one rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from pool import ranks
from shardway.errors import UserError
from shardway.parallel.axes.context import Chunks, ContextAttention
from shardway.train.passes import take_chunks


def whole_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def compare_with_one_rank(rank: int, method: str, kv_heads: int, dtype: torch.dtype) -> None:
    world = dist.get_world_size()
    chunks = Chunks(rank, world)
    torch.manual_seed(0)
    shapes = ((2, 4, 8 * world, 16), (2, kv_heads, 8 * world, 16), (2, kv_heads, 8 * world, 16))
    whole = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    weight = torch.randn(shapes[0], dtype=dtype)
    expected = whole_attention(*whole)
    (expected * weight).sum().backward()

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return chunks.take(tensor.detach().transpose(1, 2)).transpose(1, 2)

    parts = [own(tensor).requires_grad_() for tensor in whole]
    found = ContextAttention(dist.group.WORLD, method)(*parts)
    (found * own(weight)).sum().backward()
    tolerance = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(found, own(expected), rtol=0, atol=tolerance)
    for part, tensor in zip(parts, whole, strict=True):
        torch.testing.assert_close(part.grad, own(tensor.grad), rtol=0, atol=8 * tolerance)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("method", ["ring", "gather"])
@ranks(2)
def test_two_ranks_attend_as_one(rank: int, method: str, kv_heads: int, dtype: str) -> None:
    compare_with_one_rank(rank, method, kv_heads, getattr(torch, dtype))


@pytest.mark.parametrize("method", ["ring", "gather"])
@pytest.mark.parametrize("dtype", [torch.float64])
@ranks(3)
def test_three_ranks_attend_as_one(rank: int, method: str, dtype: torch.dtype) -> None:
    compare_with_one_rank(rank, method, 2, dtype)


def test_chunks_pair_the_first_with_the_last() -> None:
    tokens = torch.arange(12)[None]
    assert [Chunks(place, 3).take(tokens)[0].tolist() for place in range(3)] == [
        [0, 1, 10, 11],
        [2, 3, 8, 9],
        [4, 5, 6, 7],
    ]
    assert Chunks(1, 3).positions(4, torch.device("cpu")).tolist() == [2, 3, 8, 9]


def test_of_a_batch_every_tensor_with_a_sequence_is_cut() -> None:
    batch = {"inputs": torch.arange(8).reshape(2, 4), "weight": torch.ones(2)}
    cut = take_chunks(Chunks(0, 2), batch)
    assert cut["inputs"].tolist() == [[0, 3], [4, 7]]
    assert cut["weight"] is batch["weight"]


def test_a_length_that_does_not_split_is_refused() -> None:
    with pytest.raises(UserError, match=r"a sequence of 10 does not split into 2 x parallel\.cp = 4"):
        Chunks(0, 2).take(torch.zeros(1, 10))
