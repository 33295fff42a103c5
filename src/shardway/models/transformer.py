"""Shardway's transformer: attention (grouped-query, multi-head latent), feed-forward layers, blocks, the whole model.

Invariants:
- No sub-layer mentions how many heads or features it holds beyond the size of one head, so a projection whose columns
  are split over ranks runs the same code on fewer of them.
- A feed-forward layer's output is linear in what `down` holds, so parts of the hidden features give parts of a sum.
- A block is one unit of sharding, compilation and recompute, and its initial values follow from its names.
- `init_weights` fills all that is lost when the model is built on meta.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from shardway.errors import Problem
from shardway.models.contract import ModelPlan, Split, canonical_name
from shardway.models.experts import MixtureOfExperts, Router
from shardway.models.initialise import constant_, normal_
from shardway.models.shapes import BlockShape, LatentShape

# --- attention


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


# --- the dense feed-forward layer


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, arXiv:2002.05202): down(silu(gate(x)) * up(x)), or down(gelu(up(x)))."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        gated, bias = shape.activation == "swiglu", shape.bias
        # The exact function, or the approximation that GPT-2 was trained with.
        self.approximate = "tanh" if shape.activation == "gelu_tanh" else "none"
        self.gate = nn.Linear(shape.dim, shape.ffn_dim, bias=bias) if gated else None
        self.up = nn.Linear(shape.dim, shape.ffn_dim, bias=bias)
        self.down = nn.Linear(shape.ffn_dim, shape.dim, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        if self.gate is None:
            return self.down(F.gelu(hidden, approximate=self.approximate))
        return self.down(F.silu(self.gate(x)) * hidden)


# --- one block: pre-norm attention and feed-forward


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


# --- the decoder-only transformer


@dataclass(frozen=True, kw_only=True)
class TransformerShape(BlockShape):
    """The sizes of a transformer, all resolved. Raises UserError where they do not fit each other."""

    vocab: int
    tied: bool = True
    max_positions: int = 0
    """Rows of the table of learned positions."""

    def _find_problems(self) -> Iterator[Problem]:
        yield from super()._find_problems()
        if self.positions == "learned" and self.max_positions < 1:
            yield Problem("model.max_positions", f"{self.max_positions} learned positions", allowed="at least 1")

    @property
    def matrix_parameters(self) -> int:
        """Parameters that a token is multiplied with: all matrices but tables of embeddings and unused experts."""
        return self.block_matrices + self.vocab * self.dim

    @property
    def parameters(self) -> int:
        """All parameters: blocks, output layer, a separate embedding where not tied, positions, the last norm."""
        tables = (1 if self.tied else 2) * self.vocab + (self.max_positions if self.positions == "learned" else 0)
        return self.block_parameters + tables * self.dim + self.norm_parameters

    def flops_per_token(self, seq_len: int) -> int:
        """Training FLOPs a token: 6 N + 12 L H Q T (Chowdhery et al., PaLM, arXiv:2204.02311, appendix B).

        N counts the matrices; the attention term counts the whole T x T square, as that convention has it, though a
        causal kernel may skip half. Recompute is not counted.
        """
        return 6 * self.matrix_parameters + 12 * self.layers * self.attention_width * seq_len


class Transformer(nn.Module):
    """Token ids [batch, seq] -> logits [batch, seq, vocab]."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.shape = shape
        learned = shape.positions == "learned"
        self.embedding: nn.Embedding | None = nn.Embedding(shape.vocab, shape.dim)
        self.position_embedding = nn.Embedding(shape.max_positions, shape.dim) if learned else None
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = build_blocks(shape)
        self.norm = build_norm(shape)
        self.head: nn.Module | None = TiedHead() if shape.tied else nn.Linear(shape.dim, shape.vocab, bias=False)

    def forward(self, inputs: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Logits for int64 `inputs` [batch, seq]; `positions` [seq] or [batch, seq] default to 0, 1, 2 ...

        A pipeline stage takes and returns [batch, seq, dim] where it lacks the first or the last modules, and needs
        `positions` then.
        """
        if positions is None:
            positions = torch.arange(inputs.shape[-1], device=inputs.device)
        x = inputs if self.embedding is None else self._embed(self.embedding(inputs), positions)
        for block in self.blocks.values():
            x = block(x, positions)
        if self.head is None:
            return x
        x = self.norm(x)
        return self.head(x) if self.embedding is None or not self.shape.tied else self.head(x, self.embedding.weight)

    def _embed(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.dropout(x if self.position_embedding is None else x + self.position_embedding(positions))

    def init_weights(self, seed: int) -> None:
        """Fill every parameter and buffer; the values depend on seed and name alone."""
        init_blocks_and_ends(self, self.shape, seed)

    def plan(self) -> ModelPlan:
        """Attention and feed-forward are regions; a tied head uses the embedding's weight, split the same way."""
        shape, mixture = self.shape, self.shape.mixture
        positions: dict[str, Split] = {"position_embedding": "sequence"} if shape.positions == "learned" else {}
        return ModelPlan(
            blocks=("blocks.*",),
            tensor={
                "embedding": "vocabulary",
                **positions,
                "blocks.*.attention_norm": "sequence",
                "blocks.*.ffn_norm": "sequence",
                **tensor_plan(shape),
                "norm": "sequence",
                "head": "logits",
            },
            regions=("blocks.*.attention", "blocks.*.ffn"),
            held=held_plan(shape),
            kv_width=shape.head_width if shape.latent is None else 0,
            attention=("blocks.*.attention.core",),
            positions="positions",
            experts=() if mixture is None else ("blocks.*.ffn.experts",),
            active=1.0 if mixture is None else mixture.per_token / mixture.experts,
            first=("embedding", *positions, "dropout"),
            last=("norm", "head"),
            shared=(("embedding", "head"),) if shape.tied else (),
        )


class TiedHead(nn.Module):
    """The output layer that borrows the embedding's weight at each call.

    It holds no parameter: one shared by two modules would come apart in `to_empty` and in sharding.
    """

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight)
