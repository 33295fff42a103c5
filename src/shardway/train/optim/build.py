"""Builds the optimizer of the [optim] section of a run file.

Invariant: each name in the run file is one constructor here. This module must not contain a formula.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from shardway.runfile.schema import OptimSection
from shardway.train.optim.adafactor import Adafactor
from shardway.train.optim.adamw import SGD, AdamW, build_adamw8bit
from shardway.train.optim.base import Numerics, decay_groups, muon_groups
from shardway.train.optim.muon import Muon


def build_optimizer(section: OptimSection, model: nn.Module, peak_lr: float) -> torch.optim.Optimizer:
    """The optimizer of a run file over the trainable parameters of a model.

    Groups may have rates of their own; each is the peak of its group. Raises UserError where the model has nothing
    that the optimizer is for, or a package is missing.
    """
    return OPTIMIZERS[section.name](section, model, peak_lr)


def _adamw(section: OptimSection, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    groups = decay_groups(model, section.weight_decay)
    return AdamW(groups, {"lr": lr, "betas": _betas(section), "eps": section.eps}, _numerics(section))


def _sgd(section: OptimSection, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    groups = decay_groups(model, section.weight_decay)
    defaults = {"lr": lr, "momentum": section.momentum, "nesterov": section.nesterov}
    return SGD(groups, defaults, _numerics(section))


def _adafactor(section: OptimSection, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return Adafactor(decay_groups(model, section.weight_decay), {"lr": lr}, Numerics())


def _adamw8bit(section: OptimSection, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return build_adamw8bit(decay_groups(model, section.weight_decay), lr, _betas(section), section.eps)


def _muon(section: OptimSection, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    matrices, others = muon_groups(model, section.weight_decay)
    block_matrices = {
        "params": matrices,
        "muon": True,
        "lr": lr * section.muon_lr_factor,
        "weight_decay": section.weight_decay,
        "momentum": section.muon_momentum,
        "iterations": section.muon_iterations,
        "adjust": section.muon_adjust,
    }
    defaults = {"muon": False, "lr": lr, "betas": _betas(section), "eps": section.eps}
    # The rate of the first group is what a run shows. A pipeline stage may have no block at all.
    return Muon([*others, *([block_matrices] if matrices else [])], defaults, _numerics(section))


def _betas(section: OptimSection) -> tuple[float, float]:
    first, second = section.betas
    return first, second


def _numerics(section: OptimSection) -> Numerics:
    return Numerics(section.kernel, torch.bfloat16 if section.state_dtype == "bf16" else None)


OPTIMIZERS: dict[str, Callable[[OptimSection, nn.Module, float], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "sgd": _sgd,
    "adafactor": _adafactor,
    "adamw8bit": _adamw8bit,
    "muon": _muon,
}
"""Name in the run file -> constructor."""
