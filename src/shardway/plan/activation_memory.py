"""The tensors of a micro-batch that a layer keeps for its backward pass.

Invariant: counts bytes of tensors that autograd saves, each once, with what splits it; for the layer of Korthikanti et
al. they sum to its published 34 sbh + 5 a s^2 b (arXiv:2205.05198, section 4.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from shardway.plan.case import Case, Recompute
from shardway.plan.shapes.architecture import AttentionShape, LayerShape

MASK_BYTES = 1
EXPERT_IMBALANCE = 0.5
ONLY_PRODUCTS = (
    "result of attention's last product",
    "result of feed-forward's last product",
    "summands of attention's last product",
    "summands of feed-forward's last product",
)
"""Inputs that the backward pass itself does not need, but recompute of other operators does."""

STATISTIC_BYTES = 4


@dataclass(frozen=True)
class ActivationRules:
    """What decides what a layer keeps. `input_bytes`: of product inputs; `tp`, `ep`, `etp`: degrees."""

    recompute: Recompute
    value_bytes: int
    input_bytes: int
    seq_len: int
    tp: int
    stream_split: int
    ep: int
    etp: int
    flash: bool
    dropout: bool
    fused_norms: bool
    fused_activations: bool
    fused_scores: bool
    norm_bytes: int
    """Bytes of a norm's input."""
    stream_bytes: int
    casts_each: bool
    whole_regions: bool

    @property
    def region_split(self) -> str:
        """What splits the input of a region of the tensor axis."""
        return "none" if self.whole_regions else "stream"


def saving_of(case: Case) -> ActivationRules:
    """The rules of a case; an engine may keep inputs of products in the format in which they are multiplied."""
    engine, degrees = case.engine, case.degrees
    return ActivationRules(
        recompute=case.recompute,
        value_bytes=case.value_bytes,
        input_bytes=1 if case.low_bits and engine.keeps_low_bits else case.value_bytes,
        seq_len=case.seq_len,
        tp=degrees.tp,
        stream_split=case.stream_split,
        ep=degrees.ep,
        etp=degrees.etp,
        flash=case.flash,
        dropout=case.dropout,
        fused_norms=engine.fused_norms or case.compiled,
        fused_activations=engine.fused_activations or case.compiled,
        fused_scores=engine.fused_scores,
        norm_bytes=4 if case.casts_each else case.value_bytes,
        stream_bytes=case.stream_bytes,
        casts_each=case.casts_each and not case.compiled,
        whole_regions=engine.whole_regions,
    )


@dataclass(frozen=True)
class SavedActivation:
    """A tensor of `bytes_per_token`, before anything splits it.

    `split`: "tensor" (features or heads), "stream" (by sequence if the tensor axis does that), "expert", "none".
    `product` is the part of it that is a result of a product (or of attention) or the layer's input; `second` the part
    that remains if only every second product's result is kept.
    """

    name: str
    bytes_per_token: float
    split: str = "stream"
    product: float = 0.0
    second: float = 0.0


def list_saved(layer: LayerShape, how: ActivationRules) -> tuple[SavedActivation, ...]:
    """All that a layer saves if nothing is recomputed."""
    found: list[SavedActivation] = []
    for attention in layer.attentions:
        found += _attention(layer, attention, how)
    found += _mixture(layer, how) if layer.experts else _feed_forward(layer, how)
    return tuple(found)


def kept_bytes(layer: LayerShape, case: Case) -> float:
    """Bytes per token of the micro-batch that a layer keeps under the recompute of the case, on one rank."""
    return _layer_bytes(layer, saving_of(case)).kept


def whole_bytes(layer: LayerShape, case: Case) -> float:
    """The same without recompute: what one layer needs while it is computed again."""
    return _layer_bytes(layer, saving_of(case)).whole


@dataclass(frozen=True)
class _LayerBytes:
    kept: float
    whole: float


@lru_cache(maxsize=4096)
def _layer_bytes(layer: LayerShape, how: ActivationRules) -> _LayerBytes:
    """Both values at once, cached, since a search asks for the same layer thousands of times."""
    saved = [(each, local_bytes(each, how)) for each in list_saved(layer, how)]
    whole = sum(size for each, size in saved if each.name not in ONLY_PRODUCTS)
    if how.recompute == "full":
        return _LayerBytes(layer.hidden * how.stream_bytes / how.stream_split, whole)
    return _LayerBytes(sum(size * _kept_part(each, how) for each, size in saved), whole)


def local_bytes(saved: SavedActivation, how: ActivationRules) -> float:
    """The bytes of it on a rank of the tensor axis."""
    expert = how.tp  # the rows of a token's experts, or their features, are shared by the tensor ranks
    ranks = {"tensor": how.tp, "stream": how.stream_split, "none": 1, "expert": expert}
    return saved.bytes_per_token / ranks[saved.split]


def _kept_part(saved: SavedActivation, how: ActivationRules) -> float:
    if how.recompute == "none":
        return float(saved.name not in ONLY_PRODUCTS)
    if how.recompute == "selective":
        return float(not saved.name.startswith("scores") and saved.name not in ONLY_PRODUCTS)
    return saved.product if how.recompute == "products" else saved.second


def _attention(layer: LayerShape, attention: AttentionShape, how: ActivationRules) -> Iterator[SavedActivation]:
    size, width = how.value_bytes, layer.hidden
    stream = how.stream_bytes / how.norm_bytes
    yield SavedActivation("input of attention's norm", width * how.norm_bytes, product=stream, second=stream)
    yield from _norm(width, how)
    copies = attention.input_products if how.casts_each else 1
    yield SavedActivation("input of queries, keys, values", copies * width * how.input_bytes, how.region_split)
    if attention.latent is not None:
        latent = attention.latent
        yield SavedActivation(
            "latents before and after their norms", 2 * (latent.q_rank + latent.kv_rank) * size, "none", 0.5, 0.5
        )
    yield SavedActivation("queries", attention.qk_width * size, "tensor", product=1, second=1)
    split_heads = attention.latent is not None or attention.kv_heads % how.tp == 0
    # With fewer heads than ranks each rank has one of them.
    kv_width = attention.kv_width if split_heads else attention.kv_width // attention.kv_heads
    yield SavedActivation(
        "keys and values", kv_width * size, "tensor" if split_heads else "none", product=1, second=0.5
    )
    if not how.flash:
        yield from _scores(attention, how)
    else:
        yield SavedActivation("sums of exponentials", attention.heads * STATISTIC_BYTES, "tensor", product=1, second=1)
    yield SavedActivation("output of attention", attention.value_width * size, "tensor", product=1, second=1)
    yield SavedActivation(ONLY_PRODUCTS[0], width * size, product=1)
    yield from _summands(ONLY_PRODUCTS[2], width, how)
    if how.dropout:
        yield SavedActivation("mask of dropout after attention", width * MASK_BYTES)


def _summands(name: str, width: int, how: ActivationRules) -> Iterator[SavedActivation]:
    """Summands of all tokens on each rank of the tensor axis, whatever splits their sum."""
    if how.whole_regions and how.tp > 1:
        yield SavedActivation(name, width * how.value_bytes, "none", product=1)


def _norm(width: int, how: ActivationRules) -> Iterator[SavedActivation]:
    """What an unfused norm keeps beside its input: a copy in fp32, and the result before its gain."""
    if not (how.fused_norms):
        yield SavedActivation("copies in a norm", width * (4 + how.value_bytes))


def _scores(attention: AttentionShape, how: ActivationRules) -> Iterator[SavedActivation]:
    """Softmax, and with dropout its mask and result: 5 bytes per score in 16 bits."""
    scores = attention.heads * how.seq_len
    yield SavedActivation("scores after softmax", scores * how.value_bytes, "tensor")
    if not how.fused_scores:
        yield SavedActivation(
            "scores before softmax, and their mask", scores * (how.value_bytes + 4 + MASK_BYTES), "tensor"
        )
    if how.dropout:
        yield SavedActivation("scores after dropout, and its mask", scores * (how.value_bytes + MASK_BYTES), "tensor")


def _feed_forward(layer: LayerShape, how: ActivationRules) -> Iterator[SavedActivation]:
    size = how.value_bytes
    yield SavedActivation("input of feed-forward's norm", layer.hidden * how.norm_bytes)
    yield from _norm(layer.hidden, how)
    copies = layer.gate_products if how.casts_each else 1
    yield SavedActivation("input of feed-forward", copies * layer.hidden * how.input_bytes, how.region_split)
    yield from _activation(layer, layer.ffn, 1, how)
    yield SavedActivation(ONLY_PRODUCTS[1], layer.hidden * size, product=1, second=1)
    yield from _summands(ONLY_PRODUCTS[3], layer.hidden, how)
    if how.dropout:
        yield SavedActivation("mask of dropout after feed-forward", layer.hidden * MASK_BYTES)


def _activation(layer: LayerShape, width: int, copies: float, how: ActivationRules) -> Iterator[SavedActivation]:
    """Tensors between the two products of a feed-forward layer (or of `copies` experts)."""
    wide, size = 2 if layer.gated else 1, how.value_bytes
    split = "tensor" if width == layer.ffn and not layer.experts else "expert"
    yield SavedActivation("input of the activation", copies * wide * width * size, split, product=1, second=1 / wide)
    if layer.gated and not (how.fused_activations):
        yield SavedActivation("gate after its function", copies * width * size, split)
    yield SavedActivation("output of the activation", copies * width * how.input_bytes, split)


def _mixture(layer: LayerShape, how: ActivationRules) -> Iterator[SavedActivation]:
    mixture, size = layer.experts, how.value_bytes
    if mixture is None:
        return
    yield SavedActivation("input of the router's norm", layer.hidden * how.norm_bytes)
    yield from _norm(layer.hidden, how)
    yield SavedActivation("input of the router", layer.hidden * how.norm_bytes)
    yield SavedActivation("scores of the router", mixture.count * STATISTIC_BYTES, "none")
    copies = mixture.per_token * busiest_share(how)
    yield SavedActivation("tokens sent to experts", copies * layer.hidden * how.input_bytes, _token_split(how))
    yield from _activation(layer, mixture.dim, copies, how)
    yield SavedActivation("results of experts", copies * layer.hidden * size, _token_split(how), product=1, second=1)
    if mixture.shared_dim:
        yield from _activation(layer, mixture.shared_dim, 1, how)


def busiest_share(how: ActivationRules) -> float:
    """Tokens of the busiest rank over the mean; an assumption, approaching 1.5 for large ep."""
    return 1 + EXPERT_IMBALANCE * (1 - 1 / how.ep)


def _token_split(how: ActivationRules) -> str:
    """Tokens reach experts once each; if experts are not split, the tensor ranks share their rows."""
    return "tensor" if how.etp == 1 else "stream"
