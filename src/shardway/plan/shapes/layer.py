"""One layer of a transformer as a list of matrices and an attention, from which all counts follow.

Invariant: parameters, FLOPs, matrix products and saved tensors are all read off the same matrices, so that they cannot
disagree. This module must not know of layouts, machines or number formats.

Sources: attention and feed-forward: Vaswani et al., arXiv:1706.03762, section 3; grouped queries: Ainslie et al.,
arXiv:2305.13245; gated units: Shazeer, arXiv:2002.05202; latent attention: DeepSeek-V2, arXiv:2405.04434, section 2.1;
experts: Lepikhin et al., arXiv:2006.16668, and shared ones: Dai et al., arXiv:2401.06066.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal

Split = Literal["outputs", "inputs", "none"]
"""Which side of a matrix the tensor axis splits."""

Part = Literal["attention", "ffn", "router", "experts", "shared", "head", "embedding"]


@dataclass(frozen=True)
class Matrix:
    """A weight that tokens are multiplied with; of experts there are `copies`, and a token meets `met` of them."""

    name: str
    part: Part
    inputs: int
    outputs: int
    split: Split = "none"
    bias: bool = False
    copies: int = 1
    met: int = 1
    kv_heads: int = 0
    """Heads of keys or values that the outputs are made of, beyond which the tensor axis cannot split them."""

    @property
    def parameters(self) -> int:
        """All copies, with biases."""
        return self.copies * (self.inputs * self.outputs + (self.outputs if self.bias else 0))

    @property
    def flops_per_token(self) -> int:
        """Forward: a multiplication and an addition for each element that a token meets."""
        return 2 * self.met * self.inputs * self.outputs


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Sizes of multi-head latent attention; `head_dim` of the attention is then what carries no position."""

    kv_rank: int
    q_rank: int = 0
    rope_dim: int = 64
    value_dim: int = 128


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Heads that look at positions: all (`window` 0), or the last `window` of them; `causal` ones not ahead."""

    heads: int
    kv_heads: int
    head_dim: int
    latent: Latent | None = None
    window: int = 0
    causal: bool = True
    bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False
    """The norms of queries and of keys span all heads, each with a gain of its own (OLMo 2, arXiv:2501.00656)."""
    sinks: bool = False
    """Each head has a learned score beside those of positions (gpt-oss, arXiv:2508.10925)."""
    cross: bool = False
    """Keys and values come from the encoder."""

    @property
    def input_products(self) -> int:
        """Products that read what goes in: those of queries, keys and values, or of both latents."""
        return 3 if self.latent is None else 2

    @property
    def qk_width(self) -> int:
        """Features of all queries, and of keys once they are there for each head."""
        return self.heads * (self.head_dim + (self.latent.rope_dim if self.latent else 0))

    @property
    def value_width(self) -> int:
        """Features of what all heads give out."""
        return self.heads * (self.latent.value_dim if self.latent else self.head_dim)

    @property
    def kv_width(self) -> int:
        """Features of keys and values together, as attention reads them."""
        return self.qk_width + self.value_width if self.latent else 2 * self.kv_heads * self.head_dim

    def matrices(self, hidden: int) -> Iterator[Matrix]:
        """Those around the scores."""
        if self.latent is not None:
            yield from self._latent_matrices(hidden, self.latent)
        else:
            kv = self.kv_heads * self.head_dim
            yield Matrix("q", "attention", hidden, self.heads * self.head_dim, "outputs", self.bias)
            yield Matrix("kv", "attention", hidden, 2 * kv, "outputs", self.bias, kv_heads=self.kv_heads)
        yield Matrix("o", "attention", self.value_width, hidden, "inputs", self.output_bias)

    def _latent_matrices(self, hidden: int, latent: Latent) -> Iterator[Matrix]:
        if latent.q_rank:
            yield Matrix("q_down", "attention", hidden, latent.q_rank)
        yield Matrix("q_up", "attention", latent.q_rank or hidden, self.qk_width, "outputs")
        yield Matrix("kv_down", "attention", hidden, latent.kv_rank + latent.rope_dim)
        up = self.heads * self.head_dim + self.value_width
        yield Matrix("kv_up", "attention", latent.kv_rank, up, "outputs")

    @property
    def norm_parameters(self) -> int:
        """Gains of norms inside attention, and sinks."""
        if self.latent is not None:
            return self.latent.kv_rank + self.latent.q_rank
        heads = self.heads + self.kv_heads if self.qk_norm_whole else 2
        return (heads * self.head_dim if self.qk_norm else 0) + (self.heads if self.sinks else 0)

    def mean_span(self, seq: int, causal: bool) -> float:
        """Positions that a query is scored with, on average; not `causal`: the count that ignores the mask."""
        if not (self.causal and causal) or self.cross:
            return float(min(seq, self.window) if self.window and self.causal else seq)
        window = min(self.window or seq, seq)
        return (window * (window + 1) / 2 + (seq - window) * window) / seq

    def core_flops_per_token(self, seq: int, causal: bool) -> float:
        """Scores and the sum of values, forward."""
        return 2 * self.mean_span(seq, causal) * (self.qk_width + self.value_width)


@dataclass(frozen=True, kw_only=True)
class ExpertsShape:
    """A mixture: `count` experts of width `dim`, of which a token meets `per_token`, and shared width besides."""

    count: int
    per_token: int
    dim: int
    shared_dim: int = 0
    shared_gate: bool = False
    """What the shared width gives is weighted by a score of its own (Qwen2-MoE, arXiv:2407.10671)."""
    bias: bool = False
    """Of the router and of the experts."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Attention, perhaps a second one to an encoder, and a feed-forward layer or a mixture of experts."""

    hidden: int
    attention: AttentionShape
    ffn: int
    gated: bool = True
    cross: AttentionShape | None = None
    experts: ExpertsShape | None = None
    ffn_bias: bool = False
    norms: int = 2
    norm_bias: bool = False

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """A search looks up the same layer thousands of times."""
        return hash(tuple(getattr(self, each.name) for each in fields(self)))

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """All of them, in the order in which a token meets them."""
        cross = self.cross.matrices(self.hidden) if self.cross else ()
        return (*self.attention.matrices(self.hidden), *cross, *self._feed_forward())

    @property
    def gate_products(self) -> int:
        """Products that read what goes into the feed-forward: up, and the gate."""
        return 2 if self.gated else 1

    @property
    def attentions(self) -> tuple[AttentionShape, ...]:
        """Its own, and that to the encoder."""
        return (self.attention, self.cross) if self.cross else (self.attention,)

    def _feed_forward(self) -> Iterator[Matrix]:
        if self.experts is None:
            yield from self._gated("ffn", self.ffn, self.ffn_bias)
            return
        mixture = self.experts
        yield Matrix("router", "router", self.hidden, mixture.count, bias=mixture.bias)
        yield from self._gated("experts", mixture.dim, mixture.bias, mixture.count, mixture.per_token)
        if mixture.shared_dim:
            yield from self._gated("shared", mixture.shared_dim)
        if mixture.shared_gate:
            yield Matrix("shared_gate", "router", self.hidden, 1)

    def _gated(self, part: Part, width: int, bias: bool = False, copies: int = 1, met: int = 1) -> Iterator[Matrix]:
        wide = width * (2 if self.gated else 1)
        yield Matrix(f"{part}_up", part, self.hidden, wide, "outputs", bias, copies, met)
        yield Matrix(f"{part}_down", part, width, self.hidden, "inputs", bias, copies, met)

    @property
    def norm_parameters(self) -> int:
        """Gains (and biases) of all norms of the layer."""
        own = self.norms * self.hidden * (2 if self.norm_bias else 1)
        return own + sum(each.norm_parameters for each in self.attentions)

    @property
    def parameters(self) -> int:
        """All of them, experts that a token does not meet too."""
        return sum(each.parameters for each in self.matrices) + self.norm_parameters

    @property
    def active_parameters(self) -> int:
        """Those that one token meets."""
        idle = sum(each.parameters // each.copies * (each.copies - each.met) for each in self.matrices)
        return self.parameters - idle

    @cached_property
    def matmul_flops_per_token(self) -> int:
        """Forward, without attention's scores."""
        return sum(each.flops_per_token for each in self.matrices)

    @cached_property
    def source_flops_per_token(self) -> int:
        """Those of `matmul_flops_per_token` that tokens of the encoder cost, and not the layer's own: keys and values
        of the attention to it."""
        if self.cross is None:
            return 0
        return sum(each.flops_per_token for each in self.cross.matrices(self.hidden) if each.name == "kv")

    def core_flops_per_token(self, seq: int, causal: bool, source_seq: int | None = None) -> float:
        """Forward, scores and sums of values alone; `source_seq` positions of the encoder, None: as many."""
        spans = ((each, source_seq or seq if each.cross else seq) for each in self.attentions)
        return sum(each.core_flops_per_token(span, causal) for each, span in spans)
