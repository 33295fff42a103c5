"""The MNIST convolutional network of introductory courses.

Invariant: no parameter has a gradient that is zero by construction; so a convolution before a batch norm has no bias.
This module must not depend on where images come from.

Batch norm takes its statistics from the images that one rank sees at once, so the loss curve of this model depends on
the size of that share, unlike that of a model without batch norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from shardway.errors import Problem, check_no_problems
from shardway.models.contract import ModelPlan, canonical_name
from shardway.models.initialise import constant_, normal_

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
        check_no_problems("the convnet", _list_shape_problems(self))

    @property
    def features(self) -> int:
        """Inputs of the linear layer."""
        _, height, width = self.image
        return self.channels[-1] * (height >> len(self.channels)) * (width >> len(self.channels))

    @property
    def parameters(self) -> int:
        """All parameters: kernels, gain and bias of each norm, and the linear layer."""
        inputs = (self.image[0], *self.channels)
        blocks = (KERNEL**2 * i * o + 2 * o for i, o in zip(inputs, self.channels, strict=False))
        return sum(blocks) + (self.features + 1) * self.classes


def _list_shape_problems(shape: ConvNetShape) -> list[Problem]:
    least, (_, height, width) = 2 ** len(shape.channels), shape.image
    if min(height, width) >= least:
        return []
    return [
        Problem(
            where="model.channels",
            what=f"its {len(shape.channels)} blocks halve images of {height} x {width} to nothing",
            allowed=f"images of at least {least} x {least}",
            remedy="name fewer channels, or use larger images",
        )
    ]


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
        """Fill every parameter and the running statistics; the values depend on seed and name alone."""
        for name, parameter in self.named_parameters():
            name = canonical_name(name)
            if parameter.dim() < 2:
                constant_(parameter, 1.0 if name.endswith("norm.weight") else 0.0, name=name)
            else:
                normal_(parameter, seed=seed, name=name, std=linear_std(parameter))
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d | nn.SyncBatchNorm):
                module.reset_running_stats()

    def plan(self) -> ModelPlan:
        """Blocks are the units; nothing splits over a tensor axis."""
        return ModelPlan(blocks=("blocks.*",), last=("head",))


class ConvBlock(nn.Module):
    """5x5 convolution that keeps the size, batch norm, ReLU, 2x2 max-pooling."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, KERNEL, padding=KERNEL // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.max_pool2d(torch.relu(self.norm(self.conv(x))), 2)


def linear_std(weight: torch.Tensor) -> float:
    """1/sqrt(3 fan_in), the standard deviation of torch's own default.

    That default is uniform within 1/sqrt(fan_in): `kaiming_uniform_` (He et al., arXiv:1502.01852) with a = sqrt(5).
    """
    return 1 / math.sqrt(3 * weight.shape[1:].numel())
