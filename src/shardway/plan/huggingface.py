"""The shape of a model by its name: one known by name, or a Hugging Face model from its config.json; without torch.

Families whose layers are known here can be split in any way. Any other config, and heads that are not known here, are
counted by the library itself (`plan.counted`).

Invariants:
- Reading goes on after a wrong key, so that all problems are reported at once. `check` must be called before values are
  used; nothing is built from keys that are missing or invalid.
- Parameters are those that the library builds for the same config, which a test compares for every family; absent keys
  have the library's defaults.
- A shape is that of the class that `architectures` names. An unknown family or class, or a key that is missing or
  invalid, is an error and never guessed.
- Every named model has a source, and its shape follows from the keys of its config.json like that of any other.

Sources: the modeling files of huggingface/transformers 5.23, one a family.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from shardway.errors import Problem, UserError, check_no_problems, list_some, render_problems
from shardway.hfconfig import CONFIG, TOKENIZER_FILES, ModelFacts, locate_model, read_config
from shardway.places import expand_home
from shardway.plan.counted import CountedModel, find_counted
from shardway.plan.shapes import (
    LARGEST,
    MOST_LAYERS,
    Architecture,
    AttentionShape,
    ExpertsShape,
    Latent,
    LayerRun,
    LayerShape,
    Matrix,
    Measured,
    Shape,
    residual_network,
)

# --- reading a config.json


class Keys:
    """The keys of one config; several names of a key are those of different library versions."""

    def __init__(self, config: Mapping[str, Any], name: str, origin: str) -> None:
        self.config, self.name, self._origin = config, name, origin
        self.problems: list[Problem] = []

    def check(self) -> None:
        """Raise UserError with every key that is missing or invalid."""
        check_no_problems(self._origin, self.problems)

    def refuse(self, key: str, what: str, allowed: str = "", remedy: str = "") -> None:
        self.problems.append(Problem(key, what, allowed=allowed, remedy=remedy))

    def size(self, *names: str, default: int | None = None, least: int = 1, most: int = LARGEST) -> int:
        """An integer; null counts as missing. Without a default it is required."""
        key = next((name for name in names if self.config.get(name) is not None), names[0])
        value = self.config.get(key)
        if value is None and default is not None:
            return default
        if type(value) is int and least <= value <= most:
            return value
        what = "is missing" if value is None else f"{value!r} is no size"
        self.refuse(key, what, f"an integer, {least} to {most:,}", "correct the config.json")
        return 1

    def count(self, *names: str, default: int = 0) -> int:
        return self.size(*names, default=default, least=0)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.config.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            self.refuse(name, f"{value!r} is neither", "true, false")
        return bool(value)

    def text(self, name: str, default: str) -> str:
        value = self.config.get(name)
        if value is not None and not isinstance(value, str):
            self.refuse(name, f"{value!r} is no string")
        return value if isinstance(value, str) else default

    def sizes(self, name: str) -> tuple[int, ...]:
        """A list of integers, at least one."""
        value = self.config.get(name)
        if isinstance(value, list) and value and all(type(each) is int and 1 <= each <= LARGEST for each in value):
            return tuple(value)
        self.refuse(name, "is missing" if value is None else f"{value!r} is no list of sizes", "a list of sizes")
        return (1,)

    def fill(self, **defaults: Any) -> Keys:
        """The same keys, with the library's values for those that are absent; null is a value of its own there."""
        filled = Keys({**defaults, **self.config}, self.name, self._origin)
        filled.problems = self.problems
        return filled

    def words(self, name: str, count: int, allowed: Mapping[str, Any]) -> tuple[str, ...]:
        """A list of `count` words; empty if it is missing."""
        value = self.config.get(name) or []
        if not isinstance(value, list) or (value and len(value) != count):
            self.refuse(name, f"{value!r} is no list of {count} words", f"{count} of {', '.join(allowed)}")
            return ()
        for unknown in sorted({str(each) for each in value if each not in allowed}):
            self.refuse(name, f'"{unknown}" is not known', ", ".join(allowed))
        return tuple(each for each in value if each in allowed)

    def table(self, name: str) -> Keys:
        """The keys of a table in the config; its problems are collected with these."""
        value = self.config.get(name) or {}
        if not isinstance(value, Mapping):
            self.refuse(name, f"{value!r} is no table")
            value = {}
        inner = Keys(value, self.name, self._origin)
        inner.problems = self.problems
        return inner


# --- sizes that all families have

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "n_embed")
_FFN = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
_LAYER_TYPES = {"full_attention": 0, "sliding_attention": 1}


@dataclass(frozen=True, kw_only=True)
class FamilySizes:
    """The sizes that every family has."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int


def read_sizes(keys: Keys, *, ffn_factor: int = 0) -> FamilySizes:
    """The sizes; without `ffn_factor` the width of the feed-forward layer is required."""
    hidden, heads = keys.size(*_HIDDEN), keys.size(*_HEADS)
    kv_heads = keys.size("num_key_value_heads", default=heads)
    sizes = FamilySizes(
        hidden=hidden,
        layers=keys.size(*_LAYERS, most=MOST_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=keys.size("head_dim", default=max(1, hidden // heads)),
        ffn=keys.size(*_FFN, default=ffn_factor * hidden or None),
        vocab=keys.size("vocab_size"),
    )
    if not keys.problems and keys.config.get("head_dim") is None and hidden % heads:
        what = f"{heads} heads do not split a width of {hidden}, and head_dim is not given"
        keys.refuse("num_attention_heads", what, "a divisor of the width")
    if not keys.problems and heads % kv_heads:
        keys.refuse("num_key_value_heads", f"{kv_heads} does not divide {heads} heads", "a divisor of the heads")
    return sizes


def read_windows(keys: Keys, layers: int, *, whole_every: int = 0) -> tuple[int, ...]:
    """The window of each layer, 0 for all positions. Without `layer_types` all layers have the window except each
    `whole_every`-th."""
    window = keys.count("sliding_window")
    types = keys.words("layer_types", layers, _LAYER_TYPES)
    if types:
        return tuple(window * _LAYER_TYPES[each] for each in types)
    return tuple(0 if whole_every and (layer + 1) % whole_every == 0 else window for layer in range(layers))


# --- heads that `architectures` names

_CLASSES = 2  # the library's number of classes if a config names no labels

Head = tuple[int, bool]
"""Outputs, 0 for none, and whether it is used once per sample."""

_ENCODER_HEADS: Mapping[str, Callable[[Keys], Head]] = {
    "Model": lambda _: (0, True),
    "ForSequenceClassification": lambda keys: (_count_classes(keys), True),
    "ForMultipleChoice": lambda _: (1, True),
    "ForTokenClassification": lambda keys: (_count_classes(keys), False),
    "ForQuestionAnswering": lambda keys: (_count_classes(keys), False),
}

_DECODER_HEADS: Mapping[str, Callable[[Keys], Head]] = {
    name: _ENCODER_HEADS[name] for name in ("Model", "ForSequenceClassification", "ForTokenClassification")
}


def _count_classes(keys: Keys) -> int:
    labels = keys.config.get("id2label")
    return len(labels) if isinstance(labels, Mapping) and labels else keys.size("num_labels", default=_CLASSES)


def _named_head(keys: Keys, usual: tuple[str, ...], heads: Mapping[str, Callable[[Keys], Head]]) -> Head | None:
    """The head of the class that the config names; None for the `usual` ones, or where it names none."""
    named = keys.config.get("architectures")
    name = named[0] if isinstance(named, list) and named else named
    if not name or str(name).endswith(usual):
        return None
    for ending, head in heads.items():
        if str(name).endswith(ending) and not str(name).endswith(("HeadsModel", "EncoderModel")):
            return head(keys)
    allowed = ", ".join((*usual, *heads))
    keys.refuse("architectures", f'"{name}" has a head whose sizes are not known', f"a class that ends in {allowed}")
    return None


# --- the families

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_OPT_OFFSET = 2  # OPT's first position is 2 (modeling_opt.py, OPTLearnedPositionalEmbedding)
_BIASES = ("bias", "output_bias")
_ALL_BIASES = (*_BIASES, "ffn_bias")


@dataclass(frozen=True, kw_only=True)
class DecoderFamily:
    """How a family differs from Llama, and the keys that decide about its biases, windows and experts.

    `bias` is about queries, keys and values; `bias_key`: the key, with the library's default, that sets the biases in
    `biases`; `norm_bias`: norms are layer norms with a bias; `norm_vectors` is 0 if norms have no parameters; `tied`:
    whether embedding and head are one if the config does not say; `defaults`: the library's values of absent keys,
    where they are not those that the code here has for a missing key.
    """

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
    bias_key: tuple[str, bool] | None = ("attention_bias", False)
    biases: tuple[str, ...] = _BIASES
    ffn_bias_key: str = ""
    windows: Callable[[Keys, int], tuple[int, ...]] | None = None
    experts: Callable[[Keys, FamilySizes], ExpertsShape] | None = None
    sparse: Callable[[Keys, int], tuple[bool, ...]] | None = None  # which layers have the experts; None: all
    ffn_factor: int = 0  # the default width of the feed-forward layer over that of the stream; 0: it has none
    defaults: Mapping[str, int] = field(default_factory=dict)

    def __call__(self, keys: Keys, sizes: FamilySizes | None = None, latent: Latent | None = None) -> Architecture:
        """The architecture of a config. Raises UserError that names every key that is missing or invalid."""
        keys = keys.fill(**self.defaults)
        biases: dict[str, Any] = dict.fromkeys(self.biases, keys.flag(*self.bias_key)) if self.bias_key else {}
        if self.ffn_bias_key:
            biases["ffn_bias"] = keys.flag(self.ffn_bias_key)
        tied = keys.flag("tie_word_embeddings", self.tied)
        sizes = sizes or read_sizes(keys, ffn_factor=self.ffn_factor)
        windows = self.windows(keys, sizes.layers) if self.windows else ()
        experts = self.experts(keys, sizes) if self.experts else None
        mixed = self.sparse(keys, sizes.layers) if self.sparse else ()
        head = _named_head(keys, ("ForCausalLM", "LMHeadModel"), _DECODER_HEADS)
        if experts is not None and experts.per_token > experts.count:
            what = f"{experts.per_token} is more than there are experts, {experts.count}"
            keys.refuse("num_experts_per_tok", what, f"1 to {experts.count}")
        keys.check()
        own = replace(self, **biases)
        names = ("bias", "output_bias", "qk_norm", "qk_norm_whole", "sinks")
        attention = AttentionShape(
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            latent=latent,
            **{name: getattr(own, name) for name in names},
        )
        base = LayerShape(
            hidden=sizes.hidden,
            attention=attention,
            ffn=sizes.ffn,
            norms=own.norms * own.norm_vectors,
            **{name: getattr(own, name) for name in ("gated", "ffn_bias", "norm_bias")},
        )
        layers = [
            replace(
                base,
                attention=replace(attention, window=windows[number] if windows else 0),
                experts=experts if not mixed or mixed[number] else None,
            )
            for number in range(sizes.layers)
        ]
        norm = own.norm_vectors * sizes.hidden * (2 if own.norm_bias else 1)
        language = Architecture(
            name=keys.name,
            hidden=sizes.hidden,
            # Equal neighbours are one run.
            runs=tuple(LayerRun(layer, len(list(same))) for layer, same in groupby(layers)),
            vocab=sizes.vocab,
            tied=tied,
            positions=own.positions,
            head_bias=own.head_bias,
            final_norm_parameters=norm if own.final_norm else 0,
            extra_parameters=norm if own.embedding_norm else 0,
        )
        if head is None:
            return language
        outputs, pooled = head
        return replace(language, outputs=outputs, pooled=pooled, tied=False, head_bias=not pooled)


_GPT = DecoderFamily(gated=False, norm_bias=True, bias=True, output_bias=True, ffn_bias=True, bias_key=None, tied=True)
"""GPT-2's layers: biases everywhere, no gate."""


def _gpt2(keys: Keys) -> Architecture:
    _refuse_cross_attention(keys)
    return replace(_GPT, ffn_factor=4, positions=keys.size("n_positions", "max_position_embeddings"))(keys)


def _refuse_cross_attention(keys: Keys) -> None:
    if keys.flag("add_cross_attention"):
        keys.refuse("add_cross_attention", "true: attention to another model's outputs is not counted", "false")


def _windows_but_each(whole_every: int) -> Callable[[Keys, int], tuple[int, ...]]:
    return lambda keys, layers: read_windows(keys, layers, whole_every=whole_every)


def _qwen_windows(keys: Keys, layers: int) -> tuple[int, ...]:
    """None unless `use_sliding_window`, and then from layer `max_window_layers` on."""
    windows = read_windows(keys, layers)
    if not keys.flag("use_sliding_window"):
        return (0,) * layers
    first = 0 if keys.config.get("layer_types") else keys.count("max_window_layers")
    return tuple(window if layer >= first else 0 for layer, window in enumerate(windows))


def _sparse_layers(keys: Keys, layers: int) -> tuple[bool, ...]:
    """Whether each layer has experts (modeling_qwen2_moe.py, Qwen2MoeDecoderLayer)."""
    dense = keys.config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(each) is not int for each in dense):
        keys.refuse("mlp_only_layers", f"{dense!r} is no list of layers", "a list of numbers")
        dense = []
    step = keys.size("decoder_sparse_step", default=1)
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


def _read_experts(keys: Keys, dim: int, *per_token: str, **more: Any) -> ExpertsShape:
    count = keys.size(*_EXPERTS)
    return ExpertsShape(count=count, per_token=keys.size("num_experts_per_tok", *per_token), dim=dim, **more)


def _deepseek(keys: Keys) -> Architecture:
    """Latent attention, and experts from layer `first_k_dense_replace` on."""
    for name in ("q_lora_rank", "n_shared_experts", "first_k_dense_replace"):
        if name not in keys.config:  # null is a value: no rank, no experts, no dense layers
            keys.refuse(name, "is missing", f"an integer, 0 to {LARGEST:,}, or null", "correct the config.json")
    width = keys.size("moe_intermediate_size")
    sizes = replace(read_sizes(keys), head_dim=keys.size("qk_nope_head_dim"))
    latent = Latent(
        kv_rank=keys.size("kv_lora_rank"),
        q_rank=keys.count("q_lora_rank"),
        rope_dim=keys.size("qk_rope_head_dim"),
        value_dim=keys.size("v_head_dim"),
    )
    experts = _read_experts(keys, width, shared_dim=width * keys.count("n_shared_experts"))
    first = keys.count("first_k_dense_replace")
    mixed = tuple(layer >= first for layer in range(sizes.layers))
    if keys.flag("attention_bias"):
        keys.refuse("attention_bias", "true: biases of latent attention are not counted", "false")
    if keys.size("moe_layer_freq", default=1) != 1:
        keys.refuse("moe_layer_freq", f"{keys.config['moe_layer_freq']}: dense layers between are not counted", "1")
    family = DecoderFamily(bias_key=None, experts=lambda *_: experts, sparse=lambda *_: mixed)
    return family(keys, replace(sizes, kv_heads=sizes.heads), latent)


def _opt(keys: Keys) -> Architecture:
    sizes = read_sizes(keys)
    if keys.count("word_embed_proj_dim", default=sizes.hidden) != sizes.hidden:
        what = f"{keys.config['word_embed_proj_dim']}: an embedding narrower than the layers is not counted"
        keys.refuse("word_embed_proj_dim", what, f"hidden_size, {sizes.hidden}")
    decoder = replace(
        _GPT,
        bias_key=("enable_bias", True),
        biases=_ALL_BIASES,
        norm_vectors=int(keys.flag("layer_norm_elementwise_affine", True)),
        positions=keys.size("max_position_embeddings") + _OPT_OFFSET,
        final_norm=keys.flag("do_layer_norm_before", True) and not keys.flag("_remove_final_layer_norm"),
    )
    return replace(decoder(keys, sizes), unused_positions=_OPT_OFFSET)


def _mpt(keys: Keys) -> Architecture:
    """As in the library: no biases, and positions are biases of the scores."""
    for name, inner in (("no_bias", keys), ("alibi", keys.table("attn_config"))):
        if not inner.flag(name, True):
            keys.refuse(name, "false is not counted", "true")
    sizes = read_sizes(keys, ffn_factor=keys.size("expansion_ratio", default=4))
    return DecoderFamily(gated=False, bias_key=None, tied=True)(keys, sizes)


def _falcon(keys: Keys) -> Architecture:
    keys = keys.fill(multi_query=True, parallel_attn=True)
    sizes = read_sizes(keys, ffn_factor=4)
    newer, parallel = keys.flag("new_decoder_architecture"), keys.flag("parallel_attn")
    heads = keys.size("num_kv_heads", "n_head_kv", default=sizes.heads)
    if not newer:
        heads = 1 if keys.flag("multi_query") else sizes.heads
    norms = 2 if not parallel else keys.size("num_ln_in_parallel_attn", default=2 if newer else 1)
    family = replace(_GPT, bias_key=("bias", False), biases=_ALL_BIASES, norms=norms)
    return family(keys, replace(sizes, kv_heads=heads))


def _phi(keys: Keys) -> Architecture:
    if keys.flag("qk_layernorm"):
        keys.refuse("qk_layernorm", "true: norms of queries and keys with a bias are not counted", "false")
    return replace(_GPT, norms=1, head_bias=True, tied=False)(keys)


def _gemma3_text(keys: Keys) -> Architecture:
    keys = keys.fill(
        vocab_size=262_208,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        sliding_window=4096,
    )
    every = keys.size("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return DecoderFamily(norms=4, qk_norm=True, tied=True, windows=_windows_but_each(every))(keys)


def _gemma3(keys: Keys) -> Architecture:
    """A language model, and a vision tower with parameters alone: samples are text, which it does not see."""
    _named_head(keys, ("ForConditionalGeneration",), {})
    text, tower = keys.table("text_config"), _siglip_parameters(keys.table("vision_config"))
    text.config = {key: value for key, value in text.config.items() if key != "architectures"}
    text.name = f"{keys.name}, for text alone"
    language = _gemma3_text(text)
    seen = keys.table("vision_config").size("hidden_size", default=_SIGLIP_WIDTH)
    projector = seen * language.hidden + seen  # a matrix, and the norm before it
    return replace(language, extra_parameters=tower + projector)


_SIGLIP_WIDTH = 768


def _siglip_parameters(keys: Keys) -> int:
    """Parameters of a SigLIP vision tower (arXiv:2303.15343, as modeling_siglip.py builds it) without its head."""
    width, ffn = keys.size("hidden_size", default=_SIGLIP_WIDTH), keys.size("intermediate_size", default=3072)
    layers, heads = keys.size("num_hidden_layers", default=12), keys.size("num_attention_heads", default=12)
    image, patch = keys.size("image_size", default=224), keys.size("patch_size", default=16)
    if keys.flag("vision_use_head", True):
        keys.refuse("vision_use_head", "true (or missing): the head of a vision tower is not counted", "false")
    layer = _biased_layer(width, heads, max(1, width // heads), ffn)
    patches = keys.size("num_channels", default=3) * patch**2 * width + width
    return patches + (image // patch) ** 2 * width + layers * layer.parameters + 2 * width


def _deepseek_v2(keys: Keys) -> Architecture:
    return _deepseek(keys.fill(q_lora_rank=1536, n_shared_experts=2, first_k_dense_replace=0))


def _deepseek_v3(keys: Keys) -> Architecture:
    return _deepseek(keys.fill(q_lora_rank=1536, n_shared_experts=1, first_k_dense_replace=3))


_PHI3 = DecoderFamily(bias_key=None, windows=read_windows)
_OLMO2 = DecoderFamily(qk_norm=True, qk_norm_whole=True, windows=read_windows)
_QWEN3 = DecoderFamily(qk_norm=True, windows=_qwen_windows)
_QWEN_DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}


# --- families that are no text decoders: BERT, T5, vision transformers, residual networks

_T5_BUCKETS = 32


def _bert(keys: Keys) -> Architecture:
    """A masked language model has a dense layer with a norm before the tied head, which has a bias. BERT's numbers of
    classes follow a dense layer over one position (the pooler), those of each position follow nothing."""
    _refuse_cross_attention(keys)
    sizes = read_sizes(keys)
    positions, kinds = keys.size("max_position_embeddings"), keys.size("type_vocab_size", default=2)
    tied, causal = keys.flag("tie_word_embeddings", True), keys.flag("is_decoder")
    head = _named_head(keys, ("ForMaskedLM", "LMHeadModel", "ForCausalLM"), _ENCODER_HEADS)
    keys.check()
    hidden, norm = sizes.hidden, 2 * sizes.hidden
    layer = _biased_layer(hidden, sizes.heads, sizes.head_dim, sizes.ffn, causal=causal)
    masked = Architecture(
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
    if head is None:
        return masked
    outputs, pooled = head
    pooler = masked.before_head if pooled else ()
    return replace(
        masked, outputs=outputs, pooled=pooled, tied=False, head_bias=True, before_head=pooler, final_norm_parameters=0
    )


def _roberta(keys: Keys) -> Architecture:
    """Positions begin behind the number of padding (modeling_roberta.py, RobertaEmbeddings)."""
    return replace(_bert(keys), unused_positions=keys.count("pad_token_id", default=1) + 1)


def _biased_layer(
    hidden: int, heads: int, width: int, ffn: int, *, causal: bool = False, bias: bool = True
) -> LayerShape:
    """A layer without gates and with biases everywhere; `bias` is about queries, keys and values."""
    own = AttentionShape(heads=heads, kv_heads=heads, head_dim=width, causal=causal, bias=bias, output_bias=True)
    return LayerShape(hidden=hidden, attention=own, ffn=ffn, gated=False, ffn_bias=True, norm_bias=True)


def _t5(keys: Keys) -> Architecture:
    """An encoder, and a decoder that attends to it; the first layer of each has a table of relative positions. A head
    of its own, as T5 1.1 has, is what the library has after loading such weights; from the config alone it ties."""
    _named_head(keys, ("ForConditionalGeneration", "T5WithLMHeadModel"), {})
    hidden, heads, layers = keys.size("d_model"), keys.size("num_heads"), keys.size("num_layers", most=MOST_LAYERS)
    width, ffn, vocab = keys.size("d_kv"), keys.size("d_ff"), keys.size("vocab_size")
    decoders = keys.size("num_decoder_layers", default=layers)
    buckets = keys.size("relative_attention_num_buckets", default=_T5_BUCKETS)
    gated = keys.text("feed_forward_proj", "relu").startswith("gated")
    tied = keys.flag("tie_word_embeddings", True)
    keys.check()
    causal = AttentionShape(heads=heads, kv_heads=heads, head_dim=width)
    seeing = replace(causal, causal=False)
    encoder = LayerShape(hidden=hidden, attention=seeing, ffn=ffn, gated=gated)
    decoder = replace(encoder, attention=causal, cross=replace(seeing, cross=True), norms=3)
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
    image, patch = keys.size("image_size", default=224), keys.size("patch_size", default=16)
    if image % patch:
        keys.refuse("patch_size", f"{patch} does not divide image_size = {image}", "a divisor of image_size")
    channels = keys.size("num_channels", default=3)
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    ffn, layers = keys.size("intermediate_size"), keys.size("num_hidden_layers", most=MOST_LAYERS)
    biased = keys.flag("qkv_bias", True)
    # A model without classes has a pooler.
    bare = _named_head(keys, ("ForImageClassification",), {"Model": lambda _: (0, True)})
    classes = 0 if bare else _count_classes(keys)
    if hidden % heads:
        keys.refuse("num_attention_heads", f"{heads} does not divide {hidden}", "a divisor of hidden_size")
    keys.check()
    layer = _biased_layer(hidden, heads, hidden // heads, ffn, bias=biased)
    return Architecture(
        name=keys.name,
        hidden=hidden,
        runs=(LayerRun(layer, layers),),
        vocab=max(1, classes),
        outputs=classes,
        tied=False,
        positions=(image // patch) ** 2 + 1,
        patch_features=channels * patch**2,
        pooled=True,
        before_head=(Matrix("pooler", "head", hidden, hidden, bias=True),) if bare else (),
        head_bias=True,
        final_norm_parameters=2 * hidden,
        extra_parameters=hidden,
    )


def _resnet(keys: Keys) -> Measured:
    depths, widths = keys.sizes("depths"), keys.sizes("hidden_sizes")
    if len(depths) != len(widths):
        keys.refuse("hidden_sizes", f"{len(widths)} widths of {len(depths)} stages", "one a stage")
    _named_head(keys, ("ForImageClassification",), {})
    kind = keys.text("layer_type", "bottleneck")
    if kind not in ("basic", "bottleneck"):
        keys.refuse("layer_type", f'"{kind}" is not known', "basic, bottleneck")
    if keys.flag("downsample_in_bottleneck"):
        keys.refuse("downsample_in_bottleneck", "true is not counted", "false")
    stem, channels = keys.size("embedding_size", default=64), keys.size("num_channels", default=3)
    image, classes = keys.size("image_size", default=224), _count_classes(keys)
    early = keys.flag("downsample_in_first_stage")
    keys.check()
    return residual_network(
        keys.name,
        depths,
        widths,
        basic=kind == "basic",
        stem=stem,
        image=(channels, image, image),
        classes=classes,
        early_stride=early,
    )


# --- every family

FAMILIES: Mapping[str, Callable[[Keys], Shape]] = {
    "bert": _bert,
    # positions are biases of the scores, without parameters; a norm follows the embedding
    "bloom": replace(_GPT, embedding_norm=True, ffn_factor=4),
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek,  # DeepSeek's layers under a name of its own (arXiv:2507.20534, section 2.3)
    "falcon": _falcon,
    "gemma": DecoderFamily(tied=True, defaults={"num_key_value_heads": 16, "head_dim": 256}),
    # norms before and after attention and feed-forward; every second layer sees all positions
    "gemma2": DecoderFamily(
        norms=4,
        tied=True,
        windows=_windows_but_each(2),
        defaults={"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
    ),
    "gemma3": _gemma3,
    "gemma3_text": _gemma3_text,
    "gpt2": _gpt2,
    "gpt_neox": replace(_GPT, bias_key=("attention_bias", True), tied=False),
    "gpt_oss": DecoderFamily(
        sinks=True,
        bias_key=("attention_bias", True),
        windows=_windows_but_each(2),
        experts=lambda keys, sizes: _read_experts(keys, sizes.ffn, "experts_per_token", bias=True),
        defaults={"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128},
    ),
    # attention and feed-forward in parallel, behind one norm
    "gptj": replace(_GPT, norms=1, bias=False, output_bias=False, head_bias=True, tied=False, ffn_factor=4),
    "llama": DecoderFamily(ffn_bias_key="mlp_bias", windows=read_windows),
    "mistral": replace(_PHI3, defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "mixtral": replace(
        _PHI3,
        experts=lambda keys, sizes: _read_experts(keys, sizes.ffn),
        defaults={"num_key_value_heads": 8},
    ),
    "mpt": _mpt,
    "olmo": DecoderFamily(norm_vectors=0),  # norms without parameters
    "olmo2": _OLMO2,
    "olmo3": replace(_OLMO2, windows=_windows_but_each(4), defaults={"sliding_window": 4096}),
    "opt": _opt,
    "phi": _phi,
    "phi3": _PHI3,
    "qwen2": DecoderFamily(bias=True, bias_key=None, windows=_qwen_windows, defaults=_QWEN_DEFAULTS),
    "qwen2_moe": DecoderFamily(
        bias_key=("qkv_bias", True),
        biases=("bias",),
        windows=_qwen_windows,
        experts=lambda keys, _: _read_experts(
            keys,
            shared_dim=keys.size("shared_expert_intermediate_size"),
            dim=keys.size("moe_intermediate_size"),
            shared_gate=True,
        ),
        sparse=_sparse_layers,
        defaults={**_QWEN_DEFAULTS, "num_key_value_heads": 16},
    ),
    "qwen3": replace(_QWEN3, defaults={**_QWEN_DEFAULTS, "head_dim": 128}),
    "qwen3_moe": replace(
        _QWEN3,
        experts=lambda keys, _: _read_experts(keys, keys.size("moe_intermediate_size")),
        sparse=_sparse_layers,
        defaults={"num_key_value_heads": 4, "sliding_window": 4096},
    ),
    "resnet": _resnet,
    "roberta": _roberta,
    "smollm3": DecoderFamily(
        ffn_bias_key="mlp_bias", tied=True, windows=_qwen_windows, defaults={"num_key_value_heads": 4}
    ),
    "starcoder2": replace(
        _GPT,
        bias_key=("use_bias", True),
        biases=_ALL_BIASES,
        windows=read_windows,
        defaults={"num_key_value_heads": 2},
    ),
    "t5": _t5,
    "vit": _vit,
}
"""`model_type` of a config -> its reader."""


def read_shape(hf: str) -> Shape:
    """The shape of a folder or of a hub name, from the cache if it is there.

    Raises UserError if there is no config, the family is unknown, or keys are missing or invalid.
    """
    folder = locate_model(hf, weights=False)
    return shape_of_config(read_config(folder), hf, str(folder / CONFIG))


def facts_of_config(folder: Path) -> ModelFacts | None:
    """The facts of a decoder-only model from the shape that the planner has for it; None for any other model."""
    config = read_config(folder)
    try:
        shape = shape_of_config(config, str(folder), str(folder / CONFIG))
    except UserError:
        return None
    if not isinstance(shape, Architecture) or shape.patch_features or shape.outputs is not None:
        return None
    layer = shape.layers[0]
    if any(run.side == "encoder" or not run.layer.attention.causal for run in shape.runs) or layer.attention.latent:
        return None
    experts, tokenizer = layer.experts, folder / TOKENIZER_FILES[0]
    return ModelFacts(
        family=str(config["model_type"]),
        vocab=shape.vocab,
        dim=shape.hidden,
        layers=shape.depth,
        heads=layer.attention.heads,
        kv_heads=layer.attention.kv_heads,
        head_dim=layer.attention.head_dim,
        ffn_dim=layer.ffn,
        max_positions=shape.longest or LARGEST,
        tied=shape.tied,
        experts=experts.count if experts else 0,
        experts_per_token=experts.per_token if experts else 0,
        expert_dim=experts.dim if experts else 0,
        tokenizer=str(tokenizer) if tokenizer.is_file() else "",
    )


def shape_of_config(config: Mapping[str, Any], name: str, origin: str = CONFIG) -> Shape:
    """The shape of a model called `name`, whose config was read from `origin`. Raises UserError."""
    family = config.get("model_type")
    read = FAMILIES.get(family) if isinstance(family, str) else None
    if read is None:
        problem = Problem(
            "model_type",
            "is missing" if family is None else f'"{family}" is a family whose layers are not known',
            allowed=", ".join(FAMILIES),
        )
        raise UserError(render_problems(origin, [problem]))
    return read(Keys(config, name, origin))


# --- named models, from the TOML file beside this module, and the word that names a model

_MOST = 12


@dataclass(frozen=True)
class NamedModel:
    """A model with a name: the source of its sizes, and the keys of its config.json."""

    name: str
    source: str
    config: Mapping[str, Any]


@cache
def load_named() -> Mapping[str, NamedModel]:
    """Every model by its name, in the order of the file; an entry extends the one that it is `like`."""
    text = files(__package__).joinpath("named.toml").read_text(encoding="utf-8")
    tables = {name: table for name, table in tomllib.loads(text).items() if isinstance(table, dict)}

    def config_of(table: dict[str, Any]) -> dict[str, Any]:
        own = {key: value for key, value in table.items() if key not in ("source", "like")}
        return {**(config_of(tables[table["like"]]) if "like" in table else {}), **own}

    return {name: NamedModel(name, table["source"], config_of(table)) for name, table in tables.items()}


@cache
def find_named(name: str) -> Shape:
    """The shape of a named model. Raises UserError that lists similar names."""
    model = load_named().get(name.lower())
    if model is None:
        names = list(load_named())
        near = difflib.get_close_matches(name.lower(), names, n=_MOST, cutoff=0.5)
        known = f"names like it: {', '.join(near)}" if near else list_some(names, _MOST)
        problem = Problem(
            "model",
            f'"{name}" is no model that is known by name',
            allowed=f"one of {len(names)}; {known}",
            remedy="correct the name, or name a Hugging Face folder, a hub name (org/name), or a run file",
        )
        raise UserError(render_problems("the model", [problem]), [problem])
    return shape_of_config(model.config, model.name, f"named.toml, {model.name}")


def find_shape(name: str, announce: Callable[[str], None] = lambda _: None) -> Shape | CountedModel:
    """The shape of a folder or a config.json, of a hub name, or of a model known by name; of a config whose layers or
    head are not known here, what the library counts. `announce` gets a sentence before that begins. Raises UserError.
    """
    path = expand_home(name)
    is_config = path.is_file() and path.name == CONFIG
    if not (is_config or path.is_dir() or "/" in name):
        return find_named(name)
    hf = str(path.parent) if is_config else name
    folder = locate_model(hf, weights=False)
    config = read_config(folder)
    try:
        return shape_of_config(config, hf, str(folder / CONFIG))
    except UserError as error:
        if not isinstance(config.get("model_type"), str):
            raise
        check_no_problems(str(folder / CONFIG), list(_list_impossible(config, config["model_type"] in FAMILIES)))
        try:
            return find_counted(config, hf, announce)
        except UserError as refused:
            if config["model_type"] not in FAMILIES:
                raise
            raise UserError(f"{error}\n{refused}", error.problems) from refused


_SIZES = (*_LAYERS, *_HEADS, *_HIDDEN, *_FFN, "num_decoder_layers", "num_key_value_heads", "head_dim", "vocab_size")


def _list_impossible(config: Mapping[str, Any], known: bool, inside: str = "") -> Iterator[Problem]:
    """Sizes that no model has, which the library would build all the same, or for hours. Of a family that is not
    `known` a part may be left out by a 0."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _list_impossible(value, known, f"{inside}{key}.")
        elif key in _SIZES and type(value) is int:
            least, most = int(known), MOST_LAYERS if "layer" in key else LARGEST
            if not least <= value <= most:
                allowed = f"an integer, {least} to {most:,}"
                what = f"{value} is no size"
                yield Problem(f"{inside}{key}", what, allowed=allowed, remedy="correct the config.json")


def name_problems(name: str) -> list[Problem]:
    """Problems of a model that is named by a word alone."""
    if name.endswith(".toml") or "/" in name or expand_home(name).exists():
        return []
    try:
        find_shape(name)
    except UserError as error:
        return [*error.problems]
    return []
