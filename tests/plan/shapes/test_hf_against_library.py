"""Every family, small, has the parameters of what the library builds: from the few keys that it needs, and from all
that the library writes down."""

from __future__ import annotations

import json
from typing import Any

import pytest
from library_counts import build_on_meta, count, make_config

from shardway.errors import UserError
from shardway.plan.huggingface import FAMILIES, shape_of_config
from shardway.plan.shapes import Architecture

V: dict[str, Any] = {"vocab_size": 100}
S = {**V, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 4}
GROUPED = {**S, "num_key_value_heads": 2}
GPT = {**V, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 50}
OPT = {**V, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
OPT |= {"max_position_embeddings": 50, "word_embed_proj_dim": 64}
FALCON = {**V, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
MOE = {**GROUPED, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
QWEN2_MOE = {**MOE, "shared_expert_intermediate_size": 40}
DEEPSEEK = {**S, "moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "kv_lora_rank": 16}
DEEPSEEK |= {"q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
DEEPSEEK |= {"first_k_dense_replace": 1, "n_shared_experts": 2}
T5 = {**V, "d_model": 64, "d_kv": 8, "d_ff": 96, "num_layers": 3, "num_heads": 4}
VIT = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
VIT |= {"image_size": 32, "patch_size": 8, "num_labels": 7}
RESNET = {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [2, 3], "num_labels": 7}

CASES: dict[str, list[dict[str, Any]]] = {
    "bert": [{**S, "max_position_embeddings": 50}],
    "bloom": [{**V, "hidden_size": 64, "n_layer": 3, "n_head": 4}],
    "deepseek_v2": [DEEPSEEK, {**DEEPSEEK, "q_lora_rank": None}],
    "deepseek_v3": [DEEPSEEK, {**DEEPSEEK, "q_lora_rank": None, "n_shared_experts": 1}],
    "falcon": [
        FALCON,
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
        {**FALCON, "parallel_attn": False, "multi_query": False, "bias": True, "alibi": True},
    ],
    "gemma": [{**GROUPED, "head_dim": 32}],
    "gemma2": [{**GROUPED, "head_dim": 32, "sliding_window": 8}],
    "gemma3_text": [{**GROUPED, "head_dim": 32}],
    "gpt2": [GPT, {**GPT, "n_inner": 100}],
    "gpt_neox": [S, {**S, "attention_bias": False, "tie_word_embeddings": True}],
    "gpt_oss": [{**GROUPED, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}],
    "gptj": [{**GPT, "rotary_dim": 8}],
    "llama": [
        GROUPED,
        {**GROUPED, "attention_bias": True, "mlp_bias": True, "head_dim": 32, "tie_word_embeddings": True},
    ],
    "mistral": [{**GROUPED, "head_dim": 32, "sliding_window": 16}],
    "mixtral": [{**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}],
    "mpt": [{**V, "d_model": 64, "n_layers": 3, "n_heads": 4}],
    "olmo": [GROUPED],
    "olmo2": [GROUPED],
    "olmo3": [GROUPED],
    "opt": [
        OPT,
        {**OPT, "enable_bias": False, "layer_norm_elementwise_affine": False},
        {**OPT, "do_layer_norm_before": False},
    ],
    "phi": [GROUPED],
    "phi3": [GROUPED],
    "qwen2": [GROUPED, {**GROUPED, "tie_word_embeddings": True}],
    "qwen2_moe": [{**QWEN2_MOE, "decoder_sparse_step": 2}, {**QWEN2_MOE, "qkv_bias": False, "mlp_only_layers": [0]}],
    "qwen3": [{**GROUPED, "head_dim": 32}],
    "qwen3_moe": [{**MOE, "mlp_only_layers": [0], "head_dim": 32}],
    "resnet": [
        RESNET,
        {**RESNET, "hidden_sizes": [16, 64], "layer_type": "basic", "downsample_in_first_stage": True},
    ],
    "roberta": [{**S, "max_position_embeddings": 50, "type_vocab_size": 1}],
    "smollm3": [GROUPED],
    "starcoder2": [GROUPED, {**GROUPED, "use_bias": False}],
    "t5": [T5, {**T5, "num_decoder_layers": 2, "feed_forward_proj": "gated-gelu"}],
    "vit": [VIT, {**VIT, "qkv_bias": False}],
}


def test_every_family_has_a_case() -> None:
    # The language model of gemma3 is gemma3_text; kimi_k2 has DeepSeek's layers, and is not in the library.
    assert set(CASES) == set(FAMILIES) - {"gemma3", "kimi_k2"}


@pytest.mark.parametrize("family", CASES)
def test_parameters_are_those_of_the_library(family: str) -> None:
    for keys in CASES[family]:
        config = make_config({"model_type": family, **keys})
        expected = count(build_on_meta(config))
        written = json.loads(json.dumps(config.to_dict()))
        assert shape_of_config({"model_type": family, **keys}, family).parameters == expected
        assert shape_of_config(written, family).parameters == expected


def test_a_t5_with_a_head_of_its_own() -> None:
    """T5 1.1 shares no weight between embedding and head (its README), which transformers 5 no longer says."""
    keys = {"model_type": "t5", **T5}
    tied, untied = (shape_of_config({**keys, "tie_word_embeddings": tied}, "t5") for tied in (True, False))
    assert untied.parameters - tied.parameters == 100 * 64


WINDOWS = {"sliding_window": 8, "use_sliding_window": True, "num_hidden_layers": 30, "max_window_layers": 3}
MANY_HEADS = {"hidden_size": 256, "num_attention_heads": 32}  # a default number of keys is no divisor of a few heads
LACKING: dict[str, dict[str, Any]] = {
    **{family: cases[0] for family, cases in CASES.items()},
    **{family: {**CASES[family][0], **MANY_HEADS} for family in CASES if "num_key_value_heads" in CASES[family][0]},
    "qwen2": {**GROUPED, **MANY_HEADS, **WINDOWS},
    "qwen3": {**GROUPED, **MANY_HEADS, "head_dim": 32, **WINDOWS},
    "mistral": {**GROUPED, **MANY_HEADS, "sliding_window": 16},
    "gpt_oss": {**CASES["gpt_oss"][0], **MANY_HEADS, "sliding_window": 16},
    "olmo3": {**GROUPED, "sliding_window": 16},
    "falcon": {**FALCON, "parallel_attn": True, "multi_query": True, "bias": False},
}


@pytest.mark.parametrize("family", CASES)
def test_a_key_that_is_absent_or_null_is_what_it_is_in_the_library(family: str) -> None:
    """Each key of a config in turn; what the planner refuses is counted by the library, and what the library refuses
    is no model."""
    import transformers

    whole, compared = {"pad_token_id": None, **LACKING[family]}, 0
    for keys in [{k: v for k, v in whole.items() if k != key} for key in whole] + [{**whole, k: None} for k in whole]:
        try:
            shape = shape_of_config({"model_type": family, **keys}, family)
        except UserError:
            continue
        try:
            config = transformers.CONFIG_MAPPING[family].from_dict(dict(keys))
            expected = count(build_on_meta(config))
        except Exception:  # the library raises errors of any kind
            continue
        assert shape.parameters == expected, keys
        compared += 1
        if isinstance(shape, Architecture) and getattr(config, "layer_types", None):
            windows = [(config.sliding_window or 0) if "sliding" in each else 0 for each in config.layer_types]
            assert [layer.attention.window for layer in shape.layers] == windows, keys
    assert compared > 1


def test_a_window_that_is_absent_is_no_window_that_is_null() -> None:
    def window(**more: Any) -> int:
        shape = shape_of_config({"model_type": "mistral", **GROUPED, **more}, "mistral")
        assert isinstance(shape, Architecture)
        return shape.layers[0].attention.window

    assert (window(), window(sliding_window=None), window(sliding_window=8)) == (4096, 0, 8)
