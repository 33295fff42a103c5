"""An architecture as configurations of libraries know one: layers alike but for which of them have experts or a window.

Invariant: where layers differ in more than that, it is said. This module must not know a library.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from shardway.plan.shapes.architecture import Architecture
from shardway.plan.shapes.layer import ExpertsShape, LayerShape


@dataclass(frozen=True, kw_only=True)
class UniformSizes:
    """One layer that stands for all, with what may differ between layers as one entry a layer."""

    layer: LayerShape
    ffn: int
    experts: ExpertsShape | None
    mixed: tuple[bool, ...]
    """Which layers have experts."""
    window: int
    windowed: tuple[bool, ...]
    """Which layers look at the last positions alone."""

    @property
    def count(self) -> int:
        """Layers in all."""
        return len(self.mixed)


def read_sizes(model: Architecture) -> UniformSizes:
    """The sizes of the decoder; the first layer of a kind speaks for those that differ."""
    layers = _decoder(model)
    dense = [layer for layer in layers if layer.experts is None]
    return UniformSizes(
        layer=layers[0],
        ffn=(dense or layers)[0].ffn,
        experts=next((layer.experts for layer in layers if layer.experts), None),
        mixed=tuple(layer.experts is not None for layer in layers),
        window=next((layer.attention.window for layer in layers if layer.attention.window), 0),
        windowed=tuple(bool(layer.attention.window) for layer in layers),
    )


def describe_irregular(model: Architecture) -> Iterator[str]:
    """What one set of sizes cannot say about a model."""
    layers = _decoder(model)
    if any(run.side == "encoder" for run in model.runs):
        yield "The encoder of the model is not in these sizes: they are those of its decoder."
    if model.patch_features:
        yield "The model reads patches of images, and these sizes are those of a decoder of tokens."
    if not all(layer.attention.causal for layer in layers):
        yield "Attention of the model looks ahead, and these sizes are those of a causal decoder."
    for what, kinds in _kinds(layers).items():
        if len(kinds) > 1:
            yield f"Layers differ in {what}; the sizes written are those of the first layer of the kind."


def _decoder(model: Architecture) -> Sequence[LayerShape]:
    return [run.layer for run in model.runs for _ in range(run.count) if run.side == "decoder"] or model.layers


def _kinds(layers: Sequence[LayerShape]) -> dict[str, set[object]]:
    return {
        "attention": {replace(layer.attention, window=0) for layer in layers},
        "the window of attention": {layer.attention.window for layer in layers if layer.attention.window},
        "experts": {layer.experts for layer in layers if layer.experts},
        "the feed-forward layer": {(layer.ffn, layer.gated, layer.ffn_bias) for layer in layers if not layer.experts},
        "norms": {(layer.norms, layer.norm_bias) for layer in layers},
    }


def render_pattern(flags: Sequence[bool]) -> str:
    """One entry a layer as an expression: "([0]*3+[1]*58)"."""
    runs = [f"[{int(flag)}]*{len(list(group))}" for flag, group in groupby(flags)]
    return f"({'+'.join(runs)})"
