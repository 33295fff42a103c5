"""DeepSpeed: its configuration in JSON, and a text file beside it, since JSON has no comments.

Invariants:
- Every field of a case that ds_config.json does not carry over unchanged has its sentence here.
- If DeepSpeed counts data ranks as the plan does, the file has all three batch sizes, so that DeepSpeed rejects a world
  of another size. A pipeline is made by the script, and with it every degree but the data ranks, so the file then has
  none of these degrees.

Sources: DeepSpeed 0.19.8 (runtime/config.py, runtime/engine.py, runtime/bf16_optimizer.py, runtime/pipe/engine.py,
runtime/zero/config.py, runtime/zero/stage3.py, runtime/tensor_parallel/config.py,
runtime/sequence_parallel/ulysses_sp.py, module_inject/auto_ep_config.py, module_inject/auto_ep_folding.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from shardway.plan.case import Case, layers_of_stages
from shardway.plan.export import common
from shardway.plan.export.common import EmittedFile, Settings, Value

# --- what DeepSpeed or its configuration cannot express


def describe(case: Case) -> Iterator[str]:
    """All notes, the layout first."""
    made, in_fp32 = degrees_of(case), sums_in_fp32(case)
    yield from common.describe_engine(case, "DeepSpeed", ("deepspeed", "megatron-deepspeed"))
    yield from _describe_pipeline(case)
    yield from _describe_tensor(case, made["tp"])
    yield from _describe_sequence(case, made["sp"])
    yield from _describe_experts(case)
    if case.degrees.dp_replicate > 1 and case.zero:
        yield (
            f"DeepSpeed shares states over all {case.degrees.data} data ranks, not over {case.degrees.dp_shard} of "
            f"them with {case.degrees.dp_replicate} copies: less memory and more traffic between nodes than predicted."
        )
    if case.zero == 0 and case.engine.overlaps_gradients and case.degrees.data > 1 and case.degrees.pp == 1:
        yield "Without ZeRO, DeepSpeed sums gradients after the backward pass: slower steps than predicted."
    if case.offload and not case.zero:
        yield "DeepSpeed puts optimizer states into CPU memory from ZeRO 1 on: nothing is offloaded here."
    if case.optimizer == "adamw8bit":
        yield "DeepSpeed has no AdamW of 8 bits: the file says AdamW, whose states take more memory than predicted."
    elif case.optimizer not in _OPTIMIZERS:
        yield f"DeepSpeed has no {case.optimizer}: the file says AdamW, whose states take other memory than predicted."
    if case.optimizer == "adafactor" and case.zero:
        yield "ZeRO gives Adafactor flat weights, which have no rows and columns to factor: more memory than predicted."
    # BF16_Optimizer, which DeepSpeed uses with exactly these settings, refuses Muon.
    degrees, low = case.degrees, case.value_bytes == 2 and case.precision != "fp16"
    split = degrees.pp * degrees.tp * degrees.ep > 1
    refused = degrees.pp > 1 if case.zero == 0 else case.zero == 1 and in_fp32 and not case.offload and split
    if case.optimizer == "muon" and low and refused:
        yield (
            "DeepSpeed refuses Muon here: beside bf16 with ZeRO 1, or in a pipeline, it takes dense models on data "
            "ranks alone, with gradients in fp32."
        )
    if case.optimizer == "muon" and case.zero == 3:
        yield "Under ZeRO 3, Muon wants gradients summed whole on each rank: more traffic than predicted."
    if case.gradient_bytes == 4 and not in_fp32:
        yield "Without ZeRO, DeepSpeed sums gradients in the format of the weights; the plan sums them in fp32."
    yield from common.describe_tf32(case, "The file says fp32")
    if case.low_bits:
        yield f"DeepSpeed has no {case.precision} of its own: the file says bf16, and the model has to bring the rest."
    if case.recompute != "none":
        yield f"Recompute ({case.recompute}) is the script's: DeepSpeed's settings only say where what is kept lies."
    if case.compiled:
        yield "Call engine.compile() in the script: the plan compiles."
    yield from common.describe_own_model(case)
    data = f"the data in sequences of {case.seq_len}"
    yield common.describe_script(f"the model, {data}, the number of steps, the learning rate (optimizer.params.lr)")


def _describe_pipeline(case: Case) -> Iterator[str]:
    degrees = case.degrees
    if degrees.pp == 1:
        return
    sizes = layers_of_stages(case)
    layers = str(sizes[0]) if common.is_even(case) else ", ".join(map(str, sizes))
    yield (
        f"pp {degrees.pp} is not in the file: DeepSpeed makes a pipeline of a PipelineModule in the script, with "
        f"num_stages={degrees.pp}, and its schedule is 1F1B with one stage a rank. The plan: "
        f"{common.name_schedule(case)}, layers of a stage: {layers}."
    )
    if case.zero > 1:
        yield f"DeepSpeed refuses a pipeline with ZeRO 2 or 3, and the plan says {case.zero}."
    if case.engine.overlaps_gradients and degrees.data > 1:
        yield "DeepSpeed sums gradients after the last micro-batch of a pipeline: slower steps than predicted."


def _describe_tensor(case: Case, made: int) -> Iterator[str]:
    degrees = case.degrees
    if degrees.tp == 1:
        return
    if made == 1:
        yield (
            f"tp {degrees.tp} is not in the file: DeepSpeed refuses AutoTP in a pipeline. The model has to split "
            "itself, with PipeModelDataParallelTopology"
            f"(num_pp={degrees.pp}, num_mp={degrees.tp}, num_dp={degrees.data})."
        )
        if case.sequence:
            yield "The plan splits norms and the residual stream over tp as well: the model has to."
        if case.async_tensor:
            yield "The plan runs collectives of tp beside products: the model has to."
        return
    tp, heads = case.degrees.tp, min(run.layer.attention.kv_heads for run in case.model.runs)
    yield (
        f"train_batch_size ({case.global_batch}) is not in the file: DeepSpeed would count the ranks of AutoTP as data "
        "ranks. Those of one tensor group have to read the same."
    )
    yield "DeepSpeed splits models of Hugging Face by itself (AutoTP); another one needs a partition_config."
    if case.sequence:
        yield "AutoTP does not split norms and the residual stream by sequence: more memory than predicted."
    if case.async_tensor:
        yield "AutoTP overlaps a collective of tp with products on the way back alone: slower steps than predicted."
    if tp > heads:
        yield f"AutoTP gives attention to the first {heads} ranks of tp {tp}, one a key-value head; the others wait."


def _describe_sequence(case: Case, made: int) -> Iterator[str]:
    cp, beside = case.degrees.cp, "a pipeline" if case.degrees.pp > 1 else "AutoTP"
    if cp == 1:
        return
    if made == 1:
        yield f"cp {cp} is not in the file: DeepSpeed makes no groups for sequence parallelism beside {beside}."
    yield f"cp {cp} is DeepSpeed's Ulysses, which exchanges heads instead of passing keys and values on."
    for attention in [run.layer.attention for run in case.model.runs]:
        shared = attention.kv_heads % cp == 0 or cp % attention.kv_heads == 0
        if attention.heads % cp or not shared:
            yield f"Ulysses refuses {attention.heads} heads, {attention.kv_heads} of keys and values, over cp {cp}."
    if case.zero:
        yield "Whether ZeRO shares over the ranks of cp as well follows from how the script makes its groups."


def _describe_experts(case: Case) -> Iterator[str]:
    degrees = case.degrees
    if not any(run.layer.experts for run in case.model.runs):
        return
    if degrees.ep == 1:
        if degrees.tp > 1:
            yield f"Whether tp splits experts is AutoTP's to say; the plan splits each over {degrees.etp} ranks."
        return
    yield "DeepSpeed spreads experts of models of Hugging Face by itself (AutoEP); another one calls moe.layer.MoE."
    if degrees.etp > 1:
        yield f"DeepSpeed refuses experts that are split, and the plan splits each over {degrees.etp} ranks."
    if degrees.tp > 1 and (degrees.cp > 1 or degrees.pp > 1 or case.offload):
        yield "DeepSpeed refuses AutoEP with tp beside a pipeline, sequence parallelism or offload."
    if case.zero == 3 and degrees.cp > 1:
        yield "DeepSpeed refuses AutoEP with sequence parallelism under ZeRO 3."
    if case.zero == 3:
        yield "DeepSpeed refuses moe.layer.MoE under ZeRO 3; AutoEP goes with it."


# --- the files

FILE = "ds_config.json"
NOTES = "ds_config.txt"

_OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD", "muon": "Muon", "adafactor": "Adafactor"}
_UNTESTED = ("sgd", "adafactor")  # optimizers that ZeRO takes only with an explicit setting


def render(case: Case, head: Sequence[str]) -> list[EmittedFile]:
    """ds_config.json, and ds_config.txt with prediction, degrees and notes."""
    settings = json.dumps(_settings(case), indent=2) + "\n"
    return [EmittedFile(FILE, settings), EmittedFile(NOTES, "\n".join(head) + "\n")]


def degrees_of(case: Case) -> Mapping[str, int]:
    """The degrees of the file: AutoTP and groups for sequence parallelism (sp, here cp) exclude each other, and a
    pipeline excludes both."""
    degrees = case.degrees
    alone = degrees.pp == 1
    return {"dp": degrees.data, "sp": degrees.cp if alone and degrees.tp == 1 else 1, "tp": degrees.tp if alone else 1}


def sums_in_fp32(case: Case) -> bool:
    """Whether gradients are summed in fp32: without ZeRO, DeepSpeed takes only the format of the weights."""
    return case.gradient_bytes == 4 and (case.zero > 0 or case.value_bytes == 4)


def _settings(case: Case) -> dict[str, Value]:
    degrees, made = case.degrees, degrees_of(case)
    name = "fp16" if case.precision == "fp16" else "bf16"
    formats: Settings = {
        name: {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32" if sums_in_fp32(case) else name},
    }
    zero: Settings = {"stage": 0}
    if case.zero:
        zero = {
            "stage": case.zero,
            "overlap_comm": case.engine.overlaps_gradients and degrees.pp == 1,
            **({"offload_optimizer": {"device": "cpu", "pin_memory": True}} if case.offload else {}),
        }
    if case.zero == 3:
        # Every weight is sharded, and freed after use or kept as in the plan, from its first use in the forward pass to
        # its use in the backward; Muon needs whole gradients.
        whole = 2 * case.model.parameters
        held: Settings = {"stage3_max_live_parameters": whole, "stage3_max_reuse_distance": whole}
        zero = {
            **zero,
            "stage3_param_persistence_threshold": 0,
            **({"stage3_max_reuse_distance": 0} if case.reshard else held),
            **({"offload_param": {"device": "cpu", "pin_memory": True}} if case.offload else {}),
            **({"reduce_scatter": False} if case.optimizer == "muon" else {}),
        }
    tensor: Settings = {"autotp_size": made["tp"], "tp_overlap_comm": case.async_tensor}
    experts: Settings = {"enabled": True, "autoep_size": degrees.ep, "expert_tensor_parallel_size": degrees.etp}
    # Settings of deepspeed.checkpointing, which the model has to call.
    recompute: Settings = {
        "partition_activations": False,
        "contiguous_memory_optimization": False,
        "number_checkpoints": case.model.depth,
    }
    return {
        # With AutoTP DeepSpeed counts its ranks as data ranks in the check of the whole batch.
        **({} if made["tp"] > 1 else {"train_batch_size": case.global_batch}),
        "train_micro_batch_size_per_gpu": case.micro_batch,
        "gradient_accumulation_steps": case.micro_batches,
        **(formats if case.value_bytes == 2 else {}),
        "optimizer": {"type": _OPTIMIZERS.get(case.optimizer, "AdamW"), "params": {}},
        **({"zero_allow_untested_optimizer": True} if case.optimizer in _UNTESTED else {}),
        "zero_optimization": zero,
        **({"tensor_parallel": tensor} if made["tp"] > 1 else {}),
        **({"expert_parallel": experts} if degrees.ep > 1 else {}),
        **({"data_parallel_size": made["dp"], "sequence_parallel_size": made["sp"]} if made["sp"] > 1 else {}),
        **({"activation_checkpointing": recompute} if case.recompute == "full" else {}),
    }
