"""Shardway's transformer <-> the families of `transformers` that compute the same: Llama, Qwen2, Qwen3, Mixtral and
Qwen3-MoE.

Invariant: a shape has a family only if that family computes the same logits with the same weights. A shape without a
family is refused with the key that prevents it. This module must not import transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from shardway.errors import Problem, check_no_problems
from shardway.hfconfig import CONFIG
from shardway.models.experts import MixtureShape
from shardway.models.huggingface.weights import FAMILIES, Arrangement, Names, Shape
from shardway.models.transformer import TransformerShape

_MODULES: Mapping[str, str] = MappingProxyType(
    {
        "embedding": "model.embed_tokens",
        "norm": "model.norm",
        "head": "lm_head",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attention.wq": "self_attn.q_proj",
        "attention.wk": "self_attn.k_proj",
        "attention.wv": "self_attn.v_proj",
        "attention.wo": "self_attn.o_proj",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "ffn.gate": "mlp.gate_proj",
        "ffn.up": "mlp.up_proj",
        "ffn.down": "mlp.down_proj",
        "ffn.router": "mlp.gate",
        "ffn.experts": "mlp.experts",
    }
)
"""A module of the transformer, or of one of its blocks -> what the library calls it."""

_FAMILIES: Mapping[tuple[bool, bool, bool], tuple[str, str]] = MappingProxyType(
    {
        (False, False, False): ("llama", "LlamaForCausalLM"),
        (False, False, True): ("qwen2", "Qwen2ForCausalLM"),
        (False, True, False): ("qwen3", "Qwen3ForCausalLM"),
        (True, False, False): ("mixtral", "MixtralForCausalLM"),
        (True, True, False): ("qwen3_moe", "Qwen3MoeForCausalLM"),
    }
)
"""(has experts, qk_norm, qkv_bias) -> `model_type` and class."""

_ARCHITECTURES = MappingProxyType(dict(_FAMILIES.values()))


def _list_misfits(wanted: Mapping[str, tuple[Any, Sequence[Any]]], what: str) -> list[Problem]:
    """A problem for each key whose value is none of those that are computed."""
    return [
        Problem(
            key,
            f"{value!r} {what}",
            allowed=", ".join("none" if each is None else str(each).lower() for each in allowed),
        )
        for key, (value, allowed) in wanted.items()
        if value not in allowed
    ]


def family_of(shape: TransformerShape) -> str:
    """The `model_type` that computes what this shape does. Raises UserError that names every key with no form there."""
    mixture, qwen = shape.mixture, shape.qk_norm
    family, _ = _FAMILIES.get((mixture is not None, shape.qk_norm, shape.qkv_bias), (None, ""))
    wanted: dict[str, tuple[Any, Sequence[Any]]] = {
        "model.norm": (shape.norm, ["rmsnorm"]),
        "model.activation": (shape.activation, ["swiglu"]),
        "model.positions": (shape.positions, ["rope"]),
        "model.kv_rank": (0 if shape.latent is None else shape.latent.kv_rank, [0]),
        "model.bias": (shape.bias, [False, True] if family == "llama" else [False]),
        "model.qkv_bias": (shape.qkv_bias, [False] if family is None else [shape.qkv_bias]),
    }
    if mixture is not None:  # Mixtral; Qwen3-MoE may have dense layers first, and weights that do not sum to one
        wanted |= {
            "model.shared_experts": (mixture.shared, [0]),
            "model.router_score": (mixture.score, ["softmax"]),
            "model.router_scale": (mixture.scale, [1.0]),
            "model.balance": (mixture.balance, ["none", "loss"]),
            "model.capacity_factor": (mixture.capacity_factor, [0.0]),
            "model.router_normalise": (mixture.normalise, [True, False] if qwen else [True]),
            "model.dense_layers": (shape.dense_layers, [shape.dense_layers] if qwen else [0]),
        }
    check_no_problems("the transformer", _list_misfits(wanted, "has no form in Hugging Face's families"))
    return str(family)


def to_huggingface_config(shape: TransformerShape, max_positions: int) -> dict[str, Any]:
    """The config.json of a transformer trained on samples of up to `max_positions` tokens. Raises UserError."""
    family, mixture = family_of(shape), shape.mixture
    config = {
        "model_type": family,
        "architectures": [_ARCHITECTURES[family]],
        "vocab_size": shape.vocab,
        "hidden_size": shape.dim,
        "intermediate_size": shape.ffn_dim,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "hidden_act": "silu",
        "max_position_embeddings": max_positions,
        "rms_norm_eps": shape.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rope_theta": shape.rope_theta,  # where releases before 5 look for it
        "tie_word_embeddings": shape.tied,
        "attention_bias": shape.bias,
        "mlp_bias": shape.bias,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if mixture is not None:
        config["num_experts_per_tok"] = mixture.per_token
    if family == "mixtral" and mixture is not None:
        config |= {"num_local_experts": mixture.experts, "intermediate_size": mixture.expert_dim}
    if family == "qwen3_moe" and mixture is not None:
        config |= {
            "num_experts": mixture.experts,
            "moe_intermediate_size": mixture.expert_dim,
            "norm_topk_prob": mixture.normalise,
            "mlp_only_layers": list(range(shape.dense_layers)),
            "decoder_sparse_step": 1,
        }
    return config


def to_transformer_shape(config: Mapping[str, Any]) -> TransformerShape:
    """The shape of Shardway's transformer that computes what a config.json describes.

    Raises UserError for a family or a setting that it does not compute.
    """
    family, dense = config.get("model_type"), list(config.get("mlp_only_layers") or [])
    # Rotary positions: releases before 5 have the base outside, and the kind in `rope_scaling`.
    older = {"rope_theta": config["rope_theta"]} if "rope_theta" in config else {}
    rope = {**older, **(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    bias, mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    wanted: dict[str, tuple[Any, Sequence[Any]]] = {
        "hidden_act": (config.get("hidden_act", "silu"), ["silu"]),
        "rope_type": (str(rope.get("rope_type", rope.get("type", "default"))), ["default"]),
        "attention_bias": (bias, [mlp_bias] if family == "llama" else [False]),
        "decoder_sparse_step": (config.get("decoder_sparse_step", 1), [1]),
        "mlp_only_layers": (dense, [list(range(len(dense)))]),
        "use_sliding_window": (bool(config.get("use_sliding_window")), [False]),
        "quantization_config": (config.get("quantization_config"), [None]),
    }
    problems = _list_misfits(wanted, "is not what Shardway's transformer computes")
    if family not in _ARCHITECTURES:
        what, allowed = f"{family!r} is no family that Shardway's transformer computes", ", ".join(_ARCHITECTURES)
        problems.insert(0, Problem("model_type", what, allowed=allowed, remedy="name it as model.hf instead"))
    check_no_problems(CONFIG, problems)
    heads, dim = config["num_attention_heads"], config["hidden_size"]
    mixture = None
    if family in ("mixtral", "qwen3_moe"):
        mixture = MixtureShape(
            experts=config.get("num_experts") or config["num_local_experts"],
            per_token=config["num_experts_per_tok"],
            expert_dim=config.get("moe_intermediate_size") or config["intermediate_size"],
            normalise=family == "mixtral" or bool(config.get("norm_topk_prob")),
            balance="loss",
        )
    return TransformerShape(
        vocab=config["vocab_size"],
        dim=dim,
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        ffn_dim=config["intermediate_size"],
        head_dim=config.get("head_dim") or dim // heads,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        bias=bias and family == "llama",
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        rope_theta=rope.get("rope_theta", 10000.0),
        tied=bool(config.get("tie_word_embeddings", False)),
        mixture=mixture,
        dense_layers=len(dense),
    )


def names_of_transformer(shape: TransformerShape) -> Names:
    """How files of the family that computes this shape hold the transformer's parameters."""
    family = FAMILIES[family_of(shape)]

    def names(name: str, whole: Shape) -> Sequence[Arrangement]:
        return family(translate(name), whole)

    return names


def translate(name: str) -> str:
    """A parameter of Shardway's transformer -> its name in the library: blocks.3.ffn.up.weight ->
    model.layers.3.mlp.up_proj.weight."""
    owner, _, leaf = name.rpartition(".")
    if not owner.startswith("blocks."):
        return f"{_MODULES[owner]}.{leaf}"
    _, index, inner = owner.split(".", 2)
    return f"model.layers.{index}.{_MODULES[inner]}.{leaf}"
