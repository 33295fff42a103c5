"""AdamW with 8-bit states (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861).

Invariant: torchao is imported when it is asked for, and only here. This module must not quantize anything itself.

A block of 256 numbers is quantized together, and blocks are cut from what a rank holds. So a checkpoint fits another
layout only where that cuts a parameter between blocks too (torchao raises ValueError elsewhere), and states of parts
below 4096 numbers, which stay in fp32, are quantized when they come to a larger part.
"""

from __future__ import annotations

from typing import Any

import torch

from shardway.errors import UserError
from shardway.train.optim.groups import Groups


def build_adamw8bit(groups: Groups, lr: float, betas: tuple[float, float], eps: float) -> torch.optim.Optimizer:
    """torchao's AdamW8bit, with a learning rate that may be set to a number. Raises UserError without torchao."""
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise UserError(
            f'optim.name = "adamw8bit" needs torchao, which cannot be imported: {error}\n'
            '  To do: pip install "shardway[float8]", or choose optim.name = "adamw" with '
            'optim.state_dtype = "bf16", which takes half the memory of fp32 states and needs nothing.'
        ) from None
    optimizer: torch.optim.Optimizer = AdamW8bit(groups, lr=lr, betas=betas, eps=eps)
    optimizer.register_step_pre_hook(_make_rates_tensors)
    return optimizer


def _make_rates_tensors(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Its update is compiled, and a number would be compiled into it anew at every step of the schedule."""
    for group in optimizer.param_groups:
        if not isinstance(group["lr"], torch.Tensor):
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32)
