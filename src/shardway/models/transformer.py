"""A decoder-only transformer: pre-norm; rotary or learned positions; grouped-query or latent attention; dense or a
mixture of experts. The shapes of Llama, GPT-2, Qwen, Mixtral and DeepSeek are settings of it.

Invariant: no sub-layer mentions how many heads or features it holds beyond the size of one head, so a projection
whose columns were split over ranks runs the same code on fewer of them; and `init_weights` fills all that is lost
when the model is built on meta. This module must not know of meshes or of the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from shardway.errors import Problem
from shardway.models.block import build_blocks, build_norm, held_plan, init_blocks_and_ends, tensor_plan
from shardway.models.contract import ModelPlan, Split
from shardway.models.shapes import BlockShape


@dataclass(frozen=True, kw_only=True)
class TransformerShape(BlockShape):
    """The sizes of a transformer, all resolved. Raises UserError where they do not fit each other."""

    vocab: int
    tied: bool = True
    max_positions: int = 0
    """Rows of the table of learned positions."""

    def _find_problems(self) -> Iterator[Problem]:
        yield from super()._find_problems()
        if self.positions == "learned" and self.max_positions < 1:
            yield Problem("model.max_positions", f"{self.max_positions} learned positions", allowed="at least 1")

    @property
    def matrix_parameters(self) -> int:
        """Parameters that a token is multiplied with: all matrices but tables of embeddings and unused experts."""
        return self.block_matrices + self.vocab * self.dim

    @property
    def parameters(self) -> int:
        """All parameters: blocks, output layer, a separate embedding where not tied, positions, the last norm."""
        tables = (1 if self.tied else 2) * self.vocab + (self.max_positions if self.positions == "learned" else 0)
        return self.block_parameters + tables * self.dim + self.norm_parameters

    def flops_per_token(self, seq_len: int) -> int:
        """Training FLOPs a token: 6 N + 12 L H Q T (Chowdhery et al., PaLM, arXiv:2204.02311, appendix B).

        N counts the matrices; the attention term counts the whole T x T square, as that convention has it, though a
        causal kernel may skip half. Recompute is not counted.
        """
        return 6 * self.matrix_parameters + 12 * self.layers * self.attention_width * seq_len


class Transformer(nn.Module):
    """Token ids [batch, seq] -> logits [batch, seq, vocab]."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.shape = shape
        learned = shape.positions == "learned"
        self.embedding: nn.Embedding | None = nn.Embedding(shape.vocab, shape.dim)
        self.position_embedding = nn.Embedding(shape.max_positions, shape.dim) if learned else None
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = build_blocks(shape)
        self.norm = build_norm(shape)
        self.head: nn.Module | None = TiedHead() if shape.tied else nn.Linear(shape.dim, shape.vocab, bias=False)

    def forward(self, inputs: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Logits for int64 `inputs` [batch, seq]; `positions` [seq] or [batch, seq] default to 0, 1, 2 ...

        A pipeline stage takes and returns [batch, seq, dim] where it lacks the first or the last modules, and needs
        `positions` then.
        """
        if positions is None:
            positions = torch.arange(inputs.shape[-1], device=inputs.device)
        x = inputs if self.embedding is None else self._embed(self.embedding(inputs), positions)
        for block in self.blocks.values():
            x = block(x, positions)
        if self.head is None:
            return x
        x = self.norm(x)
        return self.head(x) if self.embedding is None or not self.shape.tied else self.head(x, self.embedding.weight)

    def _embed(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.dropout(x if self.position_embedding is None else x + self.position_embedding(positions))

    def init_weights(self, seed: int) -> None:
        """Fill every parameter and buffer; the values depend on seed and name alone."""
        init_blocks_and_ends(self, self.shape, seed)

    def plan(self) -> ModelPlan:
        """Attention and feed-forward are regions; a tied head uses the embedding's weight, split the same way."""
        shape, mixture = self.shape, self.shape.mixture
        positions: dict[str, Split] = {"position_embedding": "sequence"} if shape.positions == "learned" else {}
        return ModelPlan(
            blocks=("blocks.*",),
            tensor={
                "embedding": "vocabulary",
                **positions,
                "blocks.*.attention_norm": "sequence",
                "blocks.*.ffn_norm": "sequence",
                **tensor_plan(shape),
                "norm": "sequence",
                "head": "logits",
            },
            regions=("blocks.*.attention", "blocks.*.ffn"),
            held=held_plan(shape),
            kv_width=shape.head_width if shape.latent is None else 0,
            attention=("blocks.*.attention.core",),
            positions="positions",
            experts=() if mixture is None else ("blocks.*.ffn.experts",),
            active=1.0 if mixture is None else mixture.per_token / mixture.experts,
            first=("embedding", *positions, "dropout"),
            last=("norm", "head"),
            shared=(("embedding", "head"),) if shape.tied else (),
        )


class TiedHead(nn.Module):
    """The output layer that borrows the embedding's weight at each call.

    It holds no parameter: one shared by two modules would come apart in `to_empty` and in sharding.
    """

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight)
