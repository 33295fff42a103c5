"""From the resolved [model] section and what is known of the data to a model.

Invariant: what does not fit together is a UserError before any weight exists. This module must not resolve "auto"
(that is `shardway.resolve`) nor read data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from shardway.errors import Bug, Problem, UserError, check_no_problems, render_problems
from shardway.runfile.schema import ModelSection


@dataclass(frozen=True)
class Sample:
    """What one sample is: `vocab` of its tokens, or None for numbers; `shape` without the batch dim."""

    vocab: int | None
    shape: tuple[int, ...]

    def __str__(self) -> str:
        size = " x ".join(map(str, self.shape))
        return f"{size} numbers" if self.vocab is None else f"{size} tokens of a vocabulary of {self.vocab}"


def build_model(
    section: ModelSection,
    *,
    vocab: int | None,
    sample_shape: tuple[int, ...],
    device: torch.device | str = "meta",
) -> nn.Module:
    """The model of `section.kind` on `device`, its weights not yet set: call `init_weights(seed)`.

    `vocab` is the data's vocabulary, None where samples are not tokens; `sample_shape` is (seq_len,) or the image's
    (channels, height, width). Raises UserError where model and data do not fit.
    """
    build = BUILDERS[section.kind]
    with torch.device(device):
        return build(section, Sample(vocab, sample_shape))


def _build_transformer(section: ModelSection, sample: Sample) -> nn.Module:
    from shardway.models.transformer import Transformer, TransformerShape

    if sample.vocab is None or len(sample.shape) != 1:
        raise _misfit(section, sample, "sequences of tokens")
    vocab = _resolved(section, "vocab")
    check_no_problems("the model", _list_vocab_problems(vocab, sample.vocab))
    shape = TransformerShape(
        vocab=vocab,
        dim=section.dim,
        layers=section.layers,
        heads=section.heads,
        kv_heads=_resolved(section, "kv_heads"),
        ffn_dim=_resolved(section, "ffn_dim"),
        norm=section.norm,
        activation=section.activation,
        tied=section.tied,
        rope_theta=section.rope_theta,
        dropout=section.dropout,
    )
    return Transformer(shape)


def _build_convnet(section: ModelSection, sample: Sample) -> nn.Module:
    from shardway.models.convnet import ConvNet, ConvNetShape

    if sample.vocab is not None or len(sample.shape) != 3:
        raise _misfit(section, sample, "images of channels x height x width")
    channels, height, width = sample.shape
    return ConvNet(ConvNetShape((channels, height, width), tuple(section.channels), section.classes))


def _build_mlp(section: ModelSection, sample: Sample) -> nn.Module:
    from shardway.models.mlp import MLP, MLPShape

    if sample.vocab is not None:
        raise _misfit(section, sample, "arrays of numbers")
    shape = MLPShape(math.prod(sample.shape), tuple(section.hidden), section.classes, section.dropout)
    return MLP(shape)


BUILDERS: dict[str, Callable[[ModelSection, Sample], nn.Module]] = {
    "transformer": _build_transformer,
    "convnet": _build_convnet,
    "mlp": _build_mlp,
}
"""model.kind -> builder; each imports its model when it is called."""


def _resolved(section: ModelSection, key: str) -> int:
    value = getattr(section, key)
    if not isinstance(value, int):
        raise Bug(f"model.{key} = {value!r} reached build_model unresolved")
    return value


def _list_vocab_problems(vocab: int, data_vocab: int) -> list[Problem]:
    if vocab >= data_vocab:
        return []
    return [
        Problem(
            where="model.vocab",
            what=f"{vocab} is smaller than the data's vocabulary of {data_vocab}",
            allowed=f"at least {data_vocab}",
            remedy='set model.vocab = "auto", or use the tokenizer that the model is meant for',
        )
    ]


def _misfit(section: ModelSection, sample: Sample, wanted: str) -> UserError:
    problem = Problem(
        where="model.kind",
        what=f'a "{section.kind}" learns from {wanted}, and a sample of the data is {sample}',
        allowed=f"data whose samples are {wanted}",
        remedy="change model.kind or data.kind",
    )
    return UserError(render_problems("the model", [problem]))
