"""The shape of a Hugging Face model from its config.json, without torch and without the library.

Invariants:
- Parameters are those that the library builds for the same config, which a test compares for every family; absent keys
  have the library's defaults.
- An unknown family, or a key that is missing or invalid, is an error and never guessed.

Sources: the modeling files of huggingface/transformers 5.23, one a family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from shardway.errors import Problem, UserError, render_problems
from shardway.hfconfig import CONFIG, locate_model, read_config
from shardway.plan.shapes.architecture import MOST_LAYERS, Architecture, AttentionShape, LayerRun, LayerShape, Matrix
from shardway.plan.shapes.hf_decoders import DECODERS, Keys, read_sizes
from shardway.plan.shapes.measured import Measured, ResidualNetwork, Shape, residual_network

# --- families that are no text decoders: BERT, T5, vision transformers, residual networks

_T5_BUCKETS = 32
_CLASSES = 2
"""The library's number of classes if a config names no labels."""


def _bert(keys: Keys) -> Architecture:
    """As a masked language model: no pooler, a dense layer with a norm before the tied head, which has a bias."""
    sizes = read_sizes(keys)
    positions, kinds = keys.size("max_position_embeddings"), keys.size("type_vocab_size", default=2)
    tied, causal = keys.flag("tie_word_embeddings", True), keys.flag("is_decoder")
    keys.check()
    hidden, norm = sizes.hidden, 2 * sizes.hidden
    attention = AttentionShape(
        heads=sizes.heads,
        kv_heads=sizes.heads,
        head_dim=sizes.head_dim,
        causal=causal,
        bias=True,
        output_bias=True,
    )
    layer = LayerShape(hidden=hidden, attention=attention, ffn=sizes.ffn, gated=False, ffn_bias=True, norm_bias=True)
    return Architecture(
        name=keys.name,
        hidden=hidden,
        runs=(LayerRun(layer, sizes.layers),),
        vocab=sizes.vocab,
        tied=tied,
        positions=positions,
        head_bias=True,
        final_norm_parameters=norm,
        extra_parameters=kinds * hidden + norm,
        before_head=(Matrix("head_transform", "head", hidden, hidden, bias=True),),
    )


def _t5(keys: Keys) -> Architecture:
    """An encoder, and a decoder that attends to it; the first layer of each has a table of relative positions."""
    hidden, heads, layers = keys.size("d_model"), keys.size("num_heads"), keys.size("num_layers", most=MOST_LAYERS)
    width, ffn, vocab = keys.size("d_kv"), keys.size("d_ff"), keys.size("vocab_size")
    decoders = keys.size("num_decoder_layers", default=layers)
    buckets = keys.size("relative_attention_num_buckets", default=_T5_BUCKETS)
    gated = keys.text("feed_forward_proj", "relu").startswith("gated")
    tied = keys.flag("tie_word_embeddings", True)
    keys.check()
    seeing = AttentionShape(heads=heads, kv_heads=heads, head_dim=width, causal=False)
    causal = AttentionShape(heads=heads, kv_heads=heads, head_dim=width)
    cross = AttentionShape(heads=heads, kv_heads=heads, head_dim=width, causal=False, cross=True)
    encoder = LayerShape(hidden=hidden, attention=seeing, ffn=ffn, gated=gated)
    decoder = LayerShape(hidden=hidden, attention=causal, cross=cross, ffn=ffn, gated=gated, norms=3)
    return Architecture(
        name=keys.name,
        hidden=hidden,
        runs=(LayerRun(encoder, layers, "encoder"), LayerRun(decoder, decoders)),
        vocab=vocab,
        tied=tied,
        final_norm_parameters=2 * hidden,
        extra_parameters=2 * buckets * heads,
    )


def _vit(keys: Keys) -> Architecture:
    """A classifier by the class token."""
    image, patch, channels = _read_patches(keys)
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    ffn, layers = keys.size("intermediate_size"), keys.size("num_hidden_layers", most=MOST_LAYERS)
    biased, classes = keys.flag("qkv_bias", True), _count_classes(keys)
    if hidden % heads:
        keys.refuse("num_attention_heads", f"{heads} does not divide {hidden}", "a divisor of hidden_size")
    keys.check()
    attention = AttentionShape(
        heads=heads, kv_heads=heads, head_dim=hidden // heads, causal=False, bias=biased, output_bias=True
    )
    layer = LayerShape(hidden=hidden, attention=attention, ffn=ffn, gated=False, ffn_bias=True, norm_bias=True)
    return Architecture(
        name=keys.name,
        hidden=hidden,
        runs=(LayerRun(layer, layers),),
        vocab=classes,
        tied=False,
        positions=(image // patch) ** 2 + 1,
        patch_features=channels * patch**2,
        head_bias=True,
        final_norm_parameters=2 * hidden,
        extra_parameters=hidden,
    )


def _read_patches(keys: Keys) -> tuple[int, int, int]:
    """Height of the image, height of a patch, channels."""
    image, patch = keys.size("image_size", default=224), keys.size("patch_size", default=16)
    if image % patch:
        keys.refuse("patch_size", f"{patch} does not divide image_size = {image}", "a divisor of image_size")
    return image, patch, keys.size("num_channels", default=3)


def _resnet(keys: Keys) -> Measured:
    """A classifier of square images."""
    depths, widths = keys.sizes("depths"), keys.sizes("hidden_sizes")
    if len(depths) != len(widths):
        keys.refuse("hidden_sizes", f"{len(widths)} widths of {len(depths)} stages", "one a stage")
    kind = keys.text("layer_type", "bottleneck")
    if kind not in ("basic", "bottleneck"):
        keys.refuse("layer_type", f'"{kind}" is not known', "basic, bottleneck")
    if keys.flag("downsample_in_bottleneck"):
        keys.refuse("downsample_in_bottleneck", "true is not counted", "false")
    stem, channels = keys.size("embedding_size", default=64), keys.size("num_channels", default=3)
    image, classes = keys.size("image_size", default=224), _count_classes(keys)
    early = keys.flag("downsample_in_first_stage")
    keys.check()
    sizes = ResidualNetwork(
        name=keys.name,
        depths=depths,
        widths=widths,
        layer="basic" if kind == "basic" else "bottleneck",
        stem=stem,
        image=(channels, image, image),
        classes=classes,
        early_stride=early,
    )
    return residual_network(sizes)


def _count_classes(keys: Keys) -> int:
    labels = keys.config.get("id2label")
    return len(labels) if isinstance(labels, Mapping) and labels else keys.size("num_labels", default=_CLASSES)


OTHERS: Mapping[str, Callable[[Keys], Shape]] = {
    "bert": _bert,
    "resnet": _resnet,
    "roberta": _bert,
    "t5": _t5,
    "vit": _vit,
}
"""`model_type` of a config -> its reader."""


# --- every family

FAMILIES: Mapping[str, Callable[[Keys], Shape]] = MappingProxyType(dict(sorted({**DECODERS, **OTHERS}.items())))
"""`model_type` of a config -> its reader."""


def read_shape(hf: str) -> Shape:
    """The shape of a folder or of a hub name, from the cache if it is there.

    Raises UserError if there is no config, the family is unknown, or keys are missing or invalid.
    """
    folder = locate_model(hf, weights=False)
    return shape_of_config(read_config(folder), hf, str(folder / CONFIG))


def shape_of_config(config: Mapping[str, Any], name: str, origin: str = CONFIG) -> Shape:
    """The shape of a model called `name`, whose config was read from `origin`. Raises UserError."""
    family = config.get("model_type")
    read = FAMILIES.get(family) if isinstance(family, str) else None
    if read is None:
        raise _unknown(family, origin)
    return read(Keys(config, name, origin))


def _unknown(family: object, origin: str) -> UserError:
    problem = Problem(
        "model_type",
        "is missing" if family is None else f'"{family}" is a family whose layers are not known',
        allowed=", ".join(FAMILIES),
        remedy="let the model itself be counted: `shardway plan run.toml --trace`",
    )
    return UserError(render_problems(origin, [problem]))
