"""The encoder-decoder of introductory courses (`torch.nn.Transformer`; Vaswani et al., arXiv:1706.03762), as a
language model.

The source is the sequence; the target is the sequence shifted by one token. The decoder gets the same tokens as the
encoder, and no layer sees later ones, not even in the source. This equals `torch.nn.Transformer` with three causal
masks.

Invariant: logits of a token depend on that token and earlier ones alone. This module must not depend on the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from shardway.errors import Problem, check_no_problems
from shardway.models.contract import ModelPlan, canonical_name
from shardway.models.initialise import constant_, normal_

WAVELENGTHS = 10000.0
"""Base of the wavelengths of sinusoidal positions (Vaswani et al., section 3.5)."""


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderShape:
    """The sizes of an encoder-decoder. Raises UserError where they do not fit each other."""

    vocab: int
    dim: int
    layers: int
    """Of the encoder, and as many of the decoder."""
    heads: int
    ffn_dim: int
    dropout: float = 0.0

    def __post_init__(self) -> None:
        what = f"{self.heads} heads do not split model.dim = {self.dim} into heads of equal width"
        problem = Problem("model.heads", what, allowed="a divisor of model.dim", remedy="change model.heads")
        check_no_problems("the encoder-decoder", [problem] if self.dim % self.heads else [])

    @property
    def parameters(self) -> int:
        """All parameters; an encoder layer has one attention and two norms, a decoder layer two and three."""
        attention, norm = 4 * self.dim * (self.dim + 1), 2 * self.dim
        ffn = 2 * self.dim * self.ffn_dim + self.ffn_dim + self.dim
        blocks = self.layers * (3 * attention + 2 * ffn + 5 * norm)
        return blocks + 2 * norm + (2 * self.dim + 1) * self.vocab


class EncoderDecoder(nn.Module):
    """Token ids [batch, seq] -> logits [batch, seq, vocab]."""

    def __init__(self, shape: EncoderDecoderShape) -> None:
        super().__init__()
        self.shape = shape
        sizes = (shape.dim, shape.heads, shape.ffn_dim, shape.dropout)
        layers = [str(index) for index in range(shape.layers)]
        self.embedding = nn.Embedding(shape.vocab, shape.dim)
        self.dropout = nn.Dropout(shape.dropout)
        self.encoder = nn.ModuleDict({name: nn.TransformerEncoderLayer(*sizes, batch_first=True) for name in layers})
        self.encoder_norm = nn.LayerNorm(shape.dim)
        self.decoder = nn.ModuleDict({name: nn.TransformerDecoderLayer(*sizes, batch_first=True) for name in layers})
        self.decoder_norm = nn.LayerNorm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocab)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        seq = inputs.shape[1]
        later = torch.ones(seq, seq, dtype=torch.bool, device=inputs.device).triu(1)
        x = self.embedding(inputs) * math.sqrt(self.shape.dim)
        source = target = self.dropout(x + sinusoids(seq, self.shape.dim, inputs.device).type_as(x))
        for layer in self.encoder.values():
            source = layer(source, src_mask=later, is_causal=True)
        source = self.encoder_norm(source)
        for layer in self.decoder.values():
            target = layer(target, source, later, later, tgt_is_causal=True, memory_is_causal=True)
        # What `nn.Linear` makes of [batch, seq, dim] with a bias is a view, and FSDP2 warns of views that it returns.
        return F.linear(self.decoder_norm(target), self.head.weight).add_(self.head.bias)

    def init_weights(self, seed: int) -> None:
        """Fill every parameter; the values depend on seed and name alone.

        Matrices have the variance 2/(inputs + outputs) (Glorot and Bengio, 2010) that `nn.Transformer` gives them;
        the embedding 1/dim, so that it is of the size of the positions once it is multiplied by sqrt(dim).
        """
        for name, parameter in self.named_parameters():
            name = canonical_name(name)
            if parameter.dim() < 2:
                constant_(parameter, 0.0 if name.endswith("bias") else 1.0, name=name)
            else:
                std = self.shape.dim**-0.5 if name == "embedding.weight" else math.sqrt(2 / sum(parameter.shape))
                normal_(parameter, seed=seed, name=name, std=std)

    def plan(self) -> ModelPlan:
        """Layers are the units. The decoder needs all of the encoder, so there is no one place to cut a pipeline."""
        return ModelPlan(blocks=("encoder.*", "decoder.*"))


def sinusoids(seq: int, dim: int, device: torch.device) -> torch.Tensor:
    """Float32 [seq, dim]: sin(position / 10000**(2i/dim)) in feature 2i, the cosine in 2i + 1 (section 3.5)."""
    exponent = torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim
    angles = torch.arange(seq, device=device, dtype=torch.float32)[:, None] * WAVELENGTHS**-exponent
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[:, :dim]
