"""The families of `transformers` whose decoder this package is known to compute as the library does.

Invariant: a family stands here only with a test that compares its logits with the library's own; what of a config this
package would not compute is refused, never ignored. This module must not import transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from shardway.errors import Problem
from shardway.models.huggingface.experts import ExpertNames
from shardway.models.huggingface.pieces import Names, keep_names

_QWEN_EXPERTS = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")

FAMILIES: Mapping[str, Names] = MappingProxyType(
    {
        "llama": keep_names,
        "mistral": keep_names,
        "qwen2": keep_names,
        "qwen3": keep_names,
        "olmo": keep_names,
        "olmo2": keep_names,
        "phi3": keep_names,
        "smollm3": keep_names,
        "mixtral": ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
        "qwen2_moe": _QWEN_EXPERTS,
        "qwen3_moe": _QWEN_EXPERTS,
    }
)
"""`model_type` -> how files name the parameters."""

SPARE = ("*.rotary_emb.inv_freq",)
"""Tensors that old files hold and that follow from the config."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""What a tied model uses twice: under which names files hold it."""

SPARE_IF_TIED = (HEAD,)

_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary positions whose frequencies do not depend on the length of the input."""


def list_config_problems(config: Any, seq_len: int) -> list[Problem]:
    """What of a config (an object of the library's) this package cannot train on samples of `seq_len` tokens."""
    return [problem for check in _CHECKS for problem in check(config, seq_len)]


def _unknown_family(config: Any, seq_len: int) -> list[Problem]:
    if config.model_type in FAMILIES:
        return []
    return [
        Problem(
            "model_type",
            f'"{config.model_type}" is a family that Shardway has not been tested with',
            allowed=", ".join(FAMILIES),
            remedy="train it with `run.shard(model)` in a script of your own",
        )
    ]


def _other_numbers(config: Any, seq_len: int) -> list[Problem]:
    """Options of a config that change what is computed, in ways that stop at the borders between ranks."""
    wanted = {
        "quantization_config": (None, "weights that are not quantized"),
        "attention_dropout": (0.0, "no dropout of attention weights"),
        "router_jitter_noise": (0.0, "no noise in the router"),
        "output_router_logits": (False, "a mixture without the library's balancing loss"),
    }
    return [
        Problem(key, f"{getattr(config, key)} is set", allowed=f"{neutral}: {why}", remedy="change it in config.json")
        for key, (neutral, why) in wanted.items()
        if getattr(config, key, None) not in (neutral, None)
    ]


def _other_experts(config: Any, seq_len: int) -> list[Problem]:
    """Experts are computed by Shardway's own module, which knows one activation."""
    if not isinstance(FAMILIES.get(config.model_type), ExpertNames) or config.hidden_act == "silu":
        return []
    return [Problem("hidden_act", f'"{config.hidden_act}" in a mixture of experts', allowed='"silu"')]


def _moving_positions(config: Any, seq_len: int) -> list[Problem]:
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind in _STATIC_ROPE:
        return []
    what = f'"{kind}" positions depend on the length of the input'
    return [Problem("rope_parameters.rope_type", what, allowed=", ".join(_STATIC_ROPE))]


def _short_sequences(config: Any, seq_len: int) -> list[Problem]:
    limits = {"max_position_embeddings": config.max_position_embeddings, "sliding_window": _window(config)}
    return [
        Problem(key, f"{limit} is less than data.seq_len = {seq_len}", allowed="samples that are no longer")
        for key, limit in limits.items()
        if limit is not None and seq_len > limit
    ]


def _window(config: Any) -> int | None:
    """How far back attention looks, where it does not see all; None too where a window is written but not used."""
    kinds = getattr(config, "layer_types", None)
    uses = kinds is None or "sliding_attention" in kinds
    window: int | None = getattr(config, "sliding_window", None)
    return window if uses else None


_CHECKS: tuple[Callable[[Any, int], list[Problem]], ...] = (
    _unknown_family,
    _other_numbers,
    _other_experts,
    _moving_positions,
    _short_sequences,
)
