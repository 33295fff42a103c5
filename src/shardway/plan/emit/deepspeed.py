"""DeepSpeed: its configuration in JSON, and a text beside it with what JSON has no comment for.

Invariant: wherever DeepSpeed counts data ranks as the plan does, the three batch sizes stand in the file, so that it
refuses a world of another size. A pipeline is made by the script, and with it every degree but the data ranks, so the
file then has none of them. This module must not import deepspeed.

Source: DeepSpeed 0.19.8 (runtime/config.py, runtime/engine.py, runtime/zero/config.py,
runtime/tensor_parallel/config.py, module_inject/auto_ep_config.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from shardway.plan.case import Case
from shardway.plan.emit.deepspeed_told import describe_all
from shardway.plan.emit.emitted import Emitted, EmittedFile, EmittedHeader, gather
from shardway.plan.emit.texts import Settings, Value

FILE = "ds_config.json"
NOTES = "ds_config.txt"

_OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD", "muon": "Muon", "adafactor": "Adafactor"}
_UNTESTED = ("sgd", "adafactor")
"""Those that ZeRO takes only when it is told to."""


def emit(case: Case, prediction_lines: Sequence[str]) -> Emitted:
    """ds_config.json, and ds_config.txt with prediction, degrees and what is told."""
    told = gather(describe_all(case, sums_in_fp32(case), degrees_of(case)))
    head = EmittedHeader(case, prediction_lines, degrees_of(case), told)
    notes = "\n".join(head.lines()) + "\n"
    settings = json.dumps(_settings(case), indent=2) + "\n"
    return Emitted((EmittedFile(FILE, settings), EmittedFile(NOTES, notes)), told)


def degrees_of(case: Case) -> Mapping[str, int]:
    """As the file has them: AutoTP and groups for sequence parallelism (sp, here cp) exclude each other, and both do a
    pipeline."""
    degrees = case.degrees
    alone = degrees.pp == 1
    return {
        "dp": degrees.data,
        "sp": degrees.cp if alone and degrees.tp == 1 else 1,
        "tp": degrees.tp if alone else 1,
    }


def sums_in_fp32(case: Case) -> bool:
    """Without ZeRO, DeepSpeed refuses gradients in another format than the weights'."""
    return case.gradient_bytes == 4 and (case.zero > 0 or case.value_bytes == 4)


def _settings(case: Case) -> dict[str, Value]:
    return {
        **_batch(case),
        **_formats(case),
        "optimizer": {"type": _OPTIMIZERS.get(case.optimizer, "AdamW"), "params": {}},
        **({"zero_allow_untested_optimizer": True} if case.optimizer in _UNTESTED else {}),
        "zero_optimization": _zero(case),
        **_axes(case),
        **_recompute(case),
    }


def _batch(case: Case) -> Settings:
    """DeepSpeed counts the ranks of AutoTP as data ranks when it checks the batch, so all of it is left out there."""
    whole: Settings = {} if degrees_of(case)["tp"] > 1 else {"train_batch_size": case.global_batch}
    return {
        **whole,
        "train_micro_batch_size_per_gpu": case.micro_batch,
        "gradient_accumulation_steps": case.micro_batches,
    }


def _formats(case: Case) -> Settings:
    if case.value_bytes == 4:
        return {}
    name = "fp16" if case.precision == "fp16" else "bf16"
    return {
        name: {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32" if sums_in_fp32(case) else name},
    }


def _zero(case: Case) -> Settings:
    if case.zero == 0:
        return {"stage": 0}
    return {
        "stage": case.zero,
        "overlap_comm": case.engine.overlaps_gradients and case.degrees.pp == 1,
        **({"offload_optimizer": {"device": "cpu", "pin_memory": True}} if case.offload else {}),
        **(_weights(case) if case.zero == 3 else {}),
    }


def _weights(case: Case) -> Settings:
    """Every weight is shared, and freed after its use or held as in the plan; Muon needs whole gradients."""
    whole = 2 * case.model.parameters  # from the first use of a weight on the way there to its use on the way back
    held: Settings = {"stage3_max_live_parameters": whole, "stage3_max_reuse_distance": whole}
    return {
        "stage3_param_persistence_threshold": 0,
        **({"stage3_max_reuse_distance": 0} if case.reshard else held),
        **({"offload_param": {"device": "cpu", "pin_memory": True}} if case.offload else {}),
        **({"reduce_scatter": False} if case.optimizer == "muon" else {}),
    }


def _axes(case: Case) -> Settings:
    degrees, made = case.degrees, degrees_of(case)
    tensor: Settings = {"autotp_size": made["tp"], "tp_overlap_comm": case.async_tensor}
    experts: Settings = {"enabled": True, "autoep_size": degrees.ep, "expert_tensor_parallel_size": degrees.etp}
    return {
        **({"tensor_parallel": tensor} if made["tp"] > 1 else {}),
        **({"expert_parallel": experts} if degrees.ep > 1 else {}),
        **({"data_parallel_size": made["dp"], "sequence_parallel_size": made["sp"]} if made["sp"] > 1 else {}),
    }


def _recompute(case: Case) -> Settings:
    """Of deepspeed.checkpointing, which the model has to call."""
    if case.recompute != "full":
        return {}
    places: Settings = {"partition_activations": False, "contiguous_memory_optimization": False}
    return {"activation_checkpointing": {**places, "number_checkpoints": case.model.depth}}
