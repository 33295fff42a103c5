"""A decoder-only transformer: pre-norm, rotary positions, grouped-query attention.

Invariant: no sub-layer mentions how many heads or features it holds beyond the size of one head, so a projection
whose columns were split over ranks runs the same code on fewer of them; and there are no buffers, so nothing is lost
when the model is built on meta. This module must not know of meshes or of the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from shardway.errors import Problem, check_no_problems
from shardway.models.contract import ModelPlan, Split, canonical_name
from shardway.models.initialise import constant_, normal_

NORM_EPS = 1e-5


@dataclass(frozen=True)
class TransformerShape:
    """The sizes of a transformer, all resolved. Raises UserError where they do not fit each other."""

    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn_dim: int
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    activation: Literal["swiglu", "gelu"] = "swiglu"
    tied: bool = True
    rope_theta: float = 10000.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_no_problems("the transformer", _list_shape_problems(self))

    @property
    def head_dim(self) -> int:
        """Features of one head."""
        return self.dim // self.heads

    @property
    def ffn_matrices(self) -> int:
        """Matrices of one feed-forward layer: gate, up and down, or up and down."""
        return 3 if self.activation == "swiglu" else 2

    @property
    def matrix_parameters(self) -> int:
        """Parameters that a token is multiplied with: all matrices but a separate embedding table."""
        attention = 2 * self.dim * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * (attention + self.ffn_matrices * self.dim * self.ffn_dim) + self.vocab * self.dim

    @property
    def parameters(self) -> int:
        """All parameters: the matrices, a separate embedding where not tied, and the norms."""
        embedding = 0 if self.tied else self.vocab * self.dim
        return self.matrix_parameters + embedding + (2 * self.layers + 1) * self.dim

    def flops_per_token(self, seq_len: int) -> int:
        """Training FLOPs a token: 6 N + 12 L H Q T (Chowdhery et al., PaLM, arXiv:2204.02311, appendix B).

        N counts the matrices; the attention term counts the whole T x T square, as that convention has it, though a
        causal kernel may skip half. Recompute is not counted.
        """
        return 6 * self.matrix_parameters + 12 * self.layers * self.heads * self.head_dim * seq_len


def _list_shape_problems(shape: TransformerShape) -> list[Problem]:
    problems = []
    if shape.dim % (2 * shape.heads):
        problems.append(
            Problem(
                where="model.heads",
                what=f"{shape.heads} heads do not split model.dim = {shape.dim} into heads of even width",
                allowed="a divisor of model.dim / 2, since rotary positions turn pairs of features",
                remedy="change model.heads or model.dim",
            )
        )
    if shape.heads % shape.kv_heads:
        problems.append(
            Problem(
                where="model.kv_heads",
                what=f"{shape.kv_heads} does not divide model.heads = {shape.heads}",
                allowed="a divisor of model.heads",
                remedy="change model.kv_heads or model.heads",
            )
        )
    return problems


class Transformer(nn.Module):
    """Token ids [batch, seq] -> logits [batch, seq, vocab]."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding: nn.Embedding | None = nn.Embedding(shape.vocab, shape.dim)
        self.dropout = nn.Dropout(shape.dropout)
        # A dict, so that a pipeline stage that drops blocks keeps the names, and thus the weights, of the others.
        self.blocks = nn.ModuleDict({str(index): Block(shape) for index in range(shape.layers)})
        self.norm = build_norm(shape)
        self.head: nn.Module | None = TiedHead() if shape.tied else nn.Linear(shape.dim, shape.vocab, bias=False)

    def forward(self, inputs: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Logits for int64 `inputs` [batch, seq]; `positions` [seq] or [batch, seq] default to 0, 1, 2 ...

        A pipeline stage takes and returns [batch, seq, dim] where it lacks the first or the last modules, and needs
        `positions` then.
        """
        if positions is None:
            positions = torch.arange(inputs.shape[-1], device=inputs.device)
        x = inputs if self.embedding is None else self.dropout(self.embedding(inputs))
        for block in self.blocks.values():
            x = block(x, positions)
        if self.head is None:
            return x
        x = self.norm(x)
        return self.head(x) if self.embedding is None or not self.shape.tied else self.head(x, self.embedding.weight)

    def init_weights(self, seed: int) -> None:
        """Fill every parameter; the values depend on seed and name alone."""
        for name, parameter in self.named_parameters():
            name = canonical_name(name)
            if parameter.dim() < 2:
                constant_(parameter, 1.0, name=name)
            else:
                normal_(parameter, seed=seed, name=name, std=self._std(name))

    def _std(self, name: str) -> float:
        """sqrt(2/(5 dim)) (Nguyen and Salazar, "Transformers without Tears", arXiv:1910.05895, "SmallInit").

        It is GPT-2's 0.02 at dim 1000 and suits narrow models too. Projections that add to the residual stream are
        divided by sqrt(2 layers), the number of such additions (Radford et al., GPT-2, 2019, section 2.3).
        """
        residual = name.endswith(("attention.wo.weight", "ffn.down.weight"))
        return math.sqrt(2 / (5 * self.shape.dim)) / (math.sqrt(2 * self.shape.layers) if residual else 1.0)

    def plan(self) -> ModelPlan:
        """Attention and feed-forward are regions; a tied head uses the embedding's weight, split the same way."""
        gate: dict[str, Split] = {"blocks.*.ffn.gate": "column"} if self.shape.activation == "swiglu" else {}
        return ModelPlan(
            blocks=("blocks.*",),
            tensor={
                "embedding": "vocabulary",
                "blocks.*.attention_norm": "sequence",
                "blocks.*.attention.w[qkv]": "column",
                "blocks.*.attention.wo": "row",
                "blocks.*.ffn_norm": "sequence",
                **gate,
                "blocks.*.ffn.up": "column",
                "blocks.*.ffn.down": "row",
                "norm": "sequence",
                "head": "logits",
            },
            regions=("blocks.*.attention", "blocks.*.ffn"),
            kv_width=self.shape.head_dim,
            attention=("blocks.*.attention.core",),
            positions="positions",
            first=("embedding", "dropout"),
            last=("norm", "head"),
            shared=(("embedding", "head"),) if self.shape.tied else (),
        )


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)); [batch, seq, dim] -> the same."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.attention_norm = build_norm(shape)
        self.attention = Attention(shape)
        self.ffn_norm = build_norm(shape)
        self.ffn = FeedForward(shape)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Takes positions, not a table of angles: a sharded block in bf16 would have the table cast to bf16."""
        x = x + self.dropout(self.attention(self.attention_norm(x), positions))
        return x + self.dropout(self.ffn(self.ffn_norm(x)))


class Attention(nn.Module):
    """Causal grouped-query attention (Ainslie et al., arXiv:2305.13245).

    Queries, keys and values have a matrix each, so that each splits by heads; joined into one they were no faster
    (measured on CPU, 2 threads, dim 128 to 256). Attention probabilities have no dropout: it would rule out the
    fused kernel on CPU.
    """

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.rope_theta = shape.rope_theta
        self.wq = nn.Linear(shape.dim, shape.heads * shape.head_dim, bias=False)
        self.wk = nn.Linear(shape.dim, shape.kv_heads * shape.head_dim, bias=False)
        self.wv = nn.Linear(shape.dim, shape.kv_heads * shape.head_dim, bias=False)
        self.core = CausalAttention()
        self.wo = nn.Linear(shape.heads * shape.head_dim, shape.dim, bias=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        # [batch, seq, heads, head_dim], with however many heads this rank's columns make
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        cos, sin = rotation(positions, self.head_dim, self.rope_theta)
        q, k, v = (y.transpose(1, 2) for y in (rotate(q, cos, sin), rotate(k, cos, sin), v))
        return self.wo(self.core(q, k, v).transpose(1, 2).flatten(2))


class CausalAttention(nn.Module):
    """softmax(q k^T / sqrt(head_dim)) v over earlier positions; [batch, heads, seq, head_dim] each, k and v perhaps
    of fewer heads. A module of its own, so that one that sees a part of the sequence can take its place."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, arXiv:2002.05202): down(silu(gate(x)) * up(x)), or down(gelu(up(x)))."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.dim, shape.ffn_dim, bias=False) if shape.activation == "swiglu" else None
        self.up = nn.Linear(shape.dim, shape.ffn_dim, bias=False)
        self.down = nn.Linear(shape.ffn_dim, shape.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        return self.down(F.gelu(hidden) if self.gate is None else F.silu(self.gate(x)) * hidden)


class TiedHead(nn.Module):
    """The output layer that borrows the embedding's weight at each call.

    It holds no parameter: one shared by two modules would come apart in `to_empty` and in sharding.
    """

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight)


def build_norm(shape: TransformerShape) -> nn.Module:
    """The norm of the residual stream, with a gain and no bias."""
    if shape.norm == "layernorm":
        return nn.LayerNorm(shape.dim, eps=NORM_EPS, bias=False)
    return nn.RMSNorm(shape.dim, eps=NORM_EPS)


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
