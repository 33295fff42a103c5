"""What is written for the hub beside the tensors, and under which names the tensors are.

Invariant: a form is complete before anything is written; a model that the hub has no form for is a UserError. This
module must not write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from shardway.errors import UserError
from shardway.models.huggingface.families import FAMILIES
from shardway.models.huggingface.model import HuggingFaceModel
from shardway.models.huggingface.own import names_of_transformer, to_huggingface_config
from shardway.models.huggingface.pieces import Names
from shardway.models.transformer import Transformer


@dataclass(frozen=True)
class Form:
    """How a model is written for the hub."""

    config: Mapping[str, Any]
    """The content of config.json."""
    names: Names
    """What files call its parameters: the first arrangement of each is written."""
    source: Path | None = None
    """The folder that the model came from: its tokenizer and its generation config go along."""


def form_of(model: nn.Module, *, max_positions: int, source: Path | None = None) -> Form:
    """The form of a model that is not wrapped. `max_positions`: the longest sample that a transformer of Shardway's own
    was trained on. Raises UserError where there is none."""
    if isinstance(model, HuggingFaceModel):
        return Form(model.config.to_dict(), FAMILIES[model.config.model_type], source or model.source)
    if isinstance(model, Transformer):
        config = to_huggingface_config(model.shape, max_positions)
        return Form(config, names_of_transformer(model.shape), source)
    raise UserError(
        f"a {type(model).__name__} has no form among Hugging Face's decoder-only families.\n"
        "  To do: export a transformer, or a model that model.hf named."
    )
