"""The sizes of a transformer block, all resolved, and what follows from them: parameters and FLOPs.

Invariant: only numbers, so that a shape can be counted without weights. This module must not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from shardway.errors import Problem, check_no_problems

Activation = Literal["swiglu", "gelu", "gelu_tanh"]


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
class MixtureShape:
    """Sizes of a mixture of experts, how it chooses, and how it keeps its experts equally busy."""

    experts: int
    per_token: int
    """Experts that one token is sent to (top-k)."""
    expert_dim: int
    shared: int = 0
    """Experts that every token passes through; together one feed-forward layer of `shared * expert_dim`."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    """Weights of the chosen experts sum to `scale`."""
    scale: float = 1.0
    balance: Literal["bias", "loss", "none"] = "bias"
    bias_update_rate: float = 1e-3
    balance_weight: float = 1e-2
    capacity_factor: float = 0.0
    """An expert takes at most this times its even share of a sequence; 0 takes all."""


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """The sizes of blocks of attention and feed-forward. Raises UserError where they do not fit each other."""

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
    activation: Activation = "swiglu"
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

    def __post_init__(self) -> None:
        check_no_problems("the transformer", list(self._find_problems()))

    def _find_problems(self) -> Iterator[Problem]:
        yield from _find_head_problems(self)
        if self.latent is not None:
            yield from _find_latent_problems(self, self.latent)
        if self.mixture is not None:
            yield from _find_mixture_problems(self, self.mixture)

    @property
    def head_width(self) -> int:
        """Features of one head (in latent attention: those without a position)."""
        return self.dim // self.heads if self.head_dim is None else self.head_dim

    @property
    def ffn_matrices(self) -> int:
        """Matrices of one feed-forward layer: gate, up and down, or up and down."""
        return 3 if self.activation == "swiglu" else 2

    @property
    def mixed_layers(self) -> int:
        """Blocks with experts."""
        return 0 if self.mixture is None else self.layers - self.dense_layers

    def is_mixed(self, index: int) -> bool:
        """Whether the block at `index` has experts."""
        return self.mixture is not None and index >= self.dense_layers

    @property
    def block_matrices(self) -> int:
        """Elements of all matrices of the blocks that one token is multiplied with."""
        dense = self.ffn_matrices * self.dim * self.ffn_dim
        ffn = (self.layers - self.mixed_layers) * dense + self.mixed_layers * self._active_experts
        return self.layers * self._attention_matrices + ffn

    @property
    def block_parameters(self) -> int:
        """All parameters of the blocks: the matrices, the experts that a token does not use, norms and biases."""
        norms = 2 * self.layers * self.norm_parameters
        vectors = self.layers * self._attention_vectors + (self.layers - self.mixed_layers) * self._ffn_biases
        return self.block_matrices + self.mixed_layers * self._idle_experts + norms + vectors

    @property
    def attention_width(self) -> int:
        """Features of queries and values of all heads, halved: what the scores cost a token and position."""
        if self.latent is None:
            return self.heads * self.head_width
        width = self.head_width + self.latent.rope_head_dim
        return self.heads * (width + self.latent.value_head_dim) // 2

    @property
    def norm_parameters(self) -> int:
        """Gain, and bias where it has one, of a norm of the residual stream."""
        return self.dim * (2 if self.bias and self.norm == "layernorm" else 1)

    @property
    def _attention_matrices(self) -> int:
        if self.latent is None:
            return 2 * self.dim * (self.heads + self.kv_heads) * self.head_width
        latent, width = self.latent, self.head_width + self.latent.rope_head_dim
        queries = self.heads * width * (latent.q_rank or self.dim) + self.dim * latent.q_rank
        down = self.dim * (latent.kv_rank + latent.rope_head_dim)
        up = latent.kv_rank * self.heads * (self.head_width + latent.value_head_dim)
        return queries + down + up + self.heads * latent.value_head_dim * self.dim

    @property
    def _attention_vectors(self) -> int:
        if self.latent is not None:
            return self.latent.kv_rank + self.latent.q_rank
        biased = self.bias or self.qkv_bias
        qkv = (self.heads + 2 * self.kv_heads) * self.head_width if biased else 0
        return qkv + (self.dim if self.bias else 0) + (2 * self.head_width if self.qk_norm else 0)

    @property
    def _ffn_biases(self) -> int:
        return ((self.ffn_matrices - 1) * self.ffn_dim + self.dim) if self.bias else 0

    @property
    def _active_experts(self) -> int:
        """Elements of the router and of the experts that a token meets."""
        if self.mixture is None:
            return 0
        met = self.mixture.per_token + self.mixture.shared
        return self.dim * self.mixture.experts + met * 3 * self.dim * self.mixture.expert_dim

    @property
    def _idle_experts(self) -> int:
        if self.mixture is None:
            return 0
        return (self.mixture.experts - self.mixture.per_token) * 3 * self.dim * self.mixture.expert_dim


def _find_head_problems(shape: BlockShape) -> Iterator[Problem]:
    even = 2 if shape.positions == "rope" and shape.latent is None else 1
    if shape.head_dim is None and shape.dim % (even * shape.heads):
        wanted = "even width" if even == 2 else "equal width"
        why = ("model.dim / 2", ", since rotary positions turn pairs of features") if even == 2 else ("model.dim", "")
        yield Problem(
            where="model.heads",
            what=f"{shape.heads} heads do not split model.dim = {shape.dim} into heads of {wanted}",
            allowed=f"a divisor of {''.join(why)}",
            remedy="change model.heads or model.dim, or set model.head_dim",
        )
    if shape.head_dim is not None and shape.head_dim % even:
        yield Problem("model.head_dim", f"rotary positions turn pairs of features, and {shape.head_dim} is odd", "", "")
    if shape.heads % shape.kv_heads:
        yield Problem(
            where="model.kv_heads",
            what=f"{shape.kv_heads} does not divide model.heads = {shape.heads}",
            allowed="a divisor of model.heads",
            remedy="change model.kv_heads or model.heads",
        )


def _find_latent_problems(shape: BlockShape, latent: LatentShape) -> Iterator[Problem]:
    if latent.rope_head_dim % 2:
        what = f"rotary positions turn pairs of features, and {latent.rope_head_dim} is odd"
        yield Problem("model.rope_head_dim", what, allowed="an even number")
    width = shape.head_width + latent.rope_head_dim
    if latent.value_head_dim > width:
        what = f"{latent.value_head_dim} is wider than queries and keys are, {width}"
        yield Problem("model.value_head_dim", what, allowed=f"at most {width}")
    if shape.kv_heads != shape.heads:
        what = f"{shape.kv_heads}, and latent attention makes keys and values for each of {shape.heads} heads"
        yield Problem("model.kv_heads", what, allowed=f"{shape.heads}")


def _find_mixture_problems(shape: BlockShape, mixture: MixtureShape) -> Iterator[Problem]:
    if mixture.per_token > mixture.experts:
        what = f"{mixture.per_token} is more than there are experts, {mixture.experts}"
        yield Problem("model.experts_per_token", what, allowed=f"1 to {mixture.experts}")
    if shape.dense_layers >= shape.layers:
        what = f"{shape.dense_layers} leaves none of {shape.layers} layers for experts"
        yield Problem("model.dense_layers", what, allowed=f"0 to {shape.layers - 1}")
    if shape.activation != "swiglu":
        yield Problem("model.activation", f'"{shape.activation}", and experts are gated', allowed='"swiglu"')
