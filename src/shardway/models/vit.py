"""A vision transformer (Dosovitskiy et al., arXiv:2010.11929): the blocks of the transformer over patches of an image.

Invariant: attention is over all patches, and positions are learned, so the number of patches is fixed. This module
must not depend on where images come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import nn

from shardway.errors import Problem
from shardway.models.contract import ModelPlan
from shardway.models.shapes import BlockShape
from shardway.models.transformer import build_blocks, build_norm, init_blocks_and_ends, tensor_plan


@dataclass(frozen=True, kw_only=True)
class ViTShape(BlockShape):
    """The sizes of a vision transformer. Raises UserError for an image that patches do not tile."""

    causal: ClassVar[bool] = False

    image: tuple[int, int, int]
    """Channels, height and width."""
    patch: int
    """Height and width of a patch."""
    classes: int
    pooling: Literal["class", "mean"] = "class"
    """What the output layer sees: a token of its own, or the mean over the patches."""
    positions: Literal["rope", "learned"] = "learned"

    def _find_problems(self) -> Iterator[Problem]:
        yield from super()._find_problems()
        if self.latent is not None or self.mixture is not None or self.positions != "learned":
            what = "has dense blocks, attention with keys of full rank, and learned positions"
            yield Problem("model.kind", f"a vision transformer {what}")
        _, height, width = self.image
        if height % self.patch or width % self.patch:
            yield Problem(
                where="model.patch",
                what=f"patches of {self.patch} x {self.patch} do not tile images of {height} x {width}",
                allowed="a common divisor of height and width",
                remedy="change model.patch",
            )

    @property
    def tokens(self) -> int:
        """Patches, and the class token where there is one."""
        _, height, width = self.image
        return (height // self.patch) * (width // self.patch) + (self.pooling == "class")

    @property
    def parameters(self) -> int:
        """All parameters: patch projection, positions, class token, blocks, the last norm, the output layer."""
        patches = (self.image[0] * self.patch**2 + 1) * self.dim
        tokens = (self.tokens + (self.pooling == "class")) * self.dim
        return patches + tokens + self.block_parameters + self.norm_parameters + (self.dim + 1) * self.classes


class ViT(nn.Module):
    """Images [batch, channels, height, width] -> logits [batch, classes]."""

    def __init__(self, shape: ViTShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding: nn.Module | None = PatchEmbedding(shape)
        self.blocks = build_blocks(shape)
        self.norm = build_norm(shape)
        self.head: nn.Module | None = nn.Linear(shape.dim, shape.classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """A pipeline stage takes and returns [batch, tokens, dim] where it lacks the first or the last modules."""
        x = inputs if self.embedding is None else self.embedding(inputs)
        for block in self.blocks.values():
            x = block(x)
        if self.head is None:
            return x
        x = self.norm(x)
        return self.head(x[:, 0] if self.shape.pooling == "class" else x.mean(dim=1))

    def init_weights(self, seed: int) -> None:
        """Fill every parameter; the values depend on seed and name alone. The class token starts at zero."""
        init_blocks_and_ends(self, self.shape, seed)

    def plan(self) -> ModelPlan:
        """Attention and feed-forward are regions; patches stay whole, since nothing marks a part of their sequence."""
        return ModelPlan(
            blocks=("blocks.*",),
            tensor=tensor_plan(self.shape),
            regions=("blocks.*.attention", "blocks.*.ffn"),
            kv_width=self.shape.head_width,
            first=("embedding",),
            last=("norm", "head"),
        )


class PatchEmbedding(nn.Module):
    """Images -> [batch, tokens, dim]: each patch projected, the class token before them, a position added to each."""

    def __init__(self, shape: ViTShape) -> None:
        super().__init__()
        self.projection = nn.Conv2d(shape.image[0], shape.dim, shape.patch, stride=shape.patch)
        self.class_token = nn.Parameter(torch.zeros(shape.dim)) if shape.pooling == "class" else None
        self.positions = nn.Parameter(torch.empty(shape.tokens, shape.dim))
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.projection(images).flatten(2).transpose(1, 2)
        if self.class_token is not None:
            x = torch.cat((self.class_token.expand(len(x), 1, -1).type_as(x), x), dim=1)
        return self.dropout(x + self.positions)
