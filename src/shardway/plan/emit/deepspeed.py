"""DeepSpeed: its configuration in JSON, and a text beside it with what JSON has no comment for.

Invariant: the three batch sizes give the data ranks of the plan, so that DeepSpeed refuses a world of another size. A
pipeline is made by the script, so the file does not have one. This module must not import deepspeed.

Source: DeepSpeed 0.19.8 (runtime/config.py, runtime/zero/config.py, runtime/tensor_parallel/config.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from shardway.plan.case import Case
from shardway.plan.emit.emitted import Emitted, EmittedFile, Head, gather
from shardway.plan.emit.tellings import tell_copies, tell_engine, tell_kernel, tell_script
from shardway.plan.emit.texts import Settings, Value

FILE = "ds_config.json"
NOTES = "ds_config.txt"

_OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD", "muon": "Muon", "adafactor": "Adafactor"}
_TESTED = ("adamw", "muon")
"""Those that ZeRO takes without being told to."""


def emit(case: Case, prediction_lines: Sequence[str]) -> Emitted:
    """ds_config.json, and ds_config.txt with prediction, degrees and what is told."""
    told = gather(_tell(case))
    head = Head(case, prediction_lines, degrees_of(case), told)
    notes = "\n".join(head.lines()) + "\n"
    settings = json.dumps(_settings(case), indent=2) + "\n"
    return Emitted((EmittedFile(FILE, settings), EmittedFile(NOTES, notes)), told)


def degrees_of(case: Case) -> Mapping[str, int]:
    """As the file has them; cp is DeepSpeed's sequence parallelism."""
    degrees = case.degrees
    return {"dp": degrees.data, "sp": degrees.cp, "tp": degrees.tp}


def _settings(case: Case) -> dict[str, Value]:
    degrees = case.degrees
    return {
        "train_batch_size": case.global_batch,
        "train_micro_batch_size_per_gpu": case.micro_batch,
        "gradient_accumulation_steps": case.micro_batches,
        **_formats(case),
        "optimizer": {"type": _OPTIMIZERS.get(case.optimizer, "AdamW"), "params": {}},
        **({} if case.optimizer in _TESTED else {"zero_allow_untested_optimizer": True}),
        "zero_optimization": _zero(case),
        **_axes(case),
        **_recompute(case),
        **({"data_parallel_size": degrees.data, "sequence_parallel_size": degrees.cp} if degrees.cp > 1 else {}),
    }


def _formats(case: Case) -> Settings:
    if case.precision in ("fp32", "tf32"):
        return {}
    if case.precision == "fp16":
        return {"fp16": {"enabled": True}}
    return {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32" if _sums_in_fp32(case) else "bf16"}}


def _sums_in_fp32(case: Case) -> bool:
    """Without ZeRO, DeepSpeed refuses gradients in another format than the weights'."""
    return case.engine.gradient_bytes == 4 and case.zero > 0


def _recompute(case: Case) -> Settings:
    """Of deepspeed.checkpointing, which the model has to call."""
    if case.recompute != "full":
        return {}
    places: Settings = {"partition_activations": False, "contiguous_memory_optimization": False}
    return {"activation_checkpointing": {**places, "number_checkpoints": len(case.model.layers)}}


def _zero(case: Case) -> Settings:
    offload: Settings = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
    span = 2 * case.model.parameters  # from the first use of a weight on the way there to its use on the way back
    held: Settings = {"stage3_max_live_parameters": span, "stage3_max_reuse_distance": span}
    return {
        "stage": case.zero,
        "overlap_comm": case.engine.overlaps_gradients,
        **(offload if case.offload and case.zero else {}),
        **({"stage3_param_persistence_threshold": 0} if case.zero == 3 else {}),
        **({} if case.reshard or case.zero < 3 else held),
    }


def _axes(case: Case) -> Settings:
    degrees = case.degrees
    tensor: Settings = {"tensor_parallel": {"autotp_size": degrees.tp}} if degrees.tp > 1 else {}
    experts: Settings = {"enabled": True, "autoep_size": degrees.ep, "expert_tensor_parallel_size": degrees.etp}
    return {**tensor, **({"expert_parallel": experts} if degrees.ep > 1 else {})}


def _tell(case: Case) -> Iterator[str]:
    yield from tell_engine(case, "DeepSpeed", ("deepspeed", "megatron-deepspeed"))
    yield from _tell_axes(case)
    yield from tell_copies(case, "DeepSpeed")
    yield from _tell_states(case)
    yield from _tell_formats(case)
    yield from _tell_model(case)
    yield from tell_script(case, "the model, the data, the number of steps, the learning rate (optimizer.params.lr)")


def _tell_axes(case: Case) -> Iterator[str]:
    degrees = case.degrees
    if degrees.pp > 1:
        yield (
            f"pp {degrees.pp} is not in the file: DeepSpeed makes a pipeline of a PipelineModule in the script, with "
            f"num_stages={degrees.pp}, and its schedule is 1F1B (the plan: {case.schedule}, {case.stages_per_rank} "
            "stages a rank)."
        )
    if degrees.pp > 1 and case.zero > 1:
        yield f"DeepSpeed's pipeline goes with ZeRO 0 and 1 alone, and the plan says {case.zero}."
    if degrees.tp > 1:
        yield "DeepSpeed splits models of Hugging Face by itself (AutoTP); another one needs a partition_config."
    if degrees.tp > 1 and case.sequence:
        yield "AutoTP does not split norms and the residual stream by sequence: more memory than predicted."
    if degrees.cp > 1:
        yield f"cp {degrees.cp} is DeepSpeed's Ulysses, which exchanges heads instead of passing keys and values on."
    if case.async_tensor:
        yield "Collectives of tp do not run beside products in DeepSpeed as the plan has it."
    yield from _tell_experts(case)


def _tell_experts(case: Case) -> Iterator[str]:
    degrees = case.degrees
    if degrees.ep == 1:
        return
    yield "DeepSpeed spreads experts of models of Hugging Face by itself (AutoEP); another one calls moe.layer.MoE."
    if degrees.etp > 1:
        yield f"DeepSpeed refuses experts that are split, and the plan splits each over {degrees.etp} ranks."
    if degrees.tp > 1 and (degrees.cp > 1 or degrees.pp > 1 or case.offload):
        yield "DeepSpeed refuses AutoEP with tp beside a pipeline, sequence parallelism or offload."


def _tell_states(case: Case) -> Iterator[str]:
    if case.zero and case.degrees.shards > 1 and case.degrees.cp > 1:
        yield "Whether ZeRO shares over the ranks of cp as well follows from how the script makes its groups."
    if case.offload and not case.zero:
        yield "DeepSpeed puts optimizer states into CPU memory from ZeRO 1 on: nothing is offloaded here."
    if case.optimizer == "adamw8bit":
        yield "DeepSpeed has no AdamW of 8 bits: the file says AdamW, whose states take more memory than predicted."


def _tell_formats(case: Case) -> Iterator[str]:
    if case.value_bytes == 2 and case.engine.gradient_bytes == 4 and not _sums_in_fp32(case):
        yield "Without ZeRO, DeepSpeed sums gradients in the format of the weights; the plan sums them in fp32."
    if case.precision == "tf32":
        yield 'The file says fp32: set torch.set_float32_matmul_precision("high") for tf32.'
    if case.low_bits:
        yield f"DeepSpeed has no {case.precision} of its own: the file says bf16, and the model has to bring the rest."


def _tell_model(case: Case) -> Iterator[str]:
    if case.recompute != "none":
        yield f"Recompute ({case.recompute}) is the script's: DeepSpeed's settings only say where what is kept lies."
    yield from tell_kernel(case, "Your model")
    if case.dropout:
        yield "Dropout is the model's; the plan has it."
    if case.compiled:
        yield "Call engine.compile() in the script: the plan compiles."
    if case.fused_loss:
        yield "The loss of the plan is computed without a full copy of the logits: your script has to do the same."
