"""From the plans of `transformers` (tp_plan, pp_plan) to a `ModelPlan`.

Invariant: what the library's plan says in a word that this module does not know is not guessed: the tensor axis then
has no plan, and says so. This module must not change a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from shardway.models.contract import ModelPlan, Split, matches

LAYERS = "model.layers"

_SPLITS: Mapping[str, Split] = {"colwise": "column", "rowwise": "row", "embedding_rowwise": "vocabulary"}
_INSIDE_A_REGION = ("replicated_with_grad_allreduce", "packed_colwise", "moe_tp_experts")
"""Styles of what lies within a region: norms of heads, which need no split, and experts, which `_held` splits."""

_HELD = {"gate": 1, "up": 1, "down": 2}
_SHARED: Mapping[str, Split] = {"gate_proj": "column", "up_proj": "column", "down_proj": "row"}


def derive_plan(model: nn.Module, library: Any) -> ModelPlan:
    """The plan of an adapted `model`; `library` is the causal language model that it was made of."""
    modules = dict(model.named_modules())
    mixtures = any(name.endswith(".mlp.experts") for name in modules)
    tensor = _tensor(modules, library.tp_plan)
    around = [name for name in library.pp_plan if name != "lm_head"]
    cut = around.index(LAYERS)
    return ModelPlan(
        blocks=(f"{LAYERS}.*",),
        tensor=tensor,
        regions=(f"{LAYERS}.*.self_attn", f"{LAYERS}.*.mlp") if tensor else (),
        held={f"{LAYERS}.*.mlp.experts.{leaf}": dim for leaf, dim in _HELD.items()} if tensor and mixtures else {},
        kv_width=_head_dim(library.config),
        attention=(f"{LAYERS}.*.self_attn.core",),
        positions="positions",
        experts=(f"{LAYERS}.*.mlp.experts",) if mixtures else (),
        active=_active(modules),
        first=tuple(around[:cut]),
        last=(*around[cut + 1 :], "lm_head"),
        shared=(("model.embed_tokens", "lm_head"),) if library.config.tie_word_embeddings else (),
    )


def _tensor(modules: Mapping[str, nn.Module], styles: Mapping[str, str]) -> dict[str, Split]:
    """How modules split; empty where the library splits one in a way that has no word here."""
    splits: dict[str, Split] = {}
    for pattern, style in styles.items():
        if not any(matches(name, pattern) for name in modules) or style in _INSIDE_A_REGION:
            continue
        if pattern == "lm_head":
            splits[pattern] = "logits"
        elif style not in _SPLITS:
            return {}
        else:
            splits[pattern] = "key_value" if pattern.endswith((".k_proj", ".v_proj")) else _SPLITS[style]
    return {**splits, **_shared_experts(modules), **_norms(modules)}


def _shared_experts(modules: Mapping[str, nn.Module]) -> dict[str, Split]:
    """The library computes a shared expert whole on every rank; in a region, whose outputs are added up, it splits."""
    if not any(name.endswith(".mlp.shared_expert") for name in modules):
        return {}
    return {f"{LAYERS}.*.mlp.shared_expert.{leaf}": split for leaf, split in _SHARED.items()}


def _norms(modules: Mapping[str, nn.Module]) -> dict[str, Split]:
    """Norms of the residual stream: beside the attention of a layer, and after the last one."""
    prefix = f"{LAYERS}.0."
    names = [name.removeprefix(prefix) for name in modules if name.startswith(prefix)]
    beside = [name for name in names if "." not in name and name.endswith("norm")]
    return {**{f"{LAYERS}.*.{name}": "sequence" for name in beside}, "model.norm": "sequence"}


def _active(modules: Mapping[str, Any]) -> float:
    routers = [module.gate for name, module in modules.items() if f"{name}.experts" in modules]
    return float(routers[0].top_k / routers[0].num_experts) if routers else 1.0


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
