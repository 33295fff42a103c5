"""Where a model is cut into pipeline stages, and which part of it each rank keeps.

Invariant: stages follow one another as in the whole model, every module with parameters is in exactly one, and names do
not change. This module must not run a stage.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import nn

from shardway.errors import UserError
from shardway.models.contract import ModelPlan, canonical_name, match_modules


@dataclass(frozen=True)
class Cut:
    """The names of the modules of each stage, first stage first."""

    stages: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        return len(self.stages)


@dataclass(frozen=True)
class Stage:
    """One stage of this rank: its number in the whole pipeline, and a view of the model that shows it alone."""

    index: int
    module: nn.Module


def plan_cut(model: nn.Module, plan: ModelPlan, stages: int, split: Sequence[int] = ()) -> Cut:
    """Cut a whole model into stages of `split` blocks each, or balanced by cost.

    Raises UserError for a model that does not say where it may be cut, that shares weights between its ends, or has
    fewer blocks than stages.
    """
    _check_can_be_cut(model, plan)
    blocks = match_modules(model, plan.blocks)
    if split:
        counts = list(split)
    else:
        first, last = (sum(_cost(m, plan) for _, m in match_modules(model, names)) for names in (plan.first, plan.last))
        counts = balance([_cost(block, plan) for _, block in blocks], stages, first, last)
    if len(counts) != stages or sum(counts) != len(blocks):
        raise UserError(
            f"parallel.pp_split = {list(counts)} gives {sum(counts)} blocks to {len(counts)} stages; "
            f"the model has {len(blocks)} blocks, and there are {stages} stages."
        )
    names = [name for name, _ in blocks]
    edges = list(accumulate(counts, initial=0))
    parts = [names[start:end] for start, end in pairwise(edges)]
    parts[0] = [*plan.first, *parts[0]]
    parts[-1] = [*parts[-1], *plan.last]
    cut = Cut(tuple(map(tuple, parts)))
    _check_no_weight_is_in_two_stages(model, cut)
    return cut


def keep_stages(model: nn.Module, cut: Cut, indices: Sequence[int]) -> list[Stage]:
    """Remove from `model` what belongs to other stages, and return a view of each of these stages.

    A view shares parameters with the model; it differs in which children it shows. Raises UserError where these
    stages have no weight at all.
    """
    named = {name for part in cut.stages for name in part}
    _remove(model, "", named - {name for index in indices for name in cut.stages[index]})
    if next(model.parameters(), None) is None:
        raise UserError(
            f"a rank of the pipeline would hold no weight of {type(model).__name__} (its stages, of {len(cut)}: "
            f"{', '.join(map(str, indices))}).\n  To do: give it a block in parallel.pp_split, or lower parallel.pp."
        )
    return [Stage(index, _view(model, "", named - set(cut.stages[index]))) for index in indices]


def balance(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> list[int]:
    """How many consecutive blocks each stage gets, so that the dearest stage is as cheap as can be.

    `first` and `last` are what the ends cost besides their blocks. Each stage gets a block at least. Among equal
    maxima the sum of squares decides, so that the rest is even as well. Raises UserError for fewer blocks than stages.
    """
    if len(costs) < stages:
        raise UserError(
            f"{len(costs)} blocks cannot be cut into {stages} stages.\n"
            f"  To do: lower parallel.pp or parallel.pp_stages_per_rank to at most {len(costs)} stages together."
        )
    sums = list(accumulate(costs, initial=0.0))

    def cost(stage: int, start: int, end: int) -> float:
        ends = (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)
        return sums[end] - sums[start] + ends

    # best[end]: (dearest stage, sum of squares, counts) of the stages so far over the first `end` blocks
    best = {end: (cost(0, 0, end), cost(0, 0, end) ** 2, [end]) for end in range(1, len(costs) + 1)}
    for stage in range(1, stages):
        following = {}
        for end in range(stage + 1, len(costs) + 1):
            options = (
                (
                    max(best[start][0], cost(stage, start, end)),
                    best[start][1] + cost(stage, start, end) ** 2,
                    [*best[start][2], end - start],
                )
                for start in range(stage, end)
            )
            following[end] = min(options)
        best = following
    return best[len(costs)][2]


def _check_can_be_cut(model: nn.Module, plan: ModelPlan) -> None:
    kind = type(model).__name__
    if not plan.last or not plan.blocks:
        raise UserError(
            f"parallel.pp cuts a model between its blocks, and the plan of {kind} does not say what comes after them.\n"
            "  To do: name `blocks`, `first` and `last` in its plan, or set parallel.pp = 1."
        )
    if plan.shared:
        pairs = ", ".join(f"{one} and {other}" for one, other in plan.shared)
        raise UserError(
            f"{pairs} of {kind} share a weight and would be in different stages of a pipeline.\n"
            "  To do: do not tie them (model.tied = false), or set parallel.pp = 1."
        )
    named = tuple(f"{name}." for name, _ in match_modules(model, (*plan.first, *plan.blocks, *plan.last)))
    strays = [name for name, _ in model.named_parameters() if not canonical_name(name).startswith(named)]
    if strays:
        raise UserError(
            f"the parameters {', '.join(strays)} of {kind} are in none of the modules that its plan names as `first`, "
            "`blocks` or `last`, so a pipeline has no stage for them.\n  To do: name their modules in the plan."
        )


def _check_no_weight_is_in_two_stages(model: nn.Module, cut: Cut) -> None:
    """Also one that a plan does not declare as `shared`: each stage would go on with a weight of its own."""
    stage_of = {name: index for index, part in enumerate(cut.stages) for name in part}
    seen: dict[int, tuple[str, int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        stage = next(index for part, index in stage_of.items() if canonical_name(name).startswith(f"{part}."))
        first, first_stage = seen.setdefault(id(parameter), (name, stage))
        if stage != first_stage:
            raise UserError(
                f"{first} and {name} of {type(model).__name__} are one weight, and would be in stages {first_stage} "
                f"and {stage} of a pipeline.\n  To do: give each a weight of its own, or set parallel.pp = 1."
            )


def _cost(module: nn.Module, plan: ModelPlan) -> float:
    """Multiplications a token: the elements of its matrices; a lookup costs nothing, experts what a token uses."""
    experts = {id(p) for _, part in match_modules(module, _below(plan.experts, plan.blocks)) for p in part.parameters()}
    tables = {id(p) for part in module.modules() if isinstance(part, nn.Embedding) for p in part.parameters()}
    matrices = [p for p in module.parameters() if p.dim() > 1 and id(p) not in tables]
    return sum(p.numel() * (plan.active if id(p) in experts else 1.0) for p in matrices)


def _below(patterns: Iterable[str], blocks: Iterable[str]) -> list[str]:
    """Patterns of modules inside a block, as seen from the block."""
    depths = {block.count(".") + 1 for block in blocks}
    return [
        ".".join(pattern.split(".")[depth:]) for pattern in patterns for depth in depths if pattern.count(".") >= depth
    ]


def _remove(module: nn.Module, prefix: str, unwanted: set[str]) -> None:
    for name, child in list(module._modules.items()):
        if child is None:
            continue
        if prefix + name in unwanted:
            _drop(module, name)
        else:
            _remove(child, f"{prefix}{name}.", unwanted)


def _view(module: nn.Module, prefix: str, unwanted: set[str]) -> nn.Module:
    """A shallow copy without the unwanted children; hooks are its own, parameters are shared."""
    view = copy.copy(module)
    for attribute, value in vars(module).items():
        if isinstance(value, dict) and attribute not in ("_parameters", "_buffers"):
            view.__dict__[attribute] = copy.copy(value)
    for name, child in list(view._modules.items()):
        full = prefix + name
        if child is None:
            continue
        if full in unwanted:
            _drop(view, name)
        elif any(other.startswith(f"{full}.") for other in unwanted):
            view._modules[name] = _view(child, f"{full}.", unwanted)
    return view


def _drop(module: nn.Module, name: str) -> None:
    if isinstance(module, nn.ModuleDict | nn.ModuleList):
        del module._modules[name]
    else:
        module._modules[name] = None
