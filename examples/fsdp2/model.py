"""A decoder-only transformer as a course writes it, and what it tells Shardway: its `plan`.

Whoever trains it with data parallelism and sharding alone needs `blocks` of the plan, or none of it; the other lines
say how it splits by matrices, by sequence and by layers. A pipeline stage lacks some modules: they are None there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from shardway.models.contract import ModelPlan
from shardway.models.initialise import constant_, normal_


class CausalAttention(nn.Module):
    """Queries, keys and values, each [batch, heads, seq, width] -> the same."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    """[batch, seq, dim] -> the same. It never says how many heads it has, only how wide one is."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.width = dim // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.core = CausalAttention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        return self.wo(self.core(q, k, v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """[batch, seq, dim] -> the same."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.gelu(self.w1(x)))


class Block(nn.Module):
    """[batch, seq, dim] -> the same."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(dim), Attention(dim, heads)
        self.ffn_norm, self.feed_forward = nn.LayerNorm(dim), FeedForward(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """Token numbers [batch, seq] -> logits [batch, seq, vocab]."""

    def __init__(self, vocab: int, seq: int, dim: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tok_embeddings: nn.Module | None = nn.Embedding(vocab, dim)
        self.pos_embeddings = nn.Embedding(seq, dim)
        self.layers = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.output: nn.Module | None = nn.Linear(dim, vocab, bias=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        if self.tok_embeddings is not None:
            positions = torch.arange(x.shape[1], device=x.device) if positions is None else positions
            x = self.tok_embeddings(x) + self.pos_embeddings(positions)
        for layer in self.layers:
            x = layer(x)
        return x if self.output is None else self.output(self.norm(x))

    def init_weights(self, seed: int) -> None:
        """Matrices normal, gains 1, biases 0; by name, so that it does not matter which rank holds what."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                normal_(parameter, seed=seed, name=name, std=0.02)
            else:
                constant_(parameter, 0.0 if name.endswith("bias") else 1.0, name=name)

    def plan(self) -> ModelPlan:
        return ModelPlan(
            blocks=("layers.*",),
            tensor={
                "tok_embeddings": "vocabulary",
                "pos_embeddings": "sequence",
                "layers.*.*_norm": "sequence",
                "layers.*.attention.w[qkv]": "column",
                "layers.*.attention.wo": "row",
                "layers.*.feed_forward.w1": "column",
                "layers.*.feed_forward.w2": "row",
                "norm": "sequence",
                "output": "logits",
            },
            regions=("layers.*.attention", "layers.*.feed_forward"),
            attention=("layers.*.attention.core",),
            positions="positions",
            first=("tok_embeddings", "pos_embeddings"),
            last=("norm", "output"),
        )
