"""Which keys have an effect under which choice.

Invariant: one table says it for the rule that refuses an ineffective key and for what is shown and written. This
module must not refuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from shardway.runfile.schema import RunFile

TOKEN_DATA = ("text", "tokens")
IMAGE_DATA = ("arrays", "idx")

TRANSFORMER_KEYS = (
    "dim",
    "layers",
    "heads",
    "kv_heads",
    "ffn_dim",
    "vocab",
    "norm",
    "activation",
    "tied",
    "rope_theta",
)
OWNERS: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "model.kind": {
            **{f"model.{name}": ("transformer",) for name in TRANSFORMER_KEYS},
            "model.dropout": ("transformer", "mlp"),
            "model.channels": ("convnet",),
            "model.hidden": ("mlp",),
            "model.classes": ("convnet", "mlp"),
            "data.seq_len": ("transformer",),
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
            "optim.betas": ("adamw",),
            "optim.eps": ("adamw",),
            "optim.momentum": ("sgd",),
            "optim.nesterov": ("sgd",),
        },
        "optim.schedule": {"optim.decay": ("wsd",), "optim.final_lr": ("cosine", "linear", "wsd")},
        "optim.lr_scaling": {"optim.base_batch": ("linear",)},
    }
)
"""Selector key -> key -> values of the selector with which the key has an effect."""


def applies(dotted: str, values: RunFile) -> bool:
    """Whether a key has an effect in this run."""
    return all(choice_of(selector, values) in owners[dotted] for selector, owners in OWNERS.items() if dotted in owners)


def choice_of(selector: str, values: RunFile) -> str:
    """The value of a selector such as "model.kind"."""
    section, name = selector.split(".")
    return str(getattr(getattr(values, section), name))
