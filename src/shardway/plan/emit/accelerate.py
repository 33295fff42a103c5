"""Hugging Face Accelerate: the file that `accelerate launch --config_file` reads.

Invariant: the number of processes is that of the plan, so that Accelerate refuses to start where the degrees of the
file do not make as many. This module must not import accelerate.

Source: Accelerate 1.15.0 (commands/launch.py, parallelism_config.py, utils/dataclasses.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shardway.plan.case import Case
from shardway.plan.emit.emitted import Emitted, Head, gather, write
from shardway.plan.emit.tellings import tell_engine, tell_kernel, tell_script, tell_zero
from shardway.plan.emit.texts import Settings, Value, write_yaml

FILE = "accelerate.yaml"

_PRECISION = {"fp32": "no", "tf32": "no", "fp16": "fp16", "fp8": "fp8"}


def emit(case: Case, prediction_lines: Sequence[str]) -> Emitted:
    """accelerate.yaml."""
    told = gather(_tell(case))
    head = Head(case, prediction_lines, degrees_of(case), told)
    return Emitted((write(FILE, head, write_yaml(_settings(case))),), told)


def degrees_of(case: Case) -> Mapping[str, int]:
    """As the file has them."""
    degrees = case.degrees
    if not _shards(case):
        return {"dp_replicate": degrees.data}
    return {
        "dp_replicate": degrees.dp_replicate,
        "dp_shard": degrees.dp_shard,
        "cp": degrees.cp,
        "tp": degrees.tp,
    }


def _shards(case: Case) -> bool:
    """Plain copies are DDP's; all that is split is FSDP's, which Accelerate wants with tp and cp too."""
    return case.zero > 0 or case.degrees.cp * case.degrees.tp > 1


def _settings(case: Case) -> Mapping[str, Value]:
    precision = _PRECISION.get(case.precision, "bf16")
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if _shards(case) else "MULTI_GPU",
        "mixed_precision": precision,
        "num_processes": case.degrees.world,
        "num_machines": 1,
        "use_cpu": False,
        **({"fp8_config": {"backend": "AO"}} if precision == "fp8" else {}),
        **({"dynamo_config": {"dynamo_backend": "INDUCTOR"}} if case.compiled else {}),
        **(_sharding(case) if _shards(case) else {}),
    }


def _sharding(case: Case) -> Mapping[str, Settings]:
    prefix = "parallelism_config_"
    return {
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


def _tell(case: Case) -> Iterator[str]:
    yield from tell_engine(case, "Accelerate", ("fsdp2",))
    yield from _tell_axes(case)
    yield from _tell_sharing(case)
    yield from _tell_formats(case)
    yield from _tell_model(case)
    accumulate = f"gradient_accumulation_steps={case.micro_batches}"
    batches = f"batches of {case.micro_batch} x {case.seq_len} tokens a data rank and Accelerator({accumulate})"
    yield from tell_script(case, f"the model, the data, the optimizer ({case.optimizer}), {batches}")
    yield from tell_script(case, "--num_machines, --machine_rank, --main_process_ip and --main_process_port")


def _tell_axes(case: Case) -> Iterator[str]:
    degrees = case.degrees
    if degrees.pp > 1:
        yield (
            f"pp {degrees.pp} is not in the file: Accelerate trains without a pipeline, so {case.schedule} with "
            f"{case.stages_per_rank} stages a rank has no place, and it refuses to start as many ranks."
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


def _tell_sharing(case: Case) -> Iterator[str]:
    degrees = case.degrees
    if _shards(case) and degrees.dp_shard * degrees.cp == 1:
        yield "Accelerate's FSDP refuses a layout with neither dp_shard nor cp above 1."
    elif _shards(case) and degrees.dp_shard == 1 and degrees.dp_replicate > 1:
        yield "Accelerate refuses tp or cp beside copies without dp_shard above 1."
    if case.zero == 0 and _shards(case):
        yield "The plan shares no states; with tp or cp Accelerate shards weights too: less memory than predicted."
    yield from tell_zero(case, "Accelerate")
    if case.offload:
        yield "Accelerate keeps weights and gradients in CPU memory too, the plan optimizer states alone: slower steps."
    if case.offload and not _shards(case):
        yield "Without sharding nothing is offloaded."


def _tell_formats(case: Case) -> Iterator[str]:
    if case.precision == "tf32":
        yield 'The file says "no" mixed precision: set torch.set_float32_matmul_precision("high") for tf32.'
    if case.precision in ("mxfp8", "fp4"):
        yield f"Accelerate has no {case.precision} here: the file says bf16."
    if case.precision == "fp8":
        yield "fp8 is that of torchao; Transformer Engine is the other backend."


def _tell_model(case: Case) -> Iterator[str]:
    if case.recompute in ("selective", "operators"):
        yield f"Accelerate recomputes whole layers or nothing: nothing here, where the plan says {case.recompute}."
    if case.recompute == "full" and not _shards(case):
        yield "Recompute is the model's without FSDP: call gradient_checkpointing_enable()."
    yield from tell_kernel(case, "Your model")
    if case.dropout:
        yield "Dropout is the model's; the plan has it."
    if case.fused_loss:
        yield "The loss of the plan is computed without a full copy of the logits: your script has to do the same."
