"""A decoder-only language model of `transformers` behind Shardway's contract, and its plan of parallelism.

Invariants:
- Plan: an unknown word in the library's plan is not guessed. The tensor axis then has no plan, and states so.
- Model: layers, norms and embeddings are the library's own modules under the library's own names. The loop around them
  and the mixing of positions are ours, so that a model can be cut, and the axes find a module to replace.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardway.models.contract import ModelPlan, Split, canonical_name, matches
from shardway.models.huggingface.families import MixtureBlock
from shardway.models.huggingface.weights import Fit, load_weights
from shardway.models.initialise import constant_, normal_
from shardway.models.transformer import CausalAttention, TiedHead

# --- from tp_plan and pp_plan to a ModelPlan

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


# --- the model

ATTENTION = "shardway"
"""Name under which `mix_positions` is known to the library."""


def mix_positions(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, scaling: float, **__: Any
) -> tuple[torch.Tensor, None]:
    """The library's attention interface: [batch, heads, seq, head_dim] each -> [batch, seq, heads, head_dim].

    Key and value may have fewer heads. Goes through `module.core`, whose place the context axis can take; that has
    the usual factor 1 / sqrt(head_dim), so another one goes into the query.
    """
    factor = scaling * query.shape[-1] ** 0.5
    query = query if abs(factor - 1.0) < 1e-6 else query * factor
    return module.core(query, key, value).transpose(1, 2), None


class HuggingFaceModel(nn.Module):
    """Token ids [batch, seq] -> logits [batch, seq, vocab]."""

    fit: Fit | None = None
    """Where `init_weights` finds values; None draws them at random."""
    source: Path | None = None
    """The folder that the model came from."""
    notes: tuple[str, ...] = ()
    """What a person is to know of how that folder was read."""

    def __init__(self, library: Any) -> None:
        """Takes the modules of a causal language model that was built with `ATTENTION`."""
        super().__init__()
        self.config = library.config
        self.model = _Decoder(library.model)
        self.lm_head: nn.Module | None = TiedHead() if self.config.tie_word_embeddings else library.lm_head
        self._plan = derive_plan(self, library)

    def forward(self, inputs: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Logits for int64 `inputs` [batch, seq]; `positions` [seq] or [batch, seq] default to 0, 1, 2 ...

        A pipeline stage takes and returns [batch, seq, dim] where it lacks the first or the last modules, and needs
        `positions` then.
        """
        if positions is None:
            positions = torch.arange(inputs.shape[-1], device=inputs.device)
        embedding = self.model.embed_tokens
        x = inputs if embedding is None else embedding(inputs)
        angles = self.model.rotary_emb(x, positions if positions.dim() == 2 else positions[None])
        for layer in self.model.layers.values():
            x = layer(x, position_embeddings=angles, attention_mask=None)
        if self.lm_head is None or self.model.norm is None:
            return x
        x = self.model.norm(x)
        if embedding is None or not self.config.tie_word_embeddings:
            return self.lm_head(x)
        return self.lm_head(x, embedding.weight)

    def init_weights(self, seed: int) -> None:
        """Fill every parameter and buffer: from the files of the model, or, where it has a config alone, with values
        that depend on seed and name alone, of the standard deviation that the config names."""
        self.model.refill_buffers()
        if self.fit is not None:
            load_weights(self, self.fit)
        else:
            self._draw(seed)

    def _draw(self, seed: int) -> None:
        for name, parameter in self.named_parameters():
            name = canonical_name(name)
            if parameter.dim() < 2:
                constant_(parameter, 0.0 if name.endswith("bias") else 1.0, name=name)
            else:
                normal_(parameter, seed=seed, name=name, std=self.config.initializer_range)

    def plan(self) -> ModelPlan:
        """The library's own plans for tensor and pipeline parallelism, in Shardway's words."""
        return self._plan


class _Decoder(nn.Module):
    """The parts of the library's `model`, without its forward."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embed_tokens: nn.Embedding | None = model.embed_tokens
        model.embed_tokens.padding_idx = None  # its gradient would be dropped in some layouts and not in others
        # A dict, so that a pipeline stage that drops layers keeps the names of the others.
        region = _as_region(type(model.layers[0].self_attn))
        self.layers = nn.ModuleDict({str(index): _adapt(layer, region) for index, layer in enumerate(model.layers)})
        self.norm: nn.Module | None = model.norm
        self.rotary_emb = model.rotary_emb

    def refill_buffers(self) -> None:
        """Frequencies of the rotary positions, which no file holds and the meta device has lost."""
        with torch.device("cpu"):
            fresh = type(self.rotary_emb)(self.rotary_emb.config)
        for name, buffer in self.rotary_emb.named_buffers():
            buffer.copy_(fresh.get_buffer(name))


def _adapt(layer: Any, region: type[Any]) -> nn.Module:
    layer.self_attn.core = CausalAttention()
    layer.self_attn.__class__ = region
    if hasattr(layer.mlp, "experts"):
        layer.mlp = MixtureBlock(layer.mlp)
    module: nn.Module = layer
    return module


def _as_region(kind: type[Any]) -> type[Any]:
    """The library's attention as hooks of a region want it: input first and by place, one tensor out.

    The layer that calls it passes `hidden_states` by keyword and takes a pair.
    """

    class Region(kind):
        def __call__(self, hidden_states: torch.Tensor, **others: Any) -> tuple[torch.Tensor, None]:
            return super().__call__(hidden_states, **others), None

        def forward(self, hidden_states: torch.Tensor, **others: Any) -> torch.Tensor:
            mixed: torch.Tensor = super().forward(hidden_states=hidden_states, **others)[0]
            return mixed

    return Region
