"""Kinds of models by name: the contract of the group `shardway.models`, our own, and how they are built from the
resolved [model] section and the facts of the data.

Invariants:
- A kind states facts without torch, so that a run file is checked on a login node; only `build` imports it.
- All that does not fit together is a UserError before any weight exists. This module must not resolve "auto" (that is
  `shardway.resolve`) or read data, and contains no layer.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shardway.errors import Bug, Problem, UserError, check_no_problems, render_problems
from shardway.plugins import HasSettings, load_plugin
from shardway.runfile.schema import ModelSection

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class Sample:
    """One sample: `vocab` of its tokens, or None for numbers; `shape` without the batch dim."""

    vocab: int | None
    shape: tuple[int, ...]

    def __str__(self) -> str:
        size = " x ".join(map(str, self.shape))
        return f"{size} numbers" if self.vocab is None else f"{size} tokens of a vocabulary of {self.vocab}"


class ModelKind(HasSettings):
    """One value of `model.kind`. Derive from it, state the facts and write `build`.

    The module of the class is imported without torch: import torch, and a module that needs it, in `build`. What the
    model states about itself is in `shardway.models.contract`: without a `plan()` it trains on copies and shards
    (dp_replicate, dp_shard), with one along `axes` too; `init_weights(seed)` fills it, since it is built on the meta
    device. It returns logits: [batch, seq, vocab] of tokens, [batch, classes] of images.
    """

    takes: ClassVar[Literal["tokens", "images"]]
    """Rows of tokens, or images (or arrays of numbers) with a label."""
    keys: ClassVar[tuple[str, ...]] = ()
    """Keys that have an effect ("model.dim"); also "data.seq_len" where the samples are tokens."""
    axes: ClassVar[tuple[str, ...]] = ()
    """Axes of tp, cp, pp, ep along which it splits, beside dp_replicate and dp_shard."""

    @abstractmethod
    def build(self, section: ModelSection, sample: Sample) -> nn.Module:
        """The model for such samples, on the device of the context (meta), its weights not set.

        `section.settings` were checked with `read_settings`. Raises UserError if model and data do not fit.
        """


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
    import torch

    kind: ModelKind = load_plugin("models", section.kind)()
    with torch.device(device):
        return kind.build(section, Sample(vocab, sample_shape))


# --- Shardway's own


def _model(*names: str) -> tuple[str, ...]:
    return tuple(f"model.{name}" for name in names)


_SIZES = _model("dim", "layers", "heads", "ffn_dim", "dropout")
_BLOCKS = _model("head_dim", "norm", "norm_eps", "activation", "bias", "qkv_bias", "qk_norm")
_TOKENS = ("model.vocab", "data.seq_len")
_MIXTURE = ("experts_per_token", "expert_dim", "shared_experts", "dense_layers", "router_score", "router_normalise")
_BALANCE = ("router_scale", "balance", "bias_update_rate", "balance_weight", "capacity_factor")


class TransformerKind(ModelKind):
    """A decoder-only transformer."""

    takes = "tokens"
    keys = (
        *(*_SIZES, *_BLOCKS, *_TOKENS),
        *_model("kv_heads", "tied", "positions", "rope_theta", "max_positions", "experts", "kv_rank"),
        *_model(*_MIXTURE, *_BALANCE, "q_rank", "rope_head_dim", "value_head_dim"),
    )
    axes = ("tp", "cp", "pp", "ep")

    def build(self, section: ModelSection, sample: Sample) -> nn.Module:
        from shardway.models.experts import MixtureShape
        from shardway.models.transformer import LatentShape, Transformer, TransformerShape

        latent = mixture = None
        if section.kv_rank:
            latent = LatentShape(
                kv_rank=section.kv_rank,
                q_rank=section.q_rank,
                rope_head_dim=_resolved(section, "rope_head_dim"),
                value_head_dim=_resolved(section, "value_head_dim"),
            )
        if section.experts:
            mixture = MixtureShape(
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
        shape = TransformerShape(
            **_block_sizes(section),
            vocab=_vocab_of(section, sample),
            positions=section.positions,
            max_positions=_resolved(section, "max_positions") if section.positions == "learned" else 0,
            rope_theta=section.rope_theta,
            tied=section.tied,
            latent=latent,
            mixture=mixture,
            dense_layers=section.dense_layers if section.experts else 0,
        )
        return Transformer(shape)


class EncoderDecoderKind(ModelKind):
    """An encoder-decoder transformer."""

    takes = "tokens"
    keys = (*_SIZES, *_TOKENS)

    def build(self, section: ModelSection, sample: Sample) -> nn.Module:
        from shardway.models.transformer import EncoderDecoder, EncoderDecoderShape

        return EncoderDecoder(
            EncoderDecoderShape(
                vocab=_vocab_of(section, sample),
                dim=section.dim,
                layers=section.layers,
                heads=section.heads,
                ffn_dim=_resolved(section, "ffn_dim"),
                dropout=section.dropout,
            )
        )


class ViTKind(ModelKind):
    """A vision transformer."""

    takes = "images"
    keys = (*_SIZES, *_BLOCKS, *_model("patch", "pooling", "classes"))
    axes = ("tp", "pp")

    def build(self, section: ModelSection, sample: Sample) -> nn.Module:
        from shardway.models.image_models import ViT, ViTShape

        return ViT(
            ViTShape(
                **_block_sizes(section),
                image=_image_of(section, sample),
                patch=section.patch,
                pooling=section.pooling,
                classes=section.classes,
            )
        )


class ConvNetKind(ModelKind):
    """Convolution blocks and a classifier."""

    takes = "images"
    keys = _model("channels", "classes")
    axes = ("pp",)

    def build(self, section: ModelSection, sample: Sample) -> nn.Module:
        from shardway.models.image_models import ConvNet, ConvNetShape

        return ConvNet(ConvNetShape(_image_of(section, sample), tuple(section.channels), section.classes))


class MLPKind(ModelKind):
    """A perceptron on images or arrays of numbers."""

    takes = "images"
    keys = _model("hidden", "dropout", "classes")
    axes = ("pp",)

    def build(self, section: ModelSection, sample: Sample) -> nn.Module:
        from shardway.models.image_models import MLP, MLPShape

        if sample.vocab is not None:
            raise _misfit(section, sample, "arrays of numbers")
        shape = MLPShape(math.prod(sample.shape), tuple(section.hidden), section.classes, section.dropout)
        return MLP(shape)


# --- what sections give to shapes


def _block_sizes(section: ModelSection) -> dict[str, Any]:
    """Fields of a `BlockShape` that every model of such blocks takes."""
    plain = ("dim", "layers", "heads", "norm", "norm_eps", "activation", "bias", "qkv_bias", "qk_norm", "dropout")
    resolved = ("kv_heads", "head_dim", "ffn_dim")
    return {key: getattr(section, key) for key in plain} | {key: _resolved(section, key) for key in resolved}


def _vocab_of(section: ModelSection, sample: Sample) -> int:
    if sample.vocab is None or len(sample.shape) != 1:
        raise _misfit(section, sample, "sequences of tokens")
    vocab = _resolved(section, "vocab")
    problem = Problem(
        where="model.vocab",
        what=f"{vocab} is smaller than the data's vocabulary of {sample.vocab}",
        allowed=f"at least {sample.vocab}",
        remedy='set model.vocab = "auto", or use the tokenizer that the model is meant for',
    )
    check_no_problems("the model", [problem] if vocab < sample.vocab else [])
    return vocab


def _image_of(section: ModelSection, sample: Sample) -> tuple[int, int, int]:
    if sample.vocab is not None or len(sample.shape) != 3:
        raise _misfit(section, sample, "images of channels x height x width")
    channels, height, width = sample.shape
    return channels, height, width


def _resolved(section: ModelSection, key: str) -> int:
    value = getattr(section, key)
    if not isinstance(value, int):
        raise Bug(f"model.{key} = {value!r} reached build_model unresolved")
    return value


def _misfit(section: ModelSection, sample: Sample, wanted: str) -> UserError:
    problem = Problem(
        where="model.kind",
        what=f'a "{section.kind}" learns from {wanted}, and a sample of the data is {sample}',
        allowed=f"data whose samples are {wanted}",
        remedy="change model.kind or data.kind",
    )
    return UserError(render_problems("the model", [problem]))
