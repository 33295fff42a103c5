"""The architecture of a model as flags of Megatron-LM.

Invariant: each flag follows from the sizes of the plan; what a plan does not know of a model (scaling of positions,
epsilons, how experts are chosen and balanced) is left to Megatron and told. This module must not know a layout.

Source: megatron/training/arguments.py of Megatron Core 0.19.2.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardway.plan.case import Case
from shardway.plan.emit.megatron_settings import dashed, expert_settings, latent_settings
from shardway.plan.emit.sizes import UniformSizes, describe_irregular, read_sizes, render_pattern
from shardway.plan.emit.texts import Settings
from shardway.plan.shapes.layer import AttentionShape


def model_flags(case: Case) -> Settings:
    """Sizes, norms, biases, positions, experts."""
    model, sizes = case.model, read_sizes(case.model)
    return {
        "num-layers": sizes.count,
        "hidden-size": model.hidden,
        "ffn-hidden-size": sizes.ffn,
        **_attention(sizes.layer.attention),
        **_windows(sizes),
        "seq-length": case.seq_len,
        "max-position-embeddings": max(case.seq_len, model.positions),
        "position-embedding-type": "learned_absolute" if model.positions else "rope",
        "normalization": "LayerNorm" if sizes.layer.norm_bias else "RMSNorm",
        "swiglu": sizes.layer.gated,
        "disable-bias-linear": not _has_biases(sizes),
        "add-qkv-bias": sizes.layer.attention.bias and not _has_biases(sizes),
        "untie-embeddings-and-output-weights": not model.tied,
        "vocab-size": model.vocab,
        **_experts(sizes),
    }


def _attention(attention: AttentionShape) -> Settings:
    grouped = attention.kv_heads != attention.heads and attention.latent is None
    return {
        "num-attention-heads": attention.heads,
        "group-query-attention": grouped,
        "num-query-groups": attention.kv_heads if grouped else None,
        "kv-channels": attention.head_dim,
        "qk-layernorm": attention.qk_norm or attention.latent is not None,
        **dashed(latent_settings(attention)),
    }


def _windows(sizes: UniformSizes) -> Settings:
    """Megatron counts the positions before a token's own, a plan counts that one too."""
    if not sizes.window:
        return {}
    some = None if all(sizes.windowed) else render_pattern(sizes.windowed)
    return {"window-size": f"{sizes.window - 1},0", "window-attn-skip-freq": some}


def _experts(sizes: UniformSizes) -> Settings:
    experts = sizes.experts
    if experts is None:
        return {}
    return {
        "num-experts": experts.count,
        "moe-layer-freq": None if all(sizes.mixed) else render_pattern(sizes.mixed),
        **dashed(expert_settings(sizes)),
    }


def _has_biases(sizes: UniformSizes) -> bool:
    """Megatron has them everywhere, or on queries, keys and values, or nowhere."""
    return sizes.layer.ffn_bias or sizes.layer.attention.output_bias


def describe_model(case: Case) -> Iterator[str]:
    """What these flags leave open, or cannot say."""
    sizes = read_sizes(case.model)
    attention = sizes.layer.attention
    yield from describe_irregular(case.model)
    if len({attention.bias, attention.output_bias, sizes.layer.ffn_bias}) > 1 and _has_biases(sizes):
        yield "Megatron has biases in all matrices or in none but queries, keys and values; here it has them in all."
    if not sizes.layer.gated:
        yield "Without gates the activation is GELU; another one is an option of its own."
    if not case.model.positions:
        yield "Base and scaling of rotary positions are not part of a plan: set --rotary-base as the model has it."
    if sizes.experts:
        yield "How the router scores, balances and drops is not part of a plan: set the --moe-router options."
