"""Transformers: the decoder-only one (grouped-query or latent attention, dense or with experts), and the
encoder-decoder of courses.

Invariants:
- No sub-layer mentions how many heads or features it holds beyond the size of one head, so a projection whose columns
  are split over ranks runs the same code on fewer of them.
- A feed-forward layer's output is linear in what `down` holds, so parts of the hidden features give parts of a sum.
- A block is one unit of sharding, compilation and recompute, and its initial values follow from its names.
- Logits of a token depend on that token and earlier ones alone; in a packed sequence, on those of its own document.
- Where products are taken in bf16, so is the stream that blocks add to, on every layout; what a norm adds up is fp32
  inside its kernel.
- `init_weights` fills all that is lost when the model is built on meta.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from shardway.models.contract import ModelPlan, Split
from shardway.models.documents import DocumentMarks, attend_within_documents
from shardway.models.eager import multiply_gated, project_joined, rotate_by_halves, split_rotated
from shardway.models.experts import MixtureOfExperts, MixtureShape, Router
from shardway.models.initialise import fill_parameters

# --- sizes, all resolved


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

    kv_rank: int
    """Features of the latent that keys and values are made from."""
    q_rank: int
    """Features of the latent that queries are made from; 0 makes them from the residual stream."""
    rope_head_dim: int
    """Features of a head that carry the position, beside its `head_width` that do not."""
    value_head_dim: int


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """The sizes of blocks of attention and feed-forward, which fit each other: `resolve.rules.model` refuses others."""

    causal: ClassVar[bool] = True

    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn_dim: int
    head_dim: int | None = None
    """Features of a head; None: dim / heads."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = 1e-5
    activation: Literal["swiglu", "gelu", "gelu_tanh"] = "swiglu"
    bias: bool = False
    """Biases in linear layers (experts have none) and layer norms."""
    qkv_bias: bool = False
    qk_norm: bool = False
    positions: Literal["rope", "learned"] = "rope"
    rope_theta: float = 10000.0
    dropout: float = 0.0
    latent: LatentShape | None = None
    mixture: MixtureShape | None = None
    dense_layers: int = 0
    """Blocks before the first one with experts."""

    @property
    def head_width(self) -> int:
        """Features of one head (in latent attention: those without a position)."""
        return self.dim // self.heads if self.head_dim is None else self.head_dim

    @property
    def key_width(self) -> int:
        """Features of one query and key."""
        return self.head_width + (0 if self.latent is None else self.latent.rope_head_dim)


# --- attention


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al., arXiv:2305.13245); [batch, seq, dim] -> the same.

    Queries, keys and values have a matrix each, so that each splits by heads; where passes in bf16 are not compiled,
    one product takes all three (`models.eager`). In fp32 that was no faster (measured on CPU, 2 threads, dim 128 to
    256). Attention probabilities have no dropout: it would rule out the fused kernel on CPU.
    """

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.head_width = shape.head_width
        width, biased = shape.head_width, shape.bias or shape.qkv_bias
        self.wq = nn.Linear(shape.dim, shape.heads * width, bias=biased)
        self.wk = nn.Linear(shape.dim, shape.kv_heads * width, bias=biased)
        self.wv = nn.Linear(shape.dim, shape.kv_heads * width, bias=biased)
        self.q_norm = RMSNorm(width, eps=shape.norm_eps) if shape.qk_norm else None
        self.k_norm = RMSNorm(width, eps=shape.norm_eps) if shape.qk_norm else None
        self.core = CausalAttention() if shape.causal else FullAttention()
        self.wo = nn.Linear(shape.heads * width, shape.dim, bias=shape.bias)

    def forward(self, x: torch.Tensor, turn: Rotation | None, marks: torch.Tensor | None = None) -> torch.Tensor:
        """`turn` turns queries and keys; None where positions are not rotary. `marks`: `mark_documents`."""
        q, k, v = (y.transpose(1, 2) for y in self._project(x, turn))
        mixed = self.core(q, k, v) if marks is None else self.core(q, k, v, marks)
        return self.wo(mixed.transpose(1, 2).flatten(2))

    def _project(self, x: torch.Tensor, turn: Rotation | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [batch, seq, heads, head_width], of however many heads this rank's columns make."""
        layers = self.wq, self.wk, self.wv
        joined, features = project_joined(x, *layers), [w.out_features for w in layers]
        if joined is not None and turn is not None and self.q_norm is None:
            parts = split_rotated(joined, features, *turn)
            if parts is not None:
                return parts
        each = [w(x) for w in layers] if joined is None else joined.split(features, dim=-1)
        q, k, v = (y.unflatten(-1, (-1, self.head_width)) for y in each)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if turn is not None:
            q, k = rotate(q, *turn), rotate(k, *turn)
        return q, k, v


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, equations 9 to 19); [batch, seq, dim] -> the same.

    Keys and values are made from one latent of `kv_rank` features, queries perhaps from one of `q_rank`; each latent
    is normalised. The rotary features of a key are the same for all heads. Projections down and the norms are whole on
    every rank of a tensor axis, those up split by heads.
    """

    def __init__(self, shape: BlockShape, latent: LatentShape) -> None:
        super().__init__()
        self.latent, self.key_width = latent, shape.head_width
        width = shape.head_width + latent.rope_head_dim
        self.q_down = nn.Linear(shape.dim, latent.q_rank, bias=False) if latent.q_rank else None
        self.q_norm = RMSNorm(latent.q_rank, eps=shape.norm_eps) if latent.q_rank else None
        self.wq = nn.Linear(latent.q_rank or shape.dim, shape.heads * width, bias=False)
        self.kv_down = nn.Linear(shape.dim, latent.kv_rank + latent.rope_head_dim, bias=False)
        self.kv_norm = RMSNorm(latent.kv_rank, eps=shape.norm_eps)
        self.kv_up = nn.Linear(latent.kv_rank, shape.heads * (shape.head_width + latent.value_head_dim), bias=False)
        self.core = CausalAttention()
        self.wo = nn.Linear(shape.heads * latent.value_head_dim, shape.dim, bias=False)

    def forward(self, x: torch.Tensor, turn: Rotation, marks: torch.Tensor | None = None) -> torch.Tensor:
        """`turn` turns the rotary features. `marks`: `mark_documents`."""
        rotary, values = self.latent.rope_head_dim, self.latent.value_head_dim
        narrow = x if self.q_down is None or self.q_norm is None else self.q_norm(self.q_down(x))
        still, turning = (
            self.wq(narrow).unflatten(-1, (-1, self.key_width + rotary)).split((self.key_width, rotary), -1)
        )
        q = torch.cat((still, rotate(turning, *turn)), dim=-1)
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
        mixed = self.core(q, k, v) if marks is None else self.core(q, k, v, marks)
        return self.wo(mixed[..., :values].transpose(1, 2).flatten(2))


class CausalAttention(nn.Module):
    """softmax(q k^T / sqrt(head_dim)) v over earlier positions; [batch, heads, seq, head_dim] each, k and v perhaps
    of fewer heads. A module of its own, so that one that sees a part of the sequence can take its place."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, marks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`marks` of `mark_documents`: over earlier positions of the same document."""
        if marks is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return attend_within_documents(q, k, v, marks)


class FullAttention(nn.Module):
    """softmax(q k^T / sqrt(head_dim)) v over all positions; shapes as those of `CausalAttention`."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


Rotation = tuple[torch.Tensor, torch.Tensor]
"""Factors of `rotate`, each [(batch,) seq, 1, head_dim]; the 1 stands for the heads."""


def rotation(positions: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype = torch.float32) -> Rotation:
    """What turns queries and keys at `positions` [seq] or [batch, seq]; computed in float32, once for all blocks.

    Feature i and feature i + head_dim/2 turn by position * theta**(-2i/head_dim) (Su et al., RoFormer,
    arXiv:2104.09864, equation 15): cosines for both, and minus and plus the sine.
    """
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[..., None, None].float() * theta**-exponent
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the feature pairs of x [batch, seq, heads, head_dim] by the factors of `rotation`, in their format.

    Rolling by half a head brings each feature's partner to its place: about twice as fast as rotating two chunks of
    half the width and joining them (measured on CPU, 2 threads, heads of 32).
    """
    rotated = rotate_by_halves(x, cos, sin)
    if rotated is not None:
        return rotated
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
        gated = None if self.gate is None else multiply_gated(x, self.gate, self.up)
        if gated is not None:
            return self.down(gated)
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
        mixture = shape.mixture if index >= shape.dense_layers else None
        self.ffn = FeedForward(shape) if mixture is None else MixtureOfExperts(shape.dim, mixture)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: torch.Tensor, turn: Rotation | None = None, marks: torch.Tensor | None = None) -> torch.Tensor:
        """`turn` and `marks` as `Attention` takes them."""
        x = x + self.dropout(self.attention(self.attention_norm(x), turn, marks))
        return x + self.dropout(self.ffn(self.ffn_norm(x)))


def build_blocks(shape: BlockShape) -> nn.ModuleDict:
    """All blocks by number: a dict, so that a pipeline stage that drops some keeps the names, and thus the weights, of
    the others."""
    return nn.ModuleDict({str(index): Block(shape, index) for index in range(shape.layers)})


def build_norm(shape: BlockShape) -> nn.Module:
    """The norm of the residual stream, with a gain."""
    if shape.norm == "layernorm":
        return LayerNorm(shape.dim, eps=shape.norm_eps, bias=shape.bias)
    return RMSNorm(shape.dim, eps=shape.norm_eps)


class RMSNorm(nn.RMSNorm):
    """torch's in the format of its input, where autocast would bring the whole stream to fp32; the gain is brought into
    it, since no single kernel takes two formats."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with _without_autocast(x):
            return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class LayerNorm(nn.LayerNorm):
    """torch's in the format of its input, as `RMSNorm`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        with _without_autocast(x):
            return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), bias, self.eps)


def begin_stream(x: torch.Tensor) -> torch.Tensor:
    """What the first block gets: x in bf16 if products are taken in it; fp16 has not the range of a stream."""
    device = x.device.type
    on = not x.is_meta and torch.is_autocast_enabled(device)  # the meta device has no autocast
    return x.to(torch.bfloat16) if on and torch.get_autocast_dtype(device) == torch.bfloat16 else x


def _without_autocast(x: torch.Tensor) -> AbstractContextManager[object]:
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def init_blocks_and_ends(model: nn.Module, shape: BlockShape, seed: int) -> None:
    """Fill every parameter and buffer of a model of such blocks; the values depend on seed and name alone.

    Gains are 1, biases and a class token 0, matrices normal with sqrt(2/(5 dim)) (Nguyen and Salazar, "Transformers
    without Tears", arXiv:1910.05895, "SmallInit"), which is GPT-2's 0.02 at dim 1000 and suits narrow models too.
    Projections that add to the residual stream are divided by sqrt(2 layers), the number of such additions (Radford et
    al., GPT-2, 2019, section 2.3).
    """
    residual = ("attention.wo.weight", "ffn.down.weight", "experts.down", "shared.down")

    def std(name: str, weight: nn.Parameter) -> float:
        return math.sqrt(2 / (5 * shape.dim)) / (math.sqrt(2 * shape.layers) if name.endswith(residual) else 1.0)

    fill_parameters(model, seed, std, zeros=("bias", "class_token"))
    for module in model.modules():
        if isinstance(module, Router):
            module.reset()


def tensor_plan(shape: BlockShape) -> dict[str, Split]:
    """How the modules of the blocks split; what is in a region and not named here is whole on every rank."""
    plan: dict[str, Split] = {"blocks.*.attention.wq": "column"}
    if shape.latent is None:
        plan["blocks.*.attention.w[kv]"] = "key_value"
    else:
        plan["blocks.*.attention.kv_up"] = "column"
    plan["blocks.*.attention.wo"] = "row"
    if shape.mixture is None or shape.dense_layers:
        plan |= {"blocks.*.ffn.gate": "column"} if shape.activation == "swiglu" else {}
        plan |= {"blocks.*.ffn.up": "column", "blocks.*.ffn.down": "row"}
    return plan


# --- the decoder-only transformer


@dataclass(frozen=True, kw_only=True)
class TransformerShape(BlockShape):
    """The sizes of a transformer."""

    vocab: int
    tied: bool = True
    max_positions: int = 0
    """Rows of the table of learned positions."""


_HELD = {"gate": 1, "up": 1, "down": 2}
"""The dims of hidden features in weights of experts; a shared expert has one dim less."""


class Transformer(nn.Module):
    """Token ids [batch, seq] -> logits [batch, seq, vocab]."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.shape = shape
        learned = shape.positions == "learned"
        self.embedding: nn.Embedding | None = nn.Embedding(shape.vocab, shape.dim)
        self.position_embedding = nn.Embedding(shape.max_positions, shape.dim) if learned else None
        self.dropout = nn.Dropout(shape.dropout)
        self.marks = DocumentMarks()
        self.blocks = build_blocks(shape)
        self.norm = build_norm(shape)
        self.head: nn.Module | None = TiedHead() if shape.tied else nn.Linear(shape.dim, shape.vocab, bias=False)

    def forward(
        self, inputs: torch.Tensor, positions: torch.Tensor | None = None, *, packed: bool = False
    ) -> torch.Tensor:
        """Logits for int64 `inputs` [batch, seq]; `positions` [seq] or [batch, seq] default to 0, 1, 2 ...

        `packed`: a document begins wherever `positions` [batch, seq] are 0, and no token sees those of another one.
        A pipeline stage takes and returns [batch, seq, dim] where it lacks the first or the last modules, and needs
        `positions` then.
        """
        if positions is None:
            positions = torch.arange(inputs.shape[-1], device=inputs.device)
        x = inputs
        if self.embedding is not None:
            x = self.embedding(inputs)
            x = self.dropout(x if self.position_embedding is None else x + self.position_embedding(positions))
            x = begin_stream(x)
        turn = self.make_rotation(positions, x.dtype)
        marks = self.marks(positions, x, self.shape.key_width) if packed else None
        for block in self.blocks.values():
            x = block(x, turn, marks)
        if self.head is None:
            return x
        x = self.norm(x)
        return self.head(x) if self.embedding is None or not self.shape.tied else self.head(x, self.embedding.weight)

    def make_rotation(self, positions: torch.Tensor, dtype: torch.dtype = torch.float32) -> Rotation | None:
        """What turns queries and keys in every block; None where positions are not rotary."""
        shape = self.shape
        if shape.positions != "rope":
            return None
        width = shape.head_width if shape.latent is None else shape.latent.rope_head_dim
        return rotation(positions, width, shape.rope_theta, dtype)

    def init_weights(self, seed: int) -> None:
        init_blocks_and_ends(self, self.shape, seed)

    def plan(self) -> ModelPlan:
        """Attention and feed-forward are regions; a tied head uses the embedding's weight, split the same way."""
        shape, mixture = self.shape, self.shape.mixture
        positions: dict[str, Split] = {"position_embedding": "sequence"} if shape.positions == "learned" else {}
        held = {} if mixture is None else {f"blocks.*.ffn.experts.{leaf}": dim for leaf, dim in _HELD.items()}
        if mixture is not None and mixture.shared:
            held |= {f"blocks.*.ffn.shared.{leaf}": dim - 1 for leaf, dim in _HELD.items()}
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
            held=held,
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


# --- the encoder-decoder of introductory courses (`torch.nn.Transformer`; Vaswani et al., arXiv:1706.03762), as a
# language model. The source is the sequence; the target is the sequence shifted by one token. The decoder gets the same
# tokens as the encoder, and no layer sees later ones, not even in the source: `torch.nn.Transformer` with three causal
# masks

WAVELENGTHS = 10000.0
"""Base of the wavelengths of sinusoidal positions (Vaswani et al., section 3.5)."""


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderShape:
    """The sizes of an encoder-decoder."""

    vocab: int
    dim: int
    layers: int
    """Of the encoder, and as many of the decoder."""
    heads: int
    ffn_dim: int
    dropout: float = 0.0


class EncoderDecoder(nn.Module):
    """Token ids [batch, seq] -> logits [batch, seq, vocab]."""

    def __init__(self, shape: EncoderDecoderShape) -> None:
        super().__init__()
        self.shape = shape
        sizes = (shape.dim, shape.heads, shape.ffn_dim, shape.dropout)
        layers = [str(index) for index in range(shape.layers)]
        self.embedding = nn.Embedding(shape.vocab, shape.dim)
        self.dropout = nn.Dropout(shape.dropout)
        self.encoder = nn.ModuleDict({name: nn.TransformerEncoderLayer(*sizes, batch_first=True) for name in layers})
        self.encoder_norm = nn.LayerNorm(shape.dim)
        self.decoder = nn.ModuleDict({name: nn.TransformerDecoderLayer(*sizes, batch_first=True) for name in layers})
        self.decoder_norm = nn.LayerNorm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocab)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        seq = inputs.shape[1]
        later = torch.ones(seq, seq, dtype=torch.bool, device=inputs.device).triu(1)
        x = self.embedding(inputs) * math.sqrt(self.shape.dim)
        source = target = self.dropout(x + sinusoids(seq, self.shape.dim, inputs.device).type_as(x))
        for layer in self.encoder.values():
            source = layer(source, src_mask=later, is_causal=True)
        source = self.encoder_norm(source)
        for layer in self.decoder.values():
            target = layer(target, source, later, later, tgt_is_causal=True, memory_is_causal=True)
        # What `nn.Linear` makes of [batch, seq, dim] with a bias is a view, and FSDP2 warns of views that it returns.
        return F.linear(self.decoder_norm(target), self.head.weight).add_(self.head.bias)

    def init_weights(self, seed: int) -> None:
        """Fill every parameter; the values depend on seed and name alone.

        Matrices have the variance 2/(inputs + outputs) (Glorot and Bengio, 2010) that `nn.Transformer` gives them;
        the embedding 1/dim, so that it is of the size of the positions once it is multiplied by sqrt(dim).
        """
        small = self.shape.dim**-0.5
        fill_parameters(
            self, seed, lambda name, weight: small if name == "embedding.weight" else math.sqrt(2 / sum(weight.shape))
        )

    def plan(self) -> ModelPlan:
        """Layers are the units. The decoder needs all of the encoder, so there is no one place to cut a pipeline."""
        return ModelPlan(blocks=("encoder.*", "decoder.*"))


def sinusoids(seq: int, dim: int, device: torch.device) -> torch.Tensor:
    """Float32 [seq, dim]: sin(position / 10000**(2i/dim)) in feature 2i, the cosine in 2i + 1 (section 3.5)."""
    exponent = torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim
    angles = torch.arange(seq, device=device, dtype=torch.float32)[:, None] * WAVELENGTHS**-exponent
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[:, :dim]
