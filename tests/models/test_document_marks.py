from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from shardway.data.batch_tree import PackedInputs
from shardway.models.documents import attend_within_documents, mark_documents
from shardway.models.experts import MixtureShape
from shardway.models.transformer import LatentShape, Transformer, TransformerShape
from shardway.parallel.blocks import apply_compile, apply_recompute, find_units
from shardway.runfile.schema import RecomputeSection
from shardway.train.loss import IGNORED, token_cross_entropy
from shardway.train.passes import call_loss

SHAPE = TransformerShape(vocab=17, dim=32, layers=2, heads=4, kv_heads=4, ffn_dim=40)
LATENT = LatentShape(kv_rank=16, q_rank=12, rope_head_dim=4, value_head_dim=12)
VARIANTS = {
    "rope": SHAPE,
    "grouped keys": dataclasses.replace(SHAPE, kv_heads=2, qk_norm=True),
    "learned positions": dataclasses.replace(SHAPE, positions="learned", max_positions=24, norm="layernorm", bias=True),
    "latent attention": dataclasses.replace(SHAPE, latent=LATENT),
    "experts": dataclasses.replace(SHAPE, mixture=MixtureShape(experts=4, per_token=2, expert_dim=24)),
}
every_variant = pytest.mark.parametrize("shape", VARIANTS.values(), ids=VARIANTS)

ROWS = [[5, 1, 9, 7], [22], [11, 11], [1, 1, 18, 2]]
"""Lengths of the documents of each sequence."""


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A compiler that has seen nothing, before and after; the variable of its cache is put back."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def build(shape: TransformerShape) -> Transformer:
    model = Transformer(shape)
    model.init_weights(3)
    return model


def make_batch(rows: list[list[int]] = ROWS) -> tuple[PackedInputs, torch.Tensor]:
    """Inputs and targets; the last three targets of the first sequence do not count, as padding."""
    tokens = torch.randint(0, 17, (len(rows), sum(rows[0]) + 1), generator=torch.Generator().manual_seed(1))
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])
    targets = tokens[:, 1:].clone()
    targets[0, -3:] = IGNORED
    return PackedInputs(tokens[:, :-1].contiguous(), positions), targets


def list_documents(rows: list[list[int]] = ROWS) -> list[tuple[int, slice]]:
    """(sequence, places) of each document."""
    found = []
    for number, row in enumerate(rows):
        ends = torch.tensor(row).cumsum(0).tolist()
        found += [(number, slice(end - length, end)) for end, length in zip(ends, row, strict=True)]
    return found


def run(model: nn.Module, inputs: PackedInputs) -> torch.Tensor:
    logits: torch.Tensor = model(inputs.tokens, inputs.positions, packed=True)
    return logits


@every_variant
def test_logits_are_those_of_each_document_alone(shape: TransformerShape) -> None:
    model, (inputs, _) = build(shape), make_batch()
    packed = run(model, inputs)
    for row, places in list_documents():
        alone = model(inputs.tokens[row : row + 1, places])[0]
        torch.testing.assert_close(packed[row, places], alone, rtol=0, atol=1e-5)
    assert (packed - model(inputs.tokens)).abs().max() > 0.1, "documents would see each other"


@every_variant
def test_gradients_are_those_of_the_documents_one_by_one(shape: TransformerShape) -> None:
    model, (inputs, targets) = build(shape), make_batch()
    token_cross_entropy(run(model, inputs), targets).total.backward()
    packed = {name: each.grad.clone() for name, each in model.named_parameters()}
    model.zero_grad()
    for row, places in list_documents():
        token_cross_entropy(
            model(inputs.tokens[row : row + 1, places]), targets[row : row + 1, places]
        ).total.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(packed[name], parameter.grad, rtol=1e-4, atol=1e-5)


def test_a_sequence_of_one_document_is_as_one_that_is_not_packed() -> None:
    model, (inputs, _) = build(SHAPE), make_batch([[22], [22]])
    torch.testing.assert_close(run(model, inputs), model(inputs.tokens), rtol=0, atol=1e-5)


def test_the_mask_is_causal_within_documents() -> None:
    marks = mark_documents(torch.tensor([[0, 1, 0, 1, 2], [3, 4, 5, 0, 0]]), torch.float32, 8)
    assert marks.shape == (2, 1, 5, 5)
    assert marks.dtype == torch.bool
    assert marks[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]
    # A sequence that begins within a document begins one.
    assert marks[1, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1],
    ]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_is_that_of_each_document(kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(4, heads, 22, 8, generator=generator).double() for heads in (4, kv_heads, kv_heads))
    marks = mark_documents(make_batch()[0].positions, q.dtype, 8)
    mixed = attend_within_documents(q, k, v, marks)
    for row, places in list_documents():
        scores = q[row, :, places] @ k[row, :, places].repeat_interleave(4 // kv_heads, 0).mT / 8**0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        alone = weights @ v[row, :, places].repeat_interleave(4 // kv_heads, 0)
        torch.testing.assert_close(mixed[row, :, places], alone)


@pytest.mark.parametrize(("kv_heads", "width"), [(4, 8), (2, 16), (4, 12)])
def test_the_kernel_that_takes_ends_takes_these_arguments(kv_heads: int, width: int) -> None:
    """Shapes alone: the kernel is one of CUDA devices (tests/gpu)."""
    shapes = [(2, heads, 22, width) for heads in (4, kv_heads, kv_heads)]
    leaves = [torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True) for shape in shapes]
    mixed = attend_within_documents(*leaves, torch.empty(6, dtype=torch.int32, device="meta"))
    assert mixed.shape == (2, 4, 22, width)
    mixed.sum().backward()
    assert all(leaf.grad.shape == leaf.shape for leaf in leaves)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recompute_has_the_same_bits(mode: str) -> None:
    (inputs, targets), found = make_batch(), []
    for section in (None, RecomputeSection(mode=mode)):
        model = build(VARIANTS["grouped keys"])
        if section is not None:
            apply_recompute(find_units(model, model.plan()), section)
        token_cross_entropy(run(model, inputs), targets).total.backward()
        found.append([each.grad for each in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # torch's own compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("mode", ["blocks", "model"])
def test_compiled_models_keep_documents_apart(mode: str, fresh_compiler: None) -> None:
    (inputs, targets), found = make_batch(), []
    for compiles in (False, True):
        model = build(VARIANTS["grouped keys"])
        if compiles:
            apply_compile(model, find_units(model, model.plan()), mode, "aot_eager")
        logits = run(model, inputs)
        token_cross_entropy(logits, targets).total.backward()
        found.append([logits.detach(), *(each.grad for each in model.parameters())])
    for compiled, plain in zip(*reversed(found), strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5)


def test_a_pair_of_packed_inputs_reaches_the_model() -> None:
    model, (inputs, targets) = build(SHAPE), make_batch()
    loss = call_loss(token_cross_entropy, model, (inputs, targets), pair=True)
    assert loss.count == 4 * 22 - 3
    assert torch.equal(loss.total, token_cross_entropy(run(model, inputs), targets).total)
