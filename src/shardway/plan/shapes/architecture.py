"""A transformer as numbers: its layers as matrices and attention, parameters, FLOPs.

Invariants:
- Parameters, FLOPs, matrix products and saved tensors are all derived from the same matrices, so they always agree.
- FLOPs are model FLOPs (no recompute); a multiplication and an addition count as two. The backward pass is twice the
  forward pass (Kaplan et al., arXiv:2001.08361, section 2.1). `causal` counts only the half of the scores that the
  mask leaves, otherwise all of them: both conventions are published (docs/plan.md).

Sources: attention and feed-forward: Vaswani et al., arXiv:1706.03762, section 3; grouped queries: Ainslie et al.,
arXiv:2305.13245; gated units: Shazeer, arXiv:2002.05202; latent attention: DeepSeek-V2, arXiv:2405.04434, section 2.1;
experts: Lepikhin et al., arXiv:2006.16668, and shared ones: Dai et al., arXiv:2401.06066.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal

from shardway.errors import Problem, check_no_problems

# --- one layer: matrices and attention

Split = Literal["outputs", "inputs", "none"]
"""Which side of a matrix the tensor axis splits."""

Part = Literal["attention", "ffn", "router", "experts", "shared", "head", "embedding"]


@dataclass(frozen=True)
class Matrix:
    """A weight that tokens are multiplied with; experts have `copies` of it, and a token meets `met` of them."""

    name: str
    part: Part
    inputs: int
    outputs: int
    split: Split = "none"
    bias: bool = False
    copies: int = 1
    met: int = 1
    kv_heads: int = 0
    """Heads of keys or values in the outputs; the tensor axis splits no further than these."""

    @property
    def parameters(self) -> int:
        """All copies, with biases."""
        return self.copies * (self.inputs * self.outputs + (self.outputs if self.bias else 0))

    @property
    def flops_per_token(self) -> int:
        """Forward: two for each element that a token meets."""
        return 2 * self.met * self.inputs * self.outputs


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Sizes of multi-head latent attention; `head_dim` of the attention is then the part without positions."""

    kv_rank: int
    q_rank: int = 0
    rope_dim: int = 64
    value_dim: int = 128


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Heads that attend to all positions (`window` 0) or to the last `window`; `causal` heads not to later ones."""

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
    """The norms of queries and keys span all heads, with one gain per feature (OLMo 2, arXiv:2501.00656)."""
    sinks: bool = False
    """Each head has a learned score (sink) beside those of positions (gpt-oss, arXiv:2508.10925)."""
    cross: bool = False
    """Keys and values come from the encoder."""

    @property
    def input_products(self) -> int:
        """Products that read the input: queries, keys and values, or both latents."""
        return 3 if self.latent is None else 2

    @property
    def qk_width(self) -> int:
        """Features of all queries, and of keys once repeated for each head."""
        return self.heads * (self.head_dim + (self.latent.rope_dim if self.latent else 0))

    @property
    def value_width(self) -> int:
        """Output features of all heads."""
        return self.heads * (self.latent.value_dim if self.latent else self.head_dim)

    @property
    def kv_width(self) -> int:
        """Features of keys and values together, as attention reads them."""
        return self.qk_width + self.value_width if self.latent else 2 * self.kv_heads * self.head_dim

    def matrices(self, hidden: int) -> Iterator[Matrix]:
        """The matrices before and after the scores."""
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
        """Positions that a query is scored with, on average; with `causal` false the mask is ignored."""
        if not (self.causal and causal) or self.cross:
            return float(min(seq, self.window) if self.window and self.causal else seq)
        window = min(self.window or seq, seq)
        return (window * (window + 1) / 2 + (seq - window) * window) / seq

    def core_flops_per_token(self, seq: int, causal: bool) -> float:
        """Forward FLOPs of scores and the sum of values."""
        return 2 * self.mean_span(seq, causal) * (self.qk_width + self.value_width)


@dataclass(frozen=True, kw_only=True)
class ExpertsShape:
    """A mixture: `count` experts of width `dim`, of which a token meets `per_token`, and a shared width."""

    count: int
    per_token: int
    dim: int
    shared_dim: int = 0
    shared_gate: bool = False
    """The output of the shared experts is weighted by a score of its own (Qwen2-MoE, arXiv:2407.10671)."""
    bias: bool = False
    """Biases of the router and of the experts."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Attention, optionally a second one to an encoder, and a feed-forward layer or a mixture of experts."""

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
        """Cached, since a search looks up the same layer thousands of times."""
        return hash(tuple(getattr(self, each.name) for each in fields(self)))

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """All matrices, in the order in which a token meets them."""
        cross = self.cross.matrices(self.hidden) if self.cross else ()
        return (*self.attention.matrices(self.hidden), *cross, *self._feed_forward())

    @property
    def gate_products(self) -> int:
        """Products that read the input of the feed-forward layer: up, and the gate."""
        return 2 if self.gated else 1

    @property
    def attentions(self) -> tuple[AttentionShape, ...]:
        """Its own attention, and that to the encoder."""
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
        """All parameters, including experts that a token does not meet."""
        return sum(each.parameters for each in self.matrices) + self.norm_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that one token meets."""
        idle = sum(each.parameters // each.copies * (each.copies - each.met) for each in self.matrices)
        return self.parameters - idle

    @cached_property
    def matmul_flops_per_token(self) -> int:
        """Forward FLOPs without attention's scores."""
        return sum(each.flops_per_token for each in self.matrices)

    @cached_property
    def source_flops_per_token(self) -> int:
        """The part of `matmul_flops_per_token` that is spent on tokens of the encoder: keys and values of the attention
        to it."""
        if self.cross is None:
            return 0
        return sum(each.flops_per_token for each in self.cross.matrices(self.hidden) if each.name == "kv")

    def core_flops_per_token(self, seq: int, causal: bool, source_seq: int | None = None) -> float:
        """Forward FLOPs of scores and sums of values; `source_seq` positions of the encoder, None: `seq`."""
        spans = ((each, source_seq or seq if each.cross else seq) for each in self.attentions)
        return sum(each.core_flops_per_token(span, causal) for each, span in spans)


# --- a whole model

LARGEST = 2**31
"""The largest size of a layer; a larger number is taken for a typing error."""

MOST_LAYERS = 100_000
"""The most layers of one sort, for the same reason."""

Side = Literal["decoder", "encoder"]


@dataclass(frozen=True)
class LayerRun:
    """`count` identical layers; those of an encoder work on the encoder's sequence."""

    layer: LayerShape
    count: int
    side: Side = "decoder"


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A transformer: tokens (or patches) in, layers, and a head over `vocab` entries (or classes).

    Raises UserError that names every invalid size.
    """

    name: str
    hidden: int
    runs: tuple[LayerRun, ...]
    vocab: int
    tied: bool = True
    positions: int = 0
    """Rows of a table of learned positions."""
    patch_features: int = 0
    """Numbers in a patch; if above 0 the input is patches, and the head is used once per sample."""
    head_bias: bool = False
    final_norm_parameters: int = 0
    extra_parameters: int = 0
    """Parameters of the input beside its tables: a norm, kinds of tokens, a class token, relative positions."""
    before_head: tuple[Matrix, ...] = ()
    """Products of every position between the last layer and the head: BERT has one (google-research/bert,
    run_pretraining.py, get_masked_lm_output)."""
    encoder_seq: int = 0
    """Positions of the encoder, if there is one; 0 = as many as the decoder has."""

    def __post_init__(self) -> None:
        check_no_problems(f"the model {self.name}", _find_problems(self))

    @cached_property
    def layers(self) -> tuple[LayerShape, ...]:
        return tuple(run.layer for run in self.runs for _ in range(run.count))

    @property
    def depth(self) -> int:
        return sum(run.count for run in self.runs)

    @property
    def embedding_parameters(self) -> int:
        """Parameters that turn tokens or patches into features, including positions."""
        table = self.patch_features * self.hidden + self.hidden if self.patch_features else self.vocab * self.hidden
        return table + self.positions * self.hidden + self.extra_parameters

    @cached_property
    def head(self) -> Matrix:
        """The output layer; a tied one shares its weight with the embedding."""
        return Matrix("head", "head", self.hidden, self.vocab, "outputs", self.head_bias)

    @property
    def head_parameters(self) -> int:
        """Parameters of the output layer and of the part before it, without shared ones."""
        own = (self.vocab if self.head_bias else 0) if self.tied else self.head.parameters
        return own + sum(each.parameters for each in self.before_head)

    @cached_property
    def parameters(self) -> int:
        return self._ends + sum(run.count * run.layer.parameters for run in self.runs)

    @cached_property
    def active_parameters(self) -> int:
        return self._ends + sum(run.count * run.layer.active_parameters for run in self.runs)

    @property
    def _ends(self) -> int:
        return self.embedding_parameters + self.head_parameters + self.final_norm_parameters

    def forward_flops_per_token(self, seq: int, *, causal: bool) -> float:
        """FLOPs of one token of the decoder in sequences of `seq`, with its share of the encoder and of the head."""
        total, source = 0.0, self.side_seq("encoder", seq)
        for run in self.runs:
            length = self.side_seq(run.side, seq)
            per_token = run.layer.matmul_flops_per_token + run.layer.core_flops_per_token(length, causal, source)
            per_token += run.layer.source_flops_per_token * (source / length - 1)
            total += run.count * per_token * length / seq
        patches = 2 * self.patch_features * self.hidden
        head = sum(each.flops_per_token for each in (*self.before_head, self.head))
        return total + patches + head / (seq if self.patch_features else 1)

    def flops_per_token(self, seq: int, *, causal: bool) -> float:
        """Forward and backward FLOPs of one token of the decoder."""
        return 3 * self.forward_flops_per_token(seq, causal=causal)

    def side_seq(self, side: str, seq: int) -> int:
        """Length of the sequence that layers of a side work on."""
        return (self.encoder_seq or seq) if side == "encoder" else seq


def _find_problems(model: Architecture) -> list[Problem]:
    problems = [] if model.runs else [Problem("model.layers", "there is no layer", allowed="at least 1")]
    sizes = {"model.dim": model.hidden, "model.vocab": model.vocab}
    for number, run in enumerate(model.runs):
        sizes |= {f"{name} of layer {number}" if number else name: size for name, size in _sizes(run).items()}
    for name, size in sizes.items():
        most = MOST_LAYERS if name.startswith("model.layers") else LARGEST
        if not 1 <= size <= most:
            problems.append(Problem(name, f"{size:,} is no size", allowed=f"1 to {most:,}"))
    return problems + _find_head_problems([run.layer for run in model.runs])


def _sizes(run: LayerRun) -> dict[str, int]:
    layer, attention = run.layer, run.layer.attention
    width = {"model.ffn_dim": layer.ffn}
    if layer.experts:
        width = {"model.experts": layer.experts.count, "model.expert_dim": layer.experts.dim}
    heads = {"model.heads": attention.heads, "model.kv_heads": attention.kv_heads, "model.head_dim": attention.head_dim}
    return {"model.layers": run.count, **heads, **width}


def _find_head_problems(layers: Sequence[LayerShape]) -> list[Problem]:
    problems = []
    for layer in layers:
        heads, kv_heads = layer.attention.heads, layer.attention.kv_heads
        if kv_heads > 0 and heads % kv_heads:
            what = f"{kv_heads} does not divide model.heads = {heads}"
            problems.append(Problem("model.kv_heads", what, allowed="a divisor of model.heads"))
        if layer.experts and not 1 <= layer.experts.per_token <= layer.experts.count:
            what = f"{layer.experts.per_token} of {layer.experts.count} experts cannot be chosen"
            problems.append(Problem("model.experts_per_token", what, allowed=f"1 to {layer.experts.count}"))
    return list(dict.fromkeys(problems))
