"""The case that a run file describes: what the planner needs to price the run.

Invariant: every key of the run file that memory or time depend on is in the case, or `list_assumptions` has a sentence
on what replaces it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from shardway.errors import Problem, UserError, render_problems
from shardway.layout import AXES
from shardway.plan.case import Case, Degrees, EngineTraits, Precision, Recompute, find_engine
from shardway.plan.machine import Machine
from shardway.plan.shapes.architecture import Architecture
from shardway.plan.shapes.measured import Shape
from shardway.plan.shapes.section import shape_of_section
from shardway.resolve.applies import IMAGE_MODELS
from shardway.runfile.schema import ParallelSection, PrecisionSection, RecomputeSection, RunFile

ASSUMED_VOCAB = 32768
"""Vocabulary to assume before the data is opened: that of Llama 2's tokenizer, padded to a power of two."""

BETWEEN: Recompute = "products"
"""What the planner calls `recompute.mode = "selective"`: results of products and of attention are kept."""

_PRECISIONS: Mapping[str, Precision] = MappingProxyType({"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"})


def shape_of_run(values: RunFile, hf: Shape | None = None, sample: tuple[int, ...] | None = None) -> Architecture:
    """The shape of the model that a run trains, its [model] resolved.

    `hf`: the shape from the config.json of model.hf (`plan.shapes.huggingface.read_shape`). `sample`: the image's
    (channels, height, width) if the data is open; otherwise only synthetic data has one. Raises UserError for a model
    that the planner cannot lay out.
    """
    model = values.model
    if model.hf:
        return _laid_out(hf, "model.hf", model.hf)
    if model.kind not in IMAGE_MODELS:
        sample = (values.data.seq_len,)
    elif sample is None:
        if values.data.kind != "synthetic":
            what = f"{values.data.kind} data say the size of their images only once they are open"
            raise _refusal("data.kind", what, '"synthetic", with data.shape')
        sample = tuple(values.data.shape)
    if model.vocab == "auto":
        model = model.model_copy(update={"vocab": ASSUMED_VOCAB})
    return _laid_out(shape_of_section(model, sample), "model.kind", model.kind)


def _laid_out(shape: Shape | None, where: str, name: str) -> Architecture:
    if isinstance(shape, Architecture):
        return shape
    raise _refusal(where, f'"{name}" has no layers that the planner knows how to split', "a transformer that it knows")


def _refusal(where: str, what: str, allowed: str) -> UserError:
    return UserError(render_problems("the plan", [Problem(where, what, allowed=allowed)]))


def case_of(values: RunFile, shape: Architecture, micro_batch: int | None = None) -> Case:
    """The case of a resolved run; `micro_batch` overrides `train.micro_batch` if it is given.

    Shares that do not divide are rounded up: the others wait for the rank with most samples. Raises UserError if the
    planner cannot hold a degree.
    """
    degrees, micro = degrees_of(values, shape), micro_batch or int(values.train.micro_batch)
    accumulation = -(-values.train.global_batch // (degrees.data * micro))
    return fixed_case_of(
        values,
        shape,
        degrees=degrees,
        micro_batch=micro,
        global_batch=accumulation * micro * degrees.data,
        zero=zero_of(values, degrees),
        schedule=values.parallel.pp_schedule if degrees.pp > 1 else "1f1b",
        stages_per_rank=int(values.parallel.pp_stages_per_rank) if degrees.pp > 1 else 1,
    )


def fixed_case_of(values: RunFile, shape: Architecture, **laid_out: object) -> Case:
    """The case of a run, with degrees and layout from `laid_out`."""
    degrees, parallel = laid_out["degrees"], values.parallel
    reshards = parallel.pp == 1 if parallel.reshard_after_forward == "auto" else bool(parallel.reshard_after_forward)
    settings = {
        "degrees": degrees,
        "model": shape,
        "seq_len": shape.positions if shape.patch_features else values.data.seq_len,
        "precision": precision_of(values.precision),
        "optimizer": values.optim.name,
        "engine": engine_of(values),
        "reshard": reshards,
        "sequence": parallel.tp_sequence,
        "recompute": recompute_of(values.recompute),
        "dropout": values.model.dropout > 0,
        "compiled": values.train.compile in ("blocks", "model"),
        "offload": offloads(values),
    }
    return Case(**{**settings, **laid_out})  # type: ignore[arg-type]


def degrees_of(values: RunFile, shape: Architecture) -> Degrees:
    """The resolved degrees as the planner counts them: DeepSpeed shards over the ranks of dp_replicate, and the tensor
    axis also splits experts."""
    parallel = values.parallel
    sizes = {axis: int(getattr(parallel, axis)) for axis in AXES}
    if values.train.engine == "deepspeed":
        sizes |= {"dp_replicate": 1, "dp_shard": sizes["dp_replicate"] * sizes["dp_shard"]}
    return split_experts(Degrees(**sizes, ep=parallel.ep), shape)


def split_experts(degrees: Degrees, shape: Architecture) -> Degrees:
    """The same degrees with each expert split over the tensor axis, if there are experts."""
    mixed = any(run.layer.experts for run in shape.runs)
    return replace(degrees, etp=degrees.tp if mixed else 1)


def zero_of(values: RunFile, degrees: Degrees) -> int:
    """What the ranks of dp_shard x cp share: everything, or deepspeed.stage."""
    if values.train.engine == "deepspeed":
        return values.deepspeed.stage
    return 3 if degrees.shards > 1 else 0


def engine_of(values: RunFile) -> EngineTraits:
    """The engine that trains, with the format of its weights."""
    engine = find_engine("deepspeed" if values.train.engine == "deepspeed" else "shardway")
    narrow = values.precision.weights == "bf16"
    return replace(engine, weight_bytes=2, gradient_bytes=2) if narrow else engine


def precision_of(section: PrecisionSection) -> Precision:
    """The format of matrix products; fp32 if the device has still to decide."""
    if section.compute == "float8":
        return "mxfp8" if section.float8_recipe == "mxfp8" else "fp8"
    compute = _PRECISIONS.get(section.compute, "fp32")
    return "tf32" if compute == "fp32" and section.tf32 is True else compute


def recompute_of(section: RecomputeSection) -> Recompute:
    """The planner's mode that keeps no less: if some blocks are exempt from recompute, all count as kept."""
    if section.mode == "none" or (section.every > 1 and section.mode != "budget"):
        return "none"
    if section.mode == "full" or (section.mode == "selective" and not section.save_ops):
        return "full"
    return BETWEEN


def offloads(values: RunFile) -> bool:
    """Whether optimizer states lie in the host's memory or on its disk."""
    if values.train.engine == "deepspeed":
        return values.deepspeed.offload_optimizer != "none"
    return values.parallel.cpu_offload


def machine_for(machine: Machine, ranks: int) -> Machine:
    """The nodes as this many ranks use them: with fewer ranks than accelerators, each has a larger share of the
    host."""
    return replace(machine, per_node=min(machine.per_node, ranks))


def list_assumptions(values: RunFile) -> tuple[str, ...]:
    """Assumptions of the planner about a run, in sentences."""
    return tuple(_find_assumptions(values, values.parallel))


def _describe_batch(values: RunFile) -> Iterator[str]:
    """The assumption for shares that do not divide."""
    batch, sizes = values.train.global_batch, (values.train.micro_batch, values.parallel.dp_replicate)
    if "auto" in (*sizes, values.parallel.dp_shard):
        return
    whole = math.prod(int(size) for size in (*sizes, values.parallel.dp_shard))
    if batch % whole:
        full = -(-batch // whole) * whole
        yield f"a global batch of {full:,}: {batch:,} samples do not fill it, and a step takes as long"


def _find_assumptions(values: RunFile, parallel: ParallelSection) -> Iterator[str]:
    recompute = values.recompute
    if values.model.vocab == "auto" and values.model.kind not in IMAGE_MODELS and not values.model.hf:
        yield f"a vocabulary of {ASSUMED_VOCAB:,}, since only the data say it"
    yield from _describe_batch(values)
    if recompute.mode in ("selective", "full") and recompute.every > 1:
        yield "all blocks keep what they compute, since recompute.every leaves some out"
    if recompute.mode == "budget":
        yield "results of products and of attention are what the compiler keeps within recompute.budget"
    if "bf16" in (values.precision.weights, values.optim.state_dtype) and values.optim.name in ("adamw", "muon", "sgd"):
        yield "moments are kept in fp32"
    if parallel.pp > 1 and parallel.pp_split:
        yield "stages have equal numbers of layers, whatever parallel.pp_split says"
