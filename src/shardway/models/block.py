"""One block of a transformer: attention and feed-forward, each after a norm and added to the residual stream.

Invariant: a block is one unit of sharding, compilation and recompute, and has the initial values that its names give
it. This module must not know what comes before or after the blocks.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from shardway.models.attention import Attention, LatentAttention
from shardway.models.contract import Split, canonical_name
from shardway.models.experts import MixtureOfExperts
from shardway.models.feed_forward import FeedForward
from shardway.models.initialise import constant_, normal_
from shardway.models.router import Router
from shardway.models.shapes import BlockShape


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)); [batch, seq, dim] -> the same."""

    def __init__(self, shape: BlockShape, index: int) -> None:
        super().__init__()
        self.attention_norm = build_norm(shape)
        self.attention = Attention(shape) if shape.latent is None else LatentAttention(shape, shape.latent)
        self.ffn_norm = build_norm(shape)
        mixture = shape.mixture if shape.is_mixed(index) else None
        self.ffn = FeedForward(shape) if mixture is None else MixtureOfExperts(shape.dim, mixture)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Takes positions, not a table of angles: a sharded block in bf16 would have the table cast to bf16."""
        x = x + self.dropout(self.attention(self.attention_norm(x), positions))
        return x + self.dropout(self.ffn(self.ffn_norm(x)))


def build_blocks(shape: BlockShape) -> nn.ModuleDict:
    """All blocks by number: a dict, so that a pipeline stage that drops some keeps the names, and thus the weights, of
    the others."""
    return nn.ModuleDict({str(index): Block(shape, index) for index in range(shape.layers)})


def build_norm(shape: BlockShape) -> nn.Module:
    """The norm of the residual stream, with a gain."""
    if shape.norm == "layernorm":
        return nn.LayerNorm(shape.dim, eps=shape.norm_eps, bias=shape.bias)
    return nn.RMSNorm(shape.dim, eps=shape.norm_eps)


def init_blocks_and_ends(model: nn.Module, shape: BlockShape, seed: int) -> None:
    """Fill every parameter and buffer of a model of such blocks; the values depend on seed and name alone.

    Gains are 1, biases and a class token 0, matrices normal with `initial_std`.
    """
    for name, parameter in model.named_parameters():
        name = canonical_name(name)
        if parameter.dim() < 2:
            constant_(parameter, 0.0 if name.endswith(("bias", "class_token")) else 1.0, name=name)
        else:
            normal_(parameter, seed=seed, name=name, std=initial_std(shape, name))
    for module in model.modules():
        if isinstance(module, Router):
            module.reset()


def initial_std(shape: BlockShape, name: str) -> float:
    """sqrt(2/(5 dim)) (Nguyen and Salazar, "Transformers without Tears", arXiv:1910.05895, "SmallInit").

    It is GPT-2's 0.02 at dim 1000 and suits narrow models too. Projections that add to the residual stream are
    divided by sqrt(2 layers), the number of such additions (Radford et al., GPT-2, 2019, section 2.3).
    """
    residual = name.endswith(("attention.wo.weight", "ffn.down.weight", "experts.down", "shared.down"))
    return math.sqrt(2 / (5 * shape.dim)) / (math.sqrt(2 * shape.layers) if residual else 1.0)


def tensor_plan(shape: BlockShape) -> dict[str, Split]:
    """How the modules of the blocks split; what is in a region and not named here is whole on every rank."""
    plan: dict[str, Split] = {"blocks.*.attention.wq": "column"}
    if shape.latent is None:
        plan["blocks.*.attention.w[kv]"] = "key_value"
    else:
        plan["blocks.*.attention.kv_up"] = "column"
    plan["blocks.*.attention.wo"] = "row"
    if shape.mixed_layers < shape.layers:
        plan |= {"blocks.*.ffn.gate": "column"} if shape.activation == "swiglu" else {}
        plan |= {"blocks.*.ffn.up": "column", "blocks.*.ffn.down": "row"}
    return plan


def held_plan(shape: BlockShape) -> dict[str, int]:
    """The dims along which weights of experts split by hidden features."""
    if shape.mixture is None:
        return {}
    experts = {"blocks.*.ffn.experts.gate": 1, "blocks.*.ffn.experts.up": 1, "blocks.*.ffn.experts.down": 2}
    shared = {"blocks.*.ffn.shared.gate": 0, "blocks.*.ffn.shared.up": 0, "blocks.*.ffn.shared.down": 1}
    return {**experts, **(shared if shape.mixture.shared else {})}
