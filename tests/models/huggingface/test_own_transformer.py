"""Shardway's transformer and the families of the library that compute the same, both ways."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardway.errors import UserError
from shardway.hfconfig import read_config
from shardway.models.experts import MixtureShape
from shardway.models.huggingface.own import (
    family_of,
    names_of_transformer,
    to_huggingface_config,
    to_transformer_shape,
    translate,
)
from shardway.models.huggingface.weights import find_weights, fit_weights, load_weights
from shardway.models.transformer import LatentShape, Transformer, TransformerShape
from tiny_hf import TOKENS, logits_of, save_tiny

LLAMA = TransformerShape(
    vocab=50, dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48, head_dim=16, norm_eps=1e-3, tied=False, rope_theta=5e5
)
MIXTURE = MixtureShape(experts=4, per_token=2, expert_dim=24, balance="loss")
SHAPES = {
    "llama": LLAMA,
    "llama with biases": replace(LLAMA, bias=True),
    "qwen2": replace(LLAMA, qkv_bias=True, tied=True, head_dim=8),
    "qwen3": replace(LLAMA, qk_norm=True),
    "mixtral": replace(LLAMA, mixture=MIXTURE, ffn_dim=24),
    "qwen3_moe": replace(LLAMA, qk_norm=True, mixture=replace(MIXTURE, normalise=False), dense_layers=1),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_a_shape_becomes_a_config_and_a_shape_again(kind: str) -> None:
    config = to_huggingface_config(SHAPES[kind], max_positions=64)
    assert config["model_type"] == family_of(SHAPES[kind]) == kind.split(" ")[0]
    assert to_transformer_shape(config) == SHAPES[kind]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"norm": "layernorm"}, "model.norm: 'layernorm' has no form in Hugging Face's families"),
        ({"activation": "gelu"}, "model.activation: 'gelu' has no form in Hugging Face's families"),
        ({"positions": "learned", "max_positions": 9}, "model.positions: 'learned' has no form"),
        ({"qkv_bias": True, "qk_norm": True}, "model.qkv_bias: True has no form"),
        ({"qkv_bias": True, "bias": True}, "model.bias: True has no form"),
        ({"mixture": replace(MIXTURE, shared=1)}, "model.shared_experts: 1 has no form"),
        ({"mixture": replace(MIXTURE, balance="bias")}, "model.balance: 'bias' has no form"),
        ({"mixture": MIXTURE, "dense_layers": 1}, "model.dense_layers: 1 has no form"),
        (
            {"latent": LatentShape(kv_rank=8, q_rank=0, rope_head_dim=4, value_head_dim=16), "kv_heads": 4},
            "model.kv_rank: 8 has no form",
        ),
    ],
)
def test_what_no_family_computes_is_refused(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as told:
        family_of(replace(LLAMA, **changes))
    assert line in str(told.value)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "rope_type"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_what_the_transformer_does_not_compute_is_refused(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError) as told:
        to_transformer_shape({**to_huggingface_config(LLAMA, max_positions=64), **changes})
    assert f"\n  {key}: " in str(told.value)


def test_a_config_of_an_older_release_has_the_base_of_positions_outside() -> None:
    config = to_huggingface_config(LLAMA, max_positions=64)
    del config["rope_parameters"]
    assert to_transformer_shape(config) == LLAMA


def test_names_are_those_of_the_library() -> None:
    assert translate("blocks.3.attention.wq.bias") == "model.layers.3.self_attn.q_proj.bias"
    assert translate("blocks.11.ffn.experts.up") == "model.layers.11.mlp.experts.up"
    assert translate("embedding.weight") == "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 12}),
        ("qwen2", {"rope_parameters": None}),
        ("qwen3", {}),
        ("mixtral", {}),
        ("qwen3_moe", {"norm_topk_prob": True}),
        ("qwen3_moe", {"norm_topk_prob": False, "tie_word_embeddings": True}),
    ],
)
def test_logits_are_those_of_the_library(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    folder = save_tiny(tmp_path / "model", family, **changes)
    shape = to_transformer_shape(read_config(folder))
    model, files = Transformer(shape).eval(), find_weights(folder)
    assert files is not None
    model.init_weights(0)
    load_weights(model, fit_weights(model, files, names_of_transformer(shape)))
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), logits_of(folder), rtol=0, atol=1e-5)
