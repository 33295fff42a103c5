"""The decoder families of `transformers` that Shardway computes as the library does, and their experts.

Invariants:
- Experts: the numbers are those of the library's block with SwiGLU experts. Gate and up projections, one stack in the
  library, are separate here, so that each splits by columns.
- Families: each has a test that compares its logits with the library's own. A setting of a config that this package
  does not compute is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from shardway.errors import Problem
from shardway.models.experts import Experts
from shardway.models.huggingface.pieces import Arrangement, Names, Shape, keep_name, keep_names, part_of, stack

# --- the feed-forward block of a mixture


class MixtureBlock(nn.Module):
    """The library's router (and shared expert, where there is one) around experts that take sorted tokens.

    [batch, seq, dim] -> the same.
    """

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.gate = block.gate
        experts, dim, hidden = block.experts.down_proj.shape
        with block.experts.down_proj.device:
            self.experts = Experts(experts, dim, hidden)
        self.shared_expert: nn.Module | None = getattr(block, "shared_expert", None)
        self.shared_expert_gate: nn.Module | None = getattr(block, "shared_expert_gate", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        _, weights, chosen = self.gate(tokens)
        y = self._mix(tokens, weights, chosen)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            y = y + torch.sigmoid(self.shared_expert_gate(tokens)) * self.shared_expert(tokens)
        return y.view_as(x)

    def _mix(self, tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """The weighted sum of each token's experts; `weights` and `chosen` are [tokens, top_k]."""
        top_k = chosen.shape[-1]
        order = chosen.flatten().argsort(stable=True)
        owners = order // top_k
        counts = torch.bincount(chosen.flatten(), minlength=self.gate.num_experts)
        outputs = self.experts(tokens[owners], counts) * weights.flatten()[order, None].type_as(tokens)
        return torch.zeros_like(tokens).index_add(0, owners, outputs)


@dataclass(frozen=True)
class ExpertNames:
    """What a family calls a mixture's block and an expert's matrices in its files, where each expert has its own."""

    block: str
    gate: str
    up: str
    down: str

    def __call__(self, name: str, shape: Shape) -> Sequence[Arrangement]:
        """Files of one tensor per expert, and files of the stacks that transformers computes with."""
        owner, _, leaf = name.rpartition(".")
        if owner.endswith(".mlp.experts"):
            outside = f"{owner.removesuffix('mlp.experts')}{self.block}.experts"
            each = [f"{outside}.{index}.{getattr(self, leaf)}.weight" for index in range(shape[0])]
            return stack(each, shape), _stacked(f"{owner}.", leaf, shape)
        renamed = name.replace(".mlp.gate.", f".{self.block}.gate.")
        return keep_name(renamed, shape), keep_name(name, shape)


def _stacked(prefix: str, leaf: str, shape: Shape) -> Arrangement:
    if leaf == "down":
        return keep_name(f"{prefix}down_proj", shape)
    return part_of(f"{prefix}gate_up_proj", shape, dim=1, index=("gate", "up").index(leaf), parts=2)


# --- the supported families

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
