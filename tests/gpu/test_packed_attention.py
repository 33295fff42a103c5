"""The kernel that takes ends of documents gives what the mask gives, on a CUDA device."""

from __future__ import annotations

import copy

import pytest
import torch

from shardway.models.documents import attend_within_documents, mark_documents
from shardway.models.transformer import LatentShape, Transformer, TransformerShape
from shardway.parallel.axes.context import _attend, _attend_backward, _hide
from shardway.parallel.blocks import apply_compile, find_units
from shardway.train.loss import token_cross_entropy

pytestmark = pytest.mark.gpu

ROWS = [[100, 1, 27, 384], [512], [256, 256], [3, 500, 1, 8]]
SHAPE = TransformerShape(vocab=64, dim=128, layers=2, heads=4, kv_heads=2, ffn_dim=256)
LATENT = LatentShape(kv_rank=32, q_rank=0, rope_head_dim=20, value_head_dim=24)


def positions() -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in ROWS]).cuda()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kv_heads", "width"), [(8, 64), (2, 64), (1, 128), (4, 52)])
def test_ends_give_what_the_mask_gives(dtype: torch.dtype, kv_heads: int, width: int) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    shapes = [(4, heads, 512, width) for heads in (8, kv_heads, kv_heads)]
    q, k, v = (torch.randn(shape, generator=generator, device="cuda", dtype=dtype) for shape in shapes)
    ends, mask = mark_documents(positions(), dtype, width), mark_documents(positions(), torch.float32, width)
    assert ends.tolist() == [0, 100, 101, 128, 512, 1024, 1280, 1536, 1539, 2039, 2040, 2048]
    assert (ends.dtype, mask.dtype) == (torch.int32, torch.bool)
    found = []
    for given, marks in (((q, k, v), ends), ((q.float(), k.float(), v.float()), mask)):
        leaves = [each.detach().requires_grad_() for each in given]
        mixed = attend_within_documents(*leaves, marks)
        mixed.float().square().sum().backward()
        found.append([mixed.float(), *(leaf.grad.float() for leaf in leaves)])
    for narrow, wide in zip(*found, strict=True):
        assert (narrow - wide).norm() < 0.02 * wide.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("kv_heads", "queries", "keys"), [(8, 256, 256), (2, 256, 128), (2, 100, 52)])
def test_tiles_of_the_context_axis_are_as_on_a_cpu(dtype: torch.dtype, kv_heads: int, queries: int, keys: int) -> None:
    """A tile in which some queries see no key: output, logarithm and gradients."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, heads, length, 64) for heads, length in ((8, queries), (kv_heads, keys), (kv_heads, keys))]
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    marks = torch.zeros(2, 2, 256, dtype=torch.int64)
    marks[0, :, : queries // 2], marks[1, :, : keys // 3] = 7, 9
    found = []
    for device, form in (("cuda", dtype), ("cpu", torch.float32)):
        given = [each.to(device, form) for each in (q, k, v)]
        bias = _hide(marks.to(device), 0, 1, slice(0, queries), slice(0, keys), False, given[0])
        out, log_sum = _attend(*given, False, bias)
        whole = log_sum.logaddexp(log_sum.new_zeros(()))  # as if other tiles had been seen too
        grads = _attend_backward(*given, False, out, out, whole, bias)
        seen = slice(queries // 2, None)
        found.append([each.float().cpu() for each in (out[:, :, seen], log_sum[:, :, seen], *grads)])
    for narrow, wide in zip(*found, strict=True):
        assert narrow.isfinite().all()
        assert (narrow - wide).norm() < 0.02 * wide.norm()


@pytest.mark.parametrize("latent", [None, LATENT], ids=["grouped", "latent"])
@pytest.mark.parametrize("compiles", [False, True])
def test_a_model_keeps_documents_apart(latent: LatentShape | None, compiles: bool) -> None:
    shape = TransformerShape(**{**vars(SHAPE), "kv_heads": 2 if latent is None else 4, "latent": latent})
    model = Transformer(shape)
    model.init_weights(3)
    model.cuda()
    plain = copy.deepcopy(model)
    if compiles:
        apply_compile(model, find_units(model, model.plan()), "blocks")
    tokens = torch.randint(0, 64, (4, 513), generator=torch.Generator().manual_seed(1)).cuda()
    for rows in (ROWS, [[512]] * 4, [[256, 256]] * 4):  # one graph is for any number of documents
        places = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows]).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            packed = model(tokens[:, :-1], places, packed=True)
            token_cross_entropy(packed, tokens[:, 1:]).total.backward()
        for number, row in enumerate(rows):
            for end, length in zip(torch.tensor(row).cumsum(0).tolist(), row, strict=True):
                with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
                    alone = plain(tokens[number : number + 1, end - length : end]).float()
                assert (packed[number, end - length : end].float() - alone[0]).norm() < 0.05 * alone.norm()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
