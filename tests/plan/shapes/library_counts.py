"""Models of `transformers` on the meta device, to count what the library builds from a config.

Invariant: a config goes to the library as it stands, but for keys that say "none" in another way there. This module
must not import transformers when it is imported: that takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

CLASSES = {
    "bert": "AutoModelForMaskedLM",
    "resnet": "AutoModelForImageClassification",
    "roberta": "AutoModelForMaskedLM",
    "t5": "AutoModelForSeq2SeqLM",
    "vit": "AutoModelForImageClassification",
}


def make_config(config: Mapping[str, Any]) -> Any:
    """The library's config of a family with these keys."""
    import transformers

    family = config["model_type"]
    keys = {"pad_token_id": None, **{key: value for key, value in config.items() if key != "model_type"}}
    if family == "resnet":
        keys.pop("image_size", None)
    if keys.get("q_lora_rank") == 0:
        keys["q_lora_rank"] = None
    if "num_attention_heads" in keys:
        keys.setdefault("num_key_value_heads", keys["num_attention_heads"])
    return transformers.CONFIG_MAPPING[family](**keys)


def build_on_meta(config: Any) -> nn.Module:
    """The library's model for a config of its own, without memory."""
    import transformers

    build = getattr(transformers, CLASSES.get(config.model_type, "AutoModelForCausalLM")).from_config
    with torch.device("meta"):
        return build(config)


def count(model: nn.Module) -> int:
    """Parameters, shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())
