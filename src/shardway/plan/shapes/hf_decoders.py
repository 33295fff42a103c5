"""Decoder-only families of Hugging Face models: what their layers have, from the keys of a config.json.

Invariant: parameters are those that the library builds for the same config, which a test compares for every family;
what a config leaves out is as the library has it. This module must not read files.

Source: the modeling files of huggingface/transformers 5.23, one a family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from shardway.plan.shapes.architecture import Architecture
from shardway.plan.shapes.hf_keys import Keys
from shardway.plan.shapes.hf_layers import Style, build_decoder, read_sizes, read_windows
from shardway.plan.shapes.layer import ExpertsShape, Latent

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_OPT_OFFSET = 2
"""OPT's first position is 2 (modeling_opt.py, OPTLearnedPositionalEmbedding)."""
_GPT = Style(gated=False, norm_bias=True, bias=True, output_bias=True, ffn_bias=True)
"""GPT-2's layers: biases everywhere, no gate."""


def _tied(keys: Keys, default: bool = False) -> bool:
    return keys.flag("tie_word_embeddings", default)


def _biased(style: Style, biased: bool) -> Style:
    return replace(style, bias=biased, output_bias=biased, ffn_bias=biased)


def _llama(keys: Keys) -> Architecture:
    biased = keys.flag("attention_bias")
    style = Style(bias=biased, output_bias=biased, ffn_bias=keys.flag("mlp_bias"), tied=_tied(keys))
    sizes = read_sizes(keys)
    return build_decoder(keys, sizes, style, windows=read_windows(keys, sizes.layers))


def _smollm3(keys: Keys) -> Architecture:
    biased, sizes = keys.flag("attention_bias"), read_sizes(keys)
    style = Style(bias=biased, output_bias=biased, ffn_bias=keys.flag("mlp_bias"), tied=_tied(keys, True))
    return build_decoder(keys, sizes, style, windows=_qwen_windows(keys, sizes.layers))


def _mistral(keys: Keys) -> Architecture:
    sizes = read_sizes(keys)
    return build_decoder(keys, sizes, Style(tied=_tied(keys)), windows=read_windows(keys, sizes.layers))


def _mixtral(keys: Keys) -> Architecture:
    sizes = read_sizes(keys)
    experts = ExpertsShape(count=keys.size(*_EXPERTS), per_token=keys.size("num_experts_per_tok"), dim=sizes.ffn)
    windows = read_windows(keys, sizes.layers)
    return build_decoder(keys, sizes, Style(tied=_tied(keys)), windows=windows, experts=experts)


def _qwen_windows(keys: Keys, layers: int) -> tuple[int, ...]:
    """None unless `use_sliding_window`, and then from layer `max_window_layers` on."""
    windows = read_windows(keys, layers)
    if not keys.flag("use_sliding_window"):
        return (0,) * layers
    first = 0 if keys.config.get("layer_types") else keys.count("max_window_layers")
    return tuple(window if layer >= first else 0 for layer, window in enumerate(windows))


def _qwen2(keys: Keys) -> Architecture:
    sizes = read_sizes(keys)
    return build_decoder(keys, sizes, Style(bias=True, tied=_tied(keys)), windows=_qwen_windows(keys, sizes.layers))


def _qwen3_style(keys: Keys) -> Style:
    biased = keys.flag("attention_bias")
    return Style(bias=biased, output_bias=biased, qk_norm=True, tied=_tied(keys))


def _qwen3(keys: Keys) -> Architecture:
    sizes = read_sizes(keys)
    return build_decoder(keys, sizes, _qwen3_style(keys), windows=_qwen_windows(keys, sizes.layers))


def _sparse_layers(keys: Keys, layers: int) -> tuple[bool, ...]:
    """Which layers have experts (modeling_qwen2_moe.py, Qwen2MoeDecoderLayer)."""
    dense, step = keys.numbers("mlp_only_layers"), keys.size("decoder_sparse_step", default=1)
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


def _qwen2_moe(keys: Keys) -> Architecture:
    sizes = read_sizes(keys)
    experts = ExpertsShape(
        count=keys.size(*_EXPERTS),
        per_token=keys.size("num_experts_per_tok"),
        dim=keys.size("moe_intermediate_size"),
        shared_dim=keys.size("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    style, windows = Style(bias=keys.flag("qkv_bias", True), tied=_tied(keys)), _qwen_windows(keys, sizes.layers)
    mixed = _sparse_layers(keys, sizes.layers)
    return build_decoder(keys, sizes, style, windows=windows, experts=experts, mixed=mixed)


def _qwen3_moe(keys: Keys) -> Architecture:
    sizes, style = read_sizes(keys), _qwen3_style(keys)
    experts = ExpertsShape(
        count=keys.size(*_EXPERTS),
        per_token=keys.size("num_experts_per_tok"),
        dim=keys.size("moe_intermediate_size"),
    )
    windows, mixed = _qwen_windows(keys, sizes.layers), _sparse_layers(keys, sizes.layers)
    return build_decoder(keys, sizes, style, windows=windows, experts=experts, mixed=mixed)


def _deepseek(keys: Keys) -> Architecture:
    """Latent attention, and experts from layer `first_k_dense_replace` on."""
    width = keys.size("moe_intermediate_size")
    sizes = replace(read_sizes(keys), head_dim=keys.size("qk_nope_head_dim"))
    latent = Latent(
        kv_rank=keys.size("kv_lora_rank"),
        q_rank=keys.count("q_lora_rank"),
        rope_dim=keys.size("qk_rope_head_dim"),
        value_dim=keys.size("v_head_dim"),
    )
    experts = ExpertsShape(
        count=keys.size(*_EXPERTS),
        per_token=keys.size("num_experts_per_tok"),
        dim=width,
        shared_dim=width * keys.count("n_shared_experts"),
    )
    first = keys.count("first_k_dense_replace")
    mixed = [layer >= first for layer in range(sizes.layers)]
    if keys.flag("attention_bias"):
        keys.refuse("attention_bias", "true: biases of latent attention are not counted", "false")
    if keys.size("moe_layer_freq", default=1) != 1:
        keys.refuse("moe_layer_freq", f"{keys.config['moe_layer_freq']}: dense layers between are not counted", "1")
    sizes = replace(sizes, kv_heads=sizes.heads)
    return build_decoder(keys, sizes, Style(tied=_tied(keys)), experts=experts, mixed=mixed, latent=latent)


def _gpt_oss(keys: Keys) -> Architecture:
    sizes, biased = read_sizes(keys), keys.flag("attention_bias", True)
    experts = ExpertsShape(
        count=keys.size(*_EXPERTS),
        per_token=keys.size("num_experts_per_tok", "experts_per_token"),
        dim=sizes.ffn,
        bias=True,
    )
    style = Style(bias=biased, output_bias=biased, sinks=True, tied=_tied(keys))
    return build_decoder(keys, sizes, style, windows=read_windows(keys, sizes.layers, whole_every=2), experts=experts)


def _gpt2(keys: Keys) -> Architecture:
    positions = keys.size("n_positions", "max_position_embeddings")
    style = replace(_GPT, tied=_tied(keys, True), positions=positions)
    return build_decoder(keys, read_sizes(keys, ffn_factor=4), style)


def _gptj(keys: Keys) -> Architecture:
    """Attention and feed-forward side by side, behind one norm."""
    style = replace(_GPT, norms=1, bias=False, output_bias=False, tied=_tied(keys), head_bias=True)
    return build_decoder(keys, read_sizes(keys, ffn_factor=4), style)


def _gpt_neox(keys: Keys) -> Architecture:
    biased = keys.flag("attention_bias", True)
    style = replace(_GPT, bias=biased, output_bias=biased, tied=_tied(keys))
    return build_decoder(keys, read_sizes(keys), style)


def _opt(keys: Keys) -> Architecture:
    biased, sizes = keys.flag("enable_bias", True), read_sizes(keys)
    if keys.count("word_embed_proj_dim", default=sizes.hidden) != sizes.hidden:
        what = f"{keys.config['word_embed_proj_dim']}: an embedding narrower than the layers is not counted"
        keys.refuse("word_embed_proj_dim", what, f"hidden_size, {sizes.hidden}")
    style = replace(
        _biased(_GPT, biased),
        norm_vectors=int(keys.flag("layer_norm_elementwise_affine", True)),
        tied=_tied(keys, True),
        positions=keys.size("max_position_embeddings") + _OPT_OFFSET,
        final_norm=keys.flag("do_layer_norm_before", True) and not keys.flag("_remove_final_layer_norm"),
    )
    return build_decoder(keys, sizes, style)


def _bloom(keys: Keys) -> Architecture:
    """Positions are biases of the scores, without parameters; a norm follows the embedding."""
    style = replace(_GPT, tied=_tied(keys, True), embedding_norm=True)
    return build_decoder(keys, read_sizes(keys, ffn_factor=4), style)


def _mpt(keys: Keys) -> Architecture:
    """As the library has it: no biases, and positions are biases of the scores."""
    for name, wanted in (("no_bias", True), ("alibi", True)):
        inner = keys.table("attn_config") if name == "alibi" else keys
        if not inner.flag(name, wanted):
            keys.refuse(name, "false is not counted", "true")
    sizes = read_sizes(keys, ffn_factor=keys.size("expansion_ratio", default=4))
    return build_decoder(keys, sizes, Style(gated=False, tied=_tied(keys, True)))


def _falcon(keys: Keys) -> Architecture:
    sizes, biased = read_sizes(keys, ffn_factor=4), keys.flag("bias")
    newer, parallel = keys.flag("new_decoder_architecture"), keys.flag("parallel_attn", True)
    heads = keys.size("num_kv_heads", "n_head_kv", default=sizes.heads)
    if not newer:
        heads = 1 if keys.flag("multi_query", True) else sizes.heads
    norms = 2 if not parallel else keys.size("num_ln_in_parallel_attn", default=2 if newer else 1)
    style = replace(_biased(_GPT, biased), norms=norms, tied=_tied(keys, True))
    return build_decoder(keys, replace(sizes, kv_heads=heads), style)


def _phi(keys: Keys) -> Architecture:
    if keys.flag("qk_layernorm"):
        keys.refuse("qk_layernorm", "true: norms of queries and keys with a bias are not counted", "false")
    style = replace(_GPT, norms=1, tied=_tied(keys), head_bias=True)
    return build_decoder(keys, read_sizes(keys), style)


def _gemma(keys: Keys) -> Architecture:
    biased = keys.flag("attention_bias")
    style = Style(bias=biased, output_bias=biased, tied=_tied(keys, True))
    return build_decoder(keys, read_sizes(keys), style)


def _gemma2(keys: Keys) -> Architecture:
    """Norms before and after attention and feed-forward; every second layer sees all positions."""
    sizes, biased = read_sizes(keys), keys.flag("attention_bias")
    style = Style(norms=4, bias=biased, output_bias=biased, tied=_tied(keys, True))
    return build_decoder(keys, sizes, style, windows=read_windows(keys, sizes.layers, whole_every=2))


def _gemma3_text(keys: Keys) -> Architecture:
    sizes, biased = read_sizes(keys), keys.flag("attention_bias")
    every = keys.size("sliding_window_pattern", "_sliding_window_pattern", default=6)
    style = Style(norms=4, bias=biased, output_bias=biased, qk_norm=True, tied=_tied(keys, True))
    return build_decoder(keys, sizes, style, windows=read_windows(keys, sizes.layers, whole_every=every))


def _gemma3(keys: Keys) -> Architecture:
    """The language model of one that sees images too; its vision tower is not counted."""
    text = keys.table("text_config")
    text.name = f"{keys.name}, its language model alone"
    return _gemma3_text(text)


def _olmo(keys: Keys) -> Architecture:
    """Norms without parameters."""
    biased = keys.flag("attention_bias")
    style = Style(norm_vectors=0, bias=biased, output_bias=biased, tied=_tied(keys))
    return build_decoder(keys, read_sizes(keys), style)


def _olmo2(keys: Keys, whole_every: int = 0) -> Architecture:
    sizes, biased = read_sizes(keys), keys.flag("attention_bias")
    style = Style(bias=biased, output_bias=biased, qk_norm=True, qk_norm_whole=True, tied=_tied(keys))
    windows = read_windows(keys, sizes.layers, whole_every=whole_every)
    return build_decoder(keys, sizes, style, windows=windows)


def _olmo3(keys: Keys) -> Architecture:
    return _olmo2(keys, whole_every=4)


def _starcoder2(keys: Keys) -> Architecture:
    sizes = read_sizes(keys)
    style = replace(_biased(_GPT, keys.flag("use_bias", True)), tied=_tied(keys, True))
    return build_decoder(keys, sizes, style, windows=read_windows(keys, sizes.layers))


DECODERS: Mapping[str, Callable[[Keys], Architecture]] = {
    "bloom": _bloom,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "falcon": _falcon,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3_text,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "gpt_oss": _gpt_oss,
    "gptj": _gptj,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "mpt": _mpt,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "opt": _opt,
    "phi": _phi,
    "phi3": _mistral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "smollm3": _smollm3,
    "starcoder2": _starcoder2,
}
"""`model_type` of a config -> what reads it."""
