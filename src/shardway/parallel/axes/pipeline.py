"""The pipeline axis: the cut of a model into stages, and schedules of their micro-batches (GPipe, arXiv:1811.06965).

Invariants:
- Stages follow one another as in the whole model, every module with parameters is in exactly one, and names do not
  change.
- All micro-batches of a pass have the same shape, and gradients are the plain sum over them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from shardway.compat import runs_v_schedules
from shardway.errors import Bug, UserError
from shardway.models.contract import ModelPlan, canonical_name, match_modules

# --- the cut into stages


Cut = tuple[tuple[str, ...], ...]
"""The names of the modules of each stage, first stage first."""


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
    blocks = match_modules(model, plan.blocks)
    if split:
        counts = list(split)
    else:
        # Multiplications a token: elements of matrices; a lookup costs nothing, experts what a token uses.
        experts = {p for _, part in match_modules(model, plan.experts) for p in part.parameters()}
        tables = {p for part in model.modules() if isinstance(part, nn.Embedding) for p in part.parameters()}

        def cost(module: nn.Module) -> float:
            matrices = [p for p in module.parameters() if p.dim() > 1 and p not in tables]
            return sum(p.numel() * (plan.active if p in experts else 1.0) for p in matrices)

        first, last = (sum(cost(m) for _, m in match_modules(model, names)) for names in (plan.first, plan.last))
        counts = balance([cost(block) for _, block in blocks], stages, first, last)
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
    cut = tuple(map(tuple, parts))
    # Also one that a plan does not declare as `shared`: each stage would go on with a weight of its own.
    stage_of = {name: index for index, part in enumerate(cut) for name in part}
    seen: dict[int, tuple[str, int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        stage = next(index for part, index in stage_of.items() if canonical_name(name).startswith(f"{part}."))
        first_name, first_stage = seen.setdefault(id(parameter), (name, stage))
        if stage != first_stage:
            raise UserError(
                f"{first_name} and {name} of {kind} are one weight, and would be in stages {first_stage} "
                f"and {stage} of a pipeline.\n  To do: give each a weight of its own, or set parallel.pp = 1."
            )
    return cut


def keep_stages(model: nn.Module, cut: Cut, indices: Sequence[int]) -> list[Stage]:
    """Remove from `model` what belongs to other stages, and return a view of each of these stages.

    A view shares parameters with the model; it differs in which children it shows. Raises UserError where these
    stages have no weight at all.
    """
    named = {name for part in cut for name in part}
    _remove(model, "", named - {name for index in indices for name in cut[index]})
    if next(model.parameters(), None) is None:
        raise UserError(
            f"a rank of the pipeline would hold no weight of {type(model).__name__} (its stages, of {len(cut)}: "
            f"{', '.join(map(str, indices))}).\n  To do: give it a block in parallel.pp_split, or lower parallel.pp."
        )
    return [Stage(index, _view(model, "", named - set(cut[index]))) for index in indices]


def balance(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> list[int]:
    """How many consecutive blocks each stage gets, so that the most expensive stage is as cheap as possible.

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

    # best[end]: (most expensive stage, sum of squares, counts) of the stages so far over the first `end` blocks
    best = {end: (cost(0, 0, end), cost(0, 0, end) ** 2, [end]) for end in range(1, len(costs) + 1)}
    for stage in range(1, stages):
        following = {}
        for end in range(stage + 1, len(costs) + 1):
            options = []
            for start in range(stage, end):
                most, squares, before = best[start]
                own = cost(stage, start, end)
                options.append((max(most, own), squares + own**2, [*before, end - start]))
            following[end] = min(options)
        best = following
    return best[len(costs)][2]


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


# --- the schedules

LossOf = Callable[[torch.Tensor, int], torch.Tensor]
"""(output of the model for a micro-batch, its number) -> what is to be differentiated, 0-dim."""

SCHEDULES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "gpipe": ScheduleGPipe,
        "1f1b": Schedule1F1B,
        "interleaved": ScheduleInterleaved1F1B,
        "zero_bubble": ScheduleInterleavedZeroBubble,
        "zbv": ScheduleZBVZeroBubble,
    }
)
_ONE_STAGE = ("gpipe", "1f1b")
_FORWARD = ("F", "SEND_F", "RECV_F", "UNSHARD", "RESHARD")
"""Of the kinds of action of `torch.distributed.pipelining.schedules`, those that an evaluation needs."""


@dataclass
class Pipeline:
    """This rank's stages and the schedules that run them, made when the first inputs show their shape."""

    stages: Sequence[Stage]
    total_stages: int
    schedule: str
    group: dist.ProcessGroup
    device: torch.device
    _schedules: dict[Any, Any] = field(default_factory=dict)
    _loss_of: LossOf | None = None

    def __post_init__(self) -> None:
        for stage in self.stages:  # transports take nothing but contiguous memory, forward and backward
            stage.module.register_forward_pre_hook(_make_gradients_contiguous)
            stage.module.register_forward_hook(lambda module, inputs, output: output.contiguous())

    @property
    def has_first(self) -> bool:
        return self.stages[0].index == 0

    @property
    def has_last(self) -> bool:
        return any(stage.index == self.total_stages - 1 for stage in self.stages)

    def is_new_to(self, inputs: torch.Tensor, micro_batches: int, *, training: bool) -> bool:
        """Whether a pass of this shape is the first, in which torch runs stages once more to learn their shapes."""
        return (inputs.shape, micro_batches, training) not in self._schedules

    def run(
        self,
        inputs: torch.Tensor,
        micro_batches: int,
        loss_of: LossOf,
        *,
        training: bool,
        named: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """One pass: `inputs` [micro_batches x rows, ...] through all stages, `loss_of` for each output on the rank that
        has it, and in training all backward passes. Gradients add to what is there. `named`: arguments by name that
        every stage gets, tensors of them cut like inputs."""
        if self.is_new_to(inputs, micro_batches, training=training):
            self._schedules[inputs.shape, micro_batches, training] = self._make_schedule(micro_batches, training)
        schedule = self._schedules[inputs.shape, micro_batches, training]
        self._loss_of = loss_of
        arguments = (inputs,) if self.has_first else ()
        # torch cuts targets like inputs; numbers of micro-batches in their place let the caller find its own.
        numbers = torch.arange(micro_batches, device=self.device) if self.has_last else None
        step = schedule.step if training else schedule.eval
        losses: list[torch.Tensor] | None = [] if self.has_last else None
        step(*arguments, target=numbers, losses=losses, return_outputs=False, **named)
        self._loss_of = None

    def _make_schedule(self, micro_batches: int, training: bool) -> Any:
        stages = [
            PipelineStage(stage.module, stage.index, self.total_stages, self.device, group=self.group)
            for stage in self.stages
        ]
        one = self.schedule in _ONE_STAGE
        make = SCHEDULES[self.schedule]
        schedule = make(stages[0] if one else stages, micro_batches, loss_fn=self._loss, scale_grads=False)
        if not training and not one:
            # torch walks through backward passes in an evaluation too, and fails between two stages of one rank.
            actions = schedule.pipeline_order_with_comms
            for rank, own in actions.items():
                actions[rank] = [action for action in own if action.computation_type.value in _FORWARD]
        return schedule

    def _loss(self, output: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        if self._loss_of is None:
            raise Bug("a loss was asked for outside a pass")
        return self._loss_of(output, int(number))


def _make_gradients_contiguous(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    for x in inputs:
        if x.requires_grad:
            x.register_hook(torch.Tensor.contiguous)


def check_schedule(schedule: str, device: torch.device) -> None:
    """Raise UserError for a schedule that this torch cannot run on this device."""
    if schedule == "zbv" and not runs_v_schedules(device):
        raise UserError(
            f'parallel.pp_schedule = "zbv" needs torch 2.13 or later on a CPU; this is torch {torch.__version__}.\n'
            '  To do: update torch, or set parallel.pp_schedule = "zero_bubble".'
        )


def hide_forward(model: nn.Module) -> None:
    """A rank's part of a cut model cannot be called as a whole; say so instead of failing in the middle."""

    def refuse(*_: Any, **__: Any) -> torch.Tensor:
        raise UserError(
            "this rank holds some stages of the model alone (parallel.pp > 1), so it cannot be called.\n"
            "  To do: train with run.step(model, batch, loss_fn), which runs the whole pipeline."
        )

    model.forward = refuse
