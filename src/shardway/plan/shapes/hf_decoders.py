"""Decoder-only families of Hugging Face models: from the keys of a config.json to an architecture.

Invariants:
- Reading goes on after a wrong key, so that all problems are reported at once. `check` must be called before values are
  used; nothing is built from keys that are missing or invalid.
- Parameters are those that the library builds for the same config, which a test compares for every family; absent keys
  have the library's defaults.

Sources: the modeling files of huggingface/transformers 5.23, one a family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from shardway.errors import Problem, check_no_problems
from shardway.plan.shapes.architecture import (
    LARGEST,
    MOST_LAYERS,
    Architecture,
    AttentionShape,
    ExpertsShape,
    Latent,
    LayerRun,
    LayerShape,
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
        """Record a problem of a key."""
        self.problems.append(Problem(key, what, allowed=allowed, remedy=remedy))

    def size(self, *names: str, default: int | None = None, least: int = 1, most: int = LARGEST) -> int:
        """An integer; null counts as missing. Without a default it is required."""
        key, value = self._find(names)
        if value is None and default is not None:
            return default
        if type(value) is int and least <= value <= most:
            return value
        what = "is missing" if value is None else f"{value!r} is no size"
        self.refuse(key, what, f"an integer, {least} to {most:,}", "correct the config.json")
        return 1

    def count(self, *names: str, default: int = 0) -> int:
        """An integer that may be 0."""
        return self.size(*names, default=default, least=0)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.config.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            self.refuse(name, f"{value!r} is neither", "true, false")
        return bool(value)

    def text(self, name: str, default: str) -> str:
        """A string."""
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

    def numbers(self, name: str) -> tuple[int, ...]:
        """A list of layer numbers; empty if it is missing."""
        value = self.config.get(name) or []
        if isinstance(value, list) and all(type(each) is int for each in value):
            return tuple(value)
        self.refuse(name, f"{value!r} is no list of layers", "a list of numbers")
        return ()

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

    def _find(self, names: tuple[str, ...]) -> tuple[str, Any]:
        """The first of the names that is present, and its value."""
        for name in names:
            if self.config.get(name) is not None:
                return name, self.config[name]
        return names[0], None


# --- from sizes and a style to an architecture

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "n_embed")
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


@dataclass(frozen=True, kw_only=True)
class Style:
    """The differences between families. `bias` is about queries, keys and values; `norm_bias`: norms are layer norms
    with a bias; `norm_vectors` is 0 if norms have no parameters."""

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
    """The sizes; without `ffn_factor` the width of the feed-forward layer is required."""
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
    """The window of each layer, 0 for all positions. Without `layer_types` all layers have the window except each
    `whole_every`-th."""
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
    """The architecture, once all keys are valid; `mixed` states which layers have `experts` (default: all)."""
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
    """Layers in order, with equal neighbours as one run."""
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


# --- the families

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_OPT_OFFSET = 2
"""OPT's first position is 2 (modeling_opt.py, OPTLearnedPositionalEmbedding)."""
_GPT = Style(gated=False, norm_bias=True, bias=True, output_bias=True, ffn_bias=True)
"""GPT-2's layers: biases everywhere, no gate."""


def _tied(keys: Keys, default: bool = False) -> bool:
    return keys.flag("tie_word_embeddings", default)


def _biased(style: Style, biased: bool) -> Style:
    return replace(style, bias=biased, output_bias=biased, ffn_bias=biased)


def _llama(keys: Keys) -> Architecture:
    biased = keys.flag("attention_bias")
    style = Style(bias=biased, output_bias=biased, ffn_bias=keys.flag("mlp_bias"), tied=_tied(keys))
    sizes = read_sizes(keys)
    return build_decoder(keys, sizes, style, windows=read_windows(keys, sizes.layers))


def _smollm3(keys: Keys) -> Architecture:
    biased, sizes = keys.flag("attention_bias"), read_sizes(keys)
    style = Style(bias=biased, output_bias=biased, ffn_bias=keys.flag("mlp_bias"), tied=_tied(keys, True))
    return build_decoder(keys, sizes, style, windows=_qwen_windows(keys, sizes.layers))


def _mistral(keys: Keys) -> Architecture:
    sizes = read_sizes(keys)
    return build_decoder(keys, sizes, Style(tied=_tied(keys)), windows=read_windows(keys, sizes.layers))


def _mixtral(keys: Keys) -> Architecture:
    sizes = read_sizes(keys)
    experts = ExpertsShape(count=keys.size(*_EXPERTS), per_token=keys.size("num_experts_per_tok"), dim=sizes.ffn)
    windows = read_windows(keys, sizes.layers)
    return build_decoder(keys, sizes, Style(tied=_tied(keys)), windows=windows, experts=experts)


def _qwen_windows(keys: Keys, layers: int) -> tuple[int, ...]:
    """None unless `use_sliding_window`, and then from layer `max_window_layers` on."""
    windows = read_windows(keys, layers)
    if not keys.flag("use_sliding_window"):
        return (0,) * layers
    first = 0 if keys.config.get("layer_types") else keys.count("max_window_layers")
    return tuple(window if layer >= first else 0 for layer, window in enumerate(windows))


def _qwen2(keys: Keys) -> Architecture:
    sizes = read_sizes(keys)
    return build_decoder(keys, sizes, Style(bias=True, tied=_tied(keys)), windows=_qwen_windows(keys, sizes.layers))


def _qwen3_style(keys: Keys) -> Style:
    biased = keys.flag("attention_bias")
    return Style(bias=biased, output_bias=biased, qk_norm=True, tied=_tied(keys))


def _qwen3(keys: Keys) -> Architecture:
    sizes = read_sizes(keys)
    return build_decoder(keys, sizes, _qwen3_style(keys), windows=_qwen_windows(keys, sizes.layers))


def _sparse_layers(keys: Keys, layers: int) -> tuple[bool, ...]:
    """Whether each layer has experts (modeling_qwen2_moe.py, Qwen2MoeDecoderLayer)."""
    dense, step = keys.numbers("mlp_only_layers"), keys.size("decoder_sparse_step", default=1)
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


def _qwen2_moe(keys: Keys) -> Architecture:
    sizes = read_sizes(keys)
    experts = ExpertsShape(
        count=keys.size(*_EXPERTS),
        per_token=keys.size("num_experts_per_tok"),
        dim=keys.size("moe_intermediate_size"),
        shared_dim=keys.size("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    style, windows = Style(bias=keys.flag("qkv_bias", True), tied=_tied(keys)), _qwen_windows(keys, sizes.layers)
    mixed = _sparse_layers(keys, sizes.layers)
    return build_decoder(keys, sizes, style, windows=windows, experts=experts, mixed=mixed)


def _qwen3_moe(keys: Keys) -> Architecture:
    sizes, style = read_sizes(keys), _qwen3_style(keys)
    experts = ExpertsShape(
        count=keys.size(*_EXPERTS),
        per_token=keys.size("num_experts_per_tok"),
        dim=keys.size("moe_intermediate_size"),
    )
    windows, mixed = _qwen_windows(keys, sizes.layers), _sparse_layers(keys, sizes.layers)
    return build_decoder(keys, sizes, style, windows=windows, experts=experts, mixed=mixed)


def _deepseek(keys: Keys) -> Architecture:
    """Latent attention, and experts from layer `first_k_dense_replace` on."""
    width = keys.size("moe_intermediate_size")
    sizes = replace(read_sizes(keys), head_dim=keys.size("qk_nope_head_dim"))
    latent = Latent(
        kv_rank=keys.size("kv_lora_rank"),
        q_rank=keys.count("q_lora_rank"),
        rope_dim=keys.size("qk_rope_head_dim"),
        value_dim=keys.size("v_head_dim"),
    )
    experts = ExpertsShape(
        count=keys.size(*_EXPERTS),
        per_token=keys.size("num_experts_per_tok"),
        dim=width,
        shared_dim=width * keys.count("n_shared_experts"),
    )
    first = keys.count("first_k_dense_replace")
    mixed = [layer >= first for layer in range(sizes.layers)]
    if keys.flag("attention_bias"):
        keys.refuse("attention_bias", "true: biases of latent attention are not counted", "false")
    if keys.size("moe_layer_freq", default=1) != 1:
        keys.refuse("moe_layer_freq", f"{keys.config['moe_layer_freq']}: dense layers between are not counted", "1")
    sizes = replace(sizes, kv_heads=sizes.heads)
    return build_decoder(keys, sizes, Style(tied=_tied(keys)), experts=experts, mixed=mixed, latent=latent)


def _gpt_oss(keys: Keys) -> Architecture:
    sizes, biased = read_sizes(keys), keys.flag("attention_bias", True)
    experts = ExpertsShape(
        count=keys.size(*_EXPERTS),
        per_token=keys.size("num_experts_per_tok", "experts_per_token"),
        dim=sizes.ffn,
        bias=True,
    )
    style = Style(bias=biased, output_bias=biased, sinks=True, tied=_tied(keys))
    return build_decoder(keys, sizes, style, windows=read_windows(keys, sizes.layers, whole_every=2), experts=experts)


def _gpt2(keys: Keys) -> Architecture:
    positions = keys.size("n_positions", "max_position_embeddings")
    style = replace(_GPT, tied=_tied(keys, True), positions=positions)
    return build_decoder(keys, read_sizes(keys, ffn_factor=4), style)


def _gptj(keys: Keys) -> Architecture:
    """Attention and feed-forward in parallel, behind one norm."""
    style = replace(_GPT, norms=1, bias=False, output_bias=False, tied=_tied(keys), head_bias=True)
    return build_decoder(keys, read_sizes(keys, ffn_factor=4), style)


def _gpt_neox(keys: Keys) -> Architecture:
    biased = keys.flag("attention_bias", True)
    style = replace(_GPT, bias=biased, output_bias=biased, tied=_tied(keys))
    return build_decoder(keys, read_sizes(keys), style)


def _opt(keys: Keys) -> Architecture:
    biased, sizes = keys.flag("enable_bias", True), read_sizes(keys)
    if keys.count("word_embed_proj_dim", default=sizes.hidden) != sizes.hidden:
        what = f"{keys.config['word_embed_proj_dim']}: an embedding narrower than the layers is not counted"
        keys.refuse("word_embed_proj_dim", what, f"hidden_size, {sizes.hidden}")
    style = replace(
        _biased(_GPT, biased),
        norm_vectors=int(keys.flag("layer_norm_elementwise_affine", True)),
        tied=_tied(keys, True),
        positions=keys.size("max_position_embeddings") + _OPT_OFFSET,
        final_norm=keys.flag("do_layer_norm_before", True) and not keys.flag("_remove_final_layer_norm"),
    )
    return build_decoder(keys, sizes, style)


def _bloom(keys: Keys) -> Architecture:
    """Positions are biases of the scores, without parameters; a norm follows the embedding."""
    style = replace(_GPT, tied=_tied(keys, True), embedding_norm=True)
    return build_decoder(keys, read_sizes(keys, ffn_factor=4), style)


def _mpt(keys: Keys) -> Architecture:
    """As in the library: no biases, and positions are biases of the scores."""
    for name, wanted in (("no_bias", True), ("alibi", True)):
        inner = keys.table("attn_config") if name == "alibi" else keys
        if not inner.flag(name, wanted):
            keys.refuse(name, "false is not counted", "true")
    sizes = read_sizes(keys, ffn_factor=keys.size("expansion_ratio", default=4))
    return build_decoder(keys, sizes, Style(gated=False, tied=_tied(keys, True)))


def _falcon(keys: Keys) -> Architecture:
    sizes, biased = read_sizes(keys, ffn_factor=4), keys.flag("bias")
    newer, parallel = keys.flag("new_decoder_architecture"), keys.flag("parallel_attn", True)
    heads = keys.size("num_kv_heads", "n_head_kv", default=sizes.heads)
    if not newer:
        heads = 1 if keys.flag("multi_query", True) else sizes.heads
    norms = 2 if not parallel else keys.size("num_ln_in_parallel_attn", default=2 if newer else 1)
    style = replace(_biased(_GPT, biased), norms=norms, tied=_tied(keys, True))
    return build_decoder(keys, replace(sizes, kv_heads=heads), style)


def _phi(keys: Keys) -> Architecture:
    if keys.flag("qk_layernorm"):
        keys.refuse("qk_layernorm", "true: norms of queries and keys with a bias are not counted", "false")
    style = replace(_GPT, norms=1, tied=_tied(keys), head_bias=True)
    return build_decoder(keys, read_sizes(keys), style)


def _gemma(keys: Keys) -> Architecture:
    biased = keys.flag("attention_bias")
    style = Style(bias=biased, output_bias=biased, tied=_tied(keys, True))
    return build_decoder(keys, read_sizes(keys), style)


def _gemma2(keys: Keys) -> Architecture:
    """Norms before and after attention and feed-forward; every second layer sees all positions."""
    sizes, biased = read_sizes(keys), keys.flag("attention_bias")
    style = Style(norms=4, bias=biased, output_bias=biased, tied=_tied(keys, True))
    return build_decoder(keys, sizes, style, windows=read_windows(keys, sizes.layers, whole_every=2))


def _gemma3_text(keys: Keys) -> Architecture:
    sizes, biased = read_sizes(keys), keys.flag("attention_bias")
    every = keys.size("sliding_window_pattern", "_sliding_window_pattern", default=6)
    style = Style(norms=4, bias=biased, output_bias=biased, qk_norm=True, tied=_tied(keys, True))
    return build_decoder(keys, sizes, style, windows=read_windows(keys, sizes.layers, whole_every=every))


def _gemma3(keys: Keys) -> Architecture:
    """The language model of a multimodal one; its vision tower is not counted."""
    text = keys.table("text_config")
    text.name = f"{keys.name}, its language model alone"
    return _gemma3_text(text)


def _olmo(keys: Keys) -> Architecture:
    """Norms without parameters."""
    biased = keys.flag("attention_bias")
    style = Style(norm_vectors=0, bias=biased, output_bias=biased, tied=_tied(keys))
    return build_decoder(keys, read_sizes(keys), style)


def _olmo2(keys: Keys, whole_every: int = 0) -> Architecture:
    sizes, biased = read_sizes(keys), keys.flag("attention_bias")
    style = Style(bias=biased, output_bias=biased, qk_norm=True, qk_norm_whole=True, tied=_tied(keys))
    windows = read_windows(keys, sizes.layers, whole_every=whole_every)
    return build_decoder(keys, sizes, style, windows=windows)


def _olmo3(keys: Keys) -> Architecture:
    return _olmo2(keys, whole_every=4)


def _starcoder2(keys: Keys) -> Architecture:
    sizes = read_sizes(keys)
    style = replace(_biased(_GPT, keys.flag("use_bias", True)), tied=_tied(keys, True))
    return build_decoder(keys, sizes, style, windows=read_windows(keys, sizes.layers))


DECODERS: Mapping[str, Callable[[Keys], Architecture]] = {
    "bloom": _bloom,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "falcon": _falcon,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3_text,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "gpt_oss": _gpt_oss,
    "gptj": _gptj,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "mpt": _mpt,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "opt": _opt,
    "phi": _phi,
    "phi3": _mistral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "smollm3": _smollm3,
    "starcoder2": _starcoder2,
}
"""`model_type` of a config -> its reader."""
