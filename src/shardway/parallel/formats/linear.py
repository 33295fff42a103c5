"""Products of a linear layer with a weight that is handed in, whatever format the layer multiplies in.

Invariant: `linear_with(module, x, module.weight, module.bias)` equals `module(x)`, so that a region that computes with
the local part of a weight need not know formats. This module must not know meshes nor import torchao.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class FormattedLinear(nn.Linear):
    """A linear layer that multiplies in a format of its own.

    An existing `nn.Linear` becomes one by a change of its class, so that its name, parameters, hooks and whatever
    stands in for its `forward` stay.
    """

    def multiply(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [..., in] @ weight [out, in] transposed -> [..., out] in x's dtype."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear_with(self, x, self.weight, self.bias)


def linear_with(
    module: nn.Module, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """What the linear layer `module` computes of x [..., in], with this weight [out, in] and bias [out]."""
    if not isinstance(module, FormattedLinear):
        return F.linear(x, weight, bias)
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):  # the format is chosen here, not by the operator inside
        y = module.multiply(x, weight)
        return y if bias is None else y + bias.to(y.dtype)
