"""What weights mean beside their shapes: numbers of heads, rotary base, epsilons, as a source's config.json says them.

Invariant: a setting is compared only where both sides say it; one that differs is a problem, since the same weights
would compute something else. This module must not compare shapes of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from shardway.checkpoint.sources.base import ForeignSource
from shardway.errors import Problem
from shardway.models.huggingface.model import HuggingFaceModel
from shardway.models.huggingface.own import to_transformer_shape
from shardway.models.transformer import Transformer, TransformerShape

_OF_CONFIG = (
    *("model_type", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps"),
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "sliding_window", "clip_qkv"),
    *("tie_word_embeddings", "num_experts_per_tok", "norm_topk_prob", "no_rope_layers", "layer_types"),
)
"""Of a config.json, what shapes do not say."""


def is_tied(model: nn.Module) -> bool:
    """Whether the output layer of a language model is its embedding."""
    if isinstance(model, HuggingFaceModel):
        return bool(model.config.tie_word_embeddings)
    return isinstance(model, Transformer) and model.shape.tied


def list_setting_problems(source: ForeignSource, model: nn.Module) -> list[Problem]:
    """Settings in which a source's config.json and the model differ. Raises UserError for a family that Shardway's
    transformer does not compute."""
    config = source.config
    if config is None:
        return []
    if isinstance(model, HuggingFaceModel):
        own = model.config.to_dict()
        return [
            _differs(f"config.json: {key}", own[key], config[key], "name the folder of these weights as model.hf")
            for key in _OF_CONFIG
            if config.get(key) is not None
            and key in own
            and not _alike(own[key], config[key])
            and not (key == "tie_word_embeddings" and config[key])  # what the values say counts then
        ]
    if isinstance(model, Transformer):
        here, there = _settings_of(model.shape), _settings_of(to_transformer_shape(config))
        return [
            _differs(f"model.{key}", value, there[key], f"set model.{key} = {there[key]}")
            for key, value in here.items()
            if not _alike(value, there.get(key, value))
        ]
    return []


def _settings_of(shape: TransformerShape) -> dict[str, Any]:
    """Keys of [model] that no shape of a weight says."""
    settings = {
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "activation": shape.activation,
        "positions": shape.positions,
        "tied": shape.tied,
    }
    if shape.mixture is not None:
        settings |= {"experts_per_token": shape.mixture.per_token, "router_normalise": shape.mixture.normalise}
    return settings


def _alike(one: Any, other: Any) -> bool:
    """Whether two values mean the same; of two tables, in what both say."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return all(_alike(one[key], other[key]) for key in one.keys() & other.keys())
    return bool(one == other)


def _differs(where: str, here: Any, there: Any, remedy: str) -> Problem:
    return Problem(where, f"{here!r} in this run, {there!r} where the weights come from", remedy=remedy)
