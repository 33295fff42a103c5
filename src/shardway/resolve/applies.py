"""Which keys have an effect under which choice.

Invariant: this table alone decides it, for the rule that refuses an ineffective key and for what is shown and written.
Nothing is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from shardway.runfile.schema import DeepspeedSection, RunFile

TOKEN_DATA = ("text", "tokens")
IMAGE_DATA = ("arrays", "idx")

TOKEN_MODELS = ("transformer", "encoder_decoder")
IMAGE_MODELS = ("vit", "convnet", "mlp")
BLOCK_MODELS = ("transformer", "vit")
"""Kinds of models whose samples are tokens, kinds whose samples are images, and kinds made of transformer blocks."""

ABOVE_ZERO = "above 0"
"""The choice of a numeric selector that is not 0."""

_SIZES = ("dim", "layers", "heads", "ffn_dim")
_BLOCKS = ("head_dim", "norm", "norm_eps", "activation", "bias", "qkv_bias", "qk_norm")
_DECODER = ("kv_heads", "tied", "positions", "rope_theta", "max_positions", "experts", "kv_rank")
_ROUTING = ("router_score", "router_normalise", "router_scale", "balance")
_MIXTURE = ("experts_per_token", "expert_dim", "shared_experts", "dense_layers", *_ROUTING)
_LATENT = ("q_rank", "rope_head_dim", "value_head_dim")
_IMAGES = ("channels", "hidden", "patch", "pooling", "classes")

WEIGHT_KEYS = ("kind", "hf", "vocab", *_SIZES, *_BLOCKS, *_DECODER, *_MIXTURE, *_LATENT, *_IMAGES)
"""Keys of [model] about its weights or their meaning."""

_BALANCING = ("bias_update_rate", "balance_weight", "capacity_factor")
SHAPE_KEYS = (*(name for name in WEIGHT_KEYS if name not in ("kind", "hf")), *_BALANCING, "dropout")
"""Keys of [model] that describe a reference model; with model.hf its config.json decides them."""

_OF_TORCH = ("static_graph", "compress", "powersgd_rank", "reshard_after_forward", "prefetch", "cpu_offload")
"""Keys of [parallel] about PyTorch's copies and shards."""

_OF_ROLL_BACK = ("spike_steps", "spike_margin", "max_left_out", "max_roll_backs")
"""Keys of [guard] about rewinding before a spike."""


def _model(names: tuple[str, ...], *choices: str) -> dict[str, tuple[str, ...]]:
    return {f"model.{name}": choices for name in names}


AXES_OF_KIND: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "transformer": ("tp", "cp", "pp", "ep"),
        "encoder_decoder": (),
        "vit": ("tp", "pp"),
        "convnet": ("pp",),
        "mlp": ("pp",),
    }
)
"""model.kind -> axes along which it splits, beside dp_replicate and dp_shard."""

OWNERS: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "model.kind": {
            **_model(_SIZES, *TOKEN_MODELS, "vit"),
            **_model(_BLOCKS, *BLOCK_MODELS),
            **_model((*_DECODER, *_MIXTURE, *_LATENT, "capacity_factor"), "transformer"),
            **_model(("bias_update_rate", "balance_weight"), "transformer"),
            "model.vocab": TOKEN_MODELS,
            "model.dropout": (*TOKEN_MODELS, "vit", "mlp"),
            "model.channels": ("convnet",),
            "model.hidden": ("mlp",),
            **_model(("patch", "pooling"), "vit"),
            "model.classes": IMAGE_MODELS,
            "data.seq_len": TOKEN_MODELS,
        },
        "model.positions": {"model.rope_theta": ("rope",), "model.max_positions": ("learned",)},
        "model.experts": _model((*_MIXTURE, "bias_update_rate", "balance_weight", "capacity_factor"), ABOVE_ZERO),
        "model.balance": {"model.bias_update_rate": ("bias",), "model.balance_weight": ("loss",)},
        "model.kv_rank": {
            **_model(_LATENT, ABOVE_ZERO),
            **_model(("kv_heads", "bias", "qkv_bias", "qk_norm", "positions"), "0"),
        },
        "data.kind": {
            "data.include": ("text",),
            "data.tokenizer": ("text",),
            "data.token_dtype": ("tokens",),
            "data.inputs": ("arrays",),
            "data.targets": ("arrays",),
            "data.mean": IMAGE_DATA,
            "data.std": IMAGE_DATA,
            "data.samples": ("synthetic",),
            "data.shape": ("synthetic",),
            "data.path": (*TOKEN_DATA, *IMAGE_DATA),
            "data.validation": (*TOKEN_DATA, *IMAGE_DATA),
        },
        "optim.name": {
            "optim.kernel": ("adamw", "sgd", "muon"),
            "optim.state_dtype": ("adamw", "sgd", "muon"),
            "optim.betas": ("adamw", "adamw8bit", "muon"),
            "optim.eps": ("adamw", "adamw8bit", "muon"),
            **{f"optim.muon_{name}": ("muon",) for name in ("lr_factor", "adjust", "momentum", "iterations")},
            "optim.momentum": ("sgd",),
            "optim.nesterov": ("sgd",),
        },
        "optim.schedule": {"optim.decay": ("wsd",), "optim.final_lr": ("cosine", "linear", "wsd")},
        "optim.lr_scaling": {"optim.base_batch": ("linear",)},
        "train.engine": {
            **{f"deepspeed.{name}": ("deepspeed",) for name in DeepspeedSection.model_fields},
            **{f"parallel.{name}": ("torch",) for name in _OF_TORCH},
            "optim.state_dtype": ("torch",),
            **{f"guard.{name}": ("torch",) for name in ("non_finite", "max_skips", "probe_every", "compare_every")},
            "guard.on_spike": ("torch",),
        },
        "guard.on_spike": {f"guard.{name}": ("roll_back",) for name in _OF_ROLL_BACK},
        "guard.non_finite": {"guard.max_skips": ("skip",)},
        "train.compile": {"train.compile_cache": ("blocks", "model")},
        "precision.compute": {
            **{f"precision.loss_scale{part}": ("fp16",) for part in ("", "_growth", "_backoff", "_interval")},
            **{f"precision.float8_{part}": ("float8",) for part in ("recipe", "engine", "emulate", "all_gather")},
            "precision.first_last": ("float8",),
        },
        "recompute.mode": {
            "recompute.every": ("selective", "full"),
            "recompute.save_ops": ("selective",),
            "recompute.budget": ("budget",),
        },
    }
)
"""Selector key -> key -> values of the selector with which the key has an effect."""


def applies(dotted: str, values: RunFile) -> bool:
    """Whether a key has an effect in this run."""
    if values.model.hf and dotted in (f"model.{name}" for name in SHAPE_KEYS):
        return False
    if dotted == "model.hf_weights" and not values.model.hf:
        return False
    return all(choice_of(selector, values) in owners[dotted] for selector, owners in OWNERS.items() if dotted in owners)


def choice_of(selector: str, values: RunFile) -> str:
    """The choice of a selector such as "model.kind"."""
    section, name = selector.split(".")
    return name_choice(getattr(getattr(values, section), name))


def name_choice(value: object) -> str:
    """The name of a choice in `OWNERS`: a number other than 0 is `ABOVE_ZERO`."""
    return ABOVE_ZERO if isinstance(value, int) and not isinstance(value, bool) and value > 0 else str(value)
