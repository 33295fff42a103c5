"""Which parameters are updated in which way.

Invariant: every trainable parameter is in one group, once, and a group is never empty. This module must not look at
values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardway.errors import UserError
from shardway.models.contract import ModelPlan, canonical_name, matches
from shardway.parallel.units import find_units

Groups = list[dict[str, Any]]
"""Parameter groups as `torch.optim` takes them."""


def decay_groups(model: nn.Module, weight_decay: float) -> Groups:
    """Two parameter groups: matrices with weight decay, everything of fewer than two dims without."""
    return _split_by_decay(_trainable(model), weight_decay)


def muon_groups(model: nn.Module, weight_decay: float) -> tuple[list[nn.Parameter], Groups]:
    """The matrices of the model's blocks, and groups of everything else.

    A matrix has two dims, or three where the plan calls its module one of experts. Embeddings and the output layer
    are no such matrices, wherever they are, nor are the kernels of convolutions. Raises UserError for a model without
    a plan that has none.
    """
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    plan = _plan_of(inner)
    inside = {parameter for unit in find_units(inner, plan) for parameter in unit.parameters()}
    matrices = {
        parameter
        for name, module in inner.named_modules()
        for parameter in module.parameters(recurse=False)
        if parameter in inside and _is_matrix(canonical_name(name), module, parameter, plan or ModelPlan())
    }
    if not matrices and plan is None:
        raise UserError(
            f'optim.name = "muon" is for the matrices of a model\'s blocks, and {type(model).__name__} has none that '
            'are known.\n  To do: name the blocks in a plan() of the model, or choose optim.name = "adamw".'
        )
    trainable = _trainable(inner)
    others = [parameter for parameter in trainable if parameter not in matrices]
    return [parameter for parameter in trainable if parameter in matrices], _split_by_decay(others, weight_decay)


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _split_by_decay(parameters: Sequence[nn.Parameter], weight_decay: float) -> Groups:
    matrices = [parameter for parameter in parameters if parameter.dim() >= 2]
    vectors = [parameter for parameter in parameters if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _plan_of(model: nn.Module) -> ModelPlan | None:
    """The plan of a model that may be a part of a whole one (a pipeline stage), which `find_plan` would refuse."""
    offers = callable(getattr(type(model), "plan", None))
    return model.plan() if offers else None  # type: ignore[operator]


def _is_matrix(name: str, module: nn.Module, parameter: torch.Tensor, plan: ModelPlan) -> bool:
    if any(matches(name, pattern) for pattern in plan.experts):
        return parameter.dim() == 3
    kinds = [split for pattern, split in plan.tensor.items() if matches(name, pattern)]
    is_table = isinstance(module, nn.Embedding) or "vocabulary" in kinds or "logits" in kinds
    return parameter.dim() == 2 and not is_table
