"""The one ordered function that makes a model parallel, and the models that it refuses.

Invariants:
- All problems of a model are reported at once, each with the module or tensor and the remedy.
- A method that works on the shards is left as it is (for example one that clips weights in place). Only a method that
  torch refuses for mixing shards with plain tensors runs with gathered weights, from then on; like a forward pass it is
  called on all ranks.
- The order is written here and nowhere else: cut (pipeline), expert, tensor and sequence, context, recompute,
  precision, compile, shard, materialise and initialise, replicate. The resulting model computes the same loss whatever
  the degrees.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from shardway.errors import Problem, UserError, check_no_problems
from shardway.layout import needs_sharding, stages_of_rank
from shardway.models.contract import ModelPlan, find_init_weights, find_plan, match_modules
from shardway.parallel.axes.context import Chunks, apply_context
from shardway.parallel.axes.expert import apply_experts, connect_routers
from shardway.parallel.axes.pipeline import Pipeline, Stage, check_schedule, hide_forward, keep_stages, plan_cut
from shardway.parallel.axes.replicate import ReplicatedModule, broadcast_from_first, give_back, replicate
from shardway.parallel.axes.shard import shard
from shardway.parallel.axes.tensor import apply_tensor
from shardway.parallel.blocks import (
    DropoutSeeds,
    apply_compile,
    apply_recompute,
    find_units,
    seed_dropout,
)
from shardway.parallel.mesh import Mesh
from shardway.parallel.precision import Precision, apply_float8, apply_formats
from shardway.runfile.schema import ParallelSection, RecomputeSection

# --- the ordered function


@dataclass(frozen=True)
class ApplyOptions:
    """What the run file says of how a model becomes parallel. `fill` gives a model from the meta device its values:
    None calls its own `init_weights(seed)`. `wrap_copies` False leaves it to the caller to keep copies alike."""

    parallel: ParallelSection
    precision: Precision
    recompute: RecomputeSection = field(default_factory=RecomputeSection)
    compile: str = "off"
    channels_last: bool = False
    seed: int = 0
    fill: Callable[[nn.Module], None] | None = None
    wrap_copies: bool = True


@dataclass(frozen=True)
class ParallelModel:
    """A model on a mesh.

    `call` is what a forward pass calls, `module` what has this rank's parameters by their original names (the same
    thing but for replicas). With a `pipeline`, neither is called. `partial` names the parameters whose gradients are
    summed over the tensor axis once a step; `chunks` is what this rank takes of each sequence.
    """

    module: nn.Module
    call: nn.Module
    mesh: Mesh
    pipeline: Pipeline | None = None
    partial: frozenset[str] = field(default_factory=frozenset)
    chunks: Chunks = field(default_factory=lambda: Chunks(0, 1))
    splits_logits: bool = False
    dropout: DropoutSeeds | None = None

    @property
    def given(self) -> nn.Module:
        """What a script gets: its own module, with its own attributes and methods, if possible."""
        return give_back(self.call) if isinstance(self.call, ReplicatedModule) else self.call

    @property
    def answers_for_loss(self) -> bool:
        """Whether the losses that this rank computes are to be counted: no rank before it has the same."""
        has_them = self.pipeline is None or self.pipeline.has_last
        return has_them and self.mesh.coordinate("tp") == 0


def apply_parallelism(model: nn.Module, mesh: Mesh, device: torch.device, options: ApplyOptions) -> ParallelModel:
    """Make a model parallel on this mesh, in place where it can be.

    A model on the meta device is materialised and filled; a model that already has weights keeps those of rank 0.
    Raises UserError where the model cannot be initialised or split.
    """
    check_takes(model, 1 if mesh.devices is None else mesh.devices.size(), device)
    on_meta = _check_device(model, options)
    parallel, precision, plan = options.parallel, options.precision, find_plan(model)
    pp, tp, cp, ep = (mesh.degree(axis) for axis in ("pp", "tp", "cp", "ep"))
    split = [f"parallel.{axis} = {mesh.degree(axis)}" for axis in ("pp", "tp", "cp", "ep") if mesh.degree(axis) > 1]
    if plan is None and split:
        raise UserError(
            f"{', '.join(split)}: {type(model).__name__} has no plan() that says how it splits.\n"
            "  To do: give it one (shardway.models.contract.ModelPlan), or use dp_replicate and dp_shard, which take "
            "any model."
        )
    if not on_meta:
        model.to(device)
        broadcast_from_first(model, mesh)
    facts = plan or ModelPlan()
    all_units = find_units(model, plan)

    stages = [Stage(0, model)]
    if pp > 1:
        check_schedule(parallel.pp_schedule, device)
        per_rank = int(parallel.pp_stages_per_rank)
        cut = plan_cut(model, facts, pp * per_rank, parallel.pp_split)
        stages = keep_stages(model, cut, stages_of_rank(mesh.coordinate("pp"), pp, per_rank, parallel.pp_schedule))
    if ep > 1:
        apply_experts(model, facts, mesh)
    names: frozenset[str] = frozenset()
    if tp > 1:
        keys = {"sequence": parallel.tp_sequence, "split_logits": parallel.tp_loss}
        names = apply_tensor(model, facts, mesh.part("tp"), **keys)
    chunks = Chunks(mesh.coordinate("cp"), cp)
    if cp > 1:
        apply_context(model, facts, mesh.group("cp"), parallel.cp_method)
        connect_routers(model, mesh)
    split_sequence = parallel.tp_sequence and "sequence" in facts.tensor.values()
    if facts.positions and (cp > 1 or pp > 1):
        _give_positions(stages, facts.positions, chunks, tp if split_sequence else 1)

    units = find_units(model, plan)
    part = chunks.place * tp + mesh.coordinate("tp") if split_sequence else chunks.place
    dropout = seed_dropout([stage.module for stage in stages], units, DropoutSeeds(options.seed, part))
    apply_recompute(units, options.recompute)
    for stage in stages:
        apply_formats(stage.module, precision.weights_dtype, channels_last=options.channels_last)
    if precision.float8 is not None:
        edges = (all_units[0], all_units[-1]) if all_units else ()
        apply_float8(model, units, precision.float8, device, plan, edges)
    apply_compile(model, units, options.compile)

    if needs_sharding(mesh.layout):
        for stage in stages:
            experts = [module for _, module in match_modules(stage.module, facts.experts)] if ep > 1 else []
            shard(stage.module, units, experts, mesh, parallel, precision, device)
    if on_meta:
        _materialise(model, [stage.module for stage in stages], device, options)
    if pp == 1:
        offer_methods(model)
    splits_logits = tp > 1 and parallel.tp_loss and "logits" in facts.tensor.values()
    whole = ParallelModel(
        model, model, mesh, partial=names, chunks=chunks, splits_logits=splits_logits, dropout=dropout
    )
    if pp > 1:
        hide_forward(model)
        for stage in stages:
            _autocast_forward(stage.module, precision, device)
        total = pp * len(stages)
        return replace(whole, pipeline=Pipeline(stages, total, parallel.pp_schedule, mesh.group("pp"), device))
    if options.wrap_copies and mesh.degree("dp_replicate") > 1 and not needs_sharding(mesh.layout):
        return replace(whole, call=replicate(model, mesh, parallel))
    return whole


def _give_positions(stages: Sequence[Stage], keyword: str, chunks: Chunks, sequence_parts: int) -> None:
    """Give each stage the positions of its tokens in their sequence, which its input lacks.

    Between stages the sequence may be split over the tensor axis as well; positions are those of the whole of it. A
    caller's own positions, as those of packed documents, stay.
    """

    def give(parts: int, _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if keyword in named:
            return inputs, named
        length = inputs[0].shape[1] * parts
        return inputs, {**named, keyword: chunks.positions(length, inputs[0].device)}

    for stage in stages:
        parts = 1 if stage.index == 0 else sequence_parts
        stage.module.register_forward_pre_hook(partial(give, parts), with_kwargs=True)


def _autocast_forward(module: nn.Module, precision: Precision, device: torch.device) -> None:
    """A schedule runs forward and backward passes in turn; only the former may be under autocast."""
    forward = module.forward

    def run(*inputs: Any, **named: Any) -> Any:
        with precision.autocast(device):
            return forward(*inputs, **named)

    module.forward = run


def _check_device(model: nn.Module, options: ApplyOptions) -> bool:
    """Whether the model is on the meta device; UserError if only a part of it is, or if it cannot leave it."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    on_meta = [name for name, tensor in tensors if tensor.is_meta]
    if on_meta and len(on_meta) < len(tensors):
        raise UserError(
            f"{type(model).__name__} is partly on the meta device ({on_meta[0]} and {len(on_meta) - 1} more are, of "
            f"{len(tensors)} tensors).\n  To do: build the whole model under one `with torch.device(...)`."
        )
    if on_meta and options.fill is None and find_init_weights(model) is None:
        raise UserError(
            f"{type(model).__name__} was built on the meta device and has no init_weights(seed) that fills it.\n"
            "  To do: build it on a real device, or give it that method."
        )
    return bool(on_meta)


def _materialise(model: nn.Module, parts: Sequence[nn.Module], device: torch.device, options: ApplyOptions) -> None:
    ties = _find_ties(model)  # `to_empty` makes a tensor of its own for each name
    for part in parts:
        part.to_empty(device=torch.device("cpu") if options.parallel.cpu_offload else device)
    for name, first in ties.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, model.get_parameter(first))
    if options.fill is not None:
        options.fill(model)
    else:
        model.init_weights(options.seed)  # type: ignore[operator]


def _find_ties(model: nn.Module) -> dict[str, str]:
    """Further names of a weight that a model uses several times -> its first."""
    first: dict[int, str] = {}
    names = [(name, first.setdefault(id(p), name)) for name, p in model.named_parameters(remove_duplicate=False)]
    return {name: earliest for name, earliest in names if name != earliest}


# --- models that torch's wrappers do not take

_WRAPPERS = (DistributedDataParallel, DataParallel, FullyShardedDataParallel, FSDPModule)


def check_takes(model: nn.Module, ranks: int, device: torch.device) -> None:
    """Raise UserError where a model cannot be made parallel over so many ranks, whatever the layout."""
    problems: list[Problem] = []
    tensors = (*model.named_parameters(), *model.named_buffers())
    modules = [(name or "the model", module) for name, module in model.named_modules()]
    wrapped = ((name, kind.__name__) for name, each in modules for kind in _WRAPPERS if isinstance(each, kind))
    split = (name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor))
    if (found := next(wrapped, None)) is not None:
        remedy = "hand run.shard the model itself; `parallel` of the run file says how it is shared"
        problems.append(Problem(found[0], f"is in the hands of torch's {found[1]} already", remedy=remedy))
    elif (first := next(split, None)) is not None:
        remedy = "hand run.shard the model as it was before; `parallel` of the run file says how it is split"
        problems.append(Problem(first, "is a DTensor already", remedy=remedy))
    for name, tensor in tensors:
        if is_lazy(tensor):
            remedy = "call the model once with a batch before run.shard(model)"
            problems.append(Problem(name, "of a lazy module has no shape yet", remedy=remedy))
    given = f"what run.shard was given, a {type(model).__name__}"
    check_no_problems(given, problems)

    if next(model.parameters(), None) is None:
        remedy = "call it as it is, without run.shard; it is nothing that an optimizer could train"
        problems.append(Problem("the model", "has no parameters", remedy=remedy))
    for name, tensor in tensors:
        if tensor.layout is not torch.strided:
            layout = str(tensor.layout).removeprefix("torch.")
            what = f"has the layout {layout}, which is neither sent between ranks nor saved"
            remedy = "keep its indices and values as buffers, or register it with persistent=False after run.shard"
            problems.append(Problem(name, what, remedy=remedy))
    for name, module in modules:
        if ranks > 1 and isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            what = "sparse=True: gradients with indices are not added up over ranks"
            problems.append(Problem(name, what, remedy="set sparse=False, or train it on one rank"))
        if ranks > 1 and device.type == "cpu" and isinstance(module, nn.SyncBatchNorm):
            what = "a SyncBatchNorm, which torch computes over several ranks on GPUs alone, is on a CPU"
            remedy = 'convert batch norms only where run.device.type is not "cpu"'
            problems.append(Problem(name, what, remedy=remedy))
    check_no_problems(given, problems)


def find_wrapper(model: nn.Module) -> str:
    """The class of torch's that a script has put around a model that is parallel already: it would average or shard a
    second time. Empty if there is none; our own wrapper of replicas is none."""
    found = (kind for kind in _WRAPPERS if isinstance(model, kind) and not isinstance(model, ReplicatedModule))
    return next((kind.__name__ for kind in found), "")


# --- methods of a sharded model beside forward

MIXED = "got mixed torch.Tensor and DTensor"
"""torch's message if a weight is used that is not gathered."""

_LIBRARIES = ("torch.", "transformers.", "shardway.")
_NOT_OFFERED = frozenset((*dir(nn.Module), "plan", "init_weights"))

_TRIED = "_shardway_tried"
"""Attribute of a model while one of its methods is tried on shards."""


def offer_methods(model: nn.Module) -> None:
    """Let the public methods that a sharded model's class defines work as on one rank."""
    if not isinstance(model, FSDPModule):
        return
    kinds = [kind for kind in type(model).__mro__ if kind is not FSDPModule]
    names = [
        name
        for kind in kinds
        if not f"{kind.__module__}.".startswith(_LIBRARIES)
        for name, value in vars(kind).items()
        if inspect.isfunction(value) and not name.startswith("_") and name not in _NOT_OFFERED
    ]
    for name in dict.fromkeys(names):
        model.__dict__[name] = _gathering(model, name, getattr(model, name))
    if callable(save := getattr(model, "save_pretrained", None)):
        model.__dict__["save_pretrained"] = _saving_whole(model, save)


def _gathering(model: Any, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that gathers once it has been refused for shards.

    A method within another one is a part of that: gathered alone, it would leave whole weights behind it, and the rest
    would compute with them unseen by FSDP.
    """
    gathered: Callable[..., Any] | None = None

    @functools.wraps(method)
    def call(*inputs: Any, **named: Any) -> Any:
        nonlocal gathered
        within = model._get_fsdp_state()._state_ctx.iter_forward_root is not None  # a forward pass
        if within or _TRIED in model.__dict__:
            return method(*inputs, **named)
        if gathered is None:
            generators = torch.get_rng_state()
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # whole weights that a pass has left would hide that the method needs them
            model.__dict__[_TRIED] = True
            try:
                return method(*inputs, **named)
            except RuntimeError as error:
                if MIXED not in str(error):
                    raise
            finally:
                del model.__dict__[_TRIED]
            torch.set_rng_state(generators)
            del model.__dict__[name]
            register_fsdp_forward_method(model, name)
            gathered, model.__dict__[name] = model.__dict__[name], call
        return gathered(*inputs, **named)

    return call


def _saving_whole(model: nn.Module, save: Callable[..., Any]) -> Callable[..., Any]:
    """`save_pretrained` of the Hugging Face library, which takes no shards: rank 0 writes what all have gathered."""

    @functools.wraps(save)
    def call(*inputs: Any, state_dict: dict[str, Any] | None = None, **named: Any) -> Any:
        if state_dict is None:
            state_dict = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            for name, first in _find_ties(model).items():
                if first in state_dict:  # on rank 0
                    state_dict[name] = state_dict[first]
        result = save(*inputs, state_dict=state_dict, **named) if dist.get_rank() == 0 else None
        dist.barrier()
        return result

    return call
