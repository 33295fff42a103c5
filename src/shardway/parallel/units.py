"""Which submodules are one unit of sharding, compilation and recompute.

Invariant: units do not contain each other. A model's own plan decides; without one, the repeated parts of the model
do. This module must not change the model.
"""

from __future__ import annotations

from torch import nn

from shardway.models.contract import ModelPlan, match_modules


def find_units(model: nn.Module, plan: ModelPlan | None) -> list[nn.Module]:
    """The units of a model, in the order of its modules; empty for one that has no repeated part.

    Without a plan these are the members with parameters of the outermost `nn.ModuleList`s and `nn.Sequential`s.
    """
    if plan is not None:
        return [module for _, module in match_modules(model, plan.blocks)]
    return _repeated_parts(model)


def _repeated_parts(module: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            found += [part for part in child.children() if any(True for _ in part.parameters())]
        else:
            found += _repeated_parts(child)
    return found
