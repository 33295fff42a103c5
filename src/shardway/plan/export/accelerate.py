"""Hugging Face Accelerate: the file that `accelerate launch --config_file` reads.

Invariant: if Accelerate compares degrees with the number of processes, that is the plan's number of ranks, so that it
refuses to start if the file lacks a degree. Of plain copies it compares nothing; they are started on the data ranks
alone. This module does not import accelerate.

Source: Accelerate 1.15.0 (commands/launch.py, parallelism_config.py, utils/dataclasses.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shardway.plan.case import Case
from shardway.plan.export import common
from shardway.plan.export.common import EmittedFile, Value

FILE = "accelerate.yaml"

_PRECISION = {"fp32": "no", "tf32": "no", "fp16": "fp16", "fp8": "fp8"}


def render(case: Case, head: Sequence[str]) -> list[EmittedFile]:
    """accelerate.yaml."""
    return [common.write(FILE, head, common.write_yaml(_settings(case)))]


def degrees_of(case: Case) -> Mapping[str, int]:
    """The degrees of the file."""
    degrees = case.degrees
    if not _shards(case):
        return {"dp_replicate": degrees.data}
    return {"dp_replicate": degrees.dp_replicate, "dp_shard": degrees.dp_shard, "cp": degrees.cp, "tp": degrees.tp}


def _shards(case: Case) -> bool:
    """Whether FSDP is used: plain copies are DDP's; every split is FSDP's, also with tp and cp."""
    return case.zero > 0 or case.degrees.cp * case.degrees.tp > 1


def _settings(case: Case) -> Mapping[str, Value]:
    precision, sharded, prefix = _PRECISION.get(case.precision, "bf16"), _shards(case), "parallelism_config_"
    sharding: Mapping[str, Value] = {
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": case.zero == 3 and case.reshard,
            "fsdp_offload_params": case.offload,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_activation_checkpointing": case.recompute == "full",
        },
        "parallelism_config": {
            **{f"{prefix}{name}_size": size for name, size in degrees_of(case).items()},
            **({f"{prefix}cp_comm_strategy": "allgather"} if case.degrees.cp > 1 else {}),
        },
    }
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if sharded else "MULTI_GPU",
        "mixed_precision": precision,
        "num_processes": case.degrees.world if sharded else case.degrees.data,
        "num_machines": 1,
        "use_cpu": False,
        **({"fp8_config": {"backend": "AO"}} if precision == "fp8" else {}),
        **({"dynamo_config": {"dynamo_backend": "INDUCTOR"}} if case.compiled else {}),
        **(sharding if sharded else {}),
    }


def describe(case: Case) -> Iterator[str]:
    """All notes."""
    yield from common.describe_engine(case, "Accelerate", ("fsdp2",))
    degrees = case.degrees
    left = "it refuses to start as many ranks" if _shards(case) else "the file starts the data ranks alone"
    if degrees.pp > 1:
        yield (
            f"pp {degrees.pp} is not in the file: Accelerate trains without a pipeline, so "
            f"{common.name_schedule(case)} has no place, and {left}."
        )
    if degrees.ep > 1:
        yield f"ep {degrees.ep} is not in the file: Accelerate has no axis for experts, every rank holds them all."
    if degrees.etp > 1:
        yield f"Experts split over {degrees.etp} ranks of the tensor axis are the model's tp plan to say."
    if degrees.tp > 1:
        yield "Load the model with its tp plan and the device mesh of the Accelerator; other models are not split."
    if degrees.tp > 1 and case.sequence:
        yield "tp plans of Transformers do not split norms and the residual stream: more memory than predicted."
    if case.async_tensor:
        yield "Collectives of tp do not run beside products in Accelerate as the plan has it."
    if degrees.cp > 1:
        yield "cp wants attention by scaled_dot_product_attention, causal and without a mask of its own."
    if _shards(case) and degrees.dp_shard * degrees.cp == 1:
        yield "Accelerate's FSDP refuses a layout with neither dp_shard nor cp above 1."
    elif _shards(case) and degrees.dp_shard == 1 and degrees.dp_replicate > 1:
        yield "Accelerate refuses tp or cp beside copies without dp_shard above 1."
    if case.zero == 0 and _shards(case):
        yield "The plan shares no states; with tp or cp Accelerate shards weights too: less memory than predicted."
    yield from common.describe_zero(case, "Accelerate")
    if _shards(case):
        yield from common.describe_offload(case, "Accelerate")
    elif case.offload:
        yield "Without sharding Accelerate offloads nothing: more memory than predicted."
    yield from common.describe_tf32(case, 'The file says "no" mixed precision')
    if case.precision in ("mxfp8", "fp4"):
        yield f"Accelerate has no {case.precision} here: the file says bf16."
    if case.precision == "fp8":
        yield "fp8 is that of torchao, without which Accelerate refuses to start; Transformer Engine does it too."
    if case.recompute not in ("none", "full"):
        yield f"Accelerate recomputes whole layers or nothing: nothing here, where the plan says {case.recompute}."
    if case.recompute == "full" and not _shards(case):
        yield "Recompute is the model's without FSDP: call gradient_checkpointing_enable()."
    yield from common.describe_own_model(case)
    accumulate = f"gradient_accumulation_steps={case.micro_batches}"
    batches = f"batches of {case.micro_batch} x {case.seq_len} tokens a data rank and Accelerator({accumulate})"
    yield common.describe_script(f"the model, the data, the optimizer ({case.optimizer}), {batches}")
    yield common.describe_script("--num_machines, --machine_rank, --main_process_ip and --main_process_port")
