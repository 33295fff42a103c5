"""Attention: grouped-query and multi-head latent, rotary positions, and the cores that mix positions.

Invariant: no layer mentions how many heads it holds beyond the size of one, so a projection whose columns were split
over ranks runs the same code on fewer heads. This module must not know of meshes or of the residual stream.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from shardway.models.shapes import BlockShape, LatentShape


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al., arXiv:2305.13245); [batch, seq, dim] -> the same.

    Queries, keys and values have a matrix each, so that each splits by heads; joined into one they were no faster
    (measured on CPU, 2 threads, dim 128 to 256). Attention probabilities have no dropout: it would rule out the
    fused kernel on CPU.
    """

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.head_width = shape.head_width
        self.rope_theta = shape.rope_theta if shape.positions == "rope" else None
        width, biased = shape.head_width, shape.bias or shape.qkv_bias
        self.wq = nn.Linear(shape.dim, shape.heads * width, bias=biased)
        self.wk = nn.Linear(shape.dim, shape.kv_heads * width, bias=biased)
        self.wv = nn.Linear(shape.dim, shape.kv_heads * width, bias=biased)
        self.q_norm = nn.RMSNorm(width, eps=shape.norm_eps) if shape.qk_norm else None
        self.k_norm = nn.RMSNorm(width, eps=shape.norm_eps) if shape.qk_norm else None
        self.core = CausalAttention() if shape.causal else FullAttention()
        self.wo = nn.Linear(shape.heads * width, shape.dim, bias=shape.bias)

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """`positions` [seq] or [batch, seq] turn queries and keys; None where positions are not rotary."""
        # [batch, seq, heads, head_width], with however many heads this rank's columns make
        q, k, v = (w(x).unflatten(-1, (-1, self.head_width)) for w in (self.wq, self.wk, self.wv))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope_theta is not None and positions is not None:
            cos, sin = rotation(positions, self.head_width, self.rope_theta)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        return self.wo(self.core(q, k, v).transpose(1, 2).flatten(2))


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, equations 9 to 19); [batch, seq, dim] -> the same.

    Keys and values are made from one latent of `kv_rank` features, queries perhaps from one of `q_rank`; each latent
    is normalised. The rotary features of a key are the same for all heads. Projections down and the norms are whole on
    every rank of a tensor axis, those up split by heads.
    """

    def __init__(self, shape: BlockShape, latent: LatentShape) -> None:
        super().__init__()
        self.latent, self.key_width, self.rope_theta = latent, shape.head_width, shape.rope_theta
        width = shape.head_width + latent.rope_head_dim
        self.q_down = nn.Linear(shape.dim, latent.q_rank, bias=False) if latent.q_rank else None
        self.q_norm = nn.RMSNorm(latent.q_rank, eps=shape.norm_eps) if latent.q_rank else None
        self.wq = nn.Linear(latent.q_rank or shape.dim, shape.heads * width, bias=False)
        self.kv_down = nn.Linear(shape.dim, latent.kv_rank + latent.rope_head_dim, bias=False)
        self.kv_norm = nn.RMSNorm(latent.kv_rank, eps=shape.norm_eps)
        self.kv_up = nn.Linear(latent.kv_rank, shape.heads * (shape.head_width + latent.value_head_dim), bias=False)
        self.core = CausalAttention()
        self.wo = nn.Linear(shape.heads * latent.value_head_dim, shape.dim, bias=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`positions` [seq] or [batch, seq]."""
        rotary, values = self.latent.rope_head_dim, self.latent.value_head_dim
        turn = rotation(positions, rotary, self.rope_theta)
        q = self._make_queries(x, *turn)
        latent, shared_key = self.kv_down(x).split((self.latent.kv_rank, rotary), dim=-1)
        # [batch, seq, heads, ...], with however many heads this rank's columns make
        k, v = (
            self.kv_up(self.kv_norm(latent))
            .unflatten(-1, (-1, self.key_width + values))
            .split((self.key_width, values), dim=-1)
        )
        shared_key = rotate(shared_key.unsqueeze(2), *turn).expand(-1, -1, k.shape[2], -1)
        k = torch.cat((k, shared_key.type_as(k)), dim=-1)
        # Kernels want values as wide as keys: the fused one on CPU has no other form.
        v = F.pad(v, (0, k.shape[-1] - values))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        return self.wo(self.core(q, k, v)[..., :values].transpose(1, 2).flatten(2))

    def _make_queries(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        if self.q_down is not None and self.q_norm is not None:
            x = self.q_norm(self.q_down(x))
        rotary = self.latent.rope_head_dim
        q = self.wq(x).unflatten(-1, (-1, self.key_width + rotary))
        still, turning = q.split((self.key_width, rotary), dim=-1)
        return torch.cat((still, rotate(turning, cos, sin)), dim=-1)


class CausalAttention(nn.Module):
    """softmax(q k^T / sqrt(head_dim)) v over earlier positions; [batch, heads, seq, head_dim] each, k and v perhaps
    of fewer heads. A module of its own, so that one that sees a part of the sequence can take its place."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


class FullAttention(nn.Module):
    """softmax(q k^T / sqrt(head_dim)) v over all positions; shapes as those of `CausalAttention`."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


def rotation(positions: torch.Tensor, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 factors of `rotate`, each [(batch,) seq, 1, head_dim]; the 1 stands for the heads.

    Feature i and feature i + head_dim/2 turn by position * theta**(-2i/head_dim) (Su et al., RoFormer,
    arXiv:2104.09864, equation 15): cosines for both, and minus and plus the sine.
    """
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[..., None, None].float() * theta**-exponent
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the feature pairs of x [batch, seq, heads, head_dim] by the factors of `rotation`, in float32.

    Rolling by half a head brings each feature's partner to its place: about twice as fast as rotating two chunks of
    half the width and joining them (measured on CPU, 2 threads, heads of 32).
    """
    return (x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin).type_as(x)
