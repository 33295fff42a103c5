"""A whole model as numbers: its layers, its two ends, its parameters and FLOPs.

Invariant: FLOPs are model FLOPs (no recompute counted), a multiplication and an addition each; the backward pass is
twice the forward pass (Kaplan et al., arXiv:2001.08361, section 2.1). With `causal` attention counts the half of the
scores that the mask leaves, without it all of them: both are published (docs/plan.md). This module must not know of
layouts, machines or number formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from shardway.errors import Problem, check_no_problems
from shardway.plan.shapes.layer import LayerShape, Matrix

LARGEST = 2**31
"""No size of a layer is larger; a number above it is a slip of the pen."""

MOST_LAYERS = 100_000
"""Layers of one sort, for the same reason."""

Side = Literal["decoder", "encoder"]


@dataclass(frozen=True)
class LayerRun:
    """So many layers alike; those of an encoder work on the encoder's sequence."""

    layer: LayerShape
    count: int
    side: Side = "decoder"


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A transformer: tokens (or patches) in, layers, and a head over `vocab` entries (or classes).

    Raises UserError that names every size that cannot be.
    """

    name: str
    hidden: int
    runs: tuple[LayerRun, ...]
    vocab: int
    tied: bool = True
    positions: int = 0
    """Rows of a table of learned positions."""
    patch_features: int = 0
    """Numbers in a patch; above 0 the input is patches, and the head is used once a sample."""
    head_bias: bool = False
    final_norm_parameters: int = 0
    extra_parameters: int = 0
    """Of the input beside its tables: a norm after them, kinds of tokens, a class token, relative positions."""
    before_head: tuple[Matrix, ...] = ()
    """Products of every position between the last layer and the head: BERT has one (google-research/bert,
    run_pretraining.py, get_masked_lm_output)."""
    encoder_seq: int = 0
    """Positions of the encoder, where there is one; 0 = as many as the decoder has."""

    def __post_init__(self) -> None:
        check_no_problems(f"the model {self.name}", _find_problems(self))

    @cached_property
    def layers(self) -> tuple[LayerShape, ...]:
        """Every layer in order."""
        return tuple(run.layer for run in self.runs for _ in range(run.count))

    @property
    def depth(self) -> int:
        """Layers in all."""
        return sum(run.count for run in self.runs)

    @property
    def embedding_parameters(self) -> int:
        """What turns tokens or patches into features, positions too."""
        table = self.patch_features * self.hidden + self.hidden if self.patch_features else self.vocab * self.hidden
        return table + self.positions * self.hidden + self.extra_parameters

    @cached_property
    def head(self) -> Matrix:
        """The output layer; a tied one shares its weight with the embedding."""
        return Matrix("head", "head", self.hidden, self.vocab, "outputs", self.head_bias)

    @property
    def head_parameters(self) -> int:
        """What the output layer, and what stands before it, have of their own."""
        own = (self.vocab if self.head_bias else 0) if self.tied else self.head.parameters
        return own + sum(each.parameters for each in self.before_head)

    @cached_property
    def parameters(self) -> int:
        """All of them."""
        return self._ends + sum(run.count * run.layer.parameters for run in self.runs)

    @cached_property
    def active_parameters(self) -> int:
        """Those that a token meets."""
        return self._ends + sum(run.count * run.layer.active_parameters for run in self.runs)

    @property
    def _ends(self) -> int:
        return self.embedding_parameters + self.head_parameters + self.final_norm_parameters

    def forward_flops_per_token(self, seq: int, *, causal: bool) -> float:
        """Of one token of the decoder in sequences of `seq`, its share of the encoder and of the head included."""
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
        """Forward and backward of one token of the decoder."""
        return 3 * self.forward_flops_per_token(seq, causal=causal)

    def side_seq(self, side: str, seq: int) -> int:
        """Positions that layers of a side work on."""
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
