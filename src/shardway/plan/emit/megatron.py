"""Megatron-LM: a file of shell that holds its flags in an array, and the environment that they want.

Invariant: sourced, the file starts nothing and changes nothing but MEGATRON_ARGS and one variable of CUDA's. Megatron
derives the data degree from the world, so a comment and a variable say what that has to be. This module must not import
megatron.

Source: megatron/training/arguments.py of Megatron Core 0.19.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardway.plan.case import Case
from shardway.plan.emit import megatron_terms as terms
from shardway.plan.emit.emitted import Emitted, Head, gather, write
from shardway.plan.emit.megatron_model import model_flags, tell_model
from shardway.plan.emit.pipeline import layers_of_stages, render_layout
from shardway.plan.emit.tellings import tell_script
from shardway.plan.emit.texts import Settings, write_flags

FILE = "megatron.sh"

_PRECISION: Mapping[str, Settings] = {
    "fp16": {"fp16": True},
    "bf16": {"bf16": True},
    "fp8": {"bf16": True, "fp8-format": "hybrid", "fp8-recipe": "tensorwise"},
    "mxfp8": {"bf16": True, "fp8-format": "e4m3", "fp8-recipe": "mxfp8"},
    "fp4": {"bf16": True, "fp4-format": "e2m1", "fp4-recipe": "nvfp4"},
}


def emit(case: Case, prediction_lines: Sequence[str]) -> Emitted:
    """megatron.sh."""
    left = "the data, the tokenizer, the number of iterations, the learning rate, the folders of checkpoints"
    told = gather([*tell_model(case), *terms.tell_megatron(case, "Megatron-LM"), *tell_script(case, left)])
    head = Head(case, prediction_lines, degrees_of(case), told)
    return Emitted((write(FILE, head, _body(case)),), told)


def degrees_of(case: Case) -> Mapping[str, int]:
    """As Megatron has them; dp is what is left of the ranks."""
    degrees = case.degrees
    return {"dp": degrees.data, "cp": degrees.cp, "tp": degrees.tp, "pp": degrees.pp}


def _body(case: Case) -> str:
    groups = {
        "model": model_flags(case),
        "layout": _layout(case),
        "batch": {"micro-batch-size": case.micro_batch, "global-batch-size": case.global_batch},
        "states": _states(case),
        "formats and kernels": {**_PRECISION.get(case.precision, {}), **_kernels(case)},
    }
    arrays = "".join(f"  # {name}\n{write_flags(flags)}" for name, flags in groups.items())
    return (
        f'# source {FILE}; torchrun ... pretrain_gpt.py "${{MEGATRON_ARGS[@]}}" and your own flags\n'
        f"EXPECTED_RANKS={case.degrees.world}\n{_connections(case)}\nMEGATRON_ARGS=(\n{arrays})\n"
    )


def _connections(case: Case) -> str:
    """One queue keeps collectives of tp and cp in order with products; Megatron-FSDP refuses it."""
    if terms.uses_fsdp(case):
        return "unset CUDA_DEVICE_MAX_CONNECTIONS\n"
    return "export CUDA_DEVICE_MAX_CONNECTIONS=1\n" if case.degrees.tp * case.degrees.cp > 1 else ""


def _layout(case: Case) -> Settings:
    degrees = case.degrees
    moe = any(layer.experts for layer in case.model.layers)
    return {
        "tensor-model-parallel-size": degrees.tp,
        "pipeline-model-parallel-size": degrees.pp,
        "context-parallel-size": degrees.cp,
        "expert-model-parallel-size": degrees.ep if moe else None,
        "expert-tensor-parallel-size": degrees.etp if moe else None,
        "sequence-parallel": case.sequence and degrees.tp > 1,
        **_stages(case),
        "use-tp-pp-dp-mapping": terms.keeps_mapping(case),
    }


def _stages(case: Case) -> Settings:
    if terms.needs_layout(case):
        return {"pipeline-model-parallel-layout": render_layout(case)}
    if terms.virtual_stages(case):
        return {"num-layers-per-virtual-pipeline-stage": layers_of_stages(case)[0]}
    return {}


def _states(case: Case) -> Settings:
    fsdp, shared = terms.uses_fsdp(case), terms.uses_distributed_optimizer(case)
    instances = terms.instances(case)
    return {
        "optimizer": terms.OPTIMIZERS.get(case.optimizer, "adam"),
        "use-distributed-optimizer": shared,
        "num-distributed-optimizer-instances": instances if instances > 1 else None,
        "use-megatron-fsdp": fsdp,
        "data-parallel-sharding-strategy": terms.strategy(case) if fsdp else None,
        "ckpt-format": "fsdp_dtensor" if fsdp else None,
        "overlap-grad-reduce": case.engine.overlaps_gradients,
        "overlap-param-gather": case.engine.overlaps_gradients and case.engine.overlaps_parameters and shared,
        "optimizer-cpu-offload": case.offload,
        "use-precision-aware-optimizer": case.offload,
    }


def _kernels(case: Case) -> Settings:
    overlapped = case.async_tensor and case.sequence and case.degrees.tp > 1
    recompute = {name.replace("_", "-"): value for name, value in terms.recompute(case).items()}
    rate = 0.1 if case.dropout else 0.0
    return {
        "attention-backend": terms.attention_backend(case),
        **recompute,
        "tp-comm-overlap": overlapped,
        "cross-entropy-loss-fusion": case.fused_loss,
        "attention-dropout": rate,
        "hidden-dropout": rate,
    }
