"""Shapes read from config.json: refusals, and windows and experts where a config puts them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardway.errors import UserError
from shardway.plan.huggingface import FAMILIES, read_shape, shape_of_config
from shardway.plan.shapes import Architecture

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
QWEN_MOE = {**LLAMA, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DEEPSEEK = {"model_type": "deepseek_v3", "moe_intermediate_size": 8, "kv_lora_rank": 8, "v_head_dim": 8}
DEEPSEEK |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2}


def shape(**changes: Any) -> Architecture:
    found = shape_of_config({**LLAMA, **changes}, "tiny")
    assert isinstance(found, Architecture)
    return found


def refusal(config: Any, origin: str = "config.json") -> str:
    with pytest.raises(UserError) as told:
        shape_of_config(config, "tiny", origin)
    return str(told.value)


def windows(**changes: Any) -> list[int]:
    return [layer.attention.window for layer in shape(**changes).layers]


def test_a_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    found = read_shape(str(tmp_path))
    assert isinstance(found, Architecture)
    assert found.name == str(tmp_path)
    assert (found.hidden, len(found.layers), found.vocab, found.tied) == (32, 6, 50, False)
    assert found.layers[0].attention.kv_heads == 2


def test_an_unknown_family_is_told_with_those_that_are_known() -> None:
    told = refusal({"model_type": "mamba"}, "model/config.json")
    assert told.startswith("1 problem in model/config.json\n")
    assert '  model_type: "mamba" is a family whose layers are not known' in told
    assert all(family in told for family in FAMILIES)
    assert "  model_type: is missing" in refusal({})
    assert "is a family whose layers are not known" in refusal({"model_type": ["llama"]})


def test_every_wrong_key_is_told_at_once() -> None:
    config = {
        **LLAMA,
        "hidden_size": -3,
        "num_hidden_layers": "many",
        "vocab_size": 10**12,
        "attention_bias": "yes",
        "sliding_window": 2.5,
    }
    del config["intermediate_size"]
    size = "\n      allowed: an integer, {} to 2,147,483,648\n      to do: correct the config.json\n"
    assert refusal(config) + "\n" == (
        "6 problems in config.json\n"
        "  attention_bias: 'yes' is neither\n      allowed: true, false\n"
        f"  hidden_size: -3 is no size{size.format(1)}"
        f"  num_hidden_layers: 'many' is no size{size.format(1).replace('2,147,483,648', '100,000')}"
        f"  intermediate_size: is missing{size.format(1)}"
        f"  vocab_size: 1000000000000 is no size{size.format(1)}"
        f"  sliding_window: 2.5 is no size{size.format(0)}"
    )


@pytest.mark.parametrize("value", [True, 0, -1, 1.0, "8", [8], {}])
def test_what_is_no_size(value: Any) -> None:
    assert "num_attention_heads: " in refusal({**LLAMA, "num_attention_heads": value})


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide 4 heads"),
        ({"num_attention_heads": 5}, "num_attention_heads: 5 heads do not split a width of 32"),
        ({"layer_types": ["full_attention"] * 5}, "is no list of 6 words"),
        ({"layer_types": ["linear_attention"] * 6}, 'layer_types: "linear_attention" is not known'),
        ({**QWEN_MOE, "num_experts_per_tok": 9}, "num_experts_per_tok: 9 is more than there are experts, 8"),
        ({**QWEN_MOE, "mlp_only_layers": "all"}, "mlp_only_layers: 'all' is no list of layers"),
        ({"model_type": "opt", "ffn_dim": 48, "max_position_embeddings": 8, "word_embed_proj_dim": 16}, "narrower"),
        ({**DEEPSEEK, "moe_layer_freq": 2}, "moe_layer_freq: 2: dense layers between are not counted"),
        ({**DEEPSEEK, "model_type": "kimi_k2"}, "q_lora_rank: is missing"),
        ({**DEEPSEEK, "attention_bias": True}, "attention_bias: true: biases of latent attention are not counted"),
        ({"model_type": "gpt2", "n_positions": 8, "add_cross_attention": True}, "add_cross_attention: true: attention"),
        ({"model_type": "bert", "add_cross_attention": True}, "add_cross_attention: true: attention"),
        ({"model_type": "roberta", "add_cross_attention": True}, "add_cross_attention: true: attention"),
        ({"model_type": "phi", "qk_layernorm": True}, "qk_layernorm: true: norms of queries and keys"),
        ({"model_type": "mpt", "attn_config": {"alibi": False}}, "alibi: false is not counted"),
        ({"model_type": "mpt", "attn_config": 3}, "attn_config: 3 is no table"),
        ({"model_type": "vit", "patch_size": 15}, "patch_size: 15 does not divide image_size = 224"),
        ({"model_type": "vit", "hidden_size": 33}, "num_attention_heads: 4 does not divide 33"),
        ({"model_type": "resnet", "depths": [1], "hidden_sizes": [8, 8]}, "hidden_sizes: 2 widths of 1 stages"),
        ({"model_type": "resnet", "depths": [1, 0]}, "depths: [1, 0] is no list of sizes"),
        ({"model_type": "resnet", "depths": [1], "hidden_sizes": [8], "layer_type": "wide"}, 'layer_type: "wide"'),
        ({"model_type": "t5", "d_model": 8, "feed_forward_proj": 7}, "feed_forward_proj: 7 is no string"),
    ],
)
def test_what_does_not_fit_is_told(changes: dict[str, Any], line: str) -> None:
    assert line in refusal({**LLAMA, **changes})


def test_a_head_may_have_a_width_of_its_own() -> None:
    assert shape(num_attention_heads=5, num_key_value_heads=1, head_dim=8).layers[0].attention.head_dim == 8


def test_windows() -> None:
    assert windows() == [0] * 6
    assert windows(model_type="mistral", sliding_window=8) == [8] * 6
    assert windows(model_type="mistral", sliding_window=None) == [0] * 6
    assert windows(model_type="gemma2", sliding_window=8) == [8, 0] * 3
    assert windows(model_type="gemma3_text", sliding_window=8) == [8, 8, 8, 8, 8, 0]
    assert windows(model_type="gemma3_text", sliding_window=8, sliding_window_pattern=3) == [8, 8, 0] * 2
    assert windows(model_type="olmo3", sliding_window=8) == [8, 8, 8, 0, 8, 8]
    types = ["full_attention", "sliding_attention"] * 3
    assert windows(model_type="gemma2", sliding_window=8, layer_types=types) == [0, 8] * 3
    assert windows(model_type="qwen2", sliding_window=8) == [0] * 6
    qwen = {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True}
    assert windows(**qwen, max_window_layers=4) == [0] * 4 + [8] * 2
    assert windows(**qwen, layer_types=types) == [0, 8] * 3


def test_layers_alike_are_one_run() -> None:
    assert [run.count for run in shape().runs] == [6]
    assert [run.count for run in shape(model_type="olmo3", sliding_window=8).runs] == [3, 1, 2]


def test_experts_are_in_the_layers_that_have_them() -> None:
    mixed = [layer.experts is not None for layer in shape(**QWEN_MOE, decoder_sparse_step=2).layers]
    assert mixed == [False, True] * 3
    mixed = [layer.experts is not None for layer in shape(**QWEN_MOE, mlp_only_layers=[0, 5]).layers]
    assert mixed == [False, True, True, True, True, False]


def test_the_language_model_of_one_that_sees() -> None:
    tower = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    tower |= {"image_size": 8, "patch_size": 4, "vision_use_head": False}
    config = {"model_type": "gemma3", "text_config": LLAMA, "vision_config": tower}
    seeing = shape_of_config(config, "seeing")
    layer = 4 * (64 + 8) + 2 * 16 * 8 + 16 + 8 + 2 * 16
    patches, projector = 3 * 16 * 8 + 8 + 4 * 8, 8 * 32 + 8
    more = patches + 2 * layer + 16 + projector
    assert seeing.parameters == shape(model_type="gemma3_text").parameters + more
    assert seeing.name == "seeing, for text alone"
    assert "vision_use_head: true" in refusal({**config, "vision_config": {}})
    told = refusal({"model_type": "gemma3", "text_config": {**LLAMA, "hidden_size": 0}})
    assert "hidden_size: 0 is no size" in told
