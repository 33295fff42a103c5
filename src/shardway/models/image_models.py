"""Models of images and numbers: a vision transformer, the convolutional network of courses, a perceptron.

Invariants:
- Attention is over all patches, and positions are learned, so the number of patches is fixed.
- No parameter has a gradient that is zero by construction; so a convolution before a batch norm has no bias.
- A sample of any shape is taken if its size is that of the first layer.

Batch norm takes its statistics from the images that one rank sees at once, so the loss curve of this model depends on
the size of that share, unlike that of a model without batch norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

import torch
from torch import nn

from shardway.errors import Problem, check_no_problems
from shardway.models.contract import ModelPlan
from shardway.models.initialise import fill_parameters
from shardway.models.transformer import (
    BlockShape,
    begin_stream,
    build_blocks,
    build_norm,
    init_blocks_and_ends,
    tensor_plan,
)

# --- A vision transformer (Dosovitskiy et al., arXiv:2010.11929): the blocks of the transformer over patches of an
# image


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

    def __post_init__(self) -> None:
        _, height, width = self.image
        problem = Problem(
            where="model.patch",
            what=f"patches of {self.patch} x {self.patch} do not tile images of {height} x {width}",
            allowed="a common divisor of height and width",
            remedy="change model.patch",
        )
        check_no_problems("the transformer", [problem] if height % self.patch or width % self.patch else [])

    @property
    def tokens(self) -> int:
        """Patches, and the class token where there is one."""
        _, height, width = self.image
        return (height // self.patch) * (width // self.patch) + (self.pooling == "class")


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
        init_blocks_and_ends(self, self.shape, seed)

    def plan(self) -> ModelPlan:
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
        return begin_stream(self.dropout(x + self.positions))


# --- The MNIST convolutional network of introductory courses

KERNEL = 5


@dataclass(frozen=True)
class ConvNetShape:
    """The sizes of a convolutional network. Raises UserError for an image that the poolings use up."""

    image: tuple[int, int, int]
    """Channels, height and width."""
    channels: tuple[int, ...]
    """Output channels of each block; each block halves height and width, rounding down."""
    classes: int

    def __post_init__(self) -> None:
        least, (_, height, width) = 2 ** len(self.channels), self.image
        problem = Problem(
            where="model.channels",
            what=f"its {len(self.channels)} blocks halve images of {height} x {width} to nothing",
            allowed=f"images of at least {least} x {least}",
            remedy="name fewer channels, or use larger images",
        )
        check_no_problems("the convnet", [problem] if min(height, width) < least else [])

    @property
    def features(self) -> int:
        _, height, width = self.image
        return self.channels[-1] * (height >> len(self.channels)) * (width >> len(self.channels))


class ConvNet(nn.Module):
    """Images [batch, channels, height, width] -> logits [batch, classes]."""

    def __init__(self, shape: ConvNetShape) -> None:
        super().__init__()
        self.shape = shape
        inputs = (shape.image[0], *shape.channels)
        pairs = zip(inputs, shape.channels, strict=False)
        self.blocks = nn.ModuleDict({str(index): ConvBlock(*pair) for index, pair in enumerate(pairs)})
        self.head: nn.Module | None = nn.Linear(shape.features, shape.classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """A pipeline stage takes and returns feature maps where it lacks the first or the last modules."""
        x = inputs
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x.flatten(1))

    def init_weights(self, seed: int) -> None:
        # The deviation of torch's own default, uniform within 1/sqrt(fan_in): `kaiming_uniform_` (He et al.,
        # arXiv:1502.01852) with a = sqrt(5).
        fill_parameters(self, seed, lambda name, weight: 1 / math.sqrt(3 * weight.shape[1:].numel()))
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d | nn.SyncBatchNorm):
                module.reset_running_stats()

    def plan(self) -> ModelPlan:
        return ModelPlan(blocks=("blocks.*",), last=("head",))


class ConvBlock(nn.Module):
    """5x5 convolution that keeps the size, batch norm, ReLU, 2x2 max-pooling."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, KERNEL, padding=KERNEL // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.max_pool2d(torch.relu(self.norm(self.conv(x))), 2)


# --- A multi-layer perceptron on flattened samples


@dataclass(frozen=True)
class MLPShape:
    """The sizes of a perceptron: numbers in a sample, widths of the hidden layers, classes."""

    inputs: int
    hidden: tuple[int, ...]
    classes: int
    dropout: float = 0.0


class MLP(nn.Module):
    """Samples [batch, ...] -> logits [batch, classes]."""

    def __init__(self, shape: MLPShape) -> None:
        super().__init__()
        self.shape = shape
        widths = (shape.inputs, *shape.hidden)
        self.blocks = nn.ModuleDict({str(index): nn.Linear(*pair) for index, pair in enumerate(pairwise(widths))})
        self.dropout = nn.Dropout(shape.dropout)
        self.head: nn.Module | None = nn.Linear(widths[-1], shape.classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """A pipeline stage takes and returns [batch, features] where it lacks the first or the last modules."""
        x = inputs.flatten(1)
        for linear in self.blocks.values():
            x = self.dropout(torch.relu(linear(x)))
        return x if self.head is None else self.head(x)

    def init_weights(self, seed: int) -> None:
        """Fill every parameter; the values depend on seed and name alone.

        Weights have the variance 2/fan_in that keeps the scale through ReLU (He et al., arXiv:1502.01852, equation
        10), in the last layer 1/fan_in; biases are 0.
        """
        gains = {"head.weight": 1.0}
        fill_parameters(self, seed, lambda name, weight: math.sqrt(gains.get(name, 2.0) / weight.shape[1]))

    def plan(self) -> ModelPlan:
        return ModelPlan(blocks=("blocks.*",) if self.shape.hidden else (), last=("head",))
