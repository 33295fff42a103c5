"""torchtitan: a job config in TOML, read up to version 0.2, and the same as a function of Python, read since 0.3.

Invariant: both files say the same of what both versions know; what one of them lacks is told with its name. The plan's
layout is written degree by degree, nothing is left for torchtitan to derive. This module must not import torchtitan.

Source: torchtitan 0.2.2 (config/job_config.py, distributed/pipeline_parallel.py) and 0.3.0 (config/configs.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from shardway.plan.case import Case, Schedule
from shardway.plan.emit.emitted import Emitted, EmittedHeader, gather, write
from shardway.plan.emit.flavors import find_flavor
from shardway.plan.emit.pipeline import schedule_of
from shardway.plan.emit.sizes import describe_irregular
from shardway.plan.emit.texts import Settings, write_toml
from shardway.plan.emit.torchtitan_job import JOB, render_job
from shardway.plan.emit.torchtitan_told import describe_all
from shardway.plan.stages import layers_of_stages

TOML = "torchtitan.toml"

_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
}
_RECOMPUTE = {"none": "none", "selective": "none", "products": "selective", "operators": "selective", "full": "full"}


def emit(case: Case, prediction_lines: Sequence[str]) -> Emitted:
    """torchtitan.toml, and torchtitan_job.py where torchtitan has a model of these sizes to start from."""
    told = gather([*describe_irregular(case.model), *describe_all(case, *_replicas_and_shards(case))])
    flavor = find_flavor(case.model)
    head = EmittedHeader(case, prediction_lines, degrees_of(case), told)
    files = [write(TOML, head, write_toml(_tables(case)))]
    if flavor and flavor.function:
        shared = _parallelism(case, head="lm_head")
        files.append(write(JOB, head, render_job(case, flavor, _training(case), shared)))
    return Emitted(tuple(files), told)


def degrees_of(case: Case) -> Mapping[str, int]:
    """As the files have them."""
    copies, shards = _replicas_and_shards(case)
    degrees = case.degrees
    return {"dp_replicate": copies, "dp_shard": shards, "cp": degrees.cp, "tp": degrees.tp, "pp": degrees.pp}


def _replicas_and_shards(case: Case) -> tuple[int, int]:
    """Ranks that share nothing are copies, where torchtitan has copies: on an axis of their own alone."""
    degrees = case.degrees
    if case.zero == 0 and degrees.cp * degrees.tp * degrees.pp * degrees.ep == 1:
        return degrees.data, 1
    return degrees.dp_replicate, degrees.dp_shard


def _tables(case: Case) -> Mapping[str, Settings]:
    flavor = find_flavor(case.model)
    return {
        "job": {"description": f"{case.model.name}, {case.degrees.render()}"},
        "model": {
            "name": flavor.model if flavor else "llama3",
            "flavor": flavor.name if flavor else case.model.name,
            "converters": _converters(case),
        },
        "optimizer": {"name": "AdamW"},
        "training": _training(case),
        "parallelism": {
            **_parallelism(case, head="output"),
            "expert_tensor_parallel_degree": case.degrees.etp,
            "enable_async_tensor_parallel": case.async_tensor and case.compiled,
        },
        "activation_checkpoint": {"mode": _RECOMPUTE[case.recompute], "selective_ac_option": "op"},
        "compile": {"enable": case.compiled, "components": ["model", "loss"]},
        **_quantization(case),
    }


def _training(case: Case) -> Settings:
    """A pipeline takes all of a rank's sequences at once and cuts them itself."""
    single = case.degrees.pp == 1
    return {
        "local_batch_size": case.micro_batch if single else case.micro_batch * case.micro_batches,
        "global_batch_size": case.global_batch,
        "seq_len": case.seq_len,
        "mixed_precision_param": "float32" if case.precision in ("fp32", "tf32") else "bfloat16",
        "enable_cpu_offload": case.offload,
    }


def _parallelism(case: Case, head: str) -> Settings:
    degrees = case.degrees
    copies, shards = _replicas_and_shards(case)
    return {
        "data_parallel_replicate_degree": copies,
        "data_parallel_shard_degree": shards,
        "fsdp_reshard_after_forward": "always" if case.zero == 3 and case.reshard else "never",
        "context_parallel_degree": degrees.cp,
        "tensor_parallel_degree": degrees.tp,
        "pipeline_parallel_degree": degrees.pp,
        **(_pipeline(case, head) if degrees.pp > 1 else {}),
        "expert_parallel_degree": degrees.ep,
    }


def _schedule(case: Case) -> Schedule:
    """1F1B stands in for a schedule that torchtitan does not have for so many stages a rank."""
    schedule, several = schedule_of(case), case.stages_per_rank > 1
    if (schedule, several) in (("zero_bubble", False), ("gpipe", True)):
        return "interleaved" if several else "1f1b"
    return schedule


def _pipeline(case: Case, head: str) -> Settings:
    common: Settings = {
        "pipeline_parallel_schedule": _SCHEDULES[_schedule(case)],
        "pipeline_parallel_microbatch_size": case.micro_batch,
    }
    for first, last in ((1, 1), (0, 0), (1, 0), (0, 1)):
        if _their_cut(case, first, last) == layers_of_stages(case):
            weighed = len(case.model.layers) + first + last
            return {
                **common,
                "pipeline_parallel_first_stage_less_layers": first,
                "pipeline_parallel_last_stage_less_layers": last,
                "pipeline_parallel_layers_per_stage": math.ceil(weighed / case.stages),
            }
    return {**common, "module_fqns_per_model_part": _modules(case, head)}


def _their_cut(case: Case, first: int, last: int) -> tuple[int, ...]:
    """Layers of each stage as torchtitan cuts them: what does not divide goes to the first ones, the ends weigh."""
    weighed = len(case.model.layers) + first + last
    if math.ceil(weighed / math.ceil(weighed / case.stages)) != case.stages:
        return ()
    base, more = divmod(weighed, case.stages)
    sizes = [base + (stage < more) for stage in range(case.stages)]
    sizes[0] -= first
    sizes[-1] -= last
    return tuple(sizes)


def _modules(case: Case, head: str) -> list[list[str]]:
    """The names of what each stage has, where no rule of torchtitan's cuts as the plan does."""
    parts, place = [], 0
    for count in layers_of_stages(case):
        parts.append([f"layers.{layer}" for layer in range(place, place + count)])
        place += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", head]
    return parts


def _converters(case: Case) -> list[str]:
    kind = {"fp8": "float8", "mxfp8": "mx"}.get(case.precision)
    if kind is None:
        return []
    places = ["linear", "grouped_mm"] if any(layer.experts for layer in case.model.layers) else ["linear"]
    return [f"quantize.{place}.{kind}" for place in places]


def _quantization(case: Case) -> Mapping[str, Settings]:
    tables: Mapping[str, Settings] = {
        "quantize.linear.float8": {"recipe_name": "rowwise", "filter_fqns": ["output"]},
        "quantize.grouped_mm.float8": {"fqns": ["experts"]},
        "quantize.linear.mx": {"recipe_name": "mxfp8_cublas", "filter_fqns": ["output"]},
        "quantize.grouped_mm.mx": {"recipe_name": "mxfp8", "fqns": ["experts"]},
    }
    return {name: tables[name] for name in _converters(case)}
