"""A multi-layer perceptron on flattened samples.

Invariant: a sample of any shape is taken if its size is that of the first layer. This module must not depend on what
the numbers of a sample mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from shardway.models.contract import ModelPlan, canonical_name
from shardway.models.initialise import constant_, normal_


@dataclass(frozen=True)
class MLPShape:
    """The sizes of a perceptron: numbers in a sample, widths of the hidden layers, classes."""

    inputs: int
    hidden: tuple[int, ...]
    classes: int
    dropout: float = 0.0

    @property
    def widths(self) -> tuple[int, ...]:
        """Every width from the sample to the logits."""
        return (self.inputs, *self.hidden, self.classes)

    @property
    def parameters(self) -> int:
        """All weights and biases."""
        return sum((before + 1) * after for before, after in pairwise(self.widths))


class MLP(nn.Module):
    """Samples [batch, ...] -> logits [batch, classes]."""

    def __init__(self, shape: MLPShape) -> None:
        super().__init__()
        self.shape = shape
        pairs = pairwise(shape.widths[:-1])
        self.blocks = nn.ModuleDict({str(index): nn.Linear(*pair) for index, pair in enumerate(pairs)})
        self.dropout = nn.Dropout(shape.dropout)
        self.head: nn.Module | None = nn.Linear(shape.widths[-2], shape.classes)

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
        for name, parameter in self.named_parameters():
            name = canonical_name(name)
            if parameter.dim() < 2:
                constant_(parameter, 0.0, name=name)
            else:
                gain = 1.0 if name == "head.weight" else 2.0
                normal_(parameter, seed=seed, name=name, std=math.sqrt(gain / parameter.shape[1]))

    def plan(self) -> ModelPlan:
        """Each hidden layer is a unit; nothing splits over a tensor axis."""
        return ModelPlan(blocks=("blocks.*",) if self.shape.hidden else (), last=("head",))
