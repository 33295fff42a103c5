"""The context axis against attention of one rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from pool import ranks
from shardway.errors import UserError
from shardway.models.documents import attend_within_documents, mark_documents
from shardway.parallel.axes.context import Chunks, ContextAttention, _attend, _attend_backward, find_beginnings
from shardway.train.passes import take_chunks


def whole_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


LENGTHS = [[5, 1, 9, 1], [16], [2, 3, 7, 4], [8, 8]]
"""Documents of each sequence, for two ranks; of more ranks, what is left belongs to the last document."""


def positions_of(seq: int) -> torch.Tensor:
    """Positions [4, seq] of the documents of `LENGTHS`."""
    rows = [[*row[:-1], row[-1] + seq - sum(row)] for row in LENGTHS]
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


def compare_with_one_rank(rank: int, method: str, kv_heads: int, dtype: torch.dtype, *, packed: bool = False) -> None:
    world = dist.get_world_size()
    chunks = Chunks(rank, world)
    torch.manual_seed(0)
    shapes = ((4, 4, 8 * world, 16), (4, kv_heads, 8 * world, 16), (4, kv_heads, 8 * world, 16))
    whole = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    weight = torch.randn(shapes[0], dtype=dtype)
    places = positions_of(8 * world)
    marks = find_beginnings(dist.group.WORLD, chunks.take(places)) if packed else None
    expected = attend_within_documents(*whole, mark_documents(places, dtype, 16)) if packed else whole_attention(*whole)
    (expected * weight).sum().backward()

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return chunks.take(tensor.detach().transpose(1, 2)).transpose(1, 2)

    parts = [own(tensor).requires_grad_() for tensor in whole]
    found = ContextAttention(dist.group.WORLD, method)(*parts, marks)
    (found * own(weight)).sum().backward()
    tolerance = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(found, own(expected), rtol=0, atol=tolerance)
    for part, tensor in zip(parts, whole, strict=True):
        torch.testing.assert_close(part.grad, own(tensor.grad), rtol=0, atol=8 * tolerance)


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("method", ["ring", "gather"])
@ranks(2)
def test_two_ranks_attend_as_one(rank: int, method: str, kv_heads: int, dtype: str, packed: bool) -> None:
    compare_with_one_rank(rank, method, kv_heads, getattr(torch, dtype), packed=packed)


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("method", ["ring", "gather"])
@pytest.mark.parametrize("dtype", [torch.float64])
@ranks(3)
def test_three_ranks_attend_as_one(rank: int, method: str, dtype: torch.dtype, packed: bool) -> None:
    compare_with_one_rank(rank, method, 2, dtype, packed=packed)


def test_beginnings_are_those_of_the_whole_sequence() -> None:
    """A document that lies in chunks of several ranks has one beginning."""
    places = positions_of(16)
    expected = torch.arange(16) - places
    assert [sorted(set(row.tolist())) for row in expected] == [[0, 5, 6, 15], [0], [0, 2, 5, 12], [0, 8]]
    found = [Chunks(rank, 2).positions(8, places.device) - Chunks(rank, 2).take(places) for rank in range(2)]
    assert all(torch.equal(each, Chunks(rank, 2).take(expected)) for rank, each in enumerate(found))


@pytest.mark.parametrize(("queries", "keys"), [(8, 8), (20, 12), (5, 3)])
def test_the_kernel_that_takes_a_bias_takes_these_arguments(queries: int, keys: int) -> None:
    """Shapes alone: the kernel is one of CUDA devices."""
    q, k = (torch.empty(2, heads, n, 16, dtype=torch.bfloat16, device="meta") for heads, n in ((4, queries), (2, keys)))
    bias = torch.empty(2, 1, queries, keys, dtype=torch.bfloat16, device="meta")
    out, log_sum = _attend(q, k, k, False, bias)
    assert (out.shape, log_sum.shape, log_sum.dtype) == (q.shape, q.shape[:3], torch.float32)
    grads = _attend_backward(q, k, k, False, out, out, log_sum, bias)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, k.shape]


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
