"""The dense feed-forward layer.

Invariant: its output is linear in what `down` holds, so that parts of the hidden features give parts of a sum. This
module must not know of experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from shardway.models.shapes import BlockShape


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, arXiv:2002.05202): down(silu(gate(x)) * up(x)), or down(gelu(up(x)))."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        gated, bias = shape.activation == "swiglu", shape.bias
        # The exact function, or the approximation that GPT-2 was trained with.
        self.approximate = "tanh" if shape.activation == "gelu_tanh" else "none"
        self.gate = nn.Linear(shape.dim, shape.ffn_dim, bias=bias) if gated else None
        self.up = nn.Linear(shape.dim, shape.ffn_dim, bias=bias)
        self.down = nn.Linear(shape.ffn_dim, shape.dim, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        if self.gate is None:
            return self.down(F.gelu(hidden, approximate=self.approximate))
        return self.down(F.silu(self.gate(x)) * hidden)
