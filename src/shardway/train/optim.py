"""Optimizers by name.

Invariant: only matrices decay; norms, biases and other vectors do not. This module must not step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardway.runfile.schema import OptimSection

Groups = list[dict[str, Any]]


def build_optimizer(section: OptimSection, model: nn.Module, peak_lr: float) -> torch.optim.Optimizer:
    """The optimizer of a run file over the trainable parameters of a model."""
    return OPTIMIZERS[section.name](section, decay_groups(model, section.weight_decay), peak_lr)


def decay_groups(model: nn.Module, weight_decay: float) -> Groups:
    """Two parameter groups: matrices with weight decay, everything of fewer than two dims without."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trainable if parameter.dim() >= 2]
    vectors = [parameter for parameter in trainable if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _adamw(section: OptimSection, groups: Groups, lr: float) -> torch.optim.Optimizer:
    first, second = section.betas
    return torch.optim.AdamW(groups, lr=lr, betas=(first, second), eps=section.eps, fused=True)


def _sgd(section: OptimSection, groups: Groups, lr: float) -> torch.optim.Optimizer:
    # torch 2.13 knows no way to run SGD's fused kernel on sharded weights (AdamW's it does).
    sharded = any(isinstance(parameter, DTensor) for group in groups for parameter in group["params"])
    kernel = {"foreach": True} if sharded else {"fused": True}
    return torch.optim.SGD(groups, lr=lr, momentum=section.momentum, nesterov=section.nesterov, **kernel)


OPTIMIZERS: dict[str, Callable[[OptimSection, Groups, float], torch.optim.Optimizer]] = {"adamw": _adamw, "sgd": _sgd}
"""Name in the run file -> constructor; fused kernels where there are any, on CPU and CUDA."""
