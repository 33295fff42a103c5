"""From what sets a decoder-only family apart, and the sizes in its config.json, to an architecture.

Invariant: nothing is built from keys that are missing or cannot be. This module must not know of families.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from shardway.plan.shapes.architecture import MOST_LAYERS, Architecture, LayerRun
from shardway.plan.shapes.hf_keys import Keys
from shardway.plan.shapes.layer import AttentionShape, ExpertsShape, Latent, LayerShape

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "n_embed")
_LAYER_TYPES = {"full_attention": 0, "sliding_attention": 1}


@dataclass(frozen=True, kw_only=True)
class FamilySizes:
    """What every family has."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int


@dataclass(frozen=True, kw_only=True)
class Style:
    """What sets families apart. `bias` stands for queries, keys and values; `norm_bias` says that norms are layer
    norms with a bias; `norm_vectors` is 0 where norms have no parameters."""

    gated: bool = True
    norms: int = 2
    norm_bias: bool = False
    norm_vectors: int = 1
    bias: bool = False
    output_bias: bool = False
    ffn_bias: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False
    sinks: bool = False
    tied: bool = False
    head_bias: bool = False
    positions: int = 0
    embedding_norm: bool = False
    final_norm: bool = True


def read_sizes(keys: Keys, *, ffn_factor: int = 0) -> FamilySizes:
    """The sizes; without `ffn_factor` the width of the feed-forward layer must be there."""
    hidden, heads = keys.size(*_HIDDEN), keys.size(*_HEADS)
    ffn_default = ffn_factor * hidden or None
    kv_heads = keys.size("num_key_value_heads", default=heads)
    sizes = FamilySizes(
        hidden=hidden,
        layers=keys.size(*_LAYERS, most=MOST_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=keys.size("head_dim", default=max(1, hidden // heads)),
        ffn=keys.size("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", default=ffn_default),
        vocab=keys.size("vocab_size"),
    )
    if not keys.problems:
        _check_heads(keys, sizes)
    return sizes


def _check_heads(keys: Keys, sizes: FamilySizes) -> None:
    if keys.config.get("head_dim") is None and sizes.hidden % sizes.heads:
        what = f"{sizes.heads} heads do not split a width of {sizes.hidden}, and head_dim is not given"
        keys.refuse("num_attention_heads", what, "a divisor of the width")
    if sizes.heads % sizes.kv_heads:
        what = f"{sizes.kv_heads} does not divide {sizes.heads} heads"
        keys.refuse("num_key_value_heads", what, "a divisor of the heads")


def read_windows(keys: Keys, layers: int, *, whole_every: int = 0) -> tuple[int, ...]:
    """The window of each layer, 0 for all positions; where `layer_types` does not say it, all layers have the window
    but each `whole_every`-th."""
    window = keys.count("sliding_window")
    types = keys.words("layer_types", layers, _LAYER_TYPES)
    if types:
        return tuple(window * _LAYER_TYPES[each] for each in types)
    return tuple(0 if whole_every and (layer + 1) % whole_every == 0 else window for layer in range(layers))


def build_decoder(
    keys: Keys,
    sizes: FamilySizes,
    style: Style,
    *,
    windows: Sequence[int] = (),
    experts: ExpertsShape | None = None,
    mixed: Sequence[bool] = (),
    latent: Latent | None = None,
) -> Architecture:
    """The architecture, once all keys are right; of `experts` layers have some where `mixed` says so, or all."""
    if experts is not None and experts.per_token > experts.count:
        what = f"{experts.per_token} is more than there are experts, {experts.count}"
        keys.refuse("num_experts_per_tok", what, f"1 to {experts.count}")
    keys.check()
    base = _build_layer(sizes, style, latent)
    layers = []
    for number in range(sizes.layers):
        window = windows[number] if windows else 0
        attention = replace(base.attention, window=window)
        has_experts = experts is not None and (not mixed or mixed[number])
        layers.append(replace(base, attention=attention, experts=experts if has_experts else None))
    norm = style.norm_vectors * sizes.hidden * (2 if style.norm_bias else 1)
    return Architecture(
        name=keys.name,
        hidden=sizes.hidden,
        runs=gather_runs(layers),
        vocab=sizes.vocab,
        tied=style.tied,
        positions=style.positions,
        head_bias=style.head_bias,
        final_norm_parameters=norm if style.final_norm else 0,
        extra_parameters=norm if style.embedding_norm else 0,
    )


def gather_runs(layers: Sequence[LayerShape]) -> tuple[LayerRun, ...]:
    """Layers in order, those alike that follow one another as one run."""
    return tuple(LayerRun(layer, len(list(same))) for layer, same in groupby(layers))


def _build_layer(sizes: FamilySizes, style: Style, latent: Latent | None) -> LayerShape:
    attention = AttentionShape(
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        latent=latent,
        bias=style.bias,
        output_bias=style.output_bias,
        qk_norm=style.qk_norm,
        qk_norm_whole=style.qk_norm_whole,
        sinks=style.sinks,
    )
    return LayerShape(
        hidden=sizes.hidden,
        attention=attention,
        ffn=sizes.ffn,
        gated=style.gated,
        ffn_bias=style.ffn_bias,
        norms=style.norms * style.norm_vectors,
        norm_bias=style.norm_bias,
    )
