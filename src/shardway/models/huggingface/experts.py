"""A mixture's feed-forward block with the interface that the expert axis needs.

Invariant: the numbers are those of the library's block with SwiGLU experts; gate and up projections, which the library
keeps in one stack, are apart, so that each splits by columns. This module must not know how tokens travel between
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardway.models.experts import Experts
from shardway.models.huggingface.pieces import Arrangement, Shape, keep_name, part_of, stack


class MixtureBlock(nn.Module):
    """The library's router (and shared expert, where there is one) around experts that take sorted tokens.

    [batch, seq, dim] -> the same.
    """

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.gate = block.gate
        experts, dim, hidden = block.experts.down_proj.shape
        with block.experts.down_proj.device:
            self.experts = Experts(experts, dim, hidden)
        self.shared_expert: nn.Module | None = getattr(block, "shared_expert", None)
        self.shared_expert_gate: nn.Module | None = getattr(block, "shared_expert_gate", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        _, weights, chosen = self.gate(tokens)
        y = self._mix(tokens, weights, chosen)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            y = y + torch.sigmoid(self.shared_expert_gate(tokens)) * self.shared_expert(tokens)
        return y.view_as(x)

    def _mix(self, tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """The weighted sum of each token's experts; `weights` and `chosen` are [tokens, top_k]."""
        top_k = chosen.shape[-1]
        order = chosen.flatten().argsort(stable=True)
        owners = order // top_k
        counts = torch.bincount(chosen.flatten(), minlength=self.gate.num_experts)
        outputs = self.experts(tokens[owners], counts) * weights.flatten()[order, None].type_as(tokens)
        return torch.zeros_like(tokens).index_add(0, owners, outputs)


@dataclass(frozen=True)
class ExpertNames:
    """What a family calls a mixture's block and an expert's matrices in its files, where each expert has its own."""

    block: str
    gate: str
    up: str
    down: str

    def __call__(self, name: str, shape: Shape) -> Sequence[Arrangement]:
        """Files of one tensor per expert, and files of the stacks that transformers computes with."""
        owner, _, leaf = name.rpartition(".")
        if owner.endswith(".mlp.experts"):
            outside = f"{owner.removesuffix('mlp.experts')}{self.block}.experts"
            each = [f"{outside}.{index}.{getattr(self, leaf)}.weight" for index in range(shape[0])]
            return stack(each, shape), _stacked(f"{owner}.", leaf, shape)
        renamed = name.replace(".mlp.gate.", f".{self.block}.gate.")
        return keep_name(renamed, shape), keep_name(name, shape)


def _stacked(prefix: str, leaf: str, shape: Shape) -> Arrangement:
    if leaf == "down":
        return keep_name(f"{prefix}down_proj", shape)
    return part_of(f"{prefix}gate_up_proj", shape, dim=1, index=("gate", "up").index(leaf), parts=2)
