"""A small model with blocks of linear layers, for tests of what changes a model without knowing what it computes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardway.models.contract import ModelPlan
from shardway.models.initialise import constant_, normal_
from shardway.runfile.schema import PrecisionSection

DIM, HIDDEN, VOCAB = 32, 64, 48


class Block(nn.Module):
    """x + down(dropout(gelu(up(attention(norm(x)))))), with one head; [batch, seq, 32] -> the same."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, HIDDEN)
        self.router = nn.Linear(DIM, DIM, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        y = y + F.scaled_dot_product_attention(y[:, None], y[:, None], y[:, None], is_causal=True)[:, 0]
        return x + self.down(self.dropout(F.gelu(self.up(y)))) * self.router(y).sigmoid()


class Stack(nn.Module):
    """Token ids [batch, seq] -> logits [batch, seq, 48], through an embedding, blocks and an output layer."""

    def __init__(self, layers: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def init_weights(self, seed: int) -> None:
        """Fill every parameter; the values depend on seed and name alone."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                constant_(parameter, float(name.endswith("norm.weight")), name=name)
            else:
                normal_(parameter, seed=seed, name=name, std=DIM**-0.5)


class PlannedStack(Stack):
    """The same model, with a plan that leaves the router whole."""

    def plan(self) -> ModelPlan:
        """Blocks, and how their matrices split."""
        return ModelPlan(
            blocks=("blocks.*",),
            tensor={"blocks.*.up": "column", "blocks.*.down": "row", "head": "logits"},
            last=("head",),
        )


def build_stack(layers: int = 3, dropout: float = 0.0) -> PlannedStack:
    """A filled model; every call gives the same."""
    model = PlannedStack(layers, dropout)
    model.init_weights(seed=0)
    return model


def token_batch(batch: int = 2, seq: int = 16, seed: int = 1) -> torch.Tensor:
    """Token ids [batch, seq]."""
    return torch.randint(0, VOCAB, (batch, seq), generator=torch.Generator().manual_seed(seed))


def stack_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token."""
    logits = model(tokens)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def gradients(model: nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradient of each parameter after one backward pass."""
    model.zero_grad()
    stack_loss(model, tokens).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def float8(recipe: str = "tensorwise", **keys: Any) -> PrecisionSection:
    """A section that multiplies in float8."""
    named = {key if key == "first_last" else f"float8_{key}": value for key, value in keys.items()}
    return PrecisionSection.model_validate(
        {"compute": "float8", "float8_recipe": recipe, "float8_all_gather": False} | named
    )
