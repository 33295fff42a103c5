"""Builds a model from the resolved [model] section and the facts of the data.

Invariant: all that does not fit together is a UserError before any weight exists. This module must not resolve "auto"
(that is `shardway.resolve`) or read data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardway.errors import Bug, Problem, UserError, check_no_problems, render_problems
from shardway.models.shapes import LatentShape, MixtureShape
from shardway.runfile.schema import ModelSection


@dataclass(frozen=True)
class Sample:
    """One sample: `vocab` of its tokens, or None for numbers; `shape` without the batch dim."""

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

    `vocab` is the data's vocabulary, None if samples are not tokens; `sample_shape` is (seq_len,) or the image's
    (channels, height, width). Raises UserError if model and data do not fit.
    """
    build = BUILDERS[section.kind]
    with torch.device(device):
        return build(section, Sample(vocab, sample_shape))


def _build_transformer(section: ModelSection, sample: Sample) -> nn.Module:
    from shardway.models.transformer import Transformer, TransformerShape

    shape = TransformerShape(
        **_block_sizes(section),
        vocab=_vocab_of(section, sample),
        positions=section.positions,
        max_positions=_resolved(section, "max_positions") if section.positions == "learned" else 0,
        rope_theta=section.rope_theta,
        tied=section.tied,
        latent=_latent_of(section) if section.kv_rank else None,
        mixture=_mixture_of(section) if section.experts else None,
        dense_layers=section.dense_layers if section.experts else 0,
    )
    return Transformer(shape)


def _build_vit(section: ModelSection, sample: Sample) -> nn.Module:
    from shardway.models.vit import ViT, ViTShape

    shape = ViTShape(
        **_block_sizes(section),
        image=_image_of(section, sample),
        patch=section.patch,
        pooling=section.pooling,
        classes=section.classes,
    )
    return ViT(shape)


def _build_encoder_decoder(section: ModelSection, sample: Sample) -> nn.Module:
    from shardway.models.encoder_decoder import EncoderDecoder, EncoderDecoderShape

    shape = EncoderDecoderShape(
        vocab=_vocab_of(section, sample),
        dim=section.dim,
        layers=section.layers,
        heads=section.heads,
        ffn_dim=_resolved(section, "ffn_dim"),
        dropout=section.dropout,
    )
    return EncoderDecoder(shape)


def _build_convnet(section: ModelSection, sample: Sample) -> nn.Module:
    from shardway.models.convnet import ConvNet, ConvNetShape

    return ConvNet(ConvNetShape(_image_of(section, sample), tuple(section.channels), section.classes))


def _build_mlp(section: ModelSection, sample: Sample) -> nn.Module:
    from shardway.models.mlp import MLP, MLPShape

    if sample.vocab is not None:
        raise _misfit(section, sample, "arrays of numbers")
    shape = MLPShape(math.prod(sample.shape), tuple(section.hidden), section.classes, section.dropout)
    return MLP(shape)


BUILDERS: dict[str, Callable[[ModelSection, Sample], nn.Module]] = {
    "transformer": _build_transformer,
    "encoder_decoder": _build_encoder_decoder,
    "vit": _build_vit,
    "convnet": _build_convnet,
    "mlp": _build_mlp,
}
"""model.kind -> builder; each imports its model when it is called."""


def _block_sizes(section: ModelSection) -> dict[str, Any]:
    """Fields of a `BlockShape` that every model of such blocks takes."""
    return {
        "dim": section.dim,
        "layers": section.layers,
        "heads": section.heads,
        "kv_heads": _resolved(section, "kv_heads"),
        "head_dim": _resolved(section, "head_dim"),
        "ffn_dim": _resolved(section, "ffn_dim"),
        "norm": section.norm,
        "norm_eps": section.norm_eps,
        "activation": section.activation,
        "bias": section.bias,
        "qkv_bias": section.qkv_bias,
        "qk_norm": section.qk_norm,
        "dropout": section.dropout,
    }


def _latent_of(section: ModelSection) -> LatentShape:
    return LatentShape(
        kv_rank=section.kv_rank,
        q_rank=section.q_rank,
        rope_head_dim=_resolved(section, "rope_head_dim"),
        value_head_dim=_resolved(section, "value_head_dim"),
    )


def _mixture_of(section: ModelSection) -> MixtureShape:
    return MixtureShape(
        experts=section.experts,
        per_token=section.experts_per_token,
        expert_dim=_resolved(section, "expert_dim"),
        shared=section.shared_experts,
        score=section.router_score,
        normalise=section.router_normalise,
        scale=section.router_scale,
        balance=section.balance,
        bias_update_rate=section.bias_update_rate,
        balance_weight=section.balance_weight,
        capacity_factor=section.capacity_factor,
    )


def _vocab_of(section: ModelSection, sample: Sample) -> int:
    """The vocabulary of a model of tokens. Raises UserError if the data have none, or a larger one."""
    if sample.vocab is None or len(sample.shape) != 1:
        raise _misfit(section, sample, "sequences of tokens")
    vocab = _resolved(section, "vocab")
    check_no_problems("the model", _list_vocab_problems(vocab, sample.vocab))
    return vocab


def _image_of(section: ModelSection, sample: Sample) -> tuple[int, int, int]:
    """Channels, height and width of a sample. Raises UserError if it is no image."""
    if sample.vocab is not None or len(sample.shape) != 3:
        raise _misfit(section, sample, "images of channels x height x width")
    channels, height, width = sample.shape
    return channels, height, width


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
