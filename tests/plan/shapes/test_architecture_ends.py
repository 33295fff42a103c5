"""What stands beside the layers of an architecture, and layers that look at an encoder."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardway.plan.shapes import Architecture, AttentionShape, ExpertsShape, LayerRun, LayerShape, Matrix

ATTENTION = AttentionShape(heads=4, kv_heads=2, head_dim=8)
LAYER = LayerShape(hidden=16, attention=ATTENTION, ffn=24)
MODEL = Architecture(name="m", hidden=16, runs=(LayerRun(LAYER, 2),), vocab=50)


def test_norms_of_queries_and_keys() -> None:
    assert replace(ATTENTION, qk_norm=True).norm_parameters == 2 * 8
    assert replace(ATTENTION, qk_norm=True, qk_norm_whole=True).norm_parameters == (4 + 2) * 8
    assert replace(ATTENTION, sinks=True).norm_parameters == 4


def test_biases_of_experts_and_a_gate_of_the_shared_ones() -> None:
    plain = replace(LAYER, experts=ExpertsShape(count=6, per_token=2, dim=8, shared_dim=8))
    biased = replace(LAYER, experts=ExpertsShape(count=6, per_token=2, dim=8, shared_dim=8, bias=True))
    gated = replace(LAYER, experts=ExpertsShape(count=6, per_token=2, dim=8, shared_dim=8, shared_gate=True))
    assert biased.parameters - plain.parameters == 6 + 6 * (2 * 8 + 16)
    assert biased.active_parameters - plain.active_parameters == 6 + 2 * (2 * 8 + 16)
    assert gated.parameters - plain.parameters == 16
    assert gated.matmul_flops_per_token - plain.matmul_flops_per_token == 2 * 16


def test_ends() -> None:
    transform = Matrix("head_transform", "head", 16, 16, bias=True)
    assert replace(MODEL, head_bias=True).head_parameters == 50
    assert replace(MODEL, before_head=(transform,)).head_parameters == 16 * 17
    assert replace(MODEL, extra_parameters=5).embedding_parameters == MODEL.embedding_parameters + 5
    more = replace(MODEL, before_head=(transform,)).forward_flops_per_token(8, causal=False)
    assert more - MODEL.forward_flops_per_token(8, causal=False) == 2 * 16 * 16


def test_an_encoder_of_another_length() -> None:
    """By hand: a layer of the encoder on 8 positions, and one of the decoder on 4 that looks at those 8."""
    own = AttentionShape(heads=2, kv_heads=2, head_dim=8, causal=False)
    encoder = LayerShape(hidden=16, attention=own, ffn=24, gated=False)
    decoder = replace(encoder, attention=replace(own, causal=True), cross=replace(own, cross=True))
    runs = (LayerRun(encoder, 1, "encoder"), LayerRun(decoder, 1))
    model = Architecture(name="m", hidden=16, runs=runs, vocab=50, encoder_seq=8)
    square, ffn, head = 2 * 16 * 16, 2 * 2 * 16 * 24, 2 * 16 * 50

    def scores(queries: int, keys: int) -> int:
        return 2 * 2 * queries * keys * 16

    read = 8 * (4 * square + ffn) + scores(8, 8)
    written = 4 * (4 * square + ffn) + scores(4, 4) + 4 * 2 * square + 8 * 2 * square + scores(4, 8)
    total = read + written + 4 * head
    assert 4 * model.forward_flops_per_token(4, causal=False) == pytest.approx(total)


def test_equal_lengths_need_not_be_named() -> None:
    own = AttentionShape(heads=2, kv_heads=2, head_dim=8, causal=False)
    decoder = LayerShape(hidden=16, attention=own, cross=replace(own, cross=True), ffn=24)
    encoder = replace(decoder, cross=None)
    runs = (LayerRun(encoder, 1, "encoder"), LayerRun(decoder, 1))
    model = Architecture(name="m", hidden=16, runs=runs, vocab=50)
    named = replace(model, encoder_seq=8)
    assert model.forward_flops_per_token(8, causal=True) == named.forward_flops_per_token(8, causal=True)
